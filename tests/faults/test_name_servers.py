"""Name servers that are killed during a write, unreachable from the start, late, stale, or reduced to one."""

from __future__ import annotations

import itertools
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from rocketmq_spark import read_arrow
from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import DeliveryError, RocketMQError
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.spark.report import Metrics
from tests.support.auditor import audit, numbered_rows
from tests.support.cluster import heal
from tests.support.java import Java
from tests.support.links import StaleRoutes, TcpProxy, delayed
from tests.support.once import BODIES, KEYS, check_once, committing, resuming
from tests.support.peer import address_of, refused_address
from tests.support.processes import wait_for
from tests.support.resume import Killed, complete, new_plan, run_task
from tests.support.two_phase import WRITE
from tests.support.writes import (
    SMALL,
    WIDTH,
    Trial,
    await_messages,
    keys_of,
    make_topic,
    messages_in,
    numbered,
    rows,
    write,
)

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


@pytest.mark.long
def test_a_late_name_server_costs_no_row(two_brokers: LocalCluster, topic: str, java: Java) -> None:
    make_topic(two_brokers, topic)
    with TcpProxy(two_brokers.name_server, to_client=delayed(2.0)) as late:
        with Producer("late", name_server=late.address) as producer:
            producer.send_arrow(rows(2_000), topic, **SMALL)
        wait_for(lambda: messages_in(two_brokers.name_server, topic) == 2_000)
        audit(java, two_brokers.name_server, numbered_rows(topic, range(2_000), WIDTH)).check()
        read = read_arrow(topic, nameServer=late.address, columns=["keys"]).read_all()
    assert Counter(read["keys"].to_pylist()) == Counter(keys_of(2_000))


@pytest.mark.long
def test_a_name_server_later_than_the_timeout_is_an_error(two_brokers: LocalCluster, topic: str) -> None:
    make_topic(two_brokers, topic)
    with TcpProxy(two_brokers.name_server, to_client=delayed(5.0)) as late:
        with (
            Producer("late", name_server=late.address) as producer,
            pytest.raises(RocketMQError, match=rf"{late.address}.*no answer within"),
        ):
            producer.send_arrow(rows(500), topic)
        with pytest.raises(RocketMQError, match=rf"{late.address}.*no answer within"):
            read_arrow(topic, nameServer=late.address, readTimeoutMs=2_000)
        # The other name server is asked, whichever is the first.
        for servers in itertools.permutations((late.address, two_brokers.name_server)):
            with Producer("one-late", name_server=";".join(servers)) as producer:
                producer.send_arrow(rows(500), topic, **SMALL)
    wait_for(lambda: messages_in(two_brokers.name_server, topic) == 1_000)


@pytest.mark.long
@pytest.mark.parametrize("delivery", ["effectivelyOnce", "exactlyOnce"])
def test_a_recovery_with_an_old_route_repeats_no_row(
    two_brokers: LocalCluster, topic: str, java: Java, *, delivery: str
) -> None:
    """The name server of the recovery does not know the queues that have half of the rows."""
    make_topic(two_brokers, topic, queues=2)
    routes = StaleRoutes()
    with TcpProxy(two_brokers.name_server, to_server=routes.to_server, to_client=routes.to_client) as link:
        with Producer("early", name_server=link.address) as producer:
            producer.fetch_publish_message_queues(topic)
        routes.frozen = True
        make_topic(two_brokers, topic, queues=4)
        if delivery == "exactlyOnce":
            with committing(two_brokers, topic) as job:
                job.decide_and_crash(BODIES[:400], 200)
            stale = {"nameServer": link.address, "deliveryTimeoutMs": "5000"}
            with (
                committing(two_brokers, topic, **stale) as job,
                pytest.raises(DeliveryError, match=r"waited deliveryTimeoutMs=5000 for queue \S+/broker-\d/[23]"),
            ):
                job.two_phase.finish(WRITE)
            routes.frozen = False
            with committing(two_brokers, topic, nameServer=link.address) as job:
                job.two_phase.finish(WRITE)
            check_once(java, two_brokers.name_server, topic, BODIES[:400])
            return
        with resuming(two_brokers, topic) as job:

            def stored(number: int) -> None:
                if number == 1_000:
                    await_messages(two_brokers.name_server, topic, 800)

            with pytest.raises(Killed):
                run_task(job, new_plan(job), WRITE, rows=BODIES, dies_after=1_000, before=stored)
        with resuming(two_brokers, topic, nameServer=link.address) as job:
            assert len(job.queues) == 4
            plan = new_plan(job)
            complete(job, plan, WRITE, run_task(job, plan, WRITE, rows=BODIES))
        check_once(java, two_brokers.name_server, topic, BODIES, keys=KEYS)
