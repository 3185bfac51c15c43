"""Options that change each request (namespace, unit mode, VIP channel), and the queues of a whole write."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from rocketmq_spark.errors import RemotingConnectException, RouteNotFoundException
from rocketmq_spark.metrics import Recorder, WriteSummary, merge_into
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendRequest
from rocketmq_spark.model.route import BrokerData, QueueData, TopicRouteData, broker_vip_channel
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.protocol.remoting.records import encode_batch
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.connect import new_transport
from rocketmq_spark.sink.routes import RouteFinder
from rocketmq_spark.sink.sender import BatchSender
from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.transport.base import Transport
from tests.support.scripted import ScriptedTransport, route

Pair = tuple[EncodedBatch, MessageQueue | None]


class Rows:
    """Makes one batch of every list of bodies, for topic T. Batches for which `linger` is true come from `expired`
    only."""

    def __init__(self, *, linger: bool = False) -> None:
        self.linger = linger
        self.waiting: list[Pair] = []
        self.pending_bytes = 0
        self.taken_rows = 0

    def add(self, rows: list[str], now: float) -> Iterator[Pair]:
        self.taken_rows += len(rows)
        body = encode_batch([Message("T", row.encode()) for row in rows])
        pair = (EncodedBatch("T", (body,), len(rows), len(body)), None)
        if self.linger:
            self.waiting.append(pair)
        else:
            yield pair

    def reject(
        self, rejected: Sequence[tuple[EncodedBatch, MessageQueue | None]], now: float
    ) -> Iterator[tuple[EncodedBatch, MessageQueue | None]]:
        raise AssertionError("a server has rejected a row")

    def new_topics(self) -> list[str]:
        return []

    def expired(self, now: float, known: Callable[[str], bool]) -> Iterator[Pair]:
        pairs, self.waiting = self.waiting, []
        return iter(pairs)

    def flush(self) -> Iterator[Pair]:
        return self.expired(0.0, lambda _topic: True)


def write(
    routes: dict[str, TopicRouteData], *, linger: bool = False, **options: Any
) -> tuple[list[SendRequest], dict[str, Any]]:
    """Write three rows; return the requests and the figures."""
    transport = ScriptedTransport(routes, threaded=True)
    sink = SinkOptions.of(name_server=("ns:1",), **options)
    return transport.requests, write_by(transport, sink, transport.requests, linger=linger)


def write_by(transport: Transport, sink: SinkOptions, requests: Sequence[object], *, linger: bool) -> dict[str, Any]:
    recorder = Recorder("w", -1, 0)
    instance = ClientInstance("test@1", transport, sink.connection)
    # Its schedules look up the topic of rows that the producer's thread sends.
    instance.start()

    def upstream() -> Iterator[list[str]]:
        yield ["1", "2", "3"]
        # With `linger`, the producer's thread sends the rows while this thread waits.
        for _ in range(2000 if linger else 0):
            if requests:
                break
            threading.Event().wait(0.005)

    producer = BatchSender(RouteFinder(sink, instance), recorder)
    try:
        producer.write(upstream(), Rows(linger=linger))
    finally:
        instance.close()
    summary = WriteSummary()
    merge_into(summary, recorder.snapshot())
    return summary.to_dict()


@pytest.mark.parametrize("linger", [False, True])
def test_requests_have_namespaced_topics_and_receipts_bare_ones(linger: bool) -> None:
    sent: list[RemotingCommand] = []
    with FakeCluster(["a"], topics={"ns%T": 1}) as cluster:
        peer = cluster.brokers["a"]
        sink = SinkOptions.of(name_server=(cluster.name_server,), namespace="ns")
        # No row is stored before `flush`.
        facts = write_by(new_transport(sink.connection, ""), sink, peer.storage.store.log, linger=linger)
        sent += [request for request in peer.requests if request.code == RequestCode.SEND_BATCH_MESSAGE]
    [fields] = [request.ext_fields for request in sent]
    assert MessageQueue(fields["b"], fields["n"], int(fields["e"])) == MessageQueue("ns%T", "a", 0)
    assert (fields["a"], fields["c"]) == (f"ns%{sink.producer_group}", "TBW102")
    assert set(peer.storage.store.queues) == {MessageQueue("ns%T", "a", 0)}
    assert facts["a"]["queues"] == {"T": {"0": {"rows": 3, "first_offset": 0, "last_offset": 2}}}


def test_names_are_unchanged_without_a_namespace() -> None:
    requests, _ = write({"T": route({"a": 1})})
    assert requests[0].batch.topic == "T"
    assert not requests[0].unit_mode


def test_unit_mode_marks_every_request() -> None:
    requests, _ = write({"T": route({"a": 1})}, unit_mode=True)
    assert requests[0].unit_mode


def test_the_vip_channel_is_the_port_two_below_and_off_by_default() -> None:
    assert broker_vip_channel("[::1]:10911") == "[::1]:10909"
    assert write({"T": route({"a": 1})}, vip_channel_enabled=True)[0][0].address == "a:10909"
    assert write({"T": route({"a": 1})})[0][0].address == "a:10911"


@pytest.mark.parametrize("address", ["broker-without-port", "a:", "a:b", ""])
def test_the_vip_channel_of_an_invalid_address_is_left_to_the_connect(address: str) -> None:
    assert broker_vip_channel(address) == address
    invalid = TopicRouteData((QueueData("a", 1, 1, 6),), (BrokerData("a", {0: address}),))
    assert write({"T": invalid}, vip_channel_enabled=True)[0][0].address == address


def fixed(routes: dict[str, TopicRouteData], **options: Any) -> tuple[BatchSender, ScriptedTransport]:
    sink = SinkOptions.of(name_server=("ns:1",), ordered=True, topic="T", **options)
    transport = ScriptedTransport(routes)
    queues = [MessageQueue("T", "a", 0), MessageQueue("T", "b", 0)]
    instance = ClientInstance("test@1", transport, sink.connection)
    return BatchSender(RouteFinder(sink, instance, fixed_queues=queues), Recorder("w", -1, 0)), transport


def test_ordered_write_uses_the_queues_of_the_driver() -> None:
    producer, transport = fixed({"T": route({"b": 1})})
    assert producer.routes.queues_of("T") == [MessageQueue("T", "a", 0), MessageQueue("T", "b", 0)]
    assert transport.calls == []


def test_ordered_write_waits_for_lost_brokers_but_not_for_wrong_addresses() -> None:
    row = [["1"]]
    producer, transport = fixed({}, send_msg_timeout=50, delivery_timeout_ms=900)
    with pytest.raises(RouteNotFoundException):
        producer.write(row, Rows())
    patient = len(transport.calls)
    producer, transport = fixed({}, send_msg_timeout=50, delivery_timeout_ms=900)
    transport.fail("query_route", *[RemotingConnectException("refused")] * 50)
    with pytest.raises(RouteNotFoundException):
        producer.write(row, Rows())
    assert patient > 2 * len(transport.calls)
