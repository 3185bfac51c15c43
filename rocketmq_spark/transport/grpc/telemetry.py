"""Keeps a Telemetry stream open to each proxy, over which the proxy sends transaction checks to this process.

The first half message of a transport with a check handler opens a stream to every proxy: any of them may send a check.
A stream that ends or breaks is opened again, until the transport is closed or the last producer group is unregistered.
See docs/internals/grpc.md#telemetry and #checks.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rocketmq_spark._version import __version__
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.protocol.grpc.codes import code_name
from rocketmq_spark.protocol.grpc.messages import settings_of, transaction_check
from rocketmq_spark.transport.base import OnCheckTransaction
from rocketmq_spark.transport.grpc.client import GrpcClient, parsed

logger = logging.getLogger("rocketmq_spark.transport")

_JOIN_TIMEOUT: Final = 5.0


class Telemetry:
    """The streams of one client; safe for many threads. Each calls `on_check` on its thread. Intervals are seconds."""

    def __init__(
        self,
        client: GrpcClient,
        endpoints: Sequence[str],
        namespace: str,
        on_check: OnCheckTransaction,
        reopen_after: float,
        settings_every: float,
    ) -> None:
        self.client = client
        self.reopen_after = reopen_after
        self.settings_every = settings_every
        self._endpoints = endpoints
        self._namespace = namespace
        self._on_check = on_check
        self._lock = threading.Lock()
        # By topic, the group that sent the last half message. Replaced as a whole, because streams read it.
        self._groups: dict[str, str] = {}
        self._streams: dict[str, _Stream] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<Telemetry {sorted(self._streams)} for {sorted(self._groups)}>"

    def half_message(self, topic: str, producer_group: str) -> None:
        """Receive checks of a topic from now on, and give them to a producer group."""
        if self._groups.get(topic) == producer_group and len(self._streams) == len(self._endpoints):
            return
        with self._lock:
            known = topic in self._groups
            self._groups = {**self._groups, topic: producer_group}
            if not known:
                self._send_settings()
            if not self._closed:
                for endpoint in self._endpoints:
                    if endpoint not in self._streams:
                        self._streams[endpoint] = _Stream(self, endpoint)

    def heart_beat(self, endpoint: str, timeout: float) -> None:
        """Keep the client registered at a proxy that has accepted its settings; other proxies do not know it."""
        stream = self._streams.get(endpoint)
        if stream is not None and stream.acknowledged:
            request = service.HeartbeatRequest(client_type=pb.PRODUCER)
            self.client.invoke(endpoint, "Heartbeat", request, service.HeartbeatResponse, timeout, "heartbeat")

    def unregister(self, endpoint: str, producer_group: str, timeout: float) -> None:
        """Stop checks for a producer group; after the last one notify the proxy and end the stream."""
        with self._lock:
            left = {topic: group for topic, group in self._groups.items() if group != producer_group}
            changed = len(left) < len(self._groups)
            self._groups = left
            if left and changed:
                self._send_settings()
            stream = None if left else self._streams.pop(endpoint, None)
        if stream is not None:
            stream.close()
            request, reply = service.NotifyClientTerminationRequest(), service.NotifyClientTerminationResponse
            self.client.invoke(endpoint, "NotifyClientTermination", request, reply, timeout, "unregistering the client")

    def close(self) -> None:
        """End the streams. Idempotent."""
        with self._lock:
            self._closed = True
            streams, self._streams = tuple(self._streams.values()), {}
        for stream in streams:
            stream.close()
        for stream in streams:
            if stream.thread is not threading.current_thread():
                stream.thread.join(_JOIN_TIMEOUT)

    def settings(self, endpoint: str) -> bytes:
        """Return the settings that a stream sends: the topics whose checks this client answers."""
        return settings_of(endpoint, sorted(self._groups), self._namespace, __version__).SerializeToString()

    def check(self, endpoint: str, command: service.RecoverOrphanedTransactionCommand) -> None:
        """Call the handler with a proxy's check."""
        group = self._groups.get(command.message.topic.name, "")
        self._on_check(transaction_check(command, endpoint, group))

    def _send_settings(self) -> None:
        for stream in self._streams.values():
            stream.commands.put(True)


class _Stream:
    """The stream to one endpoint, which a separate thread keeps open."""

    def __init__(self, telemetry: Telemetry, endpoint: str) -> None:
        self._telemetry = telemetry
        self._endpoint = endpoint
        self._stopped = threading.Event()
        # True sends the settings again, False ends the stream. Replaced whenever the stream is opened.
        self.commands: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._call: Any = None
        self._well = True
        # The proxy has accepted the settings of the open stream.
        self.acknowledged = False
        self.thread = threading.Thread(target=self._run, name=f"rocketmq-spark-telemetry-{endpoint}", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """End the stream without waiting for its thread."""
        self._stopped.set()
        self.commands.put(False)
        if self._call is not None:
            self._call.cancel()

    def _run(self) -> None:
        import grpc

        while not self._stopped.is_set():
            commands: queue.SimpleQueue[bool] = queue.SimpleQueue()
            self.commands = commands
            try:
                self._call = self._telemetry.client.stream(self._endpoint, "Telemetry", self._settings(commands))
                if self._stopped.is_set():
                    self._call.cancel()
                for data in self._call:
                    self._receive(data)
                self._complain("the proxy ended it")
            except grpc.RpcError as exc:
                self._complain(f"{exc.code().name}: {exc.details()}")
            except (RocketMQError, ValueError) as exc:
                # ValueError: gRPC refuses a call on a closed channel.
                if self._stopped.is_set() or self._telemetry.client.closed:
                    return
                # No credentials, or with tlsInsecureSkipVerify no proxy whose certificate could be read.
                self._complain(str(exc))
            finally:
                self.acknowledged = False
                # gRPC's thread still waits for the next settings.
                commands.put(False)
            self._stopped.wait(self._telemetry.reopen_after)

    def _settings(self, commands: queue.SimpleQueue[bool]) -> Iterator[bytes]:
        """Yield the settings at intervals and when they change. The proxy ends a stream when this iterator ends."""
        again = True
        while again:
            yield self._telemetry.settings(self._endpoint)
            try:
                again = commands.get(timeout=self._telemetry.settings_every)
            except queue.Empty:
                again = True

    def _receive(self, data: bytes) -> None:
        try:
            command = parsed(data, service.TelemetryCommand, self._endpoint, "reading a command")
            if command.HasField("status") and command.status.code != pb.OK:
                self._complain(f"{code_name(command.status.code)} {command.status.message}")
                return
            kind = command.WhichOneof("command")
            if kind == "settings":
                self.acknowledged = True
            elif kind == "recover_orphaned_transaction_command":
                self._telemetry.check(self._endpoint, command.recover_orphaned_transaction_command)
            elif kind == "reconnect_endpoints_command":
                self._call.cancel()
            self._well = True
        except Exception:
            # The traceback is logged once, until a command succeeds: a proxy may send any number of them.
            level = logging.ERROR if self._well else logging.DEBUG
            self._well = False
            text = "%s: handling a command on the Telemetry stream failed"
            logger.log(level, text, self._endpoint, exc_info=level > logging.DEBUG)

    def _complain(self, why: str) -> None:
        """Log the failure once, until the stream works again."""
        level = logging.WARNING if self._well and not self._stopped.is_set() else logging.DEBUG
        self._well = False
        text = "Telemetry stream to %s: %s; no transaction checks arrive until it is open again (retried every %g s)"
        logger.log(level, text, self._endpoint, why, self._telemetry.reopen_after)
