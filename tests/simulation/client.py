"""The client of a simulation: the connector's own transport, client instance and sender, and what they did."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rocketmq_spark.arrow.batch_source import BatchSource
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.metrics import Recorder, WriteSummary, merge_into
from rocketmq_spark.model.message import (
    EncodedBatch,
    Message,
    MessageQueue,
    Ready,
    SendOutcome,
    SendRequest,
    SendStatus,
)
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.records import encode_batch
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.sink.in_flight import PendingBatch
from rocketmq_spark.sink.routes import RouteFinder
from rocketmq_spark.sink.sender import BatchSender
from rocketmq_spark.transport.base import OnOutcome
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.simulation.network import Network
from tests.simulation.world import EPOCH, SimulatedRuntime, World

_ACCOUNT = re.compile(r"Read but not sent: (\d+)(?:; outcome unknown: (\d+))?")


@dataclass(eq=False)
class Attempt:
    """One send, and its outcome once there is one."""

    batch: EncodedBatch
    queue: MessageQueue
    started: float
    within: float
    ended: float = math.inf
    outcome: SendOutcome | None = None


class RecordedTransport(RemotingTransport):
    """A transport that keeps a record of all sends."""

    def __init__(self, world: World, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.world = world
        self.attempts: list[Attempt] = []
        self.problems: list[str] = []

    def send(self, request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        attempt = Attempt(request.batch, request.queue, self.world.now, within)
        self.attempts.append(attempt)

        def ended(outcome: SendOutcome) -> None:
            if attempt.outcome is not None:
                self.problems.append(f"an attempt for {attempt.queue} has two outcomes")
            attempt.outcome, attempt.ended = outcome, self.world.now
            on_outcome(outcome)

        super().send(request, timeout, ended, within=within)


class RowBatcher(BatchSource[Sequence[tuple[int, bytes]]]):
    """Makes a batch of every `size` rows. A row is a key and a body; rows of one key go to one queue, if `ordered`."""

    def __init__(self, topic: str, size: int, queue_of: Callable[[int], MessageQueue | None]) -> None:
        self.topic = topic
        self.size = size
        self._taken_rows = self._pending_bytes = 0
        # Bytes of the batches that were given out, to compare with the memory bound.
        self.offered_bytes = 0
        self.on_batch: Callable[[], None] = lambda: None
        self._queue_of = queue_of
        self._groups: dict[int, list[bytes]] = {}

    @property
    def pending_bytes(self) -> int:
        return self._pending_bytes

    @property
    def taken_rows(self) -> int:
        return self._taken_rows

    def add(self, rows: Sequence[tuple[int, bytes]], now: float) -> Iterator[Ready]:
        self._taken_rows += len(rows)
        for key, body in rows:
            group = self._groups.setdefault(key, [])
            group.append(body)
            self._pending_bytes += len(body)
            if len(group) == self.size:
                yield self._batch(key)

    def new_topics(self) -> list[str]:
        return []

    def reject(self, rejected: Sequence[Ready], now: float) -> Iterator[Ready]:
        raise AssertionError(f"no rule refuses a row, but {rejected} were rejected")

    def expired(self, now: float, known: Callable[[str], bool]) -> Iterator[Ready]:
        return self.flush() if known(self.topic) else iter(())

    def flush(self) -> Iterator[Ready]:
        for key in list(self._groups):
            if self._groups[key]:
                yield self._batch(key)

    def _batch(self, key: int) -> Ready:
        self.on_batch()
        bodies = self._groups.pop(key)
        self._pending_bytes -= sum(map(len, bodies))
        body = encode_batch([Message(self.topic, each) for each in bodies])
        self.offered_bytes += len(body)
        return EncodedBatch(self.topic, (body,), len(bodies), len(body)), self._queue_of(key)


@dataclass(eq=False)
class TaskResult:
    """What a task has done: its rows in the order in which it took them, and how it ended."""

    number: int
    rows: list[tuple[int, bytes]]
    error: RocketMQError | None = None
    started: float = 0.0
    ended: float = math.inf
    acknowledged: list[EncodedBatch] = field(default_factory=list)
    # The most bytes that were given out and not stored, when a batch was made, and the length of the largest batch.
    most_pending: int = 0
    largest_batch: int = 0
    rest: float = 0.0
    taken: int = 0
    summary: WriteSummary = field(default_factory=WriteSummary)

    @property
    def account(self) -> tuple[int, int]:
        """The rows that the error says were not sent, and those with an unknown outcome."""
        found = _ACCOUNT.search(str(self.error))
        return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


class Worker:
    """One worker process: a client instance that its tasks share."""

    def __init__(self, network: Network, name_servers: Sequence[str], options: SinkOptions, number: int = 0) -> None:
        self.world = network.world
        self.options = options
        self.runtime = SimulatedRuntime(self.world, network.socket, network.socketpair)
        self.rng = random.Random(self.world.rng.random())
        self.transport = RecordedTransport(
            self.world, list(name_servers), random=self.rng, clock=self.runtime.clock, runtime=self.runtime
        )
        self.instance = ClientInstance(
            f"10.0.0.1@{number}", self.transport, options.connection, clock=self.runtime.clock, runtime=self.runtime
        )
        self.results: list[TaskResult] = []
        # The queue of the rows of a key, None for any.
        self.queue_of: Callable[[int], MessageQueue | None] = lambda _: None

    def run_task(
        self,
        number: int,
        rows: list[tuple[int, bytes]],
        batch_rows: int,
        rest: float = 0.0,
        rows_at_once: int | None = None,
    ) -> TaskResult:
        """Write rows as a task does; the upstream rests between two batches of rows."""
        rows_at_once = rows_at_once or 2 * batch_rows
        result = TaskResult(number, rows, started=self.world.now, rest=rest)
        self.results.append(result)
        recorder = Recorder("w", 0, number, epoch_offset=EPOCH)
        finder = RouteFinder(self.options, self.instance, clock=self.runtime.clock, rng=self.rng, runtime=self.runtime)
        topic = self.options.topic
        assert topic is not None
        batcher = RowBatcher(topic, batch_rows, self.queue_of)
        stored_bytes = 0

        def on_batch() -> None:
            result.most_pending = max(result.most_pending, batcher.offered_bytes - stored_bytes)

        batcher.on_batch = on_batch

        def on_stored(pending: PendingBatch, outcome: SendOutcome) -> None:
            batch = pending.batch
            nonlocal stored_bytes
            assert outcome.status is not None
            stored_bytes += batch.nbytes
            result.largest_batch = max(result.largest_batch, batch.nbytes)
            result.acknowledged.append(batch)

        def upstream() -> Iterator[list[tuple[int, bytes]]]:
            for at in range(0, len(rows), rows_at_once):
                if rest:
                    self.runtime.sleep(rest * self.rng.random())
                yield rows[at : at + rows_at_once]

        self.instance.register(self.options.producer_group)
        try:
            BatchSender(finder, recorder, on_stored=on_stored).write(upstream(), batcher)
        except RocketMQError as exc:
            result.error = exc
        finally:
            self.instance.unregister(self.options.producer_group)
        result.ended = self.world.now
        result.taken = batcher.taken_rows
        merge_into(result.summary, recorder.snapshot())
        return result


def was_stored(outcome: SendOutcome | None) -> bool:
    """Return whether a broker acknowledged the rows."""
    return outcome is not None and outcome.status is SendStatus.SEND_OK
