"""Writes with ``delivery=effectivelyOnce``: attempts after faults send what is missing, on a fake cluster."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.effectively_once.attempt import Attempted
from rocketmq_spark.deliveries.effectively_once.complete import ResumeReport
from rocketmq_spark.deliveries.effectively_once.plan import ResumePlan, plan_write
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.delivery import forget_logs
from rocketmq_spark.errors import (
    DataLossError,
    DeliveryError,
    InputChangedError,
    MQBrokerException,
    MQClientException,
    OptionError,
)
from rocketmq_spark.metrics import WriteSummary
from rocketmq_spark.model.message import Message, MessageQueue, SendStatus
from rocketmq_spark.protocol.remoting.codes import DELAY_ILLEGAL, RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.protocol.remoting.records import encode_single
from rocketmq_spark.testing import FakeCluster, Reply
from tests.support.resume import (
    BATCH,
    ROWS,
    WRITE,
    Killed,
    complete,
    dying_after_stored_rows,
    job_log,
    new_plan,
    refresh_routes,
    run_task,
)
from tests.support.two_phase import TOPIC, Driver, MovedClock, driver, visible


def outcome_of(done: Attempted | None) -> tuple[int, bool, bool]:
    """Return the partition of an attempt, whether it had rows, and whether it looked for stored rows."""
    assert done is not None
    return done.partition_id, bool(done.attempt), done.recovered


def test_a_write_without_faults_reads_nothing(cluster: FakeCluster, patient_job: Driver) -> None:
    plan = new_plan(patient_job)
    done = run_task(patient_job, plan, WRITE)
    assert outcome_of(done) == (0, True, False)
    assert complete(patient_job, plan, WRITE, done).repeated_rows == 0
    assert visible(cluster) == Counter(ROWS)


@pytest.mark.parametrize("dies_after", [0, BATCH, 10 * BATCH, 19 * BATCH])
def test_a_later_attempt_sends_the_missing_rows(cluster: FakeCluster, job: Driver, dies_after: int) -> None:
    plan, summary = new_plan(job), WriteSummary()
    with pytest.raises(Killed):
        run_task(job, plan, WRITE, dies_after=dies_after)
    stored = sum(visible(cluster).values())
    done = run_task(job, plan, WRITE, summary=summary)
    assert outcome_of(done) == (0, True, dies_after > 0)
    assert visible(cluster) == Counter(ROWS)
    # Requests of the dead attempt may have arrived later.
    assert summary.recovered_rows()["recovered"] >= stored
    assert summary.recovered_rows()["repeated"] == 0
    assert complete(job, plan, WRITE, done).repeated_rows == 0


def test_a_new_driver_continues_a_batch_write(cluster: FakeCluster, job: Driver) -> None:
    plan = new_plan(job)
    with pytest.raises(Killed):
        run_task(job, plan, WRITE, dies_after=100)
    again = new_plan(job)
    done = [run_task(job, again, WRITE), run_task(job, again, WRITE, 1, ["other"])]
    complete(job, again, WRITE, *done)
    assert visible(cluster) == Counter([*ROWS, "other"])
    later = new_plan(job)
    assert later.done
    assert run_task(job, later, WRITE) is None
    assert visible(cluster) == Counter([*ROWS, "other"])


def test_micro_batches_are_continued_by_new_drivers(cluster: FakeCluster, job: Driver) -> None:
    for number in range(4):
        write, rows = Write(str(number), "query"), [f"{number}-{row}" for row in ROWS]
        with pytest.raises(Killed):
            run_task(job, new_plan(job, None), write, rows=rows, dies_after=60 * number + BATCH)
        plan = new_plan(job, None)
        complete(job, plan, write, run_task(job, plan, write, rows=rows))
        # Spark has not recorded the micro-batch, and runs it again.
        plan = new_plan(job, None)
        assert plan.newest == write
        complete(job, plan, write, run_task(job, plan, write, rows=rows))
    assert visible(cluster) == Counter(f"{number}-{row}" for number in range(4) for row in ROWS)


def test_a_changed_row_fails_with_the_place_of_the_stored_one(cluster: FakeCluster, job: Driver) -> None:
    plan = new_plan(job)
    run_task(job, plan, WRITE)
    (place,) = (message for message in cluster.messages(TOPIC) if message.body == ROWS[30].encode())
    changed = [*ROWS[:30], "another row", *ROWS[31:]]
    text = rf"partition 0: .* stored 1 rows that the partition does not have .* at offset {place.queue_offset} of T/"
    with pytest.raises(InputChangedError, match=text):
        run_task(job, plan, WRITE, rows=changed)


def test_rows_in_another_order_are_recognised(cluster: FakeCluster, job: Driver) -> None:
    plan = new_plan(job)
    with pytest.raises(Killed):
        run_task(job, plan, WRITE, dies_after=10 * BATCH)
    shuffled = random.Random(1).sample(ROWS, len(ROWS))
    done = run_task(job, plan, WRITE, rows=shuffled)
    assert visible(cluster) == Counter(ROWS)
    assert complete(job, plan, WRITE, done).repeated_rows == 0


@pytest.mark.parametrize("dies_after", [BATCH, 7 * BATCH])
def test_equal_rows_are_counted(cluster: FakeCluster, job: Driver, dies_after: int) -> None:
    plan = new_plan(job)
    rows = ["same"] * 390 + ["other"] * 10
    with pytest.raises(Killed):
        run_task(job, plan, WRITE, rows=rows, dies_after=dies_after)
    done = run_task(job, plan, WRITE, rows=rows[::-1])
    assert done is not None
    assert done.rows == 400
    assert visible(cluster) == Counter(rows)
    assert complete(job, plan, WRITE, done).repeated_rows == 0


def test_a_stored_row_beyond_its_equals_is_a_repeat(cluster: FakeCluster, job: Driver) -> None:
    plan, summary = new_plan(job), WriteSummary()
    run_task(job, plan, WRITE, rows=["same"] * 7)
    done = run_task(job, plan, WRITE, rows=["same"] * 4, summary=summary)
    assert summary.recovered_rows() == {"recovered": 4, "repeated": 3}
    assert complete(job, plan, WRITE, done).repeated_rows == 3


def test_a_partition_with_fewer_rows_fails(job: Driver) -> None:
    plan = new_plan(job)
    run_task(job, plan, WRITE)
    with pytest.raises(InputChangedError, match="stored 360 rows that the partition does not have now"):
        run_task(job, plan, WRITE, rows=ROWS[:40])


def run_dying_task(cluster: FakeCluster, job: Driver, plan: ResumePlan, key: str | None = None) -> None:
    """Store some rows, and wait until all requests of the dead attempt have arrived."""
    with pytest.raises(Killed):
        run_task(job, plan, WRITE, key=key, **dying_after_stored_rows(cluster, 100))
    counts = [0]
    while len(counts) < 4 or counts[-1] != counts[-4]:
        time.sleep(0.1)
        counts.append(len(cluster.messages(TOPIC)))


def test_retries_with_changed_input_send_no_more_rows(cluster: FakeCluster, job: Driver) -> None:
    plan = new_plan(job)
    run_dying_task(cluster, job, plan)
    with pytest.raises(InputChangedError, match="Later attempts at this partition send nothing"):
        run_task(job, plan, WRITE, rows=[f"other {row}" for row in ROWS])
    before = visible(cluster)
    for number in range(3):
        # Two tasks of one driver, and another driver.
        plan = new_plan(job) if number == 2 else plan
        with pytest.raises(InputChangedError, match="the partition does not have now"):
            run_task(job, plan, WRITE, rows=[f"{number} {row}" for row in ROWS])
    assert visible(cluster) == before


@pytest.mark.parametrize("empty", [True, False])
def test_retries_after_fewer_partitions_send_no_more_rows(cluster: FakeCluster, job: Driver, *, empty: bool) -> None:
    """Spark divides files by the number of cores, and the retry of a job may have other ones."""
    parts = [ROWS[:200], ROWS[200:]]
    plan = new_plan(job)
    for number, rows in enumerate(parts):
        with pytest.raises(Killed):
            run_task(job, plan, WRITE, number, rows, dies_after=100)
    plan = new_plan(job)
    done = run_task(job, plan, WRITE, 0, ROWS)
    end = partial(run_task, job, plan, WRITE, 1, []) if empty else partial(complete, job, plan, WRITE, done)
    with pytest.raises(InputChangedError, match="rows of partition 1, and now the write has no rows there"):
        end()
    before = visible(cluster)
    plan = new_plan(job)
    with pytest.raises(DeliveryError, match="has only compared its rows"):
        run_task(job, plan, WRITE, 1, parts[1])
    if not empty:
        with pytest.raises(InputChangedError, match="partition 0: an earlier attempt at this write stored"):
            run_task(job, plan, WRITE, 0, parts[0])
    assert visible(cluster) == before


def test_rows_are_sent_again_when_an_attempt_has_found_the_same_input(cluster: FakeCluster, job: Driver) -> None:
    plan = new_plan(job)
    run_dying_task(cluster, job, plan)
    with pytest.raises(InputChangedError):
        run_task(job, plan, WRITE, rows=ROWS[200:300])
    stored = sum(visible(cluster).values())
    plan = new_plan(job)
    with pytest.raises(
        DeliveryError, match=rf"They are the same now, and {400 - stored} are missing. The next attempt"
    ):
        run_task(job, plan, WRITE)
    assert sum(visible(cluster).values()) == stored
    plan = new_plan(job)
    assert complete(job, plan, WRITE, run_task(job, plan, WRITE)).repeated_rows == 0
    assert visible(cluster) == Counter(ROWS)


def test_ordered_rows_in_another_order_fail_before_they_are_sent(cluster: FakeCluster, clock: MovedClock) -> None:
    options = {"delivery": "effectivelyOnce", "batchBytes": "1024", "fenceMs": "0", "sendMsgTimeout": "500"}
    with driver(cluster, clock, **options, ordered="true") as job:
        plan = new_plan(job)
        run_dying_task(cluster, job, plan, key="key")
        before = visible(cluster)
        with pytest.raises(InputChangedError, match="no row has its content with its number"):
            run_task(job, plan, WRITE, rows=ROWS[::-1], key="key")
        assert visible(cluster) == before


def test_a_partition_that_is_gone_fails(job: Driver) -> None:
    run_task(job, new_plan(job), WRITE, 3)
    plan = new_plan(job)
    with pytest.raises(InputChangedError, match="rows of partition 3, and now the write has no rows there"):
        run_task(job, plan, WRITE, 3, [])
    with pytest.raises(InputChangedError, match="rows of partition 3, and now the write has no rows there"):
        complete(job, plan, WRITE, run_task(job, plan, WRITE))


def test_a_late_task_without_rows_does_not_stop_another_driver(cluster: FakeCluster, job: Driver) -> None:
    with pytest.raises(Killed):
        run_task(job, new_plan(job), WRITE, dies_after=100)
    late, present = new_plan(job), new_plan(job)

    def wake(start: int) -> None:
        if start == 200:
            with pytest.raises(InputChangedError, match="rows of partition 0, and now the write has no rows there"):
                run_task(job, late, WRITE, 0, [])

    done = run_task(job, present, WRITE, before=wake)
    complete(job, present, WRITE, done)
    assert visible(cluster) == Counter(ROWS)


def test_a_late_end_with_fewer_partitions_does_not_stop_another_driver(cluster: FakeCluster, job: Driver) -> None:
    late, present = new_plan(job), new_plan(job)
    ended = run_task(job, late, WRITE, 0, ROWS[:200])
    done = [run_task(job, present, WRITE, part, rows) for part, rows in enumerate([ROWS[:200], ROWS[200:]])]
    with pytest.raises(InputChangedError, match="rows of partition 1, and now the write has no rows there"):
        complete(job, late, WRITE, ended)
    complete(job, present, WRITE, *done)
    assert visible(cluster) == Counter(ROWS)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(silent=True),
        Reply(closes=True),
        # A DLedger leader without a quorum has appended the rows; the second answer is of 4.x.
        Reply.code(ResponseCode.SYSTEM_ERROR, "in-sync replicas not enough"),
        Reply.code(ResponseCode.SYSTEM_ERROR, "[PC_SYNCHRONIZED]broker busy, start flow control for a while"),
    ],
)
@pytest.mark.parametrize("stores", [False, True])
def test_an_unknown_outcome_is_resolved_before_the_retry(
    cluster: FakeCluster, job: Driver, stores: bool, reply: Reply
) -> None:
    plan = new_plan(job)
    for broker in cluster.brokers.values():
        broker.play(replace(reply, stored=stores), times=2)
    done = run_task(job, plan, WRITE)
    assert visible(cluster) == Counter(ROWS)
    assert outcome_of(done) == (0, True, True)
    assert complete(job, plan, WRITE, done).repeated_rows == 0


def test_a_row_that_is_not_replicated_is_not_sent_again(cluster: FakeCluster, job: Driver) -> None:
    plan = new_plan(job)

    def unsafe(request: RemotingCommand) -> Reply | None:
        rows = request.ext_fields["b"] == TOPIC
        return Reply(SendStatus.FLUSH_SLAVE_TIMEOUT) if rows else None

    for broker in cluster.brokers.values():
        broker.play(unsafe, times=6)
    run_task(job, plan, WRITE)
    assert visible(cluster) == Counter(ROWS)


def test_a_request_that_is_stored_after_the_fence_is_reported(cluster: FakeCluster, job: Driver) -> None:
    plan = new_plan(job)
    with pytest.raises(Killed):
        run_task(job, plan, WRITE, **dying_after_stored_rows(cluster, 100))
    late = visible(cluster)
    done = run_task(job, plan, WRITE)
    for message in [one for one in cluster.messages(TOPIC) if one.body.decode() in late][:7]:
        queue = job.queues[0]
        properties = {name: text for name, text in message.properties.items() if name in ("SPARK_ATTEMPT", "KEYS")}
        batch = encode_single(Message(TOPIC, message.body, 0, properties))
        job.brokers.send_records([(batch, queue)], lambda *_: None)
    assert complete(job, plan, WRITE, done).repeated_rows == 7


def test_of_two_drivers_the_later_one_completes_the_write_and_reports_repeats(
    cluster: FakeCluster, patient_job: Driver
) -> None:
    # All requests of the frozen driver's task are stored after the fence of the other driver's task.
    write = Write("0", "query")
    frozen, other = new_plan(patient_job, None), new_plan(patient_job, None)
    late = run_task(patient_job, frozen, write)
    assert outcome_of(late) == (0, True, False)
    sent = cluster.messages(TOPIC)
    recovered = run_task(patient_job, other, write)
    for message in sent[:5]:
        properties = {name: text for name, text in message.properties.items() if name in ("SPARK_ATTEMPT", "KEYS")}
        batch = encode_single(Message(TOPIC, message.body, 0, properties))
        patient_job.brokers.send_records([(batch, patient_job.queues[0])], lambda *_: None)
    with pytest.raises(DeliveryError, match=r"another driver .* has begun partition 0 later than this driver"):
        complete(patient_job, frozen, write, late)
    assert complete(patient_job, other, write, recovered).repeated_rows == 5


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_record_that_a_broker_rejects_is_an_error_with_its_reason(
    cluster: FakeCluster, clock: MovedClock, on_error: str
) -> None:
    with driver(cluster, clock, delivery="effectivelyOnce", onError=on_error) as job:
        for broker in cluster.brokers.values():
            broker.play(Reply.code(ResponseCode.MESSAGE_ILLEGAL, DELAY_ILLEGAL))
        batch = encode_single(Message(job.log.topic, b"record", 0, {}))
        queue = MessageQueue(job.log.topic, job.queues[0].broker_name, 0)
        with pytest.raises(DeliveryError, match=DELAY_ILLEGAL):
            job.brokers.send_records([(batch, queue)], lambda *_: None)


def test_tasks_fail_if_the_log_does_not_continue(job: Driver) -> None:
    plan = new_plan(job, None)
    with pytest.raises(OptionError, match="has no record of transactionalId"):
        run_task(job, plan, Write("5", "query"))


def test_expired_start_offsets_are_an_error(job: Driver) -> None:
    plan = new_plan(job, None)
    write = Write("0", "query")
    complete(job, plan, write, run_task(job, plan, write))
    plan = new_plan(job, None)
    plan = replace(plan, start_offsets=plan.start_offsets[1:])
    with pytest.raises(DataLossError, match="have expired"):
        run_task(job, plan, write)


@pytest.mark.parametrize("start_anew", [False, True])
def test_a_first_micro_batch_whose_start_offsets_have_expired_is_refused(
    cluster: FakeCluster, clock: MovedClock, *, start_anew: bool
) -> None:
    write = Write("0", "query")
    with driver(cluster, clock, delivery="effectivelyOnce", fenceMs="0", startAnew=str(start_anew).lower()) as job:
        plan = new_plan(job, None)
        home = cluster.brokers[plan.home.broker_name].storage.store
        with pytest.raises(Killed):
            run_task(job, plan, write, dies_after=100)
        end = home.end(plan.home)
        with pytest.raises(Killed):
            run_task(job, new_plan(job, None), write, dies_after=200)
        # The records of the last attempt remain.
        home.expired[plan.home] = end
        plan = new_plan(job, None)
        if start_anew:
            run_task(job, plan, write)
            return
        with pytest.raises(DataLossError, match=r"its first records .* have expired"):
            run_task(job, plan, write)


def test_an_older_copy_of_a_checkpoint_is_refused(cluster: FakeCluster, job: Driver) -> None:
    for number in range(2):
        plan, write = new_plan(job, None), Write(str(number), "query")
        complete(job, plan, write, run_task(job, plan, write, rows=[f"{number}"]))
    plan = new_plan(job, None)
    # The driver dies before the end of micro-batch 2, and the copy has only micro-batch 0.
    run_task(job, plan, Write("2", "query"), rows=["2"])
    before = visible(cluster)
    with pytest.raises(OptionError, match="has micro-batch 2 already, so the checkpoint is an old copy"):
        run_task(job, new_plan(job, None), Write("1", "query"), rows=["1", "2"])
    assert visible(cluster) == before


def test_a_repeated_stage_of_a_micro_batch_is_stopped_at_its_end(
    cluster: FakeCluster, job: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    plan, write = new_plan(job, None), Write("0", "query")
    done = run_task(job, plan, write)
    with pytest.raises(Killed):
        run_task(job, plan, write, dies_after=BATCH)
    # Spark makes another stream writer for the end of the micro-batch.
    assert complete(job, new_plan(job, None), write, done).repeated_rows == 0
    assert "Spark has also started partition 0 again" in caplog.text
    assert visible(cluster) == Counter(ROWS)


def test_a_write_whose_own_start_offsets_have_expired_is_refused(job: Driver) -> None:
    plan = new_plan(job)
    with pytest.raises(Killed):
        run_task(job, plan, WRITE, dies_after=100)
    other = new_plan(job, Write("write-2"))
    complete(job, other, Write("write-2"), run_task(job, other, Write("write-2"), rows=["other"]))
    forget_logs()
    log = job_log(job)
    log.open(job.brokers, everything=True)
    log.writes[WRITE].start_offsets = None
    plan = plan_write(job.brokers, log, WRITE)
    with pytest.raises(DataLossError, match="have expired"):
        run_task(job, plan, WRITE)


def test_a_frozen_driver_is_refused_after_a_later_micro_batch(job: Driver) -> None:
    old = new_plan(job, None)
    for number in range(2):
        plan, write = new_plan(job, None), Write(str(number), "query")
        complete(job, plan, write, run_task(job, plan, write))
    forget_logs()
    with pytest.raises(DeliveryError, match="another driver of the same query"):
        run_task(job, old, Write("0", "query"))


def test_the_end_of_a_frozen_driver_is_refused_after_later_micro_batches(job: Driver) -> None:
    old, first = new_plan(job, None), Write("0", "query")
    with pytest.raises(Killed):
        run_task(job, old, first, dies_after=100)
    late = run_task(job, old, first)
    for number in range(3):
        plan, write = new_plan(job, None), Write(str(number), "query")
        complete(job, plan, write, run_task(job, plan, write))
    forget_logs()
    with pytest.raises(DeliveryError, match="another driver of the same query"):
        complete(job, old, first, late)


def test_two_logs_of_first_drivers_without_a_common_broker_are_reported(cluster: FakeCluster, job: Driver) -> None:
    one, other = cluster.brokers

    def alone(running: str, down: str) -> tuple[ResumePlan, Attempted | None]:
        cluster.kill(down)
        refresh_routes(job)
        plan = new_plan(job)
        assert plan.home.broker_name == running
        done = run_task(job, plan, WRITE, rows=ROWS[:20])
        cluster.restart(down)
        return plan, done

    alone(one, other)
    plan, done = alone(other, one)
    with pytest.raises(MQClientException, match=r"two first drivers .* may be stored twice"):
        complete(job, plan, WRITE, done)


def test_a_task_sends_nothing_for_a_write_completed_by_another_driver(
    cluster: FakeCluster, job: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    frozen, plan = new_plan(job), new_plan(job)
    complete(job, plan, WRITE, run_task(job, plan, WRITE))
    assert run_task(job, frozen, WRITE) is None
    assert "not written" not in caplog.text
    assert complete(job, frozen, WRITE) == ResumeReport()
    assert "UTC: the rows of this save are not written" in caplog.text
    assert visible(cluster) == Counter(ROWS)


def test_a_driver_frozen_after_reading_the_log_finds_the_write_completed(cluster: FakeCluster, job: Driver) -> None:
    class FrozenAfterOpen(DecisionLog):
        def open(self, brokers: Brokers, *, everything: bool) -> None:
            super().open(brokers, everything=everything)
            plan = new_plan(job)
            complete(job, plan, WRITE, run_task(job, plan, WRITE))

    plan = new_plan(job, Write("write-0"))
    late = plan_write(job.brokers, FrozenAfterOpen(plan.log_name, plan.home.topic), WRITE)
    assert late.done
    assert run_task(job, late, WRITE) is None
    assert visible(cluster) == Counter(ROWS)


def test_a_recovery_reads_queues_that_are_in_no_start_offsets_and_in_no_route(
    cluster: FakeCluster, job: Driver
) -> None:
    _, other = cluster.brokers
    cluster.kill(other)
    refresh_routes(job)
    new_plan(job)
    cluster.restart(other)
    refresh_routes(job)
    plan = new_plan(job)
    assert {queue.broker_name for queue in plan.start_offsets[0].by_queue} < set(plan.begins.queue_nums)
    with pytest.raises(Killed):
        run_task(job, plan, WRITE, dies_after=10 * BATCH)
    server = cluster.name_servers[0]
    route = server.route(TOPIC)
    assert route is not None
    listed = tuple(data for data in route.queue_datas if data.broker_name != other)
    server.routes[TOPIC] = replace(route, queue_datas=listed)
    done = run_task(job, plan, WRITE)
    assert visible(cluster) == Counter(ROWS)
    assert complete(job, plan, WRITE, done).repeated_rows == 0


def test_records_with_impossible_brokers_are_ignored(cluster: FakeCluster, patient_job: Driver) -> None:
    plan = new_plan(patient_job)
    log = DecisionLog(plan.log_name, plan.home.topic)
    record = {"kind": "begun", "id": plan.log_name, "write": WRITE.name, "query": "", "since": 0, "partition": 0}
    values = (["b0"], {"b0": -1}, {"b0": 1_000_000_000}, {"b0": "many"}, {"b0": 60_000, "b1": 60_000}, None)
    bodies = [json.dumps({**record, "attempt": "a", "brokers": brokers}).encode() for brokers in values]
    messages = [Message(plan.home.topic, body, properties={"TAGS": log.records.tag}) for body in bodies]
    broker = cluster.brokers[plan.home.broker_name]
    with broker.lock:
        broker.storage.store.put(plan.home, messages, time.time())
    done = run_task(patient_job, plan, WRITE)
    assert visible(cluster) == Counter(ROWS)
    # No earlier attempt began.
    assert outcome_of(done) == (0, True, False)


def test_a_missing_right_fails_the_plan(cluster: FakeCluster, job: Driver) -> None:
    def refuse(request: RemotingCommand) -> Reply | None:
        return Reply.code(ResponseCode.NO_PERMISSION) if request.ext_fields["topic"] == TOPIC else None

    for broker in cluster.brokers.values():
        broker.play(refuse, code=RequestCode.PULL_MESSAGE, times=10)
    with pytest.raises(MQBrokerException, match="16"):
        new_plan(job)
