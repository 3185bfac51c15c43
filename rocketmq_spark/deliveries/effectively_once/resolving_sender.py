"""Sends the rows of a task with ``delivery=effectivelyOnce``: it finds out whether a request is stored before a retry.

An attempt whose outcome is unknown, or "stored, but not safe", is resolved: a thread waits until no earlier request can
be stored any more, and reads the queue. For the pipeline the attempt takes so much longer. If the rows are there, by
their contents and in a run that no other request has (`find_runs`), they count as acknowledged. If not, the retry rules
apply.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Final, NamedTuple, TypeAlias

from rocketmq_spark.arrow.content import ContentHash
from rocketmq_spark.deliveries.effectively_once.lease import Lease
from rocketmq_spark.deliveries.effectively_once.runs import NOT_STORED, PARTLY, Sought, find_runs
from rocketmq_spark.deliveries.effectively_once.stored import hashes_of
from rocketmq_spark.deliveries.effectively_once.stored_rows import QueueRows, StoredRows
from rocketmq_spark.deliveries.log.records import QueueNums
from rocketmq_spark.deliveries.log.scan import UNKNOWN, Floor, Known, lowest
from rocketmq_spark.errors import DeliveryError, RocketMQError
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import MessageQueue, SendOutcome, SendStatus
from rocketmq_spark.sink.in_flight import Dispatch, PendingBatch
from rocketmq_spark.sink.pipeline import OnStored
from rocketmq_spark.sink.routes import RouteFinder
from rocketmq_spark.sink.sender import BatchSender
from rocketmq_spark.sink.task import SendRules

ReadStored: TypeAlias = Callable[[Mapping[MessageQueue, Floor], bool], Sequence[QueueRows]]
"""Return the rows of this attempt that queues of one broker have from their floors on. It blocks.

With True, requests without an answer may still be stored, so it waits for them first. Raises a RocketMQError if the
broker does not answer within ``deliveryTimeoutMs``.
"""


class Resumption(NamedTuple):
    """What the sender of an attempt knows of its partition."""

    read_stored: ReadStored
    token: str  # Of the attempt
    content: ContentHash
    # The floors of the rows of the attempt, by queue. Those of other queues are unknown.
    floors: Mapping[MessageQueue, Floor]
    # Where queues ended when the attempt read them. Rows below these offsets are of earlier attempts.
    ends: Mapping[MessageQueue, int]
    # The brokers that rows may go to, and how many of their queues. Later attempts read these queues.
    queue_nums: QueueNums
    # The rows that earlier attempts have stored; None: there was no earlier attempt.
    stored: StoredRows | None
    lease: Lease

    def __repr__(self) -> str:
        # With the token a user can imitate rows of the attempt.
        return f"<Resumption of an attempt that sends to {self.queue_nums}>"

    def rules(self) -> SendRules:
        """Return how the attempt sends its rows."""
        open_sender = partial(ResolvingSender, resumption=self)
        return SendRules(open_sender=open_sender, queue_nums=self.queue_nums, attempt=self.token, stored=self.stored)


# What the next attempt does after an error of `lost_tail`.
SEND_MISSING: Final = "The next attempt reads which rows are stored, and sends the others"


class _UnknownOutcomeError(DeliveryError):
    maybe_stored = True


class _OtherRequestError(DeliveryError):
    """The rows of an acknowledged request were taken for those of another request with the same contents."""

    maybe_stored = True
    retriable = True


@dataclass(slots=True)
class _Run:
    """Rows of the attempt in a queue, and the run of the request whose outcome was known next.

    A request keeps the last run from before it was sent. So the later runs can be found, and the others are forgotten.
    """

    first: int
    stop: int
    following: _Run | None = None


class _Unknown(NamedTuple):
    """A request to resolve."""

    pending: PendingBatch
    outcome: SendOutcome
    floor: Floor
    last_run: _Run  # When it was sent


class ResolvingSender(BatchSender):
    """Resolves attempts whose outcome is unknown."""

    _retry: ClassVar[str] = "A retry of the task reads which rows are stored, and sends the others"
    _after_loss: ClassVar[str] = SEND_MISSING

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
        self._content = resumption.content
        # Offsets below the rows of all later requests, by queue: known before the attempt, and observed by it.
        self._floors = resumption.floors
        self._ends = dict(resumption.ends)
        # The last run of each queue, and the runs of resolved requests.
        self._runs: dict[MessageQueue, _Run] = {}
        self._resolved_runs: defaultdict[MessageQueue, list[_Run]] = defaultdict(list)
        # Attempts to resolve, by broker; a broker with an entry has a thread.
        self._unknown: dict[str, list[_Unknown]] = {}
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
        queue = dispatch.queue
        end, last_run = self._ends.get(queue, -1), self._runs.get(queue)
        if last_run is None:
            last_run = self._runs.setdefault(queue, _Run(0, 0))
        self._instance.transport.send(
            self._request(dispatch),
            dispatch.timeout,
            partial(self._on_outcome, dispatch.pending, queue, end, last_run),
            within=dispatch.within,
        )

    def _on_outcome(
        self, pending: PendingBatch, sent_to: MessageQueue, end: int, last_run: _Run, outcome: SendOutcome
    ) -> None:
        """Take the outcome of a request, on the transport's thread.

        When the request was sent, its queue ended at `end` or later; -1 if the attempt did not know the end.
        """
        if outcome.status is SendStatus.SEND_OK:
            queue, first = outcome.queue, outcome.queue_offset
            outcome = self._compare_end(pending, sent_to, end, outcome)
            if outcome.error is None and not self._claim(queue, _Run(first, first + pending.batch.rows)):
                text = f"the rows of a request to {queue} count as those of another one"
                outcome = replace(outcome, status=None, error=_OtherRequestError(text))
        error = outcome.error
        if outcome.status is not SendStatus.SEND_OK and (error is None or (error.maybe_stored and error.retriable)):
            floor = self._floors.get(sent_to, UNKNOWN) if end < 0 else Known(end)
            self._add_unknown(_Unknown(pending, outcome, floor, last_run))
            return
        self._events.put((pending, outcome))

    def _claim(self, queue: MessageQueue, run: _Run) -> bool:
        """Note the run of an acknowledged request; return False if it is that of a resolved one."""
        with self._unknown_lock:
            if any(run.first < other.stop and other.first < run.stop for other in self._resolved_runs.get(queue, ())):
                return False
            self._append(queue, run)
            return True

    def _append(self, queue: MessageQueue, run: _Run) -> None:
        last = self._runs.get(queue)
        if last is not None:
            last.following = run
        self._runs[queue] = run

    def _add_unknown(self, unknown: _Unknown) -> None:
        broker_name = unknown.outcome.queue.broker_name
        # This takes longer than a request, so the pipeline's check of lost outcomes does not apply.
        unknown.pending.sent_at = math.inf
        with self._unknown_lock:
            idle = broker_name not in self._unknown
            self._unknown.setdefault(broker_name, []).append(unknown)
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
            try:
                resolved = self._resolved(unknown)
            except Exception as exc:
                resolved = [(pending, _unresolved(outcome, exc)) for pending, outcome, _, _ in unknown]
            for event in resolved:
                self._events.put(event)

    def _resolved(self, unknown: Sequence[_Unknown]) -> list[tuple[PendingBatch, SendOutcome]]:
        """Return the outcomes of requests whose answers are lost, by the rows that their queues have."""
        floors: defaultdict[MessageQueue, list[Floor]] = defaultdict(list)
        for one in unknown:
            floors[one.outcome.queue].append(one.floor)
        late = any(one.outcome.error is not None for one in unknown)
        stored = self._read_stored({queue: lowest(values) for queue, values in floors.items()}, late)
        sought = []
        for pending, outcome, floor, _ in unknown:
            start = floor.offset if isinstance(floor, Known) else 0
            sought.append(Sought(outcome.queue, start, hashes_of(self._content, pending.batch)))
        with self._unknown_lock:
            # An answer that comes after this finds its run taken.
            firsts = find_runs(sought, stored, _runs_since(unknown))
            for one, first in zip(unknown, firsts, strict=True):
                if first >= 0:
                    run = _Run(first, first + one.pending.batch.rows)
                    self._append(one.outcome.queue, run)
                    self._resolved_runs[one.outcome.queue].append(run)
        return [(one.pending, _outcome_of(one.outcome, first)) for one, first in zip(unknown, firsts, strict=True)]


def _runs_since(unknown: Sequence[_Unknown]) -> Iterator[tuple[MessageQueue, int, int]]:
    """Yield the runs of requests whose outcome became known after one of these was sent, some of them twice."""
    for one in unknown:
        run = one.last_run.following
        while run is not None:
            yield one.outcome.queue, run.first, run.stop
            run = run.following


def _outcome_of(outcome: SendOutcome, first: int) -> SendOutcome:
    """Return the outcome of a request whose first row has this offset, or that is not found (`find_runs`)."""
    if first == NOT_STORED:
        return outcome
    if first == PARTLY:
        # A broker stores a batch as a whole, but after a power failure it may have lost the end.
        error = _UnknownOutcomeError(f"some rows of a batch are stored in {outcome.queue}, the others are not")
        return replace(outcome, status=None, error=error)
    return replace(outcome, queue_offset=first, status=SendStatus.SEND_OK, error=None)


def _unresolved(outcome: SendOutcome, exc: Exception) -> SendOutcome:
    cause = outcome.error or outcome.status
    error = _UnknownOutcomeError(f"it is unknown whether the rows are stored in {outcome.queue} ({cause}): {exc}")
    error.__cause__ = exc
    return replace(outcome, status=None, error=error)
