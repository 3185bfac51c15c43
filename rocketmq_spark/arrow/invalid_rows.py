"""The invalid rows of a record batch: the rule that each breaks first, counts by rule, and errors.

The counts of all rules add up to the invalid rows. Errors are made row by row, because invalid rows are usually rare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from rocketmq_spark.arrow.block import read_block
from rocketmq_spark.arrow.columns import Ints, Mask, byte_strings
from rocketmq_spark.arrow.model import MessageBlock, Property, Rule, Violation
from rocketmq_spark.arrow.schema import COLUMNS, NUMBER_COLUMNS
from rocketmq_spark.errors import InvalidRowError
from rocketmq_spark.model.hashes import ROW_ID
from rocketmq_spark.model.message import EncodedBatch
from rocketmq_spark.model.properties import UNIQ_KEY, WAIT
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.compression import decompress
from rocketmq_spark.protocol.remoting.records import messages_in

# How much of a topic, of keys or of a value an error shows, characters.
_SHOWN: Final = 100

_TEXT: Final = pa.string()
_UNCARRIED: Final = ("flag", "queueId", "brokerName", "waitStoreMsgOK")


@dataclass(frozen=True, slots=True)
class InvalidRows:
    """The invalid rows of one record batch."""

    batch: pa.RecordBatch  # The whole batch, including good rows
    block: MessageBlock
    rows: Ints  # Numbers of the invalid rows, ascending; at least one
    broken: tuple[Violation, ...]
    codes: Ints  # For each of `rows`, which of `broken` each row breaks first
    partition_id: int
    first_row: int  # The number, within the partition, of the batch's first row

    @classmethod
    def of(
        cls,
        batch: pa.RecordBatch,
        block: MessageBlock,
        broken: tuple[Violation, ...],
        partition_id: int,
        first_row: int,
    ) -> InvalidRows:
        """Return the rows that break one of the rules `broken`, at least one."""
        codes = np.full(block.rows, -1)
        for code in reversed(range(len(broken))):
            codes[broken[code].rows] = code
        rows = np.flatnonzero(codes >= 0)
        return cls(batch, block, rows, broken, codes[rows], partition_id, first_row)

    @classmethod
    def encoded(cls, message: EncodedBatch, rule: Rule, options: SinkOptions, partition_id: int) -> InvalidRows:
        """Return the row of a single message as an invalid row that breaks `rule`."""
        batch, row_id = _row_of(message)
        block = read_block(batch, options)
        # With ``keepRowId`` it is the id of another message.
        if row_id is not None and not options.keep_row_id:
            kept = Property(ROW_ID, byte_strings([row_id.encode()]), None)
            block = replace(block, properties=(*block.properties, kept))
        return cls.of(batch, block, (Violation(rule, np.arange(1)),), partition_id, message.row)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def mask(self) -> Mask:
        """Which rows of the batch are invalid."""
        mask = np.zeros(self.block.rows, np.bool_)
        mask[self.rows] = True
        return mask

    def rule(self, place: int) -> Rule:
        """Return the rule that the row at `place` of `rows` breaks."""
        return self.broken[int(self.codes[place])].rule

    def by_rule(self) -> dict[str, int]:
        """Return how many rows break each rule, by the rule's text, which holds no data of the rows."""
        counts: Counter[str] = Counter()
        for violation, count in zip(self.broken, np.bincount(self.codes, minlength=len(self.broken)), strict=True):
            counts[violation.rule.broken] += int(count)
        return +counts

    def errors(self) -> Iterator[InvalidRowError]:
        """Yield an error for each row: its place, topic, keys, the rule, and what to do."""
        for place, row in enumerate(self.rows.tolist()):
            violation, rule = self.broken[int(self.codes[place])], self.rule(place)
            keys = None if self.block.keys is None else self.block.keys.text(row)
            value = "" if violation.found is None else f" ({str(violation.found(row))[:_SHOWN]})"
            number = self.first_row + row
            yield InvalidRowError(
                f"partition {self.partition_id}, row {number} (topic {(self.block.topic(row) or 'none')[:_SHOWN]}, "
                f"keys {(keys or 'none')[:_SHOWN]}): {rule.broken}{value}; {rule.allowed}; {rule.todo}",
                row=number,
                rule=rule.broken,
            )


def uncarried_columns(rows: pa.RecordBatch) -> pa.RecordBatch | None:
    """Return the columns whose values a message of some protocol or some option does not have; None: there are none."""
    names = [name for name in _UNCARRIED if name in rows.schema.names]
    # pyarrow takes no rows of views.
    columns = [
        rows[name].cast(pa.large_binary()) if pa.types.is_string_view(rows[name].type) else rows[name] for name in names
    ]
    return pa.RecordBatch.from_arrays(columns, names) if names else None


def _row_of(message: EncodedBatch) -> tuple[pa.RecordBatch, str | None]:
    """Return the row that a single message was made of, and its row id."""
    (sent,) = messages_in(message)
    properties = dict(sent.properties)
    row_id = properties.pop(ROW_ID, None)
    for name in (UNIQ_KEY, WAIT):
        properties.pop(name, None)
    types: dict[str, pa.DataType] = {"body": pa.large_binary(), "topic": _TEXT}
    row: dict[str, Any] = {"body": decompress(sent.body, message.sys_flag), "topic": message.topic}
    for name, column in COLUMNS.items():
        if column.makes in properties:
            value = properties.pop(column.makes)
            types[name] = pa.int64() if name in NUMBER_COLUMNS else _TEXT
            row[name] = int(value) if name in NUMBER_COLUMNS else value
    if properties:
        row["properties"], types["properties"] = list(properties.items()), pa.map_(_TEXT, _TEXT)
    batch, rest = pa.RecordBatch.from_pylist([row], pa.schema(types)), message.uncarried
    if rest is not None:
        batch = pa.RecordBatch.from_arrays([*batch.columns, *rest.columns], [*types, *rest.schema.names])
    return batch, row_id
