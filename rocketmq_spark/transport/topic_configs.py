"""The configuration of a topic, requested from every broker of its route.

Each broker has its own copy, written by its own UPDATE_AND_CREATE_TOPIC request, so copies can differ. A caller must
allow for the strictest copy, and for brokers that do not answer: a proxy in the broker's place does not support the
request, a user may have no right ``Get`` for the topic, and a broker can be down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rocketmq_spark.errors import RocketMQError, TopicRouteStaleException
from rocketmq_spark.parallel import in_parallel
from rocketmq_spark.route_data import TopicRouteData
from rocketmq_spark.wire.topic_config import TopicConfig


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
    def holds_batches(self) -> bool:
        """True if at least one broker can hold a whole batch in one queue entry."""
        return any(config.holds_batches for config in self.by_broker.values())


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
