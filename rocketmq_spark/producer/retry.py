"""Whether to send again, and how long to wait before: two classes, kept apart.

Rule 1: `RetryPolicy` never looks at a clock, `Backoff` never looks at an error.
Rule 2: randomness is handed in.

The counts follow ``DefaultMQProducerImpl.sendDefaultImpl`` (spec/producer.md section 6); what goes on above them until
``deliveryTimeoutMs`` is the connector's own (design.md section 2).
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.message import SendOutcome, SendStatus
from rocketmq_spark.options import SinkOptions


class Verdict(enum.Enum):
    """What to do with a batch after one attempt."""

    STORED = "stored"
    SAME_QUEUE = "same queue again, after a wait"
    OTHER_BROKER = "another broker, at once"
    LATER = "another broker, after a wait"
    GIVE_UP = "fail"


@dataclass(slots=True)
class Attempts:
    """The attempts that one batch has behind it.

    Attributes
    ----------
    in_round : int
        Failed attempts since the last wait.
    waits : int
        Waits so far; the exponent of the backoff.
    not_store_ok : int
        Answers that said "stored, but not safe".
    """

    in_round: int = 0
    waits: int = 0
    not_store_ok: int = 0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Whether a batch is sent again, and where to.

    Parameters
    ----------
    retry_times_when_send_failed : int
        The most resends of a batch that is stored but not safe.
    retry_another_broker_when_not_store_ok : bool
        Resend a batch that is stored but not safe to another broker, not to the same queue.
    require_store_ok : bool
        Count only ``SEND_OK`` as stored.
    retry_times_at_once : int
        Attempts that follow a failed one without a wait: ``retryTimesWhenSendAsyncFailed``, or
        ``retryTimesWhenSendFailed`` where a send waits for its answer.
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
        """Return what to do after `outcome`, and count it in `attempts`.

        Parameters
        ----------
        outcome : SendOutcome
        attempts : Attempts
        bound : bool
            The batch's rows belong to one queue (by key or by column) and may go to no other.
        """
        if outcome.status is not None:
            return self._after_answer(outcome.status, attempts, bound=bound)
        assert outcome.error is not None
        return self._after_error(outcome.error, attempts, bound=bound)

    def follows_at_once(self, attempts: Attempts, *, bound: bool) -> bool:
        """Tell whether another attempt would follow at once, at another broker, if the next one failed."""
        return not bound and attempts.in_round < self.retry_times_at_once

    def _after_answer(self, status: SendStatus, attempts: Attempts, *, bound: bool) -> Verdict:
        if status is SendStatus.SEND_OK:
            return Verdict.STORED
        elsewhere = self.retry_another_broker_when_not_store_ok and not bound
        if not self.require_store_ok and not elsewhere:
            return Verdict.STORED
        attempts.not_store_ok += 1
        # Endless resends would only multiply rows that are stored already (design.md section 2).
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
    """How long to wait before the next try: exponential, with jitter.

    Parameters
    ----------
    base_ms, cap_ms : int
        ``retryBackoffMs`` and ``retryBackoffMaxMs``, milliseconds.
    """

    base_ms: int
    cap_ms: int

    def delay(self, waits: int, rng: random.Random) -> float:
        """Return the seconds to wait before the `waits`-th wait (from 1): between half of the step and all of it."""
        step = min(self.cap_ms, self.base_ms * 2 ** min(max(waits, 1) - 1, 30))
        return float(step * (0.5 + rng.random() / 2) / 1000)
