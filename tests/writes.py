"""Writes of numbered rows, and the faults that happen to them meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from rocketmq_spark.admin import queue_offsets
from rocketmq_spark.cluster.probe import Probe
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.transport.remoting import RemotingTransport
from tests.ledger import Account, Ledger
from tests.waiting import PATIENCE, wait_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rocketmq_spark.cluster import Broker, LocalCluster
    from rocketmq_spark.spark.report import Metrics

# Small requests, so that whenever a fault comes some are on their way.
SMALL = {"batchBytes": "16k"}
# How many rows come at a time where they do not come from Spark.
PIECE = 500


def numbered(spark: SparkSession, rows: int, nbytes: int, partitions: int = 4) -> DataFrame:
    """Rows with their number as body, filled up to `nbytes`, and as key."""
    number = F.col("id").cast("string")
    columns = F.rpad(number, nbytes, ".").alias("body"), F.concat(F.lit("k"), number).alias("keys")
    return spark.range(0, rows, 1, partitions).select(*columns)


def keys_of(rows: int) -> set[str]:
    """The keys of so many numbered rows."""
    return {f"k{number}" for number in range(rows)}


def body_of(key: str) -> bytes:
    """How the body of the row with that key begins."""
    return key[1:].encode() + b"."


def write(frame: DataFrame, name_server: str, topic: str, **options: Any) -> None:
    """Save rows to a topic."""
    writer = frame.write.format("rocketmq").option("nameServer", name_server).option("topic", topic)
    writer.options(**options).save()


def retries_of(facts: Mapping[str, Mapping[str, Any]]) -> int:
    """How often a write has tried again, from what `Metrics.to_dict` says of each broker."""
    return sum(int(broker["retries"]) for broker in facts.values())


def messages_in(name_server: str, topic: str) -> int:
    """How many messages a topic holds just now; 0 while it is not there."""
    try:
        return sum(offsets.messages for offsets in queue_offsets([name_server], topic))
    except RocketMQError:
        return 0


def rows(count: int, groups: int = 0) -> Iterator[pa.RecordBatch]:
    """Yield so many numbered rows, `PIECE` at a time, of so many message groups in turn."""
    for start in range(0, count, PIECE):
        numbers = range(start, min(start + PIECE, count))
        columns = {"body": [str(number).ljust(200, ".") for number in numbers], "keys": [f"k{n}" for n in numbers]}
        if groups:
            columns["shardingKey"] = [f"group-{number % groups}" for number in numbers]
        yield pa.RecordBatch.from_pydict(columns)


def broken(
    batches: Iterable[pa.RecordBatch],
    before: int,
    cluster: LocalCluster,
    topic: str,
    fault: Callable[[], object],
    *,
    messages: int = PIECE // 2,
) -> Iterator[pa.RecordBatch]:
    """Yield the batches; in their midst, with so many messages stored and many on their way, have the fault happen."""
    for number, batch in enumerate(batches):
        if number == before:
            wait_for(lambda: messages_in(cluster.name_server, topic) >= messages)
            fault()
        yield batch


def counted(batches: Iterable[pa.RecordBatch], taken: list[int]) -> Iterator[pa.RecordBatch]:
    """Yield the batches, and note how many rows each has."""
    for batch in batches:
        taken.append(batch.num_rows)
        yield batch


def failing_late(frame: DataFrame, name_server: str, topic: str, rows: int) -> DataFrame:
    """Return the frame; its partition 0, tried first, waits until more than `rows` are stored behind it, and fails."""

    def passed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        if context is None or context.partitionId() or context.attemptNumber():
            return
        wait_for(lambda: messages_in(name_server, topic) > rows)
        raise RuntimeError("the first attempt fails on purpose")

    return frame.mapInArrow(passed_on, frame.schema)


@contextlib.contextmanager
def in_mid_write(name_server: str, topic: str, messages: int, fault: Callable[[], object]) -> Iterator[None]:
    """Have the fault happen, on a thread of its own, once a topic holds so many messages.

    Leaving waits for the end of the fault, and raises what it raised.
    """

    def happen() -> None:
        wait_for(lambda: messages_in(name_server, topic) >= messages)
        fault()

    with ThreadPoolExecutor(1) as pool:
        happening = pool.submit(happen)
        yield
        happening.result()


def make_topic(cluster: LocalCluster, topic: str, *, queues: int = 4, perm: int = 6, on: Sequence[Broker] = ()) -> None:
    """Create or change a topic on some brokers, or on all, and wait until the name server knows."""
    wanted = {broker.name: (queues, perm) for broker in on or cluster.brokers}

    def known() -> bool:
        with contextlib.suppress(RocketMQError):
            route = transport.query_route(topic, 5.0)
            found = {data.broker_name: (data.write_queue_nums, data.perm) for data in route.queue_datas}
            return wanted.items() <= found.items()
        return False

    with RemotingTransport([cluster.name_server]) as transport:
        for broker in on or cluster.brokers:
            transport.create_topic(broker.address, topic, queues, perm, 5.0)
        wait_for(known)


def set_config(broker: Broker, **properties: object) -> None:
    """Change properties of a broker that runs."""
    Probe(timeout=5.0).configure(broker.address, properties)


def heal(cluster: LocalCluster) -> None:
    """Have every server run again, and the name server know all brokers."""
    name_server = cluster.servers[0]
    for server in cluster.servers:
        if server.is_alive:
            server.resume()
    if not name_server.is_alive:
        name_server.restart()
    for broker in cluster.brokers:
        if not broker.is_alive:
            broker.restart()
        broker.await_ready(time.monotonic() + PATIENCE)


@dataclass
class Trial:
    """One write that a fault happens to, from its topic to its account."""

    spark: SparkSession
    cluster: LocalCluster
    topic: str
    metrics: Metrics
    ledger: Ledger
    rows: int = 0

    @property
    def queues(self) -> set[tuple[str, str]]:
        """Broker and id of every queue that got rows."""
        facts = self.metrics.to_dict()
        return {(broker, queue) for broker in facts for queue in facts[broker]["queues"].get(self.topic, ())}

    def write(
        self,
        rows: int,
        fault: Callable[[], object] = lambda: None,
        *,
        per_second: int | None,
        partitions: int = 4,
        **options: Any,
    ) -> None:
        """Write so many rows, and have the fault happen when a tenth of them is stored.

        A rate gives the fault its time: whatever the machine, the write takes ``rows / per_second`` seconds.
        """
        make_topic(self.cluster, self.topic)
        self.rows, name_server = rows, self.cluster.name_server
        rate = {} if per_second is None else {"maxRatePerSecond": per_second}
        given = {"nameServer": name_server, "rowId": True, **rate, **SMALL, **options}
        watched = self.ledger.watch([name_server], self.topic, [broker.address for broker in self.cluster.brokers])
        with watched, in_mid_write(name_server, self.topic, rows // 10, fault):
            write(numbered(self.spark, rows, 200, partitions), given.pop("nameServer"), self.topic, **given)

    def settle(self, fault: str) -> Account:
        """Read everything back, and enter it in the table under the fault's name."""
        keys, retries = keys_of(self.rows), retries_of(self.metrics.to_dict())
        return self.ledger.settle(fault, self.cluster.name_server, self.topic, keys, retries, begins=body_of)
