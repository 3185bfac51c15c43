"""Nanoseconds per row of the Arrow encoder and of the plain row-by-row encoder, whose output is the same.

Run: ``python -m tests.benchmarks.bench_encode [rows per RecordBatch]``. Both encoders run by turns in this process. The
table has medians, and the fastest run: other load on the machine can only lengthen a run.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pyarrow as pa

from rocketmq_spark.arrow.batcher import RemotingBatcher
from rocketmq_spark.arrow.encoders import UniqueIds
from rocketmq_spark.arrow.hashes import RowIds
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.compression import CompressionType
from rocketmq_spark.protocol.remoting.records import encode_batch, unique_id
from tests.benchmarks.contest import Figure
from tests.support.encoding import batch_options

RUNS = 9
BATCHES = 30
PLAIN = batch_options(topic="orders")
QUEUES = [MessageQueue("orders", broker, number) for broker in ("broker-a", "broker-b") for number in range(8)]


def columns(rows: int) -> dict[str, pa.Array]:
    """Return 100-byte bodies with a key and a tag each."""
    rng = random.Random(7)
    return {
        "body": pa.array([rng.randbytes(100) for _ in range(rows)], pa.binary()),
        "keys": pa.array([f"order-{row:08d}" for row in range(rows)]),
        "tags": pa.array([("created", "paid", "shipped")[row % 3] for row in range(rows)]),
    }


def new_ids() -> UniqueIds:
    return UniqueIds(ip=bytes(4), pid=1, wall_clock=time.time, rng=random.Random(1))


def documents(rows: int) -> list[bytes]:
    """Return JSON bodies of about 6 KB with random values; compression shrinks them to about a third."""
    rng = random.Random(9)

    def field(number: int) -> str:
        return f'"attribute_{number}": {{"quantity": {rng.randrange(1000)}, "note": "{rng.randbytes(12).hex()}"}}'

    return [("{" + ", ".join(map(field, range(80))) + "}").encode() for _ in range(rows)]


def with_arrow(batch: pa.RecordBatch, settings: SinkOptions = PLAIN, row_ids: RowIds | None = None) -> int:
    batcher = RemotingBatcher(
        settings, partition_id=0, queues_of=lambda _: QUEUES, unique_ids=new_ids(), row_ids=row_ids
    )
    encoded = sum(done.rows for _ in range(BATCHES) for done, _ in batcher.add(batch, 0.0))
    return encoded + sum(done.rows for done, _ in batcher.flush())


def row_by_row(batch: pa.RecordBatch) -> int:
    ids = new_ids()
    bodies, keys, tags = (batch.column(name).to_pylist() for name in ("body", "keys", "tags"))
    messages = []
    for row, (body, key, tag) in enumerate(zip(bodies, keys, tags, strict=True)):
        properties = {"KEYS": key, "TAGS": tag, "UNIQ_KEY": unique_id(ids.prefix, row)}
        messages.append(Message("orders", body, 0, properties))
    for start in range(0, len(messages), 4000):
        encode_batch(messages[start : start + 4000])
    return len(messages)


def measure(function: Callable[[pa.RecordBatch], int], batch: pa.RecordBatch) -> float:
    began = time.perf_counter()
    rows = function(batch)
    return (time.perf_counter() - began) / rows * 1e9


def figures() -> Iterator[Figure]:
    """Encoding alone, against the oracle."""
    batch = pa.RecordBatch.from_pydict(columns(10_000))
    with_arrow(batch)
    pairs = [(measure(row_by_row, batch), measure(with_arrow, batch)) for _ in range(RUNS)]
    report("body, keys, tags", [fast for _, fast in pairs])
    report("  row by row", [plainly for plainly, _ in pairs])
    yield Figure("encode alone, against the row-by-row encoder", [plainly / fast for plainly, fast in pairs], 30)


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    plain = columns(rows)
    names = pa.array([name for _ in range(rows) for name in ("region", "source")])
    values = pa.array([value for row in range(rows) for value in ("eu-west", f"till {row % 50}")])
    offsets = pa.array(range(0, 2 * rows + 1, 2), pa.int32())
    cases = {
        "body, keys, tags": plain,
        "body only": {"body": plain["body"]},
        "every third key and tag null": plain
        | {
            "keys": pa.array([None if row % 3 == 0 else f"order-{row:08d}" for row in range(rows)]),
            "tags": pa.array([None if row % 3 == 1 else "created" for row in range(rows)]),
        },
        "tags as dictionary": plain | {"tags": plain["tags"].dictionary_encode()},
        "large_binary, large_string": plain
        | {"body": plain["body"].cast(pa.large_binary()), "keys": plain["keys"].cast(pa.large_string())},
        "shardingKey, 16 queues": plain | {"shardingKey": plain["keys"]},
        "two user properties": plain | {"properties": pa.MapArray.from_arrays(offsets, names, values)},
    }
    batches = {name: pa.RecordBatch.from_pydict(case) for name, case in cases.items()}
    by_place = RowIds("123e4567-e89b-12d3-a456-426614174000", -1, 0)
    by_keys = RowIds("123e4567-e89b-12d3-a456-426614174000", -1, 0, ("keys",))
    for name, row_ids in (("rowId=true", by_place), ("rowId=columns:keys", by_keys)):
        report(name, [measure(partial(with_arrow, row_ids=row_ids), batches["body, keys, tags"]) for _ in range(RUNS)])
    long = pa.RecordBatch.from_pydict({"body": pa.array(documents(500))})
    for kind in (None, *CompressionType):
        settings = replace(PLAIN, compress_type=kind.name if kind else "NONE")
        name = f"6 KB bodies, {kind.name if kind else 'not compressed'}"
        report(name, [measure(partial(with_arrow, settings=settings), long) for _ in range(3)])
    for name, batch in batches.items():
        with_arrow(batch)
        report(name, [measure(with_arrow, batch) for _ in range(RUNS)])
    print(*figures())


def report(name: str, timings: list[float]) -> None:
    print(f"{name:30s} {statistics.median(timings):6.0f} ns a row, fastest {min(timings):5.0f}")


if __name__ == "__main__":
    main()
