"""The results of sends, the checks of transactions, and the requests to end a transaction or recall a message.

Follows ``SendResult.java``, ``TransactionSendResult.java`` and ``LocalTransactionState.java``.
"""

from __future__ import annotations

import base64
import binascii
import enum
from dataclasses import dataclass
from typing import Any, Final

import rocketmq_spark.model.properties as const
from rocketmq_spark.display.tables import html_table, present
from rocketmq_spark.errors import MQClientException, RocketMQError
from rocketmq_spark.model.message import MessageQueue, SendStatus
from rocketmq_spark.model.message_ext import MessageExt


class LocalTransactionState(enum.Enum):
    """A producer's answer about a half message: deliver it, drop it, or check again later."""

    COMMIT_MESSAGE = "COMMIT_MESSAGE"
    ROLLBACK_MESSAGE = "ROLLBACK_MESSAGE"
    UNKNOW = "UNKNOW"


@dataclass(frozen=True, slots=True)
class SendResult:
    """The place where the broker stored a message or a batch."""

    status: SendStatus  # Other than SEND_OK: the message is stored, but not flushed or replicated yet
    msg_id: str  # ``UNIQ_KEY``; for a batch, comma-separated, or one id if the broker stored it as one message
    message_queue: MessageQueue
    queue_offset: int  # For a batch, the offset of its first message
    offset_msg_id: str = ""  # The broker's own id, for `view_message`; comma-separated for a batch
    transaction_id: str = ""
    region_id: str = "DefaultRegion"
    trace_on: bool = True  # Whether the broker allows traces of this message
    recall_handle: str = ""  # The handle that recalls a delayed message

    def facts(self) -> dict[str, str | int | None]:
        """Return the main values by name, None for a value that the broker did not send."""
        queue = self.message_queue
        return {
            "status": self.status.name,
            "topic": queue.topic,
            "broker_name": queue.broker_name,
            "queue_id": queue.queue_id,
            "queue_offset": self.queue_offset,
            "msg_id": self.msg_id,
            "offset_msg_id": self.offset_msg_id or None,
            "recall_handle": self.recall_handle or None,
        }

    def _repr_html_(self) -> str:
        return html_table(*present(self.facts()))


class SharedResult:
    """The result of a batch whose messages have different senders. Follows ``ProduceAccumulator.splitSendResults``."""

    def __init__(self, whole: SendResult) -> None:
        self.whole = whole
        self._ids: dict[str, list[str]] = {}

    def parts(self, count: int) -> list[SendResult]:
        """Return the results of the messages."""
        return [_Part(self, number) for number in range(count)]

    def id_of(self, ids: str, number: int) -> str:
        """Return one of the ids that commas join, or the only one, as of an inner batch."""
        if ids not in self._ids:
            self._ids[ids] = ids.split(",")
        found = self._ids[ids]
        return found[number] if number < len(found) else ids


class _Part(SendResult):
    """The result of one message of a batch. Its ids are split at first use, because few callers need them."""

    __slots__ = ("_number", "_shared")

    def __init__(self, shared: SharedResult, number: int) -> None:
        self._shared = shared
        self._number = number

    # A frozen dataclass checks each assignment, which takes longer than the rest of `__init__`.
    __setattr__ = object.__setattr__

    def __reduce__(self) -> Any:
        return SendResult, tuple(getattr(self, name) for name in SendResult.__match_args__)

    __qualname__ = "SendResult"  # In the repr
    status = property(lambda self: self._shared.whole.status)
    msg_id = property(lambda self: self._shared.id_of(self._shared.whole.msg_id, self._number))
    message_queue = property(lambda self: self._shared.whole.message_queue)
    queue_offset = property(lambda self: self._shared.whole.queue_offset + self._number)
    offset_msg_id = property(lambda self: self._shared.id_of(self._shared.whole.offset_msg_id, self._number))
    transaction_id = property(lambda self: self._shared.whole.transaction_id)
    region_id = property(lambda self: self._shared.whole.region_id)
    trace_on = property(lambda self: self._shared.whole.trace_on)
    recall_handle = property(lambda self: self._shared.whole.recall_handle)


@dataclass(frozen=True, slots=True)
class TransactionSendResult(SendResult):
    """The place where a half message is stored, and the end of its local transaction."""

    local_transaction_state: LocalTransactionState = LocalTransactionState.UNKNOW
    # Why the broker did not acknowledge the commit or rollback, so that it asks the listener later. With `maybe_stored`
    # the broker may have executed it.
    end_error: RocketMQError | None = None

    @property
    def ended(self) -> bool:
        """True if the broker has acknowledged the commit or rollback."""
        return self.local_transaction_state is not LocalTransactionState.UNKNOW and self.end_error is None

    def facts(self) -> dict[str, str | int | None]:
        """Return the main values, and the end of the local transaction."""
        # `super()` fails here, because it refers to the class from before `slots=True` replaced it.
        return {
            **SendResult.facts(self),
            "local_transaction_state": self.local_transaction_state.value,
            "end_error": None if self.end_error is None else str(self.end_error),
        }


# Bits of the sys flag, and values of commitOrRollback. A broker ignores TRANSACTION_NOT_TYPE, and checks later.
TRANSACTION_NOT_TYPE: Final = 0
TRANSACTION_PREPARED_TYPE: Final = 4
TRANSACTION_COMMIT_TYPE: Final = 8
TRANSACTION_ROLLBACK_TYPE: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTransaction:
    """Commits or rolls back a transaction, or leaves it open (docs/internals/messages.md#end_transaction)."""

    topic: str
    producer_group: str  # Must equal the half message's property ``PGROUP``
    tran_state_table_offset: int  # The queue offset in the half message's acknowledgement, or in the check
    commit_log_offset: int  # The offset in the offset message id, or in the check
    commit_or_rollback: int  # {0, 8, 12}
    from_transaction_check: bool = False  # Whether this answers a check
    msg_id: str  # The half message's ``UNIQ_KEY``
    transaction_id: str = ""
    broker_name: str  # Proxies require it
    remark: str = ""  # The reason, for the broker's log


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionCheck:
    """A broker's check of a transaction (docs/internals/messages.md#checks)."""

    address: str  # ``host:port`` of the broker, which receives the answer
    message: MessageExt  # The half message, with its own topic
    tran_state_table_offset: int
    commit_log_offset: int
    msg_id: str = ""
    transaction_id: str = ""
    offset_msg_id: str = ""
    broker_name: str = ""

    @property
    def producer_group(self) -> str:
        """The group that sent the message (``PGROUP``); empty if unknown."""
        return self.message.properties.get(const.PGROUP, "")

    @property
    def unique_id(self) -> str:
        """The message's ``UNIQ_KEY``, or its offset message id without one."""
        return self.message.unique_id or self.message.offset_msg_id

    def answer(self, commit_or_rollback: int, remark: str = "") -> EndTransaction:
        """Return the request that answers the check."""
        return EndTransaction(
            topic=self.message.topic,
            producer_group=self.producer_group,
            tran_state_table_offset=self.tran_state_table_offset,
            commit_log_offset=self.commit_log_offset,
            commit_or_rollback=commit_or_rollback,
            msg_id=self.unique_id,
            transaction_id=self.transaction_id,
            broker_name=self.broker_name,
            from_transaction_check=True,
            remark=remark,
        )


def ending(request: EndTransaction) -> str:
    """Return a request's description for errors; ValueError without commit or rollback."""
    if request.commit_or_rollback == TRANSACTION_NOT_TYPE:
        raise ValueError(
            f"ending transaction {request.msg_id} without a commit or rollback: brokers do not answer this request. "
            "Use end_transaction_oneway"
        )
    return f"ending transaction {request.msg_id}"


@dataclass(frozen=True, slots=True)
class RecallMessage:
    """A request to recall a delayed message (RECALL_MESSAGE, RecallMessage; docs/internals/messages.md#delays)."""

    topic: str
    recall_handle: str  # From the acknowledgement of the message
    producer_group: str
    broker_name: str  # The broker in the handle; proxies ignore it


def broker_name_of(recall_handle: str) -> str:
    """Return the broker in a recall handle (URL-safe base64 of ``v1 topic broker deliverMs id``)."""
    try:
        words = base64.urlsafe_b64decode(recall_handle.encode("ascii")).decode().split(" ")
    except (binascii.Error, UnicodeError):
        words = []
    if len(words) != 5 or words[0] != "v1":
        raise MQClientException(f"{recall_handle[:80]!r} is no recall handle: use SendResult.recall_handle unchanged")
    return words[2]
