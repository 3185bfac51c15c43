"""Options to connections: the transport of a client instance, for a write and for a producer alike.

Rule 1: nothing is opened here; a transport connects with its first request.
"""

from __future__ import annotations

from typing import Protocol

from rocketmq_spark.transport.remoting import RemotingTransport
from rocketmq_spark.transport.tls import TlsSettings
from rocketmq_spark.wire.acl import Credentials


class ConnectionConfig(Protocol):
    """What decides on connections, among the options of a write or of a producer."""

    @property
    def name_server(self) -> tuple[str, ...]:
        """``host:port`` of each name server."""
        ...

    @property
    def access_key(self) -> str | None:
        """Name of the user that signs."""
        ...

    @property
    def secret_key(self) -> str | None:
        """What the user signs with."""
        ...

    @property
    def security_token(self) -> str | None:
        """Token of a temporary user."""
        ...

    @property
    def use_tls(self) -> bool:
        """Encrypt."""
        ...

    @property
    def tls_ca_file(self) -> str | None:
        """The authorities to trust."""
        ...

    @property
    def client_async_semaphore_value(self) -> int:
        """Most requests under way that are answered."""
        ...

    @property
    def client_oneway_semaphore_value(self) -> int:
        """Most requests under way that are not."""
        ...


def tls_settings(options: ConnectionConfig) -> TlsSettings | None:
    """Return how connections are encrypted; None: not at all."""
    return TlsSettings(options.tls_ca_file) if options.use_tls else None


def remoting_transport(options: ConnectionConfig) -> RemotingTransport:
    """Return the transport that a set of options asks for.

    Raises
    ------
    OptionError
        A name server's address is malformed, or the file of authorities can't be used.
    """
    credentials = None
    if options.access_key is not None and options.secret_key is not None:
        credentials = Credentials(options.access_key, options.secret_key, options.security_token or "")
    return RemotingTransport(
        options.name_server,
        credentials=credentials,
        tls=tls_settings(options),
        client_async_semaphore_value=options.client_async_semaphore_value,
        client_oneway_semaphore_value=options.client_oneway_semaphore_value,
    )
