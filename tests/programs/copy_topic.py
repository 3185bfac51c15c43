"""A program that a user submits to a cluster: copies the messages of one topic to another, and prints the metrics.

usage: spark-submit ... copy_topic.py '{"source": {...}, "options": {...}}'
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession

import rocketmq_spark

arguments = json.loads(sys.argv[1])
spark = SparkSession.builder.getOrCreate()
metrics = rocketmq_spark.register(spark)
messages = spark.read.format("rocketmq").options(**arguments["source"]).load()
messages.select("body", "keys").write.format("rocketmq").options(**arguments["options"]).save()
print(json.dumps({"brokers": metrics.to_dict()}))
spark.stop()
