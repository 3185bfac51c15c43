"""`ScriptedTransport` replaces a transport in tests: it answers from scripts and stored messages, and records requests.

Sends and pulls get the replies of a script first. Each send gets one outcome, its callback never runs inside ``send``,
and `close` fails the sends and pulls in flight. Unless `threaded`, callbacks run in ``deliver()``, ``advance()``,
``poll()`` and ``close()``. ``advance()`` and ``poll()`` move the `ManualClock`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from rocketmq_spark import errors
from rocketmq_spark.model.message import EncodedBatch, Encoding, Message, MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.model.message_ext import MessageExt, PullOutcome, PullRequest, PullStatus
from rocketmq_spark.model.properties import KEYS, TAGS, UNIQ_KEY
from rocketmq_spark.model.route import QueueData, TopicRouteData
from rocketmq_spark.model.send_result import (
    TRANSACTION_COMMIT_TYPE,
    EndTransaction,
    RecallMessage,
    TransactionCheck,
    ending,
)
from rocketmq_spark.protocol.remoting.codes import ResponseCode, broker_error
from rocketmq_spark.protocol.remoting.records import messages_in
from rocketmq_spark.protocol.remoting.responses import ClusterInfo, TopicConfig
from rocketmq_spark.testing import Reply
from rocketmq_spark.testing.store import HALF_TOPIC, MessageStore
from rocketmq_spark.transport.base import Closes, OnCheckTransaction, OnEnd, OnOutcome, OnPulled
from tests.support.scripted_broker import Deliveries, ManualClock, PullReply, route, take_reply, with_broker

__all__ = ["ManualClock", "PullReply", "ScriptedTransport", "route"]

logger = logging.getLogger("rocketmq_spark.transport")


class ScriptedTransport(Closes):
    """Implements all interfaces of `transport.base` in memory.

    * `routes`: the route of each topic. Tests may change the attribute, which is a copy.
    * `script`: replies to the next sends, by broker name. A reply may be a function of the request. After the script
      the reply is that of `always`, or ``SEND_OK``.
    * `clock`: by default a `ManualClock`, or ``time.monotonic`` if `threaded`.
    * `threaded`: a thread delivers due outcomes.

    With a manual clock::

        transport = ScriptedTransport({"orders": route({"a": 4, "b": 4})}, {"a": [Reply.code(2), Reply(delay=0.2)]})
        transport.send(to_a, timeout=3.0, on_outcome=outcomes.append)
        transport.deliver()                                  # never inside send
        assert outcomes[0].error.flow_control
        transport.send(to_a, timeout=3.0, on_outcome=outcomes.append)
        transport.advance(0.2)
        assert outcomes[1].latency_ms == 200.0
        assert [message.body for message in transport.stored[to_a.queue]] == [b"..."]
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
        self.attributes: dict[str, Mapping[str, str]] = {}  # Of topics
        self.settings: dict[str, str] = {}  # Of brokers
        self.release = "V5_5_0"
        # Replies after the script of a broker or of a queue's pulls. By default a pull gets the queue's messages.
        self.always: dict[str, Reply] = {}
        self.always_pull: dict[MessageQueue, PullReply] = {}
        self._sends: dict[str, deque[Reply | Callable[[SendRequest], Reply]]] = defaultdict(deque)
        self._pulls: dict[MessageQueue, deque[PullReply | Callable[[PullRequest], PullReply]]] = defaultdict(deque)
        self._failures: dict[str, deque[errors.RocketMQError]] = defaultdict(deque)
        # Every call, in order: sends with an outcome, one-way sends, pulls; others by name and arguments (no timeout).
        self.requests: list[SendRequest] = []
        self.oneways: list[SendRequest] = []
        self.pulls: list[PullRequest] = []
        self.calls: list[tuple[Any, ...]] = []
        self.polls = 0
        self.committed: dict[tuple[str, MessageQueue], int] = {}  # Offsets of groups
        self.members: dict[tuple[str, str], set[str]] = {}  # Client ids of readers, by group and broker's address
        self.on_check_transaction: OnCheckTransaction | None = None
        self._store = MessageStore()
        # Stored messages. A half message is in RMQ_SYS_TRANS_HALF_TOPIC until its commit.
        self.stored = self._store.queues
        # The first offset of a queue that has not expired, or has not been removed, if it is not 0.
        self.expired = self._store.expired
        self.removed = self._store.removed
        self._clock = clock or (time.monotonic if threaded else ManualClock())
        self._deliveries = Deliveries(self._clock, threaded=threaded)
        self._changed = self._deliveries.changed
        for broker_name, replies in (script or {}).items():
            self.play(broker_name, *replies)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "threaded" if self._deliveries.threaded else "by hand"
        return f"<ScriptedTransport {state}, {len(self.requests)} requests, {self.in_flight} in flight>"

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._deliveries.closed

    @property
    def in_flight(self) -> int:
        """The number of sends and pulls without an outcome."""
        return len(self._deliveries)

    @property
    def next_due(self) -> float:
        """The time of the next outcome on the transport's clock; inf if none is in flight."""
        return self._deliveries.next_due

    def play(self, broker_name: str, *replies: Reply | Callable[[SendRequest], Reply]) -> None:
        """Add to the end of a broker's script."""
        with self._changed:
            self._sends[broker_name].extend(replies)

    def play_pulls(self, queue: MessageQueue, *replies: PullReply | Callable[[PullRequest], PullReply]) -> None:
        """Add to the end of a queue's script. After it, `always_pull` decides, and by default the queue's messages."""
        with self._changed:
            self._pulls[queue].extend(replies)

    def fail(self, call: str, *failures: errors.RocketMQError) -> None:
        """Fail the next calls of a blocking method (such as ``"query_route"``), one with each error."""
        with self._changed:
            self._failures[call].extend(failures)

    def keep(self, queue: MessageQueue, messages: Iterable[Message]) -> None:
        """Store messages at the end of a queue as if they were sent."""
        with self._changed:
            self._store.put(queue, messages, self._clock())

    def deliver(self) -> int:
        """Deliver the outcomes that are due and were sent before this call; return their number."""
        return self._deliveries.deliver()

    def advance(self, seconds: float) -> int:
        """Move the manual clock step by step to every outcome; return the number of delivered outcomes."""
        return self._deliveries.advance(seconds)

    def send(self, request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        """Play the broker's next reply."""
        timeout = min(timeout, within)
        with self._changed:
            self._check()
            reply = self._next_reply(request)
            self.requests.append(request)
            wait = timeout if reply.silent else min(reply.delay, timeout)
            self._deliveries.schedule(wait, self._outcome(request, reply, timeout, wait), on_outcome)

    def poll(self, timeout: float) -> None:
        """Move the clock to the next outcome within `timeout`, and deliver it. Does nothing if threaded."""
        self.polls += 1
        if not self._deliveries.threaded:
            until = self._clock() + timeout
            self.advance(min(until, self.next_due) - self._clock())

    def pull(self, request: PullRequest, timeout: float, on_pulled: OnPulled) -> None:
        """Play the queue's next reply."""
        with self._changed:
            self._check()
            self.pulls.append(request)
            self._deliveries.schedule(*self._pulled(request, timeout), on_pulled)

    def pull_now(self, request: PullRequest, timeout: float) -> PullOutcome:
        """Play the queue's next reply, whatever its delay."""
        with self._changed:
            self._check()
            self.pulls.append(request)
            return self._pulled(request, timeout)[1]

    def send_oneway(self, request: SendRequest, timeout: float) -> None:
        """Play the broker's next reply for a one-way send.

        A broker's error is dropped, and a connection that broke is logged; other errors are raised. A reply stores
        unless it has an error, or if ``stored=True``; delay and silence have no effect.
        """
        with self._changed:
            self._check()
            reply = self._next_reply(request)
            self.oneways.append(request)
            if reply.stored if reply.stored is not None else reply.error is None:
                self._keep(request)
        if isinstance(reply.error, errors.RemotingSendRequestException):
            logger.warning("oneway send to %s: %s", request.queue, reply.error)
        elif reply.error is not None and not isinstance(reply.error, errors.MQBrokerException):
            raise reply.error
        if timeout <= 0:
            raise errors.RemotingTimeoutException(f"oneway send to {request.queue}: no time left of its timeout")

    def end_transaction(self, address: str, request: EndTransaction, timeout: float, on_end: OnEnd) -> None:
        """Call `end_transaction_oneway`, and deliver its error, or None, as the outcome."""
        ending(request)
        error: errors.RocketMQError | None = None
        try:
            self.end_transaction_oneway(address, request, timeout)
        except errors.RocketMQError as exc:
            error = exc
        with self._changed:
            self._check()
            self._deliveries.schedule(0.0, error, on_end)

    def end_transaction_oneway(self, address: str, request: EndTransaction, timeout: float) -> None:
        """Record the call as "end_transaction"; a commit puts the message into its queue."""
        self._record(timeout, "end_transaction", address, request)
        with self._changed:
            committed = request.commit_or_rollback == TRANSACTION_COMMIT_TYPE
            if committed and request.commit_log_offset < len(self._store.log):
                # Like a broker, again for each call.
                self._store.copy(request.commit_log_offset, self._clock())

    def recall_message(self, address: str, request: RecallMessage, timeout: float) -> str:
        """Record the call. Messages are delivered at once, so nothing is recalled."""
        self._record(timeout, "recall_message", address, request)
        return request.recall_handle

    def check_transaction(self, address: str, physical_offset: int) -> TransactionCheck:
        """Return a broker's check of the half message at a commit-log offset, after calling `on_check_transaction`."""
        with self._changed:
            check = self._store.check(address, physical_offset, self._clock())
        if self.on_check_transaction is not None:
            self.on_check_transaction(check)
        return check

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """Return the route of `routes`; an unknown topic is code 17, as from a name server."""
        self._record(timeout, "query_route", topic)
        if topic not in self.routes:
            doing = f"looking up the route of topic {topic}"
            raise broker_error(ResponseCode.TOPIC_NOT_EXIST, f"No topic route info for {topic}", "scripted", doing)
        return self.routes[topic]

    def heart_beat(self, address: str, client_id: str, producer_groups: Collection[str], timeout: float) -> None:
        """Record the call."""
        self._record(timeout, "heart_beat", address, client_id, tuple(producer_groups))

    def unregister_client(self, address: str, client_id: str, producer_group: str, timeout: float) -> None:
        """Record the call."""
        self._record(timeout, "unregister_client", address, client_id, producer_group)

    def probe(self, queue: MessageQueue, address: str, timeout: float) -> None:
        """Ask for the queue's max offset."""
        self.max_offset(queue, address, timeout)

    def max_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the number of messages in `stored` for the queue."""
        self._record(timeout, "max_offset", queue, address)
        return len(self.stored.get(queue, ()))

    def search_offset(self, queue: MessageQueue, timestamp_ms: int, address: str, timeout: float) -> int:
        """Return the first offset at or after a time. Beyond the end of an inner-batch topic it is the last offset."""
        self._record(timeout, "search_offset", queue, timestamp_ms, address)
        offset = self._store.search(queue, timestamp_ms)
        batches = TopicConfig.of_attributes(self.attributes.get(queue.topic, {})).holds_batches
        return min(offset, len(self.stored.get(queue, ())) - 1) if batches else offset

    def earliest_msg_store_time(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the store time of the queue's first message by the transport's clock; -1 for an empty queue."""
        self._record(timeout, "earliest_msg_store_time", queue, address)
        return self._store.earliest(queue)

    def view_message(self, address: str, physical_offset: int, timeout: float, *, topic: str = "") -> MessageExt:
        """Return the message at a commit-log offset, which counts for all brokers together."""
        self._record(timeout, "view_message", address, physical_offset, topic)
        message = self._store.view(physical_offset)
        if message is None:
            raise errors.MQClientException(
                f"viewing the message at commit-log offset {physical_offset}: {address} has none"
            )
        return message

    def topics(self, timeout: float) -> frozenset[str]:
        """Return the topics of `routes`."""
        self._record(timeout, "topics")
        return frozenset(self.routes)

    def topics_at(self, name_server: str, timeout: float) -> frozenset[str]:
        """Return the topics of `routes`."""
        self._record(timeout, "topics_at", name_server)
        return frozenset(self.routes)

    def route_at(self, name_server: str, topic: str, timeout: float) -> TopicRouteData:
        """Return the result of `query_route`."""
        self._record(timeout, "route_at", name_server, topic)
        return self.query_route(topic, timeout)

    def cluster_info(self, timeout: float) -> ClusterInfo:
        """Return the brokers of all routes."""
        self._record(timeout, "cluster_info")
        brokers = {broker.broker_name: broker for route in self.routes.values() for broker in route.broker_datas}
        return ClusterInfo(tuple(brokers[name] for name in sorted(brokers)), {})

    def min_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the first offset that has not expired."""
        self._record(timeout, "min_offset", queue, address)
        return self.expired.get(queue, 0)

    def check_filter(
        self, address: str, topic: str, group: str, expression: str, expression_type: str, timeout: float
    ) -> None:
        """Record the call."""
        self._record(timeout, "check_filter", address, topic, group, expression, expression_type)

    def update_consumer_offset(
        self, queue: MessageQueue, group: str, offset: int, address: str, timeout: float
    ) -> None:
        """Record the call."""
        self._record(timeout, "update_consumer_offset", queue, group, offset, address)

    def consumer_offset(self, queue: MessageQueue, group: str, address: str, timeout: float) -> int | None:
        """Return the offset in `committed`, which counts for all brokers together."""
        self._record(timeout, "consumer_offset", queue, group, address)
        return self.committed.get((group, queue))

    def register_consumer(self, client_id: str, group: str, address: str, timeout: float) -> None:
        """Record the call, and the client among the group's `members`."""
        self._record(timeout, "register_consumer", client_id, group, address)
        self.members.setdefault((group, address), set()).add(client_id)

    def consumers(self, group: str, address: str, timeout: float) -> tuple[str, ...]:
        """Return the group's `members` at the broker."""
        self._record(timeout, "consumers", group, address)
        return tuple(self.members.get((group, address), ()))

    def topic_config(self, address: str, topic: str, timeout: float) -> TopicConfig:
        """Return the configuration from `attributes`, which is the same on every broker."""
        self._record(timeout, "topic_config", address, topic)
        return TopicConfig.of_attributes(self.attributes.get(topic, {}))

    def all_topic_attributes(self, address: str, timeout: float) -> Mapping[str, Mapping[str, str] | None]:
        """Return `attributes`, which are the same on every broker."""
        self._record(timeout, "all_topic_attributes", address)
        return self.attributes

    def runtime_info(self, address: str, timeout: float) -> Mapping[str, str]:
        """Return `release` as that of every broker."""
        self._record(timeout, "runtime_info", address)
        return {"brokerVersionDesc": self.release}

    def broker_config(self, address: str, timeout: float) -> Mapping[str, str]:
        """Return `settings`, which are the same on every broker."""
        self._record(timeout, "broker_config", address)
        return self.settings

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
        """Add the broker at `address` to the topic's route; its name is the address without the port."""
        reads = queue_nums if read_queue_nums is None else read_queue_nums
        arguments = (address, topic, queue_nums, perm, reads, topic_sys_flag, order, attributes)
        self._record(timeout, "create_topic", *arguments)
        data = QueueData(address.rpartition(":")[0], reads, queue_nums, perm, topic_sys_flag)
        self.routes[topic] = with_broker(self.routes.get(topic, TopicRouteData((), ())), data, address)

    def open(self) -> None:
        """Do nothing: the thread of a threaded one runs."""

    def close(self) -> None:
        """Fail what is in flight with ``RemotingSendRequestException``. Idempotent."""
        self._deliveries.close()

    def _next_reply(self, request: SendRequest) -> Reply:
        broker = request.queue.broker_name
        return take_reply(self._sends[broker], request, self.always.get(broker, Reply()))

    def _outcome(self, request: SendRequest, reply: Reply, timeout: float, wait: float) -> SendOutcome:
        queue, late = request.queue, reply.silent or reply.delay > timeout
        offset, ids = self._keep(request) if reply.stores else (-1, "")
        text = f"sending to {queue}: no answer within {timeout:g} s"
        error = errors.RemotingTimeoutException(text) if late else reply.error
        if error is not None:
            return SendOutcome(queue, None, error, wait * 1000.0)
        return SendOutcome(queue, reply.status, None, wait * 1000.0, queue_offset=offset, offset_msg_id=ids)

    def _keep(self, request: SendRequest) -> tuple[int, str]:
        """Store a request's messages; return the queue offset of the first, and the comma-separated ids."""
        batch, queue = request.batch, request.queue
        messages = _messages_of(batch)
        half = not batch.batch and messages[0].is_half_message
        stored_in = MessageQueue(HALF_TOPIC, queue.broker_name, 0) if half else queue
        now, sys_flag, born = self._clock(), batch.sys_flag, request.born_timestamp
        read = [
            self._store.append(message, stored_in, queue, now, sys_flag=sys_flag, born_timestamp=born)
            for message in messages
        ]
        return read[0].queue_offset, ",".join(message.offset_msg_id for message in read)

    def _pulled(self, request: PullRequest, timeout: float) -> tuple[float, PullOutcome]:
        """Return the seconds until a pull's outcome, and the outcome."""
        queue = request.target.queue
        reply = take_reply(self._pulls[queue], request, self.always_pull.get(queue, PullReply()))
        timeout += request.suspend_ms / 1000
        if reply.silent or reply.delay > timeout:
            error = errors.RemotingTimeoutException(f"pulling from {queue}: no answer within {timeout:g} s")
            return timeout, PullOutcome(None, error=error)
        if reply.outcome is not None:
            return reply.delay, reply.outcome
        datas = self.routes[queue.topic].queue_datas if queue.topic in self.routes else ()
        if any(data.broker_name == queue.broker_name and queue.queue_id >= data.read_queue_nums for data in datas):
            remark = f"queueId[{queue.queue_id}] is illegal, topic:[{queue.topic}]"
            return reply.delay, PullOutcome(None, error=broker_error(29, remark, request.address, "pulling"))
        outcome = self._store.pull(request, reply.most)
        held = request.suspend_ms / 1000 if outcome.status is PullStatus.NO_NEW_MSG else 0.0
        return max(reply.delay, held), outcome

    def _check(self) -> None:
        if self.closed:
            raise errors.RocketMQError("the transport is closed: create a new one")

    def _record(self, timeout: float, name: str, *arguments: Any) -> None:
        with self._changed:
            self._check()
            self.calls.append((name, *arguments))
            if self._failures[name]:
                raise self._failures[name].popleft()
        if timeout <= 0:
            raise errors.RemotingTimeoutException(f"{name}: no time left of its timeout")


def _messages_of(batch: EncodedBatch) -> list[Message]:
    if batch.encoding is Encoding.REMOTING:
        return messages_in(batch)
    # Tests over remoting do not need protobuf.
    from rocketmq_spark.protocol.grpc._pb.service_pb2 import SendMessageRequest

    messages = []
    for message in SendMessageRequest.FromString(b"".join(batch.body)).messages:
        system = message.system_properties
        named = {KEYS: " ".join(system.keys), TAGS: system.tag, UNIQ_KEY: system.message_id}
        properties = {name: text for name, text in named.items() if text} | dict(message.user_properties)
        messages.append(Message(message.topic.name, message.body, properties=properties))
    return messages
