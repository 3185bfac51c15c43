"""The sender with its own thread, with a scripted cluster: results, errors, and cleanup."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from rocketmq_spark.errors import (
    DeliveryError,
    InvalidRowError,
    MQClientException,
    RemotingConnectException,
    RocketMQError,
    RouteNotFoundException,
)
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.records import encode_batch
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.sink.routes import RouteFinder
from rocketmq_spark.sink.sender import BatchSender
from rocketmq_spark.testing import Reply
from tests.support.pipelines import proxy_route
from tests.support.scripted import ScriptedTransport, route

Pair = tuple[EncodedBatch, MessageQueue | None]


class RowBatcher:
    """Makes a batch of every `size` rows. A row is its body; the body ``bad`` is invalid."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.rows: list[str] = []
        self.taken_rows = 0

    @property
    def pending_rows(self) -> int:
        return len(self.rows)

    @property
    def pending_bytes(self) -> int:
        return sum(map(len, self.rows))

    def add(self, rows: list[str], now: float) -> Iterator[Pair]:
        self.taken_rows += len(rows)
        for row in rows:
            if row == "bad":
                raise InvalidRowError("partition 0, row 7: bad", 7, "bad")
            self.rows.append(row)
            if len(self.rows) == self.size:
                yield from self.flush()

    def expired(self, now: float, known: Callable[[str], bool]) -> Iterator[Pair]:
        return self.flush() if known("T") else iter(())

    def reject(self, rejected: Sequence[Pair], now: float) -> Iterator[Pair]:
        raise AssertionError("a server has rejected a row")

    def new_topics(self) -> list[str]:
        return ["T"] if self.rows else []

    def flush(self) -> Iterator[Pair]:
        rows, self.rows = self.rows, []
        if rows:
            body = encode_batch([Message("T", row.encode()) for row in rows])
            yield EncodedBatch("T", (body,), len(rows), len(body)), None


class Rig:
    def __init__(self, routes: dict[str, Any] | None = None, **options: Any) -> None:
        self.transport = ScriptedTransport({"T": route({"a": 2, "b": 2})} if routes is None else routes, threaded=True)
        self.options = SinkOptions.of(name_server=("ns:1",), retry_backoff_ms=1, retry_backoff_max_ms=5, **options)
        self.instance = ClientInstance("test@1", self.transport, self.options.connection)
        self.recorder = Recorder("w", -1, 0)
        self.producer = BatchSender(RouteFinder(self.options, self.instance), self.recorder)

    def stored(self) -> list[bytes]:
        return [message.body for messages in self.transport.stored.values() for message in messages]


@pytest.fixture
def rig() -> Iterator[Rig]:
    yield from batches_of()


def batches_of(routes: dict[str, Any] | None = None, **options: Any) -> Iterator[Rig]:
    rig = Rig(routes, **options)
    yield rig
    rig.instance.close()


def numbers(rows: int) -> list[list[str]]:
    return [[f"{batch * 25 + row}" for row in range(25)] for batch in range(rows // 25)]


def test_write_returns_when_every_row_is_stored(rig: Rig) -> None:
    rig.producer.write(numbers(1000), RowBatcher())
    assert sorted(map(int, rig.stored())) == list(range(1000))
    assert not [thread for thread in threading.enumerate() if thread.name == "rocketmq-producer"]


def test_a_second_write_is_refused(rig: Rig) -> None:
    rig.producer.write(numbers(25), RowBatcher())
    with pytest.raises(RocketMQError, match="writes once: create another one"):
        rig.producer.write(numbers(25), RowBatcher())
    assert len(rig.stored()) == 25


def test_write_without_rows_starts_no_request_and_no_thread(rig: Rig) -> None:
    rig.producer.write([], RowBatcher())
    assert (rig.transport.calls, rig.transport.requests) == ([], [])


def test_rows_with_lost_answers_are_resent_and_none_is_missing() -> None:
    for rig in batches_of(send_msg_timeout=50):
        rig.transport.play("a", *[Reply(silent=True, stored=True)] * 3)
        rig.transport.play("b", Reply(silent=True), Reply.code(2, "busy"), Reply.code(14, "full"))
        rig.producer.write(numbers(500), RowBatcher())
        assert sorted(set(map(int, rig.stored()))) == list(range(500))


def test_a_retry_does_not_wait_for_a_slow_upstream(rig: Rig) -> None:
    rig.transport.always["b"] = Reply(error=RemotingConnectException("refused"))
    stored_meanwhile = []

    def upstream() -> Iterator[list[str]]:
        yield [str(number) for number in range(100)]
        for _ in range(2000):
            if len(rig.stored()) == 100:
                break
            threading.Event().wait(0.005)
        stored_meanwhile.append(len(rig.stored()))

    rig.producer.write(upstream(), RowBatcher(10))
    assert stored_meanwhile == [100]


def test_incomplete_batches_are_sent_while_the_upstream_is_slow(rig: Rig) -> None:
    stored_meanwhile = []

    def upstream() -> Iterator[list[str]]:
        yield ["early"] * 11
        for _ in range(2000):
            if len(rig.stored()) == 11:
                break
            threading.Event().wait(0.005)
        stored_meanwhile.append(len(rig.stored()))

    rig.producer.write(upstream(), RowBatcher(10))
    assert stored_meanwhile == [11]


def test_an_invalid_row_fails_the_write_while_the_upstream_is_slow(rig: Rig) -> None:
    class HoldingBatcher(RowBatcher):
        """Checks its rows only when they are sent."""

        def add(self, rows: list[str], now: float) -> Iterator[Pair]:
            self.rows += rows
            self.taken_rows += len(rows)
            return iter(())

        def expired(self, now: float, known: Callable[[str], bool]) -> Iterator[Pair]:
            found.set()
            raise InvalidRowError("partition 0, row 7: bad", 7, "bad")

    def upstream() -> Iterator[list[str]]:
        yield ["good"] * 3
        assert found.wait(30)
        yield ["never read"]

    found = threading.Event()
    with pytest.raises(InvalidRowError, match=r"row 7: bad\. .*stored: none.*not sent: 3$"):
        rig.producer.write(upstream(), HoldingBatcher())


def test_unknown_topic_fails_with_its_reason_despite_a_slow_upstream() -> None:
    def slow() -> Iterator[list[str]]:
        yield ["x"]
        time.sleep(0.5)

    for rig in batches_of(routes={}, send_msg_timeout=50):
        with pytest.raises(RouteNotFoundException, match="no name server knows it"):
            rig.producer.write(slow(), RowBatcher())


def test_invalid_row_error_has_the_row_counts_before_it(rig: Rig) -> None:
    rows = [["1"] * 10, ["2"] * 3 + ["bad"]]
    with pytest.raises(InvalidRowError, match=r"row 7: bad\. .*stored: [ab] 10 rows.*not sent: 4.*unknown: 0"):
        rig.producer.write(rows, RowBatcher(10))


def test_undeliverable_rows_fail_at_delivery_timeout_with_row_counts() -> None:
    for rig in batches_of(delivery_timeout_ms=300, send_msg_timeout=300):
        refused = Reply(error=RemotingConnectException("connecting to a:10911: refused"))
        rig.transport.always.update(a=refused, b=refused)
        with pytest.raises(
            DeliveryError, match=r"deliveryTimeoutMs=300.*refused.*stored: none.*not sent: 30"
        ) as raised:
            rig.producer.write([["x"] * 30], RowBatcher(10))
        assert isinstance(raised.value.__cause__, RemotingConnectException)


def test_unknown_topic_fails_before_the_delivery_timeout() -> None:
    for rig in batches_of({}, send_msg_timeout=100):
        with pytest.raises(RouteNotFoundException, match="topic T"):
            rig.producer.write(numbers(25), RowBatcher())


def test_empty_name_server_list_is_10004() -> None:
    transport = ScriptedTransport({})
    options = SinkOptions.of(name_server=())
    instance = ClientInstance("test@1", transport, options.connection)
    producer = BatchSender(RouteFinder(options, instance), Recorder("w", -1, 0))
    with pytest.raises(MQClientException) as raised:
        producer.routes.queues_of("T")
    assert raised.value.response_code == 10004
    assert transport.calls == []


class Jumping:
    """A clock that advances by a second at each call, and calls `at` once it has passed a time."""

    def __init__(self, when: float = 1e9, at: Callable[[], object] = lambda: None) -> None:
        self.now = 0.0
        self.when, self.at = when, at

    def __call__(self) -> float:
        self.now += 1.0
        if self.now >= self.when:
            self.when = 1e9
            self.at()
        return self.now


def over_grpc(
    routes: dict[str, Any], clock: Jumping, **options: Any
) -> tuple[BatchSender, ScriptedTransport, ClientInstance]:
    transport = ScriptedTransport(routes, threaded=True)
    sink = SinkOptions.of(
        transport="grpc", endpoints=("p:8081",), retry_backoff_ms=1, retry_backoff_max_ms=2, **options
    )
    instance = ClientInstance("test@1", transport, sink.connection)
    finder = RouteFinder(sink, instance, clock=clock)
    return BatchSender(finder, Recorder("w", -1, 0)), transport, instance


def test_a_topic_that_a_proxy_does_not_know_yet_is_waited_for() -> None:
    clock = Jumping(25.0, lambda: transport.routes.update(T=proxy_route("NORMAL", endpoints=("p:8081",))))
    producer, transport, instance = over_grpc({}, clock)
    assert producer.routes.queues_of("T") == (MessageQueue("T", "p:8081", 0),)
    assert clock.now >= 25
    instance.close()


@pytest.mark.parametrize(("delivery_timeout_ms", "patience"), [(120_000, 35), (10_000, 10)])
def test_topic_unknown_to_all_proxies_fails_after_at_most_35_s(delivery_timeout_ms: int, patience: int) -> None:
    clock = Jumping()
    producer, _, instance = over_grpc({}, clock, delivery_timeout_ms=delivery_timeout_ms)
    with pytest.raises(RouteNotFoundException, match="topic T: the proxy does not know it"):
        producer.routes.queues_of("T")
    assert patience <= clock.now <= patience + 3
    instance.close()


def test_an_endpoint_that_can_not_be_reached_fails_within_seconds() -> None:
    clock = Jumping()
    producer, transport, instance = over_grpc({}, clock)
    transport.fail("query_route", *[RemotingConnectException("connecting to p:8081: refused")] * 50)
    with pytest.raises(RouteNotFoundException, match="refused"):
        producer.routes.queues_of("T")
    assert clock.now <= 6
    instance.close()


GONE = RemotingConnectException("connecting to ns:1: refused")


def after_the_driver(routes: dict[str, Any], clock: Jumping, **options: Any) -> tuple[BatchSender, ScriptedTransport]:
    """Return a sender of a new process, whose driver has reached name servers."""
    transport = ScriptedTransport(routes)
    sink = SinkOptions.of(name_server=("ns:1",), retry_backoff_ms=1, retry_backoff_max_ms=2, **options)
    instance = ClientInstance("test@1", transport, sink.connection)
    finder = RouteFinder(sink, instance, clock=clock, servers_reached=True)
    return BatchSender(finder, Recorder("w", -1, 0)), transport


def test_name_servers_that_the_driver_has_reached_are_waited_for() -> None:
    clock = Jumping()
    producer, transport = after_the_driver({"T": route({"a": 1})}, clock)
    transport.fail("query_route", *[GONE] * 30)
    assert producer.routes.queues_of("T") == (MessageQueue("T", "a", 0),)
    assert 30 <= clock.now <= 60


def test_lost_name_servers_fail_after_the_delivery_timeout() -> None:
    clock = Jumping()
    producer, transport = after_the_driver({"T": route({"a": 1})}, clock, delivery_timeout_ms=20_000)
    transport.fail("query_route", *[GONE] * 50)
    with pytest.raises(RouteNotFoundException, match="refused"):
        producer.routes.queues_of("T")
    assert 20 <= clock.now <= 23


def test_unknown_topic_fails_soon_even_if_the_driver_reached_servers() -> None:
    clock = Jumping()
    producer, _ = after_the_driver({}, clock)
    with pytest.raises(RouteNotFoundException, match="no name server knows it"):
        producer.routes.queues_of("T")
    assert clock.now <= 6


def test_over_grpc_a_namespace_is_no_part_of_names() -> None:
    producer, transport, instance = over_grpc(
        {"T": proxy_route("NORMAL", endpoints=("p:8081",))}, Jumping(), namespace="ns"
    )
    producer.write([["1"]], RowBatcher())
    [request] = transport.requests
    assert (request.batch.topic, request.queue, request.address) == ("T", MessageQueue("T", "p:8081", 0), "p:8081")
    instance.close()


def test_bytes_in_flight_stay_within_max_in_flight_bytes() -> None:
    for rig in batches_of(max_in_flight_bytes=2000, max_in_flight=64):
        rig.transport.always.update(a=Reply(delay=0.002), b=Reply(delay=0.002))
        peak = 0

        def upstream(rig: Rig = rig) -> Iterator[list[str]]:
            nonlocal peak
            for _ in range(60):
                yield ["x" * 100]
                peak = max(peak, rig.producer._pipeline.pending_bytes)

        rig.producer.write(upstream(), RowBatcher(1))
        assert len(rig.stored()) == 60
        assert 0 < peak <= 2000


def test_upstream_error_is_raised_unchanged_and_ends_the_thread(rig: Rig) -> None:
    def upstream() -> Iterator[list[str]]:
        yield ["1"] * 20
        raise KeyError("upstream")

    with pytest.raises(KeyError, match="upstream"):
        rig.producer.write(upstream(), RowBatcher())
    assert not [thread for thread in threading.enumerate() if thread.name == "rocketmq-producer"]


def test_error_of_the_sender_thread_is_raised_in_the_caller(rig: Rig) -> None:
    class Crashing(RowBatcher):
        def expired(self, now: float, known: Callable[[str], bool]) -> Iterator[Pair]:
            raise ZeroDivisionError("expired")

    def upstream() -> Iterator[list[str]]:
        yield ["1"] * 20
        for _ in range(500):
            threading.Event().wait(0.01)
            yield ["2"]

    with pytest.raises(ZeroDivisionError, match="expired"):
        rig.producer.write(upstream(), Crashing())
