"""The lines of a commit at `metricsPath`; failures there do not fail the commit."""

from __future__ import annotations

import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.spark.report import CommitMessage, record_commit

NOW = 1_767_225_600.5


def message(write_id: str = "w", batch_id: int = -1, rows: int = 10) -> CommitMessage:
    recorder = Recorder(write_id, batch_id, 0, epoch_offset=0.0)
    recorder.record_success("a", rows, 100, 8.0, MessageQueue("T", "a", 0), 5, 1.0)
    recorder.record_retry("a", "BrokerBusyException 2", 1.0)
    return CommitMessage.of(recorder.snapshot(), histograms=False, latencies=True)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_each_commit_appends_a_line_with_metrics_per_broker(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "sink.jsonl"
    record_commit(str(path), [message("w", 3), None, message("w", 3)], "", 3, now=NOW)
    record_commit(str(path), [message("w", 4, rows=1)], "", 4, now=NOW + 1)
    first, second = lines(path)
    (numbers,) = first.pop("brokers").values()
    invalid = {"skipped": 0, "skipped_by_rule": {}, "dead_lettered": 0, "dead_lettered_by_rule": {}}
    facts = {"write_id": "w", "batch_id": 3, "save_id": None, "time": "2026-01-01T00:00:00.500+00:00", "tasks": 2}
    assert first == facts | invalid | {"skipped_writes": []}
    assert (numbers["rows"], numbers["requests"], numbers["retries"]) == (20, 2, 2)
    assert 7 < numbers["p50_ms"] < 10
    assert "queues" not in numbers
    assert second["batch_id"] == 4


def test_write_without_tasks_appends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "sink.jsonl"
    record_commit(path.as_uri(), [], "the-write", None, now=NOW)
    (line,) = lines(path)
    assert (line["write_id"], line["batch_id"], line["tasks"], line["brokers"]) == ("the-write", -1, 0, {})


def test_object_store_gets_one_file_per_commit_replaced_on_rerun(tmp_path: Path) -> None:
    # A file system that is not local, like an object store.
    store = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    (tmp_path / "sink").mkdir()
    for batch_id, rows in [(0, 1), (1, 2), (1, 3)]:
        record_commit(
            "s3://bucket/sink/",
            [message("w", batch_id, rows)],
            "",
            batch_id,
            now=NOW,
            resolve=lambda _: (store, "sink/"),
        )
    assert sorted(path.name for path in (tmp_path / "sink").iterdir()) == ["w-0.json", "w-1.json"]
    assert lines(tmp_path / "sink" / "w-1.json")[0]["brokers"]["a"]["rows"] == 3


def test_writes_of_one_micro_batch_are_recorded_separately(tmp_path: Path) -> None:
    # Within foreachBatch, tasks know only the query's id and the micro-batch.
    store = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    for save_id in ("one", "other"):
        message_ = message("query", 7)
        record_commit("s3://b", [message_], save_id, 7, now=NOW, resolve=lambda _: (store, ""))
        record_commit(str(tmp_path / "sink.jsonl"), [message_], save_id, 7, now=NOW)
    assert {path.name for path in tmp_path.glob("*.json")} == {"query-7-one.json", "query-7-other.json"}
    places = [(line["write_id"], line["batch_id"], line["save_id"]) for line in lines(tmp_path / "sink.jsonl")]
    assert places == [("query", 7, "one"), ("query", 7, "other")]


@pytest.mark.parametrize("path", ["/proc/sink.jsonl", "nonsense://x/y", "/dev/full"])
def test_failed_metrics_file_is_a_warning_with_its_path_and_not_an_error(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rocketmq_spark.spark"):
        record_commit(path, [message()], "", None, now=NOW)
    (record,) = caplog.records
    assert path in record.getMessage()
    assert "its rows are stored" in record.getMessage()


def test_openmetrics_file_has_the_sums_of_all_commits(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sink.prom"
    for batch_id in range(3):
        record_commit(str(path), [message("w", batch_id)], "", batch_id, now=NOW + batch_id, openmetrics=True)
    text = path.read_text("utf-8")
    assert 'rocketmq_spark_rows_total{broker="a"} 30\n' in text
    assert f"rocketmq_spark_last_commit_timestamp_seconds {NOW + 2}\n" in text
    assert [found.name for found in path.parent.iterdir()] == ["sink.prom"]


def test_openmetrics_object_is_replaced_by_the_sums(tmp_path: Path) -> None:
    store = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    for batch_id in range(2):
        record_commit(
            "s3://bucket/sink.prom",
            [message("w", batch_id)],
            "",
            batch_id,
            now=NOW,
            openmetrics=True,
            resolve=lambda _: (store, "sink.prom"),
        )
    assert 'rocketmq_spark_rows_total{broker="a"} 20\n' in (tmp_path / "sink.prom").read_text("utf-8")


@pytest.mark.parametrize("openmetrics", [False, True])
def test_file_with_other_content_is_kept_and_the_commit_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, openmetrics: bool
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("important")
    record_commit(str(path), [message()], "", 0, now=NOW, openmetrics=openmetrics)
    assert path.read_text() == "important"
    assert "name another file" in caplog.text


def test_damaged_openmetrics_file_is_kept_aside_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "sink.prom"
    record_commit(str(path), [message()], "", 0, now=NOW, openmetrics=True)
    damaged = path.read_bytes()[:-20] + b"\xff"
    path.write_bytes(damaged)
    record_commit(str(path), [message()], "", 1, now=NOW, openmetrics=True)
    assert 'rocketmq_spark_rows_total{broker="a"} 10\n' in path.read_text("utf-8")
    (kept,) = tmp_path.glob("sink.prom.*.bad")
    assert kept.read_bytes() == damaged
    (record,) = caplog.records
    assert str(kept) in record.getMessage()


@pytest.mark.parametrize("openmetrics", [False, True])
def test_no_shell_executes_a_broker_name_in_the_file(tmp_path: Path, openmetrics: bool) -> None:
    path = tmp_path / "profile"
    created = tmp_path / "made"
    broker = f'$(touch {created})`touch {created}`"; touch {created}'
    recorder = Recorder("w", 0, 0, epoch_offset=0.0)
    recorder.record_success(broker, 1, 100, 8.0, MessageQueue("T", broker, 0), 5, 1.0)
    written = CommitMessage.of(recorder.snapshot(), histograms=False, latencies=True)
    record_commit(str(path), [written], "", 0, now=NOW, openmetrics=openmetrics)
    subprocess.run(["/bin/sh", str(path)], capture_output=True, check=False)
    assert not created.exists()
    if not openmetrics:
        assert list(lines(path)[0]["brokers"]) == [broker]
