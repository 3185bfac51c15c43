"""Writes while a broker loses the end of its log, which it has acknowledged.

The queues then grow again from lower offsets, with other messages. Either the package reports this, or no client can
see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.deliveries.exactly_once.fence import forget_checks
from rocketmq_spark.deliveries.log.delivery import forget_logs
from rocketmq_spark.errors import DataLossError, DeliveryError, RocketMQError
from rocketmq_spark.producer.producer import Producer
from tests.support.auditor import audit, numbered_rows
from tests.support.cluster import SHORT_DEADLINES, create_topic, set_config, started
from tests.support.java import Java
from tests.support.losses import EmptyStore, Loss, OlderStore
from tests.support.once import BODIES, COMMIT_MS, KEYS, check_once, committing, resuming
from tests.support.processes import PATIENCE, wait_for
from tests.support.resume import complete, new_plan, run_task
from tests.support.two_phase import WRITE
from tests.support.writes import SMALL, WIDTH, messages_in, rows

pytestmark = [pytest.mark.faults, pytest.mark.integration]

FILLERS = 10_000
# No request may count as failed, and be repeated, because a server is slow or paused. A route that is looked up while
# the broker restarts slowly lacks the broker, which then gets no later row.
SEND_MS = 120_000
UNHURRIED: dict[str, Any] = {"send_msg_timeout": SEND_MS, "poll_name_server_interval": 1_800_000}
LOST = r"queue \S+/broker-0/\d ended at offset \d+ before, and ends at \d+ now: its broker has lost messages"


@pytest.fixture(scope="module")
def older_store() -> Iterator[OlderStore]:
    cluster = LocalCluster(brokers=2, broker_properties=SHORT_DEADLINES, start_timeout=PATIENCE)
    with started(cluster):
        yield OlderStore(cluster)


@pytest.fixture(params=["older_store", pytest.param("unclean_switch", marks=pytest.mark.long)])
def loss(request: pytest.FixtureRequest, topic: str) -> Iterator[Loss]:
    """A way to lose messages of the topic, which has two queues on each broker."""
    loss: Loss = request.getfixturevalue(request.param)
    create_topic(loss.cluster, topic, "NORMAL", 2)
    yield loss
    forget_logs()
    forget_checks()


# Writes with the default delivery


def losing(loss: Loss, topic: str, then: Callable[[], object] = lambda: None) -> Iterator[pa.RecordBatch]:
    """Yield 4,000 rows. The broker loses some of them in between, and `then` is called."""
    name_server = loss.cluster.name_server
    for number, batch in enumerate(rows(4_000)):
        if number == 1:
            wait_for(lambda: messages_in(name_server, topic) == 500)
            loss.mark()
        if number == 4:
            wait_for(lambda: messages_in(name_server, topic) == 2_000)
            loss.lose()
            then()
        yield batch


def fill(loss: Loss, topic: str) -> None:
    """Let another producer store more messages in the queues of the broker than it has lost."""
    columns = {"brokerName": ["broker-0"] * FILLERS, "queueId": pa.array([n % 2 for n in range(FILLERS)], pa.int32())}
    with Producer("other", name_server=loss.cluster.name_server, **UNHURRIED) as other:
        other.send_arrow(pa.table({"body": ["filler"] * FILLERS, **columns}), topic, queueSelector="column")


def test_a_write_fails_if_a_queue_has_lost_acknowledged_rows(loss: Loss, topic: str, java: Java) -> None:
    name_server = loss.cluster.name_server
    with Producer("pg", name_server=name_server, **UNHURRIED) as producer:
        with pytest.raises(DeliveryError, match=LOST):
            producer.send_arrow(losing(loss, topic), topic, **SMALL)
        producer.send_arrow(rows(4_000), topic, **SMALL)
    audit(java, name_server, numbered_rows(topic, range(4_000), WIDTH, repeats=True)).check()


def test_no_write_notices_lost_rows_if_others_fill_their_offsets(loss: Loss, topic: str, java: Java) -> None:
    name_server = loss.cluster.name_server
    with Producer("pg", name_server=name_server, **UNHURRIED) as producer:
        producer.send_arrow(losing(loss, topic, lambda: fill(loss, topic)), topic, **SMALL)
    given = [*numbered_rows(topic, range(4_000), WIDTH, repeats=True)]
    found = audit(java, name_server, given)
    assert found.counts.keys() == {"missing", "foreign"}
    assert found.counts["foreign"] >= FILLERS


# delivery=effectivelyOnce


# A master whose slave is paused answers FLUSH_SLAVE_TIMEOUT, until the slave is out of sync.
PATIENT = {"batchBytes": "1024", "retryTimesWhenSendFailed": "50", "sendMsgTimeout": str(SEND_MS)}


def loss_mark(loss: Loss, topic: str) -> Callable[[int], None]:
    """Return what a task calls before each row, so that the broker will lose the rows after about the 200th."""

    def mark(number: int) -> None:
        if number == 500:
            wait_for(lambda: messages_in(loss.cluster.name_server, topic) > 200)
            loss.mark()

    return mark


def write_again(loss: Loss, topic: str) -> None:
    """Make the write in a new process."""
    with resuming(loss.cluster, topic, **PATIENT) as job:
        plan = new_plan(job)
        complete(job, plan, WRITE, run_task(job, plan, WRITE, rows=BODIES))


def test_rows_that_a_queue_lost_during_a_task_are_sent_again(loss: Loss, topic: str, java: Java) -> None:
    with resuming(loss.cluster, topic, **PATIENT) as job:
        plan, mark = new_plan(job), loss_mark(loss, topic)

        def fault(number: int) -> None:
            mark(number)
            if number == 1_500:
                wait_for(lambda: messages_in(loss.cluster.name_server, topic) > 1_200)
                loss.lose()

        # The task notices it, or the driver at the end, if the task has no more rows for the broker.
        with pytest.raises(RocketMQError):
            complete(job, plan, WRITE, run_task(job, plan, WRITE, rows=BODIES, before=fault))
    write_again(loss, topic)
    check_once(java, loss.cluster.name_server, topic, BODIES, keys=KEYS)


@pytest.mark.parametrize("filled", [False, True], ids=["", "filled by others"])
def test_rows_that_a_queue_lost_after_a_task_are_sent_again(
    loss: Loss, topic: str, java: Java, *, filled: bool
) -> None:
    with resuming(loss.cluster, topic, **PATIENT) as job:
        plan = new_plan(job)
        done = run_task(job, plan, WRITE, rows=BODIES, before=loss_mark(loss, topic))
        loss.lose()
        if filled:
            fill(loss, topic)
        with pytest.raises(DataLossError, match=r"(has|have) acknowledged|ends at offset"):
            complete(job, plan, WRITE, done)
    write_again(loss, topic)
    check_once(java, loss.cluster.name_server, topic, BODIES, *["foreign"] if filled else [], keys=KEYS)


# delivery=exactlyOnce


FEW = BODIES[:200]


@pytest.mark.parametrize("filled", [False, True], ids=["", "filled by others"])
def test_half_messages_that_a_broker_lost_are_not_committed(
    loss: Loss, topic: str, java: Java, *, filled: bool
) -> None:
    with committing(loss.cluster, topic, timeout_ms=COMMIT_MS) as job:
        loss.mark()
        halves = job.prepare(FEW)
        loss.lose()
        if filled:
            # Messages of the same size, at the same places of the commit log.
            other_id = f"n{job.log.transactional_id[1:]}"
            with committing(loss.cluster, topic, transactionalId=other_id, timeout_ms=COMMIT_MS) as other:
                other.prepare(FEW)
        with pytest.raises(DeliveryError, match="broker broker-0 lacks a half message that it has acknowledged"):
            job.two_phase.commit(WRITE, *halves)
    with committing(loss.cluster, topic, timeout_ms=COMMIT_MS) as job:
        job.two_phase.commit(WRITE, *job.prepare(FEW))
    check_once(java, loss.cluster.name_server, topic, FEW)


# An empty broker takes the name of another one


@pytest.fixture
def emptied(older_store: OlderStore, topic: str) -> Iterator[EmptyStore]:
    """A way to lose all messages of the first broker, with its topics."""
    create_topic(older_store.cluster, topic, "NORMAL", 2)
    yield EmptyStore(older_store.cluster)
    forget_logs()
    forget_checks()


@pytest.mark.long
def test_no_write_notices_an_empty_broker_that_gets_no_later_row(emptied: EmptyStore, topic: str, java: Java) -> None:
    name_server, broker = emptied.cluster.name_server, emptied.cluster.brokers[0]
    batches = losing(emptied, topic, lambda: set_config(broker, autoCreateTopicEnable=False))
    with Producer("pg", name_server=name_server, **UNHURRIED) as producer:
        producer.send_arrow(batches, topic, **SMALL)
    found = audit(java, name_server, [*numbered_rows(topic, range(4_000), WIDTH, repeats=True)])
    assert found.counts.keys() == {"missing"}
    assert found.counts["missing"] <= 2_000


@pytest.mark.long
def test_exactly_once_write_commits_nothing_if_a_broker_was_emptied(
    emptied: EmptyStore, topic: str, java: Java
) -> None:
    with committing(emptied.cluster, topic, home="broker-1", timeout_ms=COMMIT_MS) as job:
        halves = job.prepare(FEW)
        emptied.lose()
        with pytest.raises(DeliveryError, match="broker broker-0 lacks a half message that it has acknowledged"):
            job.two_phase.commit(WRITE, *halves)
    with committing(emptied.cluster, topic, home="broker-1", timeout_ms=COMMIT_MS) as job:
        job.two_phase.commit(WRITE, *job.prepare(FEW))
    check_once(java, emptied.cluster.name_server, topic, FEW)
