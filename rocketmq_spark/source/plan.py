"""The plan of a read: which messages it reads, and from which brokers. `plan_read` makes it on the driver."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.route import TopicRouteData
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.routing.connect import new_transport
from rocketmq_spark.source.filters import tasks_filter
from rocketmq_spark.source.offset_resolver import OffsetResolver
from rocketmq_spark.source.queue_requests import QueueRequests
from rocketmq_spark.source.ranges import OffsetRange, in_turns, tasks_of
from rocketmq_spark.source.topic_queues import TopicQueues
from rocketmq_spark.transport.remoting.transport import RemotingTransport


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What a read, or one of its tasks, reads. A task looks up a route only if a broker does not answer."""

    ranges: tuple[OffsetRange, ...]  # Of different queues, in the order of their turns
    routes: Mapping[str, TopicRouteData]  # By topic
    tasks_filter: bool = False  # The tasks filter by tags, not the brokers
    # The offset after the last message of each queue's planned range, and when this message was stored, if known.
    lasts: Mapping[MessageQueue, tuple[int, int]] = field(default_factory=dict)

    def tasks(self, options: SourceOptions) -> list[ReadPlan]:
        """Return the plans of the tasks, as `tasks_of` cuts the ranges."""
        tasks = tasks_of(self.ranges, options.min_partitions, options.max_records_per_partition)
        return [
            ReadPlan(ranges, self._routes_of(ranges), self.tasks_filter, self._lasts_of(ranges)) for ranges in tasks
        ]

    def _routes_of(self, ranges: Sequence[OffsetRange]) -> dict[str, TopicRouteData]:
        """Return only the routes of the ranges' brokers: a topic may have hundreds of brokers."""
        brokers: dict[str, set[str]] = {}
        for part in ranges:
            brokers.setdefault(part.queue.topic, set()).add(part.queue.broker_name)
        return {topic: self.routes[topic].only(names) for topic, names in brokers.items() if topic in self.routes}

    def _lasts_of(self, ranges: Sequence[OffsetRange]) -> dict[MessageQueue, tuple[int, int]]:
        return {part.queue: self.lasts[part.queue] for part in ranges if part.size > 0 and part.queue in self.lasts}


def plan_read(options: SourceOptions) -> ReadPlan:
    """Return the plan of a batch read; raises as `TopicQueues.look_up`, `OffsetResolver.ranges` and `tasks_filter`."""
    with contextlib.closing(reading_transport(options)) as transport:
        requests = QueueRequests(TopicQueues(options, transport, time.monotonic), time.monotonic)
        resolver = OffsetResolver(requests)
        ranges = resolver.ranges(requests.queues.look_up())
        # A broker that does not answer here delays nothing: the messages of its queues are not compared.
        ends = {part.queue: part.end for part in ranges if part.size > 0 and not part.compacted}
        return plan_of(ranges, requests, resolver.stored_before(ends, patiently=False))


def plan_of(
    ranges: Sequence[OffsetRange], requests: QueueRequests, times: Mapping[MessageQueue, int | None] | None = None
) -> ReadPlan:
    """Return the plan that reads these ranges. `times` are the store times of their last messages, if known."""
    filter_here = tasks_filter(requests, [part.queue for part in ranges if part.size > 0])
    ends = {part.queue: part.end for part in ranges if not part.compacted}
    lasts = {
        queue: (ends[queue], stored) for queue, stored in (times or {}).items() if stored is not None and queue in ends
    }
    routes = requests.queues.routes(part.queue for part in ranges)
    return ReadPlan(in_turns(ranges), routes, filter_here, lasts)


def reading_transport(options: SourceOptions, *, polled: bool = False) -> RemotingTransport:
    """Return the transport of a read; it opens no connection before the first request."""
    transport = new_transport(options.connection, "", polled=polled)
    assert isinstance(transport, RemotingTransport), "a read never goes over gRPC"
    return transport
