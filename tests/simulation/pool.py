"""A pool of simulated threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from tests.simulation.world import World


class Pool(Executor):
    """An executor of a world. A future of `submit` must not be waited for: only `map` and `shutdown` wait."""

    def __init__(self, world: World, threads: int, name: str) -> None:
        self._world = world
        self._threads = threads
        self._name = name
        self._running = 0
        self._pending: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._waiters: list[Any] = []
        self._closed = False

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function on a thread of the pool."""
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self._pending.append((future, partial(call, *args, **kwargs)))
        if self._running < self._threads:
            self._running += 1
            self._world.start(self._work, self._name)
        return future

    def map(
        self, fn: Callable[..., Any], *iterables: Any, timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[Any]:
        """Return the results in order, after all calls have ended."""
        del timeout, chunksize
        futures = [self.submit(fn, *args) for args in zip(*iterables, strict=False)]
        while not all(future.done() for future in futures):
            self._world.wait(self._waiters)
        return iter([future.result() for future in futures])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls."""
        self._closed = True
        if cancel_futures:
            self._pending.clear()
        while wait and self._running:
            self._world.wait(self._waiters)

    def _work(self) -> None:
        while self._pending:
            future, call = self._pending.popleft()
            try:
                future.set_result(call())
            except Exception as exc:
                future.set_exception(exc)
            self._world.wake_all(self._waiters)
        self._running -= 1
        self._world.wake_all(self._waiters)
