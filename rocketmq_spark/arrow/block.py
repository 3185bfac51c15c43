"""RecordBatch -> MessageBlock: which column is what, normalised and checked; no copies of payloads.

Rule 1: after this module nobody asks for a column's Arrow type, nor whether a column exists.
Rule 2: a block knows every rule that its rows break, and raises nothing: what becomes of bad rows is the caller's
        choice.
Rule 3: properties of a message come in one order: KEYS, TAGS, WAIT (only ``false``), __SHARDINGKEY, DELAY,
        TIMER_DELAY_MS, TIMER_DELIVER_MS, SPARK_ROW_ID, UNIQ_KEY, then the user's own in the order of the map.

An empty string in keys or shardingKey is none, as in ``Message``'s constructor; in tags it is an error, because it
could mean the default as well as none. Columns follow design.md section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rocketmq_spark.arrow.columns import (
    ByteColumn,
    Ints,
    ListColumn,
    Mask,
    byte_column,
    coded_column,
    false_rows,
    filled,
    int_column,
    list_column,
    to_arrow,
)
from rocketmq_spark.arrow.properties import (
    Property,
    join_keys,
    property_fields,
    property_strings,
    reserved_names,
    user_properties,
)
from rocketmq_spark.arrow.row_id import RowIds, content_hashes
from rocketmq_spark.arrow.schema import DELAY_COLUMNS, READ_COLUMNS, check_columns, check_schema
from rocketmq_spark.arrow.settings import BatchSettings
from rocketmq_spark.arrow.validate import (
    TOPIC_NULL,
    Rule,
    Violation,
    check_body,
    check_key_items,
    check_range,
    check_text,
    topic_rule,
    violations,
)
from rocketmq_spark.arrow.validate_grpc import check_for_grpc
from rocketmq_spark.message_const import SHARDING_KEY
from rocketmq_spark.wire.records import ITEM_OVERHEAD, MAX_PROPERTIES
from rocketmq_spark.wire.row_hash import HASHED, ROW_ID

__all__ = ["BatchSettings", "MessageBlock", "Property", "check_schema"]

UNIQ_KEY: Final = b"UNIQ_KEY"

# The broker adds up to about 150 bytes to a single message's properties, and more to a delayed one's, before it
# compares them with 32,767 (spec/remoting.md 16: 32,600 passed, 32,700 did not).
MAX_SINGLE_PROPERTIES: Final = 32_000

_INT32_MIN: Final = -(2**31)
_INT32_MAX: Final = 2**31 - 1

# The properties that the hash in SPARK_ROW_ID covers, beside the user's own.
_HASHED: Final = frozenset(name.encode() for name in HASHED)

# Java refuses these topics in a batch only, the broker answers 13.
_RETRY_PREFIX: Final = "%RETRY%"

# The property that each delay column becomes, and its largest value (None: the broker's own limit holds).
_DELAYS: Final[Mapping[str, tuple[bytes, int | None]]] = {
    "delayTimeLevel": (b"DELAY", 18),
    "delayMs": (b"TIMER_DELAY_MS", None),
    "deliverTime": (b"TIMER_DELIVER_MS", None),
}


@dataclass(frozen=True, slots=True)
class MessageBlock:
    """The messages of one RecordBatch, column by column.

    Parameters
    ----------
    rows : int
    topics : list of str
    topic_codes : int array or None
        Which of `topics` each row has, -1 where null; None: every row has the only one.
    body : ByteColumn
    keys, sharding_key : ByteColumn or None
    properties : tuple of Property
        System properties but UNIQ_KEY, in their order.
    user : ByteColumn or None
        The user's properties as property strings.
    user_fields : ByteColumn or None
        The user's properties as fields of a gRPC message; None without any, and for other protocols.
    flags : int64 array or None
        None: all 0.
    no_wait : bool array or None
        Rows with ``waitStoreMsgOK`` false; None: none.
    queue_ids : tuple of int64 array and (bool array or None), or None
        Queue ids and which rows have one; only with ``queueSelector=column``.
    broker_names : tuple of int array and list of str, or None
        As `topic_codes` and `topics`; only with ``queueSelector=column``.
    property_sizes : int array
        Bytes of each row's whole property string.
    item_sizes : int64 array
        Bytes of each row as an item of a batch.
    single : bool array or None
        Rows that go as single messages; None: none.
    violations : tuple of Violation
    """

    rows: int
    topics: list[str]
    topic_codes: Ints | None
    body: ByteColumn
    keys: ByteColumn | None
    sharding_key: ByteColumn | None
    properties: tuple[Property, ...]
    user: ByteColumn | None
    user_fields: ByteColumn | None
    flags: npt.NDArray[np.int64] | None
    no_wait: Mask | None
    queue_ids: tuple[npt.NDArray[np.int64], Mask | None] | None
    broker_names: tuple[Ints, list[str]] | None
    property_sizes: Ints
    item_sizes: npt.NDArray[np.int64]
    single: Mask | None
    violations: tuple[Violation, ...]

    @classmethod
    def of(
        cls, batch: pa.RecordBatch, settings: BatchSettings, row_ids: RowIds | None = None, first_row: int = 0
    ) -> MessageBlock:
        """Normalise and check one batch, whose schema has passed `check_schema`.

        Parameters
        ----------
        batch : pyarrow.RecordBatch
        settings : BatchSettings
        row_ids : RowIds or None, default None
            Gives each row the property SPARK_ROW_ID.
        first_row : int, default 0
            The number, within the partition, of the batch's first row.
        """
        return _Reader(batch, settings, row_ids, first_row).block()

    def topic(self, row: int) -> str | None:
        """Return the topic of one row, None where it is null."""
        code = 0 if self.topic_codes is None else int(self.topic_codes[row])
        return None if code < 0 else self.topics[code]

    def bad_rows(self) -> Mask | None:
        """Return which rows break a rule; None: none does."""
        if not self.violations:
            return None
        bad = np.zeros(self.rows, np.bool_)
        for violation in self.violations:
            bad[violation.rows] = True
        return bad


class _Reader:
    """Reads the columns of one batch, each by its own method, and gathers what is wrong with them."""

    def __init__(self, batch: pa.RecordBatch, settings: BatchSettings, row_ids: RowIds | None, first_row: int) -> None:
        check_columns(batch.schema.names)
        self._columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        self._rows = batch.num_rows
        self._settings = settings
        self._row_ids = row_ids
        self._first_row = first_row
        self._violations: list[Violation] = []

    def block(self) -> MessageBlock:
        settings, rows = self._settings, self._rows
        by_column = settings.queue_selector == "column"
        body = byte_column(self._columns.get("body", self._columns.get("value")))
        self._violations += check_body(body, rows, settings.max_message_size)
        if body is None:
            body = ByteColumn(np.zeros(rows + 1, np.int32), np.empty(0, np.uint8), np.zeros(rows, np.bool_))
        topics, topic_codes = self._topics()
        keys = self._keys()
        tags = self._tags()
        # A proxy has every message stored as safely as its broker stores any.
        no_wait = None if settings.over_grpc else false_rows(self._columns.get("waitStoreMsgOK"))
        sharding_key = self._sharding_key()
        delays, delayed = self._delays()
        flags = self._flags()
        properties: list[Property] = [] if keys is None else [Property(b"KEYS", keys, keys.valid)]
        properties += tags
        if no_wait is not None:
            properties.append(Property(b"WAIT", None, no_wait, b"false"))
        if sharding_key is not None:
            properties.append(Property(SHARDING_KEY.encode(), sharding_key, sharding_key.valid))
        properties += delays
        entries = self._user_properties()
        strings = None if entries is None else property_strings(entries)
        user = None if strings is None else strings.joined()
        if self._row_ids is not None and rows:
            properties.append(self._row_id(self._row_ids, topics, topic_codes, properties, strings, body, flags))
        property_sizes: npt.NDArray[np.int64] = np.full(rows, len(UNIQ_KEY) + settings.unique_id_length + 2, np.int64)
        for one in properties:
            property_sizes += one.sizes(rows)
        if user is not None:
            property_sizes += user.sizes
        item_sizes: npt.NDArray[np.int64] = property_sizes + body.sizes + ITEM_OVERHEAD
        single = self._single(delayed, item_sizes, topics, topic_codes)
        if settings.over_grpc and sharding_key is not None:
            # A message group has an order: its messages go one by one.
            of_groups = np.ones(rows, np.bool_) if sharding_key.valid is None else sharding_key.valid
            single = of_groups if single is None else single | of_groups
        self._check_property_sizes(property_sizes, single)
        if settings.over_grpc:
            self._violations += check_for_grpc(rows, properties, entries, flags)
        return MessageBlock(
            rows=rows,
            topics=topics,
            topic_codes=topic_codes,
            body=body,
            keys=keys,
            sharding_key=sharding_key,
            properties=tuple(properties),
            user=user,
            user_fields=property_fields(entries).joined() if settings.over_grpc and entries is not None else None,
            flags=flags,
            no_wait=no_wait,
            queue_ids=self._queue_ids() if by_column else None,
            broker_names=coded_column(self._columns.get("brokerName")) if by_column else None,
            property_sizes=property_sizes,
            item_sizes=item_sizes,
            single=single,
            violations=tuple(self._violations),
        )

    def _topics(self) -> tuple[list[str], Ints | None]:
        if self._settings.topic is not None:
            return [self._settings.topic], None
        coded = coded_column(self._columns.get("topic"))
        if coded is None:
            self._violations += violations(TOPIC_NULL, np.arange(self._rows))
            return [], np.full(self._rows, -1)
        codes, topics = coded
        self._violations += violations(TOPIC_NULL, np.flatnonzero(codes < 0))
        for code, topic in enumerate(topics):
            rule = topic_rule(topic)
            if rule is not None:
                self._violations.append(Violation(rule, np.flatnonzero(codes == code)))
        return topics, codes

    def _keys(self) -> ByteColumn | None:
        array = self._columns.get("keys")
        if array is not None and (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
            items = list_column(array)
            if items is None:
                return None
            self._violations += check_key_items(items)
            return join_keys(items).without_empty()
        keys = byte_column(array)
        if keys is None:
            return None
        self._violations += check_text("keys", keys)
        return keys.without_empty()

    def _tags(self) -> list[Property]:
        array = self._columns.get("tags")
        default = self._settings.tags
        tags = byte_column(array)
        if tags is not None:
            self._violations += check_text("tags", tags, blank=True, pipe=True)
        if not default:
            if tags is None:
                return []
            # Many a table has one tag: a literal costs its rows nothing, a column a tenth of their encoding.
            same = None if self._settings.over_grpc else tags.same()
            return [Property(b"TAGS", tags, tags.valid) if same is None else Property(b"TAGS", None, None, same)]
        if tags is None:
            return [Property(b"TAGS", None, None, default.encode())]
        if tags.valid is not None:
            tags = byte_column(filled(tags.to_arrow(), default.encode()))
        return [Property(b"TAGS", tags, None)]

    def _sharding_key(self) -> ByteColumn | None:
        column = byte_column(self._columns.get("shardingKey"))
        if column is not None:
            self._violations += check_text("shardingKey", column)
            column = column.without_empty()
        if self._settings.ordered:
            there = np.zeros(self._rows, np.bool_) if column is None else column.valid
            rule = Rule("shardingKey is null or empty", "ordered=true needs one in every row", "fill the column")
            self._violations += violations(rule, np.flatnonzero([] if there is None else ~there))
        return column

    def _delays(self) -> tuple[list[Property], Mask | None]:
        properties: list[Property] = []
        delayed = np.zeros(self._rows, np.bool_)
        for name in DELAY_COLUMNS:
            column = int_column(self._columns.get(name))
            if column is None:
                continue
            values, valid = column
            property_name, high = _DELAYS[name]
            self._violations += check_range(name, values, valid, 1, high, "use null for no delay")
            there = np.ones(self._rows, np.bool_) if valid is None else valid
            rule = Rule(
                f"{name} is set beside another delay",
                f"one of {', '.join(DELAY_COLUMNS)} is allowed",
                "null the others",
            )
            self._violations += violations(rule, np.flatnonzero(delayed & there))
            delayed |= there
            text = byte_column(to_arrow(values, valid).cast(pa.string()))
            properties.append(Property(property_name, text, valid))
        return properties, delayed if properties else None

    def _row_id(
        self,
        ids: RowIds,
        topics: list[str],
        topic_codes: Ints | None,
        properties: Sequence[Property],
        user: ListColumn | None,
        body: ByteColumn,
        flags: npt.NDArray[np.int64] | None,
    ) -> Property:
        if ids.columns is not None:
            return ids.of_columns(self._columns, self._rows)
        hashed = [one for one in properties if one.name in _HASHED]
        # Only those that are set, so that ids are the same with a column of zeros and without one.
        texts = None if flags is None else byte_column(to_arrow(flags, flags != 0).cast(pa.string()))
        hashes = content_hashes(topics, topic_codes, hashed, user, body, texts, ids.workspace)
        return ids.of_rows(hashes, self._first_row)

    def _user_properties(self) -> ListColumn | None:
        entries = list_column(self._columns.get("properties"))
        if entries is None:
            return None
        reserved = reserved_names(sharding_key="shardingKey" in self._columns, row_id=self._row_ids is not None)
        dropped = reserved if any(name in self._columns for name in READ_COLUMNS) else frozenset()
        if self._row_ids is None and not self._settings.keep_row_id:
            dropped |= {ROW_ID}
        user, found = user_properties(entries, reserved=reserved, dropped=dropped)
        self._violations += found
        return user

    def _flags(self) -> npt.NDArray[np.int64] | None:
        column = int_column(self._columns.get("flag"))
        if column is None:
            return None
        self._violations += check_range("flag", *column, _INT32_MIN, _INT32_MAX, "it must fit 32 bits")
        return column[0]

    def _queue_ids(self) -> tuple[npt.NDArray[np.int64], Mask | None] | None:
        column = int_column(self._columns.get("queueId"))
        if column is not None:
            self._violations += check_range("queueId", *column, 0, _INT32_MAX, "use null for any queue")
        return column

    def _single(self, delayed: Mask | None, item_sizes: Ints, topics: list[str], codes: Ints | None) -> Mask | None:
        """Return which rows can't share a batch: delayed ones, too large ones, and those for a retry topic."""
        if not self._settings.batching:
            return np.ones(self._rows, np.bool_)
        single = delayed
        limit = self._settings.item_limit
        if item_sizes.max(initial=0) > limit:
            single = (item_sizes > limit) | (False if single is None else single)
        retry = [code for code, topic in enumerate(topics) if topic.startswith(_RETRY_PREFIX)]
        if retry:
            of_retry = np.ones(self._rows, np.bool_) if codes is None else np.isin(codes, retry)
            single = of_retry | (False if single is None else single)
        return single

    def _check_property_sizes(self, sizes: Ints, single: Mask | None) -> None:
        if sizes.max(initial=0) <= MAX_SINGLE_PROPERTIES:
            return
        limits = np.where(np.False_ if single is None else single, MAX_SINGLE_PROPERTIES, MAX_PROPERTIES)
        rule = Rule(
            "properties are too long",
            f"keys, tags and properties have {MAX_PROPERTIES} bytes together in a batch, {MAX_SINGLE_PROPERTIES} in a "
            "single message",
            "move what is long into the body",
        )
        self._violations += (
            Violation(one.rule, one.rows, lambda row: f"{sizes[row]} bytes")
            for one in violations(rule, np.flatnonzero(sizes > limits))
        )
