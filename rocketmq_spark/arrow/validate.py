"""Checks columns of a write against the rules of brokers, of proxies and of this connector.

Most checks test a column in one cheap pass, and look for invalid rows only if that test fails. Each broken rule becomes
a `Violation` with all rows that break it; no check raises an error for a row. The brokers' rules are in
docs/internals/producer.md#validation.
"""

from __future__ import annotations

import contextlib
import functools
import string
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.arrow.columns import ByteColumn, Ints, ListColumn, Mask, rows_with_repeats, text_array, to_numpy
from rocketmq_spark.arrow.model import Property, Rule, Violation
from rocketmq_spark.arrow.schema import COLUMN_OF, DELAYS
from rocketmq_spark.model.names import FORBIDDEN_TOPICS, MAX_TOPIC_LENGTH, is_blank, is_legal, java_length, wrap
from rocketmq_spark.model.properties import LITE_TOPIC, PRIORITY, SHARDING_KEY
from rocketmq_spark.protocol.compression import MAX_DECOMPRESSED
from rocketmq_spark.protocol.remoting.records import LARGEST_BODY

_SPACE: Final = 0x20
_LAST_ASCII: Final = 0x7F  # A control character, too

# The default of maxLiteTopicSize in a proxy's configuration.
_MAX_LITE_TOPIC: Final = 64
_IN_LITE_TOPIC: Final = np.isin(np.arange(256), list(b"-_" + (string.ascii_letters + string.digits).encode()))
# Properties that give a message its type (``TopicMessageType.parseFromMessageProperty``).
_TYPES: Final = DELAYS | {SHARDING_KEY, PRIORITY, LITE_TOPIC}

# The first two bytes of Java's white space outside ASCII: U+1680, U+2000 to U+2029, U+205F, U+3000.
_SPACES: Final = (0xE19A, 0xE280, 0xE281, 0xE380)

PROPERTY_NAME: Final = "the name of a property"

# Up to this many different names in a block, a name is one bit of a 64-bit number; the other bits hold a sum's carry.
_BITS: Final = 40


TOPIC_NULL: Final = Rule("topic is null", "every row needs a topic", "fill the column, or set the option topic")
NO_BODY: Final = ("body is null", "body is empty")
"""What the rules for rows without a body say."""
DELAY_TOO_LONG: Final = Rule(
    "the delay is longer than the server allows",
    "a broker allows timerMaxDelaySec (3 days by default), a proxy maxDelayTimeMills (24 hours)",
    "use a shorter delay",
)
FRAME_TOO_LONG: Final = Rule(
    "body is too long for a frame",
    f"after compression at most {LARGEST_BODY} bytes are allowed: servers and consumers reject frames above 16 MiB",
    "send less per row",
)
_TOPIC_BLANK: Final = Rule("topic is blank", "a topic has 1 to 127 characters", "name one, or set the option topic")
_TOPIC_TOO_LONG: Final = Rule(
    "topic is too long",
    f"{MAX_TOPIC_LENGTH} characters are allowed, including the namespace",
    "use a topic with a shorter name",
)
_TOPIC_ILLEGAL: Final = Rule(
    "topic has an illegal character",
    "letters, digits and % | _ - are allowed",
    "replace other characters, such as a dot or a slash",
)
_TOPIC_FORBIDDEN: Final = Rule("topic is the broker's own", "clients may not send to it", "use another topic")
NO_TOPIC: Final = frozenset(
    rule.broken for rule in (TOPIC_NULL, _TOPIC_BLANK, _TOPIC_TOO_LONG, _TOPIC_ILLEGAL, _TOPIC_FORBIDDEN)
)
"""What the rules for rows without a valid topic say."""


def violations(
    rule: Rule, elements: Ints, entries: ListColumn | None = None, found: Callable[[int], object] | None = None
) -> Iterator[Violation]:
    """Yield a violation by ascending `elements` (rows, or elements of `entries`), if any; `found` as in `Violation`."""
    if not len(elements):
        return
    rows = elements if entries is None else entries.rows_of(elements)
    of_row = None if found is None else lambda row: found(int(elements[np.searchsorted(rows, row)]))
    yield Violation(rule, np.unique(rows), of_row)


# A write to many topics checks them once, and not in each record batch.
@functools.lru_cache(maxsize=10_000)
def topic_rule(topic: str, namespace: str | None = None) -> Rule | None:
    """Return the rule that `topic` breaks as the target of a message; None for a valid topic.

    On servers the name begins with `namespace`.
    """
    if is_blank(topic):
        return _TOPIC_BLANK
    if java_length(wrap(namespace, topic)) > MAX_TOPIC_LENGTH:
        return _TOPIC_TOO_LONG
    if not is_legal(topic):
        return _TOPIC_ILLEGAL
    return _TOPIC_FORBIDDEN if topic in FORBIDDEN_TOPICS else None


def check_body(body: ByteColumn, max_message_size: int) -> Iterator[Violation]:
    """Check that bodies are not null and have 1 to `max_message_size` bytes."""
    allowed = f"a body has 1 to {max_message_size} bytes"
    todo = "filter such rows out, or set onError to skip or deadLetter"
    if body.sizes.min(initial=1) < 1:
        there = np.ones(len(body), np.bool_) if body.valid is None else body.valid
        for broken, rows in zip(NO_BODY, (~there, there & (body.sizes == 0)), strict=True):
            yield from violations(Rule(broken, allowed, todo), np.flatnonzero(rows))
    rule = Rule(
        "body is longer than maxMessageSize",
        f"{max_message_size} bytes are allowed",
        "send less per row"
        if max_message_size >= MAX_DECOMPRESSED
        else f"send less per row, or raise maxMessageSize here (to at most {MAX_DECOMPRESSED}) and on all brokers",
    )
    yield from check_sizes(rule, body.sizes, max_message_size)


def check_sizes(rule: Rule, sizes: Ints, limits: Ints | int, unit: str = "bytes") -> Iterator[Violation]:
    """Check that sizes of rows are not above their limits."""
    if isinstance(limits, int) and sizes.max(initial=0) <= limits:
        return
    yield from violations(rule, np.flatnonzero(sizes > limits), None, lambda row: f"{sizes[row]} {unit}")


def check_text(
    name: str, column: ByteColumn, *, blank: bool = False, entries: ListColumn | None = None
) -> Iterator[Violation]:
    """Check that texts, one per row or with `entries` one per entry, are UTF-8 and hold no separator of properties.

    With `blank`, refuse texts that Java's ``trim`` makes empty. An error names the entry.
    """
    if int(column.span.min(initial=0xFF)) <= 2:
        rule = Rule(
            f"{name} holds the character 0x01 or 0x02",
            "any other is allowed: these two separate properties",
            "remove or replace it",
        )
        yield from violations(rule, elements_with(column, (column.span - 1) < 2), entries, _name_of(entries))
    if blank:
        yield from check_blank(name, column, entries)
    if int(column.span.max(initial=0)) <= _LAST_ASCII:
        return
    # In Spark, ``cast(binary as string)`` makes strings of any bytes.
    texts = column.to_arrow()
    with contextlib.suppress(pa.ArrowInvalid):
        texts.cast(pa.large_string() if pa.types.is_large_binary(texts.type) else pa.string())
        return
    # Arrow does not name the element. This loop runs only for blocks with such a text, over non-ASCII texts.
    suspects = {element: column.value(element) or b"" for element in elements_with(column, column.span > _LAST_ASCII)}
    bad = [element for element, text in suspects.items() if text.decode("utf-8", "ignore").encode() != text]
    rule = Rule(
        f"{name} is not valid UTF-8",
        "every text must be",
        "decode the bytes with their own charset, or move them into the body",
    )
    yield from violations(rule, np.array(bad, np.int64), entries, column.text)


def check_blank(name: str, column: ByteColumn, entries: ListColumn | None = None) -> Iterator[Violation]:
    """Check that texts that are not null have a byte above 0x20."""
    empty = column.sizes == 0
    if column.valid is not None:
        empty &= column.valid
    if int(column.span.min(initial=0xFF)) > _SPACE and not empty.any():
        return
    # The first byte of an empty element is its neighbour's, or lies behind the last one: its value does not matter.
    heads = column.data[np.minimum(column.offsets[:-1], len(column.data) - 1)] if len(column.data) else np.uint8(0)
    suspects = column.not_null(np.flatnonzero(empty | (heads <= _SPACE)))
    if len(suspects) == 0:
        return
    visible = np.concatenate([[0], np.cumsum(column.span > _SPACE)])
    ends = column.offsets - int(column.offsets[0])
    blank = suspects[visible[ends[suspects + 1]] == visible[ends[suspects]]]
    rule = Rule(f"{name} is blank", "at least one visible character is needed", "use null instead")
    yield from violations(rule, blank, entries, _name_of(entries))


def _name_of(entries: ListColumn | None) -> Callable[[int], object] | None:
    """Return the function that names an entry of a map, None for other columns."""
    return None if entries is None or entries.names is None else entries.names.text


def check_tags(column: ByteColumn) -> Iterator[Violation]:
    """Check that tags can match a subscription. ``|`` is its "or", and brokers and consumers trim each tag of it."""
    yield from check_text("tags", column, blank=True)
    if (hits := column.span == ord("|")).any():
        rule = Rule("tags holds '|'", "only one tag a message is allowed", "put the others into keys or properties")
        yield from violations(rule, elements_with(column, hits))
    if int(column.span.min(initial=0xFF)) > _SPACE:
        return
    there = np.flatnonzero(column.sizes)
    ends = column.offsets[there], column.offsets[there + 1] - 1
    rule = Rule(
        "tags begins or ends with a blank",
        "no subscription matches such a tag, because its tags are trimmed",
        "trim it",
    )
    yield from violations(rule, there[(column.data[ends[0]] <= _SPACE) | (column.data[ends[1]] <= _SPACE)])


def check_key_items(items: ListColumn) -> Iterator[Violation]:
    """Check the items of ``keys`` arrays, which are joined by one space: none is null, empty, or holds a space."""
    values = items.values
    todo = "correct the items of the array, or give the keys as one string"
    yield from check_text("keys", values, entries=items)
    if (hits := values.span == _SPACE).any():
        rule = Rule("an item of keys holds a space", "the space separates keys", todo)
        yield from violations(rule, elements_with(values, hits), items)
    rule = Rule("an item of keys is null or empty", "each item is a key of at least one character", todo)
    yield from violations(rule, np.flatnonzero(values.sizes == 0), items)


def check_lite_topic(column: ByteColumn) -> Iterator[Violation]:
    """Check the names of lite topics (``GrpcValidator.validateLiteTopic``)."""
    hits: Mask = ~_IN_LITE_TOPIC[column.span]
    if hits.any():
        rule = Rule(
            "liteTopic has an illegal character", "letters, digits, - and _ are allowed", "replace other characters"
        )
        yield from violations(rule, elements_with(column, hits), None, column.text)
    rule = Rule("liteTopic is empty", f"1 to {_MAX_LITE_TOPIC} bytes are allowed", "use null for no lite topic")
    yield from violations(rule, column.not_null(np.flatnonzero(column.sizes == 0)))
    rule = Rule("liteTopic is too long", f"{_MAX_LITE_TOPIC} bytes are allowed", "use a shorter name")
    yield from check_sizes(rule, column.sizes, _MAX_LITE_TOPIC)


def check_one_type(properties: Iterable[Property], rows: int) -> Iterator[Violation]:
    """Check that priority and liteTopic are set in rows without another property that gives a message its type."""
    there = {prop.name: prop.present(rows) for prop in properties if prop.name in _TYPES}
    for own in (PRIORITY, LITE_TOPIC):
        mask = there.pop(own, None)
        if mask is not None and there:
            rule = Rule(
                f"{COLUMN_OF[own]} is set beside {' or '.join(COLUMN_OF[name] for name in there)}",
                "a message has one type, and brokers ignore what makes another one",
                "set all but one of them to null",
            )
            yield from violations(rule, np.flatnonzero(mask & np.logical_or.reduce(list(there.values()))))


def rows_without_key(keys: ByteColumn | None, rows: int) -> Mask:
    """Return which rows have keys that are null, empty or blank to Java (``StringUtils.isBlank``)."""
    if keys is None:
        return np.ones(rows, np.bool_)
    keyless: Mask = keys.sizes == 0
    if not len(keys.data):
        return keyless
    last = len(keys.data) - 1
    heads = keys.data[np.minimum(keys.offsets[:-1], last)]
    suspects = heads <= 0x20
    if heads.max(initial=0) >= 0xE1:
        seconds = keys.data[np.minimum(keys.offsets[:-1] + 1, last)]
        suspects |= np.isin(heads.astype(np.uint16) << 8 | seconds, _SPACES)
    # A loop over the few rows whose first character is white space.
    for row in np.flatnonzero(suspects & ~keyless).tolist():
        keyless[row] = is_blank((keys.value(row) or b"").decode("utf-8", "replace"))
    return keyless


def user_properties(
    entries: ListColumn, *, reserved: frozenset[str], dropped: frozenset[str]
) -> tuple[ListColumn, list[Violation]]:
    """Check a map column, and return it without the entries whose names are `dropped`.

    Names in `reserved` are violations unless they are dropped. The values of dropped entries are not checked.
    """
    broken: list[Violation] = []
    twins: Ints = np.empty(0, np.int64)
    if not _same_good_names(entries, reserved | dropped):
        names, codes, is_special = _named(entries, reserved | dropped)
        if is_special.any():
            entries = entries.filter(~_named(entries, dropped)[2][codes])
            names, codes, is_reserved = _named(entries, reserved)
            rule = Rule(
                f"{PROPERTY_NAME} is reserved",
                "names that RocketMQ or the connector writes itself are not allowed",
                "use the column meant for it (keys, tags, shardingKey, delayTimeLevel, ...) or another name; if the "
                "rows come from a read, write also its column msgId, so that such names are dropped",
            )
            broken += violations(rule, np.flatnonzero(is_reserved[codes]), entries, names.text)
        broken += check_text(PROPERTY_NAME, names, blank=True, entries=entries)
        twins = _rows_with_twins(entries, codes, len(is_special))
    broken += check_text("the value of a property", entries.values, blank=True, entries=entries)
    if entries.values.valid is not None:
        rule = Rule(
            "the value of a property is null",
            "every property needs a value",
            "leave such entries out with map_filter(properties, (k, v) -> v is not null)",
        )
        assert entries.names is not None
        broken += violations(rule, np.flatnonzero(~entries.values.valid), entries, entries.names.text)
    rule = Rule("a name occurs twice among the properties", "a name may occur once in a message", "merge the values")
    broken += violations(rule, twins)
    return entries, broken


def _same_good_names(entries: ListColumn, special: frozenset[str]) -> bool:
    """Return whether all rows have the same names, as most tables do, and these break no rule and are not `special`."""
    names, count = entries.names, int(entries.offsets[1])
    assert names is not None
    if names.valid is not None or not count or (entries.counts != count).any():
        return False
    # With equal sizes, the names are equal if each byte equals the byte one row later.
    sizes, width = names.sizes.reshape(-1, count), int(names.offsets[count] - names.offsets[0])
    if (sizes != sizes[0]).any() or (names.span[width:] != names.span[: len(names.span) - width]).any():
        return False
    first = names.slice(0, count)
    texts = {first.text(number) for number in range(count)}
    return len(texts) == count and special.isdisjoint(texts) and not any(check_text(PROPERTY_NAME, first, blank=True))


def _named(entries: ListColumn, special: frozenset[str]) -> tuple[ByteColumn, Ints, Mask]:
    """Return the names of `entries`, a number for each, and which numbers are special names."""
    assert entries.names is not None
    encoded = entries.names.to_arrow().dictionary_encode()
    is_special = pc.is_in(encoded.dictionary, text_array(special, encoded.dictionary.type))
    return entries.names, to_numpy(encoded.indices), to_numpy(is_special)


def _rows_with_twins(entries: ListColumn, codes: Ints, names: int) -> Ints:
    """Return the rows in which a name occurs twice. Spark's maps hold none, Arrow's may."""
    counts = entries.counts
    most = int(counts.max(initial=0))
    if most < 2:
        return counts[:0]
    if names <= _BITS:
        return rows_with_repeats(codes, entries.offsets)
    pairs = np.sort(np.repeat(np.arange(len(counts)), counts) * names + codes)
    return np.unique(pairs[1:][pairs[1:] == pairs[:-1]] // names)


def check_range(
    name: str, values: Ints, valid: Mask | None, low: int, high: int | None, todo: str
) -> Iterator[Violation]:
    """Check that numbers are between `low` and `high`, both included; None: without an upper limit."""
    outside = values < low
    if high is not None:
        outside |= values > high
    if valid is not None:
        outside &= valid
    if outside.any():
        allowed = f"{low} to {high} is allowed" if high is not None else f"{low} or more is allowed"
        rule = Rule(f"{name} is out of range", allowed, todo)
        yield Violation(rule, np.flatnonzero(outside), lambda row: values[row])


def elements_with(column: ByteColumn, hits: Mask) -> Ints:
    """Return the elements that hold one of the marked bytes of the column's span, ascending."""
    positions = np.flatnonzero(hits) + int(column.offsets[0])
    return column.not_null(np.unique(np.searchsorted(column.offsets, positions, side="right") - 1))
