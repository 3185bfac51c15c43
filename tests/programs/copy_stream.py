"""A driver that copies the messages of one topic to another as a stream, until all are copied.

usage: ``python copy_stream.py '{"master": "local[2]", "source": {...}, "options": {...}}'``.
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession

import rocketmq_spark

arguments = json.loads(sys.argv[1])
spark = SparkSession.builder.master(arguments["master"]).config("spark.ui.enabled", "false").getOrCreate()
rocketmq_spark.register(spark)
messages = spark.readStream.format("rocketmq").options(**arguments["source"]).load()
query = (
    messages.select("body", "keys")
    .writeStream.format("rocketmq")
    .options(**arguments["options"])
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
print(json.dumps([progress.numInputRows for progress in query.recentProgress]))
spark.stop()
