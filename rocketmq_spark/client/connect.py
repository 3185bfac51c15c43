"""Options to connections: the transport of a client instance, for a write and for a producer alike.

Rule 1: nothing is opened here; a transport connects with its first request.
Rule 2: gRPC is imported only where it is asked for: who writes to brokers need not have it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any, Final, Protocol

from rocketmq_spark.client.credentials import CredentialOptions, credentials_of, provider_class, with_variables
from rocketmq_spark.errors import OptionError
from rocketmq_spark.producer.client_config import ClientConfig
from rocketmq_spark.transport.local_address import local_ip
from rocketmq_spark.transport.remoting import RemotingTransport
from rocketmq_spark.transport.tls import TlsSettings

if TYPE_CHECKING:
    from rocketmq_spark.transport.base import Transport

# The protobuf that the generated code is stamped with: it runs on no older one (spec/grpc.md section 1.4).
PROTOBUF_FLOOR: Final = "6.31.1"

_INSTALL: Final = "pip install 'rocketmq-spark[grpc]' on the driver and on every executor"


# How a connection is secured, by field: for who makes a client beside its own.
SECURITY: Final = (
    "access_key", "secret_key", "security_token", "credentials_provider", "sign_name_server_requests", "use_tls",
    "tls_ca_file", "tls_cert_file", "tls_key_file", "tls_server_name", "tls_insecure_skip_verify",
)  # fmt: skip

logger = logging.getLogger("rocketmq_spark.transport")


class ConnectionConfig(CredentialOptions, Protocol):
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
    def sign_name_server_requests(self) -> bool:
        """Sign requests to name servers, too."""
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
    def tls_cert_file(self) -> str | None:
        """This client's certificate."""
        ...

    @property
    def tls_key_file(self) -> str | None:
        """Its private key."""
        ...

    @property
    def tls_server_name(self) -> str | None:
        """What all certificates name, if not the addresses dialled."""
        ...

    @property
    def tls_insecure_skip_verify(self) -> bool:
        """Take every certificate."""
        ...

    @property
    def client_async_semaphore_value(self) -> int:
        """Most requests under way that are answered."""
        ...

    @property
    def client_oneway_semaphore_value(self) -> int:
        """Most requests under way that are not."""
        ...


class InstanceConfig(ConnectionConfig, ClientConfig, Protocol):
    """What a client instance takes from the options of the producer that creates it."""

    @property
    def mq_client_api_timeout(self) -> int:
        """Timeout of a route, heart-beat or unregister request, ms."""
        ...


# Taken from the protocols, so that an option that a connection depends on can't be left out.
CONNECTION_OPTIONS: Final = tuple(
    dict.fromkeys(
        name
        for protocol in (ConnectionConfig, CredentialOptions, InstanceConfig, ClientConfig)
        for name, member in vars(protocol).items()
        if isinstance(member, property)
    )
)


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Everything that decides on the connections of a client instance, secrets included.

    Two producers may share an instance only if these are equal. A reference to a file equals the same reference
    only: its content may change. One to a variable needs the same value, too: it is read once. A credentials provider
    equals the same class only.
    """

    # By the names of the options, in one order. Holds secrets.
    _values: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, options: InstanceConfig, transport: Transport | None = None) -> ConnectionOptions:
        """Return those of a producer.

        Parameters
        ----------
        options : InstanceConfig
        transport : Transport, optional
            The caller's own transport; it equals itself only.

        Raises
        ------
        OptionError
            The class of the credentials provider can't be loaded.
        """
        values = {name: getattr(options, name) for name in CONNECTION_OPTIONS}
        values["transport"] = transport or ("grpc" if values.pop("over_grpc") else "remoting")
        values["client_ip"] = options.client_ip or local_ip()
        values["credentials_provider"] = provider_class(options)
        values |= zip(("access_key", "secret_key", "security_token"), with_variables(options), strict=True)
        if not options.over_grpc:
            # Over remoting each producer adds the namespace to its own topics; the connection does not know it.
            del values["namespace"]
        return cls(values)

    def differences(self, other: ConnectionOptions) -> list[str]:
        """Return the names of the options that differ, never their values."""
        missing = object()
        names = dict.fromkeys([*self._values, *other._values])
        return [name for name in names if self._values.get(name, missing) != other._values.get(name, missing)]


def tls_settings(options: ConnectionConfig) -> TlsSettings | None:
    """Return how connections are encrypted; None: not at all."""
    if not options.use_tls:
        return None
    return TlsSettings(
        options.tls_ca_file,
        options.tls_server_name,
        options.tls_cert_file,
        options.tls_key_file,
        options.tls_insecure_skip_verify,
    )


def check_connection(options: ConnectionConfig) -> None:
    """Refuse what can be known to fail in every task: packages or a class that are not there, a file of no use.

    Raises
    ------
    OptionError
    """
    tls = tls_settings(options)
    if tls is not None:
        tls.context()
    credentials_of(options)
    if options.over_grpc:
        require_grpc()


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
        An address is malformed, a file or class can't be used, or gRPC is not installed, or too old.
    """
    credentials = credentials_of(options)
    if options.tls_insecure_skip_verify:
        _warn_of_no_verification()
    if options.over_grpc:
        require_grpc()
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
        sign_name_server_requests=options.sign_name_server_requests,
        polled=polled,
    )


@functools.cache
def _warn_of_no_verification() -> None:
    logger.warning(
        "tlsInsecureSkipVerify=true: no server's certificate is checked, and who stands between can read and change "
        "what is sent; give tlsCaFile, and tlsServerName if the certificates are for another name"
    )


def require_grpc() -> None:
    """Look for what gRPC needs, without importing it.

    Raises
    ------
    OptionError
        A module is missing or too old; the text says how to install it.
    """
    missing = [module for module in ("grpc", "google.protobuf") if _spec_of(module) is None]
    if missing:
        modules, are = ("modules", "are") if len(missing) > 1 else ("module", "is")
        names = " and ".join(missing)
        raise OptionError(
            f"transport=grpc needs the Python {modules} {names}, which {are} not installed here: {_INSTALL}"
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
