"""Routes and publish infos."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.errors import (
    MQBrokerException,
    RemotingConnectException,
    RouteNotFoundException,
    TopicRouteStaleException,
)
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.route import BrokerData, QueueData, TopicRouteData
from rocketmq_spark.protocol.remoting.responses import decode_topic_route
from rocketmq_spark.routing.route_cache import RouteCache, publish_info_of


class NameServer:
    """Answers route queries from a table, and counts them."""

    def __init__(self, **routes: TopicRouteData | Exception) -> None:
        self.routes = routes
        self.asked: list[str] = []

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        assert timeout > 0
        self.asked.append(topic)
        answer = self.routes.get(topic, TopicRouteStaleException(f"no {topic}", 17, f"No topic {topic}", "ns:1"))
        if isinstance(answer, Exception):
            raise answer
        return answer


def route(*datas: QueueData, **addresses: str) -> TopicRouteData:
    brokers = tuple(BrokerData(name, {0: address}) for name, address in sorted(addresses.items()))
    return TopicRouteData(tuple(sorted(datas, key=lambda data: data.broker_name)), brokers)


def data(broker: str, read: int = 4, write: int = 4, perm: int = 6) -> QueueData:
    return QueueData(broker, read, write, perm)


def cache(server: NameServer, queue_nums: int = 4) -> RouteCache:
    return RouteCache(server.query_route, create_topic_key="TBW102", default_topic_queue_nums=queue_nums)


def test_cached_route_causes_no_request() -> None:
    server = NameServer(T=route(data("a"), a="h:1"))
    routes = cache(server)
    assert routes.look_up("T", 1.0) is routes.look_up("T", 1.0) is routes.cached("T")
    assert server.asked == ["T"]


def test_newest_route_sets_the_addresses_of_its_brokers_also_if_unchanged() -> None:
    server = NameServer(T=route(data("a"), a="h:1"), U=route(data("a"), a="h:1"))
    routes = cache(server)
    routes.look_up("T", 1.0)
    # The broker moves, moves back, and topic U is deleted meanwhile.
    server.routes["U"] = route(data("a"), a="h:2")
    routes.look_up("U", 1.0)
    assert routes.master_of("a") == "h:2"
    assert routes.refresh("T", 1.0) is False
    assert routes.master_of("a") == "h:1"


def test_unknown_topic_falls_back_to_the_template() -> None:
    server = NameServer(TBW102=route(data("a", 8, 8, 7), a="h:1"))
    info = cache(server).look_up("T", 1.0)
    assert server.asked == ["T", "TBW102"]
    assert info.template
    assert {queue.topic for queue in info.queues} == {"T"}


@pytest.mark.parametrize(("asked", "in_template", "expected"), [(4, 8, 4), (4, 2, 2), (16, 8, 8)])
def test_the_template_gives_the_lesser_of_both_queue_numbers(asked: int, in_template: int, expected: int) -> None:
    server = NameServer(TBW102=route(data("a", read=in_template, write=99, perm=7), a="h:1"))
    assert expected == len(cache(server, asked).look_up("T", 1.0).queues)


def test_a_route_without_a_writable_queue_is_an_error_and_no_fallback() -> None:
    server = NameServer(T=route(data("a", perm=4), a="h:1"), TBW102=route(data("a"), a="h:1"))
    with pytest.raises(RouteNotFoundException, match=r"topic T.*none of its queues is writable.*brokers a") as raised:
        cache(server).look_up("T", 1.0)
    assert raised.value.response_code == 10005
    assert server.asked == ["T"]


def test_queues_of_writable_brokers_with_a_master_are_sorted() -> None:
    found = TopicRouteData(
        (data("c", 1, 2), data("a", 9, 1), data("read-only", perm=4), data("no-master"), data("unknown")),
        (
            BrokerData("a", {0: "a:1", 1: "a:2"}),
            BrokerData("c", {0: "c:1"}),
            BrokerData("no-master", {1: "n:1"}),
            BrokerData("read-only", {0: "r:1"}),
        ),
    )
    info = publish_info_of("T", found)
    assert info.queues == (MessageQueue("T", "a", 0), MessageQueue("T", "c", 0), MessageQueue("T", "c", 1))
    assert info.addresses["a"] == "a:1"


def test_only_two_fields_of_an_order_configuration_entry_are_used() -> None:
    found = replace(route(data("a"), a="h:1"), order_topic_conf="a:2:9;b:1:x:y;")
    assert publish_info_of("T", found).queues == (
        MessageQueue("T", "a", 0),
        MessageQueue("T", "a", 1),
        MessageQueue("T", "b", 0),
    )


def test_first_entry_of_a_broker_that_is_listed_twice_is_used() -> None:
    with_master, without = BrokerData("a", {0: "h:1"}), BrokerData("a", {1: "slave:1"})
    found = route(data("a", write=1))
    assert publish_info_of("T", replace(found, broker_datas=(with_master, without))).addresses == {"a": "h:1"}
    assert not publish_info_of("T", replace(found, broker_datas=(without, with_master))).queues


def test_brokers_are_sorted_by_utf_16_units() -> None:
    body = {
        "queueDatas": [
            {"brokerName": name, "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
            for name in ("\uff01", "\U0001f600")
        ],
        "brokerDatas": [{"brokerName": name, "brokerAddrs": {"0": "h:1"}} for name in ("\uff01", "\U0001f600")],
    }
    info = publish_info_of("T", decode_topic_route(json.dumps(body).encode()))
    assert [queue.broker_name for queue in info.queues] == ["\U0001f600", "\uff01"]


def test_static_topic_with_an_empty_order_configuration_is_an_ordinary_one() -> None:
    body = {
        "queueDatas": [{"brokerName": "a", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}],
        "brokerDatas": [{"brokerName": "a", "brokerAddrs": {"0": "h:1"}}],
        "topicQueueMappingByBroker": {"a": {"scope": "__global__"}},
    }
    with pytest.raises(RouteNotFoundException, match="static"):
        publish_info_of("T", decode_topic_route(json.dumps(body).encode()))
    ordinary = decode_topic_route(json.dumps({**body, "orderTopicConf": ""}).encode())
    assert publish_info_of("T", ordinary).queues == (MessageQueue("T", "a", 0),)


def test_order_configuration_determines_the_queues() -> None:
    found = replace(route(data("a", perm=4), a="h:1"), order_topic_conf="a:2;b:1")
    info = publish_info_of("T", found)
    assert [str(queue) for queue in info.queues] == ["T/a/0", "T/a/1", "T/b/0"]
    assert info.order_topic


@pytest.mark.parametrize("conf", [";a:1", "a:1;;", "a:1;;b:0"])
def test_empty_entries_of_an_order_configuration_are_skipped(conf: str) -> None:
    found = replace(route(data("a"), a="h:1"), order_topic_conf=conf)
    assert publish_info_of("T", found).queues == (MessageQueue("T", "a", 0),)


@pytest.mark.parametrize("conf", ["a", "a:x", ":3", "a:-1", "a:" + "9" * 5000, "a:\u0663"])
def test_a_malformed_order_configuration_is_named(conf: str) -> None:
    found = replace(route(data("a"), a="h:1"), order_topic_conf=conf)
    with pytest.raises(RouteNotFoundException, match="order configuration"):
        publish_info_of("T", found)


@pytest.mark.parametrize(
    "found",
    [
        route(data("a", write=2**31 - 1), a="h:1"),
        route(*(data(name, write=60_000) for name in "ab"), a="h:1", b="h:2"),
        replace(route(data("a"), a="h:1"), order_topic_conf="a:60000;b:60000"),
    ],
)
def test_more_queues_than_any_topic_has_are_refused_and_not_allocated(found: TopicRouteData) -> None:
    with pytest.raises(RouteNotFoundException, match=r"topic T: \d+ queues, 100000 are allowed"):
        publish_info_of("T", found)


def test_a_static_topic_is_refused() -> None:
    with pytest.raises(RouteNotFoundException, match="static"):
        publish_info_of("T", replace(route(data("a"), a="h:1"), static_topic=True))


def test_equal_route_is_no_change_but_another_queue_number_is() -> None:
    server = NameServer(T=route(data("a"), data("b"), a="h:1", b="h:2"))
    routes = cache(server)
    assert routes.refresh("T", 1.0)
    assert not routes.refresh("T", 1.0)
    server.routes["T"] = route(data("a", write=8), data("b"), a="h:1", b="h:2")
    assert routes.refresh("T", 1.0)
    assert len(routes.look_up("T", 1.0).queues) == 12


def test_order_of_brokers_in_an_answer_is_no_change() -> None:
    queue_datas = [{"brokerName": name, "readQueueNums": 4, "writeQueueNums": 4, "perm": 6} for name in "ab"]
    broker_datas = [{"brokerName": name, "brokerAddrs": {"0": f"{name}:1", "1": f"{name}:2"}} for name in "ab"]
    answer: dict[str, list[Any]] = {"queueDatas": queue_datas, "brokerDatas": broker_datas}
    turned = {name: datas[::-1] for name, datas in answer.items()}
    server = NameServer(T=decode_topic_route(json.dumps(answer).encode()))
    routes = cache(server)
    assert routes.refresh("T", 1.0)
    server.routes["T"] = decode_topic_route(json.dumps(turned).encode())
    assert not routes.refresh("T", 1.0)


@pytest.mark.parametrize(
    "other",
    [
        route(data("a", perm=4), a="h:1"),
        route(data("a"), a="h:9"),
        TopicRouteData((data("a"),), (BrokerData("a", {0: "h:1", 1: "h:2"}),)),
        TopicRouteData((replace(data("a"), topic_sys_flag=1),), (BrokerData("a", {0: "h:1"}),)),
        replace(route(data("a"), a="h:1"), order_topic_conf="a:4"),
    ],
    ids=["perm", "address", "slave", "sys flag", "order configuration"],
)
def test_any_difference_is_a_route_change(other: TopicRouteData) -> None:
    server = NameServer(T=route(data("a"), a="h:1"))
    routes = cache(server)
    routes.refresh("T", 1.0)
    server.routes["T"] = other
    assert routes.refresh("T", 1.0)


def test_unchanged_route_without_queues_is_rebuilt() -> None:
    changes: list[None] = []
    server = NameServer(T=route(data("a", perm=4), a="h:1"))
    routes = RouteCache(
        server.query_route,
        create_topic_key="TBW102",
        default_topic_queue_nums=4,
        on_change=lambda: changes.append(None),
    )
    assert routes.refresh("T", 1.0)
    first = routes.cached("T")
    assert routes.refresh("T", 1.0)
    assert routes.cached("T") is not first
    assert len(changes) == 2


def test_the_addresses_of_a_broker_are_replaced_as_a_whole() -> None:
    server = NameServer(T=TopicRouteData((data("a"),), (BrokerData("a", {0: "h:1", 1: "h:2"}),)))
    routes = cache(server)
    routes.look_up("T", 1.0)
    server.routes["T"] = TopicRouteData((data("a"),), (BrokerData("a", {1: "h:3"}),))
    routes.refresh("T", 1.0)
    assert routes.masters() == {}
    assert routes.addresses() == ("h:3",)


def test_an_address_that_changed_replaces_the_old_one() -> None:
    server = NameServer(T=route(data("a"), a="h:1"))
    routes = cache(server)
    routes.look_up("T", 1.0)
    server.routes["T"] = route(data("a"), a="h:2")
    routes.refresh("T", 1.0)
    assert routes.masters() == {"a": "h:2"}
    assert routes.addresses() == ("h:2",)


def test_missing_topic_and_template_error_has_advice() -> None:
    with pytest.raises(RouteNotFoundException, match=r"topic T.*TBW102.*create the topic first") as raised:
        cache(NameServer()).look_up("T", 1.0)
    assert raised.value.response_code == 10005
    assert not raised.value.unreachable


def test_topic_unknown_to_the_proxy_has_no_template_fallback() -> None:
    server = NameServer(TBW102=route(data("a"), a="h:1"))
    routes = RouteCache(server.query_route, create_topic_key=None, default_topic_queue_nums=4)
    with pytest.raises(
        RouteNotFoundException, match=r"the proxy does not know it \(No topic T\).*create it first"
    ) as raised:
        routes.look_up("T", 1.0)
    assert server.asked == ["T"]
    assert (raised.value.response_code, raised.value.unreachable) == (10005, False)
    assert "-t T -a +message.type=NORMAL" in str(raised.value)


@pytest.mark.parametrize(
    "failure",
    [RemotingConnectException("ns:1 refused"), MQBrokerException("answered 1: name server not ready", 1, "", "ns:1")],
)
def test_failing_name_server_keeps_the_cached_route(failure: Exception) -> None:
    server = NameServer(T=route(data("a"), a="h:1"))
    routes = cache(server)
    info = routes.look_up("T", 1.0)
    server.routes["T"] = failure
    with pytest.raises((RouteNotFoundException, MQBrokerException)):
        routes.refresh("T", 1.0)
    assert routes.look_up("T", 1.0) is info


def test_a_name_server_that_fails_is_the_cause_of_10005() -> None:
    failure = RemotingConnectException("ns:1 refused")
    with pytest.raises(RouteNotFoundException, match="ns:1 refused") as raised:
        cache(NameServer(T=failure)).look_up("T", 1.0)
    assert raised.value.__cause__ is failure
    assert raised.value.unreachable


def test_concurrent_first_lookups_leave_one_consistent_info() -> None:
    server = NameServer(T=route(data("a"), a="h:1"))
    routes, found, start = cache(server), [], threading.Barrier(8)

    def look_up() -> None:
        start.wait()
        found.append(routes.look_up("T", 1.0))

    threads = [threading.Thread(target=look_up) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert server.asked == ["T"]
    assert {id(info) for info in found} == {id(routes.cached("T"))}


def test_own_route_replaces_the_template_permanently() -> None:
    server = NameServer(TBW102=route(data("a", perm=7), a="h:1"))
    routes = cache(server)
    routes.look_up("T", 1.0)
    server.routes["T"] = route(data("a", write=2), a="h:1")
    assert routes.refresh("T", 1.0)
    found = routes.look_up("T", 1.0)
    assert (found.template, len(found.queues)) == (False, 2)
    del server.routes["T"]
    assert not routes.refresh("T", 1.0)
    assert routes.look_up("T", 1.0) is found
    assert routes.topics() == ("T",)
