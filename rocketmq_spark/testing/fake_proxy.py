"""A RocketMQ 5 proxy in cluster mode: a gRPC server for producers, in front of the fake brokers.

`FakeCluster(proxy=True)` creates it. This module and the other two of the proxy need grpc or protobuf, so a cluster
without a proxy does not import them.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from rocketmq_spark.errors import MQBrokerException
from rocketmq_spark.model.message import SendStatus
from rocketmq_spark.model.names import is_blank
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2 as rpc
from rocketmq_spark.protocol.grpc.codes import Code
from rocketmq_spark.testing.fake_proxy_messages import status_reply, with_status
from rocketmq_spark.testing.fake_proxy_service import Client, ProxyService, Servers, Transaction
from rocketmq_spark.testing.fake_replies import Reply
from rocketmq_spark.testing.fake_sends import Refusal
from rocketmq_spark.testing.fake_storage import ProxySettings

_SERVICE: Final = "/apache.rocketmq.v2.MessagingService/"
_KEPT: Final = 10_000
# Each silent or slow call and each stream holds a thread.
_MAX_THREADS: Final = 256
_PATIENCE: Final = 30.0
# ``grpcMaxInboundMessageSize`` of a proxy, bytes.
_MAX_REQUEST: Final = 130 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Call:
    """One call that the proxy received. The request of Telemetry is empty."""

    method: str
    metadata: Mapping[str, str] = field(repr=False)  # Has signatures and tokens
    request: bytes


Handler: TypeAlias = Callable[[bytes, Any], bytes]
ReplyOf: TypeAlias = "Reply | Callable[[Call], Reply | None]"
_RequestT = TypeVar("_RequestT", bound=ProtoMessage)


class FakeProxy(grpc.GenericRpcHandler):  # type: ignore[misc]
    """One proxy. All methods may be called from any thread.

    `play` sets the replies to the next calls of a method other than Telemetry. `calls` has the last 10,000 calls.
    `handlers` execute calls, by method, and tests may replace them. The handler of Telemetry gets a command of
    a client, and returns the answer or nothing.
    """

    def __init__(self, cluster: Servers, settings: ProxySettings) -> None:
        self.cluster = cluster
        self.settings = settings
        self.address = settings.address
        self.calls: deque[Call] = deque(maxlen=_KEPT)
        # The settings that producers sent.
        self.client_settings: deque[pb.Settings] = deque(maxlen=_KEPT)
        self._service = own = ProxyService(cluster, settings, self._on_check)
        on = self._executing
        self.handlers: dict[str, Handler] = {
            "QueryRoute": on(rpc.QueryRouteRequest, lambda request, _: own.query_route(request, self.address)),
            "SendMessage": on(rpc.SendMessageRequest, own.send),
            "RecallMessage": on(rpc.RecallMessageRequest, lambda request, _: own.recall(request)),
            "EndTransaction": on(rpc.EndTransactionRequest, lambda request, _: own.end_transaction(request)),
            "Telemetry": on(rpc.TelemetryCommand, self._take_settings),
            "Heartbeat": on(rpc.HeartbeatRequest, lambda _, client: own.heart_beat(client)),
            "NotifyClientTermination": on(rpc.NotifyClientTerminationRequest, lambda _, client: own.terminate(client)),
        }
        self._replies: defaultdict[str, deque[ReplyOf]] = defaultdict(deque)
        self._streams: list[_Stream] = []
        self._lock = threading.Lock()
        self._server: Any = None

    def __repr__(self) -> str:
        return f"<FakeProxy {self.address} {'stopped' if self._server is None else 'running'}, {len(self.calls)} calls>"

    @property
    def transactions(self) -> dict[str, Transaction]:
        """The half messages that no client has ended at this proxy, by id."""
        return self._service.transactions

    def start(self) -> None:
        """Serve; after `stop`, at the same address. RuntimeError: the address cannot be used."""
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _MAX_REQUEST)]
        server = grpc.server(ThreadPoolExecutor(_MAX_THREADS), handlers=[self], options=options)
        if self.settings.certificate is None:
            port = server.add_insecure_port(self.address)
        else:
            certificate, key = (path.read_bytes() for path in self.settings.certificate)
            clients = self.settings.client_authority
            demanded = () if clients is None else (clients.read_bytes(), True)
            port = server.add_secure_port(self.address, grpc.ssl_server_credentials([(key, certificate)], *demanded))
        self.address = f"{self.address.rpartition(':')[0]}:{port}"
        self._server = server
        server.start()

    def stop(self) -> None:
        """Close all connections. The proxy forgets clients and half messages. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            self.hang_up_streams()
            stopped = server.stop(None)
            self._service.forget()
            stopped.wait(_PATIENCE)

    def play(self, *replies: ReplyOf, method: str = "SendMessage", times: int = 1) -> None:
        """Add replies to the next calls of a method, `times` times in all.

        A function returns the reply to its call, or None. ``Reply.code(42900, "flow limit")`` is an error with gRPC's
        code.
        """
        with self._lock:
            self._replies[method].extend(replies * times)

    def requests(self, method: str) -> list[Call]:
        """Return the calls of a method, in order."""
        return [call for call in tuple(self.calls) if call.method == method]

    def check(self, transaction_id: str) -> None:
        """Have the broker check a half message now, at a client whose settings name its topic."""
        self._service.check(transaction_id)

    def command(self, command: ProtoMessage) -> None:
        """Send a command on every open Telemetry stream."""
        for stream in tuple(self._streams):
            stream.commands.put(command.SerializeToString())

    def hang_up_streams(self) -> None:
        """End every Telemetry stream."""
        with self._lock:
            streams, self._streams = self._streams, []
        for stream in streams:
            stream.commands.put(None)

    @staticmethod
    def silence(context: Any) -> None:
        """Wait until the client has cancelled a call, or its deadline has passed."""
        gone = threading.Event()
        if context.add_callback(gone.set):
            gone.wait()

    def disconnect(self, broker_address: str) -> None:
        """Break the connection to a broker: requests in flight fail."""
        self._service.disconnect(broker_address)

    def service(self, handler_call_details: Any) -> Any:
        """See ``grpc.GenericRpcHandler``."""
        method = handler_call_details.method.removeprefix(_SERVICE)
        metadata = dict(handler_call_details.invocation_metadata)
        if method == "Telemetry":
            return grpc.stream_stream_rpc_method_handler(functools.partial(self._telemetry, metadata))
        if method not in self.handlers:
            return None
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: self._answer(Call(method, metadata, request), context)
        )

    def _answer(self, call: Call, context: Any) -> bytes:
        handler = self.handlers[call.method]
        with self._lock:
            self.calls.append(call)
            replies = self._replies[call.method]
            played = replies.popleft() if replies else None
        reply = played(call) if callable(played) else played
        if reply is None:
            return handler(call.request, context)
        response = handler(call.request, context) if reply.stores else b""
        if reply.silent:
            self.silence(context)
        elif reply.delay:
            time.sleep(reply.delay)
        if reply.closes:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if reply.error is not None:
            assert isinstance(reply.error, MQBrokerException)
            return status_reply(reply.error.response_code, reply.error.remark)
        return response if reply.status is SendStatus.SEND_OK else with_status(response, reply.status)

    @staticmethod
    def _executing(
        request_type: type[_RequestT], execute: Callable[[_RequestT, Client], ProtoMessage | None]
    ) -> Handler:
        """Return the handler that executes the requests of clients that name themselves."""

        def handle(data: bytes, context: Any) -> bytes:
            try:
                request = request_type.FromString(data)
            except DecodeError:
                context.abort(grpc.StatusCode.UNKNOWN, "")
            metadata = dict(context.invocation_metadata())
            client = Client(metadata.get("x-mq-client-id", ""), context.peer().partition(":")[2])
            try:
                if is_blank(client.client_id):
                    raise Refusal(Code.CLIENT_ID_REQUIRED, "client id cannot be empty")
                reply = execute(request, client)
            except Refusal as refusal:
                if request_type is rpc.TelemetryCommand:
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, refusal.remark)
                return status_reply(refusal.code, refusal.remark)
            return b"" if reply is None else reply.SerializeToString()

        return handle

    def _take_settings(self, command: rpc.TelemetryCommand, client: Client) -> ProtoMessage | None:
        if not command.HasField("settings"):
            return None
        answer = self._service.take_settings(command.settings, client)
        self.client_settings.append(command.settings)
        return answer

    def _telemetry(self, metadata: Mapping[str, str], requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        stream = _Stream(metadata.get("x-mq-client-id", ""), queue.SimpleQueue())

        def end() -> None:
            with self._lock, contextlib.suppress(ValueError):
                self._streams.remove(stream)
            stream.commands.put(None)

        def read() -> None:
            # The client or a handler has ended the stream.
            with contextlib.suppress(Exception):
                for request in requests:
                    if answer := self.handlers["Telemetry"](request, context):
                        stream.commands.put(answer)
            end()

        with self._lock:
            self.calls.append(Call("Telemetry", metadata, b""))
            self._streams.append(stream)
        context.add_callback(end)
        threading.Thread(target=read, daemon=True, name="fake-proxy-telemetry").start()
        while (command := stream.commands.get()) is not None:
            yield command

    def _on_check(self, topic: str, command: rpc.TelemetryCommand) -> None:
        """Send a check to one client whose settings name the topic, if one has a stream."""
        with self._lock:
            ids = [client_id for client_id, topics in self._service.topics.items() if topic in topics]
            streams = [stream for stream in self._streams if stream.client_id in ids]
        for stream in streams[:1]:
            stream.commands.put(command.SerializeToString())


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """An open Telemetry stream, and the commands to send; None ends it."""

    client_id: str
    commands: queue.SimpleQueue[bytes | None]
