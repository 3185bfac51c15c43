"""Protocol Buffers varints of a whole column, all of one width.

Rule 1: the width is what the largest value of the column needs; smaller values are padded with continuation bytes,
        which every decoder reads (a varint need not be the shortest one). A field of fixed width can be stored into
        frames, and costs no more than a number does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rocketmq_spark.arrow.columns import Ints
from rocketmq_spark.arrow.gather import Frame


@dataclass(frozen=True, slots=True)
class Varints:
    """One varint a row.

    Parameters
    ----------
    width : {1, 2, 4}
        Bytes of each: up to 127, to 16,383, to 268,435,455.
    values : unsigned array
        The bytes of each varint as one little-endian number.
    """

    width: int
    values: npt.NDArray[np.unsignedinteger[Any]]

    @classmethod
    def of(cls, numbers: Ints) -> Varints:
        """Encode numbers from 0 to 268,435,455."""
        most = int(numbers.max(initial=0))
        if most < 1 << 7:
            return cls(1, numbers.astype(np.uint8))
        wide = numbers.astype(np.uint32)
        if most < 1 << 14:
            return cls(2, (wide & 0x7F | 0x80 | wide >> 7 << 8).astype("<u2"))
        padded = np.full(len(wide), 0x00808080, "<u4")
        for place in range(4):
            padded |= (wide >> 7 * place & 0x7F) << 8 * place
        return cls(4, padded)

    def after(self, tag: Frame) -> Frame:
        """Return a frame that ends with the varint."""
        return tag.then(Frame(bytes(self.width), ((0, f"<u{self.width}", self.values),)))


def varint(number: int) -> bytes:
    """Return the shortest varint of one number."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
