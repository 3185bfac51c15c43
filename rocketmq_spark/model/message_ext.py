"""A message as a broker stored it, its offset message id, and requests for stored messages.

An offset message id is the store host and the commit-log offset in hex. Follows ``MessageExt.java`` and
``MessageDecoder.createMessageId`` / ``decodeMessageId``.
"""

from __future__ import annotations

import enum
import functools
import ipaddress
from dataclasses import dataclass

from rocketmq_spark.errors import MQClientException, RocketMQError
from rocketmq_spark.model.message import Buffer, Message, MessageQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageExt(Message):
    """A message as a broker stored it (``MessageExt.java``).

    Parameters
    ----------
    body : bytes
        As stored: compressed if `sys_flag` says so.
    queue_offset : int
        For an inner batch, of its first item.
    physical_offset : int
        Commit-log offset.
    sys_flag : int
        Compression, transaction and address family bits (``MessageSysFlag.java``).
    born_timestamp, store_timestamp : int
        Epoch milliseconds.
    born_host, store_host : str
        ``1.2.3.4:port`` or ``[v6]:port``.
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
    """Return the offset message id of a commit-log offset on a broker."""
    return (pack_host(store_host) + physical_offset.to_bytes(8, "big", signed=True)).hex().upper()


def decode_message_id(offset_msg_id: str) -> tuple[str, int]:
    """Return the store host (``host:port``) and the commit-log offset in an offset message id.

    The host is the address that the broker advertises (``brokerIP1``); a client may not be able to reach it.

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
    """Return the bytes that `format_host` reads."""
    address, _, port = host.rpartition(":")
    return ipaddress.ip_address(address.strip("[]")).packed + int(port).to_bytes(4, "big", signed=True)


class PullStatus(enum.Enum):
    """A broker's answer to a pull (``PullStatus.java``); the value is the response code."""

    FOUND = 0
    NO_NEW_MSG = 19
    NO_MATCHED_MSG = 20
    OFFSET_ILLEGAL = 21


@dataclass(frozen=True, slots=True, eq=False)
class PullTarget:
    """What all pull requests for one queue share. Equality is identity."""

    queue: MessageQueue
    consumer_group: str
    max_msg_nums: int  # The server also has limits of its own
    sub_expression: str  # ``*``, ``tagA || tagB``, or SQL92
    expression_type: str  # ``TAG`` or ``SQL92``


@dataclass(frozen=True, slots=True)
class PullRequest:
    """One request for messages."""

    target: PullTarget
    address: str  # ``host:port`` of the broker, master or slave
    offset: int
    suspend_ms: int = 0  # How long the broker may hold the request until there is a message; 0: it answers at once


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """The result of one pull request; `status` is None if there is an error."""

    status: PullStatus | None
    # next_begin_offset, min_offset, max_offset: Where to continue, and the offsets that the queue holds, without
    # `max_offset`
    next_begin_offset: int = -1
    min_offset: int = -1
    max_offset: int = -1
    body: Buffer = b""  # Stored records
    error: RocketMQError | None = None


@dataclass(frozen=True, slots=True)
class Pulled:
    """The records of one response, and which of their messages count."""

    queue: MessageQueue
    # start, end: The first offset that counts, and the one after the last
    start: int
    end: int
    body: Buffer  # Empty if the broker no longer has the messages
    contiguous: bool = False  # Every offset from `start` to `end` must be in the body; a missing one is lost data
