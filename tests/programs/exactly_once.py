"""Writes the lines of files exactly once, one file per micro-batch or batch write, until the job is complete.

It is complete when the file ``complete`` exists in its folder. A write that failed is repeated. With
``delivery=exactlyOnce`` each attempt writes other bodies: the line, and an id of the attempt.

usage: python exactly_once.py '{"folder": ..., "batch": false, "restarts": 20, "options": {...}}'
"""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import rocketmq_spark

arguments = json.loads(sys.argv[1])
folder = Path(arguments["folder"])
complete, files, written = folder / "complete", folder / "in", folder / "written"
spark = (
    SparkSession.builder.master("local[2,2]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.memory", "512m")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.log.level", "ERROR")
    .config("spark.sql.shuffle.partitions", "2")
    # Two tasks for a file.
    .config("spark.sql.files.openCostInBytes", "0")
    .config("spark.sql.files.maxPartitionBytes", str(arguments["bytes"] // 2 + 1))
    .config("spark.sql.streaming.pollingDelay", "100ms")
    .getOrCreate()
)
rocketmq_spark.register(spark)


def rows_of(lines: DataFrame) -> DataFrame:
    """Return the rows to write, with ``delivery=exactlyOnce`` different ones at each call."""
    attempt = uuid.uuid4().hex if arguments["options"]["delivery"] == "exactlyOnce" else "any"
    return lines.selectExpr(f"concat(value, ' {attempt}') AS body")


def stream() -> None:
    """Write new files until the job is complete."""
    query = (
        rows_of(spark.readStream.option("maxFilesPerTrigger", 1).text(str(files)))
        .writeStream.format("rocketmq")
        .options(checkpointLocation=str(folder / "checkpoint"), **arguments["options"])
        .start()
    )
    while not complete.exists():
        query.awaitTermination(1)
    query.processAllAvailable()
    query.stop()


def batches() -> None:
    """Write each file that is not noted as written, and note it, until the job is complete."""
    last = False
    while not last:
        last = complete.exists()
        for file in sorted(files.glob("[!.]*")):
            note = written / file.name
            if not note.exists():
                writer = rows_of(spark.read.text(str(file))).write.format("rocketmq")
                writer.options(writeId=file.stem, **arguments["options"]).save()
                note.touch()


for restarts_left in reversed(range(arguments["restarts"] + 1)):
    try:
        batches() if arguments["batch"] else stream()
        break
    except PySparkException as exc:
        print(f"failed: {exc}", file=sys.stderr, flush=True)
        if not restarts_left:
            raise
spark.stop()
