"""The options of a read.

Names and meaning are those of Spark's Kafka source wherever it has them, else RocketMQ's own. Reads use the remoting
protocol only, because a proxy cannot replay stored messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import rocketmq_spark.options.kinds as kinds
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.names import DEFAULT_CONSUMER_GROUP, MAX_GROUP_LENGTH, MAX_TOPIC_LENGTH
from rocketmq_spark.options import offsets as offset_json
from rocketmq_spark.options.connection import ConnectedOptions, Spelling, security_contradictions
from rocketmq_spark.options.kinds import BOOLEAN, INSTANCE_NAME, READ, ValueKind, option, specs_of
from rocketmq_spark.options.offsets import EARLIEST, LATEST, OffsetSpec
from rocketmq_spark.options.sink import against_bounds

_EARLIEST: Final = OffsetSpec("earliest")
_LATEST: Final = OffsetSpec("latest")
PULL_TIMEOUT_MS: Final = 10_000
_LONG_MAX: Final = 2**63 - 1
_MILLISECONDS: Final = kinds.integer(1, unit="ms")
_EPOCH: Final = kinds.integer(0, _LONG_MAX, unit="ms since 1970")
_COUNT: Final = kinds.integer(1, _LONG_MAX)

_SHAPE: Final = '{"topic":{"broker":{"0":23}}}'
_OFFSETS: Final = f"earliest, latest, offsets by topic, broker and queue as in {_SHAPE} (-2: earliest, -1: latest), or "


def _timestamps(text: str) -> tuple[tuple[MessageQueue, int], ...]:
    return tuple(sorted(offset_json.parse_timestamps(text).items()))


def _json(allowed: str, parse: Callable[[str], Any]) -> ValueKind:
    return ValueKind(allowed, parse, explains=True)


_TIMESTAMPS: Final = _json(f"ms since 1970 by topic, broker and queue, as in {_SHAPE}", _timestamps)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(ConnectedOptions):
    """The options of one read. Times are milliseconds. The constructor checks nothing."""

    # fmt: off
    subscribe: tuple[str, ...] = option("subscribe", (), kinds.words(
            f"topics separated by commas, each of 1 to {MAX_TOPIC_LENGTH} characters of a-z A-Z 0-9 _ - % |",
            f"[%|a-zA-Z0-9_-]{{1,{MAX_TOPIC_LENGTH}}}",
        ),
        'Topics to read, separated by commas. Also .load("topic"). One of `subscribe`, `subscribePattern` and `assign` '
        "is needed, unless `startingOffsets` is a receipt.", section="what", aliases=("topic",))
    subscribe_pattern: str | None = option("subscribePattern", None, kinds.pattern(),
        "Read the topics whose whole name matches this regular expression. Names of more than 127 characters are "
        "ignored.")
    assign: frozenset[MessageQueue] = option("assign", frozenset(),
        _json('queues by topic and broker, as in {"topic":{"broker":[0,1]}}', offset_json.parse_queues),
        "Read these queues.")
    consumer_group: str = option(
        "consumerGroup", "spark-rocketmq-source", kinds.name(MAX_GROUP_LENGTH, {DEFAULT_CONSUMER_GROUP}),
        "Group under which brokers know the reader.")
    starting_offsets: OffsetSpec = option(
        "startingOffsets", _EARLIEST, _json(f"{_OFFSETS}the receipt of a write", offset_json.parse_start),
        "Where a read begins; in a stream only its first start, and by default latest. The receipt of a write "
        "(`metrics.to_dict()` as JSON) begins at its first rows, and only its queues are read.", section="span")
    ending_offsets: OffsetSpec = option(
        "endingOffsets", _LATEST, _json(f"{_OFFSETS}the receipt of a write", offset_json.parse_end),
        "Where a batch ends, exclusive: as `startingOffsets`, but not earliest. A receipt ends after its last rows, "
        "also where `startingOffsets` is a receipt and this is not given.")
    starting_timestamp: int | None = option("startingTimestamp", None, _EPOCH,
        "Begin in every queue with the first message stored at this time or later; wins over "
        "`startingOffsetsByTimestamp`, and that over `startingOffsets`.")
    ending_timestamp: int | None = option("endingTimestamp", None, _EPOCH,
        "End a batch in every queue before the first message stored at this time or later; wins over "
        "`endingOffsetsByTimestamp`, and that over `endingOffsets`.")
    starting_offsets_by_timestamp: tuple[tuple[MessageQueue, int], ...] = option(
        "startingOffsetsByTimestamp", (), _TIMESTAMPS,
        "As `startingTimestamp`, with a time for each queue.")
    ending_offsets_by_timestamp: tuple[tuple[MessageQueue, int], ...] = option(
        "endingOffsetsByTimestamp", (), _TIMESTAMPS,
        "As `endingTimestamp`, with a time for each queue.")
    starting_offsets_by_timestamp_strategy: str = option(
        "startingOffsetsByTimestampStrategy", "error", kinds.choice("error", "latest"),
        "What becomes of a queue without any message stored at its starting time or later: the read fails, or begins "
        "at the queue's end.")
    fail_on_data_loss: bool = option("failOnDataLoss", True, BOOLEAN,
        "Fail where messages are gone that were to be read, as their time was over or their topic was deleted; false "
        "reads on with what there is.")
    on_unreadable: str = option("onUnreadable", "fail", kinds.choice("fail", "skip", "raw"),
        "What a read does with a message whose compression, checksum, record, properties or inner batch are wrong. "
        "`fail`: the read fails and names the message. `skip`: the read leaves the message out, counts and logs it. "
        "`raw`: the row has the stored bytes as `body`, and the reason in the additional column `unreadable`.")
    sub_expression: str = option("subExpression", "*",
        kinds.text("a text that is not blank, without control characters", "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"),
        "Read only messages that this expression fits: tags, with two pipe characters between them, or with "
        "filterType=SQL92 a condition on properties.", section="columns")
    filter_type: str = option("filterType", "TAG", kinds.choice("TAG", "SQL92"),
        "What `subExpression` is; brokers take SQL92 with enablePropertyFilter=true only.")
    include_properties: bool = option("includeProperties", True, BOOLEAN,
        "Have the column `properties`; false leaves it out.")
    min_partitions: int | None = option("minPartitions", None, kinds.integer(1),
        "Least number of Spark partitions: large queues are split; by default one for each queue, small ones together.",
        section="partitions")
    max_records_per_partition: int | None = option("maxRecordsPerPartition", None, _COUNT,
        "Most messages of one Spark partition: larger queues are split; by default without bounds.")
    pull_batch_size: int = option("pullBatchSize", 32, kinds.integer(1, 1024), "Messages that one request asks for.")
    pull_timeout_ms: int = option("pullTimeoutMs", PULL_TIMEOUT_MS, _MILLISECONDS,
        "How long one request may wait for its answer; by default no longer than `readTimeoutMs`.")
    read_timeout_ms: int = option("readTimeoutMs", 120000, _MILLISECONDS,
        "How long a queue may give nothing, while it must have something, before the read fails. Also the deadline for "
        "planning a batch or a micro-batch: routes and offsets together.")
    max_offsets_per_trigger: int | None = option("maxOffsetsPerTrigger", None, _COUNT,
        "Limit of one micro-batch, shared among the queues in proportion to their new offsets; by default no limit. "
        "Every queue with new offsets gets at least one, even if that exceeds the limit. Streams only.",
        section="streams")
    min_offsets_per_trigger: int | None = option("minOffsetsPerTrigger", None, _COUNT,
        "Wait with a micro-batch until there are as many new offsets, or for `maxTriggerDelay`. Streams only.")
    max_trigger_delay: int = option("maxTriggerDelay", 15 * 60 * 1000, kinds.duration(1),
        "Longest wait for `minOffsetsPerTrigger`: ms, or as in 90s, 15m, 1h. Streams only.")
    commit_offsets: bool = option("commitOffsets", False, BOOLEAN,
        "Tell the brokers the offsets of every finished micro-batch, for the lag of `consumerGroup`; where a stream "
        "goes on is up to its checkpoint alone. Nothing is told where an application reads as that group. Streams "
        "only.")
    instance_name: str | None = option("instanceName", None, INSTANCE_NAME,
        "Second part of the client id, by default spark; `#` and the process id of the reader follow it. "
        "Sent by streams with `commitOffsets=true` only.", section="instance")
    # fmt: on

    def reads(self, queue: MessageQueue) -> bool:
        """Return whether a queue is to be read."""
        if self.assign:
            asked = queue in self.assign
        elif self.subscribe_pattern is not None:
            asked = re.fullmatch(self.subscribe_pattern, queue.topic) is not None
        else:
            asked = queue.topic in self.subscribe or not self.subscribe
        receipts = [spec for spec in (self.starting_offsets, self.ending_offsets) if spec.receipt]
        return asked and all(spec.offset_of(queue) is not None for spec in receipts)


SOURCE_OPTIONS: Final = specs_of(SourceOptions, READ)

_OF_BATCHES: Final = {
    "ending_offsets": "endingOffsets",
    "ending_timestamp": "endingTimestamp",
    "ending_offsets_by_timestamp": "endingOffsetsByTimestamp",
}
_OF_STREAMS: Final = {
    "commit_offsets": "commitOffsets",
    "max_offsets_per_trigger": "maxOffsetsPerTrigger",
    "min_offsets_per_trigger": "minOffsetsPerTrigger",
    "max_trigger_delay": "maxTriggerDelay",
}
# The first of 1973 in milliseconds, and a moment far ahead in seconds.
_SECONDS: Final = 10**11
_WHICH: Final = {"subscribe": "subscribe", "subscribe_pattern": "subscribePattern", "assign": "assign"}
_NOT_ABOVE: Final = (
    ("min_offsets_per_trigger", "minOffsetsPerTrigger", "max_offsets_per_trigger", "maxOffsetsPerTrigger"),
    ("pull_timeout_ms", "pullTimeoutMs", "read_timeout_ms", "readTimeoutMs"),
)


def against_given(given: Mapping[str, Any], *, streaming: bool) -> Iterator[str]:
    """Yield an error text for each option that is missing or not valid here; `given` has no defaults."""
    chosen = [name for field, name in _WHICH.items() if field in given]
    names = ", ".join(_WHICH.values())
    if len(chosen) > 1:
        yield (
            f"only one of the following options can be specified for a read from RocketMQ: {names}; given are "
            f"{' and '.join(chosen)}"
        )
    starting = given.get("starting_offsets")
    if not chosen and not (starting is not None and starting.receipt):
        yield (
            f"one of the following options must be specified for a read from RocketMQ: {names}; as in "
            '.option("subscribe", "orders") or .load("orders")'
        )
    for field, name in (_OF_BATCHES if streaming else _OF_STREAMS).items():
        # commitOffsets=false asks a batch for nothing.
        if field not in given or given[field] is False:
            continue
        if streaming:
            yield f"{name}: ending offset not valid in streaming queries; leave it out, or use spark.read"
        else:
            yield f"{name} is for streams, and not valid in batch queries: leave it out, or use spark.readStream"
    if "max_trigger_delay" in given and "min_offsets_per_trigger" not in given:
        yield "maxTriggerDelay bounds the wait for minOffsetsPerTrigger, which is missing: give both, or neither"


def source_contradictions(options: SourceOptions, spelt: Spelling, *, streaming: bool) -> Iterator[str]:
    """Yield an error text for each contradiction."""
    yield from security_contradictions(options.connection, spelt)
    yield from against_bounds(options, _NOT_ABOVE)
    yield from _of_filters(options)
    yield from _of_queues(options)
    timed = options.starting_timestamp is not None or bool(options.starting_offsets_by_timestamp)
    if options.starting_offsets_by_timestamp_strategy == "latest" and not timed:
        yield (
            "startingOffsetsByTimestampStrategy=latest is used with startingTimestamp or startingOffsetsByTimestamp "
            "only: give one of them, or leave it out"
        )
    if streaming:
        return
    start, end = options.starting_timestamp, options.ending_timestamp
    if start is not None and end is not None and start > end:
        yield f"startingTimestamp={start} is later than endingTimestamp={end}"
    ends_timed = end is not None or bool(options.ending_offsets_by_timestamp)
    # As in Kafka's source, what a timestamp wins over is not looked at.
    if not timed:
        yield from _never("startingOffsets", options.starting_offsets, "starting", "latest", LATEST)
    if not ends_timed:
        yield from _never("endingOffsets", options.ending_offsets, "ending", "earliest", EARLIEST)
    if not timed and not ends_timed:
        yield from _backwards(options.starting_offsets, options.ending_offsets)


def _backwards(start: OffsetSpec, end: OffsetSpec) -> Iterator[str]:
    """Yield an error text for each queue that would end before it begins."""
    for queue, offset in start.offsets:
        stop = end.offset_of(queue)
        if stop is not None and 0 <= stop < offset:
            yield f"startingOffsets of {queue} is {offset}, and endingOffsets is before it: {stop}"


def option_warnings(options: SourceOptions) -> Iterator[str]:
    """Yield a warning for each value that is allowed but unlikely to be meant."""
    expression = options.sub_expression
    if options.filter_type == "TAG" and re.search("[=<>']", expression):
        yield (
            f"subExpression={expression!r} is taken for tags, and looks like a condition on properties: that needs "
            "filterType=SQL92"
        )
    for name, stamp in (
        ("startingTimestamp", options.starting_timestamp),
        ("endingTimestamp", options.ending_timestamp),
    ):
        if stamp is not None and 0 < stamp < _SECONDS:
            yield f"{name}={stamp} is a moment of 1970-73: timestamps are milliseconds, and this looks like seconds"


def _never(name: str, spec: OffsetSpec, place: str, word: str, number: int) -> Iterator[str]:
    if spec.word == word:
        yield f"{name}={word}: {place} offset can't be {word} for batch queries on RocketMQ"
    for queue, offset in spec.offsets:
        if offset == number:
            yield f"{name}: {place} offset of {queue} can't be {word} ({number}) for batch queries on RocketMQ"


def _of_filters(options: SourceOptions) -> Iterator[str]:
    expression = options.sub_expression
    if options.filter_type == "SQL92" and expression.strip() == "*":
        yield "filterType=SQL92 needs a condition as subExpression, which is *: give one, or leave filterType out"
    if options.filter_type == "TAG" and "|" in expression.replace("||", ""):
        yield (
            f"subExpression={expression!r}: a tag has no pipe character, and between tags stand two: allowed is *, or "
            "tags as in TagA || TagB"
        )
    elif options.filter_type == "TAG" and not any(map(str.strip, expression.split("||"))):
        yield f"subExpression={expression!r} has no tag: allowed is *, or tags as in TagA || TagB"


def _of_queues(options: SourceOptions) -> Iterator[str]:
    """Yield an error text for queues with offsets or times that are not read; a receipt may have a few of them."""
    for name, of_queues, receipt in (
        ("startingOffsets", options.starting_offsets.offsets, options.starting_offsets.receipt),
        ("endingOffsets", options.ending_offsets.offsets, options.ending_offsets.receipt),
        ("startingOffsetsByTimestamp", options.starting_offsets_by_timestamp, False),
        ("endingOffsetsByTimestamp", options.ending_offsets_by_timestamp, False),
    ):
        strange = [queue for queue, _ in of_queues if not options.reads(queue)]
        if strange and (not receipt or len(strange) == len(of_queues)):
            yield f"{name} has {strange[0]}, which is not among what is read: {_asked(options)}"
    start, end = options.starting_offsets, options.ending_offsets
    alone = {queue for queue, _ in start.offsets} ^ {queue for queue, _ in end.offsets}
    if start.receipt and end.receipt and alone:
        # Read without it, the rows of one of the two writes would be missing.
        yield (
            f"startingOffsets and endingOffsets are receipts of different queues, and {min(alone, key=str)} is in one "
            "of them only: nobody knows where to begin, or to end, there. Give the offsets of all queues as JSON"
        )


def _asked(options: SourceOptions) -> str:
    for field, name in _WHICH.items():
        value = getattr(options, field)
        if value:
            return f"{name} is {value if isinstance(value, str) else ','.join(map(str, value))}"
    return "startingOffsets is a receipt"
