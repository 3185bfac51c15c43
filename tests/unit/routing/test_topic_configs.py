"""The configuration of a topic on all brokers of its route."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rocketmq_spark.errors import (
    MQBrokerException,
    RemotingConnectException,
    RequestNotSupportedException,
    RocketMQError,
    TopicRouteStaleException,
)
from rocketmq_spark.model.route import BrokerData, QueueData, TopicRouteData
from rocketmq_spark.protocol.remoting.responses import TopicConfig
from rocketmq_spark.routing.topic_configs import TopicConfigCache, TopicConfigs

PLAIN = TopicConfig()
COMPACTED = TopicConfig(cleanup_policy="COMPACTION")
BATCHES = TopicConfig(queue_type="BatchCQ")
DOWN = RemotingConnectException("connection refused")
REFUSED = MQBrokerException("no right", 16, "", "b:1")
ABSENT = TopicRouteStaleException("no topic", 17, "", "c:1")


class Brokers:
    """Answers by address."""

    def __init__(self, answers: Mapping[str, TopicConfig | RocketMQError]) -> None:
        self.answers = answers
        self.releases: dict[str, str | RocketMQError] = {}

    def topic_config(self, address: str, topic: str, timeout: float) -> TopicConfig:
        assert (topic, timeout) == ("T", 3.0)
        answer = self.answers[address]
        if isinstance(answer, RocketMQError):
            raise answer
        return answer

    def runtime_info(self, address: str, timeout: float) -> Mapping[str, str]:
        release = self.releases[address]
        if isinstance(release, RocketMQError):
            raise release
        return {"brokerVersionDesc": release}


def route(brokers: Mapping[str, Mapping[int, str]], *, without_queues: str = "") -> TopicRouteData:
    return TopicRouteData(
        tuple(QueueData(name, 1, 1, 6) for name in brokers if name != without_queues),
        tuple(BrokerData(name, addresses) for name, addresses in brokers.items()),
    )


def query(answers: Mapping[str, TopicConfig | RocketMQError]) -> TopicConfigs:
    cache = TopicConfigCache(Brokers(answers), lambda: 0.0)
    return cache.look_up({"T": route({name: {0: name} for name in answers})})["T"]


def test_one_compacting_broker_makes_the_topic_compacted() -> None:
    assert query({"a": PLAIN, "b": COMPACTED}).compacted
    assert [config.holds_batches for config in query({"a": PLAIN, "b": BATCHES}).by_broker.values()] == [False, True]
    plain = query({"a": PLAIN, "b": PLAIN})
    assert plain == TopicConfigs({"a": PLAIN, "b": PLAIN}, {})
    assert not plain.compacted


def test_brokers_that_do_not_answer_are_reported_as_unknown() -> None:
    configs = query({"a": DOWN, "b": REFUSED, "c": COMPACTED})
    assert configs == TopicConfigs({"c": COMPACTED}, {"a": DOWN, "b": REFUSED})
    assert configs.compacted


def test_broker_without_the_topic_is_not_listed() -> None:
    assert query({"a": PLAIN, "c": ABSENT}) == TopicConfigs({"a": PLAIN}, {})


def test_slave_is_queried_only_if_its_broker_has_no_master() -> None:
    ids: dict[str, dict[int, str]] = {"a": {0: "master", 1: "slave", -1: "no role"}, "b": {2: "only"}, "c": {}}
    brokers = route({**ids, "d": {0: "idle"}}, without_queues="d")
    cache = TopicConfigCache(Brokers({"master": PLAIN, "only": COMPACTED}), lambda: 0.0)
    assert cache.look_up({"T": brokers})["T"] == TopicConfigs({"a": PLAIN, "b": COMPACTED}, {})


def test_cached_configurations_expire_after_30_seconds() -> None:
    now = [0.0]
    answers: dict[str, TopicConfig | RocketMQError] = {"a": PLAIN, "b": DOWN}
    brokers = Brokers(answers)
    cache = TopicConfigCache(brokers, lambda: now[0])
    routes = {"T": route({"a": {0: "a"}, "b": {0: "b"}})}
    assert cache.look_up(routes) == {"T": TopicConfigs({"a": PLAIN}, {"b": DOWN})}
    answers.update(a=COMPACTED, b=PLAIN)
    now[0] = 29.0
    assert not cache.look_up(routes)["T"].compacted
    # An unreachable broker is asked again only later.
    assert cache.look_up(routes, fresh=True) == {"T": TopicConfigs({"a": COMPACTED}, {"b": DOWN})}
    now[0] = 59.0
    assert cache.look_up(routes) == {"T": TopicConfigs({"a": COMPACTED, "b": PLAIN}, {})}


def test_configuration_stays_cached_while_its_broker_does_not_answer() -> None:
    now = [0.0]
    answers: dict[str, TopicConfig | RocketMQError] = {"a": COMPACTED, "b": PLAIN}
    cache = TopicConfigCache(Brokers(answers), lambda: now[0])
    routes = {"T": route({"a": {0: "a"}, "b": {0: "b"}})}
    known = {"T": TopicConfigs({"a": COMPACTED, "b": PLAIN}, {})}
    assert cache.look_up(routes) == known
    answers["a"] = DOWN
    for now[0] in (40.0, 80.0):
        assert cache.look_up(routes, fresh=True) == {"T": TopicConfigs({"b": PLAIN}, {"a": DOWN})}
        assert cache.look_up(routes) == known
    answers["a"] = ABSENT
    now[0] = 120.0
    assert cache.look_up(routes) == {"T": TopicConfigs({"b": PLAIN}, {})}


def test_broker_that_rejected_the_request_is_not_queried_again() -> None:
    answers: dict[str, TopicConfig | RocketMQError] = {"a": REFUSED}
    cache = TopicConfigCache(Brokers(answers), lambda: 0.0)
    for _ in range(2):
        with pytest.raises(MQBrokerException, match="no right"):
            cache.config("T", "a", "a", 3.0)
        answers["a"] = COMPACTED


def test_broker_without_answer_or_topic_is_queried_again() -> None:
    answers: dict[str, TopicConfig | RocketMQError] = {"a": ABSENT}
    cache = TopicConfigCache(Brokers(answers), lambda: 0.0)
    assert cache.config("T", "a", "a", 3.0) == PLAIN
    answers["a"] = DOWN
    with pytest.raises(RemotingConnectException):
        cache.config("T", "a", "a", 3.0)
    answers["a"] = COMPACTED
    assert cache.config("T", "a", "a", 3.0) == COMPACTED


def test_configuration_of_a_read_is_requested_again_after_a_second() -> None:
    """Its topic may have been deleted, and created again with another type."""
    now = [0.0]
    answers: dict[str, TopicConfig | RocketMQError] = {"a": COMPACTED}
    cache = TopicConfigCache(Brokers(answers), lambda: now[0])
    assert cache.config("T", "a", "a", 3.0) == COMPACTED
    answers["a"] = PLAIN
    now[0] = 0.9
    assert cache.config("T", "a", "a", 3.0) == COMPACTED
    now[0] = 1.0
    assert cache.config("T", "a", "a", 3.0) == PLAIN
    answers["a"] = DOWN
    now[0] = 2.0
    assert cache.config("T", "a", "a", 3.0) == PLAIN
    answers["a"] = REFUSED
    now[0] = 3.0
    with pytest.raises(MQBrokerException, match="no right"):
        cache.config("T", "a", "a", 3.0)


@pytest.mark.parametrize("release", ["V4_9_7", "V4_9_4_SNAPSHOT"])
def test_only_brokers_before_5_have_the_default_configuration_for_reads(release: str) -> None:
    """A proxy knows neither the topic's type nor a release, and a broker may not answer."""
    now = [0.0]
    unknown = RequestNotSupportedException("unknown request", 3, "", "a:1")
    brokers = Brokers({"a": unknown, "proxy": unknown, "new": unknown})
    brokers.releases = {"a": DOWN, "proxy": unknown, "new": "V5_5_0"}
    cache = TopicConfigCache(brokers, lambda: now[0])
    with pytest.raises(RemotingConnectException):
        cache.config("T", "a", "a", 3.0)
    brokers.releases["a"] = release
    assert cache.config("T", "a", "a", 3.0) == PLAIN
    for address in ("proxy", "new"):
        with pytest.raises(RequestNotSupportedException):
            cache.config("T", address, address, 3.0)
    # The release of an address is requested once.
    now[0], brokers.releases["a"] = 1.0, DOWN
    assert cache.config("T", "a", "a", 3.0) == PLAIN
