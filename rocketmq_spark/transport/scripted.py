"""A transport without a network: it plays a script, and keeps what it was sent where a test can look.

Rule 1: it keeps the seam's promises: one outcome per send, never inside ``send``, everything in flight fails at close.
Rule 2: with its manual clock nothing happens by itself: outcomes come when the test says ``deliver()`` or
        ``advance()``, in the order in which they fall due, equal ones in the order of their sends.
Rule 3: with ``threaded=True`` a small thread delivers them, so that code with threads of its own runs against it as is.
Rule 4: what it says is stored can be read back, decoded by the plain decoder of ``wire.records``.

The model is kafka-python's ``test/mock_broker.py``.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from rocketmq_spark.errors import (
    MQBrokerException,
    RemotingSendRequestException,
    RemotingTimeoutException,
    RocketMQError,
)
from rocketmq_spark.message import SendOutcome, SendRequest
from rocketmq_spark.pull import PullOutcome, PullRequest
from rocketmq_spark.route_data import TopicRouteData
from rocketmq_spark.transaction import EndTransaction, ending
from rocketmq_spark.transport.base import OnEnd, OnOutcome, OnPulled
from rocketmq_spark.transport.script import ManualClock, Reply, route
from rocketmq_spark.transport.scripted_pulls import PullReply, ScriptedPulls

__all__ = ["ManualClock", "PullReply", "Reply", "ScriptedTransport", "route"]

logger = logging.getLogger("rocketmq_spark.transport")

_JOIN_TIMEOUT: Final = 5.0


class ScriptedTransport(ScriptedPulls):
    """Implements :class:`.base.Transport` and :class:`.base.ReadTransport` in memory.

    Parameters
    ----------
    routes : mapping of str to TopicRouteData
        By topic. The attribute is a dict of its own: change it when the cluster changes.
    script : mapping of str to iterable of Reply, optional
        By broker name, what happens to its next sends, in order. A reply may also be a function of the request.
        When the script of a broker is used up, `always` decides, and without an entry there the send is ``SEND_OK``.
    clock : callable, optional
        Default: a :class:`ManualClock`, or ``time.monotonic`` when threaded.
    threaded : bool, default False
        Outcomes are delivered by a thread as they fall due.

    Attributes
    ----------
    always : dict of str to Reply
        By broker name, what happens once its script is used up.
    requests : list of SendRequest
        Every send that waits for an outcome, in order.
    oneways : list of SendRequest
        Every oneway send, in order.
    pulls : list of PullRequest
        Every pull, in order. :meth:`play_pulls` scripts those of a queue.
    always_pull : dict of MessageQueue to PullReply
        What happens to a queue's pulls once its script is used up; without an entry they get what it holds.
    calls : list of tuple
        Every other call, in order: its name and its arguments but the timeout.
    stored : dict of MessageQueue to list of Message
        What the brokers keep. A half message is in `RMQ_SYS_TRANS_HALF_TOPIC` until it is committed. :meth:`keep` adds
        to it without a send.
    expired : dict of MessageQueue to int
        The first offset of a queue that has not expired, where that is not 0.
    members : dict of (str, str) to set of str
        By group and broker's address, the client ids of who reads.
    on_check_transaction : callable or None
        See :class:`.base.Transport`; called by :meth:`check_transaction`.

    Examples
    --------
    By hand, on a clock of its own::

        transport = ScriptedTransport({"orders": route({"a": 4, "b": 4})}, {"a": [Reply.code(2), Reply(delay=0.2)]})
        transport.send(to_a, timeout=3.0, on_outcome=outcomes.append)
        assert outcomes == []                                # never inside send
        transport.deliver()
        assert outcomes[0].error.flow_control
        transport.send(to_a, timeout=3.0, on_outcome=outcomes.append)
        transport.advance(0.2)
        assert outcomes[1].latency_ms == 200.0
        assert [message.body for message in transport.stored[to_a.queue]] == [b"..."]

    Under a producer with threads of its own::

        with ScriptedTransport({"orders": route({"a": 4})}, threaded=True) as transport:
            transport.always["a"] = Reply(silent=True)       # every send times out, in real time
    """

    def __init__(
        self,
        routes: Mapping[str, TopicRouteData],
        script: Mapping[str, Iterable[Reply | Callable[[SendRequest], Reply]]] | None = None,
        *,
        clock: Callable[[], float] | None = None,
        threaded: bool = False,
    ) -> None:
        super().__init__(routes, clock or (time.monotonic if threaded else ManualClock()))
        self.always: dict[str, Reply] = {}
        self.requests: list[SendRequest] = []
        self.oneways: list[SendRequest] = []
        self._script = {broker: deque(replies) for broker, replies in (script or {}).items()}
        self.polls = 0
        self._threaded = threaded
        self._thread: threading.Thread | None = None
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Any, Callable[[Any], None]]] = []

    def __repr__(self) -> str:
        state = "closed" if self._closed else "threaded" if self._threaded else "by hand"
        return f"<ScriptedTransport {state}, {len(self.requests)} requests, {len(self._due)} in flight>"

    def __enter__(self) -> ScriptedTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    @property
    def in_flight(self) -> int:
        """How many sends and pulls wait for their outcome."""
        return len(self._due)

    @property
    def next_due(self) -> float:
        """When the next outcome falls due on the transport's clock; inf if none is in flight."""
        with self._changed:
            return self._due[0][0] if self._due else math.inf

    def play(self, broker_name: str, *replies: Reply | Callable[[SendRequest], Reply]) -> None:
        """Add to the end of a broker's script."""
        with self._changed:
            self._script.setdefault(broker_name, deque()).extend(replies)

    def deliver(self) -> int:
        """Deliver what is due now and was sent before this call; return how many outcomes that were."""
        with self._changed:
            before, now = next(self._numbers), self._clock()
        count = 0
        while self._deliver_one(now, before):
            count += 1
        return count

    def advance(self, seconds: float) -> int:
        """Move the manual clock, stopping at every outcome on the way; return how many were delivered.

        Raises
        ------
        TypeError
            The clock handed in can't be moved.
        """
        clock = self._clock
        if not isinstance(clock, ManualClock):
            raise TypeError(f"advance() needs a ManualClock, this transport has {clock!r}")
        until, count = clock.now + seconds, 0
        while self.next_due <= until:
            clock.now = max(clock.now, self.next_due)
            with self._changed:
                self._changed.notify_all()
            count += self.deliver()
        clock.now = until
        with self._changed:
            self._changed.notify_all()
        return count

    def send(self, request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        """Play the broker's next reply; see :class:`.base.Transport`."""
        timeout = min(timeout, within)
        with self._changed:
            self._check()
            reply = self._next_reply(request)
            self.requests.append(request)
            wait = timeout if reply.silent else min(reply.delay, timeout)
            self._schedule(wait, self._outcome(request, reply, timeout, wait), on_outcome)

    def poll(self, timeout: float) -> None:
        """Move the clock to the next outcome, at most so many seconds on, and deliver what is due then.

        A threaded one delivers by itself: there is nothing to do here.
        """
        self.polls += 1
        if not self._threaded:
            until = self._clock() + timeout
            self.advance(min(until, self.next_due) - self._clock())

    def pull(self, request: PullRequest, timeout: float, on_pulled: OnPulled) -> None:
        """Play the queue's next reply; see :class:`.base.ReadTransport`."""
        with self._changed:
            self._check()
            self.pulls.append(request)
            self._schedule(*self._pulled(request, timeout), on_pulled)

    def pull_now(self, request: PullRequest, timeout: float) -> PullOutcome:
        """Play the queue's next reply, whatever its delay; see :class:`.base.ReadTransport`."""
        with self._changed:
            self._check()
            self.pulls.append(request)
            return self._pulled(request, timeout)[1]

    def send_oneway(self, request: SendRequest, timeout: float) -> None:
        """Play the broker's next reply as far as a oneway sender learns of it; see :class:`.base.Transport`.

        A broker's refusal stays unknown, a connection that broke while writing is logged; other errors are raised.
        Only a reply without an error stores (or with ``stored=True``); delay and silence make no difference.
        """
        with self._changed:
            self._check()
            reply = self._next_reply(request)
            self.oneways.append(request)
            if reply.stored if reply.stored is not None else reply.error is None:
                self._store.keep(request, self._clock())
        if isinstance(reply.error, RemotingSendRequestException):
            logger.warning("oneway send to %s: %s", request.queue, reply.error)
        elif reply.error is not None and not isinstance(reply.error, MQBrokerException):
            raise reply.error
        if timeout <= 0:
            raise RemotingTimeoutException(f"oneway send to {request.queue}: no time left")

    def end_transaction(self, address: str, request: EndTransaction, timeout: float, on_end: OnEnd) -> None:
        """Do what `end_transaction_oneway` does, and deliver its error, or None, as the outcome."""
        ending(request)
        error: RocketMQError | None = None
        try:
            self.end_transaction_oneway(address, request, timeout)
        except RocketMQError as exc:
            error = exc
        with self._changed:
            self._check()
            self._schedule(0.0, error, on_end)

    def close(self) -> None:
        """Fail what is in flight with ``RemotingSendRequestException``. Idempotent."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is None:
            self._fail_all()
        elif thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT)

    def _schedule(self, wait: float, outcome: Any, on_outcome: Callable[[Any], None]) -> None:
        heapq.heappush(self._due, (self._clock() + wait, next(self._numbers), outcome, on_outcome))
        if self._threaded and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rocketmq-spark-scripted", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _next_reply(self, request: SendRequest) -> Reply:
        broker = request.queue.broker_name
        script = self._script.get(broker)
        reply = script.popleft() if script else self.always.get(broker, Reply())
        return reply if isinstance(reply, Reply) else reply(request)

    def _outcome(self, request: SendRequest, reply: Reply, timeout: float, wait: float) -> SendOutcome:
        queue, late = request.queue, reply.silent or reply.delay > timeout
        kept = reply.stored if reply.stored is not None else reply.error is None and not reply.silent
        offset, ids = self._store.keep(request, self._clock()) if kept else (-1, "")
        error = reply.error
        if late:
            error = RemotingTimeoutException(f"sending to {queue}: no answer within {timeout:g} s")
        if error is not None:
            return SendOutcome(queue, None, error, wait * 1000.0)
        return SendOutcome(queue, reply.status, None, wait * 1000.0, queue_offset=offset, offset_msg_id=ids)

    def _deliver_one(self, now: float, before: float) -> bool:
        with self._changed:
            if not self._due or self._due[0][0] > now or self._due[0][1] >= before:
                return False
            _, _, outcome, on_outcome = heapq.heappop(self._due)
        on_outcome(outcome)
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    break
                wait = self._due[0][0] - self._clock() if self._due else math.inf
                if wait > 0:
                    # A manual clock moves without our knowing; who moves it through advance() wakes us.
                    endless = wait == math.inf or isinstance(self._clock, ManualClock)
                    self._changed.wait(None if endless else wait)
                    continue
            try:
                self._deliver_one(self._clock(), math.inf)
            except Exception:
                logger.exception("a callback raised")
        self._fail_all()

    def _fail_all(self) -> None:
        while True:
            with self._changed:
                if not self._due:
                    return
                _, _, outcome, on_outcome = heapq.heappop(self._due)
            if outcome is None or isinstance(outcome, RocketMQError):
                on_outcome(outcome)
                continue
            if isinstance(outcome, PullOutcome):
                on_outcome(PullOutcome(None, error=RemotingSendRequestException("pulling: the transport was closed")))
                continue
            text = f"sending to {outcome.queue}: the transport was closed; the rows may be stored"
            on_outcome(replace(outcome, status=None, error=RemotingSendRequestException(text), queue_offset=-1))
