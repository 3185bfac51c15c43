"""Sends the half messages of a task, for ``delivery=exactlyOnce``.

Each half message needs its own request. For the pipeline, eight of them for one queue are a batch, which makes a row
cheaper. The batch is stored when its queue has acknowledged all of them. A retry to the same queue sends those that are
not acknowledged, and a retry to another queue sends all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Final, TypeAlias

from rocketmq_spark.deliveries.exactly_once.halves import half_properties
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import EncodedBatch, MessageQueue, Ready, SendOutcome, SendStatus
from rocketmq_spark.sink.in_flight import Dispatch, PendingBatch
from rocketmq_spark.sink.limits import BATCH_COST, SINGLE_COST, largest_batch
from rocketmq_spark.sink.pipeline import OnStored
from rocketmq_spark.sink.routes import RouteFinder
from rocketmq_spark.sink.sender import BatchSender
from rocketmq_spark.sink.task import SendRules

OnHalf: TypeAlias = Callable[[MessageQueue, int, SendOutcome], None]
"""Takes the queue, born time (epoch milliseconds) and acknowledgement of a half message."""

# Half messages of a batch: as many as cost a window as much as a batch.
_MOST_ROWS: Final = int(BATCH_COST / SINGLE_COST)
# A message of this size ends its batch, bytes: the pipeline is a small part of its cost.
_LARGE: Final = 16 * 1024


@dataclass(slots=True, eq=False)
class _Answers:
    """The acknowledgements of a batch's messages, which are all in one queue."""

    queue: MessageQueue
    # By position in the batch: born time and acknowledgement.
    stored: dict[int, tuple[int, SendOutcome]] = field(default_factory=dict)
    # Requests of the current attempt without an outcome, and the worst outcome of the others.
    awaited: int = 0
    failed: SendOutcome | None = None


class HalfSender(BatchSender):
    """Sends half messages; `on_half` gets each that is stored, with ``ordered`` in the order of its queue."""

    _done: ClassVar[str] = "prepared"
    _retry: ClassVar[str] = "None of them is visible to consumers before the driver commits the write"

    def __init__(
        self, routes: RouteFinder, recorder: Recorder, *, on_half: OnHalf, max_rate_per_second: float | None = None
    ) -> None:
        super().__init__(routes, recorder, max_rate_per_second=max_rate_per_second, on_stored=self._on_stored)
        self._on_half = on_half
        self._most_rows = _MOST_ROWS
        if max_rate_per_second is not None:
            self._most_rows = min(_MOST_ROWS, largest_batch(max_rate_per_second))
        self._answers: dict[PendingBatch, _Answers] = {}

    def _combined(self, ready: Iterator[Ready]) -> Iterator[Ready]:
        waiting: dict[tuple[str, MessageQueue | None], list[EncodedBatch]] = {}
        for message, queue in ready:
            key = message.topic, queue
            messages = waiting.setdefault(key, [])
            messages.append(message)
            if len(messages) == self._most_rows or message.nbytes >= _LARGE:
                yield _batch_of(waiting.pop(key)), queue
        for (_, queue), messages in waiting.items():
            yield _batch_of(messages), queue

    def _send(self, dispatch: Dispatch) -> None:
        pending = dispatch.pending
        messages = pending.batch.messages or (pending.batch,)
        answers = self._answers.get(pending)
        if answers is None or answers.queue != dispatch.queue:
            answers = self._answers[pending] = _Answers(dispatch.queue)
        missing = [position for position in range(len(messages)) if position not in answers.stored]
        answers.awaited, answers.failed = len(missing), None
        send = self._instance.transport.send
        for position in missing:
            request = self._request(dispatch, messages[position])
            on_outcome = partial(self._on_outcome, pending, answers, position, request.born_timestamp)
            send(request, dispatch.timeout, on_outcome, within=dispatch.within)

    def _on_outcome(
        self, pending: PendingBatch, answers: _Answers, position: int, born: int, outcome: SendOutcome
    ) -> None:
        """Take the outcome of a request, on the transport's thread; the last one is that of the attempt."""
        if outcome.status is SendStatus.SEND_OK:
            answers.stored[position] = born, outcome
        elif answers.failed is None or _badness(outcome) > _badness(answers.failed):
            answers.failed = outcome
        answers.awaited -= 1
        if not answers.awaited:
            # The offset is that of the half message. That of the row is known only after its commit.
            prepared = replace(outcome, queue=replace(outcome.queue, queue_id=-1))
            self._events.put((pending, answers.failed or prepared))

    def _on_stored(self, pending: PendingBatch, _: SendOutcome) -> None:
        answers = self._answers.pop(pending)
        for position in range(pending.batch.rows):
            self._on_half(answers.queue, *answers.stored[position])


def store_halves(brokers: Brokers, messages: Sequence[tuple[EncodedBatch, MessageQueue]], on_half: OnHalf) -> None:
    """Store half messages, each in its queue; raise as `BatchSender.write`."""
    brokers.send(HalfSender(brokers.routes(), Recorder("", -1, 0), on_half=on_half), messages)


def half_rules(group: str, timeout_ms: int, on_half: OnHalf) -> SendRules:
    """Return how a task sends its rows as half messages of a producer group; `on_half` gets each that is stored."""

    def open_sender(
        routes: RouteFinder,
        recorder: Recorder,
        *,
        max_rate_per_second: float | None,
        on_stored: OnStored | None,  # noqa: ARG001 - a half message has neither a trace nor a handle
    ) -> HalfSender:
        return HalfSender(routes, recorder, on_half=on_half, max_rate_per_second=max_rate_per_second)

    return SendRules(open_sender=open_sender, half_properties=half_properties(group, timeout_ms))


def _batch_of(messages: list[EncodedBatch]) -> EncodedBatch:
    """Return one batch of single messages for the same queue."""
    if len(messages) == 1:
        return messages[0]
    nbytes = sum(message.nbytes for message in messages)
    return EncodedBatch(messages[0].topic, (), len(messages), nbytes, messages=tuple(messages))


def _badness(outcome: SendOutcome) -> tuple[bool, bool]:
    """Return a rank: an error that ends the write outranks the others, then one after which the row may be stored."""
    error = outcome.error
    return error is not None and not error.retriable, error is None or error.maybe_stored
