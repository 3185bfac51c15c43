"""The admin commands on a real cluster: every command, its JSON, and the mistakes of a new user."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark import Admin, Producer
from rocketmq_spark.admin import queue_offsets
from rocketmq_spark.cli.app import main
from rocketmq_spark.cli.doctor import examine
from rocketmq_spark.cli.doctor.machine import FAILED, OK, WARNING
from rocketmq_spark.errors import MQClientException, OptionError, TopicRouteStaleException
from rocketmq_spark.model.message import Message, MessageQueue
from tests.support.cluster import SharedCluster, mqadmin
from tests.support.processes import wait_for
from tests.support.reading import fill, send_items

pytestmark = pytest.mark.integration

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def admin(cluster: SharedCluster) -> Iterator[Admin]:
    with Admin(cluster.name_server) as admin:
        yield admin


@pytest.fixture
def run(cluster: SharedCluster, capsys: Capture) -> Callable[..., Any]:
    """Run a command that succeeds on the shared cluster, and return its JSON."""

    def invoke(*arguments: str) -> Any:
        code = main([*arguments, "-n", cluster.name_server, "--json"])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        return json.loads(captured.out)

    return invoke


@pytest.fixture
def producer(cluster: SharedCluster) -> Iterator[Producer]:
    with Producer("admin-tests", name_server=cluster.name_server) as producer:
        yield producer


def stored(admin: Admin, topic: str) -> int:
    """Return the number of messages by the brokers' offsets."""
    return sum(row.messages for row in admin.offsets(topic))


def queues_and_permission_of(admin: Admin, topic: str, broker: str) -> tuple[int, int]:
    """Return the number of read queues and the permission of a broker, by the route."""
    (data,) = [data for data in admin.route(topic).queue_datas if data.broker_name == broker]
    return data.read_queue_nums, data.perm


def test_admin_commands_show_a_new_topic_from_creation_to_messages(
    run: Callable[..., Any], admin: Admin, topic: str
) -> None:
    created = run("create-topic", topic, "-q", "3", "--type", "normal")
    assert [(row["broker_name"], row["write_queues"], row["permission"]) for row in created] == [
        ("broker-0", 3, "rw"),
        ("broker-1", 3, "rw"),
    ]
    assert run("route", topic) == created
    receipts = [
        run("send", topic, f"body {number}", "--tags", f"t{number % 2}", "--keys", f"k{number}", "--property", "a=b")
        for number in range(4)
    ]
    wait_for(lambda: stored(admin, topic) == 4)
    counted = run("offsets", topic)
    assert len(counted) == 6
    assert sum(row["messages"] for row in counted) == 4
    peeked = run("peek", topic, "-c", "3")
    assert [row["body"] for row in peeked] == ["body 3", "body 2", "body 1"]
    for row, receipt in zip(peeked, reversed(receipts), strict=False):
        place = ("broker_name", "queue_id", "queue_offset")
        assert [row[name] for name in place] == [receipt[name] for name in place]
        assert row["properties"] == {"a": "b"}
    assert [row["body"] for row in run("peek", topic, "--tag", "t0")] == ["body 2", "body 0"]
    (listed,) = [row for row in run("topics") if row["topic"] == topic]
    assert listed == {
        "topic": topic,
        "message_type": "NORMAL",
        "queue_type": "SimpleCQ",
        "brokers": ["broker-0", "broker-1"],
        "queues": 6,
        "permission": "rw",
    }


def test_offsets_equal_those_of_mqadmin(
    admin: Admin, cluster: SharedCluster, producer: Producer, topic: str, tmp_path: Path
) -> None:
    admin.create_topic(topic, 2)
    for number in range(7):
        producer.send(Message.of(topic, b"%d" % number))
    wait_for(lambda: stored(admin, topic) == 7)
    table = mqadmin(tmp_path, "topicStatus", "-n", cluster.name_server, "-t", topic)
    lines = re.findall(r"^(broker-\d)\s+(\d+)\s+(\d+)\s+(\d+)", table, re.MULTILINE)
    found = [
        (row.broker_name, str(row.queue_id), str(row.min_offset), str(row.max_offset)) for row in admin.offsets(topic)
    ]
    assert found == sorted(lines)
    assert queue_offsets([cluster.name_server], topic) == list(admin.offsets(topic))


def test_inner_batches_are_counted_and_shown_one_by_one(admin: Admin, producer: Producer, topic: str) -> None:
    admin.create_topic(topic, 1, inner=True)
    producer.send_batch([Message.of(topic, body, tags=body.decode()[0]) for body in (b"one", b"two", b"three")])
    wait_for(lambda: stored(admin, topic) == 3)
    assert [row.body for row in admin.peek(topic, 2)] == [b"three", b"two"]
    # The broker does not see the tags of the messages in an inner batch, so it filters nothing.
    assert [row.body for row in admin.peek(topic, tag="t")] == [b"three", b"two"]
    assert [row.body for row in admin.peek(topic, tag="o || x")] == [b"one"]
    (listed,) = [row for row in admin.topics() if row.topic == topic]
    assert listed.queue_type == "BatchCQ"


def test_peek_reports_queues_without_read_permission_and_shows_the_others(
    admin: Admin, producer: Producer, cluster: SharedCluster, topic: str
) -> None:
    admin.create_topic(topic, 2)
    for number in range(8):
        producer.send(Message.of(topic, b"%d" % number))
    wait_for(lambda: stored(admin, topic) == 8)
    broker = cluster.brokers[0]

    def has(reads: int, perm: int) -> bool:
        return queues_and_permission_of(admin, topic, broker.name) == (reads, perm)

    for reads, perm, left, said in (
        (2, 2, 4, "2 queues of broker-0: broker broker-0 rejects"),
        (1, 6, 6, "1 queue of broker-0: broker broker-0 rejects"),
    ):
        admin.transport.create_topic(broker.address, topic, 2, perm, 5.0, read_queue_nums=reads)
        wait_for(partial(has, reads, perm))
        peeked = admin.peek(topic)
        assert len(peeked) == left
        assert [text.startswith(said) for text in peeked.missing] == [True]
        assert stored(admin, topic) == 8


def test_offsets_and_peek_reject_static_topic(admin: Admin, cluster: SharedCluster, topic: str, tmp_path: Path) -> None:
    mqadmin(
        tmp_path, "updateStaticTopic", "-n", cluster.name_server, "-t", topic, "-qn", "8", "-b", "broker-0,broker-1"
    )
    wait_for(lambda: admin.route(topic).static_topic)
    for ask in (admin.offsets, admin.peek):
        with pytest.raises(OptionError, match="static"):
            ask(topic)


def test_an_empty_topic_holds_nothing(admin: Admin, topic: str) -> None:
    admin.create_topic(topic, 1)
    assert admin.offsets(topic).notes == ("0 messages in 2 queues",)
    assert len(admin.peek(topic)) == 0


def test_existing_topic_is_changed_only_with_update(admin: Admin, topic: str) -> None:
    admin.create_topic(topic, 1)
    with pytest.raises(MQClientException, match="exists already"):
        admin.create_topic(topic, 2)
    changed = admin.create_topic(topic, 2, message_type="FIFO", update=True)
    assert {data.write_queue_nums for data in changed.queue_datas} == {2}
    assert [row.message_type for row in admin.topics() if row.topic == topic] == ["FIFO"]
    with pytest.raises(MQClientException, match=r"--update .* sets its queues to 3 .* and keeps its message type"):
        admin.create_topic(topic, 3)
    admin.create_topic(topic, 3, update=True)
    assert [(row.message_type, row.queues) for row in admin.topics() if row.topic == topic] == [("FIFO", 6)]


def test_system_topics_are_listed_on_request(admin: Admin) -> None:
    system_topics = {row.topic for row in admin.topics(all=True)} - {row.topic for row in admin.topics()}
    assert {"TBW102", "broker-0", "DefaultCluster", "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"} <= system_topics


def test_brokers_command_reports_version_disk_and_traffic(run: Callable[..., Any], cluster: SharedCluster) -> None:
    found = run("brokers")
    assert [(row["broker_name"], row["address"]) for row in found] == [
        (broker.name, broker.address) for broker in cluster.brokers
    ]
    for row in found:
        assert (row["version"], row["permission"], row["cluster"]) == ("5.5.0", "rw", "DefaultCluster")
        assert 0 < row["disk_used_percent"] < 100
        assert row["messages_in_today"] >= 0


def test_doctor_reports_ok_for_cluster_topic_and_proxy(
    admin: Admin, cluster: SharedCluster, topic: str, capsys: Capture
) -> None:
    admin.create_topic(topic, 2, message_type="DELAY")
    found = examine(cluster.name_server, topic=topic, endpoints=cluster.endpoints)
    servers = [one for one in found if one.check.split()[0] in ("name", "broker", "topic", "proxy")]
    assert {one.state for one in servers} == {OK}
    assert [one.finding for one in servers[3:]] == [
        "4 queues on broker-0, broker-1; DELAY messages, queues SimpleCQ",
        f"answers gRPC; topic {topic} accepts DELAY messages",
    ]
    assert all("clock as on this machine" in one.finding for one in servers[1:3])


def test_doctor_reports_ok_for_proxy_without_topic(cluster: SharedCluster) -> None:
    found = examine(endpoints=cluster.endpoints, environ={"PATH": ""})
    assert [(one.state, one.finding) for one in found if one.check.startswith("proxy")] == [(OK, "answers gRPC")]


def test_a_missing_topic_is_made_by_a_write_but_not_by_a_proxy(cluster: SharedCluster, topic: str) -> None:
    found = examine(cluster.name_server, topic=topic, endpoints=cluster.endpoints)
    states = {one.check.split()[0]: one.state for one in found}
    assert (states["topic"], states["proxy"]) == (WARNING, FAILED)
    with Admin(cluster.name_server) as admin, pytest.raises(TopicRouteStaleException, match="does not exist"):
        admin.peek(topic)


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("broker", "a broker listens there"),
        ("proxy", "a RocketMQ 5 proxy listens there"),
        ("grpc", "a gRPC server listens, as on a proxy's port 8081"),
    ],
)
def test_address_of_another_server_is_a_one_line_error(
    cluster: SharedCluster, which: str, said: str, capsys: Capture
) -> None:
    addresses = {"broker": cluster.brokers[0].address, "proxy": cluster.proxy.address, "grpc": cluster.endpoints}
    assert main(["topics", "-n", addresses[which]]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"rocketmq-spark: name server {addresses[which]}: {said}")
    assert captured.err.count("\n") == 1


def test_proxy_remoting_port_works_as_name_server_for_admin(cluster: SharedCluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, 1)
    with Admin(cluster.proxy.address) as by_proxy:
        assert by_proxy.offsets(topic).notes == ("0 messages in 2 queues",)
    with Producer("admin-tests", name_server=cluster.name_server) as producer:
        producer.send(Message.of(topic, b"one"))
    wait_for(lambda: stored(admin, topic) == 1)
    with Admin(cluster.proxy.address) as by_proxy:
        assert [row.body for row in by_proxy.peek(topic)] == [b"one"]


def test_peek_marks_unreadable_messages(
    run: Callable[..., Any], admin: Admin, cluster: SharedCluster, topic: str
) -> None:
    stored = fill(cluster, topic)
    peeked = admin.peek(topic, 20)
    assert [row.body for row in reversed(peeked)] == [body for body, _ in stored]
    assert [row.unreadable is not None for row in reversed(peeked)] == [sys_flag != 0 for _, sys_flag in stored]
    assert "compression type 7" in repr(peeked)
    assert [row.unreadable is None for row in admin.peek(topic, 2, tag="a")] == [True, False]
    assert [bool(row["unreadable"]) for row in run("peek", topic, "-c", "2")] == [False, True]


def test_a_peek_shows_batch_items_with_unreadable_properties(
    run: Callable[..., Any], admin: Admin, cluster: SharedCluster, topic: str
) -> None:
    admin.create_topic(topic, 1)
    texts = [
        b"TAGS\x01a\x02",
        b"TAGS\x01a\x02region\x01caf\xe9\x02",
        b"TAGS\x01a\x01b\x02empty\x01\x02",
        b"TAGS\x01a\x02no separator\x02",
        b"",
    ]
    queue = MessageQueue(topic, cluster.brokers[0].name, 0)
    send_items(cluster, queue, [(b"item %d" % number, text) for number, text in enumerate(texts)])
    rows = sorted(admin.peek(topic, 20), key=lambda row: row.queue_offset)
    assert [row.body for row in rows] == [b"item %d" % number for number in range(len(texts))]
    assert [row.tags for row in rows] == ["a", None, "a\x01b", None, None]
    assert [row.unreadable is not None for row in rows] == [False, True, False, True, False]
    assert "not valid UTF-8" in str(rows[1].unreadable)
    assert "'no separator'" in str(rows[3].unreadable)
    # The broker filters by the tag that the Java client reads; the reader does not know this tag.
    assert sorted(row.queue_offset for row in admin.peek(topic, 20, tag="a")) == [0, 1, 3]
    assert len(run("peek", topic, "-c", "20")) == len(texts)
