"""Delayed rows in the RocksDB timer of RocketMQ 5.5: each row is delivered once, and a recalled one is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.producer.producer import Producer
from tests.support.auditor import Row, audit
from tests.support.cluster import create_topic, started
from tests.support.java import Java
from tests.support.processes import PATIENCE

pytestmark = [pytest.mark.faults, pytest.mark.integration, pytest.mark.long]

ROWS, RECALLED = 2_000, 200


@pytest.fixture(scope="module")
def timers() -> Iterator[LocalCluster]:
    """A broker whose delayed messages are in RocksDB."""
    properties = {
        "timerRocksDBEnable": True,
        "recallMessageEnable": True,
        "timerRecallToTimelineEnable": True,
        "timerRocksDBPrecisionMs": 1000,
    }
    with started(LocalCluster(broker_properties=properties, start_timeout=PATIENCE)) as cluster:
        yield cluster


@pytest.mark.parametrize("killed", [False, True], ids=["", "broker killed"])
def test_each_delayed_row_is_delivered_once_and_no_recalled_one(
    timers: LocalCluster, topic: str, java: Java, tmp_path: Path, *, killed: bool
) -> None:
    create_topic(timers, topic, "DELAY", 2)
    bodies = [f"row-{number:04}" for number in range(ROWS)]
    delays = [20_000 + number for number in range(ROWS)]
    rows = pa.table({"body": bodies, "keys": bodies, "delayMs": delays})
    with Producer("timers", name_server=timers.name_server) as producer:
        producer.send_arrow(rows, topic, recallPath=f"{tmp_path}/handles")
        saved = {row["keys"]: row for row in parquet.read_table(tmp_path / "handles").to_pylist()}
        assert saved.keys() == set(bodies)
        for body in bodies[:RECALLED]:
            producer.recall_message(topic, saved[body]["recallHandle"])
    if killed:
        timers.brokers[0].kill()
        timers.brokers[0].restart()
    kept = (Row(topic, body, body.encode(), keys=body) for body in bodies[RECALLED:])
    found = audit(java, timers.name_server, kept, settles=30.0, within=240.0)

    found.check("addedProperty")
