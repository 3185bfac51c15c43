"""The rows of a record batch that no broker could store as they are, and the rule that each breaks.

Of several rules that a row breaks, the first checked counts, so counts by rule add up to the rows. No Python object is
made per row until it is needed, because a block may hold only invalid rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from rocketmq_spark.arrow.block import MessageBlock
from rocketmq_spark.arrow.columns import Ints, Mask
from rocketmq_spark.arrow.validate import Rule, Violation
from rocketmq_spark.errors import InvalidRowError

# How much of a topic, of keys or of a value an error shows, characters.
_SHOWN: Final = 100


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
        counts: dict[str, int] = {}
        for violation, count in zip(self.broken, np.bincount(self.codes, minlength=len(self.broken)), strict=True):
            if count:
                counts[violation.rule.broken] = counts.get(violation.rule.broken, 0) + int(count)
        return counts

    def errors(self) -> Iterator[InvalidRowError]:
        """Yield an error for each row: its place, topic, keys, the rule, and what to do."""
        for place, row in enumerate(self.rows.tolist()):
            violation, rule = self.broken[int(self.codes[place])], self.rule(place)
            keys = None if self.block.keys is None else self.block.keys.text(row)
            found = "" if violation.found is None else f" ({str(violation.found(row))[:_SHOWN]})"
            number = self.first_row + row
            yield InvalidRowError(
                f"partition {self.partition_id}, row {number} (topic {(self.block.topic(row) or 'none')[:_SHOWN]}, "
                f"keys {(keys or 'none')[:_SHOWN]}): {rule.broken}{found}; {rule.allowed}; {rule.todo}",
                row=number,
                rule=rule.broken,
            )
