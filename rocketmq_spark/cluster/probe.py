"""Requests to a server of the local cluster, each over a new connection, without retries or state.

Unlike transport/remoting this needs no options and no threads, and is enough to see whether a server is ready.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Final

from rocketmq_spark.errors import RemotingCommandException, RemotingConnectException, RemotingTimeoutException
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.model.route import TopicRouteData
from rocketmq_spark.protocol.remoting.codes import STORED, RequestCode, ResponseCode, broker_error
from rocketmq_spark.protocol.remoting.command import FrameBuffer, RemotingCommand, encode_command
from rocketmq_spark.protocol.remoting.headers import GetRouteInfoRequestHeader, SendMessageRequestHeaderV2, signed
from rocketmq_spark.protocol.remoting.response_headers import SendMessageResponseHeader
from rocketmq_spark.protocol.remoting.route import decode_topic_route, loads_lenient

_ANSWERED: Final = frozenset((int(ResponseCode.SUCCESS), *STORED))


class Probe:
    """Asks servers of one cluster, and waits `timeout` seconds for each answer."""

    def __init__(
        self,
        *,
        credentials: Credentials | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 3.0,
    ) -> None:
        self._credentials = credentials
        self._tls = tls
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"<Probe tls={self._tls is not None} timeout={self._timeout}>"

    def ask(
        self, address: str, code: RequestCode, ext_fields: Mapping[str, str], doing: str, body: bytes = b""
    ) -> RemotingCommand:
        """Send one request and return its answer; `doing` describes it in errors.

        Raises
        ------
        RemotingConnectException, RemotingTimeoutException, RemotingCommandException
            No connection, no answer in time, or an answer that cannot be decoded.
        MQBrokerException
            An answer with an error code.
        """
        host, _, port = address.rpartition(":")
        if self._credentials is not None:
            ext_fields = signed(ext_fields, (body,), self._credentials)
        deadline = time.monotonic() + self._timeout
        try:
            with contextlib.ExitStack() as stack:
                connection = stack.enter_context(socket.create_connection((host, int(port)), self._timeout))
                if self._tls is not None:
                    connection = stack.enter_context(self._tls.wrap_socket(connection, server_hostname=host))
                connection.sendall(encode_command(RemotingCommand(code, opaque=0, ext_fields=ext_fields, body=body)))
                answer = self._receive(connection, deadline, f"{doing} {address}")
        except TimeoutError as exc:
            raise RemotingTimeoutException(f"{doing} {address}: no answer within {self._timeout:g} s") from exc
        except OSError as exc:
            raise RemotingConnectException(f"{doing} {address}: {exc}") from exc
        if answer.code not in _ANSWERED:
            raise broker_error(answer.code, answer.remark, address, doing)
        return answer

    def registered_brokers(self, name_server: str) -> dict[str, str]:
        """Return the master address of each broker that a name server knows, by name (GET_BROKER_CLUSTER_INFO)."""
        answer = self.ask(name_server, RequestCode.GET_BROKER_CLUSTER_INFO, {}, "asking the name server for brokers")
        info = loads_lenient(bytes(answer.body))
        table = info.get("brokerAddrTable") if isinstance(info, dict) else None
        if not isinstance(table, dict):
            raise RemotingCommandException(f"asking {name_server} for its brokers: the answer has no brokerAddrTable")
        addresses = {name: entry.get("brokerAddrs", {}).get("0") for name, entry in table.items()}
        return {name: address for name, address in addresses.items() if address}

    def route(self, name_server: str, topic: str) -> TopicRouteData:
        """Return a topic's route (GET_ROUTEINFO_BY_TOPIC)."""
        header = GetRouteInfoRequestHeader(topic=topic, accept_standard_json_only=True)
        doing = f"looking up topic {topic}"
        answer = self.ask(name_server, RequestCode.GET_ROUTEINFO_BY_TOPIC, header.to_ext_fields(), doing)
        return decode_topic_route(bytes(answer.body))

    def send(self, address: str, broker_name: str, topic: str, body: bytes) -> SendMessageResponseHeader:
        """Store one message in queue 0 of a topic on one broker."""
        header = SendMessageRequestHeaderV2(
            producer_group="rocketmq-spark-probe",
            topic=topic,
            queue_id=0,
            born_timestamp=int(time.time() * 1000),
            broker_name=broker_name,
        )
        doing = f"sending a message to {topic}/{broker_name}/0"
        answer = self.ask(address, RequestCode.SEND_MESSAGE_V2, header.to_ext_fields(), doing, body)
        return SendMessageResponseHeader.from_ext_fields(answer.ext_fields)

    def configure(self, address: str, properties: Mapping[str, object]) -> None:
        """Change properties of a running broker and in its file (UPDATE_BROKER_CONFIG)."""
        lines = [f"{name}={value}" for name, value in properties.items()]
        doing = f"setting {', '.join(lines)} on"
        self.ask(address, RequestCode.UPDATE_BROKER_CONFIG, {}, doing, "\n".join(lines).encode())

    def _receive(self, connection: socket.socket, deadline: float, doing: str) -> RemotingCommand:
        frames = FrameBuffer()
        while True:
            command = frames.take()
            if command is not None and command.is_response:
                return command
            if command is not None:
                continue  # a request of the broker
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            data = connection.recv(65_536)
            if not data:
                raise RemotingConnectException(
                    f"{doing}: the connection was closed without an answer (a server that demands TLS does that)"
                )
            frames.feed(data)
