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
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from rocketmq_spark.errors import (
    MQBrokerException,
    MQClientException,
    RemotingSendRequestException,
    RemotingTimeoutException,
    RocketMQError,
)
from rocketmq_spark.message import (
    MASTER_ID,
    BrokerData,
    Message,
    MessageQueue,
    QueueData,
    SendOutcome,
    SendRequest,
    TopicRouteData,
)
from rocketmq_spark.message_ext import MessageExt
from rocketmq_spark.transaction import EndTransaction, TransactionCheck
from rocketmq_spark.transport.base import OnCheckTransaction, OnOutcome
from rocketmq_spark.transport.script import ManualClock, Reply, route
from rocketmq_spark.transport.scripted_store import ScriptedStore
from rocketmq_spark.wire.codes import ResponseCode, broker_error

__all__ = ["ManualClock", "Reply", "ScriptedTransport", "route"]

logger = logging.getLogger("rocketmq_spark.transport")

_JOIN_TIMEOUT: Final = 5.0


class ScriptedTransport:
    """Implements :class:`~rocketmq_spark.transport.base.Transport` in memory.

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
    calls : list of tuple
        Every other call, in order: its name and its arguments but the timeout.
    stored : dict of MessageQueue to list of Message
        What the brokers keep. A half message is in `RMQ_SYS_TRANS_HALF_TOPIC` until it is committed.
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
        self.routes = dict(routes)
        self.always: dict[str, Reply] = {}
        self.requests: list[SendRequest] = []
        self.oneways: list[SendRequest] = []
        self.calls: list[tuple[Any, ...]] = []
        self.on_check_transaction: OnCheckTransaction | None = None
        self._store = ScriptedStore()
        self.stored: dict[MessageQueue, list[Message]] = self._store.queues
        self._script = {broker: deque(replies) for broker, replies in (script or {}).items()}
        self._failures: dict[str, deque[RocketMQError]] = {}
        self._clock = clock or (time.monotonic if threaded else ManualClock())
        self._threaded = threaded
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, SendOutcome, OnOutcome]] = []
        self._closed = False

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
        """How many sends wait for their outcome."""
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

    def fail(self, call: str, *errors: RocketMQError) -> None:
        """Let the next calls of a blocking method (such as ``"query_route"``) fail, one with each error."""
        with self._changed:
            self._failures.setdefault(call, deque()).extend(errors)

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

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """Return the route of `routes`; an unknown topic is code 17, as from a name server."""
        self._record(timeout, "query_route", topic)
        found = self.routes.get(topic)
        if found is None:
            doing = f"looking up the route of topic {topic}"
            raise broker_error(ResponseCode.TOPIC_NOT_EXIST, f"No topic route info for {topic}", "scripted", doing)
        return found

    def send(self, request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        """Play the broker's next reply; see :class:`.base.Transport`."""
        timeout = min(timeout, within)
        with self._changed:
            self._check()
            reply = self._next_reply(request)
            self.requests.append(request)
            wait = timeout if reply.silent else min(reply.delay, timeout)
            outcome = self._outcome(request, reply, timeout, wait)
            heapq.heappush(self._due, (self._clock() + wait, next(self._numbers), outcome, on_outcome))
            if self._threaded and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rocketmq-spark-scripted", daemon=True)
                self._thread.start()
            self._changed.notify_all()

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

    def heart_beat(self, address: str, client_id: str, producer_groups: Collection[str], timeout: float) -> None:
        """Record the call."""
        self._record(timeout, "heart_beat", address, client_id, tuple(producer_groups))

    def unregister_client(self, address: str, client_id: str, producer_group: str, timeout: float) -> None:
        """Record the call."""
        self._record(timeout, "unregister_client", address, client_id, producer_group)

    def max_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return how many messages `stored` has for the queue."""
        self._record(timeout, "max_offset", queue, address)
        return len(self.stored.get(queue, ()))

    def min_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return 0: nothing stored here ever expires."""
        self._record(timeout, "min_offset", queue, address)
        return 0

    def search_offset(self, queue: MessageQueue, timestamp_ms: int, address: str, timeout: float) -> int:
        """Return the first offset stored at or after a time of the transport's clock, in milliseconds."""
        self._record(timeout, "search_offset", queue, timestamp_ms, address)
        return self._store.search(queue, timestamp_ms)

    def earliest_msg_store_time(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return when the queue's first message was stored, by the transport's clock; -1 for an empty queue."""
        self._record(timeout, "earliest_msg_store_time", queue, address)
        return self._store.earliest(queue)

    def view_message(self, address: str, physical_offset: int, timeout: float, *, topic: str = "") -> MessageExt:
        """Return the message at a commit-log offset, which is that of all brokers together."""
        self._record(timeout, "view_message", address, physical_offset, topic)
        message = self._store.view(physical_offset)
        if message is None:
            raise MQClientException(f"viewing the message at commit-log offset {physical_offset}: {address} has none")
        return message

    def end_transaction(self, address: str, request: EndTransaction, timeout: float) -> None:
        """Record the call; a commit puts the message into its queue."""
        self._record(timeout, "end_transaction", address, request)
        with self._changed:
            self._store.end_transaction(request, self._clock())

    def check_transaction(self, address: str, physical_offset: int) -> TransactionCheck:
        """Let a broker ask back for the half message at a commit-log offset; return what it asked.

        The handler is called in the calling thread; without one nobody hears the question.
        """
        with self._changed:
            check = self._store.check(address, physical_offset, self._clock())
        if self.on_check_transaction is not None:
            self.on_check_transaction(check)
        return check

    def create_topic(
        self,
        address: str,
        topic: str,
        queue_nums: int,
        perm: int,
        timeout: float,
        *,
        read_queue_nums: int | None = None,
        topic_sys_flag: int = 0,
        order: bool = False,
        attributes: str = "",
    ) -> None:
        """Add the broker at `address` to the topic's route; its name is the address up to the colon."""
        reads = queue_nums if read_queue_nums is None else read_queue_nums
        self._record(
            timeout, "create_topic", address, topic, queue_nums, perm, reads, topic_sys_flag, order, attributes
        )
        name = address.rpartition(":")[0]
        old = self.routes.get(topic, TopicRouteData((), ()))
        queues = [queue for queue in old.queue_datas if queue.broker_name != name]
        brokers = [broker for broker in old.broker_datas if broker.broker_name != name]
        queues.append(QueueData(name, reads, queue_nums, perm, topic_sys_flag))
        brokers.append(BrokerData(name, {MASTER_ID: address}))
        self.routes[topic] = replace(
            old,
            queue_datas=tuple(sorted(queues, key=lambda queue: queue.broker_name)),
            broker_datas=tuple(sorted(brokers, key=lambda broker: broker.broker_name)),
        )

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

    def _check(self) -> None:
        if self._closed:
            raise RocketMQError("this transport is closed: make a new one")

    def _record(self, timeout: float, name: str, *arguments: Any) -> None:
        with self._changed:
            self._check()
            self.calls.append((name, *arguments))
            errors = self._failures.get(name)
            if errors:
                raise errors.popleft()
        if timeout <= 0:
            raise RemotingTimeoutException(f"{name}: no time left")

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
            text = f"sending to {outcome.queue}: the transport was closed; the rows may be stored"
            on_outcome(replace(outcome, status=None, error=RemotingSendRequestException(text), queue_offset=-1))
