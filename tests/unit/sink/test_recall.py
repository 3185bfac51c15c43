"""The files of recall handles: what they hold, how many there are, and what happens if they cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import parquet

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.model.message import Message, MessageQueue, SendOutcome, SendStatus
from rocketmq_spark.protocol.remoting.records import encode_single
from rocketmq_spark.sink.in_flight import PendingBatch
from rocketmq_spark.sink.recall import RecallHandles

QUEUE = MessageQueue("T", "broker-a", 0)


def stored(number: int, handle: str | None = None) -> tuple[PendingBatch, SendOutcome]:
    message = Message("T", b"x", properties={"KEYS": f"k{number}", "UNIQ_KEY": f"id{number}"})
    recall_handle = f"h{number}" if handle is None else handle
    outcome = SendOutcome(QUEUE, SendStatus.SEND_OK, None, 1.0, recall_handle=recall_handle)
    return PendingBatch(encode_single(message), None), outcome


def saved(folder: Path) -> list[dict[str, str]]:
    return [row for file in sorted(folder.glob("*")) for row in parquet.read_table(file).to_pylist()]


def test_handles_are_saved_in_files_of_limited_size(tmp_path: Path) -> None:
    with RecallHandles(str(tmp_path / "new" / "folder"), 4, rows_per_file=3) as handles:
        for number in range(7):
            handles.append(*stored(number))
        handles.append(*stored(8, ""))
    assert [file.name.rpartition("-")[2] for file in sorted((tmp_path / "new" / "folder").iterdir())] == [
        f"{number}.parquet" for number in range(3)
    ]
    assert saved(tmp_path / "new" / "folder") == [
        {"topic": "T", "keys": f"k{number}", "msgId": f"id{number}", "recallHandle": f"h{number}"}
        for number in range(7)
    ]


def test_a_task_without_handles_makes_no_file(tmp_path: Path) -> None:
    with RecallHandles(str(tmp_path), 0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_handles_of_a_failed_task_are_saved(tmp_path: Path) -> None:
    def failing_task() -> None:
        with RecallHandles(str(tmp_path), 0) as handles:
            handles.append(*stored(1))
            raise RuntimeError("the task")

    with pytest.raises(RuntimeError, match="the task"):
        failing_task()
    assert [row["recallHandle"] for row in saved(tmp_path)] == ["h1"]


def test_a_folder_that_is_not_usable_fails_the_task_before_its_first_row(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MQClientException, match=r"recallPath=.*file/folder: .*give a folder that every executor"):
        RecallHandles(str(tmp_path / "file" / "folder"), 0).__enter__()
