"""The one thread that serves all connections of a transport: its own, or that of a caller who polls.

Rule 1: nothing is opened and no thread runs before the first request.
Rule 2: the thread sleeps until a socket is ready, a deadline is due or somebody wakes it; it never polls.
Rule 3: a bounded helping per socket and turn: one sendmsg, a few reads.
Rule 4: only this thread changes the selector, closes sockets and calls callbacks, and never under a lock.
Rule 5: what servers can make us hold is bounded over all of them: connections, and frames of which parts are here.
Rule 6: what another process inherited over a fork is refused there: the sockets and the selector are shared with the
        process that made them, and a single byte or epoll_ctl from the child would spoil the parent's.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from rocketmq_spark.errors import RemotingConnectException, RocketMQError
from rocketmq_spark.transport.connection import Completion, Connection, OnRequest
from rocketmq_spark.transport.hooks import RequestHooks
from rocketmq_spark.transport.request import Answer, Request
from rocketmq_spark.transport.state import State
from rocketmq_spark.transport.tls import Secure
from rocketmq_spark.wire.codes import ResponseCode, refuses_user

logger = logging.getLogger("rocketmq_spark.transport")

_RECEIVE_BUFFER: Final = 256 * 1024
_JOIN_TIMEOUT: Final = 5.0

# A name server says whom to dial. The largest clusters have some hundreds of brokers, slaves included.
_MOST_CONNECTIONS: Final = 2_000

# What frames may hold together that have not come whole yet, bytes: 16 of the largest, and 64 pulls, as many as a read
# has under way, of a whole message each. Counted where a frame is longer than honest answers are as a rule.
_MOST_UNFINISHED: Final = 256 * 1024 * 1024
_LONG_FRAME: Final = 1024 * 1024


class PolledClock:
    """A clock that passes only while its owner polls.

    Answers that arrive between two polls wait in the socket, so this time must not count against any deadline.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._now = clock()
        # By how much `clock` is ahead of this clock; None between two polls.
        self._ahead: float | None = None

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self._now if self._ahead is None else self._clock() - self._ahead

    def resume(self) -> None:
        """Let the time pass."""
        self._ahead = self._clock() - self._now

    def pause(self) -> None:
        """Stop the time."""
        self._now, self._ahead = self(), None


class IoLoop:
    """Connections by address, and the thread that moves their bytes.

    Parameters
    ----------
    clock : callable
        Seconds, monotonic.
    connect_timeout : float
        Seconds.
    on_request : callable
        Given what servers ask of us; see :class:`.connection.Connection`.
    secure : callable, optional
        Encrypts every connection.
    hooks : RequestHooks, optional
        Default: requests go out as they come.
    polled : bool, default False
        It has no thread of its own: one other thread submits everything and calls `poll`. Two threads that hand each
        other many small answers spend more time on that than on the answers.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        connect_timeout: float,
        on_request: OnRequest,
        secure: Secure | None = None,
        hooks: RequestHooks | None = None,
        *,
        polled: bool = False,
    ) -> None:
        self._pausing = PolledClock(clock) if polled else None
        self._clock = self._pausing or clock
        self._connect_timeout = connect_timeout
        self._on_request = on_request
        self._secure = secure
        self.hooks = hooks or RequestHooks()
        self.polled = polled
        self._polling = False
        self._poller: int | None = None
        self._scratch: memoryview | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._by_address: dict[str, Connection] = {}
        self._closed = False
        self._cause: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._selector: selectors.BaseSelector | None = None
        self._waker: socket.socket | None = None
        self._wakee: socket.socket | None = None
        self._woken = False
        self._attention: deque[Connection] = deque()
        self._refused: deque[Completion] = deque()
        # The thread's own: every connection it has adopted (a draining one too), and what it watches of each.
        self._adopted: dict[Connection, tuple[socket.socket, int] | None] = {}
        # Until when the thread sleeps: -inf while awake, +inf while it decides. A deadline before it must wake it.
        self._sleeping_until = -math.inf

    def __repr__(self) -> str:
        state = "closed" if self._closed else "not started" if self._thread is None else "running"
        return f"<IoLoop {state}, {list(self._by_address.values())}>"

    @property
    def closed(self) -> bool:
        """No request is taken any more: it was closed, or its thread has failed."""
        return self._closed

    @property
    def clock(self) -> Callable[[], float]:
        """The clock that deadlines are set by; a polled loop's passes only during `poll`."""
        return self._clock

    @property
    def in_own_thread(self) -> bool:
        """The caller is the loop's thread: waiting here for an answer would be waiting for itself."""
        if self.polled:
            return self._polling
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def check(self) -> None:
        """Refuse work after close, and in any process but the one that made this transport.

        Raises
        ------
        RocketMQError
        """
        if os.getpid() != self._pid:
            raise RocketMQError(
                f"this transport was made in process {self._pid} and can't be used in process {os.getpid()}: "
                "make one after the fork"
            )
        if self._closed:
            why = "is closed" if self._cause is None else f"failed ({self._cause!r})"
            raise RocketMQError(f"this transport {why}: make a new one") from self._cause

    def submit(self, address: str, request: Request) -> None:
        """Send a request over the connection to `address`, opening it if there is none. From any thread.

        Raises
        ------
        RocketMQError
            Closed, or in another process.
        """
        self.check()
        # Before the connection takes the request, and its lock: signing goes over the whole body.
        request.apply(self.hooks)
        connection, fresh = self._by_address.get(address), False
        if connection is None and len(self._by_address) >= _MOST_CONNECTIONS:
            text = f"connecting to {address}: {_MOST_CONNECTIONS} connections are open already; does nameServer name "
            self.refuse(request, RemotingConnectException(f"{text}a name server of yours? Nothing was sent"))
            return
        try:
            while connection is None or not connection.submit(request):
                connection, fresh = self._connection(address)
        finally:
            # Only now, so that a connect refused at once finds its request waiting; and even if the request could
            # not be encoded, because others may have joined the connection meanwhile.
            if fresh and connection is not None:
                self._attend(connection)
        if connection.due < self._sleeping_until:
            self._wake()

    def refuse(self, request: Request, error: RocketMQError) -> None:
        """End a request that was not submitted, on the thread on which all of them end. From any thread.

        Raises
        ------
        RocketMQError
            Closed, or in another process.
        """
        # Before the lock, too: in a forked child its holder may not exist.
        self.check()
        with self._lock:
            self.check()
            self._start()
            self._refused.append((request, Answer(None, error, 0.0)))
        self._wake()

    def close(self) -> None:
        """Fail everything in flight, close every socket, end the thread. Idempotent."""
        if os.getpid() != self._pid:
            self._drop_inherited()
            return
        with self._lock:
            self._closed = True
            thread = self._thread
        if self.polled:
            self._shut_down(None)
        if thread is not None and not self.in_own_thread:
            self._wake()
            thread.join(_JOIN_TIMEOUT)

    def poll(self, timeout: float) -> None:
        """Move bytes and call callbacks, in the calling thread; wait at most so many seconds for something to do.

        Raises
        ------
        RocketMQError
            Closed, or in another process.
        """
        self.check()
        if self._pausing is None:
            raise RocketMQError("this transport has a thread of its own, and is not to be polled")
        with self._lock:
            self._start()
        assert self._selector is not None
        assert self._scratch is not None
        self._polling = True
        self._pausing.resume()
        try:
            # What was submitted since is written first: nobody wakes this thread for it.
            self._look_at_all()
            self._turn(self._selector, self._scratch, timeout)
        except BaseException as exc:
            self._shut_down(exc)
            raise
        finally:
            self._pausing.pause()
            self._polling = False

    def _drop_inherited(self) -> None:
        # No lock (its holder may be a thread that exists in the parent only), no unregister, no shutdown: closing
        # our descriptors leaves the parent's connections as they are.
        self._closed = True
        for connection in [*self._adopted, *self._by_address.values()]:
            if connection.sock is not None:
                connection.sock.close()
        self._by_address.clear()
        self._release()

    def _connection(self, address: str) -> tuple[Connection, bool]:
        with self._lock:
            self.check()
            connection = self._by_address.get(address)
            if connection is not None and connection.state in (State.CONNECTING, State.OPEN):
                return connection, False
            self._start()
            connection = Connection(
                address, self._clock, self._connect_timeout, self._attend, self._on_request, self._secure
            )
            self._by_address[address] = connection
            return connection, True

    def _start(self) -> None:
        if self._selector is not None:
            return
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        self._wakee.setblocking(False)
        self._selector.register(self._wakee, selectors.EVENT_READ)
        self._scratch = memoryview(bytearray(_RECEIVE_BUFFER))
        if self.polled:
            self._poller = threading.get_ident()
            return
        thread = threading.Thread(target=self._run, name="rocketmq-spark-transport", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:
            self._release()
            raise RocketMQError(
                f"starting the transport's thread: {exc}; raise the process limits (ulimit -u, the container's pids)"
            ) from exc
        self._thread = thread

    def _attend(self, connection: Connection) -> None:
        self._attention.append(connection)
        self._wake()

    def _wake(self) -> None:
        # One byte until the thread has seen it: a burst of submissions costs one write.
        # Who polls is awake while it submits: only others (a look-up of a name) wake it.
        if self._woken or self._waker is None or (self.polled and threading.get_ident() == self._poller):
            return
        self._woken = True
        try:
            self._waker.send(b"\0")
        except OSError:
            # Full (then it wakes anyway), or closed by the thread's end (then nobody needs waking).
            logger.debug("the loop could not be woken", exc_info=True)

    def _run(self) -> None:
        assert self._selector is not None
        assert self._scratch is not None
        cause: BaseException | None = None
        try:
            while not self._closed:
                self._turn(self._selector, self._scratch)
        except BaseException as exc:
            cause = exc
            logger.critical("the transport's thread failed; everything in flight fails with it", exc_info=True)
        finally:
            self._shut_down(cause)

    def _turn(self, selector: selectors.BaseSelector, scratch: memoryview, timeout: float = math.inf) -> None:
        self._sleeping_until = math.inf
        due = min((connection.due for connection in self._adopted), default=math.inf)
        self._sleeping_until = due
        wait = min(timeout, max(0.0, due - self._clock()))
        ready = selector.select(None if wait == math.inf else wait)
        self._sleeping_until = -math.inf
        for key, mask in ready:
            if key.data is None:
                self._drain_wakes()
            else:
                self._serve(key.data, mask, scratch)
        self._look_at_all()
        self._finish_refused()
        # After the reading: an answer that came while this thread was held up must still count.
        now = self._clock()
        for connection in [overdue for overdue in self._adopted if overdue.due <= now]:
            self._sweep(connection, now)

    def _look_at_all(self) -> None:
        while self._attention:
            self._look_at(self._attention.popleft())

    def _finish_refused(self) -> None:
        # Those that are there now: a callback that tries again at once must not keep this thread here.
        for _ in range(len(self._refused)):
            request, answer = self._refused.popleft()
            request.finish(answer)

    def _drain_wakes(self) -> None:
        assert self._wakee is not None
        try:
            self._wakee.recv(64)
        except BlockingIOError:
            logger.debug("woken by nobody")
        # Cleared last: cleared first, the read could take away the byte of a newer wake and leave its mark, and nobody
        # would wake this thread again. Who finds the mark still set has added work that is looked at after this line.
        self._woken = False

    def _serve(self, connection: Connection, mask: int, scratch: memoryview) -> None:
        def work() -> Iterator[list[Completion]]:
            if mask & selectors.EVENT_READ:
                yield connection.on_readable(scratch)
            if mask & selectors.EVENT_WRITE and connection.state is not State.CLOSED:
                yield connection.on_writable(self._clock())

        self._guarded(connection, work())

    def _look_at(self, connection: Connection) -> None:
        def work() -> Iterator[list[Completion]]:
            if connection in self._adopted:
                yield connection.on_attention(self._clock())
            elif connection.state is State.CONNECTING:
                self._adopted[connection] = None
                yield connection.start(self._clock())

        self._guarded(connection, work())

    def _sweep(self, connection: Connection, now: float) -> None:
        self._guarded(connection, (connection.sweep(now) for _ in range(1)))

    def _guarded(self, connection: Connection, work: Iterator[list[Completion]]) -> None:
        """Do some work for one connection: a fault of ours costs that connection, not all of them."""
        completions: list[Completion] = []
        try:
            for done in work:
                completions += done
        except Exception as exc:
            logger.exception("%r: serving it failed", connection)
            completions += connection.close(self._clock(), "serving the connection failed", exc)
        self._settle(connection, completions)

    def _settle(self, connection: Connection, completions: list[Completion]) -> None:
        """Bring the selector and the tables in line with the connection, then tell who waits."""
        now = self._clock()
        if connection.drained:
            completions += connection.close(now, "drained")
        if connection.unfinished > _LONG_FRAME:
            unfinished = sum(one.unfinished for one in self._adopted)
            if unfinished > _MOST_UNFINISHED:
                what = f"closed because unfinished frames of all servers hold {unfinished} bytes"
                completions += connection.close(now, what, MemoryError("too much is unfinished"))
        if connection.state is State.DRAINING or connection.state is State.CLOSED:
            with self._lock:
                if self._by_address.get(connection.address) is connection:
                    del self._by_address[connection.address]
        try:
            self._watch(connection)
        finally:
            # Whatever becomes of the selector: these have left the tables, nobody else would tell.
            for request, answer in completions:
                self._deliver(connection.address, request, answer, now)

    def _watch(self, connection: Connection) -> None:
        assert self._selector is not None
        closed = connection.state is State.CLOSED
        wanted: tuple[socket.socket, int] | None = None
        if connection.sock is not None and not closed:
            mask = selectors.EVENT_WRITE if connection.wants_write else 0
            if connection.wants_read:
                mask |= selectors.EVENT_READ
            wanted = (connection.sock, mask)
        watched = self._adopted.get(connection)
        if wanted != watched:
            if watched is not None and wanted is not None and watched[0] is wanted[0]:
                self._selector.modify(wanted[0], wanted[1], connection)
            else:
                if watched is not None:
                    self._selector.unregister(watched[0])
                if wanted is not None:
                    self._selector.register(wanted[0], wanted[1], connection)
            self._adopted[connection] = wanted
        for sock in connection.abandoned():
            sock.close()
        if closed:
            self._adopted.pop(connection, None)
            if connection.sock is not None:
                connection.sock.close()
                connection.sock = None

    def _deliver(self, address: str, request: Request, answer: Answer, now: float) -> None:
        """Call the callback; GO_AWAY sends the request again, once, over a new connection (spec 12.4).

        Who signed a request that is refused for it is told before the caller, who may try again at once.
        """
        command = answer.command
        if command is not None and request.signed_by is not None and refuses_user(command.code, command.remark):
            self.hooks.refused(request.signed_by)
            answer = replace(answer, refused=request.signed_by)
        if command is not None and command.code == ResponseCode.GO_AWAY and request.send_again(now):
            logger.debug("%s: go away; %s is sent again over a new connection", address, request.name)
            try:
                self.submit(address, request)
                return
            except RocketMQError as exc:
                error = RemotingConnectException(f"{request.name} to {address}: the server said go away; {exc}")
                error.__cause__ = exc
                answer = Answer(None, error, answer.latency)
        request.finish(answer)

    def _shut_down(self, cause: BaseException | None) -> None:
        with self._lock:
            self._cause = cause
            self._closed = True
            connections = dict.fromkeys([*self._adopted, *self._by_address.values()])
            self._by_address.clear()
        for connection in connections:
            what = "the transport was closed" if cause is None else f"the transport's thread failed ({cause!r})"
            try:
                self._settle(connection, connection.close(self._clock(), what, cause))
            except Exception:
                # One that can't be closed in good order must not keep the others from telling who waits there.
                logger.exception("%r: closing it failed", connection)
        self._finish_refused()
        self._release()

    def _release(self) -> None:
        for resource in (self._selector, self._waker, self._wakee):
            if resource is not None:
                resource.close()
