"""Records of writes in Spark's log of Python workers, and the metrics that read them, without a Spark session."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark.errors import MetricsUnavailableError
from rocketmq_spark.metrics import Measures, PartitionReport, Recorder
from rocketmq_spark.metrics.measures import Metric
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.spark.report import WHOLE_MESSAGE_BYTES, CommitMessage, Metrics, summarise
from rocketmq_spark.spark.worker_log import LoggedMetrics, log_record, records_of

WRITE_ID = "123e4567-e89b-12d3-a456-426614174000"


def report(queues: int = 4, topic: str = "orders") -> PartitionReport:
    """A request of ten rows to each queue."""
    recorder = Recorder(WRITE_ID, -1, 0, epoch_offset=1_700_000_000)
    for number in range(queues):
        offset = 20 + 10**9 * number**3 % 999_983
        recorder.record_success("broker-a", 10, 970, 1.5, MessageQueue(topic, "broker-a", number), offset, 10.0)
    recorder.record_retry("broker-a", "BrokerBusyException 2", 10.0)
    return recorder.snapshot()


class Log:
    """What Spark keeps of a session's Python workers."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def read(self, beginning: str) -> list[tuple[Any, str]]:
        texts = [record.getMessage() for record in self._caplog.records]
        return [(place, text) for place, text in enumerate(texts) if text.startswith(beginning)]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    caplog.set_level(logging.INFO)
    return Log(caplog)


def test_metrics_read_each_record_of_their_own_once(log: Log) -> None:
    metrics = LoggedMetrics(log.read, "one")
    assert metrics.writes() == []
    log_record("one", WRITE_ID, -1, Measures.unpack(report().packed))
    log_record("another", "other", -1, Measures.unpack(report().packed))
    logging.getLogger("rocketmq_spark.record").info('row {"rocketmq_spark_metrics": 1, "id": "one", ')
    for _ in range(2):
        assert metrics.to_dict()["broker-a"]["rows"] == 40
        assert metrics.writes() == [(WRITE_ID, -1)]
    queues = metrics.to_dict(WRITE_ID)["broker-a"]["queues"]["orders"]
    assert queues["0"] == {"rows": 10, "first_offset": 20, "last_offset": 29}
    assert metrics.to_dict()["broker-a"]["retries_by_reason"] == {"BrokerBusyException 2": 1}
    metrics.reset()
    assert metrics.to_dict() == {}


def test_a_record_is_one_line_of_json_with_its_version(log: Log) -> None:
    log_record("one", "naïve\n$(write)", 3, Measures.unpack(report().packed))
    ((_, text),) = log.read("{")
    found = json.loads(text)
    assert (found["rocketmq_spark_metrics"], found["id"], found["write_id"], found["batch_id"]) == (
        *(1, "one", "naïve\n$(write)", 3),
    )
    assert text.isascii()
    assert "\n" not in text


def test_a_record_of_too_many_queues_has_totals_and_is_incomplete(log: Log) -> None:
    random = Random(0)
    queues = [
        (Metric.QUEUE_ROWS, "broker-a", "orders", number, [random.randrange(1, 1 << 50)]) for number in range(200_000)
    ]
    log_record("one", WRITE_ID, -1, Measures.of([(Metric.ROWS, "broker-a", "", 0, [10]), *queues]))
    ((_, text),) = log.read("{")
    assert len(text) < 10_000
    numbers = LoggedMetrics(log.read, "one").to_dict()["broker-a"]
    assert (numbers["rows"], numbers["queues"], numbers["incomplete"]) == (10, {}, True)


def test_a_whole_commit_message_is_bounded_and_says_if_it_lacks_queues() -> None:
    small = summarise([CommitMessage.of(report(), histograms=True, whole=True)]).to_dict()["broker-a"]
    assert (len(small["queues"]["orders"]), small["incomplete"]) == (4, False)
    large = CommitMessage.of(report(3_000), histograms=True, whole=True)
    assert len(pickle.dumps(large)) <= WHOLE_MESSAGE_BYTES
    numbers = summarise([large]).to_dict()["broker-a"]
    assert (numbers["rows"], numbers["queues"], numbers["incomplete"]) == (30_000, {}, True)


@pytest.mark.parametrize(
    "call",
    [
        lambda metrics: metrics.show(),
        lambda metrics: metrics.to_dict(),
        lambda metrics: metrics.to_pandas(),
        lambda metrics: metrics.timeline(),
        lambda metrics: metrics.latencies("a"),
        lambda metrics: metrics.plot(),
        lambda metrics: metrics.writes(),
        lambda metrics: metrics.reports,
        lambda metrics: metrics.skipped_by_reads(),
        lambda metrics: metrics.reset(),
        lambda metrics: metrics._repr_html_(),
    ],
)
def test_metrics_without_a_log_raise_and_name_the_setting(call: Callable[[Metrics], object]) -> None:
    old: Any = SimpleNamespace(tvf=object())
    with pytest.raises(MetricsUnavailableError, match=r"Spark Connect has no accumulators") as error:
        call(LoggedMetrics(records_of(old), "one"))
    if "skip" not in str(error.value):
        assert 'spark.conf.set("spark.sql.pyspark.worker.logging.enabled", "true")' in str(error.value)
        assert "metricsPath" in str(error.value)


def test_repr_of_metrics_of_spark_connect_asks_no_server() -> None:
    old: Any = SimpleNamespace(tvf=object())
    assert repr(LoggedMetrics(records_of(old), "one")).startswith("<Metrics of Spark Connect: ")
