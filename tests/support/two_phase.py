"""A driver of exactly-once writes, and the clock of a fake cluster that tests can move."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from rocketmq_spark.deliveries.base import TaskResults, Write
from rocketmq_spark.deliveries.exactly_once.commit import TwoPhaseCommit, group_of, new_run_id
from rocketmq_spark.deliveries.exactly_once.delivery import ExactlyOnce, Prepared
from rocketmq_spark.deliveries.exactly_once.ends import EndSender
from rocketmq_spark.deliveries.exactly_once.half_sender import store_halves
from rocketmq_spark.deliveries.exactly_once.halves import HalfCollector, Halves, half_properties
from rocketmq_spark.deliveries.exactly_once.report import CommitReport
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.keys import keys_of
from rocketmq_spark.deliveries.log.records import Decision
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, TRANSACTION_PREPARED_TYPE
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.records import decode_properties, encode_single
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.connect import new_transport
from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.transport.runtime import PROCESS, Runtime

TOPIC = "T"
ID = "job"
WRITE = Write("write-1")
_run_ids = itertools.count(1)


class MovedClock(Runtime):
    """A runtime whose long waits end at once and move the clock, also that of the brokers."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.ahead = 0.0
        for broker in cluster.brokers.values():
            broker.timers = _MovedTimers(broker.timers, self)
            broker.storage._time = broker.timers.time

    def clock(self) -> float:
        return time.monotonic() + self.ahead

    def boot_clock(self) -> float:
        return super().boot_clock() + self.ahead

    def wall_clock(self) -> float:
        return time.time() + self.ahead

    def sleep(self, seconds: float) -> None:
        if seconds < 0.2:
            time.sleep(seconds)
        else:
            self.ahead += seconds


class _MovedTimers:
    def __init__(self, timers: Any, clock: MovedClock) -> None:
        self._timers = timers
        self._clock = clock

    def time(self) -> float:
        return float(self._timers.time()) + self._clock.ahead

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.call_later(seconds, call)


class Driver:
    """One process that runs a driver and its tasks."""

    def __init__(
        self,
        name_server: str,
        runtime: Runtime = PROCESS,
        *,
        log: type[DecisionLog] = DecisionLog,
        commit: type[TwoPhaseCommit] = TwoPhaseCommit,
        **options: str,
    ) -> None:
        given = {"nameServer": name_server, "topic": TOPIC, "delivery": "exactlyOnce", "transactionalId": ID}
        self.options: SinkOptions = parse_sink_options({**given, **options}, {})
        connection = self.options.connection
        self.instance = ClientInstance("driver", new_transport(connection, "driver"), connection)
        self.brokers = Brokers(self.options, self.instance, clock=runtime.clock, runtime=runtime)
        keys = keys_of(self.options)
        self.log = log(str(self.options.transactional_id), self.options.transaction_topic, keys)
        self.two_phase = commit(self.brokers, self.log, new_run_id())
        try:
            names = set(self.brokers.routes().look_up(self.topic).addresses)
            self.brokers.ensure_topic(self.options.transaction_topic, names)
        except BaseException:
            self.close()
            raise

    @property
    def topic(self) -> str:
        """The topic of rows."""
        return str(self.options.topic)

    @property
    def queues(self) -> Sequence[MessageQueue]:
        """The queues of the topic of rows."""
        return self.brokers.routes().look_up(self.topic).queues

    def open(self) -> Driver:
        """Read the log, and return the driver."""
        self.log.open(self.brokers, everything=True)
        return self

    def prepare(self, bodies: Iterable[str], write: Write = WRITE) -> tuple[Halves, str]:
        """Store rows as half messages in turn in all queues, as tasks do; return them and their group."""
        group = group_of(self.log.transactional_id, write, 1, f"{self.two_phase.run_id}-{next(_run_ids)}")
        collector = HalfCollector()
        store_halves(
            self.brokers,
            [
                (half_message(body, group, self.options), queue)
                for body, queue in zip(bodies, itertools.cycle(self.queues), strict=False)
            ],
            collector.append,
        )
        return Halves.from_bytes(collector.halves().to_bytes()), group

    def plan(self, write: Write | None = None, **options: Any) -> ExactlyOnce:
        """Plan a batch write, or a stream (None)."""
        return ExactlyOnce.plan(replace(self.options, **options), self._open_instance, write)

    def commit(self, planned: ExactlyOnce, write: Write, results: Sequence[Prepared]) -> CommitReport:
        """Commit what tasks have prepared."""
        return planned.complete(self._open_instance, TaskResults(results, write.query, write.batch_id))

    def abort(self, planned: ExactlyOnce, write: Write, results: Sequence[Prepared]) -> None:
        """End a failed write."""
        planned.abort(self._open_instance, TaskResults(results, write.query, write.batch_id))

    def _open_instance(self) -> AbstractContextManager[ClientInstance]:
        return nullcontext(self.instance)

    def decide_and_crash(self, bodies: Sequence[str], committed: int, write: Write = WRITE) -> tuple[Halves, str]:
        """Decide a write, and commit only its first half messages."""
        halves, group = self.prepare(bodies, write)
        self.two_phase._decide(write, 1, group, halves, self.options.transaction_timeout_ms)
        self.end(halves.select(np.arange(committed)), group)
        return halves, group

    def end(self, halves: Halves, group: str, how: int = TRANSACTION_COMMIT_TYPE) -> EndSender:
        """End half messages, and return the sender."""
        sender = EndSender(self.brokers, halves, group, how, expires=self.brokers.clock() + 60)
        sender.run()
        return sender

    def close(self) -> None:
        """Close the connections."""
        self.instance.close()


class CrashingCommit(TwoPhaseCommit):
    """Crashes after each decision, before its commit."""

    def _execute(self, decision: Decision, halves: Halves, report: CommitReport) -> CommitReport:
        return report


def half_message(body: str, group: str, options: SinkOptions) -> EncodedBatch:
    """Return one row as a half message."""
    properties = decode_properties(half_properties(group, options.transaction_timeout_ms).encode())
    properties["UNIQ_KEY"] = f"{next(_run_ids):032X}"
    return encode_single(Message(str(options.topic), body.encode(), 0, properties), TRANSACTION_PREPARED_TYPE)


@contextmanager
def driver(cluster: FakeCluster, clock: MovedClock, **settings: Any) -> Iterator[Driver]:
    """Return a driver that is closed at the end; `settings` are keyword arguments of `Driver`."""
    running = Driver(cluster.name_server, clock, deliveryTimeoutMs="10000", **settings)
    try:
        yield running
    finally:
        running.close()


def visible(cluster: FakeCluster) -> Counter[str]:
    """Return the rows that consumers see, with the number of their copies."""
    return Counter(message.body.decode() for message in cluster.messages(TOPIC))
