"""Name servers that are killed during a write, unreachable from the start, or reduced to one."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.spark.report import Metrics
from tests.support.cluster import heal
from tests.support.links import TcpProxy
from tests.support.peer import address_of, refused_address
from tests.support.writes import Trial, make_topic, numbered, write

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]

# Frequent route lookups, so that the write meets the name server's failure.
EAGER = {"pollNameServerInterval": 500}


@contextmanager
def silent_address() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield address_of(listener)


def test_write_continues_with_known_routes_without_name_server(trial: Trial, *, full: bool) -> None:
    rows, per_second = (60_000, 6_000) if full else (12_000, 6_000)
    # One task only: a later task might start when no name server is left to give it the route.
    trial.write(rows, trial.cluster.servers[0].kill, per_second=per_second, partitions=1, maxRateTasks=1, **EAGER)
    assert not trial.cluster.servers[0].is_alive
    heal(trial.cluster)
    account = trial.settle("name server killed in mid-write")
    assert (account.repeats, account.retries) == (0, 0)


def test_unreachable_name_server_fails_write_at_once_and_is_named(spark: SparkSession, metrics: Metrics) -> None:
    refused, timeout, partitions, attempts = refused_address(), 500, 2, 2
    with silent_address() as silent:
        for address, why in ((refused, "refused"), (silent, r"no answer within 0\.\d")):
            started = time.monotonic()
            with pytest.raises(PySparkException, match=why) as raised:
                write(numbered(spark, 10, 10, partitions), address, "orders", sendMsgTimeout=timeout)
            took = time.monotonic() - started
            assert address in str(raised.value)
            assert "looking up the route of topic orders" in str(raised.value)
            # Each attempt of each task asks the one name server once; the rest is Spark's own time. Retries until
            # deliveryTimeoutMs, as with brokers, would take two minutes.
            assert took < partitions * attempts * (timeout / 1000 + 5)


@pytest.mark.parametrize("kind", ["refuses", pytest.param("is silent", marks=pytest.mark.long)])
def test_one_of_two_name_servers_suffices(
    spark: SparkSession, two_brokers: LocalCluster, topic: str, metrics: Metrics, kind: str
) -> None:
    make_topic(two_brokers, topic)
    with ExitStack() as stack:
        gone = refused_address() if kind == "refuses" else stack.enter_context(silent_address())
        # Each of the two servers is the first once.
        for servers in (f"{gone};{two_brokers.name_server}", f"{two_brokers.name_server};{gone}"):
            write(numbered(spark, 100, 10), servers, topic)
    assert sum(facts["rows"] for facts in metrics.to_dict().values()) == 200


@pytest.mark.long
def test_second_name_server_reports_new_queues_after_first_is_lost(trial: Trial) -> None:
    with ExitStack() as stack:
        links = [stack.enter_context(ExitStack()) for _ in range(2)]
        proxies = [link.enter_context(TcpProxy(trial.cluster.name_server)) for link in links]

        def cut_and_expand() -> None:
            # Cut the link that was used more.
            links[proxies.index(max(proxies, key=lambda proxy: proxy.forwarded))].close()
            make_topic(trial.cluster, trial.topic, queues=8)

        servers = ";".join(proxy.address for proxy in proxies)
        trial.write(20_000, cut_and_expand, per_second=5_000, nameServer=servers, **EAGER)
        assert len(trial.queues) == 16
        trial.settle("one of two name servers cut off in mid-write")
