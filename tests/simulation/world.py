"""Virtual time, and threads that run one after the other in an order drawn from a seed.

A thread is a greenlet. It runs until it waits, and may be interrupted at operations such as taking a lock. Then the
world resumes another one that can run, or moves the time to the next timer. So a seed gives the same run every time,
and an hour of waiting takes no time.
"""

from __future__ import annotations

import heapq
import itertools
import math
import queue as queues
import random
import selectors
import socket as sockets
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, cast

import greenlet

from rocketmq_spark.transport.runtime import Runtime

# The time of the epoch at which every world begins, seconds.
EPOCH = 1_750_000_000.0

# No wait is shorter, seconds: otherwise the time would not move, because of the precision of a float.
_SHORTEST = 1e-6


class SimulationError(Exception):
    """The simulated program waits for something that never happens, or does not end."""


class Thread:
    """A simulated thread."""

    def __init__(self, world: World, run: Callable[[], None], name: str) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self._world = world
        # The process of the thread that starts it.
        self.process: str = world.current.process if world.current else ""
        self._joining: list[_Waiter] = []
        self._greenlet = greenlet.greenlet(self._run, world.hub)
        self._target = run

    def __repr__(self) -> str:
        return f"<Thread {self.name}>"

    def switch(self) -> None:
        """Run until the thread waits or ends; called by the world."""
        self._greenlet.switch()

    def is_alive(self) -> bool:
        """Return whether the thread has not ended."""
        return not self._greenlet.dead

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread."""
        if self.is_alive():
            self._world.wait(self._joining, timeout)

    def kill(self) -> None:
        """End the thread where it waits."""
        if self._greenlet and not self._greenlet.dead:
            self._greenlet.throw(greenlet.GreenletExit)

    def _run(self) -> None:
        try:
            self._target()
        except greenlet.GreenletExit:
            return
        except BaseException as exc:
            self.failure = exc
        for waiter in self._joining:
            self._world.wake(waiter)


class _Waiter:
    __slots__ = ("done", "thread", "woken")

    def __init__(self, thread: Thread) -> None:
        self.thread = thread
        self.done = False
        self.woken = False


class World:
    """One simulation. `rng` draws everything; `now` is in seconds."""

    def __init__(self, seed: int, *, most_steps: int = 2_000_000, longest: float = 3600.0) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.hub = greenlet.getcurrent()
        self.current: Thread | None = None
        self.threads: list[Thread] = []
        self.trace: list[tuple[float, str]] = []
        self.steps = 0
        # When frozen processes go on, by name.
        self._frozen: dict[str, float] = {}
        self._most_steps = most_steps
        self._longest = longest
        self._ready: list[Thread] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        """Return the seconds since the epoch."""
        return EPOCH + self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function after some seconds."""
        heapq.heappush(self._timers, (self.now + max(0.0, seconds), next(self._numbers), call))

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append((self.now, text))

    def freeze(self, process: str, seconds: float) -> None:
        """Let no thread of a process run for some seconds, which may be infinite."""
        self._frozen[process] = max(self._frozen.get(process, 0.0), self.now + seconds)

    def is_frozen(self, process: str) -> bool:
        """Return whether no thread of a process runs now."""
        return self._frozen.get(process, 0.0) > self.now

    def is_dead(self, process: str) -> bool:
        """Return whether a process is frozen for ever."""
        return self._frozen.get(process, 0.0) == math.inf

    def start(self, run: Callable[[], None], name: str, process: str = "") -> Thread:
        """Start a thread, by default in the process of the running one."""
        thread = Thread(self, run, name)
        thread.process = process or thread.process
        self.threads.append(thread)
        self._ready.append(thread)
        return thread

    def run(self, main: Thread) -> None:
        """Run until a thread has ended. SimulationError: it waits for ever, or runs for too long."""
        while main.is_alive():
            self.steps += 1
            if self._ready:
                index = self.rng.randrange(len(self._ready)) if len(self._ready) > 1 else 0
                self._run(self._ready.pop(index))
            elif self._timers:
                due, _, call = heapq.heappop(self._timers)
                self.now = max(self.now, due)
                call()
            else:
                waiting = ", ".join(thread.name for thread in self.threads if thread.is_alive())
                raise SimulationError(f"nothing can happen any more, and these threads wait: {waiting}")
            if self.steps > self._most_steps or self.now > self._longest:
                raise SimulationError(f"no end after {self.steps} steps and {self.now:.0f} s")
        if main.failure is not None:
            raise main.failure

    def close(self) -> None:
        """End all threads."""
        for thread in self.threads:
            thread.kill()

    def wait(self, waiters: list[_Waiter], timeout: float | None = None) -> bool:
        """Wait in the running thread until another one wakes it; return False if the time is over first."""
        assert self.current is not None, "only a simulated thread can wait"
        waiter = _Waiter(self.current)
        waiters.append(waiter)
        if timeout is not None:
            self.call_later(max(timeout, _SHORTEST), lambda: self._expire(waiter, waiters))
        self.hub.switch()
        return waiter.woken

    def wake(self, waiter: _Waiter) -> None:
        """Let a waiting thread run."""
        if not waiter.done:
            waiter.done = waiter.woken = True
            self._ready.append(waiter.thread)

    def wake_all(self, waiters: list[_Waiter]) -> None:
        """Let all waiting threads run."""
        woken, waiters[:] = list(waiters), []
        for waiter in woken:
            self.wake(waiter)

    def let_others_run(self) -> None:
        """Now and then, let other threads run first, as the scheduler of an operating system does."""
        if self.current is not None and self._ready and self.rng.random() < 0.1:
            self._ready.append(self.current)
            self.hub.switch()

    def _expire(self, waiter: _Waiter, waiters: list[_Waiter]) -> None:
        if not waiter.done:
            waiter.done = True
            waiters.remove(waiter)
            self._ready.append(waiter.thread)

    def _run(self, thread: Thread) -> None:
        until = self._frozen.get(thread.process, 0.0)
        if until <= self.now:
            self._switch_to(thread)
        elif until < math.inf:
            self.call_later(until - self.now + _SHORTEST, lambda: self._ready.append(thread))

    def _switch_to(self, thread: Thread) -> None:
        self.current = thread
        thread.switch()
        self.current = None


class Lock:
    """A ``threading.Lock``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held = False
        self._waiters: list[_Waiter] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock."""
        self._world.let_others_run()
        while self._held:
            if not blocking:
                return False
            if not self._world.wait(self._waiters, None if timeout < 0 else timeout):
                return False
        self._held = True
        return True

    def release(self) -> None:
        """Give the lock back."""
        assert self._held
        self._held = False
        if self._waiters:
            self._world.wake(self._waiters.pop(0))

    def locked(self) -> bool:
        """Return whether a thread holds the lock."""
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """A ``threading.Condition``."""

    def __init__(self, world: World, lock: Lock) -> None:
        self._world = world
        self._lock = lock
        self._waiters: list[_Waiter] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock, wait for `notify_all`, and take the lock again."""
        self._lock.release()
        woken = self._world.wait(self._waiters, timeout)
        self._lock.acquire()
        return woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until a predicate holds."""
        end = None if timeout is None else self._world.now + timeout
        while not predicate():
            left = None if end is None else end - self._world.now
            if left is not None and left <= 0:
                return predicate()
            self.wait(left)
        return True

    def notify_all(self) -> None:
        """Wake all threads that wait."""
        self._world.wake_all(self._waiters)


class Event:
    """A ``threading.Event``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._happened = False
        self._waiters: list[_Waiter] = []

    def is_set(self) -> bool:
        """Return whether the event has happened."""
        return self._happened

    def set(self) -> None:
        """Wake all threads that wait."""
        self._happened = True
        self._world.wake_all(self._waiters)
        self._world.let_others_run()

    def clear(self) -> None:
        """Let threads wait again."""
        self._happened = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the event."""
        if not self._happened and (timeout is None or timeout > 0):
            self._world.wait(self._waiters, timeout)
        return self._happened


class Queue:
    """A ``queue.SimpleQueue``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._items: deque[Any] = deque()
        self._waiters: list[_Waiter] = []

    def put(self, item: Any) -> None:
        """Add an item."""
        self._items.append(item)
        if self._waiters:
            self._world.wake(self._waiters.pop(0))
        self._world.let_others_run()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the first item."""
        if not self._items and block and (timeout is None or timeout > 0):
            self._world.wait(self._waiters, timeout)
        if not self._items:
            raise queues.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        """Return whether there is no item."""
        return not self._items


class SimulatedRuntime(Runtime):
    """The runtime of a client in a world; `connect` returns the sockets of its network."""

    def __init__(self, world: World, new_socket: Callable[[], Any], new_pair: Callable[[], Any]) -> None:
        self._world = world
        self._new_socket = new_socket
        self._new_pair = new_pair

    def clock(self) -> float:
        return self._world.now

    def boot_clock(self) -> float:
        return self._world.now

    def wall_clock(self) -> float:
        return self._world.time()

    def sleep(self, seconds: float) -> None:
        self._world.wait([], seconds)

    def lock(self) -> threading.Lock:
        return cast("threading.Lock", Lock(self._world))

    def condition(self, lock: threading.Lock) -> threading.Condition:
        return cast("threading.Condition", Condition(self._world, cast("Lock", lock)))

    def event(self) -> threading.Event:
        return cast("threading.Event", Event(self._world))

    def queue(self) -> queues.SimpleQueue[Any]:
        return cast("queues.SimpleQueue[Any]", Queue(self._world))

    def start(self, run: Callable[[], None], name: str) -> threading.Thread:
        return cast("threading.Thread", self._world.start(run, name))

    def pool(self, threads: int, name: str) -> Executor:
        from tests.simulation.pool import Pool

        return Pool(self._world, threads, name)

    def current_thread(self) -> threading.Thread:
        return cast("threading.Thread", self._world.current)

    def socket(self, family: int) -> sockets.socket:
        return cast("sockets.socket", self._new_socket())

    def socketpair(self) -> tuple[sockets.socket, sockets.socket]:
        return cast("tuple[sockets.socket, sockets.socket]", self._new_pair())

    def selector(self) -> selectors.BaseSelector:
        from tests.simulation.network import Selector

        return cast("selectors.BaseSelector", Selector(self._world))

    def explained(
        self, address: str, stream: Any, reason: str, cause: BaseException | None
    ) -> tuple[str, BaseException | None]:
        return reason, cause
