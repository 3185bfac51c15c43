"""Decodes the stored messages of pulls to record batches with the columns of a read (`batches_of`).

A kernel (`rocketmq_spark.arrow.kernel`) decodes the columns of several pulls at once. If one message of these pulls
does not allow that, `decode_rows` decodes all their messages, one at a time. Such a message is unreadable, a
compressed inner batch, or otherwise rare: it has a property twice, or very many. Properties are parsed
only for a column or a filter by tags that needs them. Bodies outside inner batches are decompressed only for a column
that needs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.arrow.columns import byte_strings, text_array, to_arrow, to_numpy
from rocketmq_spark.arrow.kernel import Kernel, default_kernel
from rocketmq_spark.arrow.messages import Irregular
from rocketmq_spark.arrow.read_columns import COLUMNS_BY_NAME, FROM_PROPERTIES, UNREADABLE, ReadColumn
from rocketmq_spark.errors import CompressionError, RemotingCommandException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import MessageExt, Pulled
from rocketmq_spark.model.properties import TAGS
from rocketmq_spark.protocol.compression import COMPRESSED_FLAG, decompress
from rocketmq_spark.protocol.remoting.unwrap import INNER_BATCH, Unreadable, messages_of

# The most bytes of the decompressed bodies of one record batch.
_MOST_UNPACKED: Final = 32 * 1024 * 1024
# The most rows of one record batch. Without this limit the empty items of inner batches, each 22 bytes in an answer of
# 16 MB, would take hundreds of megabytes as columns.
_MOST_ROWS: Final = 128 * 1024

# Memory of a message without its body, and of a property, as Python objects, bytes.
_MESSAGE_COST: Final = 500
_PROPERTY_COST: Final = 200

OnUnreadable: TypeAlias = Callable[[Unreadable], bool]
"""Called once for each unreadable message; returns whether it becomes a row with the stored bytes as body."""


class _TooMuchError(Exception):
    """Several messages are, or unpack to, more than a record batch may hold."""


def fail(message: Unreadable) -> bool:
    """Raise a RemotingCommandException: the default of the option ``onUnreadable``."""
    raise RemotingCommandException(
        f"reading {message}. To leave such messages out set onUnreadable=skip; to get their stored bytes set "
        "onUnreadable=raw"
    )


def batches_of(
    pulls: Sequence[Pulled],
    schema: pa.Schema,
    tags: frozenset[str] | None = None,
    on_unreadable: OnUnreadable = fail,
    most_unpacked: int = _MOST_UNPACKED,
    kernel: Kernel | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of answers, in order, as one record batch, or as several if they unpack to too many bytes.

    `schema` has some columns of a read. With `tags`, only messages with one of them are yielded, because brokers filter
    by hashes (docs/internals/reads.md#pulls). Raises what `on_unreadable` raises.
    """
    kernel = kernel or default_kernel()
    try:
        batches: Iterable[pa.RecordBatch] = [_Columns(pulls, most_unpacked, kernel).batch(schema, tags)]
    except (Irregular, pa.ArrowInvalid, OverflowError):
        batches = decode_rows(pulls, schema, tags, on_unreadable, most_unpacked)
    except _TooMuchError:
        if len(pulls) > 1:
            halves = pulls[: len(pulls) // 2], pulls[len(pulls) // 2 :]
            parts = (batches_of(half, schema, tags, on_unreadable, most_unpacked, kernel) for half in halves)
            batches = itertools.chain(*parts)
        else:
            batches = decode_rows(pulls, schema, tags, on_unreadable, most_unpacked)
    # Outside the except blocks: the error holds what was unpacked so far.
    for batch in batches:
        if batch.num_rows:
            yield batch


def decode_rows(
    pulls: Sequence[Pulled],
    schema: pa.Schema,
    tags: frozenset[str] | None = None,
    on_unreadable: OnUnreadable = fail,
    most_unpacked: int = _MOST_UNPACKED,
) -> Iterator[pa.RecordBatch]:
    """Yield the result of `batches_of`, decoding one message at a time.

    Messages of one offset may be in different batches: a damaged queue may return several.
    """
    names = {*schema.names}
    decompressed = not names.isdisjoint(("body", UNREADABLE))
    parsed = tags is not None or not names.isdisjoint((*FROM_PROPERTIES, UNREADABLE))
    rows: list[tuple[MessageQueue, MessageExt | Unreadable]] = []
    room = most_unpacked
    for pull in pulls:
        place = pull.body, pull.queue, pull.start, pull.end
        for message in messages_of(*place, decompressed=decompressed, parsed=parsed):
            if tags is not None and not _has_tag(message, tags):
                continue
            if isinstance(message, Unreadable) and not on_unreadable(message):
                continue
            decoded = message.record if isinstance(message, Unreadable) else message
            properties = 0 if decoded is None else len(decoded.properties)
            cost = len(message.body) + _MESSAGE_COST + _PROPERTY_COST * properties
            if cost > room and rows:
                batch, rows, room = _batch_of(rows, schema), [], most_unpacked
                yield batch
            rows.append((pull.queue, message))
            room -= cost
    yield _batch_of(rows, schema)


def _batch_of(rows: Sequence[tuple[MessageQueue, MessageExt | Unreadable]], schema: pa.Schema) -> pa.RecordBatch:
    columns = [(COLUMNS_BY_NAME[field.name], field.type) for field in schema]
    arrays = [pa.array([_value(column, *row) for row in rows], kind) for column, kind in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _has_tag(message: MessageExt | Unreadable, tags: frozenset[str]) -> bool:
    """Return whether a message has one of the tags, or has tags that cannot be read."""
    if not isinstance(message, Unreadable):
        return message.properties.get(TAGS) in tags
    record = message.record
    if record is None or not message.properties_known or record.sys_flag & INNER_BATCH == INNER_BATCH:
        return True
    return record.properties.get(TAGS) in tags


def _value(column: ReadColumn, queue: MessageQueue, message: MessageExt | Unreadable) -> Any:
    if not isinstance(message, Unreadable):
        return column.value(queue, message)
    if column.of_unreadable is not None:
        return column.of_unreadable(queue, message)
    if message.record is None or (column.name in FROM_PROPERTIES and not message.properties_known):
        return None
    return column.value(queue, message.record)


class _Columns:
    """Makes columns on request; raises Irregular or a pyarrow.ArrowInvalid for what only `decode_rows` can read."""

    def __init__(self, pulls: Sequence[Pulled], most_unpacked: int, kernel: Kernel) -> None:
        self._most_unpacked = most_unpacked
        self._queues = [pull.queue for pull in pulls]
        bodies, starts, ends = zip(*((pull.body, pull.start, pull.end) for pull in pulls), strict=True)
        self._messages = kernel.messages(bodies, starts, ends, _MOST_ROWS)
        if len(self._messages) > _MOST_ROWS:
            raise _TooMuchError

    def batch(self, schema: pa.Schema, tags: frozenset[str] | None) -> pa.RecordBatch:
        if UNREADABLE in schema.names:
            # Null means that the whole message is readable, not only the columns asked for.
            self._messages.split()
            if "body" not in schema.names:
                self._bodies()
        columns = [self._column(field.name, field.type) for field in schema]
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
        if tags is None:
            return batch
        return batch.filter(pc.is_in(self._messages.values(TAGS), value_set=text_array(sorted(tags))))

    def _column(self, name: str, kind: pa.DataType) -> pa.Array:
        messages, queues = self._messages, self._queues
        match name:
            case "tags" | "keys" | "msgId" | "attempt":
                values = messages.values(COLUMNS_BY_NAME[name].property)
                return pc.coalesce(values, messages.offset_ids()) if name == "msgId" and values.null_count else values
            case "body":
                return self._bodies()
            case "properties":
                return messages.maps(kind)
            case "topic" | "brokerName":
                texts = [queue.topic if name == "topic" else queue.broker_name for queue in queues]
                return text_array(texts).take(messages.pulls())
            case "queueId":
                return to_arrow(np.array([queue.queue_id for queue in queues], np.int32)).take(messages.pulls())
            case "queueOffset":
                return messages.queue_offsets()
            case "flag":
                return messages.flags()
            case "offsetMsgId":
                return messages.offset_ids()
            case "bornHost":
                return messages.born_hosts()
            case "bornTimestamp":
                return messages.born_times().cast(kind)
            case "storeTimestamp":
                return messages.store_times().cast(kind)
            case "reconsumeTimes":
                return messages.reconsume_times()
            case _:
                return pa.nulls(len(messages), kind)

    def _bodies(self) -> pa.BinaryArray:
        bodies, sys_flags = self._messages.bodies(), to_numpy(self._messages.sys_flags())
        packed = sys_flags & COMPRESSED_FLAG != 0
        if not packed.any():
            return bodies
        unpacked: list[bytes] = []
        room = self._most_unpacked
        for row in np.flatnonzero(packed).tolist():
            try:
                unpacked.append(decompress(bodies[row].as_py(), int(sys_flags[row])))
            except CompressionError as exc:
                raise Irregular from exc
            room -= len(unpacked[-1])
            if room < 0 and len(bodies) > 1:
                raise _TooMuchError
        return pc.replace_with_mask(bodies, to_arrow(packed), byte_strings(unpacked).to_arrow().cast(pa.binary()))
