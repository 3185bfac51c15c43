"""Creates the transport that the options choose, and checks what it needs, such as files and packages.

A transport does not connect before its first request. The gRPC package is imported only for a gRPC transport.
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

# The generated code was made by this version of protobuf, and needs at least this one.
PROTOBUF_FLOOR: Final = "6.31.1"
_INSTALL: Final = "pip install 'rocketmq-spark[grpc]' on the driver and on every executor"

logger = logging.getLogger("rocketmq_spark.transport")


@dataclass(frozen=True, slots=True)
class SharedConnection:
    """The values that two producers must share to use one instance (docs/internals/producer.md#client-instances)."""

    # With the address of this host. Environment variables of secrets are resolved, because they are read once.
    # References to files are not, because the content may change. Over remoting the options have no namespace.
    options: ConnectionOptions = field(repr=False)
    # The namespace over remoting, "" with the caller's own transport. Clients of other namespaces never share.
    namespace: str
    # The class of the credentials provider.
    provider: type[Any] | None
    # The caller's own transport.
    transport: Transport | None

    @classmethod
    def of(cls, options: ConnectionOptions, transport: Transport | None = None) -> SharedConnection:
        """Return the connection of `options`; raise an OptionError if the provider's class can't be loaded."""
        resolved = replace(
            with_variables(options),
            client_ip=options.client_ip or local_ip(),
            namespace=options.namespace if options.over_grpc else None,
        )
        namespace = "" if options.over_grpc or transport is not None else options.namespace or ""
        return cls(resolved, namespace, provider_class(options), transport)

    def differences(self, other: SharedConnection) -> list[str]:
        """Return the names of the options that differ, never their values."""
        names = {
            option.name: None
            for option in fields(ConnectionOptions)
            if getattr(self.options, option.name) != getattr(other.options, option.name)
        }
        if self.provider is not other.provider:
            names["credentials_provider"] = None
        if self.transport is not other.transport:
            names["transport"] = None
        return list(names)


def tls_settings(options: ConnectionOptions) -> TlsSettings | None:
    """Return the settings of encrypted connections, or None."""
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
    """Raise an OptionError for a missing package or class, or an unusable file, which would fail in every task."""
    if tls := tls_settings(options):
        tls.context()
    credentials_of(options)
    if options.over_grpc:
        require_grpc()


def client_id_of(options: ConnectionOptions, instance_name: str) -> str:
    """Return the client id (``ClientConfig.buildMQClientId``)."""
    return "@".join(filter(None, (options.client_ip or local_ip(), instance_name, options.unit_name)))


def new_transport(options: ConnectionOptions, client_id: str, *, polled: bool = False) -> Transport:
    """Return the transport that the options choose; may raise an OptionError. Proxies know clients by `client_id`."""
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
        # Producers check the transport before they call a method that proxies do not support.
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
        "tlsInsecureSkipVerify=true: certificates of servers are not checked, so an attacker can read and change "
        "messages; set tlsCaFile, and tlsServerName if the certificates have another name"
    )


def require_grpc() -> None:
    """Raise an OptionError if a module that gRPC needs is missing or too old; nothing is imported."""
    specs = {module: _spec_of(module) for module in ("grpc", "google.protobuf")}
    missing = [module for module, spec in specs.items() if spec is None]
    if missing:
        modules, are = ("modules", "are") if len(missing) > 1 else ("module", "is")
        needed = f"the Python {modules} {' and '.join(missing)}, which {are} not installed here"
        raise OptionError(f"transport=grpc needs {needed}: {_INSTALL}")
    # The version of the package that an import would find. Its source may be missing, or contain no version.
    read = getattr(getattr(specs["google.protobuf"], "loader", None), "get_source", None)
    source = (read and read("google.protobuf")) or ""
    version = re.search(r"""^__version__ = ['"]([^'"]+)""", source, re.MULTILINE)
    if version is not None and _numbers(version[1]) < _numbers(PROTOBUF_FLOOR):
        raise OptionError(
            f"transport=grpc needs protobuf {PROTOBUF_FLOOR} or newer, and {version[1]} is installed here: {_INSTALL}"
        )


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall("[0-9]+", version)[:3]]


def _spec_of(module: str) -> ModuleSpec | None:
    # The module is not imported, because Spark forks its workers: only the process that uses gRPC may import it.
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:
        # The package around it is missing, too.
        return None
