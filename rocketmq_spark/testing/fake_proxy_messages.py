"""Makes a fake proxy's checks of messages, its requests to brokers, and its answers to clients, in pure functions.

Follows ``SendMessageActivity.java``, ``GrpcValidator.java``, ``RouteActivity.java`` and ``GrpcConverter.java``. Proxies
of RocketMQ 5.5.0 answer with the same codes (docs/internals/grpc-messages.md). Their texts need not be the same. The
conformance tests compare both proxies in some scenarios.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Final

import rocketmq_spark.model.properties as const
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendRequest, SendStatus
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.names import MAX_TOPIC_LENGTH, is_blank, is_legal, is_system_topic
from rocketmq_spark.model.route import TopicRouteData, masters_of
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.protocol.grpc.codes import STORED, Code
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.protocol.remoting.headers import head_of
from rocketmq_spark.protocol.remoting.records import encode_batch, encode_properties
from rocketmq_spark.testing.fake_sends import Refusal

# ``ProxyConfig``: userPropertyMaxNum, maxUserPropertySize, maxMessageGroupSize, maxDelayTimeMills,
# maxTransactionRecoverySecond.
_MAX_PROPERTIES: Final = 128
_MAX_PROPERTY_BYTES: Final = 16_384
_MAX_GROUP: Final = 64
_MAX_DELAY_MS: Final = 24 * 3600 * 1000
_MAX_RECOVERY: Final = 3600

_COMPRESSED: Final = 0x1
_PREPARED: Final = 0x4
_UNSPECIFIED: Final = "UNSPECIFIED"
_MIXED: Final = "MIXED"
_CODES: Final = {status: code for code, status in STORED.items()}
_STORED_BY_BROKERS: Final = frozenset(stored.value for stored in SendStatus)


def status(code: int = Code.OK, message: str = "") -> pb.Status:
    """Return the status of an answer."""
    return pb.Status(code=code, message=message or ("OK" if code == Code.OK else ""))  # type: ignore[arg-type]


def status_reply(code: int = Code.OK, message: str = "") -> bytes:
    """Return an answer with a status only. The status is the first field of every answer, so any type parses it."""
    return service.NotifyClientTerminationResponse(status=status(code, message)).SerializeToString()


def check_topic(topic: str) -> None:
    """Raise the refusal of a topic to which no client may send."""
    if not is_legal(topic) or len(topic) > MAX_TOPIC_LENGTH or is_system_topic(topic):
        raise Refusal(Code.ILLEGAL_TOPIC, f"The specified topic[{topic}] is illegal, too long, or the system's.")


def check_messages(messages: Sequence[pb.Message], max_message_size: int, now_ms: int) -> None:
    """Raise the refusal of a request whose messages a proxy does not forward."""
    if not messages:
        raise Refusal(Code.MESSAGE_CORRUPTED, "no message to send")
    topic = messages[0].topic.name
    check_topic(topic)
    for message in messages:
        if message.topic.name != topic:
            raise Refusal(Code.MESSAGE_CORRUPTED, "topic in message is not same")
        if not message.body:
            raise Refusal(Code.MESSAGE_BODY_EMPTY, "message body cannot be empty")
        if len(message.body) > max_message_size:
            raise Refusal(Code.MESSAGE_BODY_TOO_LARGE, f"message body cannot exceed the max {max_message_size}")
        _check_properties(message)
        _check_system_properties(message.system_properties, now_ms)


def _check_properties(message: pb.Message) -> None:
    properties, system = message.user_properties, message.system_properties
    if len(properties) > _MAX_PROPERTIES:
        raise Refusal(Code.MESSAGE_PROPERTIES_TOO_LARGE, f"too many user properties, max {_MAX_PROPERTIES}")
    for name, value in properties.items():
        if name in const.RESERVED_PROPERTIES:
            raise Refusal(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, f"property is used by system: {name}")
        if _has_control_character(name + value):
            raise Refusal(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, f"property {name!r} contains a control character")
    if system.tag and (is_blank(system.tag) or "|" in system.tag or _has_control_character(system.tag)):
        raise Refusal(Code.ILLEGAL_MESSAGE_TAG, "tag cannot be blank, or contain | or a control character")
    if any(key and (is_blank(key) or _has_control_character(key)) for key in system.keys):
        raise Refusal(Code.ILLEGAL_MESSAGE_KEY, "key cannot be blank, or contain a control character")
    texts = *properties.keys(), *properties.values(), system.tag, *system.keys
    if sum(len(text.encode()) for text in texts) > _MAX_PROPERTY_BYTES:
        raise Refusal(
            Code.MESSAGE_PROPERTIES_TOO_LARGE, f"the total size of user property exceeds {_MAX_PROPERTY_BYTES}"
        )


def _check_system_properties(system: pb.SystemProperties, now_ms: int) -> None:
    if is_blank(system.message_id):
        raise Refusal(Code.ILLEGAL_MESSAGE_ID, "message id cannot be blank")
    recovery = system.orphaned_transaction_recovery_duration.seconds
    if system.message_type == pb.TRANSACTION and recovery > _MAX_RECOVERY:
        raise Refusal(Code.BAD_REQUEST, f"transaction recovery second exceeds {_MAX_RECOVERY}")
    if system.HasField("delivery_timestamp") and system.delivery_timestamp.ToMilliseconds() - now_ms > _MAX_DELAY_MS:
        raise Refusal(Code.ILLEGAL_DELIVERY_TIME, f"the max delay time of message exceeds {_MAX_DELAY_MS} ms")
    group = system.message_group
    if group and (is_blank(group) or len(group.encode()) >= _MAX_GROUP or _has_control_character(group)):
        raise Refusal(Code.ILLEGAL_MESSAGE_GROUP, f"message group is blank, illegal, or exceeds {_MAX_GROUP} bytes")


def _has_control_character(text: str) -> bool:
    return any(unicodedata.category(character) == "Cc" for character in text)


def check_type(expected: str | None, actual: str) -> None:
    """Raise the refusal of messages of another type than their topic's; None is the type of an unknown topic."""
    if expected not in (_MIXED, actual):
        types = f"the expected type is {expected or _UNSPECIFIED}, but actual type is {actual}"
        raise Refusal(Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, f"TopicMessageType validate failed, {types}")


def type_of(system: pb.SystemProperties) -> str:
    """Return the type that a proxy derives from properties (docs/internals/grpc-messages.md#types)."""
    if system.message_type == pb.TRANSACTION:
        return "TRANSACTION"
    if system.HasField("delivery_timestamp"):
        return "DELAY"
    if system.message_group:
        return "FIFO"
    if system.HasField("priority"):
        return "PRIORITY"
    return "LITE" if system.lite_topic else "NORMAL"


def accepted_types(message_type: str) -> list[int]:
    """Return the types that a route names for a topic's ``message.type``."""
    if message_type == _MIXED:
        return [pb.NORMAL, pb.FIFO, pb.DELAY, pb.TRANSACTION]
    return [pb.MessageType.Value(message_type)]


def broker_request(messages: Sequence[pb.Message], queue: MessageQueue, peer: str) -> RemotingCommand:
    """Return the request that sends messages to their broker; `peer` is the client. The producer group is the topic."""
    if len(messages) > 1 and any(message.system_properties.HasField("delivery_timestamp") for message in messages):
        raise Refusal(Code.INTERNAL_SERVER_ERROR, "Delayed messages are not supported for batching")
    plain = [Message(queue.topic, message.body, properties=_properties(message, peer)) for message in messages]
    first, system = plain[0], messages[0].system_properties
    batch = len(plain) > 1
    body = encode_batch(plain) if batch else first.body
    compressed = _COMPRESSED if system.body_encoding == pb.GZIP else 0
    flags = compressed | (_PREPARED if system.message_type == pb.TRANSACTION else 0)
    properties, size = encode_properties(first.properties).decode(), (len(plain), len(body))
    encoded = EncodedBatch(queue.topic, (body,), *size, batch=batch, properties=properties, sys_flag=flags)
    # Without a time it is 1970, as at a real proxy.
    born = system.born_timestamp.ToMilliseconds()
    code, fields = head_of(SendRequest(encoded, queue, "", queue.topic, "TBW102", 4, born))
    return RemotingCommand(code, 0, fields, body)


def _properties(message: pb.Message, peer: str) -> dict[str, str]:
    system = message.system_properties
    half = system.message_type == pb.TRANSACTION
    deliver = str(system.delivery_timestamp.ToMilliseconds()) if system.HasField("delivery_timestamp") else ""
    recovery = system.orphaned_transaction_recovery_duration.seconds
    named = {
        const.TAGS: system.tag,
        const.KEYS: " ".join(system.keys),
        const.UNIQ_KEY: system.message_id,
        const.TRAN_MSG: "true" if half else "",
        const.CHECK_IMMUNITY_TIME_IN_SECONDS: str(recovery) if half and recovery else "",
        const.TIMER_DELIVER_MS: deliver,
        const.RECONSUME_TIME: "0",
        const.PGROUP: message.topic.name,
        const.SHARDING_KEY: system.message_group,
        const.LITE_TOPIC: system.lite_topic,
        const.PRIORITY: str(system.priority) if system.HasField("priority") else "",
        "__BORNHOST": system.born_host or peer,
        "BORN_TIMESTAMP": str(system.born_timestamp.ToMilliseconds()),
    }
    return {**message.user_properties, **{name: text for name, text in named.items() if text}}


def send_reply(messages: Sequence[pb.Message], response: RemotingCommand) -> service.SendMessageResponse:
    """Return the answer to a send, of its broker's answer; all messages have one result."""
    if response.code not in _STORED_BY_BROKERS:
        return service.SendMessageResponse(status=status(refused_code(response.code), response.remark))
    stored = SendStatus(response.code)
    if stored is not SendStatus.SEND_OK:
        entry = service.SendResultEntry(status=status(_CODES[stored], f"send message failed, sendStatus={stored.name}"))
        return service.SendMessageResponse(status=status(_CODES[stored]), entries=[entry])
    fields = response.ext_fields
    entry = service.SendResultEntry(
        status=status(),
        message_id=",".join(message.system_properties.message_id for message in messages),
        transaction_id=fields.get("transactionId", ""),
        offset=int(fields["queueOffset"]),
        recall_handle=fields.get("recallHandle", ""),
    )
    return service.SendMessageResponse(status=status(), entries=[entry])


def with_status(reply: bytes, stored: SendStatus) -> bytes:
    """Return the answer to a stored send with another status."""
    answer = service.SendMessageResponse.FromString(reply)
    for one in (answer.status, *(entry.status for entry in answer.entries)):
        if one.code == pb.OK:
            one.code = _CODES[stored]  # type: ignore[assignment]
    return answer.SerializeToString()


def refused_code(response_code: int) -> int:
    """Return the code for a broker's response code (``ResponseBuilder``)."""
    if response_code == ResponseCode.SYSTEM_BUSY:
        return Code.TOO_MANY_REQUESTS
    if response_code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        return Code.NOT_IMPLEMENTED
    return Code.INTERNAL_SERVER_ERROR


def writable_queues(route: TopicRouteData) -> list[MessageQueue]:
    """Return the queues of masters that take messages, in the order in which proxies count them. They have no topic."""
    masters = masters_of(route.broker_datas)
    return [
        MessageQueue("", data.broker_name, queue_id)
        for data in sorted(route.queue_datas, key=lambda data: data.broker_name)
        if data.writable and data.broker_name in masters
        for queue_id in range(data.write_queue_nums)
    ]


def route_queues(
    topic: pb.Resource, route: TopicRouteData, endpoints: pb.Endpoints, types: Sequence[int]
) -> Iterator[pb.MessageQueue]:
    """Yield the queues of a route's answer, those of slaves included."""
    brokers = {data.broker_name: data.broker_addrs for data in route.broker_datas}
    for data in route.queue_datas:
        readable = data.open_queues
        writable = data.write_queue_nums if data.writable else 0
        both = min(readable, writable)
        permissions = [pb.READ_WRITE] * both + [pb.READ] * (readable - both) + [pb.WRITE] * (writable - both)
        for broker_id in brokers.get(data.broker_name, {}):
            for number, permission in enumerate(permissions):
                yield pb.MessageQueue(
                    topic=topic,
                    id=number,
                    permission=permission,
                    broker=pb.Broker(name=data.broker_name, id=broker_id, endpoints=endpoints),
                    accept_message_types=types,  # type: ignore[arg-type]
                )


def access_point(asked: pb.Endpoints, address: str) -> pb.Endpoints:
    """Return the endpoints of a route's answer: those of the request, with the port of the proxy."""
    port = int(address.rpartition(":")[2])
    return pb.Endpoints(
        scheme=asked.scheme or pb.IPv4, addresses=[pb.Address(host=one.host, port=port) for one in asked.addresses]
    )


def merged_settings(settings: pb.Settings, max_message_size: int, *, type_check: bool) -> pb.Settings:
    """Return the answer to a producer's settings, in which the proxy replaces some values."""
    merged = pb.Settings()
    merged.CopyFrom(settings)
    backoff = merged.backoff_policy.exponential_backoff
    backoff.initial.FromMilliseconds(10)
    backoff.max.FromSeconds(1)
    backoff.multiplier = 2.0
    merged.backoff_policy.max_attempts = 3
    merged.publishing.max_body_size = max_message_size
    merged.publishing.validate_message_type = type_check
    return merged


def half_message(message: MessageExt) -> pb.Message:
    """Return a half message as a check carries it."""
    properties = message.properties
    hidden = const.RESERVED_PROPERTIES | {const.SHARDING_KEY, const.CHECK_IMMUNITY_TIME_IN_SECONDS}
    half = pb.Message(
        topic=pb.Resource(name=message.topic),
        user_properties={name: text for name, text in properties.items() if name not in hidden},
        body=message.body,
    )
    system = half.system_properties
    if message.tags:
        system.tag = message.tags
    system.keys.extend((message.keys or "").split())
    system.message_id = message.unique_id or ""
    system.body_encoding = pb.GZIP if message.sys_flag & _COMPRESSED else pb.IDENTITY
    system.message_type = pb.TRANSACTION
    system.born_timestamp.FromMilliseconds(message.born_timestamp)
    system.born_host = message.born_host
    system.store_timestamp.FromMilliseconds(message.store_timestamp)
    system.store_host = message.store_host
    system.queue_id = message.queue_id
    system.queue_offset = message.queue_offset
    return half
