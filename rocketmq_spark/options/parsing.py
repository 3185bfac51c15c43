"""Parses and checks the options that a user gives to a write or a read.

No error shows the value of a secret option or of an unknown option, which may be a misspelt secret. Spark passes keys
in lower case; errors use the declared spelling of known options. Keys that Spark adds itself are ignored, except
``path``, which names the topics.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from rocketmq_spark.errors import OptionError
from rocketmq_spark.options import source
from rocketmq_spark.options.connection import GRPC, GRPC_DEFAULTS, GRPC_MAX_IN_FLIGHT, refused_over_grpc, transport_of
from rocketmq_spark.options.kinds import READ, WRITE, OptionSpec, effective_namespace, parse_environment, parse_one
from rocketmq_spark.options.offsets import OffsetSpec
from rocketmq_spark.options.sink import SINK_OPTIONS, SINK_SPELLING, SinkOptions, sink_contradictions

_OF_BOTH: Final[Mapping[str, str]] = {
    "kafka.bootstrap.servers": "nameServer",
    "kafka.client.id": "instanceName",
    "kafka.security.protocol": "accessKey and secretKey, or useTls",
    "kafka.ssl.truststore.location": "useTls and tlsCaFile",
    "nameserver.addr": "nameServer",
}
NAMES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        READ: {
            **_OF_BOTH,
            "group": "consumerGroup",
            "consumer.group": "consumerGroup",
            "kafka.group.id": "consumerGroup",
            "consumer.topic": "subscribe",
            "consumer.tag": "subExpression",
            "consumer.offset.reset.to": "startingOffsets",
            "kafka.auto.offset.reset": "startingOffsets",
            "includeheaders": "includeProperties",
            "pull.max.speed.per.partition": "maxOffsetsPerTrigger",
            "pull.max.batch.size": "pullBatchSize",
            "kafka.max.poll.records": "pullBatchSize",
            "pull.timeout.ms": "pullTimeoutMs",
            "kafkaconsumer.polltimeoutms": "pullTimeoutMs",
            "commitasync": "commitOffsets",
        },
        WRITE: {
            **_OF_BOTH,
            "group": "producerGroup",
            "kafka.acks": "sendMode",
            "kafka.delivery.timeout.ms": "deliveryTimeoutMs",
            "kafka.request.timeout.ms": "sendMsgTimeout",
            "kafka.retries": "deliveryTimeoutMs",
            "kafka.retry.backoff.ms": "retryBackoffMs",
            "kafka.retry.backoff.max.ms": "retryBackoffMaxMs",
            "kafka.batch.size": "batchBytes",
            "kafka.buffer.memory": "maxInFlightBytes",
            "kafka.max.in.flight.requests.per.connection": "maxInFlight",
            "kafka.max.request.size": "maxMessageSize",
            "kafka.compression.type": "compressType",
            "kafka.enable.idempotence": "rowId",
            "kafka.partitioner.class": "queueSelector",
        },
    }
)
"""The options that replace an option of another connector, by use and by the lower-case name there."""

_TRIED: Final[Mapping[str, str]] = {
    "bootstrap.servers": "nameServer",
    "brokers": "nameServer",
    "user": "accessKey",
    "username": "accessKey",
    "password": "secretKey",
}


# Keys that Spark 4.3 adds (path, checkpointLocation, queryName), and the reserved properties of ``TableCatalog``.
_SPARK_KEYS: Final = frozenset(
    {"path", "checkpointlocation", "queryname", "owner", "provider", "location", "external", "comment", "collation",
     "is_managed_location", "table_type"}
)  # fmt: skip
_SPARK_PREFIX: Final = "option."

_OPTIONS: Final[Mapping[str, Sequence[OptionSpec]]] = {WRITE: SINK_OPTIONS, READ: source.SOURCE_OPTIONS}


def parse_values(table: Sequence[OptionSpec], options: Mapping[str, str], use: str = WRITE) -> dict[str, Any]:
    """Return the parsed values by field, or raise an OptionError: unknown, malformed, or two names that disagree."""
    known = {name.lower(): (spec, name) for spec in table for name in spec.names}
    own = {
        key: text
        for key, text in options.items()
        if key.lower() not in _SPARK_KEYS and not key.lower().startswith(_SPARK_PREFIX)
    }
    unknown = [key for key in own if key.lower() not in known]
    if unknown:
        raise OptionError(_unknown_text(unknown, table, use))
    values: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    for key, text in own.items():
        spec, name = known[key.lower()]
        value, first_name = parse_one(spec, text, name), given_as.setdefault(spec.field, name)
        if values.setdefault(spec.field, value) != value:
            raise OptionError(f"{first_name} and {name} are the same option with two values: give one of them")
    return values


def _unknown_text(keys: Sequence[str], table: Sequence[OptionSpec], use: str) -> str:
    canonical = {name.lower(): spec.name for spec in table for name in spec.names}
    other = READ if use == WRITE else WRITE
    names_there = {name.lower(): name for spec in _OPTIONS[other] for name in spec.names}
    names_here = {**_TRIED, **NAMES[use]}
    hints = {}
    for key in keys:
        lower, hint = key.lower(), ""
        if lower in names_there:
            hint = f"{names_there[lower]} is an option of a {other}"
        elif lower in names_here:
            hint = f"use {names_here[lower]}"
        elif lower.startswith("kafka."):
            # Kafka's clients have hundreds of options, so the table does not have all of them.
            hint = "an option of Kafka's clients; docs/migration.md lists the options to use instead"
        elif near := difflib.get_close_matches(lower, canonical, n=1):
            hint = f"did you mean {canonical[near[0]]}?"
        hints[key] = hint
    texts = [f"unknown option {key!r}" + (f": {hint}" if hint else "") for key, hint in hints.items()]
    if not all(hints.values()):
        texts.append(f"the options of a {use} are {', '.join(spec.name for spec in table)}")
    return "; ".join(texts)


_NO_SERVER: Final = (
    'option nameServer is missing: give .option("nameServer", "host:9876;host:9876"), or set the environment variable '
    "NAMESRV_ADDR on the driver"
)
_SPEC_OF: Final = {use: {spec.name: spec for spec in specs} for use, specs in _OPTIONS.items()}


def parse_sink_options(
    options: Mapping[str, str], environ: Mapping[str, str], settled: Mapping[str, Any] = MappingProxyType({})
) -> SinkOptions:
    """Return the options of a write, from keys in any case.

    `settled` has values by field that override `options`: those of the producer that writes. Raises an OptionError for
    an unknown, malformed or missing option, and for a contradiction.
    """
    values = parse_values(SINK_OPTIONS, options)
    if transport_of(values, SINK_SPELLING) == GRPC:
        values = {**GRPC_DEFAULTS, "max_in_flight": GRPC_MAX_IN_FLIGHT, **values}
    else:
        values |= parse_environment(SINK_OPTIONS, values, environ)
    by_key = {key.lower(): text for key, text in options.items()}
    if "path" in by_key:
        named = parse_one(_SPEC_OF[WRITE]["topic"], by_key["path"], 'path (.save("topic"), .start("topic"))')
        if values.setdefault("topic", named) != named:
            raise OptionError(f"topic={values['topic']!r} and .save({named!r}) name two topics: give one of them")
    values = {**values, **settled}
    values["namespace"] = effective_namespace(values)
    parsed = SinkOptions.of(**values)
    if not parsed.connection.route_servers:
        raise OptionError(
            f'{_NO_SERVER}. To write over gRPC, give .option("endpoints", "host:8081"). INSERT INTO passes no options, '
            "so add them: INSERT INTO t WITH ('nameServer'='host:9876') SELECT ..."
        )
    for contradiction in sink_contradictions(parsed):
        raise OptionError(contradiction)
    if parsed.over_grpc:
        for refused in refused_over_grpc(parsed, by_key["endpoints"], SINK_SPELLING):
            raise OptionError(refused)
    return parsed


def parse_source_options(
    options: Mapping[str, str], environ: Mapping[str, str], *, streaming: bool
) -> source.SourceOptions:
    """Return the options of a read, as `parse_sink_options`; a stream has other options and defaults than a batch."""
    by_key = {key.lower(): text for key, text in options.items()}
    for name in ("transport", "endpoints"):
        if name in by_key:
            raise OptionError(
                f"{name} is an option of a write: reads use only the remoting protocol, because a proxy can't replay "
                "stored messages (gRPC). Remove it, and give nameServer"
            )
    values = parse_values(source.SOURCE_OPTIONS, options, READ)
    if "path" in by_key:
        for field in ("subscribe_pattern", "assign"):
            if field in values:
                name = source.SOURCE_SPELLING(field)
                raise OptionError(f"{name} and .load({by_key['path']!r}) both select topics: give one of them")
        named = parse_one(_SPEC_OF[READ]["subscribe"], by_key["path"], 'path (.load("topic"))')
        if values.setdefault("subscribe", named) != named:
            raise OptionError(
                f"subscribe={','.join(values['subscribe'])!r} and .load({by_key['path']!r}) name different topics: "
                "give one of them"
            )
    for refused in source.against_given(values, streaming=streaming):
        raise OptionError(refused)
    starting = values.setdefault("starting_offsets", OffsetSpec("latest" if streaming else "earliest"))
    if starting.receipt and not streaming and "ending_offsets" not in values:
        ending = _SPEC_OF[READ]["endingOffsets"]
        values["ending_offsets"] = parse_one(ending, by_key["startingoffsets"], "startingOffsets")
    values |= parse_environment(source.SOURCE_OPTIONS, values, environ)
    if "read_timeout_ms" in values:
        # A request waits at most as long as the read waits for its queue.
        values.setdefault("pull_timeout_ms", min(source.PULL_TIMEOUT_MS, values["read_timeout_ms"]))
    values["namespace"] = effective_namespace(values)
    parsed = source.SourceOptions.of(**values)
    if not parsed.connection.name_server:
        raise OptionError(_NO_SERVER)
    for contradiction in source.source_contradictions(parsed, source.SOURCE_SPELLING, streaming=streaming):
        raise OptionError(contradiction)
    return parsed
