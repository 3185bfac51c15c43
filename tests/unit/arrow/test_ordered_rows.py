"""With `ordered`, rows of a queue keep their order even if they need different batches."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.arrow.batcher import RemotingBatcher
from rocketmq_spark.model.message import EncodedBatch, MessageQueue
from rocketmq_spark.protocol.compression import CompressionType, decompress
from rocketmq_spark.protocol.remoting.records import decode_batch
from tests.support.encoding import Ready, batch_options, joined, new_batcher

ORDERED = batch_options(
    topic="orders",
    ordered=True,
    batch_bytes=1200,
    max_message_size=600,
    max_pending_bytes=2000,
    compress_type=CompressionType.ZLIB,
    compress_over=200,
)

Row = dict[str, Any]

rows_of_a_partition = st.lists(
    st.fixed_dictionaries(
        {
            "shardingKey": st.sampled_from(["a", "b", "c", "d"]),
            "size": st.sampled_from([10, 50, 300, 580]),
            "waitStoreMsgOK": st.sampled_from([None, True, False]),
            "delayTimeLevel": st.sampled_from([None, None, None, 3]),
        }
    ),
    max_size=60,
)


def record_batch(rows: list[Row], first: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "body": [f"{first + place}".ljust(row["size"], ".") for place, row in enumerate(rows)],
            "shardingKey": [row["shardingKey"] for row in rows],
            "waitStoreMsgOK": pa.array([row["waitStoreMsgOK"] for row in rows], pa.bool_()),
            "delayTimeLevel": pa.array([row["delayTimeLevel"] for row in rows], pa.int32()),
        }
    )


def bodies(batch: EncodedBatch) -> list[bytes]:
    stored = [message.body for message in decode_batch(joined(batch), "orders")] if batch.batch else [joined(batch)]
    return [decompress(body, batch.sys_flag) for body in stored]


def numbers(ready: list[Ready]) -> dict[MessageQueue | None, list[int]]:
    found: dict[MessageQueue | None, list[int]] = defaultdict(list)
    for batch, queue in ready:
        found[queue] += [int(body.rstrip(b".")) for body in bodies(batch)]
    return found


@given(st.lists(rows_of_a_partition, max_size=4), st.integers(100, 3000), st.booleans())
def test_rows_of_a_queue_keep_their_order_and_none_is_missing(
    parts: list[list[Row]], chunk_bytes: int, linger: bool
) -> None:
    batcher: RemotingBatcher = new_batcher(ORDERED, chunk_bytes=chunk_bytes)
    ready: list[Ready] = []
    first = 0
    for rows in parts:
        ready += batcher.add(record_batch(rows, first), 0.0)
        first += len(rows)
        ready += batcher.expired(1.0, lambda _topic: True) if linger else ()
    ready += batcher.flush()
    found = numbers(ready)
    assert all(queue_numbers == sorted(queue_numbers) for queue_numbers in found.values())
    assert sorted(number for queue_numbers in found.values() for number in queue_numbers) == list(range(first))
    assert None not in found


def test_batch_has_at_most_max_rows() -> None:
    batcher = new_batcher(batch_options(topic="orders"), max_rows=7)
    rows = pa.RecordBatch.from_pydict({"body": ["x"] * 40})
    ready = [*batcher.add(rows, 0.0), *batcher.flush()]
    assert [batch.rows for batch, _ in ready] == [7] * 5 + [5]
