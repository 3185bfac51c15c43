"""Exactly-once writes on real brokers: rights, settings of brokers, wrong clocks, changed topics, and recoveries.

Some tests bring a driver to its decision, let it commit only some rows, and leave it. Another driver then recovers the
write.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rocketmq_spark.admin import Admin
from rocketmq_spark.cli.transactions import finish_writes
from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.cluster.probe import Probe
from rocketmq_spark.cluster.security import client_options
from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.exactly_once.commit import group_of
from rocketmq_spark.deliveries.exactly_once.delivery import ExactlyOnce
from rocketmq_spark.deliveries.exactly_once.fence import forget_checks
from rocketmq_spark.deliveries.exactly_once.half_sender import half_rules
from rocketmq_spark.deliveries.exactly_once.halves import HalfCollector, Halves
from rocketmq_spark.deliveries.log.delivery import check_stream, forget_logs
from rocketmq_spark.errors import DeliveryError, MQClientException, OptionError, RocketMQError
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.message_ext import MessageExt, decode_message_id
from rocketmq_spark.model.names import wrap
from rocketmq_spark.model.route import PERM_READ, PERM_WRITE
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.connect import new_transport
from rocketmq_spark.sink.task import SendContext, write_rows
from rocketmq_spark.transport.runtime import PROCESS, Runtime
from tests.support.cluster import SHORT_DEADLINES, SharedCluster, started
from tests.support.processes import PATIENCE, wait_for
from tests.support.reading import read_queue
from tests.support.two_phase import ID, WRITE, Driver

pytestmark = pytest.mark.integration

Cluster = LocalCluster | SharedCluster

# The deadline of drivers that die, milliseconds. A recovery waits for its end.
SOON = 2_000
ROWS = [f"row-{number:02}" for number in range(40)]
MANY_ROWS = [f"row-{number:04}" for number in range(4_000)]


@contextmanager
def driver(
    cluster: Cluster,
    topic: str,
    options: Mapping[str, str] | None = None,
    *,
    runtime: Runtime = PROCESS,
    timeout_ms: int = 60_000,
) -> Iterator[Driver]:
    """Return a driver that has read its log, and is closed at the end. Each topic of rows has its own log."""
    forget_checks()
    given: dict[str, Any] = {"transactionTopic": log_of(topic), **(options or {})}
    with closing(Driver(cluster.name_server, runtime, topic=topic, **given)) as running:
        # The option allows no deadline of less than 10 s.
        running.options = running.brokers.options = replace(running.options, transaction_timeout_ms=timeout_ms)
        yield running.open()


@contextmanager
def planning(cluster: Cluster, topic: str, **options: str) -> Iterator[Callable[[Write | None], ExactlyOnce]]:
    """Return a function that plans a batch write, or a stream (None)."""
    given = {"nameServer": cluster.name_server, "topic": topic, "transactionTopic": log_of(topic)}
    parsed = parse_sink_options({**given, "delivery": "exactlyOnce", "transactionalId": ID, **options}, {})
    connection = parsed.connection
    with closing(ClientInstance("driver", new_transport(connection, "driver"), connection)) as instance:
        yield lambda write: ExactlyOnce.plan(parsed, lambda: nullcontext(instance), write)


def log_of(topic: str) -> str:
    return f"log-{topic}"


def create(cluster: Cluster, topic: str, queues: int = 2, write_queues: int | None = None) -> str:
    """Create or change a topic on all brokers, and return its name."""
    settings = cluster.admin_settings if isinstance(cluster, SharedCluster) else {}
    with Admin(cluster.name_server, **settings) as admin:
        for broker in cluster.brokers:
            admin.transport.create_topic(
                broker.address, topic, write_queues or queues, PERM_READ | PERM_WRITE, 10.0, read_queue_nums=queues
            )
    return topic


def read(job: Driver, cluster: Cluster, queues: int = 2) -> dict[MessageQueue, list[MessageExt]]:
    """Return the messages of each queue of the topic of rows that consumers see."""
    names = {broker.name: broker.address for broker in cluster.brokers}
    # A broker makes messages visible in the order of its commit log.
    stored = job.log.append_homes(job.brokers, WRITE, set(names))
    for queue, offset in stored.items():
        job.brokers.await_readable(queue, offset)
    transport, found = job.brokers.transport, {}
    for name, address in names.items():
        for number in range(queues):
            queue = MessageQueue(job.topic, name, number)
            wired = replace(queue, topic=transport.namespace.wrap(job.topic))
            end = transport.max_offset(queue, address, 10.0)
            found[queue] = list(read_queue(transport, address, wired, 0, end))
    return found


def visible(job: Driver, cluster: Cluster, queues: int = 2) -> Counter[str]:
    """Return the rows that consumers see, with the number of their copies."""
    messages = read(job, cluster, queues).values()
    return Counter(message.body.decode() for part in messages for message in part)


def prepare(job: Driver, rows: pa.RecordBatch, write: Write = WRITE) -> tuple[Halves, str]:
    """Store rows as half messages, as a task does; return them and their group."""
    group = group_of(job.log.transactional_id, write, 1, job.two_phase.run_id)
    collector = HalfCollector()
    queues = job.queues if job.options.ordered else None
    context = SendContext(options=job.options, instance=job.instance, queues=queues)
    rules = half_rules(group, job.options.transaction_timeout_ms, collector.append)
    write_rows(context, Recorder("", -1, 0), iter([rows]), write.name, rules)
    return Halves.from_bytes(collector.halves().to_bytes()), group


# Access control


def full_rights(topic: str) -> dict[str, list[str]]:
    """Return the rights of an exactly-once write, by resource. See docs/security.md#access-control."""
    return {
        f"Topic:{topic}": ["Pub", "Sub", "Get"],
        f"Topic:{log_of(topic)}": ["Pub", "Sub", "Get"],
        "Group:TOOLS_CONSUMER": ["Sub"],
    }


def all_rights(cluster: SharedCluster) -> dict[str, str]:
    """Return the options of the administrator, without the name server."""
    return {name: value for name, value in cluster.options.items() if name != "nameServer"}


def user_with(cluster: SharedCluster, rights: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Create a user with exactly these rights, and return its options, without the name server."""
    probe, name, secret = Probe(**cluster.transport_settings), f"user-{uuid.uuid4().hex[:8]}", "hush-hush"
    user = {"username": name, "password": secret, "userType": "Normal"}
    entries = [
        {"resource": resource, "actions": actions, "decision": "Allow"}
        for resource, actions in rights.items()
        if actions
    ]
    acl = {"subject": f"User:{name}", "policies": [{"policyType": "Custom", "entries": entries}]}
    for broker in cluster.brokers:
        for code, field, value, body in (
            (RequestCode.AUTH_CREATE_USER, "username", name, user),
            (RequestCode.AUTH_CREATE_ACL, "subject", f"User:{name}", acl),
        ):
            probe.ask(broker.address, code, {field: value}, "creating a user", json.dumps(body).encode())
    return {**all_rights(cluster), "accessKey": name, "secretKey": secret}


@pytest.fixture
def administrator(secured: SharedCluster, topic: str) -> Iterator[Driver]:
    """A driver with all rights, which creates the topics of rows and of the log."""
    create(secured, topic)
    with driver(secured, topic, all_rights(secured), timeout_ms=SOON) as job:
        yield job


def write_all(job: Driver, bodies: Sequence[str]) -> None:
    """Write rows exactly once, with all that Spark's driver does."""
    job.two_phase.prepare({queue.broker_name for queue in job.queues})
    job.two_phase.commit(Write("another"), *job.prepare(bodies, Write("another")))


def test_documented_rights_suffice_for_a_write_and_a_recovery(
    secured: SharedCluster, topic: str, administrator: Driver
) -> None:
    administrator.decide_and_crash(ROWS, 15)
    with driver(secured, topic, user_with(secured, full_rights(topic))) as job:
        write_all(job, ["x", "y", "z"])
        report = job.two_phase.finish(WRITE)
        assert report.recovered_rows > 0
    assert visible(administrator, secured) == Counter([*ROWS, "x", "y", "z"])


def test_a_user_with_create_creates_the_topic_of_the_log(secured: SharedCluster, topic: str) -> None:
    create(secured, topic)
    rights, log = full_rights(topic), log_of(topic)
    with (
        planning(secured, topic, **user_with(secured, rights)) as plan,
        pytest.raises(MQClientException, match=rf"no permission to access Topic:{log} .*create-topic {log} "),
    ):
        plan(WRITE)
    rights[f"Topic:{log}"].append("Create")
    with driver(secured, topic, user_with(secured, rights)) as job:
        write_all(job, ROWS)
    with driver(secured, topic, all_rights(secured)) as job:
        assert visible(job, secured) == Counter(ROWS)


@pytest.mark.parametrize(
    ("right", "resource", "doing"),
    [
        ("Pub", "Topic:{topic}", "sending 1 rows"),
        ("Get", "Topic:{topic}", "viewing the message"),
        ("Pub", "Topic:log-{topic}", "sending 1 rows"),
        ("Sub", "Topic:log-{topic}", "pulling from log-"),
        ("Get", "Topic:log-{topic}", "GET_MAX_OFFSET of log-"),
        ("Sub", "Group:TOOLS_CONSUMER", "pulling from log-"),
    ],
)
def test_no_row_is_visible_without_one_of_the_rights(
    secured: SharedCluster, topic: str, administrator: Driver, right: str, resource: str, doing: str
) -> None:
    rights = full_rights(topic)
    resource = resource.format(topic=topic)
    rights[resource].remove(right)
    why = rf"{doing}.*no permission to access {resource} .*give the user the right that it needs on {resource}"
    with pytest.raises(RocketMQError, match=why), driver(secured, topic, user_with(secured, rights)) as job:
        write_all(job, ROWS)
    assert visible(administrator, secured) == Counter()


def send_effectively_once(cluster: SharedCluster, topic: str, user: Mapping[str, str], *, dies: bool = False) -> int:
    """Write rows effectively once, or only some of them and fail; return how many were stored before."""

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"body": MANY_ROWS[:3_000]})
        if dies:
            raise ValueError("broken input")
        yield pa.RecordBatch.from_pydict({"body": MANY_ROWS[3_000:]})

    options: dict[str, Any] = {
        "delivery": "effectivelyOnce",
        "transactionalId": ID,
        "transactionTopic": log_of(topic),
        "writeId": "monday",
        "fenceMs": "100",
        "batchBytes": "4k",
    }
    with Producer("effectively-once", name_server=cluster.name_server, **client_options(user)) as producer:
        return producer.send_arrow(batches(), topic=topic, **options).recovered_rows()["recovered"]


def test_documented_rights_suffice_for_an_effectively_once_recovery(
    secured: SharedCluster, topic: str, administrator: Driver
) -> None:
    user = user_with(secured, full_rights(topic))
    with pytest.raises(ValueError, match="broken input"):
        send_effectively_once(secured, topic, user, dies=True)
    assert send_effectively_once(secured, topic, user) > 0
    assert visible(administrator, secured) == Counter(MANY_ROWS)


@pytest.mark.parametrize(
    ("right", "resource"),
    [
        ("Pub", "Topic:{topic}"),
        ("Sub", "Topic:{topic}"),
        ("Get", "Topic:{topic}"),
        ("Pub", "Topic:log-{topic}"),
        ("Sub", "Topic:log-{topic}"),
        ("Get", "Topic:log-{topic}"),
        ("Sub", "Group:TOOLS_CONSUMER"),
    ],
)
def test_an_effectively_once_write_stores_no_row_without_one_of_the_rights(
    secured: SharedCluster, topic: str, administrator: Driver, right: str, resource: str
) -> None:
    rights = full_rights(topic)
    resource = resource.format(topic=topic)
    rights[resource].remove(right)
    why = rf"no permission to access {resource} .*give the user the right that it needs on {resource}"
    with pytest.raises(RocketMQError, match=why):
        send_effectively_once(secured, topic, user_with(secured, rights))
    assert visible(administrator, secured) == Counter()


def test_a_recovery_needs_the_right_to_read_the_topic_of_rows(
    secured: SharedCluster, topic: str, administrator: Driver
) -> None:
    administrator.decide_and_crash(ROWS, 15)
    rights = full_rights(topic)
    rights[f"Topic:{topic}"].remove("Sub")
    why = rf"pulling from {topic}.*no permission to access Topic:{topic} "
    with driver(secured, topic, user_with(secured, rights)) as job, pytest.raises(RocketMQError, match=why):
        job.two_phase.finish(WRITE)
    with driver(secured, topic, user_with(secured, full_rights(topic))) as job:
        job.two_phase.finish(WRITE)
    assert visible(administrator, secured) == Counter(ROWS)


def test_a_forged_decision_moves_no_message_of_others(
    secured: SharedCluster, topic: str, administrator: Driver
) -> None:
    secret, loot = create(secured, f"secret-{topic}"), create(secured, f"loot-{topic}")
    with Producer("secret", name_server=secured.name_server, **secured.admin_settings) as producer:
        _, offset = decode_message_id(producer.send(Message(secret, b"the secret")).offset_msg_id or "")
    # 5.5.0 checks no right on the topic of the message.
    stranger = user_with(secured, {f"Topic:{loot}": ["Pub"]})
    with Admin(secured.name_server, **client_options(stranger)) as admin:
        assert admin.transport.view_message(secured.brokers[0].address, offset, 10.0).body == b"the secret"
    # The attacker may write to the log, because its job uses the same log.
    rights = {**full_rights(loot), f"Topic:{log_of(topic)}": ["Pub", "Sub", "Get"]}
    user = {**user_with(secured, rights), "transactionTopic": log_of(topic)}
    with driver(secured, loot, user, timeout_ms=SOON) as attacker:
        halves, group = attacker.prepare(["bait", "bait"])
        forged = replace(halves, commit_log_offsets=np.array([offset, halves.commit_log_offsets[1]]))
        attacker.two_phase._decide(WRITE, 1, group, forged, SOON)
    operator = administrator.brokers
    operator.options = replace(operator.options, topic=None)
    with pytest.raises(DeliveryError, match=f"It is a message of topic {secret} with"):
        finish_writes(operator, list_only=False)
    with driver(secured, loot, all_rights(secured)) as job:
        assert visible(job, secured) == Counter()


# Settings of brokers


@pytest.fixture(
    scope="module",
    params=["true", pytest.param("false", marks=pytest.mark.long)],
    ids=["RocksDB store", "default store"],
)
def flushing(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """A broker that flushes each message, with either store of transactions."""
    # The broker checks open half messages early, and then moves them to another topic.
    checks = {"transactionCheckInterval": "1000", "transactionCheckMax": "1"}
    properties = {**SHORT_DEADLINES, **checks, "flushDiskType": "SYNC_FLUSH", "transRocksDBEnable": request.param}
    with started(LocalCluster(broker_properties=properties, start_timeout=PATIENCE)) as cluster:
        yield cluster


def test_a_write_and_a_recovery_give_each_row_once(flushing: LocalCluster, topic: str) -> None:
    create(flushing, topic)
    with driver(flushing, topic) as job:
        write_all(job, ["x", "y", "z"])
    with driver(flushing, topic, timeout_ms=SOON) as job:
        job.decide_and_crash(ROWS, 15)
    with driver(flushing, topic) as job:
        job.two_phase.finish(WRITE)
        assert visible(job, flushing) == Counter([*ROWS, "x", "y", "z"])


def test_a_broker_killed_between_decision_and_commit_gives_each_row_once(flushing: LocalCluster, topic: str) -> None:
    create(flushing, topic)
    with driver(flushing, topic, timeout_ms=SOON) as dead:
        dead.decide_and_crash(ROWS, 15)
        flushing.brokers[0].kill()
        flushing.brokers[0].restart()
    with driver(flushing, topic) as job:
        job.two_phase.finish(WRITE)
        assert visible(job, flushing) == Counter(ROWS)


@pytest.mark.long
def test_a_driver_whose_broker_is_killed_in_the_commit_completes_it(flushing: LocalCluster, topic: str) -> None:
    create(flushing, topic)
    bodies, [broker] = [f"row-{number}" for number in range(5_000)], flushing.brokers
    with driver(flushing, topic, timeout_ms=15_000) as job, ThreadPoolExecutor(1) as pool:
        queue, transport = job.queues[0], job.brokers.transport
        committing = pool.submit(job.two_phase.commit, WRITE, *job.prepare(bodies))
        wait_for(lambda: transport.max_offset(queue, broker.address, PATIENCE) > 0 or committing.done())
        broker.kill()
        broker.restart()
        committing.result(PATIENCE)
        assert visible(job, flushing) == Counter(bodies)


# Names, order, contents


def test_with_a_namespace_a_write_and_a_recovery_give_each_row_once(cluster: SharedCluster, topic: str) -> None:
    create(cluster, wrap("space", topic))
    with driver(cluster, topic, {"namespace": "space"}) as job:
        write_all(job, ["x", "y", "z"])
    with driver(cluster, topic, {"namespace": "space"}, timeout_ms=SOON) as job:
        job.decide_and_crash(ROWS, 15)
    with driver(cluster, topic, {"namespace": "space"}) as job:
        report = job.two_phase.finish(WRITE)
        assert report.recovered_rows > 0
        assert visible(job, cluster) == Counter([*ROWS, "x", "y", "z"])


def test_ordered_rows_keep_their_order_in_commit_and_recovery(cluster: SharedCluster, topic: str) -> None:
    create(cluster, topic)
    bodies = [f"{number:04}" for number in range(400)]
    rows = pa.RecordBatch.from_pydict({"body": bodies, "shardingKey": [body[-1] for body in bodies]})
    with driver(cluster, topic, {"ordered": "true"}) as job:
        write = Write("another")
        job.two_phase.commit(write, *prepare(job, rows, write))
        committed = read(job, cluster)
    with driver(cluster, topic, {"ordered": "true"}, timeout_ms=2 * SOON) as job:
        halves, group = prepare(job, rows)
        job.two_phase._decide(WRITE, 1, group, halves, job.options.transaction_timeout_ms)
        job.end(halves.select(np.arange(150)), group)
    with driver(cluster, topic, {"ordered": "true"}) as job:
        report = job.two_phase.finish(WRITE)
        assert report.recovered_rows > 0
        both = read(job, cluster)
    for queue, messages in both.items():
        first = [message.body for message in committed[queue]]
        assert first == sorted(first)
        assert [message.body for message in messages] == first + first
    assert sum(map(len, both.values())) == 2 * len(bodies)


# Brokers and clients add these to half messages only.
OF_TRANSACTIONS = {
    "TRAN_MSG",
    "PGROUP",
    "CHECK_IMMUNITY_TIME_IN_SECONDS",
    "__transactionId__",
    "REAL_TOPIC",
    "REAL_QID",
    # A broker adds this one if it has checked the half message before its end.
    "TRANSACTION_CHECK_TIMES",
}


def content(message: MessageExt) -> tuple[Any, ...]:
    """Return what consumers see of a row."""
    properties = {name: value for name, value in message.properties.items() if name not in OF_TRANSACTIONS}
    # Each attempt at a row has another one.
    del properties["UNIQ_KEY"]
    return message.body, message.flag, message.sys_flag & 0xFF00 | message.sys_flag & 1, properties


def test_recovered_rows_have_the_content_of_plain_ones(cluster: SharedCluster, topic: str) -> None:
    long, large = "0123456789" * 600, bytes(range(256)) * (4 * 4096 - 16)
    rows = pa.RecordBatch.from_pylist(
        [
            {"body": b"plain"},
            {"body": long.encode(), "keys": "k1 k2", "tags": "a"},
            {"body": b"\x00", "keys": "k3"},
            {"body": large, "tags": "large", "flag": -7},
            {
                "body": b"user",
                "properties": [("color", "blue"), ("\u00e4", "\u4e2d\U0001f600"), ("long", "x" * 20_000)],
            },
        ],
        pa.schema(
            [
                ("body", pa.binary()),
                ("keys", pa.string()),
                ("tags", pa.string()),
                ("flag", pa.int32()),
                ("properties", pa.map_(pa.string(), pa.string())),
            ]
        ),
    )
    create(cluster, topic)
    plain = create(cluster, f"plain-{topic}")
    more = {"maxMessageSize": str(4 * 1024 * 1024)}
    with driver(cluster, topic, more) as job:
        once = job.options
        job.options = replace(once, topic=plain, delivery="atLeastOnce", batching=False)
        context = SendContext(options=job.options, instance=job.instance)
        write_rows(context, Recorder("", -1, 0), iter([rows]), "plain")
        expected = [content(message) for part in read(job, cluster).values() for message in part]
    with driver(cluster, topic, more, timeout_ms=2 * SOON) as job:
        halves, group = prepare(job, rows)
        job.two_phase._decide(WRITE, 1, group, halves, job.options.transaction_timeout_ms)
        job.end(halves.select(np.arange(1)), group)
        prepared = [job.brokers.view(half.queue, half.commit_log_offset) for half in map(halves.__getitem__, range(5))]
    with driver(cluster, topic, more) as job:
        report = job.two_phase.finish(WRITE)
        assert report.recovered_rows >= rows.num_rows - 1
        found = [message for part in read(job, cluster).values() for message in part]
    assert sorted(map(content, found), key=str) == sorted(expected, key=str)
    assert {message.unique_id for message in found} == {message.unique_id for message in prepared}


def test_a_row_with_the_longest_properties_is_recovered(cluster: SharedCluster, topic: str) -> None:
    topic, write, options = create(cluster, f"{topic:x<127}"), Write("w" * 100), {"transactionalId": "j" * 100}
    # 32,000 bytes with the name, the separators and the property UNIQ_KEY.
    properties = pa.array([[("long", "x" * 31_930)]], pa.map_(pa.string(), pa.string()))
    rows = pa.RecordBatch.from_arrays([pa.array(["x"]), properties], ["body", "properties"])
    options["transactionTopic"] = "log-of-long-names"
    with driver(cluster, topic, options, timeout_ms=SOON) as job:
        halves, group = prepare(job, rows, write)
        job.two_phase._decide(write, 1, group, halves, job.options.transaction_timeout_ms)
    with driver(cluster, topic, options) as job:
        job.two_phase.finish(write)
        assert visible(job, cluster) == Counter(["x"])


# Clocks


class WrongClock(Runtime):
    """A wall clock that is ahead of, or behind, that of the brokers."""

    def __init__(self, ahead: float) -> None:
        self._ahead = ahead

    def wall_clock(self) -> float:
        return super().wall_clock() + self._ahead


@pytest.mark.parametrize("ahead", [20, -20])
def test_a_wrong_clock_fails_the_write_before_its_decision(cluster: SharedCluster, topic: str, ahead: float) -> None:
    create(cluster, topic)
    with driver(cluster, topic, runtime=WrongClock(ahead)) as job:
        with pytest.raises(DeliveryError, match=rf"clocks of a client and of broker broker-\d differ by {-ahead}"):
            write_all(job, ROWS)
        assert job.log.writes == {}
        assert visible(job, cluster) == Counter()


def test_a_clock_behind_by_the_deadline_fails_the_check_of_brokers(cluster: SharedCluster, topic: str) -> None:
    create(cluster, topic)
    why = r"rejects the end of a new half message.*Check that its clock"
    with (
        driver(cluster, topic, runtime=WrongClock(-20), timeout_ms=10_000) as job,
        pytest.raises(MQClientException, match=why),
    ):
        job.two_phase.prepare({"broker-0"})


@pytest.mark.parametrize("ahead", [20, -20])
def test_a_long_deadline_tolerates_a_wrong_clock(cluster: SharedCluster, topic: str, ahead: float) -> None:
    create(cluster, topic)
    with driver(cluster, topic, runtime=WrongClock(ahead), timeout_ms=600_000) as job:
        write_all(job, ROWS)
        assert visible(job, cluster) == Counter(ROWS)


@pytest.mark.parametrize("ahead", [20, pytest.param(-20, marks=pytest.mark.long)])
def test_a_recovery_with_a_wrong_clock_repeats_no_row(cluster: SharedCluster, topic: str, ahead: float) -> None:
    create(cluster, topic)
    with driver(cluster, topic, timeout_ms=2 * SOON) as job:
        job.decide_and_crash(ROWS, 15)
        before = visible(job, cluster)
    with driver(cluster, topic, runtime=WrongClock(ahead)) as job:
        with pytest.raises(DeliveryError, match="the clocks of a client and of broker"):
            job.two_phase.finish(WRITE)
        assert visible(job, cluster) == before
    with driver(cluster, topic) as job:
        job.two_phase.finish(WRITE)
        assert visible(job, cluster) == Counter(ROWS)


# Changed topics


@pytest.mark.parametrize(("before", "read_queues", "write_queues"), [(2, 4, 4), (4, 4, 2), (4, 2, 2)])
def test_queues_changed_before_the_commit_give_each_row_once(
    cluster: SharedCluster, topic: str, before: int, read_queues: int, write_queues: int
) -> None:
    create(cluster, topic, before)
    with driver(cluster, topic) as job:
        prepared = job.prepare(ROWS)
        create(cluster, topic, read_queues, write_queues)
        job.two_phase.commit(WRITE, *prepared)
        # Rows in queues that were removed are visible when these are added again.
        create(cluster, topic, 4)
        assert visible(job, cluster, 4) == Counter(ROWS)


def test_queues_added_before_the_recovery_give_each_row_once(cluster: SharedCluster, topic: str) -> None:
    create(cluster, topic)
    with driver(cluster, topic, timeout_ms=SOON) as job:
        job.decide_and_crash(ROWS, 15)
    create(cluster, topic, 4)
    with driver(cluster, topic) as job:
        job.two_phase.finish(WRITE)
        assert visible(job, cluster, 4) == Counter(ROWS)


# Each of the eight queues has five rows. So queues 2 and 3 have rows to commit, or committed rows to find.
@pytest.mark.parametrize(
    ("read_queues", "committed", "why"),
    [(4, 15, r"waited deliveryTimeoutMs=3000 for queue .*/broker-\d/[23]"), (2, 32, r"queueId\[[23]\] is illegal")],
)
def test_queues_removed_before_the_recovery_lose_no_row(
    cluster: SharedCluster, topic: str, read_queues: int, committed: int, why: str
) -> None:
    create(cluster, topic, 4)
    with driver(cluster, topic, timeout_ms=SOON) as job:
        job.decide_and_crash(ROWS, committed)
    create(cluster, topic, read_queues, 2)
    with driver(cluster, topic, {"deliveryTimeoutMs": "3000"}) as job, pytest.raises(RocketMQError, match=why):
        job.two_phase.finish(WRITE)
    create(cluster, topic, 4)
    with driver(cluster, topic) as job:
        job.two_phase.finish(WRITE)
        assert visible(job, cluster, 4) == Counter(ROWS)


# A log that has lost its records


def delete(cluster: SharedCluster, topic: str) -> None:
    """Delete a topic with its messages, on all brokers."""
    for broker in cluster.brokers:
        Probe().ask(broker.address, RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": topic}, "deleting")


def test_a_stream_refuses_a_log_that_was_deleted(cluster: SharedCluster, topic: str) -> None:
    create(cluster, topic)
    first, second = Write("0", "query"), Write("1", "query")
    with driver(cluster, topic) as job:
        job.two_phase.commit(first, *job.prepare(ROWS, first))
    with planning(cluster, topic) as plan:
        planned = plan(None)
        check_stream(planned.options, planned.planned, second)
        delete(cluster, log_of(topic))
        create(cluster, log_of(topic), 1)
        # Once in a process that has read the log, and once in a new process.
        plan(None)
        forget_logs()
        found = plan(None)
        with pytest.raises(OptionError, match=r"micro-batch 1 of query query: .* the log has expired.* startAnew=true"):
            check_stream(found.options, found.planned, second)
        check_stream(replace(found.options, start_anew=True), found.planned, second)


def test_a_stream_starts_anew_after_its_log_was_deleted(cluster: SharedCluster, topic: str) -> None:
    create(cluster, topic)
    first, second = Write("0", "query"), Write("1", "query")
    with driver(cluster, topic) as job:
        job.two_phase.commit(first, *job.prepare(ROWS, first))
    with planning(cluster, topic, startAnew="true") as plan:
        plan(None)
        delete(cluster, log_of(topic))
        create(cluster, log_of(topic), 1)
        found = plan(None)
        check_stream(found.options, found.planned, second)
        assert found.planned.newest is None
