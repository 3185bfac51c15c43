"""The interface between the decoder of pulls and what locates and reads stored records (`Messages`).

It has two implementations with equal results: `rocketmq_spark.arrow.numpy_messages`, and the compiled
`rocketmq_spark.arrow._records`. `rocketmq_spark.arrow.kernel` chooses one.
"""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa

from rocketmq_spark.arrow.columns import text_array
from rocketmq_spark.model.message_ext import format_host


class Irregular(Exception):
    """Malformed or rare bytes: the caller reads them row by row, and reports the error."""


class Messages(Protocol):
    """The messages of pulls in their order; each method returns an Arrow array with one element per message.

    The constructor takes the bodies of the pulls, the first offset of each pull, and the offset after its last one.
    Messages with other offsets are left out. If there are more than `most` messages, it may keep only ``most + 1``, and
    the caller asks for less. It checks all lengths, topics and checksums. The constructor and all methods raise
    Irregular for bytes that only `decode_rows` can decode.
    """

    def __len__(self) -> int:
        """Return the number of messages."""

    def pulls(self) -> pa.Int32Array:
        """Return which pull each message is from, counted from 0."""

    def queue_offsets(self) -> pa.Int64Array:
        """Return the offsets in the queue."""

    def flags(self) -> pa.Int32Array:
        """Return the flags that users set."""

    def sys_flags(self) -> pa.Int32Array:
        """Return the bits of ``MessageSysFlag``; the items of an inner batch have those of the batch."""

    def reconsume_times(self) -> pa.Int32Array:
        """Return how often consumers sent the messages back."""

    def born_times(self) -> pa.Int64Array:
        """Return when clients made the messages, microseconds since the epoch."""

    def store_times(self) -> pa.Int64Array:
        """Return when a broker stored the messages, microseconds since the epoch."""

    def born_hosts(self) -> pa.StringArray:
        """Return the addresses of clients."""

    def offset_ids(self) -> pa.StringArray:
        """Return the offset message ids."""

    def bodies(self) -> pa.BinaryArray:
        """Return the bodies as stored."""

    def split(self) -> None:
        """Parse all property strings; `values` and `maps` call it."""

    def values(self, name: str) -> pa.StringArray:
        """Return the values of one property, null where it is missing."""

    def maps(self, kind: pa.MapType) -> pa.MapArray:
        """Return all properties."""


def host_texts(hosts: pa.BinaryArray) -> pa.StringArray:
    """Return the texts of addresses as stored. A queue's messages come from few hosts: each is formatted once."""
    encoded = hosts.dictionary_encode()
    return text_array([format_host(host) for host in encoded.dictionary.to_pylist()]).take(encoded.indices)
