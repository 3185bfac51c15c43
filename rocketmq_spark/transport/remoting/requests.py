"""One request and its answer, the pending requests of a connection, and the queue of bytes that wait for its socket.

A body is never copied or joined: its pieces go to the socket as they came. Nothing here touches a socket, a thread or a
clock; `now` comes in. A request of which the socket took no byte is certainly not stored.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from rocketmq_spark.errors import MQClientException, RocketMQError
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.model.message import Buffer
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.protocol.remoting.command import MAX_FRAME, RemotingCommand, encode_head
from rocketmq_spark.transport.parallel import Permit

logger = logging.getLogger("rocketmq_spark.transport")

# The length field does not count itself. For one byte more the server closes the connection, and all its requests fail.
MAX_FRAME_LENGTH: Final = MAX_FRAME - 4

# How many pieces one sendmsg takes; 1024 on Linux and macOS.
IOV_MAX: Final = max(os.sysconf("SC_IOV_MAX"), 16) if "SC_IOV_MAX" in getattr(os, "sysconf_names", {}) else 1024

# Bytes of one sendmsg: enough for a whole batch of the default size, and few enough that one connection holds the loop
# for a fraction of a millisecond only.
WRITE_LIMIT: Final = 2 * 1024 * 1024

# Neither FLAG_RESPONSE nor FLAG_ONEWAY.
FLAG_REQUEST: Final = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """How one request ended. Command and error are both None after a one-way request."""

    command: RemotingCommand | None  # Whatever its code.
    error: RocketMQError | None
    latency: float  # From the last byte written to the answer or failure, seconds; 0 if never written.
    refused: Credentials | None = None  # The credentials, if the server rejected them.


# The end of a one-way request.
WRITTEN: Final = Answer(None, None, 0.0)

OnAnswer: TypeAlias = Callable[[Answer], None]


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One frame to send, from its submission to its answer.

    `on_answer` is called once, by the loop's thread; for a frame without an answer perhaps by the submitting thread.
    Frames with `FLAG_ONEWAY` and `FLAG_RESPONSE` (to a broker's request) get no answer and end when they are written.
    """

    code: int
    ext_fields: Mapping[str, str]
    body: tuple[Buffer, ...]  # Views must be of single bytes.
    timeout: float  # Seconds from the last byte written to the answer.
    on_answer: OnAnswer = lambda _: None
    deadline: float = math.inf  # The end of the request in any case.
    flag: int = FLAG_REQUEST
    remark: str = ""
    permit: Permit | None = None  # Released when the request ends.
    sent_fields: Mapping[str, str] = field(init=False)  # With namespace and signature.
    signed_by: Credentials | None = None
    opaque: int = 0
    resent: bool = False
    # Counted here: a wrong length would corrupt every later frame of the connection.
    nbytes: int = field(init=False)
    pieces: list[Buffer] = field(default_factory=list)
    next_piece: int = 0
    unsent: int = 0
    started: bool = False
    written_at: float | None = None
    # Of the connection, until this request was written.
    arrivals: int = 0

    def __post_init__(self) -> None:
        self.sent_fields = self.ext_fields
        self.nbytes = sum(map(len, self.body))

    @property
    def name(self) -> str:
        """The request code's name, for texts."""
        try:
            return RequestCode(self.code).name
        except ValueError:
            return f"request {self.code}"

    def encode(self, opaque: int) -> None:
        """Make the frame's pieces, of which none is written yet. MQClientException if the frame is too long."""
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
        # No empty pieces: writing only those would look like a full socket.
        self.pieces = [head, *filter(len, self.body)]
        self.unsent = len(head) + self.nbytes
        self.next_piece = 0
        self.started = False
        self.written_at = None

    def written(self, now: float, arrivals: int) -> None:
        """Note that the socket took the last byte: the timeout counts from here."""
        self.written_at = now
        self.arrivals = arrivals
        self.deadline = min(self.deadline, now + self.timeout)
        self.pieces = []

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

    def finish(self, answer: Answer) -> None:
        """Release the permit and call the callback; its exceptions are logged.

        The permit goes first (in Java last), so that a callback that sends again does not wait for its own.
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


class Outbound(deque[Request]):
    """Encoded requests that are not completely written, oldest first."""

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
