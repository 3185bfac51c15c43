"""Requests routes, and the lists of topics and brokers, from the name servers, one after the other.

A list comes from the first one that answers. Both continue after a name server that cannot be reached. The search for a
route also continues after one that does not know the topic, or whose error is retriable.
docs/internals/remoting.md#name-servers has the order, and what the answers mean.
"""

from __future__ import annotations

import logging
import random as random_module
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from rocketmq_spark import errors
from rocketmq_spark.model.route import TopicRouteData, parse_address
from rocketmq_spark.protocol.remoting.codes import NO_NAME_SERVER, RequestCode, code_name
from rocketmq_spark.protocol.remoting.headers import GetRouteInfoRequestHeader
from rocketmq_spark.protocol.remoting.responses import (
    ClusterInfo,
    decode_cluster_info,
    decode_topic_list,
    decode_topic_route,
)
from rocketmq_spark.transport.parallel import in_turn, most_relevant_error
from rocketmq_spark.transport.remoting.client import RequestClient

logger = logging.getLogger("rocketmq_spark.transport")

_CHECK: Final = (
    "check that nameServer has the addresses of name servers (default port 9876), not of brokers or proxies, and that "
    "these servers run and can be reached from here"
)

_T = TypeVar("_T")


class NameServers:
    """The name servers of one transport, ``host:port`` each; `random` draws the one to start with."""

    def __init__(self, client: RequestClient, addresses: Sequence[str], random: random_module.Random) -> None:
        for address in addresses:
            try:
                parse_address(address)
            except ValueError as exc:
                raise errors.OptionError(f"nameServer: {exc}") from exc
        self.addresses = tuple(dict.fromkeys(addresses))
        self._client = client
        self._preferred = random.randrange(len(self.addresses)) if self.addresses else 0

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """Return a topic's route; `timeout` bounds all name servers together.

        MQClientException: no name server is configured (code 10004). TopicRouteStaleException: no answering name server
        knows the topic. NoBrokersException: none of them knows a broker either. MQBrokerException: a name server
        rejected the request, or one is not ready and no other one knows the topic. RemotingException: none answered.
        """
        deadline = self._client.clock() + timeout
        try:
            return self._first_route(topic, timeout)
        except errors.TopicRouteStaleException as exc:
            servers = exc.broker_addr
            if not self._know_no_broker(servers.split(", "), deadline):
                raise
            text = (
                f"looking up the route of topic {topic}: {servers} answers, and knows no broker"
                f"{silence(exc, self.addresses)}: start one with namesrvAddr={servers.replace(', ', ';')}, or find out "
                "why running brokers do not register. A broker that has just started needs a moment"
            )
            raise errors.NoBrokersException(text, exc.response_code, exc.remark, servers) from exc

    def _first_route(self, topic: str, timeout: float) -> TopicRouteData:
        addresses, clock = self.addresses, self._client.clock
        if not addresses:
            text = f"looking up the route of topic {topic}: no name server is set; set the option nameServer"
            raise errors.MQClientException(text, NO_NAME_SERVER)
        deadline = clock() + timeout
        failures: list[str] = []
        unknown: list[errors.TopicRouteStaleException] = []
        last: errors.RemotingException | None = None
        busy: errors.MQBrokerException | None = None
        for index, share in in_turn(addresses, self._preferred, deadline, clock, failures):
            try:
                route = self.route_at(addresses[index], topic, share)
            except errors.TopicRouteStaleException as exc:
                if not unknown:
                    # Prefer a name server that answers, even if none knows the topic.
                    self._preferred = index
                unknown.append(exc)
            except errors.MQBrokerException as exc:
                if not exc.retriable:
                    self._preferred = index
                    raise
                failures.append(f"{addresses[index]}: {exc}")
                busy = exc
            except errors.RemotingException as exc:
                failures.append(f"{addresses[index]}: {exc}")
                last = most_relevant_error(last, exc)
            else:
                self._preferred = index
                return route
        if unknown and busy is None:
            raise _unknown_topic(topic, unknown, failures) from unknown[0]
        failures += [f"{exc.broker_addr}: {exc}" for exc in unknown]
        within = f" within {round(timeout, 3):g} s" if clock() >= deadline else ""
        text = f"no name server gave the route of topic {topic}{within}: {'; '.join(failures)}"
        if last is None or last.retriable:
            # A permanent error already says what to change.
            text += f" ({_CHECK})"
        if busy is not None:
            raise type(busy)(text, busy.response_code, busy.remark, busy.broker_addr) from busy
        kind = errors.RemotingTimeoutException if last is None else type(last)
        raise kind(text) from last

    def _know_no_broker(self, addresses: Sequence[str], deadline: float) -> bool:
        try:
            return not any(self.cluster_info_at(name, deadline - self._client.clock()).brokers for name in addresses)
        except errors.RocketMQError:
            # Best effort: proxies do not support this request.
            return False

    def route_at(self, address: str, topic: str, timeout: float) -> TopicRouteData:
        """Ask one name server for a topic's route (GET_ROUTEINFO_BY_TOPIC)."""
        header, doing = GetRouteInfoRequestHeader(topic=topic), f"looking up the route of topic {topic}"
        deadline = self._client.clock() + timeout
        route = self._client.ask_body(address, header, timeout, doing, decode_topic_route)
        closed = {data.broker_name for data in route.queue_datas if not data.writable}
        if any(broker.slave_may_act and broker.broker_name in closed for broker in route.broker_datas):
            return self._with_real_ids(route, address, deadline)
        return route

    def _with_real_ids(self, route: TopicRouteData, address: str, deadline: float) -> TopicRouteData:
        """Return the route with the brokers' own ids: an acting master is a slave, and may lack messages.

        Without an answer, a listed master of a broker whose slaves may act counts as a slave.
        """
        real: dict[str, Mapping[int, str]] = {}
        try:
            info = self.cluster_info_at(address, deadline - self._client.clock())
            real = {broker.broker_name: broker.broker_addrs for broker in info.brokers}
        except errors.RocketMQError as exc:
            logger.warning("unknown which slaves act as masters, so listed masters count as slaves: %s", exc)
        brokers = []
        for broker in route.broker_datas:
            addresses = broker.broker_addrs
            if broker.slave_may_act:
                slaves = {broker_id or max(addresses) + 1: name for broker_id, name in addresses.items()}
                addresses = real.get(broker.broker_name, slaves)
            brokers.append(replace(broker, broker_addrs=addresses))
        return replace(route, broker_datas=tuple(brokers))

    def topics(self, timeout: float) -> frozenset[str]:
        """Return the names of all topics."""
        return self._first_answer("listing all topics", lambda address: self.topics_at(address, timeout))

    def topics_at(self, address: str, timeout: float) -> frozenset[str]:
        """Ask one name server for the names of all topics (GET_ALL_TOPIC_LIST_FROM_NAMESERVER)."""
        code = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
        return self._client.ask_body(address, code, timeout, "listing all topics", decode_topic_list)

    def cluster_info(self, timeout: float) -> ClusterInfo:
        """Return all brokers and their clusters."""
        return self._first_answer("listing all brokers", lambda address: self.cluster_info_at(address, timeout))

    def cluster_info_at(self, address: str, timeout: float) -> ClusterInfo:
        """Ask one name server for all brokers and their clusters (GET_BROKER_CLUSTER_INFO)."""
        code = RequestCode.GET_BROKER_CLUSTER_INFO
        return self._client.ask_body(address, code, timeout, "listing all brokers", decode_cluster_info)

    def _first_answer(self, doing: str, ask: Callable[[str], _T]) -> _T:
        failures = []
        last: errors.RemotingException | None = None
        for address in self.addresses:
            try:
                return ask(address)
            except errors.RequestNotSupportedException as exc:
                text = f"{doing}: {address} is no name server: it answers like a broker or a proxy"
                raise errors.MQClientException(f"{text}; give addresses of name servers (default port 9876)") from exc
            except errors.RemotingException as exc:
                failures.append(f"{address}: {exc}")
                last = most_relevant_error(last, exc)
        kind = type(last) if isinstance(last, errors.RemotingTlsException) else errors.RemotingConnectException
        hint = "" if kind is not errors.RemotingConnectException else f" ({_CHECK})"
        raise kind(f"{doing}: no name server answers: {'; '.join(failures)}{hint}") from last


def silence(exc: errors.TopicRouteStaleException, name_servers: Sequence[str]) -> str:
    """Return a clause with the name servers that did not answer about an unknown topic; "" if all answered."""
    answering = exc.broker_addr.split(", ")
    silent = ", ".join(address for address in name_servers if address not in answering)
    return f", while {silent} did not answer" if silent else ""


def _unknown_topic(
    topic: str, unknown: Sequence[errors.TopicRouteStaleException], failures: Sequence[str]
) -> errors.TopicRouteStaleException:
    servers, code = ", ".join(exc.broker_addr for exc in unknown), unknown[0].response_code
    # The second line of a remark is a link to RocketMQ's documentation of errors.
    remark = unknown[0].remark.partition("\n")[0] or "(no remark)"
    silent = f"; without an answer: {'; '.join(failures)}" if failures else ""
    text = f"looking up the route of topic {topic}: {servers} answered {code} {code_name(code)}: {remark}{silent}"
    hint = "create the topic, or check its name and the nameServer option"
    return errors.TopicRouteStaleException(f"{text} ({hint})", code, f"{servers}: {remark}{silent}", servers)
