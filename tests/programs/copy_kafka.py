"""Runs the recipe that copies a topic from Kafka to RocketMQ and back, and compares the copy with the original.

Usage: ``python -m tests.programs.copy_kafka JARS RECIPE TOPIC BOOTSTRAP_SERVERS``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pyspark.sql import Row, SparkSession

import rocketmq_spark

ROWS = 500


def main(jars: str, recipe: str, topic: str, servers: str) -> None:
    """Write records to ``TOPIC-in``, run the recipe, and compare ``TOPIC-out`` with them."""
    builder = SparkSession.builder.master("local[2]").config("spark.jars", jars).config("spark.log.level", "OFF")
    spark = builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    rocketmq_spark.register(spark)
    originals = spark.range(ROWS).selectExpr(
        "CAST(concat('key-', id % 9) AS BINARY) AS key",
        "CAST(concat('value ', id) AS BINARY) AS value",
        "array(named_struct('key', 'source', 'value', CAST(concat('till ', id % 3) AS BINARY))) AS headers",
    )
    brokers = {"kafka.bootstrap.servers": servers}
    originals.write.format("kafka").options(**brokers, topic=f"{topic}-in", includeHeaders="true").save()
    names: dict[str, Any] = {"spark": spark}
    exec(compile(Path(recipe).read_text(encoding="utf-8"), recipe, "exec"), names)

    def read(name: str) -> Any:
        reader = spark.read.format("kafka").options(**brokers, subscribe=name, includeHeaders="true")
        return reader.load()

    copied = names["to_kafka"](
        spark.read.format("rocketmq").options(**names["server"], subscribe=f"{topic}-copied").load()
    )
    # The columns of a read of Kafka, in its order and of its types.
    columns = [(field.name, field.dataType) for field in read(f"{topic}-in").schema]
    assert [(field.name, field.dataType.simpleString()) for field in copied.schema] == [
        (name, kind.simpleString()) for name, kind in columns
    ]
    assert rows_of(read(f"{topic}-out")) == rows_of(read(f"{topic}-in"))
    spark.stop()


def rows_of(records: Any) -> list[tuple[bytes, bytes, bytes]]:
    """Return key, value and the header ``source`` of each record, in the order of values."""

    def source(row: Row) -> bytes:
        return next(bytes(header.value) for header in row.headers if header.key == "source")

    return sorted((bytes(row.key), bytes(row.value), source(row)) for row in records.collect())


if __name__ == "__main__":
    main(*sys.argv[1:])
