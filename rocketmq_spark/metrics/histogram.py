"""HdrHistogram's bucket layout for latencies in microseconds, from 1 us to 1 hour.

Bucket indices are HdrHistogram's own, so that every quantile agrees with it (``AbstractHistogram.java``,
``countsArrayIndex`` and ``getValueAtPercentile``). With two significant digits a bucket is at most 1/128 of its value
wide, which is less than two runs of one write differ by. Three digits would need 23,552 buckets instead of 3,328.
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

# 2 * 10^digits rounded up to a power of two: the first buckets are one unit wide, then the width doubles.
_SUB_BUCKET_BITS: Final = 8
_HALF_BITS: Final = _SUB_BUCKET_BITS - 1

# 26 halves of 128 buckets.
BUCKETS: Final = 3_328


def index_of(latency_us: int) -> int:
    """Return the bucket of a latency between 0 and `HIGHEST_US`, microseconds."""
    bucket = max(latency_us.bit_length() - _SUB_BUCKET_BITS, 0)
    return (bucket << _HALF_BITS) + (latency_us >> bucket)


def lowest_us(index: int) -> int:
    """Return the smallest latency of a bucket, microseconds."""
    bucket = max((index >> _HALF_BITS) - 1, 0)
    return (index - (bucket << _HALF_BITS)) << bucket


def highest_us(index: int) -> int:
    """Return the largest latency of a bucket, microseconds."""
    return lowest_us(index + 1) - 1


def coarser(index: int, bits: int) -> int:
    """Return the middle of the 2^bits neighbouring buckets that contain `index`; 7 bits are an octave, the most."""
    return (index >> bits << bits) + (1 << bits >> 1)


def percentiles_us(indices: IntArray, counts: IntArray, percents: tuple[float, ...]) -> list[int]:
    """Return the latencies that the given percentages of all values do not exceed.

    `indices` are ascending, and there is at least one; each percentage is above 0 and at most 100.
    """
    reached = np.cumsum(counts)
    targets = [max(int(percent * int(reached[-1]) / 100 + 0.5), 1) for percent in percents]
    return [highest_us(int(indices[at])) for at in np.searchsorted(reached, targets)]


def to_hdr(indices: IntArray, counts: IntArray) -> HdrHistogram:
    """Return the same counts as an HdrHistogram of microseconds."""
    from hdrh.histogram import HdrHistogram

    histogram = HdrHistogram(LOWEST_US, HIGHEST_US, SIGNIFICANT_DIGITS)
    for index, count in zip(indices.tolist(), counts.tolist(), strict=True):
        histogram.record_value(lowest_us(index), count)
    return histogram
