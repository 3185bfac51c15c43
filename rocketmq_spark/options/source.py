"""Declares the options of a read, and checks them for contradictions.

Many names are those of Spark's Kafka source. Where that has offsets or times by topic and partition, this has them by
topic, broker and queue. Other options are this connector's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import rocketmq_spark.options.kinds as kinds
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import utc
from rocketmq_spark.model.names import DEFAULT_CONSUMER_GROUP, MAX_GROUP_LENGTH, MAX_TOPIC_LENGTH, trim
from rocketmq_spark.options import offsets as offset_json
from rocketmq_spark.options.connection import ConnectedOptions, Spelling, security_contradictions
from rocketmq_spark.options.kinds import BOOLEAN, INSTANCE_NAME, MILLISECONDS, READ, ValueKind, option, specs_of
from rocketmq_spark.options.offsets import COMMITTED, EARLIEST, LATEST, OffsetSpec
from rocketmq_spark.options.sink import against_bounds

PULL_TIMEOUT_MS: Final = 10_000
_LONG_MAX: Final = 2**63 - 1
_EPOCH: Final = kinds.integer(0, _LONG_MAX, unit="ms since 1970")
_COUNT: Final = kinds.integer(1, _LONG_MAX)

_SHAPE: Final = '{"topic":{"broker":{"0":23}}}'
_OFFSETS: Final = (
    f"earliest, latest, offsets by topic, broker and queue as in {_SHAPE} (-2: earliest, -1: latest), or the receipt "
    "of a write"
)
_STARTS: Final = _OFFSETS.replace("latest,", "latest, committed,", 1)

_TEXT: Final = kinds.text("a non-blank text without control characters", "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
# To a broker " * " is the tag "*", and messages without this tag do not match.
_EXPRESSION: Final = ValueKind(_TEXT.allowed, lambda text: "*" if trim(_TEXT.parse(text)) == "*" else text)

_BROKER_NAMES: Final = kinds.words("", r"\S(.*\S)?")
_BROKERS: Final = ValueKind(
    "a number from 1 on, or names of brokers separated by commas",
    lambda text: (_COUNT if text.strip().isdecimal() else _BROKER_NAMES).parse(text),
)
_TIMESTAMPS: Final = ValueKind(
    f"ms since 1970 by topic, broker and queue, as in {_SHAPE}",
    lambda text: tuple(sorted(offset_json.parse_numbers(text, 0).items())),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(ConnectedOptions):
    """The options of one read. Times are milliseconds. The constructor checks nothing."""

    # fmt: off
    subscribe: tuple[str, ...] = option("subscribe", (), kinds.words(
            f"topics separated by commas, each of 1 to {MAX_TOPIC_LENGTH} characters of a-z A-Z 0-9 _ - % | +",
            f"[%|a-zA-Z0-9_+-]{{1,{MAX_TOPIC_LENGTH}}}",
        ),
        'Topics to read, separated by commas. Also .load("topic"). Exactly one of `subscribe`, `subscribePattern` and '
        "`assign` is required, unless `startingOffsets` is a receipt.", section="what", aliases=("topic",))
    subscribe_pattern: str | None = option("subscribePattern", None, kinds.PATTERN,
        "Read the topics whose whole name matches this regular expression, except RocketMQ's own topics (also "
        "%RETRY%... and %DLQ%...) and names of more than 127 characters.")
    assign: frozenset[MessageQueue] = option("assign", frozenset(),
        ValueKind('queues by topic and broker, as in {"topic":{"broker":[0,1]}}', offset_json.parse_queues),
        "Read these queues.")
    require_brokers: int | tuple[str, ...] | None = option("requireBrokers", None, _BROKERS,
        "Minimum number, or names, of the brokers that the name servers must list for the topics. Otherwise the read "
        "fails. Name servers do not list a broker that is down. A stream checks this only at its first start.")
    consumer_group: str = option(
        "consumerGroup", "spark-rocketmq-source", kinds.name(MAX_GROUP_LENGTH, {DEFAULT_CONSUMER_GROUP}),
        "Consumer group that the brokers see. `startingOffsets=committed` reads its offsets.")
    starting_offsets: OffsetSpec = option(
        "startingOffsets", OffsetSpec("earliest"), ValueKind(_STARTS, offset_json.parse_start),
        "Where a read begins. A stream uses it only at its first start; its default is latest. `committed` begins "
        "where `consumerGroup` stopped. A receipt of a write (`metrics.to_dict()` as JSON) begins at its first rows, "
        "and reads only its queues.", section="span")
    starting_offsets_fallback: str = option(
        "startingOffsetsFallback", "error", kinds.choice("error", *offset_json.WORDS),
        "Where `startingOffsets=committed` begins in a queue that has messages, but no committed offset. `error`: the "
        "read fails. A queue that never had a message begins at offset 0.")
    ending_offsets: OffsetSpec = option(
        "endingOffsets", OffsetSpec("latest"), ValueKind(_OFFSETS, offset_json.parse_end),
        "Where a batch ends, exclusive: as `startingOffsets`, except earliest. A receipt ends after the last rows of "
        "the write. Default: latest, or the receipt in `startingOffsets`.", reads=kinds.BATCH)
    starting_timestamp: int | None = option("startingTimestamp", None, _EPOCH,
        "Begin in every queue with the first message stored at this time or later. Overrides "
        "`startingOffsetsByTimestamp`, which overrides `startingOffsets`.")
    ending_timestamp: int | None = option("endingTimestamp", None, _EPOCH,
        "End a batch in every queue before the first message stored at this time or later. Overrides "
        "`endingOffsetsByTimestamp`, which overrides `endingOffsets`.", reads=kinds.BATCH)
    starting_offsets_by_timestamp: tuple[tuple[MessageQueue, int], ...] = option(
        "startingOffsetsByTimestamp", (), _TIMESTAMPS, "As `startingTimestamp`, for each queue.")
    ending_offsets_by_timestamp: tuple[tuple[MessageQueue, int], ...] = option(
        "endingOffsetsByTimestamp", (), _TIMESTAMPS, "As `endingTimestamp`, for each queue.", reads=kinds.BATCH)
    starting_offsets_by_timestamp_strategy: str = option(
        "startingOffsetsByTimestampStrategy", "error", kinds.choice("error", "latest"),
        "Handling of a queue that has messages, but none at its starting time or later. `error`: the read fails. "
        "`latest`: the read begins at the end of the queue. An empty queue always begins at its end.")
    fail_on_data_loss: bool = option("failOnDataLoss", True, BOOLEAN,
        "Fail if messages in the read's range no longer exist, because they expired or their topic was deleted. false: "
        "read the remaining messages.")
    on_unreadable: str = option("onUnreadable", "fail", kinds.choice("fail", "skip", "raw"),
        "Handling of a message whose compression, checksum, record, properties or inner batch are invalid. `fail`: the "
        "read fails and names the message. `skip`: the read skips, counts and logs it. `raw`: the row has the stored "
        "bytes as `body`, and the reason in the additional column `unreadable`.")
    sub_expression: str = option("subExpression", "*", _EXPRESSION,
        "Read only messages that match this expression: tags separated by two pipe characters, or a condition on "
        "properties with `filterType=SQL92`.", section="columns")
    filter_type: str = option("filterType", "TAG", kinds.choice("TAG", "SQL92"),
        "Language of `subExpression`. Brokers support SQL92 only with enablePropertyFilter=true.")
    include_properties: bool = option("includeProperties", True, BOOLEAN, "Include the column `properties`.")
    min_partitions: int | None = option("minPartitions", None, kinds.integer(1),
        "Minimum number of Spark partitions; large queues are split. Default: at most one per queue; small queues "
        "share one.", section="partitions")
    max_records_per_partition: int | None = option("maxRecordsPerPartition", None, _COUNT,
        "Maximum number of messages per Spark partition; larger queues are split. Default: no limit.")
    pull_batch_size: int = option("pullBatchSize", 512, kinds.integer(1, 1024),
        "Maximum number of messages per pull request. Brokers return at most 32 by default.", section="pulls")
    pull_timeout_ms: int = option("pullTimeoutMs", PULL_TIMEOUT_MS, MILLISECONDS,
        "Timeout of one request. Default: at most `readTimeoutMs`.")
    read_timeout_ms: int = option("readTimeoutMs", 120000, MILLISECONDS,
        "How long a queue that has messages may return none before the read fails. Also the deadline for planning a "
        "batch or micro-batch, with all routes and offsets.")
    max_offsets_per_trigger: int | None = option("maxOffsetsPerTrigger", None, _COUNT,
        "Maximum number of messages per micro-batch, in proportion to the new offsets of the queues. Every queue with "
        "new offsets gets at least one, even beyond the limit.", section="streams", reads=kinds.STREAM)
    max_bytes_per_trigger: int | None = option("maxBytesPerTrigger", None, kinds.size(1, 2**63 - 1),
        "Approximate maximum of the bytes that a micro-batch reads, estimated from the stored sizes of some messages. "
        "Every queue with new offsets gets at least one message, even beyond the limit.", reads=kinds.STREAM)
    min_offsets_per_trigger: int | None = option("minOffsetsPerTrigger", None, _COUNT,
        "Delay a micro-batch until this many new offsets exist, or `maxTriggerDelay` is over.", reads=kinds.STREAM)
    max_trigger_delay: int = option("maxTriggerDelay", 15 * 60 * 1000, kinds.duration(1),
        "Maximum wait for `minOffsetsPerTrigger`.", reads=kinds.STREAM)
    commit_offsets: bool = option("commitOffsets", False, BOOLEAN,
        "Commit the offsets of each finished micro-batch, to show the lag of `consumerGroup`, unless an application "
        "consumes as that group. A stream restarts only from its checkpoint.", reads=kinds.STREAM)
    instance_name: str | None = option("instanceName", None, INSTANCE_NAME,
        "Second part of the client id, followed by `#` and the process id of the reader. Default: spark. Used only "
        "with `commitOffsets=true`.", section="instance")
    # fmt: on

    def reads(self, queue: MessageQueue) -> bool:
        """Return whether the options select a queue."""
        if self.assign:
            selected = queue in self.assign
        elif self.subscribe_pattern is not None:
            selected = re.fullmatch(self.subscribe_pattern, queue.topic) is not None
        else:
            selected = queue.topic in self.subscribe or not self.subscribe
        receipts = [spec for spec in (self.starting_offsets, self.ending_offsets) if spec.receipt]
        return selected and all(spec.offset_of(queue) is not None for spec in receipts)


SOURCE_OPTIONS: Final = specs_of(SourceOptions, READ)

SOURCE_SPELLING: Final[Spelling] = {spec.field: spec.name for spec in SOURCE_OPTIONS}.__getitem__

_WHICH: Final = ("subscribe", "subscribe_pattern", "assign")
_NOT_ABOVE: Final = (("min_offsets_per_trigger", "max_offsets_per_trigger"), ("pull_timeout_ms", "read_timeout_ms"))
# 1973 began after this many milliseconds. A smaller timestamp is probably in seconds.
_SECONDS: Final = 10**11
# From this timestamp on, in the year 33658, the unit is probably a smaller one.
_MICROSECONDS: Final = 10**15


def against_given(user_options: Mapping[str, Any], *, streaming: bool) -> Iterator[str]:
    """Yield an error text for each option that is missing or not valid here; `user_options` contains no defaults."""
    chosen = [SOURCE_SPELLING(field) for field in _WHICH if field in user_options]
    names = ", ".join(map(SOURCE_SPELLING, _WHICH))
    if len(chosen) > 1:
        yield (
            f"only one of the following options can be specified for a read from RocketMQ: {names}; given are "
            f"{' and '.join(chosen)}"
        )
    starting = user_options.get("starting_offsets")
    if not chosen and not (starting is not None and starting.receipt):
        yield (
            f"one of the following options must be specified for a read from RocketMQ: {names}; as in "
            '.option("subscribe", "orders") or .load("orders")'
        )
    why = " is for streams and not valid in batch queries: remove it, or use spark.readStream"
    if streaming:
        why = ": ending offset not valid in streaming queries; remove it, or use spark.read"
    for spec in SOURCE_OPTIONS:
        # commitOffsets=false has no effect in a batch.
        if (
            spec.reads == (kinds.BATCH if streaming else kinds.STREAM)
            and user_options.get(spec.field, False) is not False
        ):
            yield spec.name + why
    if starting is not None and starting.word == COMMITTED and "consumer_group" not in user_options:
        yield "startingOffsets=committed requires consumerGroup: name the group whose committed offsets begin the read"
    if "max_trigger_delay" in user_options and "min_offsets_per_trigger" not in user_options:
        yield (
            "maxTriggerDelay is given without minOffsetsPerTrigger: give minOffsetsPerTrigger, too, or remove "
            "maxTriggerDelay"
        )


def source_contradictions(options: SourceOptions, spelt: Spelling, *, streaming: bool) -> Iterator[str]:
    """Yield an error text for each contradiction."""
    yield from security_contradictions(options.connection, spelt)
    yield from against_bounds(options, _NOT_ABOVE)
    yield from _of_filters(options)
    yield from _of_queues(options)
    timed = options.starting_timestamp is not None or bool(options.starting_offsets_by_timestamp)
    if options.starting_offsets_by_timestamp_strategy == "latest" and not timed:
        yield (
            "startingOffsetsByTimestampStrategy=latest requires startingTimestamp or startingOffsetsByTimestamp: give "
            "one of them, or remove startingOffsetsByTimestampStrategy"
        )
    if options.starting_offsets_fallback != "error" and options.starting_offsets.word != COMMITTED:
        yield (
            f"startingOffsetsFallback={options.starting_offsets_fallback} requires startingOffsets=committed: give "
            "it, or remove startingOffsetsFallback"
        )
    if streaming:
        return
    start, end = options.starting_timestamp, options.ending_timestamp
    if start is not None and end is not None and start > end:
        yield f"startingTimestamp={start} is later than endingTimestamp={end}: lower the one or raise the other"
    ends_timed = end is not None or bool(options.ending_offsets_by_timestamp)
    # As in Kafka's source, an option that a timestamp overrides is not checked.
    if not timed:
        yield from _never("starting", options.starting_offsets, "latest", LATEST)
    if not ends_timed:
        yield from _never("ending", options.ending_offsets, "earliest", EARLIEST)
    if timed or ends_timed:
        return
    for queue, offset in options.starting_offsets.offsets:
        stop = options.ending_offsets.offset_of(queue)
        if stop is not None and 0 <= stop < offset:
            yield f"startingOffsets of {queue} is {offset}, but endingOffsets is {stop}: give an end from {offset} on"


def option_warnings(options: SourceOptions) -> Iterator[str]:
    """Yield a warning for each value that is allowed but probably a mistake."""
    expression = options.sub_expression
    if options.filter_type == "TAG" and re.search("[=<>'&]", expression):
        yield f"subExpression={expression!r} is interpreted as tags; a condition requires filterType=SQL92"
    times: list[tuple[str, int | None]] = [
        ("startingTimestamp", options.starting_timestamp),
        ("endingTimestamp", options.ending_timestamp),
        *((f"startingOffsetsByTimestamp of {queue}", time) for queue, time in options.starting_offsets_by_timestamp),
        *((f"endingOffsetsByTimestamp of {queue}", time) for queue, time in options.ending_offsets_by_timestamp),
    ]
    for name, time in times:
        if time is not None and (0 < time < _SECONDS or _MICROSECONDS <= time < _LONG_MAX):
            unit = "seconds" if time < _SECONDS else "microseconds or nanoseconds"
            yield f"{name} is {time}, or {utc(time)}: it looks like {unit}, but milliseconds since 1970 are required"
            # The other times probably have the same unit.
            return


def _never(place: str, spec: OffsetSpec, word: str, number: int) -> Iterator[str]:
    if spec.word == word:
        yield f"{place}Offsets={word}: {place} offset can't be {word} for batch queries on RocketMQ"
    for queue, offset in spec.offsets:
        if offset == number:
            yield f"{place}Offsets: {place} offset of {queue} can't be {word} ({number}) for batch queries on RocketMQ"


def _of_filters(options: SourceOptions) -> Iterator[str]:
    expression = options.sub_expression
    if options.filter_type == "SQL92" and expression.strip() == "*":
        yield "filterType=SQL92 requires a condition, but subExpression is *: give a condition, or remove filterType"
    # Brokers accept LIKE and evaluate it as false. A text literal may contain the word.
    if options.filter_type == "SQL92" and re.search(r"\blike\b", re.sub("'[^']*'", "", expression), re.IGNORECASE):
        yield (
            f"subExpression={expression!r}: brokers match no message with LIKE; use CONTAINS, STARTSWITH or ENDSWITH "
            "with a text without %"
        )
    if options.filter_type == "TAG" and "|" in expression.replace("||", ""):
        yield f"subExpression={expression!r} contains a single pipe: allowed is *, or tags as in TagA || TagB"
    elif options.filter_type == "TAG" and not any(map(str.strip, expression.split("||"))):
        yield f"subExpression={expression!r} has no tag: allowed is *, or tags as in TagA || TagB"


def _of_queues(options: SourceOptions) -> Iterator[str]:
    """Yield an error text for offsets or times of queues that are not read; a receipt may have some of them."""
    for name, of_queues, receipt in (
        ("startingOffsets", options.starting_offsets.offsets, options.starting_offsets.receipt),
        ("endingOffsets", options.ending_offsets.offsets, options.ending_offsets.receipt),
        ("startingOffsetsByTimestamp", options.starting_offsets_by_timestamp, False),
        ("endingOffsetsByTimestamp", options.ending_offsets_by_timestamp, False),
    ):
        strange = [queue for queue, _ in of_queues if not options.reads(queue)]
        if strange and (not receipt or len(strange) == len(of_queues)):
            yield f"{name} has {strange[0]}, but the read does not include it ({_asked(options)}): remove or include it"
    start, end = options.starting_offsets, options.ending_offsets
    alone = {queue for queue, _ in start.offsets} ^ {queue for queue, _ in end.offsets}
    if start.receipt and end.receipt and alone:
        # Without this queue, the rows of one of the two writes would be missing.
        yield (
            f"startingOffsets and endingOffsets are receipts of different queues: only one of them has "
            f"{min(alone, key=str)}. Give the offsets of all queues as JSON"
        )


def _asked(options: SourceOptions) -> str:
    for field in _WHICH:
        if value := getattr(options, field):
            return f"{SOURCE_SPELLING(field)} is {value if isinstance(value, str) else ','.join(map(str, value))}"
    return "startingOffsets is a receipt"
