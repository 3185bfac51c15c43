"""A message as a broker stored it, and the id that says where.

Rule 1: a stored message is a message: what reads a :class:`~rocketmq_spark.message.Message` reads this one too.
Rule 2: the offset message id is the store host and the commit-log offset, in hex (spec/remoting.md section 9.1).

Follows MessageExt.java and ``MessageDecoder.createMessageId`` / ``decodeMessageId``.
"""

from __future__ import annotations

import functools
import ipaddress
from dataclasses import dataclass

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.message import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageExt(Message):
    """One record as a broker stored it (spec/remoting.md 8, ``MessageExt.java``).

    Parameters
    ----------
    topic, body, flag, properties
        As in :class:`~rocketmq_spark.message.Message`; the body as stored: compressed if `sys_flag` says so.
    queue_id : int
    queue_offset : int
        For an inner batch, of its first item.
    physical_offset : int
        Commit-log offset.
    sys_flag : int
        Compression, transaction and address family bits (spec/remoting.md section 7).
    born_timestamp, store_timestamp : int
        Epoch milliseconds.
    born_host, store_host : str
        ``1.2.3.4:port`` or ``[v6]:port``.
    reconsume_times : int
    prepared_transaction_offset : int
    body_crc : int
        CRC-32 of the body as stored, top bit cleared. Not verified.
    """

    queue_id: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_timestamp: int
    born_host: str
    store_timestamp: int
    store_host: str
    reconsume_times: int
    prepared_transaction_offset: int
    body_crc: int

    @property
    def offset_msg_id(self) -> str:
        """The broker's own id: store host and commit-log offset, 32 or 56 hex digits."""
        return encode_message_id(self.store_host, self.physical_offset)


def encode_message_id(store_host: str, physical_offset: int) -> str:
    """Return the offset message id of what a broker stored at a commit-log offset."""
    return (pack_host(store_host) + physical_offset.to_bytes(8, "big", signed=True)).hex().upper()


def decode_message_id(offset_msg_id: str) -> tuple[str, int]:
    """Return the store host (``host:port``) and the commit-log offset that an offset message id is made of.

    The host is the broker's own idea of itself (``brokerIP1``), which a client may not be able to reach.

    Raises
    ------
    MQClientException
        Neither 32 hex digits nor 56 (a broker on IPv6). An acknowledgement of a batch joins its ids with commas.
    """
    try:
        data = bytes.fromhex(offset_msg_id) if len(offset_msg_id) in (32, 56) else b""
    except ValueError:
        data = b""
    if 2 * len(data) != len(offset_msg_id) or not data:
        raise MQClientException(
            f"{offset_msg_id[:80]!r} is no offset message id: one has 32 hex digits, or 56 from a broker on IPv6"
        )
    return format_host(data[:-8]), int.from_bytes(data[-8:], "big", signed=True)


# A pull's records come from few hosts, and formatting an address costs more than the rest of a record.
@functools.lru_cache(maxsize=1024)
def format_host(data: bytes) -> str:
    """Return ``1.2.3.4:port`` or ``[v6]:port`` of 4 or 16 address bytes and a 4-byte port."""
    address = ipaddress.ip_address(data[:-4])
    port = int.from_bytes(data[-4:], "big", signed=True)
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


@functools.lru_cache(maxsize=1024)
def pack_host(host: str) -> bytes:
    """Return what :func:`format_host` read."""
    address, _, port = host.rpartition(":")
    return ipaddress.ip_address(address.strip("[]")).packed + int(port).to_bytes(4, "big", signed=True)
