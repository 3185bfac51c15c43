"""Sends the rows of one partition: `BatchSender.write` returns when every batch is acknowledged, or raises.

The caller's thread reads and encodes rows, and waits while ``maxInFlightBytes`` are pending. The sender's own thread
handles the outcomes of attempts and starts retries, so that a retry never waits for slow input. With
``sendMode=oneway`` (`OnewaySender`) only the caller's thread sends, and batches are not acknowledged.
docs/internals/architecture.md#row-path has the modules that a row passes.
"""

from __future__ import annotations

import logging
import math
import queue as queues
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from rocketmq_spark.arrow.batch_source import BatchSource
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import EncodedBatch, MessageQueue, Ready, SendOutcome, SendRequest, SendStatus
from rocketmq_spark.model.route import broker_vip_channel
from rocketmq_spark.routing.selectors import selector_of
from rocketmq_spark.sink.failures import SEND_ALL_AGAIN, lost_tail
from rocketmq_spark.sink.in_flight import Dispatch, PendingBatch, batch_weight, offset_of
from rocketmq_spark.sink.limits import RateLimit
from rocketmq_spark.sink.pipeline import OnStored, SendPipeline
from rocketmq_spark.sink.routes import RouteFinder

T = TypeVar("T")

logger = logging.getLogger("rocketmq_spark.producer")

# How often the sender's thread looks for groups that have waited for their linger time, seconds.
_LINGER_TICK = 0.1
# The part of maxInFlightBytes that may still be pending when a caller that waited for room continues.
_PLENTY = 0.75


class BatchSender:
    """Sends the rows of one partition task.

    The caller registers and unregisters its group with the instance of `routes`, and reads the `recorder` only after
    `write`. `max_rate_per_second` is this task's share. See `SendPipeline` for `on_stored`.
    """

    # What the error of a failed write says about the rows that were sent, and about a retry of the task.
    _done: ClassVar[str] = "stored"
    _retry: ClassVar[str] = "Rows sent again by a retry of the task may be stored twice"
    _after_loss: ClassVar[str] = SEND_ALL_AGAIN
    # Until when the requests of this sender may be written; see `SendRequest`.
    _write_by = math.inf

    def __init__(
        self,
        routes: RouteFinder,
        recorder: Recorder,
        *,
        max_rate_per_second: float | None = None,
        on_stored: OnStored | None = None,
    ) -> None:
        self.routes = routes
        self._options = options = routes.options
        self._instance = instance = routes.instance
        self._clock = clock = routes.clock
        self._recorder = recorder
        self._pipeline = SendPipeline(
            options,
            instance.faults,
            recorder,
            publish_info=routes.cached,
            refresh_route=instance.refresh_route,
            new_selector=lambda: selector_of(options, instance.faults, routes.rng),
            rng=routes.rng,
            rate=None if max_rate_per_second is None else RateLimit(max_rate_per_second, clock()),
            on_stored=on_stored,
        )
        self._runtime = runtime = routes.runtime
        self._lock = runtime.lock()
        self._changed = runtime.condition(self._lock)
        # The condition that the caller's thread waits for, if it waits.
        self._awaited: Callable[[], bool] | None = None
        # Outcomes of attempts; None only wakes the sender's thread.
        self._events: queues.SimpleQueue[tuple[PendingBatch, SendOutcome] | None] = runtime.queue()
        # The end of each queue after the last row that it has acknowledged.
        self._ends: dict[MessageQueue, int] = {}
        # A proxy answers for several brokers. With ``requireStoreOk=false`` rows may be lost.
        self._compares_ends = options.require_store_ok and not options.over_grpc
        self._source: BatchSource[Any] | None = None
        self._reading = False
        self._closing = False
        self._crash: BaseException | None = None
        self._thread: threading.Thread | None = None

    def write(self, rows: Iterable[T], source: BatchSource[T]) -> None:
        """Send the batches that `source` makes of all `rows`; return when each is acknowledged.

        Raises a DeliveryError that says how many rows could not be stored, where and why, or with ``onError=fail`` an
        InvalidRowError for a row that no broker could store; rows before it may be stored.
        """
        if self._source is not None:
            raise RocketMQError("a BatchSender writes once: create another one with the same client instance")
        self._source = source
        try:
            for some in self._read(rows):
                self._start()
                for batch, queue in self._combined(source.add(some, self._clock())):
                    self._offer(batch, queue)
                    self._divert(source)
                # Batches of topics without a route would not be sent while the next rows are awaited.
                for topic in source.new_topics():
                    self.routes.look_up(topic)
                self._wait_for_lingering()
            waiting = True
            while waiting:
                for batch, queue in self._combined(source.flush()):
                    self._start()
                    self._offer(batch, queue)
                with self._changed:
                    self._wait_for(lambda: self._pipeline.is_empty)
                    self._raise_failure()
                waiting = self._divert(source)
        except RocketMQError as exc:
            self._await_outcomes()
            exc.args = (f"{exc}. {self._account()}", *exc.args[1:])
            raise
        finally:
            self._closing = True
            self._events.put(None)
            if self._thread is not None:
                self._thread.join()

    def _read(self, rows: Iterable[T]) -> Iterator[T]:
        """Yield the rows; while the next ones are awaited, the other thread may send batches that are not full."""
        iterator = iter(rows)
        while True:
            self._reading = True
            try:
                some = next(iterator, None)
            finally:
                # Taking the lock waits until the other thread has left the source.
                with self._lock:
                    self._reading = False
            if some is None:
                return
            self._raise_failure()
            yield some

    def _combined(self, ready: Iterator[Ready]) -> Iterator[Ready]:
        """Return the batches to send for those of the source."""
        return ready

    def _start(self) -> None:
        if self._thread is None:
            self._thread = self._runtime.start(self._run, "rocketmq-producer")

    def _offer(self, batch: EncodedBatch, queue: MessageQueue | None) -> None:
        self.routes.look_up(batch.topic)
        with self._changed:
            if not self._has_room(batch):
                self._wait_for(lambda: self._has_room(batch, plenty=True))
            self._raise_failure()
            self._pipeline.offer(batch, queue, self._clock())
            self._dispatch()

    def _divert(self, source: BatchSource[Any]) -> bool:
        """Skip the rows that servers rejected, or send them as dead letters; return whether there were any."""
        diverted = False
        while self._options.on_error != "fail":
            with self._changed:
                rejected = self._pipeline.rejections()
            if not rejected:
                break
            diverted = True
            for batch, queue in source.reject(rejected, self._clock()):
                self._offer(batch, queue)
        return diverted

    def _wait_for_lingering(self) -> None:
        """Wait for room if the other thread has sent incomplete groups, which it does without a wait."""
        limit = self._options.max_in_flight_bytes
        with self._changed:
            if self._pipeline.pending_bytes > limit:
                self._wait_for(lambda: self._pipeline.pending_bytes <= limit * _PLENTY)
                self._raise_failure()

    def _has_room(self, batch: EncodedBatch, *, plenty: bool = False) -> bool:
        pending = self._pipeline.pending_bytes
        grouped = self._source.pending_bytes if self._source else 0
        # A caller that waits for room waits for enough to continue for a while.
        limit = self._options.max_in_flight_bytes * (_PLENTY if plenty else 1.0)
        return not pending or pending + grouped + batch_weight(batch) <= limit

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition or a failure; the lock is held."""
        self._awaited = condition
        self._changed.wait_for(lambda: condition() or self._failure is not None)
        self._awaited = None

    def _await_outcomes(self) -> None:
        """Wait for outcomes, at most ``sendMsgTimeout``, so that the error of a failed write has exact numbers."""
        with self._changed:
            self._pipeline.stop()
            self._changed.wait_for(
                lambda: not self._pipeline.in_flight or self._crash is not None, self._options.send_msg_timeout / 1000
            )

    @property
    def _failure(self) -> BaseException | None:
        return self._pipeline.failure if self._crash is None else self._crash

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _account(self) -> str:
        with self._lock:
            unfinished = self._pipeline.unfinished()
            taken = self._source.taken_rows if self._source else 0
            not_sent = taken - self._pipeline.stored_rows - unfinished.unknown
            stored = "; ".join(self._recorder.lines()) or "none"
            sent = self._pipeline.stored_rows + unfinished.unknown
        text = f"Rows of this task {self._done}: {stored}. Read but not sent: {not_sent}"
        if not sent:
            return text
        where = ", ".join(f"{broker} {rows}" for broker, rows in unfinished.unknown_by_broker.items())
        where = f" ({where}, sent, perhaps stored)" if where else ""
        return f"{text}; outcome unknown: {unfinished.unknown}{where}. {self._retry}"

    def _dispatch(self) -> None:
        """Start every attempt that may start now; the lock is held, and no attempt blocks."""
        for dispatch in self._pipeline.dispatches(self._clock()):
            self._send(dispatch)

    def _send(self, dispatch: Dispatch) -> None:
        pending, queue = dispatch.pending, dispatch.queue
        on_outcome = partial(self._on_sent, pending, queue, self._ends.get(queue, -1))
        self._instance.transport.send(self._request(dispatch), dispatch.timeout, on_outcome, within=dispatch.within)

    def _on_sent(self, pending: PendingBatch, sent_to: MessageQueue, end: int, outcome: SendOutcome) -> None:
        """Take the outcome of a request, on the transport's thread; its queue had ended at `end` when it was sent."""
        if outcome.status is not None and self._compares_ends:
            outcome = self._compare_end(pending, sent_to, end, outcome)
        self._events.put((pending, outcome))

    def _compare_end(self, pending: PendingBatch, sent_to: MessageQueue, end: int, outcome: SendOutcome) -> SendOutcome:
        """Note where the queue of stored rows ends now; return an error if it ended at `end` before, and lost rows."""
        queue, first = outcome.queue, offset_of(pending.batch, outcome)
        if first < 0:
            return outcome
        self._ends[queue] = max(self._ends.get(queue, 0), first + pending.batch.rows)
        if sent_to == queue and first < end:
            return replace(outcome, status=None, error=lost_tail(queue, end, first, self._after_loss))
        return outcome

    def _request(self, dispatch: Dispatch, batch: EncodedBatch | None = None) -> SendRequest:
        dispatch.pending.born_timestamp = born = int(self._runtime.wall_clock() * 1000)
        return SendRequest(
            batch or dispatch.pending.batch,
            dispatch.queue,
            broker_vip_channel(dispatch.address) if self._options.vip_channel_enabled else dispatch.address,
            self._options.producer_group,
            self._options.connection.create_topic_key,
            self._options.connection.default_topic_queue_nums,
            born,
            unit_mode=self._options.unit_mode,
            write_by=self._write_by,
        )

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_events()
        except BaseException as exc:
            with self._changed:
                self._crash = exc
                self._changed.notify_all()

    def _take_events(self) -> None:
        """Wait for an outcome or the next due time, and act on it."""
        with self._lock:
            due = self._pipeline.next_wakeup(self._clock())
        pause = _LINGER_TICK if due is None else min(_LINGER_TICK, max(0.0, due - self._clock()))
        try:
            event = self._events.get(timeout=pause)
        except queues.Empty:
            event = None
        with self._changed:
            now = self._clock()
            if event is None:
                self._pipeline.check_overdue(now)
            while event is not None:
                self._pipeline.complete(*event, now)
                event = None if self._events.empty() else self._events.get()
            if self._reading and self._source is not None:
                # For topics without a route the caller's thread finds it, or raises within seconds.
                routes = self._instance.routes
                late = self._source.expired(now, lambda topic: routes.cached(topic) is not None)
                try:
                    for batch, queue in self._combined(late):
                        self._pipeline.offer(batch, queue, now)
                except RocketMQError as exc:
                    # Of a row that no broker could store, for example. The caller's thread raises it.
                    self._pipeline.failure = self._pipeline.failure or exc
            self._dispatch()
            # Not at every outcome: a needless wakeup costs more than sending a message.
            if self._failure is not None or (self._awaited and self._awaited()):
                self._changed.notify_all()


class OnewaySender(BatchSender):
    """Sends without acknowledgements: ``sendMode=oneway`` (docs/internals/producer.md#one-way-sends).

    The caller's thread sends, and the socket holds it up: there is no other thread, and no window.
    """

    _done: ClassVar[str] = "sent without acknowledgement (perhaps stored)"

    def _start(self) -> None:
        return

    def _offer(self, batch: EncodedBatch, queue: MessageQueue | None) -> None:
        self.routes.look_up(batch.topic)
        self._pipeline.offer(batch, queue, self._clock())
        self._dispatch()
        self._raise_failure()
        while (due := self._pipeline.next_wakeup(self._clock())) is not None:
            self._runtime.sleep(max(0.0, due - self._clock()))
            self._dispatch()
            self._raise_failure()

    def _send(self, dispatch: Dispatch) -> None:
        error: RocketMQError | None = None
        try:
            self._instance.transport.send_oneway(self._request(dispatch), min(dispatch.timeout, dispatch.within))
        except RocketMQError as exc:
            error = exc
        # The status is ours, not a broker's: the pipeline counts it as sent, never as stored.
        status = SendStatus.SEND_OK if error is None else None
        self._pipeline.complete(dispatch.pending, SendOutcome(dispatch.queue, status, error, 0.0), self._clock())
