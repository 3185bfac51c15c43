"""The codes of the remoting protocol, and the error of each response code.

The error's class carries the decision on a retry, so callers do not compare codes. Follows ``RequestCode.java``,
``ResponseCode.java`` and ``RemotingSysResponseCode.java``.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from rocketmq_spark.errors import (
    BrokerBusyException,
    BrokerOutcomeUnknownException,
    BrokerUnavailableException,
    MQBrokerException,
    RequestNotSupportedException,
    TopicRouteStaleException,
    UserRefusedException,
)
from rocketmq_spark.model.message import SendStatus
from rocketmq_spark.protocol.remoting.command import shortened


class RequestCode(enum.IntEnum):
    """What a request asks for (``RequestCode.java``)."""

    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    GET_ALL_TOPIC_CONFIG = 21
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    CHECK_CLIENT_CONFIG = 46
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_TOPIC_IN_BROKER = 215
    GET_CONSUMER_RUNNING_INFO = 307
    SEND_MESSAGE_V2 = 310
    SEND_BATCH_MESSAGE = 320
    SEND_REPLY_MESSAGE_V2 = 325
    GET_TOPIC_CONFIG = 351
    RECALL_MESSAGE = 370
    AUTH_CREATE_USER = 3001
    AUTH_DELETE_USER = 3003
    AUTH_GET_USER = 3004
    AUTH_CREATE_ACL = 3006


NAME_SERVER_REQUESTS: Final = frozenset(
    {
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
    }
)
"""Requests to name servers, or to proxies in their place (``DefaultRequestProcessor``), but not to brokers."""


_BUSY: Final = "the broker refused for now and stored nothing; lower maxInFlight or the number of tasks"
_FORWARDED: Final = "the request was forwarded and its outcome is unknown"
_ILLEGAL: Final = "check body and property sizes, delay properties, and the topic's message.type"
_NO_SERVICE: Final = "the broker's disk may be full, or it is shutting down or a slave"
_UNKNOWN_REQUEST: Final = (
    "this server doesn't know the request, and brokers know none of a name server's: check nameServer"
)


class ResponseCode(enum.IntEnum):
    """How a request ended (``ResponseCode.java``, ``RemotingSysResponseCode.java``): number, error, what to do."""

    error: type[MQBrokerException]
    hint: str

    def __new__(cls, number: int, error: type[MQBrokerException] = MQBrokerException, hint: str = "") -> ResponseCode:
        """Make the member of one row."""
        code = int.__new__(cls, number)
        code._value_, code.error, code.hint = number, error, hint
        return code

    SUCCESS = 0
    # For remarks that `_BY_REMARK` does not have: the broker may have stored the message, and Java tries again.
    SYSTEM_ERROR = 1, BrokerOutcomeUnknownException, "the broker's log (broker.log, store.log) has the cause"
    SYSTEM_BUSY = 2, BrokerBusyException, _BUSY
    REQUEST_CODE_NOT_SUPPORTED = 3, RequestNotSupportedException, _UNKNOWN_REQUEST
    TRANSACTION_FAILED = 4
    FLUSH_DISK_TIMEOUT = 10, MQBrokerException, "stored, but not flushed to disk yet; requireStoreOk=false accepts that"
    SLAVE_NOT_AVAILABLE = 11, MQBrokerException, "stored on the master only; requireStoreOk=false accepts that"
    FLUSH_SLAVE_TIMEOUT = 12, MQBrokerException, "stored, but not on the slave yet; requireStoreOk=false accepts that"
    MESSAGE_ILLEGAL = 13, MQBrokerException, _ILLEGAL
    SERVICE_NOT_AVAILABLE = 14, BrokerUnavailableException, _NO_SERVICE
    VERSION_NOT_SUPPORTED = 15, MQBrokerException, "a proxy needs the broker name (n, bname) in every request"
    NO_PERMISSION = 16, MQBrokerException, "check accessKey, secretKey and the user's rights, and the topic's perm"
    TOPIC_NOT_EXIST = 17, TopicRouteStaleException, "create the topic, or check its name and the nameServer option"
    TOPIC_EXIST_ALREADY = 18
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26, MQBrokerException, "create the consumer group, or check the consumerGroup option"
    FILTER_DATA_NOT_EXIST = 27
    FILTER_DATA_NOT_LATEST = 28
    INVALID_PARAMETER = 29, MQBrokerException, "check the topic's name and number of queues"
    NO_BUYER_ID = 204
    NOT_IN_CURRENT_UNIT = 205
    FLOW_CONTROL = 215, BrokerBusyException, _BUSY
    NOT_LEADER_FOR_QUEUE = 501, TopicRouteStaleException, "the queue moved to another broker"
    ILLEGAL_OPERATION = 604
    GO_AWAY = 1500, BrokerUnavailableException, "the server is shutting down and did not execute the request"
    RPC_UNKNOWN = -1000, BrokerOutcomeUnknownException, _FORWARDED
    RPC_ADDR_IS_NULL = -1002, BrokerOutcomeUnknownException, _FORWARDED
    RPC_SEND_TO_CHANNEL_FAILED = -1004, BrokerOutcomeUnknownException, _FORWARDED
    RPC_TIME_OUT = -1006, BrokerOutcomeUnknownException, _FORWARDED


_CODES: Final[Mapping[int, ResponseCode]] = {int(code): code for code in ResponseCode}
_CLASSES: Final[Mapping[int, type[MQBrokerException]]] = {int(code): code.error for code in ResponseCode}

# ``ClientErrorCode.NO_NAME_SERVER_EXCEPTION``: no name server or proxy is configured.
NO_NAME_SERVER: Final = 10004

# The response codes of a send that mean "stored".
STORED: Final[Mapping[int, SendStatus]] = MappingProxyType({int(status.value): status for status in SendStatus})

PASSING_TROUBLE: Final = (
    # 4.x brokers say SYSTEM_ERROR where 5.x say SYSTEM_BUSY.
    ("broker busy, start flow control", BrokerBusyException),
    ("timer message is under flow control", BrokerBusyException),
    ("create mapped file failed", BrokerUnavailableException),
    ("in-sync replicas not enough", BrokerUnavailableException),
    ("broker unable to service, until", BrokerUnavailableException),
    ("name server not ready", BrokerUnavailableException),
)
"""Remarks of brokers that temporarily store nothing, under an unspecific code, and the error of each."""

# The remark of servers about a known user without the right.
NO_RIGHT: Final = "no permission to access"
_MISSING_RIGHT: Final = re.compile(
    rf"(?:{NO_RIGHT}|no (?:default )?permission for) ((?:topic|group|cluster):[^\s,]+)", re.IGNORECASE
)

# Servers from 4.9 to 5.2 (PlainPermissionManager.java). Their proxies answer NO_PERMISSION with these words, and their
# brokers SYSTEM_ERROR, with the exception's name before them.
_PLAIN_ACCESS: Final = (
    "Check signature failed",
    "No acl config for",
    "No accessKey is configured",
    "No PlainAccessResource for",
)

# Looked up by "contains", first match wins: a proxy wraps the remarks of the broker behind it.
_BY_REMARK: Final[Mapping[int, tuple[tuple[str, type[MQBrokerException]], ...]]] = {
    ResponseCode.SYSTEM_ERROR: (
        *((f"AclException: {words}", UserRefusedException) for words in _PLAIN_ACCESS),
        ("AclException: ", MQBrokerException),
        # The remoting port of a proxy refuses users with this code.
        (NO_RIGHT, MQBrokerException),
        ("check signature failed", UserRefusedException),
        ("username cannot be null", UserRefusedException),
        *PASSING_TROUBLE,
        # A proxy's own remoting client, towards the broker.
        ("wait response on the channel", BrokerOutcomeUnknownException),
        ("send request to <", BrokerOutcomeUnknownException),
        # Requests that are wrong: the same bytes will never be right.
        ("body size exceeded", MQBrokerException),
        ("NullPointerException", MQBrokerException),
        ("BufferUnderflowException", MQBrokerException),
        ("NumberFormatException", MQBrokerException),
        ("timerWheelEnable", MQBrokerException),
        ("unsupported key", MQBrokerException),
    ),
    ResponseCode.NO_PERMISSION: (
        # The permission bits of the broker or topic changed under our route. All else that is NO_PERMISSION (access
        # control, reserved topics: "Sending message to topic[..] is forbidden.") stays forbidden.
        ("] sending message is forbidden", TopicRouteStaleException),
        ("] pulling message is forbidden", TopicRouteStaleException),
        # Authentication comes before authorization, and names the user in the same way.
        (NO_RIGHT, MQBrokerException),
        ("check signature failed", UserRefusedException),
        ("username cannot be null", UserRefusedException),
        ("User:", UserRefusedException),
        *((words, UserRefusedException) for words in _PLAIN_ACCESS),
    ),
    # The topic shrank under our route. Other illegal parameters (topic name, group) stay illegal.
    ResponseCode.INVALID_PARAMETER: (("request queueId[", TopicRouteStaleException),),
}

KEY_MISSING: Final = "Required message key is missing"
"""The remark of a broker that rejects a single message without keys."""
NEEDS_KEYS: Final = (
    "the topic is a compaction topic, cleanup.policy=COMPACTION: every row needs a key; rows of this topic without a "
    "key that were stored in batches are lost"
)


def code_name(code: int) -> str:
    """Return RocketMQ's name of a response code, ``UNKNOWN`` for one that this client doesn't know."""
    return _CODES[code].name if code in _CODES else "UNKNOWN"


def broker_error(code: int, remark: str, address: str, doing: str) -> MQBrokerException:
    """Return the error for a server's answer; its class carries the decision on a retry.

    `doing` is what was requested, such as ``sending 500 rows to orders/broker-a/3``.
    """
    error = _class_of(code, remark)
    hint = access_hint(error, remark) or (NEEDS_KEYS if KEY_MISSING in remark else _hint_of(code))
    remark = shortened(remark)
    text = f"{doing}: {address} answered {code} {code_name(code)}: {remark or '(no remark)'}"
    return error(f"{text} ({hint})" if hint else text, code, remark, address)


def access_hint(error: type[MQBrokerException], remark: str) -> str:
    """Return what to do about a rejected user or a missing right, "" for any other error."""
    if issubclass(error, UserRefusedException):
        return "check accessKey, secretKey and securityToken"
    missing = missing_right(remark)
    return f"give the user the right that it needs on {missing}, or check accessKey" if missing else ""


def missing_right(remark: str) -> str:
    """Return the resource on which a known user has no right, such as ``Topic:orders``, or ""."""
    found = _MISSING_RIGHT.search(remark)
    return found[1] if found else ""


def refuses_user(code: int, remark: str) -> bool:
    """Return whether a server rejected the user or the signature."""
    return issubclass(_class_of(code, remark), UserRefusedException)


def _hint_of(code: int) -> str:
    return _CODES[code].hint if code in _CODES else ""


def _class_of(code: int, remark: str) -> type[MQBrokerException]:
    by_remark = (error for fragment, error in _BY_REMARK.get(code, ()) if fragment in remark)
    return next(by_remark, _CLASSES.get(code, MQBrokerException))
