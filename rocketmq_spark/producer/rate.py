"""When the next messages may go, so that a task stays within its share of ``maxRatePerSecond``.

Rule 1: no clock here; `now` (seconds) comes in.
Rule 2: messages wait before they go and not after, so that tasks with few rows, one after the other, keep the rate too.
Rule 3: who asks first goes first; time that nobody used is good for one second's messages at most.

A token bucket, kept as the moment at which it will be empty.
"""

from __future__ import annotations

from typing import Final

_KEPT_S: Final = 1.0


class RateLimit:
    """One task's share of the rate.

    Parameters
    ----------
    per_second : float
        Messages.
    now : float
        When the task begins, seconds.
    """

    def __init__(self, per_second: float, now: float) -> None:
        self._per_second = per_second
        self._taken_until = now

    def reserve(self, messages: int, now: float) -> float:
        """Return when so many messages may go, seconds; never before what was reserved earlier."""
        self._taken_until = max(self._taken_until, now - _KEPT_S) + messages / self._per_second
        return self._taken_until

    def __repr__(self) -> str:
        return f"<RateLimit {self._per_second:g}/s>"


def largest_batch(per_second: float) -> int:
    """Return how many messages a batch may have that holds up others for about a second at most."""
    return max(1, int(per_second))
