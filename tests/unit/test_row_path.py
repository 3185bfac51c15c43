"""The row path in docs/internals/architecture.md has the files whose code runs for each record batch of a write."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pyarrow as pa
from pyspark.sql.types import StructType

import rocketmq_spark
from rocketmq_spark.spark.datasource import RocketMQDataSource
from rocketmq_spark.testing import FakeCluster

PACKAGE = Path(rocketmq_spark.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "internals" / "architecture.md"
ROWS = 8_000  # The joiner holds smaller record batches.
# These run once for each task or for its report.
ONCE = {"sink/task.py", "spark/report.py", "metrics/summary.py"}
# Only the constructors of its dataclasses run, and generated code names no file.
GENERATED = {"protocol/remoting/headers.py"}
# These folders have values that all layers read, and the fake cluster.
NOT_LISTED = ("model/", "options/", "testing/")


class Calls:
    """Counts the calls of functions of the package by file, in all threads but those of the fake cluster."""

    def __init__(self) -> None:
        self.by_file: Counter[str] = Counter()
        self._thread = threading.local()

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(f"{PACKAGE}/") and self._is_of_client(frame):
            self.by_file[file.removeprefix(f"{PACKAGE}/")] += 1

    def _is_of_client(self, frame: FrameType) -> bool:
        known: bool | None = getattr(self._thread, "is_of_client", None)
        if known is None:
            files = [one.f_code.co_filename for one in _stack(frame)]
            known = self._thread.is_of_client = not any(file.startswith(f"{PACKAGE}/testing/") for file in files)
        return known


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def write(cluster: FakeCluster, record_batches: int) -> Counter[str]:
    """Write as one task, and return the calls by file."""
    # With a timeout that no slow machine exceeds, there are no retries, which have files of their own.
    options = {"nameServer": cluster.name_server, "topic": "orders", "batchBytes": "262144", "sendMsgTimeout": "120000"}
    schema = StructType().add("body", "binary").add("keys", "string").add("tags", "string")
    writer = RocketMQDataSource(options).writer(schema, overwrite=False)
    columns = {"body": [b"x" * 100] * ROWS, "keys": [str(row) for row in range(ROWS)], "tags": ["t"] * ROWS}
    rows = pa.RecordBatch.from_pydict(columns)
    calls, before = Calls(), sys.getprofile()
    threading.setprofile(calls.profile)
    sys.setprofile(calls.profile)
    try:
        writer.write(iter([rows] * record_batches))
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return calls.by_file


def files_of_rows() -> set[str]:
    """Return the files with more calls in a write of six record batches than in a write of two."""
    counts = []
    for record_batches in (2, 6):
        # A new cluster, so that each write starts the thread of its connections.
        with FakeCluster(topics={"orders": 2}) as cluster:
            counts.append(write(cluster, record_batches))
    few, many = counts
    return {file for file in many if many[file] >= few[file] + 4 and not file.startswith(NOT_LISTED)}


def test_row_path_of_the_page_is_complete() -> None:
    section = PAGE.read_text("utf-8").split("## Row path\n")[1].split("\n## ")[0]
    listed = {
        file for line in section.splitlines() if line.startswith("|") for file in re.findall(r"`(\S+\.py)`", line)
    }
    called = files_of_rows() | ONCE | GENERATED
    changes = {"add": sorted(called - listed), "remove": sorted(listed - called)}
    assert changes == {"add": [], "remove": []}, "edit the table in docs/internals/architecture.md, section Row path"
