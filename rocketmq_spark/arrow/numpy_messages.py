"""Reads the messages of pulls with numpy and Arrow, all columns of all pulls at once (`NumpyMessages`)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from rocketmq_spark.arrow.columns import ByteColumn, to_arrow, to_numpy
from rocketmq_spark.arrow.messages import Irregular, host_texts
from rocketmq_spark.arrow.read_columns import LAST_TIME, US_PER_MS
from rocketmq_spark.arrow.stored import Properties, cells, records_of, rows_of, split_properties
from rocketmq_spark.model.message import Buffer
from rocketmq_spark.model.message_ext import encode_message_id, format_host
from rocketmq_spark.protocol.remoting.unwrap import CRC_MASK

# The two hex digits of each byte.
_HEX: Final = np.array([f"{value:02X}" for value in range(256)], np.bytes_).view(np.uint16)


class NumpyMessages:
    """Implements `Messages`; also raises a pyarrow.ArrowInvalid instead of Irregular."""

    def __init__(self, bodies: Sequence[Buffer], starts: Sequence[int], ends: Sequence[int], most: int) -> None:
        # All messages are kept: numpy needs little memory for each.
        del most
        body = bodies[0] if len(bodies) == 1 else b"".join(bodies)
        self._records = records = records_of(body)
        self._rows = rows = rows_of(records, body)
        self._properties: Properties | None = None
        # The number of the pull that each row is of, and whether its offset lies between the pull's start and end.
        borders = np.cumsum([len(body) for body in bodies])
        if not np.isin(borders, np.append(records.starts, len(body))).all():
            # The size of a pull's last record is wrong: it reaches into the next pull.
            raise Irregular
        self._pulls = np.searchsorted(borders, records.starts, side="right").astype(np.int32)[rows.record]
        firsts, lasts = np.array(starts, np.int64)[self._pulls], np.array(ends, np.int64)[self._pulls]
        inside = (rows.queue_offset >= firsts) & (rows.queue_offset < lasts)
        if not inside.all():
            kept = np.flatnonzero(inside)
            self._rows, self._pulls = rows.select(kept), self._pulls[kept]
        # A loop over bodies, because zlib computes one CRC per call. Python bytes are faster here than array slices.
        stored = cells(records.data, records.whole.bodies, records.whole.body_ends).to_pylist()
        computed = np.fromiter(map(zlib.crc32, stored), np.uint32, len(stored))
        if not np.array_equal(computed & CRC_MASK, records.heads["crc"]):
            raise Irregular

    def __len__(self) -> int:
        return len(self._rows.record)

    def pulls(self) -> pa.Int32Array:
        return to_arrow(self._pulls)

    def queue_offsets(self) -> pa.Int64Array:
        return to_arrow(self._rows.queue_offset)

    def flags(self) -> pa.Int32Array:
        return to_arrow(self._rows.flag)

    def sys_flags(self) -> pa.Int32Array:
        return self._ints("sys_flag")

    def reconsume_times(self) -> pa.Int32Array:
        return self._ints("reconsume_times")

    def _ints(self, name: str) -> pa.Int32Array:
        return to_arrow(self._records.heads[name].astype(np.int32)[self._rows.record])

    def born_times(self) -> pa.Int64Array:
        return self._times("born_timestamp")

    def store_times(self) -> pa.Int64Array:
        return self._times("store_timestamp")

    def _times(self, name: str) -> pa.Int64Array:
        times = self._records.heads[name].astype(np.int64)
        if np.any((times > LAST_TIME) | (times < -LAST_TIME)):
            raise Irregular
        return to_arrow(times[self._rows.record] * US_PER_MS)

    def born_hosts(self) -> pa.StringArray:
        return host_texts(self._opaque("born_host")).take(to_arrow(self._rows.record))

    def offset_ids(self) -> pa.StringArray:
        heads = self._records.heads
        hosts = self._opaque("store_host").dictionary_encode()
        known = [format_host(host) for host in hosts.dictionary.to_pylist()]
        # All hosts are IPv4, or all are IPv6: all ids have one width.
        prefixes = np.array([encode_message_id(host, 0)[:-16] for host in known], np.bytes_)[to_numpy(hosts.indices)]
        offsets = np.ascontiguousarray(heads["physical_offset"]).view(np.uint8).reshape(-1, 8)
        prefixes = prefixes.view(np.uint8).reshape(-1, prefixes.itemsize)
        ids = np.concatenate([prefixes, _HEX[offsets].view(np.uint8)], axis=1)[self._rows.record]
        ends = np.arange(len(ids) + 1, dtype=np.int32) * ids.shape[1]
        return ByteColumn(ends, ids.ravel()).to_arrow().view(pa.string())

    def _opaque(self, name: str) -> pa.BinaryArray:
        """Return the bytes of a field of the heads."""
        values = np.ascontiguousarray(self._records.heads[name])
        kind = pa.binary(values.dtype.itemsize)
        fixed_size = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values.view(np.uint8))])
        return fixed_size.cast(pa.binary())

    def bodies(self) -> pa.BinaryArray:
        return cells(self._records.data, self._rows.bodies, self._rows.body_ends)

    def split(self) -> None:
        self._split()

    def values(self, name: str) -> pa.StringArray:
        return self._split().value_of(name)

    def maps(self, kind: pa.MapType) -> pa.MapArray:
        return self._split().as_maps(kind)

    def _split(self) -> Properties:
        if self._properties is None:
            self._properties = split_properties(cells(self._records.data, self._rows.properties, self._rows.ends))
            if self._properties is None:
                raise Irregular
        return self._properties
