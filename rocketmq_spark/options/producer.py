"""The properties of a producer in plain Python: the Java producer's, in snake_case.

A keyword is checked as the option of a write with the same meaning is: its value is written as text and parsed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import rocketmq_spark.options.kinds as kinds
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model.names import effective_namespace
from rocketmq_spark.options.connection import (
    GRPC,
    GRPC_DEFAULTS,
    refused_over_grpc,
    security_contradictions,
    transport_of,
)
from rocketmq_spark.options.kinds import BOOLEAN, INSTANCE_NAME, INT_MAX, MIB, PRODUCER, option, specs_of
from rocketmq_spark.options.sink import SendOptions

# retryResponseCodes of the Java producer 5.x.
RETRY_RESPONSE_CODES: Final = frozenset({17, 14, 1, 2, 16, 204, 205, 1500})
# The codes of a proxy after which another proxy may succeed.
GRPC_RETRY_RESPONSE_CODES: Final = frozenset({40300, 40402, 40800, 42900, 50000, 50001, 50400})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions(SendOptions):
    """The properties of one producer. Times are milliseconds, sizes bytes."""

    # fmt: off
    topics: tuple[str, ...] = option("topics", (), kinds.ValueKind("a name, or several as a list", str),
        "Topics whose routes are looked up when it starts; one that is not there is logged.", section="topics")
    retry_response_codes: tuple[int, ...] = option("retryResponseCodes", tuple(sorted(RETRY_RESPONSE_CODES)),
        kinds.ValueKind("ascending broker codes", kinds.ladder(strictly=True).parse),
        "Codes of a broker after which `send` tries another one; over gRPC also 40300, 40402, 40800, 42900, 50000, "
        "50001 and 50400. `add_retry_response_code` adds one.", section="codes")
    enable_backpressure_for_async_mode: bool = option("enableBackpressureForAsyncMode", False, BOOLEAN,
        "Have `send_async` wait while too much is under way, by the two options that follow.", section="window")
    back_pressure_for_async_send_num: int = option("backPressureForAsyncSendNum", 1024, kinds.integer(1),
        "Most messages of `send_async` in flight; 10 at least. The default is that of Java 5.5.0; it was 10000 there "
        "until 5.3.3.")
    back_pressure_for_async_send_size: int = option("backPressureForAsyncSendSize", 100 * MIB, kinds.size(1, INT_MAX),
        "Most bytes of `send_async` under way; 1 MiB at least.")
    client_callback_executor_threads: int = option("clientCallbackExecutorThreads", 0, kinds.integer(0),
        "Threads that callbacks of `send_async` run on; 0: one for each processor.")
    trace_msg_batch_num: int = option("traceMsgBatchNum", 10, kinds.integer(1),
        "Most messages that one trace message tells of.", section="trace")
    instance_name: str = option("instanceName", "DEFAULT", INSTANCE_NAME,
        "Second part of the client id; DEFAULT stands for a name that no other producer has. Producers of one client "
        "id share connections and routes; their connection options must be equal.", section="instance")
    # fmt: on


_SPECS: Final = specs_of(ProducerOptions, PRODUCER)
_FIELD_OF: Final = {spec.name: spec.field for spec in _SPECS}
# Under their names in Python, which their texts use, too.
PRODUCER_OPTIONS: Final = tuple(
    replace(
        spec, name=spec.field, aliases=(), doc=re.sub(r"\w+", lambda word: _FIELD_OF.get(word[0], word[0]), spec.doc)
    )
    for spec in _SPECS
)
_SPEC_OF: Final = {spec.name: spec for spec in PRODUCER_OPTIONS}


def producer_options(properties: Mapping[str, Any], environ: Mapping[str, str]) -> ProducerOptions:
    """Return the options of a producer from its properties; None means not given, several values are a list or tuple.

    ``NAMESRV_ADDR`` in `environ` is read if no name server and no proxy is given. Raises an OptionError if a property
    is unknown or malformed, or two contradict each other.
    """
    values = {name: _checked(name, value) for name, value in properties.items() if value is not None}
    if transport_of(values, str) == GRPC:
        codes = tuple(sorted(RETRY_RESPONSE_CODES | GRPC_RETRY_RESPONSE_CODES))
        values = {**GRPC_DEFAULTS, "retry_response_codes": codes, **values}
    elif "name_server" not in values and environ.get("NAMESRV_ADDR", "").strip():
        values["name_server"] = _checked("name_server", environ["NAMESRV_ADDR"])
    values["namespace"] = effective_namespace(values.get("namespace"), values.get("name_server", ()))
    parsed = ProducerOptions.of(**values)
    if parsed.over_grpc:
        for refused in refused_over_grpc(parsed, option_text(properties["endpoints"]), str):
            raise OptionError(refused)
    for contradiction in security_contradictions(parsed.connection, str):
        raise OptionError(contradiction)
    return parsed


def _checked(name: str, value: Any) -> Any:
    if name not in _SPEC_OF:
        near = difflib.get_close_matches(name, _SPEC_OF, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the properties of a producer are {', '.join(_SPEC_OF)}"
        raise OptionError(f"unknown property {name!r}: {hint}")
    if name == "topics":
        return (value,) if isinstance(value, str) else tuple(value)
    spec = _SPEC_OF[name]
    try:
        return spec.kind.parse(option_text(value))
    except ValueError:
        pass
    # Outside the except block: the parser's own error, which may quote the value, does not become the context.
    shown = "has a value (not shown: it is secret) that" if spec.secret else f"is {value!r}, which"
    raise OptionError(f"property {name} {shown} is not allowed: allowed is {spec.kind.allowed}")


def option_text(value: Any) -> str:
    """Return an option's Python value as text, as ``DataFrameWriter.option`` writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, (tuple, list, set, frozenset)) else str(value)
