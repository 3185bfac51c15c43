"""Messages in the form of the gRPC protocol, and the meaning of its answers.

An encoded batch is sent as it is, unless its born timestamps are too old. Everything else comes in the remoting form
and is translated for every attempt. Messages that the protocol can't carry are rejected before anything is sent.

The server derives a message's type from its properties, so a message has at most one of shardingKey, delay and
transaction. Each of these goes alone: a batch of them loses its order or is rejected.

Follows ``SendMessageActivity.java`` and ``GrpcConverter.java`` of the proxy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from google.protobuf.message import DecodeError

import rocketmq_spark.model.properties as const
from rocketmq_spark.errors import MQBrokerException, MQClientException
from rocketmq_spark.model.message import Encoding, Message, MessageQueue, SendOutcome, SendRequest, SendStatus
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.properties import CARRIED, Carried
from rocketmq_spark.model.send_result import TransactionCheck
from rocketmq_spark.protocol.compression import CompressionType
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb.service_pb2 import (
    RecoverOrphanedTransactionCommand,
    SendMessageRequest,
    SendMessageResponse,
)
from rocketmq_spark.protocol.grpc.codes import STORED, proxy_error
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.records import messages_in

# How much older than the request the born timestamps of an encoded batch may be, milliseconds. New timestamps cost ten
# times the encoding, and batches wait for seconds where a proxy is slower than the rows come.
_STALE_MS: Final = 30_000

# How gRPC carries properties; all others are the user's.
_CARRIED: Final = {
    **dict.fromkeys(const.RESERVED_PROPERTIES, Carried.REFUSED),
    **{name: how.grpc for name, how in CARRIED.items()},
}
_REFUSED: Final = frozenset(name for name, how in _CARRIED.items() if how is Carried.REFUSED)
_NOT_USERS: Final = frozenset(name for name, how in _CARRIED.items() if how is not Carried.PROPERTY)

_REMOTING: Final = "the gRPC protocol can't carry it; use transport=remoting"


def encode_send_request(request: SendRequest, *, namespace: str = "", born_host: str = "") -> bytes:
    """Return the bytes of the SendMessageRequest that one attempt sends.

    The born timestamp of `request` becomes the messages', and a relative delay counts from it. An encoded batch has the
    `namespace` of its topic inside. Without `born_host` the proxy stores the address that it sees.

    Raises an MQClientException with code 13 for a message or batch that the protocol can't carry, or an encoded batch
    that can't be read, and a CompressionError for an unknown compression.
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
                f"sending {batch.rows} rows to topic {batch.topic!r}: they are encoded as no request that can be read, "
                "so that no proxy could either; is one of their texts not valid UTF-8?",
                ResponseCode.MESSAGE_ILLEGAL,
            ) from exc
    encoding = _body_encoding(batch.topic, batch.sys_flag)
    made = [_encoded(message, request.born_timestamp) for message in messages_in(batch)]
    if len(made) > 1 and any(one.system_properties.message_type != pb.NORMAL for one in made):
        raise _illegal(batch.topic, "a message with a shardingKey, a delay or a transaction goes alone, not in a batch")
    for one in made:
        one.topic.resource_namespace = namespace
        one.system_properties.body_encoding = encoding
        one.system_properties.born_host = born_host
    return SendMessageRequest(messages=made).SerializeToString()


def restamp(body: bytes, born_timestamp: int) -> bytes:
    """Return a SendMessageRequest with new born timestamps (epoch milliseconds); may raise a DecodeError."""
    request = SendMessageRequest.FromString(body)
    for message in request.messages:
        message.system_properties.born_timestamp.FromMilliseconds(born_timestamp)
    return request.SerializeToString()


def outcome_of(request: SendRequest, response: SendMessageResponse, latency_ms: float, doing: str = "") -> SendOutcome:
    """Return the outcome of an answer: stored if the status and all results, of which there is one at least, say so.

    `doing` says for errors what was sent where by which call; by default rows and topic.
    """
    judged = _judged(request, response, doing or f"sending {request.batch.rows} rows to topic {request.batch.topic}")
    if isinstance(judged, MQBrokerException):
        return SendOutcome(request.queue, None, judged, latency_ms)
    first = response.entries[0]
    return SendOutcome(
        MessageQueue(request.queue.topic, request.queue.broker_name, -1),
        judged,
        None,
        latency_ms,
        queue_offset=first.offset,
        transaction_id="" if request.batch.batch else first.transaction_id,
        recall_handle=first.recall_handle,
    )


def message_ext(message: pb.Message) -> MessageExt:
    """Return a message that a proxy delivers; proxies do not report its position in the commit log."""
    system = message.system_properties
    properties = {name: text for name, text in message.user_properties.items() if name not in const.RESERVED_PROPERTIES}
    fields = {
        const.TAGS: system.tag,
        const.KEYS: " ".join(system.keys),
        const.UNIQ_KEY: system.message_id,
        const.SHARDING_KEY: system.message_group,
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
        # GZIP means that the body is compressed, in whatever way its producer chose.
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
    command: RecoverOrphanedTransactionCommand, address: str, producer_group: str
) -> TransactionCheck:
    """Return a proxy's question about a half message; only the proxy at `address` takes the answer.

    The protocol has no group, so `producer_group` comes from the caller.
    """
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


def _encoded(message: Message, born_timestamp: int) -> pb.Message:
    if message.flag:
        raise _illegal(message.topic, f"its flag is {message.flag}; {_REMOTING}, or leave the flag 0")
    refused = sorted(_REFUSED & message.properties.keys())
    if refused:
        instead = " (delay by time: delayMs, deliverTime)" if const.DELAY in refused else ""
        raise _illegal(message.topic, f"it has the property {', '.join(refused)}{instead}; {_REMOTING}")
    made = pb.Message(
        topic=pb.Resource(name=message.topic),
        user_properties={name: text for name, text in message.properties.items() if name not in _NOT_USERS},
        body=message.body,
    )
    system = made.system_properties
    if message.tags:
        system.tag = message.tags
    if message.keys:
        system.keys.append(message.keys)
    if message.sharding_key:
        system.message_group = message.sharding_key
    try:
        system.born_timestamp.FromMilliseconds(born_timestamp)
        deliver_at = _deliver_at(message, born_timestamp)
        if deliver_at is not None:
            system.delivery_timestamp.FromMilliseconds(deliver_at)
    except ValueError as exc:
        raise _illegal(message.topic, f"when is it to be delivered? {exc}") from exc
    system.message_id = message.unique_id or ""
    system.message_type = _message_type(message, delayed=deliver_at is not None)
    return made


def _deliver_at(message: Message, now_ms: int) -> int | None:
    times = [message.deliver_ms] if message.deliver_ms else []
    times += [now_ms + delay for delay in (message.delay_ms, message.delay_sec * 1000) if delay]
    if len(times) > 1:
        raise ValueError("it has several delays, give at most one")
    return times[0] if times else None


def _message_type(message: Message, *, delayed: bool) -> pb.MessageType:
    kinds = {
        "a transaction": (message.is_half_message, pb.TRANSACTION),
        "a delay": (delayed, pb.DELAY),
        "a shardingKey": (bool(message.sharding_key), pb.FIFO),
    }
    found = {what: kind for what, (is_one, kind) in kinds.items() if is_one}
    if len(found) > 1:
        raise _illegal(message.topic, f"it has {' and '.join(found)}, the gRPC protocol allows one; drop the others")
    return next(iter(found.values()), pb.NORMAL)


def _body_encoding(topic: str, sys_flag: int) -> pb.Encoding:
    kind = CompressionType.of_sys_flag(sys_flag)
    if kind is None:
        return pb.IDENTITY
    if kind is not CompressionType.ZLIB:
        raise _illegal(topic, f"its body is compressed with {kind.name}; set compressType to ZLIB or NONE")
    # The proxy makes the flag of a zlib body of this, which remoting consumers read.
    return pb.GZIP


def _judged(request: SendRequest, response: SendMessageResponse, doing: str) -> SendStatus | MQBrokerException:
    rows, results, status = request.batch.rows, len(response.entries), response.status

    def failure(status: pb.Status, message: str = "") -> MQBrokerException:
        return proxy_error(status.code, message or status.message, request.address, doing)

    if status.code not in STORED and status.code != pb.MULTIPLE_RESULTS:
        return failure(status)
    if not results:
        return failure(status, "it holds no result")
    # Checked before any entry is read: a reply of 4 MB holds 2,000,000 of them.
    if results != rows and (results > 1 or status.code == pb.MULTIPLE_RESULTS):
        return failure(status, f"it holds {results} results")
    failures, first = 0, None
    for entry in response.entries:
        if entry.status.code not in STORED:
            error = failure(entry.status)
            if not error.retriable:
                # A message that will never be accepted decides.
                return error
            failures, first = failures + 1, first or error
    if first is not None:
        # The entries do not say which messages are stored.
        return first if results == 1 else failure(status, f"{failures} of {results} results are failures: {first}")
    codes = [status.code, *(entry.status.code for entry in response.entries)]
    return next((STORED[code] for code in codes if code not in (pb.OK, pb.MULTIPLE_RESULTS)), SendStatus.SEND_OK)


def _illegal(topic: str, reason: str) -> MQClientException:
    return MQClientException(f"sending a message to topic {topic!r}: {reason}", ResponseCode.MESSAGE_ILLEGAL)
