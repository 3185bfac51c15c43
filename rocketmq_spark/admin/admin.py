"""`Admin` shows the state of a cluster, and creates or changes topics.

It opens no connection before its first request.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from rocketmq_spark import errors
from rocketmq_spark.admin.answers import BrokerInfo, PeekedMessage, QueueOffsets, TopicInfo
from rocketmq_spark.admin.brokers import brokers_of, topics_of
from rocketmq_spark.admin.queues import admin_options, missing_queues, offsets_of, peek
from rocketmq_spark.display.row_table import Table
from rocketmq_spark.errors import NoBrokersException, RocketMQError, TopicRouteStaleException
from rocketmq_spark.model.names import check_topic, is_legal, is_system_topic
from rocketmq_spark.model.route import MAX_QUEUES, PERM_READ, PERM_WRITE, TopicRouteData, masters_of
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.protocol.remoting.responses import BATCH_CQ, CLEANUP_POLICY, COMPACTION, MESSAGE_TYPE, QUEUE_TYPE
from rocketmq_spark.routing.connect import new_transport
from rocketmq_spark.routing.retries import Retries
from rocketmq_spark.source.topic_routes import closed_to_readers
from rocketmq_spark.transport.parallel import query_all
from rocketmq_spark.transport.remoting.client import TOOLS_CONSUMER
from rocketmq_spark.transport.remoting.name_servers import silence
from rocketmq_spark.transport.remoting.transport import RemotingTransport


class Admin:
    """Shows the state of a cluster, and creates or changes topics. The answers are shown as tables in a notebook.

    Parameters
    ----------
    name_server : str or sequence of str, optional
        ``host:9876;host:9876``. Default: the environment variable ``NAMESRV_ADDR``.
    timeout : float, default 5.0
        Seconds for one request to one server, at most 3,600.
    connection
        Options of a read's connection in snake_case, such as ``access_key``, ``use_tls`` and ``namespace``, see
        docs/options.md. With ``namespace``, topics are shown without it, and topics of other namespaces are not shown.

    Notes
    -----
    An argument that is malformed or contradicts another one is an OptionError. Each method that sends requests raises a
    ``RemotingException`` if no name server answers, and an ``MQBrokerException`` if one rejects the request. If some
    brokers do not answer, `missing` of a `Table` names them. An Admin is thread-safe, and can't be pickled.

    Examples
    --------
    >>> with rocketmq_spark.Admin("127.0.0.1:9876") as admin:  # doctest: +SKIP
    ...     admin.create_topic("orders", queues=8)
    ...     admin.topics()
    ...     admin.peek("orders", 5).to_pandas()
    """

    def __init__(
        self, name_server: str | Sequence[str] | None = None, *, timeout: float = 5.0, **connection: Any
    ) -> None:
        self._options = admin_options({"name_server": name_server, **connection}, timeout, os.environ)
        self._timeout = timeout
        transport = new_transport(self._options.connection, "")
        assert isinstance(transport, RemotingTransport), "there are no proxies among the options"
        self._transport = transport

    def __repr__(self) -> str:
        return f"<Admin {'closed ' if self._transport.closed else ''}{';'.join(self._options.connection.name_server)}>"

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Admin holds connections and can't be pickled: create it where it is used")

    @property
    def options(self) -> SourceOptions:
        """The options of the connection; their repr contains no secret."""
        return self._options

    @property
    def transport(self) -> RemotingTransport:
        """The transport, for requests that have no method here."""
        return self._transport

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._transport.close()

    def topics(self, *, all: bool = False) -> Table[TopicInfo]:  # noqa: A002
        """Return the topics of the cluster; with `all` also RocketMQ's own.

        Those are retry and dead-letter topics of consumer groups, templates, half messages, timers, and one topic per
        broker and cluster. Raises an MQClientException if the given name server is a broker or a proxy.
        """
        return topics_of(self._transport, self._timeout, everything=all)

    def route(self, topic: str) -> TopicRouteData:
        """Return the brokers and queues of a topic.

        Raises a TopicRouteStaleException, with similar names and the silent name servers, for an unknown topic. Raises
        a NoBrokersException if the name servers know no broker.
        """
        try:
            return self._transport.query_route(topic, self._timeout * len(self._options.connection.name_server))
        except NoBrokersException:
            raise
        except TopicRouteStaleException as exc:
            near: list[str] = []
            # A proxy does not list topics.
            with contextlib.suppress(RocketMQError):
                near = difflib.get_close_matches(topic, self._transport.topics(self._timeout), n=3)
            hint = f"create it: rocketmq-spark create-topic {topic}"
            if near:
                hint = f"did you mean {' or '.join(near)}?"
            elif not is_legal(topic):
                hint = f"{topic!r} is not a valid name: allowed are letters, digits and % | _ -"
            silent = silence(exc, self._options.connection.name_server)
            others = f"{silent} and may know one" if silent else ""
            raise TopicRouteStaleException(
                f"topic {topic} does not exist: {exc.broker_addr} returned no route{others}; {hint}",
                exc.response_code,
                exc.remark,
                exc.broker_addr,
            ) from exc

    def offsets(self, topic: str) -> Table[QueueOffsets]:
        """Return the offsets of each queue of a topic, and the total of messages in the notes.

        A broker counts a message shortly after its acknowledgement, because it builds its queues in the background.
        Raises an OptionError for a static topic, and a TopicRouteStaleException for an unknown topic.
        """
        rows, errors = offsets_of(self._options, self._transport, topic, self.route(topic))
        total = f"{sum(row.messages for row in rows):,} messages in {len(rows):,} queues"
        return Table(QueueOffsets, rows, missing=missing_queues(errors), notes=[total])

    def peek(
        self, topic: str, count: int = 10, *, tag: str | None = None, consumer_group: str = TOOLS_CONSUMER
    ) -> Table[PeekedMessage]:
        """Return the newest messages of a topic by store time, the newest first, without moving any group's offsets.

        Between brokers the order is as exact as their clocks. With `tag` only messages with this tag are returned, or
        with one of several as in ``a || b``. The last 1,000 messages of each queue are searched, or the last `count` if
        that is more. Requests name `consumer_group`. Its default, RocketMQ's own tools, exists on all brokers; access
        control may require another one.

        Raises an OptionError for a `count` below 1, an empty tag or a static topic, a TopicRouteStaleException for an
        unknown topic, and a ReadError if a queue returned nothing within the timeout or its broker fails.
        """
        route = self.route(topic)
        offsets, errors = offsets_of(self._options, self._transport, topic, route)
        filled = [one.queue for one in offsets if one.messages > 0]
        closed = closed_to_readers(self._options.connection.wire_name(topic), route, filled)
        readable = [one for one in offsets if one.queue not in closed]
        rows = peek(self._options, self._transport, {topic: route}, readable, count, tag, consumer_group)
        tag_note = "only the newest messages of each queue were searched for the tag"
        notes = [tag_note] if tag is not None and len(rows) < count else []
        notes += [] if filled else ["the topic holds no messages"]
        return Table(PeekedMessage, rows, missing=[*missing_queues(errors), *missing_queues(closed)], notes=notes)

    def brokers(self) -> Table[BrokerInfo]:
        """Return the brokers of the cluster, including slaves, and their status; raises errors as `topics`."""
        return brokers_of(self._transport, self._timeout)

    def create_topic(
        self,
        topic: str,
        queues: int = 8,
        *,
        message_type: str | None = None,
        inner: bool = False,
        compaction: bool = False,
        update: bool = False,
        cluster: str | None = None,
    ) -> TopicRouteData:
        """Create a topic on every master of a cluster, and return its route once every name server knows all of it.

        `queues` is per broker. `message_type` is what proxies of RocketMQ 5 accept: NORMAL, FIFO, DELAY,
        TRANSACTION, MIXED, PRIORITY (RocketMQ 5.4) or LITE (RocketMQ 5.5). Brokers' default is NORMAL. `inner` makes
        queues of the type BatchCQ, for writes with ``batchType=inner``. With `compaction` brokers keep the newest
        message of each key. Both are permanent. `cluster` is required if the name servers know several clusters.

        With `update` an existing topic gets `queues`, the permission ``rw``, and the message type if it is given.
        Messages in removed queues become unreadable.

        Raises an OptionError for an argument that is not allowed, and an MQClientException for a name that is not
        allowed, for an existing topic without `update`, and if some brokers failed. In that case the text names them,
        and the topic exists on the others.
        """
        connection = self._options.connection
        check_topic(connection.wire_name(topic))
        new = NewTopic(topic, queues, message_type, inner, compaction)
        return create_topic(self._transport, new, connection.name_server, self._timeout, cluster, update=update)


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
