"""The configuration of topics, requested from brokers once and kept.

Each broker has its own copy, written by its own UPDATE_AND_CREATE_TOPIC request, so copies can differ. A caller must
allow for the strictest copy, and for brokers that do not answer: a proxy in the broker's place does not support the
request, a user may have no right ``Get`` for the topic, and a broker can be down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from rocketmq_spark.errors import (
    RemotingException,
    RequestNotSupportedException,
    RocketMQError,
    TopicRouteStaleException,
)
from rocketmq_spark.model.route import TopicRouteData
from rocketmq_spark.protocol.remoting.response_bodies import TopicConfig
from rocketmq_spark.transport.base import Configs
from rocketmq_spark.transport.parallel import in_parallel

# A cleanup policy and a queue type change only when a topic is deleted and created again. Routes are as old.
_KEPT_S: Final = 30.0
_TIMEOUT_S: Final = 3.0

# None: the broker does not have the topic.
_Answer: TypeAlias = TopicConfig | RocketMQError | None


@dataclass(frozen=True, slots=True)
class TopicConfigs:
    """The configuration of one topic on each broker of its route, by broker name.

    `unknown` has the brokers that did not return it. A broker without the topic is in neither mapping: it creates the
    topic with default attributes.
    """

    by_broker: dict[str, TopicConfig] = field(default_factory=dict)
    unknown: dict[str, RocketMQError] = field(default_factory=dict)

    @property
    def compacted(self) -> bool:
        """True if at least one broker keeps only the newest message of each key."""
        return any(config.compacted for config in self.by_broker.values())

    @property
    def keys_required(self) -> bool | None:
        """True if a broker drops messages without keys; None if a broker's configuration is unknown."""
        if self.compacted:
            return True
        return None if self.unknown else False


class TopicConfigCache:
    """The answers of brokers about topics, by topic and broker; safe for many threads.

    A write asks all brokers of a topic with `get`, a read asks one broker with `config`.
    """

    def __init__(self, transport: Configs, clock: Callable[[], float]) -> None:
        self._transport = transport
        self._clock = clock
        # When a broker answered about a topic, and what.
        self._answers: dict[tuple[str, str], tuple[float, _Answer]] = {}
        self._unreachable: dict[str, tuple[float, RemotingException]] = {}

    def get(self, topics: Mapping[str, TopicRouteData], *, fresh: bool = False) -> dict[str, TopicConfigs]:
        """Return the configurations of topics, given their routes. Does not raise.

        Answers and errors count for 30 s. While a broker does not answer, its last configuration stays: a restart of
        the broker must not end the check of a compaction topic's rows. With `fresh` all brokers are asked, and only
        their new answers are returned.
        """
        addresses = {
            (topic, broker_name): address
            for topic, route in topics.items()
            for broker_name, address in _brokers_with_queues(route).items()
        }
        oldest = self._clock() - _KEPT_S
        outdated = [place for place in addresses if fresh or self._answers.get(place, (oldest, None))[0] <= oldest]
        answers = in_parallel(outdated, lambda place: self._update(place, addresses[place]))
        if not fresh:
            answers = {place: self._answers[place][1] for place in addresses}
        configs = {topic: TopicConfigs() for topic in topics}
        for (topic, broker_name), answer in answers.items():
            if isinstance(answer, TopicConfig):
                configs[topic].by_broker[broker_name] = answer
            elif answer is not None:
                configs[topic].unknown[broker_name] = answer
        return configs

    def config(self, topic: str, broker_name: str, address: str, timeout: float) -> TopicConfig:
        """Return a topic's configuration on one broker, which is asked until it has answered or refused once.

        A broker without the topic creates it with default attributes, and a broker of 4.x or a proxy does not support
        the request: for both the default configuration is returned.
        """
        place = topic, broker_name
        _, answer = self._answers.get(place, (0.0, None))
        if answer is None or (isinstance(answer, RocketMQError) and answer.retriable):
            answer = self._request(address, topic, timeout)
            self._answers[place] = self._clock(), answer
        if answer is None or isinstance(answer, RequestNotSupportedException):
            return TopicConfig()
        if isinstance(answer, RocketMQError):
            raise answer
        return answer

    def _update(self, place: tuple[str, str], address: str) -> _Answer:
        """Ask a broker, unless it could not be reached for another topic within the last 30 s."""
        since, error = self._unreachable.get(address, (0.0, None))
        answer: _Answer = error
        if error is None or self._clock() >= since + _KEPT_S:
            answer = self._request(address, place[0], _TIMEOUT_S)
            if isinstance(answer, RemotingException):
                self._unreachable[address] = self._clock(), answer
        _, known = self._answers.get(place, (0.0, None))
        is_silent = isinstance(answer, RocketMQError) and answer.retriable
        self._answers[place] = self._clock(), known if is_silent and isinstance(known, TopicConfig) else answer
        return answer

    def _request(self, address: str, topic: str, timeout: float) -> _Answer:
        try:
            return self._transport.topic_config(address, topic, timeout)
        except TopicRouteStaleException:
            return None
        except RocketMQError as exc:
            return exc


def _brokers_with_queues(route: TopicRouteData) -> dict[str, str]:
    """Return the address of each broker that has queues: its master, or its first slave if it has no master."""
    names = {data.broker_name for data in route.queue_datas}
    return {
        broker.broker_name: broker.broker_addrs[min(broker.broker_addrs)]
        for broker in route.broker_datas
        if broker.broker_addrs and broker.broker_name in names
    }
