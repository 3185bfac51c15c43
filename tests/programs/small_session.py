"""Writes, reads and streams a few rows without a real server: tests/harness/class_archive.py archives its classes."""

from __future__ import annotations

import tempfile

from pyspark.sql import SparkSession

import rocketmq_spark
from rocketmq_spark.testing import FakeCluster

with FakeCluster(topics={"rows": 2}) as cluster, tempfile.TemporaryDirectory() as folder:
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    rocketmq_spark.register(spark)
    where = {"nameServer": cluster.name_server, "topic": "rows"}
    spark.range(100).selectExpr("cast(id AS string) AS body").write.format("rocketmq").options(**where).save()
    rows = spark.read.format("rocketmq").option("nameServer", cluster.name_server).load("rows")
    rows.groupBy("body").count().collect()
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    stream = numbers.selectExpr("cast(value AS string) AS body").writeStream.format("rocketmq").options(**where)
    stream.option("checkpointLocation", folder).trigger(once=True).start().awaitTermination()
    spark.stop()
