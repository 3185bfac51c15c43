"""Requests to brokers for writes with a decision log. Each is repeated until ``deliveryTimeoutMs``.

Messages are sent by the pipeline of a write (`BatchSender`), so they follow its retry rules and require SEND_OK.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import ClassVar, Final, TypeVar, cast

from rocketmq_spark.arrow.batch_source import BatchSource
from rocketmq_spark.arrow.kernel import default_kernel
from rocketmq_spark.arrow.stored import missing_records
from rocketmq_spark.errors import (
    DataLossError,
    MQBrokerException,
    MQClientException,
    RocketMQError,
    RouteNotFoundException,
)
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import EncodedBatch, MessageQueue, Ready
from rocketmq_spark.model.message_ext import MessageExt, Pulled, PullOutcome, PullRequest, PullStatus, PullTarget
from rocketmq_spark.model.route import PERM_READ, PERM_WRITE
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.records import decode_records
from rocketmq_spark.protocol.remoting.unwrap import messages_of
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.retries import Backoff, Retries
from rocketmq_spark.routing.route_cache import TopicPublishInfo
from rocketmq_spark.routing.topic_configs import has_topic
from rocketmq_spark.sink.pipeline import OnStored
from rocketmq_spark.sink.routes import RouteFinder
from rocketmq_spark.sink.sender import BatchSender
from rocketmq_spark.transport.parallel import MOST_AT_ONCE, in_parallel
from rocketmq_spark.transport.remoting.client import TOOLS_CONSUMER
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from rocketmq_spark.transport.runtime import PROCESS, Runtime

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

logger = logging.getLogger("rocketmq_spark.producer")

_PULL_BATCH: Final = 1000
COMPARE: Final = (
    "So it is unknown which rows of the write are stored. Compare them with the topic, and write what is missing with "
    "another transactionalId (a stream: and startAnew=true)"
)
# A missing right has the same response code.
_OTHER_TOPIC: Final = "topic does not match the message"


class _Messages(BatchSource[None]):
    """Gives encoded messages; it takes no rows."""

    def __init__(self, messages: Sequence[Ready]) -> None:
        self._messages, self._rows = messages, len(messages)

    @property
    def pending_bytes(self) -> int:
        return 0

    @property
    def taken_rows(self) -> int:
        return self._rows

    def add(self, rows: None, now: float) -> Iterator[Ready]:
        return iter(())

    def reject(self, rejected: Sequence[Ready], now: float) -> Iterator[Ready]:
        raise AssertionError("Brokers sends with onError=fail, so the sender raises the error of the server")

    def new_topics(self) -> tuple[()]:
        return ()

    def expired(self, now: float, known: object) -> Iterator[Ready]:
        return iter(())

    def flush(self) -> Iterator[Ready]:
        messages, self._messages = self._messages, ()
        return iter(messages)


class _RecordSender(BatchSender):
    _done: ClassVar[str] = "stored (records of the decision log)"
    _retry: ClassVar[str] = "A record that is stored twice counts once"


@dataclass(eq=False, repr=False)
class Brokers:
    """The brokers of a write, as its driver reaches them. The caller registers the producer group of `instance`."""

    options: SinkOptions
    instance: ClientInstance
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    runtime: Runtime = PROCESS
    rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.transport = cast(RemotingTransport, self.instance.transport)
        self._backoff = Backoff(self.options.retry_backoff_ms, self.options.retry_backoff_max_ms, self.rng)
        # `onError` is about the user's rows: a record or half message that a server rejects fails the write.
        self._of_records = replace(self.options, on_error="fail")

    @property
    def patience(self) -> float:
        """How long a request is repeated, seconds."""
        return self.options.delivery_timeout_ms / 1000

    @property
    def request_timeout(self) -> float:
        """How long one attempt may take, seconds."""
        return self.options.send_msg_timeout / 1000

    def routes(self) -> RouteFinder:
        """Return the look-up of routes of a write."""
        return RouteFinder(
            self._of_records, self.instance, clock=self.clock, runtime=self.runtime, rng=self.rng, servers_reached=True
        )

    def refresh_route(self, topic: str) -> None:
        """Look a topic's route up now."""
        self.instance.routes.refresh(topic, self.request_timeout * len(self.options.connection.route_servers))

    def refresh_route_after(self, error: RocketMQError, topic: str) -> None:
        """Look a topic's route up in the background, if an error may come from a broker that is no master any more."""
        if error.refresh_route or error.flow_control:
            self.instance.refresh_route(topic)

    def fresh_route(self, topic: str) -> TopicPublishInfo:
        """Look a topic's route up now, again and again until ``deliveryTimeoutMs``, and return it."""
        retries = self.retries()
        while True:
            try:
                self.refresh_route(topic)
                return self.routes().look_up(topic)
            except RouteNotFoundException:
                if not retries.wait():
                    raise

    def address_of(self, queue: MessageQueue) -> str:
        """Return the address of a queue's master; raise a RouteNotFoundException (10005) if none is known."""
        address = self.instance.routes.master_of(queue.broker_name)
        if address is None:
            raise RouteNotFoundException(
                f"no name server lists a master of broker {queue.broker_name}, which has queue {queue}: start it"
            )
        return address

    def request(self, queue: MessageQueue, send: Callable[[str, float], T]) -> T:
        """Return the answer of a queue's broker; `send` gets the address and a timeout, and may be repeated.

        Raises the last error after ``deliveryTimeoutMs``, and at once an error that is not retriable.
        """
        retries = self.retries()
        while True:
            try:
                return send(self.address_of(queue), self.request_timeout)
            except RocketMQError as exc:
                self.refresh_route_after(exc, queue.topic)
                if not exc.retriable or not retries.wait():
                    raise

    def backoff(self, waits: int) -> float:
        """Return the length of the `waits`-th wait, seconds."""
        return self._backoff.delay(waits)

    def retries(self) -> Retries:
        """Return the waits of a request that is repeated until ``deliveryTimeoutMs``."""
        return Retries(self.clock() + self.patience, self.backoff, self.clock, self.runtime.sleep)

    def for_each(self, keys: Iterable[K], call: Callable[[K], T], at_once: int = MOST_AT_ONCE) -> dict[K, T]:
        """Return the answer for each key; requests run in parallel. The first error is raised."""
        return in_parallel(keys, call, self.runtime, at_once)

    def max_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """Return the offset of the next message of each queue."""

        def max_offset(queue: MessageQueue) -> int:
            return self.request(queue, lambda address, timeout: self.transport.max_offset(queue, address, timeout))

        return self.for_each(queues, max_offset)

    def ends_at_once(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """Return the offset of the next message of each queue whose broker answers its first request."""
        by_broker: defaultdict[str, list[MessageQueue]] = defaultdict(list)
        for queue in queues:
            by_broker[queue.broker_name].append(queue)
        ends: dict[MessageQueue, int] = {}

        def of_broker(name: str) -> None:
            try:
                for queue in by_broker[name]:
                    ends[queue] = self.transport.max_offset(queue, self.address_of(queue), self.request_timeout)
            except RocketMQError as exc:
                logger.debug("the ends of the queues of broker %s are unknown now: %s", name, exc)

        self.for_each(by_broker, of_broker)
        return ends

    def min_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the oldest message of a queue."""
        return self.request(queue, lambda address, timeout: self.transport.min_offset(queue, address, timeout))

    def first_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the oldest message that can be read. A broker may report a lower minimum offset."""
        target, offset = PullTarget(queue, TOOLS_CONSUMER, 1, "*", "TAG"), self.min_offset(queue)
        while True:
            outcome = self._pull(target, offset)
            if outcome.status is PullStatus.FOUND:
                return min(message.queue_offset for message in decode_records(outcome.body))
            if outcome.next_begin_offset <= offset:
                return offset
            offset = outcome.next_begin_offset

    def message_at(self, queue: MessageQueue, offset: int) -> tuple[Pulled, int]:
        """Return the answer that has the message at an offset, and the offset of the queue's next message."""
        outcome = self._pull(PullTarget(queue, TOOLS_CONSUMER, 1, "*", "TAG"), offset)
        body = outcome.body if outcome.status is PullStatus.FOUND else b""
        return Pulled(queue, offset, offset + 1, body), outcome.max_offset

    def messages_before(self, queue: MessageQueue, offset: int, most: int) -> Iterator[MessageExt]:
        """Yield those of the last messages before an offset that can be decoded."""
        for pulled in self.pulls(queue, max(0, offset - most), offset):
            # The answer to a pull may also have messages after the offset.
            for message in messages_of(pulled.body, queue, pulled.start, pulled.end, decompressed=False, parsed=False):
                if isinstance(message, MessageExt):
                    yield message

    def send_records(self, messages: Sequence[tuple[EncodedBatch, MessageQueue]], on_stored: OnStored) -> None:
        """Store records, each in its queue; raise as `BatchSender.write`."""
        self.send(_RecordSender(self.routes(), Recorder("", -1, 0), on_stored=on_stored), messages)

    def send(self, sender: BatchSender, messages: Sequence[tuple[EncodedBatch, MessageQueue]]) -> None:
        """Store encoded messages, each in its queue; raise as `BatchSender.write`."""
        if messages:
            sender.write((), _Messages(messages))

    def read(
        self, queue: MessageQueue, start: int, end: int, expression: str = "*", *, complete: bool = False
    ) -> Iterator[MessageExt]:
        """Yield the messages of a queue from one offset to another. `expression` selects tags.

        Deleted messages are skipped. With `complete` they are a DataLossError. With another `expression`, this applies
        only to those before the minimum offset that the broker reports.
        """
        for pulled in self.pulls(queue, start, end, expression, complete=complete):
            for message in decode_records(pulled.body):
                if pulled.start <= message.queue_offset < pulled.end:
                    yield message

    def pulls(
        self, queue: MessageQueue, start: int, end: int, expression: str = "*", *, complete: bool = False
    ) -> Iterator[Pulled]:
        """Yield the answers that have the messages of a queue from one offset to another; see `read`."""
        target = PullTarget(queue, TOOLS_CONSUMER, _PULL_BATCH, expression, "TAG")
        retries = self.retries()
        while start < end:
            outcome = self._pull(target, start)
            stop = min(end, max(outcome.next_begin_offset, start))
            pulled = Pulled(queue, start, stop, outcome.body if outcome.status is PullStatus.FOUND else b"")
            if complete and (stop > start or outcome.status is not PullStatus.NO_NEW_MSG):
                # A broker may report a lower minimum offset than it has, and skips messages that it cannot read. If it
                # lacks a part of the index, it answers with NO_NEW_MSG and a later offset. numpy would be slower here.
                has_each_offset = default_kernel().has_each_offset
                has_all = stop == start or expression != "*" or has_each_offset(pulled.body, start, stop)
                missing = [] if has_all else missing_records(pulled)
                if missing or outcome.status in (PullStatus.OFFSET_ILLEGAL, PullStatus.NO_NEW_MSG):
                    raise _lost(queue, *(missing or [(start, end)])[0], outcome)
            if outcome.status is PullStatus.FOUND:
                yield pulled
            if outcome.next_begin_offset > start:
                start = outcome.next_begin_offset
                retries.progressed()
            # For example a slave that was promoted, and does not have all messages.
            elif not retries.wait():
                raise MQClientException(
                    f"reading queue {queue}: the broker has no messages from offset {start} to {end} "
                    f"({outcome.status}), which it had before: start the broker that had them"
                )

    def check_readable(self, queue: MessageQueue) -> None:
        """Pull once; raise if the user has no right to pull, or the broker is down. An empty queue is enough."""
        self._pull(PullTarget(queue, TOOLS_CONSUMER, 1, "*", "TAG"), self.max_offsets([queue])[queue])

    def _pull(self, target: PullTarget, offset: int) -> PullOutcome:
        def pull(address: str, timeout: float) -> PullOutcome:
            outcome = self.transport.pull_now(PullRequest(target, address, offset), timeout)
            error = outcome.error
            if isinstance(error, MQBrokerException) and error.response_code == ResponseCode.INVALID_PARAMETER:
                raise MQClientException(
                    f"reading queue {target.queue}: {error}. If the topic has fewer read queues than before, rows of "
                    "earlier attempts may be in this queue: restore it (mqadmin updateTopic -r), and run the job again"
                ) from error
            if error is not None:
                raise error
            return outcome

        return self.request(target.queue, pull)

    def await_readable(self, queue: MessageQueue, offset: int) -> None:
        """Return when a stored message can be read, and so all messages that the broker stored before it."""
        retries = self.retries()
        # A broker builds its queues within milliseconds.
        retries.delay = lambda waits: min(0.001 * 2**waits, 0.1)
        while self.max_offsets([queue])[queue] <= offset:
            if not retries.wait():
                raise MQClientException(
                    f"queue {queue}: the message at offset {offset} is stored, but not readable after "
                    f"deliveryTimeoutMs={self.options.delivery_timeout_ms}: check the disk and the log of the broker"
                )

    def view(self, queue: MessageQueue, commit_log_offset: int) -> MessageExt:
        """Return the half message for a queue at an offset of its broker's commit log; DataLossError if it is gone."""

        def view(address: str, timeout: float) -> MessageExt:
            try:
                try:
                    return self.transport.view_message(address, commit_log_offset, timeout, topic=queue.topic)
                except MQBrokerException as exc:
                    # 5.5.1 compares the topic with the message's, a system topic for half messages in RocksDB.
                    if exc.response_code != ResponseCode.NO_PERMISSION or _OTHER_TOPIC not in exc.remark:
                        raise
                return self.transport.view_message(address, commit_log_offset, timeout)
            except MQClientException as exc:
                raise DataLossError(
                    f"a half message for queue {queue} is gone: {exc}. It expired (fileReservedTime), the broker lost "
                    f"it, or the decision is forged. {COMPARE}"
                ) from exc

        return self.request(queue, view)

    def ensure_topic(self, topic: str, broker_names: Collection[str]) -> None:
        """Create a topic with one queue on each broker that does not have it, and wait until its route has them all.

        Without `broker_names`, a topic that exists may be anywhere. Raises an MQClientException that names the command
        for an administrator, if the brokers refuse.
        """
        info = self.routes().look_up(topic)
        if not broker_names and info.template:
            broker_names = info.broker_names
        missing = sorted(set(broker_names) - (set() if info.template else info.broker_names))
        if not missing:
            return
        for name in missing:
            try:
                self.request(MessageQueue(topic, name, 0), partial(self._create_topic, topic))
            except RocketMQError as exc:
                raise MQClientException(
                    f"topic {topic} is not known to be on broker {name}, and the driver could not create it: {exc}; "
                    f"start the broker, or create the topic first (rocketmq-spark create-topic {topic} --queues 1)"
                ) from exc
        self.await_listed(topic, broker_names)

    def await_listed(self, topic: str, broker_names: Collection[str]) -> TopicPublishInfo:
        """Return the route of a topic when it has a writable queue on each of these brokers.

        Raises an MQClientException after ``deliveryTimeoutMs``.
        """

        def listed() -> TopicPublishInfo | None:
            known = self.instance.routes.cached(topic)
            if known is None or known.template or not known.broker_names.issuperset(broker_names):
                return None
            return known

        if info := listed():
            return info
        for _ in self.retries():
            with contextlib.suppress(RouteNotFoundException):
                self.refresh_route(topic)
            if info := listed():
                return info
        raise MQClientException(
            f"the name servers do not list topic {topic} as writable on all of {', '.join(sorted(broker_names))}: "
            "start these brokers, check that they are registered, and make the topic writable there"
        )

    def _create_topic(self, topic: str, address: str, timeout: float) -> None:
        # A topic that exists keeps its queues.
        if not has_topic(self.transport, address, topic, timeout):
            self.transport.create_topic(address, topic, 1, PERM_READ | PERM_WRITE, timeout)


def _lost(queue: MessageQueue, start: int, end: int, outcome: PullOutcome) -> DataLossError:
    return DataLossError(
        f"reading queue {queue}: its messages {start} to {end - 1} are gone (the broker reports minOffset="
        f"{outcome.min_offset} and maxOffset={outcome.max_offset}). They expired (fileReservedTime), the broker lost "
        f"them, or the topic was created again. {COMPARE}"
    )
