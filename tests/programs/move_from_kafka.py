"""Runs the recipe of docs/cookbook.md that moves a topic from Kafka, and checks the differences that it finds.

Usage: ``python -m tests.programs.move_from_kafka JSON``. The JSON has ``jars``, ``name_server``, ``kafka`` (addresses),
``folder`` and ``topic``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

import rocketmq_spark
from tests.support.processes import wait_for
from tests.support.recipes import Recipe
from tests.support.writes import messages_in

ROWS = 200


def row(number: int, hour: int | None, text: str = "") -> tuple[str, str]:
    """Return key and value of a row. A row without an hour has no time."""
    content = {"id": number, "text": text} | ({} if hour is None else {"time": f"2026-11-28T{hour:02}:30:00Z"})
    return f"key-{number}", json.dumps(content)


class Move:
    """A session, and the topic in both systems."""

    def __init__(self, jars: str, name_server: str, kafka: str, folder: str, topic: str) -> None:
        builder = SparkSession.builder.master("local[2]").config("spark.jars", jars).config("spark.log.level", "OFF")
        builder = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
        builder = builder.config("spark.sql.session.timeZone", "UTC").config("spark.sql.shuffle.partitions", "2")
        self.spark = builder.getOrCreate()
        rocketmq_spark.register(self.spark)
        places = {"127.0.0.1:9876": name_server, "127.0.0.1:9092": kafka}
        self.recipe = Recipe("Move from Kafka", places, {"orders": topic}, Path(folder))
        self._name_server, self._kafka, self._topic = name_server, kafka, topic

    def to_kafka(self, *rows: tuple[str, str | None]) -> None:
        frame = self.spark.createDataFrame(list(rows), "key string, value string")
        frame.write.format("kafka").options(**{"kafka.bootstrap.servers": self._kafka}).option(
            "topic", self._topic
        ).save()

    def to_rocketmq(self, *rows: tuple[str, str]) -> None:
        """Send rows, and return when readers see them."""
        keys, bodies = zip(*rows, strict=True)
        before = messages_in(self._name_server, self._topic)
        with rocketmq_spark.Producer("move", name_server=self._name_server) as producer:
            producer.send_arrow(pa.table({"keys": keys, "body": bodies}), self._topic)
        wait_for(lambda: messages_in(self._name_server, self._topic) == before + len(rows))

    def differences(self, names: dict[str, Any]) -> tuple[set[Any], set[Any]]:
        """Compare, and return the hours that differ with both counts, and the rows that differ with both counts."""
        names = self.recipe.run(1, **names)
        hours = {(row.hour and row.hour.hour, row.kafka, row.rocketmq) for row in names["different_hours"].collect()}
        found = self.spark.read.parquet(str(Path(self.recipe.folder, "orders-different-rows"))).collect()
        assert all(len(row.places) == row.kafka + row.rocketmq for row in found)
        return hours, {(row["key"], row.body and bytes(row.body).decode(), row.kafka, row.rocketmq) for row in found}


def main(arguments: str) -> None:
    """Run the recipe."""
    move = Move(**json.loads(arguments))
    move.to_kafka(*(row(number, 8 + number % 4) for number in range(ROWS)), row(ROWS, None), ("deleted", None))
    names = move.recipe.run(0, spark=move.spark)
    # The driver dies before the end of the micro-batch.
    move.recipe.repeat_last_micro_batch("orders-from-kafka")
    move.recipe.run(0, spark=move.spark)
    assert move.differences(names) == ({(None, 2, 1)}, {("deleted", None, 1, 0)})

    only_in_kafka, only_in_rocketmq = row(1000, 9), row(1001, 10)
    old, new = row(1002, 11, "old"), row(1002, 11, "new")
    move.to_kafka(only_in_kafka, old)
    move.to_rocketmq(only_in_rocketmq, new)
    each = ROWS // 4
    hours = {(None, 2, 1), (9, each + 1, each), (10, each, each + 1), (11, each + 1, each + 1)}
    extra = {("deleted", None, 1, 0), (*only_in_rocketmq, 0, 1), (*new, 0, 1)}
    assert move.differences(names) == (hours, extra | {(*only_in_kafka, 1, 0), (*old, 1, 0)})
    before = messages_in(move._name_server, move._topic)
    for _ in range(2):
        move.recipe.run(2, **names)
    wait_for(lambda: messages_in(move._name_server, move._topic) == before + 2)
    assert move.differences(names)[1] == extra
    move.spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
