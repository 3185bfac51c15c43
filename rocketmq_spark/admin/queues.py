"""Requests the offsets of a topic's queues, and reads its newest messages, for `Admin.offsets` and `Admin.peek`.

Offsets are also requested for queues that readers may not read: messages stay in place when a permission changes.
Requests for offsets go to the topic's brokers in turn. After a timeout or a failed connection, no new one goes to that
address. Follows ``MQAdminImpl`` (docs/internals/reads.md#offsets).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime, timezone
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from rocketmq_spark.admin.answers import PeekedMessage, QueueOffsets
from rocketmq_spark.errors import OptionError, ReadError, RocketMQError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.properties import RESERVED_PROPERTIES
from rocketmq_spark.model.route import TopicRouteData
from rocketmq_spark.options.connection import ConnectionOptions
from rocketmq_spark.options.kinds import effective_namespace, parse_environment, parse_one
from rocketmq_spark.options.source import SOURCE_OPTIONS, SourceOptions, source_contradictions
from rocketmq_spark.source.queue_requests import QueueRequests
from rocketmq_spark.source.ranges import OffsetRange
from rocketmq_spark.source.topic_queues import TopicQueues
from rocketmq_spark.source.topic_routes import refuse_static
from rocketmq_spark.transport.base import ReadTransport
from rocketmq_spark.transport.remoting.transport import RemotingTransport

if TYPE_CHECKING:
    import pyarrow as pa

# The longest timeout of a request, seconds. Threads and sockets do not accept much larger numbers.
_LONGEST_S: Final = 3_600
# After requests have timed out, other brokers still get requests for this long.
_FOR_OTHER_BROKERS_MS: Final = 60_000
# Messages of each queue that are searched for a tag. Brokers compare only its hash, in their ConsumeQueue.
_BACK_FOR_A_TAG: Final = 1_000
# A record that cannot be decoded is shown first, because it may be the newest.
_UNKNOWN_TIME: Final = datetime.max.replace(tzinfo=timezone.utc)


def admin_options(connection_fields: Mapping[str, Any], timeout: float, environ: Mapping[str, str]) -> SourceOptions:
    """Return the options of a connection, or raise an OptionError.

    `connection_fields` has fields of `ConnectionOptions` that reads have, with None for missing values.
    ``NAMESRV_ADDR`` is the default of the name servers. `timeout` is the seconds for each request.
    """
    check_timeout(timeout)
    connection = {field.name for field in fields(ConnectionOptions)}
    table = [spec for spec in SOURCE_OPTIONS if spec.field in connection]
    if unknown := connection_fields.keys() - {spec.field for spec in table}:
        known = ", ".join(sorted(spec.field for spec in table))
        raise OptionError(f"unknown option {', '.join(sorted(unknown))}; the options of the connection are {known}")
    values = {
        spec.field: parse_one(spec, text, spec.field)
        for spec in table
        if (text := connection_fields.get(spec.field)) is not None
    }
    values |= parse_environment(table, values, environ)
    if not values.get("name_server"):
        raise OptionError(
            "no name server is given: set name_server to host:9876;host:9876, or the environment variable NAMESRV_ADDR"
        )
    values["namespace"] = effective_namespace(values)
    milliseconds = max(1, round(timeout * 1000))
    options = SourceOptions.of(**values, pull_timeout_ms=milliseconds, read_timeout_ms=milliseconds)
    for contradiction in source_contradictions(options, str, streaming=False):
        raise OptionError(contradiction)
    return options


def check_timeout(timeout: float) -> None:
    """Raise an OptionError unless a timeout is allowed."""
    if not 0 < timeout <= _LONGEST_S:
        raise OptionError(f"timeout is {timeout!r}: allowed are seconds per request, above 0 and at most {_LONGEST_S}")


def offsets_of(
    options: SourceOptions, transport: ReadTransport, topic: str, route: TopicRouteData
) -> tuple[list[QueueOffsets], dict[MessageQueue, RocketMQError]]:
    """Return the offsets of a topic's queues, and the errors of the others; both by broker name, then queue id.

    If no queue has an answer, it raises the first error.
    """
    refuse_static(topic, route)
    own = replace(options, subscribe=(topic,), read_timeout_ms=options.pull_timeout_ms + _FOR_OTHER_BROKERS_MS)
    queues = TopicQueues(own, transport, time.monotonic, {topic: route})

    def request(queue: MessageQueue, address: str, timeout: float) -> QueueOffsets:
        # An empty queue of the type BatchCQ returns -1.
        first = max(0, transport.min_offset(queue, address, timeout))
        return QueueOffsets(queue, first, transport.max_offset(queue, address, timeout))

    topic_queues = (
        MessageQueue(topic, data.broker_name, number) for data in route.queue_datas for number in range(data.queue_nums)
    )
    by_turns = sorted(topic_queues, key=lambda queue: queue.queue_id)
    answers, errors = QueueRequests(queues, time.monotonic).once(by_turns, request)
    if errors and not answers:
        raise errors[min(errors)]
    return [answers[queue][0] for queue in sorted(answers)], dict(sorted(errors.items()))


def missing_queues(reasons: Mapping[MessageQueue, RocketMQError | str]) -> list[str]:
    """Return one sentence for each broker, with the first reason; `reasons` are sorted by broker."""
    texts = []
    for broker, group in groupby(reasons, key=lambda queue: queue.broker_name):
        first, *others = group
        texts.append(f"{len(others) + 1} queue{'s' if others else ''} of {broker}: {reasons[first]}")
    return texts


def queue_offsets(name_servers: str | Sequence[str], topic: str, *, timeout: float = 3.0) -> list[QueueOffsets]:
    """Return the offsets of all queues of a topic, by broker name, then queue id; a missing answer is an error.

    `name_servers` is a text (``host:9876;host:9876``) or a list; `timeout` is in seconds per request. Raises an
    OptionError for a malformed argument or a static topic, a RemotingException if a server does not answer, and a
    TopicRouteStaleException for an unknown topic.
    """
    options = admin_options({"name_server": name_servers}, timeout, {})
    namespace = options.connection.namespace or ""
    with RemotingTransport(options.connection.name_server, namespace=namespace) as transport:
        offsets, errors = offsets_of(options, transport, topic, transport.query_route(topic, timeout))
    for error in errors.values():
        raise error
    return offsets


def peek(
    options: SourceOptions,
    transport: ReadTransport,
    routes: Mapping[str, TopicRouteData],
    offsets: Sequence[QueueOffsets],
    count: int,
    tag: str | None,
    consumer_group: str,
) -> list[PeekedMessage]:
    """Return the newest messages of some queues by store time, the newest first; see `Admin.peek`.

    `offsets` are those of the queues that readers may read. Messages that expire meanwhile are left out.
    """
    # Only this function needs Arrow.
    from rocketmq_spark.arrow.read_columns import arrow_schema_of
    from rocketmq_spark.source.plan import plan_of
    from rocketmq_spark.source.read import read_rows

    # In the order of the fields of `PeekedMessage`.
    schema = arrow_schema_of(
        ("storeTimestamp", "brokerName", "queueId", "queueOffset", "tags", "keys", "properties", "body", "unreadable")
    )
    if count < 1:
        raise OptionError(f"peeking at {count} messages: allowed is 1 or more")
    if tag is not None and not any(map(str.strip, tag.split("||"))):
        raise OptionError(f"tag={tag!r} has no tag: give one, or several as in TagA || TagB")
    back = count if tag is None else max(count, _BACK_FOR_A_TAG)
    # With compacted=True a gap is no error: peek shows the remaining messages.
    ranges = [
        OffsetRange(item.queue, max(item.min_offset, item.max_offset - back), item.max_offset, compacted=True)
        for item in offsets
        if item.messages > 0
    ]
    options = replace(
        options,
        subscribe=tuple(routes),
        sub_expression="*" if tag is None else tag,
        consumer_group=consumer_group,
        fail_on_data_loss=False,
    )
    requests = QueueRequests(TopicQueues(options, transport, time.monotonic, routes), time.monotonic)
    rows = _messages(read_rows(options, plan_of(ranges, requests), schema, on_unreadable=lambda _: True))
    try:
        return heapq.nlargest(count, rows, key=lambda row: (row.store_time or _UNKNOWN_TIME, row.queue_offset))
    except ReadError as exc:
        # The text of this error contains options of a DataFrame; that of its cause does not.
        raise ReadError(
            f"peeking at topic {', '.join(routes)}: {exc.__cause__ or exc}; try again, with a longer timeout if a "
            "broker is slow"
        ) from exc


def _messages(batches: Iterator[pa.RecordBatch]) -> Iterator[PeekedMessage]:
    for batch in batches:
        for row in batch.to_pylist():
            own = {name: text for name, text in row["properties"] or () if name not in RESERVED_PROPERTIES}
            yield PeekedMessage(*{**row, "properties": own}.values())
