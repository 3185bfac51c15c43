"""How a client reaches its servers: the options of a connection, and which of the two protocols they choose.

A write, a read, a producer and an admin client each contain one `ConnectionOptions`. `endpoints` alone choose gRPC,
everything else chooses remoting. An option that a proxy cannot honour is an error, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias, TypeVar

import rocketmq_spark.options.kinds as kinds
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model.names import wrap
from rocketmq_spark.options.kinds import (
    ADDRESSES,
    BOOLEAN,
    ENDPOINTS,
    PRODUCER,
    SENDING,
    TOPIC,
    option,
)

REMOTING: Final = "remoting"
GRPC: Final = "grpc"

# Returns the name by which the user knows a field.
Spelling: TypeAlias = Callable[[str], str]

_Options = TypeVar("_Options", bound="ConnectedOptions")

# A shorter interval would be a load of its own on name servers and brokers.
_INTERVAL: Final = kinds.integer(100, unit="ms")
_MILLISECONDS: Final = kinds.integer(1, unit="ms")
_PRINTABLE: Final = kinds.text("a text that is not blank, without control characters", "[\x00-\x1f\x7f]")
_COMMITS_ONLY: Final = "Sent by streams with `commitOffsets=true` only."


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """The options of a connection. Times are milliseconds. Secrets are not in the repr."""

    # fmt: off
    name_server: tuple[str, ...] = option("nameServer", (), ADDRESSES,
        "Addresses of the name servers, separated by ; or a comma: needed unless `endpoints` are given.",
        section="servers", aliases=("nameServerAddress", "namesrvAddr"), env="NAMESRV_ADDR",
        producer_doc="Addresses of the name servers, separated by ; or a comma, or a list: needed unless `endpoints` "
        "are given.", cli="host:9876;host:9876. Default: the cluster that `rocketmq-spark cluster up` left running.")
    transport: str = option("transport", REMOTING, kinds.choice(REMOTING, GRPC),
        "`remoting`: to the brokers that `nameServer` tells of; `grpc`: to the RocketMQ 5 proxies of `endpoints`, "
        "which alone mean it.", uses=SENDING)
    endpoints: tuple[str, ...] = option("endpoints", (), ENDPOINTS,
        "Addresses of proxies (host:port, separated by ; or a comma), for writing over gRPC without a name server. "
        "https:// before one needs `useTls`, and http:// excludes it.", uses=SENDING,
        producer_doc="Addresses of proxies, in the same way, for sending over gRPC without a name server. https:// "
        "before one needs `use_tls`, and http:// excludes it.")
    namespace: str | None = option("namespace", None, kinds.text("characters of a-z A-Z 0-9 _ - |", "[^a-zA-Z0-9_|-]"),
        "Put before the names of topics and of the group as `namespace%`; metrics and receipts show the names without. "
        "By default that of a name server `MQ_INST_x_y.host`.", cli="Only topics of this namespace, named without it.")
    create_topic_key: str = option("createTopicKey", "TBW102", TOPIC,
        "Topic whose route serves as template for a topic that does not exist yet.", section="template", uses=SENDING)
    default_topic_queue_nums: int = option("defaultTopicQueueNums", 4, kinds.integer(1),
        "Queues per broker of a topic that is created by writing to it.", uses=SENDING)
    client_ip: str | None = option("clientIP", None, kinds.text("a text without blanks and without @", r"[\s@]"),
        "First part of the client id; by default the address of the host.", section="client",
        read_doc=f"First part of the client id; by default the address of the host. {_COMMITS_ONLY}")
    unit_name: str | None = option("unitName", None, kinds.text("a text that is not blank", "[\x00-\x1f]"),
        "Third part of the client id, for brokers of several units; by default none.",
        read_doc=f"Third part of the client id, for brokers of several units; by default none. {_COMMITS_ONLY}")
    poll_name_server_interval: int = option("pollNameServerInterval", 30000, _INTERVAL,
        "Time between two refreshes of the routes.", section="intervals", uses=SENDING)
    heartbeat_broker_interval: int = option("heartbeatBrokerInterval", 30000, _INTERVAL,
        "Time between two heartbeats to the brokers.", uses=SENDING)
    mq_client_api_timeout: int = option("mqClientApiTimeout", 3000, kinds.integer(1, unit="ms"),
        "How long a question to a name server or a broker's admin side may take.", uses=(PRODUCER,))
    client_async_semaphore_value: int = option("clientAsyncSemaphoreValue", 65535, kinds.integer(1),
        "Most requests on their way from one worker process, whatever their brokers; what is beyond is tried again.",
        section="permits", uses=SENDING,
        producer_doc="Most asynchronous requests on their way from one client id; an attempt beyond fails at once.")
    client_oneway_semaphore_value: int = option("clientOnewaySemaphoreValue", 65535, kinds.integer(1),
        "The same for requests without an acknowledgement (`oneway`).", uses=SENDING,
        producer_doc="Most `send_oneway` requests on their way from one client id; one beyond waits for its turn.")
    send_latency_fault_enable: bool = option("sendLatencyFaultEnable", False, BOOLEAN,
        "Avoid slow and failing brokers for a while.", section="faults", uses=SENDING)
    fault_preset: str = option("faultPreset", "v4", kinds.choice("v4", "v5", "legacy"),
        "Rules by which brokers are avoided: those of RocketMQ 5 with the durations of 4.x (`v4`) or of 5.x (`v5`), or "
        "those of 4.x (`legacy`: one fast answer ends an isolation).", uses=SENDING)
    latency_max: tuple[int, ...] | None = option("latencyMax", None, kinds.ladder(strictly=True),
        "Latencies at which a broker is avoided, ascending; by default those of `faultPreset`.", uses=SENDING)
    not_available_duration: tuple[int, ...] | None = option("notAvailableDuration", None, kinds.ladder(strictly=False),
        "How long a broker is avoided, for each step of latencyMax; by default as in `faultPreset`.", uses=SENDING)
    start_detector_enable: bool = option("startDetectorEnable", False, BOOLEAN,
        "Ask brokers that could not be reached, in the background, whether they can be reached again; not with "
        "faultPreset=legacy, which does not tell such brokers from slow ones.", uses=SENDING)
    detect_timeout: int = option("detectTimeout", 200, _MILLISECONDS,
        "How long the detector waits for a broker's answer.", uses=SENDING)
    detect_interval: int = option("detectInterval", 2000, _INTERVAL,
        "Shortest time between two questions of the detector to one broker.", uses=SENDING)
    use_tls: bool = option("useTls", False, BOOLEAN,
        "Encrypt every connection, to name servers and brokers or to proxies; their certificates must be for the "
        "addresses dialled.", section="tls", cli="Encrypt every connection.")
    tls_ca_file: str | None = option("tlsCaFile", None, _PRINTABLE,
        "PEM file of the authorities to trust, at one path on the driver and every executor; by default the system's.",
        producer_doc="PEM file of the authorities to trust; by default the system's.",
        cli="PEM file of the authorities to trust. Default: the system's.")
    tls_cert_file: str | None = option("tlsCertFile", None, _PRINTABLE,
        "PEM file of this client's certificate, for servers that demand one, at one path on the driver and every "
        "executor; with the chain up to an authority that they trust.",
        producer_doc="PEM file of this client's certificate, for servers that demand one, with the chain up to an "
        "authority that they trust.", cli="PEM file of this client's certificate.")
    tls_key_file: str | None = option("tlsKeyFile", None, _PRINTABLE,
        "PEM file of that certificate's private key, which is not encrypted; by default in tlsCertFile.",
        cli="PEM file of its private key. Default: that of the certificate.")
    tls_server_name: str | None = option(
        "tlsServerName", None, kinds.text("a host name or address without a port", r"[\s/@\[\]]|^\.|^[^:]*:[^:]*$"),
        "The one name that the certificates of all servers are for, where it is not the addresses dialled.",
        cli="The one name of all certificates, where it is not the addresses dialled.")
    tls_insecure_skip_verify: bool = option("tlsInsecureSkipVerify", False, BOOLEAN,
        "Take every certificate, whoever has signed it and whatever it names: what is sent can be read and changed by "
        "who stands between. For trying things; it is warned of.",
        cli="Take every certificate: for trying things only.")
    access_key: str | None = option("accessKey", None, kinds.SECRET,
        "Name of the user that signs requests to brokers or proxies, with secretKey.", section="access",
        cli="Name of the user that asks.")
    secret_key: str | None = option("secretKey", None, kinds.SECRET,
        "Password of that user: shown nowhere, and never sent.", secret=True, cli="Its password.")
    security_token: str | None = option("securityToken", None, kinds.SECRET,
        "Token of a temporary user, sent with every signed request.", secret=True, cli="Its token, if temporary.")
    credentials_provider: str | None = option("credentialsProvider", None, kinds.CLASS,
        "A class of yours that gives the three, and new ones before they expire, in place of accessKey and secretKey.",
        cli="module:Class that gives key, secret and token, in their place.")
    sign_name_server_requests: bool = option("signNameServerRequests", False, BOOLEAN,
        "Sign requests to name servers, too: for the remoting port of a proxy with access control, and for name "
        "servers that demand it. RocketMQ's own name servers know no users.", cli="Sign requests to name servers, too.")
    # fmt: on

    @property
    def over_grpc(self) -> bool:
        """True if the client connects to proxies, not to name servers and brokers."""
        return self.transport == GRPC

    @property
    def route_servers(self) -> tuple[str, ...]:
        """The servers that return routes: name servers, or the proxies."""
        return self.endpoints if self.over_grpc else self.name_server

    def wire_name(self, name: str) -> str:
        """Return the servers' name of a topic or group: over gRPC the namespace is no part of it."""
        return name if self.over_grpc else wrap(self.namespace, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedOptions:
    """What the options of a write, a read and a producer have in common."""

    connection: ConnectionOptions = ConnectionOptions()

    @classmethod
    def of(cls: type[_Options], **values: Any) -> _Options:
        """Return options from values by field; the fields of the connection are among them."""
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


# Defaults over gRPC. Some clients of proxies take any compressed body for gzip, which consumers over remoting cannot
# unpack. So bodies are compressed only if the user asks for it.
GRPC_DEFAULTS: Final[Mapping[str, Any]] = {"transport": GRPC, "compress_type": "NONE"}

# A proxy is fastest with few requests at once: with 3 of 1,000 rows it took 1.5 times as many rows as with 8.
GRPC_MAX_IN_FLIGHT: Final = 3

_CREATE_FIRST: Final = (
    "a proxy creates no topics: create them first (rocketmq-spark create-topic NAME, or mqadmin updateTopic -t NAME "
    "-a +message.type=NORMAL)"
)


# (field, the values that are possible over gRPC, why others are not)
_REFUSED: Final[tuple[tuple[str, tuple[Any, ...], str], ...]] = (
    ("unit_mode", (False,), "its requests carry no mark of a unit"),
    ("vip_channel_enabled", (False,), "a proxy has no second port"),
    ("sign_name_server_requests", (False,), "no name server is asked, and every request to a proxy is signed"),
    ("create_topic_key", ("TBW102",), _CREATE_FIRST),
    ("default_topic_queue_nums", (4,), _CREATE_FIRST),
    ("send_mode", ("async", "sync"), "a proxy answers every request; async and sync are allowed"),
    (
        "compress_type",
        ("NONE", "ZLIB"),
        "a message can say only that it is compressed, and readers over remoting take that for ZLIB; ZLIB and NONE go",
    ),
    (
        "queue_selector",
        (None, "roundRobin", "random"),
        "the proxy chooses the queue; rows of one shardingKey keep their order in a topic of the type FIFO",
    ),
    ("batch_type", ("plain",), "a proxy makes no inner batches"),
    ("enable_trace", (False,), "a proxy refuses messages to the trace topic"),
)


def transport_of(values: Mapping[str, Any], spelt: Spelling) -> str:
    """Return the transport that the given options choose, by field. The environment is not among them.

    Raises
    ------
    OptionError
        Addresses of both kinds, or of the wrong one; gRPC without endpoints.
    """
    name_server, endpoints, transport = spelt("name_server"), spelt("endpoints"), spelt("transport")
    chosen: str | None = values.get("transport")
    if chosen is None and "endpoints" in values and "name_server" in values:
        raise OptionError(
            f"{name_server} and {endpoints} are both given: give {name_server} alone to write to brokers by the "
            f"remoting protocol, or {endpoints} alone to write to RocketMQ 5 proxies by gRPC"
        )
    if chosen == REMOTING and "endpoints" in values:
        raise OptionError(
            f"{endpoints} are the proxies of {transport}={GRPC}, and {transport} is {REMOTING}: give {name_server} in "
            f"their place, or leave {transport} out"
        )
    if chosen == GRPC and "name_server" in values:
        raise OptionError(
            f"{transport}={GRPC} asks no name server, and {name_server} is given: give {endpoints} in its place (the "
            f"proxies, as in 10.0.0.1:8081;10.0.0.2:8081), or leave {transport} out"
        )
    if chosen == GRPC and "endpoints" not in values:
        raise OptionError(
            f"option {endpoints} is missing, which {transport}={GRPC} needs: the addresses of the RocketMQ 5 proxies, "
            "as in 10.0.0.1:8081;10.0.0.2:8081"
        )
    return chosen or (GRPC if "endpoints" in values else REMOTING)


def against_schemes(endpoints: str, use_tls: bool, spelt: Spelling) -> Iterator[str]:
    """Yield an error text if the addresses as the user wrote them have a scheme that contradicts `use_tls`.

    A user who writes ``https://`` expects that passwords and rows are encrypted.
    """
    given = {scheme.lower() for scheme in re.findall("(https?)://", endpoints, re.IGNORECASE)}
    for scheme, encrypted in (("https", True), ("http", False)):
        if scheme in given and use_tls is not encrypted:
            yield (
                f"{spelt('endpoints')} begin with {scheme}://, and {spelt('use_tls')} is {str(use_tls).lower()}: set "
                f"{spelt('use_tls')}={str(encrypted).lower()}, or leave {scheme}:// out"
            )


def refused_over_grpc(options: ConnectedOptions, spelt: Spelling) -> Iterator[str]:
    """Yield an error text for each option that a proxy cannot honour."""
    values = options.values()
    for field, allowed, why in _REFUSED:
        value = values.get(field, allowed[0])
        if value not in allowed:
            shown = str(value).lower() if isinstance(value, bool) else value
            yield (
                f"{spelt(field)}={shown} is not possible over gRPC: {why}. Leave {spelt(field)} out, or give "
                f"{spelt('name_server')} in place of {spelt('endpoints')}"
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
# (field, a field that would be ignored beside it, why)
_EXCLUDES: Final = (
    ("credentials_provider", "access_key", "a provider gives these itself"),
    ("tls_insecure_skip_verify", "tls_ca_file", "nobody's certificate is checked then"),
    ("tls_insecure_skip_verify", "tls_server_name", "nobody's certificate is checked then"),
)


def security_contradictions(options: ConnectionOptions, spelt: Spelling) -> Iterator[str]:
    """Yield an error text for each contradiction in credentials and encryption."""
    for field, needed in _NEEDS:
        if getattr(options, field) and not getattr(options, needed):
            both = f"set {spelt(needed)}=true, or leave it out" if needed == "use_tls" else "give both, or neither"
            yield f"{spelt(field)} is given without {spelt(needed)}: {both}"
    if options.sign_name_server_requests and not (options.access_key or options.credentials_provider):
        yield (
            f"{spelt('sign_name_server_requests')} is given without credentials: give {spelt('access_key')} or "
            f"{spelt('credentials_provider')}, or leave it out"
        )
    for field, other, why in _EXCLUDES:
        if getattr(options, field) and getattr(options, other):
            yield f"{spelt(field)} and {spelt(other)} are both given, and {why}: leave one of them out"
