"""A decision log with ``transactionalKey``: forged messages have no effect, and copies lose or repeat no row."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from rocketmq_spark.cli.transactions import finish_writes
from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.exactly_once.delivery import Prepared
from rocketmq_spark.deliveries.log.delivery import forget_logs
from rocketmq_spark.deliveries.log.keys import LogKeys
from rocketmq_spark.deliveries.log.records import VERSION, BegunRecord, DoneRecord, Record, encode, parse
from rocketmq_spark.errors import MQClientException, OptionError, RocketMQError
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.testing import FakeCluster
from tests.support.resume import ROWS, WRITE, Killed, complete, job_log, new_plan, run_task
from tests.support.two_phase import ID, TOPIC, Driver, MovedClock, driver, visible

OLD, NEW = "the-old-key-of-the-log", "the-new-key-of-the-log"
DECISIONS = "rocketmq-spark-decisions"
EFFECTIVE = {"delivery": "effectivelyOnce", "batchBytes": "1024", "fenceMs": "0", "sendMsgTimeout": "500"}
LOGS = {"exactlyOnce": ID, "effectivelyOnce": f"{ID}#{TOPIC}"}


@contextmanager
def effective(cluster: FakeCluster, clock: MovedClock, key: str | None = NEW) -> Iterator[Driver]:
    """Return a driver of effectively-once writes."""
    given = EFFECTIVE if key is None else {**EFFECTIVE, "transactionalKey": key}
    forget_logs()
    with driver(cluster, clock, **given) as running:
        yield running


@contextmanager
def exact(cluster: FakeCluster, clock: MovedClock, key: str | None = NEW) -> Iterator[Driver]:
    """Return a driver of exactly-once writes."""
    given = {} if key is None else {"transactionalKey": key}
    forget_logs()
    with driver(cluster, clock, **given) as running:
        yield running


def log_queues(cluster: FakeCluster) -> list[MessageQueue]:
    return sorted(
        queue
        for broker in cluster.brokers.values()
        for queue in broker.storage.store.queues
        if queue.topic == DECISIONS
    )


def messages(cluster: FakeCluster, queue: MessageQueue) -> list[MessageExt]:
    broker = cluster.brokers[queue.broker_name]
    with broker.lock:
        return list(broker.storage.store._read.get(queue, ()))


def put(cluster: FakeCluster, queue: MessageQueue, *bodies: bytes, tag: str) -> None:
    """Store messages as another user does."""
    broker = cluster.brokers[queue.broker_name]
    with broker.lock:
        stored = [Message(queue.topic, bytes(body), properties={"TAGS": tag}) for body in bodies]
        broker.storage.store.put(queue, stored, time.time())


def copies(cluster: FakeCluster) -> Iterator[tuple[MessageExt, MessageQueue]]:
    """Yield each message of the log, with each queue."""
    queues = log_queues(cluster)
    for queue in queues:
        for message in messages(cluster, queue):
            for target in queues:
                yield message, target


def copy(cluster: FakeCluster, message: MessageExt, target: MessageQueue) -> None:
    put(cluster, target, bytes(message.body), tag=message.tags or "")


def micro_batch(job: Driver, number: int, *, dies: bool = False) -> list[str]:
    """Write a micro-batch, after an attempt that dies; return its rows."""
    write, rows = Write(str(number), "query"), [f"{number}-{row}" for row in ROWS[:60]]
    if dies:
        with pytest.raises(Killed):
            run_task(job, new_plan(job, None), write, rows=rows, dies_after=40)
    plan = new_plan(job, None)
    complete(job, plan, write, run_task(job, plan, write, rows=rows))
    return rows


def committed(job: Driver, number: int) -> list[str]:
    """Write a micro-batch with ``exactlyOnce``; return its rows."""
    write, rows = Write(str(number), "query"), [f"{number}-{row}" for row in range(20)]
    forget_logs()
    planned = job.plan()
    halves, group = job.prepare(rows, write)
    job.commit(planned, write, [Prepared(group, halves.to_bytes())])
    return rows


# What has no valid signature


def forged(log: str, queue: MessageQueue) -> list[bytes]:
    """Return messages that would have an effect without a key, and some that have none."""
    home = [queue.topic, "broker-9", 0]
    head = {"version": VERSION, "id": log, "write": "0", "query": "query", "since": 0}
    records: list[dict[str, object]] = [
        {"kind": "done", "floors": []} if "#" in log else {"kind": "done"},
        {"kind": "done", "write": "9", "floors": []} if "#" in log else {"kind": "done", "write": "9"},
        {"kind": "home", "home": home},
        {"kind": "claim", "home": home},
        {"kind": "floors", "floors": [[TOPIC, queue.broker_name, 0, 2**63 - 1]]},
        {"kind": "begun", "partition": 0, "attempt": "forged", "brokers": {"broker-0": 99_999}},
        {"kind": "begun", "partition": 2**31 - 1, "attempt": "forged", "brokers": {}},
        {
            "kind": "decision",
            "round": 1,
            "group": f"{log}#0#1#r",
            "rows": 0,
            "timeout_ms": 3_600_000,
            "manifests": [],
            "digest": "00" * 32,
            "floors": [],
            "youngest": [],
        },
        {"kind": "merged", "version": VERSION + 1},
    ]
    bodies = [json.dumps({**head, **record}).encode() for record in records]
    # A key of the attacker's own.
    signed = [LogKeys.of(b"a-key-of-another-user").sealed(body, log, queue, 0) for body in bodies]
    return [*bodies, *signed, b"", b"\xff" * 100, b"[" * 100_000, b'{"id": "\x1b[2J"}']


@pytest.mark.parametrize("crash", [False, True])
def test_forged_messages_have_no_effect_on_an_effectively_once_write(
    cluster: FakeCluster, clock: MovedClock, caplog: pytest.LogCaptureFixture, crash: bool
) -> None:
    with effective(cluster, clock) as job:
        new_plan(job, None)
        tag = job_log(job).records.tag
        rows: list[str] = []
        for number in range(3):
            for queue in log_queues(cluster):
                put(cluster, queue, *forged(LOGS["effectivelyOnce"], queue), tag=tag)
            rows += micro_batch(job, number, dies=crash)
        new_plan(job, None)
        log = job_log(job)
        assert visible(cluster) == Counter(rows)
        assert len(log.records.ignored) > 2 * len(forged(LOGS["effectivelyOnce"], log.require_home()))
    texts = [record.getMessage() for record in caplog.records if "is no valid record" in record.getMessage()]
    assert texts
    assert all("it has no valid signature of a key in transactionalKey" in text for text in texts)


def test_forged_messages_have_no_effect_on_an_exactly_once_write(cluster: FakeCluster, clock: MovedClock) -> None:
    with exact(cluster, clock) as job:
        job.plan()
        rows: list[str] = []
        for number in range(3):
            for queue in log_queues(cluster):
                put(cluster, queue, *forged(ID, queue), tag=job.log.records.tag)
            rows += committed(job, number)
        assert visible(cluster) == Counter(rows)


def test_without_a_key_forged_records_count_and_a_signed_one_is_an_error(
    cluster: FakeCluster, clock: MovedClock
) -> None:
    with effective(cluster, clock, None) as job:
        new_plan(job)
        log = job_log(job)
        done = encode(DoneRecord(write=WRITE, start_offsets={}), log.transactional_id, log.topic)
        put(cluster, log.require_home(), done, tag=log.records.tag)
        assert new_plan(job).done
    with effective(cluster, clock) as job:
        plan = new_plan(job)
        assert not plan.done
    with (
        effective(cluster, clock, None) as job,
        pytest.raises(MQClientException, match="has a signed record, and this"),
    ):
        new_plan(job)


def test_a_task_with_other_keys_than_its_driver_fails(cluster: FakeCluster, clock: MovedClock) -> None:
    with effective(cluster, clock) as job:
        plan = new_plan(job)
    for key in (OLD, None):
        with effective(cluster, clock, key) as task, pytest.raises(OptionError, match="the driver signs the records"):
            run_task(task, plan, WRITE)
    assert not visible(cluster)


# Copies of valid records


@pytest.mark.parametrize("seed", range(12))
def test_copied_records_neither_lose_nor_repeat_rows(cluster: FakeCluster, clock: MovedClock, seed: int) -> None:
    rng = random.Random(seed)

    def attack() -> None:
        for message, target in rng.sample(possible := list(copies(cluster)), min(len(possible), rng.randrange(30))):
            copy(cluster, message, target)

    expected: Counter[str] = Counter()
    with effective(cluster, clock) as job:
        for number in range(8):
            write, rows = Write(str(number), "query"), [f"{number}-{row}" for row in ROWS[:60]]
            for attempt in range(4):
                attacked = attack if attempt < 3 else lambda: None
                with contextlib.suppress(Killed, RocketMQError):
                    plan = new_plan(job, None)
                    attacked()
                    dies_after = 20 * rng.randrange(1, 3) if attempt == 0 else None
                    done = run_task(job, plan, write, rows=rows, dies_after=dies_after)
                    attacked()
                    complete(job, plan, write, done)
                    break
                assert not visible(cluster) - expected - Counter(rows), "a row is repeated"
            else:
                raise AssertionError("copies stop the write for ever")
            expected.update(rows)
            assert visible(cluster) == expected


@pytest.mark.parametrize("seed", range(8))
def test_copied_records_neither_lose_nor_repeat_rows_of_exactly_once_writes(
    cluster: FakeCluster, clock: MovedClock, seed: int
) -> None:
    rng, expected = random.Random(seed), Counter[str]()

    def attack() -> None:
        for message, target in rng.sample(possible := list(copies(cluster)), min(len(possible), rng.randrange(20))):
            copy(cluster, message, target)

    with exact(cluster, clock) as job:
        for number in range(6):
            attack()
            expected.update(committed(job, number))
            assert visible(cluster) == expected
            if rng.randrange(2):
                # Its driver dies during the commit; the next one completes it.
                write, rows = Write(f"batch-{number}"), [f"batch-{number}-{row}" for row in range(20)]
                job.open().decide_and_crash(rows, rng.randrange(20), write)
                attack()
                job.open().two_phase.finish(write)
                expected.update(rows)
                assert visible(cluster) == expected


def kinds(cluster: FakeCluster, job: Driver) -> dict[str, list[tuple[MessageExt, MessageQueue, Record]]]:
    """Return the valid records of a log by kind."""
    log, found = job_log(job), dict[str, list[tuple[MessageExt, MessageQueue, Record]]]()
    for queue in log_queues(cluster):
        for message in messages(cluster, queue):
            opened = log.keys.opened(bytes(message.body), log.transactional_id, queue)
            if opened is not None:
                record = parse(opened.body, log.transactional_id, log.topic, message.queue_offset)
                assert record is not None
                found.setdefault(type(record).__name__, []).append((message, queue, record))
    return found


@pytest.mark.parametrize("how", ["expired", "removed"])
@pytest.mark.parametrize("kind", ["DoneRecord", "StartRecord", "BegunRecord", "HomeRecord"])
def test_copies_of_expired_records_do_not_exist(cluster: FakeCluster, clock: MovedClock, kind: str, how: str) -> None:
    with effective(cluster, clock) as job:
        for number in range(4):
            micro_batch(job, number, dies=True)
        found = kinds(cluster, job)
        for queue in log_queues(cluster):
            broker = cluster.brokers[queue.broker_name]
            getattr(broker.storage.store, how)[queue] = broker.storage.store.end(queue)
        for message, queue, _ in found[kind]:
            copy(cluster, message, queue)
        before = visible(cluster)
        with pytest.raises(OptionError, match="the decision log has no record of transactionalId=job"):
            micro_batch(job, 4)
        assert visible(cluster) == before


def test_a_copied_begun_record_does_not_hide_or_replace_an_attempt(cluster: FakeCluster, clock: MovedClock) -> None:
    with effective(cluster, clock) as job:
        rows = micro_batch(job, 0)
        write, more = Write("1", "query"), [f"1-{row}" for row in ROWS[:60]]
        with pytest.raises(Killed):
            run_task(job, new_plan(job, None), write, rows=more, dies_after=40)
        for message, queue, record in kinds(cluster, job)["BegunRecord"]:
            assert isinstance(record, BegunRecord)
            copy(cluster, message, queue)
        plan = new_plan(job, None)
        complete(job, plan, write, run_task(job, plan, write, rows=more))
        assert visible(cluster) == Counter([*rows, *more])


def test_a_driver_asks_once_for_the_first_offset_of_each_queue(cluster: FakeCluster, clock: MovedClock) -> None:
    with effective(cluster, clock) as job:
        micro_batch(job, 0)
        for broker in cluster.brokers.values():
            broker.requests.clear()
        new_plan(job, None)
        asked = Counter(
            (name, request.ext_fields["queueId"])
            for name, broker in cluster.brokers.items()
            for request in broker.requests
            if request.code == RequestCode.GET_MIN_OFFSET and request.ext_fields["topic"] == DECISIONS
        )
        assert asked == Counter((queue.broker_name, str(queue.queue_id)) for queue in log_queues(cluster))


def test_a_copied_begun_record_stops_no_attempt(cluster: FakeCluster, clock: MovedClock) -> None:
    with effective(cluster, clock) as job:
        with pytest.raises(Killed):
            run_task(job, new_plan(job), WRITE, dies_after=40)

        def attack(start: int) -> None:
            if start == 200:
                for message, queue, _ in kinds(cluster, job)["BegunRecord"]:
                    copy(cluster, message, queue)
                # The attempt reads the log again.
                clock.ahead += 60.0

        plan = new_plan(job)
        complete(job, plan, WRITE, run_task(job, plan, WRITE, before=attack))
        assert visible(cluster) == Counter(ROWS)


def test_a_replaced_manifest_stops_the_recovery(cluster: FakeCluster, clock: MovedClock) -> None:
    with exact(cluster, clock) as job:
        halves, _ = job.open().decide_and_crash([f"row-{number}" for number in range(20)], 7)
        before = visible(cluster)
        home = job.log.require_home()
        (offset,) = job.log.writes[WRITE].last.manifests
        broker = cluster.brokers[home.broker_name]
        with broker.lock:
            # A lost end of the queue, and a message of another user in its place.
            read = broker.storage.store._read[home]
            other = halves.select(range(19, -1, -1)).to_manifests()[0]  # type: ignore[arg-type]
            read[offset] = replace(read[offset], body=other)
        with pytest.raises(MQClientException, match="their content differs from what the decision says"):
            job.open().two_phase.finish(WRITE)
        assert visible(cluster) == before


# Rotation


@pytest.mark.parametrize("deliver", ["exactlyOnce", "effectivelyOnce"])
def test_a_key_is_replaced_in_three_steps(cluster: FakeCluster, clock: MovedClock, deliver: str) -> None:
    opened: Callable[..., object] = exact if deliver == "exactlyOnce" else effective
    expected: Counter[str] = Counter()
    number = 0
    for key in (OLD, f"{OLD},{NEW}", f"{NEW},{OLD}", NEW):
        with opened(cluster, clock, key) as job:  # type: ignore[attr-defined]
            for _ in range(2):
                expected.update(micro_batch(job, number, dies=True) if opened is effective else committed(job, number))
                number += 1
                assert visible(cluster) == expected


def test_an_attempt_under_the_old_key_is_recovered_after_the_rotation(cluster: FakeCluster, clock: MovedClock) -> None:
    write, rows = Write("1", "query"), [f"1-{row}" for row in ROWS[:60]]
    with effective(cluster, clock, OLD) as job:
        expected = Counter(micro_batch(job, 0))
        with pytest.raises(Killed):
            run_task(job, new_plan(job, None), write, rows=rows, dies_after=40)
    with effective(cluster, clock, f"{NEW},{OLD}") as job:
        plan = new_plan(job, None)
        assert {one.key_id for one in plan.begun[write][0].values()} == {LogKeys.of(OLD.encode()).signs}
        complete(job, plan, write, run_task(job, plan, write, rows=rows))
        assert visible(cluster) == expected + Counter(rows)


def test_a_removed_key_stops_a_stream_that_still_needs_it(cluster: FakeCluster, clock: MovedClock) -> None:
    with effective(cluster, clock, OLD) as job:
        expected = Counter(micro_batch(job, 0))
    with effective(cluster, clock, NEW) as job:
        with pytest.raises(OptionError, match="has no record of transactionalId=job"):
            micro_batch(job, 1)
        assert visible(cluster) == expected


# Many messages


def test_many_messages_of_others_cost_no_memory_and_end_with_an_error(cluster: FakeCluster, clock: MovedClock) -> None:
    with effective(cluster, clock) as job:
        new_plan(job, None)
        log = job_log(job)
        put(cluster, log.require_home(), *[b"{}"] * 5_000, tag=log.records.tag)
        log.refresh(job.brokers)
        assert len(log.records.ignored) == 1_000
        put(cluster, log.require_home(), *[b"{}"] * 100, tag=log.records.tag)
        times = iter(range(0, 10_000, 5))
        slow = replace(job.brokers, clock=lambda: float(next(times)))
        with pytest.raises(MQClientException, match=r"of \d+ messages with the tag of this log are no records of it"):
            log.refresh(slow)


EXTREMES: list[dict[str, object]] = [
    {"kind": "done", "floors": [[TOPIC, f"broker-{number}", 99_999, 2**63 - 1] for number in range(1_000)]},
    {"kind": "floors", "floors": [[TOPIC, "broker-0", 0, 2**63 - 1], [TOPIC, "broker-1", 0, 2**63 - 1]]},
    {"kind": "begun", "partition": 2**31 - 1, "attempt": "a" * 256, "brokers": {"broker-0": 100_000}},
    {"kind": "begun", "partition": 0, "attempt": "a", "brokers": {"b" * 512: 100_000}, "floors": []},
    {"kind": "home", "home": [DECISIONS, "broker-9", 99_999]},
    {"kind": "claim", "home": [DECISIONS, "broker-9", 99_999]},
    {"kind": "done", "write": str(10**18), "floors": []},
]


@pytest.mark.parametrize("number", range(len(EXTREMES)))
@pytest.mark.parametrize("key", [NEW, None])
def test_records_with_extreme_values_end_in_time(
    cluster: FakeCluster, clock: MovedClock, key: str | None, number: int
) -> None:
    """With the key they change nothing. Without it they may stop or fool the write, but end with no other error."""
    head = {"version": VERSION, "id": LOGS["effectivelyOnce"], "write": "1", "query": "query", "since": 0}
    body = json.dumps({**head, **EXTREMES[number]}).encode()
    with effective(cluster, clock, key) as job:
        expected = Counter(micro_batch(job, 0))
        for queue in log_queues(cluster):
            put(cluster, queue, body, tag=job_log(job).records.tag)
        try:
            expected.update(micro_batch(job, 1, dies=True))
        except RocketMQError:
            assert key is None
            return
        if key is not None:
            assert visible(cluster) == expected


def test_open_writes_of_a_signed_log_are_finished_with_its_key(cluster: FakeCluster, clock: MovedClock) -> None:
    rows = [f"row-{number}" for number in range(20)]
    with exact(cluster, clock) as job:
        job.open().decide_and_crash(rows, 7)
    with (
        exact(cluster, clock, None) as other,
        pytest.raises(MQClientException, match="a signed record, and this job has"),
    ):
        finish_writes(other.brokers, list_only=False)
    with exact(cluster, clock, OLD) as other, pytest.raises(MQClientException, match="has no decision of"):
        finish_writes(other.brokers, list_only=False)
    with exact(cluster, clock, f"{OLD},{NEW}") as other:
        assert [write.state for write in finish_writes(other.brokers, list_only=False)] == ["finished"]
    assert visible(cluster) == Counter(rows)
