"""Which options of a read contradict each other or the kind of the read, and what to do about it.

Rule 1: each value is allowed by itself; here is only what they would mean together.
Rule 2: what a batch, or a stream, would not apply is refused, never ignored.

Follows KafkaSourceProvider.scala (validateBatchOptions, validateStreamOptions), but for rule 2: Kafka's source only
warns of a stream's options in a batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from rocketmq_spark.offset_json import EARLIEST, LATEST, OffsetSpec
from rocketmq_spark.option_rules import against_bounds, of_security
from rocketmq_spark.option_transport import Spelling

if TYPE_CHECKING:
    from rocketmq_spark.reader_options import ReaderOptions

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
    """Yield a text for each option that should not have been given, or that is missing.

    Parameters
    ----------
    given : mapping of str to value
        By field; without the defaults.
    streaming : bool
    """
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


def contradictions(options: ReaderOptions, spelt: Spelling, *, streaming: bool) -> Iterator[str]:
    """Yield a text for each contradiction."""
    yield from of_security(options, spelt)
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
    """Yield a text for each queue that would end before it begins."""
    for queue, offset in start.offsets:
        stop = end.offset_of(queue)
        if stop is not None and 0 <= stop < offset:
            yield f"startingOffsets of {queue} is {offset}, and endingOffsets is before it: {stop}"


def doubts(options: ReaderOptions) -> Iterator[str]:
    """Yield a text for each value that is allowed, and hardly meant."""
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


def _of_filters(options: ReaderOptions) -> Iterator[str]:
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


def _of_queues(options: ReaderOptions) -> Iterator[str]:
    """Yield a text for queues that have offsets or times and are not read; a receipt may have some that are read."""
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


def _asked(options: ReaderOptions) -> str:
    for field, name in _WHICH.items():
        value = getattr(options, field)
        if value:
            return f"{name} is {value if isinstance(value, str) else ','.join(map(str, value))}"
    return "startingOffsets is a receipt"
