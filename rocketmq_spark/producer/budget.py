"""How much time a send has left, attempts and waiting included.

Rule 1: a budget is counted from the moment it is made, on a handed-in clock; it is spent when more than all of it is
        gone: with exactly nothing left an attempt is still made, as in Java.
Rule 2: who asks for time that is not there gets ``RemotingTooMuchRequestException``, and nothing was sent.

Follows the ``timeout < cost`` checks of ``DefaultMQProducerImpl.java`` (spec/producer.md sections 6, 7.8, 8.2, 9.1,
11).
"""

from __future__ import annotations

from collections.abc import Callable

from rocketmq_spark.errors import RemotingTooMuchRequestException


class Budget:
    """The time of one call.

    Parameters
    ----------
    seconds : float
        All of it.
    clock : callable
        Seconds, monotonic.
    """

    __slots__ = ("_clock", "began", "seconds")

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self._clock = clock
        self.began = clock()

    @property
    def spent(self) -> float:
        """Seconds gone."""
        return self._clock() - self.began

    @property
    def left(self) -> float:
        """Seconds left; negative once it is overdrawn."""
        return self.seconds - self.spent

    def require(self, doing: str) -> float:
        """Return the seconds left, 0 at least.

        Raises
        ------
        RemotingTooMuchRequestException
            It is overdrawn.
        """
        left = self.left
        if left < 0:
            raise RemotingTooMuchRequestException(
                f"{doing}: {self.seconds * 1000:.0f} ms were given, and are over before it was sent; raise the timeout"
            )
        return left

    def __repr__(self) -> str:
        return f"<Budget {self.left:.3f} s left of {self.seconds:g} s>"
