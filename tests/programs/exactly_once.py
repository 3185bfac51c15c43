"""Writes rows exactly once until the job is complete: the file ``complete`` exists in its folder.

The rows are the lines of files, one file per micro-batch or batch write, or with ``source`` the messages of a topic.
A write that failed is repeated, and ``restarts`` times in a row if nothing is written in between. With
``delivery=exactlyOnce`` each attempt writes other bodies: the line, and an id of the attempt. ``remote`` is the address
of a server of Spark Connect.

usage: python exactly_once.py '{"folder": ..., "batch": false, "restarts": 20, "options": {...}, "conf": {...}}'
"""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import rocketmq_spark

arguments = json.loads(sys.argv[1])
folder = Path(arguments["folder"])
complete, files, written = folder / "complete", folder / "in", folder / "written"
builder = SparkSession.builder
if arguments["remote"]:
    builder = builder.remote(arguments["remote"])
else:
    for name, value in arguments["conf"].items():
        builder = builder.config(name, value)
spark = builder.getOrCreate()
rocketmq_spark.register(spark)


def written_writes() -> int:
    """Return the number of writes that Spark has noted as complete."""
    where = written if arguments["batch"] else folder / "checkpoint" / "commits"
    return sum(1 for _ in where.glob("[0-9]*"))


def rows_of(lines: DataFrame) -> DataFrame:
    """Return the rows to write, with ``delivery=exactlyOnce`` different ones at each call."""
    attempt = uuid.uuid4().hex if arguments["options"]["delivery"] == "exactlyOnce" else "any"
    return lines.selectExpr(f"concat(value, ' {attempt}') AS body")


def stream() -> None:
    """Write new files until the job is complete."""
    if arguments["source"]:
        rows = spark.readStream.format("rocketmq").options(**arguments["source"]).load().select("body", "keys")
    else:
        rows = rows_of(spark.readStream.option("maxFilesPerTrigger", 1).text(str(files)))
    query = (
        rows.writeStream.format("rocketmq")
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


done, failures = written_writes(), 0
while True:
    try:
        batches() if arguments["batch"] else stream()
        break
    # PySpark leaves the error of a killed worker that plans as it is.
    except (PySparkException, Py4JJavaError) as exc:
        print(f"failed: {exc}", file=sys.stderr, flush=True)
        failures = failures + 1 if written_writes() == done else 1
        done = written_writes()
        if failures > arguments["restarts"]:
            raise
spark.stop()
