"""The bucket layout: HdrHistogram's."""

from __future__ import annotations

import pytest
from hdrh.histogram import HdrHistogram
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.metrics.measures import (
    BUCKETS,
    HIGHEST_US,
    LOWEST_US,
    SIGNIFICANT_DIGITS,
    highest_us,
    index_of,
    lowest_us,
)
from tests.support.pipelines import recorder, success, summary_of


def hdr() -> HdrHistogram:
    return HdrHistogram(LOWEST_US, HIGHEST_US, SIGNIFICANT_DIGITS)


latencies_us = st.integers(LOWEST_US, HIGHEST_US) | st.integers(LOWEST_US, 100_000)


@given(latencies_us)
def test_bucket_index_is_hdr_histograms(latency_us: int) -> None:
    assert index_of(latency_us) == hdr()._counts_index_for(latency_us)


@given(latencies_us)
def test_bucket_bounds_are_hdr_histograms(latency_us: int) -> None:
    index = index_of(latency_us)
    assert lowest_us(index) == hdr().get_lowest_equivalent_value(latency_us)
    assert highest_us(index) == hdr().get_highest_equivalent_value(latency_us)


def test_every_index_is_a_bucket() -> None:
    assert index_of(HIGHEST_US) < min(hdr().counts_len, BUCKETS)


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
    assert summary.measures().brokers["a"].clamped == (0 if in_range else 1)
    assert ("1 latencies lay outside 1 us .. 1 hour and count as the nearer end." in summary.notes()) == (not in_range)
