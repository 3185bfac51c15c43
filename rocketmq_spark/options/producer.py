"""The properties of a `Producer` in plain Python, and the function that parses and checks them.

Names are in snake_case; many are the Java producer's. Most properties are also options of a write: those of
`SendOptions` and of the connection.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from rocketmq_spark.errors import OptionError
from rocketmq_spark.options import kinds
from rocketmq_spark.options.connection import (
    GRPC,
    GRPC_DEFAULTS,
    refused_over_grpc,
    security_contradictions,
    transport_of,
)
from rocketmq_spark.options.sink import SendOptions

# retryResponseCodes of the Java producer 5.x, see docs/internals/producer.md#send-loop.
RETRY_RESPONSE_CODES: Final = frozenset({17, 14, 1, 2, 16, 204, 205, 1500})
# The codes of a proxy after which another proxy may succeed, see docs/internals/grpc.md#codes.
GRPC_RETRY_RESPONSE_CODES: Final = frozenset({40300, 40402, 40800, 42900, 50000, 50001, 50400})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions(SendOptions):
    """The properties of one producer. Times are milliseconds, sizes bytes."""

    # fmt: off
    topics: tuple[str, ...] = kinds.option("topics", (), kinds.ValueKind("a name, or several as a list", str),
        "Topics whose routes the producer looks up at its start. A missing topic is logged.", section="topics")
    retry_response_codes: tuple[int, ...] = kinds.option("retryResponseCodes", tuple(sorted(RETRY_RESPONSE_CODES)),
        kinds.ValueKind("ascending broker codes", kinds.ladder(strictly=True).parse),
        "Broker codes after which `send` tries another broker. Over gRPC also 40300, 40402, 40800, 42900, 50000, "
        "50001 and 50400. `add_retry_response_code` adds one.", section="codes")
    enable_backpressure_for_async_mode: bool = kinds.option("enableBackpressureForAsyncMode", False, kinds.BOOLEAN,
        "Let `send_async` wait while one of the two limits below is reached.", section="window")
    back_pressure_for_async_send_num: int = kinds.option("backPressureForAsyncSendNum", 1024, kinds.integer(1),
        "Maximum number of messages of `send_async` in flight, at least 10. Java's default until 5.3.3 was 10000.")
    back_pressure_for_async_send_size: int = kinds.option(
        "backPressureForAsyncSendSize", 100 * kinds.MIB, kinds.size(1, kinds.INT_MAX),
        "Maximum number of bytes of `send_async` in flight, at least 1 MiB.")
    client_callback_executor_threads: int = kinds.option("clientCallbackExecutorThreads", 0, kinds.integer(0),
        "Number of threads for the callbacks of `send_async`. 0: one per processor.")
    trace_msg_batch_num: int = kinds.option("traceMsgBatchNum", 10, kinds.integer(1),
        "Maximum number of messages in one trace message.", section="trace")
    instance_name: str = kinds.option("instanceName", "DEFAULT", kinds.INSTANCE_NAME,
        "Second part of the client id. DEFAULT: a unique name. Producers with the same client id share connections and "
        "routes, and their connection options must be equal.", section="instance")
    # fmt: on


PRODUCER_OPTIONS: Final = tuple(
    replace(spec, name=spec.field, aliases=()) for spec in kinds.specs_of(ProducerOptions, kinds.PRODUCER)
)
_SPEC_OF: Final = {spec.name: spec for spec in PRODUCER_OPTIONS}


def producer_options(properties: Mapping[str, Any], environ: Mapping[str, str]) -> ProducerOptions:
    """Return the options of a producer from its properties. None means not given; a list has several values.

    Raises an OptionError for an unknown or malformed property, and for a contradiction.
    """
    values = {name: _checked(name, value) for name, value in properties.items() if value is not None}
    if transport_of(values, str) == GRPC:
        codes = tuple(sorted(RETRY_RESPONSE_CODES | GRPC_RETRY_RESPONSE_CODES))
        values = {**GRPC_DEFAULTS, "retry_response_codes": codes, **values}
    else:
        values |= kinds.parse_environment(PRODUCER_OPTIONS, values, environ)
    values["namespace"] = kinds.effective_namespace(values)
    parsed = ProducerOptions.of(**values)
    if parsed.over_grpc:
        for refused in refused_over_grpc(parsed, kinds.option_text(properties["endpoints"]), str):
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
    return kinds.parse_one(_SPEC_OF[name], value, name, "property")
