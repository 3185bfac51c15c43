"""Asking many servers one thing, all at once.

Rule 1: a minute for all of them together: a name server may list more that do not answer than anybody waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from typing import Final, TypeVar

from rocketmq_spark.errors import RemotingTooMuchRequestException, RocketMQError
from rocketmq_spark.parallel import in_parallel

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_LONGEST: Final = 60.0


def ask_all(
    about: Iterable[K], ask: Callable[[K], T], clock: Callable[[], float] = time.monotonic
) -> dict[K, T | RocketMQError]:
    """Return what each question gave, or why it gave nothing; in the order of `about`."""

    gives_up = clock() + _LONGEST

    def one(key: K) -> T | RocketMQError:
        if clock() >= gives_up:
            return RemotingTooMuchRequestException(f"not asked: the others took {_LONGEST:g} s")
        try:
            return ask(key)
        except RocketMQError as exc:
            return exc

    return in_parallel(about, one)
