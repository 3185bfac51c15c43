"""HdrHistogram's bucket layout for latencies: index arithmetic and quantiles over sparse counts.

Rule 1: the unit is the microsecond; recorded values lie between 1 us and 1 hour, others are clamped by the caller.
Rule 2: an index here is an index there: `to_hdr` copies counts, and every quantile agrees with hdrh's.

Two significant digits: a bucket is at most 1/128 of its value wide, below what two runs of one write differ by. Three
digits would need 23,552 buckets instead of 3,328, and a task's latencies would spread over more of them: larger
reports, for digits that nobody reads.

Follows HdrHistogram's AbstractHistogram.java (countsArrayIndex, getValueAtPercentile).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hdrh.histogram import HdrHistogram

IntArray: TypeAlias = "npt.NDArray[np.int64]"

LOWEST_US: Final = 1
HIGHEST_US: Final = 3_600_000_000
SIGNIFICANT_DIGITS: Final = 2

# 2 * 10^digits rounded up to a power of two: the buckets of one unit's width, from which on the width doubles.
_SUB_BUCKET_BITS: Final = 8
_HALF_BITS: Final = _SUB_BUCKET_BITS - 1

# Bits that hold any index, for tables keyed by broker and index (the layout has 26 halves of 128 buckets: 3,328).
INDEX_BITS: Final = 12


def index_of(latency_us: int) -> int:
    """Return the bucket of a latency between 0 and `HIGHEST_US`, microseconds."""
    bucket = max(latency_us.bit_length() - _SUB_BUCKET_BITS, 0)
    return (bucket << _HALF_BITS) + (latency_us >> bucket)


def lowest_us(index: int) -> int:
    """Return the smallest latency that falls into a bucket, microseconds."""
    bucket = max((index >> _HALF_BITS) - 1, 0)
    return (index - (bucket << _HALF_BITS)) << bucket


def highest_us(index: int) -> int:
    """Return the largest latency that falls into a bucket, microseconds."""
    return lowest_us(index + 1) - 1


def percentiles_us(indices: IntArray, counts: IntArray, percents: tuple[float, ...]) -> list[int]:
    """Return the latencies that the given shares of all values don't exceed (``getValueAtPercentile``).

    Parameters
    ----------
    indices : array of int64
        Bucket indices, ascending; at least one.
    counts : array of int64
        How many values each bucket holds.
    percents : tuple of float
        Each greater than 0 and at most 100.

    Returns
    -------
    list of int
        Microseconds, one per percentage.
    """
    reached = np.cumsum(counts)
    targets = [max(int(percent * int(reached[-1]) / 100 + 0.5), 1) for percent in percents]
    return [highest_us(int(indices[at])) for at in np.searchsorted(reached, targets)]


def coarser(indices: IntArray, bits: int) -> IntArray:
    """Return the middle of the 2^bits neighbouring buckets that each index belongs to; at most 7 bits (an octave)."""
    return indices if not bits else (indices >> bits << bits) + (1 << bits >> 1)


def to_hdr(indices: IntArray, counts: IntArray) -> HdrHistogram:
    """Return the same counts as an HdrHistogram of microseconds."""
    from hdrh.histogram import HdrHistogram

    histogram = HdrHistogram(LOWEST_US, HIGHEST_US, SIGNIFICANT_DIGITS)
    for index, count in zip(indices.tolist(), counts.tolist(), strict=True):
        histogram.record_value(lowest_us(index), count)
    return histogram
