"""A program that a user submits to a cluster: streams the lines of files, one file per micro-batch, until all are sent.

usage: spark-submit ... stream.py '{"files": ..., "options": {...}}'
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession

import rocketmq_spark

arguments = json.loads(sys.argv[1])
spark = SparkSession.builder.getOrCreate()
metrics = rocketmq_spark.register(spark)
lines = spark.readStream.option("maxFilesPerTrigger", 1).text(arguments["files"])
query = (
    lines.selectExpr("value AS body", "concat('k', substring_index(value, '.', 1)) AS keys")
    .writeStream.format("rocketmq")
    .options(**arguments["options"])
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
print(json.dumps({"brokers": metrics.to_dict(), "batches": [batch for _, batch in metrics.writes()]}))
spark.stop()
