"""Implements `ProxyTransport` of :mod:`..base` with gRPC v2 calls to RocketMQ 5 proxies, and never repeats a send.

The other methods of `Transport` and `ReadTransport` raise MQClientException, because proxies do not support them.
"""

from __future__ import annotations

import math
import os
import random as random_module
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

from rocketmq_spark import errors
from rocketmq_spark._version import __version__
from rocketmq_spark.model import send_result
from rocketmq_spark.model.credentials import CredentialsProvider
from rocketmq_spark.model.message import MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.model.route import MAX_QUEUES, TopicRouteData
from rocketmq_spark.protocol.grpc import messages
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.protocol.remoting.codes import NO_NAME_SERVER
from rocketmq_spark.transport.base import Closes, OnCheckTransaction, OnEnd, OnOutcome, ReadTransport, Transport
from rocketmq_spark.transport.grpc.channels import Channels, root_certificates, target_of
from rocketmq_spark.transport.grpc.client import GrpcAnswer, GrpcClient, error_in, parsed
from rocketmq_spark.transport.grpc.metadata import MetadataSource
from rocketmq_spark.transport.grpc.telemetry import Telemetry
from rocketmq_spark.transport.parallel import Permits, in_turn, most_relevant_error
from rocketmq_spark.transport.tls import TlsSettings

# After these errors of a proxy or its broker, another proxy may answer.
_ANOTHER_MAY_ANSWER: Final = (
    errors.BrokerBusyException,
    errors.BrokerOutcomeUnknownException,
    errors.BrokerUnavailableException,
)

# Parts (see `parsed`) for each queue of a route: itself, topic, broker, endpoints, addresses, types. And for each row's
# result: itself, its status, fields of newer releases.
_ROUTE_PARTS: Final = 12 * MAX_QUEUES
_RESULT_PARTS: Final = 8


class GrpcTransport(Closes):
    """Implements `ProxyTransport` of :mod:`..base` over gRPC v2 (a 5.x proxy).

    Each process has its own channels, threads and client id (docs/internals/grpc.md#forks). Set `on_check_transaction`
    before the first half message is sent. OptionError: an endpoint is not ``host:port``, a limit is below 1, a file of
    `tls` is unusable, or a header cannot hold a text.
    """

    def __init__(
        self,
        endpoints: Sequence[str],  # ``host:port`` of each proxy; may be empty if no route is requested
        *,
        client_id: str,  # The name under which proxies list this client, with a random end
        credentials: CredentialsProvider | None = None,
        tls: TlsSettings | None = None,
        namespace: str = "",  # Sent with every call, but not in the names of topics
        client_async_semaphore_value: int = 65_535,  # Most sends in flight; the next one fails at once
        random: random_module.Random | None = None,  # Selects the first endpoint, and the end of the client id
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        reopen_after: float = 1.0,
        settings_every: float = 300.0,
    ) -> None:
        for endpoint in endpoints:
            try:
                target_of(endpoint)
            except ValueError as exc:
                raise errors.OptionError(f"option endpoints: {exc}") from exc
        self.endpoints = tuple(dict.fromkeys(endpoints))
        self.on_check_transaction: OnCheckTransaction | None = None
        self._namespace = namespace
        self._clock = clock
        self._closed = False
        random = random or random_module.SystemRandom()
        # As with name servers, first a random endpoint, then the last one that answered.
        self._preferred = random.randrange(len(self.endpoints)) if self.endpoints else 0
        roots = None if tls is None else root_certificates(tls)

        def new_telemetry() -> Telemetry:
            identity = client_id, __version__, credentials, namespace
            metadata = MetadataSource(*identity, random=random, wall_clock=wall_clock)
            permits = Permits(client_async_semaphore_value, "clientAsyncSemaphoreValue")
            client = GrpcClient(Channels(tls, roots), metadata, permits, clock)
            return Telemetry(client, self.endpoints, namespace, self._on_check, reopen_after, settings_every)

        self._new_telemetry = new_telemetry
        # By process. No lock, because the parent could hold it forever. No removal: docs/internals/grpc.md#forks.
        self._live = {os.getpid(): new_telemetry()}

    def __repr__(self) -> str:
        telemetry = self._live.get(os.getpid())
        client = "not used in this process" if telemetry is None else repr(telemetry.client)
        return f"<GrpcTransport endpoints={';'.join(self.endpoints)} {'closed' if self._closed else client}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if not name.startswith("_") and (hasattr(Transport, name) or hasattr(ReadTransport, name)):
                raise errors.MQClientException(
                    f"{name}: the gRPC protocol has no such call; give name_server instead of endpoints"
                )
            raise AttributeError(f"'GrpcTransport' object has no attribute '{name}'")

    @property
    def closed(self) -> bool:
        """True after `close`, or when its thread has failed."""
        telemetry = self._live.get(os.getpid())
        return self._closed or (telemetry is not None and telemetry.client.closed)

    def send(self, request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        """Start one attempt (SendMessage); see `Sends.send`, and docs/internals/grpc.md#deadlines for `timeout`.

        The outcome of a message that the protocol can't carry is an MQClientException.
        """
        telemetry, batch, queue = self._here(), request.batch, request.queue

        def on_answer(answer: GrpcAnswer) -> None:
            outcome = _outcome_of(request, answer)
            telemetry.client.report(outcome.error, answer.signed_by)
            on_outcome(outcome)

        doing = f"sending {batch.rows} rows to {queue}"
        try:
            body = messages.encode_send_request(request, namespace=self._namespace)
        except errors.RocketMQError as exc:
            telemetry.client.refuse(exc, on_answer)
            return
        is_half = batch.sys_flag & send_result.TRANSACTION_ROLLBACK_TYPE == send_result.TRANSACTION_PREPARED_TYPE
        if is_half and self.on_check_transaction is not None:
            telemetry.half_message(batch.topic, request.producer_group)
        telemetry.client.start(request.address, "SendMessage", body, min(timeout, within), on_answer, doing)

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """Return a topic's route (docs/internals/grpc.md#routes). MQClientException (10004): there is no endpoint."""
        client, endpoints = self._here().client, self.endpoints
        if not endpoints:
            text = f"looking up the route of topic {topic}: no proxy is set; set the option endpoints"
            raise errors.MQClientException(text, NO_NAME_SERVER)
        deadline = self._clock() + timeout
        failures: list[str] = []
        last: errors.MQBrokerException | errors.RemotingException | None = None
        for index, share in in_turn(endpoints, self._preferred, deadline, self._clock, failures):
            try:
                reply = self._query_route(client, topic, endpoints[index], share)
                self._preferred = index
                return messages.route_of(reply, endpoints)
            except (*_ANOTHER_MAY_ANSWER, errors.RemotingException) as exc:
                failures.append(str(exc))
                last = most_relevant_error(last, exc)
        within = f" within {round(timeout, 3):g} s" if self._clock() >= deadline else ""
        text = f"no proxy gave the route of topic {topic}{within}: {'; '.join(failures)}"
        if isinstance(last, errors.MQBrokerException):
            raise type(last)(text, last.response_code, last.remark, last.broker_addr) from last
        raise (errors.RemotingTimeoutException if last is None else type(last))(text) from last

    def heart_beat(self, address: str, client_id: str, producer_groups: Collection[str], timeout: float) -> None:  # noqa: ARG002
        """Keep this transport's own client id registered at a proxy (Heartbeat), if it has a Telemetry stream there."""
        self._here().heart_beat(address, timeout)

    def unregister_client(self, address: str, client_id: str, producer_group: str, timeout: float) -> None:  # noqa: ARG002
        """Stop answering checks for a group; after the last group end the stream (NotifyClientTermination)."""
        self._here().unregister(address, producer_group, timeout)

    def probe(self, queue: MessageQueue, address: str, timeout: float) -> None:
        """Request the route of the queue's topic."""
        self._query_route(self._here().client, queue.topic, address, timeout)

    def end_transaction(self, address: str, request: send_result.EndTransaction, timeout: float, on_end: OnEnd) -> None:
        """Start to commit or roll back a half message (EndTransaction), at the proxy that accepted or checks it."""
        doing, telemetry = send_result.ending(request), self._here()

        def on_answer(answer: GrpcAnswer) -> None:
            error = answer.error
            if answer.reply is not None:
                try:
                    reply = parsed(answer.reply, service.EndTransactionResponse, address, answer.doing)
                    error = error_in(reply.status, address, answer.doing)
                except errors.RemotingCommandException as exc:
                    error = exc
            telemetry.client.report(error, answer.signed_by)
            on_end(error)

        message = messages.end_transaction_request(request, self._namespace).SerializeToString()
        telemetry.client.start(address, "EndTransaction", message, timeout, on_answer, doing)

    def end_transaction_oneway(self, address: str, request: send_result.EndTransaction, timeout: float) -> None:
        """Commit or roll back a half message (EndTransaction), and wait for the reply: gRPC has no one-way calls.

        Nothing is sent for an undecided one (docs/internals/grpc.md#transactions).
        """
        if request.commit_or_rollback == send_result.TRANSACTION_NOT_TYPE:
            return
        message, doing = (
            messages.end_transaction_request(request, self._namespace),
            f"ending transaction {request.msg_id}",
        )
        self._here().client.invoke(address, "EndTransaction", message, service.EndTransactionResponse, timeout, doing)

    def recall_message(self, address: str, request: send_result.RecallMessage, timeout: float) -> str:
        """Take a delayed message back (RecallMessage), and return its id."""
        message = messages.recall_message_request(request, self._namespace)
        doing = f"recalling a message of topic {request.topic}"
        reply_type = service.RecallMessageResponse
        return self._here().client.invoke(address, "RecallMessage", message, reply_type, timeout, doing).message_id

    def open(self) -> None:
        """See `Transport.open`."""
        self._here().client.open()

    def close(self) -> None:
        """Close every channel of this process and end its threads; calls in flight fail. Idempotent."""
        self._closed = True
        telemetry = self._live.get(os.getpid())
        if telemetry is not None:
            telemetry.close()
            telemetry.client.close()

    def _here(self) -> Telemetry:
        """Return this process's channels and threads, which its first call creates."""
        if self.closed:
            raise errors.RocketMQError("this transport is closed: make a new one")
        pid = os.getpid()
        telemetry = self._live.get(pid)
        return self._live.setdefault(pid, self._new_telemetry()) if telemetry is None else telemetry

    def _query_route(self, client: GrpcClient, topic: str, endpoint: str, timeout: float) -> service.QueryRouteResponse:
        request, doing = (
            messages.route_request(topic, self._namespace, endpoint),
            f"looking up the route of topic {topic}",
        )
        reply_type = service.QueryRouteResponse
        return client.invoke(endpoint, "QueryRoute", request, reply_type, timeout, doing, most_parts=_ROUTE_PARTS)

    def _on_check(self, check: send_result.TransactionCheck) -> None:
        if self.on_check_transaction is not None:
            self.on_check_transaction(check)


def _outcome_of(request: SendRequest, answer: GrpcAnswer) -> SendOutcome:
    error = answer.error
    if answer.reply is not None:
        try:
            most = _RESULT_PARTS * (request.batch.rows + 1)
            reply = parsed(answer.reply, service.SendMessageResponse, request.address, answer.doing, most)
            return messages.outcome_of(request, reply, answer.latency_ms, answer.doing)
        except errors.RemotingCommandException as exc:
            error = exc
    return SendOutcome(request.queue, None, error, answer.latency_ms)
