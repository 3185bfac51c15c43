"""The rows of a record batch that no broker could store as they are, and the rule that each breaks.

Of several rules that a row breaks, the first checked counts, so counts by rule add up to the rows. No Python object is
made per row until it is needed, because a block may hold only invalid rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from rocketmq_spark.arrow.block import MessageBlock
from rocketmq_spark.arrow.columns import ByteColumn, Ints, Mask
from rocketmq_spark.arrow.validate import Rule, Violation
from rocketmq_spark.errors import InvalidRowError
from rocketmq_spark.model.names import is_blank

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
        cls, batch: pa.RecordBatch, block: MessageBlock, more: Sequence[Violation], partition_id: int, first_row: int
    ) -> InvalidRows | None:
        """Return the rows that break a rule of the block or of `more`; None if no row does."""
        broken = (*block.violations, *more)
        if not broken:
            return None
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


KeysRequired: TypeAlias = Callable[[Sequence[str]], Mapping[str, "bool | None"]]
"""Returns, by topic, whether its rows need a key; None if that is unknown."""

NO_KEY: Final = Rule(
    "keys is null or blank",
    "a compaction topic (cleanup.policy=COMPACTION) needs a key in every row",
    "fill the column keys, or write to another topic",
)

INNER_BATCH: Final = Rule(
    "batchType=inner to a compaction topic",
    "a compaction topic (cleanup.policy=COMPACTION) keeps no inner batches",
    "leave the option batchType out",
)

# The first two bytes of Java's white space outside ASCII: U+1680, U+2000 to U+2029, U+205F, U+3000.
_SPACES: Final = (0xE19A, 0xE280, 0xE281, 0xE380)


class KeyCheck:
    """Checks rows without a key against what their topics require.

    Parameters
    ----------
    keys_required : callable
        Called only for topics of which a block has a row without a key.
    inner_batches : bool, default False
        Compaction topics drop inner batches, with the keys of their rows: every row counts as one without a key.
    """

    def __init__(self, keys_required: KeysRequired, *, inner_batches: bool = False) -> None:
        self._keys_required = keys_required
        self._rule = INNER_BATCH if inner_batches else NO_KEY
        self._probed: set[str] = set()

    def __call__(self, block: MessageBlock) -> MessageBlock:
        """Return the block with a violation for each row that lacks a required key.

        If a topic's configuration is unknown, its first row without a key becomes a single message. The broker of a
        compaction topic rejects it, and the write fails.
        """
        keyless = rows_without_key(None if self._rule is INNER_BATCH else block.keys, block.rows)
        bad = block.bad_rows()
        if bad is not None:
            keyless &= ~bad
        if not keyless.any():
            return block
        if block.topic_codes is None:
            first_rows = {0: int(keyless.argmax())}
        else:
            rows = np.flatnonzero(keyless & (block.topic_codes >= 0))[::-1]
            firsts = np.full(len(block.topics), -1)
            # Of rows with one code the last to be assigned, which is the first row, stays.
            firsts[block.topic_codes[rows]] = rows
            first_rows = {code: first for code, first in enumerate(firsts.tolist()) if first >= 0}
        required = self._keys_required([block.topics[code] for code in first_rows])
        violations, single = list(block.violations), block.single
        for code, first in first_rows.items():
            topic = block.topics[code]
            if required.get(topic):
                of_topic = keyless if block.topic_codes is None else keyless & (block.topic_codes == code)
                violations.append(Violation(self._rule, np.flatnonzero(of_topic)))
            elif required.get(topic) is None and topic not in self._probed:
                self._probed.add(topic)
                single = np.zeros(block.rows, np.bool_) if single is None else single.copy()
                single[first] = True
        return replace(block, violations=tuple(violations), single=single)


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
