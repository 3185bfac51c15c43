"""The custom headers of the requests that the connector sends, as ext fields.

Attributes are the long names in snake_case; on the wire they are camelCase (`SendMessageRequestHeaderV2`: one letter
each). None and empty text are left out, because an empty value breaks signatures in binary headers. `broker_name` has
no default where a proxy needs it; brokers ignore it.

Follows the ``*RequestHeader.java`` classes.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.model.message import Buffer
from rocketmq_spark.protocol.remoting.codes import RequestCode

# Names that are not simply the attribute's in camelCase.
_IRREGULAR: Final = {"client_id": "clientID", "broker_name": "bname"}

# Of a consumer's heart-beat.
_PULLS: Final = {
    "consumeType": "CONSUME_ACTIVELY",
    "messageModel": "CLUSTERING",
    "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
    "unitMode": False,
    "subscriptionDataSet": [],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHeader:
    """A request's custom header; each dataclass field is one ext field, in the order of the fields.

    Attributes
    ----------
    code : RequestCode
        The request that it belongs to.
    """

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
def _wire_names(header: type[RequestHeader]) -> tuple[tuple[str, str], ...]:
    """Return the attributes of a header, each with its name on the wire."""
    attributes = [item.name for item in dataclasses.fields(header)]
    letters = header is SendMessageRequestHeaderV2
    wire = "abcdefghijklmn" if letters else [_IRREGULAR.get(name) or _camel_case(name) for name in attributes]
    return tuple(zip(attributes, wire, strict=True))


def _camel_case(attribute: str) -> str:
    head, *rest = attribute.split("_")
    return head + "".join(word.capitalize() for word in rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessageRequestHeaderV2(RequestHeader):
    """SEND_MESSAGE_V2, SEND_BATCH_MESSAGE and SEND_REPLY_MESSAGE_V2.

    Parameters
    ----------
    queue_id : int
        -1 lets the broker pick.
    born_timestamp : int
        Epoch milliseconds.
    flag : int, default 0
        The user's flag of a single message; brokers ignore it for a batch.
    properties : str or None, default None
        Property string of a single message; for a batch only ``WAIT``.
    batch : bool, default False
        The body is batch items. This, not the request code, makes a batch.
    """

    code: ClassVar[RequestCode] = RequestCode.SEND_MESSAGE_V2
    producer_group: str
    topic: str
    default_topic: str = "TBW102"
    default_topic_queue_nums: int = 4
    queue_id: int
    sys_flag: int = 0
    born_timestamp: int
    flag: int = 0
    properties: str | None = None
    reconsume_times: int = 0
    unit_mode: bool = False
    max_reconsume_times: int | None = None
    batch: bool = False
    broker_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetRouteInfoRequestHeader(RequestHeader):
    """`accept_standard_json_only` forces standard JSON, which name servers from 4.9.4 on send to our version anyway."""

    code: ClassVar[RequestCode] = RequestCode.GET_ROUTEINFO_BY_TOPIC
    topic: str
    accept_standard_json_only: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnregisterClientRequestHeader(RequestHeader):
    """One group per request."""

    code: ClassVar[RequestCode] = RequestCode.UNREGISTER_CLIENT
    client_id: str
    producer_group: str | None = None
    consumer_group: str | None = None
    broker_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetMaxOffsetRequestHeader(RequestHeader):
    """An unknown topic or queue answers 0, not an error: check against the route."""

    code: ClassVar[RequestCode] = RequestCode.GET_MAX_OFFSET
    topic: str
    queue_id: int
    committed: bool | None = None
    broker_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetMinOffsetRequestHeader(RequestHeader):
    """Asks for the offset of the oldest message."""

    code: ClassVar[RequestCode] = RequestCode.GET_MIN_OFFSET
    topic: str
    queue_id: int
    broker_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOffsetRequestHeader(RequestHeader):
    """Searches by store time, epoch milliseconds.

    With `boundary_type` ``lower`` the answer is the first offset stored at or after `timestamp`, or the max offset.
    With ``upper`` it is the last offset stored at or before it.
    """

    code: ClassVar[RequestCode] = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
    topic: str
    queue_id: int
    timestamp: int
    boundary_type: str = "lower"
    broker_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetEarliestMsgStoreTimeRequestHeader(RequestHeader):
    """Asks when the oldest message was stored."""

    code: ClassVar[RequestCode] = RequestCode.GET_EARLIEST_MSG_STORETIME
    topic: str
    queue_id: int
    broker_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewMessageRequestHeader(RequestHeader):
    """`offset` is a commit-log offset. Access control rejects the request without `topic`."""

    code: ClassVar[RequestCode] = RequestCode.VIEW_MESSAGE_BY_ID
    offset: int
    topic: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTransactionRequestHeader(RequestHeader):
    """`commit_or_rollback` is 0, 8 or 12."""

    code: ClassVar[RequestCode] = RequestCode.END_TRANSACTION
    topic: str
    producer_group: str
    tran_state_table_offset: int
    commit_log_offset: int
    commit_or_rollback: int
    from_transaction_check: bool = False
    msg_id: str
    transaction_id: str = ""
    broker_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallMessageRequestHeader(RequestHeader):
    """Takes a delayed message back."""

    code: ClassVar[RequestCode] = RequestCode.RECALL_MESSAGE
    producer_group: str
    topic: str
    recall_handle: str
    broker_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PullMessageRequestHeader(RequestHeader):
    """`queue_offset` is the first offset to return.

    Bits of `sys_flag`: 1 commit offset, 2 suspend, 4 the request carries the subscription, 16 lite pull.
    """

    code: ClassVar[RequestCode] = RequestCode.PULL_MESSAGE
    consumer_group: str
    topic: str
    queue_id: int
    queue_offset: int
    max_msg_nums: int
    sys_flag: int = 4
    commit_offset: int = 0
    suspend_timeout_millis: int = 0
    subscription: str = "*"
    sub_version: int = 0
    expression_type: str = "TAG"
    broker_name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConsumerOffsetRequestHeader(RequestHeader):
    """Commits a group's offset."""

    code: ClassVar[RequestCode] = RequestCode.UPDATE_CONSUMER_OFFSET
    consumer_group: str
    topic: str
    queue_id: int
    commit_offset: int
    broker_name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetConsumerListByGroupRequestHeader(RequestHeader):
    """Asks a broker for the client ids of a group."""

    code: ClassVar[RequestCode] = RequestCode.GET_CONSUMER_LIST_BY_GROUP
    consumer_group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetTopicConfigRequestHeader(RequestHeader):
    """Asks a broker for a topic's configuration."""

    code: ClassVar[RequestCode] = RequestCode.GET_TOPIC_CONFIG
    topic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTopicRequestHeader(RequestHeader):
    """Goes to every master, and overwrites an existing topic.

    `perm`: 4 read, 2 write, 1 inherit. `attributes`: such as ``+message.type=FIFO,+queue.type=BatchCQ``.
    """

    code: ClassVar[RequestCode] = RequestCode.UPDATE_AND_CREATE_TOPIC
    topic: str
    default_topic: str = "TBW102"
    read_queue_nums: int
    write_queue_nums: int
    perm: int = 6
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: str = ""
    broker_name: str | None = None


def heart_beat_body(client_id: str, producer_groups: Iterable[str] = (), consumer_groups: Iterable[str] = ()) -> bytes:
    """Encode the body of HEART_BEAT.

    Groups are sorted, so that equal clients send equal bytes. Consumer groups pull and have no subscriptions, so a
    broker assigns them no queue of another consumer.
    """
    body = {
        "clientID": client_id,
        "producerDataSet": [{"groupName": group} for group in sorted(producer_groups)],
        # Both sets are needed, empty or not.
        "consumerDataSet": [{"groupName": group, **_PULLS} for group in sorted(consumer_groups)],
    }
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def signed(ext_fields: Mapping[str, str], body: Iterable[Buffer], credentials: Credentials) -> dict[str, str]:
    """Return the ext fields with AccessKey, SecurityToken (if there is one) and Signature.

    The signature covers the value of every other ext field, ordered by the fields' names, and then the body. It covers
    no names, and neither code, opaque nor remark. Follows ``AclClientRPCHook.java`` and ``AclSigner.java``.
    """
    fields = {**ext_fields, "AccessKey": credentials.access_key}
    if credentials.security_token:
        fields["SecurityToken"] = credentials.security_token
    fields.pop("Signature", None)
    content = "".join(fields[name] for name in sorted(fields))
    # Invalid Unicode passes: an error here would show secrets. Encoding the header rejects it.
    secret_key = credentials.secret_key.encode("utf-8", "surrogatepass")
    digest = hmac.new(secret_key, content.encode("utf-8", "surrogatepass"), "sha1")
    for piece in body:
        digest.update(piece)
    fields["Signature"] = base64.b64encode(digest.digest()).decode()
    return fields
