"""Half messages as columns."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.deliveries.exactly_once.halves import (
    HalfCollector,
    Halves,
    concat,
    half_properties,
)
from rocketmq_spark.deliveries.log.half import Half
from rocketmq_spark.errors import DeliveryError, MQClientException
from rocketmq_spark.model.message import MessageQueue, SendOutcome, SendStatus
from rocketmq_spark.model.message_ext import encode_message_id
from rocketmq_spark.protocol.remoting.records import decode_properties

A0, A1, B0 = MessageQueue("T", "a", 0), MessageQueue("T", "a", 1), MessageQueue("U", "b", 0)


def acknowledged(queue: MessageQueue, offset: int, born: int) -> tuple[MessageQueue, int, SendOutcome]:
    msg_id = encode_message_id("127.0.0.1:10911", offset * 100)
    return queue, born, SendOutcome(queue, SendStatus.SEND_OK, None, 1.0, offset, msg_id)


def collected(*rows: tuple[MessageQueue, int, int]) -> Halves:
    collector = HalfCollector()
    for row in rows:
        collector.append(*acknowledged(*row))
    return collector.halves()


def facts(halves: Halves) -> tuple[list[Half], set[Half], Half | None]:
    return [halves[row] for row in range(len(halves))], set(halves.youngest), halves.oldest


def test_oldest_and_youngest_half_messages_are_kept() -> None:
    halves = collected((A0, 1, 50), (B0, 2, 40), (A1, 3, 70), (A0, 4, 60))
    rows, youngest, oldest = facts(halves)
    assert rows == [Half(A0, 100, 1), Half(B0, 200, 2), Half(A1, 300, 3), Half(A0, 400, 4)]
    assert youngest == {Half(A1, 300, 3, 70), Half(B0, 200, 2, 40)}
    assert oldest == Half(B0, 200, 2, 40)


def test_bytes_hold_the_same_half_messages() -> None:
    halves = collected((A0, 1, 50), (B0, 2, 40))
    assert facts(Halves.from_bytes(halves.to_bytes())) == facts(halves)
    assert facts(Halves.from_bytes(HalfCollector().halves().to_bytes())) == ([], set(), None)


def test_manifests_hold_the_same_half_messages() -> None:
    halves = collected((A0, 1, 50), (B0, 2, 40), (A1, 3, 70))
    (manifest,) = halves.to_manifests()
    assert manifest == b"".join(
        struct.pack("<Iqq", code, offset * 100, offset) for code, offset in enumerate((1, 2, 3))
    )
    rows, youngest, oldest = facts(Halves.from_manifests([manifest], halves.queues, 3, halves.youngest))
    assert (rows, youngest, oldest) == (facts(halves)[0], facts(halves)[1], None)
    assert HalfCollector().halves().to_manifests() == []


def row(queue: int, commit_log_offset: int, queue_offset: int = 0) -> bytes:
    return struct.pack("<Iqq", queue, commit_log_offset, queue_offset)


@pytest.mark.parametrize(
    ("manifests", "why"),
    [
        ([], "lack 2 of 2 rows"),
        ([row(0, 1)], "has 20 bytes, 40 are expected"),
        ([row(0, 1) + row(0, 2) + row(0, 3)], "has 60 bytes, 40 are expected"),
        ([row(0, 1) + row(0, 2), b""], None),
        ([row(0, 1) + row(0, 2), row(0, 3)], "has 20 bytes, 0 are expected"),
        ([row(0, 1) + row(0, 2)[:-1]], "has 39 bytes"),
        ([row(0, 1) + row(3, 2)], "unknown queue"),
        ([row(0, 1) + row(2**32 - 1, 2)], "unknown queue"),
        ([row(0, 1) + row(0, -2)], "negative offset"),
        ([row(0, 1) + row(0, 2, -1)], "negative offset"),
        ([row(0, 1) + row(2, 1)], "listed twice"),
        ([row(0, 1) + row(1, 1)], None),
    ],
)
def test_manifests_are_checked(manifests: list[bytes], why: str | None) -> None:
    queues, youngest = (A0, B0, A1), (Half(A0, 1, 0, 5), Half(B0, 1, 0, 5))
    if why is None:
        assert len(Halves.from_manifests(manifests, queues, 2, youngest)) == 2
        return
    with pytest.raises(ValueError, match=why):
        Halves.from_manifests(manifests, queues, 2, youngest)


def test_a_broker_whose_last_half_message_is_unknown_is_refused() -> None:
    halves = collected((A0, 1, 50), (B0, 2, 40))
    with pytest.raises(ValueError, match="none of them is the youngest"):
        Halves.from_manifests(halves.to_manifests(), halves.queues, 2, halves.youngest[:1])


@given(st.lists(st.binary(max_size=100), max_size=3), st.integers(0, 12))
def test_arbitrary_manifests_raise_nothing_but_value_errors(manifests: list[bytes], rows: int) -> None:
    with contextlib.suppress(ValueError):
        halves = Halves.from_manifests(manifests, (A0, B0), rows, (Half(A0, 1, 0, 5), Half(B0, 1, 0, 5)))
        assert len(halves) == rows


def test_parts_of_several_tasks_are_joined() -> None:
    parts = [collected((A0, 1, 50), (B0, 2, 40)), HalfCollector().halves(), collected((B0, 3, 45), (A0, 4, 30))]
    rows, youngest, oldest = facts(concat(parts))
    assert [half.queue for half in rows] == [A0, B0, B0, A0]
    assert youngest == {Half(A0, 100, 1, 50), Half(B0, 300, 3, 45)}
    assert oldest == Half(A0, 400, 4, 30)
    assert facts(concat([])) == ([], set(), None)


def placed(*rows: tuple[MessageQueue, int, int]) -> Halves:
    """Return half messages with these offsets in the commit log and in the queue of half messages."""
    halves = collected(*((queue, number, 50) for number, (queue, _, _) in enumerate(rows)))
    logs, queues = (np.array([row[at] for row in rows]) for at in (1, 2))
    return replace(halves, commit_log_offsets=logs, queue_offsets=queues)


def test_half_messages_of_one_order_are_not_lost() -> None:
    placed((A0, 100, 1), (A1, 400, 4), (B0, 100, 1), (A0, 300, 2)).check_not_lost("write 1")
    HalfCollector().halves().check_not_lost("write 1")


@pytest.mark.parametrize(
    "later", [(A0, 300, 2), (A0, 300, 3), (A1, 500, 3), (A1, 500, 2)], ids=["both", "log", "queue", "order"]
)
def test_a_later_half_message_in_the_place_of_another_shows_a_loss(later: tuple[MessageQueue, int, int]) -> None:
    with pytest.raises(DeliveryError, match="committing write 1: a broker has acknowledged a half message at an"):
        placed((A0, 100, 1), (A0, 300, 3), (B0, 500, 5), later).check_not_lost("write 1")


def test_some_rows_are_taken_in_order() -> None:
    halves = collected((A0, 1, 50), (B0, 2, 40), (A1, 3, 70))
    assert [half.queue for half in facts(halves.select(np.array([2, 0])))[0]] == [A1, A0]


def test_a_driver_holds_at_most_64_bytes_per_row() -> None:
    halves = collected(*((A0, number, 50) for number in range(100_000)))
    arrays = (halves.codes, halves.commit_log_offsets, halves.queue_offsets)
    assert sum(array.nbytes for array in arrays) + len(halves.to_bytes()) <= 64 * 100_000


def test_an_acknowledgement_without_offsets_is_an_error() -> None:
    _, _, outcome = acknowledged(A0, 1, 50)
    with pytest.raises(MQClientException, match="no offset message id"):
        HalfCollector().append(A0, 50, SendOutcome(A0, SendStatus.SEND_OK, None, 1.0, 1, ""))
    with pytest.raises(MQClientException, match="has offset -1"):
        HalfCollector().append(A0, 50, replace(outcome, queue_offset=-1))


def test_times_that_are_no_whole_seconds_are_rounded_up() -> None:
    properties = decode_properties(half_properties("job#1#1#run", 10_001).encode())
    assert properties == {
        "TRAN_MSG": "true",
        "PGROUP": "job#1#1#run",
        "CHECK_IMMUNITY_TIME_IN_SECONDS": "11",
    }
