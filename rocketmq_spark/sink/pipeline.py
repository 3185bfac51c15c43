"""The state machine of a task's encoded batches: it decides when and where each is sent, retried or split.

Rule 1: no clock, no thread, no transport: `now` (seconds) is an argument, and attempts are returned as `Dispatch`.
Rule 2: the write succeeds only if every batch is stored (``sendMode=oneway``: written). The first that fails ends it.
Rule 3: a batch gets its queue when it is sent, so that a retry can use another queue with the same bytes. A batch bound
        to a queue (as by key or column) waits for that queue.
Rule 4: retries follow docs/internals/sink.md#sink-retries, and their deadline docs/internals/producer.md#timeouts.
Rule 5: ``ordered`` and ``sendMode=sync`` follow docs/internals/sink.md#ordered-writes.
Rule 6: with ``maxRatePerSecond``, a batch's first attempt waits for its turn. This wait has no deadline.
Rule 7: after some errors a batch is split by docs/internals/sink.md#batch-splitting.

A batch is waiting (for its turn or a retry), ready, or in flight, until it is stored, split or failed.
"""

from __future__ import annotations

import heapq
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeAlias

from rocketmq_spark.errors import DeliveryError, RemotingTimeoutException, RocketMQError
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import EncodedBatch, MessageQueue, SendOutcome
from rocketmq_spark.options.kinds import MIB
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.batches import singles_of, split_batch
from rocketmq_spark.routing.fault_strategy import FaultSite, FaultStrategy, site_of
from rocketmq_spark.routing.retries import Backoff
from rocketmq_spark.routing.route_cache import TopicPublishInfo
from rocketmq_spark.routing.selectors import QueueSelector
from rocketmq_spark.sink.failures import delivery_error, no_queue, reason, rejection
from rocketmq_spark.sink.in_flight import (
    Dispatch,
    Parts,
    PendingBatch,
    RetryPolicy,
    SendQueues,
    Verdict,
    batch_weight,
    offset_of,
)
from rocketmq_spark.sink.limits import Pace, RateLimit, Window

logger = logging.getLogger("rocketmq_spark.producer")

# Beyond the deadline of every attempt, seconds.
_GRACE = 30.0

OnStored: TypeAlias = Callable[[PendingBatch, SendOutcome], None]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Rows without an acknowledgement: those certainly not stored, and those perhaps stored, by the last broker."""

    not_sent: int
    unknown_by_broker: Mapping[str, int]

    @property
    def unknown(self) -> int:
        """Rows that were sent and are perhaps stored."""
        return sum(self.unknown_by_broker.values())


@dataclass(eq=False, repr=False)
class SendPipeline:
    """The state machine of one partition task's batches. Not safe for threads: the sender holds a lock around it.

    `publish_info` returns the cached route of a topic, without a request. `refresh_route` requests a fresh route in the
    background. `on_stored` is called with every stored batch and its outcome, except with ``sendMode=oneway``. It must
    neither block nor raise.
    """

    options: SinkOptions
    faults: FaultStrategy
    recorder: Recorder
    _: KW_ONLY
    publish_info: Callable[[str], TopicPublishInfo | None]
    refresh_route: Callable[[str], None]
    new_selector: Callable[[], QueueSelector]
    rng: random.Random
    rate: RateLimit | None = None
    on_stored: OnStored | None = None
    # Bytes of the batches that are not stored yet.
    pending_bytes: int = field(default=0, init=False)
    stored_rows: int = field(default=0, init=False)
    failure: RocketMQError | None = field(default=None, init=False)
    paused: bool = field(default=False, init=False)  # No attempt starts
    # With ``onError`` other than fail: messages that a server rejected, and their bound queues, until `rejections`.
    _rejected: list[tuple[EncodedBatch, MessageQueue | None]] = field(default_factory=list, init=False)
    _failed: PendingBatch | None = field(default=None, init=False)
    _waiting: list[tuple[float, int, PendingBatch]] = field(default_factory=list, init=False)
    _sequence: int = field(default=0, init=False)
    _in_flight: set[PendingBatch] = field(default_factory=set, init=False)
    _unbatched: bool = field(default=False, init=False)
    _recheck_at: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        options, sync = self.options, self.options.send_mode == "sync"
        self._policy = RetryPolicy(options)
        self.backoff = Backoff(options.retry_backoff_ms, options.retry_backoff_max_ms, self.rng)
        self._ready = SendQueues(serial=options.ordered or sync, single=sync)
        # By broker name, and by topic.
        self._windows = defaultdict[str, Window](lambda: Window(options.max_in_flight))
        self._selectors = defaultdict[str, QueueSelector](self.new_selector)
        self._pace = Pace(options.batch_bytes, self.rng)

    @property
    def is_empty(self) -> bool:
        """True when every batch offered is stored (with ``sendMode=oneway``: sent)."""
        return not (self._in_flight or self._waiting or len(self._ready))

    @property
    def in_flight(self) -> int:
        """The number of requests without an outcome."""
        return len(self._in_flight)

    def offer(self, batch: EncodedBatch, queue: MessageQueue | None, now: float) -> None:
        """Accept a batch for `queue`, or for any queue of its topic (None)."""
        for part in (singles_of(batch) if self._unbatched else None) or (batch,):
            self.pending_bytes += batch_weight(part)
            pending = PendingBatch(part, queue)
            if self.rate is None:
                self._ready.add(pending)
            else:
                # Even if its turn has come: batches that were offered earlier may still wait there, and precede it.
                self._wait(pending, self.rate.reserve(part.rows, now))

    def dispatches(self, now: float) -> Iterator[Dispatch]:
        """Yield the attempts to make now; each is in flight from then on."""
        if self.failure is not None or self.paused:
            return
        while self._waiting and self._waiting[0][0] <= now:
            self._ready.add(heapq.heappop(self._waiting)[2])
        recheck = now >= self._recheck_at
        if recheck:
            self._recheck_at = now + self.options.retry_backoff_ms / 1000
        yield from self._ready.start_ready(
            lambda pending: self._dispatch(pending, now) if self.failure is None else (),
            lambda broker_name, cost: self._admits(broker_name, cost, now),
            recheck=recheck,
        )

    def next_wakeup(self, now: float) -> float | None:
        """Return when `dispatches` may yield something without another outcome, seconds; None: never."""
        if self.failure is not None or self.paused:
            return None
        times = [self._waiting[0][0]] if self._waiting else []
        if self._ready.open:
            rests = [self._pace.next_at, *(window.rest_until for window in self._windows.values())]
            times += [rest for rest in rests if rest > now]
            # A line that waits for a route, or for the end of an isolation, is woken by no outcome.
            times.append(self._recheck_at)
        return min(times, default=None)

    def complete(self, pending: PendingBatch, outcome: SendOutcome, now: float) -> None:
        """Accept an attempt's outcome: count the rows as stored, or decide on the next attempt."""
        self._in_flight.discard(pending)
        broker = outcome.queue.broker_name
        verdict = self._policy.decide(pending, outcome)
        self._note(pending, outcome, now)
        if verdict is Verdict.STORED:
            self.pending_bytes -= batch_weight(pending.batch)
            self.stored_rows += pending.batch.rows
            self._ready.release(pending)
            self._record(pending, outcome, now)
            return
        if self.failure is not None:
            # Nothing is sent any more. The batch only counts among the rows without an acknowledgement.
            self._wait(pending, now)
            return
        why = reason(outcome)
        if verdict is Verdict.GIVE_UP and self._reject(pending, outcome):
            return
        if verdict is Verdict.GIVE_UP and not self._split(pending, outcome, now):
            self.recorder.record_failure(broker, why, now)
            self._fail(pending, rejection(pending, outcome))
            return
        self.recorder.record_retry(broker, why, now)
        if verdict is Verdict.GIVE_UP:
            return
        pending.last_broker_name = broker
        pending.same_queue = verdict is Verdict.SAME_QUEUE
        wait = 0.0 if verdict is Verdict.OTHER_BROKER else self.backoff.delay(pending.waits)
        if self._fail_if_expired(pending, now + wait):
            self.recorder.record_failure(broker, why, now)
            return
        self._wait(pending, now + wait)

    def rejections(self) -> list[tuple[EncodedBatch, MessageQueue | None]]:
        """Return the messages that servers rejected as invalid rows since the last call, and their bound queues."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def check_overdue(self, now: float) -> None:
        """Fail if an attempt has no outcome long after its deadline, so that a broken transport cannot hang a write."""
        longest = self.options.delivery_timeout_ms / 1000 + _GRACE
        overdue = next((pending for pending in self._in_flight if now - pending.sent_at > longest), None)
        if overdue is not None:
            why = f"the transport reported no outcome within {longest:g} s, which is a bug in rocketmq_spark; report it"
            self._fail(overdue, why)

    def stop(self) -> None:
        """Send nothing more. Outcomes of requests in flight still count."""
        if self.failure is None:
            self.failure = DeliveryError("sending was stopped")

    def unfinished(self) -> Unfinished:
        """Count the rows without an acknowledgement."""
        unfinished = {pending for _, _, pending in self._waiting}.union(self._in_flight, self._ready)
        if self._failed is not None:
            unfinished.add(self._failed)
        not_sent = 0
        by_broker: Counter[str] = Counter()
        for pending in unfinished:
            if pending.maybe_stored or pending in self._in_flight:
                by_broker[pending.queue.broker_name if pending.queue else "none"] += pending.batch.rows
            else:
                not_sent += pending.batch.rows
        return Unfinished(not_sent, dict(sorted(by_broker.items())))

    def _record(self, pending: PendingBatch, outcome: SendOutcome, now: float) -> None:
        batch, queue = pending.batch, outcome.queue
        if self.options.send_mode == "oneway":
            self.recorder.record_sent(queue.broker_name, batch.rows, batch.nbytes, now)
            return
        offset = offset_of(batch, outcome)
        self.recorder.record_success(
            queue.broker_name, batch.rows, batch.nbytes, outcome.latency_ms, queue, offset, now
        )
        if self.on_stored is not None:
            self.on_stored(pending, outcome)

    def _split(self, pending: PendingBatch, outcome: SendOutcome, now: float) -> bool:
        """Replace a rejected batch by its parts; return whether it has parts."""
        parts: Sequence[EncodedBatch] | None = None
        if outcome.error is not None and outcome.error.unbatch:
            parts = singles_of(pending.batch)
            if parts is not None and not self._unbatched:
                logger.warning("%s; from now on this task sends its rows one by one, which is slower", outcome.error)
                self._unbatched = True
        elif outcome.error is not None and pending.batch.messages:
            # The error shall name the message.
            parts = singles_of(pending.batch)
        elif outcome.error is not None and outcome.error.split:
            parts = split_batch(pending.batch)
        if parts is None:
            return False
        # In reverse order, because retried batches go to the front of their line.
        for part in reversed(self._parts_of(pending, parts, small=pending.small)):
            self._wait(part, now)
        return True

    def _parts_of(self, pending: PendingBatch, parts: Sequence[EncodedBatch], small: bool) -> list[PendingBatch]:
        self.pending_bytes += sum(map(batch_weight, parts)) - batch_weight(pending.batch)
        return [pending.part(part, small=small) for part in parts]

    def _reject(self, pending: PendingBatch, outcome: SendOutcome) -> bool:
        """Put a message aside that is an invalid row by a server's limit, if ``onError`` allows it; return whether."""
        error = outcome.error
        if error is None or not error.invalid_row or pending.batch.batch or self.options.on_error == "fail":
            return False
        self.pending_bytes -= batch_weight(pending.batch)
        self._ready.release(pending)
        self._rejected.append((pending.batch, pending.bound))
        return True

    def _wait(self, pending: PendingBatch, until: float) -> None:
        self._sequence += 1
        heapq.heappush(self._waiting, (until, self._sequence, pending))

    def _dispatch(self, pending: PendingBatch, now: float) -> Dispatch | Parts | Collection[str]:
        """Start an attempt, or return parts to try instead, or the brokers that have no room for it."""
        info = self.publish_info(pending.batch.topic)
        if info is None or not self._has_queue(pending, info):
            self.refresh_route(pending.batch.topic)
            if pending.first_tried_at is None:
                pending.first_tried_at = now
            if self._expired(pending, now):
                self._fail(pending, no_queue(pending, self.options.delivery_timeout_ms))
            return ()
        if self._fail_if_expired(pending, max(now, self._pace.next_at)):
            return ()
        count = self._pace.parts(pending.batch.nbytes) if pending.first_tried_at is None and not pending.small else 1
        parts = split_batch(pending.batch, count) if count > 1 else None
        if parts is not None:
            return Parts(self._parts_of(pending, parts, small=True))
        queue = self._choose(pending, info, now)
        if not isinstance(queue, MessageQueue):
            # Before the first attempt, waiting for our own windows does not count.
            return queue
        if pending.first_tried_at is None:
            pending.first_tried_at = now
        self._windows[queue.broker_name].start(pending.cost)
        self._pace.start(pending.batch.nbytes, now)
        pending.queue = queue
        pending.sent_at = now
        self._in_flight.add(pending)
        left = pending.first_tried_at + self.options.delivery_timeout_ms / 1000 - now
        return Dispatch(pending, queue, info.addresses[queue.broker_name], self._attempt_timeout(pending), left)

    def _attempt_timeout(self, pending: PendingBatch) -> float:
        """Return ``sendMsgTimeout``, capped where Java caps it, plus the share for the size, seconds."""
        timeout, cap = self.options.send_msg_timeout, self.options.send_msg_max_timeout_per_request
        # As in Java, the last attempt before a wait has the whole timeout, for brokers that are slower than the cap.
        if cap > 0 and self._policy.follows_at_once(pending):
            timeout = min(timeout, cap)
        seconds = timeout / 1000 + pending.batch.nbytes / MIB
        # On a slow link the same deadline would end every attempt (docs/internals/grpc.md#deadlines).
        return seconds * 2**pending.timeouts if self.options.over_grpc else seconds

    def _has_queue(self, pending: PendingBatch, info: TopicPublishInfo) -> bool:
        """Return whether there is a queue for the batch, with or without room in its broker's window."""
        queue = pending.wanted_queue
        if queue is None or (queue in info.queue_set and queue.broker_name in info.addresses):
            return info.has_master
        # Only bound rows wait for a queue that is gone. Others use another one.
        pending.same_queue = False
        return pending.bound is None and info.has_master

    def _choose(self, pending: PendingBatch, info: TopicPublishInfo, now: float) -> MessageQueue | Collection[str]:
        """Return the queue to send to now, or the brokers that have no room."""
        full: set[str] = set()

        def admits(broker_name: str) -> bool:
            if broker_name not in info.addresses:
                return False
            if self._admits(broker_name, pending.cost, now):
                return True
            full.add(broker_name)
            return False

        queue = pending.wanted_queue
        if queue is not None:
            return queue if admits(queue.broker_name) else full
        selector = self._selectors[info.topic]
        if self._pace.is_on:
            # Tasks that go from broker to broker in the same order meet at the slowest one.
            selector.reset()
            if calm := selector.select(
                info, pending.last_broker_name, lambda name: admits(name) and not self._pace.avoids(name), now
            ):
                return calm
        return selector.select(info, pending.last_broker_name, admits, now) or full

    def _admits(self, broker_name: str, cost: float, now: float) -> bool:
        return now >= self._pace.next_at and self._windows[broker_name].admits(cost, now)

    def _note(self, pending: PendingBatch, outcome: SendOutcome, now: float) -> None:
        """Update window, fault table and route cache by an outcome."""
        broker = outcome.queue.broker_name
        window = self._windows[broker]
        error = outcome.error
        if error is None:
            window.success(pending.cost, outcome.latency_ms)
            self._pace.success(broker, outcome.latency_ms, pending.sent_at, now)
            self._isolate(FaultSite.RETURNED, broker, outcome.latency_ms, now)
            # Any answer means that the rows are stored, even if not safely.
            pending.maybe_stored = True
            return
        pending.last_error = error
        pending.maybe_stored |= error.maybe_stored
        pending.timeouts += isinstance(error, RemotingTimeoutException)
        if error.retriable:
            if window.trouble(pending.cost, pending.sent_at, now):
                window.rest(now + self.backoff.delay(window.troubles))
        else:
            window.release(pending.cost)
        if error.flow_control:
            self._pace.rejection(broker, outcome.latency_ms, pending.sent_at, now)
        # Flow control never isolates, because the broker works.
        if error.isolate:
            self._isolate(site_of(error), broker, outcome.latency_ms, now)
        if error.refresh_route:
            self.refresh_route(pending.batch.topic)

    def _isolate(self, site: FaultSite, broker: str, latency_ms: float, now: float) -> None:
        away_ms = self.faults.update(site, broker, latency_ms, now)
        if away_ms:
            self.recorder.record_isolation(broker, away_ms, now)

    def _expired(self, pending: PendingBatch, at: float) -> bool:
        began = pending.first_tried_at
        return began is not None and at >= began + self.options.delivery_timeout_ms / 1000

    def _fail_if_expired(self, pending: PendingBatch, at: float) -> bool:
        expired = self._expired(pending, at)
        if expired:
            self._fail(pending, f"gave up after deliveryTimeoutMs={self.options.delivery_timeout_ms}")
        return expired

    def _fail(self, pending: PendingBatch, why: str) -> None:
        if self.failure is None:
            self._failed = pending
            self.failure = delivery_error(pending, why)
