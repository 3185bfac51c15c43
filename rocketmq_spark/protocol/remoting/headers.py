"""Makes the custom headers (ext fields) of requests from values of the model, the body of heartbeats, and signatures.

Attributes have Java's long names in snake_case. On the wire most names are in camelCase, and the names of a send are
single letters (docs/internals/messages.md#send-header). None and empty text are not sent. In most headers `broker_name`
has no default, because a proxy needs it.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.model.message import Buffer, SendRequest
from rocketmq_spark.model.message_ext import PullRequest, PullTarget
from rocketmq_spark.model.send_result import EndTransaction, RecallMessage
from rocketmq_spark.protocol.remoting.codes import RequestCode

# Names on the wire that are not the attribute's name in camelCase.
_IRREGULAR: Final = {"client_id": "clientID", "broker_name": "bname"}

# What a heartbeat says of each consumer group. Without subscriptions a broker assigns it no queue.
_CONSUMER: Final = {
    "consumeType": "CONSUME_ACTIVELY",
    "messageModel": "CLUSTERING",
    "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
    "unitMode": False,
    "subscriptionDataSet": [],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHeader:
    """The custom header of the request `code`; its ext fields are the dataclass's fields, in their order."""

    code: ClassVar[RequestCode]

    def to_ext_fields(self) -> dict[str, str]:
        """Return the ext fields in wire order."""
        ext_fields: dict[str, str] = {}
        for attribute, name in _wire_names(type(self)):  # type: ignore[arg-type]
            value = getattr(self, attribute)
            if value is None or value == "":
                continue
            ext_fields[name] = ("true" if value else "false") if isinstance(value, bool) else str(value)
        return ext_fields


@functools.cache
def _wire_names(header: type) -> tuple[tuple[str, str], ...]:
    """Return the attributes of a header, each with its name on the wire."""
    # The broker's name is always the last.
    attributes = sorted((item.name for item in dataclasses.fields(header)), key="broker_name".__eq__)
    if header is SendMessageRequestHeaderV2:
        return tuple(zip(attributes, "abcdefghijklmn", strict=True))
    return tuple((name, _IRREGULAR.get(name) or _camel_case(name)) for name in attributes)


def _camel_case(attribute: str) -> str:
    head, *rest = attribute.split("_")
    return head + "".join(word.capitalize() for word in rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessageRequestHeaderV2(RequestHeader):
    """The header of SEND_MESSAGE_V2, SEND_BATCH_MESSAGE and SEND_REPLY_MESSAGE_V2."""

    code: ClassVar[RequestCode] = RequestCode.SEND_MESSAGE_V2
    producer_group: str
    topic: str
    default_topic: str = "TBW102"
    default_topic_queue_nums: int = 4
    queue_id: int  # -1 lets the broker choose
    sys_flag: int = 0
    born_timestamp: int  # Epoch milliseconds
    flag: int = 0  # The user's flag of a single message; brokers ignore it for a batch
    properties: str | None = None  # The property string of a single message or a batch
    reconsume_times: int = 0
    unit_mode: bool = False
    max_reconsume_times: int | None = None
    batch: bool = False  # The body is batch items. This, not the request code, makes a batch.
    broker_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetRouteInfoRequestHeader(RequestHeader):
    """Name servers from 4.9.4 on answer this client in standard JSON; `accept_standard_json_only` forces it."""

    code: ClassVar[RequestCode] = RequestCode.GET_ROUTEINFO_BY_TOPIC
    topic: str
    accept_standard_json_only: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnregisterClientRequestHeader(RequestHeader):
    """Unregisters a client from one group."""

    code: ClassVar[RequestCode] = RequestCode.UNREGISTER_CLIENT
    client_id: str
    producer_group: str | None = None
    consumer_group: str | None = None
    broker_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRequestHeader(RequestHeader):
    """The field of requests about one topic."""

    topic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequestHeader(RequestHeader):
    """The field of requests about one consumer group."""

    consumer_group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRequestHeader(RequestHeader):
    """The fields of requests about one queue."""

    topic: str
    queue_id: int
    broker_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetMaxOffsetRequestHeader(QueueRequestHeader):
    """Asks for the offset of the next message. For an unknown topic or queue a broker answers 0, not an error."""

    code: ClassVar[RequestCode] = RequestCode.GET_MAX_OFFSET
    committed: bool | None = None


class GetMinOffsetRequestHeader(QueueRequestHeader):
    """Asks for the offset of the oldest message."""

    code: ClassVar[RequestCode] = RequestCode.GET_MIN_OFFSET


class GetEarliestMsgStoreTimeRequestHeader(QueueRequestHeader):
    """Asks when the oldest message was stored."""

    code: ClassVar[RequestCode] = RequestCode.GET_EARLIEST_MSG_STORETIME


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOffsetRequestHeader(QueueRequestHeader):
    """Asks for the first offset stored at or after `timestamp` (epoch milliseconds), or the max offset."""

    code: ClassVar[RequestCode] = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
    timestamp: int
    boundary_type: str = "lower"  # ``upper`` asks for the last offset stored at or before `timestamp`


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewMessageRequestHeader(RequestHeader):
    """`offset` is a commit-log offset. Access control rejects the request without `topic`."""

    code: ClassVar[RequestCode] = RequestCode.VIEW_MESSAGE_BY_ID
    offset: int
    topic: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTransactionRequestHeader(EndTransaction, RequestHeader):
    """Has no `remark`; the command has it."""

    code: ClassVar[RequestCode] = RequestCode.END_TRANSACTION


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallMessageRequestHeader(RecallMessage, RequestHeader):
    """Recalls a delayed message."""

    code: ClassVar[RequestCode] = RequestCode.RECALL_MESSAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class PullMessageRequestHeader(RequestHeader):
    """Asks for messages; bits of `sys_flag`: 1 commit offset, 2 wait for messages, 4 subscription, 16 lite pull."""

    code: ClassVar[RequestCode] = RequestCode.PULL_MESSAGE
    consumer_group: str
    topic: str
    queue_id: int
    queue_offset: int  # The first offset to return
    max_msg_nums: int
    sys_flag: int = 4
    commit_offset: int = 0
    suspend_timeout_millis: int = 0
    subscription: str = "*"
    sub_version: int = 0
    expression_type: str = "TAG"
    broker_name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConsumerOffsetRequestHeader(QueueRequestHeader):
    """Commits a group's offset."""

    code: ClassVar[RequestCode] = RequestCode.UPDATE_CONSUMER_OFFSET
    consumer_group: str
    commit_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryConsumerOffsetRequestHeader(QueueRequestHeader):
    """Asks for a group's offset. Brokers of 4.9 ignore `set_zero_if_not_found`."""

    code: ClassVar[RequestCode] = RequestCode.QUERY_CONSUMER_OFFSET
    consumer_group: str
    set_zero_if_not_found: bool = False


class GetConsumerListByGroupRequestHeader(GroupRequestHeader):
    """Asks a broker for the client ids of a group."""

    code: ClassVar[RequestCode] = RequestCode.GET_CONSUMER_LIST_BY_GROUP


class GetConsumerConnectionListRequestHeader(GroupRequestHeader):
    """Asks a broker for the members of a group and their addresses."""

    code: ClassVar[RequestCode] = RequestCode.GET_CONSUMER_CONNECTION_LIST


@dataclass(frozen=True, slots=True, kw_only=True)
class GetConsumeStatsRequestHeader(GroupRequestHeader):
    """Asks a broker for a group's offsets of all queues of a topic, or of all topics of which it knows an offset."""

    code: ClassVar[RequestCode] = RequestCode.GET_CONSUME_STATS

    topic: str = ""


class DeleteTopicRequestHeader(TopicRequestHeader):
    """Deletes a topic on a broker."""

    code: ClassVar[RequestCode] = RequestCode.DELETE_TOPIC_IN_BROKER


class DeleteTopicFromNamesrvRequestHeader(TopicRequestHeader):
    """Removes a topic's route from a name server."""

    code: ClassVar[RequestCode] = RequestCode.DELETE_TOPIC_IN_NAMESRV


class GetTopicConfigRequestHeader(TopicRequestHeader):
    """Asks a broker for a topic's configuration."""

    code: ClassVar[RequestCode] = RequestCode.GET_TOPIC_CONFIG


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTopicRequestHeader(RequestHeader):
    """Creates a topic on one broker, or overwrites its configuration."""

    code: ClassVar[RequestCode] = RequestCode.UPDATE_AND_CREATE_TOPIC
    topic: str
    default_topic: str = "TBW102"
    read_queue_nums: int
    write_queue_nums: int
    perm: int = 6  # 4 read, 2 write, 1 inherit
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: str = ""  # Such as ``+message.type=FIFO,+queue.type=BatchCQ``
    broker_name: str | None = None


# The fields of SendMessageRequestHeaderV2 that most messages of a queue share, in the order of `head_of`.
_SHARED: Final = (
    *("producer_group", "topic", "default_topic", "default_topic_queue_nums", "queue_id", "broker_name", "sys_flag"),
    *("flag", "properties", "reconsume_times", "unit_mode", "max_reconsume_times", "batch"),
)


def head_of(request: SendRequest) -> tuple[RequestCode, dict[str, str]]:
    """Return the code and ext fields of a send."""
    batch, queue = request.batch, request.queue
    shared = _shared_send_fields(
        request.producer_group,
        batch.topic,
        request.default_topic,
        request.default_topic_queue_nums,
        queue.queue_id,
        queue.broker_name,
        batch.sys_flag,
        batch.flag,
        "?" if batch.properties else None,
        request.reconsume_times,
        request.unit_mode,
        request.max_reconsume_times,
        batch.batch,
    )
    # "g" is the born timestamp and "i" the properties. Both keep their places in the order of the golden frames.
    fields = {**shared, "g": str(request.born_timestamp)}
    if batch.properties:
        fields["i"] = batch.properties
    if request.reply:
        return RequestCode.SEND_REPLY_MESSAGE_V2, fields
    return RequestCode.SEND_BATCH_MESSAGE if batch.batch else RequestCode.SEND_MESSAGE_V2, fields


@functools.lru_cache(maxsize=4096, typed=True)
def _shared_send_fields(*values: Any) -> Mapping[str, str]:
    """Return the fields that most messages of a queue share; without the cache a single message costs 10 % more.

    It is `typed`, because True equals 1, and has another text.
    """
    return SendMessageRequestHeaderV2(born_timestamp=0, **dict(zip(_SHARED, values, strict=True))).to_ext_fields()


# The fields of EndTransactionRequestHeader that many ends share, in the order of `end_transaction_fields`.
_SHARED_BY_ENDS: Final = (
    *("topic", "producer_group", "commit_or_rollback", "from_transaction_check"),
    *("msg_id", "transaction_id", "broker_name"),
)


def end_transaction_fields(request: EndTransaction) -> dict[str, str]:
    """Return the ext fields of END_TRANSACTION, without the remark."""
    shared = _shared_end_fields(
        request.topic,
        request.producer_group,
        request.commit_or_rollback,
        request.from_transaction_check,
        "?" if request.msg_id else "",
        "?" if request.transaction_id else "",
        request.broker_name,
    )
    fields = {
        **shared,
        "tranStateTableOffset": str(request.tran_state_table_offset),
        "commitLogOffset": str(request.commit_log_offset),
    }
    if request.msg_id:
        fields["msgId"] = request.msg_id
    if request.transaction_id:
        fields["transactionId"] = request.transaction_id
    return fields


@functools.lru_cache(maxsize=1024, typed=True)
def _shared_end_fields(*values: Any) -> Mapping[str, str]:
    """Return the fields that the ends of a group at a broker share; the cache halves the time of an end."""
    named = dict(zip(_SHARED_BY_ENDS, values, strict=True))
    return EndTransactionRequestHeader(tran_state_table_offset=0, commit_log_offset=0, **named).to_ext_fields()


def pull_fields(request: PullRequest) -> dict[str, str]:
    """Return the ext fields of PULL_MESSAGE."""
    return {**_shared_pull_fields(request.target, request.suspend_ms), "queueOffset": str(request.offset)}


@functools.lru_cache(maxsize=1024)
def _shared_pull_fields(target: PullTarget, suspend_ms: int) -> Mapping[str, str]:
    """Return the fields that all pulls of a queue share; the caller replaces the offset."""
    return PullMessageRequestHeader(
        consumer_group=target.consumer_group,
        topic=target.queue.topic,
        queue_id=target.queue.queue_id,
        queue_offset=0,
        max_msg_nums=target.max_msg_nums,
        # With a subscription in the request, no heartbeat is needed.
        sys_flag=6 if suspend_ms else 4,
        suspend_timeout_millis=suspend_ms,
        subscription=target.sub_expression,
        expression_type=target.expression_type,
        broker_name=target.queue.broker_name,
    ).to_ext_fields()


def heart_beat_body(client_id: str, producer_groups: Iterable[str] = (), consumer_groups: Iterable[str] = ()) -> bytes:
    """Return the body of HEART_BEAT; groups are sorted, so that equal clients send equal bytes."""
    body = {
        "clientID": client_id,
        "producerDataSet": [{"groupName": group} for group in sorted(producer_groups)],
        # Both sets are required, even if empty.
        "consumerDataSet": [{"groupName": group, **_CONSUMER} for group in sorted(consumer_groups)],
    }
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def signed(ext_fields: Mapping[str, str], body: Iterable[Buffer], credentials: Credentials) -> dict[str, str]:
    """Return the fields with AccessKey, SecurityToken if any, Signature (docs/internals/access-control.md#signing)."""
    fields = {**ext_fields, "AccessKey": credentials.access_key}
    if credentials.security_token:
        fields["SecurityToken"] = credentials.security_token
    fields.pop("Signature", None)
    content = "".join(fields[name] for name in sorted(fields))
    # Invalid Unicode is accepted here, because an error would show secrets. Encoding the header rejects it.
    secret_key = credentials.secret_key.encode("utf-8", "surrogatepass")
    digest = hmac.new(secret_key, content.encode("utf-8", "surrogatepass"), "sha1")
    for piece in body:
        digest.update(piece)
    fields["Signature"] = base64.b64encode(digest.digest()).decode()
    return fields
