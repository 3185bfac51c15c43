"""The properties of a producer in plain Python: the Java producer's, under their own names in snake_case.

Rule 1: one meaning and one check for each property, whether a DataFrame's option or a keyword here: a keyword's value
        is written as text and goes through the same table.
Rule 2: every value is checked when the producer is made; the group alone is checked when it starts, as in Java.

Follows spec/producer.md section 2.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import rocketmq_spark.option_values as kinds
from rocketmq_spark.errors import OptionError
from rocketmq_spark.namespace import effective_namespace
from rocketmq_spark.option_rules import of_security
from rocketmq_spark.option_table import SINK_OPTIONS, OptionSpec
from rocketmq_spark.option_transport import (
    GRPC,
    GRPC_DEFAULTS,
    REMOTING,
    against_schemes,
    refused_over_grpc,
    transport_of,
)
from rocketmq_spark.option_values import BOOLEAN, INT_MAX, MIB
from rocketmq_spark.options import OptionRow, row_of

# retryResponseCodes of 5.x (spec/producer.md section 2).
RETRY_RESPONSE_CODES: Final = frozenset({17, 14, 1, 2, 16, 204, 205, 1500})
# The same for the codes of a proxy: those after which another one may succeed (spec/grpc.md sections 5.8, 6.1).
GRPC_RETRY_RESPONSE_CODES: Final = frozenset({40300, 40402, 40800, 42900, 50000, 50001, 50400})


@dataclass(frozen=True, slots=True, repr=False)
class ProducerOptions:
    """The properties of one producer, parsed. Times are milliseconds, sizes bytes."""

    name_server: tuple[str, ...] = ()
    transport: str = REMOTING
    endpoints: tuple[str, ...] = ()
    instance_name: str = "DEFAULT"
    client_ip: str | None = None
    unit_name: str | None = None
    unit_mode: bool = False
    namespace: str | None = None
    create_topic_key: str = "TBW102"
    default_topic_queue_nums: int = 4
    send_msg_timeout: int = 3000
    send_msg_max_timeout_per_request: int = -1
    compress_msg_body_over_howmuch: int = 4096
    compress_type: str = "ZLIB"
    compress_level: int = 5
    retry_times_when_send_failed: int = 2
    retry_times_when_send_async_failed: int = 2
    retry_another_broker_when_not_store_ok: bool = False
    retry_response_codes: tuple[int, ...] = tuple(sorted(RETRY_RESPONSE_CODES))
    max_message_size: int = 4 * MIB
    topics: tuple[str, ...] = ()
    send_latency_fault_enable: bool = False
    fault_preset: str = "v4"
    latency_max: tuple[int, ...] | None = None
    not_available_duration: tuple[int, ...] | None = None
    start_detector_enable: bool = False
    detect_timeout: int = 200
    detect_interval: int = 2000
    enable_backpressure_for_async_mode: bool = False
    back_pressure_for_async_send_num: int = 1024
    back_pressure_for_async_send_size: int = 100 * MIB
    vip_channel_enabled: bool = False
    poll_name_server_interval: int = 30_000
    heartbeat_broker_interval: int = 30_000
    mq_client_api_timeout: int = 3000
    client_oneway_semaphore_value: int = 65_535
    client_async_semaphore_value: int = 65_535
    client_callback_executor_threads: int = 0
    enable_trace: bool = False
    trace_topic: str = "RMQ_SYS_TRACE_TOPIC"
    trace_msg_batch_num: int = 10
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

    @property
    def over_grpc(self) -> bool:
        """True if proxies take the messages, not brokers."""
        return self.transport == GRPC

    @property
    def route_servers(self) -> tuple[str, ...]:
        """Whom routes are asked of: name servers, or the proxies."""
        return self.endpoints if self.over_grpc else self.name_server

    @property
    def wrapped_namespace(self) -> str:
        """The namespace that names of topics and groups begin with; over gRPC it goes beside them, so it is empty."""
        return "" if self.over_grpc else self.namespace or ""

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in _PROPERTIES}
        shown = (
            f"{name}={'<redacted>' if name in _SECRETS and value is not None else repr(value)}"
            for name, value in values.items()
        )
        return f"ProducerOptions({', '.join(shown)})"


_NUMBER: Final = kinds.integer(1)
_SET_OF_CODES: Final = kinds.ladder(strictly=True)

# What only a producer in plain Python has; all else is an option of a write, too.
_OWN: Final = {
    spec.field: spec
    for spec in (
        OptionSpec(
            "retryResponseCodes",
            kinds.ValueKind("integers", "ascending broker codes", _SET_OF_CODES.parse),
            "Codes of a broker after which `send` tries another one; over gRPC also 40300, 40402, 40800, 42900, 50000, "
            "50001 and 50400. `add_retry_response_code` adds one.",
        ),
        OptionSpec(
            "topics",
            kinds.ValueKind("names", "a name, or several as a list", str),
            "Topics whose routes are looked up when it starts; one that is not there is logged.",
        ),
        OptionSpec(
            "enableBackpressureForAsyncMode",
            BOOLEAN,
            "Have `send_async` wait while too much is under way, by the two options that follow.",
        ),
        OptionSpec(
            "backPressureForAsyncSendNum",
            _NUMBER,
            "Most messages of `send_async` in flight; 10 at least. The default is that of Java 5.5.0; it was 10000 "
            "there until 5.3.3.",
        ),
        OptionSpec(
            "backPressureForAsyncSendSize",
            kinds.size(1, INT_MAX),
            "Most bytes of `send_async` under way; 1 MiB at least.",
        ),
        OptionSpec(
            "mqClientApiTimeout",
            kinds.integer(1, unit="ms"),
            "How long a question to a name server or a broker's admin side may take.",
        ),
        OptionSpec(
            "clientCallbackExecutorThreads",
            kinds.integer(0),
            "Threads that callbacks of `send_async` run on; 0: one for each processor.",
        ),
        OptionSpec("traceMsgBatchNum", _NUMBER, "Most messages that one trace message tells of."),
    )
}
# Where a send has Java's meaning, which is not that of a write.
_DOCS: Final = {
    "name_server": "Addresses of the name servers, separated by ; or a comma, or a list: needed unless `endpoints` are "
    "given.",
    "endpoints": "Addresses of proxies, in the same way, for sending over gRPC without a name server. https:// before "
    "one needs `use_tls`, and http:// excludes it.",
    "instance_name": "Second part of the client id; DEFAULT stands for a name that no other producer has. Producers of "
    "one client id share connections and routes; their connection options must be equal.",
    "send_msg_timeout": "How long one send may take, with all its attempts.",
    "send_msg_max_timeout_per_request": "How long an attempt may take that another one may follow; -1: as long as the "
    "send has left.",
    "retry_times_when_send_failed": "Attempts of `send` after the first, each at another broker.",
    "retry_times_when_send_async_failed": "Attempts of `send_async` after the first. An error code of a broker ends an "
    "asynchronous send, as in Java.",
    "retry_another_broker_when_not_store_ok": "Try another broker where a message is stored but not safe; else that "
    "status is the result.",
    "client_async_semaphore_value": "Most asynchronous requests on their way from one client id; an attempt beyond "
    "fails at once.",
    "client_oneway_semaphore_value": "Most `send_oneway` requests on their way from one client id; one beyond waits "
    "for its turn.",
    "tls_ca_file": "PEM file of the authorities to trust; by default the system's.",
    "tls_cert_file": "PEM file of this client's certificate, for servers that demand one, with the chain up to an "
    "authority that they trust.",
    "enable_trace": "Leave a trace record of every message at `trace_topic`.",
}
_SHARED: Final = {spec.field: spec for spec in SINK_OPTIONS}
_SECRETS: Final = frozenset(spec.field for spec in SINK_OPTIONS if spec.secret)
_PROPERTIES: Final = tuple(field.name for field in fields(ProducerOptions))


def producer_options(properties: Mapping[str, Any], environ: Mapping[str, str]) -> ProducerOptions:
    """Return the properties of a producer.

    Parameters
    ----------
    properties : mapping of str to value
        By field name; None is as if it were not there; several values as a list or tuple.
    environ : mapping of str to str
        ``NAMESRV_ADDR`` stands in for the name servers, unless something asks for gRPC.

    Raises
    ------
    OptionError
        A property is unknown or malformed, or two contradict each other.
    """
    values = {name: _checked(name, value) for name, value in properties.items() if value is not None}
    if transport_of(values, str) == GRPC:
        codes = tuple(sorted(RETRY_RESPONSE_CODES | GRPC_RETRY_RESPONSE_CODES))
        values = {**GRPC_DEFAULTS, "retry_response_codes": codes, **values}
    elif "name_server" not in values and environ.get("NAMESRV_ADDR", "").strip():
        values["name_server"] = _checked("name_server", environ["NAMESRV_ADDR"])
    values["namespace"] = effective_namespace(values.get("namespace"), values.get("name_server", ()))
    parsed = ProducerOptions(**values)
    if parsed.over_grpc:
        endpoints = option_text(properties["endpoints"])
        for refused in (*refused_over_grpc(parsed, str), *against_schemes(endpoints, parsed.use_tls, str)):
            raise OptionError(refused)
    for contradiction in of_security(parsed, str):
        raise OptionError(contradiction)
    return parsed


def _checked(name: str, value: Any) -> Any:
    if name not in _PROPERTIES:
        near = difflib.get_close_matches(name, _PROPERTIES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the properties of a producer are {', '.join(_PROPERTIES)}"
        raise OptionError(f"unknown property {name!r}: {hint}")
    if name == "topics":
        return (value,) if isinstance(value, str) else tuple(value)
    kind = _spec(name).kind
    try:
        return kind.parse(option_text(value))
    except ValueError:
        pass
    # Outside the except block: the parser's own error, which may quote the value, does not become the context.
    shown = "has a value (not shown: it is secret) that" if name in _SECRETS else f"is {value!r}, which"
    raise OptionError(f"property {name} {shown} is not allowed: allowed is {kind.allowed}")


def _spec(field: str) -> OptionSpec:
    return _OWN.get(field) or _SHARED[field]


def producer_options_table() -> list[OptionRow]:
    """Return the properties of a producer, under their names in Python, with their defaults as one would type them."""
    defaults = {field.name: field.default for field in fields(ProducerOptions)}
    return [row_of(_spec(name), name, defaults[name], _doc_of(name)) for name in _PROPERTIES]


def _doc_of(name: str) -> str:
    # The text of a write's option names other ones as a DataFrame's options are spelt.
    by_spelling = {spec.name: field for field, spec in _SHARED.items() if field in _PROPERTIES}
    return re.sub(r"\w+", lambda word: by_spelling.get(word[0], word[0]), _DOCS.get(name) or _spec(name).doc)


def option_text(value: Any) -> str:
    """Return the text of an option given as a Python value: ``true`` for True, as ``DataFrameWriter.option`` has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, (tuple, list, set, frozenset)) else str(value)
