"""One deadline for all queries that plan a read or a micro-batch.

Follows no Java class: Java clients have a timeout for each request only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from rocketmq_spark.errors import ReadError, RocketMQError
from rocketmq_spark.parallel import in_parallel

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class PlanningDeadline:
    """The time for planning: ``readTimeoutMs`` from `restart` on. Before that there is no deadline, as in tasks.

    Attributes
    ----------
    at : float
        Seconds of the clock.
    """

    def __init__(self, timeout_ms: int, clock: Callable[[], float]) -> None:
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._started = self.at = math.inf

    def restart(self) -> None:
        """Begin to plan."""
        self._started = self._clock()
        self.at = self._started + self._timeout_ms / 1000

    def extend(self, seconds: float) -> None:
        """Move the deadline to ``readTimeoutMs`` and some seconds later than `restart` has set it. Idempotent.

        A broker's master does not answer, and the offsets of its slave count only after ``readTimeoutMs``.
        """
        self.at = max(self.at, self._started + 2 * self._timeout_ms / 1000 + seconds)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self._clock() >= self.at

    def limit(self, seconds: float) -> float:
        """Return a request's timeout, shortened to the time that is left."""
        return min(seconds, self.at - self._clock())

    def in_parallel(
        self, about: Iterable[K], ask: Callable[[K], T], what: str, fallback: Callable[[K], T | None] = lambda _: None
    ) -> dict[K, T]:
        """Return the answer about each of `about`, as `parallel.in_parallel`.

        Parameters
        ----------
        about : iterable
        ask : callable
        what : str
            The plural name of the answers, for the error.
        fallback : callable, optional
            Gives older answers, which are enough after the deadline.

        Raises
        ------
        ReadError
            The deadline has passed. The text says how many answers there were.
        """
        keys = list(about)
        answered: list[K] = []

        def ask_in_time(key: K) -> T:
            error: RocketMQError | None = None
            if not self.passed:
                try:
                    answer = ask(key)
                except RocketMQError as exc:
                    if not self.passed or not (exc.retriable or isinstance(exc, ReadError)):
                        raise
                    error = exc
                else:
                    answered.append(key)
                    return answer
            older = fallback(key)
            if older is not None:
                return older
            why = "raise readTimeoutMs, or read fewer topics" if error is None else f"the last try: {error}"
            raise ReadError(
                f"planning the read: readTimeoutMs={self._timeout_ms} has passed with {len(answered)} of {len(keys)} "
                f"{what} known; {why}"
            ) from error

        return in_parallel(keys, ask_in_time)
