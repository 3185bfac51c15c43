"""Many tasks, merged in any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.errors import OptionError
from rocketmq_spark.metrics import Measures, PartitionReport, WriteSummary, merge_into
from tests.support.pipelines import recorder, reports, success, summary_of


def everything(summary: WriteSummary) -> tuple[Any, ...]:
    timeline = sorted(summary.timeline(), key=lambda row: (row["second"], row["broker"]))
    return summary.to_dict(), timeline, summary.reports, summary.dropped_reports, summary.invalid_rows()


@given(st.lists(reports(), max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_merging_in_any_order_gives_the_same(found: list[PartitionReport], random: Any) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)
    one, other = summary_of(found), summary_of(shuffled)
    assert everything(other) == everything(one)
    place = itemgetter("write_id", "batch_id")
    assert sorted(other.by_write(), key=place) == sorted(one.by_write(), key=place)


@given(st.lists(reports(), max_size=5))
@settings(max_examples=40)
def test_merging_older_writes_together_keeps_all_totals(found: list[PartitionReport]) -> None:
    assert everything(summary_of(found, keep=1)) == everything(summary_of(found))


@given(st.lists(reports(), min_size=2, max_size=4))
@settings(max_examples=40)
def test_merging_merged_measures_gives_the_same(found: list[PartitionReport]) -> None:
    def merged(parts: Sequence[Measures]) -> Measures:
        result = Measures()
        for part in parts:
            result.merge(part)
        return result

    parts = [Measures.unpack(report.packed) for report in found]
    nested = merged([parts[0], merged(parts[1:])])
    through_bytes = Measures.unpack(nested.pack())
    direct = merged(parts)
    assert through_bytes.brokers == nested.brokers == direct.brokers
    assert through_bytes.width == direct.width
    for broker in direct.brokers:
        assert through_bytes.latencies(broker)[0].tolist() == direct.latencies(broker)[0].tolist()
        assert through_bytes.latencies(broker)[1].tolist() == direct.latencies(broker)[1].tolist()


def test_merged_timelines_are_coarsened_equally_in_any_order() -> None:
    found = []
    for start in (0, 250, 500, 5_000):
        recording = recorder()
        for second in range(start, start + 250):
            success(recording, rows=second, now=second)
        found.append(recording.snapshot())
    expected = everything(summary_of(found))
    assert {row["width_s"] for row in expected[1]} == {2}
    for order in itertools.permutations(found):
        assert everything(summary_of(order)) == expected


def test_receipts_span_all_tasks() -> None:
    found = []
    for offset in (40, 10, 90):
        recording = recorder()
        success(recording, rows=5, offset=offset)
        found.append(recording.snapshot())
    assert summary_of(found).to_dict()["a"]["queues"] == {
        "t": {"0": {"rows": 15, "first_offset": 10, "last_offset": 94}}
    }


def test_two_writes_stay_apart() -> None:
    found = []
    for write_id, batch_id, rows in (("q1", 0, 1), ("q2", 0, 10), ("q1", 1, 100)):
        recording = recorder(write_id, batch_id)
        success(recording, rows=rows)
        found.append(recording.snapshot())
    summary = summary_of(found)
    assert summary.keys() == [("q1", 0), ("q2", 0), ("q1", 1)]
    rows_of = {write_id: summary.to_dict(write_id)["a"]["rows"] for write_id in ("q1", "q2", None)}
    assert rows_of == {"q1": 101, "q2": 10, None: 111}


def test_write_without_any_report_has_no_data() -> None:
    summary = summary_of([recorder("another").snapshot()])
    assert summary.to_dict("new") == {}
    assert summary.by_write("new") == summary.timeline("new") == []


@pytest.mark.parametrize("ask", [WriteSummary.plot, WriteSummary.plot_timeline, WriteSummary.show])
def test_unknown_write_error_lists_the_known_writes(ask: Callable[..., object]) -> None:
    none = r"^write_id='nope' is not a known write: no task of a write has ended$"
    with pytest.raises(OptionError, match=none):
        ask(WriteSummary(), write_id="nope")
    summary = summary_of([recorder(f"q{number}").snapshot() for number in (1, 2, 2, 3, 4, 5, 6)])
    with pytest.raises(OptionError, match=r"^write_id='nope' is not a known write: the newest are q2, q3, q4, q5, q6$"):
        ask(summary, write_id="nope")


def test_by_write_sums_up_brokers_and_tasks_of_each_micro_batch() -> None:
    found = []
    for batch_id, start in ((0, 10.0), (1, 20.0)):
        for partition_id in (0, 1):
            recording = recorder("query", batch_id, partition_id, epoch=1_700_000_000)
            success(recording, "a", rows=30, latency_ms=500, now=start + partition_id)
            success(recording, "b", rows=20, latency_ms=100, now=start + partition_id + 0.25)
            recording.record_retry("b", "busy", start + 1.5)
            found.append(recording.snapshot())
    first, second = summary_of(found).by_write("query")
    assert (first["write_id"], first["batch_id"], second["batch_id"]) == ("query", 0, 1)
    # The first request was written 500 ms before its answer.
    assert (first["start"], first["duration_s"]) == (1_700_000_009.5, 2.0)
    assert (second["start"], second["duration_s"]) == (1_700_000_019.5, 2.0)
    assert [first[name] for name in ("rows", "sent_rows", "requests", "bytes", "retries", "failures")] == [
        100, 0, 4, 1000, 2, 0,
    ]  # fmt: skip
    assert [round(first[name] / 10) for name in ("p50_ms", "p90_ms", "p99_ms", "max_ms")] == [10, 50, 50, 50]


def test_by_write_of_a_write_without_a_request_has_no_time_and_no_latency() -> None:
    (found,) = summary_of([recorder().snapshot()]).by_write()
    assert (found["rows"], found["requests"]) == (0, 0)
    assert {found[name] for name in ("start", "duration_s", "p50_ms", "max_ms")} == {None}


def test_only_the_newest_writes_are_kept_apart() -> None:
    summary = WriteSummary(keep=3)
    for batch_id in range(10):
        recording = recorder("q", batch_id)
        success(recording, rows=1)
        merge_into(summary, recording.snapshot())
    assert summary.keys() == [("q", 7), ("q", 8), ("q", 9)]
    assert summary.to_dict()["a"]["rows"] == 10
    assert summary.to_dict("q")["a"]["rows"] == 3


def test_reset_sets_all_counts_to_zero() -> None:
    summary = summary_of([recorder().snapshot(), "nonsense"])
    summary.reset()
    assert (summary.to_dict(), summary.keys(), summary.reports, summary.dropped_reports) == ({}, [], 0, 0)
