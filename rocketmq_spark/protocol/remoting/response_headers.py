"""Reads the custom headers of answers, and of a broker's check of a transaction, from their ext fields.

Unknown fields are ignored. A RemotingCommandException names a required field that is missing or no integer. Follows the
``*ResponseHeader.java`` classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.send_result import TransactionCheck
from rocketmq_spark.protocol.remoting.command import RemotingCommand, shortened
from rocketmq_spark.protocol.remoting.records import decode_records

DEFAULT_REGION: Final = "DefaultRegion"

_INTEGER: Final = re.compile(r"-?[0-9]{1,19}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessageResponseHeader:
    """The answer to a send that stored the message or batch (codes 0, 10, 11, 12)."""

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
        """Return the header of the ext fields."""
        return cls(
            msg_id=_text(ext_fields, "msgId"),
            queue_id=read_long(ext_fields, "queueId"),
            queue_offset=read_long(ext_fields, "queueOffset"),
            transaction_id=ext_fields.get("transactionId", ""),
            batch_uniq_id=ext_fields.get("batchUniqId", ""),
            recall_handle=ext_fields.get("recallHandle", ""),
            region_id=ext_fields.get("MSG_REGION") or DEFAULT_REGION,
            # Tracing is on unless a server writes exactly "false".
            trace_on=ext_fields.get("TRACE_ON") != "false",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PullMessageResponseHeader:
    """The answer to a pull, with or without messages (codes 0, 19, 20, 21)."""

    next_begin_offset: int
    min_offset: int
    max_offset: int

    @classmethod
    def from_ext_fields(cls, ext_fields: Mapping[str, str]) -> PullMessageResponseHeader:
        """Return the header of the ext fields."""
        return cls(
            next_begin_offset=read_long(ext_fields, "nextBeginOffset"),
            min_offset=read_long(ext_fields, "minOffset"),
            max_offset=read_long(ext_fields, "maxOffset"),
        )


def transaction_check_of(address: str, command: RemotingCommand) -> TransactionCheck:
    """Return a broker's CHECK_TRANSACTION_STATE, read as in ``ClientRemotingProcessor.java``."""
    fields, records = command.ext_fields, decode_records(command.body)
    if len(records) != 1:
        raise RemotingCommandException(f"a check of a transaction from {address} holds {len(records)} messages, not 1")
    return TransactionCheck(
        address=address,
        message=records[0],
        tran_state_table_offset=read_long(fields, "tranStateTableOffset"),
        commit_log_offset=read_long(fields, "commitLogOffset"),
        msg_id=fields.get("msgId", ""),
        transaction_id=fields.get("transactionId", ""),
        offset_msg_id=fields.get("offsetMsgId", ""),
        # Proxies send no broker name.
        broker_name=fields.get("bname", ""),
    )


def read_long(ext_fields: Mapping[str, str], name: str) -> int:
    """Return the 64-bit integer of a required ext field."""
    text = _text(ext_fields, name)
    if _INTEGER.fullmatch(text) and -(2**63) <= (value := int(text)) < 2**63:
        return value
    raise RemotingCommandException(f"reading a header: ext field {name!r} is {text[:40]!r}, not an integer")


def _text(ext_fields: Mapping[str, str], name: str) -> str:
    value = ext_fields.get(name)
    if value is None:
        raise RemotingCommandException(
            f"reading a header: ext field {name!r} is missing; there are {shortened(str(sorted(ext_fields)))}"
        )
    return value
