"""The custom headers of the requests that the connector sends, as ext fields.

Rule 1: attributes are the long names in snake_case; on the wire they are camelCase (`SendMessageRequestHeaderV2`:
        one letter each), in the order of the fields, which is that of the golden frames.
Rule 2: None and empty text are left out (an empty value breaks signatures in binary headers), booleans are
        ``true``/``false``, everything on the wire is text.
Rule 3: `broker_name` has no default where a proxy needs it (spec/remoting.md 2.5); brokers ignore it.

Follows spec/remoting.md sections 3, 4, 11 to 14 and the ``*RequestHeader.java`` classes.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Final

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

# (attribute, name on the wire) of each class used so far.
_WIRE_NAMES: Final[dict[type[_RequestHeader], tuple[tuple[str, str], ...]]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _RequestHeader:
    """What all request headers share: turning themselves into ext fields, one per dataclass field, in their order."""

    def to_ext_fields(self) -> dict[str, str]:
        """Return the ext fields in wire order."""
        ext_fields: dict[str, str] = {}
        for attribute, name in _wire_names(type(self)):
            value = getattr(self, attribute)
            if value is None or value == "":
                continue
            ext_fields[name] = ("true" if value else "false") if isinstance(value, bool) else str(value)
        return ext_fields


def _wire_names(header: type[_RequestHeader]) -> tuple[tuple[str, str], ...]:
    names = _WIRE_NAMES.get(header)
    if names is None:
        attributes = [item.name for item in fields(header)]
        letters = header is SendMessageRequestHeaderV2
        wire = "abcdefghijklmn" if letters else [_IRREGULAR.get(name) or _camel_case(name) for name in attributes]
        names = _WIRE_NAMES[header] = tuple(zip(attributes, wire, strict=True))
    return names


def _camel_case(attribute: str) -> str:
    head, *rest = attribute.split("_")
    return head + "".join(word.capitalize() for word in rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessageRequestHeaderV2(_RequestHeader):
    """SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE (``SendMessageRequestHeaderV2.java``, spec/remoting.md 4.1, 6.1).

    Parameters
    ----------
    producer_group, topic : str
    default_topic : str, default "TBW102"
        Template that a broker creates an unknown topic from.
    default_topic_queue_nums : int, default 4
    queue_id : int
        -1 lets the broker pick.
    sys_flag : int, default 0
    born_timestamp : int
        Epoch milliseconds.
    flag : int, default 0
        The user's flag of a single message; ignored for a batch.
    properties : str or None, default None
        Property string of a single message; for a batch only ``WAIT`` (6.4 says what anything else does).
    reconsume_times : int, default 0
    unit_mode : bool, default False
    max_reconsume_times : int or None, default None
    batch : bool, default False
        The body is batch items. This, not the request code, makes a batch.
    broker_name : str
    """

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
class GetRouteInfoRequestHeader(_RequestHeader):
    """GET_ROUTEINFO_BY_TOPIC (spec/remoting.md 3).

    Parameters
    ----------
    topic : str
    accept_standard_json_only : bool or None, default None
        True forces standard JSON; a name server from 4.9.4 on sends it to our version anyway.
    """

    topic: str
    accept_standard_json_only: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnregisterClientRequestHeader(_RequestHeader):
    """UNREGISTER_CLIENT, one group per call (spec/remoting.md 12.2)."""

    client_id: str
    producer_group: str | None = None
    consumer_group: str | None = None
    broker_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetMaxOffsetRequestHeader(_RequestHeader):
    """GET_MAX_OFFSET: the offset that the next message will get (spec/remoting.md 13.2).

    An unknown topic or queue answers 0, not an error: check against the route.
    """

    topic: str
    queue_id: int
    committed: bool | None = None
    broker_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetMinOffsetRequestHeader(_RequestHeader):
    """GET_MIN_OFFSET: the offset of the oldest message (spec/remoting.md 13.2)."""

    topic: str
    queue_id: int
    broker_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOffsetRequestHeader(_RequestHeader):
    """SEARCH_OFFSET_BY_TIMESTAMP, by store time (spec/remoting.md 13.2).

    Parameters
    ----------
    topic : str
    queue_id : int
    timestamp : int
        Epoch milliseconds.
    boundary_type : {"lower", "upper"}, default "lower"
        ``lower``: first offset stored at or after `timestamp`, the max offset if there is none. ``upper``: last offset
        stored at or before it.
    broker_name : str
    """

    topic: str
    queue_id: int
    timestamp: int
    boundary_type: str = "lower"
    broker_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetEarliestMsgStoreTimeRequestHeader(_RequestHeader):
    """GET_EARLIEST_MSG_STORETIME (``GetEarliestMsgStoretimeRequestHeader.java``)."""

    topic: str
    queue_id: int
    broker_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewMessageRequestHeader(_RequestHeader):
    """VIEW_MESSAGE_BY_ID, by commit-log offset (spec/remoting.md 13.3).

    Parameters
    ----------
    offset : int
    topic : str or None, default None
        Looked at by access control only, which refuses the request without it.
    """

    offset: int
    topic: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTransactionRequestHeader(_RequestHeader):
    """END_TRANSACTION (spec/remoting.md 11.2).

    Parameters
    ----------
    topic, producer_group : str
    tran_state_table_offset, commit_log_offset : int
    commit_or_rollback : {0, 8, 12}
    from_transaction_check : bool, default False
    msg_id : str
    transaction_id : str, default ""
    broker_name : str
    """

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
class RecallMessageRequestHeader(_RequestHeader):
    """RECALL_MESSAGE (spec/remoting.md section 10).

    Parameters
    ----------
    producer_group, topic, recall_handle, broker_name : str
    """

    producer_group: str
    topic: str
    recall_handle: str
    broker_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PullMessageRequestHeader(_RequestHeader):
    """PULL_MESSAGE and LITE_PULL_MESSAGE (spec/remoting.md 13.1).

    Parameters
    ----------
    consumer_group, topic : str
    queue_id : int
    queue_offset : int
        First offset wanted.
    max_msg_nums : int
    sys_flag : int, default 4
        1 commit offset, 2 suspend, 4 subscription in this request (no heart-beat needed), 16 lite pull.
    commit_offset : int, default 0
    suspend_timeout_millis : int, default 0
    subscription : str, default "*"
    sub_version : int, default 0
    expression_type : str, default "TAG"
    broker_name : str or None
    """

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
class UpdateConsumerOffsetRequestHeader(_RequestHeader):
    """UPDATE_CONSUMER_OFFSET (spec/remoting.md 13.2)."""

    consumer_group: str
    topic: str
    queue_id: int
    commit_offset: int
    broker_name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetConsumerListByGroupRequestHeader(_RequestHeader):
    """GET_CONSUMER_LIST_BY_GROUP, to a broker."""

    consumer_group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetTopicConfigRequestHeader(_RequestHeader):
    """GET_TOPIC_CONFIG, to a broker (spec/remoting.md 14)."""

    topic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTopicRequestHeader(_RequestHeader):
    """UPDATE_AND_CREATE_TOPIC, to every master; overwrites an existing topic (spec/remoting.md 14).

    Parameters
    ----------
    topic : str
    default_topic : str, default "TBW102"
    read_queue_nums, write_queue_nums : int
    perm : int, default 6
        4 read, 2 write, 1 inherit.
    topic_filter_type : str, default "SINGLE_TAG"
    topic_sys_flag : int, default 0
    order : bool, default False
    attributes : str, default ""
        Such as ``+message.type=FIFO,+queue.type=BatchCQ``.
    broker_name : str or None, default None
        No proxy knows this request.
    """

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


def heart_beat_body(
    client_id: str, producer_groups: Collection[str] = (), consumer_groups: Collection[str] = ()
) -> bytes:
    """Encode the body of HEART_BEAT (spec/remoting.md 12.1).

    Parameters
    ----------
    client_id : str
        ``ip@instanceName``, unique per process.
    producer_groups : collection of str
        Written in sorted order, so that equal clients send equal bytes.
    consumer_groups : collection of str
        They pull, and have no subscriptions: a broker then makes no queue of theirs another one's.
    """
    body = {
        "clientID": client_id,
        "producerDataSet": [{"groupName": group} for group in sorted(producer_groups)],
        # Both sets are needed, empty or not.
        "consumerDataSet": [{"groupName": group, **_PULLS} for group in sorted(consumer_groups)],
    }
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
