"""A program that a user submits to a cluster: writes numbered rows, and prints the path of the package and metrics.

usage: spark-submit ... write.py '{"rows": ..., "partitions": ..., "options": {...}, "slow": false}'
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

import rocketmq_spark


def slow_at_first(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass everything on; of partition 0, the first attempt then takes its time."""
    yield from batches
    context = TaskContext.get()
    if context is not None and not context.partitionId() and not context.attemptNumber():
        time.sleep(60)


def home(_: object) -> str:
    """Return where a task finds the package."""
    import rocketmq_spark

    return rocketmq_spark.__file__


arguments = json.loads(sys.argv[1])
spark = SparkSession.builder.getOrCreate()
metrics = rocketmq_spark.register(spark)
partitions = arguments["partitions"]
homes = set(spark.sparkContext.parallelize(range(2), 2).map(home).collect())
frame = spark.range(0, arguments["rows"], 1, partitions).selectExpr(
    "rpad(cast(id as string), 100, '.') AS body", "concat('k', id) AS keys"
)
if arguments.get("slow"):
    frame = frame.mapInArrow(slow_at_first, frame.schema)
frame.write.format("rocketmq").options(**arguments["options"]).save()
print(json.dumps({"homes": [rocketmq_spark.__file__, *homes], "brokers": metrics.to_dict()}))
spark.stop()
