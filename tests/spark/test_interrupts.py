"""Ctrl-C during a batch write, in a program that a user runs in a terminal."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from rocketmq_spark.admin import queue_offsets
from rocketmq_spark.spark.interrupts import cancelled_by_interrupt
from tests.support.cluster import SharedCluster
from tests.support.processes import PATIENCE, PROGRAMS, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def test_ctrl_c_cancels_a_write_and_says_what_is_stored(
    cluster: SharedCluster, topic: str, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    topics = [make_topic("NORMAL", topic), make_topic("NORMAL", f"{topic}-2")]

    def stored(name: str) -> int:
        return sum(queue.messages for queue in queue_offsets(cluster.name_server, name))

    def printed() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "out").read_text().splitlines() if line.startswith("{")]

    command = [sys.executable, str(PROGRAMS / "interrupted.py"), cluster.name_server, topic]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    with (
        (tmp_path / "out").open("wb") as out,
        (tmp_path / "err").open("wb") as err,
        subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True) as program,
    ):

        def interrupt_when(condition: Callable[[], bool]) -> None:
            wait_for(lambda: condition() or program.poll() is not None)
            # As a terminal does: to every process of the foreground group.
            os.killpg(program.pid, signal.SIGINT)

        try:
            interrupt_when(lambda: {"reported": 2000} in printed())
            interrupt_when(lambda: stored(topics[1]) >= 2000)
            code = program.wait(PATIENCE)
        finally:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
    errors = (tmp_path / "err").read_text(errors="replace")
    assert code == 0, errors
    # The program prints each line when no job runs any more.
    assert printed() == [
        {"reported": 2000},
        {"interrupted": "save", "rows": 2000},
        {"interrupted": "write", "rows": 2000},
        {"rows": 2010},
    ]
    assert 2010 <= stored(topics[0]) <= 4010
    said = [line for line in errors.splitlines() if "the write was interrupted, and" in line]
    assert len(said) == 2, errors
    assert "Spark was told to cancel it. Tasks that had finished report 2000 acknowledged rows" in said[0]
    assert "How many rows are stored is not known here" in said[1]
    (last,) = (line for line in errors.splitlines() if line.startswith(f"topic {topic} ·") and "interrupted" in line)
    # Spark may or may not have killed the other two by now.
    assert re.search(r"· 2 of 4 tasks ended(, 2 running)? ·", last), last


class Interrupting(logging.Handler):
    """Interrupts the main thread again while Py4J handles the first interrupt."""

    def emit(self, record: logging.LogRecord) -> None:
        if "KeyboardInterrupt while sending command" in record.getMessage():
            signal.raise_signal(signal.SIGINT)


def test_second_ctrl_c_at_once_cancels_and_keeps_the_session_usable(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = spark.sparkContext.statusTracker()

    def wait(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        time.sleep(10)
        yield from batches

    def interrupt() -> int:
        wait_for(lambda: bool(tracker.getActiveJobsIds()))
        (job,) = tracker.getActiveJobsIds()
        os.kill(os.getpid(), signal.SIGINT)
        return job

    frame, second = spark.range(1).mapInArrow(wait, "id long"), Interrupting()
    # A notebook's kernel has this handler.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger().addHandler(second)
    try:
        with ThreadPoolExecutor(1) as thread:
            interrupted = thread.submit(interrupt)
            with pytest.raises(KeyboardInterrupt), cancelled_by_interrupt(spark):
                frame.write.format("noop").mode("overwrite").save()
    finally:
        logging.getLogger().removeHandler(second)
        signal.signal(signal.SIGINT, handler)
    assert "the write was interrupted, and Spark was told to cancel it" in caplog.text
    wait_for(lambda: not tracker.getActiveJobsIds())
    cancelled = tracker.getJobInfo(interrupted.result())
    assert cancelled is not None
    assert cancelled.status == "FAILED"
    assert [row.id for row in spark.range(3).collect()] == [0, 1, 2]
