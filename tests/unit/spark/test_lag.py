"""The lag of a streaming query, and the line of each micro-batch, from progress reports."""

from __future__ import annotations

import json
import logging
import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark import ProgressListener, lag
from rocketmq_spark.errors import MetricsUnavailableError
from rocketmq_spark.metrics import Recorder, WriteSummary, merge_into
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.testing import FakeCluster

QUERY = uuid.uuid4()
READ = {"orders": {"a": {"0": 5, "1": [0, 7]}}}
ENDS = {"orders": {"a": {"0": 9, "1": 7}, "b": {"0": 3}}}


class Source(dict[str, Any]):
    """A source in a report of PySpark 4.0, whose values are not JSON."""

    def __init__(self, offsets: dict[str, Any]) -> None:
        super().__init__({name: str(value) for name, value in offsets.items()})
        self.json = json.dumps(offsets)


def source(end: Any = READ, latest: Any = ENDS) -> Source:
    return Source({"endOffset": end, "latestOffset": latest})


KAFKA = source({"orders": {"0": 23}}, {"orders": {"0": 42}})


def progress(*sources: Source, **values: Any) -> SimpleNamespace:
    usual = {"id": QUERY, "name": "copy", "batchId": 4, "numInputRows": 12, "durationMs": {"triggerExecution": 250}}
    return SimpleNamespace(sources=sources, **{**usual, **values})


def query(last: Any) -> Any:
    return SimpleNamespace(lastProgress=last)


@pytest.fixture(autouse=True)
def no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)


def test_lag_is_the_end_of_each_queue_less_the_offset_of_the_query() -> None:
    found = lag(query(progress(KAFKA, source())))
    assert [
        (one.topic, one.broker_name, one.queue_id, one.read_offset, one.max_offset, one.messages) for one in found
    ] == [
        ("orders", "a", 0, 5, 9, 4),
        ("orders", "a", 1, 7, 7, 0),
    ]
    assert repr(found).splitlines()[0].split() == [
        "topic",
        "broker",
        "queue",
        "read",
        "offset",
        "max",
        "offset",
        "messages",
    ]


def test_progress_of_older_releases_is_a_dict() -> None:
    last = {"sources": [{"endOffset": READ, "latestOffset": ENDS}]}
    assert [one.messages for one in lag(query(last))] == [4, 0]


def test_offset_behind_a_deleted_topic_is_no_negative_lag() -> None:
    shrunk = {"orders": {"a": {"0": 1, "1": 1}}}
    assert [one.messages for one in lag(query(progress(source(latest=shrunk))))] == [0, 0]


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (None, "no progress yet"),
        (progress(), "reads no RocketMQ topic"),
        (progress(KAFKA), "reads no RocketMQ topic"),
        (progress(source(end=None)), "reads no RocketMQ topic"),
        (progress(source(latest=None)), "give name_server"),
    ],
)
def test_lag_without_offsets_is_an_error(last: Any, reason: str) -> None:
    with pytest.raises(MetricsUnavailableError, match=reason):
        lag(query(last))


def test_with_name_servers_the_brokers_are_asked() -> None:
    with FakeCluster(["a"], topics={"orders": 2}) as cluster:
        found = lag(query(progress(source({"orders": {"a": {"0": 0, "1": 0}}}, None))), cluster.name_server)
    assert [(one.queue, one.messages) for one in found] == [
        (MessageQueue("orders", "a", 0), 0),
        (MessageQueue("orders", "a", 1), 0),
    ]


def test_listener_logs_rows_latency_retries_and_lag(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rocketmq_spark.spark")
    metrics = WriteSummary()
    recorder = Recorder(str(QUERY), 4, 0, epoch_offset=0.0)
    recorder.record_success("a", 12, 100, 8.0, MessageQueue("T", "a", 0), 5, 1.0)
    recorder.record_retry("a", "BrokerBusyException 2", 1.0)
    merge_into(metrics, recorder.snapshot())
    listener = ProgressListener(metrics)
    listener.onQueryStarted(SimpleNamespace(id=QUERY, name=None))
    listener.onQueryProgress(SimpleNamespace(progress=progress(source())))
    listener.onQueryProgress(SimpleNamespace(progress=progress(KAFKA, batchId=5)))
    listener.onQueryIdle(SimpleNamespace())
    listener.onQueryTerminated(SimpleNamespace(id=QUERY, exception="it failed"))
    written = "12 stored, p99 8.0 ms, 1 retries, 0 failures"
    unread = "4 messages not read, 4 of them in orders/a/0"
    assert caplog.messages == [
        f"query {QUERY} has started",
        f"query copy ({QUERY}), micro-batch 4: 12 rows in 250 ms; {written}; {unread}",
        f"query copy ({QUERY}), micro-batch 5: 12 rows in 250 ms",
        f"query {QUERY} has ended with an error: it failed",
    ]
