"""`Admin` against servers that answer, and one that does not."""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark import Admin
from rocketmq_spark.admin import BrokerInfo, QueueOffsets, TopicInfo, queue_offsets
from rocketmq_spark.admin.brokers import clock_of
from rocketmq_spark.admin.topics import NewTopic, known_to_all
from rocketmq_spark.cli.doctor.examine import check_topic
from rocketmq_spark.errors import (
    MQClientException,
    NoBrokersException,
    OptionError,
    RemotingCertificateException,
    RemotingConnectException,
    TopicRouteStaleException,
)
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.route import BrokerData, QueueData, TopicRouteData
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.testing import FakeCluster, Reply
from rocketmq_spark.testing.fake_storage import TopicSettings
from tests.support.fakes import broker, name_server
from tests.support.peer import Peer, Session, refused_address
from tests.support.transports import Authority
from tests.unit.conftest import FIGURES

SECRETS: dict[str, Any] = {"access_key": "someone", "secret_key": "hush-hush", "security_token": "token-token"}


@pytest.fixture
def admin(fake: FakeCluster) -> Iterator[Admin]:
    with Admin(fake.name_server) as admin:
        yield admin


def test_topics_have_their_types_brokers_queues_and_permission(admin: Admin, fake: FakeCluster) -> None:
    found = admin.topics()
    assert list(found) == [
        TopicInfo("half", "NORMAL", "SimpleCQ", ("a", "gone"), 2, "r/rw"),
        TopicInfo("orders", "FIFO", "BatchCQ", ("a",), 2, "rw"),
    ]
    # A broker that cannot be asked is named.
    assert [text.partition(":")[0] for text in found.missing] == ["the types of topics on gone"]


def test_topics_without_a_route_are_counted_by_reason(fake: FakeCluster) -> None:
    for number in range(20):
        fake.create_topic(f"t{number}")

    def refusing(request: RemotingCommand) -> Reply | None:
        topic = request.ext_fields["topic"]
        return None if topic == "orders" else Reply.code(13 if topic == "half" else 16, f"not {topic}")

    fake.name_servers[0].always[RequestCode.GET_ROUTEINFO_BY_TOPIC] = refusing
    with Admin(fake.name_server) as admin:
        found = admin.topics()
    assert [row.topic for row in found] == ["orders"]
    many, one = sorted(text for text in found.missing if text.startswith(("topic ", "20 ")))
    assert many.startswith("20 topics, including t0: ")
    assert one.startswith("topic half: ")


def test_system_topics_are_listed_on_request(admin: Admin, fake: FakeCluster) -> None:
    system_topics: tuple[str, ...] = (
        "a",
        "DefaultCluster",
        "DefaultCluster_REPLY_TOPIC",
        "TBW102",
        "%RETRY%group",
        "rmq_sys_wheel_timer",
    )
    system_topics = (*system_topics, "%DLQ%group")
    # Without this, brokers do not register TBW102.
    fake.brokers["a"].settings.auto_create_topic = True
    for name in system_topics:
        fake.create_topic(name)
    assert {row.topic for row in admin.topics()} == {"half", "orders"}
    assert {row.topic for row in admin.topics(all=True)} == {"half", "orders", *system_topics}


def test_topics_of_a_namespace_are_shown_alone_and_without_it(fake: FakeCluster) -> None:
    for name in ("mine%orders", "other%orders"):
        fake.create_topic(name, 2)
    with Admin(fake.name_server, namespace="mine") as admin:
        assert [row.topic for row in admin.topics()] == ["orders"]
        assert [row.queue.topic for row in admin.offsets("orders")] == ["orders", "orders"]
    assert fake.brokers["a"].requests[-1].ext_fields["topic"] == "mine%orders"


def test_requests_of_an_admin_in_a_namespace_are_about_its_topics(fake: FakeCluster) -> None:
    # The broker that does not answer is in this route only.
    del fake.name_servers[0].routes["half"]
    for name in ("mine%orders", "mine%a", "%RETRY%mine%group"):
        fake.create_topic(name, 2)
    fake.brokers["a"].storage.store.put(
        MessageQueue("mine%orders", "a", 0), [Message.of("mine%orders", b"one")], 1_700_000_000.5
    )
    with Admin(fake.name_server, namespace="mine") as admin:
        # The topic with the name of a broker has no namespace.
        assert [row.topic for row in admin.topics()] == ["a", "orders"]
        assert [row.topic for row in admin.topics(all=True)] == ["%RETRY%group", "a", "orders"]
        assert [row.body for row in admin.peek("orders")] == [b"one"]
        assert [check.state for check in check_topic(admin, "orders", 5.0)] == ["ok"]
        servers = (fake.name_servers[0], fake.brokers["a"])
        for server in servers:
            server.requests.clear()
        admin.peek("orders", consumer_group="group")
        admin.create_topic("bills", 1)
    fields = [request.ext_fields for server in servers for request in server.requests]
    assert {one["consumerGroup"] for one in fields if "consumerGroup" in one} == {"mine%group"}
    assert {one["topic"] for one in fields if "topic" in one} == {"mine%orders", "mine%bills"}
    with Admin(fake.name_server, namespace="mine") as admin:
        with pytest.raises(TopicRouteStaleException, match=r"topic ordres does not exist: .*; did you mean orders\?"):
            admin.route("ordres")
        with pytest.raises(MQClientException, match=r"topic 'mine%t{123}' has 128 characters"):
            admin.create_topic("t" * 123)


def test_unknown_topic_error_suggests_a_similar_topic(admin: Admin) -> None:
    with pytest.raises(TopicRouteStaleException, match=r"topic ordres does not exist: .*; did you mean orders\?"):
        admin.route("ordres")
    with pytest.raises(
        TopicRouteStaleException, match=r"topic xyz does not exist: .*; create it: rocketmq-spark create-topic xyz$"
    ):
        admin.offsets("xyz")
    for name in ("*", "no such"):
        with pytest.raises(TopicRouteStaleException, match=rf"; {re.escape(repr(name))} is not a valid name: "):
            admin.route(name)


def test_missing_brokers_are_reported_instead_of_a_missing_topic() -> None:
    silent = refused_address()
    for others, said in (
        ("", "knows no broker: start one with"),
        (silent, f"no broker, while {silent} did not answer: s"),
    ):
        with name_server() as empty, Admin(f"{empty.address};{others}") as admin:
            with pytest.raises(NoBrokersException, match=said) as raised:
                admin.route("orders")
            assert "create-topic" not in str(raised.value)


def test_unknown_topic_error_names_name_servers_that_did_not_answer(fake: FakeCluster) -> None:
    silent = refused_address()
    with Admin(f"{fake.name_server};{silent}") as admin:
        with pytest.raises(TopicRouteStaleException) as raised:
            admin.route("xyz")
        assert str(raised.value) == (
            f"topic xyz does not exist: {fake.name_server} returned no route, while {silent} did not answer and may "
            "know one; create it: rocketmq-spark create-topic xyz"
        )


def test_offsets_list_every_queue(admin: Admin) -> None:
    found = admin.offsets("orders")
    queues = [MessageQueue("orders", "a", number) for number in (0, 1)]
    assert list(found) == [QueueOffsets(queues[0], 0, 2), QueueOffsets(queues[1], 0, 1)]
    assert found.notes == ("3 messages in 2 queues",)
    assert found.missing == ()


def test_queues_of_an_unreachable_broker_are_missing_and_others_listed(admin: Admin, fake: FakeCluster) -> None:
    found = admin.offsets("half")
    assert [row.queue.broker_name for row in found] == ["a"]
    (missing,) = found.missing
    assert missing.startswith("1 queue of gone: ")
    with pytest.raises(RemotingConnectException):
        queue_offsets([fake.name_server], "half")


def test_offsets_fail_if_no_broker_answers(admin: Admin, fake: FakeCluster) -> None:
    gone = BrokerData("gone", {0: refused_address()}, "DefaultCluster")
    fake.name_servers[0].routes["lost"] = TopicRouteData((QueueData("gone", 2, 2, 6),), (gone,))
    with pytest.raises(RemotingConnectException):
        admin.offsets("lost")


def test_the_newest_messages_come_first_with_bytes_and_own_properties(admin: Admin, fake: FakeCluster) -> None:
    later = Message.of("orders", b"latest", keys="a b", properties={"n": "1"})
    fake.brokers["a"].storage.store.put(MessageQueue("orders", "a", 1), [later], 1_700_000_001.0)
    newest, second = admin.peek("orders", 2)
    assert newest.body == b"latest"
    assert (newest.queue_id, newest.queue_offset, newest.keys, newest.tags) == (1, 1, "a b", None)
    assert newest.store_time == datetime(2023, 11, 14, 22, 13, 21, tzinfo=timezone.utc)
    assert newest.properties == {"n": "1"}
    assert second.body == b"three \xff"


def test_peek_pulls_only_the_ends_of_queues(admin: Admin, fake: FakeCluster) -> None:
    many = [Message.of("orders", b"%d" % number) for number in range(100)]
    fake.brokers["a"].storage.store.put(MessageQueue("orders", "a", 0), many, 1_700_000_002.0)
    assert [row.body for row in admin.peek("orders", 2)] == [b"99", b"98"]
    pulls = [request.ext_fields for request in fake.brokers["a"].requests if request.code == 11]
    assert {int(fields["queueOffset"]) for fields in pulls if fields["queueId"] == "0"} == {100}
    assert {fields["consumerGroup"] for fields in pulls} == {"TOOLS_CONSUMER"}


def test_a_peek_by_tag_shows_that_tag_alone(admin: Admin) -> None:
    found = admin.peek("orders", tag="t1")
    assert [row.body for row in found] == ["zwei ü".encode()]
    assert found.notes == ("only the newest messages of each queue were searched for the tag",)


def test_peek_at_an_empty_topic_reports_it(admin: Admin) -> None:
    assert admin.peek("half").notes == ("the topic holds no messages",)


@pytest.mark.parametrize(("count", "tag", "text"), [(0, None, "allowed is"), (1, " || ", "has no tag: give one")])
def test_peek_without_count_or_tag_is_rejected(admin: Admin, count: int, tag: str | None, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        admin.peek("orders", count, tag=tag)


def test_brokers_are_listed_with_facts_and_unreachable_ones_are_named(admin: Admin, fake: FakeCluster) -> None:
    found = admin.brokers()
    booted = datetime.fromtimestamp(1_700_000_000, timezone.utc)
    address = fake.brokers["a"].address
    assert list(found) == [BrokerInfo("a", 0, "DefaultCluster", address, "5.5.0", "rw", 42.0, 100, 0, booted)]
    assert [text.partition(" (")[0] for text in found.missing] == ["gone"]


def test_facts_that_a_broker_does_not_report_are_unknown(admin: Admin, fake: FakeCluster) -> None:
    broker = fake.brokers["a"]
    broker.figures.update(dict.fromkeys(FIGURES))
    broker.config["brokerPermission"] = None
    unknown = (None,) * 6
    assert admin.brokers()[0] == BrokerInfo("a", 0, "DefaultCluster", broker.address, *unknown)


@pytest.mark.parametrize("much", ["9" * 18, "9" * 19, "9" * 5000])
def test_figure_out_of_range_is_unknown(admin: Admin, fake: FakeCluster, much: str) -> None:
    fake.brokers["a"].figures |= {
        "bootTimestamp": much,
        "commitLogDiskRatio": much,
        "runtime": f"[ {much} days, 2 hours, 3 minutes, 4 seconds ]",
    }
    fake.brokers["a"].config["brokerPermission"] = much
    row = admin.brokers()[0]
    assert (row.running_since, row.version) == (None, "5.5.0")
    figures = fake.brokers["a"].figures
    assert clock_of({name: text for name, text in figures.items() if text is not None}) is None


def test_broker_clock_is_its_boot_time_plus_runtime() -> None:
    assert clock_of({"bootTimestamp": "1000", "runtime": "[ 1 days, 2 hours, 3 minutes, 4 seconds ]"}) == 93_785.0
    assert clock_of({"bootTimestamp": "1000"}) is None


def test_new_topic_exists_on_every_master_when_create_topic_returns(fake: FakeCluster) -> None:
    del fake.name_servers[0].routes["half"]
    with Admin(fake.name_server) as admin:
        created = admin.create_topic("new", 3, message_type="delay", inner=True)
    assert created == fake.name_servers[0].route("new")
    assert created.queue_datas == (QueueData("a", 3, 3, 6),)
    attributes = {"message.type": "DELAY", "queue.type": "BatchCQ"}
    assert fake.brokers["a"].storage.topics["new"] == TopicSettings(3, 3, attributes=attributes)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"message_type": "delay"}, r"\+message\.type=DELAY"),
        ({"inner": True}, r"\+queue\.type=BatchCQ"),
        ({"message_type": "fifo", "compaction": True}, r"\+message\.type=FIFO,\+cleanup\.policy=COMPACTION"),
        ({"message_type": "fifo"}, None),
        ({}, None),
    ],
)
def test_topics_that_old_brokers_do_not_have_are_refused(
    fake: FakeCluster, given: dict[str, Any], refused: str | None
) -> None:
    del fake.name_servers[0].routes["half"]
    fake.brokers["a"].figures["brokerVersionDesc"] = "V4_9_7"
    with Admin(fake.name_server) as admin:
        if refused is None:
            admin.create_topic("new", 1, **given)
        else:
            with pytest.raises(MQClientException, match=f"broker a has RocketMQ 4.9.7, which ignores .* {refused}"):
                admin.create_topic("new", 1, **given)
    assert ("new" in fake.brokers["a"].storage.topics) == (refused is None)


def test_existing_topic_is_changed_only_with_update(fake: FakeCluster) -> None:
    del fake.name_servers[0].routes["half"]
    with Admin(fake.name_server) as admin:
        with pytest.raises(
            MQClientException,
            match=r"topic orders exists already \(a: 2 queues\): .*--update \(in Python update=True\)",
        ):
            admin.create_topic("orders", 4)
        assert fake.brokers["a"].storage.topics["orders"].write_queue_nums == 2
        assert admin.create_topic("orders", 4, update=True).queue_datas[0].write_queue_nums == 4


@pytest.mark.parametrize("old", [QueueData("a", 2, 4, 6), QueueData("a", 4, 4, 4)])
def test_route_from_before_the_change_is_not_returned(fake: FakeCluster, old: QueueData) -> None:
    del fake.name_servers[0].routes["half"]
    server = fake.name_servers[0]
    now = server.route("orders")
    assert now is not None
    server.routes["orders"], asked = replace(now, queue_datas=(old,)), itertools.count(1)

    def late(_: RemotingCommand) -> None:
        if next(asked) == 4:
            del server.routes["orders"]

    server.always[RequestCode.GET_ROUTEINFO_BY_TOPIC] = late
    with Admin(fake.name_server) as admin:
        created = admin.create_topic("orders", 4, update=True)
    assert created.queue_datas == (QueueData("a", 4, 4, 6),)


def test_topic_on_read_only_broker_counts_as_created(fake: FakeCluster) -> None:
    now = fake.name_servers[0].route("orders")
    assert now is not None
    closed = replace(now, queue_datas=(QueueData("a", 4, 4, 4),))
    new = NewTopic("orders", 4, None, inner=False)
    with Admin(fake.name_server) as admin:
        fake.name_servers[0].routes["orders"] = closed
        times = iter([0.0, 14.0])
        found = known_to_all(
            admin.transport, new, frozenset("a"), [fake.name_server], 5.0, 6, clock=lambda: next(times, 15.1)
        )
    assert found == closed


def test_longer_timeout_is_named_in_the_error(fake: FakeCluster) -> None:
    new = NewTopic("orders", 4, None, inner=False)
    times = iter([0.0])
    with Admin(fake.name_server) as admin, pytest.raises(MQClientException, match="after 20 s not every name server"):
        known_to_all(admin.transport, new, frozenset("a"), [fake.name_server], 20.0, 6, clock=lambda: next(times, 20.1))


def test_brokers_that_did_not_make_a_topic_are_named(admin: Admin) -> None:
    text = r"creating topic new with 8 queues failed on gone: .*\. It succeeded on a$"
    with pytest.raises(MQClientException, match=text):
        admin.create_topic("new")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"topic": "x y"}, "illegal character"),
        ({"topic": "TBW102"}, "the name is reserved for RocketMQ"),
        ({"topic": "new", "queues": 50_001}, "with 50001 queues on each of 2 brokers: .* at most 100000 queues in all"),
        ({"topic": "new", "queues": 0}, "with 0 queues: allowed are integers from 1 on"),
        ({"topic": "new", "queues": "8"}, "with '8' queues: allowed are integers from 1 on"),
        ({"topic": "new", "queues": True}, "with True queues: allowed are integers from 1 on"),
        ({"topic": "new", "inner": "no"}, "with inner='no': allowed is True or False"),
        ({"topic": "new", "update": "no"}, "with update='no': allowed is True or False"),
        ({"topic": "new", "message_type": 1}, "allowed are NORMAL, FIFO, DELAY, TRANSACTION"),
        ({"topic": "new", "message_type": "LATE"}, "allowed are NORMAL, FIFO, DELAY, TRANSACTION"),
        ({"topic": "new", "cluster": "other"}, "unknown cluster 'other': the name servers know DefaultCluster"),
    ],
)
def test_invalid_new_topics_are_rejected(admin: Admin, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((MQClientException, OptionError), match=text):
        admin.create_topic(**arguments)


def test_create_topic_requires_a_cluster_name_if_there_are_several(admin: Admin, fake: FakeCluster) -> None:
    other = BrokerData("b", {0: fake.brokers["a"].address}, "second")
    fake.name_servers[0].routes["far"] = TopicRouteData((QueueData("b", 1, 1, 6),), (other,))
    with pytest.raises(OptionError, match=r"several clusters \(DefaultCluster, second\): choose one with --cluster"):
        admin.create_topic("new")


def test_server_that_is_no_name_server_is_reported() -> None:
    refused = pytest.raises(MQClientException, match="is no name server")
    with broker() as other, Admin(other.address) as admin, refused:
        admin.topics()


def test_unreachable_name_server_is_an_error_that_names_it() -> None:
    address = refused_address()
    with Admin(address) as admin, pytest.raises(RemotingConnectException, match=address):
        admin.brokers()


def test_rejected_certificate_is_reported_like_for_a_producer(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with Peer(Session.serve, tls=authority.context("server", "DNS:elsewhere.example")) as peer:
        settings: dict[str, Any] = {"use_tls": True, "tls_ca_file": str(authority.ca_file)}
        with Admin(peer.address, **settings) as admin, pytest.raises(RemotingCertificateException, match="must name"):
            admin.brokers()


def test_options_are_checked_and_named() -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"name_server": "nonsense"}, "option name_server is 'nonsense'"),
        ({"name_server": "a:1", "access_key": "x"}, "access_key is given without secret_key"),
        ({"name_server": "a:1", "tls_server_name": "x"}, "tls_server_name is given without use_tls"),
        ({"name_server": "a:1", "timeout": 0}, "timeout is 0"),
        (
            {"name_server": "a:1", "acess_key": "x"},
            "unknown option acess_key; the options of the connection are access_key, ",
        ),
        ({"name_server": "a:1", "subscribe": "x"}, "unknown option subscribe; "),
    )
    for arguments, text in cases:
        with pytest.raises(OptionError, match=text):
            Admin(**arguments)


def test_environment_variable_is_the_default_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    with pytest.raises(OptionError, match="NAMESRV_ADDR"):
        Admin()
    monkeypatch.setenv("NAMESRV_ADDR", "a:9876;b:9876")
    with Admin() as admin:
        assert admin.options.connection.name_server == ("a:9876", "b:9876")


def test_secrets_are_in_no_repr() -> None:
    with Admin("a:9876", **SECRETS) as admin:
        shown = f"{admin!r} {admin.options!r}"
    assert repr(admin) == "<Admin closed a:9876>"
    assert not [secret for secret in ("hush-hush", "token-token") if secret in shown]


def test_admin_cannot_be_pickled() -> None:
    with Admin("a:9876") as admin, pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(admin)
