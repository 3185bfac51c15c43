"""Latencies and counts: recorded, packed, merged in any order, shown."""

from __future__ import annotations

import io
import itertools
import json
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hdrh.histogram import HdrHistogram
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.message import MessageQueue
from rocketmq_spark.metrics import Measures, PartitionReport, Recorder, WriteSummary, merge_into
from rocketmq_spark.metrics.histogram import (
    HIGHEST_US,
    INDEX_BITS,
    LOWEST_US,
    SIGNIFICANT_DIGITS,
    highest_us,
    index_of,
    lowest_us,
)
from rocketmq_spark.metrics.measures import MAX_SECONDS
from rocketmq_spark.metrics.view import require

NOTE = "Latencies cover successful attempts only; numbers appear as tasks end."


def hdr() -> HdrHistogram:
    return HdrHistogram(LOWEST_US, HIGHEST_US, SIGNIFICANT_DIGITS)


def recorder(write_id: str = "w", batch_id: int = -1, partition_id: int = 0, epoch: float = 0) -> Recorder:
    return Recorder(write_id, batch_id, partition_id, epoch_offset=epoch)


def success(
    to: Recorder,
    broker: str = "a",
    rows: int = 1,
    latency_ms: float = 1.0,
    offset: int = 0,
    now: float = 0.0,
    **other: Any,
) -> None:
    queue = MessageQueue(other.get("topic", "t"), broker, other.get("queue_id", 0))
    to.record_success(broker, rows, other.get("nbytes", 10 * rows), latency_ms, queue, offset, now)


def summary_of(reports: Iterable[object], keep: int = 1000) -> WriteSummary:
    summary = WriteSummary(keep)
    for report in reports:
        merge_into(summary, report)
    return summary


def everything(summary: WriteSummary) -> tuple[Any, ...]:
    timeline = sorted(summary.timeline(), key=lambda row: (row["second"], row["broker"]))
    return summary.to_dict(), timeline, summary.reports, summary.dropped_reports


latencies_us = st.integers(LOWEST_US, HIGHEST_US) | st.integers(LOWEST_US, 100_000)

events = st.one_of(
    st.tuples(
        st.just("success"),
        st.sampled_from("abc"),
        st.integers(1, 32_000),
        st.floats(0.0, 5e6),
        st.sampled_from(("t", "u")),
        st.integers(0, 3),
        st.integers(-1, 2**40),
        st.floats(0, 5_000),
    ),
    st.tuples(st.just("retry"), st.sampled_from("abc"), st.sampled_from(("busy", "lost")), st.floats(0, 5_000)),
    st.tuples(st.just("failure"), st.sampled_from("abc"), st.sampled_from(("13", "lost")), st.floats(0, 5_000)),
    st.tuples(st.just("isolation"), st.sampled_from("abc"), st.floats(0, 60_000), st.floats(0, 5_000)),
)


@st.composite
def reports(draw: st.DrawFn) -> PartitionReport:
    recording = recorder(draw(st.sampled_from(("w", "v"))), draw(st.integers(0, 2)), draw(st.integers(0, 9)), 1_000)
    for event in sorted(draw(st.lists(events, max_size=12)), key=lambda event: event[-1]):
        kind, broker, *rest = event
        if kind == "success":
            rows, latency_ms, topic, queue_id, offset, now = rest
            queue = MessageQueue(topic, broker, queue_id)
            recording.record_success(broker, rows, rows, latency_ms, queue, offset, now)
        elif kind == "retry":
            recording.record_retry(broker, *rest)
        elif kind == "failure":
            recording.record_failure(broker, *rest)
        else:
            recording.record_isolation(broker, *rest)
    return recording.snapshot()


# The bucket layout.


@given(latencies_us)
def test_bucket_index_is_hdr_histograms(latency_us: int) -> None:
    assert index_of(latency_us) == hdr()._counts_index_for(latency_us)


@given(latencies_us)
def test_bucket_bounds_are_hdr_histograms(latency_us: int) -> None:
    index = index_of(latency_us)
    assert lowest_us(index) == hdr().get_lowest_equivalent_value(latency_us)
    assert highest_us(index) == hdr().get_highest_equivalent_value(latency_us)


def test_every_index_fits_its_bits_in_a_key() -> None:
    assert index_of(HIGHEST_US) < min(hdr().counts_len, 1 << INDEX_BITS)


@given(st.lists(latencies_us, min_size=1, max_size=200))
@settings(max_examples=60)
def test_quantiles_agree_with_hdr_histogram(values: list[int]) -> None:
    recording, reference = recorder(), hdr()
    for value in values:
        success(recording, latency_ms=value / 1000)
        reference.record_value(value)
    summary = summary_of([recording.snapshot()])
    numbers = summary.to_dict()["a"]
    for percent in (50, 90, 99):
        assert numbers[f"p{percent}_ms"] == reference.get_value_at_percentile(percent) / 1000
    assert numbers["max_ms"] == reference.get_max_value() / 1000
    shown = summary.latencies("a")
    assert list(shown.counts) == list(reference.counts)
    assert shown.get_total_count() == reference.get_total_count()
    assert shown.get_value_at_percentile(75) == reference.get_value_at_percentile(75)


@pytest.mark.parametrize(
    ("latency_ms", "counted_ms"),
    [(0.0, 0.001), (-5.0, 0.001), (float("nan"), 0.001), (0.001, 0.001), (3.6e6, 3.6e6), (3.7e6, 3.6e6), (1e300, 3.6e6),
     (float("inf"), 3.6e6)],
)  # fmt: skip
def test_latencies_out_of_range_are_clamped(latency_ms: float, counted_ms: float) -> None:
    recording = recorder()
    success(recording, latency_ms=latency_ms)
    summary = summary_of([recording.snapshot()])
    assert summary.to_dict()["a"]["max_ms"] == highest_us(index_of(int(counted_ms * 1000))) / 1000
    in_range = latency_ms == counted_ms
    assert summary.measures().broker_totals()["a"].clamped == (0 if in_range else 1)
    assert ("1 latencies lay outside 1 us .. 1 hour and count as the nearer end." in summary.notes()) == (not in_range)


# One task.


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
            "isolated_times": 0,
            "isolated_ms": 0.0,
        },
        "b": {
            "rows": 0,
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
            "isolated_times": 0,
            "isolated_ms": 0.0,
        },
    }


def test_to_dict_is_json() -> None:
    recording = recorder()
    success(recording)
    found = summary_of([recording.snapshot()]).to_dict()
    assert json.loads(json.dumps(found)) == found


def test_nothing_recorded_is_nothing_shown() -> None:
    summary = summary_of([recorder().snapshot()])
    assert (summary.to_dict(), summary.timeline(), summary.reports) == ({}, [], 1)
    assert summary.latencies("nobody").get_total_count() == 0


def test_seconds_count_from_the_epoch() -> None:
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


def test_an_isolation_counts_as_long_as_the_task_lived() -> None:
    recording = recorder()
    recording.record_isolation("a", 600_000, 1.5)
    success(recording, "b", now=4.25)
    summary = summary_of([recording.snapshot()])
    numbers = summary.to_dict()["a"]
    assert (numbers["isolated_times"], numbers["isolated_ms"]) == (1, 2750.0)
    assert [row["second"] for row in summary.timeline() if row["isolated"]] == [1, 2, 3, 4]
    assert {row["broker"] for row in summary.timeline() if row["isolated"]} == {"a"}


def test_an_isolation_that_is_prolonged_counts_once() -> None:
    recording = recorder()
    recording.record_isolation("a", 1_000, 1.0)
    recording.record_isolation("a", 500, 1.5)
    recording.record_isolation("a", 1_000, 5.0)
    success(recording, "b", now=10.0)
    numbers = summary_of([recording.snapshot()]).to_dict()["a"]
    assert (numbers["isolated_times"], numbers["isolated_ms"]) == (2, 2500.0)


def test_a_snapshot_leaves_the_recorder_as_it_was() -> None:
    recording = recorder()
    success(recording, rows=1)
    first = recording.snapshot()
    assert recording.snapshot() == first
    success(recording, rows=2)
    assert summary_of([recording.snapshot()]).to_dict()["a"]["rows"] == 3


def test_lines_tell_rows_and_latencies_of_the_brokers_that_stored() -> None:
    recording = recorder()
    success(recording, "b", rows=7, latency_ms=2)
    success(recording, "a", rows=5, latency_ms=2)
    recording.record_retry("c", "lost", 1.0)
    assert recording.lines() == [
        "a 5 rows in 1 requests (p50 2.0 ms, p99 2.0 ms, max 2.0 ms)",
        "b 7 rows in 1 requests (p50 2.0 ms, p99 2.0 ms, max 2.0 ms)",
    ]


def test_repr_of_a_recorder_tells_place_and_counts() -> None:
    recording = recorder("w", 3, 7)
    success(recording, rows=5)
    assert repr(recording) == "<Recorder write=w batch=3 partition=7 brokers=1 rows=5 requests=1>"


# More seconds than are kept.


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


def test_a_merge_coarsens_a_copy_of_what_it_reads() -> None:
    long, short = recorder("long"), recorder("short")
    for second in range(2_000):
        success(long, now=second)
    success(short, now=1)
    success(short, now=2)
    summary = summary_of([short.snapshot(), long.snapshot()])
    assert {row["width_s"] for row in summary.timeline()} == {4}
    assert [row["second"] for row in summary.timeline("short")] == [1, 2]


# Many tasks.


@given(st.lists(reports(), max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_merging_in_any_order_gives_the_same(found: list[PartitionReport], random: Any) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)
    assert everything(summary_of(shuffled)) == everything(summary_of(found))


@given(st.lists(reports(), max_size=5))
@settings(max_examples=40, deadline=None)
def test_folding_older_writes_away_loses_nothing(found: list[PartitionReport]) -> None:
    assert everything(summary_of(found, keep=1)) == everything(summary_of(found))


@given(st.lists(reports(), min_size=2, max_size=4))
@settings(max_examples=40, deadline=None)
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
    assert through_bytes.broker_totals() == nested.broker_totals() == direct.broker_totals()
    assert through_bytes.width == direct.width
    for broker in direct.broker_totals():
        assert through_bytes.latencies(broker)[0].tolist() == direct.latencies(broker)[0].tolist()
        assert through_bytes.latencies(broker)[1].tolist() == direct.latencies(broker)[1].tolist()


def test_time_lines_of_many_short_tasks_coarsen_alike_in_any_order() -> None:
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
    assert summary.to_dict("q3") == {}


def test_only_the_newest_writes_are_kept_apart() -> None:
    summary = WriteSummary(keep=3)
    for batch_id in range(10):
        recording = recorder("q", batch_id)
        success(recording, rows=1)
        merge_into(summary, recording.snapshot())
    assert summary.keys() == [("q", 7), ("q", 8), ("q", 9)]
    assert summary.to_dict()["a"]["rows"] == 10
    assert summary.to_dict("q")["a"]["rows"] == 3


def test_reset_begins_from_zero() -> None:
    summary = summary_of([recorder().snapshot(), "nonsense"])
    summary.reset()
    assert (summary.to_dict(), summary.keys(), summary.reports, summary.dropped_reports) == ({}, [], 0, 0)


# Reports that can't be read.


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
    assert "the metrics of a task are lost, its rows are not" in caplog.text
    assert summary.notes()[1].startswith("1 reports of tasks could not be read")


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_measures_never_raise_and_are_taken_whole_or_not_at_all(data: st.DataObject) -> None:
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


# What it looks like.


def shown() -> WriteSummary:
    recording = recorder()
    success(recording, "broker-a", rows=1_234_567, latency_ms=2, nbytes=3 * 1024**2)
    recording.record_retry("<b> [red]", "busy", 1.0)
    return summary_of([recording.snapshot()])


def test_show_prints_a_line_per_broker_and_what_to_know() -> None:
    out = io.StringIO()
    shown().show(file=out)
    head, _, *rows = [line.split() for line in out.getvalue().strip().splitlines()]
    assert " ".join(head) == ("broker rows requests MiB retries failures isolated p50 ms p90 ms p99 ms max ms")
    assert rows[0] == ["<b>", "[red]", "0", "0", "0.0", "1", "0", "0", "-", "-", "-", "-"]
    assert rows[1] == ["broker-a", "1,234,567", "1", "3.0", "0", "0", "0", "2.0", "2.0", "2.0", "2.0"]
    assert " ".join(rows[-1]) == NOTE


def test_show_goes_to_stdout_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    shown().show()
    assert "broker-a" in capsys.readouterr().out


def test_show_before_any_task_has_ended_says_so() -> None:
    out = io.StringIO()
    WriteSummary().show(file=out)
    assert out.getvalue() == f"No task has ended yet.\n{NOTE}\n"


def test_html_is_a_table_with_escaped_names() -> None:
    page = shown()._repr_html_()
    assert page.startswith("<table>")
    assert "<td>&lt;b&gt; [red]</td><td>0</td>" in page
    assert page.endswith(f"</table>\n<p>{NOTE}</p>")
    assert "No task has ended yet." in WriteSummary()._repr_html_()


def test_repr_tells_the_counts() -> None:
    assert repr(shown()) == "<WriteSummary writes=1 reports=1 <Measures brokers=2 rows=1234567 requests=1>>"


def test_pandas_has_a_row_of_numbers_per_broker() -> None:
    pytest.importorskip("pandas")
    frame = shown().to_pandas()
    assert frame.index.tolist() == ["<b> [red]", "broker-a"]
    assert frame.loc["broker-a", "rows"] == 1_234_567
    assert frame["p99_ms"].isna().tolist() == [True, False]
    assert {name: str(kind) for name, kind in frame.dtypes.items()} == {
        **dict.fromkeys(("rows", "requests", "bytes", "retries", "failures", "isolated_times"), "int64"),
        **dict.fromkeys(("p50_ms", "p90_ms", "p99_ms", "max_ms", "isolated_ms"), "float64"),
    }


def test_pandas_of_nothing_has_the_same_columns() -> None:
    pytest.importorskip("pandas")
    assert WriteSummary().to_pandas().columns.tolist() == shown().to_pandas().columns.tolist()


def test_plot_has_a_line_per_broker_that_answered() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = shown().plot()
    assert [line.get_label() for line in axes.lines] == ["broker-a"]
    assert axes.lines[0].get_xdata()[-1] == shown().to_dict()["broker-a"]["max_ms"]
    assert axes.lines[0].get_ydata()[-1] == 100
    assert axes.get_legend() is not None
    again = WriteSummary().plot(axes)
    assert again is axes
    pyplot.close("all")


def test_a_missing_optional_module_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"^drawing needs no_such_module: pip install 'rocketmq-spark\[notebook\]'$"):
        require("no_such_module.part", "drawing")
