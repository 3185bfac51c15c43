"""Which rows of an effectively-once write are stored: where to read, and the row ids in the answers of brokers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa

from rocketmq_spark.arrow.decode import batches_of
from rocketmq_spark.arrow.read_columns import ROW_IDS, arrow_schema_of
from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.effectively_once.stored_rows import StoredRows, places_of
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.records import Begun, QueueNums
from rocketmq_spark.errors import MQClientException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.properties import ROW_ID
from rocketmq_spark.model.route import MAX_QUEUES
from rocketmq_spark.options.kinds import MIB
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.unwrap import Unreadable
from rocketmq_spark.source.read import grouped

T = TypeVar("T")

# Bytes of the answers that are decoded together.
_DECODED_AT_ONCE: Final = 2 * MIB
# Queues that are read at the same time. Each holds at most `_DECODED_AT_ONCE` bytes and one answer.
_QUEUES_AT_ONCE: Final = 8
_ONLY_IDS: Final = arrow_schema_of([ROW_IDS])


def row_id_prefix(options: SinkOptions, write: Write, partition_id: int | None = None) -> str:
    """Return how the ids of a write's rows begin, or those of one partition."""
    prefix = f"{row_id_name(options, write)}/{write.batch_id}/"
    return prefix if partition_id is None else f"{prefix}{partition_id}/"


def row_id_name(options: SinkOptions, write: Write) -> str:
    """Return the first part of the ids of a write's rows."""
    return write.query or f"{options.transactional_id}#{write.name}"


def most_queues(several: Iterable[QueueNums]) -> dict[str, int]:
    """Return the brokers of all together, each with its largest number of queues.

    Raises an MQClientException for more queues than a topic may have.
    """
    most: dict[str, int] = {}
    for queue_nums in several:
        for name, nums in queue_nums.items():
            most[name] = max(nums, most.get(name, 0))
    if (queues := sum(most.values())) > MAX_QUEUES:
        raise MQClientException(
            f"the records of earlier attempts name {queues} queues, {MAX_QUEUES} are allowed: find out which program "
            "writes to the transactionTopic, and use another one"
        )
    return most


def queues_of(
    brokers: Brokers, attempts: Sequence[Begun], start_offsets: Mapping[MessageQueue, int]
) -> dict[MessageQueue, int]:
    """Return offsets below all rows of attempts, for all queues that their brokers have now or had when they began.

    `start_offsets` are those of the write. The offset is 0 if none is known: all messages of the queue are read then.

    Raises a RouteNotFoundException (10005) if no name server answers for a time.
    """
    topic = str(brokers.options.topic)
    # A route from before the fence may lack queues. This one may, too, for a broker that is not registered now.
    info = brokers.fresh_route(topic)
    route = [] if info.template else info.route.queue_datas
    now = {data.broker_name: max(data.read_queue_nums, data.write_queue_nums) for data in route}
    sent_to = most_queues(one.queue_nums for one in attempts)
    all_nums = {name: max(nums, now.get(name, 0)) for name, nums in sent_to.items()}
    queues = [MessageQueue(topic, name, queue_id) for name, nums in all_nums.items() for queue_id in range(nums)]
    queues += [
        queue
        for queue in dict.fromkeys(itertools.chain(start_offsets, *(one.start_offsets for one in attempts)))
        if queue.broker_name in all_nums and queue.queue_id >= all_nums[queue.broker_name]
    ]
    return {
        queue: min(one.start_offset_of(queue, start_offsets) for one in attempts if queue.broker_name in one.queue_nums)
        for queue in queues
    }


def starts_of(
    brokers: Brokers, write: Write, start_offsets: Mapping[MessageQueue, int], ends: Mapping[MessageQueue, int]
) -> dict[MessageQueue, int]:
    """Return where to read the rows of a write in queues that end at `ends`, by start offsets from before the write."""
    prefix = row_id_prefix(brokers.options, write)

    def is_own(message: MessageExt) -> bool:
        return message.properties.get(ROW_ID, "").startswith(prefix)

    return brokers.for_each(
        start_offsets, lambda queue: brokers.start_of(queue, start_offsets[queue], ends[queue], is_own)
    )


def read_stored(
    brokers: Brokers, starts: Mapping[MessageQueue, int], ends: Mapping[MessageQueue, int], prefix: str
) -> StoredRows:
    """Return the rows between two offsets of queues whose ids begin with a prefix.

    Raises a DataLossError if a message is missing there.
    """
    return StoredRows.concat(_read(brokers, starts, ends, prefix, StoredRows.SCHEMA, StoredRows.in_batch))


def count_repeats(
    brokers: Brokers,
    starts: Mapping[MessageQueue, int],
    ends: Mapping[MessageQueue, int],
    prefix: str,
    partitions: Collection[int],
) -> int:
    """Return how many rows of these partitions the queues have twice or more often; raises as `read_stored`."""
    wanted = np.array(sorted(partitions))
    found = _read(brokers, starts, ends, prefix, _ONLY_IDS, places_of)
    places = [places[np.isin(places[:, 0], wanted)] for places in found]
    together = np.concatenate(places) if places else np.empty((0, 2), np.int64)
    return len(together) - len(np.unique(together, axis=0))


def _read(
    brokers: Brokers,
    starts: Mapping[MessageQueue, int],
    ends: Mapping[MessageQueue, int],
    prefix: str,
    schema: pa.Schema,
    convert: Callable[[pa.RecordBatch, MessageQueue, str], T],
) -> list[T]:
    """Return the results of `convert` for each group of messages in which an id has the prefix."""
    wanted, turn = prefix.encode(), brokers.runtime.lock()

    def scan(queue: MessageQueue) -> list[T]:
        pulls = brokers.pulls(queue, starts[queue], ends[queue], complete=True)
        converted: list[T] = []
        with_ids = (pulled for pulled in pulls if wanted in bytes(pulled.body))
        for group in grouped(with_ids, _DECODED_AT_ONCE):
            # Messages of other producers may unpack to many times their size. So one group at a time is decoded.
            with turn:
                converted += [convert(batch, queue, prefix) for batch in batches_of(group, schema, None, _leave_out)]
        return converted

    return list(itertools.chain.from_iterable(brokers.for_each(starts, scan, at_once=_QUEUES_AT_ONCE).values()))


def _leave_out(_: Unreadable) -> bool:
    # Other producers may store anything. This sink's rows are readable.
    return False
