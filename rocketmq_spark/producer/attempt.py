"""Makes attempts to send a message of a `Producer`: `SendAttempt` makes one attempt, and `SendLoop` repeats it.

The loop selects a queue for each attempt. It is not used if the caller or its selector chose the queue. In one-way and
asynchronous sends it makes one attempt; `AsyncSend` retries asynchronous ones.
"""

from __future__ import annotations

import queue as queues
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from rocketmq_spark import errors
from rocketmq_spark.model.message import MessageQueue, SendOutcome, SendRequest, SendStatus
from rocketmq_spark.model.route import broker_vip_channel
from rocketmq_spark.model.send_result import SendResult
from rocketmq_spark.options.producer import ProducerOptions
from rocketmq_spark.producer.encode import EncodedMessage
from rocketmq_spark.producer.hooks import CheckForbiddenContext, CommunicationMode, Hooks, SendMessageContext
from rocketmq_spark.protocol.remoting.codes import refuses_access
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.fault_strategy import FaultSite
from rocketmq_spark.routing.heart_beat import API_TIMEOUT
from rocketmq_spark.routing.route_cache import RouteCache
from rocketmq_spark.sink.trace import message_type_of
from rocketmq_spark.transport.base import local_ip
from rocketmq_spark.transport.runtime import PROCESS, Runtime

# The last attempt's error -> the code of the send's error (ClientErrorCode.java).
_CODES: Final = {
    errors.RemotingConnectException: 10001,
    errors.RemotingTimeoutException: 10002,
    errors.MQClientException: 10003,
}

# A transport ends every request in time. This much later, the attempt fails without an outcome (seconds).
_GRACE: Final = 10.0

# (queue, seconds left) -> result; None for oneway and asynchronous sends.
Attempt = Callable[[MessageQueue, float], "SendResult | None"]
# (broker that failed last, is a retry) -> queue
Select = Callable[["str | None", bool], "MessageQueue | None"]


class Deadline:
    """The time of one call, in seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._began = clock()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds left; negative after the deadline."""
        return self.seconds - self.spent

    def require(self, doing: str) -> float:
        """Return the seconds left, or raise ``RemotingTooMuchRequestException`` after the deadline."""
        left = self.left
        if left < 0:
            raise errors.RemotingTooMuchRequestException(
                f"{doing}: the timeout of {self.seconds * 1000:.0f} ms passed before the message was sent; raise "
                "send_msg_timeout, or timeout_ms of this call"
            )
        return left


@dataclass(frozen=True, slots=True)
class SendLoop:
    """Makes attempts until one has a final result or none is left (docs/internals/producer.md#send-loop)."""

    # Attempts after the first; 0 for asynchronous and oneway sends.
    retry_times: int
    retry_response_codes: Collection[int]
    # After a status other than SEND_OK. The last such status precedes a later failure.
    retry_another_broker_when_not_store_ok: bool
    # Limit of every attempt but the last, seconds; negative for none.
    max_timeout_per_request: float

    def run(self, topic: str, deadline: Deadline, select: Select, attempt: Attempt) -> SendResult | None:
        """Return the result of the first successful attempt; raises as docs/internals/producer.md#send-loop says.

        The error has `maybe_stored` if an attempt's error has it.
        """
        maybe_stored = False

        def noted_attempt(queue: MessageQueue, left: float) -> SendResult | None:
            nonlocal maybe_stored
            try:
                return attempt(queue, left)
            except errors.RocketMQError as exc:
                maybe_stored |= exc.maybe_stored
                raise

        try:
            return self._run(topic, deadline, select, noted_attempt)
        except errors.RocketMQError as exc:
            exc.maybe_stored |= maybe_stored
            raise

    def _run(self, topic: str, deadline: Deadline, select: Select, attempt: Attempt) -> SendResult | None:
        result: SendResult | None = None
        last: errors.RemotingException | errors.MQClientException | errors.MQBrokerException | None = None
        brokers: list[str] = []
        # Unlike Java, do not try a broker twice that refuses access or with which TLS fails: it may lock the user out.
        rejecting: set[str] = set()
        for times in range(1 + self.retry_times):
            queue = select(brokers[-1] if brokers else None, times > 0)
            if queue is None or queue.broker_name in rejecting:
                break
            left = deadline.left
            if left < 0 and result is None:
                tried = f"; tried {', '.join(brokers)}" if brokers else ""
                raise errors.RemotingTooMuchRequestException(
                    f"sending to topic {topic}: it took {deadline.spent * 1000:.0f} ms, longer than its timeout of "
                    f"{deadline.seconds * 1000:.0f} ms{tried}; raise send_msg_timeout, or "
                    "set send_msg_max_timeout_per_request so that a retry fits into it"
                ) from last
            if left < 0:
                break
            brokers.append(queue.broker_name)
            if 0 <= self.max_timeout_per_request < left and times < self.retry_times:
                left = self.max_timeout_per_request
            try:
                result = attempt(queue, left)
            except (errors.RemotingException, errors.MQClientException) as exc:
                if exc.invalid_message:
                    if result is not None:
                        return result
                    raise
                last = exc
                if isinstance(exc, errors.RemotingException) and not exc.retriable:
                    rejecting.add(queue.broker_name)
            except errors.MQBrokerException as exc:
                if exc.response_code not in self.retry_response_codes:
                    if result is not None:
                        return result
                    raise
                last = exc
                if refuses_access(exc):
                    rejecting.add(queue.broker_name)
            else:
                stored = result is None or result.status is SendStatus.SEND_OK
                if stored or not self.retry_another_broker_when_not_store_ok:
                    return result
        if result is not None:
            return result
        raise _all_failed(topic, deadline, brokers, last) from last


def _all_failed(topic: str, deadline: Deadline, brokers: list[str], last: Exception | None) -> errors.MQClientException:
    code = next((code for kind, code in _CODES.items() if isinstance(last, kind)), -1)
    if isinstance(last, errors.MQBrokerException):
        code = last.response_code
    reason = (
        f"; last: {type(last).__name__}: {last}"
        if last
        else "; no queue could be selected, because the topic has no writable queue"
    )
    return errors.MQClientException(
        f"sending to topic {topic} failed {len(brokers)} times in {deadline.spent * 1000:.0f} ms, "
        f"brokers [{', '.join(brokers)}]{reason}",
        code,
    )


@dataclass(frozen=True, slots=True)
class PreparedAttempt:
    """An attempt whose hooks before the send have been called: it only has to be sent."""

    message: EncodedMessage
    request: SendRequest
    context: SendMessageContext | None

    def __str__(self) -> str:
        return f"sending to {self.request.queue} at {self.request.address}"


class SendAttempt:
    """Makes or prepares the attempts of one producer (docs/internals/producer.md#attempts); safe for many threads."""

    def __init__(
        self,
        producer_group: str,
        options: ProducerOptions,
        instance: ClientInstance,
        hooks: Hooks,
        *,
        runtime: Runtime = PROCESS,
    ) -> None:
        self.producer_group = producer_group
        self._client_ip = options.connection.client_ip or local_ip()
        self.options = options
        self.instance = instance
        self.hooks = hooks
        self.runtime = runtime

    def send(self, message: EncodedMessage, queue: MessageQueue, seconds: float) -> SendResult:
        """Send and wait for the answer; raises the error of the outcome, and as `prepare` and `Deadline.require`."""
        deadline = Deadline(seconds, self.runtime.clock)
        attempt = self.prepare(message, queue, CommunicationMode.SYNC, deadline)
        try:
            result = message.result_of(self._outcome(attempt, deadline))
        except (errors.RemotingException, errors.MQBrokerException, KeyboardInterrupt) as exc:
            self.hooks.after(attempt.context, exception=exc)
            raise
        self.hooks.after(attempt.context, result)
        return result

    def send_oneway(self, message: EncodedMessage, queue: MessageQueue, seconds: float) -> None:
        """Send, and return once the socket has taken the last byte; raises as `send`, but waits for no answer."""
        deadline = Deadline(seconds, self.runtime.clock)
        attempt = self.prepare(message, queue, CommunicationMode.ONEWAY, deadline)
        try:
            self.instance.transport.send_oneway(attempt.request, deadline.require(str(attempt)))
        except (errors.RemotingException, KeyboardInterrupt) as exc:
            self.hooks.after(attempt.context, exception=exc)
            raise
        self.hooks.after(attempt.context)

    def prepare(
        self, encoded: EncodedMessage, queue: MessageQueue, mode: CommunicationMode, deadline: Deadline
    ) -> PreparedAttempt:
        """Find the broker, call the hooks, make the request; raises as `broker_address` and a check-forbidden hook."""
        options, message = self.options, encoded.message
        longest = min(options.connection.mq_client_api_timeout / 1000, max(deadline.left, 0.0))
        address = broker_address(self.instance.routes, queue, longest)
        if options.vip_channel_enabled:
            address = broker_vip_channel(address)
        self.hooks.check_forbidden(
            lambda: CheckForbiddenContext(
                name_servers=options.connection.name_server,
                producer_group=self.producer_group,
                communication_mode=mode,
                broker_addr=address,
                message=message,
                message_queue=queue,
                unit_mode=options.unit_mode,
            )
        )
        context = self.hooks.before(
            lambda: SendMessageContext(
                producer_group=self.producer_group,
                communication_mode=mode,
                born_host=self._client_ip,
                broker_addr=address,
                message=message,
                message_queue=queue,
                namespace="" if options.over_grpc else options.connection.namespace or "",
                message_type=message_type_of(message),
            )
        )
        request = SendRequest(
            encoded.encoded,
            queue,
            address,
            self.producer_group,
            options.connection.create_topic_key,
            options.connection.default_topic_queue_nums,
            int(self.runtime.wall_clock() * 1000),
            unit_mode=options.unit_mode,
            reconsume_times=encoded.reconsume_times,
            max_reconsume_times=encoded.max_reconsume_times,
            reply=message.is_reply,
        )
        return PreparedAttempt(encoded, request, context)

    def update_fault(self, site: FaultSite, broker_name: str, began: float) -> None:
        """Report an attempt to the fault strategy; it began at `began` of the runtime's clock and ends now."""
        now = self.runtime.clock()
        self.instance.faults.update(site, broker_name, (now - began) * 1000, now)

    def _outcome(self, attempt: PreparedAttempt, deadline: Deadline) -> SendOutcome:
        left = deadline.require(str(attempt))
        outcomes: queues.SimpleQueue[SendOutcome] = self.runtime.queue()
        self.instance.transport.send(attempt.request, left, outcomes.put, within=left)
        try:
            return outcomes.get(timeout=left + _GRACE)
        except queues.Empty:
            error = f"{attempt}: the transport reported no outcome within {round(left + _GRACE, 3):g} s"
            raise errors.RemotingTimeoutException(error) from None


def broker_address(routes: RouteCache, queue: MessageQueue, timeout: float = API_TIMEOUT) -> str:
    """Return ``host:port`` of a queue's master, after a lookup if needed; raises ``MQClientException`` without one."""
    address = routes.master_of(queue.broker_name)
    if address is None:
        routes.look_up(queue.topic, timeout)
        address = routes.master_of(queue.broker_name)
    if address is None:
        raise errors.MQClientException(
            f"looking up the broker of queue {queue}: no master of {queue.broker_name} is known; known brokers: "
            f"{', '.join(sorted(routes.masters())) or 'none'}. Start the broker, or choose a queue of a known one"
        )
    return address
