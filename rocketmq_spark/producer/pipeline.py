"""What becomes of each batch between its encoding and its acknowledgement.

Rule 1: no clock, no thread, no transport: `now` (seconds) comes in, decisions come out as `Dispatch` values.
Rule 2: every batch offered ends exactly once: stored, or as the reason of the failure.
Rule 3: a batch gets its queue when it is sent, not before, so that a retry can go elsewhere with the same bytes;
        a batch bound to a queue (by key, by column) waits for that queue.
Rule 4: flow control tries the same queue again; other retriable failures go to another broker first, then wait.
Rule 5: the whole of it is bounded by ``deliveryTimeoutMs``, counted from a batch's first try.
Rule 6: with ``ordered`` no batch goes before the one offered earlier for its queue is stored; with ``sendMode=sync``
        none goes before the one offered earlier is stored.
Rule 7: with a rate, a batch's first try waits for its turn; that waiting has no deadline.
Rule 8: a batch of which some message is refused is sent again in halves, until that message stands alone.
Rule 9: once a broker has said that it knows no batches, rows go one by one.

States of a delivery: ready -> in flight -> (stored | failed | waiting -> ready). Follows design.md section 2.
"""

from __future__ import annotations

import heapq
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from rocketmq_spark.errors import DeliveryError, RemotingTimeoutException, RocketMQError
from rocketmq_spark.message import EncodedBatch, MessageQueue, SendOutcome
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.namespace import unwrap
from rocketmq_spark.options import SinkOptions
from rocketmq_spark.producer.delivery import Delivery, Dispatch, Lines, batch_weight
from rocketmq_spark.producer.failure_text import delivery_error, no_queue, reason, refused_for_good
from rocketmq_spark.producer.fault_preset import FaultSite, site_of
from rocketmq_spark.producer.fault_strategy import FaultStrategy
from rocketmq_spark.producer.rate import RateLimit
from rocketmq_spark.producer.retry import Backoff, RetryPolicy, Verdict
from rocketmq_spark.producer.route_cache import TopicPublishInfo
from rocketmq_spark.producer.selector import QueueSelector
from rocketmq_spark.producer.window import Window
from rocketmq_spark.wire.batch_split import singles_of, split_batch

logger = logging.getLogger("rocketmq_spark.producer")

_MIB = 1024 * 1024

# Beyond the deadline of every attempt, seconds.
_GRACE = 30.0


OnStored: TypeAlias = Callable[[EncodedBatch, SendOutcome], None]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Rows of a pipeline that have no acknowledgement, by what is known of them.

    Parameters
    ----------
    not_sent : int
    unknown_by_broker : mapping of str to int
        Sent, perhaps stored, by the broker of the last attempt.
    """

    not_sent: int
    unknown_by_broker: Mapping[str, int]

    @property
    def unknown(self) -> int:
        """Rows that were sent, and are perhaps stored."""
        return sum(self.unknown_by_broker.values())


class SendPipeline:
    """The state machine of one partition task's batches.

    Not safe for threads: the producer holds a lock around it.

    Parameters
    ----------
    options : SinkOptions
    faults : FaultStrategy
        The client instance's.
    recorder : Recorder
    publish_info : callable
        ``topic -> TopicPublishInfo or None``; what is cached, without asking anybody.
    refresh_route : callable
        ``topic -> None``; asks for a fresh route in the background.
    selector_of : callable
        ``topic -> QueueSelector``; called once per topic.
    rng : random.Random
    rate : RateLimit or None, default None
    on_stored : callable, optional
        Told every batch that was stored, and its answer; must neither block nor raise.
    """

    def __init__(
        self,
        options: SinkOptions,
        faults: FaultStrategy,
        recorder: Recorder,
        *,
        publish_info: Callable[[str], TopicPublishInfo | None],
        refresh_route: Callable[[str], None],
        selector_of: Callable[[str], QueueSelector],
        rng: random.Random,
        rate: RateLimit | None = None,
        on_stored: OnStored | None = None,
    ) -> None:
        self._options = options
        self._faults = faults
        self._recorder = recorder
        self._publish_info = publish_info
        self._refresh_route = refresh_route
        self._selector_of = selector_of
        self._rng = rng
        self._rate = rate
        self._on_stored = on_stored
        self._policy = RetryPolicy.of_options(options)
        self.backoff = Backoff(options.retry_backoff_ms, options.retry_backoff_max_ms)
        self._windows: dict[str, Window] = {}
        self._selectors: dict[str, QueueSelector] = {}
        sync = options.send_mode == "sync"
        self._ready = Lines(serial=options.ordered or sync, single=sync)
        self._waiting: list[tuple[float, int, Delivery]] = []
        self._sequence = 0
        self._in_flight: set[Delivery] = set()
        self._failed: Delivery | None = None
        self._unbatched = False
        self._recheck_at = float("-inf")
        self.pending_bytes = 0
        self.stored_rows = 0
        self.failure: RocketMQError | None = None

    @property
    def is_empty(self) -> bool:
        """True when every batch offered is stored (or sent, where nobody acknowledges)."""
        return not (self._in_flight or self._waiting or len(self._ready))

    @property
    def in_flight(self) -> int:
        """Requests that have no outcome yet."""
        return len(self._in_flight)

    def offer(self, batch: EncodedBatch, queue: MessageQueue | None, now: float) -> None:
        """Take a batch over; `queue` is the only one it may go to, None means any."""
        for part in (singles_of(batch) if self._unbatched else None) or (batch,):
            self.pending_bytes += batch_weight(part)
            delivery = Delivery(part, queue)
            if self._rate is None:
                self._ready.add(delivery)
            else:
                # Even if its turn has come: what was offered before it may still be waiting there, and goes first.
                self._wait(delivery, self._rate.reserve(part.rows, now))

    def dispatches(self, now: float) -> Iterator[Dispatch]:
        """Yield the attempts to make now; each counts as in flight from then on."""
        if self.failure is not None:
            return
        while self._waiting and self._waiting[0][0] <= now:
            self._ready.add(heapq.heappop(self._waiting)[2])
        recheck = now >= self._recheck_at
        if recheck:
            self._recheck_at = now + self._options.retry_backoff_ms / 1000
        yield from self._ready.take(
            lambda delivery: self._dispatch(delivery, now) if self.failure is None else (),
            lambda broker_name, cost: self._window(broker_name).admits(cost, now),
            recheck=recheck,
        )

    def next_wakeup(self, now: float) -> float | None:
        """Return when `dispatches` may have something to yield without an outcome coming first (seconds)."""
        if self.failure is not None:
            return None
        times = [self._waiting[0][0]] if self._waiting else []
        if self._ready.open:
            times += [window.rest_until for window in self._windows.values() if window.rest_until > now]
            # No outcome wakes a line that waits for a route or for the end of an isolation.
            times.append(self._recheck_at)
        return min(times, default=None)

    def complete(self, delivery: Delivery, outcome: SendOutcome, now: float) -> None:
        """Take an attempt's outcome: count the rows as stored, or decide on the next attempt."""
        self._in_flight.discard(delivery)
        broker = outcome.queue.broker_name
        verdict = self._policy.decide(outcome, delivery.attempts, bound=delivery.bound is not None)
        self._note(delivery, outcome, now)
        if verdict is Verdict.STORED:
            self.pending_bytes -= delivery.weight
            self.stored_rows += delivery.batch.rows
            self._ready.release(delivery)
            self._record(delivery.batch, outcome, now)
            return
        if self.failure is not None:
            # Nothing is sent any more; it only counts among the rows that have no acknowledgement.
            self._wait(delivery, now)
            return
        why = reason(outcome)
        if verdict is Verdict.GIVE_UP and self._split(delivery, outcome, now):
            self._recorder.record_retry(broker, why, now)
            return
        if verdict is Verdict.GIVE_UP:
            self._recorder.record_failure(broker, why, now)
            self._fail(delivery, refused_for_good(delivery, outcome))
            return
        self._recorder.record_retry(broker, why, now)
        delivery.last_broker_name = broker
        delivery.same_queue = verdict is Verdict.SAME_QUEUE
        wait = 0.0
        if verdict is not Verdict.OTHER_BROKER:
            wait = self.backoff.delay(delivery.attempts.waits, self._rng)
        if self._expired(delivery, now + wait):
            self._recorder.record_failure(broker, why, now)
            self._fail_expired(delivery)
            return
        self._wait(delivery, now + wait)

    def check_overdue(self, now: float) -> None:
        """Fail if an attempt has had no outcome for so long that none will come.

        A transport ends every attempt; this is for the one that breaks that promise: the write then fails, and says
        that rows are unknown, where it would hang.
        """
        longest = self._options.delivery_timeout_ms / 1000 + _GRACE
        for delivery in self._in_flight:
            if now - delivery.sent_at > longest:
                self._fail(delivery, f"the transport gave no outcome within {longest:g} s")
                return

    def stop(self) -> None:
        """Send nothing more; outcomes of what is in flight still count."""
        if self.failure is None:
            self.failure = DeliveryError("sending was stopped")

    def unfinished(self) -> Unfinished:
        """Count the rows without an acknowledgement."""
        open_ones = {delivery for _, _, delivery in self._waiting} | self._in_flight
        open_ones.update(self._ready)
        if self._failed is not None:
            open_ones.add(self._failed)
        unknown = {delivery for delivery in open_ones if delivery.maybe_stored or delivery in self._in_flight}
        by_broker: Counter[str] = Counter()
        for delivery in unknown:
            by_broker[delivery.queue.broker_name if delivery.queue else "none"] += delivery.batch.rows
        return Unfinished(sum(delivery.batch.rows for delivery in open_ones - unknown), dict(sorted(by_broker.items())))

    def _record(self, batch: EncodedBatch, outcome: SendOutcome, now: float) -> None:
        queue = outcome.queue
        if self._options.wrapped_namespace:
            # Receipts have the names that the user gave.
            queue = replace(queue, topic=unwrap(queue.topic, self._options.wrapped_namespace))
        if self._options.send_mode == "oneway":
            self._recorder.record_sent(queue.broker_name, batch.rows, batch.nbytes, now)
            return
        self._recorder.record_success(
            queue.broker_name, batch.rows, batch.nbytes, outcome.latency_ms, queue, outcome.queue_offset, now
        )
        if self._on_stored is not None:
            self._on_stored(batch, outcome)

    def _split(self, delivery: Delivery, outcome: SendOutcome, now: float) -> bool:
        """Put the parts of a refused batch in its place, if it has parts."""
        parts: Sequence[EncodedBatch] | None = None
        if outcome.error is not None and outcome.error.unbatch:
            parts = singles_of(delivery.batch)
            if parts is not None and not self._unbatched:
                logger.warning("%s; from now on this task sends its rows one by one, which is slower", outcome.error)
                self._unbatched = True
        elif outcome.error is not None and outcome.error.split:
            parts = split_batch(delivery.batch)
        if parts is None:
            return False
        self.pending_bytes += sum(map(batch_weight, parts)) - delivery.weight
        # The last part first: what was tried before goes to the head of its line.
        for part in reversed(parts):
            self._wait(Delivery(part, delivery.bound, first_tried_at=delivery.first_tried_at), now)
        return True

    def _wait(self, delivery: Delivery, until: float) -> None:
        self._sequence += 1
        heapq.heappush(self._waiting, (until, self._sequence, delivery))

    def _window(self, broker_name: str) -> Window:
        window = self._windows.get(broker_name)
        if window is None:
            window = self._windows[broker_name] = Window(self._options.max_in_flight)
        return window

    def _dispatch(self, delivery: Delivery, now: float) -> Dispatch | Collection[str]:
        """Start an attempt, or return the brokers whose windows have no room for it."""
        info = self._publish_info(delivery.batch.topic)
        if info is None or not self._has_queue(delivery, info):
            self._refresh_route(delivery.batch.topic)
            self._begin(delivery, now)
            if self._expired(delivery, now):
                self._fail(delivery, no_queue(delivery, self._options.delivery_timeout_ms))
            return ()
        if self._expired(delivery, now):
            self._fail_expired(delivery)
            return ()
        queue = self._choose(delivery, info, now)
        if not isinstance(queue, MessageQueue):
            # The time in which our own windows have no room does not count before the first attempt.
            return queue
        self._begin(delivery, now)
        self._window(queue.broker_name).start(delivery.cost)
        delivery.queue = queue
        delivery.sent_at = now
        self._in_flight.add(delivery)
        left = (delivery.first_tried_at or now) + self._options.delivery_timeout_ms / 1000 - now
        return Dispatch(delivery, queue, info.addresses[queue.broker_name], self._attempt_timeout(delivery), left)

    def _attempt_timeout(self, delivery: Delivery) -> float:
        """Return ``sendMsgTimeout``, cut where Java cuts it, and its share for the size, seconds."""
        timeout, cap = self._options.send_msg_timeout, self._options.send_msg_max_timeout_per_request
        # The last attempt before a wait has the whole time, as Java's last has: else a broker that needs more than the
        # cap could never be written to.
        if cap > 0 and self._policy.follows_at_once(delivery.attempts, bound=delivery.bound is not None):
            timeout = min(timeout, cap)
        seconds = timeout / 1000 + delivery.batch.nbytes / _MIB
        # A call's deadline runs while its bytes are still on their way: on a slow link the same one again would end
        # every attempt.
        return seconds * 2**delivery.timeouts if self._options.over_grpc else seconds

    def _has_queue(self, delivery: Delivery, info: TopicPublishInfo) -> bool:
        """Tell whether a queue exists that the delivery may go to, with room in its broker's window or without."""
        wanted = delivery.wanted_queue
        if wanted is None or (wanted in info.queue_set and wanted.broker_name in info.addresses):
            return info.has_master
        # Only rows bound by a key wait for a queue that is gone; others look for another one.
        delivery.same_queue = False
        return delivery.bound is None and info.has_master

    def _choose(self, delivery: Delivery, info: TopicPublishInfo, now: float) -> MessageQueue | Collection[str]:
        """Return the queue to send to now, or the brokers whose windows have no room."""
        full: set[str] = set()

        def admits(broker_name: str) -> bool:
            if broker_name not in info.addresses:
                return False
            if self._window(broker_name).admits(delivery.cost, now):
                return True
            full.add(broker_name)
            return False

        wanted = delivery.wanted_queue
        if wanted is not None:
            return wanted if admits(wanted.broker_name) else full
        selector = self._selectors.get(info.topic)
        if selector is None:
            selector = self._selectors[info.topic] = self._selector_of(info.topic)
        return selector.select(info, delivery.last_broker_name, admits, now) or full

    def _note(self, delivery: Delivery, outcome: SendOutcome, now: float) -> None:
        """Tell the window, the fault table and the route cache what an outcome says of the broker."""
        broker = outcome.queue.broker_name
        window = self._window(broker)
        error = outcome.error
        if error is None:
            window.success(delivery.cost, outcome.latency_ms)
            self._isolate(FaultSite.RETURNED, broker, outcome.latency_ms, now)
            # Any answer but SEND_OK says that the rows are stored already, if not safely.
            delivery.maybe_stored = True
            return
        delivery.last_error = error
        delivery.maybe_stored |= error.maybe_stored
        delivery.timeouts += isinstance(error, RemotingTimeoutException)
        if error.retriable:
            if window.trouble(delivery.cost, delivery.sent_at, now):
                window.rest(now + self.backoff.delay(window.troubles, self._rng))
        else:
            window.release(delivery.cost)
        # Flow control never isolates: the broker is well, and asks for patience.
        if error.isolate:
            self._isolate(site_of(error), broker, outcome.latency_ms, now)
        if error.refresh_route:
            self._refresh_route(delivery.batch.topic)

    def _isolate(self, site: FaultSite, broker: str, latency_ms: float, now: float) -> None:
        away_ms = self._faults.update(site, broker, latency_ms, now)
        if away_ms:
            self._recorder.record_isolation(broker, away_ms, now)

    @staticmethod
    def _begin(delivery: Delivery, now: float) -> None:
        if delivery.first_tried_at is None:
            delivery.first_tried_at = now

    def _expired(self, delivery: Delivery, at: float) -> bool:
        began = delivery.first_tried_at
        return began is not None and at >= began + self._options.delivery_timeout_ms / 1000

    def _fail_expired(self, delivery: Delivery) -> None:
        self._fail(delivery, f"gave up after deliveryTimeoutMs={self._options.delivery_timeout_ms}")

    def _fail(self, delivery: Delivery, why: str) -> None:
        if self.failure is not None:
            return
        self._failed = delivery
        self.failure = delivery_error(delivery, why)

    def __repr__(self) -> str:
        return f"<SendPipeline ready={len(self._ready)} in_flight={len(self._in_flight)} waiting={len(self._waiting)}>"
