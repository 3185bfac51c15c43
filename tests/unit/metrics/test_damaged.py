"""Damaged reports, and small ones."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.metrics import PartitionReport, WriteSummary, merge_into
from tests.support.pipelines import recorder, success, summary_of


def good_report() -> PartitionReport:
    recording = recorder()
    success(recording, "a", rows=3)
    success(recording, "b", rows=4, latency_ms=30, now=2)
    recording.record_retry("b", "busy", 2)
    return recording.snapshot()


@pytest.mark.parametrize(
    "report",
    [
        None,
        3,
        "text",
        [],
        PartitionReport("w", 0, 0, b""),
        PartitionReport("w", 0, 0, b"nonsense"),
        PartitionReport("w", 0, 0, None),  # type: ignore[arg-type]
        PartitionReport([], 0, 0, good_report().packed),  # type: ignore[arg-type]
        PartitionReport("w", 0, 0, good_report().packed[:-3]),
    ],
)
def test_a_malformed_report_is_counted_logged_and_changes_nothing(
    report: object, caplog: pytest.LogCaptureFixture
) -> None:
    summary = summary_of([good_report()])
    before = summary.to_dict()
    merge_into(summary, report)
    assert summary.to_dict() == before
    assert summary.keys() == [("w", -1)]
    assert (summary.reports, summary.dropped_reports) == (1, 1)
    assert "a task's report could not be read (" in caplog.text
    assert "): the metrics lack its rows, but the rows are not lost" in caplog.text
    assert summary.notes()[1].startswith("1 reports of tasks could not be read")


@given(st.data())
@settings(max_examples=150)
def test_damaged_report_is_merged_completely_or_dropped_and_never_raises(data: st.DataObject) -> None:
    import zlib

    plain = bytearray(zlib.decompress(good_report().packed))
    for _ in range(data.draw(st.integers(1, 3))):
        plain[data.draw(st.integers(0, len(plain) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(plain)) | st.just(len(plain)))
    summary = WriteSummary()
    merge_into(summary, PartitionReport("w", -1, 0, zlib.compress(bytes(plain[:cut]))))
    assert summary.reports + summary.dropped_reports == 1
    if summary.dropped_reports:
        assert (summary.to_dict(), summary.keys()) == ({}, [])


def test_reports_of_small_tasks_are_small() -> None:
    recording = recorder("123e4567-e89b-12d3-a456-426614174000", epoch=1_700_000_000)
    for request in range(200):
        success(recording, f"broker-{request % 20}", 1000, 1 + request % 7 + request / 100, request, now=request / 100)
    assert len(pickle.dumps(recording.snapshot())) < 2_000
