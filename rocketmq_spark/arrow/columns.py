"""Converts Arrow columns to numpy arrays and back: offsets into bytes, or whole numbers, each with a mask of nulls.

A column of strings or binaries shares its memory, unless it is a dictionary or a view. This module avoids ``pa.array``,
``pa.scalar`` (also inside ``fill_null``), ``Array.to_numpy`` and ``DataType.to_pandas_dtype``. They import pandas if it
is installed, which costs each Spark worker half a second and 40 MB. Without pandas, ``to_pandas_dtype`` fails before
pyarrow 26.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints: TypeAlias = "npt.NDArray[np.integer[Any]]"
Mask: TypeAlias = "npt.NDArray[np.bool_]"
Octets: TypeAlias = "npt.NDArray[np.uint8]"

_STRING: Final = pa.string()
# Their milliseconds fit 64 bits.
_MOST_SECONDS: Final = (2**63 - 1) // 1000
_PER_MS: Final = {"ms": 1, "us": 1_000, "ns": 1_000_000}


@dataclass(frozen=True, slots=True)
class ByteColumn:
    """Byte strings, one per row."""

    offsets: Ints  # Row k is ``data[offsets[k]:offsets[k + 1]]``. The first is not 0 where the Arrow array was a slice
    data: Octets
    valid: Mask | None = None  # False where the row is null (`data` may still hold bytes for it). None: no row is null
    sizes: Ints = field(init=False)  # Bytes of each row; 0 where it is null

    def __post_init__(self) -> None:
        # Not np.diff: on the few thousand rows of a chunk its argument checks cost as much as the subtraction.
        sizes = self.offsets[1:] - self.offsets[:-1]
        object.__setattr__(self, "sizes", sizes if self.valid is None else sizes * self.valid)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def span(self) -> Octets:
        """The bytes of all rows, including those under null rows."""
        return self.data[int(self.offsets[0]) : int(self.offsets[-1])]

    def value(self, row: int) -> bytes | None:
        """Return a copy of one row's bytes, None where it is null."""
        if self.valid is not None and not self.valid[row]:
            return None
        return self.data[int(self.offsets[row]) : int(self.offsets[row + 1])].tobytes()

    def text(self, row: int, errors: str = "backslashreplace") -> str | None:
        """Return one row as text, None where it is null."""
        value = self.value(row)
        return None if value is None else value.decode("utf-8", errors)

    def not_null(self, rows: Ints) -> Ints:
        """Return the `rows` that are not null."""
        return rows if self.valid is None else rows[self.valid[rows]]

    def slice(self, start: int, stop: int) -> ByteColumn:
        """Return rows `start` up to `stop`, without a copy."""
        valid = None if self.valid is None else self.valid[start:stop]
        return ByteColumn(self.offsets[start : stop + 1], self.data, valid)

    def without_empty(self) -> ByteColumn | None:
        """Return the column with empty strings as nulls; None if all rows are null then."""
        not_empty = self.sizes > 0
        if not_empty.all():
            return self
        return ByteColumn(self.offsets, self.data, not_empty) if not_empty.any() else None

    def common_value(self) -> bytes | None:
        """Return the value that all rows have; None if they differ, one is null or empty, or there is no row."""
        if self.valid is not None or not len(self):
            return None
        width = int(self.sizes[0])
        # With one size for all, rows are equal if each byte equals the byte one row later.
        if not width or (self.sizes != width).any() or (self.span[width:] != self.span[:-width]).any():
            return None
        return self.span[:width].tobytes()

    def to_arrow(self) -> pa.Array:
        """Return the column as an Arrow array of binary or large_binary, without a copy of the bytes."""
        large = self.offsets.dtype.itemsize == 8
        buffers = [_packed(self.valid), pa.py_buffer(np.ascontiguousarray(self.offsets)), pa.py_buffer(self.data)]
        return pa.Array.from_buffers(pa.large_binary() if large else pa.binary(), len(self), buffers)


@dataclass(frozen=True, slots=True)
class ListColumn:
    """A list of byte strings per row, or with `names` a map; a null row has no entries."""

    offsets: Ints  # Row k owns the entries ``offsets[k]`` up to ``offsets[k + 1]``; the first is 0
    values: ByteColumn  # The entries of all rows
    names: ByteColumn | None = None  # The keys of a map's entries

    @property
    def counts(self) -> Ints:
        """How many entries each row has."""
        return self.offsets[1:] - self.offsets[:-1]

    def rows_of(self, entries: Ints) -> Ints:
        """Return the row of each of `entries`."""
        return np.searchsorted(self.offsets, entries, side="right") - 1

    def joined(self) -> ByteColumn:
        """Return each row's entries as one string, without a copy; they must lie back to back, without nulls."""
        return ByteColumn(self.values.offsets[self.offsets], self.values.data)

    def filter(self, keep: Mask) -> ListColumn:
        """Return a copy with only the entries for which `keep` is True."""
        before = np.concatenate([[0], np.cumsum(keep)])
        mask = to_arrow(keep)
        names = None if self.names is None else byte_column_or_nulls(self.names.to_arrow().filter(mask))
        return ListColumn(before[self.offsets], byte_column_or_nulls(self.values.to_arrow().filter(mask)), names)


def byte_strings(values: Sequence[bytes]) -> ByteColumn:
    """Return a few byte strings as a column."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    return ByteColumn(offsets, np.frombuffer(b"".join(values), np.uint8))


def text_array(texts: Iterable[str], arrow_type: pa.DataType = _STRING) -> pa.Array:
    """Return a few texts as an Arrow array."""
    return byte_strings([text.encode() for text in texts]).to_arrow().cast(arrow_type)


def to_arrow(values: Ints | Mask, valid: Mask | None = None) -> pa.Array:
    """Return numbers as an Arrow array that shares their memory, or a copy of a mask; `valid` marks non-null rows."""
    data = _packed(values) if values.dtype == np.bool_ else pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [_packed(valid), data])


def to_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """Return an Arrow array of whole numbers or booleans without nulls as a numpy array; numbers share their memory."""
    if pa.types.is_boolean(array.type):
        return to_numpy(array.cast(pa.uint8())).view(np.bool_)
    dtype = np.dtype(str(array.type))
    return np.frombuffer(array.buffers()[1] or b"", dtype, count=len(array), offset=array.offset * dtype.itemsize)


def filled(array: pa.Array, value: bytes | int) -> pa.Array:
    """Return an array of byte strings, whole numbers or booleans with `value` in place of its nulls."""
    return array.fill_null(_scalar(value, array.type)) if array.null_count else array


def _scalar(value: bytes | int, arrow_type: pa.DataType) -> pa.Scalar:
    # pa.scalar imports pandas.
    array = byte_strings([value]).to_arrow() if isinstance(value, bytes) else to_arrow(np.array([value]))
    return array.cast(arrow_type)[0]


def _packed(mask: Ints | Mask | None) -> pa.Buffer | None:
    return None if mask is None else pa.py_buffer(np.packbits(mask, bitorder="little"))


def valid_mask(array: pa.Array) -> Mask | None:
    """Return which rows of `array` are not null; None: all."""
    return to_numpy(array.is_valid()) if array.null_count else None


def _offsets(array: pa.Array, dtype: type[np.int32] | type[np.int64]) -> Ints:
    if len(array) == 0:
        return np.zeros(1, dtype)
    start = array.offset * np.dtype(dtype).itemsize
    offsets: Ints = np.frombuffer(array.buffers()[1], dtype, count=len(array) + 1, offset=start)
    return offsets


def without_dictionary(array: pa.Array) -> pa.Array:
    """Return `array` with the values in place of a dictionary and its indices."""
    if not pa.types.is_dictionary(array.type):
        return array
    if _has_views(array.type.value_type):
        # pyarrow decodes no dictionary of views.
        array = pa.DictionaryArray.from_arrays(array.indices, array.dictionary.cast(pa.large_binary()))
    return array.dictionary_decode()


def _has_views(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(arrow_type) or pa.types.is_binary_view(arrow_type))


def filtered(array: pa.Array, keep: pa.Array) -> pa.Array:
    """Return the rows of `array` for which `keep` is true. Views become large strings: pyarrow filters no views."""
    plain = _without_views(array.type)
    return (array if plain == array.type else array.cast(plain)).filter(keep)


def _without_views(arrow_type: pa.DataType) -> pa.DataType:
    """Return the type of a column of a write with large strings and binaries in place of views."""
    if _has_views(arrow_type):
        return pa.large_string() if pa.types.is_string_view(arrow_type) else pa.large_binary()
    if pa.types.is_map(arrow_type):
        return pa.map_(_without_views(arrow_type.key_type), _without_views(arrow_type.item_type))
    if pa.types.is_list(arrow_type):
        return pa.list_(_without_views(arrow_type.value_type))
    if pa.types.is_large_list(arrow_type):
        return pa.large_list(_without_views(arrow_type.value_type))
    return arrow_type


def _plain(array: pa.Array | None) -> pa.Array | None:
    """Return `array` without a dictionary and without views; None if every row is null."""
    if array is None or array.null_count == len(array):
        return None
    array = without_dictionary(array)
    if _has_views(array.type):
        array = array.cast(pa.large_binary())
    # Once more: a dictionary's own null values count as nulls only now.
    return None if array.null_count == len(array) else array


def byte_column(array: pa.Array | None) -> ByteColumn | None:
    """Return an array of strings or binaries, of any layout, as bytes; None if every row is null."""
    array = _plain(array)
    if array is None:
        return None
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    offsets = _offsets(array, np.int64 if large else np.int32)
    raw = array.buffers()[2]
    data = np.empty(0, np.uint8) if raw is None else np.frombuffer(raw, np.uint8)
    return ByteColumn(offsets, data, valid_mask(array))


def byte_column_or_nulls(array: pa.Array) -> ByteColumn:
    """Return an array of strings or binaries as bytes, also if every row is null."""
    return byte_column(array) or null_bytes(len(array))


def null_bytes(rows: int) -> ByteColumn:
    """Return a column of nulls."""
    return ByteColumn(np.zeros(rows + 1, np.int32), np.empty(0, np.uint8), np.zeros(rows, np.bool_))


def decimals(values: Ints, valid: Mask | None = None) -> ByteColumn | None:
    """Return numbers as decimal texts, null where `valid` is False; None if every row is null."""
    return byte_column(to_arrow(values, valid).cast(pa.string()))


def coded_column(array: pa.Array | None) -> tuple[Ints, list[str]] | None:
    """Return a text array as (a number for each row, the text of each number); None if every row is null.

    A null row has the number -1. Each distinct value becomes a Python string, so a column must have few of them.
    """
    array = _plain(array)
    if array is None:
        return None
    encoded = array.dictionary_encode()
    texts = [value.decode("utf-8", "replace") for value in encoded.dictionary.cast(pa.large_binary()).to_pylist()]
    return to_numpy(filled(encoded.indices, -1)), texts


def distinct_texts(array: pa.Array) -> set[str]:
    """Return the different values of a text array, "" for null; bad UTF-8 becomes U+FFFD, as in `coded_column`."""
    column = byte_column_or_nulls(array.unique())
    return {column.text(row, "replace") or "" for row in range(len(column))}


def list_column(array: pa.Array | None) -> ListColumn | None:
    """Return a list, large_list or map array of byte strings as entries; None if no row has any."""
    if array is None or array.null_count == len(array):
        return None
    offsets = _offsets(array, np.int64 if pa.types.is_large_list(array.type) else np.int32)
    first, last = int(offsets[0]), int(offsets[-1])
    if first == last:
        return None
    # `keys`, `items` and `values` are the whole child, whatever slice of its parent the array is.
    is_map = pa.types.is_map(array.type)
    names = byte_column_or_nulls(array.keys[first:last]) if is_map else None
    values = byte_column_or_nulls((array.items if is_map else array.values)[first:last])
    column = ListColumn(offsets - first, values, names)
    valid = valid_mask(array)
    if valid is None:
        return column
    keep = np.repeat(valid, column.counts)
    return column if keep.all() else column.filter(keep)


def int_column(array: pa.Array | None) -> tuple[npt.NDArray[np.int64], Mask | None] | None:
    """Return an integer or timestamp array as (values, which are not null); None if all are null.

    A timestamp becomes milliseconds since the epoch, rounded down. Unsigned values beyond 63 bits become the largest
    signed one, which is out of bounds in every column. The value of a null row is 0.
    """
    array = _plain(array)
    if array is None:
        return None
    valid = valid_mask(array)
    unit = array.type.unit if pa.types.is_timestamp(array.type) else "ms"
    if pa.types.is_uint64(array.type):
        array = pc.min_element_wise(array, _scalar(2**63 - 1, array.type), skip_nulls=False)
    values = to_numpy(filled(array.cast(pa.int64()), 0))
    if unit == "s":
        return np.clip(values, -_MOST_SECONDS, _MOST_SECONDS) * 1000, valid
    return values // _PER_MS[unit], valid


def rows_with_repeats(numbers: Ints, offsets: Ints) -> Ints:
    """Return the rows in which a number (0 to 40) occurs twice; row k has ``numbers[offsets[k]:offsets[k + 1]]``."""
    filled_rows = np.flatnonzero(offsets[1:] > offsets[:-1])
    if not len(filled_rows):
        return filled_rows
    starts = offsets[:-1][filled_rows]
    bits = np.left_shift(np.int64(1), numbers, dtype=np.int64)
    # The sum of a row's bits equals their union exactly if none occurs twice.
    repeats: Mask = np.add.reduceat(bits, starts) != np.bitwise_or.reduceat(bits, starts)
    return filled_rows[repeats]


def false_rows(array: pa.Array | None) -> Mask | None:
    """Return which rows of a boolean array are False; None if none is."""
    if array is None or pa.types.is_null(array.type):
        return None
    mask = ~to_numpy(filled(array, True))
    return mask if mask.any() else None
