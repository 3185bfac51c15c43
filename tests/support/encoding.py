"""What the Arrow encoder must give for rows of plain Python values, worked out one row at a time."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from rocketmq_spark.arrow.batcher import RemotingBatcher
from rocketmq_spark.arrow.encoders import UniqueIds
from rocketmq_spark.model.hashes import queue_index, string_hash
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.compression import CompressionType, compress
from rocketmq_spark.protocol.remoting.records import (
    MAX_BATCH_ROWS,
    MAX_BODY,
    encode_batch,
    encode_properties,
    unique_id,
)

Ready = tuple[EncodedBatch, MessageQueue | None]

# (topic, queue, wait, sysFlag): rows that may share a batch.
Group = tuple[str, MessageQueue | None, bool, int]


def queues_of(topic: str) -> list[MessageQueue]:
    """Three queues on two brokers, whatever the topic."""
    return [MessageQueue(topic, "broker-a", 0), MessageQueue(topic, "broker-a", 1), MessageQueue(topic, "broker-b", 0)]


def new_ids(wall_clock: Callable[[], float] = lambda: 1_700_000_000.0) -> UniqueIds:
    return UniqueIds(ip=b"\x0a\x00\x00\x01", pid=4711, wall_clock=wall_clock, rng=random.Random(0))


def batch_options(
    *,
    max_pending_bytes: int | None = None,
    compress_type: CompressionType | None = None,
    compress_over: int = 4096,
    inner_batches: bool = False,
    **options: Any,
) -> SinkOptions:
    """Return the options of a write that compresses nothing by default.

    Parameters
    ----------
    max_pending_bytes : int, optional
        The half of ``maxInFlightBytes`` that the encoder may fill.
    """
    if max_pending_bytes is not None:
        options["max_in_flight_bytes"] = 2 * max_pending_bytes
    return SinkOptions.of(
        compress_type="NONE" if compress_type is None else compress_type.name,
        compress_msg_body_over_howmuch=compress_over,
        batch_type="inner" if inner_batches else "plain",
        **options,
    )


def new_batcher(settings: SinkOptions | None = None, **more: Any) -> RemotingBatcher:
    arguments: dict[str, Any] = {"partition_id": 3, "queues_of": queues_of, "unique_ids": new_ids()}
    return RemotingBatcher(settings or batch_options(topic="orders"), **(arguments | more))


def encode(batches: Iterable[pa.RecordBatch], settings: SinkOptions | None = None, **more: Any) -> list[Ready]:
    """Put record batches through a batcher and return all that comes out."""
    batcher = new_batcher(settings, **more)
    done = [ready for batch in batches for ready in batcher.add(batch, 0.0)]
    return done + list(batcher.flush())


def joined(batch: EncodedBatch) -> bytes:
    return b"".join(batch.body)


@dataclass
class Expected:
    """The rows of one group in their order: as items, and as single messages."""

    items: list[Message] = field(default_factory=list)
    singles: list[Message] = field(default_factory=list)


def message_of(row: Mapping[str, Any], number: int, settings: SinkOptions, ids: UniqueIds, first_id: int) -> Message:
    """Return one row as a message, its properties in the documented order."""
    keys = row.get("keys")
    properties = {
        "KEYS": " ".join(keys) if isinstance(keys, list) else keys,
        "TAGS": settings.tags if row.get("tags") is None else row["tags"],
        "WAIT": "false" if row.get("waitStoreMsgOK") is False else None,
        "__SHARDINGKEY": row.get("shardingKey"),
        "DELAY": row.get("delayTimeLevel"),
        "TIMER_DELAY_MS": row.get("delayMs"),
        "TIMER_DELIVER_MS": row.get("deliverTime"),
        "UNIQ_KEY": unique_id(ids.prefix, first_id + number) if settings.unique_key else None,
    }
    texts = {name: str(value) for name, value in properties.items() if value not in (None, "")}
    topic = settings.topic or row["topic"]
    return Message(topic, row["body"], row.get("flag") or 0, texts | dict(row.get("properties") or ()))


def compressed(message: Message, settings: SinkOptions) -> tuple[Message, int]:
    """Return a message with its body as sent, and its sysFlag. A long body is compressed if that makes it shorter."""
    kind = CompressionType.__members__.get(settings.compress_type)
    if kind is None or len(message.body) < settings.compress_msg_body_over_howmuch:
        return message, 0
    body = compress(message.body, kind, settings.compress_level)
    return (replace(message, body=body), kind.sys_flag) if len(body) < len(message.body) else (message, 0)


def expected(rows: Sequence[Mapping[str, Any]], settings: SinkOptions) -> dict[Group, Expected]:
    """Return what the batcher must give for `rows`, with ids as `new_ids` makes them."""
    ids = new_ids()
    first_id = ids.reserve(0)
    groups: dict[Group, Expected] = defaultdict(Expected)
    for number, row in enumerate(rows):
        message = message_of(row, number, settings, ids, first_id)
        queue = None
        if row.get("shardingKey") and settings.queue_selector in (None, "hash"):
            queues = queues_of(message.topic)
            queue = queues[queue_index(string_hash(row["shardingKey"]), len(queues))]
        size = len(encode_batch([message]))
        message, sys_flag = compressed(message, settings)
        group = groups[message.topic, queue, row.get("waitStoreMsgOK") is not False, sys_flag]
        delayed = any(row.get(name) is not None for name in ("delayTimeLevel", "delayMs", "deliverTime"))
        if delayed or not settings.batching or size > min(MAX_BODY, settings.max_message_size):
            group.singles.append(message)
        else:
            group.items.append(message)
    return dict(groups)


def check(done: Sequence[Ready], rows: Sequence[Mapping[str, Any]], settings: SinkOptions) -> None:
    """Assert that `done` is `rows`, each once, in the order of its group, byte for byte, and within the limits."""
    by_group: dict[Group, tuple[list[EncodedBatch], list[EncodedBatch]]] = defaultdict(lambda: ([], []))
    for batch, queue in done:
        assert batch.nbytes == len(joined(batch))
        wait = "WAIT\x01false\x02" not in batch.properties
        by_group[batch.topic, queue, wait, batch.sys_flag][0 if batch.batch else 1].append(batch)
    wanted = expected(rows, settings)
    assert set(by_group) == set(wanted)
    for group, (batches, singles) in by_group.items():
        messages = wanted[group].items
        whole = b"".join(encode_batch(messages[at : at + 1000]) for at in range(0, len(messages), 1000))
        assert b"".join(map(joined, batches)) == whole
        assert sum(batch.rows for batch in batches) == len(messages)
        limit = min(settings.batch_bytes, settings.max_message_size, MAX_BODY)
        for batch in batches:
            assert 1 <= batch.rows <= MAX_BATCH_ROWS
            assert batch.nbytes <= limit or batch.rows == 1
            assert batch.nbytes <= min(settings.max_message_size, MAX_BODY)
            assert batch.flag == 0
            assert batch.properties == ("" if group[2] else "WAIT\x01false\x02")
        assert [(joined(one), one.properties, one.flag, one.rows) for one in singles] == [
            (message.body, encode_properties(message.properties).decode(), message.flag, 1)
            for message in wanted[group].singles
        ]
