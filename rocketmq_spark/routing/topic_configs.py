"""Requests the configuration of topics from brokers, and caches it (docs/internals/remoting.md#topics).

Each broker has its own copy, and copies can differ. `TopicConfigCache.look_up` is for writes: a configuration that a
broker has not returned is unknown, as on proxies and 4.x brokers. `TopicConfigCache.config` is for reads: there, topics
of 4.x brokers have the default configuration, because these releases have no other.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeGuard

from rocketmq_spark import errors
from rocketmq_spark.model.route import TopicRouteData, in_order
from rocketmq_spark.protocol.remoting.responses import TopicConfig
from rocketmq_spark.transport.base import Admin, Configs
from rocketmq_spark.transport.parallel import in_parallel

# A cleanup policy and a queue type change only if a topic is deleted and created again. Cached routes are as old.
_KEPT_S: Final = 30.0
# A read that took an old answer for the new topic would not report its gaps, or let brokers filter inner batches.
_FRESH_S: Final = 1.0
_TIMEOUT_S: Final = 3.0
_BEFORE_5: Final = re.compile(r"[0-4](\.[0-9]{1,4}){1,3}(\.SNAPSHOT)?")

# None: the broker does not have the topic.
_Answer: TypeAlias = TopicConfig | errors.RocketMQError | None


@dataclass(frozen=True, slots=True)
class TopicConfigs:
    """The configuration of one topic on each broker of its route, by broker name."""

    # Without brokers that do not have the topic: they create it with default attributes.
    by_broker: dict[str, TopicConfig] = field(default_factory=dict)
    unknown: dict[str, errors.RocketMQError] = field(default_factory=dict)

    @property
    def compacted(self) -> bool:
        """True if a broker keeps only the newest message of each key (docs/internals/reads.md#compaction-topics)."""
        return any(config.compacted for config in self.by_broker.values())

    @property
    def keys_required(self) -> bool | None:
        """True if a broker drops messages without keys; None if a broker's configuration is unknown."""
        if self.compacted:
            return True
        return None if self.unknown else False


class TopicConfigCache:
    """The answers of brokers about topics, by topic and broker; safe for many threads."""

    def __init__(self, transport: Configs, clock: Callable[[], float]) -> None:
        self._transport = transport
        self._clock = clock
        # The time and the answer of each broker, by topic and broker name.
        self._answers: dict[tuple[str, str], tuple[float, _Answer]] = {}
        self._unreachable: dict[str, tuple[float, errors.RemotingException]] = {}
        # The releases of 4.x brokers, by address.
        self._before_5: dict[str, str] = {}

    def look_up(self, topics: Mapping[str, TopicRouteData], *, fresh: bool = False) -> dict[str, TopicConfigs]:
        """Return the configurations of topics, given their routes, for a write. Does not raise.

        Answers and errors are valid for 30 s. While a broker does not answer, its last configuration stays valid, so
        that the check of a compaction topic's rows survives a restart. With `fresh` only new answers are returned, and
        a broker that could not be reached in the last 30 s is not asked.
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
        """Return a topic's configuration on one broker, for a read. Retriable errors are not cached.

        An answer is valid for a second, as the routes of reads, and while the broker does not answer again. Raises a
        RequestNotSupportedException for a proxy.
        """
        place = topic, broker_name
        since, answer = self._answers.get(place, (0.0, None))
        if answer is None or self._clock() - since >= _FRESH_S:
            newest = self._request(address, topic, timeout)
            if isinstance(newest, errors.RequestNotSupportedException):
                newest = self._config_before_5(address, newest, timeout)
            if not _is_retriable(newest):
                answer = newest
            elif answer is None:
                raise newest
            self._answers[place] = self._clock(), answer
        if answer is None:
            # The broker will create the topic with these defaults.
            return TopicConfig()
        if isinstance(answer, errors.RocketMQError):
            raise answer
        return answer

    def old_brokers(self, configs: TopicConfigs, route: TopicRouteData) -> dict[str, str]:
        """Return the release of each broker of a topic that is older than 5.0, by broker name.

        These brokers and proxies do not support the request for a configuration. A proxy does not tell a release.
        """
        addresses, found = _brokers_with_queues(route), dict[str, str]()
        for broker_name, exc in sorted(configs.unknown.items()):
            if isinstance(exc, errors.RequestNotSupportedException):
                with contextlib.suppress(errors.RocketMQError):
                    if release := self._release_before_5(addresses[broker_name], _TIMEOUT_S):
                        found[broker_name] = release
        return found

    def _update(self, place: tuple[str, str], address: str) -> _Answer:
        """Request the configuration, unless the broker could not be reached for another topic in the last 30 s."""
        since, error = self._unreachable.get(address, (0.0, None))
        answer: _Answer = error
        if error is None or self._clock() >= since + _KEPT_S:
            answer = self._request(address, place[0], _TIMEOUT_S)
            if isinstance(answer, errors.RemotingException):
                self._unreachable[address] = self._clock(), answer
        _, known = self._answers.get(place, (0.0, None))
        is_silent = _is_retriable(answer) and isinstance(known, TopicConfig)
        self._answers[place] = self._clock(), known if is_silent else answer
        return answer

    def _config_before_5(
        self, address: str, unsupported: errors.RequestNotSupportedException, timeout: float
    ) -> TopicConfig | errors.RocketMQError:
        """Return the configuration of any topic of a 4.x broker, or the error for a proxy."""
        try:
            return TopicConfig() if self._release_before_5(address, timeout) else unsupported
        except errors.RocketMQError as exc:
            return exc if exc.retriable else unsupported

    def _release_before_5(self, address: str, timeout: float) -> str | None:
        release = self._before_5.get(address)
        if release is None and (release := release_before_5(self._transport.runtime_info(address, timeout))):
            self._before_5[address] = release
        return release

    def _request(self, address: str, topic: str, timeout: float) -> _Answer:
        try:
            return self._transport.topic_config(address, topic, timeout)
        except errors.TopicRouteStaleException:
            return None
        except errors.RocketMQError as exc:
            return exc


def _is_retriable(answer: _Answer) -> TypeGuard[errors.RocketMQError]:
    return isinstance(answer, errors.RocketMQError) and answer.retriable


def has_topic(transport: Admin, address: str, topic: str, timeout: float) -> bool:
    """Return whether a broker has a topic; raises as `Admin.all_topic_attributes`."""
    try:
        transport.topic_config(address, topic, timeout)
    except errors.TopicRouteStaleException:
        return False
    except errors.RequestNotSupportedException:
        # Brokers before 5.0 return the configuration of all topics only.
        return topic in transport.all_topic_attributes(address, timeout)
    return True


def version_of(runtime: Mapping[str, str]) -> str | None:
    """Return a broker's release from its metrics: ``V5_5_0`` is ``5.5.0``."""
    return runtime.get("brokerVersionDesc", "").removeprefix("V").replace("_", ".") or None


def release_before_5(runtime: Mapping[str, str]) -> str | None:
    """Return a broker's release if it has no attributes of topics, no timers and no inner batches; None: it has them.

    A release that the broker does not tell, or that is malformed, is also None.
    """
    release = version_of(runtime)
    return release if release and _BEFORE_5.fullmatch(release) else None


def _brokers_with_queues(route: TopicRouteData) -> dict[str, str]:
    """Return the address of each broker that has queues: its master, or its first slave if it has no master."""
    names = {data.broker_name for data in route.queue_datas}
    return {
        broker.broker_name: broker.broker_addrs[in_order(broker.broker_addrs)[0]]
        for broker in route.broker_datas
        if broker.broker_addrs and broker.broker_name in names
    }
