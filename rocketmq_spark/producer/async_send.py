"""The parts of `Producer.send_async`: futures, retries, and limits of the messages and bytes in flight.

The limits apply only with ``enable_backpressure_for_async_mode``. See docs/internals/producer.md#asynchronous-sends.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Final

from rocketmq_spark import errors
from rocketmq_spark.model.message import MessageQueue, SendOutcome
from rocketmq_spark.model.send_result import SendResult
from rocketmq_spark.producer.attempt import Deadline, PreparedAttempt, SendAttempt
from rocketmq_spark.routing.fault_strategy import FaultSite

logger = logging.getLogger("rocketmq_spark.producer")

_LEAST_MESSAGES: Final = 10
_LEAST_BYTES: Final = 1024 * 1024

OnFuture = Callable[[Future[SendResult]], object]
OnDone = Callable[["SendResult | None", "Exception | None"], None]
# Broker that failed last -> another queue, or None to stay.
Reselect = Callable[[str], "MessageQueue | None"]


class FairPermits:
    """Permits for messages or bytes in flight (`what`), first come first served. The limit may change."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._limit = 0
        self._in_use = 0
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @property
    def available(self) -> int:
        """Free permits; negative if more are in use than a lowered limit allows."""
        return self._limit - self._in_use

    def resize(self, limit: int) -> None:
        """Set the limit; permits in use stay in use."""
        with self._changed:
            self._limit = limit
            self._changed.notify_all()

    def acquire(self, permits: int, deadline: Deadline) -> None:
        """Take permits, or raise ``RemotingTooMuchRequestException`` after the deadline."""
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                if not self._changed.wait_for(
                    lambda: self._waiting[0] is ticket and permits <= self.available, deadline.left
                ):
                    raise errors.RemotingTooMuchRequestException(
                        f"sending asynchronously: the limit of {self._what} in flight ({self._in_use} of "
                        f"{self._limit} in use) left no room within {deadline.seconds * 1000:.0f} ms; wait for "
                        "outcomes, or raise the limit with set_back_pressure_for_async_send"
                    )
                self._in_use += permits
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def release(self, permits: int) -> None:
        """Give permits back."""
        with self._changed:
            self._in_use -= permits
            self._changed.notify_all()


class BackPressure:
    """The limits of one producer: messages and bytes in flight."""

    def __init__(self, messages: int, nbytes: int) -> None:
        self.messages = FairPermits("messages")
        self.nbytes = FairPermits("bytes")
        self.resize(messages, nbytes)

    def resize(self, messages: int, nbytes: int) -> None:
        """Set both limits, to 10 messages and 1 MiB at least."""
        self.messages.resize(max(messages, _LEAST_MESSAGES))
        self.nbytes.resize(max(nbytes, _LEAST_BYTES))

    def admit(self, nbytes: int, deadline: Deadline) -> Callable[[], None]:
        """Wait until a message of `nbytes` may be sent; return a function that releases its permits, once."""
        with ExitStack() as permits:
            self.messages.acquire(1, deadline)
            permits.callback(self.messages.release, 1)
            self.nbytes.acquire(nbytes, deadline)
            permits.callback(self.nbytes.release, nbytes)
            return permits.pop_all().close


class Outstanding:
    """The messages of one producer's asynchronous sends that have not ended; safe for many threads.

    After `watch` it also counts messages that fail, because their futures have no reader at the end of the process.
    """

    def __init__(self) -> None:
        self.messages = 0
        self.failed = 0
        self.error: BaseException | None = None
        """The error of the first failed send."""
        self._watched = False
        self._changed = threading.Condition()

    def watch(self) -> None:
        """Count failures from now on."""
        self._watched = True

    def begin(self, messages: int) -> None:
        """Add the messages of a send."""
        with self._changed:
            self.messages += messages

    def end(self, messages: int, error: Exception | None) -> None:
        """Remove the messages of a send; `error` is that of a failed one."""
        with self._changed:
            if error is not None and self._watched:
                self.fail(messages, error)
            self.messages -= messages
            self._changed.notify_all()

    def fail(self, messages: int, error: BaseException) -> None:
        """Count messages of a failed send."""
        with self._changed:
            self.failed += messages
            self.error = self.error or error

    def wait(self, seconds: float) -> bool:
        """Wait until all sends have ended; return False if some are left after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.messages, seconds)


class SendFuture(Future[SendResult]):
    """The outcome of one asynchronous send.

    `release` returns the permits of back pressure when the send ends, before its result is set. `on_end` is called
    once, after that, with the error of a failed send. If the caller cancels the future, both are called when the send
    would begin.
    """

    def __init__(self, callback_executor: Executor, on_end: Callable[[Exception | None], None]) -> None:
        super().__init__()
        self._callback_executor = callback_executor
        self._on_end = on_end
        self.release: Callable[[], None] = lambda: None
        self.sent_again = False
        """Set by a callback that sends the messages of this failed send again."""

    def add_done_callback(self, fn: OnFuture) -> None:
        """Call `fn` with the finished future; what it raises is logged."""

        def call(future: Future[SendResult]) -> None:
            try:
                fn(future)
            except Exception:
                logger.exception("the callback %r of an asynchronous send raised", fn)

        def submit(future: Future[SendResult]) -> None:
            try:
                self._callback_executor.submit(call, future)
            except Exception:
                logger.debug("the callback executor rejected %r", fn, exc_info=True)
                call(future)

        super().add_done_callback(submit)

    def begin(self) -> bool:
        """Return whether the send may begin, which it may not if the caller has cancelled it."""
        if self.set_running_or_notify_cancel():
            return True
        self.release()
        self._on_end(None)
        return False

    def finish(self, result: SendResult | None, error: Exception | None) -> None:
        """Set the result or the error; called once, after `begin`."""
        self.release()
        if error is not None:
            self.set_exception(error)
        else:
            assert result is not None
            self.set_result(result)
        self._on_end(None if self.sent_again else error)

    def fail(self, error: Exception) -> None:
        """Fail a send that has not begun."""
        if self.begin():
            self.finish(None, error)


@dataclass(slots=True, eq=False)
class AsyncSend:
    """The attempts of one asynchronous send; the transport's thread makes the retries, without a wait.

    `reselect` chooses the queue of a retry. Without it, or if it returns None, the queue stays. `on_done` is called
    exactly once, after the hooks, which are not called for each attempt.
    """

    attempt: SendAttempt
    prepared: PreparedAttempt
    deadline: Deadline
    reselect: Reselect | None
    on_done: OnDone
    _retries: int = field(default=0, init=False)
    _began: float = field(default=0.0, init=False)
    _done: bool = field(default=False, init=False)
    _maybe_stored: bool = field(default=False, init=False)  # In one of the attempts
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def start(self) -> None:
        """Make an attempt; errors are reported through `on_done`."""
        self._guarded(self._send)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step, and report an unexpected exception, which no caller on the transport's thread could catch."""
        try:
            step()
        except Exception as exc:
            if self._done:
                raise
            error = errors.MQClientException(f"{self.prepared}: unexpected {type(exc).__name__}: {exc}")
            error.__cause__ = exc
            self._finish(None, error)

    def _send(self) -> None:
        self._began = self.attempt.runtime.clock()
        try:
            left = self.deadline.require(str(self.prepared))
            self.attempt.instance.transport.send(
                self.prepared.request,
                left,
                lambda outcome: self._guarded(lambda: self._on_outcome(outcome)),
                within=left,
            )
        except errors.RemotingTooMuchRequestException as exc:
            self._finish(None, exc)
        except errors.RocketMQError as exc:
            self._update_fault(FaultSite.ASYNC_NOT_SUBMITTED)
            self._retry_or_fail(exc, exc)

    def _on_outcome(self, outcome: SendOutcome) -> None:
        error = outcome.error
        self._maybe_stored |= error is None or error.maybe_stored
        if error is None:
            self._update_fault(FaultSite.ASYNC_RETURNED)
            self._finish(self.prepared.message.result_of(outcome), None)
        elif isinstance(error, errors.MQBrokerException):
            self._update_fault(FaultSite.ASYNC_REFUSED)
            self._finish(None, error)
        else:
            if isinstance(error, errors.RemotingException):
                self._update_fault(FaultSite.ASYNC_FAILED)
            self._retry_or_fail(error, _as_client_error(error))

    def _retry_or_fail(self, error: errors.RocketMQError, final: Exception) -> None:
        """Retry after `error`, or report `final`."""
        self._retries += 1
        retriable = error.retriable and not isinstance(error, errors.RemotingTooMuchRequestException)
        retry_times = self.attempt.options.retry_times_when_send_async_failed
        if not retriable or self._retries > retry_times or self.deadline.left <= 0:
            self._finish(None, final)
            return
        request = self.prepared.request
        queue = self.reselect(request.queue.broker_name) if self.reselect is not None else None
        if queue is not None:
            address = self.attempt.instance.routes.master_of(queue.broker_name)
            if address is None:
                # As in Java, an unknown address counts as an attempt that could not connect.
                unknown = errors.RemotingConnectException(
                    f"sending to {queue}: no master of {queue.broker_name} is known; start the broker"
                )
                self._retry_or_fail(unknown, _as_client_error(unknown))
                return
            same_queue_id = replace(request.queue, broker_name=queue.broker_name)
            request = replace(request, queue=same_queue_id, address=address)
            self.prepared = replace(self.prepared, request=request)
        logger.debug("%s: trying again at %s", error, request.address)
        self.start()

    def _update_fault(self, site: FaultSite) -> None:
        self.attempt.update_fault(site, self.prepared.request.queue.broker_name, self._began)

    def _finish(self, result: SendResult | None, error: Exception | None) -> None:
        with self._lock:
            if self._done:
                return
            self._done = True
        if isinstance(error, errors.RocketMQError):
            error.maybe_stored |= self._maybe_stored
        try:
            self.attempt.hooks.after(self.prepared.context, result, error)
        finally:
            self.on_done(result, error)


def _as_client_error(error: errors.RocketMQError) -> errors.RocketMQError:
    """Return a transport's error as Java reports it: an ``MQClientException`` with the cause."""
    if not isinstance(error, errors.RemotingException):
        return error
    wrapped = errors.MQClientException(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
