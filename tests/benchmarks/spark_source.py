"""A Spark session that reads a topic and drops the rows for each line on stdin; each answer is a line of JSON.

Run: python spark_source.py SOURCE ADDRESS TOPIC ROWS [JAR,JAR...], then lines with a schema, or empty for all columns
"""

from __future__ import annotations

import json
import sys
import time

from pyspark.sql import DataFrame, SparkSession

from tests.benchmarks.spark_sink import session, used


def read(spark: SparkSession, source: str, address: str, topic: str, schema: str = "") -> DataFrame:
    options = {"kafka.bootstrap.servers" if source == "kafka" else "nameServer": address, "subscribe": topic}
    reader = spark.read.format(source).options(**options).option("startingOffsets", "earliest")
    return (reader.schema(schema) if schema else reader).load()


def main(source: str, address: str, topic: str, wanted: str, jars: str = "") -> None:
    spark = session(jars)
    if source == "rocketmq":
        import rocketmq_spark

        rocketmq_spark.register(spark)
    # Check once that the source reads all rows. A broker shows stored messages a moment later.
    deadline = time.monotonic() + 60
    while (count := read(spark, source, address, topic).count()) != int(wanted):
        if time.monotonic() > deadline:
            raise SystemExit(f"{topic} has {count} rows, not {wanted}")
    for line in sys.stdin:
        rows = read(spark, source, address, topic, line.strip())
        # A first read, as Java's clients do. It restarts Python workers, which end after an idle minute.
        rows.write.format("noop").mode("overwrite").save()
        before, began = used(), time.perf_counter()
        rows.write.format("noop").mode("overwrite").save()
        took, after = time.perf_counter() - began, used()
        cpu = {name: after[name] - before[name] for name in ("jvm", "python")}
        print(json.dumps({"rows": count, "seconds": took, **cpu, "peak": after["peak"]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
