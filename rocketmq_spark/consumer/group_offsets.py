"""How far a group has read, told to the brokers: for the lag that RocketMQ's own tools show.

Rule 1: a broker is told nothing before it knows the group, and nothing at all where an application reads as the group.
Rule 2: the first offset of a topic comes alone. Of a group that is new to a topic a broker begins its table with the
        first one, and two that come at once begin two, of which one is lost though both are acknowledged.
Rule 3: with news of one queue all are told: a slave in its master's place, or a broker that was killed, may have lost
        what it was told before.
Rule 4: nothing fails a query here. What fails is logged, once for each broker, and told again.

Follows ``ConsumerOffsetManager.commitOffset`` and ``ConsumerGroupInfo.updateSubscription``.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rocketmq_spark.consumer.bounds import Bounds, Offsets
from rocketmq_spark.consumer.topic_queues import TopicQueues
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.transport.base import ReadTransport

logger = logging.getLogger("rocketmq_spark.consumer")

# Seconds from one heart-beat to the next (heartbeatBrokerInterval); a broker forgets a client after four of them.
_HEART_BEAT: Final = 30.0
# A reader's client id ends in its name and `#<process id>`; Java's has nanoseconds behind the #, or none at all.
_READER: Final = re.compile(r"[^@]*@.+#\d{1,7}(@.*)?")


class GroupOffsets:
    """The offsets of one query's group.

    Parameters
    ----------
    options : ReaderOptions
    transport : ReadTransport
    queues : TopicQueues
    bounds : Bounds
    clock : callable
        Seconds, monotonic.
    client_id : str
        What brokers call this member of the group.
    """

    def __init__(
        self,
        options: ReaderOptions,
        transport: ReadTransport,
        queues: TopicQueues,
        bounds: Bounds,
        clock: Callable[[], float],
        client_id: str,
    ) -> None:
        self._options = options
        self._transport = transport
        self._queues = queues
        self._bounds = bounds
        self._clock = clock
        self._client_id = client_id
        self._timeout = options.pull_timeout_ms / 1000
        # When each address had its last heart-beat.
        self._registered: dict[str, float] = {}
        # What was told last, and when it is to be told again though nothing has changed.
        self._said: Offsets = {}
        self._again_at = math.inf
        self._warned = False

    def tell(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Tell the brokers how far the group has read.

        What failed is told again by the next call: with other offsets at once, with the same ones after half a minute.

        Parameters
        ----------
        offsets : mapping of MessageQueue to int
            The offset that comes next. Queues that the options do not ask for are left out: another query may read them
            as the same group.
        """
        now = self._clock()
        if offsets == self._said and now < self._again_at:
            return
        self._said, self._again_at = dict(offsets), now + _HEART_BEAT
        wanted = [*filter(self._options.reads, offsets)]
        self._queues.deadline.restart()
        try:
            present = sorted(set(self._queues.present()).intersection(wanted))
        except RocketMQError as exc:
            logger.warning("commitOffsets: %s", exc)
            return

        def one(queue: MessageQueue, address: str) -> None:
            self._transport.update_consumer_offset(
                self._queues.on_wire(queue), self._options.consumer_group, offsets[queue], address, self._timeout
            )

        joined = self._bounds.once([*{queue.broker_name: queue for queue in present}.values()], self._join)
        open_to_us = {
            queue.broker_name for queue, answer in joined.items() if not isinstance(answer, RocketMQError) and answer[0]
        }
        first_of = {_place(queue): queue for queue in present if queue.broker_name in open_to_us}
        told = self._bounds.once([*first_of.values()], one)
        begun = {_place(queue) for queue, answer in told.items() if not isinstance(answer, RocketMQError)}
        told |= self._bounds.once([queue for queue in present if queue not in told and _place(queue) in begun], one)
        failed: dict[str, tuple[MessageQueue, RocketMQError]] = {}
        for queue, answer in [*joined.items(), *told.items()]:
            if isinstance(answer, RocketMQError):
                failed.setdefault(queue.broker_name, (queue, answer))
        for queue, error in failed.values():
            logger.warning("commitOffsets: %s: %s", queue, error)
        if not failed and len(told) == len(wanted):
            self._again_at = math.inf

    def _join(self, queue: MessageQueue, address: str) -> bool:  # noqa: ARG002 - any queue of the broker
        """Have a broker know the group, and the tools that ask it: without a heart-beat there is no %RETRY% topic.

        Return whether the group is ours: a heart-beat without subscriptions would take an application those that it
        has, and the offsets told would be its own.
        """
        group, now = self._options.consumer_group, self._clock()
        if now - self._registered.get(address, -math.inf) <= _HEART_BEAT:
            return True
        members = self._transport.consumers(group, address, self._timeout)
        others = sorted(one for one in members if one != self._client_id and not _READER.fullmatch(one))
        if others:
            self._warn_of(others, address)
            return False
        self._transport.register_consumer(self._client_id, group, address, self._timeout)
        self._registered[address] = now
        return True

    def _warn_of(self, others: Sequence[str], address: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "commitOffsets: consumerGroup=%s is that of %s at %s, which is no reader of ours: nothing is told "
                "there, or its offsets and subscriptions would be lost; give the query a consumerGroup of its own",
                *(self._options.consumer_group, others[0], address),
            )


def _place(queue: MessageQueue) -> tuple[str, str]:
    return queue.topic, queue.broker_name
