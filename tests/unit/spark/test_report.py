"""Reports to the driver without a Spark session: the accumulator, driven like PySpark, and commit messages."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Iterator

import pytest
from pyspark.accumulators import Accumulator, _accumulatorRegistry
from pyspark.sql.datasource import WriterCommitMessage

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.errors import DeliveryError, MQClientException, OptionError
from rocketmq_spark.metrics import PartitionReport, ReadReport, Recorder, WriteSummary, merge_into
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.spark.partition import name_micro_batch
from rocketmq_spark.spark.report import (
    COMMIT_MESSAGE_BYTES,
    CommitMessage,
    Metrics,
    ReportAccumulatorParam,
    check_complete,
    log_summary,
    micro_batch_of,
    summarise,
)

WRITE_ID = "123e4567-e89b-12d3-a456-426614174000"
ACCUMULATOR_ID = 987_654_321
BROKERS = tuple(f"rocketmq-cluster-broker-{number:02d}" for number in range(20))


def report(
    partition_id: int = 0, rows: int = 10, brokers: tuple[str, ...] = ("a", "b"), requests: int = 1
) -> PartitionReport:
    """Each of `requests` requests to each broker holds `rows` rows; no two latencies are alike."""
    recorder = Recorder(WRITE_ID, -1, partition_id, epoch_offset=1_700_000_000)
    for place, broker in enumerate(brokers):
        for request in range(requests):
            latency_ms = 1 + (partition_id * 37 + place * 11 + request * 101) % 1009 / 7
            queue = MessageQueue("orders", broker, request % 4)
            recorder.record_success(broker, rows, 97 * rows, latency_ms, queue, request * rows, 10.0 + request / 50)
        recorder.record_retry(broker, "BrokerBusyException 2", 10.0)
    return recorder.snapshot()


@pytest.fixture
def accumulator() -> Iterator[Accumulator[object]]:
    yield Accumulator(ACCUMULATOR_ID, Metrics(), ReportAccumulatorParam())
    _accumulatorRegistry.pop(ACCUMULATOR_ID, None)


def metrics_of(accumulator: Accumulator[object]) -> Metrics:
    metrics = accumulator.value
    assert isinstance(metrics, Metrics)
    return metrics


def task_update(pickled: bytes, *reports: object) -> bytes:
    """Do what a Python worker does with an accumulator of its task; return the bytes that it sends back."""
    driver_side = _accumulatorRegistry.pop(ACCUMULATOR_ID)
    try:
        in_task = pickle.loads(pickled)
        for each in reports:
            in_task.add(each)
        return pickle.dumps((in_task.aid, in_task._value))
    finally:
        _accumulatorRegistry[ACCUMULATOR_ID] = driver_side


def receive(update: bytes) -> None:
    """Do what the driver's accumulator server does with an update (pyspark/accumulators.py, accum_updates)."""
    aid, value = pickle.loads(update)
    _accumulatorRegistry[aid] += value


def test_reports_of_tasks_reach_the_drivers_metrics(accumulator: Accumulator[object]) -> None:
    metrics = metrics_of(accumulator)
    pickled = pickle.dumps(accumulator)
    for partition_id in range(3):
        receive(task_update(pickled, report(partition_id)))
    assert {broker: numbers["rows"] for broker, numbers in metrics.to_dict().items()} == {"a": 30, "b": 30}
    assert metrics.writes() == [(WRITE_ID, -1)]
    assert metrics.summary.reports == 3


def test_pickled_accumulator_contains_no_reports(accumulator: Accumulator[object]) -> None:
    before = len(pickle.dumps(accumulator))
    for partition_id in range(50):
        accumulator.add(report(partition_id))
    assert len(pickle.dumps(accumulator)) == before
    assert before < 300


def test_a_task_without_a_report_adds_nothing(accumulator: Accumulator[object]) -> None:
    receive(task_update(pickle.dumps(accumulator)))
    assert metrics_of(accumulator).to_dict() == {}


def test_malformed_updates_are_counted_and_never_raise(accumulator: Accumulator[object]) -> None:
    pickled = pickle.dumps(accumulator)
    receive(task_update(pickled, "nonsense", report(), None))
    receive(pickle.dumps((ACCUMULATOR_ID, 3)))
    summary = metrics_of(accumulator).summary
    assert (summary.reports, summary.dropped_reports) == (1, 3)


def test_reset_keeps_the_accumulator_in_use(accumulator: Accumulator[object]) -> None:
    metrics, pickled = metrics_of(accumulator), pickle.dumps(accumulator)
    receive(task_update(pickled, report(rows=1)))
    metrics.reset()
    assert metrics.to_dict() == {}
    receive(task_update(pickled, report(rows=2)))
    assert metrics.to_dict()["a"]["rows"] == 2
    assert metrics.summary is accumulator.value


def test_two_thousand_tasks_over_twenty_brokers_add_up(accumulator: Accumulator[object]) -> None:
    updates = [task_update(pickle.dumps(accumulator), report(each, each % 100, BROKERS, 2)) for each in range(100)]
    for _ in range(20):
        for update in updates:
            receive(update)
    rows = 20 * 2 * sum(range(100))
    found = metrics_of(accumulator).to_dict()
    assert list(found) == list(BROKERS)
    for numbers in found.values():
        assert (numbers["rows"], numbers["bytes"], numbers["requests"]) == (rows, 97 * rows, 4_000)
        assert numbers["retries_by_reason"] == {"BrokerBusyException 2": 2_000}
        assert sum(queue["rows"] for queue in numbers["queues"]["orders"].values()) == rows
    assert sum(row["rows"] for row in metrics_of(accumulator).timeline()) == 20 * rows
    assert metrics_of(accumulator).latencies(BROKERS[7]).get_total_count() == 4_000
    assert metrics_of(accumulator).summary.reports == 2_000


def test_concurrent_readers_see_complete_reports(accumulator: Accumulator[object]) -> None:
    summary, ready = metrics_of(accumulator).summary, threading.Event()

    def merge_all() -> None:
        ready.wait(10)
        for each in reports:
            merge_into(summary, each)

    reports = [report(each, rows=1) for each in range(200)]
    thread = threading.Thread(target=merge_all)
    thread.start()
    ready.set()
    while thread.is_alive():
        found = summary.to_dict()
        assert not found or found["a"]["rows"] == found["b"]["rows"] == found["a"]["requests"]
    thread.join(10)
    assert summary.to_dict()["a"]["rows"] == 200


def test_show_and_html_with_an_accumulator(
    accumulator: Accumulator[object], capsys: pytest.CaptureFixture[str]
) -> None:
    accumulator.add(report())
    metrics = metrics_of(accumulator)
    metrics.show()
    assert "p99 ms" in capsys.readouterr().out
    assert metrics._repr_html_().startswith("<table>")
    assert repr(metrics) == ("<Metrics <WriteSummary writes=1 reports=1 <Measures brokers=2 rows=20 requests=2>>>")


# Commit messages.


@pytest.mark.parametrize("histograms", [False, True])
@pytest.mark.parametrize("requests", [1, 20, 300])
def test_a_commit_message_of_twenty_brokers_is_at_most_a_kibibyte(histograms: bool, requests: int) -> None:
    message = CommitMessage.of(report(7, 31_999, BROKERS, requests), histograms=histograms)
    assert len(pickle.dumps(message)) <= COMMIT_MESSAGE_BYTES == 1024
    totals = summarise([message]).to_dict()
    assert {broker: numbers["rows"] for broker, numbers in totals.items()} == dict.fromkeys(BROKERS, 31_999 * requests)


def test_commit_message_has_the_type_spark_expects_and_pickles() -> None:
    message = CommitMessage.of(report(5), histograms=True)
    assert isinstance(message, WriterCommitMessage)
    assert pickle.loads(pickle.dumps(message)) == message
    assert (message.write_id, message.batch_id, message.partition_id) == (WRITE_ID, -1, 5)


def test_totals_without_histograms_have_no_latencies() -> None:
    numbers = summarise([CommitMessage.of(report(), histograms=False)]).to_dict()["a"]
    assert (numbers["rows"], numbers["requests"], numbers["bytes"], numbers["retries"]) == (10, 1, 970, 1)
    assert numbers["p50_ms"] is None
    assert numbers["queues"] == numbers["retries_by_reason"] == {}


@pytest.mark.parametrize(("brokers", "requests"), [(("a", "b"), 8), (BROKERS, 20)])
def test_latencies_of_a_small_message_are_exact(brokers: tuple[str, ...], requests: int) -> None:
    small = report(brokers=brokers, requests=requests)
    summary = WriteSummary()
    merge_into(summary, small)
    exact, coarse = summary.to_dict(), summarise([CommitMessage.of(small, histograms=True)]).to_dict()
    for broker in brokers:
        for name in ("p50_ms", "p90_ms", "p99_ms", "max_ms"):
            assert coarse[broker][name] == exact[broker][name]


def test_latencies_of_a_large_message_stay_in_their_octave() -> None:
    large = report(1, 10, BROKERS, 300)
    summary = WriteSummary()
    merge_into(summary, large)
    exact, coarse = summary.to_dict(), summarise([CommitMessage.of(large, histograms=True)]).to_dict()
    for broker in BROKERS:
        assert coarse[broker]["requests"] == exact[broker]["requests"]
        for name in ("p50_ms", "p90_ms", "p99_ms"):
            assert exact[broker][name] / 2 <= coarse[broker][name] <= exact[broker][name] * 2


def test_summary_skips_tasks_that_did_not_finish() -> None:
    messages = [CommitMessage.of(report(1), histograms=False), None, CommitMessage.of(report(2), histograms=False)]
    assert summarise(messages).to_dict()["a"]["rows"] == 20


def test_the_log_line_of_a_write(caplog: pytest.LogCaptureFixture) -> None:
    messages = [CommitMessage.of(report(0), histograms=True), CommitMessage.of(report(0), histograms=True)]
    with caplog.at_level(logging.INFO):
        log_summary(messages)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        f"write of {WRITE_ID}: 2 tasks stored 40 rows, 4 requests, 3880 bytes, 4 retries, 0 failures "
        "(a 20 rows, 2 retries, 0 failures, p50 1.0 p90 1.0 p99 1.0 max 1.0 ms; "
        "b 20 rows, 2 retries, 0 failures, p50 2.6 p90 2.6 p99 2.6 max 2.6 ms)"
    )


def test_log_line_has_level_info_if_metrics_are_available(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_summary([CommitMessage.of(report(), histograms=False)], batch_id=4)
    [record] = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage().startswith(f"micro-batch 4 of {WRITE_ID}: 1 tasks stored 20 rows, ")


def test_micro_batch_number_comes_from_the_tasks() -> None:
    within = CommitMessage.of(Recorder(WRITE_ID, 17, 0).snapshot(), histograms=False)
    outside = CommitMessage.of(Recorder(WRITE_ID, -1, 0).snapshot(), histograms=False)
    assert micro_batch_of([None, within, within]) == 17
    assert micro_batch_of([outside]) is micro_batch_of([None]) is micro_batch_of([]) is None


def test_the_log_line_of_an_empty_write(caplog: pytest.LogCaptureFixture) -> None:
    empty = CommitMessage.of(Recorder(WRITE_ID, -1, 0).snapshot(), histograms=False)
    with caplog.at_level(logging.INFO):
        log_summary([empty])
    assert caplog.messages == [f"write of {WRITE_ID}: 1 tasks stored nothing"]


def test_the_log_line_of_an_aborted_write(caplog: pytest.LogCaptureFixture) -> None:
    messages = [CommitMessage.of(report(), histograms=False), None]
    log_summary(messages, aborted=True)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"aborted write of {WRITE_ID}: 1 of 2 tasks had finished and stored 20 rows")


def test_query_stopped_during_a_micro_batch_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_summary([None, None], batch_id=2, aborted=True)
    [record] = caplog.records
    assert (record.levelname, record.exc_info) == ("INFO", None)
    assert record.getMessage().startswith("aborted micro-batch 2: 0 of 2 tasks had finished and stored nothing")


@pytest.mark.parametrize("histograms", [True, False])
def test_the_log_line_of_a_write_that_skipped_rows_is_a_warning(
    caplog: pytest.LogCaptureFixture, *, histograms: bool
) -> None:
    recorder = Recorder(WRITE_ID, -1, 0)
    recorder.record_skipped({"body is null": 3, "topic is null": 1})
    message = CommitMessage.of(recorder.snapshot(), histograms=histograms)
    with caplog.at_level(logging.INFO):
        log_summary([message, message])
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        f"write of {WRITE_ID}: 2 tasks stored nothing; 8 invalid rows skipped: 6 body is null, 2 topic is null."
    )


def test_skipped_messages_of_reads_are_counted_separately_from_writes(accumulator: Accumulator[object]) -> None:
    pickled = pickle.dumps(accumulator)
    for skipped in ({"orders": 2, "refunds": 1}, {"orders": 1}):
        receive(task_update(pickled, ReadReport(skipped)))
    metrics = metrics_of(accumulator)
    assert metrics.skipped_by_reads() == {"orders": 3, "refunds": 1}
    assert metrics.writes() == []
    assert "4 unreadable messages skipped by reads: orders 3, refunds 1." in metrics.summary.notes()
    metrics.reset()
    assert metrics.skipped_by_reads() == {}


def test_the_error_of_a_task_names_its_micro_batch_once() -> None:
    where = "micro-batch 0 of query q-1"
    error = MQClientException("sending failed", 13)
    name_micro_batch(error, "q-1", 0)
    assert (str(error), error.response_code) == (f"{where}: sending failed", 13)
    name_micro_batch(error, "q-1", 0)
    assert str(error) == f"{where}: sending failed"
    # The error of a delivery with a decision log names its write itself.
    refused = OptionError(f"{Write('0', 'q-1')}: the decision log has expired")
    name_micro_batch(refused, "q-1", 0)
    assert str(refused) == f"{where}: the decision log has expired"


def message(partition_id: int) -> CommitMessage:
    return CommitMessage.of(report(partition_id), histograms=False)


@pytest.mark.parametrize(
    ("messages", "missing", "expected"),
    [
        ([], 1, 1),
        ([None], 1, 1),
        ([None, None], 2, 2),
        ([message(0), None, message(2)], 1, 3),
        ([message(0), message(2)], 1, 3),
        ([message(1)], 1, 2),
        ([message(0), message(0)], 1, 2),
        ([message(0), WriterCommitMessage()], 1, 2),
    ],
)
def test_a_commit_without_the_message_of_each_task_is_refused(
    messages: list[WriterCommitMessage | None], missing: int, expected: int
) -> None:
    text = f"{missing} of at least {expected} tasks sent no message"
    with pytest.raises(DeliveryError, match=text) as batch:
        check_complete(messages, None)
    assert "committing a write" in str(batch.value)
    with pytest.raises(DeliveryError, match=text) as stream:
        check_complete(messages, 17)
    assert "micro-batch or epoch 17" in str(stream.value)
    assert "trigger(continuous=...)" in str(stream.value)


def test_a_commit_with_the_messages_of_all_tasks_is_accepted_in_any_order() -> None:
    check_complete([message(0)], None)
    check_complete([message(2), message(0), message(1)], 0)
