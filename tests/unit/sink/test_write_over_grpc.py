"""A write of a table through the gRPC transport to a test proxy: requests in flight, and retries."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pyarrow as pa
import pytest

from rocketmq_spark.errors import DeliveryError, InvalidRowError
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.protocol.grpc.codes import Code
from rocketmq_spark.testing.fake_cluster import FakeCluster
from rocketmq_spark.testing.fake_proxy import FakeProxy
from rocketmq_spark.testing.fake_proxy_messages import status_reply
from tests.support.processes import PATIENCE, wait_for
from tests.support.proxies import running_proxy, stored

_names = (f"write-over-grpc-{number}" for number in itertools.count())
Make = Callable[..., Producer]


@pytest.fixture
def proxy() -> Iterator[FakeProxy]:
    with running_proxy({"orders": "MIXED", "dead": "NORMAL"}) as proxy:
        yield proxy


@pytest.fixture
def make(proxy: FakeProxy) -> Iterator[Make]:
    producers: list[Producer] = []

    def make(**properties: Any) -> Producer:
        producers.append(Producer("pg", endpoints=proxy.address, instance_name=next(_names), **properties))
        producers[-1].start()
        return producers[-1]

    yield make
    for producer in producers:
        producer.shutdown()


def rows(count: int, **columns: list[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"body": [f"row {number}" for number in range(count)], **columns})


@pytest.mark.parametrize(
    ("column", "arrow_type"), [("delayMs", pa.int64()), ("deliverTime", pa.timestamp("ms", "UTC"))], ids=str
)
def test_a_delivery_after_the_year_9999_makes_an_invalid_row(
    proxy: FakeProxy, make: Make, column: str, arrow_type: pa.DataType
) -> None:
    delays = pa.array([None, 2**47, 2**47 + 1, 2**62], arrow_type)
    summary = make().send_arrow(rows(4, **{column: delays}), "orders", onError="skip")
    assert summary.invalid_rows()["skipped_by_rule"] == {"the delay is longer than the server allows": 3}
    assert [message.body for message in stored(proxy)] == [b"row 0"]


@pytest.mark.parametrize("by_gateway", [False, True], ids=["by-proxy", "by-gateway"])
def test_throttled_requests_are_resent_unchanged_without_isolation(
    proxy: FakeProxy, make: Make, *, by_gateway: bool
) -> None:
    send, throttled = proxy.handlers["SendMessage"], iter([True] * 5)

    def throttling(request: bytes, context: Any) -> bytes:
        if not next(throttled, False):
            return send(request, context)
        if by_gateway:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many")
        return status_reply(Code.TOO_MANY_REQUESTS, "flow limit")

    proxy.handlers["SendMessage"] = throttling
    # Only failures isolate a broker, even on a busy machine.
    producer = make(send_latency_fault_enable=True, latency_max="30000", not_available_duration="60000")
    options = {"batchBytes": "1k", "retryBackoffMs": "1", "retryBackoffMaxMs": "2"}
    brokers = producer.send_arrow(rows(300), "orders", **options).to_dict()[proxy.address]
    assert (brokers["rows"], brokers["retries_by_reason"]) == (300, {"BrokerBusyException 42900": 5})
    assert brokers["isolated_times"] == 0
    assert sorted(message.body for message in stored(proxy)) == sorted(b"row %d" % number for number in range(300))
    attempts = Counter(ids(call.request) for call in proxy.requests("SendMessage"))
    assert attempts.total() - len(attempts) == 5


def ids(request: bytes) -> tuple[str, ...]:
    messages = service.SendMessageRequest.FromString(request).messages
    return tuple(message.system_properties.message_id for message in messages)


@pytest.mark.parametrize(
    ("columns", "max_in_flight", "most"),
    [({}, 3, 3), ({"delayMs": [60_000] * 200}, 1, 8)],
    ids=["batches", "singles"],
)
def test_requests_in_flight_stay_within_the_limit(
    proxy: FakeProxy, make: Make, columns: dict[str, list[Any]], max_in_flight: int, most: int
) -> None:
    send, changed, peak, in_flight = proxy.handlers["SendMessage"], threading.Condition(), 0, 0

    def counting(request: bytes, context: Any) -> bytes:
        nonlocal peak, in_flight
        with changed:
            in_flight += 1
            peak = max(peak, in_flight)
            changed.notify_all()
            assert changed.wait_for(lambda: peak > 1, PATIENCE)
        time.sleep(0.002)
        with changed:
            in_flight -= 1
        return send(request, context)

    proxy.handlers["SendMessage"] = counting
    make().send_arrow(rows(200, **columns), "orders", batchBytes="1k", maxInFlight=str(max_in_flight))
    assert len(stored(proxy)) == 200
    assert 1 < peak <= most


def test_upstream_error_ends_the_write_and_shutdown_cancels_requests(proxy: FakeProxy, make: Make) -> None:
    ended = threading.Semaphore(0)

    def silent(_: bytes, context: Any) -> bytes:
        proxy.silence(context)
        ended.release()
        return b""

    def upstream() -> Iterator[pa.RecordBatch]:
        yield rows(300)
        wait_for(lambda: len(proxy.requests("SendMessage")) == 2)
        raise KeyError("upstream")

    proxy.handlers["SendMessage"] = silent
    producer = make(send_msg_timeout=60_000)
    with pytest.raises(KeyError, match="upstream"):
        producer.send_arrow(upstream(), "orders", batchBytes="1k")
    assert not [thread for thread in threading.enumerate() if thread.name == "rocketmq-producer"]
    producer.shutdown()
    assert [ended.acquire(timeout=PATIENCE / 2) for _ in range(2)] == [True, True]
    assert len(proxy.requests("SendMessage")) == 2


def with_bad_text(column: str) -> pa.RecordBatch:
    """Return ten rows; one has invalid UTF-8 in a string column."""
    texts = [b"caf\xe9" if number == 7 else "caf\u00e9".encode() for number in range(10)]
    return rows(10, **{column: pa.array(texts, pa.binary()).view(pa.string())})


@pytest.mark.parametrize("column", ["tags", "keys"])
def test_row_with_invalid_utf_8_fails_is_skipped_or_becomes_dead_letter(
    proxy: FakeProxy, make: Make, column: str
) -> None:
    producer, rule = make(), f"{column} is not valid UTF-8"
    with pytest.raises(InvalidRowError, match=rf"row 7 .*{rule} \(caf\\xe9\)"):
        producer.send_arrow(with_bad_text(column), "orders")
    assert stored(proxy) == []
    summary = producer.send_arrow(with_bad_text(column), "orders", onError="skip")
    assert summary.invalid_rows()["skipped_by_rule"] == {rule: 1}
    summary = producer.send_arrow(with_bad_text(column), "orders", onError="deadLetter", deadLetterTopic="dead")
    assert summary.invalid_rows()["dead_lettered_by_rule"] == {rule: 1}
    messages = Counter((message.topic, message.body) for message in stored(proxy))
    assert messages == Counter(
        {("orders", b"row %d" % number): 2 for number in range(10) if number != 7} | {("dead", b"row 7"): 1}
    )


def test_rows_beyond_the_delay_limit_of_the_proxy_are_dead_letters(proxy: FakeProxy, make: Make) -> None:
    batch = rows(4, delayMs=pa.array([1, 30 * 3600 * 1000, None, 2], pa.int64()))
    summary = make().send_arrow(batch, "orders", onError="deadLetter", deadLetterTopic="dead")
    assert summary.invalid_rows()["dead_lettered"] == 1
    cluster = proxy.cluster
    assert isinstance(cluster, FakeCluster)
    # `stored` would also count delayed rows that wait in the broker's timer.
    wait_for(lambda: len(cluster.messages("orders")) == 3)
    (letter,) = cluster.messages("dead")
    assert letter.body == b"row 1"
    assert letter.properties["DEAD_LETTER_delayMs"] == "108000000"


@pytest.mark.parametrize("column", ["delayMs", "deliverTime"])
def test_rows_that_are_due_after_the_year_9999_are_invalid_rows(make: Make, column: str) -> None:
    times = pa.array([1, 2**62, None], pa.int64())
    if column == "deliverTime":
        times = pa.array([1, 2**61, None], pa.int64()).view(pa.timestamp("ms", "UTC"))
    summary = make().send_arrow(rows(3, **{column: times}), "orders", onError="skip")
    assert summary.invalid_rows()["skipped_by_rule"] == {"the delay is longer than the server allows": 1}
    with pytest.raises(DeliveryError, match="after the year 9999"):
        make().send_arrow(rows(3, **{column: times}), "orders")
