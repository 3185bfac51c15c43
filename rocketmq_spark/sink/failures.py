"""Builds the texts of failures in the sink: an attempt's short reason for the metrics, and the error of a failed write.

The error has the cause, and of a batch with one message its keys, tags and id. `BatchSender` adds how many rows are
stored.
"""

from __future__ import annotations

from typing import Final

from rocketmq_spark.errors import DeliveryError, MQBrokerException, RocketMQError
from rocketmq_spark.model.message import EncodedBatch, MessageQueue, SendOutcome
from rocketmq_spark.protocol.batches import lone_message
from rocketmq_spark.sink.in_flight import PendingBatch

HOW_LOST: Final = "a power failure with flushDiskType=ASYNC_FLUSH, or a slave that lacked them became the master"
SEND_ALL_AGAIN: Final = "A retry of the task sends all of its rows again"


class LostMessagesError(DeliveryError):
    """A broker has lost messages that it had stored."""

    maybe_stored = True


def lost_tail(queue: MessageQueue, before: int, now: int, then: str) -> LostMessagesError:
    """Return the error of a queue that ended at offset `before` during a write, and ends at `now`; `then` is advice."""
    return LostMessagesError(
        f"queue {queue} ended at offset {before} before, and ends at {now} now: its broker has lost messages, perhaps "
        f"acknowledged rows of this write ({HOW_LOST}), or the topic was created again. {then}"
    )


def reason(outcome: SendOutcome) -> str:
    """Return the name of a failed outcome, for ``retries_by_reason`` and ``failures_by_code``."""
    if outcome.status is not None:
        return outcome.status.name
    code = getattr(outcome.error, "response_code", None)
    name = type(outcome.error).__name__
    return f"{name} {code}" if code is not None else name


def rejection(pending: PendingBatch, outcome: SendOutcome) -> str:
    """Return why a batch is given up before its deadline."""
    if outcome.status is None:
        if isinstance(outcome.error, LostMessagesError):
            return "the sink stops, because rows are lost"
        if isinstance(outcome.error, MQBrokerException):
            return "the broker rejected the batch, and would reject it again"
        # The client itself failed, for example because it does not trust a certificate.
        return "a retry would fail, too"
    return (
        f"the batch was stored {pending.not_store_ok} times, but never safely: broker {outcome.queue.broker_name} "
        f"last answered {outcome.status.name}. Fix flushing or replication on the topic's brokers, or set "
        "requireStoreOk=false to accept such answers"
    )


def no_queue(pending: PendingBatch, delivery_timeout_ms: int) -> str:
    """Return which queue a batch has waited for until its deadline."""
    queue = pending.wanted_queue
    if queue is None:
        return (
            f"waited deliveryTimeoutMs={delivery_timeout_ms} for any writable queue of topic {pending.batch.topic}: "
            "its route has no master with one; start a broker of the topic, or make the topic writable"
        )
    return (
        f"waited deliveryTimeoutMs={delivery_timeout_ms} for queue {queue}: no name server lists a master of broker "
        f"{queue.broker_name} with this queue; start the broker"
    )


def delivery_error(pending: PendingBatch, why: str) -> DeliveryError:
    """Return the error of a write that this batch ends; its cause is the last attempt's error."""
    batch, error = pending.batch, pending.last_error
    where = f" to {pending.queue}" if pending.queue else ""
    details = "; ".join((f"{batch.nbytes} bytes", *_message_details(batch)))
    last_error = f"; last error: {error}" if error else ""
    failure = DeliveryError(f"sending {batch.rows} rows of topic {batch.topic} ({details}){where}: {why}{last_error}")
    failure.__cause__ = error
    return failure


def _message_details(batch: EncodedBatch) -> list[str]:
    """Return keys, tags and id of a batch's only row; nothing for several rows."""
    try:
        message = lone_message(batch)
    except RocketMQError:
        # The caller's error has the reason of the failure, which helps more than a decoding error.
        return []
    if message is None:
        return []
    details = {"keys": message.keys, "tags": message.tags, "message id": message.unique_id}
    return [f"{name} {text[:100]}" for name, text in details.items() if text]
