"""Asking many servers one thing, all at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from rocketmq_spark.errors import RocketMQError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_AT_ONCE: Final = 16


def ask_all(about: Iterable[K], ask: Callable[[K], T]) -> dict[K, T | RocketMQError]:
    """Return what each question gave, or why it gave nothing; in the order of `about`."""
    keys = list(about)
    if not keys:
        return {}

    def one(key: K) -> T | RocketMQError:
        try:
            return ask(key)
        except RocketMQError as exc:
            return exc

    with ThreadPoolExecutor(min(_AT_ONCE, len(keys)), "rocketmq-spark-admin") as pool:
        return dict(zip(keys, pool.map(one, keys), strict=True))
