"""The options of a read, as one table: their names, what each may hold, what it means.

Rule 1: parsing, messages, defaults and documentation come from this table and nowhere else.
Rule 2: an option that a write has, too, is the same object: one name, one check, one text. What only a stream that
        commits offsets sends has a text of its own.

Names and meaning are those of Spark's Kafka source wherever it has them, else RocketMQ's own (design.md section 8).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import rocketmq_spark.option_values as kinds
from rocketmq_spark import offset_json
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.names import DEFAULT_CONSUMER_GROUP, MAX_GROUP_LENGTH, MAX_TOPIC_LENGTH
from rocketmq_spark.option_table import SINK_OPTIONS, OptionSpec
from rocketmq_spark.option_values import BOOLEAN, ValueKind

_LONG_MAX: Final = 2**63 - 1
_MILLISECONDS: Final = kinds.integer(1, unit="ms")
_EPOCH: Final = kinds.integer(0, _LONG_MAX, unit="ms since 1970")
_COUNT: Final = kinds.integer(1, _LONG_MAX)

_SHAPE: Final = '{"topic":{"broker":{"0":23}}}'
_OFFSETS: Final = f"earliest, latest, offsets by topic, broker and queue as in {_SHAPE} (-2: earliest, -1: latest), or "


def _timestamps(text: str) -> tuple[tuple[MessageQueue, int], ...]:
    return tuple(sorted(offset_json.parse_timestamps(text).items()))


def _json(allowed: str, parse: Callable[[str], Any]) -> ValueKind:
    return ValueKind("JSON", allowed, parse, explains=True)


_TIMESTAMPS: Final = _json(f"ms since 1970 by topic, broker and queue, as in {_SHAPE}", _timestamps)
_WRITERS: Final = {spec.name: spec for spec in SINK_OPTIONS}
_COMMITS_ONLY: Final = "Sent by streams with `commitOffsets=true` only."

SUBSCRIBE_SPEC: Final = OptionSpec(
    "subscribe",
    kinds.words(
        f"topics separated by commas, each of 1 to {MAX_TOPIC_LENGTH} characters of a-z A-Z 0-9 _ - % |",
        f"[%|a-zA-Z0-9_-]{{1,{MAX_TOPIC_LENGTH}}}",
    ),
    'Topics to read, separated by commas. Also .load("topic"). One of `subscribe`, `subscribePattern` and `assign` is '
    "needed, unless `startingOffsets` is a receipt.",
    aliases=("topic",),
)
ENDING_OFFSETS_SPEC: Final = OptionSpec(
    "endingOffsets",
    _json(f"{_OFFSETS}the receipt of a write", offset_json.parse_end),
    "Where a batch ends, exclusive: as `startingOffsets`, but not earliest. A receipt ends after its last rows, also "
    "where `startingOffsets` is a receipt and this is not given.",
)

READER_OPTIONS: Final[tuple[OptionSpec, ...]] = (
    _WRITERS["nameServer"],
    SUBSCRIBE_SPEC,
    OptionSpec(
        "subscribePattern",
        kinds.pattern(),
        "Read the topics whose whole name matches this regular expression. Names of more than 127 characters are "
        "ignored.",
    ),
    OptionSpec(
        "assign",
        _json('queues by topic and broker, as in {"topic":{"broker":[0,1]}}', offset_json.parse_queues),
        "Read these queues.",
    ),
    OptionSpec(
        "startingOffsets",
        _json(f"{_OFFSETS}the receipt of a write", offset_json.parse_start),
        "Where a read begins; in a stream only its first start, and by default latest. The receipt of a write "
        "(`metrics.to_dict()` as JSON) begins at its first rows, and only its queues are read.",
    ),
    ENDING_OFFSETS_SPEC,
    OptionSpec(
        "startingTimestamp",
        _EPOCH,
        "Begin in every queue with the first message stored at this time or later; wins over "
        "`startingOffsetsByTimestamp`, and that over `startingOffsets`.",
    ),
    OptionSpec(
        "endingTimestamp",
        _EPOCH,
        "End a batch in every queue before the first message stored at this time or later; wins over "
        "`endingOffsetsByTimestamp`, and that over `endingOffsets`.",
    ),
    OptionSpec("startingOffsetsByTimestamp", _TIMESTAMPS, "As `startingTimestamp`, with a time for each queue."),
    OptionSpec("endingOffsetsByTimestamp", _TIMESTAMPS, "As `endingTimestamp`, with a time for each queue."),
    OptionSpec(
        "startingOffsetsByTimestampStrategy",
        kinds.choice("error", "latest"),
        "What becomes of a queue without any message stored at its starting time or later: the read fails, or begins "
        "at the queue's end.",
    ),
    OptionSpec(
        "minPartitions",
        kinds.integer(1),
        "Least number of Spark partitions: large queues are split; by default one for each queue, small ones together.",
    ),
    OptionSpec(
        "maxRecordsPerPartition",
        _COUNT,
        "Most messages of one Spark partition: larger queues are split; by default without bounds.",
    ),
    OptionSpec(
        "failOnDataLoss",
        BOOLEAN,
        "Fail where messages are gone that were to be read, as their time was over or their topic was deleted; false "
        "reads on with what there is.",
    ),
    OptionSpec(
        "onUnreadable",
        kinds.choice("fail", "skip", "raw"),
        "What a read does with a message whose compression, checksum, record, properties or inner batch are wrong. "
        "`fail`: the read fails and names the message. `skip`: the read leaves the message out, counts and logs it. "
        "`raw`: the row has the stored bytes as `body`, and the reason in the additional column `unreadable`.",
    ),
    OptionSpec(
        "subExpression",
        kinds.text("a text that is not blank, without control characters", "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"),
        "Read only messages that this expression fits: tags, with two pipe characters between them, or with "
        "filterType=SQL92 a condition on properties.",
    ),
    OptionSpec(
        "filterType",
        kinds.choice("TAG", "SQL92"),
        "What `subExpression` is; brokers take SQL92 with enablePropertyFilter=true only.",
    ),
    OptionSpec("includeProperties", BOOLEAN, "Have the column `properties`; false leaves it out."),
    OptionSpec(
        "consumerGroup",
        kinds.name(MAX_GROUP_LENGTH, {DEFAULT_CONSUMER_GROUP}),
        "Group under which brokers know the reader.",
    ),
    OptionSpec(
        "commitOffsets",
        BOOLEAN,
        "Tell the brokers the offsets of every finished micro-batch, for the lag of `consumerGroup`; where a stream "
        "goes on is up to its checkpoint alone. Nothing is told where an application reads as that group. Streams "
        "only.",
    ),
    OptionSpec(
        "maxOffsetsPerTrigger",
        _COUNT,
        "Limit of one micro-batch, shared among the queues in proportion to their new offsets; by default no limit. "
        "Every queue with new offsets gets at least one, even if that exceeds the limit. Streams only.",
    ),
    OptionSpec(
        "minOffsetsPerTrigger",
        _COUNT,
        "Wait with a micro-batch until there are as many new offsets, or for `maxTriggerDelay`. Streams only.",
    ),
    OptionSpec(
        "maxTriggerDelay",
        kinds.duration(1),
        "Longest wait for `minOffsetsPerTrigger`: ms, or as in 90s, 15m, 1h. Streams only.",
    ),
    OptionSpec("pullBatchSize", kinds.integer(1, 1024), "Messages that one request asks for."),
    OptionSpec(
        "pullTimeoutMs",
        _MILLISECONDS,
        "How long one request may wait for its answer; by default no longer than `readTimeoutMs`.",
    ),
    OptionSpec(
        "readTimeoutMs",
        _MILLISECONDS,
        "How long a queue may give nothing, while it must have something, before the read fails. Also the deadline for "
        "planning a batch or a micro-batch: routes and offsets together.",
    ),
    replace(
        _WRITERS["instanceName"],
        doc="Second part of the client id, by default spark; `#` and the process id of the reader follow it. "
        f"{_COMMITS_ONLY}",
    ),
    replace(_WRITERS["clientIP"], doc=f"{_WRITERS['clientIP'].doc} {_COMMITS_ONLY}"),
    replace(_WRITERS["unitName"], doc=f"{_WRITERS['unitName'].doc} {_COMMITS_ONLY}"),
    _WRITERS["namespace"],
    _WRITERS["accessKey"],
    _WRITERS["secretKey"],
    _WRITERS["securityToken"],
    _WRITERS["credentialsProvider"],
    _WRITERS["signNameServerRequests"],
    _WRITERS["useTls"],
    _WRITERS["tlsCaFile"],
    _WRITERS["tlsCertFile"],
    _WRITERS["tlsKeyFile"],
    _WRITERS["tlsServerName"],
    _WRITERS["tlsInsecureSkipVerify"],
)
