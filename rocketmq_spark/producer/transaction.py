"""Sends half messages, runs local transactions, reports how they ended, and answers the checks of servers.

Consumers do not see a half message until its transaction is committed. The local transaction runs only if the half
message was stored with SEND_OK; otherwise a rollback is reported. In a check, a server asks how a transaction ended.
See docs/internals/producer.md#transactions and docs/internals/messages.md#end_transaction.
"""

from __future__ import annotations

import logging
import queue as queues
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Protocol

import rocketmq_spark.model.properties as const
from rocketmq_spark.errors import MQClientException, RocketMQError
from rocketmq_spark.model.message import Message, SendStatus
from rocketmq_spark.model.message_ext import MessageExt, decode_message_id
from rocketmq_spark.model.send_result import (
    TRANSACTION_COMMIT_TYPE,
    TRANSACTION_NOT_TYPE,
    TRANSACTION_ROLLBACK_TYPE,
    EndTransaction,
    LocalTransactionState,
    SendResult,
    TransactionCheck,
    TransactionSendResult,
)
from rocketmq_spark.producer.attempt import broker_address
from rocketmq_spark.producer.encode import decompressed
from rocketmq_spark.producer.hooks import EndTransactionContext, Hooks
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.heart_beat import API_TIMEOUT
from rocketmq_spark.transport.runtime import PROCESS, Runtime

logger = logging.getLogger("rocketmq_spark.producer")

LocalTransactionExecutor = Callable[[Message, Any], "LocalTransactionState | None"]

_TIMERS: Final = (const.TIMER_DELAY_MS, const.TIMER_DELAY_SEC, const.TIMER_DELIVER_MS)

# Pending checks (checkRequestHoldMax). The broker repeats those beyond.
_MAX_CHECKS: Final = 2000

_ENDS: Final = {
    LocalTransactionState.COMMIT_MESSAGE: TRANSACTION_COMMIT_TYPE,
    LocalTransactionState.ROLLBACK_MESSAGE: TRANSACTION_ROLLBACK_TYPE,
    LocalTransactionState.UNKNOW: TRANSACTION_NOT_TYPE,
}


class TransactionListener(Protocol):
    """Decides on half messages (``TransactionListener.java``)."""

    def execute_local_transaction(self, message: Message, arg: Any) -> LocalTransactionState | None:
        """Run the local transaction after the half message was stored (SEND_OK), on the thread of the caller."""

    def check_local_transaction(self, message: MessageExt) -> LocalTransactionState | None:
        """Return how the local transaction of an earlier half message ended. It runs on a thread of the producer.

        If the body cannot be decompressed, this is not called: the state stays unknown, and the cause is logged.
        """


@dataclass(slots=True, eq=False)
class Transactions:
    """The transactions of one producer; `send` makes retries, and the listener's checks run on `check_executor`."""

    producer_group: str
    timeout: float
    instance: ClientInstance
    hooks: Hooks
    send: Callable[[Message], SendResult]
    listener: TransactionListener | None
    check_executor: Executor
    runtime: Runtime = PROCESS
    _free_checks: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(_MAX_CHECKS), init=False
    )
    # The ids of messages whose local transaction runs, or whose end is not acknowledged yet.
    _undecided: set[str] = field(default_factory=set, init=False)
    # Dropped checks are logged as a warning once, until a check is taken again: brokers may repeat them endlessly.
    _dropping_checks: bool = field(default=False, init=False)

    def run(self, message: Message, executor: LocalTransactionExecutor | None, arg: Any) -> TransactionSendResult:
        """Send a half message, run the local transaction, report its end; raises as `Producer.send_in_transaction`."""
        if self.listener is None:
            raise MQClientException(
                f"sending in a transaction: producer {self.producer_group} has no transaction_listener, which the "
                "broker's checks need; pass one to Producer(...)"
            )
        execute = executor or self.listener.execute_local_transaction
        half = self._half(message)
        try:
            result = self.send(half)
        except RocketMQError as exc:
            code = getattr(exc, "response_code", -1)
            error = MQClientException(f"sending a half message to topic {message.topic}: {exc}", code)
            error.maybe_stored = exc.maybe_stored
            raise error from exc
        # As Java's getTransactionId: the unique id, not the broker's transaction id.
        half = half.with_properties({const.UNIQ_KEY: result.msg_id, const.TRANSACTION_ID: result.msg_id})
        self._undecided.add(result.msg_id)
        try:
            return self._decide_and_end(half, result, lambda: execute(half, arg))
        finally:
            self._undecided.discard(result.msg_id)

    def _decide_and_end(
        self, half: Message, result: SendResult, execute: Callable[[], LocalTransactionState | None]
    ) -> TransactionSendResult:
        state, remark = LocalTransactionState.ROLLBACK_MESSAGE, ""
        if result.status is SendStatus.SEND_OK:
            state, remark = _decided("executing the local transaction", result.msg_id, execute)
        end_error: RocketMQError | None = None
        try:
            self._end(half, result, state, remark)
        except (RocketMQError, ValueError) as exc:
            end_error = exc if isinstance(exc, RocketMQError) else MQClientException(str(exc))
            text = "ending the transaction of message %s (%s): %s; the broker will check it later"
            logger.warning(text, result.msg_id, state.name, exc, exc_info=True)
        values = {field.name: getattr(result, field.name) for field in fields(SendResult)}
        return TransactionSendResult(**values, local_transaction_state=state, end_error=end_error)

    def submit_check(self, check: TransactionCheck) -> None:
        """Answer a broker's check on the check executor. This call does not block: checks beyond 2,000 are dropped."""
        if self.listener is None:
            text = "%s checks the transaction of message %s, but producer %s has no transaction_listener; pass it one"
            logger.warning(text, check.address, check.unique_id, self.producer_group)
            return
        if not self._free_checks.acquire(blocking=False):
            level = logging.DEBUG if self._dropping_checks else logging.WARNING
            self._dropping_checks = True
            text = "transaction check of message %s dropped: %d are pending already; the broker will repeat the check"
            logger.log(level, text, check.unique_id, _MAX_CHECKS)
            return
        self._dropping_checks = False
        try:
            self.check_executor.submit(self._answer, check, self.listener)
        except RuntimeError:
            self._free_checks.release()
            logger.debug("transaction check of message %s dropped: the producer is shut down", check.unique_id)

    def _half(self, message: Message) -> Message:
        if message is None:
            raise MQClientException("sending a half message: got None; pass a Message", ResponseCode.MESSAGE_ILLEGAL)
        if message.priority is not None or message.lite_topic:
            raise MQClientException(
                f"sending a half message to topic {message.topic}: it has a priority or a lite topic, which brokers "
                "ignore in transactions; leave it out",
                ResponseCode.MESSAGE_ILLEGAL,
            )
        # The broker would lose a half message with a delay: the delay overwrites its REAL_TOPIC.
        timers = [name for name in _TIMERS if name in message.properties]
        if timers:
            logger.warning(
                "a half message to topic %s can't be delayed: properties dropped: %s", message.topic, ", ".join(timers)
            )
        plain = message.without_properties(const.DELAY, *timers)
        return plain.with_properties({const.TRAN_MSG: "true", const.PGROUP: self.producer_group})

    def _end(self, half: Message, result: SendResult, state: LocalTransactionState, remark: str) -> None:
        queue = result.message_queue
        address = broker_address(self.instance.routes, queue)
        # A proxy returns neither queue nor offset.
        has_offset = queue.queue_id >= 0
        commit_log_offset = decode_message_id(result.offset_msg_id or result.msg_id)[1] if has_offset else 0
        end = EndTransaction(
            topic=queue.topic,
            producer_group=self.producer_group,
            tran_state_table_offset=result.queue_offset,
            commit_log_offset=commit_log_offset,
            commit_or_rollback=_ENDS[state],
            msg_id=result.msg_id,
            transaction_id=result.transaction_id,
            broker_name=queue.broker_name,
            remark=remark,
        )
        self._send_end(half, address, end, state, from_check=False)

    def _is_undecided(self, check: TransactionCheck) -> bool:
        """Return whether the call for a checked message still runs in this producer, and will end the message."""
        undecided = check.unique_id in self._undecided
        if undecided:
            text = "%s checks the transaction of message %s, which still runs; the broker will repeat the check"
            logger.debug(text, check.address, check.unique_id)
        return undecided

    def _answer(self, check: TransactionCheck, listener: TransactionListener) -> None:
        try:
            if self._is_undecided(check):
                return
            properties = {**check.message.properties, const.TRANSACTION_ID: check.unique_id}
            message = replace(check.message, properties=properties)
            # If decompression fails, the answer is "unknown", and its remark is the cause.
            state, remark = _decided(
                "checking the local transaction",
                check.unique_id,
                lambda: listener.check_local_transaction(decompressed(message)),
            )
            # Again, because the local transaction may have begun during the check.
            if self._is_undecided(check):
                return
            self._send_end(message, check.address, check.answer(_ENDS[state], remark), state, from_check=True)
        except RocketMQError as exc:
            text = "answering the transaction check of message %s at %s: %s; the broker will repeat the check"
            logger.warning(text, check.unique_id, check.address, exc)
        except Exception:
            logger.exception("the transaction check of message %s failed; the broker will repeat it", check.unique_id)
        finally:
            self._free_checks.release()

    def _send_end(
        self, message: Message, address: str, end: EndTransaction, state: LocalTransactionState, *, from_check: bool
    ) -> None:
        context = EndTransactionContext(
            self.producer_group, address, message, end.msg_id, end.transaction_id, state, from_check
        )
        self.hooks.end_transaction(context)
        transport = self.instance.transport
        if from_check or state is LocalTransactionState.UNKNOW:
            # Brokers do not answer an undecided end. If the answer to a check is lost, the broker checks again.
            transport.end_transaction_oneway(address, end, API_TIMEOUT if from_check else self.timeout)
            return
        outcomes: queues.SimpleQueue[RocketMQError | None] = self.runtime.queue()
        transport.end_transaction(address, end, self.timeout, outcomes.put)
        error = outcomes.get()
        if error is not None:
            raise error


def _decided(
    doing: str, msg_id: str, decide: Callable[[], LocalTransactionState | None]
) -> tuple[LocalTransactionState, str]:
    """Return the state of a local transaction, and a remark if `decide` failed."""
    try:
        state = decide()
        if not isinstance(state, LocalTransactionState | None):
            raise TypeError(f"returned {state!r}; return a LocalTransactionState or None")
    except Exception as exc:
        text = "%s of message %s failed: the state is unknown, the broker will check it later"
        logger.warning(text, doing, msg_id, exc_info=True)
        return LocalTransactionState.UNKNOW, f"{doing} raised {type(exc).__name__}: {exc}"
    return state or LocalTransactionState.UNKNOW, ""
