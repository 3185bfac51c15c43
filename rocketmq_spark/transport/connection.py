"""One connection: its state, the requests that wait on it, and what every event makes of them.

Rule 1: many requests are in flight; an answer finds its request by opaque alone, in any order.
Rule 2: whoever takes a request out of the table owns its outcome: so each has exactly one.
Rule 3: every method but :meth:`Connection.submit` belongs to the loop's thread. They decide, and *return* what ended;
        the loop calls the callbacks, watches the socket and closes it. Only what a server asks of us is handed on from
        here, to `on_request`, which neither blocks nor raises.
Rule 4: the lock guards the state and the out queue, and is never held while a callback runs.
Rule 5: no retry here. A connection that breaks fails all that waits on it, saying of each whether it was sent.

The model is NettyRemotingAbstract.java and NettyRemotingClient.java (spec/producer.md section 10); timeouts count from
the last byte written, and a timeout closes only a connection that has fallen silent, or on which a frame does not end.
"""

from __future__ import annotations

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
)
from rocketmq_spark.transport.dial import Dial
from rocketmq_spark.transport.disagreement import REMOTING_HELLO, disagreement
from rocketmq_spark.transport.failures import broken, overdue
from rocketmq_spark.transport.request import FLAG_REQUEST, Answer, Outbound, Request, next_opaque
from rocketmq_spark.transport.state import TRANSITIONS, Event, State
from rocketmq_spark.transport.tls import Secure
from rocketmq_spark.transport.tls_errors import CertificateError, DisagreementError, HandshakeError
from rocketmq_spark.transport.tls_stream import TlsStream
from rocketmq_spark.wire.codes import ResponseCode
from rocketmq_spark.wire.command import FLAG_ONEWAY, FLAG_RESPONSE, RemotingCommand, shortened
from rocketmq_spark.wire.framing import FrameBuffer

logger = logging.getLogger("rocketmq_spark.transport")

Completion: TypeAlias = "tuple[Request, Answer]"

# Given the address and the request of a server; True if it was taken, False if nobody wants it.
OnRequest: TypeAlias = Callable[[str, RemotingCommand], bool]

# How often one socket is read before the others get their turn.
_READS_PER_EVENT: Final = 8

# How long a frame may come, seconds: the answer to a full batch takes that at 35 kB/s. One whose length was damaged on
# its way would swallow every later answer, megabytes of them, and so look alive.
_FRAME_TIMEOUT: Final = 30.0

# How long an answer of ours to the broker's own request may wait for the socket, seconds.
_RESPONSE_TIMEOUT: Final = 3.0

# Behind so many frames no refusal is queued any more: a server that asks and never reads must not fill our memory.
_MOST_UNSENT: Final = 1000

# So many frames in a row may answer nothing that is asked: late answers (each of clientAsyncSemaphoreValue's 65,535
# requests may have timed out), and what a broker asks of us. Who goes on so would have us read for ever.
_MOST_UNASKED: Final = 100_000

# Bodies up to this length are cheaper to copy into the socket together with others than to be written each by itself.
_SHORT: Final = 16 * 1024


class Connection:
    """The connection to one address.

    Parameters
    ----------
    address : str
    clock : callable
        Seconds, monotonic.
    connect_timeout : float
        For the look-up of the name and all its addresses together.
    attend : callable
        Tells the loop, from any thread, that it should look at this connection.
    on_request : callable
        Given the address and what the server asks of us (spec/remoting.md section 12.3), on the loop's thread; returns
        False for what it does not know, which is then refused.
    secure : callable, optional
        Encrypts it; the handshake is part of connecting.

    Attributes
    ----------
    sock : socket or None
        What the loop should watch.
    due : float
        No deadline is earlier than this: the loop sleeps at most until then.
    """

    def __init__(
        self,
        address: str,
        clock: Callable[[], float],
        connect_timeout: float,
        attend: Callable[[Connection], None],
        on_request: OnRequest,
        secure: Secure | None = None,
    ) -> None:
        self.address = address
        self.state = State.CONNECTING
        self.due = clock() + connect_timeout
        self.sock: socket.socket | None = None
        self._clock = clock
        self._connect_timeout = connect_timeout
        self._attend = attend
        self._on_server_request = on_request
        self._dial = Dial(address, self.due, lambda: attend(self), secure=secure)
        self._stream: socket.socket | TlsStream | None = None
        self._lock = threading.Lock()
        self._table: dict[int, Request] = {}
        self._out = Outbound()
        self._frames = FrameBuffer()
        self._opaque = -1
        self._arrivals = 0
        self._unasked = 0
        self._last_progress = 0.0
        # When the frame began that is not whole yet.
        self._frame_since = math.inf
        self._blocked = False
        self._failure: OSError | None = None

    def __repr__(self) -> str:
        return f"<Connection {self.address} {self.state.name}, {len(self._table)} in flight, {len(self._out)} unsent>"

    @property
    def wants_write(self) -> bool:
        """Writability matters: the connect's end, or bytes that the socket did not take.

        Not whether anything is queued: a submitting thread may just now be writing it.
        """
        return self._dial.wants_write if self.state is State.CONNECTING else self._blocked

    @property
    def wants_read(self) -> bool:
        """Readability matters: answers, or the server's part of a handshake."""
        return self.state is not State.CONNECTING or self._dial.wants_read

    @property
    def unfinished(self) -> int:
        """Bytes of a frame that has not come whole yet."""
        return 0 if self.state is State.CLOSED else self._frames.pending

    @property
    def drained(self) -> bool:
        """Nothing is left to do on a connection that gets no more requests."""
        return self.state is State.DRAINING and not self._table and not self._blocked and not self._out

    def abandoned(self) -> list[socket.socket]:
        """Take the sockets of failed connects, to be closed."""
        sockets, self._dial.abandoned = self._dial.abandoned, []
        return sockets

    def submit(self, request: Request) -> bool:
        """Queue a request, from any thread; False if this connection takes no more.

        The socket is tried at once when nothing is queued before it: waking the loop for it would cost more than the
        write itself. What the socket does not take, and a failure, are left to the loop; and so is a short request
        while others are under way, for the loop then writes all that have come together, with one call.
        """
        done: list[Request] = []
        with self._lock:
            if self.state is not State.OPEN and self.state is not State.CONNECTING:
                return False
            self._opaque = next_opaque(self._opaque, self._table)
            request.encode(self._opaque)
            self._table[request.opaque] = request
            self.due = min(self.due, request.deadline)
            waits = bool(self._out)
            self._out.push(request)
            if self.state is State.CONNECTING or waits:
                return True
            self._last_progress = self._clock()
            unfinished = len(self._table) > 1 and request.nbytes <= _SHORT
            if not unfinished:
                done = self._write()
                unfinished = self._blocked or self._failure is not None
        for oneway in done:
            oneway.finish(Answer(None, None, 0.0))
        if unfinished:
            self._attend(self)
        return True

    def start(self, now: float) -> list[Completion]:
        """Begin to connect."""
        self._dial.begin(now)
        return self._after_dial(now)

    def on_attention(self, now: float) -> list[Completion]:
        """Look at what another thread has left: a finished name look-up, short requests, a failed write."""
        if self.state is State.CONNECTING:
            self._dial.step(now)
            return self._after_dial(now)
        return self._go_on(now, more=bool(self._out) and not self._blocked and self._failure is None)

    def on_writable(self, now: float) -> list[Completion]:
        """Go on with the connect, or with writing."""
        if self.state is State.CONNECTING:
            self._dial.on_writable(now)
            return self._after_dial(now)
        return self._go_on(now, more=self._blocked)

    def _go_on(self, now: float, *, more: bool) -> list[Completion]:
        """Write on if there is `more`; say what is done, or failed."""
        with self._lock:
            done = self._write() if more and self.state is not State.CLOSED else []
        completions = [(request, Answer(None, None, 0.0)) for request in done]
        if self._failure is not None and self.state is not State.CLOSED:
            completions += self._fail(now, "writing failed", self._failure)
        return completions

    def on_readable(self, scratch: memoryview) -> list[Completion]:
        """Read what has come; `scratch` is the loop's own reusable buffer."""
        if self.state is State.CONNECTING:
            self._dial.on_readable(self._clock())
            return self._after_dial(self._clock())
        completions: list[Completion] = []
        for _ in range(_READS_PER_EVENT):
            if self._stream is None:
                break
            try:
                count = self._stream.recv_into(scratch)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as exc:
                return completions + self._fail(self._clock(), f"reading failed: {exc}", exc)
            now = self._clock()
            if not count:
                closed = ConnectionResetError("end of stream")
                return completions + self._fail(now, "the server closed the connection", closed)
            self._arrivals += 1
            try:
                self._frames.feed(scratch[:count])
                while (command := self._frames.take()) is not None:
                    self._frame_since = math.inf
                    self._on_command(command, now, completions)
            except Exception as exc:
                # Not RemotingCommandException alone: a decoder's own bug must not lose the answers decoded before.
                what = f"the server sent bytes that are not the protocol ({shortened(str(exc))})"
                return completions + self._fail(now, what, exc, RemotingCommandException)
            self._frame_since = min(self._frame_since, now) if self._frames.pending else math.inf
            if count < len(scratch):
                break
        if self._failure is not None and self.state is not State.CLOSED:
            completions += self._fail(self._clock(), "writing failed", self._failure)
        return completions

    def sweep(self, now: float) -> list[Completion]:
        """Fail what is overdue, and the connection if it is stuck, silent, or out of step."""
        if now < self.due or self.state is State.CLOSED:
            return []
        completions: list[Completion] = []
        if self.state is State.CONNECTING:
            self._dial.step(now)
            completions = self._after_dial(now)
        silent: Request | None = None
        stuck: Request | None = None
        with self._lock:
            for request in [waiting for waiting in self._table.values() if waiting.deadline <= now]:
                del self._table[request.opaque]
                if not request.started:
                    self._out.discard(request)
                elif request.written_at is not None and request.arrivals == self._arrivals:
                    silent = request if request.timeout >= self._longest_timeout() else silent
                connecting = self.state is State.CONNECTING
                error = overdue(request, self.address, len(self._table), connecting=connecting)
                completions.append((request, Answer(None, error, request.latency(now))))
            if self.state is not State.CONNECTING and self._out and now >= self._stuck_at():
                stuck = self._out.head
            self.due = self._next_due()
        if stuck is not None:
            what = f"the server accepted no byte for {now - self._last_progress:.1f} s"
            completions += self._fail(now, what, TimeoutError("write stalled"))
        elif silent is not None:
            what = f"closed because nothing at all came from the server for {round(silent.timeout, 3):g} s"
            completions += self._fail(now, what, TimeoutError("silent connection"))
        elif completions and now - self._frame_since >= _FRAME_TIMEOUT:
            what = f"closed because a frame of the server has not ended for {now - self._frame_since:.0f} s"
            completions += self._fail(now, what, TimeoutError("unfinished frame"))
        return completions

    def close(self, now: float, what: str, cause: BaseException | None = None) -> list[Completion]:
        """Fail everything."""
        return [] if self.state is State.CLOSED else self._fail(now, what, cause)

    def _explained(self, what: str, cause: BaseException | None) -> tuple[str, BaseException | None]:
        """Find out whether a connection on which nothing has ever come ended for want of TLS, or because of it."""
        if isinstance(self._stream, TlsStream) and not self._arrivals and isinstance(cause, OSError):
            refusal = self._stream.last_words()
            return (what, cause) if refusal is None else (f"{what}: {refusal}", refusal)
        hung_up = isinstance(cause, ConnectionError) and not isinstance(cause, CertificateError | DisagreementError)
        shaking = isinstance(cause, HandshakeError)
        # Who can't be connected to has not hung up; and a handshake that has ended is an answer.
        if not hung_up or self._arrivals or not (shaking or isinstance(self._stream, socket.socket)):
            return what, cause
        # Not the address: a name would have to be looked up, which may take any time.
        remedy = disagreement(self._dial.tried or self.address, REMOTING_HELLO, over_tls=shaking)
        return (what, cause) if remedy is None else (f"{what}: {remedy}", DisagreementError(remedy))

    def _fire(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state][event]

    def _write(self) -> list[Request]:
        """Give the socket one helping (the lock is held); return the requests that are done because written."""
        assert self._stream is not None
        # Before the call: after it, this thread may wait so long for the interpreter's lock that the answer is there
        # first, and a latency would come out as nothing.
        now = self._clock()
        try:
            # Without a piece a TLS stream sends on what it has encrypted before.
            sent = self._stream.sendmsg(self._out.gather() if self._out else ())
            self._last_progress = now
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as exc:
            self._failure = exc
            return []
        done: list[Request] = []
        for request in self._out.advance(sent):
            request.written(now, self._arrivals)
            if request.flag == FLAG_REQUEST:
                self.due = min(self.due, request.deadline)
            elif request.flag == FLAG_ONEWAY and self._table.pop(request.opaque, None) is not None:
                done.append(request)
        self._blocked = bool(self._out) or (isinstance(self._stream, TlsStream) and self._stream.unsent)
        if self._out:
            self.due = min(self.due, self._stuck_at())
        return done

    def _stuck_at(self) -> float:
        return self._last_progress + self._out.head.timeout

    def _longest_timeout(self) -> float:
        """Return the patience of the most patient request: a heart-beat's must not end a send's."""
        return max((request.timeout for request in self._table.values()), default=0.0)

    def _next_due(self) -> float:
        due = min((request.deadline for request in self._table.values()), default=math.inf)
        if self.state is State.CONNECTING:
            return min(due, self._dial.due)
        return min(due, self._stuck_at()) if self._out else due

    def _after_dial(self, now: float) -> list[Completion]:
        self.sock = self._dial.sock
        if self._dial.failed:
            within = f" within {self._connect_timeout:g} s" if now >= self._dial.deadline else ""
            what = f"can't connect{within} ({self._dial.reasons})"
            return self._fail(now, what, self._dial.failures[-1][1] if self._dial.failures else None)
        done: list[Request] = []
        with self._lock:
            if self._dial.connected:
                self._stream = self._dial.stream
                self._fire(Event.CONNECTED)
                logger.debug("connected to %s", self.address)
                self._last_progress = now
                if self._out:
                    done = self._write()
            self.due = self._next_due()
        completions = [(request, Answer(None, None, 0.0)) for request in done]
        if self._failure is not None:
            completions += self._fail(now, "writing failed", self._failure)
        return completions

    def _on_command(self, command: RemotingCommand, now: float, completions: list[Completion]) -> None:
        self._unasked += 1
        if self._unasked > _MOST_UNASKED:
            raise RemotingCommandException(f"{_MOST_UNASKED} frames in a row that answer nothing")
        if not command.is_response:
            self._on_request(command)
            return
        # An answer can be here before the sending thread has come back from the socket and noted when it wrote: that
        # thread holds the lock until then.
        with self._lock:
            request = self._table.pop(command.opaque, None)
            latency = 0.0 if request is None else request.latency(now)
        if request is None:
            logger.debug("%s: nobody waits for opaque %d (code %d)", self.address, command.opaque, command.code)
            return
        self._unasked = 0
        if command.code == ResponseCode.GO_AWAY:
            with self._lock:
                self._fire(Event.GO_AWAY)
        completions.append((request, Answer(command, None, latency)))

    def _on_request(self, command: RemotingCommand) -> None:
        """Hand on what a broker asks of us; what nobody wants is refused, or dropped if nobody reads that."""
        if self._on_server_request(self.address, command):
            return
        logger.debug("%s: request %d of the server dropped or refused", self.address, command.code)
        if command.is_oneway or len(self._out) >= _MOST_UNSENT:
            return
        remark = f"request type {command.code} not supported"
        code = ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        answer = Request(code, {}, (), _RESPONSE_TIMEOUT, lambda _: None, flag=FLAG_RESPONSE, remark=remark)
        answer.encode(command.opaque)
        with self._lock:
            waits = bool(self._out)
            self._out.push(answer)
            if not waits:
                self._last_progress = self._clock()
                self._write()

    def _fail(
        self,
        now: float,
        what: str,
        cause: BaseException | None,
        kind: type[RemotingException] = RemotingSendRequestException,
    ) -> list[Completion]:
        what, cause = self._explained(what, cause)
        with self._lock:
            self._fire(Event.CLOSE)
            waiting = list(self._table.values())
            self._table.clear()
            self._out.clear()
            self.due = math.inf
        started = sum(request.started for request in waiting)
        logger.debug("%s: %s; %d requests sent, %d not", self.address, what, started, len(waiting) - started)
        errors = broken(waiting, self.address, what, cause, kind)
        return [
            (request, Answer(None, error, request.latency(now))) for request, error in zip(waiting, errors, strict=True)
        ]
