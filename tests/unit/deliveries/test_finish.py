"""`finish_transactions` lists and completes the open writes of a transactional id, on a fake cluster."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest

import rocketmq_spark
from rocketmq_spark.cli.transactions import OpenWrite, finish_transactions, finish_writes
from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.errors import DataLossError, DeliveryError, MQClientException, OptionError, RemotingException
from rocketmq_spark.options.sink import SINK_OPTIONS
from rocketmq_spark.testing import FakeCluster
from tests.support.peer import refused_address
from tests.support.two_phase import ID, TOPIC, WRITE, CrashingCommit, Driver, MovedClock, driver, visible

ROWS = [f"row-{number}" for number in range(20)]
ONCE = Counter(ROWS)
LOG = "rocketmq-spark-decisions"


def commit(job: Driver, write: Write) -> None:
    halves, group = job.prepare(ROWS, write)
    job.two_phase.commit(write, halves, group)


def test_the_write_of_a_dead_driver_is_finished(cluster: FakeCluster, clock: MovedClock, first: Driver) -> None:
    # The driver died longer ago than transactionTimeoutMs.
    clock.ahead = -120
    first.decide_and_crash(ROWS, 7)
    clock.ahead = 0
    (row,) = finish_transactions(ID, name_server=cluster.name_server)
    assert row == OpenWrite("write-1", None, 2, 20, "finished", 13, (TOPIC,))
    assert visible(cluster) == ONCE
    table = finish_transactions(ID, name_server=cluster.name_server)
    assert list(table) == []
    assert table.notes == ("every decided write is complete",)


def test_list_only_changes_nothing(cluster: FakeCluster, first: Driver) -> None:
    first.decide_and_crash(ROWS, 7)
    table = rocketmq_spark.finish_transactions(ID, name_server=[cluster.name_server], list_only=True)
    assert list(table) == [OpenWrite("write-1", None, 1, 20, "open", None, (TOPIC,))]
    assert "write-1" in repr(table)
    assert visible(cluster).total() == 7


def test_only_open_writes_are_listed_with_their_queries(first: Driver) -> None:
    commit(first, Write("a"))
    first.decide_and_crash(ROWS, 20, Write("b"))
    commit(first, Write("0", "query"))
    first.decide_and_crash(ROWS, 0, Write("1", "query"))
    table = finish_writes(first.brokers, list_only=True)
    assert [(row.write, row.query_id) for row in table] == [("b", None), ("1", "query")]


def test_all_open_writes_are_finished(cluster: FakeCluster, first: Driver) -> None:
    first.decide_and_crash(ROWS[:10], 3, Write("a"))
    first.decide_and_crash(ROWS[10:], 10, Write("0", "query"))
    table = finish_writes(first.brokers, list_only=False)
    assert [(row.write, row.state, row.round, row.recovered_rows) for row in table] == [
        ("a", "finished", 2, 7),
        ("0", "finished", 1, 0),
    ]
    assert visible(cluster) == ONCE


def test_rows_are_those_of_the_write_also_in_a_later_round(
    cluster: FakeCluster, clock: MovedClock, first: Driver
) -> None:
    first.decide_and_crash(ROWS, 3)
    with driver(cluster, clock, commit=CrashingCommit) as second:
        second.open().two_phase.finish(WRITE)
    (row,) = finish_writes(first.brokers, list_only=False)
    assert (row.round, row.rows, row.recovered_rows) == (3, 20, 17)
    assert visible(cluster) == ONCE


def test_a_new_round_has_the_transaction_timeout_of_the_job(cluster: FakeCluster, clock: MovedClock) -> None:
    with driver(cluster, clock, transactionTimeoutMs="600000") as job:
        job.open().decide_and_crash(ROWS, 7)
        with driver(cluster, clock) as other:
            finish_writes(other.brokers, list_only=False)
        job.log.refresh(job.brokers)
        assert [decision.timeout_ms for decision in job.log.writes[WRITE].decisions.values()] == [600_000, 600_013]


def test_a_write_that_fails_does_not_stop_the_others(cluster: FakeCluster, first: Driver) -> None:
    first.decide_and_crash(["lost"], 0, Write("a"))
    home = first.log.home
    assert home is not None
    # The claim of the log and the manifest of the first write have expired.
    cluster.brokers[home.broker_name].storage.store.expired[home] = 2
    first.decide_and_crash(ROWS, 7, Write("b"))
    with pytest.raises(
        DeliveryError, match=r"^1 of 2 open writes of .*=job are finished; write a: .* are gone"
    ) as failed:
        finish_writes(first.brokers, list_only=False)
    assert isinstance(failed.value.__cause__, DataLossError)
    assert visible(cluster) == ONCE
    (row,) = finish_writes(first.brokers, list_only=True)
    assert row.write == "a"


def test_an_unknown_id_is_an_error_that_says_what_to_check(cluster: FakeCluster, first: Driver) -> None:
    commit(first, WRITE)
    with pytest.raises(
        MQClientException, match=r"has no decision of transactionalId=jbo: .* Check the transactionalId"
    ):
        finish_transactions("jbo", name_server=cluster.name_server)


def test_a_log_that_does_not_exist_is_not_created(cluster: FakeCluster) -> None:
    with pytest.raises(MQClientException, match=rf"^topic {LOG} does not exist: .* Check the transactionTopic"):
        finish_transactions(ID, name_server=cluster.name_server)
    assert all(LOG not in broker.storage.topics for broker in cluster.brokers.values())


def test_a_deleted_topic_of_rows_is_not_created(cluster: FakeCluster, first: Driver) -> None:
    first.decide_and_crash(ROWS, 7)
    for broker in cluster.brokers.values():
        with broker.lock:
            del broker.storage.topics[TOPIC]
            broker.on_change()
    with pytest.raises(DeliveryError, match=rf"write-1: topic {TOPIC} does not exist: .* Create the topic again"):
        finish_writes(first.brokers, list_only=False)
    assert all(TOPIC not in broker.storage.topics for broker in cluster.brokers.values())


def test_a_topic_of_rows_that_a_broker_lacks_is_not_created(
    cluster: FakeCluster, clock: MovedClock, first: Driver
) -> None:
    first.decide_and_crash(ROWS, 7)
    broker = cluster.brokers["broker-1"]
    with broker.lock:
        del broker.storage.topics[TOPIC]
        broker.on_change()
    with (
        driver(cluster, clock) as other,
        pytest.raises(DeliveryError, match=rf"topic {TOPIC} has no writable queue on broker broker-1, to which"),
    ):
        finish_writes(other.brokers, list_only=False)
    assert TOPIC not in broker.storage.topics


def test_a_name_server_that_does_not_answer_is_an_error_at_once() -> None:
    with pytest.raises(RemotingException, match="no name server gave the route of topic rocketmq-spark-decisions"):
        finish_transactions(ID, name_server=refused_address())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"transactional_id": ""}, "option transactional_id is ''"),
        ({"transaction_topic": "a b"}, "option transaction_topic is 'a b'"),
        ({"delivery_timeout_ms": 0}, "option delivery_timeout_ms is 0"),
        ({"timeout": 0}, "timeout is 0"),
        ({"name_server": None}, "no name server is given"),
        ({"endpoints": "a:1"}, "unknown option endpoints"),
        ({"access_key": "user"}, "access_key is given without secret_key"),
    ],
)
def test_arguments_that_are_not_allowed_are_option_errors(
    arguments: dict[str, object], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    with pytest.raises(OptionError, match=text):
        finish_transactions(**{"transactional_id": ID, "name_server": "a:1", **arguments})  # type: ignore[arg-type]


def test_defaults_are_those_of_the_options_of_a_write() -> None:
    parameters = inspect.signature(finish_transactions).parameters
    defaults = {spec.field: spec.default for spec in SINK_OPTIONS}
    for name in ("transaction_topic", "delivery_timeout_ms"):
        assert parameters[name].default == defaults[name]
