"""Half messages as columns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.model.message import MessageQueue, SendOutcome, SendStatus
from rocketmq_spark.model.message_ext import encode_message_id
from rocketmq_spark.protocol.remoting.records import decode_properties
from rocketmq_spark.transactions.halves import NO_HALVES, Half, HalfCollector, Halves, concat, half_properties

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
    assert facts(Halves.from_bytes(NO_HALVES.to_bytes())) == ([], set(), None)


def test_parts_of_several_tasks_are_joined() -> None:
    parts = [collected((A0, 1, 50), (B0, 2, 40)), NO_HALVES, collected((B0, 3, 45), (A0, 4, 30))]
    rows, youngest, oldest = facts(concat(parts))
    assert [half.queue for half in rows] == [A0, B0, B0, A0]
    assert youngest == {Half(A0, 100, 1, 50), Half(B0, 300, 3, 45)}
    assert oldest == Half(A0, 400, 4, 30)
    assert facts(concat([])) == ([], set(), None)


def test_some_rows_are_taken_in_order() -> None:
    halves = collected((A0, 1, 50), (B0, 2, 40), (A1, 3, 70))
    assert [half.queue for half in facts(halves.take(np.array([2, 0])))[0]] == [A1, A0]


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
