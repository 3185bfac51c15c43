"""The request and response codes of the remoting protocol that this package knows, and the errors of response codes.

The code, and for some codes the server's remark, select the class of the error and its advice, if there is any. See
docs/internals/remoting.md#response-codes.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Final, TypeAlias, TypeVar

from rocketmq_spark import errors
from rocketmq_spark.model.message import SendStatus
from rocketmq_spark.protocol.remoting.command import shortened


class RequestCode(enum.IntEnum):
    """The codes of requests (``RequestCode.java``)."""

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
    GET_ALL_CONSUMER_OFFSET = 43
    CHECK_CLIENT_CONFIG = 46
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    GET_CONSUME_STATS = 208
    DELETE_TOPIC_IN_BROKER = 215
    DELETE_TOPIC_IN_NAMESRV = 216
    GET_CONSUMER_RUNNING_INFO = 307
    SEND_MESSAGE_V2 = 310
    SEND_BATCH_MESSAGE = 320
    SEND_REPLY_MESSAGE_V2 = 325
    GET_TOPIC_CONFIG = 351
    RECALL_MESSAGE = 370
    CONTROLLER_GET_SYNC_STATE_DATA = 1006
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

_BUSY: Final = "the broker is overloaded and stored nothing; lower maxInFlight or the number of tasks"
_FORWARDED: Final = "the proxy forwarded the request, and the outcome is unknown"
_COLD: Final = (
    "with coldDataFlowControlEnable the broker limits the bytes of messages outside of memory that a group reads in 5 "
    "s; raise cgColdReadThreshold of the broker, or the limit of the group with mqadmin "
    "updateColdDataFlowCtrGroupConfig -b {address} -g GROUP -v BYTES"
)
_ILLEGAL: Final = (
    "check body (maxMessageSize of the broker) and property sizes, delay properties, and the topic's message.type"
)
_NO_SERVICE: Final = "the broker's disk may be full, or it is shutting down or a slave"
_UNKNOWN_REQUEST: Final = "this server does not support the request: check that nameServer has no broker's address"

_Error: TypeAlias = type[errors.MQBrokerException]
CodeT = TypeVar("CodeT", bound="AnswerCode")


class AnswerCode(enum.IntEnum):
    """A code of answers: its number, the class of its error (None: the default), and what the user can do."""

    error: _Error | None
    hint: str

    def __new__(cls: type[CodeT], number: int, error: _Error | None = None, hint: str = "") -> CodeT:
        """Return the member of one row."""
        code = int.__new__(cls, number)
        code._value_, code.error, code.hint = number, error, hint
        return code


class ResponseCode(AnswerCode):
    """The codes of responses (``ResponseCode.java``, ``RemotingSysResponseCode.java``)."""

    SUCCESS = 0
    # For remarks that `_BY_REMARK` does not have: the broker may have stored the message, and Java retries.
    SYSTEM_ERROR = 1, errors.BrokerOutcomeUnknownException, "the broker's log (broker.log, store.log) has the cause"
    SYSTEM_BUSY = 2, errors.BrokerBusyException, _BUSY
    REQUEST_CODE_NOT_SUPPORTED = 3, errors.RequestNotSupportedException, _UNKNOWN_REQUEST
    TRANSACTION_FAILED = 4
    FLUSH_DISK_TIMEOUT = 10, None, "stored, but not flushed to disk yet; requireStoreOk=false accepts that"
    SLAVE_NOT_AVAILABLE = 11, None, "stored on the master only; requireStoreOk=false accepts that"
    FLUSH_SLAVE_TIMEOUT = 12, None, "stored, but not on the slave yet; requireStoreOk=false accepts that"
    MESSAGE_ILLEGAL = 13, None, _ILLEGAL
    SERVICE_NOT_AVAILABLE = 14, errors.BrokerUnavailableException, _NO_SERVICE
    VERSION_NOT_SUPPORTED = 15, None, "a proxy needs the broker name (n, bname) in every request"
    NO_PERMISSION = 16, None, "check accessKey, secretKey and the user's rights, and the topic's perm"
    TOPIC_NOT_EXIST = (
        17,
        errors.TopicRouteStaleException,
        "create the topic, or check its name and the nameServer option",
    )
    TOPIC_EXIST_ALREADY = 18
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26, None, "create the consumer group, or check the consumerGroup option"
    FILTER_DATA_NOT_EXIST = 27
    FILTER_DATA_NOT_LATEST = 28
    INVALID_PARAMETER = 29, None, "check the topic's name and number of queues"
    NO_BUYER_ID = 204
    NOT_IN_CURRENT_UNIT = 205
    CONSUMER_NOT_ONLINE = 206
    FLOW_CONTROL = 215, errors.BrokerBusyException, _BUSY
    NOT_LEADER_FOR_QUEUE = 501, errors.TopicRouteStaleException, "the queue moved to another broker"
    ILLEGAL_OPERATION = 604
    GO_AWAY = 1500, errors.BrokerUnavailableException, "the server is shutting down and did not execute the request"
    RPC_UNKNOWN = -1000, errors.BrokerOutcomeUnknownException, _FORWARDED
    RPC_ADDR_IS_NULL = -1002, errors.BrokerOutcomeUnknownException, _FORWARDED
    RPC_SEND_TO_CHANNEL_FAILED = -1004, errors.BrokerOutcomeUnknownException, _FORWARDED
    RPC_TIME_OUT = -1006, errors.BrokerOutcomeUnknownException, _FORWARDED


_CODES: Final[Mapping[int, ResponseCode]] = {int(code): code for code in ResponseCode}

# UNAUTHORIZED and FORBIDDEN of ``definition.proto``.
_PROXY_REFUSES: Final = (40100, 40300)

# ``ClientErrorCode.NO_NAME_SERVER_EXCEPTION``: no name server or proxy is configured.
NO_NAME_SERVER: Final = 10004

# The response codes of a send that mean "stored".
STORED: Final[Mapping[int, SendStatus]] = {int(status.value): status for status in SendStatus}

PASSING_TROUBLE: Final = (
    # 4.x brokers say SYSTEM_ERROR where 5.x say SYSTEM_BUSY.
    ("broker busy, start flow control", errors.BrokerBusyException),
    ("timer message is under flow control", errors.BrokerBusyException),
    ("create mapped file failed", errors.BrokerUnavailableException),
    # A DLedger leader without a quorum has appended the message, and commits it later.
    ("in-sync replicas not enough", errors.BrokerOutcomeUnknownException),
    ("broker unable to service, until", errors.BrokerUnavailableException),
    ("name server not ready", errors.BrokerUnavailableException),
)
"""Remarks of brokers that temporarily acknowledge nothing, under an unspecific code, and the error of each."""

# The remark for a known user without a right on the resource.
NO_RIGHT: Final = "no permission to access"
# Remarks of access control under an unspecific code: of 4.9 to 5.2, and of the remoting port of a proxy.
_NO_ACCESS: Final = ("AclException: ", NO_RIGHT)
_MISSING_RIGHT: Final = re.compile(
    rf"(?:{NO_RIGHT}|no (?:default )?permission for) ((?:topic|group|cluster):[^\s,]+)", re.IGNORECASE
)

_DETAILS: Final = re.compile("[:,]")

DELAY_ILLEGAL: Final = "timer message illegal"
"""The remark of a broker that rejects a message because of its delay."""

# Servers from 4.9 to 5.2: docs/internals/access-control.md#acl-1.
_PLAIN_ACCESS: Final = (
    "Check signature failed",
    "No acl config for",
    "No accessKey is configured",
    "No PlainAccessResource for",
)

OFFSET_RESET: Final = "OFFSET_RESET"
"""The remark of the one answer to a pull with which a broker tells a group that its offset was reset."""

# Looked up by "contains", first match wins: a proxy wraps the remarks of the broker behind it.
_BY_REMARK: Final[Mapping[int, tuple[tuple[str, _Error], ...]]] = {
    ResponseCode.SYSTEM_ERROR: (
        *((f"AclException: {words}", errors.UserRefusedException) for words in _PLAIN_ACCESS),
        ("AclException: ", errors.MQBrokerException),
        # The remoting port of a proxy rejects users with this code.
        (NO_RIGHT, errors.MQBrokerException),
        ("check signature failed", errors.UserRefusedException),
        ("username cannot be null", errors.UserRefusedException),
        # The page cache is busy, and nothing is stored. Or a DLedger leader of 4.x has appended the message, as above.
        ("[PC_SYNCHRONIZED]", errors.BusyOutcomeUnknownException),
        *PASSING_TROUBLE,
        # A cold read of a group without members (docs/internals/reads.md#cold-reads), with and without Java's details.
        ("ConsumerGroupInfo.getConsumeType()", errors.ColdReadException),
        ("NullPointerException, org.apache.rocketmq.broker.processor.PullMessageProcessor", errors.ColdReadException),
        # A proxy's own remoting client, towards the broker.
        ("wait response on the channel", errors.BrokerOutcomeUnknownException),
        ("send request to <", errors.BrokerOutcomeUnknownException),
        # The request is invalid, so a retry would fail, too.
        ("body size exceeded", errors.MQBrokerException),
        ("NullPointerException", errors.MQBrokerException),
        ("BufferUnderflowException", errors.MQBrokerException),
        ("NumberFormatException", errors.MQBrokerException),
        ("timerWheelEnable", errors.MQBrokerException),
        ("unsupported key", errors.MQBrokerException),
    ),
    ResponseCode.SYSTEM_BUSY: (("is reading cold data", errors.ColdReadException),),
    ResponseCode.PULL_RETRY_IMMEDIATELY: ((OFFSET_RESET, errors.BrokerBusyException),),
    ResponseCode.PULL_OFFSET_MOVED: ((OFFSET_RESET, errors.BrokerBusyException),),
    ResponseCode.NO_PERMISSION: (
        # The permission bits of the broker or topic have changed since the route was read. In all other cases, such as
        # access control and reserved topics ("Sending message to topic[..] is forbidden."), a retry does not help.
        ("] sending message is forbidden", errors.TopicRouteStaleException),
        ("] pulling message is forbidden", errors.TopicRouteStaleException),
        # Authentication errors begin with "User:", as this authorization error does.
        (NO_RIGHT, errors.MQBrokerException),
        ("check signature failed", errors.UserRefusedException),
        ("username cannot be null", errors.UserRefusedException),
        ("User:", errors.UserRefusedException),
        *((words, errors.UserRefusedException) for words in _PLAIN_ACCESS),
    ),
    ResponseCode.MESSAGE_ILLEGAL: ((DELAY_ILLEGAL, errors.DelayRefusedException),),
    # The topic has fewer queues than the cached route. Other illegal parameters (topic name, group) stay illegal.
    ResponseCode.INVALID_PARAMETER: (("request queueId[", errors.TopicRouteStaleException),),
}

KEY_MISSING: Final = "Required message key is missing"
"""The remark of a broker that rejects a single message without keys."""
NEEDS_KEYS: Final = (
    "the topic is a compaction topic, cleanup.policy=COMPACTION: every row needs a key; rows of this topic without a "
    "key that were stored in batches are lost"
)


def code_name(code: int) -> str:
    """Return RocketMQ's name of a response code, or ``UNKNOWN``."""
    return _CODES[code].name if code in _CODES else "UNKNOWN"


def broker_error(code: int, remark: str, address: str, doing: str) -> errors.MQBrokerException:
    """Return the error for a server's answer; `doing` names the request: ``sending 500 rows to orders/broker-a/3``."""
    error = _class_of(code, remark)
    hint = access_hint(error, remark) or (NEEDS_KEYS if KEY_MISSING in remark else "")
    if issubclass(error, errors.ColdReadException):
        hint = _COLD.format(address=address)
    if not hint and code in _CODES:
        hint = _CODES[code].hint
    remark = shortened(remark)
    # The details of a NullPointerException do not help.
    shown = _DETAILS.split(remark)[0] if issubclass(error, errors.ColdReadException) else remark
    text = f"{doing}: {address} answered {code} {code_name(code)}: {shown or '(no remark)'}"
    return error(f"{text} ({hint})" if hint else text, code, remark, address)


def access_hint(error: _Error, remark: str) -> str:
    """Return what to do about a rejected user or a missing right; "" for other errors."""
    if issubclass(error, errors.UserRefusedException):
        return "check accessKey, secretKey and securityToken"
    missing = missing_right(remark)
    return f"give the user the right that it needs on {missing}, or check accessKey" if missing else ""


def missing_right(remark: str) -> str:
    """Return the resource on which a known user has no right, such as ``Topic:orders``, or ""."""
    match = _MISSING_RIGHT.search(remark)
    return match[1] if match else ""


def refuses_user(code: int, remark: str) -> bool:
    """Return whether a server rejected the user or the signature."""
    return issubclass(_class_of(code, remark), errors.UserRefusedException)


def refuses_access(error: errors.MQBrokerException) -> bool:
    """Return whether a server rejected the user, or forbids sending to the topic."""
    return (
        isinstance(error, errors.UserRefusedException)
        or error.response_code == ResponseCode.NO_PERMISSION
        # A proxy that has no writable queue also answers FORBIDDEN, as a retriable error.
        or (error.response_code in _PROXY_REFUSES and not error.retriable)
        or any(remark in error.remark for remark in _NO_ACCESS)
    )


def _class_of(code: int, remark: str) -> _Error:
    by_remark = (error for fragment, error in _BY_REMARK.get(code, ()) if fragment in remark)
    by_code = _CODES[code].error if code in _CODES else None
    return next(by_remark, by_code or errors.MQBrokerException)
