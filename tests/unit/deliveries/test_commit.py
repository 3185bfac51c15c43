"""Commits and recoveries of exactly-once writes, on a fake cluster."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import numpy as np
import pytest

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.exactly_once.commit import TwoPhaseCommit, group_of
from rocketmq_spark.deliveries.exactly_once.delivery import Prepared
from rocketmq_spark.deliveries.exactly_once.ends import EndSender
from rocketmq_spark.deliveries.exactly_once.half_sender import store_halves
from rocketmq_spark.deliveries.exactly_once.halves import Halves
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.records import Decision
from rocketmq_spark.errors import DataLossError, DeliveryError, MQBrokerException, MQClientException
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.send_result import TRANSACTION_ROLLBACK_TYPE
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.testing import FakeCluster, Reply
from tests.support.two_phase import ID, TOPIC, WRITE, CrashingCommit, Driver, MovedClock, driver, half_message, visible

ROWS = [f"row-{number}" for number in range(20)]
ONCE = Counter(ROWS)


def test_rows_are_visible_once_after_the_commit(cluster: FakeCluster, first: Driver) -> None:
    halves, group = first.prepare(ROWS)
    assert visible(cluster) == Counter()
    report = first.two_phase.commit(WRITE, halves, group)
    assert visible(cluster) == ONCE
    assert (report.rows, report.recovery_rounds) == (20, 0)
    assert first.log.writes[WRITE].done


def test_a_commit_without_faults_reads_no_row(cluster: FakeCluster, first: Driver) -> None:
    pulled = Counter[str]()
    for broker in cluster.brokers.values():
        broker.always[RequestCode.PULL_MESSAGE] = lambda request: pulled.update([request.ext_fields["topic"]])
    first.two_phase.commit(WRITE, *first.prepare(ROWS))
    assert set(pulled) == {first.log.topic}


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


def test_rows_of_a_decided_write_are_not_written_and_cause_a_warning(
    cluster: FakeCluster, clock: MovedClock, first: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    first.decide_and_crash(ROWS, 5)
    for when in ("was decided before, and is completed now", r"was completed at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"):
        caplog.clear()
        with driver(cluster, clock) as second:
            second.open().two_phase.commit(WRITE, *second.prepare([f"other-{row}" for row in ROWS]))
        [warning] = [record.getMessage() for record in caplog.records if "not written" in record.getMessage()]
        assert re.match(rf"write write-1 {when}: the rows of this save are not written", warning)
    assert visible(cluster) == ONCE


@pytest.mark.parametrize("more", [0, 5])
def test_another_number_of_rows_of_a_decided_write_is_named(
    cluster: FakeCluster, clock: MovedClock, first: Driver, caplog: pytest.LogCaptureFixture, more: int
) -> None:
    """With an older copy of a checkpoint, Spark plans the last micro-batch again, with rows that have come since."""
    first.two_phase.commit(WRITE, *first.prepare(ROWS))
    with driver(cluster, clock) as second:
        second.open().two_phase.commit(WRITE, *second.prepare([*ROWS, *["new"] * more]))
    warnings = [record.getMessage() for record in caplog.records if "was decided with" in record.getMessage()]
    assert [text.partition(" now.")[0] for text in warnings] == [
        f"write write-1 was decided with 20 rows, and has {20 + more} rows"
    ] * bool(more)
    assert visible(cluster) == ONCE


def test_late_commits_of_a_paused_driver_change_nothing(cluster: FakeCluster, clock: MovedClock, first: Driver) -> None:
    halves, group = first.decide_and_crash(ROWS, 5)
    with driver(cluster, clock) as second:
        second.open().two_phase.finish(WRITE)
    late = first.end(halves, group)
    assert not late.acknowledged.any()
    assert visible(cluster) == ONCE


def test_late_commits_change_nothing_if_the_clock_of_a_broker_goes_back(
    cluster: FakeCluster, clock: MovedClock, first: Driver
) -> None:
    halves, _ = first.decide_and_crash(ROWS, 5)

    class LateCommits(TwoPhaseCommit):
        """Has found out which rows are missing when the clocks go back by 5 s: they may differ by a tenth of 60 s."""

        late: EndSender | None = None

        def _prepare_again(self, missing: Halves, old_group: str, group: str, timeout: int) -> Halves:
            clock.ahead -= 5
            self.late = first.end(halves.select(np.arange(5, 20)), old_group)
            return super()._prepare_again(missing, old_group, group, timeout)

    with driver(cluster, clock, commit=LateCommits) as second:
        second.open().two_phase.finish(WRITE)
        assert isinstance(second.two_phase, LateCommits)
        assert second.two_phase.late is not None
        assert not second.two_phase.late.acknowledged.any()
    assert visible(cluster) == ONCE


class UnfencedCommit(TwoPhaseCommit):
    """Recovers without a fence."""

    def _fence(self, decision: Decision) -> float:
        """Return at once."""
        return 0.0


def test_without_the_fence_late_commits_repeat_rows(cluster: FakeCluster, clock: MovedClock, first: Driver) -> None:
    halves, group = first.decide_and_crash(ROWS, 5)
    with driver(cluster, clock, commit=UnfencedCommit) as second:
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


def test_commits_that_a_broker_lost_before_the_end_are_made_again(cluster: FakeCluster, clock: MovedClock) -> None:
    class FailingBroker(DecisionLog):
        """A log before whose barrier a broker loses commits that it has answered with success."""

        lost = 0

        def await_stored(self, brokers: Brokers, write: Write, broker_names: Collection[str]) -> None:
            if not self.lost:
                self.lost, store = 3, cluster.brokers["broker-0"].storage.store
                assert all(entry.read.topic == TOPIC for entry in store.log[-self.lost :])
                store.truncate(len(store.log) - self.lost)
            super().await_stored(brokers, write, broker_names)

    with driver(cluster, clock, log=FailingBroker) as failing:
        report = failing.open().two_phase.commit(WRITE, *failing.prepare(ROWS))
    assert visible(cluster) == ONCE
    assert (report.rows, report.recovered_rows) == (20, 3)


def test_half_messages_with_one_offset_are_not_committed(cluster: FakeCluster, first: Driver) -> None:
    planned = first.plan(WRITE, write_id=WRITE.name)
    halves, group = first.prepare(ROWS)
    # As after a power failure with ASYNC_FLUSH: the second task's rows took the offsets of the first one's.
    prepared = Prepared(group, halves.to_bytes())
    with pytest.raises(DeliveryError, match="a half message at an offset of an earlier one"):
        first.commit(planned, WRITE, [prepared, prepared])
    assert visible(cluster) == Counter()


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
        assert not second.end(others.select(np.arange(0)), other_group).error


def test_two_recoveries_at_once_commit_each_row_once(cluster: FakeCluster, clock: MovedClock, first: Driver) -> None:
    first.decide_and_crash(ROWS, 3)
    with driver(cluster, clock) as second, driver(cluster, clock) as third:
        third.open()
        second.open().two_phase.finish(WRITE)
        third.two_phase.finish(WRITE)
    assert visible(cluster) == ONCE


def test_a_recovery_that_crashes_is_completed_by_the_next(
    cluster: FakeCluster, clock: MovedClock, first: Driver
) -> None:
    first.decide_and_crash(ROWS, 3)
    with driver(cluster, clock, commit=CrashingCommit) as second:
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
    with driver(cluster, clock) as second, pytest.raises(DataLossError, match="its messages 1 to 1 are gone"):
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


def test_a_frozen_driver_commits_nothing_after_a_query_that_started_anew(
    cluster: FakeCluster, clock: MovedClock, first: Driver
) -> None:
    with driver(cluster, clock) as frozen:
        frozen.open()
        old = frozen.prepare([f"0-{row}" for row in ROWS], Write("0", "query"))
        # Another driver of its query continues. Then a query with a new checkpoint takes over the log (startAnew).
        for write in (*(Write(str(number), "query") for number in range(3)), Write("0", "other")):
            first.two_phase.commit(write, *first.prepare([f"{write.name}-{row}" for row in ROWS], write))
        before = visible(cluster)
        with pytest.raises(DeliveryError, match="has completed this micro-batch, and continued with micro-batch 2"):
            frozen.two_phase.commit(Write("0", "query"), *old)
        assert visible(cluster) == before
        # Its late record hides nothing from the next driver.
        first.log.open(first.brokers, everything=False)
        assert first.log.newest == Write("0", "other")


# Decisions that another user has stored in the log


@pytest.fixture
def attacker(cluster: FakeCluster, clock: MovedClock) -> Iterator[Driver]:
    """A driver of another topic that uses the same decision log."""
    cluster.create_topic("loot", 1)
    with driver(cluster, clock, topic="loot") as job:
        yield job.open()


def forge(attacker: Driver, changes: Callable[[Halves], Halves], write: Write = WRITE) -> None:
    """Decide a write of another job, with half messages that the attacker has changed."""
    halves, group = attacker.prepare(["bait-0", "bait-1"], write)
    attacker.two_phase._decide(write, 1, group, changes(halves), attacker.options.transaction_timeout_ms)


def naming(offset: int) -> Callable[[Halves], Halves]:
    """Let the half messages on broker-0 be the message at a commit-log offset."""

    def changes(halves: Halves) -> Halves:
        on_first = [halves.queues[code].broker_name == "broker-0" for code in halves.codes]
        return replace(halves, commit_log_offsets=np.where(on_first, offset, halves.commit_log_offsets))

    return changes


def stored(cluster: FakeCluster, topic: str, text: str, **properties: str) -> int:
    """Store a message on broker-0, and return its commit-log offset."""
    cluster.create_topic(topic, 1)
    broker = cluster.brokers["broker-0"]
    with broker.lock:
        message = Message(topic, text.encode(), properties=properties)
        queue = MessageQueue(topic, "broker-0", 0)
        return broker.storage.store.append(message, queue, queue, time.time()).physical_offset


def ends(cluster: FakeCluster) -> list[RemotingCommand]:
    """Return a list of all ENDs from now on."""
    seen: list[RemotingCommand] = []
    for broker in cluster.brokers.values():
        broker.always[RequestCode.END_TRANSACTION] = seen.append
    return seen


def unconfined(job: Driver) -> Driver:
    """Let a driver have rows for any topic, as with a column `topic`, or in `finish_transactions`."""
    job.brokers.options = replace(job.options, topic=None)
    return job.open()


@pytest.mark.parametrize("disguised", [False, True], ids=["plain", "with the properties of a half message"])
def test_a_message_that_a_decision_names_is_not_copied(
    cluster: FakeCluster, clock: MovedClock, attacker: Driver, disguised: bool
) -> None:
    halves, group = attacker.prepare(["bait"])
    properties = {"TRAN_MSG": "true", "PGROUP": group, "REAL_TOPIC": "loot", "REAL_QID": "0"} if disguised else {}
    offset = stored(cluster, "secret", "the secret", **properties)
    attacker.two_phase._decide(WRITE, 1, group, naming(offset)(halves), attacker.options.transaction_timeout_ms)
    with driver(cluster, clock) as job, pytest.raises(MQClientException, match="It is a message of topic secret with"):
        unconfined(job).two_phase.finish(WRITE)
    assert cluster.messages("loot") == []


def test_a_half_message_for_another_topic_is_not_copied(
    cluster: FakeCluster, clock: MovedClock, first: Driver, attacker: Driver
) -> None:
    halves, group = attacker.prepare(["bait-0", "bait-1"])
    store_halves(first.brokers, [(half_message("row", group, first.options), first.queues[0])], lambda *_: None)
    store = cluster.brokers[first.queues[0].broker_name].storage.store
    forged = naming(len(store.log) - 1)(halves)
    attacker.two_phase._decide(WRITE, 1, group, forged, attacker.options.transaction_timeout_ms)
    with driver(cluster, clock) as job, pytest.raises(MQClientException, match="'REAL_TOPIC': 'T'"):
        unconfined(job).two_phase.finish(WRITE)
    assert cluster.messages("loot") == []


def test_half_messages_of_others_are_not_rolled_back(
    cluster: FakeCluster, clock: MovedClock, first: Driver, attacker: Driver
) -> None:
    halves, _ = first.prepare(ROWS)
    group = group_of(ID, WRITE, 1, "forged")
    attacker.two_phase.prepare(set(cluster.brokers))
    attacker.two_phase._decide(WRITE, 1, group, halves, attacker.options.transaction_timeout_ms)
    seen = ends(cluster)
    with driver(cluster, clock) as job, pytest.raises(MQClientException, match="It is not copied or ended"):
        job.open().two_phase.finish(WRITE)
    assert seen == []


def test_a_decision_for_other_topics_is_not_completed_by_a_write(
    cluster: FakeCluster, clock: MovedClock, attacker: Driver
) -> None:
    attacker.decide_and_crash(["row"], 0)
    seen = ends(cluster)
    with driver(cluster, clock) as job:
        why = r"has rows for topic loot, and this write has topic=T\. .* transactions job --finish"
        with pytest.raises(MQClientException, match=why):
            job.open().two_phase.finish(WRITE)
        assert seen == []
        # For example a job whose option topic was changed.
        unconfined(job).two_phase.finish(WRITE)
    assert [message.body for message in cluster.messages("loot")] == [b"row"]


def test_dead_letters_belong_to_a_write(cluster: FakeCluster, clock: MovedClock, attacker: Driver) -> None:
    attacker.decide_and_crash(["row"], 0)
    with driver(cluster, clock, onError="deadLetter", deadLetterTopic="loot") as job:
        job.open().two_phase.finish(WRITE)
    assert [message.body for message in cluster.messages("loot")] == [b"row"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda halves: halves.select(np.array([0, 0])), "a half message is listed twice"),
        (lambda halves: replace(halves, codes=halves.codes + 2), "unknown queue"),
        (lambda halves: replace(halves, youngest=halves.youngest[:1]), "none of them is the youngest one"),
    ],
)
def test_manifests_that_are_not_valid_stop_a_recovery(
    cluster: FakeCluster, clock: MovedClock, attacker: Driver, change: Callable[[Halves], Halves], why: str
) -> None:
    forge(attacker, change)
    seen = ends(cluster)
    with driver(cluster, clock) as job, pytest.raises(MQClientException, match=f"are not valid: .*{why}.*No row of it"):
        unconfined(job).two_phase.finish(WRITE)
    assert seen == []


def test_a_message_with_another_tag_is_no_manifest(cluster: FakeCluster, clock: MovedClock, attacker: Driver) -> None:
    attacker.decide_and_crash(["row"], 0)
    home = attacker.log.home
    assert home is not None
    (offset,) = attacker.log.writes[WRITE].last.manifests
    broker = cluster.brokers[home.broker_name]
    with broker.lock:
        read = broker.storage.store._read[home]
        read[offset] = replace(read[offset], properties={"TAGS": "other"})
    why = f"the message at offset {offset} is no manifest"
    with driver(cluster, clock) as job, pytest.raises(MQClientException, match=why):
        unconfined(job).two_phase.finish(WRITE)
