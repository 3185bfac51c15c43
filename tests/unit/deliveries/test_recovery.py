"""How a recovery reads queues with messages of other producers, missing messages or a lost end."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.effectively_once.attempt import Attempted
from rocketmq_spark.deliveries.effectively_once.complete import complete as complete_write
from rocketmq_spark.deliveries.effectively_once.plan import ResumePlan, plan_write
from rocketmq_spark.deliveries.log.delivery import forget_logs
from rocketmq_spark.deliveries.log.records import Begun
from rocketmq_spark.deliveries.log.scan import UNKNOWN, Known, floor_now, lowest, scan
from rocketmq_spark.errors import DataLossError, DeliveryError, InputChangedError, MQClientException
from rocketmq_spark.metrics import WriteSummary
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.properties import ATTEMPT
from rocketmq_spark.options.offsets import parse_start, receipt_spans
from rocketmq_spark.protocol.compression import CompressionType, compress
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.protocol.remoting.records import decode_batch, encode_batch
from rocketmq_spark.protocol.remoting.unwrap import INNER_BATCH
from rocketmq_spark.testing import FakeCluster, Reply
from rocketmq_spark.testing.fake_broker import FakeBroker
from tests.support.processes import wait_for
from tests.support.resume import (
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


def broker_of(cluster: FakeCluster, queue: MessageQueue) -> FakeBroker:
    return cluster.brokers[queue.broker_name]


def put(cluster: FakeCluster, queue: MessageQueue, *messages: Message) -> None:
    """Store messages as another producer does."""
    broker = broker_of(cluster, queue)
    broker.storage.store.put(queue, messages, broker.timers.time())


def forged(message: Message, how: str) -> Message:
    """Return a message with the token of an attempt, and the content of another row or of none."""
    properties = {ATTEMPT: message.properties[ATTEMPT]}
    if how == "body":
        properties["KEYS"] = message.properties["KEYS"]
    elif how == "properties":
        properties |= {"KEYS": message.properties["KEYS"], "colour": "red"}
    return Message(TOPIC, b"forged" if how == "body" else message.body, 0, properties)


def instead_of_requests(
    cluster: FakeCluster, times: int, messages_for: Callable[[Sequence[Message]], Iterable[Message]]
) -> list[Message]:
    """Lose the next `times` requests of rows to each broker, and store other messages; return these as they come."""
    stored: list[Message] = []

    def replace_request(name: str, request: RemotingCommand) -> Reply | None:
        if request.ext_fields["b"] != TOPIC:
            return None
        queue = MessageQueue(TOPIC, name, int(request.ext_fields["e"]))
        messages = list(messages_for(decode_batch(request.body)))
        stored.extend(messages)
        put(cluster, queue, *messages)
        return Reply(closes=True, stored=False)

    for name, broker in cluster.brokers.items():
        broker.play(partial(replace_request, name), times=times)
    return stored


FORGERIES = ["body", "keys", "properties"]


@pytest.mark.parametrize("how", FORGERIES)
def test_foreign_messages_with_its_token_do_not_store_a_lost_request(
    cluster: FakeCluster, job: Driver, how: str
) -> None:
    plan, summary = new_plan(job), WriteSummary()
    forgeries = instead_of_requests(cluster, 2, lambda messages: (forged(message, how) for message in messages))
    run_task(job, plan, WRITE, summary=summary)
    assert len(forgeries) > 0
    genuine = Counter(message.body.decode() for message in cluster.messages(TOPIC) if is_genuine(message))
    assert genuine == Counter(ROWS)


def is_genuine(message: Message) -> bool:
    body = message.body.decode()
    return message.properties.get("KEYS") == f"key of {body}" and "colour" not in message.properties


@pytest.mark.parametrize("how", FORGERIES)
def test_a_row_is_not_left_out_because_of_a_foreign_message_with_the_token(
    cluster: FakeCluster, job: Driver, how: str
) -> None:
    plan = new_plan(job)
    with pytest.raises(Killed):
        run_task(job, plan, WRITE, **dying_after_stored_rows(cluster, 100))
    sent = cluster.messages(TOPIC)[0]
    later = replace(sent, body=b"row-399", properties={**sent.properties, "KEYS": "key of row-399"})
    put(cluster, job.queues[0], forged(later, how))
    with pytest.raises(InputChangedError, match=r"1 rows that the partition does not have now.* another producer"):
        run_task(job, plan, WRITE)
    genuine = Counter(message.body.decode() for message in cluster.messages(TOPIC) if is_genuine(message))
    assert genuine == Counter(ROWS)


@pytest.mark.parametrize("partly", [False, True])
def test_copies_of_rows_with_their_token_stop_no_row(cluster: FakeCluster, job: Driver, partly: bool) -> None:
    """A foreign producer reads the topic, and copies the rows of a running task."""
    plan = new_plan(job)
    copies = instead_of_requests(cluster, 1, lambda messages: messages[: 3 if partly else None])
    if partly:
        with pytest.raises(DeliveryError, match="some rows of a batch are stored in T/"):
            run_task(job, plan, WRITE)
    done = run_task(job, plan, WRITE)
    # A copy with the content of a row counts as this row.
    assert len(copies) > 0
    assert visible(cluster) == Counter(ROWS)
    assert complete(job, plan, WRITE, done).repeated_rows == 0


@pytest.mark.parametrize("delay", [0.0, 1.5])
def test_a_late_answer_does_not_count_for_the_rows_of_an_equal_request(delay: float) -> None:
    """The rows of a request whose answer is late are taken for those of a lost request with the same contents."""
    rows = ["same"] * 400
    with FakeCluster(brokers=1, topics={TOPIC: 1}) as cluster:
        (broker,) = cluster.brokers.values()
        options = {"delivery": "effectivelyOnce", "batchBytes": "1024", "fenceMs": "0", "sendMsgTimeout": "9000"}
        with driver(cluster, MovedClock(cluster), **options) as job:
            plan, summary = new_plan(job), WriteSummary()
            replies = [Reply.code(ResponseCode.SYSTEM_ERROR), Reply(delay=delay)]

            def play(request: RemotingCommand) -> Reply | None:
                return replies.pop(0) if request.ext_fields["b"] == TOPIC and replies else None

            broker.play(play, times=4)
            done = run_task(job, plan, WRITE, rows=rows, summary=summary)
            assert not replies
            assert visible(cluster) == Counter(rows)
            assert done is not None
            assert done.rows == 400
            assert covered(cluster, summary) == Counter(rows)
            assert complete(job, plan, WRITE, done).repeated_rows == 0


def expire(cluster: FakeCluster, how: str, queue: MessageQueue, first: int) -> None:
    """Delete the messages of a queue before an offset.

    If they are only `removed` or `unindexed`, the broker's minimum is too low.
    """
    getattr(broker_of(cluster, queue).storage.store, how)[queue] = first


@pytest.mark.parametrize("how", ["expired", "removed", "unindexed"])
@pytest.mark.parametrize("history", [0, 7])
def test_expired_messages_of_a_write_are_an_error(cluster: FakeCluster, job: Driver, history: int, how: str) -> None:
    for queue in job.queues:
        put(cluster, queue, *[Message(TOPIC, b"old", 0, {})] * history)
    plan = new_plan(job)
    run_task(job, plan, WRITE)
    queue = max(job.queues, key=lambda queue: broker_of(cluster, queue).storage.store.end(queue))
    before = sum(map(stored_by, cluster.brokers.values()))
    expire(cluster, how, queue, history + 3)
    text = rf"queue {queue}: its messages {history} to {history + 2} are gone .* with another transactionalId"
    with pytest.raises(DataLossError, match=text):
        run_task(job, plan, WRITE)
    assert sum(map(stored_by, cluster.brokers.values())) == before


@pytest.mark.parametrize("how", ["expired", "removed", "unindexed"])
def test_expired_commits_are_an_error(cluster: FakeCluster, clock: MovedClock, first: Driver, how: str) -> None:
    first.decide_and_crash(ROWS[:20], 20)
    expire(cluster, how, first.queues[0], 2)
    with driver(cluster, clock) as second, pytest.raises(DataLossError, match="its messages 0 to 1 are gone"):
        second.open().two_phase.finish(Write("write-1"))


@pytest.mark.parametrize("how", ["expired", "unindexed"])
def test_records_that_expired_since_the_plan_are_an_error(cluster: FakeCluster, job: Driver, how: str) -> None:
    plan = new_plan(job)
    # Another driver begins the partition.
    with pytest.raises(Killed):
        run_task(job, new_plan(job), WRITE, **dying_after_stored_rows(cluster, 100))
    expire(cluster, how, plan.home, broker_of(cluster, plan.home).storage.store.end(plan.home))
    with pytest.raises(DataLossError, match=rf"reading queue {plan.home}: its messages {plan.position} to .* are gone"):
        run_task(job, plan, WRITE)
    # Requests of the dead attempt may have arrived later.
    assert len({message.properties[ATTEMPT] for message in cluster.messages(TOPIC)}) < 2


def test_expired_messages_from_before_the_write_are_no_error(cluster: FakeCluster, job: Driver) -> None:
    for queue in job.queues:
        put(cluster, queue, *[Message(TOPIC, b"old", 0, {})] * 9)
        expire(cluster, "expired", queue, 9)
    plan = new_plan(job)
    with pytest.raises(Killed):
        run_task(job, plan, WRITE, dies_after=300)
    done = run_task(job, plan, WRITE)
    assert complete(job, plan, WRITE, done).repeated_rows == 0
    assert visible(cluster) - Counter(old=18) == Counter(ROWS)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_damaged_row_is_an_error_unless_it_is_of_another_producer(
    cluster: FakeCluster, job: Driver, is_own: bool
) -> None:
    plan = new_plan(job)
    with pytest.raises(Killed):
        run_task(job, plan, WRITE, **dying_after_stored_rows(cluster, 100))
    for name, broker in cluster.brokers.items():
        put(cluster, MessageQueue(TOPIC, name, 0), Message(TOPIC, b"of another producer", 0, {}))
        with broker.lock:
            for stored in (found for queue, found in broker.storage.store._read.items() if queue.topic == TOPIC):
                for number, message in enumerate(stored):
                    if (ATTEMPT in message.properties) is is_own:
                        stored[number] = replace(message, body_crc=message.body_crc ^ 1)
    if is_own:
        with pytest.raises(
            DataLossError, match=r"cannot be read: the body has the checksum .* has the token of the at"
        ):
            run_task(job, plan, WRITE)
        # Requests of the dead attempt may have arrived later.
        assert max((visible(cluster) - Counter({"of another producer": 2})).values()) == 1
    else:
        done = run_task(job, plan, WRITE)
        assert visible(cluster) - Counter({"of another producer": 2}) == Counter(ROWS)
        assert complete(job, plan, WRITE, done).repeated_rows == 0


def test_a_broker_down_at_the_first_plan_may_have_expired_messages(cluster: FakeCluster, job: Driver) -> None:
    _, other = cluster.brokers
    late = [queue for queue in job.queues if queue.broker_name == other]
    for queue in late:
        put(cluster, queue, *[Message(TOPIC, b"old", 0, {})] * 9)
        expire(cluster, "expired", queue, 5)
    cluster.kill(other)
    refresh_routes(job)
    new_plan(job)
    cluster.restart(other)
    refresh_routes(job)
    plan = new_plan(job)
    assert plan.begins.start_offsets == dict.fromkeys(late, 9)
    run_task(job, plan, WRITE)
    # This plan begins later, but the record of the first attempt counts.
    plan = new_plan(job)
    assert all(start_offset > 9 for start_offset in plan.begins.start_offsets.values())
    done = run_task(job, plan, WRITE)
    assert visible(cluster) - Counter(old=18) == Counter(ROWS)
    assert complete(job, plan, WRITE, done).repeated_rows == 0
    # No record says where rows of this attempt begin.
    plan = replace(
        new_plan(job, Write("write-2")), begins=Begun(plan.begins.queue_nums), start_offsets=plan.start_offsets
    )
    run_task(job, plan, Write("write-2"))
    with pytest.raises(DataLossError, match="its messages 0 to 4 are gone"):
        run_task(job, plan, Write("write-2"))


def without_home(job: Driver, cluster: FakeCluster) -> FakeBroker:
    """Return the broker that has no decision log."""
    (name,) = set(cluster.brokers) - {new_plan(job).home.broker_name}
    return cluster.brokers[name]


def lose_tail(broker: FakeBroker, messages: int) -> None:
    """Lose the last messages of a topic, and all other messages since then."""
    log = broker.storage.store.log
    places = [place for place, entry in enumerate(log) if entry.meant_for.topic == TOPIC]
    broker.storage.store.truncate(places[-messages])


def stored_by(broker: FakeBroker) -> int:
    return sum(entry.meant_for.topic == TOPIC for entry in broker.storage.store.log)


def permit(job: Driver, broker: FakeBroker, permission: int) -> None:
    """Set what clients may do at a broker, and wait for the route. It lists only queues that may be written."""
    broker.settings.permission = permission
    broker.on_change()
    routed = bool(permission & 2)
    wait_for(lambda: routed == (broker.name in {queue.broker_name for queue in job.brokers.fresh_route(TOPIC).queues}))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("is_complete", [False, True])
def test_a_batch_write_during_a_micro_batch_of_one_log_repeats_no_row(
    cluster: FakeCluster, job: Driver, number: int, *, is_complete: bool
) -> None:
    for earlier in range(number):
        complete(job, new_plan(job, None), Write(str(earlier), "query"))
    stream = Write(str(number), "query")
    with pytest.raises(Killed):
        run_task(job, new_plan(job, None), stream, **dying_after_stored_rows(cluster, 300))
    for queue in job.queues:
        put(cluster, queue, *[Message(TOPIC, b"old", 0, {})] * 40)
    plan = new_plan(job)
    if is_complete:
        complete(job, plan, WRITE, run_task(job, plan, WRITE, rows=["other"]))
    plan = new_plan(job, None)
    done = run_task(job, plan, stream)
    assert visible(cluster) - Counter(old=160, other=1) == Counter(ROWS)
    assert complete(job, plan, stream, done).repeated_rows == 0


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_log_on_a_broker_that_allows_only_reads_is_found(
    cluster: FakeCluster, job: Driver, *, is_complete: bool
) -> None:
    """A broker was added after a driver had begun the log, and replaces the old one."""
    old, new = cluster.brokers
    cluster.kill(new)
    refresh_routes(job)
    plan = new_plan(job)
    if is_complete:
        complete(job, plan, WRITE, run_task(job, plan, WRITE))
    else:
        with pytest.raises(Killed):
            run_task(job, plan, WRITE, dies_after=300)
    cluster.restart(new)
    permit(job, cluster.brokers[old], 4)
    with pytest.raises(MQClientException, match=f"in queue {plan.home}, which is not writable now: make broker and"):
        new_plan(job)
    permit(job, cluster.brokers[old], 6)
    plan = new_plan(job)
    assert plan.done == is_complete
    done = run_task(job, plan, WRITE)
    assert visible(cluster) == Counter(ROWS)
    assert complete(job, plan, WRITE, done).repeated_rows == 0


@pytest.mark.parametrize("lost", [6, 150])
@pytest.mark.parametrize("when", ["before the plan", "before the rows", "before the recovery"])
def test_rows_below_the_start_offset_of_a_queue_that_lost_its_end_are_found(
    cluster: FakeCluster, job: Driver, caplog: pytest.LogCaptureFixture, when: str, lost: int
) -> None:
    broker = without_home(job, cluster)
    queues = [queue for queue in job.queues if queue.broker_name == broker.name]
    for queue in queues:
        put(cluster, queue, *[Message(TOPIC, b"old", 0, {})] * 100)
    write = Write("write-2")
    if when == "before the plan":
        new_plan(job, write)
        lose_tail(broker, lost)
    plan = new_plan(job, write)
    if when == "before the rows":
        lose_tail(broker, lost)
    with pytest.raises(Killed):
        run_task(job, plan, write, dies_after=300)
    if when == "before the recovery":
        lose_tail(broker, stored_by(broker) - 200 + lost)
    caplog.clear()
    done = run_task(job, plan, write)
    assert visible(cluster) - Counter(old=200) == Counter(ROWS)
    assert complete(job, plan, write, done).repeated_rows == 0
    assert when == "before the plan" or "the broker has lost messages that it had stored" in caplog.text


@pytest.mark.parametrize("routed", [True, False], ids=["", "outside the first route"])
def test_a_process_remembers_a_queue_that_lost_its_end(cluster: FakeCluster, job: Driver, *, routed: bool) -> None:
    """The micro-batch after the loss stores no row on the broker, and the next one does."""
    broker = without_home(job, cluster)
    queues = [queue for queue in job.queues if queue.broker_name == broker.name]
    for queue in queues:
        put(cluster, queue, *[Message(TOPIC, b"old", 0, {})] * 100)
    complete(job, new_plan(job, None), Write("0", "query"))
    lose_tail(broker, 150)
    permit(job, broker, 6 if routed else 4)
    plan = new_plan(job, None)
    permit(job, broker, 6)
    complete_write(job.brokers, job_log(job), plan, Write("1", "query"), [], [])
    plan, write, left = plan_write(job.brokers, job_log(job), None), Write("2", "query"), stored_by(broker)

    def wait_for_some(start: int) -> None:
        if start == 300:
            wait_for(lambda: stored_by(broker) > left)

    with pytest.raises(Killed):
        run_task(job, plan, write, dies_after=300, before=wait_for_some)
    for queue in queues:
        put(cluster, queue, *[Message(TOPIC, b"old", 0, {})] * 200)
    done = run_task(job, plan, write)
    assert visible(cluster) - Counter(old=450) == Counter(ROWS)
    assert complete(job, plan, write, done).repeated_rows == 0


def test_a_queue_that_lost_its_end_must_begin_at_offset_0(cluster: FakeCluster, job: Driver) -> None:
    broker = without_home(job, cluster)
    queues = [queue for queue in job.queues if queue.broker_name == broker.name]
    for queue in queues:
        put(cluster, queue, *[Message(TOPIC, b"old", 0, {})] * 100)
        expire(cluster, "expired", queue, 9)
    write = Write("write-2")
    plan = new_plan(job, write)
    with pytest.raises(Killed):
        run_task(job, plan, write, dies_after=300)
    lose_tail(broker, stored_by(broker) - 150)
    # Rows of the first attempt may be among the messages that have expired. The end that a later plan knows does not
    # change that.
    for later in (plan, new_plan(job, write), new_plan(job, write)):
        with pytest.raises(DataLossError, match="its messages 0 to 8 are gone"):
            run_task(job, later, write)


def test_the_floor_of_a_queue_that_lost_its_end_is_unknown(
    cluster: FakeCluster, first: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    queue = first.queues[0]
    put(cluster, queue, *[Message(TOPIC, b"old", 0, {})] * 100)
    first.decide_and_crash(ROWS[:20], 20)
    floor = Known(100)
    ends = first.brokers.max_offsets([queue])
    assert floor_now(first.brokers, queue, floor, ends[queue], lambda _: False) == floor
    assert floor_now(first.brokers, queue, floor, 99, lambda _: False) == UNKNOWN
    assert "ended at offset 100 before, and ends at 99 now" in caplog.text
    # A row of the write stands below the floor, so the queue had ended there before it grew again.
    assert floor_now(first.brokers, queue, floor, 100, lambda _: True) == UNKNOWN
    assert floor_now(first.brokers, queue, UNKNOWN, 5, lambda _: False) == UNKNOWN
    with pytest.raises(DataLossError, match="it ended at offset 100 before, and ends at 99 now"):
        scan(first.brokers, queue, floor, 99)
    assert next(scan(first.brokers, queue, UNKNOWN, ends[queue])).start == 0
    assert lowest([Known(7), Known(3)]) == Known(3)
    assert lowest([Known(7), UNKNOWN]) == lowest([]) == UNKNOWN


def test_a_queue_that_is_new_since_the_plan_gets_no_row(cluster: FakeCluster, job: Driver) -> None:
    # A recovery may see a route from before the change, and then it does not read such a queue.
    plan = new_plan(job)
    new = [MessageQueue(TOPIC, name, 2) for name in cluster.brokers]
    cluster.create_topic(TOPIC, 3)
    wait_for(lambda: job.brokers.fresh_route(TOPIC).queue_set.issuperset(new))
    done = run_task(job, plan, WRITE)
    assert not any(broker_of(cluster, queue).storage.store.end(queue) for queue in new)
    assert visible(cluster) == Counter(ROWS)
    assert complete(job, plan, WRITE, done).repeated_rows == 0


def test_rows_in_queues_that_were_removed_are_not_sent_again(cluster: FakeCluster, job: Driver) -> None:
    def resize(queues: int) -> ResumePlan:
        cluster.create_topic(TOPIC, queues)
        wait_for(lambda: len(job.brokers.fresh_route(TOPIC).queues) == 2 * queues)
        return new_plan(job)

    def wait_for_some(start: int) -> None:
        if start == 300:
            wait_for(lambda: any(message.queue_id >= 2 for message in cluster.messages(TOPIC)))

    with pytest.raises(Killed):
        run_task(job, resize(4), WRITE, dies_after=300, before=wait_for_some)
    plan = resize(2)
    for _ in range(2):
        with pytest.raises(MQClientException, match=r"reading queue T/broker-\d/[23]: .* restore it \(mqadmin update"):
            run_task(job, plan, WRITE)
    # Requests of the dead attempt may have arrived later.
    assert len({message.properties[ATTEMPT] for message in cluster.messages(TOPIC)}) < 2
    plan = resize(4)
    done = run_task(job, plan, WRITE)
    assert visible(cluster) == Counter(ROWS)
    assert complete(job, plan, WRITE, done).repeated_rows == 0


def test_a_write_ends_although_its_topic_has_fewer_queues_since_then(cluster: FakeCluster, job: Driver) -> None:
    cluster.create_topic(TOPIC, 4)
    wait_for(lambda: len(job.brokers.fresh_route(TOPIC).queues) == 8)
    plan = new_plan(job)
    done = run_task(job, plan, WRITE)
    cluster.create_topic(TOPIC, 1)
    wait_for(lambda: len(job.brokers.fresh_route(TOPIC).queues) == 2)
    assert complete(job, plan, WRITE, done).repeated_rows == 0
    assert new_plan(job).done


def test_acknowledged_rows_that_are_lost_are_noticed_at_the_end(cluster: FakeCluster, job: Driver) -> None:
    broker = without_home(job, cluster)
    plan = new_plan(job)
    with pytest.raises(Killed):
        run_task(job, plan, WRITE, dies_after=100)
    done = run_task(job, plan, WRITE)
    lose_tail(broker, 30)
    with pytest.raises(DataLossError, match=r"brokers have acknowledged 400 rows, and the queues have \d+ of them now"):
        complete(job, plan, WRITE, done)
    done = run_task(job, plan, WRITE)
    assert visible(cluster) == Counter(ROWS)
    assert complete(job, plan, WRITE, done).repeated_rows == 0


@pytest.mark.parametrize("is_last", [True, False])
def test_acknowledged_rows_that_are_lost_are_noticed_without_a_recovery(
    cluster: FakeCluster, job: Driver, is_last: bool
) -> None:
    """A broker has lost rows before the end, or has given their offsets to the rows of a later task."""
    broker, plan = without_home(job, cluster), new_plan(job)
    done = [run_task(job, plan, WRITE, 0, ROWS[:200])]
    if is_last:
        done.append(run_task(job, plan, WRITE, 1, ROWS[200:]))
    lose_tail(broker, 10)
    if not is_last:
        done.append(run_task(job, plan, WRITE, 1, ROWS[200:]))
    error = "the row at offset .*, and its queue ends at" if is_last else r"\d+ rows, which have only \d+ offsets"
    with pytest.raises(DataLossError, match=f"has acknowledged {error}.*Run the job again: it sends the rows"):
        complete(job, plan, WRITE, *done)
    plan = new_plan(job)
    done = [run_task(job, plan, WRITE, part, ROWS[part * 200 :][:200]) for part in (0, 1)]
    assert visible(cluster) == Counter(ROWS)
    assert complete(job, plan, WRITE, *done).repeated_rows == 0


@pytest.mark.parametrize("others", [10, 1_000])
@pytest.mark.parametrize("routed", [True, False], ids=["", "outside the route"])
def test_acknowledged_rows_that_are_lost_are_noticed_behind_messages_of_others(
    cluster: FakeCluster, job: Driver, others: int, *, routed: bool
) -> None:
    """Other producers have stored messages at the offsets of lost rows, and perhaps more."""
    broker, plan = without_home(job, cluster), new_plan(job)
    done = run_task(job, plan, WRITE)
    store = broker.storage.store
    ends = {queue: store.end(queue) for queue in job.queues if queue.broker_name == broker.name}
    lose_tail(broker, 10)
    for queue, end in ends.items():
        put(cluster, queue, *[Message(TOPIC, b"other", 0, {})] * (others + end - store.end(queue) - 10))
    permit(job, broker, 6 if routed else 4)
    with pytest.raises(DataLossError, match=r"the row at offset \d+, and another message is there.*Run the job again"):
        complete(job, plan, WRITE, done)
    permit(job, broker, 6)
    plan = new_plan(job)
    done = run_task(job, plan, WRITE)
    assert visible(cluster) - Counter(other=10**9) == Counter(ROWS)
    assert complete(job, plan, WRITE, done).repeated_rows == 0


@pytest.mark.parametrize("recovers", [False, True])
def test_a_write_completes_although_the_records_of_its_attempts_have_expired(
    cluster: FakeCluster, job: Driver, caplog: pytest.LogCaptureFixture, recovers: bool
) -> None:
    plan = new_plan(job)
    if recovers:
        with pytest.raises(Killed):
            run_task(job, plan, WRITE, dies_after=300)
    done = run_task(job, plan, WRITE)
    home = plan.home
    store = cluster.brokers[home.broker_name].storage.store
    expire(cluster, "expired", home, store.end(home))
    # Spark's driver completes a write in another process than it plans it in.
    forget_logs()
    complete(job, plan, WRITE, done)
    assert visible(cluster) == Counter(ROWS)
    # A slow machine may also recover a request.
    assert not recovers or "partition 0 have expired (fileReservedTime), so it is unknown whether rows" in caplog.text


def test_a_write_completes_although_its_first_records_have_expired(cluster: FakeCluster, job: Driver) -> None:
    plan = new_plan(job)
    store = cluster.brokers[plan.home.broker_name].storage.store
    done = [run_task(job, plan, WRITE, 0)]
    end = store.end(plan.home)
    # Most queues end with a row of the first attempt.
    done.append(run_task(job, plan, WRITE, 1, ["last"]))
    expire(cluster, "expired", plan.home, end)
    forget_logs()
    complete(job, plan, WRITE, *done)
    assert visible(cluster) == Counter([*ROWS, "last"])


@pytest.mark.parametrize("planned", [False, True], ids=["", "before the plan"])
def test_rows_of_an_attempt_whose_record_has_expired_are_not_lost(
    cluster: FakeCluster, job: Driver, *, planned: bool
) -> None:
    plan = new_plan(job)
    with pytest.raises(Killed):
        run_task(job, plan, WRITE, **dying_after_stored_rows(cluster, 100))
    end = cluster.brokers[plan.home.broker_name].storage.store.end(plan.home)
    plan = new_plan(job) if planned else plan
    done = run_task(job, plan, WRITE)
    expire(cluster, "expired", plan.home, end)
    forget_logs()
    complete(job, plan, WRITE, done)
    assert visible(cluster) == Counter(ROWS)


def test_acknowledged_rows_of_a_broker_that_lost_the_topic_are_noticed(cluster: FakeCluster, job: Driver) -> None:
    """The broker has lost its disk, so the route of the topic lacks it at the end."""
    broker, plan = without_home(job, cluster), new_plan(job)
    done = run_task(job, plan, WRITE)
    settings = broker.storage.topics[TOPIC]
    lose_tail(broker, stored_by(broker))
    del broker.storage.topics[TOPIC]
    broker.on_change()
    wait_for(lambda: broker.name not in {queue.broker_name for queue in job.brokers.fresh_route(TOPIC).queues})
    with pytest.raises(DataLossError, match=r"the row at offset \d+, and its queue ends at 0 now.*Run the job again"):
        complete(job, plan, WRITE, done)
    broker.storage.create_topic(TOPIC, settings)
    broker.on_change()
    wait_for(lambda: broker.name in {queue.broker_name for queue in job.brokers.fresh_route(TOPIC).queues})
    plan = new_plan(job)
    done = run_task(job, plan, WRITE)
    assert visible(cluster) == Counter(ROWS)
    assert complete(job, plan, WRITE, done).repeated_rows == 0


def test_a_plan_reports_queues_that_lost_their_end(
    cluster: FakeCluster, job: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    broker = without_home(job, cluster)
    write = Write("0", "query")
    plan = new_plan(job, None)
    complete(job, plan, write, run_task(job, plan, write))
    caplog.clear()
    lose_tail(broker, 50)
    plan = new_plan(job, None)
    store = broker.storage.store
    ends = {queue: store.end(queue) for queue in job.queues if queue.broker_name == broker.name}
    assert {queue: plan.begins.start_offsets[queue] for queue in ends} == ends
    (text,) = {record.getMessage().partition(" ended at")[2][-20:] for record in caplog.records}
    assert text


def test_the_next_attempt_sends_acknowledged_rows_that_a_broker_lost(cluster: FakeCluster, clock: MovedClock) -> None:
    options = {"delivery": "effectivelyOnce", "batchBytes": "1024", "fenceMs": "0", "ordered": "true"}
    with driver(cluster, clock, **options) as job:
        broker = without_home(job, cluster)
        for queue in job.queues:
            put(cluster, queue, *[Message(TOPIC, b"old", 0, {})] * 100)
        plan = new_plan(job)
        rows = 0

        def lose(request: RemotingCommand) -> Reply | None:
            nonlocal rows
            if request.ext_fields["b"] == TOPIC:
                rows += 1
                if rows == 5:
                    lose_tail(broker, 30)
            return None

        broker.play(lose, times=10_000)
        with pytest.raises(
            DeliveryError, match="its broker has lost messages, perhaps acknowledged rows of this write"
        ):
            run_task(job, plan, WRITE, key="k")
        done = run_task(job, plan, WRITE, key="k")
        assert visible(cluster)["old"] >= 370
        assert visible(cluster) - Counter(old=400) == Counter(ROWS)
        complete(job, plan, WRITE, done)


def covered(cluster: FakeCluster, summary: WriteSummary) -> Counter[str]:
    """Return the rows that a read by the receipt of a write returns."""
    spans = receipt_spans(json.loads(json.dumps(summary.to_dict())))
    bodies: Counter[str] = Counter()
    for queue, (first, last) in spans.items():
        store = broker_of(cluster, queue).storage.store
        bodies.update(message.body.decode() for message in store.messages(queue, first, last + 1))
    return bodies


@pytest.mark.parametrize("dies_after", [20, 200, 400])
def test_a_receipt_has_the_rows_of_earlier_attempts(cluster: FakeCluster, job: Driver, dies_after: int) -> None:
    plan, summary = new_plan(job), WriteSummary()
    with contextlib.suppress(Killed):
        run_task(job, plan, WRITE, dies_after=dies_after)
    run_task(job, plan, WRITE, summary=summary)
    assert covered(cluster, summary) == Counter(ROWS)
    rows = sum(
        queue["rows"]
        for broker in summary.to_dict().values()
        for of in broker["queues"].values()
        for queue in of.values()
    )
    assert rows == len(ROWS)
    assert summary.recovered_rows()["recovered"] + sum(of["rows"] for of in summary.to_dict().values()) == len(ROWS)


def test_a_receipt_has_the_rows_of_requests_without_an_answer(cluster: FakeCluster, job: Driver) -> None:
    plan, summary = new_plan(job), WriteSummary()
    for broker in cluster.brokers.values():
        broker.play(Reply(stored=True, closes=True), times=2)
    run_task(job, plan, WRITE, summary=summary)
    assert covered(cluster, summary) == Counter(ROWS)


def test_the_receipt_of_a_write_completed_by_another_driver_is_incomplete(cluster: FakeCluster, job: Driver) -> None:
    frozen, plan, summary = new_plan(job), new_plan(job), WriteSummary()
    run_task(job, frozen, WRITE, 1, summary=summary)
    done: list[Attempted | None] = [run_task(job, plan, WRITE, part) for part in (0, 1)]
    complete(job, plan, WRITE, *done)
    assert run_task(job, frozen, WRITE, 0, summary=summary) is None
    with pytest.raises(ValueError, match=r"the receipt is incomplete: .* by another driver of the same write"):
        parse_start(json.dumps(summary.to_dict()))


def test_a_recovery_unpacks_the_messages_of_one_answer_at_a_time() -> None:
    with FakeCluster(brokers=1, topics={TOPIC: 8}) as cluster:
        (broker,) = cluster.brokers.values()
        options = {"delivery": "effectivelyOnce", "batchBytes": "1024", "fenceMs": "0"}
        with driver(cluster, MovedClock(cluster), **options) as job:
            plan = new_plan(job)
            run_task(job, plan, WRITE)
            # 20 kB that unpack to 16 MiB: another producer's, with the token of an attempt.
            token = cluster.messages(TOPIC)[0].properties[ATTEMPT]
            items = [Message(TOPIC, b"x" * 2**19, 0, {})] * 32
            body = compress(encode_batch(items), CompressionType.ZLIB)
            bomb = Message(TOPIC, body, 0, {ATTEMPT: token, "INNER_NUM": "32"})
            bits = INNER_BATCH | CompressionType.ZLIB.sys_flag
            for queue in job.queues:
                broker.storage.store.append(bomb, queue, queue, broker.timers.time(), sys_flag=bits, items=items)
            tracemalloc.start()
            run_task(job, plan, WRITE)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    # The batch, its items, their columns, and half as much.
    assert peak < 4.5 * 2**24
