"""Waits between the attempts of a request until a deadline, and the length of these waits."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with jitter, of ``retryBackoffMs`` and ``retryBackoffMaxMs``."""

    base_ms: int
    cap_ms: int
    rng: random.Random

    def delay(self, waits: int) -> float:
        """Return the length of the `waits`-th wait (from 1), seconds: between half of the step and all of it."""
        step = min(self.cap_ms, self.base_ms * 2 ** min(max(waits, 1) - 1, 30))
        return float(step * (0.5 + self.rng.random() / 2) / 1000)


@dataclass(slots=True)
class Retries:
    """The waits between attempts, until the time `deadline` of the clock.

    An iteration yields once for each attempt, and waits before all but the first. The last one begins at the deadline.
    """

    deadline: float
    # The length of the n-th wait (from 1) since the last progress, seconds.
    delay: Callable[[int], float]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _waits: int = field(default=0, init=False)

    def wait(self) -> bool:
        """Wait for the next attempt, until the deadline at most; return False at once if it has passed."""
        left = self.deadline - self.clock()
        if left <= 0:
            return False
        self._waits += 1
        self.sleep(min(self.delay(self._waits), left))
        return True

    def progressed(self) -> None:
        """Begin with the shortest wait again. The deadline stays."""
        self._waits = 0

    def __iter__(self) -> Iterator[None]:
        yield
        while self.wait():
            yield
