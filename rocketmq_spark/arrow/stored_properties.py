"""Property strings of many messages -> names, values and rows of their entries, without a Python object per row.

Rule 1: the regular case only: every entry is name, 0x01, value, 0x02 (at the end of a row perhaps without the 0x02),
        nothing is empty, no name comes twice in a row, and all of it is UTF-8. Anything else is None, for the
        row-by-row way.

The text of all rows lies in one buffer. Its separators, found by one pass of numpy, are the borders of the entries, and
an Arrow ``take`` copies names and values out. Names are few, so they are told apart once and then known by a number.

Follows spec/remoting.md section 5; `rocketmq_spark.wire.records.decode_properties` is its oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.arrow.columns import ByteColumn, Ints, ListColumn, byte_column, byte_strings, to_arrow, to_numpy

_NAME_END: Final = 1
_VALUE_END: Final = 2
# So many different names in one batch are told apart, by the bits of a number.
_MOST_NAMES: Final = 32


@dataclass(frozen=True, slots=True)
class Properties:
    """The entries of all rows, in their order.

    Parameters
    ----------
    offsets : int array, shape (rows + 1,)
        Row k owns the entries ``offsets[k]`` up to ``offsets[k + 1]``.
    names : pyarrow.DictionaryArray of string
    values : pyarrow.StringArray
    """

    offsets: Ints
    names: pa.DictionaryArray
    values: pa.StringArray

    def value_of(self, name: str) -> pa.StringArray:
        """Return the value of one name in every row, null where it is not there."""
        places = np.full(len(self.offsets) - 1, -1, np.int64)
        known = self.names.dictionary.to_pylist()
        if name in known:
            entries = np.flatnonzero(to_numpy(self.names.indices) == known.index(name))
            places[np.searchsorted(self.offsets, entries, side="right") - 1] = entries
        return self.values.take(to_arrow(places, places >= 0))

    def as_maps(self, kind: pa.MapType) -> pa.MapArray:
        """Return all entries of every row."""
        names = self.names.dictionary_decode()
        entries = pa.StructArray.from_arrays([names, self.values], fields=[kind.key_field, kind.item_field])
        offsets = pa.py_buffer(self.offsets.astype(np.int32))
        return pa.Array.from_buffers(kind, len(self.offsets) - 1, [None, offsets], children=[entries])


def split_properties(texts: pa.BinaryArray) -> Properties | None:
    """Return the entries of the property strings of n rows; None if they are not regular.

    Parameters
    ----------
    texts : pyarrow.BinaryArray
        Without nulls.
    """
    column = byte_column(_closed(texts)) or ByteColumn(np.zeros(1, np.int32), np.empty(0, np.uint8))
    data = column.span
    borders = column.offsets - column.offsets[0]
    marks = np.flatnonzero(data <= _VALUE_END)
    name_ends, value_ends = marks[::2], marks[1::2]
    if len(marks) % 2 or (data[name_ends] != _NAME_END).any() or (data[value_ends] != _VALUE_END).any():
        return None
    name_starts = np.concatenate([[0], value_ends + 1])[:-1]
    if not ((name_starts < name_ends) & (name_ends + 1 < value_ends)).all():
        return None
    starts = borders[:-1][column.sizes > 0]
    # A row's text must not go on with the bytes of the one before: both would be read as one character.
    if (data[starts] & 0xC0 == 0x80).any():
        return None
    # Cells of the text: a name and its end, its value, and the value's end.
    cells = np.stack([name_starts, name_ends + 1, value_ends], axis=1).ravel()
    text = ByteColumn(np.append(cells, len(data)).astype(column.offsets.dtype), data).to_arrow()
    first = np.arange(0, len(cells), 3, dtype=np.int64)
    offsets = np.searchsorted(value_ends, borders)
    try:
        names = _coded(text.take(to_arrow(first)), offsets)
        values = text.take(to_arrow(first + 1)).cast(pa.string())
    except pa.ArrowInvalid:
        return None
    return None if names is None else Properties(offsets, names, values)


def _coded(names: pa.BinaryArray, offsets: Ints) -> pa.DictionaryArray | None:
    """Return names as numbers; None if one comes twice in a row, or there are too many to tell.

    Parameters
    ----------
    names : pyarrow.BinaryArray
        Each with what ends it, so that those of a row, back to back, can be those of no other row.
    offsets : int array, shape (rows + 1,)
    """
    column = byte_column(names)
    if column is not None and ListColumn(offsets, column).joined().same() is not None:
        # As most topics are: every row has the names of the first one.
        known = names[: int(offsets[1])].dictionary_encode()
        indices = np.tile(to_numpy(known.indices), len(offsets) - 1)
        repeats = len(known.dictionary) < len(known)
    else:
        known = names.dictionary_encode()
        indices = to_numpy(known.indices)
        repeats = len(known.dictionary) > _MOST_NAMES or _repeats(indices, offsets)
    if repeats:
        return None
    texts = byte_strings([name[:-1] for name in known.dictionary.to_pylist()]).to_arrow().cast(pa.string())
    return pa.DictionaryArray.from_arrays(to_arrow(indices), texts)


def _closed(texts: pa.BinaryArray) -> pa.Array:
    """Return the texts with a separator at the end of each that is not empty."""
    column = byte_column(texts)
    if column is None:
        return texts
    filled = column.sizes > 0
    closed = ~filled
    closed[filled] = column.data[column.offsets[1:][filled] - 1] == _VALUE_END
    if closed.all():
        return texts
    choice = byte_strings([b"", bytes([_VALUE_END])]).to_arrow().cast(pa.binary())
    return pc.binary_join_element_wise(texts, choice.take(to_arrow((~closed).astype(np.int8))), choice[0])


def _repeats(numbers: Ints, offsets: Ints) -> bool:
    """Return whether a number (of a name) comes twice in a row."""
    starts = offsets[:-1][offsets[1:] > offsets[:-1]]
    if not len(starts):
        return False
    bits = np.left_shift(np.int64(1), numbers.astype(np.int64))
    # The sum of the bits of a row is what they are together if, and only if, each of them comes once.
    return not np.array_equal(np.add.reduceat(bits, starts), np.bitwise_or.reduceat(bits, starts))
