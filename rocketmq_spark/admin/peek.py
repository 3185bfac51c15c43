"""The newest messages of a topic.

Rule 1: only the ends of queues are read, on the path of a DataFrame's read; what is expired meanwhile is left out.
Rule 2: a queue that its topic's permission, or number of read queues, closes to readers is not read, but named.
Rule 3: "newest" is by the time of storing; brokers' clocks differ, so between brokers it is as good as they are.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Final

import pyarrow as pa

from rocketmq_spark.admin.rows import PeekedMessage, QueueOffsets
from rocketmq_spark.client.read_rows import read_rows
from rocketmq_spark.consumer.ranges import OffsetRange
from rocketmq_spark.consumer.topic_queues import TopicQueues
from rocketmq_spark.errors import OptionError, ReadError
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.message_const import RESERVED_PROPERTIES
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.route_data import TopicRouteData, permission_text
from rocketmq_spark.transport.base import ReadTransport

_SCHEMA: Final = pa.schema(
    [
        ("storeTimestamp", pa.timestamp("us", "UTC")),
        ("brokerName", pa.string()),
        ("queueId", pa.int32()),
        ("queueOffset", pa.int64()),
        ("tags", pa.string()),
        ("keys", pa.string()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("body", pa.binary()),
        ("unreadable", pa.string()),
    ]
)
# How far back a tag is looked for in each queue: brokers pass over others' messages by their queues' own entries.
_BACK_FOR_A_TAG: Final = 1_000
# A record that cannot be decoded is shown before all others, as it may be the newest.
_UNKNOWN_TIME: Final = datetime.max.replace(tzinfo=timezone.utc)


def peek(
    options: ReaderOptions,
    transport: ReadTransport,
    routes: Mapping[str, TopicRouteData],
    held: Sequence[QueueOffsets],
    count: int,
    tag: str | None,
    consumer_group: str,
) -> list[PeekedMessage]:
    """Return the newest messages of some queues, the newest first.

    Parameters
    ----------
    options : ReaderOptions
        How to reach the cluster.
    transport : ReadTransport
        Brokers are asked through it for the type of their queues, if there is a tag.
    routes : mapping of str to TopicRouteData
        The topic's.
    held : sequence of QueueOffsets
        What the queues hold; none that is closed to readers.
    count : int
    tag : str or None
    consumer_group : str

    Raises
    ------
    OptionError
        `count` is less than 1, or the tag holds nothing.
    ReadError
        A queue gave nothing within the timeout, or its broker refuses.
    """
    if count < 1:
        raise OptionError(f"peeking at {count} messages: allowed is 1 or more")
    if tag is not None and not any(map(str.strip, tag.split("||"))):
        raise OptionError(f"tag={tag!r} has no tag: allowed is one, or several as in TagA || TagB")
    back = count if tag is None else max(count, _BACK_FOR_A_TAG)
    # Read as compacted topics, so that a gap is no error: peek shows the messages that are left.
    ranges = [
        OffsetRange(one.queue, max(one.min_offset, one.max_offset - back), one.max_offset, compacted=True)
        for one in held
        if one.messages > 0
    ]
    asked = replace(
        options,
        subscribe=tuple(routes),
        sub_expression="*" if tag is None else tag,
        consumer_group=consumer_group,
        fail_on_data_loss=False,
    )
    queues = TopicQueues(asked, transport, time.monotonic, routes)
    inner = tag is not None and queues.may_hold_inner_batches([one.queue for one in ranges])
    found = _messages(read_rows(asked, ranges, _SCHEMA, routes, filters_here=inner, on_unreadable=lambda _: True))
    try:
        return heapq.nlargest(count, found, key=lambda one: (one.store_time or _UNKNOWN_TIME, one.queue_offset))
    except ReadError as exc:
        # Its own text is about the options of a DataFrame.
        raise ReadError(
            f"peeking at topic {', '.join(routes)}: {exc.__cause__ or exc}; ask again, with a longer timeout if a "
            "broker is slow"
        ) from exc


def closed_to_readers(held: Iterable[QueueOffsets], route: TopicRouteData) -> dict[MessageQueue, ReadError]:
    """Return the queues whose messages no broker gives to anybody, each with the reason."""
    datas = {data.broker_name: data for data in route.queue_datas}
    closed = {}
    for one in held:
        data = datas[one.broker_name]
        if one.messages > 0 and not (data.readable and one.queue_id < data.read_queue_nums):
            closed[one.queue] = ReadError(
                f"closed to readers (permission {permission_text(data.perm)}, read queues {data.read_queue_nums})"
            )
    return closed


def _messages(batches: Iterator[pa.RecordBatch]) -> Iterator[PeekedMessage]:
    for batch in batches:
        for row in batch.to_pylist():
            own = {name: text for name, text in row["properties"] or () if name not in RESERVED_PROPERTIES}
            yield PeekedMessage(
                row["storeTimestamp"],
                row["brokerName"],
                row["queueId"],
                row["queueOffset"],
                row["tags"],
                row["keys"],
                own,
                row["body"],
                row["unreadable"],
            )
