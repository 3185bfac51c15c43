"""The queues of a read, and the servers it asks while brokers and name servers fail and return."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.errors import (
    MQBrokerException,
    OptionError,
    ReadError,
    RemotingConnectException,
    RemotingTimeoutException,
    RocketMQError,
    RouteNotFoundException,
)
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.route import QueueData, TopicRouteData
from rocketmq_spark.options.offsets import OffsetSpec
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode, broker_error
from rocketmq_spark.source.topic_queues import TopicQueues
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support import fakes
from tests.support.processes import PATIENCE
from tests.support.scripted import route
from tests.unit.source.conftest import A0, A1, B0, B1, Make, Reader

DOWN = RemotingConnectException("refused")


def test_all_queues_of_the_topics_are_found_in_order(make_reader: Make) -> None:
    reader = make_reader(subscribe=("orders", "bills"))
    reader.transport.routes["bills"] = route({"b": 1})
    assert reader.queues.look_up() == [MessageQueue("bills", "b", 0), A0, A1, B0, B1]


OPEN_A, OPEN_B = (QueueData(name, 2, 2, 6) for name in "ab")
NO_PERMISSION = (
    "broker {0} rejects reads, because the topic's permission there is {1}. .* -t {3} -b {0}:10911 -p {2}[.]"
)


@pytest.mark.parametrize("fail_on_data_loss", [True, False])
@pytest.mark.parametrize(
    ("datas", "text"),
    [
        ((QueueData("a", 2, 2, 2), OPEN_B), NO_PERMISSION.format("a", "w", 6, "orders")),
        ((OPEN_A, QueueData("b", 2, 2, 0)), NO_PERMISSION.format("b", "-", 4, "orders")),
        (
            (QueueData("a", 2, 2, 2), QueueData("b", 2, 2, 2)),
            r"broker a rejects .* also has queues that reject reads on b$",
        ),
        (
            (OPEN_A, QueueData("b", 1, 8, 6)),
            "rejects reads of the queues 1 to 7, .* 8 write queues .* 1 read .* -t orders -b b:10911 -r 8 -w 8 -p 6$",
        ),
    ],
)
def test_queues_that_brokers_do_not_let_readers_read_are_an_error(
    make_reader: Make, datas: tuple[QueueData, QueueData], text: str, *, fail_on_data_loss: bool
) -> None:
    reader = make_reader(fail_on_data_loss=fail_on_data_loss)
    old = reader.transport.routes["orders"]
    reader.transport.routes["orders"] = replace(old, queue_datas=datas)
    with pytest.raises(ReadError, match=f"^reading topic orders: .*{text}"):
        reader.queues.look_up()
    assert reader.queues.exists(A0)


def test_error_about_permissions_has_the_name_that_servers_know(make_reader: Make) -> None:
    reader = make_reader(namespace="ns")
    reader.transport.routes["orders"] = route({"a": 1}, perm=2)
    with pytest.raises(ReadError, match="reading topic orders: .*" + NO_PERMISSION.format("a", "w", 6, "ns%orders")):
        reader.queues.look_up()


def test_only_queues_of_the_read_must_be_readable(make_reader: Make) -> None:
    datas = QueueData("a", 1, 2, 6), QueueData("b", 4, 2, 4)
    for assigned in ({A0}, {A0, replace(B0, queue_id=3)}):
        reader = make_reader(subscribe=(), assign=frozenset(assigned))
        reader.transport.routes["orders"] = replace(reader.transport.routes["orders"], queue_datas=datas)
        assert reader.queues.look_up() == sorted(assigned)
    reader = make_reader(subscribe=(), assign=frozenset({A1}))
    reader.transport.routes["orders"] = replace(reader.transport.routes["orders"], queue_datas=datas)
    with pytest.raises(ReadError, match="broker a rejects reads of the queues 1 to 1"):
        reader.queues.look_up()


def test_name_server_that_does_not_know_the_topic_lacks_all_brokers(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader(name_server=("n:1", "n:2"))
    unknown = broker_error(ResponseCode.TOPIC_NOT_EXIST, "No topic route info", "n:1", "looking up the route")
    answers_of_name_servers(reader, {"n:1": unknown, "n:2": reader.transport.routes})  # type: ignore[dict-item]
    assert reader.queues.look_up() == [A0, A1, B0, B1]
    (warning,) = caplog.messages
    assert "name server n:1 does not list all queues of a, b, as another one does" in warning


@pytest.mark.parametrize(
    ("required", "text"),
    [
        (("b", "c", "a", "d"), "requireBrokers=b,c,a,d: .* the name servers list a, b, and not c, d. Start"),
        (3, "requireBrokers=3: .* the name servers list a, b, and not 3 brokers. Start"),
    ],
)
def test_read_without_a_required_broker_is_an_error(
    make_reader: Make, required: int | tuple[str, ...], text: str
) -> None:
    reader = make_reader(require_brokers=required)
    for plan in (reader.queues.look_up, reader.cluster.starts):
        with pytest.raises(ReadError, match=text):
            plan()
    # A running stream waits for its brokers.
    assert reader.queues.present() == [A0, A1, B0, B1]
    reader.transport.routes["orders"] = route(dict.fromkeys("abcd", 1))
    assert len(reader.queues.look_up()) == 4


def test_required_brokers_may_have_different_topics_of_the_read(make_reader: Make) -> None:
    reader = make_reader(subscribe=(), subscribe_pattern=".*", require_brokers=("a", "b"))
    reader.transport.routes = {"one": route({"a": 1}), "two": route({"b": 1})}
    assert len(reader.queues.look_up()) == 2
    reader = make_reader(subscribe=("one",), require_brokers=("a", "b"))
    reader.transport.routes["one"] = route({"a": 1})
    with pytest.raises(ReadError, match="the name servers list a, and not b"):
        reader.queues.look_up()


@pytest.mark.parametrize(("left", "text"), [({}, "no broker"), ({"one": route({"a": 1})}, "a")])
def test_broker_listed_before_the_start_is_not_a_required_one(
    make_reader: Make, left: dict[str, TopicRouteData], text: str
) -> None:
    reader = make_reader(subscribe=(), subscribe_pattern=".*", require_brokers=("a", "b"))
    reader.transport.routes = {"one": route({"a": 1}), "two": route({"b": 1})}
    # Trigger.AvailableNow requests the ends of all queues before the start.
    assert len(reader.queues.present()) == 2
    reader.transport.routes = left
    with pytest.raises(ReadError, match=f"the name servers list {text}, and not "):
        reader.queues.look_up()


def test_broker_of_the_order_configuration_that_is_not_listed_is_warned_of(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader()
    old = reader.transport.routes["orders"]
    reader.transport.routes["orders"] = replace(old, order_topic_conf="a:2;b:2")
    reader.queues.look_up()
    assert caplog.messages == []
    reader.transport.routes["orders"] = replace(old, order_topic_conf="a:2;\x1b[2J:2;b:2")
    reader.queues.look_up()
    (warning,) = caplog.messages
    assert "topic orders: its order configuration names \\x1b[2J, which no name server lists now" in warning


def answers_of_name_servers(reader: Reader, answers: dict[str, dict[str, Any]]) -> None:
    """Let each name server answer with its own routes, or with an error."""

    def of(name_server: str) -> dict[str, Any]:
        answer = answers[name_server]
        if isinstance(answer, RocketMQError):
            raise answer
        return answer

    def route_at(name_server: str, topic: str, timeout: float) -> Any:
        reader.transport.calls.append(("route_at", name_server, topic))
        return of(name_server)[topic]

    reader.transport.route_at = route_at
    reader.transport.topics_at = lambda name_server, timeout: frozenset(of(name_server))


def test_brokers_that_only_some_name_servers_list_are_read_and_warned_of(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader(name_server=("n:1", "n:2"))
    part = reader.transport.routes["orders"] = route({"a": 2})
    answers_of_name_servers(reader, {"n:1": {"orders": part}, "n:2": {"orders": route({"a": 2, "b": 2})}})
    assert reader.queues.look_up() == [A0, A1, B0, B1]
    assert reader.queues.brokers.address(B0) == "b:10911"
    (warning,) = caplog.messages
    assert "reading topic orders: name server n:1 does not list all queues of b, as another one does" in warning


@pytest.mark.parametrize("answers_first", ["n:1", "n:2"])
def test_queues_that_only_some_name_servers_list_are_read_and_warned_of(
    make_reader: Make, caplog: pytest.LogCaptureFixture, answers_first: str
) -> None:
    # No registration of a broker reaches n:1 since the topic has got more queues.
    routes = {"n:1": route({"a": 1, "b": 2}), "n:2": route({"a": 2, "b": 2})}
    reader = make_reader(name_server=("n:1", "n:2"))
    reader.transport.routes["orders"] = routes[answers_first]
    answers_of_name_servers(reader, {name: {"orders": answer} for name, answer in routes.items()})
    assert reader.queues.look_up() == [A0, A1, B0, B1]
    (warning,) = caplog.messages
    assert "name server n:1 does not list all queues of a, as another one does" in warning


def test_topics_that_only_some_name_servers_list_match_a_pattern(make_reader: Make) -> None:
    reader = make_reader(name_server=("n:1", "n:2"), subscribe=(), subscribe_pattern="o.*")
    whole = {"orders": route({"a": 1}), "others": route({"b": 1})}
    answers_of_name_servers(reader, {"n:1": {}, "n:2": whole})
    reader.transport.topics = lambda timeout: frozenset()
    reader.transport.routes = whole
    reader.transport.route_at = lambda name_server, topic, timeout: whole[topic]
    assert [queue.topic for queue in reader.queues.look_up()] == ["orders", "others"]


def test_name_server_that_does_not_answer_is_asked_and_named_once_per_plan(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader(name_server=("n:1", "n:2"), subscribe=(), subscribe_pattern=".*")
    reader.transport.routes |= {f"t{number}": route({"a": 1}) for number in range(5)}
    answers_of_name_servers(reader, {"n:1": reader.transport.routes, "n:2": DOWN})  # type: ignore[dict-item]
    for plan in range(1, 3):
        assert len(reader.queues.look_up()) == 9
        assert [text for text in caplog.messages if "name server n:2 gives no answer" in text] == caplog.messages
        assert len(caplog.messages) == plan
    assert {name_server for name_server, _ in reader.asked("route_at")} == {"n:1"}


def test_broker_that_is_listed_without_an_address_is_waited_for(make_reader: Make) -> None:
    reader = make_reader(read_timeout_ms=5_000)
    reader.addresses("b", {})
    reader.fill({A0: 2})
    with pytest.raises(ReadError, match=r"orders/b/.*within readTimeoutMs=5000.*no name server has a broker b"):
        reader.resolver.ranges(reader.queues.look_up())
    reader.while_asleep = lambda: reader.addresses("b", {0: "b:10911"})
    assert [part.queue for part in reader.resolver.ranges(reader.queues.look_up())] == [A0, A1, B0, B1]


def test_an_unknown_topic_is_an_error(make_reader: Make) -> None:
    with pytest.raises(RouteNotFoundException, match=r"reading topic nothing: .*No topic route info"):
        make_reader(subscribe=("nothing",)).queues.look_up()


def test_static_topic_is_a_permanent_error(make_reader: Make) -> None:
    reader = make_reader()
    reader.transport.routes["orders"] = replace(reader.transport.routes["orders"], static_topic=True)
    with pytest.raises(OptionError, match="static") as raised:
        reader.queues.look_up()
    assert raised.value.retriable is False


def test_assigned_queues_alone_are_read_and_must_be_there(make_reader: Make) -> None:
    reader = make_reader(subscribe=(), assign=frozenset({B1, A0}))
    assert reader.queues.look_up() == [A0, B1]
    with pytest.raises(OptionError, match="assign names orders/a/7"):
        make_reader(subscribe=(), assign=frozenset({replace(A0, queue_id=7), B1})).queues.look_up()


def test_topics_of_starting_offsets_are_the_default_subscription(make_reader: Make) -> None:
    spec = OffsetSpec(None, ((A0, 5),), receipt=True)
    assert make_reader(subscribe=(), starting_offsets=spec).queues.look_up() == [A0]


def test_a_pattern_matches_whole_names_of_topics_of_users(make_reader: Make) -> None:
    reader = make_reader(subscribe=(), subscribe_pattern="orders|.*TOPIC.*|%.*|TBW.*")
    names = ["orders2", "RMQ_SYS_TRANS_HALF_TOPIC", "SCHEDULE_TOPIC_XXXX", "%RETRY%g", "%DLQ%g", "TBW102", "MY_TOPIC"]
    reader.transport.routes |= {name: route({"a": 1}) for name in names}
    assert [queue.topic for queue in reader.queues.look_up()] == ["MY_TOPIC", "orders", "orders", "orders", "orders"]


def test_pattern_skips_topics_named_after_brokers_and_clusters(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader(subscribe=(), subscribe_pattern=".*")
    old = route({"a": 1})
    for name in ("a", "east", "b"):
        brokers = [replace(one, cluster="east") for one in old.broker_datas]
        reader.transport.routes[name] = replace(old, broker_datas=tuple(brokers))
    # Topic b is on broker a, so it is a topic of a user.
    assert {queue.topic for queue in reader.queues.look_up()} == {"orders", "b"}
    assert caplog.messages == []


def test_pattern_without_a_matching_topic_is_warned_of(make_reader: Make, caplog: pytest.LogCaptureFixture) -> None:
    assert make_reader(subscribe=(), subscribe_pattern="order").queues.look_up() == []
    assert "subscribePattern=order matches no existing topic" in caplog.text


def test_names_are_wrapped_on_the_wire_and_bare_in_results() -> None:
    with fakes.name_server({"ns%orders": route({"a": 1}), "orders": route({"a": 2})}) as peer:
        for namespace, topic, queues in (("ns", "ns%orders", [A0]), ("", "orders", [A0, A1])):
            options = SourceOptions.of(name_server=(peer.address,), subscribe=("orders",))
            with RemotingTransport([peer.address], namespace=namespace) as transport:
                assert TopicQueues(options, transport, time.monotonic).look_up() == queues
            request = peer.requests.pop()
            assert (request.code, request.ext_fields["topic"]) == (RequestCode.GET_ROUTEINFO_BY_TOPIC, topic)


def test_pattern_matches_only_topics_of_its_namespace() -> None:
    # Each listed in either order with a bare topic of the same name.
    names = [f"{prefix}t{number}" for number in range(20) for prefix in ("ns%", "", "other%")]
    with fakes.name_server({name: route({"a": 1}) for name in names}) as peer:
        options = SourceOptions.of(name_server=(peer.address,), subscribe_pattern="t.*|other.*")
        with RemotingTransport([peer.address], namespace="ns") as transport:
            queues = TopicQueues(options, transport, time.monotonic).look_up()
    assert [queue.topic for queue in queues] == sorted(f"t{number}" for number in range(20))


def test_failed_route_lookup_keeps_the_known_route(make_reader: Make, caplog: pytest.LogCaptureFixture) -> None:
    reader = make_reader()
    reader.queues.look_up()
    reader.transport.fail("query_route", RemotingConnectException("no name server answers"))
    assert reader.queues.look_up() == [A0, A1, B0, B1]
    del reader.transport.routes["orders"]
    assert reader.queues.look_up() == [A0, A1, B0, B1]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert reader.queues.exists(A0) is True


def test_rejection_by_a_name_server_is_raised_despite_a_known_route(make_reader: Make) -> None:
    reader = make_reader()
    reader.queues.look_up()
    reader.transport.fail("query_route", MQBrokerException("no permission", 16, "", "n:9876"))
    with pytest.raises(MQBrokerException, match="no permission"):
        reader.queues.look_up()


def test_failed_topic_list_keeps_the_known_topics(make_reader: Make, caplog: pytest.LogCaptureFixture) -> None:
    reader = make_reader(subscribe=(), subscribe_pattern="ord.*")
    reader.transport.fail("topics", DOWN)
    with pytest.raises(RemotingConnectException):
        reader.queues.look_up()
    found = reader.queues.look_up()
    reader.transport.fail("topics", DOWN)
    assert reader.queues.look_up() == found == [A0, A1, B0, B1]
    assert "listed the topics" in caplog.text


def test_exists_is_known_only_for_queues_of_available_brokers(make_reader: Make) -> None:
    reader = make_reader()
    assert reader.queues.exists(A0) is True
    assert reader.queues.exists(replace(A0, queue_id=2)) is False
    assert reader.queues.exists(MessageQueue("orders", "c", 0)) is None
    # A topic in its first lookup: name servers with brokers do not know it, or none answers.
    assert reader.queues.exists(MessageQueue("bills", "a", 0)) is False
    reader.transport.fail("query_route", RemotingConnectException("refused"))
    assert reader.queues.exists(MessageQueue("others", "a", 0)) is None


def test_pattern_is_matched_to_names_of_at_most_127_characters(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader(subscribe=(), subscribe_pattern="orders|a+a+-?|%.*")
    longest, retry = "a" * 127, "%RETRY%" + "g" * 200
    for name in ("orders", longest, "a" * 128, "a" * 60_000 + "-", retry):
        reader.transport.routes[name] = route({"a": 1})
    for _ in range(2):
        assert {queue.topic for queue in reader.queues.look_up()} == {"orders", longest}
    (warning,) = caplog.messages
    assert "2 topics with names of more than 127 characters" in warning


def test_planning_deadline_error_reports_the_progress(make_reader: Make) -> None:
    topics = tuple(f"t{number}" for number in range(200))
    reader = make_reader(subscribe=topics, read_timeout_ms=60_000)
    reader.transport.routes |= {name: route({"a": 1}) for name in topics}
    works = reader.transport.query_route

    def slow(topic: str, timeout: float) -> Any:
        reader.clock.advance(1.0)
        return works(topic, timeout)

    reader.transport.query_route = slow
    with pytest.raises(
        ReadError, match=r"readTimeoutMs=60000 has passed with \d+ of 200 routes of topics known; raise"
    ):
        reader.queues.look_up()
    # 16 requests at once, each of a second.
    assert 60 <= len(reader.asked("query_route")) <= 60 + 16
    reader.transport.query_route = works
    assert len(reader.queues.look_up()) == 200


def test_requests_get_the_remaining_time_of_planning(make_reader: Make) -> None:
    reader = make_reader(subscribe=(), subscribe_pattern="orders", read_timeout_ms=5000)
    topics, query_route, timeouts = reader.transport.topics, reader.transport.query_route, list[float]()

    def slow(timeout: float) -> Any:
        timeouts.append(timeout)
        reader.clock.advance(4.5)
        return topics(timeout)

    def asked(topic: str, timeout: float) -> Any:
        timeouts.append(timeout)
        reader.clock.advance(timeout)
        reader.transport.fail("query_route", RemotingTimeoutException("no answer"))
        return query_route(topic, timeout)

    reader.transport.topics, reader.transport.query_route = slow, asked
    with pytest.raises(
        ReadError, match="with 0 of 1 routes of topics known; the last try: reading topic orders: no answ"
    ):
        reader.queues.look_up()
    assert timeouts == [5.0, 0.5]


def test_refusal_is_raised_as_it_is_after_the_deadline(make_reader: Make) -> None:
    reader = make_reader()
    works = reader.transport.query_route

    def refused(topic: str, timeout: float) -> Any:
        reader.clock.advance(1000.0)
        reader.transport.fail("query_route", MQBrokerException("no permission", 16, "", "n:9876"))
        return works(topic, timeout)

    reader.transport.query_route = refused
    with pytest.raises(MQBrokerException, match="no permission"):
        reader.queues.look_up()


def test_routes_of_many_topics_are_requested_concurrently(make_reader: Make) -> None:
    topics = tuple(f"t{number}" for number in range(4))
    reader = make_reader(subscribe=topics)
    reader.transport.routes |= {name: route({"a": 1}) for name in topics}
    together, works = threading.Barrier(4), reader.transport.query_route

    def asked(topic: str, timeout: float) -> Any:
        together.wait(PATIENCE)
        return works(topic, timeout)

    reader.transport.query_route = asked
    assert reader.queues.look_up() == [MessageQueue(name, "a", 0) for name in topics]
