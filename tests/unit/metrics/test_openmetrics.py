"""Measurements as OpenMetrics text, read back by the parser of Prometheus's own client, and the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from rocketmq_spark.errors import escaped
from rocketmq_spark.metrics import Measures, ReadReport, Recorder, WriteSummary, merge_into
from rocketmq_spark.metrics.openmetrics import added, families, last_commit, render
from rocketmq_spark.model.message import MessageQueue

DASHBOARD = Path(__file__).parents[3] / "conf" / "grafana.json"


def recorder(broker: str = "a", latency_ms: float = 3.0, rows: int = 10) -> Recorder:
    filled = Recorder("w", -1, 0, epoch_offset=0.0)
    filled.record_success(broker, rows, 100, latency_ms, MessageQueue("T", broker, 0), 5, 1.0)
    filled.record_retry(broker, "BrokerBusyException 2", 1.0)
    return filled


def summary(*recorders: Recorder) -> WriteSummary:
    merged = WriteSummary()
    for one in recorders:
        merge_into(merged, one.snapshot())
    return merged


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the samples by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    return parsed(text)[f"rocketmq_spark_{name}", tuple(sorted(labels.items()))]


def test_counters_of_each_broker_have_the_numbers_of_the_metrics() -> None:
    merged = summary(recorder("a"), recorder("a"), recorder("b", rows=7))
    text = merged.to_openmetrics()
    for broker, numbers in merged.to_dict().items():
        for name, key in (("rows", "rows"), ("requests", "requests"), ("sent_bytes", "bytes"), ("retries", "retries")):
            assert value(text, f"{name}_total", broker=broker) == numbers[key]
    assert value(text, "retries_by_reason_total", broker="a", reason="BrokerBusyException 2") == 2


def test_latencies_are_a_histogram_in_seconds() -> None:
    text = summary(*[recorder("a", ms) for ms in (0.1, 1.0, 3.0, 3.5, 100_000.0)]).to_openmetrics()
    counts = [
        value(text, "send_latency_seconds_bucket", broker="a", le=le) for le in ("0.000512", "0.001024", "0.002048")
    ]
    assert counts == [1, 2, 2]
    assert value(text, "send_latency_seconds_bucket", broker="a", le="0.004096") == 4
    assert value(text, "send_latency_seconds_bucket", broker="a", le="16.777216") == 4
    assert value(text, "send_latency_seconds_bucket", broker="a", le="+Inf") == 5
    assert value(text, "send_latency_seconds_count", broker="a") == 5
    assert value(text, "send_latency_seconds_sum", broker="a") == pytest.approx(100.0076, rel=0.01)


def test_coarse_latencies_of_commit_messages_fall_into_the_same_buckets() -> None:
    exact = Measures.unpack(recorder("a", 3.3).snapshot().packed)
    coarse = exact.totals_only(7)
    assert _buckets(render(families(exact))) == _buckets(render(families(coarse)))


def _buckets(text: str) -> dict[Any, float]:
    return {key: count for key, count in parsed(text).items() if key[0].endswith(("_bucket", "_count"))}


@pytest.mark.parametrize(
    "name",
    ['bro"ker\\\n# EOF', "a\u2028# EOF", "a\x85b", "a\rb", "\ud800", 'x"} 1\nrocketmq_spark_rows_total{broker="y'],
)
def test_texts_of_peers_are_escaped_and_added_again(name: str) -> None:
    text = summary(recorder(name)).to_openmetrics()
    assert text.splitlines() == text.split("\n")[:-1]
    again = added(added("", families(Measures.unpack(recorder(name).snapshot().packed))), [])
    for found in (text, again):
        assert value(found.encode().decode(), "rows_total", broker=escaped(name)) == 10


def test_no_shell_executes_a_name() -> None:
    text = summary(recorder("$(touch x)`touch x`")).to_openmetrics()
    assert not {"$", "`"} & set(text)
    assert value(text, "rows_total", broker=r"\x24(touch x)\x60touch x\x60") == 10


def test_names_that_are_equal_when_escaped_share_a_series() -> None:
    text = summary(recorder("a\n"), recorder(r"a\n")).to_openmetrics()
    assert value(text, "rows_total", broker=r"a\n") == 20


def test_invalid_unreadable_and_lost_rows_are_counted() -> None:
    recorded = recorder()
    recorded.record_skipped({"body is empty": 1})
    merged = summary(recorded)
    merge_into(merged, ReadReport({"orders": 3}))
    merge_into(merged, "no report")
    text = merged.to_openmetrics()
    assert value(text, "invalid_rows_total", fate="skipped", rule="body is empty") == 1
    assert value(text, "unreadable_messages_total", topic="orders") == 3
    assert value(text, "lost_reports_total") == 1


def test_no_measurements_are_a_valid_text() -> None:
    assert set(parsed(WriteSummary().to_openmetrics()).values()) == {0.0}


def test_a_commit_is_added_to_the_sums_of_a_file() -> None:
    one, other = (Measures.unpack(recorder(broker).snapshot().packed) for broker in ("a", "b"))
    text = added("", [*families(one), last_commit(1000.0)])
    text = added(text, [*families(other), last_commit(1001.5)])
    text = added(text, [*families(one, repeated=4), last_commit(1003.0)])
    assert value(text, "rows_total", broker="a") == 20
    assert value(text, "rows_total", broker="b") == 10
    assert value(text, "send_latency_seconds_count", broker="a") == 2
    assert value(text, "repeated_rows_total") == 4
    assert value(text, "last_commit_timestamp_seconds") == 1003.0


@pytest.mark.parametrize("text", ["x", "# EOF", "rows 1\n# EOF\n", "# TYPE a counter\na b c\n# EOF\n"])
def test_a_file_with_other_content_is_not_replaced(text: str) -> None:
    if text == "# EOF":
        assert added(text, []) == "# EOF\n"
        return
    with pytest.raises(ValueError, match="rocketmq-spark"):
        added(text, [])


def test_the_dashboard_uses_all_metrics_and_no_others() -> None:
    recorded = recorder()
    recorded.record_skipped({"body is empty": 1})
    recorded.record_sent("a", 1, 1, 1.0)
    recorded.record_failure("a", "2", 1.0)
    written = families(Measures.unpack(recorded.snapshot().packed), unreadable={"T": 1})
    names = {f"{family.name}{suffix}" for family in [*written, last_commit(0.0)] for suffix, _, _ in family.samples}
    board = json.loads(DASHBOARD.read_text("utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = {name for query in queries for name in re.findall(r"rocketmq_spark_\w+", query)}
    assert used == names
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
