"""The calls of a scripted transport that wait for their answer: routes, heart-beats, offsets, topics, transactions.

Rule 1: every call is recorded, and fails if the test said so or no time is left; else it succeeds at once.
Rule 2: the answers agree with what the scripted brokers keep.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from rocketmq_spark.errors import MQClientException, RemotingTimeoutException, RocketMQError
from rocketmq_spark.message import Message, MessageQueue
from rocketmq_spark.message_ext import MessageExt
from rocketmq_spark.recall import RecallMessage
from rocketmq_spark.route_data import MASTER_ID, BrokerData, QueueData, TopicRouteData
from rocketmq_spark.transaction import EndTransaction, TransactionCheck
from rocketmq_spark.transport.base import OnCheckTransaction
from rocketmq_spark.transport.scripted_store import ScriptedStore
from rocketmq_spark.wire.codes import ResponseCode, broker_error
from rocketmq_spark.wire.topic_config import TopicConfig


class ScriptedCalls:
    """What name servers and brokers answer to, apart from sends.

    Parameters
    ----------
    routes : mapping of str to TopicRouteData
        By topic.
    clock : callable
        Seconds.
    """

    def __init__(self, routes: Mapping[str, TopicRouteData], clock: Callable[[], float]) -> None:
        self.routes = dict(routes)
        self.attributes: dict[str, Mapping[str, str]] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.on_check_transaction: OnCheckTransaction | None = None
        self._store = ScriptedStore()
        self.stored: dict[MessageQueue, list[Message]] = self._store.queues
        self._failures: dict[str, deque[RocketMQError]] = {}
        self._clock = clock
        self._changed = threading.Condition()
        self._closed = False

    def fail(self, call: str, *errors: RocketMQError) -> None:
        """Let the next calls of a blocking method (such as ``"query_route"``) fail, one with each error."""
        with self._changed:
            self._failures.setdefault(call, deque()).extend(errors)

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """Return the route of `routes`; an unknown topic is code 17, as from a name server."""
        self._record(timeout, "query_route", topic)
        found = self.routes.get(topic)
        if found is None:
            doing = f"looking up the route of topic {topic}"
            raise broker_error(ResponseCode.TOPIC_NOT_EXIST, f"No topic route info for {topic}", "scripted", doing)
        return found

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
        """Return how many messages `stored` has for the queue."""
        self._record(timeout, "max_offset", queue, address)
        return len(self.stored.get(queue, ()))

    def search_offset(self, queue: MessageQueue, timestamp_ms: int, address: str, timeout: float) -> int:
        """Return the first offset stored at or after a time of the transport's clock, in milliseconds.

        Past the end it is the end; of a topic for inner batches, as a broker has it, the last message that there is.
        """
        self._record(timeout, "search_offset", queue, timestamp_ms, address)
        found = self._store.search(queue, timestamp_ms)
        if TopicConfig.of_attributes(self.attributes.get(queue.topic, {})).holds_batches:
            return min(found, len(self.stored.get(queue, ())) - 1)
        return found

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

    def end_transaction_oneway(self, address: str, request: EndTransaction, timeout: float) -> None:
        """Record the call as "end_transaction"; a commit puts the message into its queue."""
        self._record(timeout, "end_transaction", address, request)
        with self._changed:
            self._store.end_transaction(request, self._clock())

    def recall_message(self, address: str, request: RecallMessage, timeout: float) -> str:
        """Record the call; what is stored here is delivered at once, so nothing is taken back."""
        self._record(timeout, "recall_message", address, request)
        return request.recall_handle

    def check_transaction(self, address: str, physical_offset: int) -> TransactionCheck:
        """Let a broker ask back for the half message at a commit-log offset; return what it asked.

        The handler is called in the calling thread; without one nobody hears the question.
        """
        with self._changed:
            check = self._store.check(address, physical_offset, self._clock())
        if self.on_check_transaction is not None:
            self.on_check_transaction(check)
        return check

    def topic_config(self, address: str, topic: str, timeout: float) -> TopicConfig:
        """Return the configuration that `attributes` has for the topic, the same on every broker."""
        self._record(timeout, "topic_config", address, topic)
        return TopicConfig.of_attributes(self.attributes.get(topic, {}))

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
