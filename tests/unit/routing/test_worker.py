"""The thread around the schedules."""

from __future__ import annotations

import logging
import threading

import pytest

from rocketmq_spark.routing.heart_beat import Worker
from tests.support.scripted import ManualClock


class Job:
    """Records its calls, and is due again an hour later."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.times: list[float] = []
        self._called = threading.Semaphore(0)

    def __call__(self, now: float) -> float:
        self.times.append(now)
        self._called.release()
        if self.failures:
            raise self.failures.pop()
        return now + 3600

    def await_call(self) -> None:
        assert self._called.acquire(timeout=10)


def test_job_runs_at_start_and_when_it_is_woken() -> None:
    clock, job = ManualClock(5.0), Job()
    worker = Worker("w", job, clock)
    worker.start()
    worker.start()
    job.await_call()
    clock.advance(1.0)
    worker.wake()
    job.await_call()
    worker.stop()
    assert worker.join(10)
    assert job.times == [5.0, 6.0]


def test_job_that_is_already_due_runs_again_without_a_wait() -> None:
    clock, ran = ManualClock(), threading.Semaphore(0)

    def due_at_once(now: float) -> float:
        ran.release()
        return now

    worker = Worker("w", due_at_once, clock)
    worker.start()
    for _ in range(5):
        assert ran.acquire(timeout=10)
    worker.stop()
    assert worker.join(10)


def test_a_job_that_fails_is_logged_and_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(RuntimeError("a bug"))
    worker = Worker("w", job, ManualClock())
    with caplog.at_level(logging.ERROR, "rocketmq_spark.producer"):
        worker.start()
        job.await_call()
        worker.wake()
        job.await_call()
        worker.stop()
        assert worker.join(10)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["a bug"]


def test_stopped_worker_does_not_start() -> None:
    job = Job()
    worker = Worker("w", job, ManualClock())
    worker.stop()
    worker.start()
    assert worker.join(0)
    assert job.times == []
