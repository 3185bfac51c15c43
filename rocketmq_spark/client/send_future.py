"""What an asynchronous send returns: a future whose callbacks run on a thread of the callback executor.

Rule 1: the outcome is there as soon as the transport brings it, without a thread of that executor: a callback may wait
        for another send, though callbacks occupy every thread.
Rule 2: a callback never runs on the thread that registers it, however fast the outcome was: that thread may hold a lock
        which the callback wants.
Rule 3: an executor that takes no callback any more leaves it to the thread that brings the outcome: better there than
        never.

Follows spec/producer.md section 9.5.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial

from rocketmq_spark.send_result import SendResult

logger = logging.getLogger("rocketmq_spark.producer")


class SendFuture(Future[SendResult]):
    """The outcome of one asynchronous send.

    Parameters
    ----------
    callback_executor : concurrent.futures.Executor
    """

    def __init__(self, callback_executor: Executor) -> None:
        super().__init__()
        self._callback_executor = callback_executor

    def add_done_callback(self, fn: Callable[[Future[SendResult]], object]) -> None:
        """Have `fn` called with the finished future; what it raises is logged."""
        super().add_done_callback(partial(_call, self._callback_executor, fn))


def _call(executor: Executor, fn: Callable[[Future[SendResult]], object], future: Future[SendResult]) -> None:
    try:
        executor.submit(_guarded, fn, future)
    except Exception:
        logger.debug("the callback executor refused %r", fn, exc_info=True)
        _guarded(fn, future)


def _guarded(fn: Callable[[Future[SendResult]], object], future: Future[SendResult]) -> None:
    try:
        fn(future)
    except Exception:
        logger.exception("the callback %r of an asynchronous send raised", fn)
