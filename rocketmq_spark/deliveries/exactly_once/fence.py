"""Checks once per broker and process that a broker rejects the end of a half message after its deadline.

All exactly-once writes rely on this rule. It is not documented by RocketMQ, so another release may not have it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rocketmq_spark.deliveries.exactly_once.ends import end_half, end_request
from rocketmq_spark.deliveries.exactly_once.halves import half_properties
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.half import Half
from rocketmq_spark.errors import (
    BrokerBusyException,
    MQBrokerException,
    MQClientException,
    RemotingException,
    RocketMQError,
)
from rocketmq_spark.model.message import Message, MessageQueue, SendOutcome, SendRequest, SendStatus
from rocketmq_spark.model.message_ext import decode_message_id
from rocketmq_spark.model.send_result import TRANSACTION_PREPARED_TYPE, TRANSACTION_ROLLBACK_TYPE
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.records import decode_properties, encode_single

_GROUP: Final = "rocketmq-spark-fence"
# The age of the half message that is too old, milliseconds.
_LONG_AGO: Final = 7 * 24 * 3_600_000
_SHORT: Final = 1_000

# The addresses of brokers that passed the check.
_passed: set[str] = set()


def forget_checks() -> None:
    """Check all brokers again."""
    _passed.clear()


def check_fence(brokers: Brokers, queue: MessageQueue) -> None:
    """Store two half messages at a queue's broker, and roll them back; raise an MQClientException if it has no fence.

    The first one is older than its deadline, so the broker must reject the rollback. The second one is new.
    """
    address = brokers.address_of(queue)
    if address in _passed:
        return
    late = _end(brokers, queue, born_before=_LONG_AGO, timeout_ms=_SHORT)
    if not (isinstance(late, MQBrokerException) and late.response_code == ResponseCode.ILLEGAL_OPERATION):
        raise MQClientException(
            f"delivery=exactlyOnce is not possible with broker {queue.broker_name} ({address}): it must reject the end "
            f"of a half message after its deadline (code {int(ResponseCode.ILLEGAL_OPERATION)}), but it answered: "
            f"{late or 'success'}. Use RocketMQ 5.4 or newer, whose brokers do, or delivery=atLeastOnce"
        )
    new = _end(brokers, queue, born_before=0, timeout_ms=brokers.options.transaction_timeout_ms)
    if new is not None:
        raise MQClientException(
            f"delivery=exactlyOnce is not possible with broker {queue.broker_name} ({address}): it rejects the end of "
            f"a new half message: {new}. Check that its clock agrees with this one, and that it accepts transactions"
        ) from new
    _passed.add(address)


def _end(brokers: Brokers, queue: MessageQueue, *, born_before: int, timeout_ms: int) -> RocketMQError | None:
    """Store a half message and roll it back; return the broker's error. Without an answer, do both again."""
    born = int(brokers.runtime.wall_clock() * 1000) - born_before

    def store_and_end(address: str, timeout: float) -> RocketMQError | None:
        half = _store(brokers, queue, address, timeout, born, timeout_ms)
        answers = brokers.runtime.queue()
        end_half(brokers, half, _GROUP, TRANSACTION_ROLLBACK_TYPE, answers.put)
        error: RocketMQError | None = answers.get()
        if isinstance(error, RemotingException | BrokerBusyException):
            raise error
        if error is not None:
            # The answer to a check has no deadline. Without it the broker would check the half message many times.
            request = end_request(half, _GROUP, TRANSACTION_ROLLBACK_TYPE)
            brokers.transport.end_transaction_oneway(address, replace(request, from_transaction_check=True), timeout)
        return error

    return brokers.request(queue, store_and_end)


def _store(brokers: Brokers, queue: MessageQueue, address: str, timeout: float, born: int, timeout_ms: int) -> Half:
    properties = decode_properties(half_properties(_GROUP, timeout_ms).encode())
    batch = encode_single(Message(queue.topic, b"fence", 0, properties), TRANSACTION_PREPARED_TYPE)
    options = brokers.options.connection
    request = SendRequest(
        batch, queue, address, _GROUP, options.create_topic_key, options.default_topic_queue_nums, born
    )  # fmt: skip
    outcomes = brokers.runtime.queue()
    brokers.transport.send(request, timeout, outcomes.put, within=timeout)
    outcome: SendOutcome = outcomes.get()
    if outcome.error is not None:
        raise outcome.error
    if outcome.status is not SendStatus.SEND_OK:
        raise MQClientException(f"storing a half message at {address}: the broker answered {outcome.status}")
    return Half(queue, decode_message_id(outcome.offset_msg_id)[1], outcome.queue_offset, born)
