"""Creates, changes and deletes topics for `Admin`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rocketmq_spark import errors
from rocketmq_spark.model.names import is_system_topic
from rocketmq_spark.model.route import MAX_QUEUES, PERM_READ, PERM_WRITE, TopicRouteData, masters_of
from rocketmq_spark.protocol.remoting.headers import DeleteTopicFromNamesrvRequestHeader, DeleteTopicRequestHeader
from rocketmq_spark.protocol.remoting.responses import BATCH_CQ, CLEANUP_POLICY, COMPACTION, MESSAGE_TYPE, QUEUE_TYPE
from rocketmq_spark.routing.retries import Retries
from rocketmq_spark.routing.topic_configs import release_before_5
from rocketmq_spark.transport.parallel import query_all
from rocketmq_spark.transport.remoting.transport import RemotingTransport

MESSAGE_TYPES: Final = ("NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED", "PRIORITY", "LITE")

_READ_WRITE: Final = PERM_READ | PERM_WRITE
# Seconds. Brokers that are not busy notify name servers at once.
_KNOWN_WITHIN: Final = 15.0
_POLL: Final = 0.1


@dataclass(frozen=True, slots=True)
class NewTopic:
    """The topic to create; `inner` means queues for inner batches, `compaction` one message for each key."""

    name: str
    queues: int
    message_type: str | None
    inner: bool
    compaction: bool = False

    def attributes(self) -> str:
        """Return the attributes as the request encodes them."""
        attributes = [f"+{MESSAGE_TYPE}={self.message_type.upper()}"] if self.message_type else []
        attributes += [f"+{QUEUE_TYPE}={BATCH_CQ}"] if self.inner else []
        return ",".join([*attributes, f"+{CLEANUP_POLICY}={COMPACTION}"] if self.compaction else attributes)

    @property
    def needs_attributes(self) -> bool:
        """Whether messages would get lost or be delivered otherwise in a plain topic."""
        of_type = (self.message_type or "").upper() in ("DELAY", "PRIORITY", "LITE")
        return self.inner or self.compaction or of_type

    def check(self) -> None:
        """Raise an OptionError or MQClientException for values that brokers would reject, or accept but not apply."""
        if is_system_topic(self.name):
            raise errors.MQClientException(
                f"creating topic {self.name}: the name is reserved for RocketMQ; choose another"
            )
        if not isinstance(self.queues, int) or isinstance(self.queues, bool) or self.queues < 1:
            raise errors.OptionError(
                f"creating topic {self.name} with {self.queues!r} queues: allowed are integers from 1 on"
            )
        if self.message_type is not None and str(self.message_type).upper() not in MESSAGE_TYPES:
            allowed = ", ".join(MESSAGE_TYPES)
            raise errors.OptionError(
                f"creating topic {self.name} for {self.message_type!r} messages: allowed are {allowed}"
            )


def create_topic(
    transport: RemotingTransport,
    new: NewTopic,
    name_servers: Sequence[str],
    timeout: float,
    cluster: str | None,
    *,
    update: bool,
) -> TopicRouteData:
    """Create or change a topic; see `Admin.create_topic` and docs/internals/remoting.md#topics."""
    new.check()
    for name, flag in (("inner", new.inner), ("compaction", new.compaction), ("update", update)):
        if not isinstance(flag, bool):
            raise errors.OptionError(f"creating topic {new.name} with {name}={flag!r}: allowed is True or False")
    masters = _masters(transport, cluster, timeout)
    if new.queues * len(masters) > MAX_QUEUES:
        raise errors.OptionError(
            f"creating topic {new.name} with {new.queues} queues on each of {len(masters)} brokers: writes and reads "
            f"support at most {MAX_QUEUES} queues in all; create fewer"
        )
    _refuse_old_brokers(transport, new, masters, timeout)
    if not update:
        _refuse_existing(transport, new, timeout)

    def create(broker: str) -> None:
        transport.create_topic(masters[broker], new.name, new.queues, _READ_WRITE, timeout, attributes=new.attributes())

    failed = {
        broker: why for broker, why in query_all(masters, create).items() if isinstance(why, errors.RocketMQError)
    }
    if failed:
        reasons = "; ".join(f"{broker}: {why}" for broker, why in failed.items())
        first = next(iter(failed.values()))
        created = ", ".join(broker for broker in masters if broker not in failed) or "no broker"
        raise errors.MQClientException(
            f"creating topic {new.name} with {new.queues} queues failed on {reasons}. It succeeded on {created}"
        ) from first
    # A new topic has no earlier permission.
    perm = _READ_WRITE if update else 0
    return known_to_all(transport, new, frozenset(masters), name_servers, timeout, perm)


def _masters(transport: RemotingTransport, cluster: str | None, timeout: float) -> dict[str, str]:
    info = transport.cluster_info(timeout)
    names = sorted(info.clusters)
    if cluster is None and len(names) > 1:
        raise errors.OptionError(
            f"the name servers know several clusters ({', '.join(names)}): choose one with --cluster (in Python "
            "cluster=)"
        )
    if cluster is not None and cluster not in names:
        raise errors.OptionError(
            f"unknown cluster {cluster!r}: the name servers know {', '.join(names) or 'no cluster'}"
        )
    masters = masters_of(broker for broker in info.brokers if cluster in (None, broker.cluster))
    if not masters:
        raise errors.MQClientException(
            "no master broker is registered with the name servers: start one with namesrvAddr set to their addresses. "
            "If it has just started, try again"
        )
    return masters


def _refuse_old_brokers(transport: RemotingTransport, new: NewTopic, masters: dict[str, str], timeout: float) -> None:
    """Raise an MQClientException if a broker before 5.0 would create a plain topic, because it ignores attributes."""
    if not new.needs_attributes:
        return
    answers = query_all(masters, lambda broker: transport.runtime_info(masters[broker], timeout))
    for broker, runtime in answers.items():
        if not isinstance(runtime, errors.RocketMQError) and (release := release_before_5(runtime)):
            raise errors.MQClientException(
                f"creating topic {new.name}: broker {broker} has RocketMQ {release}, which ignores the attributes "
                f"{new.attributes()} and would create a plain topic: use brokers of RocketMQ 5, or leave them out"
            )


def _refuse_existing(transport: RemotingTransport, new: NewTopic, timeout: float) -> None:
    with contextlib.suppress(errors.TopicRouteStaleException):
        route = transport.query_route(new.name, timeout)
        brokers = ", ".join(f"{data.broker_name}: {data.write_queue_nums} queues" for data in route.queue_datas)
        kind = f"sets its message type to {new.message_type.upper()}" if new.message_type else "keeps its message type"
        raise errors.MQClientException(
            f"topic {new.name} exists already ({brokers}): choose another name, or change it with --update (in Python "
            f"update=True), which sets its queues to {new.queues} on each broker, its permission to rw, and {kind}"
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

    A permission without `perm` may be the earlier one, or that of a broker with a restrictive ``brokerPermission``. It
    is accepted after 15 s, or `timeout` if that is longer. A topic that is missing then is an MQClientException.
    """
    patience = max(_KNOWN_WITHIN, timeout)
    retries, late = Retries(clock() + patience, lambda _: _POLL, clock), False
    while True:
        answers = query_all(name_servers, lambda address: transport.name_servers.route_at(address, new.name, timeout))
        # A name server that is down gets the topic from the brokers after its restart.
        answering = [answer for answer in answers.values() if not isinstance(answer, errors.RemotingException)]
        least = 0 if late else perm
        routes = [
            route
            for route in answering
            if isinstance(route, TopicRouteData)
            and masters
            <= {
                data.broker_name
                for data in route.queue_datas
                if data.read_queue_nums == data.write_queue_nums == new.queues and data.perm & least == least
            }
        ]
        if routes and len(routes) == len(answering):
            return routes[0]
        refused = [exc for exc in answering if isinstance(exc, errors.MQBrokerException) and not exc.retriable]
        if refused:
            raise refused[0]
        if late:
            raise errors.MQClientException(
                f"topic {new.name} was created on {', '.join(sorted(masters))}, but after {patience:g} s not every "
                f"name server knows all its queues: check later with rocketmq-spark route {new.name}"
            )
        late = not retries.wait()


def delete_topic(
    transport: RemotingTransport, topic: str, route: TopicRouteData, name_servers: Sequence[str], timeout: float
) -> None:
    """Delete a topic on the masters of its route, and then on the name servers; see `Admin.delete_topic`."""
    if is_system_topic(topic):
        raise errors.MQClientException(f"deleting topic {topic}: it belongs to RocketMQ, and brokers keep it")
    names = [data.broker_name for data in route.queue_datas]
    masters = masters_of(broker for broker in route.broker_datas if broker.broker_name in names)
    if absent := sorted(set(names) - masters.keys()):
        raise errors.MQClientException(
            f"deleting topic {topic}: the master of {', '.join(absent)} is in no route, and would bring the topic "
            "back. Nothing was deleted. Start it first"
        )
    doing = f"deleting topic {topic}"

    def on_broker(broker: str) -> None:
        transport.client.call(masters[broker], DeleteTopicRequestHeader(topic=topic), timeout, doing)

    def on_name_server(address: str) -> None:
        transport.client.call(address, DeleteTopicFromNamesrvRequestHeader(topic=topic), timeout, doing)

    # Without the route, a second call would not find the brokers that failed.
    for servers, delete in ((masters, on_broker), (name_servers, on_name_server)):
        answers = query_all(servers, delete)
        failed = {server: why for server, why in answers.items() if isinstance(why, errors.RocketMQError)}
        if failed:
            deleted = ", ".join(server for server in answers if server not in failed) or "no server"
            reasons = "; ".join(f"{server}: {why}" for server, why in failed.items())
            raise errors.MQClientException(
                f"{doing} failed on {reasons}. It succeeded on {deleted}. Delete it again when they answer"
            ) from next(iter(failed.values()))
