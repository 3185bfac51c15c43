"""What the tests of metrics record: tasks by hand, and any task that may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from rocketmq_spark.message import MessageQueue
from rocketmq_spark.metrics import PartitionReport, Recorder, WriteSummary, merge_into


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
    st.tuples(
        st.sampled_from(("skipped", "dead")), st.just("a"), st.sampled_from(("body is null", "lost")), st.just(0.0)
    ),
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
        elif kind == "skipped":
            recording.record_skipped({rest[0]: 3})
        elif kind == "dead":
            recording.record_dead_letters({rest[0]: 4})
        else:
            recording.record_isolation(broker, *rest)
    return recording.snapshot()
