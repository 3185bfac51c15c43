"""Over gRPC, only verified servers get the client's certificate, also after a server has closed the connection."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark.errors import RemotingException
from rocketmq_spark.transport.grpc.transport import GrpcTransport
from rocketmq_spark.transport.tls import TlsSettings
from tests.support.peer import address_of
from tests.support.processes import PATIENCE, wait_for
from tests.support.transports import Authority


def demanding(server: Authority, clients: Authority, version: ssl.TLSVersion) -> ssl.SSLContext:
    """Return the context of a server that asks for a client's certificate."""
    context = server.context("server", "IP:127.0.0.1")
    context.minimum_version = context.maximum_version = version
    context.load_verify_locations(clients.ca_file)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.set_alpn_protocols(["h2"])
    return context


class TakenOver:
    """A server that closes a connection, and has another certificate for all later connections.

    Parameters
    ----------
    genuine, impostor : ssl.SSLContext
    connections : int
        How many genuine ones come before it hangs up.
    """

    def __init__(self, genuine: ssl.SSLContext, impostor: ssl.SSLContext, connections: int) -> None:
        self._genuine, self._impostor, self._connections = genuine, impostor, connections
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = address_of(self.listener)
        self.count = 0
        # Client certificates that the impostor received; None for a client that sent none.
        self.shown: list[object] = []

    def serve(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.count += 1
            sock.settimeout(PATIENCE)
            with sock, contextlib.suppress(OSError):
                if self.count <= self._connections:
                    with self._genuine.wrap_socket(sock, server_side=True) as secure:
                        secure.recv(1)
                elif self.count > self._connections + 1:
                    with self._impostor.wrap_socket(sock, server_side=True) as secure:
                        # The handshake brings the certificate, with TLS 1.2 and 1.3.
                        self.shown.append(secure.getpeercert(binary_form=True))
                        secure.recv(1)


@contextlib.contextmanager
def running(server: TakenOver) -> Iterator[TakenOver]:
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        # Closing alone would not wake accept().
        server.listener.shutdown(socket.SHUT_RDWR)
        server.listener.close()
        thread.join(PATIENCE)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=lambda version: version.name)
@pytest.mark.parametrize("skip_verify", [False, True])
def test_client_certificate_is_not_shown_to_an_unverified_server(
    authority: Authority, tmp_path: Path, version: ssl.TLSVersion, skip_verify: bool
) -> None:
    other = Authority(tmp_path, "another authority")
    certificate, key = map(str, authority.server("client", "DNS:spark-client"))
    contexts = (demanding(authority, authority, version), demanding(other, authority, version))
    # Without verification, the client reads the first certificate on one connection and checks it on another.
    with running(TakenOver(*contexts, connections=2 if skip_verify else 0)) as server:
        tls = TlsSettings(
            None if skip_verify else str(authority.ca_file),
            cert_file=certificate,
            key_file=key,
            insecure_skip_verify=skip_verify,
        )
        with GrpcTransport([server.address], client_id="test", tls=tls) as transport:
            for _ in range(2):
                with pytest.raises(RemotingException):
                    transport.query_route("orders", PATIENCE)
            wait_for(lambda: server.count > 3)
    assert [shown for shown in server.shown if shown is not None] == []
