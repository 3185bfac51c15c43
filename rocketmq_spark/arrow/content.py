"""Keyed hashes of the contents of messages, by which a recovery recognises its rows (`ContentHash`).

A content is a set of strings: the body, the flag, and each property of the sender. A string is cut into pieces of 16
KiB. The hash of a piece is NH, a universal hash function (as in UMAC): each two words of 32 bits are added to keys of
their places, and the products of these pairs are summed up. Two different pieces have equal sums for about one in 2^32
seeds. A second lane has other keys for each pair. Length and number of the piece are added with keys of their own. The
sums are mixed, because sums of different strings depend on each other. The mixed sums of a row are added.

Without the seed a user can prepare no collision.

The hash does not depend on the order of properties, on compression, or on how rows are cut into record batches.
"""

from __future__ import annotations

import copy
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rocketmq_spark.arrow.columns import ByteColumn, Ints, decimals
from rocketmq_spark.arrow.gather import Workspace
from rocketmq_spark.arrow.hashes import Hashes, Strings, content_sums, mix, padded, stored_content, sums_of
from rocketmq_spark.arrow.model import MessageBlock, Property
from rocketmq_spark.model.hashes import NOT_CONTENT
from rocketmq_spark.model.properties import ATTEMPT, CARRIED, ROW_ID

_LANES: Final = 2
# The most words of 8 bytes in a piece of a string. Each has a key, in the second lane the next one.
_WORDS: Final = 2048
_LENGTH_KEY: Final = _WORDS + 1
_NUMBER_KEY: Final = _LENGTH_KEY + _LANES
# Words are multiplied in blocks of this size, which fit a processor's cache.
_BLOCK: Final = 32 * 1024
_LOW: Final = np.uint64(2**32 - 1)


@dataclass(frozen=True, slots=True)
class ContentHash:
    """A hash function for contents, drawn by a seed. The hashes of n rows have the shape (2, n).

    With `numbered`, the numbers of rows belong to their content. Only one thread at a time may use an instance.
    """

    numbered: bool = False
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _keys: Hashes = field(init=False, repr=False, compare=False)
    _workspace: Workspace = field(default_factory=Workspace, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        data = hashlib.shake_256(self.seed).digest((_NUMBER_KEY + _LANES) * 8)
        object.__setattr__(self, "_keys", np.frombuffer(data, "<u8"))

    def for_thread(self) -> ContentHash:
        """Return the same hash function with memory of its own, for another thread."""
        own = copy.copy(self)
        object.__setattr__(own, "_workspace", Workspace())
        return own

    def of_block(self, block: MessageBlock, first_row: int) -> Hashes:
        """Return the hashes of the rows of a block; its first row has the number `first_row` in its partition."""
        properties = [prop for prop in block.properties if CARRIED[prop.name].hashed or prop.name == ROW_ID]
        if self.numbered:
            numbers = decimals(np.arange(first_row, first_row + block.rows))
            properties.append(Property(ATTEMPT, numbers, None, b"/"))
        return content_sums(
            self._sums, block.topics, block.topic_codes, properties, block.user_entries, block.body, block.flags
        )

    def of_stored(
        self, topic: str, attempts: ByteColumn, bodies: pa.Array, flags: pa.Array, properties: pa.Array
    ) -> Hashes:
        """Return the hashes of stored messages.

        `attempts` has what follows the token in `ATTEMPT`. `bodies` are decompressed. `properties` are maps.
        """
        numbers = [Property(ATTEMPT, attempts, attempts.valid)] if self.numbered else []
        content = stored_content(bodies, flags, properties, NOT_CONTENT)
        return content_sums(self._sums, [topic], None, numbers, *content)

    def _sums(self, columns: Sequence[Strings]) -> Hashes:
        """Return the sum of the hashes of each row's strings; a null string adds 0."""
        return sums_of(columns, _LANES, self._hashes)

    def _hashes(self, columns: Sequence[Strings], sizes: Ints) -> Hashes:
        """Return the hash of each string for each lane, in the shape of `sizes`: rows and columns."""
        data, counts = padded(columns, sizes, self._workspace)
        words, lengths, numbers = np.frombuffer(data, "<u8"), sizes.ravel().astype(np.uint64), None
        if counts.max() > _WORDS:
            pieces = -(-counts // _WORDS)
            firsts = np.cumsum(pieces) - pieces
            numbers = np.arange(pieces.sum()) - np.repeat(firsts, pieces)
            counts = np.minimum(np.repeat(counts, pieces) - numbers * _WORDS, _WORDS)
            lengths = np.repeat(lengths, pieces)
        ends = np.cumsum(counts)
        starts = ends - counts
        keys = self._workspace.array("keys", len(words) + 1, np.uint64)
        # Without a mode, numpy copies to check the places.
        self._keys.take(self._places(len(words), starts, counts), out=keys[:-1], mode="clip")
        mixed = np.zeros((_LANES, len(counts)), np.uint64)
        products = self._workspace.array("products", len(words), np.uint64)
        for lane in range(_LANES):
            if lane:
                # The last word of a piece has the key that follows in the table, not the first key of the next piece.
                keys[ends] = self._keys[counts]
            for first in range(0, len(words), _BLOCK):
                part = slice(first, first + _BLOCK)
                block = products[part]
                used = keys[first + lane : first + lane + len(block)]
                np.add(words[part].view("<u4"), used.view("<u4"), out=block.view("<u4"))
                low = self._workspace.array("low", len(block), np.uint64)
                np.bitwise_and(block, _LOW, out=low)
                block >>= np.uint64(32)
                block *= low
            sums = np.add.reduceat(products, starts)
            sums += lengths * self._keys[_LENGTH_KEY + lane]
            if numbers is not None:
                sums += numbers.astype(np.uint64) * self._keys[_NUMBER_KEY + lane]
            # So rows collide only if both lanes do.
            sums ^= mixed[lane - 1]
            mix(sums, np.empty_like(sums))
            mixed[lane] = sums
        hashes: Hashes = mixed if numbers is None else np.add.reduceat(mixed, firsts, axis=1)
        return hashes.reshape(_LANES, *sizes.shape)

    def _places(self, total: int, starts: Ints, counts: Ints) -> npt.NDArray[np.int64]:
        """Return the number of each word in its piece."""
        places = self._workspace.array("places", total, np.int64)
        places[:] = 1
        places[0] = 0
        places[starts[1:]] -= counts[:-1]
        result: npt.NDArray[np.int64] = np.cumsum(places, out=places)
        return result
