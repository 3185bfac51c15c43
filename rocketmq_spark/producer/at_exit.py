"""Waits for asynchronous sends when the process ends before `shutdown` of their producers.

The hook runs while daemon threads still run, but after all other threads have ended. Python then starts no thread and
no work of a thread pool. ``os._exit`` and signals without a handler end a process without it.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - registers its hook first
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from rocketmq_spark.producer.async_send import Outstanding

if TYPE_CHECKING:
    from rocketmq_spark.producer.message_sender import MessageSender

logger = logging.getLogger("rocketmq_spark.producer")

senders: Final[set[MessageSender]] = set()
"""The senders that are not shut down. They keep alive what a producer's sends need after its last reference."""
hand_overs: Final[set[Callable[[], None]]] = set()
"""Functions of asyncio producers, which send the messages that wait for the event loop."""


def add(sender: MessageSender) -> None:
    """Wait for the sends of a producer when the process ends."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None and not senders:
        # A child of multiprocessing ends with os._exit, after the finalizers of this module.
        util.Finalize(None, drain, exitpriority=0)
    senders.add(sender)


def _watch() -> None:
    for sender in tuple(senders):
        sender.outstanding.watch()


def drain() -> None:
    """Wait until all asynchronous sends have ended, at most the longest ``sendMsgTimeout``; log how many are lost.

    Ctrl+C ends the wait.
    """
    outstanding_of = {sender: sender.outstanding for sender in tuple(senders)}
    _watch()
    limit = 0.0
    try:
        for hand_over in tuple(hand_overs):
            hand_over()
        limit = max(
            (sender.timeout for sender, outstanding in outstanding_of.items() if outstanding.messages), default=0.0
        )
        deadline = time.monotonic() + limit
        for outstanding in outstanding_of.values():
            outstanding.wait(max(deadline - time.monotonic(), 0.0))
    except KeyboardInterrupt:
        logger.debug("the user interrupted the wait for asynchronous sends")
    finally:
        _report(outstanding_of, limit)
        for sender in outstanding_of:
            # A second call, such as that of multiprocessing, reports only later sends.
            sender.outstanding = Outstanding()


def _report(outstanding_of: dict[MessageSender, Outstanding], limit: float) -> None:
    lost = {sender: found for sender, found in outstanding_of.items() if found.failed or found.messages}
    if not lost:
        return
    failed, silent = sum(found.failed for found in lost.values()), sum(found.messages for found in lost.values())
    groups = ", ".join(sorted({sender.producer_group for sender in lost}))
    error = next((f" (the first: {found.error})" for found in lost.values() if found.error is not None), "")
    logger.error(
        "the process ends before %d messages of producer %s are acknowledged, and they may be lost: %d failed%s, %d "
        "had no answer within %g s. Call shutdown(), or use the producer in a with statement",
        *(failed + silent, groups, failed, error, silent, limit),
    )


def _forget() -> None:
    # In a forked child the threads and connections are the parent's, which drains them.
    senders.clear()
    hand_overs.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(drain)
# Sends that wait for a thread of a pool end before `atexit`. Pools use this private function, too, with an older hook.
with contextlib.suppress(AttributeError, RuntimeError):
    threading._register_atexit(_watch)  # type: ignore[attr-defined]
