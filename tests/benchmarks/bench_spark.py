"""`df.write` from Parquet in ``local[2]``, against Spark's own Kafka sink writing the same rows to a local Kafka.

Run: make bench (python -m tests.benchmarks.bench_spark [rounds] [million rows a write])

Rows have a body of 100 random bytes, a key and a tag; Kafka gets body and key. Each task writes a million rows. Kafka's
producer has linger 20 ms, batches of 256 KiB and acks 1. Its sink runs in the PySpark of its connector, in an
environment in the user's cache folder; our sink runs in the installed PySpark. The sessions live through all rounds,
and two rounds of writes before the first one do not count. Processor time of the client is that of the JVM and the
Python workers. The broker's includes the work after its acknowledgements.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rocketmq_spark import LocalCluster
from rocketmq_spark.cluster.jars import cache_folder
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.benchmarks.contest import (
    FORGETFUL,
    Figure,
    Program,
    await_rest,
    by_name,
    cpu_seconds,
    ratios,
    rounds_of,
    show,
)
from tests.benchmarks.kafka import Kafka, jars_of

SPARK = "4.0.0"
CONNECTOR = ("org.apache.spark", "spark-sql-kafka-0-10_2.13", SPARK)
MILLION = 1_000_000
QUEUES = 8
# Without an index of keys and unique ids.
UNINDEXED = {**FORGETFUL, "messageIndexEnable": False}
# The broker writes each batch with one system call, as Kafka does. On plain topics this gains nothing, because the
# broker reads the messages back one by one.
AS_ONE_UNIT = {**FORGETFUL, "writeWithoutMmap": True}


def environment() -> Path:
    """Return the interpreter of an environment with the PySpark of Kafka's connector, made at the first call."""
    folder = cache_folder() / "bench" / f"pyspark-{SPARK}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, f"pyspark=={SPARK}", "psutil"], check=True)
        (folder / "complete").touch()
    return python


def make_rows(path: Path) -> None:
    """Write a million rows to a Parquet file, which Spark reads in one task."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = pa.py_buffer(np.random.default_rng(7).bytes(100 * MILLION))
    bodies = pa.FixedSizeBinaryArray.from_buffers(pa.binary(100), MILLION, [None, content]).cast(pa.binary())
    keys = pa.array([f"key-{row + MILLION}" for row in range(MILLION)])
    rows = pa.table({"body": bodies, "keys": keys, "tags": pa.array(["tag"] * MILLION)})
    pq.write_table(rows, path, row_group_size=MILLION)


class Session(Program):
    """A Spark session in another process, which writes or reads on request.

    `script` is a file of this folder. `system` is ``kafka``, or a system for the installed PySpark. The script also
    gets `arguments`, and `environ` as well as the environment of this process.
    """

    def __init__(self, script: str, system: str, *arguments: object, environ: Mapping[str, str] | None = None) -> None:
        python = environment() if system == "kafka" else Path(sys.executable)
        command = [str(python), str(Path(__file__).with_name(script)), system, *map(str, arguments)]
        super().__init__(command, {"SPARK_LOCAL_IP": "127.0.0.1", **(environ or {})})


def sink(name: str, address: str, topic: str, parquet: Path, jars: str = "") -> Session:
    """Return a session that writes to one sink; a request is the number of million rows, and of tasks if it differs."""
    return Session("spark_sink.py", name, address, topic, parquet, jars)


def create_topic(cluster: LocalCluster, topic: str, attributes: str = "") -> None:
    with RemotingTransport([cluster.name_server]) as transport:
        transport.create_topic(cluster.brokers[0].address, topic, QUEUES, 6, 5.0, attributes=attributes)


def writes(parquet: Path, rounds: int, millions: int) -> Iterator[Figure]:
    """Rows per second, and processor time."""
    jars = ",".join(map(str, jars_of(*CONNECTOR)))
    with contextlib.ExitStack() as stack:
        plain, unindexed, inner = (
            stack.enter_context(LocalCluster(broker_properties=one)) for one in (FORGETFUL, UNINDEXED, AS_ONE_UNIT)
        )
        kafka = stack.enter_context(Kafka())
        create_topic(plain, "plain")
        create_topic(unindexed, "plain")
        create_topic(inner, "inner", "+queue.type=BatchCQ")
        sinks = {
            "rocketmq": stack.enter_context(sink("rocketmq", plain.name_server, "plain", parquet)),
            "anonymous": stack.enter_context(sink("anonymous", plain.name_server, "plain", parquet)),
            "unindexed": stack.enter_context(sink("rocketmq", unindexed.name_server, "plain", parquet)),
            "inner": stack.enter_context(sink("inner", inner.name_server, "inner", parquet)),
            "kafka": stack.enter_context(sink("kafka", kafka.address, "bench", parquet, jars)),
            "nothing": stack.enter_context(sink("nothing", "", "", parquet)),
        }
        brokers = dict.fromkeys(sinks, plain.brokers[0].pid)
        brokers |= {"unindexed": unindexed.brokers[0].pid, "inner": inner.brokers[0].pid, "kafka": kafka.pid}

        def measure(name: str) -> dict[str, Any]:
            # The memory of a session that was idle for a while may have to be read back first.
            sinks[name].ask(1)
            for cluster in (plain, unindexed, inner):
                await_rest(cluster)
            before = cpu_seconds(brokers[name])
            said = sinks[name].ask(millions)
            # Brokers index the rows after they have acknowledged them.
            for cluster in (plain, unindexed, inner):
                await_rest(cluster)
            return {**said, "broker": cpu_seconds(brokers[name]) - before}

        for name in sinks:
            measure(name)
        said = rounds_of(list(sinks), rounds, measure)
    taken = by_name([{name: one["rows"] / one["seconds"] for name, one in of.items()} for of in said])
    against = "df.write, 100-byte bodies, against Spark's Kafka sink"
    yield Figure(against, ratios(taken["rocketmq"], taken["kafka"]), 0.8)
    yield Figure("the same, messageIndexEnable=false", ratios(taken["unindexed"], taken["kafka"]), 1.0)
    yield Figure("the same to a BatchCQ topic (writeWithoutMmap=true)", ratios(taken["inner"], taken["kafka"]), 1.3)
    yield Figure("df.write, uniqueKey=false, against uniqueKey=true", ratios(taken["anonymous"], taken["rocketmq"]))

    def spent(name: str, *processes: str) -> list[float]:
        return [sum(of[name][process] for process in processes) / millions for of in said]

    client = {name: spent(name, "jvm", "python") for name in ("rocketmq", "kafka")}
    yield Figure(
        "client CPU (JVM and Python), against the Kafka sink's", ratios(client["rocketmq"], client["kafka"]), 1.0, True
    )
    own = f"{statistics.median(spent('nothing', 'python')):.2f} with a sink that does nothing"
    yield Figure("CPU seconds of Python's workers, per million rows", spent("rocketmq", "python"), 0.4, True, own)
    titles = {
        "rocketmq": "plain topic",
        "unindexed": "messageIndexEnable=false",
        "inner": "BatchCQ topic",
        "kafka": "Kafka",
    }
    for name, title in titles.items():
        processes = "jvm", "python", "broker"
        whole = spent(name, *processes)
        parts = ", ".join(f"{part} {statistics.median(spent(name, part)):.2f}" for part in processes)
        allowed = (os.cpu_count() or 1) / statistics.median(whole) * 1000
        note = f"{parts}; {os.cpu_count()} processors allow {allowed:.0f} thousand rows/s"
        yield Figure(f"CPU seconds of all processes per million rows, {title}", whole, note=note)


def memory(parquet: Path) -> Iterator[Figure]:
    """The most memory that a worker has, by how much it writes in one task."""
    peaks = []
    with LocalCluster(broker_properties=FORGETFUL) as cluster:
        create_topic(cluster, "plain")
        for millions in (1, 10):
            with sink("rocketmq", cluster.name_server, "plain", parquet) as session:
                peaks.append(session.ask(millions, 1)["peak"])
    most = f"{peaks[1] / 1e6:.0f} MB for 10 million rows"
    yield Figure("memory of a worker, 10 million rows against 1 million", [peaks[1] / peaks[0]], 1.1, True, most)


def figures(rounds: int, millions: int) -> Iterator[Figure]:
    """Measure everything here."""
    with tempfile.TemporaryDirectory() as folder:
        parquet = Path(folder) / "rows.parquet"
        make_rows(parquet)
        yield from writes(parquet, rounds, millions)
        yield from memory(parquet)


if __name__ == "__main__":
    show(figures, sys.argv[1:], 5, 4)
