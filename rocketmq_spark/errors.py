"""The errors of this package. Their flags, such as ``retriable``, say what the caller may do next.

docs/internals/remoting.md#response-codes and docs/internals/grpc.md#codes have the reactions to each response code.
Errors that the Java client also has keep its names, which end in ``Exception``, and its class hierarchy. Some
subclasses with such names exist only here. ``str`` of an error is one line of limited length, without control
characters.
"""

from __future__ import annotations

import logging
import re
import traceback
from typing import ClassVar, Final

# Maximum characters of an error, log record or table cell: enough for a write's error with counts of 1,000 brokers.
LONGEST: Final = 100_000

# ``ResponseCode.MESSAGE_ILLEGAL``, of brokers and of Java's client.
_MESSAGE_ILLEGAL: Final = 13

# Control characters, line separators, invisible characters that reorder or hide text, and surrogates, which no UTF-8
# has. U+200C and U+200D stay, because Persian, Indic scripts and emoji need them.
_UNSAFE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e0fff]"
)


def escaped(text: str, limit: int = LONGEST) -> str:
    r"""Return `text` as one line of at most `limit` characters, with control characters written as ``\n`` or ``\x1b``.

    Backslashes do not change, so escaping a text twice gives the same text.
    """
    shown = _UNSAFE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text[: limit + 1])
    if len(shown) <= limit:
        return shown
    end = f"… ({len(text)} characters)"
    return shown[: max(limit - len(end), 0)] + end


def escape_record(record: logging.LogRecord) -> bool:
    """Escape the message and the traceback of a log record. Every logger of this package has this filter.

    Traceback lines are indented, so that no line of a foreign exception's text looks like a log record.
    """
    try:
        message = record.getMessage()
        trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
    except Exception:
        # An argument has no text. The record's handler reports it, as for any other logger.
        return True
    shown = escaped(message)
    if shown != message:
        record.msg, record.args = shown, ()
    if trace:
        record.exc_text = "\n".join(f"    {escaped(line)}" for line in trace.rstrip("\n").split("\n"))
    return True


class RocketMQError(Exception):
    """The base of all errors of this package. Its flags say what the caller may do next."""

    retriable: ClassVar[bool] = False  # Sending the same bytes again later may succeed
    refresh_route: ClassVar[bool] = False  # The cached route may be stale, so look it up before the next attempt
    isolate: ClassVar[bool] = False  # The failure counts as a fault of the broker in the latency-fault table
    flow_control: ClassVar[bool] = False  # The broker is busy: retry the same queue later, with a smaller window
    split: ClassVar[bool] = False  # One row is invalid, or the batch is too large: its halves may be sent
    unbatch: ClassVar[bool] = False  # The server does not support batches: the rows may be sent one by one
    invalid_row: ClassVar[bool] = False  # A limit of the server makes the message an invalid row: ``onError`` decides
    # The broker may have stored the rows without an acknowledgement. An error of several attempts has its own value.
    maybe_stored: bool = False

    @property
    def invalid_message(self) -> bool:
        """True if the message is at fault: sending it again fails, whatever the state of the cluster."""
        rejected = self.split or isinstance(self, InvalidRowError | ReservedPropertyError)
        # Brokers answer this code, and the producer's own checks have it.
        return rejected or getattr(self, "response_code", None) == _MESSAGE_ILLEGAL

    def __str__(self) -> str:
        return escaped(str(self.args[0])) if self.args else ""


class MQClientException(RocketMQError):
    """A request that the client rejects, or that failed in every attempt.

    `response_code` is a broker's, or one of the client error codes (10001 to 10007), or -1.
    """

    def __init__(self, message: str, response_code: int = -1) -> None:
        super().__init__(message, response_code)
        self.response_code = response_code


class BatchRefusedException(MQClientException):
    """The client rejects a batch before it sends anything, because of one message or of the batch's size."""

    split = True


class RouteNotFoundException(MQClientException):
    """A topic without a route; a broker may register it later.

    The code is 10004 if no name server is known, else 10005. `unreachable` is True if no name server answered.
    """

    retriable = True
    refresh_route = True

    def __init__(self, message: str, response_code: int = 10005, *, unreachable: bool = False) -> None:
        super().__init__(message, response_code)
        self.unreachable = unreachable


class MQBrokerException(RocketMQError):
    """An error code that a broker, name server or proxy answered; `remark` is the server's own text."""

    def __init__(self, message: str, response_code: int, remark: str, broker_addr: str) -> None:
        super().__init__(message, response_code, remark, broker_addr)
        self.response_code = response_code
        self.remark = remark
        self.broker_addr = broker_addr


class UserRefusedException(MQBrokerException):
    """The server rejects the user's name or signature, so it rejects every request that is signed with them."""


class MessageRefusedException(MQBrokerException):
    """A proxy rejects the content of a request. It stores no message of the batch and does not name the invalid one."""

    split = True


class DelayRefusedException(MessageRefusedException):
    """A server rejects a message, because its delay is longer than the server allows, or the protocol can carry."""

    invalid_row = True


class RequestNotSupportedException(MQBrokerException):
    """The server does not support this kind of request (REQUEST_CODE_NOT_SUPPORTED) and executed nothing."""

    unbatch = True


class BrokerBusyException(MQBrokerException):
    """Flow control (SYSTEM_BUSY, FLOW_CONTROL): the broker stored nothing, and accepts the request later."""

    retriable = True
    flow_control = True


class BusyOutcomeUnknownException(BrokerBusyException):
    """Flow control whose answer also stands for a message that the broker has appended, and may store later."""

    maybe_stored = True


class ColdReadException(BrokerBusyException):
    """The broker limits how much a group reads of messages that are not in memory (``coldDataFlowControlEnable``)."""


class BrokerUnavailableException(MQBrokerException):
    """The broker is not available now (full disk, shutting down, a slave); another broker may be."""

    retriable = True
    refresh_route = True
    isolate = True


class TopicRouteStaleException(MQBrokerException):
    """The cached route disagrees with the broker about the topic or queue (TOPIC_NOT_EXIST, NOT_LEADER_FOR_QUEUE)."""

    retriable = True
    refresh_route = True


class NoBrokersException(TopicRouteStaleException):
    """The name servers know no broker and therefore no topic. A broker may register at any time."""


class BrokerOutcomeUnknownException(MQBrokerException):
    """A proxy or broker forwarded the request and lost its outcome: the rows may be stored."""

    retriable = True
    isolate = True
    maybe_stored = True


class RemotingException(RocketMQError):
    """A request got no usable response. The flag `maybe_stored` says whether the server may have executed it."""

    retriable = True
    isolate = True


class RemotingConnectException(RemotingException):
    """The connection to the server failed; nothing was sent."""

    refresh_route = True


class RemotingTlsException(RemotingConnectException):
    """Client and server disagree about TLS. Nothing was executed, and a retry cannot succeed."""

    retriable = False
    refresh_route = False


class RemotingCertificateException(RemotingTlsException):
    """The server's certificate, or this client's, is rejected."""


class RemotingSendRequestException(RemotingException):
    """The connection failed while the request was written, or before the response came."""

    refresh_route = True
    maybe_stored = True


class RemotingTimeoutException(RemotingException):
    """The request was written and no response came in time."""

    maybe_stored = True


class RemotingTooMuchRequestException(RemotingException):
    """The limit on requests in flight, or the time budget, was used up before sending."""

    isolate = False


class RemotingCommandException(RemotingException):
    """The bytes do not follow the protocol: an oversize frame, an unreadable header, a missing field."""

    maybe_stored = True


class TooLongFrameException(RemotingCommandException):
    """The server sent a frame above the limit of 16 MiB. The frame was not read, and the connection is closed."""


class OptionError(RocketMQError, ValueError):
    """An option of a read or write is unknown, malformed, missing, or contradicts another one."""


class CredentialsError(RocketMQError):
    """The credentials provider failed or returned no credentials."""


class SchemaError(RocketMQError, ValueError):
    """A DataFrame or table has columns that a write does not accept."""


class InvalidRowError(RocketMQError, ValueError):
    """A row that a write rejects before it sends it. Sending it again does not help.

    `row` is its number within the partition, from 0; `rule` is the violated rule, without the row's data.
    """

    def __init__(self, message: str, row: int = -1, rule: str = "") -> None:
        super().__init__(message, row, rule)
        self.row = row
        self.rule = rule


class ReservedPropertyError(RocketMQError, ValueError):
    """A user property has a name that is reserved for RocketMQ."""


class CompressionError(RocketMQError, ValueError):
    """A body cannot be compressed, or cannot be decompressed: it is damaged, truncated, or too large unpacked."""


class DeliveryError(RocketMQError):
    """A write did not get every row acknowledged. The text counts the stored, the unsent and the unknown rows."""


class InputChangedError(DeliveryError):
    """An attempt at a write has other rows than an earlier one (``delivery=effectivelyOnce``). The text names a row."""


class ReadError(RocketMQError):
    """A read did not get every message of its ranges. The text names the queue, the offset and the cause."""


class DataLossError(RocketMQError):
    """Messages in the range of a read no longer exist: they expired, or their queue was deleted."""


class MetricsUnavailableError(RocketMQError):
    """No metrics can reach the program, as on Spark Connect without a setting that the text names."""


class ClusterError(RocketMQError):
    """An operation of the local cluster failed, or a parameter of it is not allowed."""


# The last line of a traceback that ends with an error of this package. Spark passes tracebacks of Python workers on as
# text. "rocketmq_spark.errors" is the module of nearly all of them.
_RAISED: Final = re.compile(r"^[ \t]*rocketmq_spark\.[\w.]+\.(\w+): (.*)$", re.MULTILINE)
_ANSWERED: Final = re.compile(r"(\S+) answered (\d+) ")
_ROW: Final = re.compile(r"\brow (\d+)\b")


def cause(exc: BaseException | None) -> RocketMQError | None:
    """Return the error of this package that caused a Spark exception; None for other exceptions.

    Spark has only the text of an error of a task or of a planner. The result has the class and text of the error, and
    `response_code`, `broker_addr` and `row` as far as the text names them. Other attributes have their defaults. The
    argument may also be ``query.exception()``.

    >>> try:  # doctest: +SKIP
    ...     df.write.format("rocketmq").options(**options).save()
    ... except Exception as exc:
    ...     print(repr(rocketmq_spark.cause(exc)))
    """
    seen: list[BaseException] = []
    while exc is not None and exc not in seen:
        if isinstance(exc, RocketMQError):
            return exc
        seen.append(exc)
        exc = exc.__cause__ or (None if exc.__suppress_context__ else exc.__context__)
    for wrapper in seen:
        # Of errors that caused one another, the last one in a traceback was raised.
        for name, text in reversed(_RAISED.findall(str(wrapper))):
            if found := _of_text(name, text):
                return found
    return None


def _of_text(name: str, text: str) -> RocketMQError | None:
    kind = globals().get(name, RocketMQError)
    if not (isinstance(kind, type) and issubclass(kind, RocketMQError)):
        return None
    address, code = answered.groups() if (answered := _ANSWERED.search(text)) else ("", -1)
    if issubclass(kind, MQBrokerException):
        return kind(text, int(code), "", address)
    if issubclass(kind, MQClientException) and answered:
        return kind(text, int(code))
    if issubclass(kind, InvalidRowError) and (row := _ROW.search(text)):
        return kind(text, int(row[1]))
    return kind(text)
