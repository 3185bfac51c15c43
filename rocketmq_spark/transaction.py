"""What travels between a transactional producer and its broker, after the half message (spec/producer.md section 12).

Rule 1: the offsets of a check are not those of the half message's acknowledgement: the broker has written the message
        again. An answer to a check carries the check's offsets (spec/remoting.md section 11.3).
Rule 2: an answer names the message's own topic. Java's repeats the header's, which is the half topic; with access
        control no producer has a right to send there.

Follows EndTransactionRequestHeader.java, CheckTransactionStateRequestHeader.java, MessageSysFlag.java.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import rocketmq_spark.message_const as const
from rocketmq_spark.message_ext import MessageExt

# MessageSysFlag.java: what commitOrRollback says. To TRANSACTION_NOT_TYPE a broker does nothing: it will ask back.
TRANSACTION_NOT_TYPE: Final = 0
TRANSACTION_COMMIT_TYPE: Final = 8
TRANSACTION_ROLLBACK_TYPE: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTransaction:
    """How a transaction ended (END_TRANSACTION).

    Parameters
    ----------
    topic : str
    producer_group : str
        Must equal the half message's property ``PGROUP``.
    tran_state_table_offset : int
        The queue offset that acknowledged the half message, or the check's.
    commit_log_offset : int
        From the offset message id, or the check's.
    commit_or_rollback : {0, 8, 12}
    msg_id : str
        The half message's ``UNIQ_KEY``.
    transaction_id : str, default ""
    broker_name : str
        A proxy needs it.
    from_transaction_check : bool, default False
        It answers a check.
    remark : str, default ""
        Why, for the broker's log.
    """

    topic: str
    producer_group: str
    tran_state_table_offset: int
    commit_log_offset: int
    commit_or_rollback: int
    msg_id: str
    transaction_id: str = ""
    broker_name: str
    from_transaction_check: bool = False
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionCheck:
    """A broker asks how a transaction ended (CHECK_TRANSACTION_STATE).

    Parameters
    ----------
    address : str
        ``host:port`` that asked: where the answer goes.
    message : MessageExt
        The half message, under its own topic.
    tran_state_table_offset, commit_log_offset : int
    msg_id, transaction_id, offset_msg_id, broker_name : str
        As the header has them; empty where it hasn't.
    """

    address: str
    message: MessageExt
    tran_state_table_offset: int
    commit_log_offset: int
    msg_id: str = ""
    transaction_id: str = ""
    offset_msg_id: str = ""
    broker_name: str = ""

    @property
    def producer_group(self) -> str:
        """The group that the message was sent by (``PGROUP``); empty if it doesn't say."""
        return self.message.properties.get(const.PGROUP, "")

    @property
    def unique_id(self) -> str:
        """The message's ``UNIQ_KEY``, or the broker's own id of a message without one."""
        return self.message.unique_id or self.message.offset_msg_id

    def answer(self, commit_or_rollback: int, remark: str = "") -> EndTransaction:
        """Return what :meth:`.base.Transport.end_transaction` takes, for :attr:`address`."""
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
    """Return what an answered end does, for the text of an error.

    Raises
    ------
    ValueError
        It is undecided, which brokers do not answer.
    """
    if request.commit_or_rollback == TRANSACTION_NOT_TYPE:
        raise ValueError("brokers do not answer an undecided end of a transaction: use end_transaction_oneway")
    return f"ending transaction {request.msg_id}"
