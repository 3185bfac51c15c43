"""The store times of the last messages that a streaming query has read: which requests get them, and their failures."""

from __future__ import annotations

import pytest

from rocketmq_spark.errors import DataLossError, ReadError, RemotingConnectException, RemotingTimeoutException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import PullOutcome, PullStatus
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.source.ranges import OffsetRange
from rocketmq_spark.source.stream_offsets import StreamOffsets
from tests.support.scripted import ManualClock, PullReply, ScriptedTransport, route
from tests.unit.source.conftest import A0, A1, B0, QUEUES, Make, Reader

NOTHING_READ = dict.fromkeys(QUEUES, 0)
REFUSED = PullReply(outcome=PullOutcome(None, error=RemotingConnectException("refused")))


def pulled(reader: Reader) -> list[tuple[MessageQueue, int]]:
    """Return the queues and offsets of the pulls since the last call."""
    found = sorted((request.target.queue, request.offset) for request in reader.transport.pulls)
    reader.transport.pulls.clear()
    return found


def test_only_queues_with_new_messages_are_pulled(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 5, B0: 3})
    last = reader.cluster.last_messages
    ends = reader.cluster.available(NOTHING_READ)
    times = last.times(ends, NOTHING_READ, {})
    assert times == {A0: 1_000_000, B0: 1_000_000}
    assert pulled(reader) == [(A0, 4), (B0, 2)]
    for _ in range(2):
        assert last.times(ends, ends, times) == times
    assert pulled(reader) == []
    reader.clock.advance(2.0)
    reader.fill({A0: 1})
    more = {**ends, A0: 6}
    assert last.times(more, ends, times) == {A0: 1_002_000, B0: 1_000_000}
    assert pulled(reader) == [(A0, 5)]
    # The message before the start shows that no message after it has expired.
    asked = len(reader.asked("min_offset"))
    ranges = reader.cluster.ranges(ends, more, times, {A0: 1_002_000, B0: 1_000_000})
    assert [part for part in ranges if part.size] == [OffsetRange(A0, 5, 6)]
    assert pulled(reader) == [(A0, 4)]
    assert len(reader.asked("min_offset")) == asked


def test_restarted_query_compares_each_queue_once(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 5, B0: 3})
    ends, times = {**NOTHING_READ, A0: 5, B0: 3}, {A0: 1_000_000, B0: 1_000_000}
    for _ in range(2):
        assert reader.cluster.last_messages.times(ends, ends, times) == times
    assert pulled(reader) == [(A0, 4), (B0, 2)]
    again = make_reader()
    again.fill({A0: 5, B0: 3})
    with pytest.raises(
        DataLossError, match=r"orders/b/0 has another message at offset 2 .* 00:16:40.000 UTC, .* 00:16:39.999 UTC\."
    ):
        again.cluster.last_messages.times(ends, ends, {**times, B0: 999_999})


def test_queue_without_new_messages_does_not_wait_for_its_broker(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 5})
    reader.transport.play_pulls(A0, REFUSED)
    ends, times = {**NOTHING_READ, A0: 5}, {A0: 7}
    for _ in range(2):
        assert reader.cluster.last_messages.times(ends, ends, times) == times
    assert reader.slept == []
    reader.fill({A0: 1})
    # With new messages it is compared.
    with pytest.raises(DataLossError, match="orders/a/0 has another message at offset 4"):
        reader.cluster.ranges(ends, {**ends, A0: 6}, times, {})


def test_slave_does_not_show_that_messages_are_the_same(make_reader: Make) -> None:
    """It may still have a queue that its master has replaced."""
    reader = make_reader()
    reader.fill({A0: 6})
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    reader.transport.play_pulls(A0, REFUSED)
    assert reader.cluster.ranges({A0: 5}, {A0: 6}, {A0: 1_000_000}, {A0: 1_000_000}) == [OffsetRange(A0, 5, 6)]
    assert {request.address for request in reader.transport.pulls} == {"master:1"}


def test_queue_with_new_messages_waits_for_its_broker(make_reader: Make) -> None:
    reader = make_reader(read_timeout_ms=5000)
    reader.fill({A0: 5, A1: 5})
    reader.transport.play_pulls(A0, REFUSED, REFUSED)
    assert reader.cluster.last_messages.times({A0: 5}, {A0: 0}, {}) == {A0: 1_000_000}
    assert len(reader.slept) == 2
    reader.transport.play_pulls(A1, *[REFUSED] * 100)
    with pytest.raises(ReadError, match="requests about queue orders/a/1"):
        reader.cluster.last_messages.times({A1: 5}, {A1: 0}, {})


@pytest.mark.parametrize(
    "answer",
    [
        PullOutcome(PullStatus.NO_NEW_MSG, 5, 0, 4),
        PullOutcome(PullStatus.OFFSET_ILLEGAL, 7, 7, 9),
        PullOutcome(PullStatus.FOUND, 5, 0, 5, b"damaged"),
    ],
)
def test_last_message_that_a_broker_does_not_return_is_not_compared(make_reader: Make, answer: PullOutcome) -> None:
    reader = make_reader()
    reader.fill({A0: 6})
    reader.transport.play_pulls(A0, *[PullReply(outcome=answer)] * 4)
    last = reader.cluster.last_messages
    assert last.times({A0: 5}, {A0: 0}, {}) == {}
    assert reader.cluster.ranges({A0: 5}, {A0: 6}, {A0: 7}, {}) == [OffsetRange(A0, 5, 6)]


def test_queue_shorter_than_a_repeated_micro_batch_is_reported_in_time(
    make_reader: Make,
) -> None:
    reader = make_reader(read_timeout_ms=1_000, pull_timeout_ms=1_000)
    reader.fill({A0: 2})
    # The driver asks for a while, because a broker may build its queue later.
    with pytest.raises(DataLossError, match="orders/a/0 ends at offset 2, before 5, where the micro-batch ends"):
        reader.cluster.ranges(NOTHING_READ, {**NOTHING_READ, A0: 5})
    assert reader.slept


def test_messages_that_come_while_a_repeat_is_planned_are_compared(make_reader: Make) -> None:
    reader = make_reader(fail_on_data_loss=False)
    reader.fill({A0: 3})

    def store() -> None:
        if len(reader.slept) == 1:
            reader.fill({A0: 2})

    reader.while_asleep = store
    # All five messages are others than the query has read and planned.
    ranges = reader.cluster.ranges({A0: 4}, {A0: 5}, {A0: 4_000}, {A0: 5_000})
    assert reader.slept
    assert [part for part in ranges if part.size] == []


def test_end_of_a_repeat_that_was_before_its_start_is_compared(make_reader: Make) -> None:
    reader = make_reader(fail_on_data_loss=False)
    reader.fill({A0: 1})
    # The micro-batch was planned when the queue had begun again. Now it has begun again once more.
    ranges = reader.cluster.ranges({A0: 13}, {A0: 11}, {A0: 4_000}, {A0: 5_000})
    assert [part for part in ranges if part.end > 1] == []


@pytest.mark.parametrize("fails", [True, False])
def test_topic_deleted_while_a_micro_batch_is_planned_is_lost_data(
    make_reader: Make, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    reader = make_reader(fail_on_data_loss=fails)
    reader.fill({A0: 3})
    ends = {**NOTHING_READ, A0: 8}
    assert reader.cluster.last_messages.times(ends, {**NOTHING_READ, A0: 2}, {}) == {}
    if fails:
        with pytest.raises(DataLossError, match="orders/a/0 ends at offset 3, before 8, where the micro-batch ends"):
            reader.cluster.ranges({**NOTHING_READ, A0: 2}, ends)
    else:
        ranges = reader.cluster.ranges({**NOTHING_READ, A0: 2}, ends)
        assert [part for part in ranges if part.size] == [OffsetRange(A0, 2, 3)]
        assert "queue orders/a/0 continues at offset 8, where the micro-batch ends, and may skip new" in caplog.text


class LosesAnswers(ScriptedTransport):
    """Loses the answers to requests for the end of a queue that come at one time."""

    failures = 0

    def max_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        if len(self.asked_at) > 1 and self.asked_at[-1] == self.now() and not self.failures:
            self.failures += 1
            raise RemotingTimeoutException("no answer")
        self.asked_at.append(self.now())
        return super().max_offset(queue, address, timeout)

    def __init__(self, clock: ManualClock) -> None:
        super().__init__({"orders": route({"a": 2, "b": 2})}, clock=clock)
        self.now, self.asked_at = clock, list[float]()


def test_shorter_queue_is_lost_data_though_an_answer_is_lost() -> None:
    options = SourceOptions.of(name_server=("n:9876",), subscribe=("orders",), pull_timeout_ms=1_000)
    clock = ManualClock(1_000.0)
    with LosesAnswers(clock) as transport:
        cluster = StreamOffsets(options, transport, clock, sleep=clock.advance)
        with pytest.raises(DataLossError, match="orders/a/0 ends at offset 0, before 5"):
            cluster.ranges(NOTHING_READ, {**NOTHING_READ, A0: 5})
        assert transport.failures == 1


def test_skipped_messages_without_a_store_time_are_named(make_reader: Make, caplog: pytest.LogCaptureFixture) -> None:
    reader = make_reader(fail_on_data_loss=False)
    reader.fill({A0: 3})
    # Release 1.0.0rc1 wrote no store times.
    known = {**NOTHING_READ, A0: 5}
    ends = reader.cluster.available(known)
    assert [part for part in reader.cluster.ranges(known, ends) if part.size] == []
    assert "queue orders/a/0 continues at its end, offset 3, and may skip new messages before it" in caplog.text
