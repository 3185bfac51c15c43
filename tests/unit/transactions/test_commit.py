"""Commits and recoveries of exactly-once writes, on a fake cluster."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rocketmq_spark.errors import DataLossError, DeliveryError, MQBrokerException
from rocketmq_spark.model.send_result import TRANSACTION_ROLLBACK_TYPE
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.testing.scripted import Reply
from rocketmq_spark.transactions.decision_log import Write
from tests.support.two_phase import WRITE, Driver, MovedClock, driver, visible

ROWS = [f"row-{number}" for number in range(20)]
ONCE = Counter(ROWS)


def test_rows_are_visible_once_after_the_commit(cluster: FakeCluster, first: Driver) -> None:
    halves, group = first.prepare(ROWS)
    assert visible(cluster) == Counter()
    report = first.two_phase.commit(WRITE, halves, group)
    assert visible(cluster) == ONCE
    assert (report.rows, report.recovery_rounds) == (20, 0)
    assert first.log.writes[WRITE].done


def test_a_write_without_rows_is_decided_and_done(first: Driver) -> None:
    halves, group = first.prepare([])
    first.two_phase.commit(WRITE, halves, group)
    assert first.log.writes[WRITE].done


def refuses_topics(request: RemotingCommand) -> Reply | None:
    """Reply to requests for half messages as 5.5.1 does with transRocksDBEnable=true."""
    if "topic" in request.ext_fields:
        return Reply.code(ResponseCode.NO_PERMISSION, "The topic does not match the message")
    return None


def test_half_messages_are_found_by_brokers_that_compare_topics(
    cluster: FakeCluster, clock: MovedClock, first: Driver
) -> None:
    for broker in cluster.brokers.values():
        broker.always[RequestCode.VIEW_MESSAGE_BY_ID] = refuses_topics
    first.decide_and_crash(ROWS, 7)
    with driver(cluster, clock) as second:
        # A recovery copies the half messages that are not committed.
        assert second.open().two_phase.finish(WRITE).recovered_rows == 13
    assert visible(cluster) == ONCE


def test_a_commit_that_may_not_view_half_messages_fails(cluster: FakeCluster, first: Driver) -> None:
    def refuse(request: RemotingCommand) -> Reply:
        assert "topic" in request.ext_fields
        return Reply.code(ResponseCode.NO_PERMISSION, "User:u has no permission to access Topic:T")

    halves, group = first.prepare(ROWS)
    for broker in cluster.brokers.values():
        broker.always[RequestCode.VIEW_MESSAGE_BY_ID] = refuse
    with pytest.raises(MQBrokerException, match="no permission to access Topic:T"):
        first.two_phase.commit(WRITE, halves, group)
    assert visible(cluster) == Counter()


@pytest.mark.parametrize("committed", [0, 7, 20])
def test_recovery_commits_exactly_the_missing_rows(
    cluster: FakeCluster, clock: MovedClock, first: Driver, committed: int
) -> None:
    first.decide_and_crash(ROWS, committed)
    with driver(cluster, clock) as second:
        report = second.open().two_phase.finish(WRITE)
        assert visible(cluster) == ONCE
        assert (report.rows, report.recovered_rows) == (20, 20 - committed)
        assert second.log.writes[WRITE].done


def test_late_commits_of_a_paused_driver_change_nothing(cluster: FakeCluster, clock: MovedClock, first: Driver) -> None:
    halves, group = first.decide_and_crash(ROWS, 5)
    with driver(cluster, clock) as second:
        second.open().two_phase.finish(WRITE)
    late = first.end(halves, group)
    assert not late.acknowledged.any()
    assert visible(cluster) == ONCE


def test_without_the_fence_late_commits_repeat_rows(
    cluster: FakeCluster, clock: MovedClock, first: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves, group = first.decide_and_crash(ROWS, 5)
    with driver(cluster, clock) as second:
        monkeypatch.setattr(second.two_phase, "_fence", lambda _: None)
        second.open().two_phase.finish(WRITE)
    first.end(halves, group)
    assert visible(cluster).total() == 20 + 20


def test_a_lost_answer_to_a_commit_leads_to_a_recovery(cluster: FakeCluster, first: Driver) -> None:
    halves, group = first.prepare(ROWS)
    first.two_phase.prepare(set(cluster.brokers))
    cluster.brokers["broker-0"].play(Reply(closes=True, stored=True), code=RequestCode.END_TRANSACTION)
    report = first.two_phase.commit(WRITE, halves, group)
    assert visible(cluster) == ONCE
    assert report.recovery_rounds == 1


def test_the_first_decision_of_two_drivers_counts(cluster: FakeCluster, clock: MovedClock, first: Driver) -> None:
    with driver(cluster, clock) as second:
        second.open()
        halves, group = first.prepare(ROWS)
        others, other_group = second.prepare([f"other-{row}" for row in ROWS])
        first.two_phase.commit(WRITE, halves, group)
        # The second driver has read the log before the first one's decision.
        second.two_phase.commit(WRITE, others, other_group)
    assert visible(cluster) == ONCE


def test_a_loser_completes_the_decision_of_a_crashed_driver(
    cluster: FakeCluster, clock: MovedClock, first: Driver
) -> None:
    with driver(cluster, clock) as second:
        second.open()
        first.decide_and_crash(ROWS, 3)
        others, other_group = second.prepare([f"other-{row}" for row in ROWS])
        second.two_phase.commit(WRITE, others, other_group)
        assert visible(cluster) == ONCE
        # The loser has rolled its own rows back.
        assert not second.end(others.take(np.arange(0)), other_group).error


def test_two_recoveries_at_once_commit_each_row_once(cluster: FakeCluster, clock: MovedClock, first: Driver) -> None:
    first.decide_and_crash(ROWS, 3)
    with driver(cluster, clock) as second, driver(cluster, clock) as third:
        third.open()
        second.open().two_phase.finish(WRITE)
        third.two_phase.finish(WRITE)
    assert visible(cluster) == ONCE


def test_a_recovery_that_crashes_is_completed_by_the_next(
    cluster: FakeCluster, clock: MovedClock, first: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.decide_and_crash(ROWS, 3)
    with driver(cluster, clock) as second:
        monkeypatch.setattr(second.two_phase, "_execute", lambda decision, halves, report: report)
        second.open().two_phase.finish(WRITE)
    assert visible(cluster).total() == 3
    with driver(cluster, clock) as third:
        third.open()
        assert sorted(third.log.writes[WRITE].decisions) == [1, 2]
        third.two_phase.finish(WRITE)
    assert visible(cluster) == ONCE


def test_rows_too_old_for_the_deadline_fail_the_write(cluster: FakeCluster, clock: MovedClock, first: Driver) -> None:
    halves, group = first.prepare(ROWS)
    clock.sleep(55)
    with pytest.raises(DeliveryError, match=r"its first row is 5\d\.\d s old, and transactionTimeoutMs=60000 leaves"):
        first.two_phase.commit(WRITE, halves, group)
    assert visible(cluster) == Counter()
    assert WRITE not in first.log.writes


def test_an_executor_with_a_wrong_clock_fails_the_write(cluster: FakeCluster, clock: MovedClock, first: Driver) -> None:
    again, group = first.prepare(ROWS)
    stored = cluster.brokers["broker-0"].storage.store
    half = next(half for half in again.youngest if half.queue.broker_name == "broker-0")
    entry = stored.log[half.commit_log_offset]
    read = replace(entry.read, store_timestamp=entry.read.store_timestamp - 20_000)
    stored.log[half.commit_log_offset] = entry._replace(read=read)
    with pytest.raises(DeliveryError, match="clocks of a client and of broker"):
        first.two_phase.commit(WRITE, again, group)


def test_recovery_without_the_manifest_says_what_is_lost(
    cluster: FakeCluster, clock: MovedClock, first: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.decide_and_crash(ROWS, 3)
    home = first.log.home
    assert home is not None
    # The claim and the manifest.
    cluster.brokers[home.broker_name].storage.store.expired[home] = 2
    with driver(cluster, clock) as second, pytest.raises(DataLossError, match="messages from offset 1 on are deleted"):
        second.open().two_phase.finish(WRITE)


def test_rolled_back_rows_stay_invisible(cluster: FakeCluster, first: Driver) -> None:
    halves, group = first.prepare(ROWS)
    first.two_phase.roll_back(halves, group)
    assert first.end(halves, group, TRANSACTION_ROLLBACK_TYPE).acknowledged.all()
    assert visible(cluster) == Counter()


def test_properties_flag_and_compression_survive_a_recovery(
    cluster: FakeCluster, clock: MovedClock, first: Driver
) -> None:
    first.decide_and_crash(ROWS, 0)
    with driver(cluster, clock) as second:
        second.open().two_phase.finish(WRITE)
    messages = cluster.messages("T")
    assert {message.properties.get("PGROUP", "").split("#")[2] for message in messages} == {"2"}
    assert len({message.unique_id for message in messages}) == 20
    assert not any("REAL_TOPIC" in message.properties for message in messages)


def test_micro_batches_of_a_stream_are_separate_writes(cluster: FakeCluster, first: Driver) -> None:
    for number in range(3):
        write = Write(str(number), "query")
        halves, group = first.prepare([f"{number}-{row}" for row in ROWS], write)
        first.two_phase.commit(write, halves, group)
    assert visible(cluster).total() == 60
    assert first.log.newest == Write("2", "query")


@pytest.mark.parametrize("reads_again", [True, False], ids=["log read again", "log read before"])
def test_a_frozen_driver_of_an_old_micro_batch_commits_nothing(
    cluster: FakeCluster, clock: MovedClock, first: Driver, reads_again: bool
) -> None:
    with driver(cluster, clock) as frozen:
        frozen.open()
        halves, group = frozen.prepare([f"old-{row}" for row in ROWS], Write("0", "query"))
        for number in range(3):
            write = Write(str(number), "query")
            first.two_phase.commit(write, *first.prepare([f"{number}-{row}" for row in ROWS], write))
        if reads_again:
            frozen.log.open(frozen.brokers, everything=False)
        with pytest.raises(DeliveryError, match="another driver of the same query has completed this micro-batch"):
            frozen.two_phase.commit(Write("0", "query"), halves, group)
        assert not any(row.startswith("old") for row in visible(cluster))
        # Its late record hides nothing from the next driver.
        first.log.open(first.brokers, everything=False)
        assert first.log.newest == Write("2", "query")
