"""Threads of a producer's own, one of which may end them all.

Rule 1: who shuts a pool down waits for its threads, unless it is one of them: that one would wait for itself.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


class OwnPool(ThreadPoolExecutor):
    """A pool that a callback, a listener or a hook on one of its threads may shut down.

    Parameters
    ----------
    name : str
        What the threads' names begin with.
    threads : int
    """

    def __init__(self, name: str, threads: int) -> None:
        self._inside = threading.local()
        super().__init__(threads, thread_name_prefix=name, initializer=self._enter)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work, and wait for what is under way, but for the caller itself."""
        super().shutdown(wait and not hasattr(self._inside, "entered"), cancel_futures=cancel_futures)

    def _enter(self) -> None:
        self._inside.entered = True
