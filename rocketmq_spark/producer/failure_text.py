"""What a failed delivery is called: in the error of its write, and in the counts by reason."""

from __future__ import annotations

from typing import Final

from rocketmq_spark.errors import DeliveryError, MQBrokerException, RocketMQError
from rocketmq_spark.message import EncodedBatch, SendOutcome
from rocketmq_spark.producer.delivery import Delivery
from rocketmq_spark.wire.lone_message import lone_message

# How much of a message's keys or tags an error shows, characters.
_SHOWN: Final = 100


def reason(outcome: SendOutcome) -> str:
    """Name an outcome that is not `SEND_OK`, as ``retries_by_reason`` and ``failures_by_code`` show it."""
    if outcome.status is not None:
        return outcome.status.name
    code = getattr(outcome.error, "response_code", None)
    name = type(outcome.error).__name__
    return f"{name} {code}" if code is not None else name


def refused_for_good(delivery: Delivery, outcome: SendOutcome) -> str:
    """Say why a delivery is given up before its time is over."""
    if outcome.status is None:
        # Else it is this side that refuses: a certificate that it does not trust, say.
        told_by_broker = isinstance(outcome.error, MQBrokerException)
        return "the broker refused it for good" if told_by_broker else "sending it again would not help"
    return (
        f"broker {outcome.queue.broker_name} stored it {delivery.attempts.not_store_ok} times but answered "
        f"{outcome.status.name} each time: it is not safe there yet. Mend the broker's flushing or replication, "
        "or set requireStoreOk=false to accept that"
    )


def no_queue(delivery: Delivery, delivery_timeout_ms: int) -> str:
    """Say what a delivery has waited for in vain."""
    wanted = delivery.wanted_queue
    if wanted is None:
        return f"waited deliveryTimeoutMs={delivery_timeout_ms} for any writable queue of topic {delivery.batch.topic}"
    return (
        f"waited deliveryTimeoutMs={delivery_timeout_ms} for queue {wanted}: no name server lists a master of broker "
        f"{wanted.broker_name} with this queue; start the broker"
    )


def delivery_error(delivery: Delivery, why: str) -> DeliveryError:
    """Return the error of a write that ends with this delivery; its cause is the last attempt's error."""
    batch, error = delivery.batch, delivery.last_error
    where = f" to {delivery.queue}" if delivery.queue else ""
    what = f"{batch.rows} rows of topic {batch.topic} ({'; '.join((f'{batch.nbytes} bytes', *_which(batch)))})"
    failure = DeliveryError(f"sending {what}{where}: {why}" + (f"; last error: {error}" if error else ""))
    failure.__cause__ = error
    return failure


def _which(batch: EncodedBatch) -> list[str]:
    """Return by what the one row of a batch is found again, where it was sent from; nothing of several rows."""
    try:
        message = lone_message(batch)
    except RocketMQError:
        # It is told why the delivery failed; that its batch can't be read is no better reason.
        return []
    if message is None:
        return []
    found = {"keys": message.keys, "tags": message.tags, "message id": message.unique_id}
    return [f"{name} {text[:_SHOWN]}" for name, text in found.items() if text]
