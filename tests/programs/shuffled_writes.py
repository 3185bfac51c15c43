"""A program that a user submits to a cluster: some writes of rows from a shuffle, one after the other.

The rows of each partition are sorted, because a shuffle delivers them in any order. The program prints the metrics.

usage: spark-submit ... shuffled_writes.py '{"writes": ..., "rows": ..., "partitions": 4, "options": {...}}'
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession

import rocketmq_spark

arguments = json.loads(sys.argv[1])
spark = SparkSession.builder.getOrCreate()
metrics = rocketmq_spark.register(spark)
parts = arguments.get("partitions", 4)
for number in range(arguments["writes"]):
    first = number * arguments["rows"]
    numbers = spark.range(first, first + arguments["rows"], 1, parts)
    rows = numbers.repartition(parts, "id").sortWithinPartitions("id")
    writer = rows.selectExpr("cast(id AS string) AS body").write.format("rocketmq")
    writer.options(writeId=f"{number:05}", **arguments["options"]).save()
print(json.dumps(metrics.recovered_rows()))
spark.stop()
