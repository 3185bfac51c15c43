"""How many messages a topic holds, and where.

Rule 1: every queue is asked, writable or not: messages stay where they are when a permission changes.
Rule 2: who does not answer for one queue is not waited for again for the next, and keeps nobody else from being asked:
        the brokers take turns, and all of them together have a minute more than one question may take.

Follows ``MQAdminImpl.java`` (maxOffset, minOffset).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from rocketmq_spark.admin.options import admin_options
from rocketmq_spark.admin.rows import QueueOffsets
from rocketmq_spark.consumer.bounds import Bounds
from rocketmq_spark.consumer.topic_queues import TopicQueues
from rocketmq_spark.consumer.topic_routes import refuse_static
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.route_data import TopicRouteData
from rocketmq_spark.transport.base import ReadTransport
from rocketmq_spark.transport.remoting import RemotingTransport

# What others get, at least, after the first have not answered.
_LONGEST_MS: Final = 60_000


def offsets_of(
    options: ReaderOptions, transport: ReadTransport, topic: str, route: TopicRouteData
) -> dict[MessageQueue, QueueOffsets | RocketMQError]:
    """Return what each queue of a topic holds, or why that is not known; by broker name, then queue id.

    A message shows up here a moment after its send was acknowledged: a broker builds its queues in the background.

    Raises
    ------
    OptionError
        The topic is a static one.
    """
    refuse_static(topic, route)
    own = replace(options, subscribe=(topic,), read_timeout_ms=options.pull_timeout_ms + _LONGEST_MS)
    queues = TopicQueues(own, transport, time.monotonic, {topic: route})
    timeout = options.pull_timeout_ms / 1000

    def ask(queue: MessageQueue, address: str) -> QueueOffsets:
        wired = queues.on_wire(queue)
        # An empty queue of the type BatchCQ answers -1.
        first = max(0, transport.min_offset(wired, address, timeout))
        return QueueOffsets(queue, first, transport.max_offset(wired, address, timeout))

    asked = [
        MessageQueue(topic, data.broker_name, queue_id)
        for data in route.queue_datas
        for queue_id in range(data.queue_nums)
    ]
    by_turns = sorted(asked, key=lambda queue: queue.queue_id)
    found = Bounds(own, transport, queues, time.monotonic).once(by_turns, ask)
    return {
        queue: answer if isinstance(answer, RocketMQError) else answer[0] for queue, answer in sorted(found.items())
    }


def held_by(answers: dict[MessageQueue, QueueOffsets | RocketMQError]) -> list[QueueOffsets]:
    """Return what is known of queues; raises the error of the first one if it is nothing at all."""
    held = [answer for answer in answers.values() if isinstance(answer, QueueOffsets)]
    for answer in answers.values():
        if not held and isinstance(answer, RocketMQError):
            raise answer
    return held


def missing_queues(answers: Mapping[MessageQueue, QueueOffsets | RocketMQError]) -> list[str]:
    """Return one sentence for each broker that did not answer for queues of its own."""
    failed = [(queue, answer) for queue, answer in answers.items() if isinstance(answer, RocketMQError)]
    texts = []
    for broker, group in groupby(failed, key=lambda one: one[0].broker_name):
        of_broker = list(group)
        count = f"{len(of_broker)} queue{'s' if len(of_broker) > 1 else ''}"
        texts.append(f"{count} of {broker}: {of_broker[0][1]}")
    return texts


def queue_offsets(name_servers: str | Sequence[str], topic: str, *, timeout: float = 3.0) -> list[QueueOffsets]:
    """Ask every broker of a topic for the offsets of its queues; all of them, or none.

    Parameters
    ----------
    name_servers : str or sequence of str
        ``host:9876;host:9876``, or one of them each.
    topic : str
    timeout : float, default 3.0
        Seconds, for each question.

    Returns
    -------
    list of QueueOffsets
        By broker name, then queue id.

    Raises
    ------
    OptionError
        An argument is malformed, or the topic is a static one.
    RemotingException
        A server can't be asked.
    TopicRouteStaleException
        No name server knows the topic.
    """
    options = admin_options({"name_server": name_servers}, timeout, {})
    with RemotingTransport(options.name_server) as transport:
        answers = offsets_of(options, transport, topic, transport.query_route(topic, timeout))
    found = []
    for answer in answers.values():
        if isinstance(answer, RocketMQError):
            raise answer
        found.append(answer)
    return found
