"""The custom headers of answers and of a broker's requests, read from their ext fields.

Attributes are the long names in snake_case; on the wire they are camelCase. An error names the field that is missing or
no number; unknown fields are ignored. Follows the ``*ResponseHeader.java`` classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.protocol.remoting.command import shortened

DEFAULT_REGION: Final = "DefaultRegion"

_INTEGER: Final = re.compile(r"-?[0-9]{1,19}")
_MAX_LONG: Final = 2**63 - 1
_MIN_LONG: Final = -(2**63)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessageResponseHeader:
    """The answer to a send that stored (codes 0, 10, 11, 12).

    Parameters
    ----------
    msg_id : str
        Offset message id; one per item, comma-separated, for a batch.
    queue_id : int
        The queue really used.
    queue_offset : int
        Of the first message.
    """

    msg_id: str
    queue_id: int
    queue_offset: int
    transaction_id: str = ""
    batch_uniq_id: str = ""
    recall_handle: str = ""
    region_id: str = DEFAULT_REGION
    trace_on: bool = True

    @classmethod
    def from_ext_fields(cls, ext_fields: Mapping[str, str]) -> SendMessageResponseHeader:
        """Read the ext fields; raises RemotingCommandException naming a field that is missing or no number."""
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
class OffsetResponseHeader:
    """The answer to GET_MAX_OFFSET, GET_MIN_OFFSET and SEARCH_OFFSET_BY_TIMESTAMP."""

    offset: int

    @classmethod
    def from_ext_fields(cls, ext_fields: Mapping[str, str]) -> OffsetResponseHeader:
        """Read the ext fields; raises RemotingCommandException if the offset is missing or no number."""
        return cls(offset=_long(ext_fields, "offset"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EarliestMsgStoreTimeResponseHeader:
    """The answer to GET_EARLIEST_MSG_STORETIME: epoch milliseconds."""

    timestamp: int

    @classmethod
    def from_ext_fields(cls, ext_fields: Mapping[str, str]) -> EarliestMsgStoreTimeResponseHeader:
        """Read the ext fields; raises RemotingCommandException if the time is missing or no number."""
        return cls(timestamp=_long(ext_fields, "timestamp"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTransactionStateRequestHeader:
    """What a broker sends with CHECK_TRANSACTION_STATE.

    Parameters
    ----------
    tran_state_table_offset, commit_log_offset : int
        What the answer must carry.
    """

    tran_state_table_offset: int
    commit_log_offset: int
    msg_id: str = ""
    transaction_id: str = ""
    offset_msg_id: str = ""
    broker_name: str = ""

    @classmethod
    def from_ext_fields(cls, ext_fields: Mapping[str, str]) -> CheckTransactionStateRequestHeader:
        """Read the ext fields; raises RemotingCommandException naming an offset that is missing or no number."""
        return cls(
            tran_state_table_offset=_long(ext_fields, "tranStateTableOffset"),
            commit_log_offset=_long(ext_fields, "commitLogOffset"),
            msg_id=ext_fields.get("msgId", ""),
            transaction_id=ext_fields.get("transactionId", ""),
            offset_msg_id=ext_fields.get("offsetMsgId", ""),
            broker_name=ext_fields.get("bname", ""),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PullMessageResponseHeader:
    """The answer to a pull, found or not (codes 0, 19, 20, 21)."""

    next_begin_offset: int
    min_offset: int
    max_offset: int

    @classmethod
    def from_ext_fields(cls, ext_fields: Mapping[str, str]) -> PullMessageResponseHeader:
        """Read the ext fields; raises RemotingCommandException naming a field that is missing or no number."""
        return cls(
            next_begin_offset=_long(ext_fields, "nextBeginOffset"),
            min_offset=_long(ext_fields, "minOffset"),
            max_offset=_long(ext_fields, "maxOffset"),
        )


def _text(ext_fields: Mapping[str, str], name: str) -> str:
    value = ext_fields.get(name)
    if value is None:
        raise RemotingCommandException(
            f"reading a header: ext field {name!r} is missing; there are {shortened(str(sorted(ext_fields)))}"
        )
    return value


def _long(ext_fields: Mapping[str, str], name: str) -> int:
    text = _text(ext_fields, name)
    if _INTEGER.fullmatch(text) and _MIN_LONG <= (value := int(text)) <= _MAX_LONG:
        return value
    raise RemotingCommandException(f"reading a header: ext field {name!r} is {text[:40]!r}, not an integer")
