"""The first program of a new user: writes numbered rows, and reads the offsets of the write's receipt.

usage: python round_trip.py '{"rows": ..., "nameServer": "...", "topic": "..."}'
"""

from __future__ import annotations

import json
import os
import sys

# Spark's workers run this interpreter.
os.environ["PYSPARK_PYTHON"] = sys.executable

import pyspark
from pyspark.sql import SparkSession

import rocketmq_spark

arguments = json.loads(sys.argv[1])
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
metrics = rocketmq_spark.register(spark)
servers = {"nameServer": arguments["nameServer"]}
rows = spark.range(arguments["rows"]).selectExpr("concat('row ', id) AS body", "cast(id AS string) AS keys")
rows.write.format("rocketmq").options(**servers, topic=arguments["topic"]).save()
receipt = json.dumps(metrics.to_dict())
read = spark.read.format("rocketmq").options(**servers, startingOffsets=receipt, endingOffsets=receipt).load()
found = sorted(int(keys) for keys, body in read.select("keys", "body").collect() if body == f"row {keys}".encode())
homes = [module.__file__ for module in (rocketmq_spark, pyspark)]
print(json.dumps({"homes": homes, "pyspark": pyspark.__version__, "found": found}))
spark.stop()
