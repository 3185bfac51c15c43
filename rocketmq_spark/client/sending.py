"""Every way to send a message, from the packed message to its outcome, for one running producer.

Rule 1: a queue of the caller's (or of its selector) gets one attempt and raises what happened; else the loop tries.
Rule 2: the fault strategy hears of attempts whose queue was ours to choose, and of no others.
Rule 3: an asynchronous caller hears of everything through its future; the one exception is a wrong type.

Follows ``DefaultMQProducerImpl.java`` (spec/producer.md sections 6, 9, 11, 16.1).
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any, Final

from rocketmq_spark.client.send_future import SendFuture
from rocketmq_spark.errors import MQClientException, RocketMQError, RouteNotFoundException
from rocketmq_spark.message import Message, MessageQueue
from rocketmq_spark.names import is_blank
from rocketmq_spark.namespace import wrap
from rocketmq_spark.producer.async_send import AsyncRules, AsyncSend
from rocketmq_spark.producer.back_pressure import Admission, BackPressure
from rocketmq_spark.producer.budget import Budget
from rocketmq_spark.producer.client_instance import ClientInstance
from rocketmq_spark.producer.fault_preset import FaultSite, site_of
from rocketmq_spark.producer.hooks import CommunicationMode, Hooks
from rocketmq_spark.producer.kernel import Kernel
from rocketmq_spark.producer.outgoing import Outgoing
from rocketmq_spark.producer.queue_selectors import MessageQueueSelector, select_queue
from rocketmq_spark.producer.route_cache import TopicPublishInfo
from rocketmq_spark.producer.selector import ThreadLocalSelector
from rocketmq_spark.producer.send import Attempt, SendLoop
from rocketmq_spark.producer_options import ProducerOptions
from rocketmq_spark.send_result import SendResult
from rocketmq_spark.wire.codes import ResponseCode

logger = logging.getLogger("rocketmq_spark.producer")

_NO_NAME_SERVER: Final = 10004


@dataclass(frozen=True, slots=True)
class Target:
    """Where the caller wants a message to go, if anywhere in particular."""

    queue: MessageQueue | None = None
    selector: MessageQueueSelector | None = None
    arg: Any = None


class Sending:
    """The sends of one producer.

    Parameters
    ----------
    options : ProducerOptions
    instance : ClientInstance
    kernel : Kernel
    hooks : Hooks
    async_executor, callback_executor : Executor
        Where asynchronous sends are prepared, and where their callbacks run.
    retry_response_codes : set of int
        Shared with the producer, which may add to it.
    clock : callable
        Seconds, monotonic.
    rng : random.Random
    """

    def __init__(
        self,
        options: ProducerOptions,
        instance: ClientInstance,
        kernel: Kernel,
        hooks: Hooks,
        *,
        async_executor: Executor,
        callback_executor: Executor,
        retry_response_codes: set[int],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._options = options
        self._namespace = options.wrapped_namespace
        self._instance = instance
        self._kernel = kernel
        self._async_executor = async_executor
        self._callback_executor = callback_executor
        self._clock = clock
        # Topics whose configuration is unknown, and a warning says so.
        self._unchecked: set[str] = set()
        self._under_way = 0
        self._changed = threading.Condition()
        self._selector = ThreadLocalSelector(instance.faults, rng)
        self._api_timeout = options.mq_client_api_timeout / 1000
        self._loop = SendLoop(
            options.retry_times_when_send_failed,
            retry_response_codes,
            options.retry_another_broker_when_not_store_ok,
            options.send_msg_max_timeout_per_request / 1000,
        )
        self._once = replace(self._loop, retry_times=0)
        self._async_rules = AsyncRules(
            kernel,
            instance.transport,
            hooks,
            options.retry_times_when_send_async_failed,
            self._update_fault,
            clock,
        )
        self.back_pressure = (
            BackPressure(options.back_pressure_for_async_send_num, options.back_pressure_for_async_send_size)
            if options.enable_backpressure_for_async_mode
            else None
        )

    def send(self, pack: Callable[[], Outgoing], target: Target, seconds: float) -> SendResult:
        """Send and wait for the outcome."""
        budget = Budget(seconds, self._clock)
        outgoing = pack()

        def attempt(queue: MessageQueue, left: float) -> SendResult:
            return self._kernel.send(outgoing, queue, left)

        result = self._run(self._loop, outgoing, target, budget, attempt)
        assert result is not None
        return result

    def with_keys(self, outgoing: Outgoing, members: Sequence[Message]) -> Outgoing:
        """Return a batch if its topic keeps all of its messages.

        A broker of a compaction topic rejects a single message without keys. It accepts a batch, and drops such
        messages of it.

        Raises
        ------
        MQClientException
            Code 13: a message without keys to a compaction topic.
        """
        keyless = next((number for number, member in enumerate(members) if is_blank(member.keys or "")), None)
        if keyless is None or self._options.over_grpc:
            return outgoing
        topic = outgoing.message.topic
        info = self._route(topic, Budget(self._api_timeout, self._clock))
        configs = self._instance.topic_configs.get({topic: info.route})[topic]
        if configs.compacted:
            raise MQClientException(
                f"sending a batch to topic {outgoing.topic}: message {keyless} has no keys, and brokers of a "
                "compaction topic (cleanup.policy=COMPACTION) drop such messages; set the keys of every message",
                ResponseCode.MESSAGE_ILLEGAL,
            )
        if configs.unknown and topic not in self._unchecked:
            self._unchecked.add(topic)
            logger.warning(
                "sending batches without keys to topic %s: whether it is a compaction topic, which drops such "
                "messages, is unknown: %s",
                outgoing.topic,
                next(iter(configs.unknown.values())),
            )
        return outgoing

    def send_oneway(self, pack: Callable[[], Outgoing], target: Target, seconds: float) -> None:
        """Send, and wait until it is written."""
        if self._options.over_grpc:
            raise _not_over_grpc(
                "sending oneway: a proxy answers every request, and none is sent without waiting for it; use send or "
                "send_async"
            )
        budget = Budget(seconds, self._clock)
        outgoing = pack()

        def attempt(queue: MessageQueue, left: float) -> None:
            self._kernel.send_oneway(outgoing, queue, left)

        self._run(self._once, outgoing, target, budget, attempt)

    def send_async(
        self, pack: Callable[[], Outgoing], target: Target, seconds: float, nbytes: int
    ) -> Future[SendResult]:
        """Send, and return a future at once; with back pressure, once there is room for `nbytes`."""
        budget = Budget(seconds, self._clock)
        future = SendFuture(self._callback_executor)
        with self._changed:
            self._under_way += 1
        admission: Admission | None = None
        try:
            if self.back_pressure is not None:
                admission = self.back_pressure.admit(nbytes, budget)
        except RocketMQError as exc:
            self._refuse(future, None, exc)
            return future
        except BaseException:
            self._ended()
            raise

        def dropped(task: Future[None]) -> None:
            if task.cancelled():
                self._refuse(future, admission, MQClientException("sending asynchronously: the executor dropped it"))

        try:
            task = self._async_executor.submit(self._begin_async, pack, target, budget, future, admission)
        except Exception as exc:
            if admission is not None:
                # With back pressure there can't be many: in the caller's own thread then.
                self._begin_async(pack, target, budget, future, admission)
            else:
                refused = MQClientException(f"sending asynchronously: the executor refused it ({exc})")
                refused.__cause__ = exc
                self._refuse(future, None, refused)
        else:
            task.add_done_callback(dropped)
        return future

    def drain(self, seconds: float) -> bool:
        """Wait until no asynchronous send is under way; False if some are after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way, seconds)

    def _ended(self) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def _begin_async(
        self,
        pack: Callable[[], Outgoing],
        target: Target,
        budget: Budget,
        future: Future[SendResult],
        admission: Admission | None,
    ) -> None:
        def done(result: SendResult | None, error: Exception | None) -> None:
            self._complete(future, admission, result, error)

        if not future.set_running_or_notify_cancel():
            self._cancelled(admission)
            return
        try:
            budget.require("sending asynchronously, after waiting for a thread")
            outgoing = pack()
            chosen = target.queue is not None or target.selector is not None

            def attempt(queue: MessageQueue, _left: float) -> None:
                prepared = self._kernel.prepare(outgoing, queue, CommunicationMode.ASYNC)
                reselect = None if chosen else lambda broker: self._reselect(outgoing.message.topic, broker)
                AsyncSend(self._async_rules, prepared, budget, reselect, done).start()

            self._run(self._once, outgoing, target, budget, attempt)
        except Exception as exc:
            done(None, exc)

    def _run(
        self, loop: SendLoop, outgoing: Outgoing, target: Target, budget: Budget, attempt: Attempt
    ) -> SendResult | None:
        topic = outgoing.message.topic
        if target.queue is not None or target.selector is not None:
            if self._options.over_grpc:
                raise _not_over_grpc(
                    f"sending to a queue of topic {outgoing.topic}: a proxy chooses the queues itself; leave queue and "
                    "selector out, messages of one sharding_key keep their order in a topic of the type FIFO"
                )
            queue = self._wanted_queue(outgoing, target, budget)
            return attempt(queue, budget.require(f"sending to {queue}"))
        info = self._route(topic, budget)

        def select(last_broker_name: str | None, retry: bool) -> MessageQueue | None:
            return self._selector.select(info, last_broker_name, self._clock(), reset_index=retry)

        return loop.run(outgoing.topic, budget, select, self._observed(attempt))

    def _observed(self, attempt: Attempt) -> Attempt:
        def observed(queue: MessageQueue, left: float) -> SendResult | None:
            began = self._clock()
            try:
                result = attempt(queue, left)
            except RocketMQError as exc:
                self._update_fault(site_of(exc), queue.broker_name, self._clock() - began)
                raise
            except KeyboardInterrupt:
                self._update_fault(FaultSite.INTERRUPTED, queue.broker_name, self._clock() - began)
                raise
            self._update_fault(FaultSite.RETURNED, queue.broker_name, self._clock() - began)
            return result

        return observed

    def _update_fault(self, site: FaultSite, broker_name: str, seconds: float) -> None:
        self._instance.faults.update(site, broker_name, seconds * 1000, self._clock())

    def _reselect(self, topic: str, last_broker_name: str) -> MessageQueue | None:
        info = self._instance.routes.cached(topic)
        return None if info is None else self._selector.select(info, last_broker_name, self._clock())

    def _route(self, topic: str, budget: Budget) -> TopicPublishInfo:
        info = self._instance.routes.cached(topic)
        if info is not None and info.ok:
            return info
        if not self._options.route_servers:
            raise RouteNotFoundException(
                f"sending to topic {topic}: the list of name servers is empty; give name_server, or endpoints for gRPC",
                _NO_NAME_SERVER,
            )
        return self._instance.routes.find(topic, min(self._api_timeout, max(budget.left, 0.0)))

    def _wanted_queue(self, outgoing: Outgoing, target: Target, budget: Budget) -> MessageQueue:
        if target.queue is not None:
            queue = replace(target.queue, topic=wrap(self._namespace, target.queue.topic))
            if queue.topic != outgoing.message.topic:
                raise MQClientException(
                    f"sending to {target.queue}: the message's topic is {outgoing.topic}, the queue must be one of it"
                )
            return queue
        assert target.selector is not None
        try:
            info = self._route(outgoing.message.topic, budget)
        except RouteNotFoundException as exc:
            raise MQClientException(
                str(exc), exc.response_code if exc.response_code == _NO_NAME_SERVER else -1
            ) from exc
        queues = [replace(queue, topic=outgoing.topic) for queue in info.queues]
        chosen = select_queue(target.selector, queues, replace(outgoing.message, topic=outgoing.topic), target.arg)
        return replace(chosen, topic=wrap(self._namespace, chosen.topic))

    def _refuse(self, future: Future[SendResult], admission: Admission | None, error: Exception) -> None:
        """End a send that no thread has begun with."""
        if future.set_running_or_notify_cancel():
            self._complete(future, admission, None, error)
        else:
            self._cancelled(admission)

    def _cancelled(self, admission: Admission | None) -> None:
        if admission is not None:
            admission.release()
        self._ended()

    def _complete(
        self,
        future: Future[SendResult],
        admission: Admission | None,
        result: SendResult | None,
        error: Exception | None,
    ) -> None:
        if admission is not None:
            admission.release()
        if error is not None:
            future.set_exception(error)
        else:
            assert result is not None
            future.set_result(result)
        self._ended()


def _not_over_grpc(reason: str) -> MQClientException:
    return MQClientException(f"{reason}; or use a producer with transport=remoting (name_server)")
