"""Asking many servers one thing, all at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from rocketmq_spark.consumer.parallel import in_parallel
from rocketmq_spark.errors import RocketMQError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def ask_all(about: Iterable[K], ask: Callable[[K], T]) -> dict[K, T | RocketMQError]:
    """Return what each question gave, or why it gave nothing; in the order of `about`."""

    def one(key: K) -> T | RocketMQError:
        try:
            return ask(key)
        except RocketMQError as exc:
            return exc

    return in_parallel(about, one)
