"""Sends the messages of one running producer: selects queues, makes attempts, and starts asynchronous sends.

See docs/internals/producer.md#send-loop, docs/internals/routing.md#selectors and
docs/internals/routing.md#latency-faults.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from rocketmq_spark.errors import BatchRefusedException, MQClientException, RocketMQError, RouteNotFoundException
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.names import is_blank
from rocketmq_spark.model.properties import TIMERS
from rocketmq_spark.model.send_result import SendResult
from rocketmq_spark.producer.async_send import AsyncSend, BackPressure, Outstanding, SendFuture
from rocketmq_spark.producer.attempt import Attempt, Deadline, SendAttempt, SendLoop
from rocketmq_spark.producer.encode import EncodedMessage, MessageEncoder
from rocketmq_spark.producer.hooks import CommunicationMode
from rocketmq_spark.protocol.remoting.codes import NO_NAME_SERVER, ResponseCode
from rocketmq_spark.routing.fault_strategy import FaultSite, site_of
from rocketmq_spark.routing.route_cache import TopicPublishInfo
from rocketmq_spark.routing.selectors import MessageQueueSelector, ThreadLocalSelector, select_queue

logger = logging.getLogger("rocketmq_spark.producer")


class QueueChoice(NamedTuple):
    """The queue that a caller chooses, or the selector and its argument; empty if the producer chooses."""

    queue: MessageQueue | None = None
    selector: MessageQueueSelector | None = None
    arg: Any = None

    def __bool__(self) -> bool:
        return self.queue is not None or self.selector is not None


class MessageSender:
    """Sends messages for one producer; safe for many threads. Timeouts are seconds. Retry codes may be added later."""

    def __init__(
        self,
        attempt: SendAttempt,
        encoder: MessageEncoder,
        *,
        async_executor: Executor,
        callback_executor: Executor,
        retry_response_codes: Collection[int],
        rng: random.Random | None = None,
    ) -> None:
        options = attempt.options
        self._options = options
        self._attempt = attempt
        self._clock = attempt.runtime.clock
        self._instance = attempt.instance
        self._encoder = encoder
        self._async_executor = async_executor
        self._callback_executor = callback_executor
        self._selector = ThreadLocalSelector(self._instance.faults, rng or random.Random())
        self._api_timeout = options.connection.mq_client_api_timeout / 1000
        self._loop = SendLoop(
            options.retry_times_when_send_failed,
            retry_response_codes,
            options.retry_another_broker_when_not_store_ok,
            options.send_msg_max_timeout_per_request / 1000,
        )
        self._loop_once = replace(self._loop, retry_times=0)
        # Topics whose brokers have timers.
        self._timed_topics: set[str] = set()
        # Topics whose unknown configuration was logged.
        self._warned_topics: set[str] = set()
        self.producer_group = attempt.producer_group
        self.timeout = options.send_msg_timeout / 1000
        self.outstanding = Outstanding()
        self.back_pressure = (
            BackPressure(options.back_pressure_for_async_send_num, options.back_pressure_for_async_send_size)
            if options.enable_backpressure_for_async_mode
            else None
        )

    def send(self, message: Message, timeout: float, choice: QueueChoice) -> SendResult:
        """Send a message and wait for the outcome."""
        deadline = Deadline(timeout, self._clock)
        return self._send(self._encode(message), choice, deadline)

    def send_batch(self, messages: Sequence[Message], timeout: float, choice: QueueChoice) -> SendResult:
        """Send messages as one request and wait for the outcome; raises as `encode_batch` and `_check_keys`."""
        deadline = Deadline(timeout, self._clock)
        return self._send(self._encode_batch(messages), choice, deadline)

    def send_oneway(self, message: Message, timeout: float, choice: QueueChoice) -> None:
        """Send a message, and return when it is written (docs/internals/producer.md#one-way-sends)."""
        if self._options.over_grpc:
            raise _not_over_grpc(
                "sending oneway: a proxy answers every request, and the transport waits for the answer; use send or "
                "send_async"
            )
        deadline = Deadline(timeout, self._clock)
        encoded = self._encode(message)
        self._run(self._loop_once, encoded, choice, deadline, partial(self._attempt.send_oneway, encoded))

    def send_async(self, message: Message, timeout: float, choice: QueueChoice) -> Future[SendResult]:
        """Send a message and return a future at once, or with back pressure after a wait for permits or a route."""
        nbytes = _body_size(message) or 1
        return self._start(lambda: self._encode(message), 1, nbytes, timeout, choice)

    def send_batch_async(self, messages: Sequence[Message], timeout: float, choice: QueueChoice) -> Future[SendResult]:
        """Send messages as one request, as `send_async`; the errors of the future are those of `send_batch`."""
        nbytes = 1
        if self.back_pressure is not None:
            nbytes += sum(map(_body_size, messages))
        return self._start(lambda: self._encode_batch(messages), len(messages) or 1, nbytes, timeout, choice)

    def send_merged_async(self, messages: Sequence[Message], timeout: float) -> Future[SendResult]:
        """Send messages that may also be sent alone, as `send_batch_async`, unless their topic may be a compaction one.

        That one drops messages without keys from a batch, but rejects a single one.
        """
        encode = partial(self._encode_batch, messages, merged=True)
        return self._start(encode, len(messages), 1, timeout, QueueChoice())

    def _encode(self, message: Message) -> EncodedMessage:
        encoded = self._encoder.encode(message)
        if not TIMERS.isdisjoint(encoded.message.properties) and not self._options.over_grpc:
            self._check_timers(encoded.message.topic)
        return encoded

    def _encode_batch(self, messages: Sequence[Message], *, merged: bool = False) -> EncodedMessage:
        encoded = self._encoder.encode_batch(messages)
        self._check_keys(encoded, messages, merged=merged)
        return encoded

    def _start(
        self, encode: Callable[[], EncodedMessage], messages: int, nbytes: int, timeout: float, choice: QueueChoice
    ) -> Future[SendResult]:
        deadline = Deadline(timeout, self._clock)
        self.outstanding.begin(messages)
        end = partial(self.outstanding.end, messages)
        future = SendFuture(self._callback_executor, end)
        try:
            if self.back_pressure is not None:
                future.release = self.back_pressure.admit(nbytes, deadline)
        except RocketMQError as exc:
            future.fail(exc)
            return future
        except BaseException:
            end(None)
            raise

        def begin() -> None:
            if not future.begin():
                return
            try:
                deadline.require("sending asynchronously, after waiting for a thread")
                encoded = encode()
                reselect = None if choice else partial(self._reselect, encoded.message.topic)

                def attempt(queue: MessageQueue, _left: float) -> None:
                    prepared = self._attempt.prepare(encoded, queue, CommunicationMode.ASYNC, deadline)
                    AsyncSend(self._attempt, prepared, deadline, reselect, future.finish).start()

                self._run(self._loop_once, encoded, choice, deadline, attempt)
            except Exception as exc:
                future.finish(None, exc)

        def fail_if_dropped(task: Future[None]) -> None:
            if task.cancelled():
                future.fail(
                    MQClientException("sending asynchronously: the executor cancelled the send before it began")
                )

        try:
            task = self._async_executor.submit(begin)
        except Exception as exc:
            if self.back_pressure is not None:
                # The permits limit how many sends the caller's own thread has to make.
                begin()
            else:
                rejected = MQClientException(f"sending asynchronously: the executor rejected the send ({exc})")
                rejected.__cause__ = exc
                future.fail(rejected)
        else:
            task.add_done_callback(fail_if_dropped)
        return future

    def _send(self, encoded: EncodedMessage, choice: QueueChoice, deadline: Deadline) -> SendResult:
        result = self._run(self._loop, encoded, choice, deadline, partial(self._attempt.send, encoded))
        assert result is not None
        return result

    def _run(
        self, loop: SendLoop, encoded: EncodedMessage, choice: QueueChoice, deadline: Deadline, attempt: Attempt
    ) -> SendResult | None:
        """Make one attempt at the chosen queue, or let the loop try the queues of the topic."""
        if choice:
            chosen = self._chosen_queue(encoded, choice, deadline)
            return attempt(chosen, deadline.require(f"sending to {chosen}"))
        info = self._route(encoded.message.topic, deadline)

        def select(last_broker_name: str | None, retry: bool) -> MessageQueue | None:
            return self._selector.select(info, last_broker_name, self._clock(), reset_index=retry)

        def reported_attempt(queue: MessageQueue, left: float) -> SendResult | None:
            began = self._clock()
            try:
                result = attempt(queue, left)
            except RocketMQError as exc:
                self._attempt.update_fault(site_of(exc), queue.broker_name, began)
                raise
            except KeyboardInterrupt:
                self._attempt.update_fault(FaultSite.INTERRUPTED, queue.broker_name, began)
                raise
            self._attempt.update_fault(FaultSite.RETURNED, queue.broker_name, began)
            return result

        return loop.run(encoded.message.topic, deadline, select, reported_attempt)

    def _chosen_queue(self, encoded: EncodedMessage, choice: QueueChoice, deadline: Deadline) -> MessageQueue:
        topic, queue = encoded.message.topic, choice.queue
        if self._options.over_grpc:
            raise _not_over_grpc(
                f"sending to a queue of topic {topic}: a proxy chooses the queues itself; leave queue and "
                "selector out (messages of one sharding_key keep their order in a topic of the type FIFO)"
            )
        if queue is not None:
            if queue.topic != topic:
                raise MQClientException(f"sending to {queue}: the message's topic is {topic}; choose a queue of it")
            return queue
        assert choice.selector is not None
        try:
            info = self._route(topic, deadline)
        except RouteNotFoundException as exc:
            code = exc.response_code if exc.response_code == NO_NAME_SERVER else -1
            raise MQClientException(str(exc), code) from exc
        return select_queue(choice.selector, list(info.queues), encoded.message, choice.arg)

    def _route(self, topic: str, deadline: Deadline) -> TopicPublishInfo:
        info = self._instance.routes.cached(topic)
        if info is not None and info.ok:
            return info
        if not self._options.connection.route_servers:
            raise RouteNotFoundException(
                f"sending to topic {topic}: the list of name servers is empty; give name_server, or endpoints for gRPC",
                NO_NAME_SERVER,
            )
        return self._instance.routes.look_up(topic, min(self._api_timeout, max(deadline.left, 0.0)))

    def _reselect(self, topic: str, last_broker_name: str) -> MessageQueue | None:
        info = self._instance.routes.cached(topic)
        return None if info is None else self._selector.select(info, last_broker_name, self._clock())

    def _check_keys(self, encoded: EncodedMessage, messages: Sequence[Message], *, merged: bool) -> None:
        """Raise for a message without keys to a compaction topic (docs/internals/reads.md#compaction-topics).

        A merged batch must not go to an unknown topic either, because its messages can be sent alone.
        """
        keyless = next((number for number, message in enumerate(messages) if is_blank(message.keys or "")), None)
        if keyless is None or self._options.over_grpc:
            return
        topic = encoded.message.topic
        info = self._route(topic, Deadline(self._api_timeout, self._clock))
        configs = self._instance.topic_configs.look_up({topic: info.route})[topic]
        if configs.compacted:
            raise BatchRefusedException(
                f"sending a batch to topic {topic}: message {keyless} has no keys, and brokers of a "
                "compaction topic (cleanup.policy=COMPACTION) drop such messages; set the keys of every message",
                ResponseCode.MESSAGE_ILLEGAL,
            )
        if merged and configs.unknown.keys() - self._instance.topic_configs.old_brokers(configs, info.route).keys():
            raise BatchRefusedException(
                f"sending messages to topic {topic} together: message {keyless} has no keys, and whether this is a "
                "compaction topic is unknown; send it alone"
            )
        if configs.unknown and not merged and topic not in self._warned_topics:
            self._warned_topics.add(topic)
            logger.warning(
                "sending batches without keys to topic %s: its configuration is unknown (%s); if it is a compaction "
                "topic, its brokers drop such messages",
                *(topic, next(iter(configs.unknown.values()))),
            )

    def _check_timers(self, topic: str) -> None:
        """Raise if a broker of a topic would deliver a message at once, because it ignores its time of delivery."""
        if topic in self._timed_topics:
            return
        info = self._route(topic, Deadline(self._api_timeout, self._clock))
        configs = self._instance.topic_configs.look_up({topic: info.route})[topic]
        for broker_name, release in self._instance.topic_configs.old_brokers(configs, info.route).items():
            raise MQClientException(
                f"sending to topic {topic}: broker {broker_name} has RocketMQ {release}, which ignores times of "
                "delivery and would deliver the message at once: set delay_time_level, or use brokers of RocketMQ 5",
                ResponseCode.MESSAGE_ILLEGAL,
            )
        self._timed_topics.add(topic)


def _body_size(message: Message) -> int:
    # Anything but a message with bytes is refused later, by the future.
    return len(message.body) if isinstance(message, Message) and isinstance(message.body, bytes) else 0


def _not_over_grpc(reason: str) -> MQClientException:
    return MQClientException(f"{reason}; or use a producer with transport=remoting (name_server)")
