"""Requests about the queues of a read: one try for each queue, or tries until ``readTimeoutMs``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from rocketmq_spark import errors
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import PullOutcome, PullRequest, PullTarget
from rocketmq_spark.model.route import masters_of
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.routing.retries import Retries
from rocketmq_spark.source.broker_choice import BrokerChoice
from rocketmq_spark.source.topic_queues import TopicQueues
from rocketmq_spark.source.topic_routes import PlanningDeadline
from rocketmq_spark.transport.base import ReadTransport
from rocketmq_spark.transport.parallel import in_parallel

logger = logging.getLogger("rocketmq_spark.source")

T = TypeVar("T")
# A request about a queue (as the user knows it) to a broker's address, with a timeout in seconds.
Request: TypeAlias = Callable[[MessageQueue, str, float], T]

# The codes of a broker's answers to a pull if it does not have the topic, or the queue is above its read queues. The
# code of 4.9 for the second case is 1, with this remark (PullMessageProcessor).
_LACKING: Final = (ResponseCode.TOPIC_NOT_EXIST, ResponseCode.INVALID_PARAMETER)
_NO_QUEUE: Final = "queueId["

WAIT: Final = 0.2
"""Seconds between two tries."""


@dataclass(slots=True, eq=False, repr=False)
class QueueRequests:
    """Sends requests about many queues at once, each to the broker that `BrokerChoice` chooses."""

    queues: TopicQueues
    clock: Callable[[], float]
    sleep: Callable[[float], None] = time.sleep
    options: SourceOptions = field(init=False)
    transport: ReadTransport = field(init=False)
    deadline: PlanningDeadline = field(init=False)
    brokers: BrokerChoice = field(init=False)

    def __post_init__(self) -> None:
        self.options, self.transport = self.queues.options, self.queues.transport
        self.deadline, self.brokers = self.queues.deadline, self.queues.brokers

    def once(
        self, queues: Sequence[MessageQueue], request: Request[T], *, trusted: bool = False
    ) -> tuple[dict[MessageQueue, tuple[T, str]], dict[MessageQueue, errors.RocketMQError]]:
        """Send one request about each queue, and return the answers with the brokers' addresses, and the errors.

        With `trusted` only brokers are used that `BrokerChoice.trusts`. A broker that did not answer gets no second
        request, and after ``readTimeoutMs`` no broker gets one.
        """
        silent: dict[str, errors.RocketMQError] = {}
        patience = self.options.read_timeout_ms / 1000
        gives_up = min(self.clock() + patience, self.deadline.at)

        def request_of(queue: MessageQueue) -> tuple[T, str] | errors.RocketMQError:
            address = ""
            if self.clock() > gives_up:
                return errors.RemotingTooMuchRequestException(
                    f"no request was sent about queue {queue}, because requests about other queues took "
                    f"readTimeoutMs={self.options.read_timeout_ms}"
                )
            try:
                address = self.brokers.address(queue, trusted=trusted)
                return silent.get(address) or (self._request(queue, address, request, trusted=trusted), address)
            except errors.RocketMQError as exc:
                if isinstance(exc, errors.RemotingException):
                    silent[address] = exc
                if exc.retriable and not exc.flow_control:
                    self.brokers.failed(queue, address)
                return exc

        results = in_parallel(queues, request_of, self.deadline.runtime)
        failures = {queue: result for queue, result in results.items() if isinstance(result, errors.RocketMQError)}
        return {
            queue: result for queue, result in results.items() if not isinstance(result, errors.RocketMQError)
        }, failures

    def _request(self, queue: MessageQueue, address: str, request: Request[T], *, trusted: bool) -> T:
        answer = request(queue, address, self.deadline.limit(self.brokers.timeout))
        self.brokers.answered(queue, address, trusted=trusted)
        return answer

    def each(self, queues: Iterable[MessageQueue], request: Request[T]) -> dict[MessageQueue, T]:
        """Return the answers of trusted brokers for all queues; raises as `until_answered`."""
        return self.deadline.in_parallel(queues, lambda queue: self.until_answered(queue, request), "offsets of queues")

    def until_answered(self, queue: MessageQueue, request: Request[T], *, trusted: bool = True) -> T:
        """Return the answer of the first broker that gives one; a ReadError after ``readTimeoutMs``."""
        options = self.options
        gives_up = self.clock() + options.read_timeout_ms / 1000
        retries = Retries(gives_up, lambda _: WAIT, self.clock, self.sleep)
        while True:
            address = ""
            try:
                address = self.brokers.address(queue, trusted=trusted)
                return self._request(queue, address, request, trusted=trusted)
            except errors.RocketMQError as exc:
                if not exc.retriable:
                    raise
                if not exc.flow_control:
                    self.brokers.failed(queue, address)
                # The last request to the master may take this long, before the one to a slave.
                more = 2 * self.brokers.timeout if self.brokers.has_slave(queue) else 0.0
                retries.deadline = min(gives_up + more, self.deadline.at)
                # A try after the deadline of the plan would fail at once, and its error would hide this one.
                if retries.wait() and not self.deadline.passed:
                    continue
                raise errors.ReadError(
                    f"requests about queue {queue}: no broker answered within "
                    f"readTimeoutMs={options.read_timeout_ms}. The last try: {exc}. Start the broker, or raise "
                    "readTimeoutMs"
                ) from exc

    def await_listed(self, queues: Collection[MessageQueue]) -> set[MessageQueue]:
        """Return the queues that are gone: their brokers run, and their topics do not have them any more.

        It looks for queues for ``pullTimeoutMs``, and at most for half of the time until the planning deadline.
        """
        gone, now = self.queues.gone(queues, recent=False), self.clock()
        gives_up = min(now + self.brokers.timeout, (now + self.deadline.at) / 2)
        for _ in Retries(gives_up, lambda _: WAIT, self.clock, self.sleep) if gone else ():
            # The name servers may have restarted, and know only some brokers.
            gone = self.queues.gone(sorted(gone), recent=True)
            if not gone:
                break
        return self.confirmed(
            gone, [queue for queue in queues if queue not in gone and self.queues.exists(queue) is None]
        )

    def confirmed(self, gone: set[MessageQueue], absent: Collection[MessageQueue] = ()) -> set[MessageQueue]:
        """Return those queues of `gone` and `absent` that their brokers run without.

        A broker that is down may come back. The name servers list no topic whose brokers are all down.
        """
        if not gone and not absent:
            return gone
        try:
            brokers = self.transport.cluster_info(self.deadline.limit(self.brokers.timeout)).brokers
        except errors.RocketMQError as exc:
            # These brokers may be down: the next requests about the queues wait for them. A proxy never lists brokers.
            names = ", ".join(map(str, sorted({*gone, *absent})[:5]))
            logger.warning("unknown if the queues %s are gone, because no list of brokers came: %s", names, exc)
            return set()
        masters = masters_of(brokers)

        def is_lost(queue: MessageQueue) -> bool:
            gives_up = self.clock() + 2 * self.brokers.timeout
            for _ in Retries(gives_up, lambda _: WAIT, self.clock, self.sleep):
                try:
                    self.pull(queue, 0, masters[queue.broker_name], 1)
                except errors.RocketMQError as exc:
                    if isinstance(exc, errors.MQBrokerException) and (
                        exc.response_code in _LACKING or _NO_QUEUE in exc.remark
                    ):
                        return True
                    if exc.retriable and not self.deadline.passed:
                        continue
                break
            return False

        # A broker may have come back since the last answer that its topic has no route. Later requests need the route.
        self.queues.expire()
        running = sorted(queue for queue in {*gone, *absent} if queue.broker_name in masters)
        found = self.deadline.in_parallel(running, is_lost, "answers about removed queues")
        return {queue for queue, lost in found.items() if lost}

    def pull(self, queue: MessageQueue, offset: int, address: str, count: int) -> PullOutcome:
        """Return at most `count` messages, of all tags."""
        target = PullTarget(queue, self.options.consumer_group, count, "*", "TAG")
        # Each pull has its own timeout. The deadline ends the pulls of a broker that names a new offset each time.
        timeout = self.deadline.limit(self.brokers.timeout)
        try:
            outcome = self.transport.pull_now(PullRequest(target, address, offset), timeout)
            if outcome.error is not None:
                raise outcome.error
        except errors.TooLongFrameException:
            if count == 1:
                raise
            return self.pull(queue, offset, address, count // 2)
        return outcome
