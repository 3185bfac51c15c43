"""Options to connections: the transport of a client instance, for a write and for a producer alike.

Rule 1: nothing is opened here; a transport connects with its first request.
Rule 2: gRPC is imported only where it is asked for: who writes to brokers need not have it.
"""

from __future__ import annotations

import importlib.util
import re
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Final, Protocol

from rocketmq_spark.errors import OptionError
from rocketmq_spark.transport.local_address import local_ip
from rocketmq_spark.transport.remoting import RemotingTransport
from rocketmq_spark.transport.tls import TlsSettings
from rocketmq_spark.wire.acl import Credentials

if TYPE_CHECKING:
    from rocketmq_spark.transport.base import Transport

# The protobuf that the generated code is stamped with: it runs on no older one (spec/grpc.md section 1.4).
PROTOBUF_FLOOR: Final = "6.31.1"

_INSTALL: Final = "pip install 'rocketmq-spark[grpc]' on the driver and on every executor"


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
    def client_ip(self) -> str | None:
        """First part of the client id; None: the address of this host."""
        ...

    @property
    def unit_name(self) -> str | None:
        """Third part of the client id."""
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


def client_id_of(options: ConnectionConfig, instance_name: str) -> str:
    """Return what servers call a client (``ClientConfig.buildMQClientId``)."""
    return "@".join(filter(None, (options.client_ip or local_ip(), instance_name, options.unit_name)))


def new_transport(options: ConnectionConfig, client_id: str, *, polled: bool = False) -> Transport:
    """Return the transport that a set of options asks for.

    Parameters
    ----------
    options : ConnectionConfig
    client_id : str
        By which a proxy tells clients apart; brokers are told it by the calls themselves.
    polled : bool, default False
        See `RemotingTransport`.

    Raises
    ------
    OptionError
        An address is malformed, the file of authorities can't be used, or gRPC is not installed, or too old.
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
        polled=polled,
    )


def _require_grpc() -> None:
    missing = [module for module in ("grpc", "google.protobuf") if _spec_of(module) is None]
    if missing:
        raise OptionError(
            f"transport=grpc needs the Python module {' and '.join(missing)}, which is not installed here: {_INSTALL}"
        )
    found = _protobuf_version()
    if found is not None and _numbers(found) < _numbers(PROTOBUF_FLOOR):
        raise OptionError(
            f"transport=grpc needs protobuf {PROTOBUF_FLOOR} or newer, and {found} is installed here: {_INSTALL}"
        )


def _protobuf_version() -> str | None:
    """Return the version of the package that an import would find; None if its source does not say."""
    spec = _spec_of("google.protobuf")
    read = getattr(spec.loader, "get_source", None) if spec is not None else None
    said = re.search(r"""^__version__ = ['"]([^'"]+)""", (read and read("google.protobuf")) or "", re.MULTILINE)
    return said[1] if said else None


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall("[0-9]+", version)[:3]]


def _spec_of(module: str) -> ModuleSpec | None:
    # Found, not imported: gRPC is to be touched in the process that uses it only (spec/grpc.md section 2.4).
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:
        # The package around it is not there either.
        return None
