"""Hashes the strings of whole columns with numpy: those of ``SPARK_ROW_ID``, and those of contents.

The compiled `rocketmq_spark.arrow._hashes` has the same functions. `rocketmq_spark.arrow.kernel` chooses.

In ``SPARK_ROW_ID``, an id by place ends with one hash of 64 bits, an id by columns with two
(docs/delivery.md#row-ids-and-deduplication). Such a hash reads a string as 8-byte words, padded with zeros, so that
numpy hashes many strings at once. For words counted from 1, it is
``mix(size + sum(mix((word[k] + k * STEP) ^ seed)))``.

For contents, a string is cut into pieces of 16 KiB. The hash of a piece is NH, a universal hash function (as in UMAC):
each two words of 32 bits are added to keys of their places, and the products of these pairs are summed up. Two
different pieces have equal sums for about one in 2^32 seeds. A second lane has other keys for each pair. Length and
number of the piece are added with keys of their own. The sums are mixed, because sums of different strings depend on
each other. The hash of a string is the sum of the mixed sums of its pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from rocketmq_spark.arrow.columns import ByteColumn, Ints
from rocketmq_spark.arrow.gather import Choice, Frame, Part, Workspace, assemble, chunks
from rocketmq_spark.model.hashes import STEP

Hashes = npt.NDArray[np.uint64]

_STEP: Final = np.uint64(STEP)
_ROUNDS: Final = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_PADS: Final = tuple(bytes(count) for count in range(8))

# Words are hashed in pieces of about this size, bytes. This bounds memory, and hides the fixed cost of numpy's calls:
# pieces of 256 KiB, which fit a processor's cache, take 245 ns per row of 100 bytes instead of 176.
_PIECE: Final = 1024 * 1024
# Words are mixed and multiplied in blocks of these sizes, which fit a processor's cache.
_MIXED_BLOCK: Final = 16 * 1024
_MULTIPLIED_BLOCK: Final = 32 * 1024

_LANES: Final = 2
# The most words of 8 bytes in a piece of a string. Each has a key, in the second lane the next one.
_WORDS: Final = 2048
_LENGTH_KEY: Final = _WORDS + 1
_NUMBER_KEY: Final = _LENGTH_KEY + _LANES
KEYS: Final = _NUMBER_KEY + _LANES
"""How many keys `nh_sums` takes."""
_LOW: Final = np.uint64(2**32 - 1)


@dataclass(frozen=True, slots=True)
class Strings:
    """The strings ``head + value + tail``, none of them empty; null where the value is null."""

    values: ByteColumn
    head: bytes = b""
    tail: bytes = b""

    @property
    def sizes(self) -> Ints:
        """Bytes of each string, as if no value were null."""
        return self.values.sizes.astype(np.int64) + (len(self.head) + len(self.tail))


def hash_sums(columns: Sequence[Strings], workspace: Workspace, seeds: Sequence[int]) -> Hashes:
    """Return, for each of `seeds`, the sum of the hashes of each row's strings; a null string adds 0."""
    return _sums_of(columns, len(seeds), lambda parts, sizes: _hashes(parts, sizes, seeds, workspace))


def nh_sums(columns: Sequence[Strings], workspace: Workspace, keys: Hashes) -> Hashes:
    """Return, for both lanes, the sum of the hashes of the contents of each row's strings; a null string adds 0."""
    return _sums_of(columns, _LANES, lambda parts, sizes: _nh_hashes(parts, sizes, keys, workspace))


def _sums_of(
    columns: Sequence[Strings], lanes: int, hashes_of: Callable[[Sequence[Strings], Ints], Iterable[Hashes]]
) -> Hashes:
    """Return, for each lane, the sum of the hashes of each row's strings; a null string adds 0.

    `hashes_of` gets some rows of all columns, and the sizes of their strings in bytes. It returns the hash of each
    string for each lane, in the shape of the sizes: rows and columns.
    """
    sizes = np.stack([strings.sizes for strings in columns], axis=1)
    sums = np.zeros((lanes, len(sizes)), np.uint64)
    for start, stop in chunks(sizes.sum(axis=1), _PIECE, None):
        parts = [replace(strings, values=strings.values.slice(start, stop)) for strings in columns]
        for of_lane, hashes in zip(sums, hashes_of(parts, sizes[start:stop]), strict=True):
            # Not one sum over an axis: for the few columns of a row that takes several times as long.
            for position, strings in enumerate(parts):
                valid = strings.values.valid
                of_lane[start:stop] += hashes[:, position] if valid is None else hashes[:, position] * valid
    return sums


def _padded(columns: Sequence[Strings], sizes: Ints, workspace: Workspace) -> tuple[memoryview, Ints]:
    """Return all strings, row by row, each padded with zeros to a multiple of 8 bytes, and these multiples."""
    pads = -sizes & 7
    counts = ((sizes + pads) >> 3).ravel()
    parts: list[Part] = []
    for position, strings in enumerate(columns):
        ending = Choice(tuple(strings.tail + pad for pad in _PADS), pads[:, position])
        parts += [*([Frame(strings.head)] if strings.head else []), strings.values, ending]
    return assemble(parts, len(sizes), int(counts.sum()) * 8, None, workspace), counts


def _hashes(columns: Sequence[Strings], sizes: Ints, seeds: Sequence[int], workspace: Workspace) -> Iterator[Hashes]:
    """Yield, for each of `seeds`, the hash of each string in the shape of `sizes`: rows and columns."""
    data, counts = _padded(columns, sizes, workspace)
    ends = np.cumsum(counts)
    total = int(ends[-1])
    starts = ends - counts
    # STEP, 2 * STEP, ... in each string: a running sum that falls back where a string begins.
    words = workspace.array("words", total, np.uint64)
    words[:] = _STEP
    words[starts[1:]] -= counts[:-1].astype(np.uint64) * _STEP
    np.cumsum(words, out=words)
    words += np.frombuffer(data, "<u8")
    for seed in seeds:
        mixed = words if seed == seeds[-1] else workspace.array("mixed", total, np.uint64)
        for first in range(0, total, _MIXED_BLOCK):
            block = mixed[first : first + _MIXED_BLOCK]
            np.bitwise_xor(words[first : first + _MIXED_BLOCK], np.uint64(seed), out=block)
            _mix(block, workspace.array("shifted", len(block), np.uint64))
        sums: Hashes = np.add.reduceat(mixed, starts)
        sums += sizes.ravel().astype(np.uint64)
        _mix(sums, np.empty_like(sums))
        yield sums.reshape(sizes.shape)


def _mix(words: Hashes, shifted: Hashes) -> None:
    """Mix each word in place (the finaliser of SplitMix64); `shifted` is memory of the same size."""
    for shift, factor in _ROUNDS:
        np.right_shift(words, shift, out=shifted)
        words ^= shifted
        words *= factor
    np.right_shift(words, np.uint64(31), out=shifted)
    words ^= shifted


def _nh_hashes(columns: Sequence[Strings], sizes: Ints, keys: Hashes, workspace: Workspace) -> Hashes:
    """Return the hash of each string for each lane, in the shape of `sizes`: rows and columns."""
    data, counts = _padded(columns, sizes, workspace)
    words, lengths, numbers = np.frombuffer(data, "<u8"), sizes.ravel().astype(np.uint64), None
    if counts.max() > _WORDS:
        pieces = -(-counts // _WORDS)
        firsts = np.cumsum(pieces) - pieces
        numbers = np.arange(pieces.sum()) - np.repeat(firsts, pieces)
        counts = np.minimum(np.repeat(counts, pieces) - numbers * _WORDS, _WORDS)
        lengths = np.repeat(lengths, pieces)
    ends = np.cumsum(counts)
    starts = ends - counts
    of_words = workspace.array("keys", len(words) + 1, np.uint64)
    # Without a mode, numpy copies to check the places.
    keys.take(_places(len(words), starts, counts, workspace), out=of_words[:-1], mode="clip")
    mixed = np.zeros((_LANES, len(counts)), np.uint64)
    products = workspace.array("products", len(words), np.uint64)
    for lane in range(_LANES):
        if lane:
            # The last word of a piece has the key that follows in the table, not the first key of the next piece.
            of_words[ends] = keys[counts]
        for first in range(0, len(words), _MULTIPLIED_BLOCK):
            part = slice(first, first + _MULTIPLIED_BLOCK)
            block = products[part]
            used = of_words[first + lane : first + lane + len(block)]
            np.add(words[part].view("<u4"), used.view("<u4"), out=block.view("<u4"))
            low = workspace.array("low", len(block), np.uint64)
            np.bitwise_and(block, _LOW, out=low)
            block >>= np.uint64(32)
            block *= low
        sums = np.add.reduceat(products, starts)
        sums += lengths * keys[_LENGTH_KEY + lane]
        if numbers is not None:
            sums += numbers.astype(np.uint64) * keys[_NUMBER_KEY + lane]
        # So rows collide only if both lanes do.
        sums ^= mixed[lane - 1]
        _mix(sums, np.empty_like(sums))
        mixed[lane] = sums
    hashes: Hashes = mixed if numbers is None else np.add.reduceat(mixed, firsts, axis=1)
    return hashes.reshape(_LANES, *sizes.shape)


def _places(total: int, starts: Ints, counts: Ints, workspace: Workspace) -> npt.NDArray[np.int64]:
    """Return the number of each word in its piece."""
    places = workspace.array("places", total, np.int64)
    places[:] = 1
    places[0] = 0
    places[starts[1:]] -= counts[:-1]
    result: npt.NDArray[np.int64] = np.cumsum(places, out=places)
    return result
