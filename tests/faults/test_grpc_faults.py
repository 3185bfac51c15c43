"""Writes over gRPC while a proxy, or its broker, fails. The tests read every row back from the brokers.

The key identifies a row. A row may be stored more than once if it was resent; repeats have the same message id, and the
same row id, which the ledger checks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
from pyspark.sql import SparkSession

from rocketmq_spark import read_arrow
from rocketmq_spark.admin import Admin
from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import DeliveryError
from rocketmq_spark.model.message import Message
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.spark.report import Metrics
from tests.support.auditor import ROW_ID, audit, numbered_rows
from tests.support.java import Java
from tests.support.links import TcpProxy
from tests.support.local_mode import LocalModeProxy, local_mode
from tests.support.peer import refused_address
from tests.support.processes import PATIENCE, wait_for
from tests.support.reading import read_topic
from tests.support.writes import (
    PIECE,
    SMALL,
    WIDTH,
    Ledger,
    account_of,
    broken,
    check_account,
    counted,
    in_mid_write,
    messages_in,
    numbered,
    retries_of,
    rows,
)

pytestmark = [pytest.mark.faults, pytest.mark.integration]

MakeTopic = Callable[..., str]

# Options of a producer's write. The ledger identifies rows by their row ids.
WITH_ID = {**SMALL, "rowId": "true"}


@pytest.fixture
def cluster(two_brokers: LocalCluster) -> LocalCluster:
    """Servers of the fault tests instead of the shared ones, because these tests kill the proxy."""
    return two_brokers


@pytest.fixture
def breakable_link(cluster: LocalCluster) -> Iterator[tuple[str, Callable[[], None]]]:
    """A second address of the proxy, and a function that cuts it off after 100,000 bytes were sent to it."""
    with ExitStack() as closing:
        link = closing.enter_context(TcpProxy(cluster.endpoints))

        def cut() -> None:
            wait_for(lambda: link.forwarded > 100_000)
            closing.close()

        yield link.address, cut


def watched(ledger: Ledger, cluster: LocalCluster, topic: str) -> AbstractContextManager[None]:
    return ledger.watch([cluster.name_server], topic, [broker.address for broker in cluster.brokers])


def settle(
    ledger: Ledger,
    fault: str,
    cluster: LocalCluster,
    topic: str,
    count: int,
    brokers: Mapping[str, Mapping[str, Any]],
    groups: int = 0,
) -> None:
    """Check that no row is missing, and that repeats have one id, and add the fault to the table."""
    retries, marks = retries_of(brokers), [ROW_ID, "UNIQ_KEY"]
    ledger.settle(fault, cluster.name_server, topic, count, retries, width=WIDTH, marks=marks, groups=groups)


def name_of(faults: bool) -> str:
    return f"sendLatencyFaultEnable {'on' if faults else 'off'}"


def kill_and_restart(cluster: LocalCluster) -> None:
    assert cluster.proxy is not None
    cluster.proxy.kill()
    cluster.proxy.restart()


@pytest.mark.spark
def test_proxy_killed_and_restarted_during_write_loses_no_row(
    spark: SparkSession, metrics: Metrics, cluster: LocalCluster, make_topic: MakeTopic, ledger: Ledger, *, full: bool
) -> None:
    topic, count, name_server = make_topic("NORMAL"), 60_000 if full else 12_000, cluster.name_server
    # At this rate the write lasts seconds on any machine, so the kill falls into it.
    options: dict[str, Any] = {
        "endpoints": cluster.endpoints,
        "maxRatePerSecond": 6_000,
        "rowId": True,
        "topic": topic,
        **SMALL,
    }
    with (
        watched(ledger, cluster, topic),
        in_mid_write(name_server, topic, PIECE, lambda: kill_and_restart(cluster)),
    ):
        numbered(spark, count, WIDTH).write.format("rocketmq").options(**options).save()
    summary = metrics.to_dict()
    assert summary[cluster.endpoints]["rows"] == count
    assert summary[cluster.endpoints]["retries"] > 0
    settle(ledger, "proxy killed and started again", cluster, topic, count, summary)


@pytest.mark.long
@pytest.mark.parametrize("restarts", [True, False], ids=["restarted", "gone"])
def test_broker_killed_behind_the_proxy_loses_no_row(
    cluster: LocalCluster, make_topic: MakeTopic, ledger: Ledger, *, restarts: bool
) -> None:
    topic, count, broker = make_topic("NORMAL"), 20_000, cluster.brokers[0]

    def kill() -> None:
        broker.kill()
        if restarts:
            broker.restart()

    with Producer("pg", endpoints=cluster.endpoints) as producer, watched(ledger, cluster, topic):
        summary = producer.send_arrow(broken(rows(count), 20, cluster, topic, kill), topic, **WITH_ID).to_dict()
    if not restarts:
        broker.restart()
    fault = f"broker killed {'and restarted' if restarts else 'for good'}, over gRPC"
    settle(ledger, fault, cluster, topic, count, summary)
    assert summary[cluster.endpoints]["rows"] == count


# A broker and its proxy in one process (local mode)


@pytest.fixture(scope="module")
def local() -> Iterator[tuple[LocalCluster, LocalModeProxy]]:
    with local_mode({}) as servers:
        yield servers


@pytest.fixture
def local_topic(local: tuple[LocalCluster, LocalModeProxy], topic: str) -> str:
    """The test's topic in local mode; it has two queues."""
    with Admin(local[0].name_server, timeout=PATIENCE) as admin:
        admin.create_topic(topic, 2, message_type="NORMAL")
    return topic


@pytest.mark.long
def test_broker_killed_with_the_proxy_of_its_process_loses_no_row(
    local: tuple[LocalCluster, LocalModeProxy], local_topic: str, ledger: Ledger
) -> None:
    (cluster, both), count = local, 20_000

    def kill() -> None:
        both.kill()
        both.restart()

    batches = broken(rows(count), 20, cluster, local_topic, kill)
    with (
        Producer("pg", endpoints=both.endpoints) as producer,
        ledger.watch([cluster.name_server], local_topic, [both.address]),
    ):
        summary = producer.send_arrow(batches, local_topic, **WITH_ID).to_dict()
    settle(ledger, "broker with its proxy killed and restarted", cluster, local_topic, count, summary)
    assert summary[both.endpoints]["rows"] == count


@pytest.mark.long
def test_read_of_a_broker_killed_with_the_proxy_of_its_process_is_complete(
    local: tuple[LocalCluster, LocalModeProxy], local_topic: str
) -> None:
    (cluster, both), count = local, 60_000
    with Producer("pg", endpoints=both.endpoints) as producer:
        producer.send_arrow(rows(count), local_topic)
    wait_for(lambda: messages_in(cluster.name_server, local_topic) == count)
    reader = read_arrow(local_topic, nameServer=cluster.name_server, columns=["keys"])
    keys = reader.read_next_batch().column("keys").to_pylist()
    # More is not read yet than a reader may have received.
    assert len(keys) < count / 2
    both.kill()
    both.restart()
    keys += reader.read_all().column("keys").to_pylist()
    assert sorted(keys) == sorted(f"k{number}" for number in range(count))


@pytest.mark.long
def test_proxy_restart_keeps_row_order_within_group(
    cluster: LocalCluster, make_topic: MakeTopic, ledger: Ledger
) -> None:
    topic, count, groups = make_topic("FIFO"), 3_000, 40
    with Producer("pg", endpoints=cluster.endpoints) as producer, watched(ledger, cluster, topic):
        batches = broken(rows(count, groups), 3, cluster, topic, lambda: kill_and_restart(cluster))
        summary = producer.send_arrow(batches, topic, ordered="true", rowId="true").to_dict()
    assert summary[cluster.endpoints]["retries"] > 0
    settle(ledger, "proxy killed and started again, rows of groups", cluster, topic, count, summary, groups)


@pytest.mark.long
def test_rows_in_flight_to_a_frozen_proxy_are_resent_and_none_is_lost(
    cluster: LocalCluster, make_topic: MakeTopic, ledger: Ledger
) -> None:
    topic, count, proxy = make_topic("NORMAL"), 20_000, cluster.proxy
    assert proxy is not None

    def freeze() -> None:
        proxy.pause()
        threading.Event().wait(3.0)
        proxy.resume()

    with (
        Producer("pg", endpoints=cluster.endpoints, send_msg_timeout=1000) as producer,
        watched(ledger, cluster, topic),
    ):
        summary = producer.send_arrow(broken(rows(count), 30, cluster, topic, freeze), topic, **WITH_ID).to_dict()
    settle(ledger, "proxy paused for 3 s", cluster, topic, count, summary)
    assert summary[cluster.endpoints]["rows"] == count
    assert summary[cluster.endpoints]["retries_by_reason"]["RemotingTimeoutException"] > 0


@pytest.mark.parametrize(
    "faults", [pytest.param(False, marks=pytest.mark.long), True], ids=["without-faults", "with-faults"]
)
def test_unreachable_endpoint_gets_no_rows_and_does_not_slow_write(
    cluster: LocalCluster, make_topic: MakeTopic, topic: str, ledger: Ledger, *, faults: bool, full: bool
) -> None:
    count, dead, lone = 15_000 if full else 6_000, refused_address(), make_topic("NORMAL", f"{topic}-lone")
    make_topic("NORMAL")
    endpoints = f"{dead};{cluster.endpoints}"
    with Producer("pg", endpoints=endpoints, send_latency_fault_enable=faults) as producer:
        with watched(ledger, cluster, topic):
            summary = producer.send_arrow(rows(count), topic, **WITH_ID).to_dict()
        for number in range(4):
            message = Message.of(lone, b"one by one", keys=f"k{number}")
            assert producer.send(message).message_queue.broker_name == cluster.endpoints
    found = read_topic(cluster.name_server, lone, 4, key=lambda message: message.keys)
    assert {message.keys for message in found} == {f"k{number}" for number in range(4)}
    settle(ledger, f"endpoint dead from the start, {name_of(faults)}", cluster, topic, count, summary)
    assert (summary[dead]["rows"], summary[cluster.endpoints]["rows"]) == (0, count)
    assert summary[dead]["retries_by_reason"].keys() == {"RemotingConnectException"}
    # Only a few requests go to the dead endpoint: the producer backs off longer each time, or isolates it.
    assert summary[dead]["retries"] <= (8 if faults else 30)
    assert (summary[dead]["isolated_times"] > 0) is faults


@pytest.mark.long
@pytest.mark.parametrize("faults", [False, True], ids=["without-faults", "with-faults"])
def test_rows_of_failing_endpoint_go_to_the_other_endpoint(
    cluster: LocalCluster,
    make_topic: MakeTopic,
    breakable_link: tuple[str, Callable[[], None]],
    ledger: Ledger,
    *,
    faults: bool,
) -> None:
    topic, count, (dying, cut) = make_topic("NORMAL"), 20_000, breakable_link
    endpoints, options = f"{dying};{cluster.endpoints}", {**WITH_ID, "maxInFlight": "4"}
    with (
        Producer("pg", endpoints=endpoints, send_latency_fault_enable=faults) as producer,
        watched(ledger, cluster, topic),
    ):
        summary = producer.send_arrow(broken(rows(count), 30, cluster, topic, cut), topic, **options).to_dict()
    settle(ledger, f"endpoint that dies, {name_of(faults)}", cluster, topic, count, summary)
    assert summary[dying]["rows"] + summary[cluster.endpoints]["rows"] == count
    assert 0 < summary[dying]["rows"] < summary[cluster.endpoints]["rows"]
    assert summary[dying]["retries"] > 0
    if faults:
        # Only requests in flight failed; after the first outcome the producer sends nothing to this endpoint.
        assert summary[dying]["isolated_times"] > 0
        assert summary[dying]["retries"] <= 4


def test_write_with_only_endpoint_down_fails_with_correct_row_counts(
    cluster: LocalCluster, make_topic: MakeTopic, breakable_link: tuple[str, Callable[[], None]], java: Java
) -> None:
    topic, count, (dying, cut) = make_topic("NORMAL"), 20_000, breakable_link
    taken = list[int]()
    batches = counted(broken(rows(count), 30, cluster, topic, cut), taken)
    with Producer("pg", endpoints=dying, send_msg_timeout=1000) as producer, pytest.raises(DeliveryError) as raised:
        producer.send_arrow(batches, topic, deliveryTimeoutMs="2000", **SMALL)
    account = account_of(raised.value)
    assert 0 < account[0] < count
    given = numbered_rows(topic, range(sum(taken)), WIDTH, repeats=True, optional=True)
    check_account(audit(java, cluster.name_server, given, marks=["UNIQ_KEY"]), account)
