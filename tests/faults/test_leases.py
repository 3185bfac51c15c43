"""Tasks that go on after another attempt has replaced them stop by themselves, and no row is repeated.

Real Spark makes such tasks: it repeats a stage beside a running task, loses an executor that still runs, or is frozen.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from rocketmq_spark.cluster import LocalCluster
from tests.support import writes
from tests.support.auditor import BY_NUMBER, audit, numbered_rows
from tests.support.cuts import DriverLink
from tests.support.drivers import Driver, resume, send
from tests.support.exactly_once import Growth, Job
from tests.support.java import Java
from tests.support.processes import PATIENCE, StandaloneCluster, Submission, descendants, wait_for

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration, pytest.mark.timeout(1800)]

FENCE: Final = 2.0
REPLACED: Final = "was replaced by attempt"
# Rows and seconds of a partition, if nothing holds it up.
ROWS: Final = 20_000
SECONDS: Final = 40

OPTIONS: Final[dict[str, Any]] = {
    "delivery": "effectivelyOnce",
    "fenceMs": str(int(FENCE * 1000)),
    "batchBytes": "4k",
    # For each of two tasks at a time. Tasks last so long on any machine that a fault falls into them.
    "maxRatePerSecond": str(2 * ROWS // SECONDS),
    "maxRateTasks": "2",
}


def submit(spark: StandaloneCluster, cluster: LocalCluster, topic: str, partitions: int, **conf: str) -> Submission:
    """Start a write of rows from a shuffle."""
    options = {**OPTIONS, "nameServer": cluster.name_server, "topic": topic, "transactionalId": f"job-{topic}"}
    arguments = {"writes": 1, "rows": partitions * ROWS, "partitions": partitions, "options": options}
    settings = {"spark.task.maxFailures": "20", "spark.stage.maxConsecutiveAttempts": "20"}
    return spark.submit("shuffled_writes", arguments, conf={**settings, **conf})


@contextmanager
def growth_of(cluster: LocalCluster, driver: Submission | Driver) -> Iterator[Growth]:
    with closing(Growth(cluster, lambda: not driver.is_alive)) as growth:
        yield growth


def await_sends(growth: Growth, topic: str, times: int = 5) -> None:
    """Return when a topic has grown several times."""
    for _ in range(times):
        growth.wait(topic)


def workers_of(executor: int) -> list[psutil.Process]:
    """Return the Python workers of an executor, without their daemon."""
    found = []
    for pid in descendants(executor):
        try:
            process = psutil.Process(pid)
            if process.name().startswith("python") and process.parent().name().startswith("python"):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def check_rows(cluster: LocalCluster, topic: str, java: Java, rows: int) -> None:
    """Compare what consumers see with the rows that were written, each once."""
    audit(java, cluster.name_server, numbered_rows(topic, range(rows), 0, keyed=False), identity=BY_NUMBER).check()


@pytest.mark.long
@pytest.mark.parametrize("freezes", [False, True], ids=["running", "frozen"])
def test_a_task_beside_its_repeated_stage_stops(
    two_brokers: LocalCluster, topic: str, tmp_path: Path, java: Java, *, freezes: bool
) -> None:
    writes.make_topic(two_brokers, topic, queues=4)
    # Three, so that both tasks of the repeated stage start at once, beside the old one.
    with StandaloneCluster(tmp_path / "spark", workers=3) as spark:
        driver = submit(spark, two_brokers, topic, 2)
        with growth_of(two_brokers, driver) as growth:
            await_sends(growth, topic)
            old, lost = (one for one in spark.executors() if workers_of(one))
            paused = workers_of(old) if freezes else []
            for worker in paused:
                send(worker, signal.SIGSTOP)
            # Its shuffle files are gone with it. Spark repeats the stage, and lets the task of the other executor run.
            os.kill(lost, signal.SIGKILL)
            if freezes:
                # Both later attempts have waited for the fence, and send.
                wait_for(lambda: spark.logs().count("an earlier attempt began it") == 2)
                time.sleep(FENCE)
                await_sends(growth, topic)
                resume(paused)
            wait_for(lambda: REPLACED in spark.logs() or not driver.is_alive)
        recovered = driver.result(PATIENCE)
        logs = spark.logs()
    print(recovered)
    assert REPLACED in logs
    assert "of the same driver, because Spark has started the task again" in logs
    assert recovered["recovered"] > 0
    check_rows(two_brokers, topic, java, 2 * ROWS)


@pytest.mark.long
def test_an_executor_cut_off_from_its_driver_stops(
    two_brokers: LocalCluster, topic: str, tmp_path: Path, java: Java
) -> None:
    writes.make_topic(two_brokers, topic, queues=4)
    with closing(DriverLink(2)) as link, StandaloneCluster(tmp_path / "spark") as spark:
        conf = {
            "spark.driver.host": link.HOST,
            "spark.driver.bindAddress": link.DRIVER,
            "spark.driver.port": str(link.ports[0]),
            "spark.driver.blockManager.port": str(link.ports[1]),
            "spark.executor.heartbeatInterval": "1s",
            "spark.network.timeout": "10s",
            "spark.network.timeoutInterval": "1s",
            "spark.storage.blockManagerHeartbeatTimeoutMs": "10s",
        }
        driver = submit(spark, two_brokers, topic, 1, **conf)
        with growth_of(two_brokers, driver) as growth:
            await_sends(growth, topic)
            (old,) = [pid for pid in spark.executors() if workers_of(pid)]
            # The host of the executor is cut off as a whole: its worker gets no order of the master to end it. The
            # worker also writes what the executor prints, so the test takes its place.
            host = psutil.Process(psutil.Process(old).ppid())
            send(host, signal.SIGSTOP)
            printed, output = b"", os.open(f"/proc/{old}/fd/2", os.O_RDONLY | os.O_NONBLOCK)

            def is_replaced() -> bool:
                nonlocal printed
                with suppress(BlockingIOError):
                    printed += os.read(output, 1_000_000)
                return REPLACED.encode() in printed or not driver.is_alive

            try:
                link.cut([old])
                wait_for(is_replaced)
                recovered = driver.result(PATIENCE)
            finally:
                os.close(output)
                send(host, signal.SIGCONT)
    print(recovered)
    assert REPLACED.encode() in printed
    assert recovered["recovered"] > 0
    check_rows(two_brokers, topic, java, ROWS)


@contextmanager
def new_job(cluster: LocalCluster, topic: str, folder: Path, seconds: int) -> Iterator[Job]:
    """Return a stream with micro-batches that last at least some seconds."""
    writes.make_topic(cluster, topic, queues=4)
    rate = {"maxRatePerSecond": str(ROWS // seconds)}
    with closing(Job(cluster, topic, folder, rows=ROWS, **{**OPTIONS, **rate})) as job:
        yield job


def test_a_driver_that_was_stopped_while_another_one_took_over_stops(
    two_brokers: LocalCluster, topic: str, tmp_path: Path, java: Java
) -> None:
    with new_job(two_brokers, topic, tmp_path, 8) as job:
        job.feed(1)
        old = job.start(restarts=0)
        with growth_of(two_brokers, old) as growth:
            await_sends(growth, topic)
            paused = old.pause()
        time.sleep(FENCE)
        new = job.start()
        with growth_of(two_brokers, new) as growth:
            await_sends(growth, topic)
        resume(paused)
        assert old.wait() != 0, old.tail()
        job.finish(new)
        output = old.output.read_text(errors="replace")
        assert REPLACED in output or "was replaced by another driver" in output, output[-4000:]
        job.account(java).found.check()


@pytest.mark.long
def test_two_drivers_of_one_checkpoint_repeat_nothing(
    two_brokers: LocalCluster, topic: str, tmp_path: Path, java: Java
) -> None:
    with new_job(two_brokers, topic, tmp_path, 8) as job:
        job.feed(3)
        job.complete()
        drivers = [job.start(restarts=2), job.start(restarts=2)]
        codes = [driver.wait() for driver in drivers]
        print(f"exit codes: {codes}, {job.written} micro-batches are complete", flush=True)
        if 0 not in codes:
            job.finish(job.start())
        outputs = [driver.output.read_text(errors="replace") for driver in drivers]
        assert any(REPLACED in output or "another driver" in output for output in outputs)
        job.account(java).found.check()
