"""Runs the recipes of docs/cookbook.md for Delta and Iceberg, in a session with the settings of the page.

Usage: ``python -m tests.programs.lake JSON``. The JSON has ``jars``, ``name_server``, ``folder`` and ``topics``, which
are the topics of the test by their names on the page. The program writes rows, runs a recipe, and compares its table.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

import rocketmq_spark
from tests.support.processes import wait_for
from tests.support.recipes import ENDS, Recipe, ends_of, settings_of
from tests.support.writes import messages_in

DELTA, ICEBERG, CHANGES = "Lake: Delta", "Lake: Iceberg", "Apply change data"
ROWS = 300


class Lake:
    """A session, and the topics and folders of the recipes."""

    def __init__(self, jars: str, name_server: str, folder: str, topics: dict[str, str]) -> None:
        self._name_server = name_server
        self.folder = Path(folder)
        self.topics = topics
        builder = SparkSession.builder.master("local[2]").config("spark.jars", jars).config("spark.log.level", "OFF")
        settings = {
            "spark.ui.enabled": "false",
            "spark.driver.extraJavaOptions": "-XX:+UseSerialGC",
            "spark.sql.session.timeZone": "UTC",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "1",
            "spark.databricks.delta.snapshotPartitions": "1",
            "spark.sql.warehouse.dir": f"{folder}/warehouse",
            **settings_of(DELTA, folder),
            **settings_of(ICEBERG, folder),
        }
        for name, value in settings.items():
            builder = builder.config(name, value)
        self.spark = builder.getOrCreate()
        rocketmq_spark.register(self.spark)

    def recipe(self, name: str) -> Recipe:
        ends = {ENDS: json.dumps(ends_of(self._name_server, self.topics["orders"]))}
        return Recipe(name, {"127.0.0.1:9876": self._name_server, **ends}, self.topics, self.folder)

    def send(self, topic: str, bodies: list[str], **columns: Any) -> None:
        """Send rows, and return when readers see them."""
        where = self.topics[topic]
        before = messages_in(self._name_server, where)
        with rocketmq_spark.Producer("lake", name_server=self._name_server) as producer:
            producer.send_arrow(pa.table({"body": bodies, **columns}), where)
        wait_for(lambda: messages_in(self._name_server, where) == before + len(bodies))

    def bodies(self, table: str) -> Counter[str]:
        return Counter(bytes(row.body).decode() for row in self.spark.table(table).select("body").collect())


def fill(lake: Lake, name: str, checkpoint: str, table: str) -> None:
    """Write to a table as a stream, repeat a micro-batch, delete rows, and load them again by time and by offsets."""
    recipe = lake.recipe(name)
    recipe.run(0, spark=lake.spark)
    expected = lake.bodies(table)
    assert expected.total() == ROWS
    recipe.repeat_last_micro_batch(checkpoint)
    names = recipe.run(0, spark=lake.spark)
    assert lake.bodies(table) == expected
    lake.spark.sql(f"DELETE FROM {table} WHERE queueOffset % 3 = 0")
    backfill = lake.recipe(DELTA)
    names = backfill.run(1, **names)
    backfill.run(2, **names)  # The calls of the page: an hour without messages, and all offsets
    assert lake.bodies(table) == expected
    names["backfill"](startingTimestamp="0")
    assert lake.bodies(table) == expected


def merge_changes(lake: Lake, namespace: str, using: str) -> None:
    """Apply changes of Debezium and Canal to a table with MERGE, in two micro-batches. The second one comes twice."""
    lake.spark.sql(f"USE {namespace}")
    lake.spark.sql(f"CREATE TABLE customers (id bigint, name string, balance decimal(12, 2)) USING {using}")
    names = lake.recipe(CHANGES).run(0, 2, spark=lake.spark)
    messages = lake.spark.read.format("rocketmq").options(**names["server"]).load(lake.topics["customer-changes"])
    names["merge"](messages.where("queueOffset < 2"), 0)
    assert lake.spark.table("customers").count() == 2
    for _ in range(2):
        names["merge"](messages.where("queueOffset >= 2"), 1)
        [row] = lake.spark.table("customers").collect()
        assert (row.id, row["name"], str(row.balance)) == (2, "bob", "2.50")


def main(arguments: str) -> None:
    """Run the recipes."""
    lake = Lake(**json.loads(arguments))
    lake.send("orders", [f"row {number}" for number in range(ROWS)])
    changes: list[dict[str, Any]] = [
        {"op": "c", "before": None, "after": {"id": 1, "name": "ada", "balance": 1}},
        {"op": "c", "before": None, "after": {"id": 2, "name": "bo", "balance": 1}},
        {"op": "u", "before": {"id": 2}, "after": {"id": 2, "name": "bob", "balance": 2.5}},
        {"type": "DELETE", "data": [{"id": "1", "name": "ada", "balance": "1"}], "old": None},
    ]
    lake.send("customer-changes", list(map(json.dumps, changes)), shardingKey=["customers"] * len(changes))
    fill(lake, DELTA, "lake-delta-checkpoint", f"delta.`{lake.folder}/lake-delta/orders`")
    fill(lake, ICEBERG, "lake-iceberg-checkpoint", "lake.shop.orders")
    merge_changes(lake, "spark_catalog.default", "delta")
    merge_changes(lake, "lake.shop", "iceberg")
    lake.spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
