"""`Admin`, the front door; the modules beside it make the requests.

Nothing is opened before the first request.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Sequence
from typing import NoReturn

from rocketmq_spark.admin.answers import BrokerInfo, PeekedMessage, QueueOffsets, Table, TopicInfo
from rocketmq_spark.admin.brokers import brokers_of, topics_of
from rocketmq_spark.admin.create import NewTopic, create_topic
from rocketmq_spark.admin.queues import admin_options, closed_to_readers, held_by, missing_queues, offsets_of, peek
from rocketmq_spark.errors import NoBrokersException, RocketMQError, TopicRouteStaleException
from rocketmq_spark.model.names import check_topic, is_legal
from rocketmq_spark.model.route import TopicRouteData
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.routing.connect import new_transport
from rocketmq_spark.transport.remoting.client import TOOLS_CONSUMER
from rocketmq_spark.transport.remoting.name_servers import silence
from rocketmq_spark.transport.remoting.transport import RemotingTransport


class Admin:
    """Shows the state of a cluster, and creates topics. Every answer prints as a table, also in a notebook.

    Parameters
    ----------
    name_server : str or sequence of str, optional
        ``host:9876;host:9876``. Default: the environment variable ``NAMESRV_ADDR``.
    timeout : float, default 5.0
        Seconds for one request to one server; 3,600 at most.
    access_key, ..., namespace
        The options of a read with these names, see docs/options.md. With `namespace` topics have their names without
        it, and those of other namespaces are left out.

    Notes
    -----
    Each method raises a ``RemotingException`` if no name server answers, and an ``MQBrokerException`` if one refuses.
    A broker that does not answer is named in the table's `missing`, and the other answers are shown.

    It is safe for many threads, and can't be pickled. An OptionError is raised for an argument that is malformed or
    contradicts another one, and without a name server.

    Examples
    --------
    >>> with rocketmq_spark.Admin("127.0.0.1:9876") as admin:  # doctest: +SKIP
    ...     admin.create_topic("orders", queues=8)
    ...     admin.topics()
    ...     admin.peek("orders", 5).to_pandas()
    """

    def __init__(
        self,
        name_server: str | Sequence[str] | None = None,
        *,
        access_key: str | None = None,
        secret_key: str | None = None,
        security_token: str | None = None,
        credentials_provider: str | None = None,
        sign_name_server_requests: bool = False,
        use_tls: bool = False,
        tls_ca_file: str | None = None,
        tls_cert_file: str | None = None,
        tls_key_file: str | None = None,
        tls_server_name: str | None = None,
        tls_insecure_skip_verify: bool = False,
        namespace: str | None = None,
        timeout: float = 5.0,
    ) -> None:
        # All arguments but the timeout are options of the connection.
        self._options = admin_options(locals(), timeout, os.environ)
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
        raise TypeError("an Admin holds connections and can't be pickled: make one where it is used")

    @property
    def options(self) -> SourceOptions:
        """The options of the connection; their repr shows no secret."""
        return self._options

    @property
    def transport(self) -> RemotingTransport:
        """The transport, for requests that have no method here."""
        return self._transport

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._transport.close()

    def topics(self, *, all: bool = False) -> Table[TopicInfo]:  # noqa: A002
        """Return the topics of the cluster; an MQClientException if the given name server is a broker or a proxy.

        With `all` RocketMQ's own topics are included: retry and dead-letter topics of consumer groups, templates, half
        messages, timers, and one for each broker and cluster.
        """
        return topics_of(self._transport, self._timeout, everything=all)

    def route(self, topic: str) -> TopicRouteData:
        """Return the brokers and queues of a topic.

        Raises a TopicRouteStaleException if no name server knows the topic: its text has similar names, and the name
        servers that did not answer. It is a NoBrokersException if they know no broker at all.
        """
        try:
            return self._transport.query_route(topic, self._timeout * len(self._options.connection.name_server))
        except NoBrokersException:
            raise
        except TopicRouteStaleException as exc:
            near: list[str] = []
            # A proxy has no list of topics.
            with contextlib.suppress(RocketMQError):
                near = difflib.get_close_matches(topic, self._transport.topics(self._timeout), n=3)
            hint = f"create it: rocketmq-spark create-topic {topic}"
            if near:
                hint = f"did you mean {' or '.join(near)}?"
            elif not is_legal(topic):
                hint = f"no topic can be called {topic!r}: a name has letters, digits and % | _ - only"
            silent = silence(exc, self._options.connection.name_server)
            others = f"{silent} and may know one" if silent else ""
            raise TopicRouteStaleException(
                f"topic {topic} does not exist: {exc.broker_addr} knows no route of it{others}; {hint}",
                exc.response_code,
                exc.remark,
                exc.broker_addr,
            ) from exc

    def offsets(self, topic: str) -> Table[QueueOffsets]:
        """Return the offsets of each queue of a topic; the sum of messages is in the notes.

        A message is counted a moment after its send was acknowledged: a broker builds its queues in the background.
        Raises an OptionError for a static topic, and a TopicRouteStaleException for one that no name server knows.
        """
        answers = offsets_of(self._options, self._transport, topic, self.route(topic))
        rows = held_by(answers)
        total = f"{sum(row.messages for row in rows):,} messages in {len(rows):,} queues"
        return Table(QueueOffsets, rows, missing=missing_queues(answers), notes=[total])

    def peek(
        self, topic: str, count: int = 10, *, tag: str | None = None, consumer_group: str = TOOLS_CONSUMER
    ) -> Table[PeekedMessage]:
        """Return the newest messages of a topic, the newest first, without moving offsets of a consumer group.

        "Newest" is by the time of storing, so between brokers it is as good as their clocks.

        With `tag` only messages with this tag are returned, or with one of several as in ``a || b``. The last 1,000
        messages of each queue are searched, or the last `count` if that is more. The requests name `consumer_group`.
        The default, of RocketMQ's own tools, exists on all brokers. Access control may require another one.

        Raises an OptionError if `count` is less than 1, the tag is not one, or the topic is a static one; a
        TopicRouteStaleException if no name server knows the topic; and a ReadError if a queue returned nothing within
        the timeout, or its broker refuses.
        """
        answers = offsets_of(self._options, self._transport, topic, route := self.route(topic))
        held = held_by(answers)
        closed = closed_to_readers(held, route)
        readable = [one for one in held if one.queue not in closed]
        rows = peek(self._options, self._transport, {topic: route}, readable, count, tag, consumer_group)
        notes = ["a tag is looked for at the ends of queues only"] if tag is not None and len(rows) < count else []
        notes += [] if any(one.messages for one in held) else ["the topic holds no messages"]
        return Table(PeekedMessage, rows, missing=[*missing_queues(answers), *missing_queues(closed)], notes=notes)

    def brokers(self) -> Table[BrokerInfo]:
        """Return the brokers of the cluster, including slaves, and their status.

        Raises an MQClientException if the given name server is a broker or a proxy.
        """
        return brokers_of(self._transport, self._timeout)

    def create_topic(
        self,
        topic: str,
        queues: int = 8,
        *,
        message_type: str | None = None,
        inner: bool = False,
        update: bool = False,
        cluster: str | None = None,
    ) -> TopicRouteData:
        """Create a topic on every master of a cluster, and return its route once every name server knows all of it.

        Parameters
        ----------
        queues : int, default 8
            On each broker.
        message_type : {"NORMAL", "FIFO", "DELAY", "TRANSACTION"}, optional
            The messages that proxies of RocketMQ 5 accept. Brokers' default: ``NORMAL``.
        inner : bool, default False
            Make its queues of the type BatchCQ, for writes with ``batchType=inner``. They stay of that type.
        update : bool, default False
            Change an existing topic: its number of queues, its permission to ``rw``, and if `message_type` is given
            its message type. Messages in removed queues can't be read any more.
        cluster : str, optional
            Required if the name servers know several.

        Raises an OptionError for an argument that is not allowed, and an MQClientException if the topic exists and
        `update` is False, its name is not allowed, or some brokers failed: the text names each, and the topic exists on
        the others.
        """
        connection = self._options.connection
        check_topic(connection.wire_name(topic))
        new = NewTopic(topic, queues, message_type, inner)
        return create_topic(self._transport, new, connection.name_server, self._timeout, cluster, update=update)
