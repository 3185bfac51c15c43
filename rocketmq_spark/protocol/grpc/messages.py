"""Converts values of the model to requests of the gRPC protocol, and converts what proxies send to values of the model.

The messages of a `Producer` are encoded for remoting. They are converted at every attempt, and rejected if gRPC can't
carry them. The sink's batches are encoded for gRPC already. If a batch is 30 s old at an attempt, the client renews its
born timestamps. See docs/internals/grpc-messages.md#messages and docs/internals/grpc.md#results.
"""

from __future__ import annotations

import ipaddress
import platform
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from google.protobuf.message import DecodeError

import rocketmq_spark.model.properties as const
from rocketmq_spark.errors import (
    BatchRefusedException,
    DelayRefusedException,
    MQBrokerException,
    MQClientException,
    RemotingCommandException,
)
from rocketmq_spark.model import route
from rocketmq_spark.model.message import Encoding, Message, MessageQueue, SendOutcome, SendRequest, SendStatus
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.properties import CARRIED, Carried
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, EndTransaction, RecallMessage, TransactionCheck
from rocketmq_spark.protocol.compression import CompressionType
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.protocol.grpc.codes import STORED, proxy_error
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.records import messages_in

# The highest age of an encoded batch's born timestamps, milliseconds. A batch waits for seconds if a proxy is slow.
_STALE_MS: Final = 30_000

# How gRPC carries properties; it carries all others as user properties.
_CARRIED: Final = {
    **dict.fromkeys(const.RESERVED_PROPERTIES, Carried.REFUSED),
    **{name: how.grpc for name, how in CARRIED.items()},
}
_REFUSED: Final = frozenset(name for name, how in _CARRIED.items() if how is Carried.REFUSED)
_NOT_USERS: Final = frozenset(name for name, how in _CARRIED.items() if how is not Carried.PROPERTY)

_REMOTING: Final = "send over remoting (nameServer instead of endpoints)"


def encode_send_request(request: SendRequest, *, namespace: str = "", born_host: str = "") -> bytes:
    """Return the bytes of the SendMessageRequest that one attempt sends.

    A batch that is encoded for gRPC contains its `namespace`. Raises an MQClientException with code 13 if the protocol
    can't carry a message, with `split` if there are others; a DelayRefusedException for a time of delivery that it
    can't carry; and a CompressionError for an unknown compression.
    """
    batch = request.batch
    if batch.encoding is Encoding.GRPC:
        body = b"".join(batch.body)
        if request.born_timestamp - batch.born_timestamp < _STALE_MS:
            return body
        try:
            return restamp(body, request.born_timestamp)
        except DecodeError as exc:
            # The sender names the rows only in errors of this package.
            raise MQClientException(
                f"sending {batch.rows} rows to topic {batch.topic!r}: cannot decode the encoded batch, and neither "
                "can a proxy: probably a text is not valid UTF-8. Check the columns with texts",
                ResponseCode.MESSAGE_ILLEGAL,
            ) from exc
    encoding = _body_encoding(batch.topic, batch.sys_flag)
    members = list(messages_in(batch))
    try:
        messages = [_encoded(message, request.born_timestamp) for message in members]
        if len(messages) > 1 and any(message.system_properties.message_type != pb.NORMAL for message in messages):
            # A batch of them would lose its order or be rejected.
            raise _illegal(
                batch.topic,
                "a message with a shardingKey, a delay, a priority, a liteTopic or a transaction must be sent alone, "
                "not in a batch",
            )
    except MQClientException as exc:
        if len(members) > 1:
            raise BatchRefusedException(str(exc), exc.response_code) from exc
        raise
    for message in messages:
        message.topic.resource_namespace = namespace
        message.system_properties.body_encoding = encoding
        message.system_properties.born_host = born_host
    return service.SendMessageRequest(messages=messages).SerializeToString()


def restamp(body: bytes, born_timestamp: int) -> bytes:
    """Return a SendMessageRequest with new born timestamps (epoch milliseconds); may raise a DecodeError."""
    request = service.SendMessageRequest.FromString(body)
    for message in request.messages:
        message.system_properties.born_timestamp.FromMilliseconds(born_timestamp)
    return request.SerializeToString()


def outcome_of(
    request: SendRequest, response: service.SendMessageResponse, latency_ms: float, doing: str = ""
) -> SendOutcome:
    """Return the outcome of an answer: stored if the status and every result, at least one, have a code in `STORED`."""
    status = _status_of(request, response, doing or f"sending {request.batch.rows} rows to topic {request.batch.topic}")
    if isinstance(status, MQBrokerException):
        return SendOutcome(request.queue, None, status, latency_ms)
    first = response.entries[0]
    return SendOutcome(
        MessageQueue(request.queue.topic, request.queue.broker_name, -1),
        status,
        None,
        latency_ms,
        queue_offset=first.offset,
        transaction_id="" if request.batch.batch else first.transaction_id,
        recall_handle=first.recall_handle,
    )


def message_ext(message: pb.Message) -> MessageExt:
    """Return a message from a proxy; proxies do not report its position in the commit log."""
    system = message.system_properties
    properties = {name: text for name, text in message.user_properties.items() if name not in const.RESERVED_PROPERTIES}
    fields = {
        const.TAGS: system.tag,
        const.KEYS: " ".join(system.keys),
        const.UNIQ_KEY: system.message_id,
        const.SHARDING_KEY: system.message_group,
        const.LITE_TOPIC: system.lite_topic,
        const.PRIORITY: str(system.priority) if system.HasField("priority") else "",
        const.TRAN_MSG: "true" if system.message_type == pb.TRANSACTION else "",
    }
    if system.HasField("delivery_timestamp"):
        fields[const.TIMER_DELIVER_MS] = str(system.delivery_timestamp.ToMilliseconds())
    properties.update((name, text) for name, text in fields.items() if text)
    return MessageExt(
        topic=message.topic.name,
        body=message.body,
        properties=properties,
        queue_id=system.queue_id,
        queue_offset=system.queue_offset,
        physical_offset=-1,
        # Proxies use GZIP for every type of compression.
        sys_flag=CompressionType.of_body(message.body).sys_flag if system.body_encoding == pb.GZIP else 0,
        born_timestamp=system.born_timestamp.ToMilliseconds(),
        born_host=system.born_host,
        store_timestamp=system.store_timestamp.ToMilliseconds(),
        store_host=system.store_host,
        reconsume_times=max(system.delivery_attempt - 1, 0),
        prepared_transaction_offset=0,
        body_crc=0,
    )


def transaction_check(
    command: service.RecoverOrphanedTransactionCommand, address: str, producer_group: str
) -> TransactionCheck:
    """Return a proxy's check of a half message of `producer_group`; only the proxy at `address` accepts the answer."""
    message = message_ext(command.message)
    return TransactionCheck(
        address=address,
        message=replace(message, properties={**message.properties, const.PGROUP: producer_group}),
        tran_state_table_offset=message.queue_offset,
        commit_log_offset=message.physical_offset,
        msg_id=message.unique_id or "",
        transaction_id=command.transaction_id,
        broker_name=address,
    )


def endpoints_of(endpoint: str) -> pb.Endpoints:
    """Return the ``host:port`` at which this client reaches the proxy, in the protocol's form."""
    host, port = route.parse_address(endpoint)
    try:
        scheme = pb.IPv4 if ipaddress.ip_address(host).version == 4 else pb.IPv6
    except ValueError:
        scheme = pb.DOMAIN_NAME
    return pb.Endpoints(scheme=scheme, addresses=[pb.Address(host=host, port=port)])


def route_request(topic: str, namespace: str, endpoint: str) -> service.QueryRouteRequest:
    """Return the request for a topic's route."""
    return service.QueryRouteRequest(
        topic=pb.Resource(resource_namespace=namespace, name=topic), endpoints=endpoints_of(endpoint)
    )


def route_of(reply: service.QueryRouteResponse, endpoints: Iterable[str]) -> route.TopicRouteData:
    """Return a topic's route with its message types (docs/internals/grpc.md#routes).

    RemotingCommandException: the reply exceeds the bounds of a name server's route.
    """
    _check("queues", len(reply.message_queues), route.MAX_QUEUES)
    _check("brokers", len({queue.broker.name for queue in reply.message_queues}), route.MAX_BROKERS)
    for queue in reply.message_queues:
        _check("addresses of a broker", len(queue.broker.endpoints.addresses), route.MAX_ADDRESSES)
    candidates = [
        queue
        for queue in reply.message_queues
        if queue.permission in (pb.WRITE, pb.READ_WRITE) and queue.broker.id == route.MASTER_ID
    ]
    # The connector cannot send a type that this protocol version does not have.
    known = frozenset(pb.MessageType.values())
    types = {kind for queue in candidates for kind in queue.accept_message_types if kind in known}
    names = sorted(endpoints)
    return route.TopicRouteData(
        queue_datas=tuple(
            route.QueueData(name, 1, 1, route.PERM_READ | route.PERM_WRITE if candidates else route.PERM_READ)
            for name in names
        ),
        broker_datas=tuple(route.BrokerData(name, {route.MASTER_ID: name}) for name in names),
        message_types=frozenset(map(pb.MessageType.Name, types)),
    )


def settings_of(endpoint: str, topics: Iterable[str], namespace: str, version: str) -> service.TelemetryCommand:
    """Return the settings that a producer sends when it opens its stream."""
    settings = pb.Settings(
        client_type=pb.PRODUCER,
        access_point=endpoints_of(endpoint),
        publishing=pb.Publishing(
            topics=[pb.Resource(resource_namespace=namespace, name=topic) for topic in topics],
            validate_message_type=True,
        ),
        user_agent=pb.UA(language=pb.PYTHON, version=version, platform=platform.platform(), hostname=platform.node()),
    )
    settings.request_timeout.FromSeconds(3)
    return service.TelemetryCommand(settings=settings)


def recall_message_request(request: RecallMessage, namespace: str) -> service.RecallMessageRequest:
    """Return the request to take a delayed message back."""
    topic = pb.Resource(resource_namespace=namespace, name=request.topic)
    return service.RecallMessageRequest(topic=topic, recall_handle=request.recall_handle)


def end_transaction_request(request: EndTransaction, namespace: str) -> service.EndTransactionRequest:
    """Return the request to end a transaction, which must be committed or rolled back."""
    committed = request.commit_or_rollback == TRANSACTION_COMMIT_TYPE
    return service.EndTransactionRequest(
        topic=pb.Resource(resource_namespace=namespace, name=request.topic),
        message_id=request.msg_id,
        transaction_id=request.transaction_id,
        resolution=pb.COMMIT if committed else pb.ROLLBACK,
        source=pb.SOURCE_SERVER_CHECK if request.from_transaction_check else pb.SOURCE_CLIENT,
    )


def _encoded(message: Message, born_timestamp: int) -> pb.Message:
    if message.flag:
        raise _illegal(message.topic, f"gRPC cannot carry its flag {message.flag}; {_REMOTING}, or set the flag to 0")
    refused = sorted(_REFUSED & message.properties.keys())
    if refused:
        delays = ", or delay by time (delayMs, deliverTime)" if const.DELAY in refused else ""
        raise _illegal(message.topic, f"gRPC cannot carry the property {', '.join(refused)}; {_REMOTING}{delays}")
    encoded = pb.Message(
        topic=pb.Resource(name=message.topic),
        user_properties={name: text for name, text in message.properties.items() if name not in _NOT_USERS},
        body=message.body,
    )
    system = encoded.system_properties
    if message.tags:
        system.tag = message.tags
    if message.keys:
        system.keys.append(message.keys)
    if message.sharding_key:
        system.message_group = message.sharding_key
    system.born_timestamp.FromMilliseconds(born_timestamp)
    try:
        deliver_at = _deliver_at(message, born_timestamp)
    except ValueError as exc:
        raise _illegal(message.topic, f"invalid delivery time: {exc}") from exc
    if deliver_at is not None:
        try:
            system.delivery_timestamp.FromMilliseconds(deliver_at)
        except ValueError as exc:
            text = "its time of delivery is after the year 9999, which gRPC cannot carry; choose an earlier one"
            illegal = ResponseCode.MESSAGE_ILLEGAL
            raise DelayRefusedException(f"{_sending(message.topic)}: {text}", illegal, text, "") from exc
    try:
        if message.priority is not None:
            system.priority = message.priority
    except ValueError as exc:
        raise _illegal(message.topic, f"invalid priority: {exc}") from exc
    if message.lite_topic:
        system.lite_topic = message.lite_topic
    system.message_id = message.unique_id or ""
    system.message_type = _message_type(message, delayed=deliver_at is not None)
    return encoded


def _deliver_at(message: Message, now_ms: int) -> int | None:
    times = [message.deliver_ms] if message.deliver_ms else []
    times += [now_ms + delay for delay in (message.delay_ms, message.delay_sec * 1000) if delay]
    if len(times) > 1:
        raise ValueError("the message has several delays, set at most one")
    return times[0] if times else None


def _message_type(message: Message, *, delayed: bool) -> pb.MessageType:
    kinds = {
        "a transaction": (message.is_half_message, pb.TRANSACTION),
        "a delay": (delayed, pb.DELAY),
        "a shardingKey": (bool(message.sharding_key), pb.FIFO),
        "a priority": (message.priority is not None, pb.PRIORITY),
        "a liteTopic": (bool(message.lite_topic), pb.LITE),
    }
    types = {name: kind for name, (present, kind) in kinds.items() if present}
    if len(types) > 1:
        raise _illegal(
            message.topic, f"the message has {' and '.join(types)}, but the gRPC protocol allows only one of them"
        )
    return next(iter(types.values()), pb.NORMAL)


def _body_encoding(topic: str, sys_flag: int) -> pb.Encoding:
    kind = CompressionType.of_sys_flag(sys_flag)
    if kind is None:
        return pb.IDENTITY
    if kind is not CompressionType.ZLIB:
        raise _illegal(topic, f"its body is compressed with {kind.name}; set compressType to ZLIB or NONE")
    # From GZIP the proxy makes the sysFlag of zlib, which remoting consumers read.
    return pb.GZIP


def _status_of(
    request: SendRequest, response: service.SendMessageResponse, doing: str
) -> SendStatus | MQBrokerException:
    rows, results, status = request.batch.rows, len(response.entries), response.status

    def failure(status: pb.Status, message: str = "") -> MQBrokerException:
        return proxy_error(status.code, message or status.message, request.address, doing)

    if status.code not in STORED and status.code != pb.MULTIPLE_RESULTS:
        return failure(status)
    if not results:
        return failure(status, "the answer has no result")
    # Checked before any entry is read, because a reply of 4 MB may contain 2,000,000.
    if results != rows and (results > 1 or status.code == pb.MULTIPLE_RESULTS):
        return failure(status, f"the answer has {results} results for {rows} messages")
    failures, first = 0, None
    for entry in response.entries:
        if entry.status.code not in STORED:
            error = failure(entry.status)
            if not error.retriable:
                # One message that will never be accepted makes the batch not retriable.
                return error
            failures, first = failures + 1, first or error
    if first is not None:
        # The entries do not say which messages are stored.
        return first if results == 1 else failure(status, f"{failures} of {results} results are failures: {first}")
    codes = [status.code, *(entry.status.code for entry in response.entries)]
    return next((STORED[code] for code in codes if code not in (pb.OK, pb.MULTIPLE_RESULTS)), SendStatus.SEND_OK)


def _illegal(topic: str, reason: str) -> MQClientException:
    return MQClientException(f"{_sending(topic)}: {reason}", ResponseCode.MESSAGE_ILLEGAL)


def _sending(topic: str) -> str:
    return f"sending a message to topic {topic!r}"


def _check(name: str, count: int, most: int) -> None:
    if count > most:
        raise RemotingCommandException(f"reading a topic route: {count} {name}, at most {most} are allowed")
