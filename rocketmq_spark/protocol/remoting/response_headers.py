"""The custom headers of answers and of a broker's requests, read from their ext fields.

Attributes are the long names in snake_case; on the wire they are camelCase. Unknown fields are ignored. Follows the
``*ResponseHeader.java`` classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final, TypeVar

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.send_result import TransactionCheck
from rocketmq_spark.protocol.remoting.command import RemotingCommand, shortened
from rocketmq_spark.protocol.remoting.headers import wire_names
from rocketmq_spark.protocol.remoting.records import decode_records

DEFAULT_REGION: Final = "DefaultRegion"

# Of `CheckTransactionStateRequestHeader`.
_TEXTS: Final = frozenset({"msgId", "transactionId", "offsetMsgId", "bname"})

HeaderT = TypeVar("HeaderT", bound="ResponseHeader")


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessageResponseHeader:
    """The answer to a send that stored (codes 0, 10, 11, 12)."""

    msg_id: str  # Offset message id; of a batch one for each item, separated by commas
    queue_id: int  # The queue that the broker used
    queue_offset: int  # Of the first message
    transaction_id: str = ""
    batch_uniq_id: str = ""
    recall_handle: str = ""
    region_id: str = DEFAULT_REGION
    trace_on: bool = True

    @classmethod
    def from_ext_fields(cls, ext_fields: Mapping[str, str]) -> SendMessageResponseHeader:
        """Read the ext fields; a RemotingCommandException names a field that is missing or no number."""
        return cls(
            msg_id=_text(ext_fields, "msgId"),
            queue_id=_long(ext_fields, "queueId"),
            queue_offset=_long(ext_fields, "queueOffset"),
            transaction_id=ext_fields.get("transactionId", ""),
            batch_uniq_id=ext_fields.get("batchUniqId", ""),
            recall_handle=ext_fields.get("recallHandle", ""),
            region_id=ext_fields.get("MSG_REGION") or DEFAULT_REGION,
            # Exactly "false": a server that says nothing has not switched tracing off.
            trace_on=ext_fields.get("TRACE_ON") != "false",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PullMessageResponseHeader:
    """The answer to a pull, found or not (codes 0, 19, 20, 21)."""

    next_begin_offset: int
    min_offset: int
    max_offset: int

    @classmethod
    def from_ext_fields(cls, ext_fields: Mapping[str, str]) -> PullMessageResponseHeader:
        """Read the ext fields; a RemotingCommandException names a field that is missing or no number."""
        return cls(
            next_begin_offset=_long(ext_fields, "nextBeginOffset"),
            min_offset=_long(ext_fields, "minOffset"),
            max_offset=_long(ext_fields, "maxOffset"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHeader:
    """An answer's custom header: numbers, which are required, and texts, which may be missing."""

    @classmethod
    def from_ext_fields(cls: type[HeaderT], ext_fields: Mapping[str, str]) -> HeaderT:
        """Read the ext fields; a RemotingCommandException names a number that is missing or ill-formed."""
        values = {
            attribute: ext_fields.get(name, "") if name in _TEXTS else _long(ext_fields, name)
            for attribute, name in wire_names(cls)  # type: ignore[arg-type]
        }
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetResponseHeader(ResponseHeader):
    """The answer to GET_MAX_OFFSET, GET_MIN_OFFSET and SEARCH_OFFSET_BY_TIMESTAMP."""

    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EarliestMsgStoreTimeResponseHeader(ResponseHeader):
    """The answer to GET_EARLIEST_MSG_STORETIME: epoch milliseconds."""

    timestamp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTransactionStateRequestHeader(ResponseHeader):
    """What a broker sends with CHECK_TRANSACTION_STATE; the answer carries both offsets."""

    tran_state_table_offset: int
    commit_log_offset: int
    msg_id: str = ""
    transaction_id: str = ""
    offset_msg_id: str = ""
    broker_name: str = ""


_INTEGER: Final = re.compile(r"-?[0-9]{1,19}")


def _text(ext_fields: Mapping[str, str], name: str) -> str:
    value = ext_fields.get(name)
    if value is None:
        raise RemotingCommandException(
            f"reading a header: ext field {name!r} is missing; there are {shortened(str(sorted(ext_fields)))}"
        )
    return value


def _long(ext_fields: Mapping[str, str], name: str) -> int:
    text = _text(ext_fields, name)
    if _INTEGER.fullmatch(text) and -(2**63) <= (value := int(text)) < 2**63:
        return value
    raise RemotingCommandException(f"reading a header: ext field {name!r} is {text[:40]!r}, not an integer")


def transaction_check_of(address: str, command: RemotingCommand) -> TransactionCheck:
    """Read CHECK_TRANSACTION_STATE, as ClientRemotingProcessor.java does."""
    header = CheckTransactionStateRequestHeader.from_ext_fields(command.ext_fields)
    records = decode_records(command.body)
    if len(records) != 1:
        raise RemotingCommandException(f"a check of a transaction from {address} holds {len(records)} messages, not 1")
    return TransactionCheck(address=address, message=records[0], **asdict(header))
