"""Half messages: sent, decided by a local transaction, ended; and the broker's question about those left open.

Rule 1: the local transaction runs only after the half message is safe (`SEND_OK`); any other answer rolls it back.
Rule 2: what a local transaction raises, None, or what is no state, means "not known yet": the broker asks
        back, nothing is guessed.
Rule 3: the broker acknowledges an end, unlike Java's, which is one-way: brokers drop one-way ends under load. An end
        without an acknowledgement is in the result and in the log, and is never sent twice: a second commit would
        deliver the message again. The broker asks back.

Follows ``DefaultMQProducerImpl.sendMessageInTransaction``, ``endTransaction``, ``checkTransactionState``
(spec/producer.md section 12).
"""

from __future__ import annotations

import logging
import queue as queues
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Protocol

from rocketmq_spark.client.own_pool import OwnPool
from rocketmq_spark.compression import COMPRESSED_FLAG, decompress
from rocketmq_spark.errors import MQClientException, RocketMQError
from rocketmq_spark.message import Message, SendStatus
from rocketmq_spark.message_const import (
    DELAY,
    PGROUP,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    TRAN_MSG,
    TRANSACTION_ID,
    UNIQ_KEY,
)
from rocketmq_spark.message_ext import MessageExt, decode_message_id
from rocketmq_spark.namespace import unwrap, wrap
from rocketmq_spark.producer.heart_beat import API_TIMEOUT
from rocketmq_spark.producer.hooks import EndTransactionContext, Hooks
from rocketmq_spark.producer.kernel import Kernel
from rocketmq_spark.send_result import LocalTransactionState, SendResult, TransactionSendResult
from rocketmq_spark.transaction import (
    TRANSACTION_COMMIT_TYPE,
    TRANSACTION_NOT_TYPE,
    TRANSACTION_ROLLBACK_TYPE,
    EndTransaction,
    TransactionCheck,
)
from rocketmq_spark.transport.base import Transport
from rocketmq_spark.wire.codes import ResponseCode

logger = logging.getLogger("rocketmq_spark.producer")

LocalTransactionExecutor = Callable[[Message, Any], "LocalTransactionState | None"]

# Checks that wait for the listener; the broker asks again for those beyond (checkRequestHoldMax).
_MAX_CHECKS: Final = 2000

_ENDS: Final = {
    LocalTransactionState.COMMIT_MESSAGE: TRANSACTION_COMMIT_TYPE,
    LocalTransactionState.ROLLBACK_MESSAGE: TRANSACTION_ROLLBACK_TYPE,
    LocalTransactionState.UNKNOW: TRANSACTION_NOT_TYPE,
}


class TransactionListener(Protocol):
    """What decides on half messages (``TransactionListener.java``)."""

    def execute_local_transaction(self, message: Message, arg: Any) -> LocalTransactionState | None:
        """Run the local transaction, right after the half message was stored; on the sending thread."""
        ...

    def check_local_transaction(self, message: MessageExt) -> LocalTransactionState | None:
        """Return how the local transaction of an earlier half message ended; on a thread of the producer's own.

        The body is decompressed. A message whose body can't be decompressed is not given to the listener: its state
        stays unknown, and the log has the cause.
        """
        ...


@dataclass(frozen=True, slots=True)
class Transactions:
    """The transactional side of one producer.

    Parameters
    ----------
    producer_group : str
        With the namespace.
    namespace : str
        Empty for none.
    transport : Transport
    kernel : Kernel
    hooks : Hooks
    send : callable
        Sends a message synchronously, with retries.
    timeout : float
        Seconds for an end and its acknowledgement.
    """

    producer_group: str
    namespace: str
    transport: Transport
    kernel: Kernel
    hooks: Hooks
    send: Callable[[Message], SendResult]
    timeout: float

    def run(self, message: Message, executor: LocalTransactionExecutor, arg: Any) -> TransactionSendResult:
        """Send a half message, run the local transaction, and tell the broker how it ended.

        Raises
        ------
        MQClientException
            The half message could not be sent; the local transaction has not run.
        """
        half = self._half(message)
        try:
            result = self.send(half)
        except RocketMQError as exc:
            code = getattr(exc, "response_code", -1)
            raise MQClientException(f"sending a half message to topic {message.topic}: {exc}", code) from exc
        # Java's getTransactionId: the unique id, then and at every check, whatever the broker calls the transaction.
        half = half.with_properties({UNIQ_KEY: result.msg_id, TRANSACTION_ID: result.msg_id})
        state, failure = LocalTransactionState.ROLLBACK_MESSAGE, None
        if result.status is SendStatus.SEND_OK:
            state, failure = _decided(lambda: executor(half, arg))
        end_error: RocketMQError | None = None
        try:
            self._end(half, result, state, failure)
        except (RocketMQError, ValueError) as exc:
            end_error = exc if isinstance(exc, RocketMQError) else MQClientException(str(exc))
            logger.warning("ending the transaction of message %s (%s): %s; the broker will ask back", result.msg_id,
                           state.name, exc, exc_info=True)  # fmt: skip
        known = {field.name: getattr(result, field.name) for field in fields(SendResult)}
        return TransactionSendResult(**known, local_transaction_state=state, end_error=end_error)

    def _half(self, message: Message) -> Message:
        if message is None:
            raise MQClientException("sending a half message: there is none, it is None", ResponseCode.MESSAGE_ILLEGAL)
        # The broker would lose a half message with a delay: its REAL_TOPIC is overwritten (spec/remoting.md 11.1).
        timers = [name for name in (TIMER_DELAY_MS, TIMER_DELAY_SEC, TIMER_DELIVER_MS) if name in message.properties]
        if timers:
            logger.warning("a half message to topic %s can't be delayed: %s dropped", message.topic, ", ".join(timers))
        plain = message.without_properties(DELAY, *timers)
        return plain.with_properties({TRAN_MSG: "true", PGROUP: self.producer_group})

    def _end(self, half: Message, result: SendResult, state: LocalTransactionState, failure: Exception | None) -> None:
        queue = replace(result.message_queue, topic=wrap(self.namespace, result.message_queue.topic))
        address = self.kernel.address_of(queue)
        # A proxy tells neither queue nor offset, and keeps them itself (spec/grpc.md section 5.7).
        known = queue.queue_id >= 0
        commit_log_offset = decode_message_id(result.offset_msg_id or result.msg_id)[1] if known else 0
        end = EndTransaction(
            topic=queue.topic,
            producer_group=self.producer_group,
            tran_state_table_offset=result.queue_offset,
            commit_log_offset=commit_log_offset,
            commit_or_rollback=_ENDS[state],
            msg_id=result.msg_id,
            transaction_id=result.transaction_id,
            broker_name=queue.broker_name,
            remark=_remark("executing the local transaction", failure),
        )
        self._tell(half, address, end, state, from_check=False)

    def answer(self, check: TransactionCheck, listener: TransactionListener) -> None:
        """Answer a broker's question, to the address that asked."""
        message = replace(
            check.message,
            topic=unwrap(check.message.topic, self.namespace),
            properties={**check.message.properties, TRANSACTION_ID: check.unique_id},
        )
        # A body that can't be decompressed is answered as unknown, with the cause as the remark.
        state, failure = _decided(lambda: listener.check_local_transaction(_decompressed(message)))
        end = check.answer(_ENDS[state], _remark("checking the local transaction", failure))
        try:
            self._tell(message, check.address, end, state, from_check=True)
        except RocketMQError as exc:
            logger.warning("answering the check of message %s at %s: %s; the broker will ask again", check.unique_id,
                           check.address, exc)  # fmt: skip

    def _tell(
        self, message: Message, address: str, end: EndTransaction, state: LocalTransactionState, *, from_check: bool
    ) -> None:
        self.hooks.end_transaction(
            EndTransactionContext(
                self.producer_group, address, message, end.msg_id, end.transaction_id, state, from_check
            )
        )
        if from_check or state is LocalTransactionState.UNKNOW:
            # Brokers do not answer an undecided end. A lost answer to a check costs nothing: the broker asks again.
            self.transport.end_transaction_oneway(address, end, API_TIMEOUT if from_check else self.timeout)
            return
        outcomes: queues.SimpleQueue[RocketMQError | None] = queues.SimpleQueue()
        self.transport.end_transaction(address, end, self.timeout, outcomes.put)
        error = outcomes.get()
        if error is not None:
            raise error


class CheckExecutor:
    """The thread on which a listener is asked about earlier half messages.

    Parameters
    ----------
    transactions : Transactions
    listener : TransactionListener
    """

    def __init__(self, transactions: Transactions, listener: TransactionListener) -> None:
        self._transactions = transactions
        self._listener = listener
        self._pool = OwnPool("rocketmq-transaction-check", 1)
        self._room = threading.BoundedSemaphore(_MAX_CHECKS)
        # Said once, until there is room again: a broker may ask without end.
        self._full = False

    def submit(self, check: TransactionCheck) -> None:
        """Take a check, without blocking; one too many is dropped, the broker asks again."""
        if not self._room.acquire(blocking=False):
            level = logging.DEBUG if self._full else logging.WARNING
            self._full = True
            logger.log(level, "check of message %s dropped: %d wait already", check.unique_id, _MAX_CHECKS)
            return
        self._full = False
        try:
            self._pool.submit(self._answer, check)
        except RuntimeError:
            self._room.release()
            logger.debug("check of message %s dropped: shut down", check.unique_id)

    def _answer(self, check: TransactionCheck) -> None:
        try:
            self._transactions.answer(check, self._listener)
        except Exception:
            logger.exception("the check of message %s failed", check.unique_id)
        finally:
            self._room.release()

    def shutdown(self) -> None:
        """End the thread after the check that it is at."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _decided(
    decide: Callable[[], LocalTransactionState | None],
) -> tuple[LocalTransactionState, Exception | None]:
    try:
        state = decide()
        if not isinstance(state, LocalTransactionState | None):
            raise TypeError(f"answered {state!r}: a LocalTransactionState or None is allowed")
    except Exception as exc:
        logger.warning(
            "a local transaction gave no answer: its state is not known, the broker will ask back", exc_info=True
        )
        return LocalTransactionState.UNKNOW, exc
    return state or LocalTransactionState.UNKNOW, None


def _decompressed(message: MessageExt) -> MessageExt:
    body = decompress(message.body, message.sys_flag)
    return replace(message, body=body, sys_flag=message.sys_flag & ~COMPRESSED_FLAG)


def _remark(doing: str, failure: Exception | None) -> str:
    return "" if failure is None else f"{doing} raised {type(failure).__name__}: {failure}"
