"""Asks several servers at once, shares a deadline between servers asked in turn, and limits requests in flight.

`most_relevant_error` chooses the error to report if all servers failed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from rocketmq_spark.errors import OptionError, RemotingTimeoutException, RemotingTooMuchRequestException, RocketMQError
from rocketmq_spark.transport.runtime import PROCESS, Runtime

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
_E = TypeVar("_E", bound=RocketMQError)

MOST_AT_ONCE: Final = 64
# Near servers answer a few threads faster than many, which wait for each other. So each of these numbers of threads has
# some time to take all keys, seconds, before it is doubled.
_STEPS: Final = frozenset({4, 8, 16, 32})
_STEP_TIME: Final = 0.002
_LONGEST: Final = 60.0


def in_parallel(
    about: Iterable[K], ask: Callable[[K], T], runtime: Runtime = PROCESS, at_once: int = MOST_AT_ONCE
) -> dict[K, T]:
    """Return the result of `ask` for each key, in order; raise the exception of the first key that failed.

    After a failure no further key is asked about.
    """
    keys = list(about)
    if not keys:
        return {}
    answers: dict[int, T] = {}
    failures: dict[int, Exception] = {}
    pending = deque(enumerate(keys))
    # Set when no further key is to be taken.
    taken = runtime.event()

    def work() -> None:
        while not failures:
            try:
                number, key = pending.popleft()
            except IndexError:
                break
            try:
                answers[number] = ask(key)
            except Exception as exc:
                failures[number] = exc
        taken.set()

    threads = min(at_once, len(keys))
    if threads == 1:
        work()
    else:
        with runtime.pool(threads, "rocketmq-spark-questions") as pool:
            try:
                for started in range(threads):
                    if taken.is_set() or (started in _STEPS and taken.wait(_STEP_TIME)):
                        break
                    pool.submit(work)
            except RuntimeError:
                # The process ends, or has reached its limit of threads. This thread then takes the keys.
                work()
    if failures:
        raise failures[min(failures)]
    return {key: answers[number] for number, key in enumerate(keys)}


def query_all(
    about: Iterable[K], ask: Callable[[K], T], clock: Callable[[], float] = time.monotonic
) -> dict[K, T | RocketMQError]:
    """Return the result or the error of `ask` for each key, in order."""
    expires = clock() + _LONGEST

    def result(key: K) -> T | RocketMQError:
        if clock() >= expires:
            return RemotingTooMuchRequestException(f"not asked: the requests before it took {_LONGEST:g} s")
        try:
            return ask(key)
        except RocketMQError as exc:
            return exc

    return in_parallel(about, result)


def in_turn(
    addresses: Sequence[str], first: int, deadline: float, clock: Callable[[], float], failures: list[str]
) -> Iterator[tuple[int, float]]:
    """Yield the index of each address, from `first` on, with its share of the time left; without any, add a failure."""
    for turn in range(len(addresses)):
        index = (first + turn) % len(addresses)
        share = (deadline - clock()) / (len(addresses) - turn)
        if share > 0:
            yield index, share
        else:
            failures.append(f"{addresses[index]}: not asked, no time was left")


def most_relevant_error(last: _E | None, error: _E) -> _E:
    """Return the error to report if all servers failed; a retriable one is preferred."""
    return error if last is None or error.retriable else last


@dataclass(slots=True, eq=False)
class Permit:
    """The right to have one request in flight."""

    permits: Permits
    held: bool = True

    def release(self) -> None:
        """Return the permit, from any thread; repeated calls do nothing."""
        with self.permits.changed:
            if self.held:
                self.held = False
                self.permits.free += 1
                self.permits.changed.notify()


class Permits:
    """A limited number of permits; `free` counts the available ones. `option` sets the limit, at least 1."""

    def __init__(self, limit: int, option: str) -> None:
        if limit < 1:
            raise OptionError(f"{option}: {limit} is not allowed; allowed are numbers from 1")
        self.limit = limit
        self.option = option
        self.free = limit
        self.changed = threading.Condition(threading.Lock())

    def try_acquire(self) -> Permit | None:
        """Return a permit, or None if none is free."""
        with self.changed:
            if not self.free:
                return None
            self.free -= 1
        return Permit(self)

    def acquire(self, timeout: float, doing: str) -> Permit:
        """Return a permit, or raise RemotingTimeoutException, or RemotingTooMuchRequestException without a timeout."""
        with self.changed:
            if not self.free and timeout <= 0:
                raise self.exhausted(doing)
            if not self.changed.wait_for(lambda: self.free, timeout):
                raise RemotingTimeoutException(f"{self.exhausted(doing)}. None became free within {timeout:g} s")
            self.free -= 1
        return Permit(self)

    def exhausted(self, doing: str) -> RemotingTooMuchRequestException:
        """Return the error of a request that gets no permit."""
        return RemotingTooMuchRequestException(
            f"{doing}: not sent, because all {self.limit} permits for requests in flight are in use (raise "
            f"{self.option}, or send less at once)"
        )
