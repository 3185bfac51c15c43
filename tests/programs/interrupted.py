"""Writes rows with tasks of which half never end, twice; the caller interrupts both writes. Prints lines of JSON.

usage: interrupted.py NAME_SERVER TOPIC
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

import rocketmq_spark


def first_two_end(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass everything on; from partition 2 on, never end."""
    yield from batches
    context = TaskContext.get()
    while context is not None and context.partitionId() > 1:
        time.sleep(1)


def rows() -> int:
    """Return the rows in the metrics."""
    return sum(broker["rows"] for broker in metrics.to_dict().values())


def tasks() -> tuple[int, int]:
    """Return how many tasks of the running jobs have ended, and how many run, as Spark's status tracker says.

    It may be late.
    """
    tracker = spark.sparkContext.statusTracker()
    jobs = map(tracker.getJobInfo, tracker.getActiveJobsIds())
    stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
    return (
        sum(stage.numCompletedTasks for stage in stages if stage),
        sum(stage.numActiveTasks for stage in stages if stage),
    )


def await_reports() -> None:
    """Tell the caller when the two tasks that end have reported their rows, and Spark knows that the others run."""
    while rows() < 2000 or tasks() != (2, 2):
        time.sleep(0.1)
    print(json.dumps({"reported": rows()}), flush=True)


def await_cancelled() -> None:
    """Return when no job runs."""
    while spark.sparkContext.statusTracker().getActiveJobsIds():
        time.sleep(0.1)


name_server, topic = sys.argv[1:]
settings: dict[str, bool | float | int | str | None] = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.log.level": "OFF",
}
settings["spark.ui.showConsoleProgress"] = "false"
spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
metrics = rocketmq_spark.register(spark)
frame = spark.range(0, 4000, 1, 4).selectExpr("cast(id as string) AS body")
frame = frame.mapInArrow(first_two_end, frame.schema)
options = {"nameServer": name_server, "topic": topic}
threading.Thread(target=await_reports, daemon=True).start()
try:
    with rocketmq_spark.live(spark, topic, name_server):
        frame.write.format("rocketmq").options(**options).save()
except KeyboardInterrupt:
    await_cancelled()
    print(json.dumps({"interrupted": "save", "rows": rows()}), flush=True)
try:
    rocketmq_spark.write(frame, nameServer=name_server, topic=f"{topic}-2")
except KeyboardInterrupt:
    await_cancelled()
    print(json.dumps({"interrupted": "write", "rows": rows()}), flush=True)
# The session works as before.
spark.range(10).selectExpr("cast(id as string) AS body").write.format("rocketmq").options(**options).save()
print(json.dumps({"rows": rows()}), flush=True)
spark.stop()
