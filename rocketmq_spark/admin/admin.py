"""`Admin` shows the state of a cluster, and changes topics and the offsets of consumer groups.

It opens no connection before its first request.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, NoReturn

from rocketmq_spark.admin.answers import BrokerInfo, Group, OffsetReset, PeekedMessage, QueueOffsets, TopicInfo
from rocketmq_spark.admin.brokers import brokers_of, topics_of
from rocketmq_spark.admin.groups import group_of, reset_offsets, resetting
from rocketmq_spark.admin.queues import admin_options, missing_queues, offsets_of, peek
from rocketmq_spark.admin.topics import NewTopic, create_topic, delete_topic
from rocketmq_spark.display.row_table import Table
from rocketmq_spark.errors import NoBrokersException, RocketMQError, TopicRouteStaleException
from rocketmq_spark.model.names import check_topic, is_legal
from rocketmq_spark.model.route import TopicRouteData
from rocketmq_spark.options.kinds import parse_one
from rocketmq_spark.options.source import SOURCE_OPTIONS, SourceOptions
from rocketmq_spark.routing.connect import new_transport
from rocketmq_spark.source.topic_routes import closed_to_readers
from rocketmq_spark.transport.remoting.client import TOOLS_CONSUMER
from rocketmq_spark.transport.remoting.name_servers import silence
from rocketmq_spark.transport.remoting.transport import RemotingTransport

_GROUP: Final = next(spec for spec in SOURCE_OPTIONS if spec.field == "consumer_group")


class Admin:
    """Shows the state of a cluster, and changes topics and the offsets of groups. Answers are tables in a notebook.

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

    def delete_topic(self, topic: str) -> TopicRouteData:
        """Delete a topic and its messages on all brokers of its route, and return that route.

        A broker that is down keeps the topic, and registers it again when it starts. Writers may create the topic again
        (``autoCreateTopicEnable``).

        Raises a TopicRouteStaleException for an unknown topic, and an MQClientException for a topic of RocketMQ itself,
        if a broker of the route has no master, and if some servers failed. In that case the text names them.
        """
        route = self.route(topic)
        delete_topic(self._transport, topic, route, self._options.connection.name_server, self._timeout)
        return route

    def group(self, name: str) -> Group:
        """Return how far a consumer group is in each queue, and its members.

        The queues are those of all topics of which the group has committed offsets, retry topics too. Brokers do not
        store when an offset was committed: `QueueLag.read_until` is when the last message that was read was stored.

        Raises an MQClientException if no broker knows an offset or a member of the group.
        """
        return group_of(self._transport, parse_one(_GROUP, name, "group"), self._timeout)

    def reset_offsets(
        self, group: str, topic: str, to: str | int | datetime, *, dry_run: bool = False
    ) -> Table[OffsetReset]:
        """Commit other offsets of a topic for a consumer group that has no members, and return them.

        `to` is ``earliest``, ``latest``, a time (a datetime with a time zone, or milliseconds since 1970), or all
        offsets as in ``startingOffsets``. With a time, the group continues with the first message that was stored then
        or later; a queue without such a message continues at its end. With `dry_run` nothing is committed. Messages in
        the group's retry topic stay there. The `missing` of the table names queues whose offset was not committed.

        Raises an OptionError for a `to` that is not allowed or offsets of unknown queues, a TopicRouteStaleException
        for an unknown topic, and an MQClientException if the group has members, which would overwrite the offsets.
        """
        name = parse_one(_GROUP, group, "group")
        options = resetting(replace(self._options, subscribe=(topic,), consumer_group=name), to)
        return reset_offsets(options, self._transport, self.route(topic), dry_run=dry_run)
