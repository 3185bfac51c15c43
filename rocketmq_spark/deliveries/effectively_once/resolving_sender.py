"""Sends the rows of a task with ``delivery=effectivelyOnce``: it finds out whether a request is stored before a retry.

An attempt whose outcome is unknown, or "stored, but not safe", is resolved: a thread waits until no earlier request can
be stored any more, and reads the queue. For the pipeline the attempt takes so much longer. If the rows are there, they
count as acknowledged. If not, the retry rules apply.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar, NamedTuple, TypeAlias

from rocketmq_spark.deliveries.effectively_once.lease import Lease
from rocketmq_spark.deliveries.effectively_once.stored_rows import StoredRows
from rocketmq_spark.errors import DeliveryError, RocketMQError
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import MessageQueue, SendOutcome, SendStatus
from rocketmq_spark.protocol.remoting.records import messages_in
from rocketmq_spark.sink.in_flight import Dispatch, PendingBatch
from rocketmq_spark.sink.pipeline import OnStored
from rocketmq_spark.sink.routes import RouteFinder
from rocketmq_spark.sink.sender import BatchSender
from rocketmq_spark.sink.task import SendRules

ReadStored: TypeAlias = Callable[[Mapping[MessageQueue, int], bool], StoredRows]
"""Return the rows of this partition that queues of one broker have from given offsets on. It blocks.

With True, requests without an answer may still be stored, so it waits for them first. Raises a RocketMQError if the
broker does not answer within ``deliveryTimeoutMs``.
"""


class Resumption(NamedTuple):
    """What the sender of an attempt knows of its partition."""

    read_stored: ReadStored
    partition_id: int
    # Offsets below all rows of this partition, by queue; 0 for other queues.
    start_offsets: Mapping[MessageQueue, int]
    # Where queues ended when the attempt read them. Rows below these offsets are of earlier attempts.
    ends: Mapping[MessageQueue, int]
    # The brokers that rows may go to. Later attempts read the queues of these brokers.
    broker_names: frozenset[str]
    # The rows that earlier attempts have stored; None: there was no earlier attempt.
    stored: StoredRows | None
    lease: Lease

    def rules(self) -> SendRules:
        """Return how the attempt sends its rows."""
        open_sender = partial(ResolvingSender, resumption=self)
        return SendRules(open_sender=open_sender, broker_names=self.broker_names, has_row_ids=True, stored=self.stored)


class _UnknownOutcomeError(DeliveryError):
    maybe_stored = True


def lost_tail(queue: MessageQueue, before: int, now: int) -> DeliveryError:
    """Return the error of a queue that ended at offset `before` during a write, and ends at `now`."""
    return _UnknownOutcomeError(
        f"queue {queue} ended at offset {before} before, and ends at {now} now: its broker has lost messages, perhaps "
        "acknowledged rows of this write (a power failure with flushDiskType=ASYNC_FLUSH, or a slave that lacked them "
        "became the master). The next attempt reads which rows are stored, and sends the others"
    )


class ResolvingSender(BatchSender):
    """Resolves attempts whose outcome is unknown."""

    _retry: ClassVar[str] = "A retry of the task reads which rows are stored, and sends the others"

    def __init__(
        self,
        routes: RouteFinder,
        recorder: Recorder,
        *,
        resumption: Resumption,
        max_rate_per_second: float | None = None,
        on_stored: OnStored | None = None,
    ) -> None:
        super().__init__(routes, recorder, max_rate_per_second=max_rate_per_second, on_stored=on_stored)
        self._read_stored = resumption.read_stored
        # Offsets below the rows of all later requests, by queue: known before the attempt, and observed by it.
        self._start_offsets = resumption.start_offsets
        self._ends = dict(resumption.ends)
        # Attempts to resolve, by broker; a broker with an entry has a thread.
        self._unknown: dict[str, list[tuple[PendingBatch, SendOutcome, int]]] = {}
        self._unknown_lock = routes.runtime.lock()
        self._lease = resumption.lease
        self._lease.on_read = self._on_lease_read

    def _dispatch(self) -> None:
        left = self._lease.left()
        # Rows wait until the lease is renewed.
        self._pipeline.paused = left <= 0.0
        # The transport compares this with its clock just before it writes: this process may be frozen until then.
        self._write_by = self._clock() + left
        super()._dispatch()

    def _on_lease_read(self, error: RocketMQError | None) -> None:
        """Go on sending, or stop, on the lease's thread."""
        if error is not None:
            with self._changed:
                self._pipeline.failure = self._pipeline.failure or error
                self._changed.notify_all()
        self._events.put(None)

    def _send(self, dispatch: Dispatch) -> None:
        end = self._ends.get(dispatch.queue, -1)
        self._instance.transport.send(
            self._request(dispatch),
            dispatch.timeout,
            partial(self._on_outcome, dispatch.pending, dispatch.queue, end),
            within=dispatch.within,
        )

    def _on_outcome(self, pending: PendingBatch, sent_to: MessageQueue, end: int, outcome: SendOutcome) -> None:
        """Take the outcome of a request, on the transport's thread.

        When the request was sent, its queue ended at `end` or later; -1 if the attempt did not know the end.
        """
        if outcome.status is SendStatus.SEND_OK:
            queue, first = outcome.queue, outcome.queue_offset
            if sent_to == queue and first < end:
                outcome = replace(outcome, status=None, error=lost_tail(queue, end, first))
            self._ends[queue] = max(self._ends.get(queue, 0), first + pending.batch.rows)
        elif outcome.error is None or (outcome.error.maybe_stored and outcome.error.retriable):
            self._add_unknown(pending, outcome, self._start_offsets.get(sent_to, 0) if end < 0 else end)
            return
        self._events.put((pending, outcome))

    def _add_unknown(self, pending: PendingBatch, outcome: SendOutcome, start_offset: int) -> None:
        broker_name = outcome.queue.broker_name
        # This takes longer than a request, so the pipeline's check of lost outcomes does not apply.
        pending.sent_at = math.inf
        with self._unknown_lock:
            idle = broker_name not in self._unknown
            self._unknown.setdefault(broker_name, []).append((pending, outcome, start_offset))
        if idle:
            self._runtime.start(partial(self._resolve_unknown, broker_name), f"rocketmq-resolve-{broker_name}")

    def _resolve_unknown(self, broker_name: str) -> None:
        """Resolve the attempts at one broker until there are no more."""
        while True:
            with self._unknown_lock:
                unknown = self._unknown.pop(broker_name)
                if unknown:
                    self._unknown[broker_name] = []
            if not unknown:
                return
            start_offsets: defaultdict[MessageQueue, list[int]] = defaultdict(list)
            for _, outcome, start_offset in unknown:
                start_offsets[outcome.queue].append(start_offset)
            late = any(outcome.error is not None for _, outcome, _ in unknown)
            try:
                stored = self._read_stored({queue: min(values) for queue, values in start_offsets.items()}, late)
                resolved = [(pending, self._resolved(pending, outcome, stored)) for pending, outcome, _ in unknown]
            except Exception as exc:
                resolved = [(pending, _unresolved(outcome, exc)) for pending, outcome, _ in unknown]
            for event in resolved:
                self._events.put(event)

    def _resolved(self, pending: PendingBatch, outcome: SendOutcome, stored: StoredRows) -> SendOutcome:
        """Return the outcome of a request whose answer is lost, by the rows that its queue has."""
        places = stored.places_of(messages_in(pending.batch))
        found = [place for place in places if place is not None]
        if len(found) == len(places):
            queue, first = found[0]
            if found != [(queue, first + number) for number in range(len(found))]:
                # Another producer has stored copies. So the metrics know no offsets.
                first = -1
            return replace(outcome, queue=queue, queue_offset=first, status=SendStatus.SEND_OK, error=None)
        if found:
            # A broker stores a batch as a whole, but after a power failure it may have lost the end.
            text = f"{len(found)} of {len(places)} rows of a batch are stored in {outcome.queue}; the others are not"
            return replace(outcome, status=None, error=_UnknownOutcomeError(text))
        return outcome


def _unresolved(outcome: SendOutcome, exc: Exception) -> SendOutcome:
    cause = outcome.error or outcome.status
    error = _UnknownOutcomeError(f"it is unknown whether the rows are stored in {outcome.queue} ({cause}): {exc}")
    error.__cause__ = exc
    return replace(outcome, status=None, error=error)
