"""`Admin`: the front door. What each question asks of whom is in the modules beside this one.

Rule 1: nothing is opened before the first question; what is open is closed by `close`.
Rule 2: names of topics are the user's; the namespace is put before them here, and taken off again.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

from rocketmq_spark.admin.brokers import brokers_of
from rocketmq_spark.admin.create import NewTopic, create_topic
from rocketmq_spark.admin.offsets import held_by, missing_queues, offsets_of
from rocketmq_spark.admin.options import admin_options
from rocketmq_spark.admin.rows import BrokerInfo, PeekedMessage, QueueOffsets, TopicInfo
from rocketmq_spark.admin.table import Table
from rocketmq_spark.admin.topics import topics_of
from rocketmq_spark.client.connect import new_transport
from rocketmq_spark.errors import NoBrokersException, RocketMQError, TopicRouteStaleException
from rocketmq_spark.names import is_legal
from rocketmq_spark.namespace import unwrap, wrap
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.route_data import TopicRouteData
from rocketmq_spark.transport.name_servers import silence
from rocketmq_spark.transport.remoting import RemotingTransport

# The group of RocketMQ's own tools: every broker knows it, none has to make it (``MixAll.TOOLS_CONSUMER_GROUP``).
TOOLS_CONSUMER = "TOOLS_CONSUMER"


class Admin:
    """Looks around in a cluster, and makes topics. Every answer is a value that prints, and shows itself in a notebook.

    Parameters
    ----------
    name_server : str or sequence of str, optional
        ``host:9876;host:9876``. Default: the environment variable ``NAMESRV_ADDR``.
    access_key, secret_key, security_token : str, optional
        Sign requests to brokers; each also as ``env:NAME`` or ``file:/path``.
    credentials_provider : str, optional
        ``module:Class`` of who knows these, in their place; see `CredentialsProvider`.
    sign_name_server_requests : bool, default False
        Sign requests to name servers, too: for proxies with access control, and name servers that demand it.
    use_tls : bool, default False
        Encrypt every connection.
    tls_ca_file : str, optional
        PEM file of the authorities to trust; by default the system's.
    tls_cert_file, tls_key_file : str, optional
        PEM files of this client's certificate and its key, for servers that demand them.
    tls_server_name : str, optional
        The one name that all certificates are for, where it is not the addresses dialled.
    tls_insecure_skip_verify : bool, default False
        Take every certificate; it is warned of.
    namespace : str, optional
        Only the topics of this namespace, by their names without it. Default: that of a name server
        ``MQ_INST_x_y.host``.
    timeout : float, default 5.0
        Seconds that one question to one server may take; 3,600 at most.

    Raises
    ------
    OptionError
        An argument is malformed, no name server is given, or two arguments contradict each other.

    Notes
    -----
    Each question raises a ``RemotingException`` where no name server answers, and an ``MQBrokerException`` where one
    refuses. A broker that does not answer is named in the table's `missing`, and the rest is shown.

    It may be used by many threads, and can't be pickled.

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
        given = {
            "name_server": name_server,
            "access_key": access_key,
            "secret_key": secret_key,
            "security_token": security_token,
            "credentials_provider": credentials_provider,
            "sign_name_server_requests": sign_name_server_requests,
            "use_tls": use_tls,
            "tls_ca_file": tls_ca_file,
            "tls_cert_file": tls_cert_file,
            "tls_key_file": tls_key_file,
            "tls_server_name": tls_server_name,
            "tls_insecure_skip_verify": tls_insecure_skip_verify,
            "namespace": namespace,
        }
        self._options = admin_options(given, timeout, os.environ)
        self._timeout = timeout
        transport = new_transport(self._options, "")
        assert isinstance(transport, RemotingTransport), "there are no proxies among the options"
        self._transport = transport

    def __repr__(self) -> str:
        return f"<Admin {'closed ' if self._transport.closed else ''}{';'.join(self._options.name_server)}>"

    def __enter__(self) -> Admin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Admin holds connections and can't be pickled: make one where it is used")

    @property
    def options(self) -> ReaderOptions:
        """How the cluster is reached; its repr shows no secret."""
        return self._options

    @property
    def transport(self) -> RemotingTransport:
        """What questions go through, for one that has no method here."""
        return self._transport

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._transport.close()

    def topics(self, *, all: bool = False) -> Table[TopicInfo]:  # noqa: A002
        """Return the topics of the cluster.

        Parameters
        ----------
        all : bool, default False
            Those that RocketMQ made for itself, too: retry and dead-letter topics of consumer groups, templates,
            half messages, timers, and one for each broker and cluster.

        Raises
        ------
        MQClientException
            What was given as name server is a broker or a proxy.
        """
        return topics_of(self._transport, self._options.wrapped_namespace, self._timeout, everything=all)

    def route(self, topic: str) -> TopicRouteData:
        """Return where the queues of a topic are.

        Raises
        ------
        TopicRouteStaleException
            No name server knows the topic; the text has names that are like it, and who did not answer. A
            ``NoBrokersException`` where they know no broker at all.
        """
        wired = wrap(self._options.wrapped_namespace, topic)
        try:
            return self._transport.query_route(wired, self._timeout * len(self._options.name_server))
        except NoBrokersException:
            raise
        except TopicRouteStaleException as exc:
            near: list[str] = []
            # A proxy has no list of topics to tell.
            with contextlib.suppress(RocketMQError):
                near = difflib.get_close_matches(wired, self._transport.topics(self._timeout), n=3)
            names = [unwrap(one, self._options.wrapped_namespace) for one in near]
            hint = f"create it: rocketmq-spark create-topic {topic}"
            if names:
                hint = f"did you mean {' or '.join(names)}?"
            elif not is_legal(wired):
                hint = f"no topic can be called {topic!r}: a name has letters, digits and % | _ - only"
            silent = silence(exc, self._options.name_server)
            others = f"{silent} and may know one" if silent else ""
            raise TopicRouteStaleException(
                f"topic {topic} does not exist: {exc.broker_addr} knows no route of it{others}; {hint}",
                exc.response_code,
                exc.remark,
                exc.broker_addr,
            ) from exc

    def offsets(self, topic: str) -> Table[QueueOffsets]:
        """Return what each queue of a topic holds, by the brokers' own count; their sum is in the notes.

        A message shows up here a moment after its send was acknowledged: a broker builds its queues in the background.

        Raises
        ------
        OptionError
            The topic is a static one.
        TopicRouteStaleException
            No name server knows the topic.
        """
        answers = offsets_of(self._options, self._transport, topic, self.route(topic))
        rows = held_by(answers)
        total = f"{sum(row.messages for row in rows):,} messages in {len(rows):,} queues"
        return Table(QueueOffsets, rows, missing=missing_queues(answers), notes=[total])

    def peek(
        self, topic: str, count: int = 10, *, tag: str | None = None, consumer_group: str = TOOLS_CONSUMER
    ) -> Table[PeekedMessage]:
        """Return the newest messages of a topic, the newest first; no offset of any consumer group is moved.

        Parameters
        ----------
        topic : str
        count : int, default 10
        tag : str, optional
            Only messages with this tag, or with one of several as in ``a || b``; looked for among the last 1,000
            messages of each queue, or the last `count` if that is more.
        consumer_group : str, default "TOOLS_CONSUMER"
            In whose name brokers are asked; that one, of RocketMQ's own tools, exists on all of them. Access control
            may want another one.

        Raises
        ------
        OptionError
            `count` is less than 1, the tag is not one, or the topic is a static one.
        TopicRouteStaleException
            No name server knows the topic.
        ReadError
            A queue gave nothing within the timeout, or its broker refuses.
        """
        # Arrow is not needed for anything else here.
        from rocketmq_spark.admin.peek import closed_to_readers, peek

        answers = offsets_of(self._options, self._transport, topic, route := self.route(topic))
        held = held_by(answers)
        closed = closed_to_readers(held, route)
        readable = [one for one in held if one.queue not in closed]
        rows = peek(self._options, self._transport, {topic: route}, readable, count, tag, consumer_group)
        notes = ["a tag is looked for at the ends of queues only"] if tag is not None and len(rows) < count else []
        notes += [] if any(one.messages for one in held) else ["the topic holds no messages"]
        return Table(PeekedMessage, rows, missing=[*missing_queues(answers), *missing_queues(closed)], notes=notes)

    def brokers(self) -> Table[BrokerInfo]:
        """Return the brokers of the cluster, slaves among them, and what they say of themselves.

        Raises
        ------
        MQClientException
            What was given as name server is a broker or a proxy.
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
        topic : str
        queues : int, default 8
            On each broker.
        message_type : {"NORMAL", "FIFO", "DELAY", "TRANSACTION"}, optional
            What proxies of RocketMQ 5 let in; default: what brokers take it for, ``NORMAL``.
        inner : bool, default False
            Make its queues of the type BatchCQ, for writes with ``batchType=inner``. They stay of that type.
        update : bool, default False
            Change a topic that exists: its number of queues, its permission to ``rw``, and if `message_type` is given
            its type of messages. Messages in queues that are taken away can't be read any more.
        cluster : str, optional
            Needed where the name servers know several.

        Raises
        ------
        OptionError
            An argument is not allowed.
        MQClientException
            The topic exists and `update` is False; its name is not allowed; or some brokers failed: the text names
            each, and the topic exists on the others.
        """
        new = NewTopic(topic, wrap(self._options.wrapped_namespace, topic), queues, message_type, inner)
        return create_topic(self._transport, new, self._options.name_server, self._timeout, cluster, update=update)
