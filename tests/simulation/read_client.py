"""The client of a simulated read: the connector's own transport and puller, and what they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message_ext import Pulled, PullOutcome, PullRequest
from rocketmq_spark.source.puller import Puller
from rocketmq_spark.source.ranges import OffsetRange
from rocketmq_spark.transport.base import OnPulled
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.simulation.read_checks import TaskRead


class Memory:
    """The answers that exist and were not given out yet."""

    def __init__(self, task: TaskRead) -> None:
        self.task = task
        self.waiting = 0

    def measure(self) -> None:
        """Compare with the most."""
        self.task.most_waiting = max(self.task.most_waiting, self.waiting)


class Body(bytes):
    """The body of an answer. It counts until it is given out, or nothing refers to it."""

    memory: Memory | None = None

    def keep(self, memory: Memory) -> None:
        """Begin to count."""
        self.memory = memory
        memory.waiting += len(self)

    def give(self) -> None:
        """Count no more."""
        if self.memory is not None:
            self.memory.waiting -= len(self)
            self.memory = None

    def __del__(self) -> None:
        self.give()


class RecordedReads(RemotingTransport):
    """A transport that counts the requests in flight and the bytes of answers."""

    memory: Memory
    # On its clock, which stands still while the consumer rests.
    began: float
    in_flight = 0

    def pull(self, request: PullRequest, timeout: float, on_pulled: OnPulled) -> None:
        task = self.memory.task
        self.memory.measure()

        def ended(outcome: PullOutcome) -> None:
            self.in_flight -= 1
            if outcome.body:
                task.polled[request.target.queue] = self.clock() - self.began
                body = Body(outcome.body)
                body.keep(self.memory)
                task.largest = max(task.largest, len(body))
                outcome = replace(outcome, body=body)
            on_pulled(outcome)

        self.in_flight += 1
        task.most_in_flight = max(task.most_in_flight, self.in_flight)
        try:
            super().pull(request, timeout, ended)
        except RocketMQError:
            self.in_flight -= 1
            raise


class RecordedPuller(Puller):
    """A puller whose consumer rests between two results, as Spark does."""

    memory: Memory
    rest: Callable[[], float]

    def pull(self, ranges: Sequence[OffsetRange]) -> Iterator[Pulled]:
        for pulled in super().pull(ranges):
            self.memory.measure()
            if isinstance(pulled.body, Body):
                pulled.body.give()
            self.memory.task.progress[pulled.queue] = self.rest()
            yield pulled
