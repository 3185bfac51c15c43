"""Reads a record batch of a write into a `MessageBlock`: converts its columns to one layout, and checks its rows.

The block lists broken rules; its caller raises an error, or skips or diverts the rows. `CARRIED` says which properties
the protocol drops, and which ones make a row a single message. The order in a property string is: KEYS, TAGS, WAIT
(only ``false``), __SHARDINGKEY, DELAY, TIMER_DELAY_MS, TIMER_DELIVER_MS, _SYS_MSG_PRIORITY_, __LITE_TOPIC,
SPARK_ROW_ID, SPARK_ATTEMPT, UNIQ_KEY, then the user's properties. An empty string in keys or shardingKey counts as
null. In tags it is an error: it could mean the default tag or no tag. In liteTopic it is an error, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rocketmq_spark.arrow import schema, validate
from rocketmq_spark.arrow.columns import (
    ByteColumn,
    Ints,
    ListColumn,
    Mask,
    byte_column,
    byte_column_or_nulls,
    coded_column,
    decimals,
    false_rows,
    filled,
    int_column,
    list_column,
    null_bytes,
)
from rocketmq_spark.arrow.encoders import UNIQ_KEY, MessageIds, UniqueIds, join_keys, property_fields, property_strings
from rocketmq_spark.arrow.gather import consecutive_decimals
from rocketmq_spark.arrow.grpc_limits import check_for_grpc
from rocketmq_spark.arrow.hashes import RowIds
from rocketmq_spark.arrow.model import MessageBlock, Property, Rule, Violation
from rocketmq_spark.arrow.validate import violations
from rocketmq_spark.model.names import RETRY_PREFIX
from rocketmq_spark.model.properties import (
    ATTEMPT,
    CARRIED,
    KEYS,
    LITE_TOPIC,
    ROW_ID,
    SHARDING_KEY,
    TAGS,
    WAIT,
    Carried,
)
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.records import ITEM_OVERHEAD, MAX_BODY, MAX_PROPERTIES

# The broker first adds up to about 150 bytes, more to a delayed message (docs/internals/messages.md#limits).
MAX_SINGLE_PROPERTIES: Final = 32_000

_PROPERTIES_TOO_LONG: Final = Rule(
    "properties are too long",
    f"keys, tags and properties may have {MAX_PROPERTIES} bytes together in a batch, {MAX_SINGLE_PROPERTIES} in a "
    "single message",
    "move long values into the body",
)

# Bytes of the broker's 4 MiB for the properties that a proxy adds (docs/internals/grpc-messages.md#batches).
_PROXY_ROOM: Final = 512 * 1024


def item_limit(options: SinkOptions) -> int:
    """Return the bytes of the largest batch, so also of an item (row in it). A larger row goes as a single message."""
    return min(MAX_BODY - _PROXY_ROOM if options.over_grpc else MAX_BODY, options.max_message_size)


def read_block(
    batch: pa.RecordBatch, options: SinkOptions, row_ids: RowIds | None = None, first_row: int = 0, attempt: str = ""
) -> MessageBlock:
    """Normalise and check a batch that has passed `check_schema`; `first_row` counts the partition's rows before it.

    Each row gets the token of its `attempt`, if that has one, and with ``ordered`` also its number.
    """
    return _Reader(batch, options, row_ids, first_row, attempt).block()


class _Reader:
    """Reads the columns of one batch and collects violations. An error names the first rule that a row breaks."""

    def __init__(
        self, batch: pa.RecordBatch, options: SinkOptions, row_ids: RowIds | None, first_row: int, attempt: str
    ) -> None:
        schema.check_columns(batch.schema.names)
        self._columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        self._rows = batch.num_rows
        self._options = options
        self._row_ids = row_ids
        self._first_row = first_row
        self._attempt = attempt.encode()
        self._violations: list[Violation] = []

    def block(self) -> MessageBlock:
        options, rows = self._options, self._rows
        body = byte_column(self._columns.get("body", self._columns.get("value"))) or null_bytes(rows)
        self._violations += validate.check_body(body, options.max_message_size)
        topics, topic_codes = self._topics()
        properties: list[Property] = []
        properties += _property(KEYS, keys := self._keys())
        properties += self._tags()
        no_wait = false_rows(self._columns.get("waitStoreMsgOK"))
        if no_wait is not None:
            properties.append(Property(WAIT, None, no_wait, literal=b"false"))
        properties += _property(SHARDING_KEY, sharding_key := self._sharding_key())
        properties += self._numbers()
        properties += _property(LITE_TOPIC, lite_topic := self._text("liteTopic", validate.check_lite_topic))
        self._violations += validate.check_one_type(properties, rows)
        flag_column = self._ints("flag")
        flags = None if flag_column is None else flag_column[0]
        entries = self._user_properties()
        entry_strings = None if entries is None else property_strings(entries)
        user = None if entry_strings is None else entry_strings.joined()  # One string per row
        if self._row_ids is not None and rows:
            if self._row_ids.columns is not None:
                properties.append(self._row_ids.of_columns(self._columns, rows))
            else:
                hashed = [prop for prop in properties if CARRIED[prop.name].hashed]
                content = (topics, topic_codes, hashed, entry_strings, body, flags)
                properties.append(self._row_ids.of_content(self._first_row, *content))
        if self._attempt and rows:
            properties.append(self._attempt_property())
        properties = [prop for prop in properties if self._carried(prop) is not Carried.DROPPED]
        id_length = len(UNIQ_KEY) + (MessageIds if options.over_grpc else UniqueIds).LENGTH + 2
        property_sizes: Ints = np.full(rows, id_length if options.unique_key else 0, np.int64)
        for prop in properties:
            property_sizes += prop.sizes(rows)
        if user is not None:
            property_sizes += user.sizes
        item_sizes: npt.NDArray[np.int64] = property_sizes + body.sizes + ITEM_OVERHEAD
        single = self._single(properties, item_sizes, topics, topic_codes)
        if property_sizes.max(initial=0) > MAX_SINGLE_PROPERTIES:
            limits = np.where(np.False_ if single is None else single, MAX_SINGLE_PROPERTIES, MAX_PROPERTIES)
            self._violations += validate.check_sizes(_PROPERTIES_TOO_LONG, property_sizes, limits)
        if options.over_grpc:
            self._violations += check_for_grpc(rows, properties, entries, flags)
        by_column = options.queue_selector == "column"
        return MessageBlock(
            rows=rows,
            topics=topics,
            topic_codes=topic_codes,
            body=body,
            keys=keys,
            sharding_key=sharding_key,
            lite_topic=lite_topic,
            properties=tuple(properties),
            unique_key=options.unique_key,
            user=user,
            user_entries=entry_strings,
            user_fields=property_fields(entries).joined() if options.over_grpc and entries is not None else None,
            flags=flags,
            queue_ids=self._ints("queueId") if by_column else None,
            broker_names=coded_column(self._columns.get("brokerName")) if by_column else None,
            property_sizes=property_sizes,
            item_sizes=item_sizes,
            single=single,
            violations=tuple(self._violations),
        )

    def _carried(self, prop: Property) -> Carried:
        how = CARRIED[prop.name]
        return how.grpc if self._options.over_grpc else how.batch

    def _topics(self) -> tuple[list[str], Ints | None]:
        if self._options.topic is not None:
            return [self._options.topic], None
        coded = coded_column(self._columns.get("topic"))
        if coded is None:
            self._violations += violations(validate.TOPIC_NULL, np.arange(self._rows))
            return [], np.full(self._rows, -1)
        codes, topics = coded
        self._violations += violations(validate.TOPIC_NULL, np.flatnonzero(codes < 0))
        for code, topic in enumerate(topics):
            if (rule := validate.topic_rule(topic, self._options.connection.wire_namespace)) is not None:
                self._violations.append(Violation(rule, np.flatnonzero(codes == code)))
        return topics, codes

    def _keys(self) -> ByteColumn | None:
        array = self._columns.get("keys")
        if array is None or not schema.is_list(array.type):
            return self._text("keys", partial(validate.check_text, "keys"))
        items = list_column(array)
        if items is None:
            return None
        self._violations += validate.check_key_items(items)
        return join_keys(items).without_empty()

    def _text(self, name: str, check: Callable[[ByteColumn], Iterable[Violation]]) -> ByteColumn | None:
        """Check a column of texts, and return it with empty texts as nulls."""
        column = byte_column(self._columns.get(name))
        if column is None:
            return None
        self._violations += check(column)
        return column.without_empty()

    def _tags(self) -> list[Property]:
        default = (self._options.tags or "").encode()
        tags = byte_column(self._columns.get("tags"))
        if tags is None:
            return [Property(TAGS, None, None, literal=default)] if default else []
        self._violations += validate.check_tags(tags)
        if default and tags.valid is not None:
            tags = byte_column_or_nulls(filled(tags.to_arrow(), default))
        # Many tables have one tag. A literal costs nothing per row, a column a tenth of the encoding.
        same = None if default or self._options.over_grpc else tags.common_value()
        return [Property(TAGS, tags, tags.valid) if same is None else Property(TAGS, None, None, literal=same)]

    def _sharding_key(self) -> ByteColumn | None:
        column = self._text("shardingKey", partial(validate.check_text, "shardingKey"))
        if self._options.ordered:
            present = np.zeros(self._rows, np.bool_) if column is None else column.valid
            rule = Rule(
                "shardingKey is null or empty",
                "ordered=true needs a shardingKey in every row",
                "fill the column, or set ordered=false",
            )
            self._violations += violations(rule, np.flatnonzero([] if present is None else ~present))
        return column

    def _numbers(self) -> Iterator[Property]:
        """Yield the properties that columns of whole numbers make."""
        delayed = np.zeros(self._rows, np.bool_)
        for name in schema.NUMBER_COLUMNS:
            column = self._ints(name)
            if column is None:
                continue
            prop = Property(schema.COLUMNS[name].makes, decimals(*column), column[1])
            if name in schema.DELAY_COLUMNS:
                present = prop.present(self._rows)
                twice = Rule(
                    f"{name} is set beside another delay",
                    f"only one of {', '.join(schema.DELAY_COLUMNS)} is allowed in a row",
                    "set the others to null",
                )
                self._violations += violations(twice, np.flatnonzero(delayed & present))
                delayed |= present
            yield prop

    def _ints(self, name: str) -> tuple[npt.NDArray[np.int64], Mask | None] | None:
        column, spec = int_column(self._columns.get(name)), schema.COLUMNS[name]
        if column is not None and spec.bounds is not None:
            self._violations += validate.check_range(name, *column, *spec.bounds, spec.advice)
        return column

    def _user_properties(self) -> ListColumn | None:
        entries = list_column(self._columns.get("properties"))
        if entries is None:
            return None
        reserved = schema.reserved_names(self._columns, row_id=self._row_ids is not None)
        # When a topic is copied, `properties` also has the reserved names of the read messages.
        dropped = reserved if any(name in self._columns for name in schema.READ_ONLY) else frozenset()
        if self._row_ids is None and not self._options.keep_row_id:
            dropped |= {ROW_ID}
        # A copy of a topic has the tokens of an earlier write.
        dropped |= {ATTEMPT}
        user, user_violations = validate.user_properties(entries, reserved=reserved, dropped=dropped)
        self._violations += user_violations
        return user

    def _attempt_property(self) -> Property:
        if not self._options.ordered:
            return Property(ATTEMPT, None, None, self._attempt)
        numbers = consecutive_decimals(self._first_row, self._rows)
        return Property(
            ATTEMPT, numbers or decimals(self._first_row + np.arange(self._rows)), None, self._attempt + b"/"
        )

    def _single(
        self, properties: Sequence[Property], item_sizes: Ints, topics: list[str], codes: Ints | None
    ) -> Mask | None:
        """Return which rows cannot share a batch: by their size, or by docs/internals/messages.md#batch."""
        rows, limit = self._rows, item_limit(self._options)
        if not self._options.batching:
            return np.ones(rows, np.bool_)
        masks = [prop.present(rows) for prop in properties if self._carried(prop) is Carried.ALONE]
        if item_sizes.max(initial=0) > limit:
            masks.append(item_sizes > limit)
        retry = [code for code, topic in enumerate(topics) if topic.startswith(RETRY_PREFIX)]
        if retry:
            masks.append(np.ones(rows, np.bool_) if codes is None else np.isin(codes, retry))
        return np.logical_or.reduce(masks) if masks else None


def _property(name: str, column: ByteColumn | None) -> list[Property]:
    return [] if column is None else [Property(name, column, column.valid)]
