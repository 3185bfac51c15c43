"""The error of each code of a proxy, and of each status of gRPC itself.

gRPC's status says whether there is an answer; the answer's code says how the call ended. Tables map a code to a class,
and look into the text (without case) where one code has several causes. Unknown codes are classified by their hundreds;
by default, the message may be stored and is retried. ``MessageRefusedException`` is only for an error of one message:
halving the batch finds it.

Follows ``definition.proto`` (Code) and ``ResponseBuilder.java`` of the proxy. The proxy turns every error of a broker
but flow control into INTERNAL_SERVER_ERROR with the broker's text.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from rocketmq_spark.errors import (
    BrokerBusyException,
    BrokerOutcomeUnknownException,
    MessageRefusedException,
    MQBrokerException,
    RemotingCertificateException,
    RemotingCommandException,
    RemotingConnectException,
    RemotingException,
    RemotingSendRequestException,
    RemotingTimeoutException,
    RemotingTlsException,
    TopicRouteStaleException,
    UserRefusedException,
)
from rocketmq_spark.model.message import SendStatus
from rocketmq_spark.protocol.remoting.codes import KEY_MISSING, NEEDS_KEYS, NO_RIGHT, PASSING_TROUBLE, access_hint
from rocketmq_spark.protocol.remoting.command import shortened
from rocketmq_spark.protocol.tls import MUST_NAME, NOT_TRUSTED, OUT_OF_DATE, SPEAKS_NO_TLS, TOO_OLD, other_name

_AnswerError: TypeAlias = type[MQBrokerException]

_RIGHTS: Final = "check accessKey, secretKey and the user's rights"
_BUSY: Final = "the proxy or its broker refused for now and stored nothing; lower maxInFlight or the number of tasks"
_FORWARDED: Final = "the proxy passed it on and the outcome is unknown; its log (proxy.log) may have the cause"
_SIZE: Final = "a message may have 4 MiB, and so may a whole batch, unless maxMessageSize of proxy and broker says more"
_PROPERTY: Final = "over gRPC no property has a control character (such as a tab) in it, or one of RocketMQ's own names"
_PROPERTIES: Final = "a message may have 128 properties, and 16384 bytes of them with tag and keys"
_TYPE: Final = (
    "over gRPC a shardingKey makes a FIFO message, a delay a DELAY message, a transaction a TRANSACTION message, and "
    "the topic's message.type must be that one: mqadmin updateTopic ... -a +message.type=FIFO"
)
_NO_SUCH: Final = "create the topic, or check its name: a proxy creates none, and learns of a new one within 30 s"
_NO_QUEUE: Final = "the topic has no queue that takes messages: check its perm, and that its brokers are up"
_ADDRESS: Final = (
    "endpoints names gRPC ports of proxies, 8081 unless set, not a name server or broker; are useTls and tlsCertFile "
    "right?"
)
_NO_PEM: Final = "tlsCaFile holds no PEM certificate"
_NO_CALL: Final = "this proxy has no such call, or the address is no proxy's (an http_proxy in between answers so, too)"

_TOO_LONG: Final = "the reply is longer than any that a proxy gives; what it answers may have been executed"
_COMPRESSED: Final = (
    "compressed replies are refused, and the call may have been executed; let no gateway compress the proxy's replies"
)
_RECALL: Final = "brokers allow it with recallMessageEnable=true"
_TRANSACTION: Final = (
    "a transaction ends once, at the proxy that took its half message, within 30 s; then the broker asks"
)


class Code(enum.IntEnum):
    """How a call ended (``definition.proto``, Code): the number, the class of its error, and what to do about it.

    The hundreds are those of HTTP. They decide on the class where a code has none of its own.
    """

    error: _AnswerError | None
    hint: str

    def __new__(cls, number: int, error: _AnswerError | None = None, hint: str = "") -> Code:
        """Make the member of one row."""
        code = int.__new__(cls, number)
        code._value_, code.error, code.hint = number, error, hint
        return code

    CODE_UNSPECIFIED = 0
    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    # 400xx is about one message, unless a class is set.
    ILLEGAL_ACCESS_POINT = 40001, MQBrokerException
    ILLEGAL_TOPIC = 40002, MQBrokerException, "check the topic's name; the broker's own topics take no messages"
    ILLEGAL_CONSUMER_GROUP = 40003, MQBrokerException
    ILLEGAL_MESSAGE_TAG = 40004, None, "a tag is not blank, and has no | and no control character"
    ILLEGAL_MESSAGE_KEY = 40005, None, "a key is not blank, and has no control character"
    ILLEGAL_MESSAGE_GROUP = 40006, None, "a shardingKey is not blank, has at most 63 bytes, and no control character"
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40007, None, _PROPERTY
    INVALID_TRANSACTION_ID = 40008, MQBrokerException
    ILLEGAL_MESSAGE_ID = 40009
    ILLEGAL_FILTER_EXPRESSION = 40010, MQBrokerException
    ILLEGAL_INVISIBLE_TIME = 40011, MQBrokerException
    ILLEGAL_DELIVERY_TIME = 40012, None, "the proxy allows a delay of maxDelayTimeMills, 24 hours if not set"
    INVALID_RECEIPT_HANDLE = 40013, MQBrokerException
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014, MQBrokerException, _TYPE
    UNRECOGNIZED_CLIENT_TYPE = 40015, MQBrokerException
    MESSAGE_CORRUPTED = 40016, MQBrokerException, "all messages of a request have one topic"
    CLIENT_ID_REQUIRED = 40017, MQBrokerException
    ILLEGAL_POLLING_TIME = 40018, MQBrokerException
    ILLEGAL_OFFSET = 40019, MQBrokerException
    ILLEGAL_LITE_TOPIC = 40020, MQBrokerException
    UNAUTHORIZED = 40100, UserRefusedException, _RIGHTS
    PAYMENT_REQUIRED = 40200
    FORBIDDEN = 40300, None, _RIGHTS
    NOT_FOUND = 40400
    MESSAGE_NOT_FOUND = 40401
    TOPIC_NOT_FOUND = 40402, TopicRouteStaleException, _NO_SUCH
    CONSUMER_GROUP_NOT_FOUND = 40403
    OFFSET_NOT_FOUND = 40404
    REQUEST_TIMEOUT = 40800, None, _FORWARDED
    PAYLOAD_TOO_LARGE = 41300, None, _SIZE
    MESSAGE_BODY_TOO_LARGE = 41301, None, _SIZE
    MESSAGE_BODY_EMPTY = 41302, None, "a message needs a body of at least one byte"
    PRECONDITION_FAILED = 42800
    TOO_MANY_REQUESTS = 42900, None, _BUSY
    # Quotas do not pass by waiting.
    LITE_TOPIC_QUOTA_EXCEEDED = 42901, MQBrokerException
    LITE_SUBSCRIPTION_QUOTA_EXCEEDED = 42902, MQBrokerException
    REQUEST_HEADER_FIELDS_TOO_LARGE = 43100
    MESSAGE_PROPERTIES_TOO_LARGE = 43101, None, _PROPERTIES
    INTERNAL_ERROR = 50000, None, _FORWARDED
    INTERNAL_SERVER_ERROR = 50001, None, "the proxy's and the broker's logs (proxy.log, broker.log) have the cause"
    HA_NOT_AVAILABLE = 50002, None, "stored on the master only; requireStoreOk=false accepts that"
    NOT_IMPLEMENTED = 50100, None, "this proxy or broker doesn't know the request"
    PROXY_TIMEOUT = 50400, None, _FORWARDED
    MASTER_PERSISTENCE_TIMEOUT = 50401, None, "stored, but not flushed to disk yet; requireStoreOk=false accepts that"
    SLAVE_PERSISTENCE_TIMEOUT = 50402, None, "stored, but not on the slave yet; requireStoreOk=false accepts that"
    UNSUPPORTED = 50500
    VERSION_UNSUPPORTED = 50501
    VERIFY_FIFO_MESSAGE_UNSUPPORTED = 50502
    FAILED_TO_CONSUME_MESSAGE = 60000


_CODES: Final[Mapping[int, Code]] = {int(code): code for code in Code}

# The codes of a send that mean "stored".
STORED: Final[Mapping[int, SendStatus]] = MappingProxyType(
    {
        int(Code.OK): SendStatus.SEND_OK,
        int(Code.HA_NOT_AVAILABLE): SendStatus.SLAVE_NOT_AVAILABLE,
        int(Code.MASTER_PERSISTENCE_TIMEOUT): SendStatus.FLUSH_DISK_TIMEOUT,
        int(Code.SLAVE_PERSISTENCE_TIMEOUT): SendStatus.FLUSH_SLAVE_TIMEOUT,
    }
)

_BY_HUNDREDS: Final[Mapping[int, _AnswerError]] = {
    400: MessageRefusedException,
    408: BrokerOutcomeUnknownException,
    413: MessageRefusedException,
    429: BrokerBusyException,
    431: MessageRefusedException,
    501: MQBrokerException,
    505: MQBrokerException,
}


class _Words(NamedTuple):
    """A cause that only the text of an answer shows. The text contains `fragment`; the first match wins."""

    code: int
    fragment: str
    error: _AnswerError
    hint: str = ""


_WORDS: Final = (
    # The proxy does not know the topic (yet); every other conflict of types is one.
    _Words(Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, "unspecified", TopicRouteStaleException, _NO_SUCH),
    # 5.5.0 has one code for who is not known and who may not.
    _Words(Code.UNAUTHORIZED, NO_RIGHT, MQBrokerException),
    _Words(Code.FORBIDDEN, "no writable queue", TopicRouteStaleException, _NO_QUEUE),
    *(_Words(Code.INTERNAL_SERVER_ERROR, fragment, error) for fragment, error in PASSING_TROUBLE),
    # The permission bits of the broker or topic changed under the proxy's route.
    _Words(Code.INTERNAL_SERVER_ERROR, "] sending message is forbidden", TopicRouteStaleException, _NO_QUEUE),
    # Requests that are wrong: the same bytes will never be right.
    _Words(Code.INTERNAL_SERVER_ERROR, "message body size exceeded", MessageRefusedException, _SIZE),
    _Words(Code.INTERNAL_SERVER_ERROR, "delayed messages are not supported for batching", MessageRefusedException),
    _Words(Code.INTERNAL_SERVER_ERROR, "the message is illegal", MessageRefusedException),
    _Words(Code.INTERNAL_SERVER_ERROR, KEY_MISSING.lower(), MessageRefusedException, NEEDS_KEYS),
    _Words(Code.INTERNAL_SERVER_ERROR, "recall handle is invalid", MQBrokerException),
    _Words(Code.INTERNAL_SERVER_ERROR, "operation is forbidden", MQBrokerException, _RECALL),
    _Words(Code.INTERNAL_SERVER_ERROR, "cannot found transaction data", MQBrokerException, _TRANSACTION),
)


class _Failure(NamedTuple):
    """The meaning of a status of gRPC itself. Its details contain `fragment`; the first match wins."""

    status: str
    fragment: str
    error: _AnswerError | type[RemotingException]
    hint: str
    code: int = 0  # The protocol's own code for the same; 0 where nobody answered


_FAILURES: Final = (
    # No connection came about, so nothing was sent.
    _Failure("UNAVAILABLE", "certificate has expired", RemotingCertificateException, OUT_OF_DATE),
    _Failure("UNAVAILABLE", "certificate is not yet valid", RemotingCertificateException, OUT_OF_DATE),
    _Failure("UNAVAILABLE", "certificate_verify_failed", RemotingCertificateException, NOT_TRUSTED),
    _Failure("UNAVAILABLE", "hostname verification", RemotingCertificateException, MUST_NAME),
    # The same as gRPC 1.76 says it.
    _Failure("UNAVAILABLE", "is not in peer certificate", RemotingCertificateException, MUST_NAME),
    _Failure("UNAVAILABLE", "failed to create security handshaker", RemotingCertificateException, _NO_PEM),
    _Failure("UNAVAILABLE", "wrong_version_number", RemotingTlsException, SPEAKS_NO_TLS),
    # The alert of the server, and the error of this side.
    _Failure("UNAVAILABLE", "alert_protocol_version", RemotingTlsException, TOO_OLD),
    _Failure("UNAVAILABLE", "unsupported_protocol", RemotingTlsException, TOO_OLD),
    _Failure("UNAVAILABLE", "failed to connect", RemotingConnectException, _ADDRESS),
    _Failure("UNAVAILABLE", "errors resolving", RemotingConnectException, "check the names in endpoints"),
    _Failure("UNAVAILABLE", "dns resolution failed", RemotingConnectException, "check the names in endpoints"),
    _Failure("DEADLINE_EXCEEDED", "", RemotingTimeoutException, "it may have been executed"),
    # This client's own limits for replies: the server answered, so it may have stored the rows. (A server cannot say
    # these of a request: requests are never compressed, and their metadata is a fraction of any limit.)
    _Failure("RESOURCE_EXHAUSTED", "client: received message larger than max", RemotingCommandException, _TOO_LONG),
    _Failure("RESOURCE_EXHAUSTED", "decompressed message larger than max", RemotingCommandException, _TOO_LONG),
    # gRPC 1.76 and 1.85 give different statuses.
    _Failure("UNIMPLEMENTED", "compression algorithm", RemotingCommandException, _COMPRESSED),
    _Failure("INTERNAL", "compression algorithm", RemotingCommandException, _COMPRESSED),
    _Failure("RESOURCE_EXHAUSTED", "received metadata size exceeds", RemotingCommandException, _TOO_LONG),
    # A gateway's limit, which waiting does not lift.
    _Failure("RESOURCE_EXHAUSTED", "maximum size", MessageRefusedException, _SIZE, Code.PAYLOAD_TOO_LARGE),
    _Failure("RESOURCE_EXHAUSTED", "larger than max", MessageRefusedException, _SIZE, Code.PAYLOAD_TOO_LARGE),
    _Failure("RESOURCE_EXHAUSTED", "", BrokerBusyException, _BUSY, Code.TOO_MANY_REQUESTS),
    # About the call and not about a message: no half of a batch fares better.
    _Failure("INVALID_ARGUMENT", "", MQBrokerException, "", Code.BAD_REQUEST),
    _Failure("PERMISSION_DENIED", "", MQBrokerException, _RIGHTS, Code.FORBIDDEN),
    _Failure("UNAUTHENTICATED", "", UserRefusedException, _RIGHTS, Code.UNAUTHORIZED),
    _Failure("UNIMPLEMENTED", "", MQBrokerException, _NO_CALL, Code.NOT_IMPLEMENTED),
)


def code_name(code: int) -> str:
    """Return the protocol's name of a code, ``UNKNOWN`` for one that this client doesn't know."""
    return _CODES[code].name if code in _CODES else "UNKNOWN"


def proxy_error(code: int, message: str, address: str, doing: str) -> MQBrokerException:
    """Return the error for a proxy's answer, or for one of its results; the class carries the decision on a retry.

    The code may be in `STORED` if nothing shows that the message was stored. `doing` is what was requested, such as
    ``sending 500 rows to topic orders``.
    """
    said = message.lower()
    words = next((words for words in _WORDS if words.code == code and words.fragment in said), None)
    error = words.error if words else _class_of(code)
    hint = (words.hint if words else "") or access_hint(error, message) or (_CODES[code].hint if code in _CODES else "")
    message = shortened(message)
    text = f"{doing}: {address} answered {code} {code_name(code)}: {message or '(no message)'}"
    return error(f"{text} ({hint})" if hint else text, int(code), message, address)


def call_error(
    status: str, details: str, address: str, doing: str, server_name: str | None = None
) -> MQBrokerException | RemotingException:
    """Return the error of a call that ended without an answer, with a status (name of a ``grpc.StatusCode``).

    `details` is gRPC's text, which shows whether the connection broke or never opened; `server_name` is tlsServerName.
    """
    said = details.lower()
    text = f"{doing}: {address}: gRPC {status}: {shortened(details) or '(no details)'}"
    failure = next((one for one in _FAILURES if one.status == status and one.fragment in said), None)
    if failure is None:
        # The connection or the server broke down in the middle.
        return RemotingSendRequestException(f"{text} (it may have been executed)")
    hint = failure.hint
    if hint == MUST_NAME:
        hint = other_name(address.rpartition(":")[0].strip("[]"), server_name)
    text = f"{text} ({hint})" if hint else text
    if issubclass(failure.error, MQBrokerException):
        return failure.error(text, int(failure.code), details, address)
    return failure.error(text)


def _class_of(code: int) -> _AnswerError:
    unknown = MQBrokerException if code // 10_000 == 4 else BrokerOutcomeUnknownException
    own = _CODES[code].error if code in _CODES else None
    return own or _BY_HUNDREDS.get(code // 100, unknown)
