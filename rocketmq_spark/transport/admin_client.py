"""Questions about a cluster and its topics: to the name servers, to one of them, to one broker.

Rule 1: a question to the name servers goes to one after the other until one answers; whatever it answers counts. Only
        a route has rules of its own (name_servers.py).
Rule 2: a question to one server is asked once.

Follows MQClientAPIImpl.java and spec/remoting.md sections 3 and 14.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TypeVar

from rocketmq_spark.errors import (
    MQClientException,
    NoBrokersException,
    RemotingConnectException,
    RemotingException,
    RemotingTlsException,
    RequestNotSupportedException,
    RocketMQError,
    TopicRouteStaleException,
)
from rocketmq_spark.route_data import TopicRouteData
from rocketmq_spark.transport.failures import to_tell
from rocketmq_spark.transport.loop import IoLoop
from rocketmq_spark.transport.name_servers import NameServers, silence
from rocketmq_spark.transport.pulls import PullClient
from rocketmq_spark.wire.cluster_info import ClusterInfo, decode_cluster_info, decode_properties, decode_runtime_info
from rocketmq_spark.wire.codes import RequestCode
from rocketmq_spark.wire.headers import (
    CreateTopicRequestHeader,
    GetRouteInfoRequestHeader,
    GetTopicConfigRequestHeader,
)
from rocketmq_spark.wire.name_lists import decode_topic_list
from rocketmq_spark.wire.route import decode_topic_route
from rocketmq_spark.wire.topic_config import TopicConfig, decode_all_topic_attributes, decode_topic_config

_T = TypeVar("_T")


class AdminClient(PullClient):
    """The part of a transport that asks about clusters and topics.

    Parameters
    ----------
    loop : IoLoop
    clock : callable
        Seconds, monotonic.
    async_permits, oneway_permits : int
        See `RemotingClient`.
    name_servers : sequence of str
        ``host:port`` each.
    random : random.Random
        Picks the name server to start with.
    """

    def __init__(
        self,
        loop: IoLoop,
        clock: Callable[[], float],
        async_permits: int,
        oneway_permits: int,
        name_servers: Sequence[str],
        random: Random,
    ) -> None:
        super().__init__(loop, clock, async_permits, oneway_permits)
        self._name_servers = NameServers(name_servers, random, clock)

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """Ask the name servers for a topic's route; see :class:`.base.Transport`.

        Raises
        ------
        NoBrokersException
            They don't know the topic, nor any broker.
        MQClientException, TopicRouteStaleException, MQBrokerException, RemotingException
            See `NameServers.route`.
        """
        deadline = self._clock() + timeout
        try:
            return self._name_servers.route(topic, timeout, lambda address, share: self.route_at(address, topic, share))
        except TopicRouteStaleException as exc:
            asked = exc.broker_addr
            if not self._knows_no_broker(asked.split(", "), deadline):
                raise
            others = silence(exc, self._name_servers.addresses)
            raise NoBrokersException(
                f"looking up the route of topic {topic}: {asked} answers, and knows no broker{others}: start one with "
                f"namesrvAddr={asked.replace(', ', ';')}, or look why those there do not register; one that has just "
                "started takes a moment",
                exc.response_code,
                exc.remark,
                asked,
            ) from exc

    def _knows_no_broker(self, addresses: Sequence[str], deadline: float) -> bool:
        try:
            return not any(self.cluster_info_at(one, deadline - self._clock()).brokers for one in addresses)
        except RocketMQError:
            # A proxy does not tell; and what was asked for is not this.
            return False

    def route_at(self, address: str, topic: str, timeout: float) -> TopicRouteData:
        """Ask one name server for a topic's route (GET_ROUTEINFO_BY_TOPIC)."""
        header = GetRouteInfoRequestHeader(topic=topic).to_ext_fields()
        doing = f"looking up the route of topic {topic}"
        command = self._call(address, RequestCode.GET_ROUTEINFO_BY_TOPIC, header, timeout, doing)
        return decode_topic_route(bytes(command.body))

    def topics(self, timeout: float) -> frozenset[str]:
        """Ask the name servers, one after the other, for the names of all topics; see :class:`.base.ReadTransport`."""

        def ask(address: str, doing: str) -> frozenset[str]:
            command = self._call(address, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {}, timeout, doing)
            return decode_topic_list(bytes(command.body))

        return self._of_any("listing all topics", ask)

    def cluster_info(self, timeout: float) -> ClusterInfo:
        """Ask the name servers, one after the other, for all brokers and their clusters (GET_BROKER_CLUSTER_INFO)."""
        return self._of_any("listing all brokers", lambda address, _: self.cluster_info_at(address, timeout))

    def cluster_info_at(self, address: str, timeout: float) -> ClusterInfo:
        """Ask one name server for all brokers and their clusters (GET_BROKER_CLUSTER_INFO)."""
        command = self._call(address, RequestCode.GET_BROKER_CLUSTER_INFO, {}, timeout, "listing all brokers")
        return decode_cluster_info(bytes(command.body))

    def runtime_info(self, address: str, timeout: float) -> Mapping[str, str]:
        """Return a broker's figures, by name (GET_BROKER_RUNTIME_INFO)."""
        doing = "asking a broker for its figures"
        return decode_runtime_info(
            bytes(self._call(address, RequestCode.GET_BROKER_RUNTIME_INFO, {}, timeout, doing).body)
        )

    def broker_config(self, address: str, timeout: float) -> Mapping[str, str]:
        """Return a broker's settings, by name (GET_BROKER_CONFIG). There may be secrets among them."""
        doing = "asking a broker for its settings"
        return decode_properties(bytes(self._call(address, RequestCode.GET_BROKER_CONFIG, {}, timeout, doing).body))

    def topic_config(self, address: str, topic: str, timeout: float) -> TopicConfig:
        """Return a topic's configuration on one broker (GET_TOPIC_CONFIG); proxies do not support this request."""
        header = GetTopicConfigRequestHeader(topic=topic).to_ext_fields()
        doing = f"looking up the configuration of topic {topic}"
        command = self._call(address, RequestCode.GET_TOPIC_CONFIG, header, timeout, doing)
        return decode_topic_config(bytes(command.body))

    def all_topic_attributes(self, address: str, timeout: float) -> Mapping[str, Mapping[str, str] | None]:
        """Return the same of all topics of a broker (GET_ALL_TOPIC_CONFIG); None of one that is older than types."""
        doing = "looking up the types of a broker's topics"
        command = self._call(address, RequestCode.GET_ALL_TOPIC_CONFIG, {}, timeout, doing)
        return decode_all_topic_attributes(bytes(command.body))

    def create_topic(
        self,
        address: str,
        topic: str,
        queue_nums: int,
        perm: int,
        timeout: float,
        *,
        read_queue_nums: int | None = None,
        topic_sys_flag: int = 0,
        order: bool = False,
        attributes: str = "",
    ) -> None:
        """Create or overwrite a topic on one broker (UPDATE_AND_CREATE_TOPIC); not over a proxy."""
        header = CreateTopicRequestHeader(
            topic=topic,
            read_queue_nums=queue_nums if read_queue_nums is None else read_queue_nums,
            write_queue_nums=queue_nums,
            perm=perm,
            topic_sys_flag=topic_sys_flag,
            order=order,
            attributes=attributes,
        )
        doing = f"creating topic {topic}"
        self._call(address, RequestCode.UPDATE_AND_CREATE_TOPIC, header.to_ext_fields(), timeout, doing)

    def _of_any(self, doing: str, ask: Callable[[str, str], _T]) -> _T:
        failures = []
        last: RemotingException | None = None
        for address in self._name_servers.addresses:
            try:
                return ask(address, doing)
            except RequestNotSupportedException as exc:
                raise MQClientException(
                    f"{doing}: {address} is no name server: it answers as a broker or a proxy does; give the addresses "
                    "of name servers (port 9876, unless they were given another one)"
                ) from exc
            except RemotingException as exc:
                failures.append(f"{address}: {exc}")
                last = to_tell(last, exc)
        kind = type(last) if isinstance(last, RemotingTlsException) else RemotingConnectException
        raise kind(f"{doing}: no name server answers: {'; '.join(failures)}") from last
