"""Archives of the classes that JVMs of the tests load (class data sharing).

With one a JVM starts in two thirds of the time. There is one for Spark sessions, and one for the servers of a local
cluster. A JVM ignores an archive of another Java or of other jars.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.cluster.jars import RELEASE, cache_folder
from rocketmq_spark.cluster.process import find_java
from rocketmq_spark.errors import ClusterError
from tests.support.processes import PATIENCE, SERIAL_GC, SPARK_HOME

_QUIETLY: Final = "-Xshare:auto -Xlog:cds=off"
_SESSION: Final = """
import tempfile
import rocketmq_spark
from pyspark.sql import SparkSession
from rocketmq_spark.testing import FakeCluster
session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config("spark.log.level", "OFF")
spark = session.getOrCreate()
rocketmq_spark.register(spark)
rows = spark.range(1000).selectExpr("cast(id as string) AS body")
assert rows.mapInArrow(lambda batches: batches, "body string").groupBy("body").count().count() == 1000
with FakeCluster(1, topics={"topic": 1, "copy": 1}) as cluster, tempfile.TemporaryDirectory() as folder:
    servers = {"nameServer": cluster.name_server}
    rows.write.format("rocketmq").options(**servers, topic="topic").save()
    assert spark.read.format("rocketmq").options(**servers).load("topic").select("body").distinct().count() == 1000
    stream = spark.readStream.format("rocketmq").options(**servers, startingOffsets="earliest").load("topic")
    copy = stream.select("body").writeStream.format("rocketmq").options(**servers, topic="copy")
    copy.option("checkpointLocation", folder).trigger(availableNow=True).start().awaitTermination()
jvm = spark.sparkContext._gateway.proc
spark.stop()
# The JVM writes the archive at its end, which is that of its input.
jvm.stdin.close()
jvm.wait()
"""


def path_of(kind: str) -> Path | None:
    """Return where the archive of "spark" or "servers" is, for this Java and these releases; None without Java."""
    try:
        java = find_java().resolve()
    except ClusterError:
        return None
    jars = SPARK_HOME / "jars"
    facts = f"{java} {java.stat().st_mtime_ns} "
    facts += f"{jars} {jars.stat().st_mtime_ns}" if kind == "spark" else RELEASE
    return cache_folder() / f"{kind}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.jsa"


def options(kind: str) -> str:
    """Return the options of a JVM that uses an archive; none without the archive."""
    archive = path_of(kind)
    return "" if archive is None or not archive.exists() else f"-XX:SharedArchiveFile={archive} {_QUIETLY}"


def make_all() -> None:
    """Make the archives that do not exist; one process at a time."""
    for kind, make in (("spark", _of_a_session), ("servers", _of_a_broker)):
        _make(kind, make)


def _make(kind: str, make: Callable[[Path], None]) -> None:
    archive = path_of(kind)
    if archive is None:
        return
    archive.parent.mkdir(parents=True, exist_ok=True)
    with (archive.parent / f".{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if archive.exists():
            return
        for old in archive.parent.glob(f"{kind}-*.jsa"):
            old.unlink()
        new = archive.with_suffix(".new")
        new.unlink(missing_ok=True)
        make(new)
        # Without it tests run as before.
        if new.exists():
            new.rename(archive)


def _of_a_session(archive: Path) -> None:
    options = f"{SERIAL_GC} -XX:ArchiveClassesAtExit={archive} -Xlog:cds=off"
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_SUBMIT_OPTS": options}
    command = [sys.executable, "-c", _SESSION]
    _run(command, environment)


def _of_a_broker(archive: Path) -> None:
    # Servers of a temporary cluster are killed, so they cannot write an archive at their end.
    with LocalCluster(jvm_options=["-XX:+RecordDynamicDumpInfo", "-Xlog:cds=off"], start_timeout=PATIENCE) as cluster:
        jcmd = find_java().resolve().with_name("jcmd")
        if jcmd.exists():
            _run([str(jcmd), str(cluster.brokers[0].pid), "VM.cds", "dynamic_dump", str(archive)], dict(os.environ))


def _run(command: list[str], environment: dict[str, str]) -> None:
    quiet = subprocess.DEVNULL
    subprocess.run(command, env=environment, stdout=quiet, stderr=quiet, timeout=PATIENCE, check=False)
