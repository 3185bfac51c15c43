"""Nanoseconds per row of the Arrow encoder, for plain rows and for the variants of rows and writes.

Run: ``python -m tests.benchmarks.bench_encode``. All variants run by turns in this process, and their figures are
multiples of the time of plain rows in the same round. The row-by-row encoder has the same output as the other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from rocketmq_spark.arrow.batcher import RemotingBatcher
from rocketmq_spark.arrow.encoders import UniqueIds
from rocketmq_spark.arrow.hashes import RowIds
from rocketmq_spark.arrow.joiner import JoiningBatcher
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.compression import CompressionType
from rocketmq_spark.protocol.remoting.records import encode_batch, unique_id
from tests.benchmarks.contest import Figure, in_turns, ratios
from tests.support.encoding import batch_options

RUNS = 9
# Rows of a record batch, as Spark's default has them.
ROWS = 10_000
# Arrow's bytes of one run: 300,000 rows of 100 bytes.
RUN_BYTES = 40_000_000
PLAIN = batch_options(topic="orders")
BY_PLACE = RowIds("123e4567-e89b-12d3-a456-426614174000", -1, 0)


class Case(NamedTuple):
    """A variant of rows and write options; at most `wanted` times the time of plain rows is its aim."""

    name: str
    batch: pa.RecordBatch
    wanted: float | None = None
    options: SinkOptions = PLAIN
    row_ids: RowIds | None = None
    queues: Sequence[MessageQueue] = ()


def columns(rows: int) -> dict[str, pa.Array]:
    """Return 100-byte bodies with a key and a tag each."""
    rng = random.Random(7)
    return {
        "body": pa.array([rng.randbytes(100) for _ in range(rows)], pa.binary()),
        "keys": pa.array([f"order-{row:08d}" for row in range(rows)]),
        "tags": pa.array([("created", "paid", "shipped")[row % 3] for row in range(rows)]),
    }


def queues(brokers: int, of_each: int) -> list[MessageQueue]:
    return [
        MessageQueue("orders", f"broker-{broker}", number) for broker in range(brokers) for number in range(of_each)
    ]


def new_ids() -> UniqueIds:
    return UniqueIds(ip=bytes(4), pid=1, wall_clock=time.time, rng=random.Random(1))


def documents(rows: int) -> list[bytes]:
    """Return JSON bodies of about 6 KB with random values; compression shrinks them to about a third."""
    rng = random.Random(9)

    def field(number: int) -> str:
        return f'"attribute_{number}": {{"quantity": {rng.randrange(1000)}, "note": "{rng.randbytes(12).hex()}"}}'

    return [("{" + ", ".join(map(field, range(80))) + "}").encode() for _ in range(rows)]


def cases() -> Iterator[Case]:
    """Yield plain rows, and then all variants."""
    plain = columns(ROWS)
    batch = pa.RecordBatch.from_pydict(plain)
    yield Case("plain rows", batch)
    for rows, wanted in ((100, 6), (1_000, 2)):
        yield Case(f"record batches of {rows:,} rows", batch[:rows], wanted)
    rng = random.Random(3)
    topics = pa.array([f"orders-{rng.randrange(1000)}" for _ in range(ROWS)])
    yield Case("1,000 topics", pa.RecordBatch.from_pydict(plain | {"topic": topics}), 5, batch_options())
    keyed = pa.RecordBatch.from_pydict(plain | {"shardingKey": plain["keys"]})
    yield Case("shardingKey, 256 queues of 16 brokers", keyed, 3, queues=queues(16, 16))
    yield Case("shardingKey, 64 queues", keyed, 2.5, queues=queues(4, 16))
    yield Case("shardingKey, 16 queues", keyed, 2, queues=queues(2, 8))
    yield Case("ordered, 64 queues", keyed, 3, replace(PLAIN, ordered=True), queues=queues(4, 16))
    yield Case("rowId=true", batch, 2.5, row_ids=BY_PLACE)
    yield Case("rowId=columns:keys", batch, 2.5, row_ids=replace(BY_PLACE, columns=("keys",)))
    names = pa.array([name for _ in range(ROWS) for name in ("region", "source")])
    values = pa.array([value for row in range(ROWS) for value in ("eu-west", f"till {row % 50}")])
    offsets = pa.array(range(0, 2 * ROWS + 1, 2), pa.int32())
    properties = pa.MapArray.from_arrays(offsets, names, values)
    yield Case("two user properties", pa.RecordBatch.from_pydict(plain | {"properties": properties}), 2.5)


def other_cases() -> Iterator[Case]:
    """Yield variants without an aim."""
    plain = columns(ROWS)
    others = {
        "body only": {"body": plain["body"]},
        "every third key and tag null": plain
        | {
            "keys": pa.array([None if row % 3 == 0 else f"order-{row:08d}" for row in range(ROWS)]),
            "tags": pa.array([None if row % 3 == 1 else "created" for row in range(ROWS)]),
        },
        "tags as dictionary": plain | {"tags": plain["tags"].dictionary_encode()},
        "large_binary, large_string": plain
        | {"body": plain["body"].cast(pa.large_binary()), "keys": plain["keys"].cast(pa.large_string())},
    }
    for name, case in others.items():
        yield Case(name, pa.RecordBatch.from_pydict(case))
    long = pa.RecordBatch.from_pydict({"body": pa.array(documents(500))})
    for kind in (None, *CompressionType):
        options = replace(PLAIN, compress_type=kind.name if kind else "NONE")
        yield Case(f"6 KB bodies, {kind.name if kind else 'not compressed'}", long, options=options)


def with_arrow(case: Case) -> int:
    """Encode record batches as a task does, and return the rows."""
    remoting = RemotingBatcher(
        case.options, partition_id=0, queues_of=lambda _: case.queues, unique_ids=new_ids(), row_ids=case.row_ids
    )
    batcher, encoded = JoiningBatcher(remoting, case.options.topic), 0
    for _ in range(RUN_BYTES // case.batch.nbytes):
        encoded += sum(done.rows for done, _ in batcher.add(case.batch, 0.0))
        batcher.new_topics()
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


def measure(encode: Callable[[], int]) -> float:
    """Return the nanoseconds per row of one run."""
    began = time.perf_counter()
    rows = encode()
    return (time.perf_counter() - began) / rows * 1e9


def in_order(contestants: Mapping[str, Callable[[], int]], rounds: int) -> Mapping[str, Sequence[float]]:
    """Return the nanoseconds per row of each round, by contestant."""
    return in_turns(list(contestants), rounds, lambda name: measure(contestants[name]))


def figures() -> Iterator[Figure]:
    """Encoding alone: variants against plain rows, and plain rows against the oracle."""
    variants = list(cases())
    contestants = {case.name: partial(with_arrow, case) for case in variants}
    plain = variants[0]
    timings = in_order({**contestants, "row by row": partial(row_by_row, plain.batch)}, RUNS)
    plainly = timings[plain.name]
    yield Figure("encode alone, against the row-by-row encoder", ratios(timings["row by row"], plainly), 30)
    for case in variants[1:]:
        taken = ratios(timings[case.name], plainly)
        yield Figure(f"encode alone, {case.name}, against plain rows", taken, case.wanted, at_most=True)


def main() -> None:
    for figure in figures():
        print(figure)
    in_order({case.name: partial(with_arrow, case) for case in other_cases()}, 3)


if __name__ == "__main__":
    main()
