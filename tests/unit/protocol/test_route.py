from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.route import BrokerData, QueueData, TopicRouteData
from rocketmq_spark.protocol.remoting.responses import decode_topic_route, loads_lenient
from rocketmq_spark.routing.route_cache import publish_info_of
from tests.support.strategies import encode_route, fastjson, routes
from tests.vectors import load

# Strings that look like keys, end with backslashes, or contain quotes.
tricky_texts = st.text('{}[],:"\\ 019-a\n', max_size=12) | st.text(max_size=6)
leaves = st.none() | st.booleans() | st.integers() | tricky_texts
documents = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(tricky_texts, inner, max_size=3)
        | st.dictionaries(st.integers(-99, 99), inner, max_size=3)
    ),
    max_leaves=12,
)


def with_text_keys(document: object) -> object:
    if isinstance(document, dict):
        return {str(key): with_text_keys(item) for key, item in document.items()}
    if isinstance(document, list):
        return [with_text_keys(item) for item in document]
    return document


@given(documents)
def test_unquoted_numeric_keys_load_as_if_quoted(document: object) -> None:
    assert loads_lenient(fastjson(document).encode()) == with_text_keys(document)


@given(documents)
def test_standard_json_loads_as_it_is(document: object) -> None:
    text = json.dumps(with_text_keys(document), indent=1)
    assert loads_lenient(text.encode()) == with_text_keys(document)


@pytest.mark.parametrize(
    ("body", "document"),
    [
        ('{0:"a"}', {"0": "a"}),
        ('{ 0 : "a" ,\n -1\t:"b"}', {"0": "a", "-1": "b"}),
        ('{0:"{1:","x":",2:"}', {"0": "{1:", "x": ",2:"}),
        (r'{0:"\"{1:",3:"\\"}', {"0": '"{1:', "3": "\\"}),
        (r'{"\\":{1:2},"k{1:":[1,2,{3:-4}]}', {"\\": {"1": 2}, "k{1:": [1, 2, {"3": -4}]}),
        ('{"t":{0:{},1:{2:[]}}}', {"t": {"0": {}, "1": {"2": []}}}),
    ],
)
def test_only_keys_are_quoted_and_strings_stay_unchanged(body: str, document: object) -> None:
    assert loads_lenient(body.encode()) == document


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{0:}",
        b'{0:"a"',
        b'{0:"a',
        b"{a:1}",
        b'{{"brokerName":"a"}:1}',
        b'"\xff"',
        b"[" * 200_000,
        b"{0:" * 200_000,
        b'{0:"' + b'\\"' * 200_000,
    ],
    ids=range(11),
)
def test_invalid_json_is_rejected_even_after_quoting_its_keys(body: bytes) -> None:
    with pytest.raises(RemotingCommandException, match=f"JSON body of {len(body)} bytes"):
        loads_lenient(body)


@given(routes(), st.booleans())
def test_route_round_trips(route: TopicRouteData, standard: bool) -> None:
    assert decode_topic_route(encode_route(route, standard=standard)) == route


def test_route_from_java_for_old_clients_is_decoded() -> None:
    vector = load("java_codecs.json")["route"]
    name = vector["broker_name"]
    assert decode_topic_route(bytes.fromhex(vector["hex"])) == TopicRouteData(
        (QueueData(name, vector["read_queue_nums"], vector["write_queue_nums"], vector["perm"]),),
        (BrokerData(name, dict(vector["broker_addrs"]), vector["cluster"]),),
    )


def test_brokers_and_queues_are_sorted_by_broker_name() -> None:
    queues = [QueueData(name, 1, 1, 6) for name in "cab"]
    brokers = [BrokerData(name, {0: f"{name}:1"}) for name in "bca"]
    route = decode_topic_route(encode_route(TopicRouteData(tuple(queues), tuple(brokers))))
    assert [queue.broker_name for queue in route.queue_datas] == ["a", "b", "c"]
    assert [broker.broker_name for broker in route.broker_datas] == ["a", "b", "c"]


@pytest.mark.parametrize("body", [b"{}", b'{"queueDatas":null,"brokerDatas":null,"orderTopicConf":""}'])
def test_route_without_brokers_is_empty(body: bytes) -> None:
    # An empty order configuration differs from a missing one: it makes a static topic an ordinary one.
    conf = "" if b"orderTopicConf" in body else None
    assert decode_topic_route(body) == TopicRouteData((), (), conf)


def test_optional_keys_default() -> None:
    body = (
        b'{"queueDatas":[{"brokerName":"a","readQueueNums":1,"writeQueueNums":2,"perm":4}],'
        b'"brokerDatas":[{"brokerName":"a","brokerAddrs":{"1":"h:1"},"cluster":null}],"topicQueueMappingByBroker":{}}'
    )
    assert decode_topic_route(body) == TopicRouteData((QueueData("a", 1, 2, 4),), (BrokerData("a", {1: "h:1"}),))


def test_broker_without_a_role_does_not_spoil_the_route_of_the_others() -> None:
    # A DLedger broker of 5.x whose group has no leader registers with this id.
    body = (
        b'{"queueDatas":[{"brokerName":"a","readQueueNums":1,"writeQueueNums":1,"perm":6},'
        b'{"brokerName":"b","readQueueNums":1,"writeQueueNums":1,"perm":6}],'
        b'"brokerDatas":[{"brokerName":"a","brokerAddrs":{"0":"h:1"}},{"brokerName":"b","brokerAddrs":{-1:"h:2"}}]}'
    )
    route = decode_topic_route(body)
    assert route.broker_datas == (BrokerData("a", {0: "h:1"}), BrokerData("b", {-1: "h:2"}))
    assert publish_info_of("T", route).queues == (MessageQueue("T", "a", 0),)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("[]", "the route"),
        ("null", "the route"),
        ('{"queueDatas":{}}', "queueDatas"),
        ('{"queueDatas":["a"]}', "queueDatas"),
        ('{"brokerDatas":"a"}', "brokerDatas"),
        ('{"orderTopicConf":1}', "orderTopicConf"),
        ('{"queueDatas":[{"readQueueNums":1,"writeQueueNums":1,"perm":6}]}', "brokerName"),
        ('{"queueDatas":[{"brokerName":"a","readQueueNums":"1","writeQueueNums":1,"perm":6}]}', "readQueueNums"),
        ('{"queueDatas":[{"brokerName":"a","readQueueNums":1,"writeQueueNums":true,"perm":6}]}', "writeQueueNums"),
        ('{"queueDatas":[{"brokerName":"a","readQueueNums":1,"writeQueueNums":1}]}', "perm"),
        (
            '{"queueDatas":[{"brokerName":"a","readQueueNums":1,"writeQueueNums":1,"perm":6,"topicSysFlag":1.5}]}',
            "topicS",
        ),
        ('{"brokerDatas":[{"brokerName":"a"}]}', "brokerAddrs"),
        ('{"brokerDatas":[{"brokerName":"a","brokerAddrs":[]}]}', "brokerAddrs"),
        ('{"brokerDatas":[{"brokerName":"a","brokerAddrs":{"x":"h:1"}}]}', "broker id"),
        ('{"brokerDatas":[{"brokerName":"a","brokerAddrs":{"0":5}}]}', "0 is 5"),
        ('{"brokerDatas":[{"brokerName":7,"brokerAddrs":{}}]}', "brokerName"),
        ('{"brokerDatas":[{"brokerName":"a","brokerAddrs":{},"cluster":[]}]}', "cluster"),
    ],
)
def test_ill_formed_field_of_a_route_is_named(body: str, names: str) -> None:
    with pytest.raises(RemotingCommandException, match=f"brokers and queues: .*{names}"):
        decode_topic_route(body.encode())
