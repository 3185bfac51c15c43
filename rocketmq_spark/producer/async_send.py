"""One asynchronous send: its attempts, and the one outcome that its caller hears of.

Rule 1: a broker's error code ends it; only what the transport reports is tried again, up to
        ``retryTimesWhenSendAsyncFailed``, while time is left.
Rule 2: a retry goes to another broker where the queue was our choice, and to the same one where it was the caller's;
        queue id and born timestamp stay as they were first chosen. (Java keeps the first broker's name in the header,
        too: a proxy would then forward the retry to the broker that failed.)
Rule 3: `on_done` is called exactly once, whatever raises: an unexpected exception becomes the cause of an
        ``MQClientException``.
Rule 4: this runs on the transport's thread: it never waits.

Follows ``MQClientAPIImpl.sendMessageAsync`` and ``onExceptionImpl`` (spec/producer.md sections 9.3, 9.4, 16.2, 16.3,
16.12).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from rocketmq_spark.errors import (
    MQBrokerException,
    MQClientException,
    RemotingConnectException,
    RemotingException,
    RemotingTooMuchRequestException,
    RocketMQError,
)
from rocketmq_spark.message import MessageQueue, SendOutcome
from rocketmq_spark.producer.budget import Budget
from rocketmq_spark.producer.fault_preset import FaultSite
from rocketmq_spark.producer.hooks import Hooks
from rocketmq_spark.producer.kernel import Kernel, Prepared, as_client_error
from rocketmq_spark.send_result import SendResult
from rocketmq_spark.transport.base import Transport

logger = logging.getLogger("rocketmq_spark.producer")

OnDone = Callable[["SendResult | None", "Exception | None"], None]
# Broker that failed last -> another queue, or None to stay.
Reselect = Callable[[str], "MessageQueue | None"]


@dataclass(frozen=True, slots=True)
class AsyncRules:
    """What the asynchronous sends of a producer share.

    Parameters
    ----------
    kernel : Kernel
    transport : Transport
    hooks : Hooks
    retry_times : int
        ``retryTimesWhenSendAsyncFailed``.
    update_fault : callable
        ``(site, broker name, seconds)``.
    clock : callable
        Seconds.
    """

    kernel: Kernel
    transport: Transport
    hooks: Hooks
    retry_times: int
    update_fault: Callable[[FaultSite, str, float], None]
    clock: Callable[[], float]


class AsyncSend:
    """One message under way.

    Parameters
    ----------
    rules : AsyncRules
    prepared : Prepared
        The first attempt.
    budget : Budget
        Of all attempts.
    reselect : callable or None
        Finds the queue of a retry; None: a retry goes to the same broker.
    on_done : callable
        Told the outcome, once.
    """

    def __init__(
        self,
        rules: AsyncRules,
        prepared: Prepared,
        budget: Budget,
        reselect: Reselect | None,
        on_done: OnDone,
    ) -> None:
        self._rules = rules
        self._prepared = prepared
        self._budget = budget
        self._reselect = reselect
        self._on_done = on_done
        self._queue = prepared.request.queue
        self._address = prepared.request.address
        self._retries = 0
        self._began = 0.0
        self._done = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Make an attempt; its failure, too, is reported through `on_done`."""
        self._guarded(self._attempt)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step. Retries run on the transport's thread: no caller is there to get an exception."""
        try:
            step()
        except Exception as exc:
            if self._done:
                raise
            error = MQClientException(
                f"sending to {self._queue} at {self._address}: unexpected {type(exc).__name__}: {exc}"
            )
            error.__cause__ = exc
            self._finish(None, error)

    def _attempt(self) -> None:
        self._began = self._rules.clock()
        try:
            left = self._budget.require(f"sending to {self._queue} at {self._address}")
            request = replace(self._prepared.request, queue=self._queue, address=self._address)
            self._rules.transport.send(
                request, left, lambda outcome: self._guarded(lambda: self._on_outcome(outcome)), within=left
            )
        except RemotingTooMuchRequestException as exc:
            self._finish(None, exc)
        except RocketMQError as exc:
            self._rules.update_fault(
                FaultSite.ASYNC_NOT_SUBMITTED, self._queue.broker_name, self._rules.clock() - self._began
            )
            self._retry_or_fail(exc, exc)

    def _on_outcome(self, outcome: SendOutcome) -> None:
        took = self._rules.clock() - self._began
        if isinstance(outcome.error, MQBrokerException):
            self._rules.update_fault(FaultSite.ASYNC_REFUSED, self._queue.broker_name, took)
            self._finish(None, outcome.error)
        elif outcome.error is not None:
            if isinstance(outcome.error, RemotingException):
                self._rules.update_fault(FaultSite.ASYNC_FAILED, self._queue.broker_name, took)
            self._retry_or_fail(outcome.error, as_client_error(outcome.error))
        else:
            self._rules.update_fault(FaultSite.ASYNC_RETURNED, self._queue.broker_name, took)
            self._finish(self._rules.kernel.result_of(self._prepared, outcome), None)

    def _retry_or_fail(self, error: RocketMQError, shown: Exception) -> None:
        self._retries += 1
        retriable = error.retriable and not isinstance(error, RemotingTooMuchRequestException)
        if not retriable or self._retries > self._rules.retry_times or self._budget.left <= 0:
            self._finish(None, shown)
            return
        queue = self._reselect(self._queue.broker_name) if self._reselect is not None else None
        if queue is not None:
            address = self._rules.kernel.known_address(queue.broker_name)
            if address is None:
                # An address that nobody knows counts as an attempt that found nobody there (16.2).
                lost = RemotingConnectException(f"sending to {queue}: no master of {queue.broker_name} is known")
                self._retry_or_fail(lost, as_client_error(lost))
                return
            self._address, self._queue = address, replace(self._queue, broker_name=queue.broker_name)
        logger.debug("%s: trying again at %s", error, self._address)
        self.start()

    def _finish(self, result: SendResult | None, error: Exception | None) -> None:
        with self._lock:
            if self._done:
                return
            self._done = True
        try:
            self._rules.hooks.after(self._prepared.context, result, error)
        finally:
            self._on_done(result, error)
