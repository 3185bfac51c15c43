"""How much asynchronous sending may be under way: messages and bytes, with limits that may change meanwhile.

Rule 1: first come, first served: who asks for much is not overtaken for ever by those who ask for little.
Rule 2: what was acquired is released once, bytes before messages, and before the caller hears of the outcome.
Rule 3: lowering a limit below what is in use leaves that alone: nobody gets in until enough has come back.

Follows ``DefaultMQProducerImpl.BackpressureSendCallBack`` and ``SemaphoreReleaseOnlyOnce`` (spec/producer.md section
9.2).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final

from rocketmq_spark.errors import RemotingTooMuchRequestException
from rocketmq_spark.producer.budget import Budget

LEAST_MESSAGES: Final = 10
LEAST_BYTES: Final = 1024 * 1024


class FairPermits:
    """A counting semaphore that serves in order and whose limit may change.

    Parameters
    ----------
    limit : int
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_use = 0
        self._changed = threading.Condition()
        self._line: deque[object] = deque()

    @property
    def available(self) -> int:
        """How many may be acquired now; negative after the limit was lowered below what is in use."""
        return self._limit - self._in_use

    def resize(self, limit: int) -> None:
        """Set the limit; what is in use stays in use."""
        with self._changed:
            self._limit = limit
            self._changed.notify_all()

    def acquire(self, permits: int, timeout: float) -> bool:
        """Take so many, waiting at most `timeout` seconds for one's turn; False if they did not come."""
        ticket = object()
        deadline = time.monotonic() + timeout
        with self._changed:
            self._line.append(ticket)
            try:
                while not (self._line[0] is ticket and permits <= self.available):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                    self._changed.wait(left)
                self._in_use += permits
                return True
            finally:
                self._line.remove(ticket)
                self._changed.notify_all()

    def release(self, permits: int) -> None:
        """Give back."""
        with self._changed:
            self._in_use -= permits
            self._changed.notify_all()

    def __repr__(self) -> str:
        return f"<FairPermits {self._in_use}/{self._limit}>"


class BackPressure:
    """The two limits of one producer.

    Parameters
    ----------
    messages : int
        ``backPressureForAsyncSendNum``, 10 at least.
    nbytes : int
        ``backPressureForAsyncSendSize``, 1 MiB at least.
    """

    def __init__(self, messages: int, nbytes: int) -> None:
        self.messages = FairPermits(max(messages, LEAST_MESSAGES))
        self.nbytes = FairPermits(max(nbytes, LEAST_BYTES))

    def resize(self, messages: int, nbytes: int) -> None:
        """Set both limits."""
        self.messages.resize(max(messages, LEAST_MESSAGES))
        self.nbytes.resize(max(nbytes, LEAST_BYTES))

    def admit(self, nbytes: int, budget: Budget) -> Admission:
        """Wait until a message of so many bytes may go.

        Raises
        ------
        RemotingTooMuchRequestException
            The budget is over first; nothing is held then.
        """
        if not self.messages.acquire(1, budget.left):
            raise _full("messages", self.messages, budget)
        size = max(nbytes, 1)
        try:
            if not self.nbytes.acquire(size, budget.left):
                raise _full("bytes", self.nbytes, budget)
        except BaseException:
            self.messages.release(1)
            raise
        return Admission(self, size)

    def __repr__(self) -> str:
        return f"<BackPressure messages={self.messages!r} bytes={self.nbytes!r}>"


class Admission:
    """What one message holds of the limits, until it is released."""

    __slots__ = ("_held", "_limits", "_lock")

    def __init__(self, limits: BackPressure, nbytes: int) -> None:
        self._limits = limits
        self._held = nbytes
        self._lock = threading.Lock()

    def release(self) -> None:
        """Give back; a second call does nothing."""
        with self._lock:
            held, self._held = self._held, 0
        if held:
            self._limits.nbytes.release(held)
            self._limits.messages.release(1)


def _full(what: str, permits: FairPermits, budget: Budget) -> RemotingTooMuchRequestException:
    return RemotingTooMuchRequestException(
        f"sending asynchronously: the limit of {what} under way ({permits!r}) left no room within "
        f"{budget.seconds * 1000:.0f} ms; wait for outcomes, or raise it"
    )
