"""Whether to send a batch again (`RetryPolicy`), and how long to wait before (`Backoff`).

The policy never looks at a clock, and the backoff never looks at an error. The counts follow
``DefaultMQProducerImpl.sendDefaultImpl``; retries after a wait, until ``deliveryTimeoutMs``, are the connector's own.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message import SendOutcome, SendStatus
from rocketmq_spark.options.sink import SinkOptions


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
