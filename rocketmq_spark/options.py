"""The options of a write: parsed once, on the driver, into one frozen value.

Rule 1: every value is checked here, before any task; a message says the option, the value and what is allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from rocketmq_spark.errors import OptionError
from rocketmq_spark.namespace import effective_namespace
from rocketmq_spark.option_parsing import parse_environment, parse_one, parse_values, redacted_repr
from rocketmq_spark.option_rules import contradictions
from rocketmq_spark.option_table import SINK_OPTIONS, TOPIC_SPEC, OptionSpec
from rocketmq_spark.option_transport import (
    GRPC,
    GRPC_DEFAULTS,
    GRPC_MAX_IN_FLIGHT,
    REMOTING,
    against_schemes,
    refused_over_grpc,
    transport_of,
)
from rocketmq_spark.option_values import MIB
from rocketmq_spark.reader_option_table import READER_OPTIONS

_SPELLING: Final = {spec.field: spec.name for spec in SINK_OPTIONS}


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One option as the documentation shows it."""

    name: str
    aliases: tuple[str, ...]
    env: str
    type: str
    allowed: str
    default: str
    doc: str


@dataclass(frozen=True, slots=True, repr=False)
class SinkOptions:
    """The options of one write, parsed. Times are milliseconds, sizes bytes; see `SINK_OPTIONS` for each one's meaning.

    Hashable and picklable; equal options share a client instance. Building one directly checks nothing.
    """

    name_server: tuple[str, ...] = ()
    transport: str = REMOTING
    endpoints: tuple[str, ...] = ()
    topic: str | None = None
    tags: str | None = None
    producer_group: str = "spark-rocketmq-sink"
    instance_name: str | None = None
    client_ip: str | None = None
    unit_name: str | None = None
    unit_mode: bool = False
    namespace: str | None = None
    vip_channel_enabled: bool = False
    create_topic_key: str = "TBW102"
    default_topic_queue_nums: int = 4
    send_mode: str = "async"
    send_msg_timeout: int = 3000
    send_msg_max_timeout_per_request: int = -1
    retry_times_when_send_failed: int = 2
    retry_times_when_send_async_failed: int = 2
    retry_another_broker_when_not_store_ok: bool = False
    max_message_size: int = 4 * MIB
    compress_msg_body_over_howmuch: int = 4096
    compress_type: str = "ZLIB"
    compress_level: int = 5
    send_latency_fault_enable: bool = False
    fault_preset: str = "v4"
    latency_max: tuple[int, ...] | None = None
    not_available_duration: tuple[int, ...] | None = None
    start_detector_enable: bool = False
    detect_timeout: int = 200
    detect_interval: int = 2000
    poll_name_server_interval: int = 30000
    heartbeat_broker_interval: int = 30000
    client_async_semaphore_value: int = 65535
    client_oneway_semaphore_value: int = 65535
    queue_selector: str | None = None
    machine_room: tuple[str, ...] = ()
    ordered: bool = False
    batching: bool = True
    batch_bytes: int = MIB
    batch_type: str = "plain"
    max_in_flight: int = 8
    max_in_flight_bytes: int = 32 * MIB
    delivery_timeout_ms: int = 120000
    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 5000
    require_store_ok: bool = True
    on_error: str = "fail"
    dead_letter_topic: str | None = None
    row_id: bool | tuple[str, ...] = False
    keep_row_id: bool = False
    access_key: str | None = None
    secret_key: str | None = None
    security_token: str | None = None
    credentials_provider: str | None = None
    sign_name_server_requests: bool = False
    use_tls: bool = False
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_server_name: str | None = None
    tls_insecure_skip_verify: bool = False
    enable_trace: bool = False
    trace_topic: str = "RMQ_SYS_TRACE_TOPIC"
    max_rate_per_second: int | None = None
    max_rate_tasks: int | None = None
    metrics_path: str | None = None

    @property
    def over_grpc(self) -> bool:
        """True if proxies take the rows, not brokers."""
        return self.transport == GRPC

    @property
    def route_servers(self) -> tuple[str, ...]:
        """Whom routes are asked of: name servers, or the proxies."""
        return self.endpoints if self.over_grpc else self.name_server

    @property
    def wrapped_namespace(self) -> str:
        """The namespace that names of topics and groups begin with; over gRPC it goes beside them, so it is empty."""
        return "" if self.over_grpc else self.namespace or ""

    @property
    def custom_selector(self) -> str | None:
        """``module:Class`` if `queue_selector` is a class, else None."""
        return self.queue_selector if ":" in (self.queue_selector or "") else None

    def __repr__(self) -> str:
        return redacted_repr(self, SINK_OPTIONS)


def parse_sink_options(
    options: Mapping[str, str], environ: Mapping[str, str], settled: Mapping[str, Any] = MappingProxyType({})
) -> SinkOptions:
    """Return the options of a write.

    Parameters
    ----------
    options : mapping of str to str
        As Spark hands them over; keys in any case.
    environ : mapping of str to str
        Environment of the driver: ``NAMESRV_ADDR`` stands in for ``nameServer``, as in the Java client.
    settled : mapping of str to value, default none
        Fields that `options` do not give because something else has settled them, such as the producer that writes.

    Raises
    ------
    OptionError
        An option is unknown, malformed or missing, or two contradict each other.
    """
    values = parse_values(SINK_OPTIONS, options, "write", {"read": READER_OPTIONS})
    if transport_of(values, _SPELLING.__getitem__) == GRPC:
        values = {**GRPC_DEFAULTS, "max_in_flight": GRPC_MAX_IN_FLIGHT, **values}
    else:
        values |= parse_environment(SINK_OPTIONS, values, environ)
    path = next((text for key, text in options.items() if key.lower() == "path"), None)
    if path is not None:
        named = parse_one(TOPIC_SPEC, path, 'path (.save("topic"), .start("topic"))')
        if values.setdefault("topic", named) != named:
            raise OptionError(f"topic={values['topic']!r} and .save({named!r}) name two topics: give one of them")
    values = {**values, **settled}
    values["namespace"] = effective_namespace(values.get("namespace"), values.get("name_server", ()))
    parsed = SinkOptions(**values)
    if not parsed.route_servers:
        raise OptionError(
            'option nameServer is missing: give .option("nameServer", "host:9876;host:9876"), or set the environment '
            "variable NAMESRV_ADDR on the driver; to write over gRPC, give the proxies: "
            '.option("endpoints", "host:8081"). INSERT INTO a table hands its writer no options: say '
            "INSERT INTO t WITH ('nameServer'='host:9876') SELECT ..."
        )
    for contradiction in contradictions(parsed, _SPELLING.__getitem__):
        raise OptionError(contradiction)
    if parsed.over_grpc:
        endpoints = ";".join(text for key, text in options.items() if key.lower() == "endpoints")
        for refused in (
            *refused_over_grpc(parsed, _SPELLING.__getitem__),
            *against_schemes(endpoints, parsed.use_tls, _SPELLING.__getitem__),
        ):
            raise OptionError(refused)
    return parsed


def options_table() -> list[OptionRow]:
    """Return the options of a write in the order of the documentation, with their defaults as one would type them."""
    return rows_of(SINK_OPTIONS, SinkOptions)


def rows_of(table: Sequence[OptionSpec], holder: type[Any]) -> list[OptionRow]:
    """Return the rows of a table; the defaults are those of the dataclass `holder`."""
    defaults = {field.name: field.default for field in dataclasses.fields(holder)}
    return [row_of(spec, spec.name, defaults[spec.field], spec.doc) for spec in table]


def row_of(spec: OptionSpec, name: str, default: Any, doc: str) -> OptionRow:
    """Return the row of one option, with its default as one would type it."""
    aliases = spec.aliases if name == spec.name else ()
    return OptionRow(name, aliases, spec.env, spec.kind.type, spec.kind.allowed, _shown_default(default), doc)


def _shown_default(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple | frozenset) else str(value)
