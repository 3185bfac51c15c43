"""Whether a batch is sent again (`RetryPolicy`), and when it may be sent (`Backoff`, `Window`, `RateLimit`).

All of it is pure: clock and randomness are arguments, and each `now` is in seconds. The counts of retries follow
``DefaultMQProducerImpl.sendDefaultImpl``; retries after a wait, until ``deliveryTimeoutMs``, are the connector's own.

The protocol has no credit: a broker reads as fast as it can, and drops requests that waited 200 ms in its send queue.
So trouble (flow control, a timeout, a lost connection) halves the broker's window, once for all requests that were in
flight together, and the broker rests before the next request. The window grows by one per window of answers, and only
while it is the limit and answers are quick. It never falls below one request: with nothing in flight, a request always
fits after the rest.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message import SendOutcome, SendStatus
from rocketmq_spark.options.sink import SinkOptions

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


class Verdict(enum.Enum):
    """What to do with a batch after one attempt."""

    STORED = "stored"
    SAME_QUEUE = "same queue again, after a wait"
    OTHER_BROKER = "another broker, at once"
    LATER = "another broker, after a wait"
    GIVE_UP = "fail"


@dataclass(slots=True)
class Attempts:
    """The attempts of one batch so far."""

    # Failed attempts since the last wait.
    in_round: int = 0
    # Waits so far, the exponent of the backoff.
    waits: int = 0
    # Answers with the meaning "stored, but not safe".
    not_store_ok: int = 0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Whether a batch is sent again, and where to; the fields are the options of the same names.

    `retry_times_at_once` is the number of attempts that follow a failed one without a wait:
    ``retryTimesWhenSendAsyncFailed``, or ``retryTimesWhenSendFailed`` where a send waits for its answer.
    """

    retry_times_when_send_failed: int
    retry_another_broker_when_not_store_ok: bool
    require_store_ok: bool
    retry_times_at_once: int

    @classmethod
    def of_options(cls, options: SinkOptions) -> RetryPolicy:
        """Return the policy of a write."""
        asynchronous = options.send_mode == "async"
        return cls(
            options.retry_times_when_send_failed,
            options.retry_another_broker_when_not_store_ok,
            options.require_store_ok,
            options.retry_times_when_send_async_failed if asynchronous else options.retry_times_when_send_failed,
        )

    def decide(self, outcome: SendOutcome, attempts: Attempts, *, bound: bool) -> Verdict:
        """Return what to do after `outcome`, and count it in `attempts`; `bound` rows may go to one queue only."""
        if outcome.status is not None:
            return self._after_answer(outcome.status, attempts, bound=bound)
        assert outcome.error is not None
        return self._after_error(outcome.error, attempts, bound=bound)

    def follows_at_once(self, attempts: Attempts, *, bound: bool) -> bool:
        """Return whether a failure of the next attempt would be retried at another broker without a wait."""
        return not bound and attempts.in_round < self.retry_times_at_once

    def _after_answer(self, status: SendStatus, attempts: Attempts, *, bound: bool) -> Verdict:
        if status is SendStatus.SEND_OK:
            return Verdict.STORED
        elsewhere = self.retry_another_broker_when_not_store_ok and not bound
        if not self.require_store_ok and not elsewhere:
            return Verdict.STORED
        attempts.not_store_ok += 1
        # Endless resends would only multiply rows that are stored already.
        if attempts.not_store_ok > self.retry_times_when_send_failed:
            return Verdict.GIVE_UP if self.require_store_ok else Verdict.STORED
        attempts.waits += 1
        return Verdict.LATER if elsewhere else Verdict.SAME_QUEUE

    def _after_error(self, error: RocketMQError, attempts: Attempts, *, bound: bool) -> Verdict:
        if not error.retriable:
            return Verdict.GIVE_UP
        if bound or error.flow_control:
            attempts.waits += 1
            return Verdict.SAME_QUEUE
        if self.follows_at_once(attempts, bound=bound):
            attempts.in_round += 1
            return Verdict.OTHER_BROKER
        attempts.in_round = 0
        attempts.waits += 1
        return Verdict.LATER


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with jitter, of ``retryBackoffMs`` and ``retryBackoffMaxMs``."""

    base_ms: int
    cap_ms: int

    def delay(self, waits: int, rng: random.Random) -> float:
        """Return the length of the `waits`-th wait (from 1), seconds: between half of the step and all of it."""
        step = min(self.cap_ms, self.base_ms * 2 ** min(max(waits, 1) - 1, 30))
        return float(step * (0.5 + rng.random() / 2) / 1000)


class Window:
    """The window of one broker, in units of a batch; `limit_max` is ``maxInFlight``."""

    __slots__ = ("_fastest_ms", "_halved_at", "_limit_max", "in_flight", "limit", "rest_until", "troubles")

    def __init__(self, limit_max: int) -> None:
        self._limit_max = float(limit_max)
        # How much may be in flight now.
        self.limit = min(_START, self._limit_max)
        # No request may start before this time.
        self.rest_until = float("-inf")
        self._halved_at = float("-inf")
        self._fastest_ms = float("inf")
        self.in_flight = 0.0
        self.troubles = 0

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
            self.limit = min(self._limit_max, self.limit + cost / max(self.limit, 1.0))

    def trouble(self, cost: float, started_at: float, now: float) -> bool:
        """Count a request that ended in trouble; return whether the trouble is new, so that the caller calls `rest`.

        Requests that started before the window was last halved belong to the same trouble, and change nothing.
        """
        self.release(cost)
        if started_at < self._halved_at:
            return False
        self._halved_at = now
        self.limit = max(_FLOOR, self.limit / 2)
        self.troubles += 1
        return True

    def rest(self, until: float) -> None:
        """Start no request before `until`."""
        self.rest_until = max(self.rest_until, until)

    def release(self, cost: float) -> None:
        """Count a request that ended with an error that does not depend on the broker's load."""
        # Costs are eighths, exact in binary, so that no rounding error stays in flight.
        self.in_flight -= cost

    def __repr__(self) -> str:
        return f"<Window {self.in_flight:g}/{self.limit:.2f} of {self._limit_max:g}, troubles={self.troubles}>"


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
