"""Several messages as the body of one request, checked as Java checks a collection.

Rule 1: the checks that concern the batch come first, message by message; then each member is validated and gets its
        id. Whatever is wrong is one error with the first cause.
Rule 2: the whole encoded body keeps to maxMessageSize; that error is the one of a single message that is too large.
Rule 3: a batch is never compressed, and nothing of the caller's changes: members are encoded from copies.

Follows ``DefaultMQProducer.batch`` and ``MessageBatch.generateFromList`` of 5.5.0 (spec/producer.md section 3.8).
Unlike Java, more than 32,000 messages are refused: a broker would acknowledge them and damage its queue
(spec/remoting.md 6.4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.message import EncodedBatch, Message
from rocketmq_spark.message_const import INSTANCE_ID, UNIQ_KEY, WAIT
from rocketmq_spark.names import RETRY_PREFIX
from rocketmq_spark.namespace import is_none, wrap
from rocketmq_spark.producer.validators import check_message
from rocketmq_spark.wire.codes import ResponseCode
from rocketmq_spark.wire.records import encode_batch, encode_properties


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """A batch, ready to be sent.

    Parameters
    ----------
    encoded : EncodedBatch
        With the topic as brokers know it; its properties are WAIT, UNIQ_KEY and, in a namespace, INSTANCE_ID.
    unique_id : str
        The id of the batch itself: a broker that stores the batch as one message answers with it.
    member_ids : tuple of str
        In the order of the messages.
    """

    encoded: EncodedBatch
    unique_id: str
    member_ids: tuple[str, ...]

    def msg_id(self, batch_uniq_id: str) -> str:
        """Return the id that a send result carries, given the one that the broker answered ("" for none)."""
        return self.unique_id if batch_uniq_id else ",".join(self.member_ids)


def encode_message_batch(
    messages: Iterable[Message], *, max_message_size: int, next_id: Callable[[], str], namespace: str | None = None
) -> MessageBatch:
    """Check and encode messages that are to be stored together or not at all.

    Parameters
    ----------
    messages : iterable of Message
        Of one topic (without namespace) and one waitStoreMsgOK.
    max_message_size : int
        Bytes that the whole body may have.
    next_id : callable
        Draws the ids of members that have none, and the batch's.
    namespace : str, optional

    Raises
    ------
    MQClientException
        Code -1, with the cause: no message or too many, several topics or waitStoreMsgOK, a delay, a retry topic, or a
        message that is invalid by itself. Code 13: together they are larger than `max_message_size`.
    """
    try:
        members = list(messages)
        _check_members(members)
        for member in members:
            check_message(member, max_message_size)
        members = [member if member.unique_id else member.with_properties({UNIQ_KEY: next_id()}) for member in members]
        body = encode_batch(members)
    except (MQClientException, ValueError, TypeError) as exc:
        raise MQClientException(f"making a batch of messages: {exc}") from exc
    topic = wrap(namespace, members[0].topic)
    batch_id = next_id()
    properties = {WAIT: str(members[0].wait_store_msg_ok).lower(), UNIQ_KEY: batch_id}
    if not is_none(namespace):
        properties[INSTANCE_ID] = str(namespace)
    # As Java: the name is valid with its namespace too, and the sum of all is held to the limit of one message.
    check_message(Message(topic, body), max_message_size)
    encoded = EncodedBatch(topic, (body,), len(members), len(body), properties=encode_properties(properties).decode())
    return MessageBatch(encoded, batch_id, tuple(str(member.unique_id) for member in members))


def _check_members(members: list[Message]) -> None:
    if not members:
        raise _illegal("there is none; a batch needs at least one")
    for number, member in enumerate(members):
        if member is None:
            raise _illegal(f"message {number} is None")
        if max(member.delay_time_level, member.delay_ms, member.delay_sec, member.deliver_ms) > 0:
            raise _illegal(f"message {number} has a delay, which a batch can't have; send it by itself")
        if member.is_half_message:
            raise _illegal(
                f"message {number} is a half message, which brokers deliver at once in a batch; send it alone"
            )
        if member.topic is not None and member.topic.startswith(RETRY_PREFIX):
            raise _illegal(f"message {number} is for retry topic {member.topic!r}, which takes no batches")
        if member.topic != members[0].topic:
            raise _illegal(
                f"message {number} is for topic {member.topic!r}, message 0 for {members[0].topic!r}; make one batch "
                "for each topic"
            )
        if member.wait_store_msg_ok != members[0].wait_store_msg_ok:
            raise _illegal(f"messages 0 and {number} differ in waitStoreMsgOK; make one batch for each")


def _illegal(reason: str) -> MQClientException:
    return MQClientException(reason, ResponseCode.MESSAGE_ILLEGAL)
