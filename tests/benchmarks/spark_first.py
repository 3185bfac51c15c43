"""Times the first write and the first read of a new Spark session, and prints milliseconds as a line of JSON.

Run: python spark_first.py SYSTEM NAME_SERVER TOPIC, then one empty line; SYSTEM is ``rocketmq`` or ``nothing``
"""

from __future__ import annotations

import json
import sys
import time

import rocketmq_spark
from tests.benchmarks.nothing import NothingDataSource
from tests.benchmarks.spark_sink import session

ROWS = 10


def main(system: str, name_server: str, topic: str) -> None:
    spark = session("")
    rocketmq_spark.register(spark)
    spark.dataSource.register(NothingDataSource)
    rows = spark.range(0, ROWS, 1, 1).selectExpr(
        "cast(cast(id AS string) AS binary) AS body", "cast(id AS string) keys"
    )
    options = {"nameServer": name_server, "topic": topic} if system == "rocketmq" else {}
    sys.stdin.readline()
    began = time.perf_counter()
    rows.write.format(system).options(**options).mode("append").save()
    written = time.perf_counter()
    found = spark.read.format(system).options(**options).load().select("body", "keys").collect()
    read = time.perf_counter()
    took = {"write": (written - began) * 1000, "read": (read - written) * 1000}
    print(json.dumps({**took, "rows": len(found)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
