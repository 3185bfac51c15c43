"""One request on its way, its answer, and the queue of bytes that wait for the socket.

Rule 1: a body is never copied or joined: its pieces go to the socket as they came (scatter/gather).
Rule 2: nothing here touches a socket, a thread or a clock; `now` comes in.
Rule 3: a request of which the socket took no byte is certainly not stored; one byte is enough to make it uncertain.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from rocketmq_spark.credentials import Credentials
from rocketmq_spark.errors import MQClientException, RocketMQError
from rocketmq_spark.message import Buffer
from rocketmq_spark.transport.hooks import RequestHooks
from rocketmq_spark.transport.permits import Permit
from rocketmq_spark.wire.codes import RequestCode
from rocketmq_spark.wire.command import RemotingCommand, encode_head

logger = logging.getLogger("rocketmq_spark.transport")

# The length field counts itself out (spec/remoting.md section 1.1); one byte more and the server hangs up, which
# would fail every other request on the connection too.
MAX_FRAME_LENGTH: Final = 16_777_212

# How many pieces one sendmsg takes; 1024 on Linux and macOS.
IOV_MAX: Final = max(os.sysconf("SC_IOV_MAX"), 16) if "SC_IOV_MAX" in getattr(os, "sysconf_names", {}) else 1024

# Bytes handed over in one sendmsg. Enough for a whole batch of the default size in one call, and little enough that
# a connection with much to write leaves the loop to the others after a fraction of a millisecond.
WRITE_LIMIT: Final = 2 * 1024 * 1024

# The third header flag (spec/remoting.md section 1.2): neither FLAG_RESPONSE nor FLAG_ONEWAY.
FLAG_REQUEST: Final = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """How one request ended.

    Parameters
    ----------
    command : RemotingCommand or None
        The peer's answer, whatever its code.
    error : RocketMQError or None
        Why there is none. Both are None when a oneway request was written.
    latency : float
        From the last byte written to the answer or failure, seconds; 0 if never written.
    refused : Credentials or None
        Who signed, if that is what the peer refuses.
    """

    command: RemotingCommand | None
    error: RocketMQError | None
    latency: float
    refused: Credentials | None = None


OnAnswer: TypeAlias = Callable[[Answer], None]


class Request:
    """One frame of ours, from its submission to its answer.

    Parameters
    ----------
    code : int
    ext_fields : mapping of str to str
    body : tuple of buffers
        Views must be of single bytes.
    timeout : float
        Seconds from the last byte written to the answer.
    on_answer : callable
        Called once, by the loop's thread (for a frame that expects no answer perhaps by the submitting one).
    expires : float, default inf
        The moment at which the caller gives up whatever has been written.
    flag : int, default FLAG_REQUEST
        `FLAG_ONEWAY` and `FLAG_RESPONSE` (ours, to a request of the broker's) expect no answer: written is done.
    remark : str, default ""

    Attributes
    ----------
    permit : Permit or None
        Goes back when the request ends.
    signed_by : Credentials or None
    """

    __slots__ = (
        "arrivals",
        "body",
        "code",
        "deadline",
        "ext_fields",
        "flag",
        "nbytes",
        "next_piece",
        "on_answer",
        "opaque",
        "permit",
        "pieces",
        "remark",
        "resent",
        "sent_fields",
        "signed_by",
        "started",
        "timeout",
        "unsent",
        "written_at",
    )

    def __init__(
        self,
        code: int,
        ext_fields: Mapping[str, str],
        body: tuple[Buffer, ...],
        timeout: float,
        on_answer: OnAnswer,
        *,
        expires: float = math.inf,
        flag: int = FLAG_REQUEST,
        remark: str = "",
    ) -> None:
        self.code = code
        self.ext_fields = ext_fields
        self.sent_fields = ext_fields
        self.signed_by: Credentials | None = None
        self.body = body
        self.timeout = timeout
        self.on_answer = on_answer
        self.flag = flag
        self.remark = remark
        self.deadline = expires
        # Counted here and not taken from the caller: a wrong length would shift every later frame of the connection.
        self.nbytes = sum(map(len, body))
        self.resent = False
        self.permit: Permit | None = None
        self.opaque = 0
        self._forget_progress()

    def _forget_progress(self) -> None:
        self.pieces: list[Buffer] = []
        self.next_piece = 0
        self.unsent = 0
        self.started = False
        self.written_at: float | None = None
        self.arrivals = 0

    @property
    def name(self) -> str:
        """The request code's name, for texts."""
        try:
            return RequestCode(self.code).name
        except ValueError:
            return f"request {self.code}"

    def apply(self, hooks: RequestHooks) -> None:
        """Make the ext fields that go out, such as the signature, from the caller's; also before a resend."""
        self.sent_fields, self.signed_by = hooks.apply(self.code, self.ext_fields, self.body)

    def encode(self, opaque: int) -> None:
        """Make the head for this opaque; the body's pieces follow it as they are.

        Raises
        ------
        MQClientException
            Head and body are longer than a frame may be.
        """
        command = RemotingCommand(
            code=self.code, opaque=opaque, ext_fields=self.sent_fields, flag=self.flag, remark=self.remark
        )
        head = encode_head(command, self.nbytes)
        length = len(head) - 4 + self.nbytes
        if length > MAX_FRAME_LENGTH:
            raise MQClientException(
                f"{self.name}: a frame of {length} bytes, a server takes at most {MAX_FRAME_LENGTH}: send less at once"
            )
        self.opaque = opaque
        # No empty pieces: a gather of nothing but these would look like a socket that takes no byte.
        self.pieces = [head, *filter(len, self.body)]
        self.unsent = len(head) + self.nbytes

    def written(self, now: float, arrivals: int) -> None:
        """Note that the socket has taken the last byte (from here the timeout counts) after so many arrivals."""
        self.written_at = now
        self.arrivals = arrivals
        self.deadline = min(self.deadline, now + self.timeout)
        self.pieces = []

    def latency(self, now: float) -> float:
        """Seconds since the last byte was written; 0 before that."""
        return 0.0 if self.written_at is None else max(0.0, now - self.written_at)

    def send_again(self, now: float) -> bool:
        """Make ready for the one resend that GO_AWAY allows; False if it was used or no time is left."""
        remaining = self.deadline - now
        if self.resent or remaining <= 0:
            return False
        self.resent = True
        self.timeout = min(self.timeout, remaining)
        self._forget_progress()
        return True

    def finish(self, answer: Answer) -> None:
        """Give the permit back and tell the caller; what the callback raises is logged here, nobody else could be told.

        The permit first (Java: last), so that a callback that sends again does not wait for its own.
        """
        if self.permit is not None:
            self.permit.release()
        try:
            self.on_answer(answer)
        except Exception:
            logger.exception("the callback of %s (opaque %d) raised", self.name, self.opaque)


def next_opaque(last: int, in_flight: Container[int]) -> int:
    """Return the opaque after `last` that no request in flight has; after 2**31 - 1 comes -2**31, as Java's int."""
    while True:
        last = (last + 1 + 0x80000000) % 0x100000000 - 0x80000000
        if last not in in_flight:
            return last


class Outbound:
    """Requests whose bytes the socket has not all taken, oldest first."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def head(self) -> Request:
        """The request being written."""
        return self._queue[0]

    def push(self, request: Request) -> None:
        """Queue an encoded request."""
        self._queue.append(request)

    def discard(self, request: Request) -> None:
        """Take out a request that is not started (one that is must be written to its end, or framing is lost)."""
        self._queue.remove(request)

    def clear(self) -> None:
        """Forget everything."""
        self._queue.clear()

    def gather(self) -> list[Buffer]:
        """Return the next pieces for one sendmsg: at most `IOV_MAX` pieces and `WRITE_LIMIT` bytes, at least one."""
        head = self._queue[0]
        if len(self._queue) == 1 and head.unsent <= WRITE_LIMIT and len(head.pieces) - head.next_piece <= IOV_MAX:
            return head.pieces[head.next_piece :] if head.next_piece else head.pieces
        gathered: list[Buffer] = []
        room = WRITE_LIMIT
        for request in self._queue:
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

    def advance(self, sent: int) -> list[Request]:
        """Count `sent` bytes as taken by the socket; return the requests that are now whole."""
        done: list[Request] = []
        while sent:
            request = self._queue[0]
            request.started = True
            if sent >= request.unsent:
                sent -= request.unsent
                request.unsent = 0
                done.append(self._queue.popleft())
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
