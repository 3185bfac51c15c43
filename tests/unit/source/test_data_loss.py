"""Messages that a broker no longer has: each offset of a range comes out as a row or is reported as missing."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import (
    DataLossError,
    ReadError,
    RemotingCommandException,
    RemotingConnectException,
    RocketMQError,
)
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.message_ext import Pulled, PullOutcome, PullRequest, PullStatus
from rocketmq_spark.protocol.remoting.records import encode_batch
from rocketmq_spark.protocol.remoting.unwrap import Unreadable
from rocketmq_spark.source.puller import Puller
from rocketmq_spark.source.ranges import OffsetRange
from rocketmq_spark.source.read import decoded
from tests.support.scripted import PullReply
from tests.unit.source.conftest import A0, A1, B0, Make, Reader, stored

SCHEMA = pa.schema([("brokerName", pa.string()), ("queueId", pa.int32()), ("queueOffset", pa.int64())])
GAP = re.compile(r"messages (\d+) to (\d+) of (\S+) are not there any more")


def read(reader: Reader, *ranges: OffsetRange, tag: str = "*") -> dict[MessageQueue, list[int]]:
    """Read ranges as a task does that filters by `tag` itself, and return the offsets of each queue."""
    pulls = Puller(reader.options, reader.transport, reader.queues.brokers, reader.clock).pull(ranges)
    offsets: dict[MessageQueue, list[int]] = {}
    for batch in decoded(replace(reader.options, sub_expression=tag), pulls, SCHEMA):
        for row in batch.to_pylist():
            queue = MessageQueue("orders", row["brokerName"], row["queueId"])
            offsets.setdefault(queue, []).append(row["queueOffset"])
    return offsets


def reported(texts: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    """The missing offsets that texts name, by queue: the first and the last of each gap."""
    gaps: dict[str, list[tuple[int, int]]] = {}
    for first, last, queue in GAP.findall("\n".join(texts)):
        gaps.setdefault(queue, []).append((int(first), int(last)))
    return gaps


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the log messages of readers. (An example of Hypothesis cannot use a function-scoped fixture.)"""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logger = logging.getLogger("rocketmq_spark.source")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def answer(after: int, *offsets: int) -> PullReply:
    return PullReply(PullOutcome(PullStatus.FOUND, after, 0, 100, b"".join(map(stored, offsets))))


def test_expired_messages_are_lost_data(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 50})
    reader.transport.expired[A0] = 20
    lost = r"messages 5 to 19 of orders/a/0 are not .* the first one left is 20: .*failOnDataLoss=false"
    with pytest.raises(DataLossError, match=lost):
        read(reader, OffsetRange(A0, 5, 40))


@given(st.integers(0, 30), st.integers(1, 200), st.integers(0, 250))
def test_expired_messages_are_skipped_without_fail_on_data_loss(start: int, size: int, expired: int) -> None:
    reader = Reader(fail_on_data_loss=False)
    reader.fill({A0: 260})
    reader.transport.expired[A0] = expired
    left = list(range(max(start, expired), start + size))
    assert read(reader, OffsetRange(A0, start, start + size)) == ({A0: left} if left else {})


@pytest.mark.parametrize(
    ("offsets", "others", "lost"),
    [((0, 0, 2), (0,), "1 to 1 of orders/a/0"), ((0, 0, 1, 2), (), "0 to 0 of orders/b/0")],
)
def test_a_message_that_a_damaged_queue_returns_twice_hides_no_missing_one(
    offsets: tuple[int, ...], others: tuple[int, ...], lost: str
) -> None:
    answers = (A0, 3, offsets), (B0, 1, others)
    pulls = [Pulled(queue, 0, end, b"".join(map(stored, of)), contiguous=True) for queue, end, of in answers]
    with pytest.raises(DataLossError, match=f"messages {lost} are not there"):
        list(decoded(Reader().options, pulls, SCHEMA))


def test_messages_that_expire_during_the_read_are_lost_data(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 500})
    pulls = Puller(reader.options, reader.transport, reader.queues.brokers, reader.clock).pull(
        [OffsetRange(A0, 0, 500)]
    )
    first = next(pulls)
    reader.transport.expired[A0] = 400
    with pytest.raises(DataLossError):
        list(decoded(reader.options, [first, *pulls], SCHEMA))


def test_deleted_messages_are_lost_data_under_a_stale_minimum_offset(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 200})
    reader.transport.removed[A0] = 100
    with pytest.raises(DataLossError) as raised:
        read(reader, OffsetRange(A0, 5, 150))
    # Several answers report a part each; the error names the whole gap.
    assert reported([str(raised.value)]) == {"orders/a/0": [(5, 99)]}


def test_an_answer_without_a_filter_that_has_no_message_is_lost_data(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 20})
    reader.transport.play_pulls(A0, PullReply(PullOutcome(PullStatus.NO_MATCHED_MSG, 8, 0, 20)))
    with pytest.raises(DataLossError, match="messages 0 to 7 of orders/a/0"):
        read(reader, OffsetRange(A0, 0, 20))


@pytest.mark.parametrize(
    ("offsets", "gaps"),
    [
        ((4, 5, 6, 7, 8, 9), [(0, 3)]),
        ((0, 1, 2, 6, 7, 8, 9), [(3, 5)]),
        ((0, 1, 2, 3), [(4, 9)]),
        ((2, 4, 5, 9), [(0, 1), (3, 3), (6, 8)]),
    ],
    ids=["begins later", "hole", "ends early", "several"],
)
def test_every_offset_missing_in_an_answer_is_reported(
    make_reader: Make, caplog: pytest.LogCaptureFixture, offsets: tuple[int, ...], gaps: list[tuple[int, int]]
) -> None:
    reader = make_reader()
    reader.transport.play_pulls(A0, answer(10, *offsets))
    with pytest.raises(DataLossError) as raised:
        read(reader, OffsetRange(A0, 0, 10))
    assert reported([str(raised.value)]) == {"orders/a/0": gaps}
    reader = make_reader(fail_on_data_loss=False)
    reader.transport.play_pulls(A0, answer(10, *offsets))
    assert read(reader, OffsetRange(A0, 0, 10)) == {A0: list(offsets)}
    assert reported(caplog.messages) == {"orders/a/0": gaps}


def test_unreadable_messages_are_not_reported_as_missing(make_reader: Make, caplog: pytest.LogCaptureFixture) -> None:
    unreadable = stored(1, b"not zlib", sys_flag=0x301)
    body = b"".join((stored(0), unreadable, stored(2), stored(5)))
    pull = Pulled(A0, 0, 6, body, contiguous=True)
    left_out: list[Unreadable] = []

    def leave_out(message: Unreadable) -> bool:
        left_out.append(message)
        return False

    reader = make_reader(fail_on_data_loss=False)
    schema = SCHEMA.append(pa.field("body", pa.binary()))
    batches = [*decoded(reader.options, [pull], schema, leave_out)]
    assert [row["queueOffset"] for batch in batches for row in batch.to_pylist()] == [0, 2, 5]
    assert [(message.start, message.end) for message in left_out] == [(1, 2)]
    assert reported(caplog.messages) == {"orders/a/0": [(3, 4)]}


def test_one_error_names_the_gaps_of_all_queues(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 50, B0: 50})
    reader.transport.expired |= {A0: 20, B0: 7}
    ranges = [OffsetRange(A0, 5, 50), OffsetRange(B0, 0, 50)]
    with pytest.raises(DataLossError) as raised:
        read(reader, *ranges)
    assert reported([str(raised.value)]) == {"orders/a/0": [(5, 19)], "orders/b/0": [(0, 6)]}


@given(st.integers(0, 300), st.lists(st.integers(0, 60), min_size=1, max_size=20), st.booleans())
def test_every_offset_is_a_row_or_reported(start: int, steps: list[int], corrected: bool) -> None:
    """A broker deletes messages between any two answers, and corrects the minimum offset at once or never."""
    reader = Reader(fail_on_data_loss=False)
    reader.fill({A0: 900})
    deleted = reader.transport.expired if corrected else reader.transport.removed
    left = iter(steps)

    def expiring(_: PullRequest) -> PullReply:
        deleted[A0] = min(deleted.get(A0, 0) + next(left, 0) * 10, 900)
        return PullReply()

    reader.transport.play_pulls(A0, *[expiring] * 20)
    with logged() as texts:
        rows = read(reader, OffsetRange(A0, start, 900)).get(A0, [])
    missing = [offset for first, last in reported(texts).get("orders/a/0", []) for offset in range(first, last + 1)]
    assert sorted(rows + missing) == list(range(start, 900))


def test_gaps_of_a_compacted_topic_are_no_lost_data(make_reader: Make) -> None:
    reader = make_reader()
    left = [1, 4, 8, 12, 19]

    def next_ones(request: PullRequest) -> PullReply:
        offsets = [offset for offset in left if offset >= request.offset][:2]
        return answer(offsets[-1] + 1, *offsets)

    reader.transport.play_pulls(A0, PullReply(PullOutcome(PullStatus.NO_MATCHED_MSG, 1, 1, 20)), *[next_ones] * 20)
    assert read(reader, OffsetRange(A0, 0, 20, compacted=True)) == {A0: [1, 4, 8, 12, 19]}


def test_compacted_queue_that_ends_in_a_gap_times_out(make_reader: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A broker drops messages without keys, and counts them in the maximum offset of the queue."""
    options = {"read_timeout_ms": 20_000}
    reader = make_reader(**options)
    reader.fill({A0: 15})
    with pytest.raises(ReadError, match=r"nothing came from offset 15 on .* have no keys, .*failOnDataLoss=false"):
        read(reader, OffsetRange(A0, 0, 20, compacted=True))
    reader = make_reader(**options, fail_on_data_loss=False)
    reader.fill({A0: 15})
    assert read(reader, OffsetRange(A0, 0, 20, compacted=True)) == {A0: list(range(15))}
    assert "orders/a/0 has no messages 15 to 19: the last messages of this compacted topic have no keys" in caplog.text


def test_a_range_that_begins_inside_an_inner_batch_is_contiguous(make_reader: Make) -> None:
    reader = make_reader()
    batch = stored(0, encode_batch([Message.of("orders", b"%d" % number) for number in range(6)]), 0xC0, INNER_NUM="6")
    reader.transport.play_pulls(A0, PullReply(PullOutcome(PullStatus.FOUND, 6, 0, 6, batch)))
    assert read(reader, OffsetRange(A0, 2, 5)) == {A0: [2, 3, 4]}


def test_tags_filtered_by_the_task_do_not_hide_gaps(make_reader: Make) -> None:
    reader = make_reader()
    reader.transport.play_pulls(A0, answer(5, 0, 1, 2, 3, 4), answer(10, 7, 8, 9))
    with pytest.raises(DataLossError) as raised:
        read(reader, OffsetRange(A0, 0, 10), tag="a")
    assert reported([str(raised.value)]) == {"orders/a/0": [(5, 6)]}


def pass_over_all(reader: Reader, then: Callable[[int], object] = lambda _: None) -> None:
    """Let a broker pass over the messages of a queue, 50 with each answer, and call `then` with the number of requests.

    Requests without a filter get what the queue holds.
    """

    def pass_over(request: PullRequest) -> PullReply:
        then(len(reader.transport.pulls))
        if request.target.sub_expression == "*":
            return PullReply()
        return PullReply(PullOutcome(PullStatus.NO_MATCHED_MSG, request.offset + 50, 0, 500), delay=0.3)

    reader.fill({A0: 500})
    reader.transport.play_pulls(A0, *[pass_over] * 100)


def test_filtered_read_checks_skipped_offsets_for_data_loss(make_reader: Make) -> None:
    reader = make_reader(sub_expression="a")
    pass_over_all(reader)
    assert read(reader, OffsetRange(A0, 0, 500)) == {}
    checks = [request.offset for request in reader.transport.pulls if request.target.sub_expression == "*"]
    # Four answers take more than a second; the last check is at the end.
    assert checks == [0, 200, 400]


@pytest.mark.parametrize("deleted", ["expired", "removed"])
def test_skipped_messages_that_expire_before_their_check_are_lost_data(make_reader: Make, deleted: str) -> None:
    reader = make_reader(sub_expression="a")

    def expire(requests: int) -> None:
        # The tenth request is the second check.
        if requests == 10:
            getattr(reader.transport, deleted)[A0] = 270

    pass_over_all(reader, expire)
    with pytest.raises(DataLossError) as raised:
        read(reader, OffsetRange(A0, 0, 500))
    assert reported([str(raised.value)]) == {"orders/a/0": [(200, 269)]}


REFUSED = PullReply(PullOutcome(None, error=RemotingConnectException("refused")))


def with_deleting_master(reader: Reader, checks_fail: int) -> None:
    """Let the master delete its first 10 messages and pass over them, and fail so many checks; a slave has them."""
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    reader.fill({A0: 50})
    failing = [checks_fail]

    def reply(request: PullRequest) -> PullReply:
        if request.address == "slave:1":
            return PullReply()
        if request.target.sub_expression != "*":
            return answer(*range(10, 50)) if request.offset < 10 else PullReply()
        if failing[0] > 0:
            failing[0] -= 1
            return REFUSED
        return PullReply(PullOutcome(PullStatus.OFFSET_ILLEGAL, 10, 10, 50)) if request.offset < 10 else PullReply()

    reader.transport.play_pulls(A0, *[reply] * 1000)


@pytest.mark.parametrize("checks_fail", [0, 1, 5])
def test_check_of_a_filtered_read_goes_to_the_broker_that_answered(make_reader: Make, checks_fail: int) -> None:
    reader = make_reader(sub_expression="a", pull_timeout_ms=1_000)
    with_deleting_master(reader, checks_fail)
    with pytest.raises(DataLossError, match="messages 0 to 9 of orders/a/0"):
        read(reader, OffsetRange(A0, 0, 50))


def test_filtered_read_fails_if_the_master_that_answered_it_is_lost(make_reader: Make) -> None:
    reader = make_reader(sub_expression="a", read_timeout_ms=20_000, pull_timeout_ms=1_000)
    with_deleting_master(reader, 1_000)
    with pytest.raises(
        ReadError, match=r"nothing came from offset 0 on for readTimeoutMs=20000. The last try: refused"
    ):
        read(reader, OffsetRange(A0, 0, 50))


def test_every_master_that_passed_over_messages_is_checked(make_reader: Make) -> None:
    reader = make_reader(sub_expression="a")
    reader.addresses("a", {0: "first:1"})

    def fail_over(request: PullRequest) -> PullReply:
        reader.addresses("a", {0: "second:1"})
        # The reader looks up a route at most once in a second.
        return PullReply(REFUSED.outcome, delay=1.1)

    def pass_over(request: PullRequest) -> PullReply:
        passed = PullReply(PullOutcome(PullStatus.NO_MATCHED_MSG, request.offset + 250, 0, 500))
        return PullReply() if request.target.sub_expression == "*" else passed

    reader.fill({A0: 500})
    reader.transport.play_pulls(A0, pass_over, fail_over, *[pass_over] * 100)
    assert read(reader, OffsetRange(A0, 0, 500)) == {}
    requests = [(one.address, one.offset, one.target.sub_expression) for one in reader.transport.pulls]
    assert requests == [
        ("first:1", 0, "a"),
        ("first:1", 250, "a"),
        ("second:1", 250, "a"),
        ("first:1", 0, "*"),
        ("second:1", 0, "*"),
    ]


def test_expired_messages_of_a_filtered_read_are_logged_once(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader(sub_expression="a", fail_on_data_loss=False)

    def pass_over(request: PullRequest) -> PullReply:
        if len(reader.transport.pulls) == 3:
            reader.transport.expired[A0] = 170
        if request.target.sub_expression == "*" or request.offset < reader.transport.expired.get(A0, 0):
            return PullReply()
        return PullReply(PullOutcome(PullStatus.NO_MATCHED_MSG, request.offset + 50, 0, 500))

    reader.fill({A0: 500})
    reader.transport.play_pulls(A0, *[pass_over] * 20)
    assert read(reader, OffsetRange(A0, 0, 500)) == {}
    assert reported(caplog.messages) == {"orders/a/0": [(0, 169)]}


def test_messages_that_expire_after_their_check_are_not_lost(make_reader: Make) -> None:
    reader = make_reader(sub_expression="a")

    def expire(requests: int) -> None:
        if requests == 10:
            reader.transport.removed[A0] = 180

    pass_over_all(reader, expire)
    assert read(reader, OffsetRange(A0, 0, 500)) == {}


def test_a_compacted_topic_is_filtered_without_checks(make_reader: Make) -> None:
    reader = make_reader(sub_expression="a")
    pass_over_all(reader)
    assert read(reader, OffsetRange(A0, 0, 500, compacted=True)) == {}
    assert {request.target.sub_expression for request in reader.transport.pulls} == {"a"}


# A master that fails, and a slave that has the messages from 30 on only.


def with_late_slave(reader: Reader, master: RocketMQError | None) -> list[str]:
    """Let the slave lack the first 30 messages and the master fail; return the addresses of the requests."""
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    reader.fill({A0: 50, A1: 50})
    asked: list[str] = []

    def reply(request: PullRequest) -> PullReply:
        asked.append(request.address)
        if request.address == "slave:1" and request.offset < 30:
            return PullReply(PullOutcome(PullStatus.OFFSET_ILLEGAL, request.offset, 30, 50))
        failed = request.address == "master:1" and master is not None and len(asked) < 100
        return PullReply(PullOutcome(None, error=master)) if failed else PullReply()

    reader.transport.play_pulls(A0, *[reply] * 1000)
    return asked


def test_first_offset_of_a_slave_is_ignored_if_the_master_answers(make_reader: Make) -> None:
    reader = make_reader()
    asked = with_late_slave(reader, None)
    reader.queues.brokers.failed(A0, reader.queues.brokers.address(A0))
    assert read(reader, OffsetRange(A0, 0, 50)) == {A0: list(range(50))}
    assert asked[:2] == ["slave:1", "master:1"]


def test_first_offset_of_a_slave_is_used_after_read_timeout(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader(read_timeout_ms=20_000, pull_timeout_ms=5_000)
    with_late_slave(reader, RemotingConnectException("refused"))
    began = reader.clock.now
    with pytest.raises(DataLossError, match="messages 0 to 29 of orders/a/0"):
        read(reader, OffsetRange(A0, 0, 50))
    assert 20.0 < reader.clock.now - began < 30.0
    warning = "the master of a has not answered for readTimeoutMs=20000: the offsets of its slave slave:1 count instead"
    assert sum(text.startswith(warning) for text in caplog.messages) == 1


def with_cleaned_slave(reader: Reader, master: RocketMQError | None) -> list[str]:
    """Let the slave pass over its first 30 messages, which it has just deleted, and the master fail.

    Return the addresses of the requests.
    """
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    reader.fill({A0: 50})
    asked: list[str] = []

    def reply(request: PullRequest) -> PullReply:
        asked.append(request.address)
        if request.address == "slave:1" and request.offset < 30:
            return answer(32, 30, 31)
        failed = request.address == "master:1" and master is not None
        return PullReply(PullOutcome(None, error=master)) if failed else PullReply()

    reader.transport.play_pulls(A0, *[reply] * 1000)
    return asked


def test_filtered_read_does_not_lack_what_only_the_slave_has_deleted(make_reader: Make) -> None:
    reader = make_reader(sub_expression="a")
    asked = with_cleaned_slave(reader, None)
    reader.queues.brokers.failed(A0, reader.queues.brokers.address(A0))
    assert read(reader, OffsetRange(A0, 0, 50)) == {A0: list(range(50))}
    # The second request to the slave is the one without a filter.
    assert asked[:3] == ["slave:1", "slave:1", "master:1"]
    assert [request.target.sub_expression for request in reader.transport.pulls[:3]] == ["a", "*", "a"]


def test_filtered_read_accepts_answers_of_a_slave_that_deleted_nothing(make_reader: Make) -> None:
    reader = make_reader(sub_expression="a")
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    pass_over_all(reader)
    reader.queues.brokers.failed(A0, reader.queues.brokers.address(A0))
    assert read(reader, OffsetRange(A0, 0, 500)) == {}
    assert {request.address for request in reader.transport.pulls} == {"slave:1"}
    requests = [(request.offset, request.target.sub_expression) for request in reader.transport.pulls]
    assert requests[:4] == [(0, "a"), (0, "*"), (50, "a"), (50, "*")]


def test_filtered_read_reports_what_a_slave_has_deleted_after_read_timeout(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader(sub_expression="a", read_timeout_ms=20_000, pull_timeout_ms=5_000, fail_on_data_loss=False)
    with_cleaned_slave(reader, RemotingConnectException("refused"))
    assert read(reader, OffsetRange(A0, 0, 50)) == {A0: list(range(30, 50))}
    assert reported(caplog.messages) == {"orders/a/0": [(0, 29)]}


def test_lost_master_without_a_slave_is_a_read_error(make_reader: Make) -> None:
    reader = make_reader(read_timeout_ms=20_000)
    gone = PullReply(PullOutcome(None, error=RemotingConnectException("refused")))
    reader.transport.always_pull[A0] = gone
    with pytest.raises(ReadError, match=r"readTimeoutMs=20000\. The last try: refused"):
        read(reader, OffsetRange(A0, 0, 50))


def test_read_returns_to_its_master_after_it_recovers(make_reader: Make) -> None:
    reader = make_reader(pull_timeout_ms=5_000, pull_batch_size=1)
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    reader.fill({A0: 400})
    late = PullReply(delay=0.1)
    reader.transport.always_pull[A0] = late
    reader.transport.play_pulls(A0, PullReply(PullOutcome(None, error=RemotingConnectException("refused"))))
    pulls: list[Pulled] = []
    for pulled in Puller(reader.options, reader.transport, reader.queues.brokers, reader.clock, window=1).pull(
        [OffsetRange(A0, 0, 400)]
    ):
        pulls.append(replace(pulled, body=b""))
    assert len(pulls) == 400
    addresses = [request.address for request in reader.transport.pulls]
    back = addresses.index("master:1", 1)
    # About 50 answers of the slave in 5 s, and then all of the master.
    assert set(addresses[1:back]) == {"slave:1"}
    assert set(addresses[back:]) == {"master:1"}


def test_a_compacted_topic_is_not_read_from_a_slave_that_began_later(make_reader: Make) -> None:
    reader = make_reader()
    asked = with_late_slave(reader, None)
    reader.queues.brokers.failed(A0, reader.queues.brokers.address(A0))
    assert read(reader, OffsetRange(A0, 0, 50, compacted=True)) == {A0: list(range(50))}
    assert asked[:2] == ["slave:1", "master:1"]


def test_first_message_of_compacted_topic_at_slave_is_checked_at_master(make_reader: Make) -> None:
    reader = make_reader()
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    reader.fill({A0: 50})
    reader.transport.play_pulls(A0, answer(32, 30, 31))
    reader.queues.brokers.failed(A0, reader.queues.brokers.address(A0))
    assert read(reader, OffsetRange(A0, 0, 50, compacted=True)) == {A0: list(range(50))}


# A broker lists a message of a compacted topic a moment before it can return it.


@pytest.mark.parametrize(
    "early",
    [
        PullReply(PullOutcome(PullStatus.OFFSET_ILLEGAL, 1, 0, 5)),
        answer(5, 0, 1, 2),
        answer(4, 0, 1, 2),
    ],
    ids=["first", "several", "last"],
)
def test_message_of_a_compacted_topic_that_is_being_written_is_read(make_reader: Make, early: PullReply) -> None:
    reader = make_reader()
    reader.fill({A0: 5})
    reader.transport.play_pulls(A0, early)
    assert read(reader, OffsetRange(A0, 0, 5, compacted=True)) == {A0: [0, 1, 2, 3, 4]}


def test_listed_message_of_a_compacted_topic_that_never_comes_is_an_error(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(request: PullRequest) -> PullReply:
        return PullReply(PullOutcome(PullStatus.OFFSET_ILLEGAL, 1, 0, 5)) if request.offset == 0 else PullReply()

    reader = make_reader(read_timeout_ms=20_000)
    reader.fill({A0: 5})
    reader.transport.play_pulls(A0, *[missing] * 100)
    with pytest.raises(ReadError, match="nothing came from offset 0 on"):
        read(reader, OffsetRange(A0, 0, 5, compacted=True))
    reader = make_reader(read_timeout_ms=20_000, fail_on_data_loss=False)
    reader.fill({A0: 5})
    reader.transport.play_pulls(A0, *[missing] * 100)
    assert read(reader, OffsetRange(A0, 0, 5, compacted=True)) == {A0: [1, 2, 3, 4]}
    assert "orders/a/0 has no messages 0 to 0: a:10911 lists messages there" in caplog.text


def test_inner_batch_with_fewer_messages_than_offsets_is_unreadable() -> None:
    """A sender chooses the number of offsets."""
    reader = Reader()
    items = encode_batch([Message.of("orders", b"%d" % number) for number in range(3)])
    body = stored(0, items, 0xC0, INNER_NUM="5") + stored(5)
    pull = Pulled(A0, 0, 6, body, contiguous=True)
    with pytest.raises(RemotingCommandException, match=r"messages 3 to 4 cannot be read: .* 3 messages and 5 offsets"):
        list(decoded(reader.options, [pull], SCHEMA))
    skipped: list[Unreadable] = []

    def skip(message: Unreadable) -> bool:
        skipped.append(message)
        return False

    batches = decoded(reader.options, [pull], SCHEMA, skip)
    assert [row for batch in batches for row in batch["queueOffset"].to_pylist()] == [0, 1, 2, 5]
    assert [(message.start, message.end) for message in skipped] == [(3, 5)]
