"""A proxy for tests of the gRPC transport: a real gRPC server in this process, with generic handlers and no stubs.

`FakeProxy` answers the calls of a producer, plays `Reply`s for its sends as `FakeBroker` does, and keeps the requests,
messages and settings that it receives. A test may replace the handler of any method::

    with FakeProxy() as proxy:
        proxy.handlers["SendMessage"] = lambda request, context: b"..."
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from rocketmq_spark.errors import MQBrokerException
from rocketmq_spark.model.message import Message
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.protocol.grpc.codes import STORED, Code, proxy_error
from rocketmq_spark.testing.scripted import Reply
from tests.support.processes import PATIENCE

SERVICE = "/apache.rocketmq.v2.MessagingService/"
_CODES = {status: code for code, status in STORED.items()}


def refusal(code: int, message: str = "") -> Reply:
    """Return a reply that rejects a send with a status."""
    return Reply(error=proxy_error(code, message, "fake", "sending"))


def status(code: int = Code.OK, message: str = "") -> pb.Status:
    return pb.Status(code=code, message=message)  # type: ignore[arg-type]


def route_reply(
    *types: int, permission: int = pb.READ_WRITE, broker_id: int = 0, host: str = "10.9.9.9"
) -> service.QueryRouteResponse:
    """Return the route of a proxy. Its broker address is unreachable: a client must never connect to it."""
    address = pb.Endpoints(scheme=pb.IPv4, addresses=[pb.Address(host=host, port=1)] if host else [])
    queues = [
        pb.MessageQueue(
            id=number,
            permission=permission,  # type: ignore[arg-type]
            broker=pb.Broker(name="broker-0", id=broker_id, endpoints=address),
            accept_message_types=types,  # type: ignore[arg-type]
        )
        for number in range(4)
    ]
    return service.QueryRouteResponse(status=status(), message_queues=queues)


@dataclass(frozen=True)
class Call:
    """One call that the proxy received."""

    method: str
    metadata: dict[str, str]
    request: bytes


class FakeProxy(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A proxy on its own port. Its topics are the keys of `routes`.

    Parameters
    ----------
    tls : tuple of paths, optional
        Certificate and key.
    address : str
        Address to listen on. Default: a free port.
    clients : path, optional
        Authority of the required client certificates. Default: clients need no certificate.
    """

    def __init__(
        self, tls: tuple[Path, Path] | None = None, address: str = "127.0.0.1:0", clients: Path | None = None
    ) -> None:
        self.routes: dict[str, service.QueryRouteResponse] = {"orders": route_reply(pb.NORMAL)}
        self.replies: deque[Reply] = deque()
        self.calls: list[Call] = []
        self.stored: list[pb.Message] = []
        self.halves: dict[str, pb.Message] = {}
        self.settings: list[pb.Settings] = []
        self.answers_settings = True
        self.ends: list[service.EndTransactionRequest] = []
        self.handlers: dict[str, Callable[[bytes, Any], bytes]] = {
            "QueryRoute": self._query_route,
            "SendMessage": self._send,
            "EndTransaction": self._end,
            "Heartbeat": lambda *_: service.HeartbeatResponse(status=status()).SerializeToString(),
            "NotifyClientTermination": lambda *_: status_reply(),
        }
        self._changed = threading.Condition()
        self._streams: list[queue.SimpleQueue[service.TelemetryCommand | None]] = []
        self._stopping = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(16), handlers=[self], options=[("grpc.so_reuseport", 0)])
        if tls is None:
            port = self._server.add_insecure_port(address)
        else:
            certificate, key = (path.read_bytes() for path in tls)
            demanded = () if clients is None else (clients.read_bytes(), True)
            port = self._server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)], *demanded))
        self.address = f"127.0.0.1:{port}"

    def __enter__(self) -> FakeProxy:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close all connections."""
        self._stopping.set()
        for commands in self._streams:
            commands.put(None)
        self._server.stop(None).wait(PATIENCE)

    def service(self, handler_call_details: Any) -> Any:
        """See ``grpc.GenericRpcHandler``."""
        method = handler_call_details.method.removeprefix(SERVICE)
        metadata = dict(handler_call_details.invocation_metadata)

        def answer(request: bytes, context: Any) -> bytes:
            self._note(Call(method, metadata, request))
            return self.handlers[method](request, context)

        if method == "Telemetry":
            return grpc.stream_stream_rpc_method_handler(
                lambda requests, context: self._telemetry(requests, metadata, context)
            )
        return grpc.unary_unary_rpc_method_handler(answer) if method in self.handlers else None

    def requests(self, method: str) -> list[Call]:
        """Return the calls of a method, in order."""
        return [call for call in tuple(self.calls) if call.method == method]

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until `condition` holds; it is checked after each call."""
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE), self.calls

    @property
    def messages(self) -> list[Message]:
        """The stored messages, with the properties that both protocols have."""
        return [plain(message) for message in tuple(self.stored)]

    def command(self, command: service.TelemetryCommand) -> None:
        """Send a command on every open Telemetry stream."""
        for commands in self._streams:
            commands.put(command)

    def check(self, message_id: str) -> None:
        """Ask the producer to check the transaction of a half message."""
        half = service.RecoverOrphanedTransactionCommand(message=self.halves[message_id], transaction_id=message_id)
        self.command(service.TelemetryCommand(recover_orphaned_transaction_command=half))

    def hang_up_streams(self) -> None:
        """End every Telemetry stream."""
        streams, self._streams = self._streams, []
        for commands in streams:
            commands.put(None)

    def _note(self, call: Call) -> None:
        with self._changed:
            self.calls.append(call)
            self._changed.notify_all()

    def _query_route(self, request: bytes, _: Any) -> bytes:
        topic = service.QueryRouteRequest.FromString(request).topic.name
        unknown = service.QueryRouteResponse(status=status(Code.TOPIC_NOT_FOUND, "No topic route info"))
        return self.routes.get(topic, unknown).SerializeToString()

    def _send(self, request: bytes, context: Any) -> bytes:
        messages = service.SendMessageRequest.FromString(request).messages
        with self._changed:
            reply = self.replies.popleft() if self.replies else Reply()
            offset, kept = len(self.stored), reply.stored
            if kept or (kept is None and reply.error is None and not reply.silent):
                for message in messages:
                    half = message.system_properties.message_type == pb.TRANSACTION
                    if half:
                        self.halves[message.system_properties.message_id] = message
                    else:
                        self.stored.append(message)
        if reply.silent:
            self.silence(context)
        if reply.error is not None:
            assert isinstance(reply.error, MQBrokerException)
            refused = status(reply.error.response_code, reply.error.remark)
            return service.SendMessageResponse(status=refused).SerializeToString()
        ids = ",".join(message.system_properties.message_id for message in messages)
        entry = service.SendResultEntry(
            status=status(_CODES[reply.status]), message_id=ids, transaction_id=ids.partition(",")[0], offset=offset
        )
        return service.SendMessageResponse(status=status(_CODES[reply.status]), entries=[entry]).SerializeToString()

    def silence(self, context: Any) -> None:
        """Wait until the caller has cancelled the call or its deadline has passed."""
        gone = threading.Event()
        context.add_callback(gone.set)
        gone.wait(PATIENCE)

    def _end(self, request: bytes, _: Any) -> bytes:
        end = service.EndTransactionRequest.FromString(request)
        with self._changed:
            self.ends.append(end)
            half = self.halves.pop(end.message_id, None)
            if half is not None and end.resolution == pb.COMMIT:
                self.stored.append(half)
        return service.EndTransactionResponse(status=status()).SerializeToString()

    def _telemetry(self, requests: Iterator[bytes], metadata: dict[str, str], context: Any) -> Iterator[bytes]:
        self._note(Call("Telemetry", metadata, b""))
        commands: queue.SimpleQueue[service.TelemetryCommand | None] = queue.SimpleQueue()

        def read() -> None:
            with contextlib.suppress(Exception):  # the stream is gone
                for request in requests:
                    command = service.TelemetryCommand.FromString(request)
                    with self._changed:
                        self.settings.append(command.settings)
                        self._changed.notify_all()
                    if self.answers_settings:
                        commands.put(service.TelemetryCommand(status=status(), settings=command.settings))

        self._streams.append(commands)
        context.add_callback(lambda: commands.put(None))
        threading.Thread(target=read, daemon=True).start()
        while not self._stopping.is_set() and (command := commands.get()) is not None:
            yield command.SerializeToString()


def status_reply(code: int = Code.OK, message: str = "") -> bytes:
    """Return a reply with a status only. The status is the first field of every reply, so any reply type parses it."""
    return service.NotifyClientTerminationResponse(status=status(code, message)).SerializeToString()


def plain(message: pb.Message) -> Message:
    """Return a message with the properties that the remoting protocol gives it."""
    system = message.system_properties
    named = {"UNIQ_KEY": system.message_id, "TAGS": system.tag, "KEYS": " ".join(system.keys)}
    properties = {name: text for name, text in named.items() if text} | dict(message.user_properties)
    return Message(message.topic.name, message.body, properties=properties)
