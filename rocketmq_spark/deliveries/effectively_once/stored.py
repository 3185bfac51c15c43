"""Which rows of an effectively-once write are stored: where to read, and the contents in the answers of brokers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.arrow.columns import Ints, byte_column_or_nulls, filled, text_array, to_numpy
from rocketmq_spark.arrow.content import ContentHash
from rocketmq_spark.arrow.decode import batches_of
from rocketmq_spark.arrow.numpy_hashes import Hashes
from rocketmq_spark.arrow.read_columns import ATTEMPTS, arrow_schema_of
from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.effectively_once.stored_rows import QueueRows
from rocketmq_spark.deliveries.effectively_once.tokens import TOKEN_LENGTH
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.records import Begun, QueueNums
from rocketmq_spark.deliveries.log.scan import UNKNOWN, Floor, Known, floor_now, lowest, scan
from rocketmq_spark.errors import DataLossError, MQClientException
from rocketmq_spark.model.message import EncodedBatch, MessageQueue
from rocketmq_spark.model.message_ext import MessageExt, Pulled
from rocketmq_spark.model.properties import ATTEMPT
from rocketmq_spark.model.route import MAX_QUEUES
from rocketmq_spark.options.kinds import MIB
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.compression import decompress
from rocketmq_spark.protocol.remoting.records import messages_in
from rocketmq_spark.protocol.remoting.unwrap import Unreadable, messages_of
from rocketmq_spark.source.read import grouped

T = TypeVar("T")

# Bytes of the answers that are decoded together.
_DECODED_AT_ONCE: Final = 2 * MIB
_FIRST_MESSAGE: Final = 1024
# Queues that are read at the same time. Each holds at most `_DECODED_AT_ONCE` bytes and one answer.
_QUEUES_AT_ONCE: Final = 8
_NUMBER: Final = "^[0-9]{1,18}$"
_ONLY_TOKENS: Final = arrow_schema_of([ATTEMPTS])
_ROWS: Final = arrow_schema_of([ATTEMPTS, "queueOffset", "body", "flag", "properties"])


def row_id_name(options: SinkOptions, write: Write) -> str:
    """Return the first part of the ids of a write's rows, which they have with ``rowId=true``."""
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


def floors_of(
    brokers: Brokers, attempts: Sequence[Begun], start_offsets: Mapping[MessageQueue, int]
) -> dict[MessageQueue, Floor]:
    """Return the floors of all rows of attempts, for all queues that their brokers have now or had when they began.

    `start_offsets` are those of the write.

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
        queue: _floor_of_all(
            [one.floor_of(queue, start_offsets) for one in attempts if queue.broker_name in one.queue_nums],
            start_offsets.get(queue, 0),
        )
        for queue in queues
    }


def _floor_of_all(floors: Sequence[Floor], start_offset: int) -> Floor:
    """Return the floor of all attempts that have these floors in a queue."""
    floor = lowest(floors)
    # A floor below the write's start offset says that the broker lost messages before an attempt began. Rows that
    # attempts with another floor stored since then may be anywhere.
    lost = isinstance(floor, Known) and floor.offset < start_offset
    return UNKNOWN if lost and len(set(floors)) > 1 else floor


def floors_now(
    brokers: Brokers, floors: Mapping[MessageQueue, Floor], ends: Mapping[MessageQueue, int], tokens: Collection[str]
) -> dict[MessageQueue, Floor]:
    """Return the floors of the rows with these tokens, in queues that end at `ends` now."""
    is_own = partial(_has_token, tokens=tokens)
    return brokers.for_each(floors, lambda queue: floor_now(brokers, queue, floors[queue], ends[queue], is_own))


def has_others(pulled: Pulled, tokens: Collection[str]) -> bool:
    """Return whether an answer has messages, and none of them has one of these tokens."""
    messages = [*messages_of(pulled.body, pulled.queue, pulled.start, pulled.end, decompressed=False, parsed=False)]
    return bool(messages) and not any(isinstance(one, MessageExt) and _has_token(one, tokens) for one in messages)


def _has_token(message: MessageExt, tokens: Collection[str]) -> bool:
    return message.properties.get(ATTEMPT, "")[:TOKEN_LENGTH] in tokens


def read_stored(
    brokers: Brokers,
    floors: Mapping[MessageQueue, Floor],
    ends: Mapping[MessageQueue, int],
    tokens: Collection[str],
    content: ContentHash,
) -> list[QueueRows]:
    """Return the rows with these tokens between the floors and ends of queues.

    Raises a DataLossError if a message is missing there.
    """
    # Requests to several brokers are resolved at the same time, beside the task's own thread.
    content = content.for_thread()

    def rows_of(found: pa.RecordBatch, queue: MessageQueue) -> QueueRows:
        attempts, offsets, *columns = found.columns
        hashes = _hashes(content, queue.topic, attempts, columns)
        return QueueRows(queue, to_numpy(offsets), hashes, _numbers(attempts) if content.numbered else None)

    return _read(brokers, floors, ends, tokens, _ROWS, rows_of)


def count_stored(
    brokers: Brokers, floors: Mapping[MessageQueue, Floor], ends: Mapping[MessageQueue, int], tokens: Collection[str]
) -> Counter[str]:
    """Return how many rows with each of these tokens the queues have; raises as `read_stored`."""

    def count(found: pa.RecordBatch, _: MessageQueue) -> Counter[str]:
        values = _tokens(found.column(0)).value_counts()
        return Counter(dict(zip(values.field(0).to_pylist(), values.field(1).to_pylist(), strict=True)))

    return sum(_read(brokers, floors, ends, tokens, _ONLY_TOKENS, count), Counter())


def hashes_of(content: ContentHash, batch: EncodedBatch) -> Hashes:
    """Return the hashes of the rows of a request, on any thread."""
    messages = messages_in(batch)
    columns = [
        [message.properties[ATTEMPT] for message in messages],
        [decompress(message.body, batch.sys_flag) for message in messages],
        [message.flag for message in messages],
        [list(message.properties.items()) for message in messages],
    ]
    kinds = [_ROWS.field(name).type for name in (ATTEMPTS, "body", "flag", "properties")]
    attempts, *rest = (pa.array(values, kind) for values, kind in zip(columns, kinds, strict=True))
    return _hashes(content.for_thread(), batch.topic, attempts, rest)


def _hashes(content: ContentHash, topic: str, attempts: pa.Array, columns: Sequence[pa.Array]) -> Hashes:
    return content.of_stored(topic, byte_column_or_nulls(pc.utf8_slice_codeunits(attempts, TOKEN_LENGTH)), *columns)


def _numbers(attempts: pa.Array) -> Ints:
    """Return the numbers of rows, 0 for what is no number: no row has such a content, whatever its number."""
    texts = pc.utf8_slice_codeunits(attempts, TOKEN_LENGTH + 1)
    is_number = filled(pc.match_substring_regex(texts, _NUMBER), False)
    numbers: Ints = to_numpy(pc.if_else(is_number, texts, "0").cast(pa.int64()))
    return numbers


def _tokens(attempts: pa.Array) -> pa.Array:
    return pc.utf8_slice_codeunits(attempts, 0, TOKEN_LENGTH)


def _read(
    brokers: Brokers,
    floors: Mapping[MessageQueue, Floor],
    ends: Mapping[MessageQueue, int],
    tokens: Collection[str],
    schema: pa.Schema,
    convert: Callable[[pa.RecordBatch, MessageQueue], T],
) -> list[T]:
    """Return the results of `convert` for the rows with tokens in each group of messages, in the order of a queue."""
    wanted, known, turn = [token.encode() for token in tokens], text_array(tokens), brokers.runtime.lock()

    def may_have_rows(pulled: Pulled) -> bool:
        # The first message has a token in most answers that have any. A search needs a copy.
        parts = (bytes(part) for part in (pulled.body[:_FIRST_MESSAGE], pulled.body))
        return any(token in part for part in parts for token in wanted)

    def read(queue: MessageQueue) -> list[T]:
        pulls = scan(brokers, queue, floors[queue], ends[queue])
        converted: list[T] = []
        for group in grouped(filter(may_have_rows, pulls), _DECODED_AT_ONCE):
            # Messages of other producers may unpack to many times their size. So one group at a time is decoded.
            with turn:
                for batch in batches_of(group, schema, None, partial(_check_foreign, tokens=wanted)):
                    is_own = filled(pc.is_in(_tokens(batch.column(0)), known), False)
                    found = batch if is_own.true_count == len(batch) else batch.filter(is_own)
                    if len(found):
                        converted.append(convert(found, queue))
        return converted

    return list(itertools.chain.from_iterable(brokers.for_each(floors, read, at_once=_QUEUES_AT_ONCE).values()))


def _check_foreign(message: Unreadable, tokens: Sequence[bytes]) -> bool:
    """Return False, so that the message is left out; raise a DataLossError if it has a token.

    Other producers may store anything. A row of the write that is left out would be sent again.
    """
    record = message.record
    attempt = "" if record is None else record.properties.get(ATTEMPT, "")
    # The rows of an inner batch are in its body.
    if attempt[:TOKEN_LENGTH].encode() in tokens or any(token in message.body for token in tokens):
        raise DataLossError(
            f"a recovery reads the rows of an earlier attempt, and {message}. It has the token of the attempt, so it "
            "is unknown which rows are stored. If the next attempt fails, too, compare the rows with the topic, and "
            "write what is missing with another transactionalId (a stream: and startAnew=true)"
        )
    return False
