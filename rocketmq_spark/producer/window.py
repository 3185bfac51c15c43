"""How much may be in flight to one broker.

Rule 1: no clock; `now` (seconds) comes in. Randomness comes in through the backoff's delay.
Rule 2: a batch costs one, a single message an eighth: a broker serves both through the same few threads.
Rule 3: trouble (flow control, timeout, lost connection) halves the window, once for all requests that were on their
        way together, and lets the broker rest before the next request.
Rule 4: the window grows by one per window of answers, and only while it is what limits us and answers come quickly.
Rule 5: the floor is one request: with nothing in flight a request always fits, once the rest is over.

The protocol has no credit: a broker reads as fast as it can and throws out what waited 200 ms in its send queue
(spec/remoting.md section 18; design.md sections 2, 3 and 10).
"""

from __future__ import annotations

from typing import Final

BATCH_COST: Final = 1.0
SINGLE_COST: Final = 1.0 / 8

_START: Final = 2.0
_FLOOR: Final = SINGLE_COST

# An answer slower than what a broker lets a request wait in its queue shows a queue somewhere on the way: more in
# flight would only lengthen it. On a link that is slow by itself twice the fastest answer is the mark (as TCP Vegas).
_CALM_MS: Final = 200.0


class Window:
    """The window of one broker, in units of a batch.

    Parameters
    ----------
    limit_max : int
        ``maxInFlight``: batches in flight at most.
    """

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
        """How much may be in flight just now, in batches."""
        return self._limit

    @property
    def rest_until(self) -> float:
        """Until when no request may start, seconds."""
        return self._rest_until

    def admits(self, cost: float, now: float) -> bool:
        """Tell whether a request of that cost may start now."""
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
        """Count a request that ended in trouble; return whether this was the first sign of it.

        The caller then says how long to `rest`. Requests that started before the window was last halved tell of the
        same trouble and change nothing.
        """
        self._end(cost)
        if started_at < self._halved_at:
            return False
        self._halved_at = now
        self._limit = max(_FLOOR, self._limit / 2)
        self.troubles += 1
        return True

    def rest(self, until: float) -> None:
        """Start no request before `until` (seconds)."""
        self._rest_until = max(self._rest_until, until)

    def release(self, cost: float) -> None:
        """Count a request that ended in neither: an error that says nothing of the broker's load."""
        self._end(cost)

    def _end(self, cost: float) -> None:
        # Costs are eighths, exact in binary: no rounding can leave a crumb in flight.
        self.in_flight -= cost

    def __repr__(self) -> str:
        return f"<Window {self.in_flight:g}/{self._limit:.2f} of {self._limit_max:g}, troubles={self.troubles}>"
