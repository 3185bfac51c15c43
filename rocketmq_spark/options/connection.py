"""The options of a connection to name servers and brokers (remoting) or to proxies (gRPC), and checks of them.

The options of a write, a read and a producer each contain one `ConnectionOptions`. `Admin` has the options of a read.
Reads and `Admin` accept no options for gRPC.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias, TypeVar

import rocketmq_spark.options.kinds as kinds
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model.names import wrap
from rocketmq_spark.options.kinds import ADDRESSES, BOOLEAN, ENDPOINTS, MILLISECONDS, PRODUCER, SENDING, TOPIC, option

REMOTING: Final = "remoting"
GRPC: Final = "grpc"

# Returns the name of a field as the user spells it.
Spelling: TypeAlias = Callable[[str], str]

_Options = TypeVar("_Options", bound="ConnectedOptions")

# Shorter intervals would load name servers and brokers noticeably.
_INTERVAL: Final = kinds.integer(100, unit="ms")
_COMMITS_ONLY: Final = "Reads: used only by streams with `commitOffsets=true`."


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """The options of a connection. Times are milliseconds. Secrets are not in the repr."""

    # fmt: off
    name_server: tuple[str, ...] = option("nameServer", (), ADDRESSES,
        "Addresses of the name servers, separated by ; or a comma. Required unless `endpoints` is given.",
        section="servers", aliases=("nameServerAddress", "namesrvAddr"), env="NAMESRV_ADDR",
        flag_help="Name servers, not proxies: host:9876;host:9876. Default: those of `rocketmq-spark cluster up`.")
    transport: str = option("transport", REMOTING, kinds.choice(REMOTING, GRPC),
        "`remoting` connects to name servers and brokers. `grpc` connects to the RocketMQ 5 proxies of `endpoints`. "
        "Default: `grpc` if only `endpoints` is given.", uses=SENDING)
    endpoints: tuple[str, ...] = option("endpoints", (), ENDPOINTS,
        "Addresses of RocketMQ 5 proxies, separated by ; or a comma. Messages are then sent over gRPC without a name "
        "server. A prefix https:// requires `useTls`, and http:// excludes it.", uses=SENDING)
    namespace: str | None = option("namespace", None, kinds.text("characters of a-z A-Z 0-9 _ - |", "[^a-zA-Z0-9_|-]"),
        "Prefix (`namespace%`) of topic and group names on the servers. Metrics and receipts show names without it. "
        "Default: the namespace in a name server address `MQ_INST_x_y.host`.",
        flag_help="Only topics of this namespace, shown without its prefix.")
    create_topic_key: str = option("createTopicKey", "TBW102", TOPIC,
        "Topic whose route is the template for topics that do not exist yet.", section="template", uses=SENDING)
    default_topic_queue_nums: int = option("defaultTopicQueueNums", 4, kinds.integer(1),
        "Queues per broker of a topic that the write creates.", uses=SENDING)
    client_ip: str | None = option("clientIP", None, kinds.text("a text without blanks and without @", r"[\s@]"),
        f"First part of the client id. Default: the address of this host. {_COMMITS_ONLY}", section="client")
    unit_name: str | None = option("unitName", None, kinds.text("a non-blank text", "[\x00-\x1f]"),
        f"Third part of the client id, for deployments with several units. {_COMMITS_ONLY}")
    poll_name_server_interval: int = option("pollNameServerInterval", 30000, _INTERVAL,
        "Interval between route refreshes.", section="intervals", uses=SENDING)
    heartbeat_broker_interval: int = option("heartbeatBrokerInterval", 30000, _INTERVAL,
        "Interval between heartbeats to the brokers.", uses=SENDING)
    mq_client_api_timeout: int = option("mqClientApiTimeout", 3000, kinds.integer(1, unit="ms"),
        "Timeout of a request to a name server, or of an admin request to a broker.", uses=(PRODUCER,))
    client_async_semaphore_value: int = option("clientAsyncSemaphoreValue", 65535, kinds.integer(1),
        "Maximum number of requests in flight per worker process; requests beyond it are retried. `Producer`: of "
        "asynchronous requests per client id; an attempt beyond it fails at once.", section="permits", uses=SENDING)
    client_oneway_semaphore_value: int = option("clientOnewaySemaphoreValue", 65535, kinds.integer(1),
        "The same limit for requests without acknowledgement (`sendMode=oneway`, `send_oneway`). A request beyond it "
        "waits.", uses=SENDING)
    send_latency_fault_enable: bool = option("sendLatencyFaultEnable", False, BOOLEAN,
        "Avoid slow and failing brokers for a while.", section="faults", uses=SENDING)
    fault_preset: str = option("faultPreset", "v4", kinds.choice("v4", "v5", "legacy"),
        "Rules for avoiding brokers. `v4`: the rules of RocketMQ 5 with the durations of 4.x. `v5`: the rules and "
        "durations of 5.x. `legacy`: the rules of 4.x, where one fast answer ends the isolation.", uses=SENDING)
    latency_max: tuple[int, ...] | None = option("latencyMax", None, kinds.ladder(strictly=True),
        "Latencies from which a broker is avoided, ascending. Default: those of `faultPreset`.", uses=SENDING)
    not_available_duration: tuple[int, ...] | None = option("notAvailableDuration", None, kinds.ladder(strictly=False),
        "How long a broker is avoided, per step of `latencyMax`. Default: those of `faultPreset`.", uses=SENDING)
    start_detector_enable: bool = option("startDetectorEnable", False, BOOLEAN,
        "Probe unreachable brokers in the background, and use them again as soon as they answer. Not available with "
        "`faultPreset=legacy`, which does not distinguish unreachable brokers from slow ones.", uses=SENDING)
    detect_timeout: int = option("detectTimeout", 200, MILLISECONDS, "Timeout of one probe.", uses=SENDING)
    detect_interval: int = option("detectInterval", 2000, _INTERVAL,
        "Minimum interval between two probes of one broker.", uses=SENDING)
    use_tls: bool = option("useTls", False, BOOLEAN,
        "Encrypt every connection with TLS. The certificates of the servers must be valid for the addresses that the "
        "client connects to.", section="tls")
    tls_ca_file: str | None = option("tlsCaFile", None, kinds.READ_FILE,
        "PEM file of the trusted certificate authorities. Default: the system's authorities.")
    tls_cert_file: str | None = option("tlsCertFile", None, kinds.READ_FILE,
        "PEM file of the client certificate and its chain, for servers that require one.")
    tls_key_file: str | None = option("tlsKeyFile", None, kinds.READ_FILE,
        "PEM file of the unencrypted private key of the client certificate. Default: the key in `tlsCertFile`.")
    tls_server_name: str | None = option(
        "tlsServerName", None, kinds.text("a host name or address without a port", r"[\s/@\[\]]|^\.|^[^:]*:[^:]*$"),
        "Name that the certificates of all servers are valid for, if it is not the address that the client connects "
        "to.")
    tls_insecure_skip_verify: bool = option("tlsInsecureSkipVerify", False, BOOLEAN,
        "Only for trials: accept every certificate. Anyone between client and server can then read and change the "
        "data. It is logged as a warning.")
    access_key: str | None = option("accessKey", None, kinds.SECRET,
        "Name of the user that signs requests to brokers or proxies. Requires `secretKey`.", section="access")
    secret_key: str | None = option("secretKey", None, kinds.SECRET,
        "Secret key of the user. It is never sent, logged or shown.", secret=True)
    security_token: str | None = option("securityToken", None, kinds.SECRET,
        "Token of a temporary user, sent with every signed request.", secret=True)
    credentials_provider: str | None = option("credentialsProvider", None, kinds.CLASS,
        "Your class, as `module:Class`, that provides the access key, secret key and token, and renews them before "
        "they expire. Excludes `accessKey` and `secretKey`.")
    sign_name_server_requests: bool = option("signNameServerRequests", False, BOOLEAN,
        "Also sign requests to name servers. Needed for the remoting port of a proxy with access control, and for name "
        "servers that require signatures. RocketMQ's own name servers do not.")
    # fmt: on

    @property
    def over_grpc(self) -> bool:
        """True if the client connects to proxies."""
        return self.transport == GRPC

    @property
    def route_servers(self) -> tuple[str, ...]:
        """The servers that return routes: name servers or proxies."""
        return self.endpoints if self.over_grpc else self.name_server

    @property
    def wire_namespace(self) -> str | None:
        """The namespace in names of topics and groups on the servers; None over gRPC, where it is a separate field."""
        return None if self.over_grpc else self.namespace

    def wire_name(self, name: str) -> str:
        """Return the name of a topic or group on the servers."""
        return wrap(self.wire_namespace, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedOptions:
    """The options of the connection, the base of the options of a write, a read and a producer."""

    connection: ConnectionOptions = ConnectionOptions()

    @classmethod
    def of(cls: type[_Options], **values: Any) -> _Options:
        """Return the options of a mapping by field, which includes the fields of the connection."""
        own = {field.name for field in fields(cls)}
        connection = {name: values.pop(name) for name in values.keys() - own}
        return cls(connection=ConnectionOptions(**connection), **values)

    def values(self) -> dict[str, Any]:
        """Return all values by field, those of the connection first."""
        connection = {field.name: getattr(self.connection, field.name) for field in fields(ConnectionOptions)}
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "connection"}
        return connection | own

    @property
    def over_grpc(self) -> bool:
        """See `ConnectionOptions.over_grpc`."""
        return self.connection.over_grpc


# Bodies are compressed only on request, because some clients expect gzip: docs/internals/grpc-messages.md#compression.
GRPC_DEFAULTS: Final[Mapping[str, Any]] = {"transport": GRPC, "compress_type": "NONE"}

# Measured, see docs/internals/grpc-messages.md#batches.
GRPC_MAX_IN_FLIGHT: Final = 3

_CREATE_FIRST: Final = (
    "a proxy creates no topics, so create them first (rocketmq-spark create-topic NAME, or mqadmin updateTopic -t NAME "
    "-a +message.type=NORMAL)"
)

_ZLIB_ONLY: Final = (
    "gRPC does not name the compression type, and consumers over remoting assume ZLIB; allowed are ZLIB and NONE"
)
_PROXY_CHOOSES: Final = (
    "the proxy chooses the queue; in a topic of the type FIFO it keeps the order of rows with one shardingKey"
)

# (field, the values that are allowed over gRPC, why others are not), see docs/internals/grpc.md#unsupported.
_REFUSED: Final[tuple[tuple[str, tuple[Any, ...], str], ...]] = (
    ("unit_mode", (False,), "requests over gRPC have no unit mode"),
    ("vip_channel_enabled", (False,), "a proxy has no VIP port"),
    ("sign_name_server_requests", (False,), "no name server is used, and every request to a proxy is signed"),
    ("create_topic_key", ("TBW102",), _CREATE_FIRST),
    ("default_topic_queue_nums", (4,), _CREATE_FIRST),
    ("send_mode", ("async", "sync"), "a proxy answers every request; allowed are async and sync"),
    ("compress_type", ("NONE", "ZLIB"), _ZLIB_ONLY),
    ("queue_selector", (None, "roundRobin", "random"), _PROXY_CHOOSES),
    ("batch_type", ("plain",), "a proxy stores no inner batches"),
    ("enable_trace", (False,), "a proxy rejects messages to the trace topic"),
)


def transport_of(values: Mapping[str, Any], spelt: Spelling) -> str:
    """Return the transport of options by field (not the environment), or raise an OptionError for wrong addresses."""
    name_server, endpoints, transport = spelt("name_server"), spelt("endpoints"), spelt("transport")
    chosen: str | None = values.get("transport")
    wrong = ""
    if chosen is None and "endpoints" in values and "name_server" in values:
        wrong = f"{name_server} and {endpoints} are both given: give {name_server} (remoting) or {endpoints} (gRPC)"
    elif chosen == REMOTING and "endpoints" in values:
        wrong = f"{transport}={REMOTING} excludes {endpoints}: give {name_server} instead, or remove {transport}"
    elif chosen == GRPC and "name_server" in values:
        wrong = f"{transport}={GRPC} excludes {name_server}: give {endpoints} (proxies) instead, or remove {transport}"
    elif chosen == GRPC and "endpoints" not in values:
        wrong = (
            f"option {endpoints} is missing: {transport}={GRPC} requires the addresses of RocketMQ 5 proxies, as in "
            "10.0.0.1:8081;10.0.0.2:8081"
        )
    if wrong:
        raise OptionError(wrong)
    return chosen or (GRPC if "endpoints" in values else REMOTING)


def refused_over_grpc(options: ConnectedOptions, endpoints: str, spelt: Spelling) -> Iterator[str]:
    """Yield an error text for each option that a proxy cannot honour; `endpoints` is the user's text."""
    values = options.values()
    for field, allowed, why in _REFUSED:
        value = values.get(field, allowed[0])
        if value not in allowed:
            shown, name = str(value).lower() if isinstance(value, bool) else value, spelt(field)
            yield (
                f"{name}={shown} is not available over gRPC: {why}. Remove {name}, or give {spelt('name_server')} "
                f"instead of {spelt('endpoints')}"
            )
    # The prefix https:// promises the user that passwords and rows are encrypted.
    schemes = {scheme.lower() for scheme in re.findall("(https?)://", endpoints, re.IGNORECASE)}
    use_tls = options.connection.use_tls
    for scheme, encrypted in (("https", True), ("http", False)):
        if scheme in schemes and use_tls is not encrypted:
            yield (
                f"{spelt('endpoints')} begins with {scheme}://, but {spelt('use_tls')} is {str(use_tls).lower()}: set "
                f"{spelt('use_tls')}={str(encrypted).lower()}, or remove {scheme}://"
            )


# (field, the field that it needs)
_NEEDS: Final = (
    ("access_key", "secret_key"),
    ("secret_key", "access_key"),
    ("security_token", "access_key"),
    ("tls_ca_file", "use_tls"),
    ("tls_cert_file", "use_tls"),
    ("tls_key_file", "tls_cert_file"),
    ("tls_server_name", "use_tls"),
    ("tls_insecure_skip_verify", "use_tls"),
)
# (field, a field that it would override, why)
_EXCLUDES: Final = (
    ("credentials_provider", "access_key", "a provider returns the access key itself"),
    ("tls_insecure_skip_verify", "tls_ca_file", "the first accepts every certificate"),
    ("tls_insecure_skip_verify", "tls_server_name", "the first accepts every certificate"),
)


def security_contradictions(options: ConnectionOptions, spelt: Spelling) -> Iterator[str]:
    """Yield an error text for each contradiction in credentials and encryption."""
    for field, needed in _NEEDS:
        if getattr(options, field) and not getattr(options, needed):
            advice = f"set {spelt(needed)}=true" if needed == "use_tls" else f"give {spelt(needed)}, too"
            yield f"{spelt(field)} is given without {spelt(needed)}: {advice}, or remove {spelt(field)}"
    if options.sign_name_server_requests and not (options.access_key or options.credentials_provider):
        signs, key, provider = map(spelt, ("sign_name_server_requests", "access_key", "credentials_provider"))
        yield f"{signs} is given without credentials: give {key} or {provider}, or remove {signs}"
    for field, other, why in _EXCLUDES:
        if getattr(options, field) and getattr(options, other):
            yield f"{spelt(field)} and {spelt(other)} are both given, but {why}: remove one of them"
