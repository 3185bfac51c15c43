"""Messages as brokers store them (``MessageExt.java``), their offset message ids, and pull requests with their results.

An offset message id contains a broker's address and an offset in its commit log
(docs/internals/messages.md#message-ids).
"""

from __future__ import annotations

import datetime
import enum
import functools
import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.errors import MQClientException, RocketMQError
from rocketmq_spark.model.message import Buffer, Message, MessageQueue

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageExt(Message):
    """A message as a broker stored it (``MessageExt.java``); its body is compressed if `sys_flag` says so."""

    queue_id: int
    queue_offset: int  # For an inner batch, of its first item
    physical_offset: int  # Commit-log offset
    sys_flag: int  # Compression, transaction and address family bits (``MessageSysFlag.java``)
    born_timestamp: int  # Epoch milliseconds
    born_host: str  # ``1.2.3.4:port`` or ``[v6]:port``
    store_timestamp: int  # Epoch milliseconds
    store_host: str
    reconsume_times: int
    prepared_transaction_offset: int
    body_crc: int  # CRC-32 of the body as stored, top bit cleared. Not verified.

    @property
    def offset_msg_id(self) -> str:
        """The broker's own id: store host and commit-log offset, 32 or 56 hex digits."""
        return encode_message_id(self.store_host, self.physical_offset)


def encode_message_id(store_host: str, physical_offset: int) -> str:
    """Return the offset message id of a commit-log offset on a broker."""
    return (pack_host(store_host) + physical_offset.to_bytes(8, "big", signed=True)).hex().upper()


def decode_message_id(offset_msg_id: str) -> tuple[str, int]:
    """Return the store host (``host:port``) and the commit-log offset in an offset message id.

    MQClientException: another text, such as the comma-separated ids of a batch.
    """
    if not re.fullmatch(r"[0-9A-Fa-f]{32}|[0-9A-Fa-f]{56}", offset_msg_id):
        raise MQClientException(
            f"{offset_msg_id[:80]!r} is no offset message id: one has 32 hex digits, or 56 from a broker on IPv6. Give "
            "one id that a broker returned (SendResult.offset_msg_id)"
        )
    data = bytes.fromhex(offset_msg_id)
    return format_host(data[:-8]), int.from_bytes(data[-8:], "big", signed=True)


# The records of a pull have few hosts, and formatting an address costs more than the rest of a record.
@functools.lru_cache(maxsize=1024)
def format_host(data: bytes) -> str:
    """Return ``1.2.3.4:port`` or ``[v6]:port`` of 4 or 16 address bytes and a 4-byte port."""
    address = ipaddress.ip_address(data[:-4])
    port = int.from_bytes(data[-4:], "big", signed=True)
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


def utc(milliseconds: int) -> str:
    """Return a time (epoch) as date and time in UTC; beyond the years 1 to 9999, the number."""
    try:
        time = _EPOCH + datetime.timedelta(milliseconds=milliseconds)
    except OverflowError:
        return f"{milliseconds} ms since 1970 (not in the years 1 to 9999)"
    return time.isoformat(" ", "milliseconds").replace("+00:00", " UTC")


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
    """The common part of all pull requests for one queue. Equality is identity."""

    queue: MessageQueue
    consumer_group: str
    max_msg_nums: int  # The broker has a limit, too
    sub_expression: str  # ``*``, ``tagA || tagB``, or SQL92
    expression_type: str  # ``TAG`` or ``SQL92``


@dataclass(frozen=True, slots=True)
class PullRequest:
    """One request for messages."""

    target: PullTarget
    address: str  # ``host:port`` of the broker, master or slave
    offset: int
    suspend_ms: int = 0  # How long the broker may wait for a message before it answers


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """The result of one pull request. Exactly one of `status` and `error` is set."""

    status: PullStatus | None
    next_begin_offset: int = -1  # Where to continue
    min_offset: int = -1
    max_offset: int = -1  # The offset after the last message of the queue
    body: Buffer = b""  # Stored records
    error: RocketMQError | None = None


@dataclass(frozen=True, slots=True)
class Pulled:
    """The records of one response; only the messages from `start` to `end` are used."""

    queue: MessageQueue
    start: int  # The first offset
    end: int  # The offset after the last
    body: Buffer  # Empty if the broker no longer has the messages
    contiguous: bool = False  # Every offset must be in the body; a missing one is lost data
