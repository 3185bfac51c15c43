"""The gRPC protocol v2 through RocketMQ 5 proxies: one channel per endpoint, many calls in flight on each.

Turns the interfaces of :mod:`..base` into calls, and replies into outcomes. A configured endpoint takes a broker's
place in routes: its name, its address, and its only queue. Sends are not retried.

Channels and threads belong to one process. Another process makes its own under its own client id. It neither uses nor
closes nor drops what it inherited, because each of those can hang.
"""

from __future__ import annotations

import math
import os
import random as random_module
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

from rocketmq_spark._version import __version__
from rocketmq_spark.errors import (
    BrokerBusyException,
    BrokerOutcomeUnknownException,
    BrokerUnavailableException,
    MQBrokerException,
    MQClientException,
    OptionError,
    RemotingCommandException,
    RemotingException,
    RemotingTimeoutException,
    RocketMQError,
)
from rocketmq_spark.model.credentials import CredentialsProvider
from rocketmq_spark.model.message import MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.model.route import MAX_QUEUES, TopicRouteData
from rocketmq_spark.model.send_result import (
    TRANSACTION_NOT_TYPE,
    TRANSACTION_PREPARED_TYPE,
    TRANSACTION_ROLLBACK_TYPE,
    EndTransaction,
    RecallMessage,
    TransactionCheck,
    ending,
)
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.protocol.grpc.messages import (
    encode_send_request,
    end_transaction_request,
    outcome_of,
    recall_message_request,
    route_of,
    route_request,
)
from rocketmq_spark.protocol.remoting.codes import NO_NAME_SERVER
from rocketmq_spark.transport.base import OnCheckTransaction, OnEnd, OnOutcome, ReadTransport, Transport
from rocketmq_spark.transport.grpc.channels import Channels, root_certificates, target_of
from rocketmq_spark.transport.grpc.client import GrpcAnswer, GrpcClient, error_in, parsed
from rocketmq_spark.transport.grpc.metadata import MetadataSource
from rocketmq_spark.transport.grpc.telemetry import Pauses, Telemetry
from rocketmq_spark.transport.parallel import Permits, in_turn, most_relevant_error
from rocketmq_spark.transport.tls import TlsSettings

# Failures of one proxy or its broker, and not of the request: another proxy may answer it.
_ANOTHER_MAY_ANSWER: Final = (BrokerBusyException, BrokerOutcomeUnknownException, BrokerUnavailableException)

# Parts (see `parsed`) for each queue of a route: itself, topic, broker, endpoints, addresses, types. And for each row's
# result: itself, its status, fields of newer releases.
_ROUTE_PARTS: Final = 12 * MAX_QUEUES
_RESULT_PARTS: Final = 8


class GrpcTransport:
    """Implements `ProxyTransport` of :mod:`..base` over gRPC v2 (a 5.x proxy).

    A process that inherits one over a fork gets connections of its own with its first call, and nothing of what its
    parent had in flight. Fork while one is open, or well after it was closed: gRPC goes on shutting down after `close`,
    and a child forked in that moment may hang.

    Set `on_check_transaction` before the first half message is sent. OptionError: an endpoint is not ``host:port``, a
    limit below 1, a file of `tls` unusable, or a text cannot be in a header.

    Parameters
    ----------
    endpoints : sequence of str
        ``host:port`` of each proxy. May be empty if no route is requested.
    client_id : str
        What proxies list this client under, with a random end.
    namespace : str, default ""
        Sent with every call; a topic's name stays as it is.
    client_async_semaphore_value : int, default 65535
        Most sends in flight. The next one fails at once with RemotingTooMuchRequestException.
    random : random.Random, optional
        Picks the endpoint for the first route request, and the end of the client id.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        client_id: str,
        credentials: CredentialsProvider | None = None,
        tls: TlsSettings | None = None,
        namespace: str = "",
        client_async_semaphore_value: int = 65_535,
        random: random_module.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        pauses: Pauses | None = None,
    ) -> None:
        for endpoint in endpoints:
            try:
                target_of(endpoint)
            except ValueError as exc:
                raise OptionError(f"option endpoints: {exc}") from exc
        self.endpoints = tuple(dict.fromkeys(endpoints))
        self.on_check_transaction: OnCheckTransaction | None = None
        self._client_id = client_id
        self._credentials = credentials
        self._tls = tls
        self._roots = None if tls is None else root_certificates(tls)
        self._namespace = namespace
        self._limit = client_async_semaphore_value
        self._random = random or random_module.SystemRandom()
        self._clock = clock
        self._wall_clock = wall_clock
        self._pauses = pauses or Pauses()
        self._closed = False
        # As with name servers: at random first, then the one that answered last.
        self._good = self._random.randrange(len(self.endpoints)) if self.endpoints else 0
        # By process. A lock would not do: a thread of the parent may have held it for ever. Nothing is taken out:
        # collecting an inherited channel as garbage would close it.
        self._live = {os.getpid(): self._new_telemetry()}

    def __repr__(self) -> str:
        telemetry = self._live.get(os.getpid())
        state = (
            "closed" if self._closed else "not used in this process" if telemetry is None else repr(telemetry.client)
        )
        return f"<GrpcTransport endpoints={';'.join(self.endpoints)} {state}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if not name.startswith("_") and (hasattr(Transport, name) or hasattr(ReadTransport, name)):
                raise MQClientException(f"{name}: the gRPC protocol has no such call; use transport=remoting")
            raise AttributeError(f"'GrpcTransport' object has no attribute '{name}'")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a GrpcTransport holds channels and can't be pickled: pickle its options, and make it there")

    def __enter__(self) -> GrpcTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """True after `close`, or when the thread behind it has failed."""
        telemetry = self._live.get(os.getpid())
        return self._closed or (telemetry is not None and telemetry.client.closed)

    def send(self, request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        """Start one attempt (SendMessage); see `Sends.send`.

        The call's deadline is the shorter of `timeout` and `within`, and both count from here, because gRPC does not
        report when the last byte was written. What the protocol can't carry is an MQClientException as outcome.
        """
        telemetry, batch, queue = self._here(), request.batch, request.queue

        def on_answer(answer: GrpcAnswer) -> None:
            outcome = _outcome_of(request, answer)
            telemetry.client.tell(outcome.error, answer.signed_by)
            on_outcome(outcome)

        doing = f"sending {batch.rows} rows to {queue}"
        try:
            body = encode_send_request(request, namespace=self._namespace)
        except RocketMQError as exc:
            telemetry.client.refuse(exc, on_answer)
            return
        is_half = batch.sys_flag & TRANSACTION_ROLLBACK_TYPE == TRANSACTION_PREPARED_TYPE
        if is_half and self.on_check_transaction is not None:
            telemetry.half_message(batch.topic, request.producer_group)
        telemetry.client.start(request.address, "SendMessage", body, min(timeout, within), on_answer, doing)

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """Return a topic's route, with every endpoint in it, whichever answers.

        Each endpoint is asked at most once, with an equal share of the time left. The one that answered is asked first
        the next time. MQClientException (code 10004): there is no endpoint.
        """
        client, endpoints = self._here().client, self.endpoints
        if not endpoints:
            raise MQClientException(
                f"looking up the route of topic {topic}: no proxy is set; set the option endpoints", NO_NAME_SERVER
            )
        deadline = self._clock() + timeout
        failures: list[str] = []
        last: MQBrokerException | RemotingException | None = None
        for index, share in in_turn(endpoints, self._good, deadline, self._clock, failures):
            try:
                reply = self._query_route(client, topic, endpoints[index], share)
                self._good = index
                return route_of(reply, endpoints)
            except (*_ANOTHER_MAY_ANSWER, RemotingException) as exc:
                failures.append(str(exc))
                last = most_relevant_error(last, exc)
        within = f" within {round(timeout, 3):g} s" if self._clock() >= deadline else ""
        text = f"no proxy gave the route of topic {topic}{within}: {'; '.join(failures)}"
        if isinstance(last, MQBrokerException):
            raise type(last)(text, last.response_code, last.remark, last.broker_addr) from last
        raise (RemotingTimeoutException if last is None else type(last))(text) from last

    def heart_beat(self, address: str, client_id: str, producer_groups: Collection[str], timeout: float) -> None:  # noqa: ARG002
        """Keep this client alive at a proxy (Heartbeat) if it has a Telemetry stream there; else do nothing.

        Proxies know this transport's own client id.
        """
        self._here().heart_beat(address, timeout)

    def unregister_client(self, address: str, client_id: str, producer_group: str, timeout: float) -> None:  # noqa: ARG002
        """Stop answering checks for a producer group; after the last one notify the proxy (NotifyClientTermination).

        Nothing is sent without a Telemetry stream.
        """
        self._here().unregister(address, producer_group, timeout)

    def probe(self, queue: MessageQueue, address: str, timeout: float) -> None:
        """Ask for the route of the queue's topic."""
        self._query_route(self._here().client, queue.topic, address, timeout)

    def end_transaction(self, address: str, request: EndTransaction, timeout: float, on_end: OnEnd) -> None:
        """Start to commit or roll back a half message (EndTransaction), at the proxy that took it or asked."""
        doing, telemetry = ending(request), self._here()

        def on_answer(answer: GrpcAnswer) -> None:
            error = answer.error
            if answer.reply is not None:
                try:
                    reply = parsed(answer.reply, service.EndTransactionResponse, address, answer.doing)
                    error = error_in(reply.status, address, answer.doing)
                except RemotingCommandException as exc:
                    error = exc
            telemetry.client.tell(error, answer.signed_by)
            on_end(error)

        message = end_transaction_request(request, self._namespace).SerializeToString()
        telemetry.client.start(address, "EndTransaction", message, timeout, on_answer, doing)

    def end_transaction_oneway(self, address: str, request: EndTransaction, timeout: float) -> None:
        """Commit or roll back a half message (EndTransaction), and wait for the reply: gRPC has no one-way calls.

        A proxy keeps a half message for 30 s. Nothing is sent for an undecided one: a request would end it, and the
        proxy checks it later anyway.
        """
        if request.commit_or_rollback == TRANSACTION_NOT_TYPE:
            return
        message, doing = end_transaction_request(request, self._namespace), f"ending transaction {request.msg_id}"
        self._here().client.invoke(address, "EndTransaction", message, service.EndTransactionResponse, timeout, doing)

    def recall_message(self, address: str, request: RecallMessage, timeout: float) -> str:
        """Take a delayed message back (RecallMessage), and return its id."""
        message = recall_message_request(request, self._namespace)
        doing = f"recalling a message of topic {request.topic}"
        reply_type = service.RecallMessageResponse
        return self._here().client.invoke(address, "RecallMessage", message, reply_type, timeout, doing).message_id

    def close(self) -> None:
        """Close every channel of this process and end its threads; what is in flight fails. Idempotent."""
        self._closed = True
        telemetry = self._live.get(os.getpid())
        if telemetry is not None:
            telemetry.close()
            telemetry.client.close()

    def _here(self) -> Telemetry:
        """Return this process's connections and threads, making them on the first call."""
        if self.closed:
            raise RocketMQError("this transport is closed: make a new one")
        pid = os.getpid()
        telemetry = self._live.get(pid)
        return self._live.setdefault(pid, self._new_telemetry()) if telemetry is None else telemetry

    def _new_telemetry(self) -> Telemetry:
        identity = self._client_id, __version__, self._credentials, self._namespace
        metadata = MetadataSource(*identity, random=self._random, wall_clock=self._wall_clock)
        permits = Permits(self._limit, "clientAsyncSemaphoreValue")
        client = GrpcClient(Channels(self._tls, self._roots), metadata, permits, self._clock)
        return Telemetry(client, self.endpoints, self._namespace, self._on_check, self._pauses)

    def _query_route(self, client: GrpcClient, topic: str, endpoint: str, timeout: float) -> service.QueryRouteResponse:
        request, doing = route_request(topic, self._namespace, endpoint), f"looking up the route of topic {topic}"
        return client.invoke(
            endpoint, "QueryRoute", request, service.QueryRouteResponse, timeout, doing, most_parts=_ROUTE_PARTS
        )

    def _on_check(self, check: TransactionCheck) -> None:
        if self.on_check_transaction is not None:
            self.on_check_transaction(check)


def _outcome_of(request: SendRequest, answer: GrpcAnswer) -> SendOutcome:
    error = answer.error
    if answer.reply is not None:
        try:
            most = _RESULT_PARTS * (request.batch.rows + 1)
            reply = parsed(answer.reply, service.SendMessageResponse, request.address, answer.doing, most)
            return outcome_of(request, reply, answer.latency_ms, answer.doing)
        except RemotingCommandException as exc:
            error = exc
    return SendOutcome(request.queue, None, error, answer.latency_ms)
