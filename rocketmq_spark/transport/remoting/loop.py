"""The event loop of a remoting transport: one thread serves all its connections.

This is the loop's own thread, or that of a caller which polls. Only it changes the selector, reads, and ends requests
that get an answer. A thread that submits a request may write it, and end it if it is one-way. No callback runs under a
lock. The loop limits how many connections are open, and the memory of all incomplete frames together. A forked child
can only close it, because a byte written or an epoll_ctl call there would damage the parent's connections.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from rocketmq_spark.errors import RemotingConnectException, RocketMQError
from rocketmq_spark.transport.base import thread_failed
from rocketmq_spark.transport.remoting.connection import Connection, OnRequest, State
from rocketmq_spark.transport.remoting.requests import Answer, Completion, Request
from rocketmq_spark.transport.runtime import PROCESS, Runtime
from rocketmq_spark.transport.tls import Secure

logger = logging.getLogger("rocketmq_spark.transport")

# Takes the address, the request and its answer, on the loop's thread.
OnEnd: TypeAlias = Callable[[str, Request, Answer], None]

_RECEIVE_BUFFER: Final = 256 * 1024
_JOIN_TIMEOUT: Final = 5.0

# The largest clusters have some hundred brokers, slaves included.
_MOST_CONNECTIONS: Final = 2_000

# Bytes of incomplete frames of all connections: 16 of the largest, or the 64 pulls that a read has in flight, of one
# large message each. Checked only for frames longer than usual answers.
_MOST_UNFINISHED: Final = 256 * 1024 * 1024
_LONG_FRAME: Final = 1024 * 1024


# The forks between the first process and this one; comparing them costs less than the system call for the pid.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class PolledClock:
    """A clock that runs only during polls: answers that arrive in between wait in the socket, and must not expire."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._now = clock()
        # By how much `clock` is ahead of this clock; None between two polls.
        self._ahead: float | None = None

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self._now if self._ahead is None else self._clock() - self._ahead

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the clock in a ``with`` block."""
        self._ahead = self._clock() - self._now
        try:
            yield
        finally:
            self._now, self._ahead = self(), None


class IoLoop:
    """Connections by address, and the thread that moves their bytes.

    `on_end` takes every request that ends on a connection; it calls `Request.finish`, or submits the request again.

    A `polled` loop starts no thread: one other thread submits everything and calls `poll`. For many small answers the
    hand-over between two threads costs more than the answers. Its `clock`, for all deadlines, runs only during `poll`.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        connect_timeout: float,
        on_request: OnRequest,
        secure: Secure | None = None,
        *,
        polled: bool = False,
        runtime: Runtime = PROCESS,
    ) -> None:
        self._runtime = runtime
        self._pausing = PolledClock(clock) if polled else None
        self.clock = self._pausing or clock
        self._connect_timeout = connect_timeout
        self._on_request = on_request
        self._secure = secure
        self.on_end: OnEnd = lambda _address, request, answer: request.finish(answer)
        self.polled = polled
        self._polling = False
        self._poller: threading.Thread | None = None
        self._scratch = memoryview(b"")
        self._pid, self._forks = os.getpid(), _forks
        self._lock = threading.Lock()
        self.by_address: dict[str, Connection] = {}
        self.closed = False
        self._cause: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._selector: selectors.BaseSelector | None = None
        self._waker: socket.socket | None = None
        self._wakee: socket.socket | None = None
        self._woken = False
        self._attention: deque[Connection] = deque()
        self._refused: deque[Completion] = deque()
        # Used by the thread only: its connections, also draining ones, each with the watched socket and events.
        self._adopted: dict[Connection, tuple[socket.socket, int] | None] = {}
        # When the thread's sleep ends: -inf while awake, +inf while it decides. An earlier deadline must wake it.
        self._sleeping_until = -math.inf

    def __repr__(self) -> str:
        state = "closed" if self.closed else "not started" if self._thread is None else "running"
        return f"<IoLoop {state}, {list(self.by_address.values())}>"

    @property
    def in_own_thread(self) -> bool:
        """True in the loop's own thread, which must not wait for an answer."""
        return self._polling if self.polled else self._thread is self._runtime.current_thread()

    def check(self) -> None:
        """Raise RocketMQError after `close`, and in a process that did not create this transport."""
        if _forks != self._forks:
            text = f"this transport was made in process {self._pid} and can't be used in process {os.getpid()}"
            raise RocketMQError(f"{text}: make one after the fork")
        if self.closed:
            why = "is closed" if self._cause is None else f"failed ({self._cause!r})"
            raise RocketMQError(f"this transport {why}: make a new one") from self._cause

    def submit(self, address: str, request: Request) -> None:
        """Send a request over the connection to `address`, and open the connection if necessary. From any thread."""
        self.check()
        connection, fresh = self.by_address.get(address), False
        if connection is None and len(self.by_address) >= _MOST_CONNECTIONS:
            text = f"connecting to {address}: {_MOST_CONNECTIONS} connections are open already, which is the limit"
            hint = "Nothing was sent. Check that nameServer has the right addresses: no cluster has so many brokers"
            self.refuse(request, RemotingConnectException(f"{text}. {hint}"))
            return
        try:
            while connection is None or not connection.submit(request):
                connection, fresh = self._connection(address)
        finally:
            # After the request is queued, so that a connect that fails at once fails it too. Also if the request could
            # not be encoded, because other threads may have queued requests meanwhile.
            if fresh and connection is not None:
                self._attend(connection)
        if connection.due < self._sleeping_until:
            self._wake()

    def refuse(self, request: Request, error: RocketMQError) -> None:
        """Fail a request that was not submitted, on the loop's thread like all others. From any thread."""
        # Before the lock, too: in a forked child the thread that holds it may not exist.
        self.check()
        with self._lock:
            self.check()
            self._start()
            self._refused.append((request, Answer(None, error, 0.0)))
        self._wake()

    def close(self) -> None:
        """Fail everything in flight, close every socket, end the thread. Idempotent."""
        if _forks != self._forks:
            # Without the lock: the thread that holds it may exist in the parent only. Closing descriptors does not
            # close the parent's connections.
            self.closed = True
            for connection in [*self._adopted, *self.by_address.values()]:
                if connection.sock is not None:
                    connection.sock.close()
            self.by_address.clear()
            self._release()
            return
        with self._lock:
            self.closed = True
            thread = self._thread
        if self.polled:
            self._shut_down(None)
        if thread is not None and not self.in_own_thread:
            self._wake()
            thread.join(_JOIN_TIMEOUT)

    def open(self) -> None:
        """Start the thread."""
        with self._lock:
            self.check()
            self._start()

    def poll(self, timeout: float) -> None:
        """Move bytes and call callbacks in the calling thread; wait at most `timeout` seconds for the first event."""
        self.check()
        if self._pausing is None:
            raise RocketMQError("this transport has its own thread: make it with polled=True to poll it")
        with self._lock:
            self._start()
        self._polling = True
        try:
            with self._pausing.running():
                # First write the requests that were submitted since the last poll: they woke no thread.
                self._look_at_all()
                self._turn(timeout)
        except BaseException as exc:
            self._shut_down(exc)
            raise
        finally:
            self._polling = False

    def _connection(self, address: str) -> tuple[Connection, bool]:
        with self._lock:
            self.check()
            connection = self.by_address.get(address)
            if connection is not None and connection.state in (State.CONNECTING, State.OPEN):
                return connection, False
            self._start()
            connection = Connection(
                address, self.clock, self._connect_timeout, self._attend, self._on_request, self._secure, self._runtime
            )
            self.by_address[address] = connection
            return connection, True

    def _start(self) -> None:
        if self._selector is not None:
            return
        try:
            self._selector = self._runtime.selector()
            self._waker, self._wakee = self._runtime.socketpair()
            self._waker.setblocking(False)
            self._wakee.setblocking(False)
            self._selector.register(self._wakee, selectors.EVENT_READ)
            self._scratch = memoryview(bytearray(_RECEIVE_BUFFER))
            if self.polled:
                self._poller = self._runtime.current_thread()
            else:
                self._thread = self._runtime.start(self._run, "rocketmq-spark-transport")
        except (OSError, RuntimeError) as exc:
            self._release()
            # The next request then starts the thread again, instead of waiting forever.
            self._selector = None
            raise thread_failed(exc) from exc

    def _attend(self, connection: Connection) -> None:
        self._attention.append(connection)
        self._wake()

    def _wake(self) -> None:
        # One byte until the thread has read it. A polling thread is awake while it submits; a lookup's thread wakes it.
        if self._woken or self._waker is None or (self.polled and self._runtime.current_thread() is self._poller):
            return
        self._woken = True
        # The buffer is full, and the thread wakes anyway; or the socket is closed, because the thread has ended.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            while not self.closed:
                self._turn()
        except BaseException as exc:
            cause = exc
            logger.critical("the transport's thread failed; all requests in flight fail", exc_info=True)
        finally:
            self._shut_down(cause)

    def _turn(self, timeout: float = math.inf) -> None:
        assert self._selector is not None
        assert self._wakee is not None
        self._sleeping_until = math.inf
        due = min((connection.due for connection in self._adopted), default=math.inf)
        self._sleeping_until = due
        wait = min(timeout, max(0.0, due - self.clock()))
        ready = self._selector.select(None if wait == math.inf else wait)
        # An answer that arrives later, while this thread is delayed, is read in the next turn: it must still count.
        now = self.clock()
        self._sleeping_until = -math.inf
        for key, mask in ready:
            if key.data is not None:
                self._serve(key.data, mask)
                continue
            with contextlib.suppress(BlockingIOError):
                self._wakee.recv(64)
            # Cleared last. Otherwise the read could take the byte of a newer wake and leave the flag set, and no thread
            # would wake this one again. Work that was added while the flag was set is done after this line.
            self._woken = False
        self._look_at_all()
        self._finish_refused()
        for connection in [adopted for adopted in self._adopted if adopted.due <= now]:
            self._guarded(connection, functools.partial(connection.sweep, now))

    def _look_at_all(self) -> None:
        while self._attention:
            connection = self._attention.popleft()
            if connection in self._adopted:
                self._guarded(connection, functools.partial(connection.on_attention, self.clock()))
            elif connection.state is State.CONNECTING:
                self._adopted[connection] = None
                self._guarded(connection, functools.partial(connection.start, self.clock()))

    def _finish_refused(self) -> None:
        # Only those queued now: callbacks that retry at once must not keep this thread here.
        for _ in range(len(self._refused)):
            request, answer = self._refused.popleft()
            request.finish(answer)

    def _serve(self, connection: Connection, mask: int) -> None:
        steps: list[Callable[[], list[Completion]]] = []
        if mask & selectors.EVENT_READ:
            steps.append(lambda: connection.on_readable(self._scratch))
        if mask & selectors.EVENT_WRITE:
            steps.append(lambda: connection.on_writable(self.clock()))
        self._guarded(connection, *steps)

    def _guarded(self, connection: Connection, *steps: Callable[[], list[Completion]]) -> None:
        """Run steps for one connection; an exception closes only that connection."""
        completions: list[Completion] = []
        try:
            for step in steps:
                completions += step()
        except Exception as exc:
            logger.exception("%r: serving it failed", connection)
            completions += connection.close(self.clock(), "serving the connection failed", exc)
        self._update(connection, completions)

    def _update(self, connection: Connection, completions: list[Completion]) -> None:
        """Update the selector and the tables for a connection, then report the requests that ended on it."""
        now = self.clock()
        if connection.drained:
            completions += connection.close(now, "drained")
        if connection.unfinished > _LONG_FRAME:
            unfinished = sum(adopted.unfinished for adopted in self._adopted)
            if unfinished > _MOST_UNFINISHED:
                limit = f"{_MOST_UNFINISHED} are allowed"
                reason = f"closed because unfinished frames of all servers hold {unfinished} bytes, {limit}"
                completions += connection.close(now, reason, MemoryError("too much is unfinished"))
        if connection.state is State.DRAINING or connection.state is State.CLOSED:
            with self._lock:
                if self.by_address.get(connection.address) is connection:
                    del self.by_address[connection.address]
        try:
            self._watch(connection)
        finally:
            # Even if the selector fails: these requests have left the tables, so nothing else would report them.
            for request, answer in completions:
                self.on_end(connection.address, request, answer)

    def _watch(self, connection: Connection) -> None:
        assert self._selector is not None
        closed = connection.state is State.CLOSED
        mask = selectors.EVENT_WRITE * connection.wants_write | selectors.EVENT_READ * connection.wants_read
        watch = None if connection.sock is None or closed else (connection.sock, mask)
        watched = self._adopted.get(connection)
        if watch != watched:
            if watched is not None:
                self._selector.unregister(watched[0])
            if watch is not None:
                self._selector.register(*watch, connection)
            self._adopted[connection] = watch
        connection.close_abandoned()
        if closed:
            self._adopted.pop(connection, None)
            if connection.sock is not None:
                connection.sock.close()
                connection.sock = None

    def _shut_down(self, cause: BaseException | None) -> None:
        with self._lock:
            self._cause = cause
            self.closed = True
            connections = dict.fromkeys([*self._adopted, *self.by_address.values()])
            self.by_address.clear()
        for connection in connections:
            reason = "the transport was closed" if cause is None else f"the transport's thread failed ({cause!r})"
            try:
                self._update(connection, connection.close(self.clock(), reason, cause))
            except Exception:
                # The requests of the other connections must fail, too.
                logger.exception("%r: closing it failed", connection)
        self._finish_refused()
        self._release()

    def _release(self) -> None:
        for resource in (self._selector, self._waker, self._wakee):
            if resource is not None:
                resource.close()
