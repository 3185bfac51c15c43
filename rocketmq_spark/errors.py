"""What can go wrong, and what each failure allows the caller to do next.

Rule 1: an error carries the decision. The sender asks the error's flags; it never lists error classes.
Rule 2: the Java client's exceptions keep their Java names and their tree (spec/producer.md, preamble);
        the connector's own errors end in ``Error``.
Rule 3: no value of a secret option ever reaches an error.
Rule 4: the text of an error is one bounded line without control characters. Its attributes keep the data unchanged.

The flags follow spec/remoting.md section 17, column "connector".
"""

from __future__ import annotations

from typing import ClassVar

from rocketmq_spark.text import escaped


class RocketMQError(Exception):
    """The common base of all errors of this package.

    Attributes
    ----------
    retriable : bool
        Sending the same bytes again later may succeed.
    refresh_route : bool
        The cached route is probably stale: look it up again before the next attempt.
    isolate : bool
        Counts as a fault of the broker in the latency-fault table.
    flow_control : bool
        The broker is healthy and refused for now: same queue again, after a wait, with a smaller window.
    maybe_stored : bool
        The broker may have stored the rows although no acknowledgement came.
    split : bool
        A row of the batch is refused, or all of them are too much at once: its halves may be sent.
    unbatch : bool
        The server knows no batches: the rows may be sent one by one.
    """

    retriable: ClassVar[bool] = False
    refresh_route: ClassVar[bool] = False
    isolate: ClassVar[bool] = False
    flow_control: ClassVar[bool] = False
    maybe_stored: ClassVar[bool] = False
    split: ClassVar[bool] = False
    unbatch: ClassVar[bool] = False

    def __str__(self) -> str:
        return escaped(str(self.args[0])) if self.args else ""


class MQClientException(RocketMQError):
    """A request that the client refuses, or that ran out of attempts.

    Parameters
    ----------
    message : str
        What was being done, to what, and what to do next.
    response_code : int, default -1
        A broker's response code or one of the client error codes (10001 .. 10007).
    """

    def __init__(self, message: str, response_code: int = -1) -> None:
        super().__init__(message, response_code)
        self.response_code = response_code


class RouteNotFoundException(MQClientException):
    """No route for a topic just now: a name server may learn of it later.

    Parameters
    ----------
    message : str
    response_code : int, default 10005
        10004 without any name server, else 10005 (``ClientErrorCode.java``).
    unreachable : bool, default False
        No name server could be asked; False: one answered, and has no usable route.
    """

    retriable = True
    refresh_route = True

    def __init__(self, message: str, response_code: int = 10005, *, unreachable: bool = False) -> None:
        super().__init__(message, response_code)
        self.unreachable = unreachable


class MQBrokerException(RocketMQError):
    """A broker (or name server, or proxy) answered with an error code.

    Parameters
    ----------
    message : str
        The whole text for the user.
    response_code : int
        The code of the answer.
    remark : str
        The server's own words.
    broker_addr : str
        ``host:port`` of the server that answered.
    """

    def __init__(self, message: str, response_code: int, remark: str, broker_addr: str) -> None:
        super().__init__(message, response_code, remark, broker_addr)
        self.response_code = response_code
        self.remark = remark
        self.broker_addr = broker_addr


class UserRefusedException(MQBrokerException):
    """The server does not take the user's name or signature: nothing that is signed with the same passes there."""


class MessageRefusedException(MQBrokerException):
    """A proxy refuses what a request holds; of a batch it doesn't say which message is wrong, and stores none."""

    split = True


class RequestNotSupportedException(MQBrokerException):
    """The server doesn't know this kind of request (REQUEST_CODE_NOT_SUPPORTED), and has done nothing."""

    unbatch = True


class BrokerBusyException(MQBrokerException):
    """Flow control (SYSTEM_BUSY, FLOW_CONTROL): not stored, the broker asks for patience."""

    retriable = True
    flow_control = True


class BrokerUnavailableException(MQBrokerException):
    """The broker can't serve just now (full disk, shutting down, a slave): another one may."""

    retriable = True
    refresh_route = True
    isolate = True


class TopicRouteStaleException(MQBrokerException):
    """The broker knows the topic or the queue differently from our route (TOPIC_NOT_EXIST, NOT_LEADER_FOR_QUEUE)."""

    retriable = True
    refresh_route = True


class NoBrokersException(TopicRouteStaleException):
    """The name servers that answer know no broker at all, so no topic either; one may register any moment."""


class BrokerOutcomeUnknownException(MQBrokerException):
    """A proxy or broker lost track of a request that it forwarded: the rows may be stored."""

    retriable = True
    isolate = True
    maybe_stored = True


class RemotingException(RocketMQError):
    """A request did not get through, or its answer did not come back."""

    retriable = True
    isolate = True


class RemotingConnectException(RemotingException):
    """No connection to the server: nothing was sent."""

    refresh_route = True


class RemotingTlsException(RemotingConnectException):
    """Server and client do not agree on TLS, and nothing was executed: sending again will not change that."""

    retriable = False
    refresh_route = False


class RemotingCertificateException(RemotingTlsException):
    """A certificate is refused: the server's, or this client's."""


class RemotingSendRequestException(RemotingException):
    """The connection failed while the request was being written, or before its answer came."""

    refresh_route = True
    maybe_stored = True


class RemotingTimeoutException(RemotingException):
    """The request was written and no answer came in time."""

    maybe_stored = True


class RemotingTooMuchRequestException(RemotingException):
    """A limit on requests in flight, or the time budget, was used up before sending."""

    isolate = False


class RemotingCommandException(RemotingException):
    """Bytes that are not the protocol: an oversize frame, a header that can't be decoded, a missing field."""

    maybe_stored = True


class OptionError(RocketMQError, ValueError):
    """An option of a read or write is unknown, malformed, missing, or contradicts another one."""


class CredentialsError(RocketMQError):
    """Nobody to sign a request with: who knows the credentials did not answer, or gave none that are good."""


class SchemaError(RocketMQError, ValueError):
    """The columns of a DataFrame or table are not the ones a write accepts."""


class InvalidRowError(RocketMQError, ValueError):
    """A row that no broker could store as it is; it never becomes valid by sending it again.

    Parameters
    ----------
    message : str
        Partition, row number, topic, keys and the rule broken.
    row : int, default -1
        Row number within the partition, from 0.
    rule : str, default ""
        The rule broken, without the row's own data.
    """

    def __init__(self, message: str, row: int = -1, rule: str = "") -> None:
        super().__init__(message, row, rule)
        self.row = row
        self.rule = rule


class ReservedPropertyError(RocketMQError, ValueError):
    """A user property has a name that RocketMQ uses itself."""


class CompressionError(RocketMQError, ValueError):
    """A body that can't be compressed, or can't be read back: damaged, cut off, or too large once unpacked."""


class DeliveryError(RocketMQError):
    """A write that can't get every row acknowledged; says per broker what is stored, not sent and unknown."""


class ReadError(RocketMQError):
    """A read that can't get every message of its ranges; says which queue, from which offset on, and why."""


class DataLossError(RocketMQError):
    """Messages that a read must have are not there any more: they expired, or their queue is gone."""


class MetricsUnavailableError(RocketMQError):
    """The metrics of this session have no way back to the driver (no accumulator)."""


class ClusterError(RocketMQError):
    """The local cluster can't be fetched, started, or asked."""
