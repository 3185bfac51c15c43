"""The threads, locks, times and sockets of a remoting client, in one place, so that a simulator can replace them.

The remoting connections and their loop, the sender of a task, the producer, the plan of a read, the route cache and the
periodic jobs take them from here, where they wait. Their locks that are never held while the holder waits are plain
``threading.Lock``. Other code, such as gRPC, lookups of names and providers of credentials, does not use them.
"""

from __future__ import annotations

import queue as queues
import selectors
import socket as sockets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Final

from rocketmq_spark.transport.tls import TlsStream
from rocketmq_spark.transport.tls_probe import explained

# On Linux, CLOCK_MONOTONIC stands still while the system is suspended. On macOS it does not.
_BOOT_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Runtime:
    """Those of this process."""

    def clock(self) -> float:
        """Return the monotonic time in seconds."""
        return time.monotonic()

    def boot_clock(self) -> float:
        """Return the seconds since the system began, also those while it was suspended, if the system counts them."""
        return time.clock_gettime(_BOOT_CLOCK)

    def wall_clock(self) -> float:
        """Return the seconds since the epoch."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def lock(self) -> threading.Lock:
        """Return a new lock."""
        return threading.Lock()

    def condition(self, lock: threading.Lock) -> threading.Condition:
        """Return a new condition; `lock` is of this runtime."""
        return threading.Condition(lock)

    def event(self) -> threading.Event:
        """Return a new event."""
        return threading.Event()

    def queue(self) -> queues.SimpleQueue[Any]:
        """Return a new queue."""
        return queues.SimpleQueue()

    def start(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Start a daemon thread; RuntimeError if the process may have no more."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def pool(self, threads: int, name: str) -> Executor:
        """Return a new pool of threads; the caller shuts it down."""
        return ThreadPoolExecutor(threads, name)

    def current_thread(self) -> threading.Thread:
        """Return the running thread."""
        return threading.current_thread()

    def socket(self, family: int) -> sockets.socket:
        """Return a new TCP socket."""
        return sockets.socket(family, sockets.SOCK_STREAM)

    def socketpair(self) -> tuple[sockets.socket, sockets.socket]:
        """Return two connected sockets."""
        return sockets.socketpair()

    def selector(self) -> selectors.BaseSelector:
        """Return a new selector."""
        return selectors.DefaultSelector()

    def explained(
        self, address: str, stream: sockets.socket | TlsStream | None, reason: str, cause: BaseException | None
    ) -> tuple[str, BaseException | None]:
        """See `tls_probe.explained`, which may connect to the address."""
        return explained(address, stream, reason, cause)


PROCESS: Final = Runtime()
"""The runtime of every client, except in simulations."""
