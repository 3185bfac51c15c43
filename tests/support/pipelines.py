"""A pipeline on a handed-in clock whose attempts go to a scripted cluster, and what a broker may do to it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from rocketmq_spark.errors import RemotingConnectException
from rocketmq_spark.metrics import PartitionReport, Recorder, WriteSummary, merge_into
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendOutcome, SendRequest, SendStatus
from rocketmq_spark.model.route import MASTER_ID, BrokerData, QueueData, TopicRouteData
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.records import encode_batch
from rocketmq_spark.routing.fault_strategy import FaultStrategy
from rocketmq_spark.routing.route_cache import TopicPublishInfo, publish_info_of
from rocketmq_spark.routing.selectors import RoundRobinSelector
from rocketmq_spark.sink.in_flight import PendingBatch
from rocketmq_spark.sink.limits import RateLimit
from rocketmq_spark.sink.pipeline import SendPipeline
from rocketmq_spark.testing import Reply
from rocketmq_spark.transport.base import OnOutcome
from tests.support.scripted import ManualClock, ScriptedTransport


class Rig:
    """A pipeline whose attempts go to a scripted transport; time passes only in `run`."""

    def __init__(self, cluster: TopicRouteData, seed: int = 1, rate: float | None = None, **options: Any) -> None:
        self.clock = ManualClock(100.0)
        self.transport = ScriptedTransport({"T": cluster}, clock=self.clock)
        self.infos: dict[str, TopicPublishInfo] = {"T": publish_info_of("T", cluster)}
        self.refreshed: list[str] = []
        self.recorder = Recorder("w", -1, 0, epoch_offset=0.0)
        sink = SinkOptions.of(name_server=("ns:1",), **options)
        self.faults = FaultStrategy.of_options(sink.connection)
        rng = random.Random(seed)
        self.pipeline = SendPipeline(
            sink,
            self.faults,
            self.recorder,
            publish_info=self._publish_info,
            refresh_route=self.refreshed.append,
            new_selector=lambda: RoundRobinSelector(self.faults, rng),
            rng=rng,
            rate=None if rate is None else RateLimit(rate, self.clock.now),
        )
        self.outcomes: list[tuple[PendingBatch, SendOutcome]] = []
        # How often the pipeline has checked whether a batch can start.
        self.tries = 0

    def _publish_info(self, topic: str) -> TopicPublishInfo | None:
        self.tries += 1
        return self.infos.get(topic)

    def offer(
        self,
        batches: int = 1,
        *,
        rows: int = 1,
        bound: MessageQueue | None = None,
        single: bool = False,
        topic: str = "T",
    ) -> None:
        for _ in range(batches):
            self.offer_bodies([b"x"] * rows, bound, single=single, topic=topic)

    def offer_bodies(
        self, bodies: list[bytes], bound: MessageQueue | None = None, *, single: bool = False, topic: str = "T"
    ) -> None:
        """Offer one batch of these bodies, or the one body as a single message."""
        body = bodies[0] if single else encode_batch([Message(topic, each) for each in bodies])
        batch = EncodedBatch(topic, (body,), len(bodies), len(body), batch=not single)
        self.pipeline.offer(batch, bound, self.clock.now)

    def step(self) -> None:
        """Start what may start now."""
        for dispatch in self.pipeline.dispatches(self.clock.now):
            request = SendRequest(dispatch.pending.batch, dispatch.queue, dispatch.address, "g", "TBW102", 4, 0)
            self.transport.send(request, dispatch.timeout, self._taker(dispatch.pending), within=dispatch.within)

    def _taker(self, pending: PendingBatch) -> Callable[[SendOutcome], None]:
        return lambda outcome: self.outcomes.append((pending, outcome))

    def complete(self) -> list[PendingBatch]:
        """Hand over the outcomes that have come, and return whose they were."""
        for pending, outcome in self.outcomes:
            self.pipeline.complete(pending, outcome, self.clock.now)
        done = [pending for pending, _ in self.outcomes]
        self.outcomes.clear()
        return done

    def go_on(self) -> list[PendingBatch]:
        """Start what may start now, let time pass until the next thing happens, and return whose outcomes came."""
        self.step()
        wakeup = self.pipeline.next_wakeup(self.clock.now)
        due = min(self.transport.next_due, wakeup if wakeup is not None else float("inf"))
        self.transport.advance(max(0.0, due - self.clock.now))
        return self.complete()

    def run(self, until: float = 1e6) -> None:
        """Let time pass until everything is stored, or has failed."""
        for _ in range(100_000):
            self.step()
            if self.pipeline.is_empty or (self.pipeline.failure and not self.pipeline.in_flight):
                return
            wakeup = self.pipeline.next_wakeup(self.clock.now)
            due = min(self.transport.next_due, wakeup if wakeup is not None else float("inf"))
            assert due < until, f"{self.pipeline!r} would wait for ever"
            self.transport.advance(max(0.0, due - self.clock.now))
            self.complete()
        raise AssertionError(f"{self.pipeline!r} does not end")

    @property
    def brokers(self) -> list[str]:
        return [request.queue.broker_name for request in self.transport.requests]

    @property
    def facts(self) -> dict[str, Any]:
        summary = WriteSummary()
        merge_into(summary, self.recorder.snapshot())
        return summary.to_dict()


def refused() -> Reply:
    return Reply(error=RemotingConnectException("refused"))


# After these the client knows whether the rows are stored.
CERTAIN_REPLIES = st.one_of(
    st.just(Reply()),
    st.just(Reply(delay=0.7)),
    st.just(refused()),
    st.sampled_from([2, 14, 17, 215]).map(lambda code: Reply.code(code, "scripted")),
    st.sampled_from(list(SendStatus)).map(lambda status: Reply(status)),
)
REPLIES = st.one_of(
    CERTAIN_REPLIES,
    st.just(Reply(silent=True)),
    st.just(Reply(silent=True, stored=True)),
    st.just(Reply.code(1, "scripted")),
)


def recorder(write_id: str = "w", batch_id: int = -1, partition_id: int = 0, epoch: float = 0) -> Recorder:
    return Recorder(write_id, batch_id, partition_id, epoch_offset=epoch)


def success(
    to: Recorder,
    broker: str = "a",
    rows: int = 1,
    latency_ms: float = 1.0,
    offset: int = 0,
    now: float = 0.0,
    **other: Any,
) -> None:
    queue = MessageQueue(other.get("topic", "t"), broker, other.get("queue_id", 0))
    to.record_success(broker, rows, other.get("nbytes", 10 * rows), latency_ms, queue, offset, now)


def summary_of(reports: Iterable[object], keep: int = 1000) -> WriteSummary:
    summary = WriteSummary(keep)
    for report in reports:
        merge_into(summary, report)
    return summary


events = st.one_of(
    st.tuples(
        st.just("success"),
        st.sampled_from("abc"),
        st.integers(1, 32_000),
        st.floats(0.0, 5e6),
        st.sampled_from(("t", "u")),
        st.integers(0, 3),
        st.integers(-1, 2**40),
        st.floats(0, 5_000),
    ),
    st.tuples(st.just("retry"), st.sampled_from("abc"), st.sampled_from(("busy", "lost")), st.floats(0, 5_000)),
    st.tuples(st.just("failure"), st.sampled_from("abc"), st.sampled_from(("13", "lost")), st.floats(0, 5_000)),
    st.tuples(
        st.sampled_from(("skipped", "dead")), st.just("a"), st.sampled_from(("body is null", "lost")), st.just(0.0)
    ),
    st.tuples(st.just("isolation"), st.sampled_from("abc"), st.floats(0, 60_000), st.floats(0, 5_000)),
)


@st.composite
def reports(draw: st.DrawFn) -> PartitionReport:
    recording = recorder(draw(st.sampled_from(("w", "v"))), draw(st.integers(0, 2)), draw(st.integers(0, 9)), 1_000)
    for event in sorted(draw(st.lists(events, max_size=12)), key=lambda event: event[-1]):
        kind, broker, *rest = event
        if kind == "success":
            rows, latency_ms, topic, queue_id, offset, now = rest
            queue = MessageQueue(topic, broker, queue_id)
            recording.record_success(broker, rows, rows, latency_ms, queue, offset, now)
        elif kind == "retry":
            recording.record_retry(broker, *rest)
        elif kind == "failure":
            recording.record_failure(broker, *rest)
        elif kind == "skipped":
            recording.record_skipped({rest[0]: 3})
        elif kind == "dead":
            recording.record_dead_letters({rest[0]: 4})
        else:
            recording.record_isolation(broker, *rest)
    return recording.snapshot()


ENDPOINTS = ("p:8081", "q:8081")


def proxy_route(*message_types: str, endpoints: tuple[str, ...] = ENDPOINTS) -> TopicRouteData:
    """Return the route of a topic that accepts messages of these types."""
    return TopicRouteData(
        tuple(QueueData(endpoint, 1, 1, 6) for endpoint in endpoints),
        tuple(BrokerData(endpoint, {MASTER_ID: endpoint}) for endpoint in endpoints),
        message_types=frozenset(message_types),
    )


class ScriptedProxies(ScriptedTransport):
    """A scripted transport whose answers tell neither queue nor offset."""

    def send(self, request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        def without_place(outcome: SendOutcome) -> None:
            on_outcome(replace(outcome, queue=replace(outcome.queue, queue_id=-1), queue_offset=-1, offset_msg_id=""))

        super().send(request, timeout, without_place, within=within)
