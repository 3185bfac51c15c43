"""One question about many things, asked at once.

Rule 1: what a question raises is raised; who wants the other answers all the same returns errors instead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_AT_ONCE: Final = 16


def in_parallel(about: Iterable[K], ask: Callable[[K], T]) -> dict[K, T]:
    """Return what each question gave, in the order of `about`; raises what the first of them raised."""
    keys = list(about)
    if not keys:
        return {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(keys)), "rocketmq-spark-questions") as pool:
        return dict(zip(keys, pool.map(ask, keys), strict=True))
