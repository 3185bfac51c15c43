"""The one loop that ties the pieces: record batches in, every row acknowledged on return.

    record batch -> batcher -> (encoded batch, queue) -> pipeline -> transport -> outcome -> pipeline -> recorder

Rule 1: the caller's thread reads, encodes and waits for room; the producer's own thread takes outcomes and sends
        again. So a retry never waits for an upstream that is slow to give its next record batch.
Rule 2: one lock guards pipeline, batcher and recorder; nothing blocks while holding it.
Rule 3: `write` returns only when every row is stored; else it raises, and says how many rows are stored, not sent
        and unknown, per broker.
Rule 4: nothing is opened before the first row.

Follows design.md section 2.
"""

from __future__ import annotations

import logging
import queue as queues
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Generic, Protocol, TypeVar

from rocketmq_spark.errors import DeliveryError, RocketMQError, RouteNotFoundException
from rocketmq_spark.message import EncodedBatch, MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.namespace import wrap
from rocketmq_spark.options import SinkOptions
from rocketmq_spark.producer.client_instance import ClientInstance
from rocketmq_spark.producer.delivery import Delivery, Dispatch, batch_weight, broker_vip_channel
from rocketmq_spark.producer.heart_beat import API_TIMEOUT
from rocketmq_spark.producer.pipeline import OnStored, SendPipeline
from rocketmq_spark.producer.rate import RateLimit
from rocketmq_spark.producer.route_cache import TopicPublishInfo
from rocketmq_spark.producer.selector import selector_of

logger = logging.getLogger("rocketmq_spark.producer")

RowsT = TypeVar("RowsT", contravariant=True)

_NO_NAME_SERVER = 10004
# A proxy that was asked for a topic before it was created keeps that answer for 20 s, and gives it once more then. On a
# real one: known after 21 s where it was asked every second, after 27 s where every 4.5 s. Seconds.
_PROXY_FORGETS = 35.0
# How often the producer's thread looks for groups that have waited long enough, seconds.
_LINGER_TICK = 0.1
# Which part of maxInFlightBytes may be pending still when a caller that waited for room goes on.
_PLENTY = 0.75


class Batcher(Protocol[RowsT]):
    """Turns rows into encoded batches; both encoders fit it. Pairs are (batch, its only queue or None for any)."""

    @property
    def pending_bytes(self) -> int:
        """What waits in batches that are not full, bytes."""
        ...

    @property
    def taken_rows(self) -> int:
        """Every row ever handed to `add`, without those that are left out."""
        ...

    def add(self, rows: RowsT, now: float) -> Iterator[tuple[EncodedBatch, MessageQueue | None]]:
        """Take rows in, and yield the batches that are full."""
        ...

    def expired(self, now: float, known: Callable[[str], bool]) -> Iterator[tuple[EncodedBatch, MessageQueue | None]]:
        """Yield the batches of `known` topics that have waited long enough for more rows."""
        ...

    def flush(self) -> Iterator[tuple[EncodedBatch, MessageQueue | None]]:
        """Yield all that is left."""
        ...


class BatchSender(Generic[RowsT]):
    """Sends the rows of one partition task.

    Parameters
    ----------
    options : SinkOptions
    instance : ClientInstance
        Shared with other producers of this process; its group is counted in by the caller.
    recorder : Recorder
        Takes counts and latencies; read it only after `write` has returned or raised.
    clock : callable, default time.monotonic
        Seconds, for budgets and latencies.
    wall_clock : callable, default time.time
        Seconds since the epoch, for born timestamps.
    rng : random.Random, optional
        For round robin starts and jitter.
    fixed_queues : sequence of MessageQueue, optional
        The queues of the whole write (``ordered``), whatever becomes of the route.
    max_rate_per_second : float, optional
        This task's share of ``maxRatePerSecond``.
    on_stored : callable, optional
        Told every batch that was stored, and its answer; must neither block nor raise.
    servers_reached : bool, default False
        Somebody has had an answer from these name servers (or proxies) for this write, a driver for its tasks: their
        addresses are right, and where none can be reached now they are gone for a while.
    """

    # What an account says of the rows that are done.
    _done: ClassVar[str] = "stored"

    def __init__(
        self,
        options: SinkOptions,
        instance: ClientInstance,
        recorder: Recorder,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        fixed_queues: Sequence[MessageQueue] | None = None,
        max_rate_per_second: float | None = None,
        on_stored: OnStored | None = None,
        servers_reached: bool = False,
    ) -> None:
        self._options = options
        self._instance = instance
        self._recorder = recorder
        self._clock = clock
        self._wall_clock = wall_clock
        self._rng = rng or random.Random()
        self._fixed_queues = fixed_queues
        self._servers_reached = servers_reached
        rate = None if max_rate_per_second is None else RateLimit(max_rate_per_second, clock())
        self._pipeline = SendPipeline(
            options,
            instance.faults,
            recorder,
            publish_info=instance.routes.cached,
            refresh_route=instance.refresh_route,
            selector_of=lambda _topic: selector_of(options, instance.faults, self._rng),
            rng=self._rng,
            rate=rate,
            on_stored=on_stored,
        )
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # What the caller's thread waits for, if it does.
        self._awaited: Callable[[], bool] = _never
        # Outcomes of attempts; None wakes the producer's thread for something else.
        self._events: queues.SimpleQueue[tuple[Delivery, SendOutcome] | None] = queues.SimpleQueue()
        self._batcher: Batcher[RowsT] | None = None
        self._reading = False
        self._closing = False
        self._crash: BaseException | None = None
        self._thread: threading.Thread | None = None

    def publish_queues(self, topic: str) -> Sequence[MessageQueue]:
        """Return the queues of the whole write, if it has such, or a topic's writable ones, looking its route up.

        Until a first route has been found by this process, and for a topic that nobody knows, patience is
        ``sendMsgTimeout`` for each name server (or endpoint); afterwards, and from the start where `servers_reached`, a
        name server that is gone is waited for until ``deliveryTimeoutMs``. A topic that proxies do not know is waited
        for 35 s (at most ``deliveryTimeoutMs``): it may just have been created.

        Raises
        ------
        MQClientException
            10004 without any name server, 10005 (`RouteNotFoundException`) when patience is over.
        """
        if self._fixed_queues and topic == self._options.topic:
            return self._fixed_queues
        return self.publish_info(topic).queues

    def publish_info(self, topic: str) -> TopicPublishInfo:
        """Return a topic's route, with the patience of `publish_queues`."""
        return self._find_route(wrap(self._options.wrapped_namespace, topic))

    def write(self, batches: Iterable[RowsT], batcher: Batcher[RowsT]) -> None:
        """Send every row of `batches`; return when each is stored and acknowledged.

        Raises
        ------
        DeliveryError
            Some rows could not be stored; the text says how many, where and why.
        InvalidRowError
            A row that no broker could store; rows before it may be stored.
        RocketMQError
            This producer has written before.
        """
        if self._batcher is not None:
            raise RocketMQError("a BatchSender writes once: make another one, it shares the client instance")
        self._batcher = batcher
        try:
            for rows in self._read(batches):
                self._start()
                for batch, queue in batcher.add(rows, self._clock()):
                    self._offer(batch, queue)
            for batch, queue in batcher.flush():
                self._offer(batch, queue)
            self._drain()
        except RocketMQError as exc:
            self._settle()
            if type(exc) is DeliveryError:
                raise DeliveryError(f"{exc}. {self._account()}") from exc.__cause__
            exc.args = (f"{exc}. {self._account()}", *exc.args[1:])
            raise
        finally:
            self._close()

    def _read(self, batches: Iterable[RowsT]) -> Iterator[RowsT]:
        """Yield the batches, and let the other thread send what waits in groups while the next one is awaited."""
        iterator = iter(batches)
        while True:
            self._reading = True
            try:
                rows = next(iterator, None)
            finally:
                # Taking the lock waits for the other thread to be out of the batcher.
                with self._lock:
                    self._reading = False
            if rows is None:
                return
            self._raise_failure()
            yield rows

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="rocketmq-producer", daemon=True)
            thread.start()
            self._thread = thread

    def _offer(self, batch: EncodedBatch, queue: MessageQueue | None) -> None:
        batch = self._named(batch)
        self._find_route(batch.topic)
        with self._changed:
            if not self._has_room(batch):
                self._wait_for(lambda: self._has_room(batch, plenty=True))
            self._raise_failure()
            self._pipeline.offer(batch, queue, self._clock())
            self._dispatch()

    def _named(self, batch: EncodedBatch) -> EncodedBatch:
        """Return the batch under the name that brokers know its topic by."""
        if not self._options.wrapped_namespace:
            return batch
        return replace(batch, topic=wrap(self._options.wrapped_namespace, batch.topic))

    def _has_route(self, topic: str) -> bool:
        # Of others the caller's thread finds the route, or says within seconds why there is none.
        return self._instance.routes.cached(wrap(self._options.wrapped_namespace, topic)) is not None

    def _has_room(self, batch: EncodedBatch, *, plenty: bool = False) -> bool:
        pending = self._pipeline.pending_bytes
        grouped = self._batcher.pending_bytes if self._batcher else 0
        # Whoever waits for room waits for so much that it can go on for a while.
        limit = self._options.max_in_flight_bytes * (_PLENTY if plenty else 1.0)
        return not pending or pending + grouped + batch_weight(batch) <= limit

    def _drain(self) -> None:
        with self._changed:
            self._wait_for(lambda: self._pipeline.is_empty)
            self._raise_failure()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for something to be so, or for a failure; the lock is held."""
        self._awaited = condition
        self._changed.wait_for(lambda: condition() or self._failed)
        self._awaited = _never

    def _settle(self) -> None:
        """Wait a little for what is in flight, so that the account of a failed write is as exact as it can be."""
        with self._changed:
            self._pipeline.stop()
            self._changed.wait_for(
                lambda: not self._pipeline.in_flight or self._crash is not None, self._options.send_msg_timeout / 1000
            )

    @property
    def _failed(self) -> bool:
        return self._pipeline.failure is not None or self._crash is not None

    def _raise_failure(self) -> None:
        if self._crash is not None:
            raise self._crash
        if self._pipeline.failure is not None:
            raise self._pipeline.failure

    def _account(self) -> str:
        with self._lock:
            unfinished = self._pipeline.unfinished()
            taken = self._batcher.taken_rows if self._batcher else 0
            not_sent = taken - self._pipeline.stored_rows - unfinished.unknown
            stored = "; ".join(self._recorder.lines()) or "none"
        where = "".join(f"{broker} {rows}, " for broker, rows in unfinished.unknown_by_broker.items())
        return (
            f"Rows of this task {self._done}: {stored}. Read but not sent: {not_sent}; outcome unknown: "
            f"{unfinished.unknown} ({where}sent, perhaps stored). Rows sent again by a retry of the task may be stored "
            "twice"
        )

    def _find_route(self, topic: str) -> TopicPublishInfo:
        routes = self._instance.routes
        info = routes.cached(topic)
        if info is not None and info.ok:
            return info
        servers = len(self._options.route_servers)
        if not servers:
            raise RouteNotFoundException(f"looking up topic {topic}: the name server list is empty", _NO_NAME_SERVER)
        started, waits = self._clock(), 0
        short, longest = self._options.send_msg_timeout * servers / 1000, self._options.delivery_timeout_ms / 1000
        while True:
            try:
                return routes.find(topic, min(short, API_TIMEOUT * servers))
            except RouteNotFoundException as exc:
                # What once had a route is waited for; a wrong address or a wrong topic is not (design.md section 2).
                # Of an ordered write the driver has found the queues: a topic without them has lost its brokers.
                once_ok = routes.was_ok(topic) or (self._fixed_queues is not None and not exc.unreachable)
                known = self._servers_reached or not routes.is_empty
                lost = once_ok or (exc.unreachable and known)
                patience = longest if lost else short
                if self._options.over_grpc and not exc.unreachable:
                    patience = max(patience, min(_PROXY_FORGETS, longest))
                waits += 1
                pause = self._pipeline.backoff.delay(waits, self._rng)
                if self._clock() + pause >= started + patience:
                    raise
                logger.info("%s; trying again", exc)
                time.sleep(pause)

    def _dispatch(self) -> None:
        """Start every attempt that may start now; the lock is held, and no attempt blocks."""
        for dispatch in self._pipeline.dispatches(self._clock()):
            self._send(dispatch)

    def _send(self, dispatch: Dispatch) -> None:
        delivery, put = dispatch.delivery, self._events.put
        self._instance.transport.send(
            self._request(dispatch),
            dispatch.timeout,
            lambda outcome: put((delivery, outcome)),
            within=dispatch.within,
        )

    def _request(self, dispatch: Dispatch) -> SendRequest:
        return SendRequest(
            dispatch.delivery.batch,
            dispatch.queue,
            broker_vip_channel(dispatch.address) if self._options.vip_channel_enabled else dispatch.address,
            self._options.producer_group,
            self._options.create_topic_key,
            self._options.default_topic_queue_nums,
            int(self._wall_clock() * 1000),
            unit_mode=self._options.unit_mode,
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
        """Wait for an outcome or for the next time something is due, and act on it."""
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
            if self._reading and self._batcher is not None:
                for batch, queue in self._batcher.expired(now, self._has_route):
                    self._pipeline.offer(self._named(batch), queue, now)
            self._dispatch()
            # Not at every outcome: waking a thread for nothing costs more than sending a message.
            if self._failed or self._awaited():
                self._changed.notify_all()

    def _close(self) -> None:
        self._closing = True
        self._events.put(None)
        if self._thread is not None:
            self._thread.join()

    def __repr__(self) -> str:
        return f"<BatchSender {self._pipeline!r} {self._recorder!r}>"


def _never() -> bool:
    return False
