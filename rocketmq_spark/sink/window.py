"""How much may be in flight to one broker, and how fast a task may send.

The protocol has no credit: a broker reads as fast as it can, and drops requests that waited 200 ms in its send queue.
So trouble (flow control, a timeout, a lost connection) halves the window, once for all requests that were in flight
together, and the broker rests before the next request. The window grows by one per window of answers, and only while it
is the limit and answers are quick. It never falls below one request: with nothing in flight, a request always fits
after the rest. Each `now` is in seconds.
"""

from __future__ import annotations

from typing import Final

# A single message costs an eighth of a batch: a broker serves both with the same few threads.
BATCH_COST: Final = 1.0
SINGLE_COST: Final = 1.0 / 8

_START: Final = 2.0
_FLOOR: Final = SINGLE_COST

# A slower answer than a broker lets a request wait in its queue shows that requests queue up somewhere: more in flight
# would only lengthen the queue. On a slow link the limit is twice the fastest answer (as in TCP Vegas).
_CALM_MS: Final = 200.0

# Unused rate that a task may catch up on, seconds.
_KEPT_S: Final = 1.0


class Window:
    """The window of one broker, in units of a batch; `limit_max` is ``maxInFlight``."""

    __slots__ = ("_fastest_ms", "_halved_at", "_limit", "_limit_max", "_rest_until", "in_flight", "troubles")

    def __init__(self, limit_max: int) -> None:
        self._limit_max = float(limit_max)
        self._limit = min(_START, self._limit_max)
        self._rest_until = float("-inf")
        self._halved_at = float("-inf")
        self._fastest_ms = float("inf")
        self.in_flight = 0.0
        self.troubles = 0

    @property
    def limit(self) -> float:
        """How much may be in flight now, in batches."""
        return self._limit

    @property
    def rest_until(self) -> float:
        """The time before which no request may start."""
        return self._rest_until

    def admits(self, cost: float, now: float) -> bool:
        """Return whether a request of that cost may start now."""
        if now < self._rest_until:
            return False
        return self.in_flight == 0 or self.in_flight + cost <= self._limit

    def start(self, cost: float) -> None:
        """Count a request that starts."""
        self.in_flight += cost

    def success(self, cost: float, latency_ms: float) -> None:
        """Count an answer."""
        limiting = self.in_flight + 1.0 > self._limit
        self._end(cost)
        self.troubles = 0
        self._fastest_ms = min(self._fastest_ms, latency_ms)
        if limiting and latency_ms < max(_CALM_MS, 2 * self._fastest_ms):
            self._limit = min(self._limit_max, self._limit + cost / max(self._limit, 1.0))

    def trouble(self, cost: float, started_at: float, now: float) -> bool:
        """Count a request that ended in trouble; return whether the trouble is new, so that the caller calls `rest`.

        Requests that started before the window was last halved belong to the same trouble, and change nothing.
        """
        self._end(cost)
        if started_at < self._halved_at:
            return False
        self._halved_at = now
        self._limit = max(_FLOOR, self._limit / 2)
        self.troubles += 1
        return True

    def rest(self, until: float) -> None:
        """Start no request before `until`."""
        self._rest_until = max(self._rest_until, until)

    def release(self, cost: float) -> None:
        """Count a request that ended with an error that does not depend on the broker's load."""
        self._end(cost)

    def _end(self, cost: float) -> None:
        # Costs are eighths, exact in binary, so that no rounding error stays in flight.
        self.in_flight -= cost

    def __repr__(self) -> str:
        return f"<Window {self.in_flight:g}/{self._limit:.2f} of {self._limit_max:g}, troubles={self.troubles}>"


class RateLimit:
    """One task's share of the rate, in messages per second, from the task's beginning (`now`) on."""

    def __init__(self, per_second: float, now: float) -> None:
        self._per_second = per_second
        self._taken_until = now

    def reserve(self, messages: int, now: float) -> float:
        """Return when this many messages may be sent; never before messages that were reserved earlier."""
        self._taken_until = max(self._taken_until, now - _KEPT_S) + messages / self._per_second
        return self._taken_until

    def __repr__(self) -> str:
        return f"<RateLimit {self._per_second:g}/s>"


def largest_batch(per_second: float) -> int:
    """Return the most messages of a batch that holds up others for about a second at most."""
    return max(1, int(per_second))
