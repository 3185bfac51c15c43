"""Creates topics, and waits until every name server knows them.

Brokers overwrite an existing topic without an error, so one is changed only on request. Follows
``UpdateTopicSubCommand.java``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.errors import (
    MQBrokerException,
    MQClientException,
    OptionError,
    RemotingException,
    RocketMQError,
    TopicRouteStaleException,
)
from rocketmq_spark.model.names import is_system_topic
from rocketmq_spark.model.route import MAX_QUEUES, PERM_READ, PERM_WRITE, TopicRouteData, masters_of
from rocketmq_spark.protocol.remoting.response_bodies import BATCH_CQ, MESSAGE_TYPE, QUEUE_TYPE
from rocketmq_spark.transport.parallel import query_all
from rocketmq_spark.transport.remoting.transport import RemotingTransport

MESSAGE_TYPES: Final = ("NORMAL", "FIFO", "DELAY", "TRANSACTION")

_READ_WRITE: Final = PERM_READ | PERM_WRITE
# Seconds. Brokers notify name servers at once, unless they are busy.
_KNOWN_WITHIN: Final = 15.0
_POLL: Final = 0.1


@dataclass(frozen=True, slots=True)
class NewTopic:
    """The topic to create; `inner` asks for queues for inner batches."""

    name: str
    queues: int
    message_type: str | None
    inner: bool

    def attributes(self) -> str:
        """Return the attributes in the form of the request."""
        attributes = [f"+{MESSAGE_TYPE}={self.message_type.upper()}"] if self.message_type else []
        return ",".join([*attributes, f"+{QUEUE_TYPE}={BATCH_CQ}"] if self.inner else attributes)

    def check(self) -> None:
        """Raise an OptionError or MQClientException for values that brokers would reject, or accept and lose."""
        if is_system_topic(self.name):
            raise MQClientException(f"creating topic {self.name}: it is one of RocketMQ's own")
        if not isinstance(self.queues, int) or isinstance(self.queues, bool) or self.queues < 1:
            raise OptionError(
                f"creating topic {self.name} with {self.queues!r} queues: allowed is an integer, 1 or more"
            )
        if self.message_type is not None and str(self.message_type).upper() not in MESSAGE_TYPES:
            allowed = ", ".join(MESSAGE_TYPES)
            raise OptionError(f"creating topic {self.name} for {self.message_type!r} messages: allowed is {allowed}")


def create_topic(
    transport: RemotingTransport,
    new: NewTopic,
    name_servers: Sequence[str],
    timeout: float,
    cluster: str | None,
    *,
    update: bool,
) -> TopicRouteData:
    """Create or change a topic; see `Admin.create_topic`."""
    new.check()
    for name, flag in (("inner", new.inner), ("update", update)):
        if not isinstance(flag, bool):
            raise OptionError(f"creating topic {new.name} with {name}={flag!r}: allowed is True or False")
    masters = _masters(transport, cluster, timeout)
    if new.queues * len(masters) > MAX_QUEUES:
        raise OptionError(
            f"creating topic {new.name} with {new.queues} queues on each of {len(masters)} brokers: allowed are "
            f"{MAX_QUEUES} in all; more than that no write or read of ours takes"
        )
    if not update:
        _refuse_existing(transport, new, timeout)

    def create(broker: str) -> None:
        transport.create_topic(masters[broker], new.name, new.queues, _READ_WRITE, timeout, attributes=new.attributes())

    failed = {broker: why for broker, why in query_all(masters, create).items() if isinstance(why, RocketMQError)}
    if failed:
        reasons = "; ".join(f"{broker}: {why}" for broker, why in failed.items())
        first = next(iter(failed.values()))
        raise MQClientException(f"creating topic {new.name} with {new.queues} queues: {reasons}") from first
    # A new topic has no earlier permission.
    perm = _READ_WRITE if update else 0
    return known_to_all(transport, new, frozenset(masters), name_servers, timeout, perm)


def _masters(transport: RemotingTransport, cluster: str | None, timeout: float) -> dict[str, str]:
    info = transport.cluster_info(timeout)
    names = sorted(info.clusters)
    if cluster is None and len(names) > 1:
        raise OptionError(f"the name servers know the clusters {', '.join(names)}: say which one, with cluster")
    if cluster is not None and cluster not in names:
        raise OptionError(f"the name servers know no cluster {cluster!r}, but {', '.join(names) or 'none at all'}")
    masters = masters_of(one for one in info.brokers if cluster in (None, one.cluster))
    if not masters:
        raise MQClientException("no broker has registered with the name servers: start one, or wait for it")
    return masters


def _refuse_existing(transport: RemotingTransport, new: NewTopic, timeout: float) -> None:
    with contextlib.suppress(TopicRouteStaleException):
        route = transport.query_route(new.name, timeout)
        there = ", ".join(f"{data.broker_name}: {data.write_queue_nums} queues" for data in route.queue_datas)
        kind = "leaves its message type as it is"
        if new.message_type:
            kind = f"its message type to {new.message_type.upper()}"
        raise MQClientException(
            f"topic {new.name} exists already ({there}): take another name, or change it with --update (in Python "
            f"update=True), which sets its queues to {new.queues} on each broker and its permission to rw, and {kind}"
        )


def known_to_all(
    transport: RemotingTransport,
    new: NewTopic,
    masters: frozenset[str],
    name_servers: Sequence[str],
    timeout: float,
    perm: int,
    clock: Callable[[], float] = time.monotonic,
) -> TopicRouteData:
    """Return the route of a created topic, once every name server that answers knows all of it.

    A permission without `perm` may be the earlier one, or its broker is closed (``brokerPermission``) and limits its
    topics. It is accepted after 15 s, or `timeout` if that is more. Then a missing topic is an MQClientException.
    """
    patience = max(_KNOWN_WITHIN, timeout)
    deadline = clock() + patience
    while True:
        late = clock() > deadline
        answers = query_all(name_servers, lambda address: transport.name_servers.route_at(address, new.name, timeout))
        # A name server that is down asks the brokers when it is back.
        answering = [answer for answer in answers.values() if not isinstance(answer, RemotingException)]
        least = 0 if late else perm
        routes = [
            answer
            for answer in answering
            if isinstance(answer, TopicRouteData) and _has_all(answer, new, masters, least)
        ]
        if routes and len(routes) == len(answering):
            return routes[0]
        refused = [one for one in answering if isinstance(one, MQBrokerException) and not one.retriable]
        if refused:
            raise refused[0]
        if late:
            raise MQClientException(
                f"topic {new.name} was created on {', '.join(sorted(masters))}, and after {patience:g} s the name "
                "servers do not know all of it: ask for its route in a while"
            )
        time.sleep(_POLL)


def _has_all(route: TopicRouteData, new: NewTopic, masters: frozenset[str], perm: int) -> bool:
    ready = {
        data.broker_name
        for data in route.queue_datas
        if data.read_queue_nums == data.write_queue_nums == new.queues and data.perm & perm == perm
    }
    return masters <= ready
