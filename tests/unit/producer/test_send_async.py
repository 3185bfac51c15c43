"""Asynchronous sends."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest

from rocketmq_spark.errors import (
    BatchRefusedException,
    CredentialsError,
    MQBrokerException,
    MQClientException,
    RemotingConnectException,
    RemotingTimeoutException,
    RemotingTlsException,
    RemotingTooMuchRequestException,
    RocketMQError,
)
from rocketmq_spark.model.message import Message, MessageQueue, SendRequest
from rocketmq_spark.model.send_result import SendResult
from rocketmq_spark.options.producer import RETRY_RESPONSE_CODES
from rocketmq_spark.producer.async_send import BackPressure
from rocketmq_spark.producer.attempt import Deadline
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.testing import Reply
from tests.support.processes import PATIENCE, wait_for
from tests.support.scripted import ManualClock, ScriptedTransport, route

Make = Callable[..., Producer]
# Starts a producer for threads or for asyncio.
Start = Callable[..., Any]
MESSAGE = Message.of("T", b"x")


@pytest.fixture
def held() -> Iterator[ScriptedTransport]:
    """Brokers that reply when a test advances the clock by a millisecond."""
    with ScriptedTransport({"T": route({"a": 2, "b": 2})}, clock=ManualClock(), threaded=True) as scripted:
        scripted.always = dict.fromkeys("ab", Reply(delay=0.001))
        yield scripted


def started(make_producer: Make, **properties: Any) -> Producer:
    producer = make_producer(**properties)
    producer.start()
    return producer


def test_async_send_returns_at_once_and_calls_back_exactly_once(make_producer: Make, held: ScriptedTransport) -> None:
    producer = started(make_producer, transport=held)
    calls: list[Future[SendResult]] = []
    future = producer.send_async(MESSAGE, callback=calls.append)
    wait_for(lambda: held.in_flight == 1)
    assert not future.done()
    held.advance(0.001)
    assert future.result(PATIENCE).queue_offset == 0
    producer.shutdown()
    assert calls == [future]


def test_callbacks_run_on_threads_of_the_callback_executor(producer: Producer) -> None:
    names: list[str] = []
    done = threading.Event()

    def note(_future: Future[SendResult]) -> None:
        names.append(threading.current_thread().name)
        done.set()

    producer.send_async(MESSAGE, callback=note)
    assert done.wait(PATIENCE)
    assert names[0].startswith("ClientCallbackExecutor")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (Message("T", b""), 13),
        (Message("T", 5), 13),  # type: ignore[arg-type]
        (Message.of("U", b"x"), 10005),
        (Message("no spaces", b"x"), -1),
    ],
)
def test_invalid_message_or_missing_route_fails_the_future(start_any: Start, message: Message, code: int) -> None:
    error = start_any().send_async(message).exception(PATIENCE)
    assert isinstance(error, MQClientException)
    assert error.response_code == code


def test_a_transport_failure_is_tried_on_another_broker(start_any: Start, transport: ScriptedTransport) -> None:
    producer = start_any()
    transport.always["a"] = Reply(error=RemotingConnectException("down"))
    for _ in range(6):
        assert producer.send_async(MESSAGE).result(PATIENCE).message_queue.broker_name == "b"
    retried = [request for request in transport.requests if request.address == "a:10911"]
    assert 1 <= len(retried) <= 6


def test_attempts_are_limited_by_retry_times_when_send_async_failed(
    start_any: Start, transport: ScriptedTransport
) -> None:
    lost = RemotingConnectException("down")
    transport.always = {"a": Reply(error=lost), "b": Reply(error=lost)}
    producer = start_any(retry_times_when_send_async_failed=3, retry_times_when_send_failed=9)
    error = producer.send_async(MESSAGE).exception(PATIENCE)
    assert isinstance(error, MQClientException)
    assert (error.response_code, error.__cause__, len(transport.requests)) == (-1, lost, 4)
    brokers = [request.address[0] for request in transport.requests]
    assert all(before != after for before, after in itertools.pairwise(brokers))


def test_send_to_an_explicit_queue_is_retried_at_the_same_broker(
    start_any: Start, transport: ScriptedTransport
) -> None:
    transport.play("a", Reply(error=RemotingConnectException("down")))
    result = start_any().send_async(MESSAGE, MessageQueue("T", "a", 1)).result(PATIENCE)
    assert result.message_queue == MessageQueue("T", "a", 1)
    assert [request.address for request in transport.requests] == ["a:10911"] * 2


@pytest.mark.parametrize("code", sorted(RETRY_RESPONSE_CODES))
def test_error_code_of_a_broker_ends_an_async_send(start_any: Start, transport: ScriptedTransport, code: int) -> None:
    """As in Java, ``retryResponseCodes`` is for synchronous sends."""
    transport.always = {"a": Reply.code(code, "no"), "b": Reply.code(code, "no")}
    error = start_any().send_async(MESSAGE).exception(PATIENCE)
    assert isinstance(error, MQBrokerException)
    assert (error.response_code, len(transport.requests)) == (code, 1)


@pytest.mark.parametrize("error", [RemotingTlsException("it demands TLS"), CredentialsError("the vault is sealed")])
def test_permanent_error_ends_the_send(start_any: Start, transport: ScriptedTransport, error: RocketMQError) -> None:
    transport.always = {"a": Reply(error=error), "b": Reply(error=error)}
    raised = start_any().send_async(MESSAGE).exception(PATIENCE)
    assert error in (raised, getattr(raised, "__cause__", None))
    assert len(transport.requests) == 1


def test_retries_stop_when_the_shared_time_is_over(start_any: Start, transport: ScriptedTransport) -> None:
    transport.always = {"a": Reply(silent=True), "b": Reply(silent=True)}
    producer = start_any(retry_times_when_send_async_failed=50)
    error = producer.send_async(MESSAGE, timeout_ms=1000).exception(PATIENCE)
    assert isinstance(error, MQClientException)
    assert isinstance(error.__cause__, RemotingTimeoutException)
    assert len(transport.requests) == 1


def test_a_retry_keeps_queue_id_and_born_timestamp_of_the_first_choice(
    start_any: Start, transport: ScriptedTransport
) -> None:
    lost = Reply(error=RemotingConnectException("down"))
    transport.play("a", lost)
    transport.play("b", lost)
    start_any().send_async(MESSAGE).result(PATIENCE)
    first, *others = transport.requests
    assert others
    assert {(request.queue.queue_id, request.born_timestamp) for request in others} == {
        (first.queue.queue_id, first.born_timestamp)
    }


def test_a_batch_is_one_request_and_its_result_has_all_ids(start_any: Start, transport: ScriptedTransport) -> None:
    result = start_any().send_batch_async([MESSAGE, MESSAGE, MESSAGE]).result(PATIENCE)
    assert len(result.msg_id.split(",")) == 3
    assert [request.batch.rows for request in transport.requests] == [3]


def test_a_batch_with_an_invalid_message_fails_before_the_request(
    start_any: Start, transport: ScriptedTransport
) -> None:
    error = start_any().send_batch_async([MESSAGE, Message("T", b"")]).exception(PATIENCE)
    assert isinstance(error, BatchRefusedException)
    assert error.split
    assert not transport.requests


def test_failing_callback_is_logged_and_later_sends_succeed(
    producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_future: Future[SendResult]) -> None:
        raise ZeroDivisionError("in a callback")

    future = producer.send_async(MESSAGE, callback=broken)
    assert future.result(PATIENCE)
    assert producer.send_async(MESSAGE).result(PATIENCE)
    producer.shutdown()
    assert "in a callback" in caplog.text


def test_send_beyond_back_pressure_fails_and_permits_return(make_producer: Make, held: ScriptedTransport) -> None:
    producer = started(
        make_producer,
        transport=held,
        enable_backpressure_for_async_mode=True,
        back_pressure_for_async_send_num=1,
        send_msg_timeout=5000,
    )
    assert producer._service is not None
    limits = producer._service.sender.back_pressure
    assert limits is not None
    assert limits.messages.available == 10
    in_flight = [producer.send_async(MESSAGE) for _ in range(10)]
    wait_for(lambda: held.in_flight == 10)
    refused = producer.send_async(MESSAGE, timeout_ms=20).exception(PATIENCE)
    assert isinstance(refused, RemotingTooMuchRequestException)
    held.always = {"a": Reply.code(13, "illegal"), "b": Reply.code(13, "illegal")}
    held.advance(0.001)
    assert all(future.result(PATIENCE) for future in in_flight)
    assert isinstance(producer.send_async(MESSAGE).exception(PATIENCE), MQBrokerException)
    assert isinstance(producer.send_async(Message("T", b"")).exception(PATIENCE), MQClientException)
    assert (limits.messages.available, limits.nbytes.available) == (10, 1024 * 1024 * 100)


def test_changed_limits_still_count_sends_in_flight(make_producer: Make, held: ScriptedTransport) -> None:
    producer = started(
        make_producer, transport=held, enable_backpressure_for_async_mode=True, back_pressure_for_async_send_num=20
    )
    assert producer._service is not None
    limits = producer._service.sender.back_pressure
    assert limits is not None
    in_flight = [producer.send_async(MESSAGE) for _ in range(15)]
    producer.set_back_pressure_for_async_send(1, 1)
    assert limits.messages.available == -5
    wait_for(lambda: held.in_flight == 15)
    held.advance(0.001)
    assert all(future.result(PATIENCE) for future in in_flight)
    assert (limits.messages.available, limits.nbytes.available) == (10, 1024 * 1024)
    with pytest.raises(MQClientException, match="has no back pressure"):
        started(make_producer).set_back_pressure_for_async_send(10, 10)


def test_future_cancelled_before_its_start_sends_nothing(make_producer: Make, transport: ScriptedTransport) -> None:
    gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(gate.wait, PATIENCE)
        producer = started(make_producer, async_sender_executor=pool)
        future = producer.send_async(MESSAGE)
        assert future.cancel()
        gate.set()
    producer.shutdown()
    assert transport.requests == []


def test_an_executor_that_is_shut_down_fails_the_future(make_producer: Make) -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    producer = started(make_producer, async_sender_executor=pool)
    error = producer.send_async(MESSAGE).exception(PATIENCE)
    assert isinstance(error, MQClientException)
    assert "the executor rejected the send" in str(error)


def test_callback_on_the_only_thread_can_wait_for_another_send(make_producer: Make) -> None:
    producer = started(make_producer, client_callback_executor_threads=1)
    results: list[SendResult] = []
    done = threading.Event()

    def send_another(_future: Future[SendResult]) -> None:
        try:
            results.append(producer.send_async(MESSAGE).result(PATIENCE / 4))
        finally:
            done.set()

    producer.send_async(MESSAGE, callback=send_another)
    assert done.wait(PATIENCE)
    assert len(results) == 1


def test_callback_never_runs_on_the_sending_thread(producer: Producer) -> None:
    future = producer.send_async(MESSAGE)
    future.result(PATIENCE)
    names: list[str] = []
    done = threading.Event()

    def note(_future: Future[SendResult]) -> None:
        names.append(threading.current_thread().name)
        done.set()

    future.add_done_callback(note)
    assert done.wait(PATIENCE)
    assert names[0].startswith("ClientCallbackExecutor")


class Refusing(Executor):
    """A bounded executor that is full, and raises its own exception."""

    def submit(self, *_args: Any, **_kwargs: Any) -> Future[Any]:
        raise LookupError("queue is full")


def test_rejecting_callback_executor_leaves_no_future_pending(make_producer: Make) -> None:
    calls: list[Future[SendResult]] = []
    called = threading.Event()

    def note(future: Future[SendResult]) -> None:
        calls.append(future)
        called.set()

    future = started(make_producer, callback_executor=Refusing()).send_async(MESSAGE, callback=note)
    assert future.result(PATIENCE)
    assert called.wait(PATIENCE)
    assert calls == [future]


def test_async_executor_that_raises_another_error_fails_the_future(make_producer: Make) -> None:
    producer = started(make_producer, async_sender_executor=Refusing())
    error = producer.send_async(MESSAGE).exception(PATIENCE)
    assert isinstance(error, MQClientException)
    assert isinstance(error.__cause__, LookupError)
    assert producer._service is not None
    assert producer._service.sender.outstanding.wait(0)


@pytest.mark.parametrize("back_pressure", [False, True])
def test_send_dropped_by_the_executor_fails_and_returns_its_permits(make_producer: Make, back_pressure: bool) -> None:
    gate = threading.Event()
    pool = ThreadPoolExecutor(1)
    pool.submit(gate.wait, PATIENCE)
    producer = started(make_producer, async_sender_executor=pool, enable_backpressure_for_async_mode=back_pressure)
    future = producer.send_async(MESSAGE)
    pool.shutdown(wait=False, cancel_futures=True)
    gate.set()
    assert isinstance(future.exception(PATIENCE), MQClientException)
    assert producer._service is not None
    sender = producer._service.sender
    assert sender.outstanding.wait(0)
    if sender.back_pressure is not None:
        assert sender.back_pressure.messages.available == 1024


def test_interruption_while_acquiring_permits_returns_them() -> None:
    readings = iter([0.0, 0.0])

    def clock() -> float:
        for reading in readings:
            return reading
        raise KeyboardInterrupt

    limits = BackPressure(10, 1024 * 1024)
    with pytest.raises(KeyboardInterrupt):
        limits.admit(1, Deadline(1.0, clock))
    assert (limits.messages.available, limits.nbytes.available) == (10, 1024 * 1024)


class _FaultyTransport(ScriptedTransport):
    """The first attempt cannot connect; the next one raises an unexpected exception."""

    def send(self, request: SendRequest, timeout: float, on_outcome: Callable[..., None], **options: Any) -> None:
        if self.requests:
            raise ValueError("no such cipher")
        super().send(request, timeout, on_outcome, **options)


class _WrongAnswers(ScriptedTransport):
    """The transport reports None instead of an outcome."""

    def send(self, request: SendRequest, timeout: float, on_outcome: Callable[..., None], **options: Any) -> None:
        threading.Thread(target=on_outcome, args=(None,)).start()


@pytest.mark.parametrize("queue", [None, MessageQueue("T", "a", 1)])
@pytest.mark.parametrize(("kind", "cause"), [(_FaultyTransport, ValueError), (_WrongAnswers, AttributeError)])
def test_an_unexpected_exception_ends_the_future_with_its_cause(
    make_producer: Make, kind: type[ScriptedTransport], cause: type[Exception], queue: MessageQueue | None
) -> None:
    with kind({"T": route({"a": 2, "b": 2})}, threaded=True) as transport:
        lost = RemotingConnectException("down")
        transport.always = {"a": Reply(error=lost), "b": Reply(error=lost)}
        error = started(make_producer, transport=transport).send_async(MESSAGE, queue).exception(PATIENCE)
        assert isinstance(error, MQClientException)
        assert isinstance(error.__cause__, cause)
        assert f"{cause.__name__}: {error.__cause__}" in str(error)
