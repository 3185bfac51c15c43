"""A stream that a test kills: it writes keys to files, and waits within a micro-batch.

usage: python read_stream.py '{"batch": ..., "gate": ..., "options": {...}, "sink": {...}}'
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

import rocketmq_spark

arguments = json.loads(sys.argv[1])
gate = Path(arguments["gate"])


def held_up(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass everything on; in that micro-batch, a partition says that it has, and then takes its time."""
    yield from batches
    context = TaskContext.get()
    if context is not None and context.getLocalProperty("streaming.sql.batchId") == str(arguments["batch"]):
        gate.touch()
        time.sleep(120)


spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.driver.host", "127.0.0.1")
    .getOrCreate()
)
rocketmq_spark.register(spark)
keys = spark.readStream.format("rocketmq").options(**arguments["options"]).load().select("keys")
query = keys.mapInArrow(held_up, keys.schema).writeStream.format("parquet").options(**arguments["sink"]).start()
query.awaitTermination()
