"""The errors of requests that did not get their answer.

Rule 1: the class says what may have become of the request: of which no byte was handed to the socket, that one is
        certainly not executed (``maybe_stored`` is False); of any other nobody can know.
Rule 2: each request gets an error of its own, because each may be raised in another thread; the cause is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rocketmq_spark.errors import (
    RemotingCertificateException,
    RemotingConnectException,
    RemotingException,
    RemotingTimeoutException,
    RemotingTlsException,
    RemotingTooMuchRequestException,
    RocketMQError,
)
from rocketmq_spark.transport.request import Request
from rocketmq_spark.transport.tls_errors import CertificateError, DisagreementError

_E = TypeVar("_E", bound=RocketMQError)


def overdue(request: Request, address: str, others: int, *, connecting: bool) -> RemotingException:
    """Return the error of a request whose time is up on a connection that goes on."""
    doing, time = f"{request.name} to {address}", f"{round(request.timeout, 3):g} s"
    if request.written_at is not None:
        return RemotingTimeoutException(f"{doing}: no answer within {time}; {others} other requests wait there")
    if request.started:
        return RemotingTimeoutException(f"{doing}: after {time} it was not yet wholly written")
    if connecting:
        return RemotingConnectException(f"{doing}: not connected within {time}; it was not sent")
    return RemotingTooMuchRequestException(
        f"{doing}: {time} went by while it queued behind {others} others; it was not sent"
    )


def broken(
    requests: Sequence[Request], address: str, what: str, cause: BaseException | None, kind: type[RemotingException]
) -> list[RemotingException]:
    """Return the errors, in order, of all requests that waited on a connection when it broke.

    Parameters
    ----------
    requests : sequence of Request
    address : str
    what : str
        What happened to the connection.
    cause : exception or None
    kind : type
        The class for a request of which bytes were sent.
    """
    if cause is not None:
        # Its frames hold the buffers that were being sent, and whoever keeps the error would keep those.
        cause.__traceback__ = None
    for_good = _for_good(cause)
    started = sum(request.started for request in requests)
    errors: list[RemotingException] = []
    for request in requests:
        doing = f"{request.name} to {address}: {what}"
        error: RemotingException
        if for_good is not None:
            error = for_good(f"{doing}; nothing was executed")
        elif request.started:
            error = kind(f"{doing}; {started} requests waited for answers and may have been executed")
        else:
            others = f" ({len(requests)} were waiting)" if len(requests) > 1 else ""
            error = RemotingConnectException(f"{doing}; this request was not sent{others}")
        error.__cause__ = cause
        errors.append(error)
    return errors


def _for_good(cause: BaseException | None) -> type[RemotingTlsException] | None:
    """Return the class of what ends before a server has looked at any request, and will again."""
    if isinstance(cause, CertificateError):
        return RemotingCertificateException
    return RemotingTlsException if isinstance(cause, DisagreementError) else None


def to_tell(last: _E | None, error: _E) -> _E:
    """Return which of two servers' failures decides where all have failed: what may pass for one passes for all."""
    return error if last is None or error.retriable else last
