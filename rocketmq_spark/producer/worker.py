"""A thread that does what is due, and only waits otherwise.

Rule 1: what is due, and when, is a function of `now` that is handed in; no decision is made here.
Rule 2: a job that fails is logged and tried again a little later; the thread lives as long as its owner.

Follows the ``ScheduledExecutorService`` of ``MQClientInstance.java`` (spec/producer.md section 1.4).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

logger = logging.getLogger("rocketmq_spark.producer")

# Until the next try after a bug of ours, seconds.
_AFTER_FAILURE: Final = 3.0


class Worker:
    """Calls `run_due` when it is time to, on a daemon thread.

    Parameters
    ----------
    name : str
        The thread's.
    run_due : callable
        ``now -> when something will be due next``, seconds.
    clock : callable
        Seconds.
    """

    def __init__(self, name: str, run_due: Callable[[float], float], clock: Callable[[], float]) -> None:
        self._run_due = run_due
        self._clock = clock
        self._wake = threading.Event()
        self._stopped = False
        self._lock = threading.Lock()
        self._name = name
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin. Idempotent; after `stop` it does nothing."""
        with self._lock:
            if self._thread is None and not self._stopped:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread

    def wake(self) -> None:
        """Have `run_due` called now."""
        self._wake.set()

    def stop(self) -> None:
        """End after the job that is running, if any; does not wait for it."""
        with self._lock:
            self._stopped = True
        self._wake.set()

    def join(self, timeout: float) -> bool:
        """Wait for the end; return whether it has come."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped:
            now = self._clock()
            try:
                due = self._run_due(now)
            except Exception:
                # A bug of ours must not end the schedules for as long as the process lives.
                logger.exception("a job of %s failed; it goes on in %g s", self._name, _AFTER_FAILURE)
                due = now + _AFTER_FAILURE
            # What asked to be woken while the job ran set the event, and is seen at once.
            self._wake.wait(max(due - self._clock(), 0.0))
            self._wake.clear()

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "waiting to start" if self._thread is None else "running"
        return f"<Worker {self._name} {state}>"
