"""Options to connections: the transport of a client instance, for a write and for a producer alike.

Rule 1: nothing is opened here; a transport connects with its first request.
Rule 2: gRPC is imported only where it is asked for: who writes to brokers need not have it.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Protocol

from rocketmq_spark.errors import OptionError
from rocketmq_spark.transport.remoting import RemotingTransport
from rocketmq_spark.transport.tls import TlsSettings
from rocketmq_spark.wire.acl import Credentials

if TYPE_CHECKING:
    from rocketmq_spark.transport.base import Transport


class ConnectionConfig(Protocol):
    """What decides on connections, among the options of a write or of a producer."""

    @property
    def name_server(self) -> tuple[str, ...]:
        """``host:port`` of each name server."""
        ...

    @property
    def over_grpc(self) -> bool:
        """True if proxies are to be connected to, not name servers and brokers."""
        ...

    @property
    def endpoints(self) -> tuple[str, ...]:
        """``host:port`` of each proxy."""
        ...

    @property
    def namespace(self) -> str | None:
        """What goes beside the names of topics over gRPC."""
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
    def tls_server_name(self) -> str | None:
        """What all certificates name, if not the addresses dialled."""
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
    return TlsSettings(options.tls_ca_file, options.tls_server_name) if options.use_tls else None


def check_connection(options: ConnectionConfig) -> None:
    """Refuse what can be known to fail in every task: packages that are not there, a file that can't be used.

    Raises
    ------
    OptionError
    """
    tls = tls_settings(options)
    if tls is not None:
        tls.context()
    if options.over_grpc:
        _require_grpc()


def new_transport(options: ConnectionConfig, client_id: str) -> Transport:
    """Return the transport that a set of options asks for.

    Parameters
    ----------
    options : ConnectionConfig
    client_id : str
        By which a proxy tells clients apart; brokers are told it by the calls themselves.

    Raises
    ------
    OptionError
        An address is malformed, the file of authorities can't be used, or gRPC is not installed.
    """
    credentials = None
    if options.access_key is not None and options.secret_key is not None:
        credentials = Credentials(options.access_key, options.secret_key, options.security_token or "")
    if options.over_grpc:
        _require_grpc()
        from rocketmq_spark.transport.grpc import GrpcTransport

        return GrpcTransport(
            options.endpoints,
            client_id=client_id,
            credentials=credentials,
            tls=tls_settings(options),
            namespace=options.namespace or "",
            client_async_semaphore_value=options.client_async_semaphore_value,
        )
    return RemotingTransport(
        options.name_server,
        credentials=credentials,
        tls=tls_settings(options),
        client_async_semaphore_value=options.client_async_semaphore_value,
        client_oneway_semaphore_value=options.client_oneway_semaphore_value,
    )


def _require_grpc() -> None:
    missing = [module for module in ("grpc", "google.protobuf") if not _is_installed(module)]
    if missing:
        raise OptionError(
            f"transport=grpc needs the Python module {' and '.join(missing)}, which is not installed here: "
            "pip install 'rocketmq-spark[grpc]' on the driver and on every executor"
        )


def _is_installed(module: str) -> bool:
    # Found, not imported: gRPC is to be touched in the process that uses it only (spec/grpc.md section 2.4).
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # The package around it is not there either.
        return False
