"""One attempt: the broker's address, the hooks around it, the request, and its outcome as a result or an exception.

Rule 1: no choice of a queue and no retry here.
Rule 2: nothing is sent once the attempt's time is over, and no hook has seen it then.
Rule 3: an observer sees every attempt that passed the check-forbidden hooks, before and after.

Follows ``DefaultMQProducerImpl.sendKernelImpl`` and ``MQClientAPIImpl.processSendResponse`` (spec/producer.md
sections 7, 8).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.errors import (
    MQBrokerException,
    MQClientException,
    RemotingException,
    RemotingTimeoutException,
    RocketMQError,
)
from rocketmq_spark.message import MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.producer.budget import Budget
from rocketmq_spark.producer.client_instance import ClientInstance
from rocketmq_spark.producer.heart_beat import API_TIMEOUT
from rocketmq_spark.producer.hooks import (
    CheckForbiddenContext,
    CommunicationMode,
    Hooks,
    SendMessageContext,
    message_type_of,
)
from rocketmq_spark.producer.outgoing import Outgoing
from rocketmq_spark.producer.route_cache import RouteCache
from rocketmq_spark.send_result import SendResult

# A transport ends every request by itself; this much later it has broken its promise, seconds.
_GRACE: Final = 10.0

_VIP_OFFSET: Final = 2


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """What every attempt of a producer has in common.

    Parameters
    ----------
    producer_group : str
        With the namespace.
    name_servers : tuple of str
    client_ip : str
    namespace : str
    create_topic_key : str
    default_topic_queue_nums : int
    unit_mode : bool
    vip_channel_enabled : bool
    """

    producer_group: str
    name_servers: tuple[str, ...]
    client_ip: str
    namespace: str
    create_topic_key: str
    default_topic_queue_nums: int
    unit_mode: bool
    vip_channel_enabled: bool


@dataclass(frozen=True, slots=True)
class Prepared:
    """An attempt that only has to be sent."""

    outgoing: Outgoing
    request: SendRequest
    context: SendMessageContext | None


class Kernel:
    """Makes the attempts of one producer; safe for many threads.

    Parameters
    ----------
    settings : KernelSettings
    instance : ClientInstance
    hooks : Hooks
    clock, wall_clock : callable
        Seconds; monotonic, and since the epoch.
    """

    def __init__(
        self,
        settings: KernelSettings,
        instance: ClientInstance,
        hooks: Hooks,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._instance = instance
        self._hooks = hooks
        self._clock = clock
        self._wall_clock = wall_clock

    def send(self, outgoing: Outgoing, queue: MessageQueue, seconds: float) -> SendResult:
        """Send and wait for the answer.

        Raises
        ------
        MQClientException
            No address of the broker is known, or a check-forbidden hook refused.
        MQBrokerException
            The broker answered with an error code.
        RemotingException
            There was no answer, or no time left to send.
        """
        budget = Budget(seconds, self._clock)
        prepared = self.prepare(outgoing, queue, CommunicationMode.SYNC)
        try:
            result = self.result_of(prepared, self._exchange(prepared, budget))
        except (RemotingException, MQBrokerException, KeyboardInterrupt) as exc:
            self._hooks.after(prepared.context, exception=exc)
            raise
        self._hooks.after(prepared.context, result)
        return result

    def send_oneway(self, outgoing: Outgoing, queue: MessageQueue, seconds: float) -> None:
        """Send, and return once the socket has taken the last byte.

        Raises
        ------
        MQClientException, RemotingException
            See `send`; no answer is waited for, so none is missed.
        """
        budget = Budget(seconds, self._clock)
        prepared = self.prepare(outgoing, queue, CommunicationMode.ONEWAY)
        try:
            self._instance.transport.send_oneway(prepared.request, budget.require(_doing(prepared)))
        except (RemotingException, KeyboardInterrupt) as exc:
            self._hooks.after(prepared.context, exception=exc)
            raise
        self._hooks.after(prepared.context)

    def prepare(self, outgoing: Outgoing, queue: MessageQueue, mode: CommunicationMode) -> Prepared:
        """Find the broker, ask the hooks, and make the request.

        Raises
        ------
        MQClientException
            No address of the broker is known, or a check-forbidden hook refused.
        """
        settings, message = self._settings, outgoing.message
        address = self.address_of(queue)
        if settings.vip_channel_enabled:
            host, _, port = address.rpartition(":")
            address = f"{host}:{int(port) - _VIP_OFFSET}"
        self._hooks.check_forbidden(
            lambda: CheckForbiddenContext(
                settings.name_servers, settings.producer_group, mode, address, message, queue, settings.unit_mode
            )
        )
        context = self._hooks.before(
            lambda: SendMessageContext(
                producer_group=settings.producer_group,
                communication_mode=mode,
                born_host=settings.client_ip,
                broker_addr=address,
                message=message,
                message_queue=queue,
                namespace=settings.namespace,
                message_type=message_type_of(message),
            )
        )
        request = SendRequest(
            outgoing.encoded,
            queue,
            address,
            settings.producer_group,
            settings.create_topic_key,
            settings.default_topic_queue_nums,
            int(self._wall_clock() * 1000),
            unit_mode=settings.unit_mode,
            reconsume_times=outgoing.reconsume_times,
            max_reconsume_times=outgoing.max_reconsume_times,
            reply=message.properties.get("MSG_TYPE") == "reply",
        )
        return Prepared(outgoing, request, context)

    def address_of(self, queue: MessageQueue) -> str:
        """Return ``host:port`` of the master of the queue's broker; see `broker_address`."""
        return broker_address(self._instance.routes, queue)

    def known_address(self, broker_name: str) -> str | None:
        """Return ``host:port`` of a broker's master as far as it is cached; asks nobody."""
        return self._instance.routes.masters().get(broker_name)

    def result_of(self, prepared: Prepared, outcome: SendOutcome) -> SendResult:
        """Return what an answer says, or raise what came instead (spec/producer.md section 8.4)."""
        if outcome.error is not None:
            raise outcome.error
        assert outcome.status is not None
        outgoing = prepared.outgoing
        return SendResult(
            status=outcome.status,
            msg_id=outcome.batch_uniq_id or outgoing.msg_id,
            message_queue=MessageQueue(outgoing.topic, outcome.queue.broker_name, outcome.queue.queue_id),
            queue_offset=outcome.queue_offset,
            offset_msg_id=outcome.offset_msg_id,
            transaction_id=outcome.transaction_id,
            region_id=outcome.region_id or "DefaultRegion",
            trace_on=outcome.trace_on,
            recall_handle=outcome.recall_handle,
        )

    def _exchange(self, prepared: Prepared, budget: Budget) -> SendOutcome:
        left = budget.require(_doing(prepared))
        done = threading.Event()
        outcomes: list[SendOutcome] = []

        def on_outcome(outcome: SendOutcome) -> None:
            outcomes.append(outcome)
            done.set()

        self._instance.transport.send(prepared.request, left, on_outcome, within=left)
        if not done.wait(left + _GRACE):
            raise RemotingTimeoutException(
                f"{_doing(prepared)}: the transport gave no outcome within {round(left, 3):g} s"
            )
        return outcomes.pop()


def broker_address(routes: RouteCache, queue: MessageQueue) -> str:
    """Return ``host:port`` of the master of a queue's broker, looking the topic's route up if it isn't known.

    Raises
    ------
    MQClientException
        The broker has no master just now, or nobody knows it.
    """
    address = routes.masters().get(queue.broker_name)
    if address is None:
        routes.find(queue.topic, API_TIMEOUT)
        address = routes.masters().get(queue.broker_name)
    if address is None:
        raise MQClientException(
            f"looking for the broker of queue {queue}: no master of {queue.broker_name} is known; known are "
            f"{', '.join(sorted(routes.masters())) or 'none'}"
        )
    return address


def _doing(prepared: Prepared) -> str:
    return f"sending to {prepared.request.queue} at {prepared.request.address}"


def as_client_error(error: RocketMQError) -> RocketMQError:
    """Return a transport's failure as an asynchronous caller sees it: ``MQClientException`` -1 with the cause (9.3)."""
    if not isinstance(error, RemotingException):
        return error
    wrapped = MQClientException(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
