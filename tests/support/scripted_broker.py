"""The parts of `ScriptedTransport`: replies to pulls, routes, a clock for tests, and the delivery of outcomes."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from rocketmq_spark.errors import RemotingSendRequestException
from rocketmq_spark.model.message import SendOutcome
from rocketmq_spark.model.message_ext import PullOutcome
from rocketmq_spark.model.route import MASTER_ID, BrokerData, QueueData, TopicRouteData
from rocketmq_spark.testing.store import MOST_PULLED

logger = logging.getLogger("rocketmq_spark.transport")

_JOIN_TIMEOUT: Final = 5.0

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


@dataclass(frozen=True, slots=True)
class PullReply:
    """The reply to one pull: `outcome`, or at most `most` messages of the queue, after `delay` seconds.

    If `silent`, or beyond the pull's own timeout, it is a ``RemotingTimeoutException``.
    """

    outcome: PullOutcome | None = None
    most: int = MOST_PULLED
    delay: float = 0.0
    silent: bool = False


def route(topic_queues: Mapping[str, int], perm: int = 6) -> TopicRouteData:
    """Return a route with the given number of queues per broker. A broker's address is its name and port 10911.

    >>> route({"broker-a": 4}).broker_datas[0].master
    'broker-a:10911'
    """
    names = sorted(topic_queues)
    return TopicRouteData(
        queue_datas=tuple(QueueData(name, topic_queues[name], topic_queues[name], perm) for name in names),
        broker_datas=tuple(BrokerData(name, {MASTER_ID: f"{name}:10911"}) for name in names),
    )


def with_broker(old: TopicRouteData, data: QueueData, address: str) -> TopicRouteData:
    """Return a route with a broker added or replaced."""
    queues = [*(queue for queue in old.queue_datas if queue.broker_name != data.broker_name), data]
    brokers = [broker for broker in old.broker_datas if broker.broker_name != data.broker_name]
    brokers.append(BrokerData(data.broker_name, {MASTER_ID: address}))
    return replace(
        old,
        queue_datas=tuple(sorted(queues, key=lambda queue: queue.broker_name)),
        broker_datas=tuple(sorted(brokers, key=lambda broker: broker.broker_name)),
    )


def take_reply(script: deque[_Reply | Callable[[_Request], _Reply]], request: _Request, used_up: _Reply) -> _Reply:
    """Take the next reply from a script, or return `used_up`; a function makes the reply to its request."""
    reply = script.popleft() if script else used_up
    return reply(request) if callable(reply) else reply


class ManualClock:
    """A clock, in seconds, that `advance` moves."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self.now += seconds


class Deliveries:
    """Outcomes in flight, ordered by their time, then by their request.

    If `threaded`, a thread delivers due outcomes, otherwise `deliver` and `advance` do. The condition `changed` guards
    this object and the transport's state. The caller of `schedule` holds it.
    """

    def __init__(self, clock: Callable[[], float], *, threaded: bool) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        self.closed = False
        self.threaded = threaded
        self._thread: threading.Thread | None = None
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Any, Callable[[Any], None]]] = []

    def __len__(self) -> int:
        return len(self._due)

    @property
    def next_due(self) -> float:
        """The time of the next outcome; inf if none is in flight."""
        with self.changed:
            return self._due[0][0] if self._due else math.inf

    def schedule(self, wait: float, outcome: Any, on_outcome: Callable[[Any], None]) -> None:
        """Deliver an outcome `wait` seconds from now."""
        heapq.heappush(self._due, (self.clock() + wait, next(self._numbers), outcome, on_outcome))
        if self.threaded and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rocketmq-spark-scripted", daemon=True)
            self._thread.start()
        self.changed.notify_all()

    def deliver(self) -> int:
        """Deliver the outcomes that are due and were scheduled before this call; return their number."""
        with self.changed:
            before, now = next(self._numbers), self.clock()
        count = 0
        while self._deliver_one(now, before):
            count += 1
        return count

    def advance(self, seconds: float) -> int:
        """Move the manual clock step by step to every outcome; return the number of delivered outcomes."""
        clock = self.clock
        if not isinstance(clock, ManualClock):
            raise TypeError(f"advance() needs a ManualClock, this transport has {clock!r}")
        until, count = clock.now + seconds, 0
        while self.next_due <= until:
            self._move(clock, max(clock.now, self.next_due))
            count += self.deliver()
        self._move(clock, until)
        return count

    def close(self) -> None:
        """Deliver all outcomes in flight as failed. Idempotent."""
        with self.changed:
            self.closed = True
            thread = self._thread
            self.changed.notify_all()
        if thread is None:
            self._end_all()
        elif thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT)

    def _move(self, clock: ManualClock, now: float) -> None:
        clock.now = now
        with self.changed:
            self.changed.notify_all()

    def _deliver_one(self, now: float, before: float) -> bool:
        with self.changed:
            if not self._due or self._due[0][0] > now or self._due[0][1] >= before:
                return False
            _, _, outcome, on_outcome = heapq.heappop(self._due)
        on_outcome(outcome)
        return True

    def _run(self) -> None:
        while True:
            with self.changed:
                if self.closed:
                    break
                wait = self._due[0][0] - self.clock() if self._due else math.inf
                if wait > 0:
                    # advance() notifies this thread when it moves a manual clock.
                    endless = wait == math.inf or isinstance(self.clock, ManualClock)
                    self.changed.wait(None if endless else wait)
                    continue
            try:
                self._deliver_one(self.clock(), math.inf)
            except Exception:
                logger.exception("a callback raised")
        self._end_all()

    def _end_all(self) -> None:
        while True:
            with self.changed:
                if not self._due:
                    return
                _, _, outcome, on_outcome = heapq.heappop(self._due)
            on_outcome(_at_close(outcome))


def _at_close(outcome: Any) -> Any:
    """Return the failure that replaces an outcome in flight when the transport closes."""
    if isinstance(outcome, PullOutcome):
        return PullOutcome(None, error=RemotingSendRequestException("pulling: the transport was closed"))
    if isinstance(outcome, SendOutcome):
        text = f"sending to {outcome.queue}: the transport was closed; the rows may be stored"
        return replace(outcome, status=None, error=RemotingSendRequestException(text), queue_offset=-1)
    return outcome
