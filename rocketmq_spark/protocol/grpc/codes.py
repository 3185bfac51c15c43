"""Maps codes of proxies, and statuses of gRPC itself, to exceptions, many with advice (docs/internals/grpc.md#codes).

``MessageRefusedException`` is for a request that is too large or has an invalid message, so smaller batches may
succeed. The sink then sends the halves of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias

from rocketmq_spark import errors
from rocketmq_spark.model.message import SendStatus
from rocketmq_spark.protocol.remoting import codes
from rocketmq_spark.protocol.remoting.command import shortened
from rocketmq_spark.protocol.tls import MUST_NAME, NOT_TRUSTED, OUT_OF_DATE, SPEAKS_NO_TLS, TOO_OLD, other_name

_AnswerError: TypeAlias = type[errors.MQBrokerException]

_RIGHTS: Final = "check accessKey, secretKey and the user's rights"
_BUSY: Final = "the proxy or its broker is overloaded and stored nothing; lower maxInFlight or the number of tasks"
_FORWARDED: Final = (
    "the proxy forwarded the request, and the outcome is unknown; the proxy's log (proxy.log) may have the cause"
)
_SIZE: Final = "a message or batch may have at most 4 MiB, unless maxMessageSize of proxy and broker allows more"
_PROPERTY: Final = (
    "over gRPC no property may contain a control character (such as a tab) or have a name that RocketMQ itself uses"
)
_PROPERTIES: Final = "a message may have at most 128 properties, and 16384 bytes of properties, tag and keys"
_TYPE: Final = (
    "over gRPC a shardingKey makes a FIFO message, a delay a DELAY message, a transaction a TRANSACTION message, and "
    "the topic's message.type must be the same: mqadmin updateTopic ... -a +message.type=FIFO"
)
_NO_SUCH: Final = "create the topic, or check its name: a proxy creates no topics, and finds a new topic within 30 s"
_NO_QUEUE: Final = "the topic has no writable queue: check its perm, and that its brokers run"
_ADDRESS: Final = (
    "endpoints must have gRPC ports of proxies (default 8081), not of name servers or brokers; check endpoints, useTls "
    "and tlsCertFile"
)
_NAMES: Final = "check the host names in endpoints"
_NO_PEM: Final = "tlsCaFile contains no PEM certificate"
_NO_CALL: Final = (
    "this proxy does not support the call, or a server that is no proxy answered (such as an http_proxy); "
    "check endpoints"
)
_TOO_LONG: Final = (
    "the reply exceeds this client's limit, so the server may be no proxy; the request may have been executed"
)
_COMPRESSED: Final = (
    "compressed replies are refused, and the call may have been executed; switch compression off in the gateway"
)
_RECALL: Final = "a broker allows recalls only with recallMessageEnable=true"
_TRANSACTION: Final = (
    "a transaction can be ended once, within 30 s, at the proxy that received its half message; later "
    "the broker asks its producers for the outcome"
)


class Code(codes.AnswerCode):
    """The codes of ``definition.proto``. Their hundreds are HTTP's, and select the class if the row has none."""

    CODE_UNSPECIFIED = 0
    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    # 400xx are errors of one message, unless the row has a class.
    ILLEGAL_ACCESS_POINT = 40001, errors.MQBrokerException
    ILLEGAL_TOPIC = (
        40002,
        errors.MQBrokerException,
        "check the topic's name; clients may not send to the broker's own topics",
    )
    ILLEGAL_CONSUMER_GROUP = 40003, errors.MQBrokerException
    ILLEGAL_MESSAGE_TAG = 40004, None, "a tag must not be blank, and must not contain | or a control character"
    ILLEGAL_MESSAGE_KEY = 40005, None, "a key must not be blank, and must not contain a control character"
    ILLEGAL_MESSAGE_GROUP = (
        40006,
        None,
        "a shardingKey must have 1 to 63 bytes, must not be blank, and must not contain a control character",
    )
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40007, None, _PROPERTY
    INVALID_TRANSACTION_ID = 40008, errors.MQBrokerException
    ILLEGAL_MESSAGE_ID = 40009
    ILLEGAL_FILTER_EXPRESSION = 40010, errors.MQBrokerException
    ILLEGAL_INVISIBLE_TIME = 40011, errors.MQBrokerException
    ILLEGAL_DELIVERY_TIME = (
        40012,
        errors.DelayRefusedException,
        "the proxy allows a delay of at most maxDelayTimeMills (default: 24 hours)",
    )
    INVALID_RECEIPT_HANDLE = 40013, errors.MQBrokerException
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014, errors.MQBrokerException, _TYPE
    UNRECOGNIZED_CLIENT_TYPE = 40015, errors.MQBrokerException
    MESSAGE_CORRUPTED = 40016, errors.MQBrokerException, "all messages of a request must have the same topic"
    CLIENT_ID_REQUIRED = 40017, errors.MQBrokerException
    ILLEGAL_POLLING_TIME = 40018, errors.MQBrokerException
    ILLEGAL_OFFSET = 40019, errors.MQBrokerException
    ILLEGAL_LITE_TOPIC = 40020, errors.MQBrokerException
    UNAUTHORIZED = 40100, errors.UserRefusedException, _RIGHTS
    PAYMENT_REQUIRED = 40200
    FORBIDDEN = 40300, None, _RIGHTS
    NOT_FOUND = 40400
    MESSAGE_NOT_FOUND = 40401
    TOPIC_NOT_FOUND = 40402, errors.TopicRouteStaleException, _NO_SUCH
    CONSUMER_GROUP_NOT_FOUND = 40403
    OFFSET_NOT_FOUND = 40404
    REQUEST_TIMEOUT = 40800, None, _FORWARDED
    PAYLOAD_TOO_LARGE = 41300, None, _SIZE
    MESSAGE_BODY_TOO_LARGE = 41301, None, _SIZE
    MESSAGE_BODY_EMPTY = 41302, None, "a message needs a body of at least one byte"
    PRECONDITION_FAILED = 42800
    TOO_MANY_REQUESTS = 42900, None, _BUSY
    # Waiting does not help.
    LITE_TOPIC_QUOTA_EXCEEDED = 42901, errors.MQBrokerException
    LITE_SUBSCRIPTION_QUOTA_EXCEEDED = 42902, errors.MQBrokerException
    REQUEST_HEADER_FIELDS_TOO_LARGE = 43100
    MESSAGE_PROPERTIES_TOO_LARGE = 43101, None, _PROPERTIES
    INTERNAL_ERROR = 50000, None, _FORWARDED
    INTERNAL_SERVER_ERROR = 50001, None, "the proxy's and the broker's logs (proxy.log, broker.log) have the cause"
    HA_NOT_AVAILABLE = 50002, None, "stored on the master only; requireStoreOk=false accepts that"
    NOT_IMPLEMENTED = 50100, None, "this proxy or broker does not support the request"
    PROXY_TIMEOUT = 50400, None, _FORWARDED
    MASTER_PERSISTENCE_TIMEOUT = 50401, None, "stored, but not flushed to disk yet; requireStoreOk=false accepts that"
    SLAVE_PERSISTENCE_TIMEOUT = 50402, None, "stored, but not on the slave yet; requireStoreOk=false accepts that"
    UNSUPPORTED = 50500
    VERSION_UNSUPPORTED = 50501
    VERIFY_FIFO_MESSAGE_UNSUPPORTED = 50502
    FAILED_TO_CONSUME_MESSAGE = 60000


_CODES: Final[Mapping[int, Code]] = {int(code): code for code in Code}

# The codes of a send that mean "stored".
STORED: Final[Mapping[int, SendStatus]] = {
    int(Code.OK): SendStatus.SEND_OK,
    int(Code.HA_NOT_AVAILABLE): SendStatus.SLAVE_NOT_AVAILABLE,
    int(Code.MASTER_PERSISTENCE_TIMEOUT): SendStatus.FLUSH_DISK_TIMEOUT,
    int(Code.SLAVE_PERSISTENCE_TIMEOUT): SendStatus.FLUSH_SLAVE_TIMEOUT,
}

_BY_HUNDREDS: Final[Mapping[int, _AnswerError]] = {
    400: errors.MessageRefusedException,
    408: errors.BrokerOutcomeUnknownException,
    413: errors.MessageRefusedException,
    429: errors.BrokerBusyException,
    431: errors.MessageRefusedException,
    501: errors.MQBrokerException,
    505: errors.MQBrokerException,
}


class _Words(NamedTuple):
    """A cause that only the text of an answer shows: the text contains `fragment`. The first match wins."""

    code: int
    fragment: str
    error: _AnswerError
    hint: str = ""


_WORDS: Final = (
    # The proxy does not know the topic (yet). Without this word the types do conflict.
    _Words(Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, "unspecified", errors.TopicRouteStaleException, _NO_SUCH),
    # 5.5.0 has one code for an unknown user and for a missing right.
    _Words(Code.UNAUTHORIZED, codes.NO_RIGHT, errors.MQBrokerException),
    _Words(Code.FORBIDDEN, "no writable queue", errors.TopicRouteStaleException, _NO_QUEUE),
    *(_Words(Code.INTERNAL_SERVER_ERROR, fragment, error) for fragment, error in codes.PASSING_TROUBLE),
    # The permission bits of the broker or topic have changed since the proxy read its route.
    _Words(Code.INTERNAL_SERVER_ERROR, "] sending message is forbidden", errors.TopicRouteStaleException, _NO_QUEUE),
    # The request is invalid, so a retry would fail, too.
    _Words(Code.INTERNAL_SERVER_ERROR, "message body size exceeded", errors.MessageRefusedException, _SIZE),
    _Words(
        Code.INTERNAL_SERVER_ERROR, "delayed messages are not supported for batching", errors.MessageRefusedException
    ),
    _Words(Code.INTERNAL_SERVER_ERROR, "the message is illegal", errors.MessageRefusedException),
    _Words(Code.INTERNAL_SERVER_ERROR, codes.KEY_MISSING.lower(), errors.MessageRefusedException, codes.NEEDS_KEYS),
    _Words(Code.INTERNAL_SERVER_ERROR, "recall handle is invalid", errors.MQBrokerException),
    _Words(Code.INTERNAL_SERVER_ERROR, "operation is forbidden", errors.MQBrokerException, _RECALL),
    _Words(Code.INTERNAL_SERVER_ERROR, "cannot found transaction data", errors.MQBrokerException, _TRANSACTION),
)


class _Failure(NamedTuple):
    """The error of a status of gRPC itself, whose details contain `fragment`. The first match wins."""

    status: str
    fragment: str
    error: _AnswerError | type[errors.RemotingException]
    hint: str
    code: int = 0  # The equivalent `Code`; 0 if no server answered


_FAILURES: Final = (
    # The connection failed, so nothing was sent.
    _Failure("UNAVAILABLE", "certificate has expired", errors.RemotingCertificateException, OUT_OF_DATE),
    _Failure("UNAVAILABLE", "certificate is not yet valid", errors.RemotingCertificateException, OUT_OF_DATE),
    _Failure("UNAVAILABLE", "certificate_verify_failed", errors.RemotingCertificateException, NOT_TRUSTED),
    _Failure("UNAVAILABLE", "hostname verification", errors.RemotingCertificateException, MUST_NAME),
    # The text of gRPC 1.76 for the same.
    _Failure("UNAVAILABLE", "is not in peer certificate", errors.RemotingCertificateException, MUST_NAME),
    _Failure("UNAVAILABLE", "failed to create security handshaker", errors.RemotingCertificateException, _NO_PEM),
    _Failure("UNAVAILABLE", "wrong_version_number", errors.RemotingTlsException, SPEAKS_NO_TLS),
    # The alert of the server, and the error of this side.
    _Failure("UNAVAILABLE", "alert_protocol_version", errors.RemotingTlsException, TOO_OLD),
    _Failure("UNAVAILABLE", "unsupported_protocol", errors.RemotingTlsException, TOO_OLD),
    _Failure("UNAVAILABLE", "failed to connect", errors.RemotingConnectException, _ADDRESS),
    _Failure("UNAVAILABLE", "errors resolving", errors.RemotingConnectException, _NAMES),
    _Failure("UNAVAILABLE", "dns resolution failed", errors.RemotingConnectException, _NAMES),
    _Failure("DEADLINE_EXCEEDED", "", errors.RemotingTimeoutException, "the call may have been executed"),
    # This client's limits for replies: the server answered, so it may have stored the rows. A server cannot mean the
    # request, which is never compressed and has little metadata.
    _Failure(
        "RESOURCE_EXHAUSTED", "client: received message larger than max", errors.RemotingCommandException, _TOO_LONG
    ),
    _Failure("RESOURCE_EXHAUSTED", "decompressed message larger than max", errors.RemotingCommandException, _TOO_LONG),
    # gRPC 1.76 and 1.85 give different statuses.
    _Failure("UNIMPLEMENTED", "compression algorithm", errors.RemotingCommandException, _COMPRESSED),
    _Failure("INTERNAL", "compression algorithm", errors.RemotingCommandException, _COMPRESSED),
    _Failure("RESOURCE_EXHAUSTED", "received metadata size exceeds", errors.RemotingCommandException, _TOO_LONG),
    # A gateway's limit, which waiting does not lift.
    _Failure("RESOURCE_EXHAUSTED", "maximum size", errors.MessageRefusedException, _SIZE, Code.PAYLOAD_TOO_LARGE),
    _Failure("RESOURCE_EXHAUSTED", "larger than max", errors.MessageRefusedException, _SIZE, Code.PAYLOAD_TOO_LARGE),
    _Failure("RESOURCE_EXHAUSTED", "", errors.BrokerBusyException, _BUSY, Code.TOO_MANY_REQUESTS),
    # Errors of the call, not of a message: halving the batch does not help.
    _Failure("INVALID_ARGUMENT", "", errors.MQBrokerException, "", Code.BAD_REQUEST),
    _Failure("PERMISSION_DENIED", "", errors.MQBrokerException, _RIGHTS, Code.FORBIDDEN),
    _Failure("UNAUTHENTICATED", "", errors.UserRefusedException, _RIGHTS, Code.UNAUTHORIZED),
    _Failure("UNIMPLEMENTED", "", errors.MQBrokerException, _NO_CALL, Code.NOT_IMPLEMENTED),
)


def code_name(code: int) -> str:
    """Return the protocol's name of a code, or ``UNKNOWN``."""
    return _CODES[code].name if code in _CODES else "UNKNOWN"


def proxy_error(code: int, message: str, address: str, doing: str) -> errors.MQBrokerException:
    """Return the error for a proxy's answer, or for one of its results; `doing` as in `broker_error`.

    The code may be in `STORED` if nothing shows that the message was stored.
    """
    text = message.lower()
    words = next((words for words in _WORDS if words.code == code and words.fragment in text), None)
    error = words.error if words else _class_of(code)
    hint = (
        (words.hint if words else "")
        or codes.access_hint(error, message)
        or (_CODES[code].hint if code in _CODES else "")
    )
    message = shortened(message)
    text = f"{doing}: {address} answered {code} {code_name(code)}: {message or '(no message)'}"
    return error(f"{text} ({hint})" if hint else text, int(code), message, address)


def call_error(
    status: str, details: str, address: str, doing: str, server_name: str | None = None
) -> errors.MQBrokerException | errors.RemotingException:
    """Return the error of a call without an answer, by its `status` (name of a ``grpc.StatusCode``) and `details`."""
    text = f"{doing}: {address}: gRPC {status}: {shortened(details) or '(no details)'}"
    failures = (row for row in _FAILURES if row.status == status and row.fragment in details.lower())
    failure = next(failures, None)
    if failure is None:
        # The connection or the server failed during the call.
        return errors.RemotingSendRequestException(f"{text} (the call may have been executed)")
    hint = failure.hint
    if hint == MUST_NAME:
        hint = other_name(address.rpartition(":")[0].strip("[]"), server_name)
    text = f"{text} ({hint})" if hint else text
    if issubclass(failure.error, errors.MQBrokerException):
        return failure.error(text, int(failure.code), details, address)
    return failure.error(text)


def _class_of(code: int) -> _AnswerError:
    by_code = _CODES[code].error if code in _CODES else None
    # By default, the message may be stored and is retried.
    default = errors.MQBrokerException if code // 10_000 == 4 else errors.BrokerOutcomeUnknownException
    return by_code or _BY_HUNDREDS.get(code // 100, default)
