"""How many requests may be under way at once: a permit for each, given back at most once.

Rule 1: a permit belongs to one request and goes back when that one ends, however it ends; a second time does nothing.
Rule 2: what must not block takes a permit now or never; what may block waits for one within its own timeout.
Rule 3: nothing is promised about the order in which those who wait get theirs (Java's semaphores are fair).

Follows NettyRemotingAbstract.java and SemaphoreReleaseOnlyOnce.java (spec/producer.md section 10.2).
"""

from __future__ import annotations

import threading

from rocketmq_spark.errors import OptionError, RemotingTimeoutException, RemotingTooMuchRequestException


class Permit:
    """The right to have one request under way."""

    __slots__ = ("_held", "_permits")

    def __init__(self, permits: Permits) -> None:
        self._permits = permits
        self._held = True

    def release(self) -> None:
        """Give it back, from any thread, any number of times."""
        permits = self._permits
        with permits.changed:
            if self._held:
                self._held = False
                permits.free += 1
                permits.changed.notify()


class Permits:
    """So many permits, and who waits for one.

    Parameters
    ----------
    limit : int
    option : str
        What the limit is called, for texts.

    Attributes
    ----------
    free : int
        How many can be taken now.

    Raises
    ------
    OptionError
        The limit is not positive.
    """

    def __init__(self, limit: int, option: str) -> None:
        if limit < 1:
            raise OptionError(f"{option}: {limit} is not allowed; at least 1 request must be let through")
        self.limit = limit
        self.option = option
        self.free = limit
        self.changed = threading.Condition(threading.Lock())

    def take(self) -> Permit | None:
        """Return a permit, or None if there is none just now."""
        with self.changed:
            if not self.free:
                return None
            self.free -= 1
        return Permit(self)

    def acquire(self, timeout: float, doing: str) -> Permit:
        """Return a permit, waiting for one at most `timeout` seconds.

        Raises
        ------
        RemotingTooMuchRequestException
            There is none, and no time to wait.
        RemotingTimeoutException
            There was none in all that time. Nothing was sent in either case.
        """
        with self.changed:
            if not self.free and timeout <= 0:
                raise self.exhausted(doing)
            if not self.changed.wait_for(lambda: self.free, timeout):
                raise RemotingTimeoutException(f"{self._text(doing)} and none came back within {timeout:g} s")
            self.free -= 1
        return Permit(self)

    def exhausted(self, doing: str) -> RemotingTooMuchRequestException:
        """Return the error of what could not wait."""
        return RemotingTooMuchRequestException(self._text(doing))

    def _text(self, doing: str) -> str:
        return f"{doing}: not sent, all {self.limit} permits are in use (raise {self.option}, or send less at once)"
