"""Writes while Spark itself fails, on a standalone cluster to which each submission ships the package."""

from __future__ import annotations

import os
import shutil
import signal
import tarfile
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyspark.sql import SparkSession

from rocketmq_spark import Producer
from rocketmq_spark.spark.report import Metrics
from tests.support.auditor import audit, numbered_rows
from tests.support.cluster import SharedCluster
from tests.support.java import Java
from tests.support.processes import StandaloneCluster, descendants, processes
from tests.support.writes import WIDTH, Ledger, await_messages, failing_late, numbered, retries_of, rows
from tests.tools.packages import Built

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]

# At this rate a write lasts seconds on any machine, so the fault falls into it.
SLOWLY = {"maxRatePerSecond": "4000", "maxRateTasks": "2", "batchBytes": "16k", "rowId": "true"}


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    with StandaloneCluster(tmp_path_factory.mktemp("standalone")) as running:
        yield running


@pytest.fixture(scope="module")
def wheel(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the package, renamed to ``.zip``, which PySpark adds to its path."""
    return Path(shutil.copy(built.pure, tmp_path_factory.mktemp("wheel") / "rocketmq_spark.zip"))


@pytest.fixture
def options(cluster: SharedCluster, topic: str, make_topic: Callable[..., str]) -> dict[str, str]:
    """Options of a write to the test's topic."""
    return {"nameServer": cluster.name_server, "topic": make_topic("NORMAL", queues=4), **SLOWLY}


@pytest.fixture
def addresses(cluster: SharedCluster) -> list[str]:
    return [broker.address for broker in cluster.brokers]


def await_stored(options: dict[str, str], messages: int) -> None:
    await_messages(options["nameServer"], options["topic"], messages)


def settle(
    ledger: Ledger, fault: str, options: dict[str, str], rows: int, facts: dict[str, Any], width: int = 100
) -> None:
    """Check that every row is stored, some more than once, and that only committed attempts were counted."""
    account = ledger.settle(fault, options["nameServer"], options["topic"], rows, retries_of(facts), width=width)
    assert account.repeats > 0
    assert sum(broker["rows"] for broker in facts.values()) == rows


@pytest.mark.long
def test_killed_executor_loses_no_row_of_write_with_shipped_wheel(
    standalone: StandaloneCluster,
    wheel: Path,
    options: dict[str, str],
    addresses: list[str],
    ledger: Ledger,
) -> None:
    rows = 12_000
    arguments = {"rows": rows, "partitions": 4, "options": options}
    with ledger.watch([options["nameServer"]], options["topic"], addresses):
        driver = standalone.submit("write", arguments, "--py-files", str(wheel))
        await_stored(options, rows // 4)
        victim = standalone.executors()[0]
        orphans = descendants(victim)
        os.kill(victim, signal.SIGKILL)
        result = driver.result()
    # All Python workers imported the package from the wheel.
    assert {Path(home).parents[1].name for home in result["homes"]} == {wheel.name}
    settle(ledger, "executor killed", options, rows, result["brokers"])
    # The executor's Python workers ended with it: none of them still sends rows of a task that Spark runs again.
    assert orphans
    assert not orphans & processes().keys()


@pytest.mark.long
@pytest.mark.parametrize("victim", ["spark", "python"])
def test_killed_worker_loses_no_row_that_is_read_and_written(
    wheel: Path,
    options: dict[str, str],
    addresses: list[str],
    ledger: Ledger,
    topic: str,
    make_topic: Callable[..., str],
    tmp_path: Path,
    victim: str,
) -> None:
    count = 12_000
    # A task for each queue of two brokers, so that each executor runs its first task when the fault comes.
    source = {
        "nameServer": options["nameServer"],
        "topic": make_topic("NORMAL", f"{topic}-source", queues=2),
        "minPartitions": "4",
    }
    with Producer("feed", name_server=source["nameServer"]) as producer:
        producer.send_arrow(rows(count), source["topic"])
    arguments = {"source": source, "options": {**options, "maxRateTasks": "3"}}
    with StandaloneCluster(tmp_path, workers=3) as cluster:
        with ledger.watch([options["nameServer"]], options["topic"], addresses):
            driver = cluster.submit("copy_topic", arguments, "--py-files", str(wheel))
            await_stored(options, count // 4)
            # The children of an executor fork Python's workers.
            executor, parents = cluster.executors()[0], processes()
            python = {pid for pid in descendants(executor) if parents.get(pid) != executor}
            worker = cluster.workers[0].pid
            assert worker is not None
            killed, orphans = ({worker}, descendants(worker)) if victim == "spark" else (python, set[int]())
            assert killed
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            result = driver.result()
        settle(ledger, f"worker killed ({victim})", options, count, result["brokers"], WIDTH)
        assert not (killed | orphans) & processes().keys()


def test_retried_spark_task_repeats_rows_with_row_ids(
    spark: SparkSession,
    small_record_batches: None,
    metrics: Metrics,
    options: dict[str, str],
    addresses: list[str],
    ledger: Ledger,
) -> None:
    rows, name_server, topic = 8_000, options["nameServer"], options["topic"]
    frame = numbered(spark, rows, 100, partitions=2)
    # More than the other partition's rows, so some rows of this partition are stored.
    late = failing_late(frame, name_server, topic, rows // 2)
    with ledger.watch([name_server], topic, addresses):
        late.write.format("rocketmq").options(**options).save()
    settle(ledger, "task failed and retried", options, rows, metrics.to_dict())


@pytest.mark.long
def test_speculative_spark_task_repeats_rows_with_row_ids(
    standalone: StandaloneCluster,
    wheel: Path,
    options: dict[str, str],
    addresses: list[str],
    ledger: Ledger,
) -> None:
    rows = 20_000
    speculation = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.minTaskRuntime": "1s",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.multiplier": "1.5",
        # Small batches, so that few rows wait between Spark's processes; these are not stored yet.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "500",
    }
    arguments = {"rows": rows, "partitions": 4, "options": options, "slow": True}
    with ledger.watch([options["nameServer"]], options["topic"], addresses):
        driver = standalone.submit("write", arguments, "--py-files", str(wheel), conf=speculation)
        result = driver.result()
    # Only the committed attempt counts.
    settle(ledger, "task run twice", options, rows, result["brokers"])


@pytest.mark.long
def test_streaming_query_with_killed_driver_resumes_from_checkpoint(
    standalone: StandaloneCluster,
    wheel: Path,
    options: dict[str, str],
    addresses: list[str],
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    files, lines = 5, 4_000
    folder = tmp_path / "in"
    folder.mkdir()
    for file in range(files):
        text = "".join(str(number).ljust(100, ".") + "\n" for number in range(file * lines, (file + 1) * lines))
        (folder / f"{file}.txt").write_text(text)
    arguments = {
        "files": str(folder),
        "options": {**options, "checkpointLocation": str(tmp_path / "checkpoint")},
    }
    with ledger.watch([options["nameServer"]], options["topic"], addresses):
        driver = standalone.submit("stream", arguments, "--py-files", str(wheel))
        await_stored(options, lines * 3 // 2)
        driver.kill()
        result = standalone.submit("stream", arguments, "--py-files", str(wheel)).result()
    rows, retries = files * lines, retries_of(result["brokers"])
    name_server, topic = options["nameServer"], options["topic"]
    account = ledger.settle("driver of a query killed", name_server, topic, rows, retries, width=100)
    # The second driver began with the unfinished micro-batch of the first one, and repeated only that micro-batch.
    assert 0 < account.repeats < lines
    assert result["batches"] == list(range(1, files))


@pytest.mark.long
def test_a_write_runs_from_an_environment_shipped_as_an_archive(
    standalone: StandaloneCluster,
    wheel: Path,
    options: dict[str, str],
    java: Java,
    tmp_path: Path,
) -> None:
    rows, environment = 1_000, tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    shutil.unpack_archive(wheel, packages, "zip")
    # The archive uses the dependencies of this environment; a user's archive has hundreds of megabytes more.
    (packages / "needs.pth").write_text(str(Path(pyarrow.__file__).parents[1]))
    archive = tmp_path / "environment.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(environment, ".")
    driver = standalone.submit(
        "write",
        {"rows": rows, "partitions": 2, "options": options},
        "--archives",
        f"{archive}#environment",
        python="./environment/bin/python",
        folder=tmp_path,
    )
    result = driver.result()
    # The homes of Python in the driver and in the executors, which unpacked the archive.
    ours, *theirs = result["homes"]
    assert Path(ours).is_relative_to(environment)
    assert {Path(home).is_relative_to(environment) for home in theirs} == {False}
    assert {"environment" in Path(home).parts for home in theirs} == {True}
    audit(java, options["nameServer"], numbered_rows(options["topic"], range(rows), 100)).check()
