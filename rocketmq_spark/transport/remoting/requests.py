"""One request, the queue of requests that wait for a socket, and the outcome or error with which a request ends.

Never copies or joins the pieces of a body. Uses no socket, thread or clock; callers pass `now`. If no byte of a request
was written, the server cannot have executed it, and the error of a timeout or a broken connection says so. The response
code, never the remark, makes an answer an error: successful answers can have remarks, too
(docs/internals/remoting.md#header).
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from rocketmq_spark import errors
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.model.message import Buffer, MessageQueue, SendOutcome
from rocketmq_spark.model.message_ext import PullOutcome, PullRequest, PullStatus
from rocketmq_spark.protocol.remoting.codes import OFFSET_RESET, STORED, RequestCode, broker_error
from rocketmq_spark.protocol.remoting.command import MAX_FRAME, RemotingCommand, encode_head
from rocketmq_spark.protocol.remoting.responses import PullMessageResponseHeader, SendMessageResponseHeader
from rocketmq_spark.protocol.tls import CertificateError, DisagreementError
from rocketmq_spark.transport.parallel import Permit

logger = logging.getLogger("rocketmq_spark.transport")

# The length field does not count itself. After a longer frame the server closes the connection: all requests fail.
MAX_FRAME_LENGTH: Final = MAX_FRAME - 4

# How many pieces one sendmsg takes; 1024 on Linux and macOS.
IOV_MAX: Final = max(os.sysconf("SC_IOV_MAX"), 16) if "SC_IOV_MAX" in getattr(os, "sysconf_names", {}) else 1024

# Bytes of one sendmsg: a whole batch of the default size, which holds the loop for a fraction of a millisecond.
WRITE_LIMIT: Final = 2 * 1024 * 1024

# Neither FLAG_RESPONSE nor FLAG_ONEWAY.
FLAG_REQUEST: Final = 0

_CODE_NAMES: Final = {int(code): code.name for code in RequestCode}

# Permanent failures of a connection, before the server has received any request.
_PERMANENT: Final[Mapping[type, type[errors.RemotingTlsException]]] = {
    CertificateError: errors.RemotingCertificateException,
    DisagreementError: errors.RemotingTlsException,
}


@dataclass(slots=True)
class Answer:
    """How one request ended. Command and error are both None after a one-way request."""

    command: RemotingCommand | None  # Whatever its code.
    error: errors.RocketMQError | None
    latency: float  # From the last byte written to the answer or failure, seconds; 0 if never written.
    refused: Credentials | None = None  # The credentials, if the server rejected them.


# The end of a one-way request.
WRITTEN: Final = Answer(None, None, 0.0)

OnAnswer: TypeAlias = Callable[[Answer], None]


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One frame to send, from its submission to its answer.

    Frames with `FLAG_ONEWAY` and `FLAG_RESPONSE` (to a broker's request) get no answer and end when they are written.
    `on_answer` is called once, on the loop's thread; for such frames perhaps on the submitting thread.
    """

    code: int
    ext_fields: Mapping[str, str]
    body: tuple[Buffer, ...]  # Views must be of single bytes.
    timeout: float  # Seconds from the last byte written to the answer.
    on_answer: OnAnswer = lambda _: None
    deadline: float = math.inf  # When the request fails at the latest, on the loop's clock.
    write_by: float = math.inf  # From this time on, no byte of it is written.
    flag: int = FLAG_REQUEST
    remark: str = ""
    permit: Permit | None = None  # Released when the request ends.
    sent_fields: Mapping[str, str] = field(init=False)  # With namespace and signature.
    signed_by: Credentials | None = None
    opaque: int = 0
    resent: bool = False
    # Counted here, because a wrong length would corrupt every later frame of the connection.
    nbytes: int = field(init=False)
    pieces: list[Buffer] = field(default_factory=list)
    next_piece: int = 0
    unsent: int = 0
    started: bool = False
    written_at: float | None = None
    arrivals: int = 0  # How often the connection had received bytes when this request was written.

    def __post_init__(self) -> None:
        self.sent_fields = self.ext_fields
        self.nbytes = sum(map(len, self.body))

    @property
    def name(self) -> str:
        """The request code's name, for texts."""
        return _CODE_NAMES.get(self.code, f"request {self.code}")

    def encode(self, opaque: int) -> None:
        """Make the frame's pieces, all unwritten; MQClientException if the frame is too long."""
        fields, flag, remark = self.sent_fields, self.flag, self.remark
        command = RemotingCommand(code=self.code, opaque=opaque, ext_fields=fields, flag=flag, remark=remark)
        head = encode_head(command, self.nbytes)
        length = len(head) - 4 + self.nbytes
        if length > MAX_FRAME_LENGTH:
            text = f"{self.name}: the frame has {length} bytes, servers accept at most {MAX_FRAME_LENGTH}"
            raise errors.MQClientException(f"{text}: send smaller or fewer messages at once")
        self.opaque = opaque
        # No empty pieces: writing only those would look like a full socket.
        self.pieces = [head, *filter(len, self.body)]
        self.unsent = len(head) + self.nbytes
        self.next_piece = 0
        self.started = False
        self.written_at = None

    def written(self, now: float, arrivals: int) -> None:
        """Start the timeout, because the socket has taken the last byte."""
        self.written_at = now
        self.arrivals = arrivals
        self.deadline = min(self.deadline, now + self.timeout)
        self.pieces = []

    @property
    def due(self) -> float:
        """When the request fails if nothing happens."""
        return self.deadline if self.written_at is not None else min(self.deadline, self.write_by)

    def latency(self, now: float) -> float:
        """Seconds since the last byte was written; 0 before that."""
        return 0.0 if self.written_at is None else max(0.0, now - self.written_at)

    def send_again(self, now: float) -> bool:
        """Prepare the one resend that GO_AWAY allows; False if it was used or no time is left."""
        remaining = self.deadline - now
        if self.resent or remaining <= 0:
            return False
        self.resent = True
        self.timeout = min(self.timeout, remaining)
        return True

    def overdue(self, address: str, others: int, *, connecting: bool) -> errors.RemotingException:
        """Return the error of a timeout on a connection with `others` pending requests."""
        doing, time = f"{self.name} to {address}", f"{round(self.timeout, 3):g} s"
        if self.written_at is not None:
            return errors.RemotingTimeoutException(
                f"{doing}: no answer within {time}; {others} other requests are pending"
            )
        if self.started:
            within = "in time" if self.write_by < self.deadline else f"within {time}"
            return errors.RemotingTimeoutException(f"{doing}: the server accepted only a part of it {within}")
        if self.write_by < self.deadline:
            text = f"{doing}: it was not sent in time, behind {others} other requests to this server"
            return errors.RemotingTooMuchRequestException(text)
        if connecting:
            return errors.RemotingConnectException(f"{doing}: not connected within {time}; it was not sent")
        return errors.RemotingTooMuchRequestException(
            f"{doing}: it was not sent, because it queued for {time} behind {others} other requests to this server"
        )

    def finish(self, answer: Answer) -> None:
        """Release the permit, then call the callback and log its exceptions."""
        # In Java the permit is released last: a callback that sends again may wait for its own permit.
        if self.permit is not None:
            self.permit.release()
        try:
            self.on_answer(answer)
        except Exception:
            logger.exception("the callback of %s (opaque %d) raised", self.name, self.opaque)


Completion: TypeAlias = tuple[Request, Answer]


def next_opaque(last: int, in_flight: Container[int]) -> int:
    """Return the next opaque that no request in flight has; it overflows from 2**31 - 1 to -2**31, like Java's int."""
    while True:
        last = (last + 1 + 0x80000000) % 0x100000000 - 0x80000000
        if last not in in_flight:
            return last


def take_overdue(
    pending: dict[int, Request], now: float, arrivals: int, address: str, *, connecting: bool
) -> tuple[list[Completion], float | None]:
    """Remove the overdue requests; return them with their errors, and for how long the server has sent nothing.

    This time is None if bytes came, or if a pending request with a longer timeout keeps the connection open.
    """
    longest = max((request.timeout for request in pending.values() if request.due > now), default=0.0)
    completions: list[Completion] = []
    silence: float | None = None
    for request in [request for request in pending.values() if request.due <= now]:
        del pending[request.opaque]
        if request.written_at is not None and request.arrivals == arrivals and longest <= request.timeout:
            silence = round(request.timeout, 3)
        error = request.overdue(address, len(pending), connecting=connecting)
        completions.append((request, Answer(None, error, request.latency(now))))
    return completions, silence


class Outbound(deque[Request]):
    """Encoded requests that are not written to their last byte, oldest first."""

    __slots__ = ()

    def gather(self) -> list[Buffer]:
        """Return the next pieces for one sendmsg: at most `IOV_MAX` pieces and `WRITE_LIMIT` bytes, at least one."""
        head = self[0]
        if len(self) == 1 and head.unsent <= WRITE_LIMIT and len(head.pieces) - head.next_piece <= IOV_MAX:
            return head.pieces[head.next_piece :] if head.next_piece else head.pieces
        gathered: list[Buffer] = []
        room = WRITE_LIMIT
        for request in self:
            for piece in request.pieces[request.next_piece : request.next_piece + IOV_MAX - len(gathered)]:
                if len(piece) > room:
                    gathered.append(memoryview(piece)[:room])
                    return gathered
                gathered.append(piece)
                room -= len(piece)
                if not room:
                    return gathered
            if len(gathered) == IOV_MAX:
                return gathered
        return gathered

    def remove_overdue(self, now: float) -> bool:
        """Remove overdue requests without written bytes; return whether the first request began, and is overdue."""
        kept = [request for request in self if request.started or request.due > now]
        if len(kept) < len(self):
            # All at once: a suspended process may find 65,535 requests overdue.
            self.clear()
            self.extend(kept)
        return bool(self) and self[0].started and self[0].write_by <= now

    def advance(self, sent: int) -> list[Request]:
        """Count `sent` bytes as written; return the requests that are now complete."""
        done: list[Request] = []
        while sent:
            request = self[0]
            request.started = True
            if sent >= request.unsent:
                sent -= request.unsent
                request.unsent = 0
                done.append(self.popleft())
                continue
            request.unsent -= sent
            pieces, index = request.pieces, request.next_piece
            while sent >= len(pieces[index]):
                sent -= len(pieces[index])
                index += 1
            if sent:
                pieces[index] = memoryview(pieces[index])[sent:]
                sent = 0
            request.next_piece = index
        return done


def outcome_of(queue: MessageQueue, rows: int, address: str, answer: Answer) -> SendOutcome:
    """Return the outcome of a send (docs/internals/messages.md#send-header)."""
    latency_ms = answer.latency * 1000.0
    command = answer.command
    if command is None:
        return SendOutcome(queue, None, answer.error, latency_ms)
    status = STORED.get(command.code)
    if status is None:
        doing = f"sending {rows} rows to {queue}"
        return SendOutcome(queue, None, broker_error(command.code, command.remark, address, doing), latency_ms)
    try:
        header = SendMessageResponseHeader.from_ext_fields(command.ext_fields)
    except errors.RocketMQError as exc:
        return SendOutcome(queue, None, exc, latency_ms)
    return SendOutcome(
        queue=queue if header.queue_id == queue.queue_id else replace(queue, queue_id=header.queue_id),
        status=status,
        error=None,
        latency_ms=latency_ms,
        queue_offset=header.queue_offset,
        offset_msg_id=header.msg_id,
        transaction_id=header.transaction_id,
        region_id=header.region_id,
        trace_on=header.trace_on,
        batch_uniq_id=header.batch_uniq_id,
        recall_handle=header.recall_handle,
    )


_PULL_STATUS: Final = {int(status.value): status for status in PullStatus}

# Remarks of code 20 that do not mean "no message matched the filter": docs/internals/reads.md#pulls.
_MOVED: Final = frozenset(("MESSAGE_WAS_REMOVING", "OFFSET_TOO_SMALL"))


def pull_outcome_of(request: PullRequest, answer: Answer) -> PullOutcome:
    """Return the outcome of a pull (docs/internals/reads.md#pulls)."""
    command = answer.command
    if command is None:
        return PullOutcome(None, error=answer.error)
    status = _PULL_STATUS.get(command.code)
    if status is PullStatus.NO_MATCHED_MSG and command.remark in _MOVED:
        status = PullStatus.OFFSET_ILLEGAL
    # The messages from the requested offset on are there: the same pull returns them.
    if status is None or command.remark == OFFSET_RESET:
        doing = f"pulling from {request.target.queue} for the group {request.target.consumer_group}"
        return PullOutcome(None, error=broker_error(command.code, command.remark, request.address, doing))
    try:
        header = PullMessageResponseHeader.from_ext_fields(command.ext_fields)
    except errors.RocketMQError as exc:
        return PullOutcome(None, error=exc)
    return PullOutcome(status, header.next_begin_offset, header.min_offset, header.max_offset, command.body)


def broken(
    requests: Collection[Request],
    address: str,
    reason: str,
    cause: BaseException | None,
    kind: type[errors.RemotingException],
    now: float,
) -> list[Completion]:
    """Return a broken connection's requests with their errors, of class `kind` if their first bytes were sent."""
    if cause is not None:
        # The traceback's frames would keep the buffers that were being sent.
        cause.__traceback__ = None
    permanent = _PERMANENT.get(type(cause))
    started = sum(request.started for request in requests)
    others = f" ({len(requests)} requests were pending)" if len(requests) > 1 else ""
    completions: list[Completion] = []
    for request in requests:
        doing = f"{request.name} to {address}: {reason}"
        error: errors.RemotingException
        if permanent is not None:
            error = permanent(f"{doing}; nothing was executed")
        elif request.started:
            more = f", and so may {started - 1} other{'s' * (started > 2)}" if started > 1 else ""
            error = kind(f"{doing}; this request was sent and may have been executed{more}")
        else:
            error = errors.RemotingConnectException(f"{doing}; this request was not sent{others}")
        error.__cause__ = cause
        completions.append((request, Answer(None, error, request.latency(now))))
    return completions
