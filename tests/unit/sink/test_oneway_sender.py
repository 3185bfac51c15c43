"""Oneway sends: rows that count as sent, retries, and the account in errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from rocketmq_spark.errors import DeliveryError, RemotingConnectException, RemotingSendRequestException
from rocketmq_spark.metrics import Recorder, WriteSummary, merge_into
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendRequest
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.records import encode_batch
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.sink.routes import RouteFinder
from rocketmq_spark.sink.sender import OnewaySender
from rocketmq_spark.testing import Reply
from tests.support.scripted import ScriptedTransport, route


class Rows:
    """Makes one batch of every list of bodies, for `queue`."""

    def __init__(self, queue: MessageQueue | None = None) -> None:
        self.queue = queue
        self.pending_bytes = 0
        self.taken_rows = 0

    def add(self, rows: list[str], now: float) -> Iterator[tuple[EncodedBatch, MessageQueue | None]]:
        self.taken_rows += len(rows)
        body = encode_batch([Message("T", row.encode()) for row in rows])
        yield EncodedBatch("T", (body,), len(rows), len(body)), self.queue

    def reject(
        self, rejected: Sequence[tuple[EncodedBatch, MessageQueue | None]], now: float
    ) -> Iterator[tuple[EncodedBatch, MessageQueue | None]]:
        raise AssertionError("a server has rejected a row")

    def new_topics(self) -> list[str]:
        return []

    def expired(self, now: float, known: Callable[[str], bool]) -> Iterator[tuple[EncodedBatch, MessageQueue | None]]:
        return iter(())

    def flush(self) -> Iterator[tuple[EncodedBatch, MessageQueue | None]]:
        return iter(())


class Rig:
    def __init__(self, rate: float | None = None, **options: Any) -> None:
        self.transport = ScriptedTransport({"T": route({"a": 2, "b": 2})})
        self.options = SinkOptions.of(
            name_server=("ns:1",), send_mode="oneway", retry_backoff_ms=1, retry_backoff_max_ms=5, **options
        )
        self.instance = ClientInstance("test@1", self.transport, self.options.connection)
        self.recorder = Recorder("w", -1, 0, epoch_offset=0.0)
        self.producer = OnewaySender(RouteFinder(self.options, self.instance), self.recorder, max_rate_per_second=rate)

    def refuse(self, broker: str) -> None:
        self.transport.always[broker] = Reply(error=RemotingConnectException("connecting: refused"))

    def stored(self) -> list[bytes]:
        return sorted(message.body for messages in self.transport.stored.values() for message in messages)

    @property
    def facts(self) -> dict[str, Any]:
        summary = WriteSummary()
        merge_into(summary, self.recorder.snapshot())
        return summary.to_dict()


@pytest.fixture
def rig() -> Iterator[Rig]:
    running = Rig()
    yield running
    running.instance.close()


def lists(count: int) -> list[list[str]]:
    return [[f"{number}-{row}" for row in range(5)] for number in range(count)]


def test_oneway_sends_once_and_rows_count_as_sent_but_not_as_stored(rig: Rig) -> None:
    rig.producer.write(lists(8), Rows())
    assert len(rig.transport.oneways) == 8
    assert rig.transport.requests == []
    assert len(rig.stored()) == 40
    assert sum(numbers["sent_rows"] for numbers in rig.facts.values()) == 40
    assert {(numbers["rows"], numbers["p50_ms"]) for numbers in rig.facts.values()} == {(0, None)}


def test_rejected_oneway_rows_are_not_resent_and_count_as_sent(rig: Rig) -> None:
    rig.transport.always.update(a=Reply.code(2, "busy"), b=Reply.code(13, "illegal"))
    rig.producer.write(lists(4), Rows())
    assert len(rig.transport.oneways) == 4
    assert rig.stored() == []
    assert sum(numbers["sent_rows"] for numbers in rig.facts.values()) == 20


def test_connection_that_breaks_during_a_oneway_send_counts_as_sent(rig: Rig) -> None:
    rig.transport.always.update(a=Reply(error=RemotingSendRequestException("reset")))
    rig.producer.write(lists(4), Rows(MessageQueue("T", "a", 0)))
    assert len(rig.transport.oneways) == 4


def test_oneway_rows_go_to_another_broker_if_a_connection_is_refused(rig: Rig) -> None:
    rig.refuse("a")
    rig.producer.write(lists(8), Rows())
    assert len(rig.stored()) == 40
    assert rig.facts["b"]["sent_rows"] == 40
    assert rig.facts["a"]["retries"] > 0


def test_undeliverable_oneway_rows_fail_the_write_with_row_counts() -> None:
    rig = Rig(delivery_timeout_ms=200, send_msg_timeout=200)

    def rows() -> Iterator[list[str]]:
        yield ["1", "2"]
        rig.refuse("a")
        rig.refuse("b")
        yield ["3"]

    with pytest.raises(DeliveryError, match=r"deliveryTimeoutMs=200.*refused") as caught:
        rig.producer.write(rows(), Rows())
    text = str(caught.value)
    assert "Rows of this task sent without acknowledgement (perhaps stored): " in text
    assert "2 rows in 1 requests. Read but not sent: 1; outcome unknown: 0" in text
    rig.instance.close()


def test_requests_carry_the_group_and_the_batch_itself(rig: Rig) -> None:
    rig.producer.write([["only"]], Rows(MessageQueue("T", "b", 1)))
    (request,) = rig.transport.oneways
    assert isinstance(request, SendRequest)
    assert (request.queue, request.address, request.producer_group) == (
        MessageQueue("T", "b", 1),
        "b:10911",
        "spark-rocketmq-sink",
    )


def test_rate_limit_applies_to_oneway_rows() -> None:
    # The rate counts from the creation of the sender on.
    started = time.monotonic()
    rig = Rig(rate=1000.0)
    rig.producer.write([["x"] * 20] * 5, Rows())
    assert time.monotonic() - started >= 0.1
    assert len(rig.stored()) == 100
    rig.instance.close()
