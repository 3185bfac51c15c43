"""An archive of the classes that a Spark session loads (class data sharing): a JVM starts in two thirds of the time.

A JVM ignores an archive of another Java, of another PySpark, or that does not exist.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from rocketmq_spark.cluster.jars import cache_folder
from rocketmq_spark.cluster.process import find_java
from rocketmq_spark.errors import ClusterError
from tests.support.processes import PATIENCE, SERIAL_GC, SPARK_HOME

_SESSION: Final = """
import rocketmq_spark
from pyspark.sql import SparkSession
session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config("spark.log.level", "OFF")
spark = session.getOrCreate()
rocketmq_spark.register(spark)
rows = spark.range(1000).selectExpr("cast(id as string) AS body")
assert rows.mapInArrow(lambda batches: batches, "body string").groupBy("body").count().count() == 1000
jvm = spark.sparkContext._gateway.proc
spark.stop()
# The JVM writes the archive at its end, which is that of its input.
jvm.stdin.close()
jvm.wait()
"""


def path_of_archive() -> Path | None:
    """Return where the archive for this Java and this PySpark is; None without Java."""
    try:
        java = find_java().resolve()
    except ClusterError:
        return None
    jars = SPARK_HOME / "jars"
    facts = f"{java} {java.stat().st_mtime_ns} {jars} {jars.stat().st_mtime_ns}"
    return cache_folder() / f"spark-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.jsa"


def options() -> str:
    """Return the options of a Spark JVM that uses the archive, if it exists when the JVM starts."""
    archive = path_of_archive()
    return SERIAL_GC if archive is None else f"{SERIAL_GC} -XX:SharedArchiveFile={archive} -Xshare:auto -Xlog:cds=off"


def make() -> None:
    """Make the archive, unless it exists; one process at a time."""
    archive = path_of_archive()
    if archive is None:
        return
    archive.parent.mkdir(parents=True, exist_ok=True)
    with archive.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if archive.exists():
            return
        for old in archive.parent.glob("spark-*.jsa"):
            old.unlink()
        made = archive.with_suffix(".new")
        made.unlink(missing_ok=True)
        options = f"{SERIAL_GC} -XX:ArchiveClassesAtExit={made} -Xlog:cds=off"
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_SUBMIT_OPTS": options}
        subprocess.run(
            [sys.executable, "-c", _SESSION],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
        )
        # Without it tests run as before.
        if made.exists():
            made.rename(archive)
