"""How a task of the simulations sends its rows: by the connector's own batchers and senders."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from rocketmq_spark.arrow.batcher import ArrowBatcher
from rocketmq_spark.arrow.joiner import JoiningBatcher
from rocketmq_spark.deliveries.base import Send
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.sink.routes import RouteFinder
from rocketmq_spark.sink.sender import BatchSender
from rocketmq_spark.sink.task import AT_LEAST_ONCE, RowBatchers, SendRules
from tests.simulation.spark import FENCE, ID, LOG, TOPIC, Attempt, SparkPlan
from tests.simulation.world import SimulatedRuntime

# Rows of one record batch of Spark.
_ROWS_AT_ONCE = 10


class WriteClient:
    """What one process has of the connector; see `tests.simulation.spark.Client`."""

    def __init__(
        self,
        brokers: Brokers,
        runtime: SimulatedRuntime,
        rng: random.Random,
        fixed_queues: Sequence[MessageQueue] | None,
    ) -> None:
        self.brokers = brokers
        self.runtime = runtime
        self.rng = rng
        self.fixed_queues = fixed_queues

    def rows(self, bodies: Sequence[str], *, slow: bool, cuts: Sequence[int]) -> Iterator[pa.RecordBatch]:
        """Return rows as record batches, which are cut after some rows, and late if the input is slow."""
        at_once = _ROWS_AT_ONCE // 5 if slow else _ROWS_AT_ONCE
        ends = sorted({*range(0, len(bodies), at_once), *cuts, len(bodies)} - {0})
        for start, end in zip([0, *ends], ends, strict=False):
            if slow:
                self.runtime.sleep(self.rng.choice((0.05, 1.5, 4.0)) * self.rng.random())
            yield record_batch(bodies[start:end])

    def send(self, attempt: Attempt, recorder: Recorder) -> Send:
        """Return what sends the rows of an attempt."""

        def send(batches: Iterator[pa.RecordBatch], *, row_id_name: str = "", rules: SendRules | None = None) -> None:
            rules = rules or AT_LEAST_ONCE
            routes = RouteFinder(
                self.brokers.options,
                self.brokers.instance,
                clock=self.runtime.clock,
                runtime=self.runtime,
                rng=self.rng,
                fixed_queues=self.fixed_queues,
                queue_nums=rules.queue_nums,
            )
            batcher = RowBatchers(routes, recorder, row_id_name, rules).source()
            assert isinstance(batcher, ArrowBatcher)
            # The look-up of topic settings uses separate threads.
            batcher.check_keys = None
            open_sender = rules.open_sender or BatchSender
            sender = open_sender(routes, recorder, max_rate_per_second=None, on_stored=None)
            sender.write(batches, JoiningBatcher(batcher, TOPIC))

        return send


def record_batch(bodies: Sequence[str]) -> pa.RecordBatch:
    """Return rows; a row has the key of its last digit."""
    keys = [f"key-{body[-1]}" for body in bodies]
    return pa.record_batch({"body": pa.array([body.encode() for body in bodies], pa.binary()), "shardingKey": keys})


def options_of(plan: SparkPlan) -> dict[str, Any]:
    """Return the options of a write, without servers."""
    return {
        "topic": TOPIC,
        "delivery": "effectivelyOnce",
        "transactional_id": ID,
        "transaction_topic": LOG,
        "fence_ms": int(FENCE * 1000),
        "delivery_timeout_ms": 10_000,
        "batch_bytes": 1024,
        "heartbeat_broker_interval": 3_000,
        "poll_name_server_interval": 3_000,
        **plan.options,
    }
