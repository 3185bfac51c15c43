"""The configuration of a topic, requested from every broker of its route.

Each broker has its own copy, written by its own UPDATE_AND_CREATE_TOPIC request, so copies can differ. A caller must
allow for the strictest copy, and for brokers that do not answer: a proxy in the broker's place does not support the
request, a user may have no right ``Get`` for the topic, and a broker can be down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from rocketmq_spark.errors import RemotingException, RocketMQError, TopicRouteStaleException
from rocketmq_spark.parallel import in_parallel
from rocketmq_spark.route_data import TopicRouteData
from rocketmq_spark.wire.topic_config import TopicConfig

# A cleanup policy and a queue type change only when a topic is deleted and created again. Routes are as old.
_KEPT_S: Final = 30.0
_TIMEOUT_S: Final = 3.0


class TopicConfigTransport(Protocol):
    """The part of a transport that `query_topic_configs` needs."""

    def topic_config(self, address: str, topic: str, timeout: float) -> TopicConfig:
        """Return a topic's configuration on one broker."""
        ...


@dataclass(frozen=True, slots=True)
class TopicConfigs:
    """The configuration of one topic on each broker of its route.

    Parameters
    ----------
    by_broker : mapping of str to TopicConfig
        The brokers that have the topic, by name.
    unknown : mapping of str to RocketMQError
        The brokers that did not return it, by name. A broker without the topic is in neither mapping: it creates the
        topic with default attributes.
    """

    by_broker: Mapping[str, TopicConfig]
    unknown: Mapping[str, RocketMQError]

    @property
    def compacted(self) -> bool:
        """True if at least one broker keeps only the newest message of each key."""
        return any(config.compacted for config in self.by_broker.values())

    @property
    def keys_required(self) -> bool | None:
        """True if a broker drops messages without keys; None if a broker's configuration is unknown."""
        return True if self.compacted else None if self.unknown else False

    @property
    def holds_batches(self) -> bool:
        """True if at least one broker can hold a whole batch in one queue entry."""
        return any(config.holds_batches for config in self.by_broker.values())

    def completed(self, earlier: TopicConfigs) -> TopicConfigs:
        """Return these, with the earlier configuration of each broker that could not answer now."""
        silent = {name for name, error in self.unknown.items() if error.retriable}
        kept = {name: config for name, config in earlier.by_broker.items() if name in silent}
        unknown = {name: error for name, error in self.unknown.items() if name not in kept}
        return TopicConfigs({**self.by_broker, **kept}, unknown)


def query_topic_configs(
    transport: TopicConfigTransport, topic: str, route: TopicRouteData, timeout: float
) -> TopicConfigs:
    """Request a topic's configuration from all brokers of its route at once. Does not raise.

    Parameters
    ----------
    transport : TopicConfigTransport
    topic : str
        With its namespace.
    route : TopicRouteData
        Brokers without queues and without an address are not asked. The master is asked, or the first slave if the
        broker has no master.
    timeout : float
        Seconds for each broker.
    """
    queue_brokers = {data.broker_name for data in route.queue_datas}
    addresses = {
        broker.broker_name: broker.broker_addrs[min(broker.broker_addrs)]
        for broker in route.broker_datas
        if broker.broker_addrs and broker.broker_name in queue_brokers
    }

    def ask(broker_name: str) -> TopicConfig | RocketMQError | None:
        try:
            return transport.topic_config(addresses[broker_name], topic, timeout)
        except TopicRouteStaleException:
            return None
        except RocketMQError as exc:
            return exc

    answers = in_parallel(addresses, ask)
    return TopicConfigs(
        {name: answer for name, answer in answers.items() if isinstance(answer, TopicConfig)},
        {name: answer for name, answer in answers.items() if isinstance(answer, RocketMQError)},
    )


class TopicConfigCache:
    """The configurations of a client instance's topics; safe for many threads.

    Answers, and errors instead of answers, are kept for 30 s. A broker that could not be reached for one topic is not
    asked about other topics for as long. While a broker does not answer, its last answer stays: a restart of the broker
    must not end the check of a compaction topic's rows.

    Parameters
    ----------
    transport : TopicConfigTransport
    clock : callable
        Seconds.
    """

    def __init__(self, transport: TopicConfigTransport, clock: Callable[[], float]) -> None:
        self._transport = transport
        self._clock = clock
        self._configs: dict[str, tuple[float, TopicConfigs]] = {}
        self._unreachable: dict[str, tuple[float, RemotingException]] = {}

    def get(self, topics: Mapping[str, TopicRouteData], *, fresh: bool = False) -> dict[str, TopicConfigs]:
        """Return the configurations of topics, with their namespace, given their routes. Does not raise.

        With `fresh` the brokers are asked, whatever is kept, and only their answers of now are returned.
        """
        now = self._clock()
        kept = {} if fresh else self._configs
        missing = [topic for topic in topics if topic not in kept or kept[topic][0] <= now - _KEPT_S]
        asked = in_parallel(missing, lambda topic: query_topic_configs(self, topic, topics[topic], _TIMEOUT_S))
        for topic, configs in asked.items():
            known = self._configs.get(topic)
            self._configs[topic] = now, configs if known is None else configs.completed(known[1])
        return asked if fresh else {topic: self._configs[topic][1] for topic in topics}

    def topic_config(self, address: str, topic: str, timeout: float) -> TopicConfig:
        """Ask one broker, unless it could not be reached a moment ago."""
        since, error = self._unreachable.get(address, (0.0, None))
        if error is not None and self._clock() < since + _KEPT_S:
            raise error
        try:
            return self._transport.topic_config(address, topic, timeout)
        except RemotingException as exc:
            self._unreachable[address] = self._clock(), exc
            raise
