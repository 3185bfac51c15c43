"""The recorder of one task, and its packed report."""

from __future__ import annotations

import json
import sys
import threading

import pytest

from rocketmq_spark.metrics.measures import MAX_SECONDS
from tests.support.pipelines import recorder, success, summary_of


def test_to_dict_of_one_task() -> None:
    recording = recorder()
    success(recording, "a", rows=10, latency_ms=2, offset=100, queue_id=1, nbytes=1000)
    success(recording, "a", rows=5, latency_ms=4, offset=50, queue_id=1, nbytes=500)
    success(recording, "a", rows=1, latency_ms=4, offset=-1, topic="u", nbytes=1)
    recording.record_retry("a", "BrokerBusyException 2", 0.5)
    recording.record_retry("a", "BrokerBusyException 2", 0.6)
    recording.record_retry("b", "FLUSH_DISK_TIMEOUT", 0.7)
    recording.record_failure("b", "MQBrokerException 13", 0.8)
    assert summary_of([recording.snapshot()]).to_dict() == {
        "a": {
            "rows": 16,
            "sent_rows": 0,
            "requests": 3,
            "bytes": 1501,
            "retries": 2,
            "failures": 0,
            "p50_ms": 4.015,
            "p90_ms": 4.015,
            "p99_ms": 4.015,
            "max_ms": 4.015,
            "retries_by_reason": {"BrokerBusyException 2": 2},
            "failures_by_code": {},
            "queues": {
                "t": {"1": {"rows": 15, "first_offset": 50, "last_offset": 109}},
                "u": {"0": {"rows": 1, "first_offset": None, "last_offset": None}},
            },
            "incomplete": True,
            "isolated_times": 0,
            "isolated_ms": 0.0,
        },
        "b": {
            "rows": 0,
            "sent_rows": 0,
            "requests": 0,
            "bytes": 0,
            "retries": 1,
            "failures": 1,
            "p50_ms": None,
            "p90_ms": None,
            "p99_ms": None,
            "max_ms": None,
            "retries_by_reason": {"FLUSH_DISK_TIMEOUT": 1},
            "failures_by_code": {"MQBrokerException 13": 1},
            "queues": {},
            "incomplete": True,
            "isolated_times": 0,
            "isolated_ms": 0.0,
        },
    }


def test_to_dict_is_json() -> None:
    recording = recorder()
    success(recording)
    found = summary_of([recording.snapshot()]).to_dict()
    assert json.loads(json.dumps(found)) == found


def test_empty_recorder_has_no_metrics() -> None:
    summary = summary_of([recorder().snapshot()])
    assert (summary.to_dict(), summary.timeline(), summary.reports) == ({}, [], 1)
    assert summary.latencies("nobody").get_total_count() == 0


def test_timeline_seconds_count_from_the_epoch() -> None:
    recording = recorder(epoch=1_700_000_000)
    success(recording, "b", rows=3, latency_ms=2, now=10.9)
    recording.record_retry("a", "busy", 10.95)
    success(recording, "a", rows=4, latency_ms=8, now=11.0)
    success(recording, "a", rows=5, latency_ms=4, now=11.5)
    row = {"width_s": 1, "retries": 0, "isolated": False}
    assert summary_of([recording.snapshot()]).timeline() == [
        {**row, "second": 1_700_000_010, "broker": "b", "rows": 3, "requests": 1, "max_ms": 2.0},
        {**row, "second": 1_700_000_010, "broker": "a", "rows": 0, "requests": 0, "max_ms": 0.0, "retries": 1},
        {**row, "second": 1_700_000_011, "broker": "a", "rows": 9, "requests": 2, "max_ms": 8.0},
    ]


def test_isolation_time_ends_with_the_task() -> None:
    recording = recorder()
    recording.record_isolation("a", 600_000, 1.5)
    success(recording, "b", now=4.25)
    summary = summary_of([recording.snapshot()])
    numbers = summary.to_dict()["a"]
    assert (numbers["isolated_times"], numbers["isolated_ms"]) == (1, 2750.0)
    assert [row["second"] for row in summary.timeline() if row["isolated"]] == [1, 2, 3, 4]
    assert {row["broker"] for row in summary.timeline() if row["isolated"]} == {"a"}


def test_prolonged_isolation_counts_once() -> None:
    recording = recorder()
    recording.record_isolation("a", 1_000, 1.0)
    recording.record_isolation("a", 500, 1.5)
    recording.record_isolation("a", 1_000, 5.0)
    success(recording, "b", now=10.0)
    numbers = summary_of([recording.snapshot()]).to_dict()["a"]
    assert (numbers["isolated_times"], numbers["isolated_ms"]) == (2, 2500.0)


def test_snapshot_does_not_change_the_recorder() -> None:
    recording = recorder()
    success(recording, rows=1)
    first = recording.snapshot()
    assert recording.snapshot() == first
    success(recording, rows=2)
    assert summary_of([recording.snapshot()]).to_dict()["a"]["rows"] == 3


def test_lines_show_rows_and_latencies_of_brokers_that_stored() -> None:
    recording = recorder()
    success(recording, "b", rows=7, latency_ms=2)
    success(recording, "a", rows=5, latency_ms=2)
    recording.record_retry("c", "lost", 1.0)
    assert recording.lines() == [
        "a 5 rows in 1 requests (p50 2.0 ms, p99 2.0 ms, max 2.0 ms)",
        "b 7 rows in 1 requests (p50 2.0 ms, p99 2.0 ms, max 2.0 ms)",
    ]


def test_repr_of_a_recorder_shows_place_and_counts() -> None:
    recording = recorder("w", 3, 7)
    success(recording, rows=5)
    assert repr(recording) == "<Recorder write=w batch=3 partition=7 brokers=1 rows=5 requests=1>"


@pytest.mark.parametrize(("seconds", "width"), [(599, 1), (600, 1), (601, 2), (1200, 2), (1201, 4), (3000, 8)])
def test_a_long_task_has_a_coarser_time_line_with_the_same_totals(seconds: int, width: int) -> None:
    recording = recorder()
    for second in range(seconds):
        success(recording, "ab"[second % 2], rows=second, latency_ms=1 + second, now=second)
    summary = summary_of([recording.snapshot()])
    timeline = summary.timeline()
    assert {row["width_s"] for row in timeline} == {width}
    assert len({row["second"] for row in timeline}) <= MAX_SECONDS
    assert sum(row["rows"] for row in timeline) == sum(range(seconds))
    assert sum(row["requests"] for row in timeline) == seconds
    assert max(row["max_ms"] for row in timeline) == seconds
    assert sum(numbers["rows"] for numbers in summary.to_dict().values()) == sum(range(seconds))


def test_merge_does_not_coarsen_the_merged_report() -> None:
    long, short = recorder("long"), recorder("short")
    for second in range(2_000):
        success(long, now=second)
    success(short, now=1)
    success(short, now=2)
    summary = summary_of([short.snapshot(), long.snapshot()])
    assert {row["width_s"] for row in summary.timeline()} == {4}
    assert [row["second"] for row in summary.timeline("short")] == [1, 2]


def test_invalid_rows_are_counted_by_rule_and_shown_in_the_notes() -> None:
    recording = recorder("w")
    recording.record_skipped({"body is null": 2, "topic is null": 1})
    recording.record_skipped({"body is null": 3})
    recording.record_dead_letters({"body is empty": 4})
    summary = summary_of([recording.snapshot(), recording.snapshot()])
    assert summary.invalid_rows("w") == {
        "skipped": 12,
        "skipped_by_rule": {"body is null": 10, "topic is null": 2},
        "dead_lettered": 8,
        "dead_lettered_by_rule": {"body is empty": 8},
    }
    assert summary.notes()[:2] == [
        "12 invalid rows skipped: 10 body is null, 2 topic is null.",
        "8 invalid rows sent to the dead-letter topic: 8 body is empty.",
    ]


def test_oneway_rows_count_as_sent_but_not_as_stored() -> None:
    recording = recorder()
    recording.record_sent("a", 30, 400, 5.0)
    recording.record_sent("a", 12, 100, 6.0)
    assert recording.lines() == ["a 42 rows in 2 requests"]
    summary = summary_of([recording.snapshot(), recording.snapshot()])
    numbers = summary.to_dict()["a"]
    assert (numbers["rows"], numbers["sent_rows"], numbers["requests"], numbers["bytes"]) == (0, 84, 4, 1000)
    assert (numbers["p50_ms"], numbers["queues"]) == (None, {})
    assert [row["rows"] for row in summary.timeline()] == [60, 24]
    assert any("84 rows were sent with sendMode=oneway (a 84), without an ack" in note for note in summary.notes())


@pytest.mark.parametrize(
    ("queue_id", "queue_offset"), [(-1, 0), (2**20, 0), (2**40, 0), (-(2**63), 0), (0, 2**63 - 1), (2**63 - 1, 5)]
)
def test_invalid_queue_or_offset_in_an_answer_only_drops_the_receipt(queue_id: int, queue_offset: int) -> None:
    recording = recorder()
    success(recording, "b", rows=3, latency_ms=1, queue_id=queue_id, offset=queue_offset)
    success(recording, "b", rows=2, latency_ms=1, queue_id=7, offset=40)
    facts = summary_of([recording.snapshot()]).to_dict()["b"]
    assert facts["rows"] == 5
    assert facts["queues"]["t"]["7"] == {"rows": 2, "first_offset": 40, "last_offset": 41}


def test_rows_stored_by_a_proxy_have_no_receipt_but_all_other_metrics() -> None:
    recording = recorder()
    success(recording, "p:8081", rows=3, latency_ms=2, nbytes=30, queue_id=-1, offset=-1)
    success(recording, "p:8081", rows=4, latency_ms=4, nbytes=40, queue_id=-1, offset=77)
    facts = summary_of([recording.snapshot()]).to_dict()["p:8081"]
    assert facts["queues"] == {}
    assert (facts["rows"], facts["requests"], facts["bytes"], facts["max_ms"]) == (7, 2, 70, 4.015)
    assert recording.lines() == ["p:8081 7 rows in 2 requests (p50 2.0 ms, p99 4.0 ms, max 4.0 ms)"]


def test_invalid_rows_are_counted_while_another_thread_sends() -> None:
    # The task's reading thread counts invalid rows without the sender's lock. A long timeline is merged meanwhile.
    recording, rows, interval = recorder(), 100_000, sys.getswitchinterval()

    def send() -> None:
        for second in range(20_000):
            recording.record_sent("a", 1, 1, float(second))

    sending = threading.Thread(target=send)
    sys.setswitchinterval(1e-6)
    try:
        sending.start()
        for _ in range(rows):
            recording.record_skipped({"body": 1})
            recording.record_dead_letters({"body": 1})
        sending.join()
    finally:
        sys.setswitchinterval(interval)
    counted = summary_of([recording.snapshot()]).invalid_rows()
    assert (counted["skipped"], counted["dead_lettered"]) == (rows, rows)


def test_writes_that_were_completed_before_are_named_once() -> None:
    parts = []
    for write in ("write monday", "write monday", "write tuesday"):
        recording = recorder()
        recording.record_skipped_write(write)
        parts.append(recording.snapshot())
    summary = summary_of(parts)
    assert summary.skipped_writes() == ["write monday", "write tuesday"]
    assert summary.notes()[:2] == [
        "write monday was completed or decided before: its rows were not written.",
        "write tuesday was completed or decided before: its rows were not written.",
    ]
