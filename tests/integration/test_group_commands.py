"""Consumer groups on real brokers: their offsets and members, other offsets for them, and the end of a topic."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import pytest

from rocketmq_spark import Admin
from rocketmq_spark.cli.app import main
from rocketmq_spark.errors import MQClientException, OptionError, TopicRouteStaleException
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import SharedCluster
from tests.support.processes import PATIENCE, wait_for
from tests.support.reading import read_topic

pytestmark = pytest.mark.integration

CLIENT = "10.0.0.1@1234#567890123"
RESET_OFFSET = 222  # INVOKE_BROKER_TO_RESET_OFFSET, of mqadmin resetOffsetByTime


@pytest.fixture
def admin(cluster: SharedCluster) -> Iterator[Admin]:
    with Admin(cluster.name_server) as admin:
        yield admin


@pytest.fixture
def application(cluster: SharedCluster) -> Iterator[RemotingTransport]:
    with RemotingTransport([cluster.name_server]) as transport:
        yield transport


@pytest.fixture
def queues(cluster: SharedCluster, make_topic: Callable[..., str], topic: str) -> list[MessageQueue]:
    """Two queues on each of two brokers; those of the first broker have three messages each."""
    make_topic("NORMAL", queues=2)
    found = [MessageQueue(topic, broker.name, number) for broker in cluster.brokers for number in range(2)]
    with Producer("pg", name_server=cluster.name_server) as producer:
        for queue in found[:2]:
            for _ in range(3):
                producer.send(Message(topic, b"x"), queue=queue)
    read_topic(cluster.name_server, topic, 6)
    return found


@pytest.fixture
def group(cluster: SharedCluster, application: RemotingTransport, queues: list[MessageQueue]) -> str:
    """A group that has a member at both brokers, and has committed offset 2 of the first queue and 0 of the third."""
    name = f"group-{queues[0].topic}"
    for broker in cluster.brokers:
        application.register_consumer(CLIENT, name, broker.address, 5.0)
    addresses = {broker.name: broker.address for broker in cluster.brokers}
    for queue, offset in ((queues[0], 2), (queues[2], 0)):
        application.update_consumer_offset(queue, name, offset, addresses[queue.broker_name], 5.0)
    return name


@pytest.fixture
def leave(cluster: SharedCluster, application: RemotingTransport, group: str, admin: Admin) -> Callable[[], None]:
    def close() -> None:
        application.close()
        wait_for(lambda: not admin.group(group).members)

    return close


def test_group_has_the_lag_of_each_queue_and_its_members(
    cluster: SharedCluster, admin: Admin, queues: list[MessageQueue], group: str
) -> None:
    found = admin.group(group)
    assert [(row.queue, row.read_offset, row.max_offset, row.messages) for row in found.queues] == [
        (queues[0], 2, 3, 1),
        (queues[1], None, 3, 3),
        (queues[2], 0, 0, 0),
        (queues[3], None, 0, 0),
    ]
    until = found.queues[0].read_until
    assert until is not None
    assert abs(time.time() - until.timestamp()) < PATIENCE
    assert found.queues.notes == ("4 messages not read in 4 queues",)
    [member] = found.members
    assert (member.client_id, member.language) == (CLIENT, "PYTHON")
    assert sorted(member.brokers) == sorted(broker.name for broker in cluster.brokers)
    assert CLIENT in repr(found)
    assert CLIENT in found._repr_html_()


def test_group_has_the_lag_at_brokers_that_know_no_offset_of_it(
    cluster: SharedCluster, application: RemotingTransport, admin: Admin, queues: list[MessageQueue], topic: str
) -> None:
    group, second = f"group-{topic}", cluster.brokers[1]
    application.register_consumer(CLIENT, group, second.address, 5.0)
    application.update_consumer_offset(queues[2], group, 0, second.address, 5.0)
    found = [(row.queue, row.read_offset, row.messages) for row in admin.group(group).queues]
    assert found == [(queues[0], None, 3), (queues[1], None, 3), (queues[2], 0, 0), (queues[3], None, 0)]


def test_unknown_group_is_an_error(admin: Admin) -> None:
    with pytest.raises(MQClientException, match="no broker knows an offset or a member of the consumer group nobody"):
        admin.group("nobody")
    with pytest.raises(OptionError, match="group is 'no body'"):
        admin.group("no body")


def test_offsets_of_a_group_with_members_are_not_reset(
    admin: Admin, queues: list[MessageQueue], group: str, topic: str
) -> None:
    with pytest.raises(MQClientException, match=rf"its members would overwrite them\. Stop {CLIENT}, or wait"):
        admin.reset_offsets(group, topic, "earliest")
    planned = admin.reset_offsets(group, topic, "earliest", dry_run=True)
    assert planned.notes == ("nothing was committed", "the group has 1 members")
    assert admin.group(group).queues[0].read_offset == 2


def test_offsets_are_reset_to_ends_times_and_numbers(
    admin: Admin, queues: list[MessageQueue], group: str, topic: str, leave: Callable[[], None]
) -> None:
    leave()

    def offsets() -> list[int | None]:
        return [row.read_offset for row in admin.group(group).queues]

    planned = admin.reset_offsets(group, topic, "latest", dry_run=True)
    assert [(row.before, row.after) for row in planned] == [(2, 3), (None, 3), (0, 0), (None, 0)]
    assert offsets() == [2, None, 0, None]
    assert list(admin.reset_offsets(group, topic, "latest")) == list(planned)
    assert offsets() == [3, 3, 0, 0]
    admin.reset_offsets(group, topic, "earliest")
    assert offsets() == [0, 0, 0, 0]
    admin.reset_offsets(group, topic, datetime.now(timezone.utc))
    assert offsets() == [3, 3, 0, 0]
    by_broker: dict[str, dict[str, int]] = {}
    for number, queue in enumerate(queues):
        by_broker.setdefault(queue.broker_name, {})[str(queue.queue_id)] = 1 if number < 2 else 0
    admin.reset_offsets(group, topic, json.dumps({topic: by_broker}))
    assert offsets() == [1, 1, 0, 0]
    by_broker[queues[0].broker_name]["0"] = 4
    with pytest.raises(OptionError, match=r"resetting .* to offset 4: the queue ends at 3"):
        admin.reset_offsets(group, topic, json.dumps({topic: by_broker}))
    for wrong in ("committed", "soon", True, -1, 1_764_230_400, datetime(2026, 1, 1)):
        with pytest.raises(OptionError, match="resetting offsets to "):
            admin.reset_offsets(group, topic, wrong)
    assert offsets() == [1, 1, 0, 0]


def test_offset_that_mqadmin_has_reset_is_reset_again(
    cluster: SharedCluster,
    application: RemotingTransport,
    admin: Admin,
    group: str,
    topic: str,
    leave: Callable[[], None],
) -> None:
    fields = {"topic": topic, "group": group, "timestamp": "0", "isForce": "true", "queueId": "0", "offset": "1"}
    answer = application.client.invoke(cluster.brokers[0].address, RESET_OFFSET, fields, b"", 5.0)
    assert answer.code == ResponseCode.SUCCESS
    leave()
    found = admin.reset_offsets(group, topic, "latest")
    assert (found.missing, [row.after for row in found]) == ((), [3, 3, 0, 0])
    assert [row.read_offset for row in admin.group(group).queues] == [3, 3, 0, 0]


def test_group_that_brokers_do_not_know_is_reported(admin: Admin, queues: list[MessageQueue], topic: str) -> None:
    found = admin.reset_offsets("never-seen", topic, "latest")
    assert len(found) == 0
    assert len(found.missing) == 4
    assert "Group never-seen not exist! (create the consumer group" in found.missing[0]


def run(cluster: SharedCluster, *arguments: str) -> int:
    return main([*arguments, "-n", cluster.name_server])


def test_commands_show_change_and_confirm(
    cluster: SharedCluster,
    queues: list[MessageQueue],
    group: str,
    topic: str,
    leave: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def output() -> Any:
        return json.loads(capsys.readouterr().out)

    assert run(cluster, "group", group, "--json") == 0
    shown = output()
    assert [row["read_offset"] for row in shown["queues"]] == [2, None, 0, None]
    assert [member["client_id"] for member in shown["members"]] == [CLIENT]
    assert run(cluster, "group", group) == 0
    assert "4 messages not read" in capsys.readouterr().out
    leave()
    assert run(cluster, "reset-offsets", group, topic, "--to", "latest") == 1
    assert "asks for a confirmation, and there is no terminal: give --yes" in capsys.readouterr().err
    assert run(cluster, "reset-offsets", group, topic, "--to", "2026-01-01T00:00:00Z", "--dry-run", "--json") == 0
    assert [row["after"] for row in output()] == [0, 0, 0, 0]
    assert run(cluster, "reset-offsets", group, topic, "--to", "latest", "--yes", "--json") == 0
    assert [row["after"] for row in output()] == [3, 3, 0, 0]


def answered(cluster: SharedCluster, answer: str, *arguments: str) -> tuple[int, str]:
    """Run a command in a terminal, give it an answer, and return its exit code and its stdout."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answer.encode() + b"\n")
        command = [sys.executable, "-m", "rocketmq_spark", *arguments, "-n", cluster.name_server]
        done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=PATIENCE, check=False)
    finally:
        os.close(ours)
        os.close(theirs)
    return done.returncode, done.stdout


def test_topic_is_deleted_only_after_a_confirmation(
    cluster: SharedCluster, admin: Admin, queues: list[MessageQueue], topic: str
) -> None:
    assert run(cluster, "delete-topic", topic) == 1
    assert answered(cluster, "n", "delete-topic", topic)[0] == 1
    assert sum(row.messages for row in admin.offsets(topic)) == 6
    code, shown = answered(cluster, "y", "delete-topic", topic)
    assert code == 0
    assert f"deleted {topic} on " in shown
    with pytest.raises(TopicRouteStaleException):
        admin.route(topic)
    with pytest.raises(TopicRouteStaleException):
        admin.transport.topic_config(cluster.brokers[0].address, topic, 5.0)
    with pytest.raises(TopicRouteStaleException):
        admin.delete_topic(topic)
    with pytest.raises(MQClientException, match="it belongs to RocketMQ"):
        admin.delete_topic("TBW102")
