"""Random plans of reads against the same plans of a table, and random writes against what the auditor reads.

A seed makes a plan, and a failure shows both. `make test` runs the first seeds, `make test-faults` 500. To run some
seeds only, set DIFFERENTIAL_SEEDS to one number or a range:

    DIFFERENTIAL_SEEDS=17 python -m pytest tests/spark/test_differential.py
    DIFFERENTIAL_SEEDS=1000-1500 python -m pytest tests/spark/test_differential.py
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rocketmq_spark.producer.producer import Producer
from tests.support.auditor import run_audits
from tests.support.cluster import SharedCluster, create_topic
from tests.support.java import Java
from tests.support.processes import wait_for
from tests.support.read_plans import COLUMNS, TAGS, Maker, Stored, run
from tests.support.write_plans import write_plan
from tests.support.writes import messages_in

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rocketmq_spark.spark.report import Metrics

pytestmark = [pytest.mark.spark, pytest.mark.integration]

# Seeds of reads and of writes: all, and those of the short form.
READS, FEW_READS = 300, 13
WRITES, FEW_WRITES = 200, 7
# Writes that one run of the auditor compares.
AT_ONCE = 10


def seeds_of(count: int, few: int, step: int) -> list[Any]:
    """Return ranges of seeds. Those after the first ones are long."""

    def pieces(first: int, end: int) -> list[range]:
        return [range(start, min(start + step, end)) for start in range(first, end, step)]

    if chosen := os.environ.get("DIFFERENTIAL_SEEDS"):
        first, _, last = chosen.partition("-")
        return pieces(int(first), int(last or first) + 1)
    marks = [pytest.mark.long, pytest.mark.timeout(3600)]
    return [*pieces(0, few), *(pytest.param(piece, marks=marks) for piece in pieces(few, count))]


def name_of(seeds: range) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"


@pytest.fixture(scope="module")
def stored(
    spark: SparkSession, cluster: SharedCluster, java: Java, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Stored, DataFrame]:
    """A topic of two queues per broker and one of inner batches, and a table of what Java's consumer reads there."""
    name = f"differential-{uuid.uuid4().hex[:8]}"
    topics = (
        create_topic(cluster, f"{name}-plain", "NORMAL"),
        create_topic(cluster, f"{name}-inner", "NORMAL", inner=True),
    )
    rng, count = random.Random(0), 180
    with Producer("differential", name_server=cluster.name_server) as producer:
        for piece in range(3):
            numbers = range(piece * count // 3, (piece + 1) * count // 3)
            pairs = [[("colour", rng.choice("rgb")), ("n", str(number % 7))][: rng.randint(0, 2)] for number in numbers]
            columns = {
                "body": [f"{number} {'.' * rng.choice((0, 10, 40, 9000))}" for number in numbers],
                "tags": pa.array([rng.choice(TAGS) for _ in numbers], pa.string()),
                "keys": pa.array([rng.choice((None, f"k{number}", "a b")) for number in numbers], pa.string()),
                "properties": pa.array(pairs, pa.map_(pa.string(), pa.string())),
                "flag": pa.array([rng.choice((0, -1, 7)) for _ in numbers], pa.int32()),
                "shardingKey": pa.array([rng.choice((None, "a", "b", "c")) for _ in numbers], pa.string()),
            }
            producer.send_arrow(pa.table(columns), topics[0])
            producer.send_arrow(pa.table(columns), topics[1], batchType="inner", batchBytes="4k")
    wait_for(lambda: [messages_in(cluster.name_server, topic) for topic in topics] == [count, count])
    lines = java.read_topics(cluster.name_server, topics, 2 * count)
    assert len(lines) == 2 * count
    # Java's client adds them.
    for line in lines:
        for added in ("MIN_OFFSET", "MAX_OFFSET", "WAIT"):
            line["properties"].pop(added, None)
        line |= {"tags": line["properties"].get("TAGS"), "keys": line["properties"].get("KEYS")}
    schema = (
        "topic string, brokerName string, queueId int, queueOffset long, body binary, tags string, keys string,"
        " flag int, properties map<string, string>, msgId string, bornTimestamp long, storeTimestamp long,"
        " bornHost string, reconsumeTimes int"
    )
    times = [f"timestamp_millis({column}) AS {column}" if column.endswith("stamp") else column for column in COLUMNS]
    frame = spark.createDataFrame([tuple(line[column] for column in COLUMNS) for line in lines], schema)
    files = str(tmp_path_factory.mktemp("table"))
    frame.selectExpr(*times).write.mode("overwrite").parquet(files)
    offsets: dict[tuple[str, str, int], tuple[int, int]] = {}
    for line in lines:
        queue = line["topic"], line["brokerName"], line["queueId"]
        offsets[queue] = 0, max(line["queueOffset"] + 1, offsets.get(queue, (0, 0))[1])
    for topic in topics:
        for broker in cluster.brokers:
            for queue_id in (0, 1):
                offsets.setdefault((topic, broker.name, queue_id), (0, 0))
    return Stored(offsets, sorted({line["storeTimestamp"] for line in lines})), spark.read.parquet(files)


@pytest.fixture
def load(spark: SparkSession, cluster: SharedCluster, metrics: Metrics) -> Callable[..., DataFrame]:
    """Read topics; keyword arguments are options."""

    def load_from(*, streams: bool = False, **options: Any) -> DataFrame:
        reader = (spark.readStream if streams else spark.read).format("rocketmq")
        return reader.options(nameServer=cluster.name_server, **options).load().select(*COLUMNS)

    return load_from


@pytest.mark.parametrize("seeds", seeds_of(READS, FEW_READS, 1), ids=name_of)
def test_plan_of_a_read_returns_the_rows_of_the_table(
    spark: SparkSession,
    stored: tuple[Stored, DataFrame],
    load: Callable[..., DataFrame],
    tmp_path: Path,
    seeds: range,
) -> None:
    known, table = stored
    for seed in seeds:
        plan = Maker(seed, known).make()
        print(f"seed {seed}: {plan.text}", flush=True)
        run(spark, plan, load, table, tmp_path / str(seed))


@pytest.mark.parametrize("seeds", seeds_of(WRITES, FEW_WRITES, AT_ONCE), ids=name_of)
def test_writes_store_the_rows_of_their_frames(
    spark: SparkSession, cluster: SharedCluster, java: Java, metrics: Metrics, seeds: range
) -> None:
    name, plans, audits = f"differential-{uuid.uuid4().hex[:8]}", [], []
    for seed in seeds:
        topics = [create_topic(cluster, f"{name}-{seed}-{which}", "NORMAL") for which in ("a", "b")]
        plan = write_plan(seed, topics, create_topic(cluster, f"{name}-{seed}-dead", "NORMAL", 1))
        print(plan.text, flush=True)
        frame = plan.frame(spark)
        given = frame.collect()
        plan.save(frame, cluster.name_server)
        plans.append(plan)
        audits.append(plan.audit(given, settles=0.2, within=20.0))
        spark.catalog.clearCache()
    for plan, found in zip(plans, run_audits(java, cluster.name_server, audits), strict=True):
        # The plan gives rows of one key an order, or not.
        wrong = list(found.lines(*([] if plan.in_order else ["order"])))
        assert not wrong, "\n".join([plan.text, *wrong])
