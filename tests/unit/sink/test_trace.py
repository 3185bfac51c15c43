"""Message trace of a write's batches: a record for each row, without an effect on the write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from rocketmq_spark.errors import RemotingConnectException
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendOutcome, SendStatus
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.producer.service import batch_trace_sender
from rocketmq_spark.protocol.remoting.records import encode_batch
from rocketmq_spark.sink.in_flight import PendingBatch
from rocketmq_spark.sink.trace import BatchTracer
from rocketmq_spark.testing import Reply
from tests.support.scripted import ScriptedTransport, route

TOPIC = "RMQ_SYS_TRACE_TOPIC"
OPTIONS = SinkOptions.of(name_server=("ns:9876",), namespace="space", producer_group="pg", enable_trace=True)
QUEUE = MessageQueue("T", "a", 1)


@pytest.fixture
def transport() -> Iterator[ScriptedTransport]:
    with ScriptedTransport({TOPIC: route({"a": 1})}, threaded=True) as scripted:
        yield scripted


@contextmanager
def tracer(transport: ScriptedTransport, options: SinkOptions = OPTIONS) -> Iterator[BatchTracer]:
    addresses = {"a": "a:10911"}
    with (
        batch_trace_sender(options, transport) as send,
        BatchTracer(options, addresses.__getitem__, send, lambda: 1_700_000_000.5) as tracing,
    ):
        yield tracing


def batch(rows: int) -> PendingBatch:
    plain = [Message.of("T", b"x" * 10, keys=f"k{row}") for row in range(rows)]
    members = [message.with_properties({"UNIQ_KEY": f"ID{row}"}) for row, message in enumerate(plain)]
    body = encode_batch(members)
    return PendingBatch(EncodedBatch("T", (body,), rows, len(body)), None)


def outcome(ids: str = "O0,O1,O2", status: SendStatus = SendStatus.SEND_OK) -> SendOutcome:
    return SendOutcome(QUEUE, status, None, 250.0, offset_msg_id=ids, region_id="here")


def records(transport: ScriptedTransport) -> list[list[str]]:
    bodies = [message.body.decode() for messages in transport.stored.values() for message in messages]
    return [text.split("\x01") for body in bodies for text in body.split("\x02") if text]


def test_each_row_has_its_record_with_its_own_ids_and_keys(transport: ScriptedTransport) -> None:
    with tracer(transport) as tracing:
        tracing.append(batch(3), outcome())
    found = records(transport)
    assert [(fields[5], fields[7], fields[12]) for fields in found] == [
        (f"ID{row}", f"k{row}", f"O{row}") for row in range(3)
    ]
    times = "1700000000250"
    assert {tuple(fields[:5] + fields[8:11] + fields[13:]) for fields in found} == {
        ("Pub", times, "here", "pg", "T", "a:10911", "10", "250", "true")
    }


def test_a_single_message_and_an_inner_batch_are_traced_too(transport: ScriptedTransport) -> None:
    single = EncodedBatch("T", (b"later",), 1, 5, batch=False, properties="UNIQ_KEY\x01ID\x02DELAY\x013\x02")
    with tracer(transport) as tracing:
        tracing.append(PendingBatch(single, None), outcome("O", SendStatus.FLUSH_DISK_TIMEOUT))
        tracing.append(batch(2), outcome("ONE"))
    found = records(transport)
    assert [(fields[5], fields[11], fields[12], fields[13]) for fields in found] == [
        ("ID", "3", "O", "false"),
        ("ID0", "0", "ONE", "true"),
        ("ID1", "0", "ONE", "true"),
    ]


def test_unwritable_trace_topic_is_logged_and_does_not_raise(
    transport: ScriptedTransport, caplog: pytest.LogCaptureFixture
) -> None:
    transport.always["a"] = Reply(error=RemotingConnectException("down"))
    with tracer(transport) as tracing:
        tracing.append(batch(3), outcome())
    assert "records of 3 rows could not be sent to topic" in caplog.text


def test_batches_beyond_the_trace_queue_are_dropped_and_counted(
    transport: ScriptedTransport, caplog: pytest.LogCaptureFixture
) -> None:
    transport.always["a"] = Reply(delay=0.1)
    with tracer(transport) as tracing:
        for _ in range(40):
            tracing.append(batch(3), outcome())
        left_out = tracing.discarded
    assert left_out >= 3 * (40 - 17)
    assert f"{left_out} rows were stored but not traced" in caplog.text


def test_a_write_of_a_group_of_any_length_is_traced(transport: ScriptedTransport) -> None:
    options = replace(OPTIONS, producer_group="" + "g" * 114)
    with tracer(transport, options) as tracing:
        tracing.append(batch(1), outcome())
    assert [fields[3] for fields in records(transport)] == ["g" * 114]
