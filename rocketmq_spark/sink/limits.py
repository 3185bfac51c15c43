"""How much a task may send: a `Window` for each broker, a `Pace` while brokers are overloaded, and a `RateLimit`.

A broker rejects a request that has waited 200 ms in its queue (`SYSTEM_BUSY`). Windows keep a few tasks below that. But
a window admits at least one request, and a thousand tasks with one request each are too many. So a task whose requests
were rejected also has a pace. Nothing here reads a clock: `now` is an argument, in seconds.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Final

from rocketmq_spark.options.sink import SinkOptions

# A single message costs an eighth of a batch: a broker serves both with the same few threads.
BATCH_COST: Final = 1.0
SINGLE_COST: Final = 1.0 / 8

# The first limit of a window.
_START: Final = 2.0
# A slower answer shows that requests queue up, and more in flight would lengthen that queue. On a slow link the limit
# is twice the fastest answer (as in TCP Vegas).
_CALM_MS: Final = 200.0

# A task sends slower, the longer its requests wait. The longest wait is this part of the mean wait of rejections, and
# at most this time: brokers usually reject a request after 200 ms.
_LONGEST_PART: Final = 0.7
_LONGEST_WAIT_MS: Final = 140.0
# The pace if requests wait for half of that time, batches per second.
_MIDDLE: Final = 10.0
# The part of the newest answer in the mean wait is this one, or less if answers come faster than 20 a second, or more
# for the first answers.
_NEWEST: Final = 1 / 40
_MEMORY_S: Final = 2.0
# How much the last wait counts beside the mean. Without it, the tasks would become fast and slow together.
_LAST: Final = 0.5
# The mean wait begins with this part of the first rejection's wait.
_FIRST_PART: Final = 0.7
# The mean waits of the slowest and the fastest pace, as parts of the longest wait.
_SLOWEST: Final = 0.97
_FASTEST: Final = 0.01
# A pace needs two rejections by brokers that let requests wait: the mean wait of rejections, where the last one counts
# half, is at least this. It begins at 0.
_PATIENT_MS: Final = 90.0
# After this time without a rejection, a task sends faster by the square of its multiples: what seems to be a wait may
# be a slow broker. The pace ends after `_QUIET_MOST` of them.
_QUIET_S: Final = 120.0
# The same for a slow link: no wait since the last rejection was shorter than this part of the mean.
_QUIET_LINK_S: Final = 30.0
_STEADY: Final = 0.7
_QUIET_MOST: Final = 4.0
# The least that a request counts, in batches. A window counts in `SINGLE_COST`.
_LEAST_COST: Final = 1 / 512
# Intervals between requests vary by this part in both directions, so that tasks do not send in step.
_JITTER: Final = 0.3
# A task avoids a broker with a probability of this part of how much longer than the mean its last request waited there.
# Without it, some brokers have long queues and others short ones. A larger part would make queues long in turn.
_AVOIDED: Final = 0.3
# A fast answer shows how long the link takes. A longer time would rather show that brokers are overloaded since the
# task started. Tasks that measure different times have different rates.
_LONGEST_LINK_MS: Final = 5.0

# Unused rate that a task may catch up on, seconds.
_KEPT_S: Final = 1.0


@dataclass(slots=True)
class Window:
    """How much may be in flight to one broker (`limit`), in batches; `limit_max` is ``maxInFlight``."""

    limit_max: int
    limit: float = field(init=False)
    in_flight: float = 0.0
    # No request may start before this time.
    rest_until: float = float("-inf")
    troubles: int = 0
    _halved_at: float = float("-inf")
    _fastest_ms: float = float("inf")

    def __post_init__(self) -> None:
        self.limit = min(_START, self.limit_max)

    def admits(self, cost: float, now: float) -> bool:
        """Return whether a request of that cost may start now."""
        return now >= self.rest_until and (self.in_flight == 0 or self.in_flight + cost <= self.limit)

    def start(self, cost: float) -> None:
        """Count a request that starts."""
        self.in_flight += cost

    def success(self, cost: float, latency_ms: float) -> None:
        """Count an answer."""
        limiting = self.in_flight + 1.0 > self.limit
        self.release(cost)
        self.troubles = 0
        self._fastest_ms = min(self._fastest_ms, latency_ms)
        if limiting and latency_ms < max(_CALM_MS, 2 * self._fastest_ms):
            self.limit = min(self.limit_max, self.limit + cost / max(self.limit, 1.0))

    def trouble(self, cost: float, started_at: float, now: float) -> bool:
        """Count a request that ended in trouble; return whether the trouble is new, so that the caller calls `rest`."""
        self.release(cost)
        # Requests that started before the window was last halved belong to the same trouble.
        if started_at < self._halved_at:
            return False
        self._halved_at = now
        self.limit = max(SINGLE_COST, self.limit / 2)
        self.troubles += 1
        return True

    def rest(self, until: float) -> None:
        """Start no request before `until`."""
        self.rest_until = max(self.rest_until, until)

    def release(self, cost: float) -> None:
        """Count a request that ended with an error that does not depend on the broker's load."""
        # Costs are eighths, exact in binary, so that no rounding error stays in flight.
        self.in_flight -= cost


@dataclass(slots=True)
class Pace:
    """How fast a task may send while brokers are overloaded: docs/internals/sink.md#pace.

    It is on from rejections after a long wait until requests wait no more, or none was rejected for a long time.
    """

    batch_bytes: int
    rng: random.Random
    # No request may start before this time.
    next_at: float = float("-inf")
    # The waits of requests, as parts of the longest one; a mean of None: the pace is off.
    _mean: float | None = None
    _last: float = 0.0
    # The last wait at each broker, and the shortest one since the last rejection.
    _waits: dict[str, float] = field(default_factory=dict)
    _least: float = math.inf
    _answers: int = 0
    _began_at: float = 0.0
    _answered_at: float = 0.0
    _rejected_at: float = 0.0
    _rejections: int = 0
    # The mean wait of rejections.
    _rejected_ms: float = 0.0
    _longest_ms: float = _LONGEST_WAIT_MS
    _link_ms: float = _LONGEST_LINK_MS

    @property
    def is_on(self) -> bool:
        """True while requests are spaced."""
        return self._mean is not None

    def parts(self, nbytes: int) -> int:
        """Return how many parts a batch of that size should have, so that none costs more than `SINGLE_COST`."""
        return 1 if self._mean is None else math.ceil(self._cost(nbytes) / SINGLE_COST)

    def avoids(self, broker_name: str) -> bool:
        """Return whether the next request should go to another broker than this one."""
        if self._mean is None:
            return False
        return self.rng.random() < _AVOIDED * (self._waits.get(broker_name, 0.0) - self._mean)

    def start(self, nbytes: int, now: float) -> None:
        """Count a request that starts."""
        if self._mean is None:
            return
        interval = self._interval(self._mean, self._cost(nbytes)) * (1 + _LAST * (self._last - self._mean))
        interval /= max(1.0, self._quiet(self._mean, now)) ** 2
        # A task that had nothing to send may catch up on one request.
        self.next_at = max(self.next_at, now - interval) + interval * self.rng.uniform(1 - _JITTER, 1 + _JITTER)

    def success(self, broker_name: str, latency_ms: float, started_at: float, now: float) -> None:
        """Count an answer."""
        self._link_ms = min(self._link_ms, latency_ms)
        self._note(self._wait(broker_name, latency_ms), started_at, now)
        if self._mean is not None and (self._mean < _FASTEST or self._quiet(self._mean, now) > _QUIET_MOST):
            self._end()

    def rejection(self, broker_name: str, latency_ms: float, started_at: float, now: float) -> None:
        """Count a request that has waited too long, or was rejected at once."""
        self._rejected_at, self._least = now, math.inf
        self._rejections += 1
        self._rejected_ms = (self._rejected_ms + latency_ms - self._link_ms) / 2
        if self._rejections == 1 or self._rejected_ms < _PATIENT_MS:
            self._end()
            return
        # Without the 0 at the beginning of the mean.
        patience_ms = self._rejected_ms / (1 - 0.5**self._rejections)
        self._longest_ms = min(_LONGEST_WAIT_MS, _LONGEST_PART * patience_ms)
        wait = self._wait(broker_name, latency_ms)
        if self._mean is not None:
            self._note(wait, started_at, now)
        else:
            self._mean = self._last = _FIRST_PART * wait
            self._answers, self._began_at = 0, now
            # Other tasks were rejected at the same time.
            self.next_at = now + self.rng.random() * self._interval(self._mean, SINGLE_COST)

    def _end(self) -> None:
        self._mean, self.next_at = None, float("-inf")

    def _quiet(self, mean: float, now: float) -> float:
        """Return the time since the last rejection, as multiples of the time after which the task sends faster."""
        return (now - self._rejected_at) / (_QUIET_LINK_S if self._least > _STEADY * mean else _QUIET_S)

    def _wait(self, broker_name: str, latency_ms: float) -> float:
        self._waits[broker_name] = wait = min(1.0, (latency_ms - self._link_ms) / self._longest_ms)
        return wait

    def _note(self, wait: float, started_at: float, now: float) -> None:
        # Requests from before the pace waited behind too many others.
        if self._mean is None or started_at < self._began_at:
            return
        self._answers += 1
        part = max(1 / (self._answers + 2), min(_NEWEST, (now - self._answered_at) / _MEMORY_S))
        self._last, self._answered_at = max(0.0, wait), now
        self._least = min(self._least, self._last)
        self._mean += part * (self._last - self._mean)

    def _interval(self, mean: float, cost: float) -> float:
        """Return the seconds between a request of that cost and the next one."""
        mean = min(mean, _SLOWEST)
        return cost * mean / (1 - mean) / _MIDDLE

    def _cost(self, nbytes: int) -> float:
        return min(BATCH_COST, max(_LEAST_COST, nbytes / self.batch_bytes))


@dataclass(slots=True)
class RateLimit:
    """One task's share of the rate, in messages per second, from the task's start (`taken_until`) on."""

    per_second: float
    taken_until: float

    def reserve(self, messages: int, now: float) -> float:
        """Return when this many messages may be sent; never before messages that were reserved earlier."""
        self.taken_until = max(self.taken_until, now - _KEPT_S) + messages / self.per_second
        return self.taken_until


def task_rate(options: SinkOptions) -> float | None:
    """Return one task's share of ``maxRatePerSecond``; None: no limit."""
    rate = options.max_rate_per_second
    return None if rate is None else rate / (options.max_rate_tasks or 1)


def largest_batch(per_second: float) -> int:
    """Return the most messages of a batch that holds up others for about a second at most."""
    return max(1, int(per_second))
