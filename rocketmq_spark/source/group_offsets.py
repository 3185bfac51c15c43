"""Writes the offsets of a streaming query to its consumer group (docs/internals/reads.md#consumer-groups)."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.source.offset_resolver import Offsets
from rocketmq_spark.source.queue_requests import QueueRequests
from rocketmq_spark.source.topic_queues import place

logger = logging.getLogger("rocketmq_spark.source")

# Seconds from one heart-beat to the next (heartbeatBrokerInterval); a broker removes a client after four of them.
_HEART_BEAT: Final = 30.0
# A reader's client id ends in its name and `#<process id>`. Java's ends in `#<nanoseconds>`, or has no #.
_READER: Final = re.compile(r"[^@]*@.+#\d{1,7}(@.*)?")


@dataclass(slots=True, eq=False, repr=False)
class GroupOffsets:
    """Writes the offsets of one query to its consumer group, as its member `client_id` (``commitOffsets``)."""

    requests: QueueRequests
    client_id: str
    # The time of the last heart-beat to each address.
    _registered: dict[str, float] = field(default_factory=dict)
    # The offsets written last, and when to write them again though they have not changed.
    _written: Offsets = field(default_factory=dict)
    _again_at: float = math.inf
    _warned: bool = False

    def write(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Write the next offset to read of each queue to the brokers.

        After a failure the next call writes again: other offsets at once, the same offsets after half a minute.
        Queues that the options do not select are skipped: another query may read them as the same group.
        """
        options, queues, now = self.requests.options, self.requests.queues, self.requests.clock()
        if offsets == self._written and now < self._again_at:
            return
        self._written, self._again_at = dict(offsets), now + _HEART_BEAT
        selected = {*filter(options.reads, offsets)}
        queues.deadline.restart()
        try:
            present = sorted(selected.intersection(queues.present()))
        except RocketMQError as exc:
            logger.warning("commitOffsets: %s", exc)
            return

        def update(queue: MessageQueue, address: str, timeout: float) -> None:
            self.requests.transport.update_consumer_offset(
                queue, options.consumer_group, offsets[queue], address, timeout
            )

        joins, failed = self.requests.once([*{queue.broker_name: queue for queue in present}.values()], self._join)
        joined = {queue.broker_name for queue, (is_member, _) in joins.items() if is_member}
        # A broker that fails for one queue of a topic gets no requests about the others.
        first_of = {place(queue): queue for queue in present if queue.broker_name in joined}
        written, failed_first = self.requests.once([*first_of.values()], update)
        begun = set(map(place, written))
        others = [queue for queue in present if queue not in written and place(queue) in begun]
        written_others, failed_others = self.requests.once(others, update)
        failed |= failed_first | failed_others
        # One warning for each broker.
        for queue in {queue.broker_name: queue for queue in reversed(failed)}.values():
            logger.warning("commitOffsets: %s: %s", queue, failed[queue])
        if not failed and len(written) + len(written_others) == len(selected):
            self._again_at = math.inf

    def _join(self, queue: MessageQueue, address: str, timeout: float) -> bool:  # noqa: ARG002 - any queue of the broker
        """Join the group at a broker, unless another application is a member; return whether the query is one.

        Otherwise that application would continue from the query's offsets (docs/internals/reads.md#consumer-groups).
        """
        requests = self.requests
        group, now, transport = requests.options.consumer_group, requests.clock(), requests.transport
        if now - self._registered.get(address, -math.inf) <= _HEART_BEAT:
            return True
        members = transport.consumers(group, address, timeout)
        others = sorted(member for member in members if member != self.client_id and not _READER.fullmatch(member))
        if others:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "commitOffsets: consumerGroup=%s is also used by %s at %s, which is not a Spark reader. No offsets "
                    "are written there, to keep its offsets and subscriptions. Set another consumerGroup for the query",
                    *(group, others[0], address),
                )
            return False
        transport.register_consumer(self.client_id, group, address, timeout)
        self._registered[address] = now
        return True
