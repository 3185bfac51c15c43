"""The decision log: homes, records, and readers that start in the middle."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rocketmq_spark.transactions.decision_log as decision_log
from rocketmq_spark.errors import DataLossError, MQClientException, RouteNotFoundException
from rocketmq_spark.model.message import Message
from rocketmq_spark.protocol.remoting.records import encode_single
from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.transactions.decision_log import DecisionLog, Write
from tests.support.two_phase import ID, WRITE, Driver, MovedClock, driver, visible

ROWS = [f"row-{number}" for number in range(20)]


@pytest.fixture
def second(cluster: FakeCluster, clock: MovedClock) -> Iterator[Driver]:
    with driver(cluster, clock) as own:
        yield own


def commit(own: Driver, write: Write) -> None:
    halves, group = own.prepare(ROWS, write)
    own.two_phase.commit(write, halves, group)


def test_drivers_draw_the_same_home(first: Driver, second: Driver) -> None:
    assert second.open().log.home == first.log.home
    homes = set()
    for number in range(20):
        log = DecisionLog(f"job-{number}", first.options.transaction_topic)
        log.open(first.brokers, everything=True)
        homes.add(log.home)
    assert len(homes) == 2


def test_a_reader_finds_a_home_that_would_not_be_drawn(
    first: Driver, second: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(first, WRITE)
    monkeypatch.setattr(DecisionLog, "_draw", lambda self, queue: queue != first.log.home)
    assert second.open().log.home == first.log.home
    assert second.log.writes[WRITE].done


def test_a_home_that_is_down_is_an_error(cluster: FakeCluster, first: Driver, clock: MovedClock) -> None:
    commit(first, WRITE)
    assert first.log.home is not None
    cluster.kill(first.log.home.broker_name)
    with (
        driver(cluster, clock) as second,
        pytest.raises(
            RouteNotFoundException, match=f"no name server lists a master of broker {first.log.home.broker_name}"
        ),
    ):
        second.open()


def test_halves_beyond_one_record_are_in_several(
    first: Driver, second: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "_MANIFEST_BYTES", 200)
    halves, _ = first.decide_and_crash(ROWS, 0)
    decision = second.open().log.writes[WRITE].last
    assert len(decision.manifests) > 3
    read = second.log.halves_of(second.brokers, decision)
    assert [read[row] for row in range(20)] == [halves[row] for row in range(20)]


def test_a_reader_of_a_stream_starts_at_the_last_micro_batch(
    first: Driver, second: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        commit(first, Write(str(number), "query"))
    monkeypatch.setattr(decision_log, "_FIRST_WINDOW", 2)
    second.log.open(second.brokers, everything=False)
    assert second.log.newest == Write("4", "query")
    assert set(second.log.writes) == {Write("4", "query")}
    assert second.log.writes[Write("4", "query")].done


def test_a_late_record_of_an_old_micro_batch_hides_no_decision(first: Driver, second: Driver) -> None:
    for number in range(2):
        commit(first, Write(str(number), "query"))
    frozen = DecisionLog(ID, first.options.transaction_topic)
    frozen.open(first.brokers, everything=False)
    first.decide_and_crash(ROWS, 5, Write("2", "query"))
    frozen.append_done(first.brokers, Write("1", "query"))
    second.log.open(second.brokers, everything=False)
    assert not second.log.writes[Write("2", "query")].done


def test_records_of_other_ids_are_ignored(first: Driver, clock: MovedClock, cluster: FakeCluster) -> None:
    commit(first, WRITE)
    others = DecisionLog("other", first.options.transaction_topic)
    others._tag = first.log._tag
    others.open(first.brokers, everything=True)
    assert others.writes == {}


def test_a_log_that_lost_records_is_an_error(cluster: FakeCluster, first: Driver) -> None:
    commit(first, WRITE)
    first.log.position += 5
    with pytest.raises(DataLossError, match="has lost messages"):
        first.log.refresh(first.brokers)


@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[]", b"{}", json.dumps({"id": ID, "kind": "decision", "write": "w", "query": ""}).encode()]
)
def test_messages_of_other_programs_are_an_error(first: Driver, second: Driver, body: bytes) -> None:
    commit(first, WRITE)
    assert first.log.home is not None
    topic = first.options.transaction_topic
    foreign = encode_single(Message(topic, body or b"x", 0, {"TAGS": first.log._tag}))
    first.brokers.send_records([(foreign, first.log.home)], lambda *_: None)
    with pytest.raises(MQClientException, match="is no record of rocketmq-spark"):
        second.open()


def test_the_first_write_names_its_home_on_all_brokers(cluster: FakeCluster, first: Driver, clock: MovedClock) -> None:
    assert first.log.home is not None
    home = first.log.home.broker_name
    halves, group = first.prepare(ROWS)
    on_home = [code for code, queue in enumerate(halves.queues) if queue.broker_name == home]
    rows = halves.take(np.flatnonzero(np.isin(halves.codes, on_home)))
    part = replace(rows, youngest=tuple(half for half in rows.youngest if half.queue.broker_name == home))
    first.two_phase.commit(WRITE, part, group)
    cluster.kill(home)
    why = f"no name server lists a master of broker {home}"
    with driver(cluster, clock) as second, pytest.raises(RouteNotFoundException, match=why):
        second.open()


CONTENDED = "another driver of transactionalId=job begins a decision log in another queue"


def move(own: Driver) -> None:
    """Let a driver without decisions have another home, as if the brokers of its own were down."""
    own.log.home = next(queue for queue in own.log._queues(own.brokers) if queue != own.log.home)
    own.log.position = 0


@pytest.fixture(params=["the first driver", "the second driver"])
def apart(request: pytest.FixtureRequest, first: Driver, second: Driver) -> None:
    """Let one of two drivers without decisions have another home."""
    second.open()
    move(first if request.param == "the first driver" else second)


def written_once(cluster: FakeCluster, clock: MovedClock) -> bool:
    """Have a third driver write; return whether each row is visible once."""
    with driver(cluster, clock) as third:
        commit(third.open(), WRITE)
    return visible(cluster) == Counter(ROWS)


@pytest.mark.usefixtures("apart")
def test_a_driver_notices_the_decision_in_another_home(
    cluster: FakeCluster, clock: MovedClock, first: Driver, second: Driver
) -> None:
    commit(first, WRITE)
    with pytest.raises(MQClientException, match=CONTENDED):
        commit(second, WRITE)
    assert second.open().log.home == first.log.home
    assert second.log.writes[WRITE].done
    assert written_once(cluster, clock)


@pytest.mark.usefixtures("apart")
def test_a_decision_does_not_count_if_another_home_was_claimed_before(
    cluster: FakeCluster, clock: MovedClock, first: Driver, second: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = DecisionLog.append_decision

    def after_a_claim(log: DecisionLog, *args: Any) -> Any:
        # Between the check and the decision of the first driver.
        with pytest.raises(MQClientException, match=CONTENDED):
            second.log.claim_home(second.brokers, WRITE, ())
        return append(log, *args)

    monkeypatch.setattr(DecisionLog, "append_decision", after_a_claim)
    with pytest.raises(MQClientException, match=CONTENDED):
        commit(first, WRITE)
    monkeypatch.undo()
    assert visible(cluster) == Counter()
    assert written_once(cluster, clock)


@pytest.mark.usefixtures("apart")
def test_claims_of_drivers_that_died_do_not_stop_others(
    cluster: FakeCluster, clock: MovedClock, first: Driver, second: Driver
) -> None:
    first.log.claim_home(first.brokers, WRITE, ())
    with pytest.raises(MQClientException, match=CONTENDED):
        second.log.claim_home(second.brokers, WRITE, ())
    assert written_once(cluster, clock)


@pytest.mark.usefixtures("apart")
def test_a_claimed_home_that_is_down_is_an_error(
    cluster: FakeCluster, clock: MovedClock, first: Driver, second: Driver
) -> None:
    for own in (first, second):
        with contextlib.suppress(MQClientException):
            own.log.claim_home(own.brokers, WRITE, ())
    # The driver that claimed it could still decide.
    home = min(first.log.home, second.log.home, key=first.log._draw)  # type: ignore[type-var, arg-type]
    assert home is not None
    cluster.kill(home.broker_name)
    why = f"no name server lists a master of broker {home.broker_name}"
    with driver(cluster, clock) as third, pytest.raises(RouteNotFoundException, match=why):
        third.open()


def test_records_that_are_written_during_the_search_are_read(
    first: Driver, second: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = DecisionLog._homes

    def with_a_commit(log: DecisionLog, *args: Any) -> Any:
        homes = search(log, *args)
        if log is second.log:
            commit(first, WRITE)
        return homes

    monkeypatch.setattr(DecisionLog, "_homes", with_a_commit)
    second.open()
    second.log.refresh(second.brokers)
    assert second.log.writes[WRITE].done
