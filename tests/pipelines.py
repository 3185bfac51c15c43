"""A pipeline on a handed-in clock whose attempts go to a scripted cluster, and what a broker may do to it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from rocketmq_spark.errors import RemotingConnectException
from rocketmq_spark.message import EncodedBatch, Message, MessageQueue, SendOutcome, SendRequest, SendStatus
from rocketmq_spark.metrics import Recorder, WriteSummary, merge_into
from rocketmq_spark.options import SinkOptions
from rocketmq_spark.producer.delivery import Delivery
from rocketmq_spark.producer.fault_strategy import FaultStrategy
from rocketmq_spark.producer.pipeline import SendPipeline
from rocketmq_spark.producer.rate import RateLimit
from rocketmq_spark.producer.route_cache import TopicPublishInfo, publish_info_of
from rocketmq_spark.producer.selector import RoundRobinSelector
from rocketmq_spark.route_data import TopicRouteData
from rocketmq_spark.transport.script import ManualClock, Reply
from rocketmq_spark.transport.scripted import ScriptedTransport
from rocketmq_spark.wire.records import encode_batch


class Rig:
    """A pipeline whose attempts go to a scripted transport; time passes only in `run`."""

    def __init__(self, cluster: TopicRouteData, seed: int = 1, rate: float | None = None, **options: Any) -> None:
        self.clock = ManualClock(100.0)
        self.transport = ScriptedTransport({"T": cluster}, clock=self.clock)
        self.infos: dict[str, TopicPublishInfo] = {"T": publish_info_of("T", cluster)}
        self.refreshed: list[str] = []
        self.recorder = Recorder("w", -1, 0, epoch_offset=0.0)
        sink = SinkOptions(name_server=("ns:1",), **options)
        self.faults = FaultStrategy.of_options(sink)
        rng = random.Random(seed)
        self.pipeline = SendPipeline(
            sink,
            self.faults,
            self.recorder,
            publish_info=self._publish_info,
            refresh_route=self.refreshed.append,
            selector_of=lambda _topic: RoundRobinSelector(self.faults, rng),
            rng=rng,
            rate=None if rate is None else RateLimit(rate, self.clock.now),
        )
        self.outcomes: list[tuple[Delivery, SendOutcome]] = []
        # How often the pipeline has looked whether a delivery can start.
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
            request = SendRequest(dispatch.delivery.batch, dispatch.queue, dispatch.address, "g", "TBW102", 4, 0)
            self.transport.send(request, dispatch.timeout, self._taker(dispatch.delivery), within=dispatch.within)

    def _taker(self, delivery: Delivery) -> Callable[[SendOutcome], None]:
        return lambda outcome: self.outcomes.append((delivery, outcome))

    def complete(self) -> list[Delivery]:
        """Hand over the outcomes that have come, and return whose they were."""
        for delivery, outcome in self.outcomes:
            self.pipeline.complete(delivery, outcome, self.clock.now)
        done = [delivery for delivery, _ in self.outcomes]
        self.outcomes.clear()
        return done

    def go_on(self) -> list[Delivery]:
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
