"""Message groups that share endpoints keep their order; a rejected batch is split in halves."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.errors import DeliveryError, MessageRefusedException
from rocketmq_spark.model.message import EncodedBatch, Encoding, Message, MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.protocol.batches import singles_of, split_batch
from rocketmq_spark.protocol.grpc.messages import encode_send_request
from rocketmq_spark.protocol.remoting.records import decode_batch, decode_properties, encode_batch, encode_properties
from rocketmq_spark.testing import Reply
from rocketmq_spark.transport.base import OnOutcome
from tests.support.pipelines import REPLIES, Rig
from tests.support.scripted import route

ENDPOINTS = {"p1:8081": 1, "p2:8081": 1}


def offer_to_group(rig: Rig, group: str, body: bytes) -> None:
    rig.pipeline.offer(EncodedBatch("T", (body,), 1, len(body), batch=False, message_group=group), None, rig.clock.now)


@settings(max_examples=100)
@given(
    st.dictionaries(st.sampled_from(sorted(ENDPOINTS)), st.lists(REPLIES, max_size=12)),
    st.lists(st.sampled_from(["red", "green", "blue"]), min_size=1, max_size=20),
    st.integers(0, 2**32),
)
def test_messages_of_a_group_are_first_stored_in_order_at_any_endpoint(
    script: dict[str, list[Reply]], groups: list[str], seed: int
) -> None:
    rig = Rig(route(ENDPOINTS), seed)
    for endpoint, replies in script.items():
        rig.transport.play(endpoint, *replies)
    first_stored: list[bytes] = []
    send, in_flight = rig.transport.send, set[str]()

    def checked(request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        group = request.batch.message_group
        assert group not in in_flight
        in_flight.add(group)

        def ended(outcome: SendOutcome) -> None:
            in_flight.discard(group)
            if outcome.error is None:
                first_stored.append(bytes(request.batch.body[0]))
            on_outcome(outcome)

        send(request, timeout, ended, within=within)

    rig.transport.send = checked
    for number, group in enumerate(groups):
        offer_to_group(rig, group, f"{group}-{number:03}".encode())
    rig.run()
    for group in set(groups):
        acknowledged = [body for body in first_stored if body.startswith(group.encode())]
        assert acknowledged == sorted(acknowledged)
    if rig.pipeline.failure is None:
        assert len(set(first_stored)) == len(groups)


def test_waiting_group_does_not_delay_batches_or_other_groups() -> None:
    rig = Rig(route(ENDPOINTS), retry_backoff_ms=5000)
    rig.transport.play("p1:8081", Reply.code(2, "busy"))
    rig.transport.play("p2:8081", Reply.code(2, "busy"))
    for number in range(3):
        offer_to_group(rig, "red", b"r%d" % number)
    for number in range(3):
        offer_to_group(rig, "green", b"g%d" % number)
    rig.offer(5)
    rig.run()
    assert rig.pipeline.stored_rows == 11


def refusing(rig: Rig, is_bad: Callable[[EncodedBatch], bool]) -> list[int]:
    """Reject such batches, and return the number of messages of each attempt."""
    send, attempts = rig.transport.send, list[int]()

    def checked(request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        attempts.append(request.batch.rows)
        if is_bad(request.batch):
            error = MessageRefusedException("refused", 40007, "illegal property", request.address)
            rig.transport.play(request.queue.broker_name, Reply(error=error))
        send(request, timeout, on_outcome, within=within)

    rig.transport.send = checked
    return attempts


def named(body: bytes, row: int) -> Message:
    return Message("T", body, properties={"KEYS": f"key-{row} k", "TAGS": "red", "UNIQ_KEY": f"{row:034X}", "a": "1"})


def batch_of(messages: list[Message], encoding: Encoding) -> EncodedBatch:
    body = encode_batch(messages)
    if encoding is Encoding.GRPC:
        queue = MessageQueue("T", "p1:8081", 0)
        plain = SendRequest(EncodedBatch("T", (body,), len(messages), len(body)), queue, "p1:8081", "g", "TBW102", 4, 0)
        body = encode_send_request(plain)
    return EncodedBatch("T", (body[:3], body[3:]), len(messages), len(body), encoding=encoding)


@settings(max_examples=50)
@given(st.integers(1, 700), st.sampled_from(Encoding), st.data())
def test_single_invalid_row_is_found_by_halving_and_named(rows: int, encoding: Encoding, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, rows - 1))
    rig = Rig(route(ENDPOINTS))
    attempts = refusing(rig, lambda batch: b"BAD" in b"".join(batch.body))
    messages = [named(b"BAD" if row == bad else b"row-%d" % row, row) for row in range(rows)]
    rig.pipeline.offer(batch_of(messages, encoding), None, rig.clock.now)
    rig.run()
    assert isinstance(rig.pipeline.failure, DeliveryError)
    assert re.match(
        rf"sending 1 rows of topic T \(\d+ bytes; keys key-{bad} k; tags red; message id {bad:034X}\) to ",
        str(rig.pipeline.failure),
    )
    assert isinstance(rig.pipeline.failure.__cause__, MessageRefusedException)
    stored = [m.body for messages in rig.transport.stored.values() for m in messages]
    assert len(stored) == len(set(stored)) == rig.pipeline.stored_rows
    assert len(attempts) <= 2 * math.ceil(math.log2(max(rows, 2))) + 1
    assert rig.pipeline.unfinished().not_sent + rig.pipeline.stored_rows == rows


def test_rejected_single_message_is_named_without_missing_properties() -> None:
    rig = Rig(route(ENDPOINTS))
    refusing(rig, lambda _: True)
    properties = encode_properties({"KEYS": "k" * 300}).decode()
    rig.pipeline.offer(EncodedBatch("T", (b"1",), 1, 1, batch=False, properties=properties), None, rig.clock.now)
    rig.run()
    assert f"sending 1 rows of topic T (1 bytes; keys {'k' * 100}) to " in str(rig.pipeline.failure)


@pytest.mark.parametrize("encoding", Encoding)
def test_undecodable_row_is_rejected_without_its_keys(encoding: Encoding) -> None:
    rig = Rig(route(ENDPOINTS))

    def rejected(request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        error = MessageRefusedException("refused", 40007, "", request.address)
        on_outcome(SendOutcome(request.queue, None, error, 1.0))

    rig.transport.send = rejected
    rig.pipeline.offer(EncodedBatch("T", (b"\x0a\xff\xff",), 1, 3, encoding=encoding), None, rig.clock.now)
    rig.step()
    rig.complete()
    assert "sending 1 rows of topic T (3 bytes) to " in str(rig.pipeline.failure)


def test_halves_of_a_batch_stay_in_order_in_sync_mode() -> None:
    rig = Rig(route({"p1:8081": 1}), send_mode="sync")
    attempts = refusing(rig, lambda batch: batch.rows > 2)
    rig.offer_bodies([b"%d" % row for row in range(8)])
    rig.offer_bodies([b"8"])
    rig.run()
    assert rig.pipeline.failure is None
    assert attempts == [8, 4, 2, 2, 4, 2, 2, 1]
    [messages] = rig.transport.stored.values()
    assert [int(message.body) for message in messages] == list(range(9))


def knowing_no_batches(rig: Rig) -> list[int]:
    """Answer every batch with code 3, and return the number of messages of each attempt."""
    send, attempts = rig.transport.send, list[int]()

    def checked(request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        attempts.append(request.batch.rows)
        if request.batch.batch:
            rig.transport.play(request.queue.broker_name, Reply.code(3, "request type 320 not supported"))
        send(request, timeout, on_outcome, within=within)

    rig.transport.send = checked
    return attempts


@pytest.mark.parametrize("options", [{}, {"send_mode": "sync"}, {"ordered": True}])
def test_rows_go_one_by_one_where_brokers_know_no_batches(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(route({"a": 1}), **options)
    attempts = knowing_no_batches(rig)
    messages = [named(b"row-%02d" % row, row) for row in range(20)]
    queue = MessageQueue("T", "a", 0) if options.get("ordered") else None
    rig.pipeline.offer(batch_of(messages[:8], Encoding.REMOTING), queue, rig.clock.now)
    rig.run()
    for start in (8, 14):
        rig.pipeline.offer(batch_of(messages[start : start + 6], Encoding.REMOTING), queue, rig.clock.now)
    rig.run()
    assert rig.pipeline.failure is None
    assert rig.pipeline.is_empty
    assert rig.pipeline.pending_bytes == 0
    # One batch is enough to know it.
    assert attempts == [8] + [1] * 20
    [stored] = rig.transport.stored.values()
    assert [(message.body, message.properties) for message in stored] == [(m.body, m.properties) for m in messages]
    assert caplog.text.count("from now on this task sends its rows one by one") == 1


def test_unsupported_single_message_fails_the_write() -> None:
    rig = Rig(route({"a": 1}))
    rig.transport.play("a", Reply.code(3, "request type 310 not supported"))
    offer_to_group(rig, "", b"x")
    rig.run()
    assert "answered 3 REQUEST_CODE_NOT_SUPPORTED" in str(rig.pipeline.failure)


@given(
    st.lists(
        st.builds(
            Message,
            st.just("T"),
            st.binary(max_size=300),
            st.integers(-(2**31), 2**31 - 1),
            st.dictionaries(st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "a"]), st.text("abcü", min_size=1)),
        ),
        min_size=1,
        max_size=40,
    ),
    st.booleans(),
)
def test_single_messages_equal_the_items_of_the_batch(messages: list[Message], wait: bool) -> None:
    body = encode_batch(messages)
    inner = "UNIQ_KEY\x01of-the-batch\x02"
    batch = EncodedBatch(
        "T",
        (body[:3], body[3:]),
        len(messages),
        len(body),
        properties=inner if wait else f"WAIT\x01false\x02{inner}",
        sys_flag=9,
    )
    singles = singles_of(batch)
    assert singles is not None
    assert {(one.topic, one.rows, one.batch, one.sys_flag) for one in singles} == {("T", 1, False, 9)}
    shared = {} if wait else {"WAIT": "false"}
    assert [
        Message(one.topic, bytes(one.body[0]), one.flag, decode_properties(one.properties.encode())) for one in singles
    ] == [replace(message, properties={**shared, **message.properties}) for message in messages]
    assert singles_of(singles[0]) is None


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=40))
def test_halves_equal_the_items_of_the_batch(bodies: list[bytes]) -> None:
    body = encode_batch([Message("T", each) for each in bodies])
    batch = EncodedBatch("T", (memoryview(body)[:7], memoryview(body)[7:]), len(bodies), len(body))
    halves = split_batch(batch)
    if len(bodies) == 1:
        assert halves is None
        return
    assert halves is not None
    assert [half.rows for half in halves] == [len(bodies) // 2, len(bodies) - len(bodies) // 2]
    assert [m.body for half in halves for m in decode_batch(b"".join(half.body), "T")] == bodies
    assert sum(half.nbytes for half in halves) == batch.nbytes
