"""Measurements as text for Prometheus and other monitors (OpenMetrics 1.0).

A scrape or a file has the sums since the process or the file began. All series are counters, the buckets of a
histogram, or the time of the last commit, so two texts are merged by adding the values of equal series.

The package prometheus-client 0.26 does not replace this module. In labels it escapes only backslashes, line feeds and
quotation marks: not CR, U+0085, U+2028, ``$`` and backticks. A lone surrogate is a UnicodeEncodeError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from rocketmq_spark.errors import escaped
from rocketmq_spark.metrics.measures import Measures, Metric, lowest_us

# Upper ends of the latency buckets, microseconds: powers of two, because the latencies in commit messages have no finer
# resolution. 0.5 ms to 17 s.
_BOUNDS_US: Final = tuple(1 << bits for bits in range(9, 25))
_LAST_COMMIT: Final = "rocketmq_spark_last_commit_timestamp_seconds"
# How every text of `render` with a metric begins.
BEGINNING: Final = "# TYPE rocketmq_spark_"
_SAMPLE: Final = re.compile(r"([a-z_]+)(\{.*\})? (\S+)")


class Family(NamedTuple):
    """The series of one name: a counter, a histogram or a gauge."""

    name: str
    kind: str
    help: str
    # Suffix of the name, labels, and value of each sample.
    samples: Sequence[tuple[str, Mapping[str, str], float]]
    unit: str = ""


_BY_BROKER: Final = {
    "rows": ("rows", "Rows that brokers have acknowledged.", ""),
    "sent_rows": ("sent_rows", "Rows that were sent with sendMode=oneway, without an acknowledgement.", ""),
    "requests": ("requests", "Acknowledged send requests.", ""),
    "nbytes": ("sent_bytes", "Bytes of acknowledged request bodies.", "bytes"),
    "retries": ("retries", "Batches that were sent again.", ""),
    "failures": ("failures", "Batches that tasks gave up.", ""),
    "isolated_times": ("isolations", "How often tasks began to avoid a broker.", ""),
    "isolated_us": ("isolated_seconds", "Time in which tasks avoided a broker, summed over tasks.", "seconds"),
}


def families(
    measures: Measures, *, unreadable: Mapping[str, int] | None = None, lost_reports: int = 0, repeated: int = 0
) -> list[Family]:
    """Return the families of measurements.

    `unreadable` are skipped messages of reads by topic, `repeated` the repeats that the end of a write has found.
    """
    return [family for family in _families(measures, unreadable or {}, lost_reports, repeated) if family.samples]


def _families(measures: Measures, unreadable: Mapping[str, int], lost_reports: int, repeated: int) -> Iterator[Family]:
    brokers = measures.brokers
    for field, (name, text, unit) in _BY_BROKER.items():
        scale = 1e6 if unit == "seconds" else 1
        yield _counter(name, text, "broker", {key: getattr(of, field) / scale for key, of in brokers.items()}, unit)
    for name, text, label, metric in (
        ("retries_by_reason", "Batches that were sent again, by the reason.", "reason", Metric.REASON_RETRIES),
        ("failures_by_code", "Batches that tasks gave up, by response code or error.", "code", Metric.REASON_FAILURES),
    ):
        reasons = measures.entries(metric, metric)
        samples = [("_total", {"broker": broker, label: detail}, count) for broker, detail, _, _, count in reasons]
        yield Family(f"rocketmq_spark_{name}", "counter", text, samples)
    yield Family(
        "rocketmq_spark_send_latency_seconds",
        "histogram",
        "Time from the last byte of a request to its acknowledgement.",
        [sample for broker in brokers for sample in _histogram(measures, broker)],
        "seconds",
    )
    rows = [
        ("_total", {"fate": fate, "rule": rule}, rows)
        for fate, metric in (("skipped", Metric.SKIPPED), ("dead_lettered", Metric.DEAD_LETTERED))
        for rule, rows in measures.by_detail(metric).items()
    ]
    yield Family("rocketmq_spark_invalid_rows", "counter", "Rows that no broker could store.", rows)
    text = "Rows that an earlier attempt had stored (effectivelyOnce)."
    yield _counter("recovered_rows", text, "", {"": measures.total(Metric.RECOVERED)})
    text = "Rows that are stored twice or more often (effectivelyOnce)."
    yield _counter("repeated_rows", text, "", {"": measures.total(Metric.REPEATED) + repeated})
    yield _counter("unreadable_messages", "Messages that reads skipped (onUnreadable).", "topic", unreadable)
    yield _counter("lost_reports", "Reports of tasks that could not be read.", "", {"": lost_reports})


def _counter(name: str, text: str, label: str, values: Mapping[str, float], unit: str = "") -> Family:
    """Return a counter with one value for each value of a label; without a label, with one value."""
    samples = [("_total", {label: key} if label else {}, value) for key, value in values.items()]
    return Family(f"rocketmq_spark_{name}", "counter", text, samples, unit)


def last_commit(now: float) -> Family:
    """Return the time of a commit, `now`, epoch seconds."""
    return Family(_LAST_COMMIT, "gauge", "Time of the newest commit.", [("", {}, round(now, 3))], "seconds")


def render(several: Iterable[Family]) -> str:
    """Return the text of families."""
    lines = []
    for family in several:
        lines.append(f"# TYPE {family.name} {family.kind}")
        if family.unit:
            lines.append(f"# UNIT {family.name} {family.unit}")
        lines.append(f"# HELP {family.name} {_escaped(family.help)}")
        values: dict[str, float] = {}
        for suffix, labels, value in family.samples:
            pairs = ",".join(f'{name}="{_label(text)}"' for name, text in labels.items())
            series = f"{family.name}{suffix}{{{pairs}}}" if pairs else f"{family.name}{suffix}"
            # Two different names may have the same escaped text.
            values[series] = values.get(series, 0.0) + value
        lines += _sample_lines(values)
    return "\n".join([*lines, "# EOF", ""])


def added(old: str, several: Iterable[Family]) -> str:
    """Return the text of families with the values of an older text of `render` added.

    Raises a ValueError if `old` has anything but metrics of this package.
    """
    heads: dict[str, list[str]] = {}
    values: dict[str, dict[str, float]] = {}
    for text in filter(None, (old, render(several))):
        _read(text, heads, values)
    lines = []
    for name, by_series in values.items():
        lines += [*heads[name], *_sample_lines(by_series)]
    return "\n".join([*lines, "# EOF", ""])


def _sample_lines(values: Mapping[str, float]) -> list[str]:
    return [f"{series} {value:.15g}" for series, value in values.items()]


def _read(text: str, heads: dict[str, list[str]], values: dict[str, dict[str, float]]) -> None:
    """Add a text: the comment lines of each family, and the value of each series."""
    # Not splitlines: labels of older versions may have other line separators.
    *lines, last = text.removesuffix("\n").split("\n")
    if last != "# EOF":
        raise ValueError("the file has other content than metrics of rocketmq-spark: name another file")
    name = ""
    for line in lines:
        if line.startswith("# TYPE "):
            name = line.split(" ")[2]
            heads[name] = []
        if line.startswith("#") and name:
            heads[name].append(line)
            continue
        sample = _SAMPLE.fullmatch(line)
        if sample is None or not name:
            raise ValueError(f"the file has a line that is no metric of rocketmq-spark: {line[:80]!r}")
        series, value = f"{sample[1]}{sample[2] or ''}", float(sample[3])
        known = values.setdefault(name, {})
        known[series] = value if name == _LAST_COMMIT else known.get(series, 0.0) + value


def _histogram(measures: Measures, broker: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    indices, counts = measures.latencies(broker)
    if not len(indices):
        return
    lowest = np.array([lowest_us(int(index)) for index in indices])
    for bound in _BOUNDS_US:
        yield "_bucket", {"broker": broker, "le": repr(bound / 1e6)}, float(counts[lowest < bound].sum())
    total = float(counts.sum())
    yield "_bucket", {"broker": broker, "le": "+Inf"}, total
    yield "_count", {"broker": broker}, total
    yield "_sum", {"broker": broker}, float((lowest * counts).sum()) / 1e6


def _label(text: str) -> str:
    """Return the text of a peer as a label, without what a shell would execute in double quotes."""
    return _escaped(escaped(text).replace("$", "\\x24").replace("`", "\\x60"))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
