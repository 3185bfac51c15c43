"""Makes the transport that connection options choose.

Nothing is opened here: a transport connects with its first request. gRPC is imported only if the options choose it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from dataclasses import dataclass, field, fields, replace
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any, Final, cast

from rocketmq_spark.errors import OptionError
from rocketmq_spark.options.connection import ConnectionOptions
from rocketmq_spark.transport.base import local_ip
from rocketmq_spark.transport.credentials import credentials_of, provider_class, with_variables
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from rocketmq_spark.transport.tls import TlsSettings

if TYPE_CHECKING:
    from rocketmq_spark.transport.base import ProxyTransport, Transport

# The generated code is made by this protobuf, and runs on no older one.
PROTOBUF_FLOOR: Final = "6.31.1"

_INSTALL: Final = "pip install 'rocketmq-spark[grpc]' on the driver and on every executor"


logger = logging.getLogger("rocketmq_spark.transport")


@dataclass(frozen=True, slots=True)
class SharedConnection:
    """What two producers must have in common to share a client instance. Equal if everything is.

    Parameters
    ----------
    options : ConnectionOptions
        With the address of this host, and with the values of the variables that secrets refer to, because a variable is
        read once. A reference to a file stays as it is: its content may change. Over remoting without the namespace.
    namespace : str
        The namespace of a transport of our own over remoting. Clients of different namespaces have their own instances,
        whatever else they have in common.
    provider : type or None
        The class of the credentials provider.
    transport : Transport or None
        The caller's own.
    """

    options: ConnectionOptions = field(repr=False)
    namespace: str
    provider: type[Any] | None
    transport: Transport | None

    @classmethod
    def of(cls, options: ConnectionOptions, transport: Transport | None = None) -> SharedConnection:
        """Return what decides whether a producer with these options may share an instance.

        Raises
        ------
        OptionError
            The class of the credentials provider can't be loaded.
        """
        resolved = replace(
            with_variables(options),
            client_ip=options.client_ip or local_ip(),
            namespace=options.namespace if options.over_grpc else None,
        )
        namespace = "" if options.over_grpc or transport is not None else options.namespace or ""
        return cls(resolved, namespace, provider_class(options), transport)

    def differences(self, other: SharedConnection) -> list[str]:
        """Return the names of the options that differ, never their values."""
        names = [
            one.name
            for one in fields(ConnectionOptions)
            if getattr(self.options, one.name) != getattr(other.options, one.name)
        ]
        if self.provider is not other.provider:
            names.append("credentials_provider")
        if self.transport is not other.transport:
            names.append("transport")
        return list(dict.fromkeys(names))


def tls_settings(options: ConnectionOptions) -> TlsSettings | None:
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


def check_connection(options: ConnectionOptions) -> None:
    """Raise an OptionError for what would fail in every task: a missing package or class, an unusable file."""
    tls = tls_settings(options)
    if tls is not None:
        tls.context()
    credentials_of(options)
    if options.over_grpc:
        require_grpc()


def client_id_of(options: ConnectionOptions, instance_name: str) -> str:
    """Return what servers call a client (``ClientConfig.buildMQClientId``)."""
    return "@".join(filter(None, (options.client_ip or local_ip(), instance_name, options.unit_name)))


def new_transport(options: ConnectionOptions, client_id: str, *, polled: bool = False) -> Transport:
    """Return the transport that the options choose; a proxy distinguishes clients by `client_id`.

    Raises
    ------
    OptionError
        An address is malformed, a file or class can't be used, or gRPC is missing or too old.
    """
    credentials = credentials_of(options)
    if options.tls_insecure_skip_verify:
        _warn_of_no_verification()
    if options.over_grpc:
        require_grpc()
        from rocketmq_spark.transport.grpc.transport import GrpcTransport

        proxies: ProxyTransport = GrpcTransport(
            options.endpoints,
            client_id=client_id,
            credentials=credentials,
            tls=tls_settings(options),
            namespace=options.namespace or "",
            client_async_semaphore_value=options.client_async_semaphore_value,
        )
        # Producers check the transport before they call what proxies do not offer.
        return cast("Transport", proxies)
    return RemotingTransport(
        options.name_server,
        credentials=credentials,
        tls=tls_settings(options),
        client_async_semaphore_value=options.client_async_semaphore_value,
        client_oneway_semaphore_value=options.client_oneway_semaphore_value,
        sign_name_server_requests=options.sign_name_server_requests,
        namespace=options.namespace or "",
        create_topic_key=options.create_topic_key,
        polled=polled,
    )


@functools.cache
def _warn_of_no_verification() -> None:
    logger.warning(
        "tlsInsecureSkipVerify=true: no server's certificate is checked, and who stands between can read and change "
        "what is sent; give tlsCaFile, and tlsServerName if the certificates are for another name"
    )


def require_grpc() -> None:
    """Raise an OptionError if a module that gRPC needs is missing or too old; nothing is imported."""
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
    # Found, not imported: gRPC may be imported only in the process that uses it, as Spark forks its workers.
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:
        # The package around it is not there either.
        return None
