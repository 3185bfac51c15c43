"""A place for what a transport tells later."""

from __future__ import annotations

import threading
from typing import Any

from tests.waiting import PATIENCE


class Outcomes(list[Any]):
    """A callback that keeps what it is called with, and can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self.threads: list[threading.Thread] = []

    def __call__(self, item: Any) -> None:
        with self._changed:
            self.threads.append(threading.current_thread())
            self.append(item)
            self._changed.notify_all()

    def wait(self, count: int) -> Outcomes:
        """Return itself once it has so many items."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self) >= count, PATIENCE), f"{len(self)} of {count} came: {self}"
        return self
