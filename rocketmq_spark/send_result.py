"""What a producer's caller gets back: where a message was stored, and how a local transaction ended.

Follows ``SendResult.java``, ``TransactionSendResult.java``, ``LocalTransactionState.java`` (spec/producer.md 8.4, 12).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rocketmq_spark import table_view
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.message import MessageQueue, SendStatus


class LocalTransactionState(enum.Enum):
    """What a producer tells the broker about a half message: deliver it, drop it, or ask again later."""

    COMMIT_MESSAGE = "COMMIT_MESSAGE"
    ROLLBACK_MESSAGE = "ROLLBACK_MESSAGE"
    UNKNOW = "UNKNOW"


@dataclass(frozen=True, slots=True)
class SendResult:
    """Where a message, or a batch of them, was stored.

    Parameters
    ----------
    status : SendStatus
        Everything but SEND_OK is stored too, but not flushed or replicated yet.
    msg_id : str
        The client's own id (``UNIQ_KEY``); of a batch, its members' ids joined by commas, or the batch's id where the
        broker stored it as one.
    message_queue : MessageQueue
        Its topic has no namespace.
    queue_offset : int
        Of a batch, the offset of its first message.
    offset_msg_id : str, default ""
        The broker's own id, the one `view_message` takes; comma-separated for a batch.
    transaction_id : str, default ""
    region_id : str, default "DefaultRegion"
    trace_on : bool, default True
        Whether the broker lets this message be traced.
    recall_handle : str, default ""
        What a delayed message is called back with.
    """

    status: SendStatus
    msg_id: str
    message_queue: MessageQueue
    queue_offset: int
    offset_msg_id: str = ""
    transaction_id: str = ""
    region_id: str = "DefaultRegion"
    trace_on: bool = True
    recall_handle: str = ""

    def facts(self) -> dict[str, str | int | None]:
        """Return what a reader of the receipt looks for, by name; what a broker left out is None."""
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
        return table_view.html_table(*table_view.present(self.facts()))


@dataclass(frozen=True, slots=True)
class TransactionSendResult(SendResult):
    """Where a half message was stored, and what its producer then told the broker.

    Parameters
    ----------
    local_transaction_state : LocalTransactionState, default UNKNOW
    end_error : RocketMQError or None, default None
        Why the broker did not acknowledge the commit or rollback. It asks the listener later. If the error has
        `maybe_stored`, the commit or rollback may have been executed.
    """

    local_transaction_state: LocalTransactionState = LocalTransactionState.UNKNOW
    end_error: RocketMQError | None = None

    @property
    def ended(self) -> bool:
        """True if the broker has acknowledged the commit or rollback."""
        return self.local_transaction_state is not LocalTransactionState.UNKNOW and self.end_error is None

    def facts(self) -> dict[str, str | int | None]:
        """Return the same, and how the local transaction ended."""
        # Named, because a class with slots is made anew, and super() would not know it.
        return {
            **SendResult.facts(self),
            "local_transaction_state": self.local_transaction_state.value,
            "end_error": None if self.end_error is None else str(self.end_error),
        }
