"""A read that begins at the offsets that a consumer group committed (``startingOffsets=committed``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.errors import MQBrokerException, OptionError, ReadError, RemotingTimeoutException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.offsets import COMMITTED, OffsetSpec
from tests.unit.source.conftest import A0, A1, B0, B1, QUEUES, Make, Reader


@pytest.fixture
def reader_of(make_reader: Make) -> Callable[..., Reader]:
    """Readers of four queues with four messages each, for the group ``billing`` with the given offsets."""

    def make(offsets: dict[MessageQueue, int], **options: Any) -> Reader:
        reader = make_reader(starting_offsets=OffsetSpec(COMMITTED), consumer_group="billing", **options)
        reader.fill(dict.fromkeys(QUEUES, 4))
        reader.transport.committed.update({("billing", queue): offset for queue, offset in offsets.items()})
        return reader

    return make


def test_read_begins_at_the_committed_offsets(reader_of: Callable[..., Reader]) -> None:
    offsets = {A0: 0, A1: 1, B0: 3, B1: 4}
    reader = reader_of(offsets)
    reader.transport.committed["another", A0] = 2
    assert reader.resolver.starts(QUEUES) == offsets
    assert {group for _, group, _ in reader.asked("consumer_offset")} == {"billing"}
    assert reader.asked("max_offset") == []


def test_offset_0_is_not_a_missing_offset(reader_of: Callable[..., Reader]) -> None:
    reader = reader_of(dict.fromkeys(QUEUES, 0), starting_offsets_fallback="latest")
    assert reader.resolver.starts(QUEUES) == dict.fromkeys(QUEUES, 0)


def test_queue_without_a_committed_offset_is_an_error(reader_of: Callable[..., Reader]) -> None:
    reader = reader_of({A0: 1, B1: 2})
    with pytest.raises(OptionError) as refused:
        reader.resolver.starts(QUEUES)
    assert str(refused.value) == (
        "startingOffsets=committed: consumerGroup=billing has no committed offset of queue orders/a/1 (queues with "
        "messages and without an offset: 2 of 4). Check the name of the group. Consumers with "
        "MessageModel.BROADCASTING commit no offsets. Or set startingOffsetsFallback=earliest or latest for such queues"
    )


@pytest.mark.parametrize(("fallback", "offset"), [("earliest", 2), ("latest", 4)])
def test_fallback_applies_to_queues_without_an_offset(
    reader_of: Callable[..., Reader], fallback: str, offset: int
) -> None:
    reader = reader_of({A0: 1, A1: 3, B0: 0}, starting_offsets_fallback=fallback)
    reader.transport.expired[B1] = 2
    assert reader.resolver.starts(QUEUES) == {A0: 1, A1: 3, B0: 0, B1: offset}


def test_queue_that_never_had_a_message_begins_at_0(make_reader: Make) -> None:
    reader = make_reader(starting_offsets=OffsetSpec(COMMITTED), consumer_group="billing")
    reader.fill({A0: 4})
    reader.transport.committed["billing", A0] = 3
    assert reader.resolver.starts(QUEUES) == {A0: 3, A1: 0, B0: 0, B1: 0}


def test_missing_offset_is_believed_only_from_the_master(reader_of: Callable[..., Reader]) -> None:
    reader = reader_of({A1: 2}, starting_offsets_fallback="latest", read_timeout_ms=20_000, pull_timeout_ms=5_000)
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    works = reader.transport.consumer_offset

    def master_away(queue: MessageQueue, group: str, address: str, timeout: float) -> int | None:
        if address == "master:1":
            raise RemotingTimeoutException("no answer")
        return works(queue, group, address, timeout)

    reader.transport.consumer_offset = master_away
    # A slave has an older offset at worst, and no message is skipped.
    assert reader.resolver.starts([A1]) == {A1: 2}
    with pytest.raises(ReadError, match=r"requests about queue orders/a/0: .* within readTimeoutMs=20000"):
        reader.resolver.starts([A0])
    assert reader.asked("max_offset") == []


def test_rejected_request_is_not_a_missing_offset(reader_of: Callable[..., Reader]) -> None:
    reader = reader_of({}, starting_offsets_fallback="latest")
    reader.transport.fail("consumer_offset", MQBrokerException("no permission", 16, "", "a:10911"))
    with pytest.raises(MQBrokerException, match="no permission"):
        reader.resolver.starts([A0])


def test_expired_messages_after_the_committed_offset_are_data_loss(reader_of: Callable[..., Reader]) -> None:
    reader = reader_of(dict.fromkeys(QUEUES, 1), fail_on_data_loss=False)
    reader.transport.expired[A0] = 3
    first = next(part for part in reader.resolver.ranges(QUEUES) if part.queue == A0)
    assert (first.start, first.end, first.expired) == (3, 4, 2)
