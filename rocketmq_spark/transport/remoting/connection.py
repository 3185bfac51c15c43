"""One connection to a server: its state, its pending requests, and the effect of each event on them.

Rule 1: the code that removes a request from the table of pending requests reports its outcome, so each has exactly one.
Rule 2: only the thread of the `IoLoop` calls the methods, except :meth:`Connection.submit`. They return the requests
        that ended; the loop calls the callbacks, watches the socket and closes it. `submit` writes, too, and itself
        finishes one-way requests.
Rule 3: the lock guards the state and the queue of unwritten requests, and is never held while a callback runs.
Rule 4: a connection that breaks fails all pending requests. Each error says whether the server may have executed it.

Unlike in Java, the time for an answer starts when the socket has taken the last byte
(docs/internals/remoting.md#connections).
"""

from __future__ import annotations

import enum
import logging
import math
import socket
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

from rocketmq_spark.errors import (
    RemotingCommandException,
    RemotingException,
    RemotingSendRequestException,
    TooLongFrameException,
)
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.command import FLAG_ONEWAY, FLAG_RESPONSE, FrameBuffer, RemotingCommand, shortened
from rocketmq_spark.transport.dial import Dial, discard
from rocketmq_spark.transport.remoting.requests import (
    FLAG_REQUEST,
    WRITTEN,
    Answer,
    Completion,
    Outbound,
    Request,
    broken,
    next_opaque,
    take_overdue,
)
from rocketmq_spark.transport.runtime import PROCESS, Runtime
from rocketmq_spark.transport.tls import Secure, TlsStream

logger = logging.getLogger("rocketmq_spark.transport")


class State(enum.Enum):
    """The states of a connection."""

    CONNECTING = "connecting"  # Requests queue up.
    OPEN = "open"
    DRAINING = "draining"  # After GO_AWAY: answers still arrive, new requests use a new connection.
    CLOSED = "closed"


TRANSITIONS: Final[dict[State, tuple[State, ...]]] = {
    State.CONNECTING: (State.OPEN, State.CLOSED),
    State.OPEN: (State.DRAINING, State.CLOSED),
    State.DRAINING: (State.DRAINING, State.CLOSED),
    State.CLOSED: (),
}

# Takes a server's address and request, on the loop's thread; must not block or raise. False refuses the request.
OnRequest: TypeAlias = Callable[[str, RemotingCommand], bool]

# Reads of one socket before the others get their turn.
_READS_PER_EVENT: Final = 8

# Seconds for one frame: the answer to a full batch at 35 kB/s. With a corrupted length a frame would never end.
_FRAME_TIMEOUT: Final = 30.0

# Seconds that the refusal of a broker's request may wait for the socket.
_RESPONSE_TIMEOUT: Final = 3.0

# No refusal is queued behind more frames, because a server that never reads must not fill the memory.
_MOST_UNSENT: Final = 1000

# Frames in a row without a pending request: the broker's requests, and late answers to at most 65,535 requests
# (clientAsyncSemaphoreValue) that timed out.
_MOST_UNASKED: Final = 100_000

# Bodies up to this length cost less if several are written in one call.
_SHORT: Final = 16 * 1024


class Connection:
    """The connection to one address.

    `attend` makes the loop call `on_attention`, and may be called from any thread. The loop sleeps at most until `due`;
    no deadline is earlier. `connect_timeout` bounds the lookup of the name and all its addresses together.
    """

    def __init__(
        self,
        address: str,
        clock: Callable[[], float],
        connect_timeout: float,
        attend: Callable[[Connection], None],
        on_request: OnRequest,
        secure: Secure | None = None,
        runtime: Runtime = PROCESS,
    ) -> None:
        self.address = address
        self._runtime = runtime
        self.state = State.CONNECTING
        self.due = clock() + connect_timeout
        self.sock: socket.socket | None = None
        self._clock = clock
        self._connect_timeout = connect_timeout
        self._attend = attend
        self._on_server_request = on_request
        self._dial = Dial(address, self.due, lambda: attend(self), secure=secure, runtime=runtime)
        self._stream: socket.socket | TlsStream | None = None
        self._lock = threading.Lock()
        # By opaque, the requests without an outcome.
        self._pending: dict[int, Request] = {}
        self._last_opaque = -1
        self._out = Outbound()
        self._frames = FrameBuffer()
        self._arrivals = 0
        self._unasked = 0
        self._last_progress = 0.0
        # When the incomplete frame began.
        self._frame_since = math.inf
        self._blocked = False
        self._sealed_by = math.inf  # Until when a TLS stream may send what it has encrypted
        self._failure: OSError | None = None

    def __repr__(self) -> str:
        return f"<Connection {self.address} {self.state.name}, {len(self._pending)} in flight, {len(self._out)} unsent>"

    @property
    def wants_write(self) -> bool:
        """Whether to watch for writability; a queue alone is no reason, because another thread may be writing it."""
        return self._dial.wants_write if self.state is State.CONNECTING else self._blocked

    @property
    def wants_read(self) -> bool:
        """Whether to watch for readability: for answers, or during a TLS handshake."""
        return self.state is not State.CONNECTING or self._dial.wants_read

    @property
    def unfinished(self) -> int:
        """Bytes of an incomplete frame."""
        return 0 if self.state is State.CLOSED else self._frames.pending

    @property
    def drained(self) -> bool:
        """True after GO_AWAY when nothing is pending."""
        return self.state is State.DRAINING and not self._pending and not self._blocked and not self._out

    def close_abandoned(self) -> None:
        """Close the sockets of failed connects, which the loop no longer watches."""
        while self._dial.abandoned:
            self._dial.abandoned.pop().close()

    def submit(self, request: Request) -> bool:
        """Queue a request, from any thread; False if this connection accepts no more.

        With an empty queue the request is written here, because waking the loop costs more than the write. The loop
        writes what the socket did not accept, and short requests while others are in flight, several in one call.
        """
        done: list[Request] = []
        with self._lock:
            if self.state is not State.OPEN and self.state is not State.CONNECTING:
                return False
            self._last_opaque = next_opaque(self._last_opaque, self._pending)
            request.encode(self._last_opaque)
            self._pending[self._last_opaque] = request
            self.due = min(self.due, request.deadline, request.write_by)
            waits = bool(self._out)
            self._out.append(request)
            if self.state is State.CONNECTING or waits:
                return True
            self._last_progress = self._clock()
            unfinished = len(self._pending) > 1 and request.nbytes <= _SHORT
            if not unfinished:
                done = self._write()
                unfinished = self._blocked or self._failure is not None
        for oneway in done:
            oneway.finish(WRITTEN)
        if unfinished:
            self._attend(self)
        return True

    def start(self, now: float) -> list[Completion]:
        """Start to connect."""
        self._dial.begin(now)
        return self._after_dial(now)

    def on_attention(self, now: float) -> list[Completion]:
        """Handle work that another thread left: a finished name lookup, short requests, or a failed write."""
        if self.state is State.CONNECTING:
            self._dial.step(now)
            return self._after_dial(now)
        return self._go_on(now, more=bool(self._out) and not self._blocked and self._failure is None)

    def on_writable(self, now: float) -> list[Completion]:
        """Continue the connect, or write."""
        if self.state is State.CONNECTING:
            self._dial.on_ready(now)
            return self._after_dial(now)
        return self._go_on(now, more=self._blocked)

    def _go_on(self, now: float, *, more: bool) -> list[Completion]:
        """Write if there is `more`; return the requests that ended."""
        with self._lock:
            done = self._write() if more and self.state is not State.CLOSED else []
        completions = [(request, WRITTEN) for request in done]
        if self._failure is not None and self.state is not State.CLOSED:
            discard(self.sock)
            completions += self._fail(now, "writing failed", self._failure)
        return completions

    def on_readable(self, scratch: memoryview) -> list[Completion]:
        """Read what has arrived; `scratch` is the loop's reusable buffer."""
        if self.state is State.CONNECTING:
            self._dial.on_ready(self._clock())
            return self._after_dial(self._clock())
        assert self._stream is not None
        completions: list[Completion] = []
        for _ in range(_READS_PER_EVENT):
            try:
                count = self._stream.recv_into(scratch)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as exc:
                return completions + self._fail(self._clock(), f"reading failed: {exc}", exc)
            now = self._clock()
            if not count:
                end = ConnectionResetError("end of stream")
                return completions + self._fail(now, "the server closed the connection", end)
            self._arrivals += 1
            try:
                self._frames.feed(scratch[:count])
                while (command := self._frames.take()) is not None:
                    self._frame_since = math.inf
                    self._on_command(command, now, completions)
            except Exception as exc:
                # Any exception: a bug of a decoder must not lose the answers decoded before.
                reason = f"the server sent bytes that are not the remoting protocol ({shortened(str(exc))})"
                kind = TooLongFrameException if isinstance(exc, TooLongFrameException) else RemotingCommandException
                return completions + self._fail(now, reason, exc, kind)
            self._frame_since = min(self._frame_since, now) if self._frames.pending else math.inf
            if count < len(scratch):
                break
        return completions + self._go_on(self._clock(), more=False)

    def sweep(self, now: float) -> list[Completion]:
        """Fail overdue requests, and close the connection if it is stuck or silent, or a frame does not end."""
        if now < self.due or self.state is State.CLOSED:
            return []
        completions: list[Completion] = []
        if self.state is State.CONNECTING:
            self._dial.step(now)
            completions = self._after_dial(now)
        with self._lock:
            cut = self._out.remove_overdue(now)
            connecting = self.state is State.CONNECTING
            ended, silence = take_overdue(self._pending, now, self._arrivals, self.address, connecting=connecting)
            completions += ended
            # A started request must be written to its end, or the stream is corrupt.
            stuck = not connecting and bool(self._out) and (cut or now >= self._stuck_at())
            self.due = self._next_due()
        if stuck:
            reason, cause = f"the server accepted no byte for {now - self._last_progress:.1f} s", "write stalled"
        elif silence is not None:
            reason, cause = f"closed because the server sent nothing for {silence:g} s", "silent connection"
        elif completions and now - self._frame_since >= _FRAME_TIMEOUT:
            open_for = f"{now - self._frame_since:.0f} s"
            reason, cause = f"closed because the server has not completed a frame for {open_for}", "unfinished frame"
        else:
            return completions
        discard(self.sock)
        return completions + self._fail(now, reason, TimeoutError(cause))

    def close(self, now: float, reason: str, cause: BaseException | None = None) -> list[Completion]:
        """Fail everything."""
        return [] if self.state is State.CLOSED else self._fail(now, reason, cause)

    def _enter(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"{self!r} can't become {state.name}")
        self.state = state

    def _write(self) -> list[Request]:
        """Write once, with the lock held; return the one-way requests that are complete."""
        assert self._stream is not None
        # Before the call: afterwards this thread may wait for the interpreter's lock until the answer has arrived, and
        # the latency would be zero.
        now = self._clock()
        if now >= self._sealed_by or (now >= self.due and self._out.remove_overdue(now)):
            self._failure = TimeoutError("the server accepted only a part of a request in time")
            return []
        try:
            # Without pieces, a TLS stream sends what it has already encrypted.
            sent = self._stream.sendmsg(self._out.gather() if self._out else ())
            self._last_progress = now
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as exc:
            self._failure = exc
            return []
        except BaseException:
            # Such as Ctrl+C. Bytes that may have been sent must not be sent again.
            for request in self._out:
                request.started = True
            self._failure = ConnectionAbortedError("the write was interrupted")
            self._attend(self)
            raise
        done: list[Request] = []
        sealed = isinstance(self._stream, TlsStream) and self._stream.unsent
        written = self._out.advance(sent)
        self._sealed_by = min([self._sealed_by, *(one.write_by for one in written)]) if sealed else math.inf
        for request in written:
            request.written(now, self._arrivals)
            if request.flag == FLAG_REQUEST:
                self.due = min(self.due, request.deadline)
            elif request.flag == FLAG_ONEWAY and self._pending.pop(request.opaque, None) is not None:
                done.append(request)
        self._blocked = bool(self._out) or sealed
        if self._out:
            self.due = min(self.due, self._stuck_at())
        return done

    def _stuck_at(self) -> float:
        return self._last_progress + self._out[0].timeout

    def _next_due(self) -> float:
        due = min((request.due for request in self._pending.values()), default=math.inf)
        if self.state is State.CONNECTING:
            return min(due, self._dial.due)
        return min(due, self._stuck_at()) if self._out else due

    def _after_dial(self, now: float) -> list[Completion]:
        self.sock = self._dial.sock
        if self._dial.failed:
            within = f" within {self._connect_timeout:g} s" if now >= self._dial.deadline else ""
            reason = f"can't connect{within} ({self._dial.reasons})"
            return self._fail(now, reason, self._dial.failures[-1][1] if self._dial.failures else None)
        with self._lock:
            if self._dial.connected:
                self._stream = self._dial.stream
                self._enter(State.OPEN)
                logger.debug("connected to %s", self.address)
                self._last_progress = now
            self.due = self._next_due()
        return self._go_on(now, more=self._dial.connected and bool(self._out))

    def _on_command(self, command: RemotingCommand, now: float, completions: list[Completion]) -> None:
        self._unasked += 1
        if self._unasked > _MOST_UNASKED:
            raise RemotingCommandException(f"the server sent {_MOST_UNASKED} frames in a row that answer no request")
        if not command.is_response:
            self._on_request(command)
            return
        # An answer may arrive before the sending thread, which holds the lock, has noted the time of the write.
        with self._lock:
            request = self._pending.get(command.opaque)
            if request is not None and request.written_at is None:
                # As an acknowledgement it would lose rows. After a GO_AWAY two connections would write the request.
                raise RemotingCommandException(f"opaque {command.opaque} is of a request that was not sent whole")
            self._pending.pop(command.opaque, None)
            latency = 0.0 if request is None else request.latency(now)
        if request is None:
            logger.debug("%s: no request has opaque %d (code %d)", self.address, command.opaque, command.code)
            return
        self._unasked = 0
        if command.code == ResponseCode.GO_AWAY:
            with self._lock:
                self._enter(State.DRAINING)
        completions.append((request, Answer(command, None, latency)))

    def _on_request(self, command: RemotingCommand) -> None:
        """Handle a broker's request; refuse an unknown one, or drop it if the broker reads nothing."""
        if self._on_server_request(self.address, command):
            return
        logger.debug("%s: request %d of the server dropped or refused", self.address, command.code)
        if command.is_oneway or len(self._out) >= _MOST_UNSENT:
            return
        code, remark = ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f"request type {command.code} not supported"
        answer = Request(code, {}, (), _RESPONSE_TIMEOUT, flag=FLAG_RESPONSE, remark=remark)
        answer.encode(command.opaque)
        with self._lock:
            waits = bool(self._out)
            self._out.append(answer)
            if not waits:
                self._last_progress = self._clock()
                self._write()

    def _fail(
        self,
        now: float,
        reason: str,
        cause: BaseException | None,
        kind: type[RemotingException] = RemotingSendRequestException,
    ) -> list[Completion]:
        if not self._arrivals:
            # The numeric address: looking up a name may take any time.
            reason, cause = self._runtime.explained(self._dial.tried or self.address, self._stream, reason, cause)
        with self._lock:
            self._enter(State.CLOSED)
            waiting = list(self._pending.values())
            self._pending.clear()
            self._out.clear()
            self.due = math.inf
        started = sum(request.started for request in waiting)
        logger.debug("%s: %s; %d requests sent, %d not", self.address, reason, started, len(waiting) - started)
        return broken(waiting, self.address, reason, cause, kind, now)
