"""Plans, and the ends of writes after their tasks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from rocketmq_spark.deliveries.base import PartitionTask, Write
from rocketmq_spark.deliveries.effectively_once.delivery import EffectivelyOnce
from rocketmq_spark.deliveries.exactly_once.delivery import Prepared, TransactionPlan
from rocketmq_spark.deliveries.log.delivery import check_stream, forget_logs
from rocketmq_spark.errors import DataLossError, DeliveryError, OptionError
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.sink.task import SendRules
from rocketmq_spark.spark.ordered_queues import query_of
from rocketmq_spark.testing import FakeCluster, Reply
from rocketmq_spark.testing.fake_storage import TopicSettings
from tests.support.two_phase import WRITE, Driver, MovedClock, driver, visible

ROWS = [f"row-{number}" for number in range(20)]
PLAN = TransactionPlan(run_id="run", write=None, done=False, newest=None, key_id="")


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    yield
    forget_logs()


def no_send(batches: Iterator[pa.RecordBatch], *, row_id_name: str = "", rules: SendRules | None = None) -> None:
    raise AssertionError("rows are sent")


def prepared(driver: Driver, write: Write, rows: list[str] = ROWS) -> list[Prepared]:
    """Prepare rows as two tasks do."""
    halves, group = driver.prepare(rows, write)
    parts = [halves.select(halves.codes.argsort()[:7]), halves.select(halves.codes.argsort()[7:])]
    return [Prepared(group, part.to_bytes()) for part in parts]


def test_a_batch_write_is_planned_and_committed_once(cluster: FakeCluster, first: Driver) -> None:
    for _ in range(2):
        plan = first.plan(WRITE)
        parts = [] if plan.planned.is_done(WRITE) else prepared(first, WRITE)
        first.commit(plan, WRITE, parts)
    assert visible(cluster) == Counter(ROWS)
    assert plan.planned.done


class Meanwhile:
    """A transport that calls `other` once, before the first request for the end of a queue when it `is_time`."""

    def __init__(self, transport: Any, is_time: Callable[[], bool], other: Callable[[], object]) -> None:
        self._transport, self._is_time, self._waiting = transport, is_time, [other]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def max_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        while self._waiting and self._is_time():
            self._waiting.pop()()
        return int(self._transport.max_offset(queue, address, timeout))


def test_two_threads_plan_writes_of_one_id_at_once(cluster: FakeCluster, patient_job: Driver) -> None:
    job, writes, plans = patient_job, (Write("write-1"), Write("write-2")), list[EffectivelyOnce]()

    def plan(write: Write) -> None:
        plans.append(EffectivelyOnce.plan(job.options, job._open_instance, write))

    def has_record() -> bool:
        return any(b'"kind": "floors"' in record.body for record in cluster.messages(job.options.transaction_topic))

    # The first thread has stored its record, and has not read it back.
    job.instance.transport = cast(Any, Meanwhile(job.instance.transport, has_record, lambda: plan(writes[1])))
    plan(writes[0])
    assert [planned.write for planned in plans] == [writes[1], writes[0]]
    assert all(planned.planned.start_offsets_of(write) for planned in plans for write in writes)


def test_the_newest_micro_batch_is_known_to_the_next_plan(cluster: FakeCluster, first: Driver) -> None:
    for number in range(3):
        write = Write(str(number), "query")
        plan = first.plan()
        assert plan.planned.newest == (Write(str(number - 1), "query") if number else None)
        assert plan.planned.write_of("query", number) == write
        assert not plan.planned.is_done(write)
        first.commit(plan, write, prepared(first, write))
        forget_logs()
    assert first.plan().planned.is_done(write)


def repeat(first: Driver, write: Write, rows: Sequence[list[str]], **options: Any) -> None:
    """Run the tasks of a micro-batch that was committed before, one for each list of rows, and its commit."""
    plan = first.plan(**options)
    results = []
    for part, bodies in enumerate(rows):
        recorder = Recorder(write.query, write.batch_id, part)
        batches = [pa.record_batch({"body": bodies})] if bodies else []
        results.append(plan.write_partition(PartitionTask(recorder, iter(batches), first._open_instance, no_send)))
    first.commit(plan, write, [result for result in results if result is not None])


@pytest.mark.parametrize("more", [0, 5])
def test_another_number_of_rows_in_a_committed_micro_batch_is_named(
    cluster: FakeCluster, first: Driver, caplog: pytest.LogCaptureFixture, more: int
) -> None:
    """With an older copy of a checkpoint, Spark plans the last micro-batch again, with rows that have come since."""
    write = Write("0", "query")
    first.commit(first.plan(), write, prepared(first, write))
    repeat(first, write, (ROWS, ["new"] * more))
    warnings = [record.getMessage() for record in caplog.records if "was decided with" in record.getMessage()]
    assert [text.partition(" now.")[0] for text in warnings] == [
        f"micro-batch 0 of query query was decided with 20 rows, and has {20 + more} rows"
    ] * bool(more)
    assert visible(cluster) == Counter(ROWS)


def test_skipped_rows_are_no_other_rows_of_a_committed_micro_batch(
    first: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    write = Write("0", "query")
    first.commit(first.plan(), write, prepared(first, write))
    invalid = ""
    repeat(first, write, ([*ROWS, invalid],), on_error="skip")
    assert "was decided with" not in caplog.text


def test_an_empty_micro_batch_is_recorded(first: Driver) -> None:
    write = Write("0", "query")
    plan = first.plan()
    first.commit(plan, write, prepared(first, write, []))
    assert first.plan().planned.newest == write


@contextmanager
def home_goes_down(cluster: FakeCluster, first: Driver, clock: MovedClock) -> Iterator[Driver]:
    """Stop the broker of the log, and return a driver that does not know it: other records of it have expired."""
    home = first.log.require_home()
    (other,) = cluster.brokers.keys() - {home.broker_name}
    store = cluster.brokers[other].storage.store
    store.expired = {queue: store.end(queue) for queue in store.queues if queue.topic == home.topic}
    forget_logs()
    cluster.kill(home.broker_name)
    with driver(cluster, clock) as last:
        yield last


def test_a_decision_that_only_the_tasks_have_found_is_not_replaced(
    cluster: FakeCluster, first: Driver, clock: MovedClock
) -> None:
    write = Write("0", "query")
    first.decide_and_crash(ROWS, 7, write)
    recorder, batches = Recorder(write.query, write.batch_id, 0), iter([pa.record_batch({"body": ROWS})])
    result = first.plan().write_partition(PartitionTask(recorder, batches, first._open_instance, no_send))
    assert result is not None
    with home_goes_down(cluster, first, clock) as last, pytest.raises(DataLossError, match="its decision has expired"):
        last.commit(last.plan(), write, [result])


def test_a_micro_batch_is_not_decided_in_a_second_log(cluster: FakeCluster, first: Driver, clock: MovedClock) -> None:
    for number in range(2):
        write = Write(str(number), "query")
        parts = prepared(first, write, [])
        if number == 0:
            first.commit(first.plan(), write, parts)
    with (
        home_goes_down(cluster, first, clock) as last,
        pytest.raises(OptionError, match="its broker is not registered"),
    ):
        last.commit(last.plan(), write, parts)


def test_rows_of_an_aborted_write_are_rolled_back(cluster: FakeCluster, first: Driver) -> None:
    plan = first.plan(WRITE)
    parts = prepared(first, WRITE)
    first.abort(plan, WRITE, parts)
    assert sum(len(broker.storage._halves) for broker in cluster.brokers.values()) == 0
    assert visible(cluster) == Counter()


def test_a_decided_write_is_not_rolled_back(cluster: FakeCluster, first: Driver) -> None:
    plan = first.plan(WRITE)
    parts = prepared(first, WRITE)
    first.commit(plan, WRITE, parts)
    ends = Counter[str]()
    for broker in cluster.brokers.values():
        broker.play(lambda _: ends.update(["end"]), code=RequestCode.END_TRANSACTION, times=100)
    first.abort(plan, WRITE, parts)
    first.abort(plan, WRITE, [])
    assert ends == Counter()


def test_tasks_of_different_runs_are_never_committed_together(cluster: FakeCluster, first: Driver) -> None:
    plan = first.plan(WRITE)
    parts = prepared(first, WRITE, ROWS[:10]) + prepared(first, WRITE, ROWS[10:])
    with pytest.raises(DeliveryError, match="its tasks belong to several runs"):
        first.commit(plan, WRITE, parts)
    assert visible(cluster) == Counter()


@pytest.mark.parametrize(
    ("newest", "batch_id", "why"),
    [
        (None, 3, "has no record of transactionalId=job"),
        (Write("3", "other"), 0, "belongs to query other"),
        (Write("3", "query"), 2, "the checkpoint is an old copy"),
    ],
)
def test_a_log_that_does_not_continue_is_refused(first: Driver, newest: Write | None, batch_id: int, why: str) -> None:
    plan = replace(PLAN, newest=newest)
    with pytest.raises(OptionError, match=why):
        check_stream(first.options, plan, Write(str(batch_id), "query"))
    anew = replace(first.options, start_anew=True)
    if "old copy" in why:
        with pytest.raises(OptionError, match=why):
            check_stream(anew, plan, Write(str(batch_id), "query"))
    else:
        check_stream(anew, plan, Write(str(batch_id), "query"))


@pytest.mark.parametrize(("newest", "batch_id"), [(None, 0), (Write("3", "query"), 3), (Write("3", "query"), 4)])
def test_a_log_that_continues_is_accepted(first: Driver, newest: Write | None, batch_id: int) -> None:
    check_stream(first.options, replace(PLAN, newest=newest), Write(str(batch_id), "query"))


def test_the_second_of_two_queries_with_one_id_commits_nothing(cluster: FakeCluster, first: Driver) -> None:
    one, other = (Write("0", name) for name in ("query", "other"))
    planned = [first.plan() for _ in range(2)]
    assert [plan.planned.newest for plan in planned] == [None, None]
    parts = prepared(first, one), prepared(first, other, ["late"])
    first.commit(planned[0], one, parts[0])
    with pytest.raises(OptionError, match="micro-batch 0 of query other: transactionalId=job belongs to query query"):
        first.commit(planned[1], other, parts[1])
    assert visible(cluster) == Counter(ROWS)


@pytest.mark.parametrize("anew", [False, True])
def test_the_driver_refuses_the_log_of_another_checkpoint_before_any_task(
    first: Driver, tmp_path: Path, *, anew: bool
) -> None:
    write = Write("0", "query")
    plan = first.plan()
    first.commit(plan, write, prepared(first, write))
    for query, folder in (("query", tmp_path / "own"), ("other", tmp_path / "another")):
        folder.mkdir()
        (folder / "metadata").write_text(json.dumps({"id": query}))
    planned = first.plan(start_anew=anew)
    assert planned.planned.newest == write
    planned.check_checkpoint(str(tmp_path / "own"), query_of)
    # Tasks check what the driver cannot read.
    planned.check_checkpoint(str(tmp_path / "unreadable"), query_of)
    for _ in range(2):
        if anew:
            planned.check_checkpoint(f"file:{tmp_path}/another", query_of)
            continue
        with pytest.raises(OptionError, match=r"checkpoint .*another: transactionalId=job belongs to query query"):
            planned.check_checkpoint(f"file:{tmp_path}/another", query_of)


def test_the_topic_of_the_log_is_created_again_if_a_broker_was_busy(cluster: FakeCluster, job: Driver) -> None:
    for code in (RequestCode.GET_TOPIC_CONFIG, RequestCode.UPDATE_AND_CREATE_TOPIC):
        cluster.brokers["broker-1"].play(Reply.code(ResponseCode.SYSTEM_BUSY, "busy"), code=code, times=2)

    job.brokers.ensure_topic("new-log", {"broker-0", "broker-1"})

    assert {queue.broker_name for queue in job.brokers.routes().look_up("new-log").queues} == {"broker-0", "broker-1"}


def test_the_topic_of_the_log_is_created_on_brokers_before_5(cluster: FakeCluster, job: Driver) -> None:
    unsupported = Reply.code(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, " request type 351 not supported")
    for broker in cluster.brokers.values():
        broker.play(unsupported, code=RequestCode.GET_TOPIC_CONFIG, times=10)
    cluster.brokers["broker-0"].storage.topics["new-log"] = TopicSettings(3, 3)

    job.brokers.ensure_topic("new-log", {"broker-0", "broker-1"})

    queues = [cluster.brokers[name].storage.topics["new-log"].write_queue_nums for name in ("broker-0", "broker-1")]
    assert queues == [3, 1]


@pytest.mark.parametrize(("query", "batch_id"), [("", 3), ("query", -1), ("", -1)])
def test_a_task_of_a_stream_guesses_no_identity(query: str, batch_id: int) -> None:
    with pytest.raises(DeliveryError, match="so it is unknown which rows are stored"):
        PLAN.write_of(query, batch_id)
    assert PLAN.write_of("query", 3) == Write("3", "query")
    # A batch write has its own identity, whatever query and micro-batch it is written in.
    assert replace(PLAN, write=Write("monday")).write_of(query, batch_id) == Write("monday")
