"""The streams over which proxies check transactions.

The first half message opens a stream to every endpoint, because brokers may send checks through any proxy. A stream
that ends is reopened after a second. Neither a proxy's command nor a handler's exception ends a stream, and unknown
commands are ignored.

A proxy uses the topic's name as producer group, and sends checks to any client whose settings name the topic, also for
other clients' half messages. A check names no group: it goes to the group that last sent a half message to that topic
from here. All senders of half messages to one topic must therefore know each other's transactions.

Follows ``ClientSessionImpl.java``.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Pauses:
    """The pauses of a stream, seconds: before it is reopened, and before it repeats its settings."""

    reopen: float = 1.0
    settings: float = 300.0


class Telemetry:
    """The streams of one process; safe for many threads.

    `on_check` is called with a proxy's checks, on the stream's thread.
    """

    def __init__(
        self, client: GrpcClient, endpoints: Sequence[str], namespace: str, on_check: OnCheckTransaction, pauses: Pauses
    ) -> None:
        self.client = client
        self.pauses = pauses
        self._endpoints = endpoints
        self._namespace = namespace
        self._on_check = on_check
        self._lock = threading.Lock()
        # By topic, who sent the last half message to it. Replaced as a whole: streams read it.
        self._groups: dict[str, str] = {}
        self._streams: dict[str, _Stream] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<Telemetry {sorted(self._streams)} for {sorted(self._groups)}>"

    def half_message(self, topic: str, producer_group: str) -> None:
        """Receive checks of a topic from now on, for a producer group."""
        if self._groups.get(topic) == producer_group and len(self._streams) == len(self._endpoints):
            return
        with self._lock:
            known = topic in self._groups
            self._groups = {**self._groups, topic: producer_group}
            if not known:
                self._say_settings()
            if not self._closed:
                for endpoint in self._endpoints:
                    if endpoint not in self._streams:
                        self._streams[endpoint] = _Stream(self, endpoint)

    def heart_beat(self, endpoint: str, timeout: float) -> None:
        """Keep the client alive at a proxy that has accepted its settings; other proxies do not know the client."""
        stream = self._streams.get(endpoint)
        if stream is not None and stream.acknowledged:
            request = service.HeartbeatRequest(client_type=pb.PRODUCER)
            self.client.invoke(endpoint, "Heartbeat", request, service.HeartbeatResponse, timeout, "heart-beat")

    def unregister(self, endpoint: str, producer_group: str, timeout: float) -> None:
        """Stop checks for a producer group; after the last one notify the proxy and end the stream."""
        with self._lock:
            left = {topic: group for topic, group in self._groups.items() if group != producer_group}
            changed = len(left) < len(self._groups)
            self._groups = left
            if left and changed:
                self._say_settings()
            stream = None if left else self._streams.pop(endpoint, None)
        if stream is not None:
            stream.close()
            request, reply = service.NotifyClientTerminationRequest(), service.NotifyClientTerminationResponse
            self.client.invoke(endpoint, "NotifyClientTermination", request, reply, timeout, "good-bye")

    def close(self) -> None:
        """End the streams. Idempotent."""
        with self._lock:
            self._closed = True
            streams, self._streams = tuple(self._streams.values()), {}
        for stream in streams:
            stream.close()
        for stream in streams:
            stream.join()

    def settings(self, endpoint: str) -> bytes:
        """Return the settings that a stream repeats: the topics whose checks are wanted."""
        return settings_of(endpoint, sorted(self._groups), self._namespace, __version__).SerializeToString()

    def check(self, endpoint: str, command: service.RecoverOrphanedTransactionCommand) -> None:
        """Hand over a proxy's check."""
        group = self._groups.get(command.message.topic.name, "")
        self._on_check(transaction_check(command, endpoint, group))

    def _say_settings(self) -> None:
        for stream in self._streams.values():
            stream.say_settings()


class _Stream:
    """The stream to one endpoint, kept open by a thread of its own."""

    def __init__(self, telemetry: Telemetry, endpoint: str) -> None:
        self._telemetry = telemetry
        self._endpoint = endpoint
        self._stopped = threading.Event()
        # True: say the settings. False: the stream ends. Each opening has one of its own.
        self._wishes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._call: Any = None
        self._well = True
        # The proxy has taken the settings of the stream that is open now.
        self.acknowledged = False
        self._thread = threading.Thread(target=self._run, name=f"rocketmq-spark-telemetry-{endpoint}", daemon=True)
        self._thread.start()

    def say_settings(self) -> None:
        """Repeat the settings now, because they have changed."""
        self._wishes.put(True)

    def close(self) -> None:
        """End it, without waiting."""
        self._stopped.set()
        self._wishes.put(False)
        if self._call is not None:
            self._call.cancel()

    def join(self) -> None:
        """Wait for its thread, unless this is it."""
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT)

    def _run(self) -> None:
        import grpc

        while not self._stopped.is_set():
            wishes: queue.SimpleQueue[bool] = queue.SimpleQueue()
            self._wishes = wishes
            try:
                self._call = self._telemetry.client.stream(self._endpoint, "Telemetry", self._commands(wishes))
                if self._stopped.is_set():
                    self._call.cancel()
                for data in self._call:
                    self._receive(data)
                self._complain("the proxy ended it")
            except grpc.RpcError as exc:
                self._complain(f"{exc.code().name}: {exc.details()}")
            except (RocketMQError, ValueError):
                return  # the client is closed, or was while gRPC looked
            finally:
                self.acknowledged = False
                # The thread of gRPC that takes our commands waits for the next one still.
                wishes.put(False)
            self._stopped.wait(self._telemetry.pauses.reopen)

    def _commands(self, wishes: queue.SimpleQueue[bool]) -> Iterator[bytes]:
        """Yield the settings now and then. The proxy ends a stream when its commands end."""
        wanted = True
        while wanted:
            yield self._telemetry.settings(self._endpoint)
            try:
                wanted = wishes.get(timeout=self._telemetry.pauses.settings)
            except queue.Empty:
                wanted = True

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
            # With its traceback once, until a good one comes: a proxy may send any number of them.
            level = logging.ERROR if self._well else logging.DEBUG
            self._well = False
            what = "%s: a command on the Telemetry stream was not taken"
            logger.log(level, what, self._endpoint, exc_info=level > logging.DEBUG)

    def _complain(self, why: str) -> None:
        """Log once why no checks come, until the stream works again."""
        level = logging.WARNING if self._well and not self._stopped.is_set() else logging.DEBUG
        self._well = False
        logger.log(level, "Telemetry stream to %s: %s; no checks of transactions come until it is open again",
                   self._endpoint, why)  # fmt: skip
