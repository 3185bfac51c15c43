"""How a fake broker decodes and checks one send request, and which properties and placement it gives the messages.

`BrokerStorage` checks topic and queue, and stores. Follows ``SendMessageProcessor.java`` and
``AbstractSendMessageProcessor.java``. RocketMQ 5.5.0 refuses with the same codes (docs/internals/messages.md).
The conformance tests compare some sends with a real broker.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import rocketmq_spark.model.properties as const
from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.names import FORBIDDEN_TOPICS, MAX_TOPIC_LENGTH, is_blank, is_legal
from rocketmq_spark.protocol.remoting.codes import DELAY_ILLEGAL, KEY_MISSING, RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.protocol.remoting.records import MAX_PROPERTIES, decode_batch, decode_properties, encode_properties
from rocketmq_spark.protocol.remoting.responses import DEFAULT_REGION
from rocketmq_spark.testing.store import HALF_TOPIC

# ``MessageStoreConfig.messageDelayLevel``, seconds.
DELAY_LEVELS: Final = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
# ``timerMaxDelaySec``
_LONGEST_DELAY: Final = 3 * 24 * 3600

_LONG_NAMES: Final = (
    *("producerGroup", "topic", "defaultTopic", "defaultTopicQueueNums", "queueId", "sysFlag", "bornTimestamp", "flag"),
    *("properties", "reconsumeTimes", "unitMode", "maxReconsumeTimes", "batch", "bname"),
)
_NEEDED: Final = "abcdefgh"

_TIMERS: Final = (const.TIMER_DELAY_SEC, const.TIMER_DELAY_MS, const.TIMER_DELIVER_MS)
_TRANSACTION_BITS: Final = 0xC
_INNER_BATCH: Final = 0x80
_ILLEGAL: Final = "the message is illegal, maybe msg body or properties length not matched."


class Refusal(Exception):
    """The code and the remark of an answer to a request that the broker did not execute."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(code, remark)
        self.code = code
        self.remark = remark


@dataclass(frozen=True, slots=True)
class Send:
    """A decoded send request."""

    topic: str
    default_topic: str
    default_topic_queue_nums: int
    queue_id: int
    sys_flag: int
    born_timestamp: int
    properties: Mapping[str, str]
    messages: tuple[Message, ...]
    batch: bool

    @property
    def waits(self) -> bool:
        """Whether the answer comes after flush and replication."""
        return self.properties.get(const.WAIT, "true").lower() == "true"


class Placement(NamedTuple):
    """Where the broker stores the messages of a send: as a half message, after a delay (seconds), or at once."""

    half: bool = False
    delay: float | None = None
    is_timer: bool = False

    @property
    def internal_topic(self) -> str:
        """The topic that has the messages first; "" if consumers see them at once."""
        if self.delay is not None:
            return "rmq_sys_wheel_timer" if self.is_timer else "SCHEDULE_TOPIC_XXXX"
        return HALF_TOPIC if self.half else ""


def decode_send(command: RemotingCommand, max_message_size: int) -> Send:
    """Return the send of a request; Refusal for one that brokers refuse before they look at the topic."""
    fields = _short_names(command)
    if missing := [name for name in _NEEDED if name not in fields]:
        raise Refusal(ResponseCode.SYSTEM_ERROR, f"java.lang.NullPointerException: {', '.join(missing)}")
    topic, properties = fields["b"], decode_properties(fields.get("i", "").encode())
    body, batch, sys_flag = bytes(command.body), fields.get("m") == "true", int(fields["f"])
    if not is_legal(topic) or len(topic) > MAX_TOPIC_LENGTH:
        raise Refusal(ResponseCode.INVALID_PARAMETER, f"The specified topic[{topic}] is illegal or too long.")
    if topic in FORBIDDEN_TOPICS:
        raise Refusal(ResponseCode.NO_PERMISSION, f"Sending message to topic[{topic}] is forbidden.")
    if batch:
        messages = _batch_of(topic, body, max_message_size)
        if sys_flag & _TRANSACTION_BITS or const.DELAY in properties:
            raise Refusal(ResponseCode.MESSAGE_ILLEGAL, _ILLEGAL)
    else:
        if not body:
            raise Refusal(ResponseCode.SYSTEM_ERROR, "java.lang.NullPointerException: msg.getBody() is null")
        # The broker's own additions take about 110 bytes.
        added = len(encode_properties(properties)) + 110 if properties else 0
        illegal = "INNER_NUM" in properties or sys_flag & _INNER_BATCH or added > MAX_PROPERTIES
        if illegal or len(body) > max_message_size:
            raise Refusal(ResponseCode.MESSAGE_ILLEGAL, _ILLEGAL)
        messages = (Message(topic, body, int(fields["h"]), properties),)
    return Send(
        topic=topic,
        default_topic=fields["c"],
        default_topic_queue_nums=int(fields["d"]),
        queue_id=int(fields["e"]),
        sys_flag=sys_flag,
        born_timestamp=int(fields["g"]),
        properties=properties,
        messages=messages,
        batch=batch,
    )


def placement_of(send: Send, now: float) -> Placement:
    """Return where a send's messages go; Refusal for a delay that brokers refuse. `now` is seconds since the epoch."""
    if send.batch:
        return Placement()
    (message,) = send.messages
    if message.is_half_message:
        return Placement(half=True)
    if level := message.properties.get(const.DELAY):
        if not level.isdigit():
            raise Refusal(ResponseCode.SYSTEM_ERROR, f'java.lang.NumberFormatException: For input string: "{level}"')
        return Placement(delay=float(DELAY_LEVELS[min(int(level), len(DELAY_LEVELS)) - 1]) if int(level) else None)
    timer = next((name for name in _TIMERS if name in message.properties), None)
    if timer is None:
        return Placement()
    text = message.properties[timer]
    if not text.lstrip("-").isdigit():
        raise Refusal(ResponseCode.MESSAGE_ILLEGAL, f"{DELAY_ILLEGAL}, ...")
    number = int(text)
    delay = number / 1000 - now if timer == const.TIMER_DELIVER_MS else number / (1000 if "MS" in timer else 1)
    if delay > _LONGEST_DELAY:
        raise Refusal(ResponseCode.MESSAGE_ILLEGAL, f"{DELAY_ILLEGAL}, the delay time should not be bigger than ...")
    return Placement(delay=delay, is_timer=True) if delay > 0 else Placement()


def priority_of(send: Send) -> int | None:
    """Return the priority that chooses the queue of a single message; None without one, or beside another type."""
    others = {const.DELAY, const.SHARDING_KEY, const.TRAN_MSG, *_TIMERS}
    if send.batch or others & send.properties.keys():
        return None
    return send.messages[0].priority


def with_additions(send: Send, cluster: str, unique_id: str) -> Message:
    """Return a single message with the properties that the broker adds; `unique_id` is used if it has none."""
    (message,) = send.messages
    added = {const.UNIQ_KEY: unique_id, **message.properties, **_added(cluster)}
    if message.lite_topic:
        added[const.INNER_MULTI_DISPATCH] = f"%LMQ%${send.topic}${message.lite_topic}"
    if message.priority is not None and priority_of(send) is None:
        del added[const.PRIORITY]
    return replace(message, properties=added)


def check_keys(send: Send) -> tuple[Message, ...]:
    """Return the messages that a compaction topic keeps; Refusal for a single message without a key."""
    kept = tuple(message for message in send.messages if not is_blank(message.keys or ""))
    if not kept and not send.batch:
        raise Refusal(ResponseCode.MESSAGE_ILLEGAL, KEY_MISSING)
    return kept


def with_real_queue(message: Message, queue: MessageQueue) -> Message:
    """Return a half or delayed message with its topic and queue id among its properties."""
    return message.with_properties({"REAL_TOPIC": queue.topic, "REAL_QID": str(queue.queue_id)})


def committed(half: Message) -> Message:
    """Return a half message as consumers see it after its commit."""
    message = half.without_properties("REAL_TOPIC", "REAL_QID")
    return message.with_properties({const.TRANSACTION_ID: half.properties[const.UNIQ_KEY]})


def inner_batch(send: Send, body: bytes, cluster: str, first: int) -> Message:
    """Return the one message that a BatchCQ topic stores for a batch whose header has ``UNIQ_KEY``."""
    range_ = {"INNER_NUM": str(len(send.messages)), "INNER_BASE": str(first)}
    return Message(send.topic, body, properties={**send.properties, **_added(cluster), **range_})


def recall_handle(queue: MessageQueue, deliver_ms: int, unique_id: str) -> str:
    """Return the handle of a timer message (docs/internals/messages.md#delays)."""
    text = f"v1 {queue.topic} {queue.broker_name} {deliver_ms + 1} {unique_id}"
    return base64.urlsafe_b64encode(text.encode()).decode()


def _added(cluster: str) -> dict[str, str]:
    return {"MSG_REGION": DEFAULT_REGION, "TRACE_ON": "true", "CLUSTER": cluster}


def _short_names(command: RemotingCommand) -> Mapping[str, str]:
    if command.code != RequestCode.SEND_MESSAGE:
        return command.ext_fields
    letters = dict(zip(_LONG_NAMES, "abcdefghijklmn", strict=True))
    return {letters[name]: text for name, text in command.ext_fields.items() if name in letters}


def _batch_of(topic: str, body: bytes, max_message_size: int) -> tuple[Message, ...]:
    if len(body) > max_message_size:
        raise Refusal(ResponseCode.SYSTEM_ERROR, f"message body size exceeded, msg body size: {len(body)}")
    try:
        messages = tuple(decode_batch(body, topic))
    except RemotingCommandException as exc:
        # A broker finds out in one of two ways, by the length of the rest.
        failure = "java.nio.BufferUnderflowException" if "20 bytes claimed" in str(exc) else "newPosition > limit"
        raise Refusal(ResponseCode.SYSTEM_ERROR, failure) from exc
    if not messages:
        raise Refusal(ResponseCode.SYSTEM_ERROR, "java.lang.NullPointerException: the batch has no message")
    return messages
