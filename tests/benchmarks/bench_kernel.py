"""The compiled kernel against numpy: nanoseconds of processor time per message, and their ratio.

Run: python -m tests.benchmarks.bench_kernel [rounds]; the part "read" of `make bench` has its figures

Both take turns in one process. The figures are medians of all rounds, and a ratio is the median of the rounds' ratios.
The last ratio is that of the fastest rounds, which other programs of the machine disturb least. Messages have 100
bytes, a key, a tag and a unique id.

With ``--run ADDRESS TOPIC ROWS KERNEL [COLUMN...]`` it reads a topic with `read_arrow`, and prints the processor
seconds of the process. `KERNEL` is the value of ROCKETMQ_SPARK_KERNEL.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from rocketmq_spark import read_arrow
from rocketmq_spark.arrow.columns import byte_column_or_nulls
from rocketmq_spark.arrow.content import ContentHash
from rocketmq_spark.arrow.decode import batches_of
from rocketmq_spark.arrow.hashes import RowIds
from rocketmq_spark.arrow.kernel import NUMPY, VARIABLE, Kernel, compiled
from rocketmq_spark.arrow.read_columns import arrow_schema_of, column_names
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import Pulled
from tests.benchmarks.contest import Figure
from tests.support.strategies import HALF, encode_stored_record

ROWS = 10_240
TOKEN = "token-of-an-attempt-00"


def record(offset: int) -> bytes:
    body = (b"%010d" % offset) * 10
    properties = {
        "KEYS": f"k{offset:09d}",
        "TAGS": f"t{offset % 4}",
        "UNIQ_KEY": f"7F0000010A5B1B2C3D4E{offset:012X}",
    }
    crc = zlib.crc32(body) & 0x7FFFFFFF
    return encode_stored_record(
        replace(HALF, topic="bench", body=body, body_crc=crc, queue_offset=offset, properties=properties)
    )


def cases() -> Iterator[tuple[str, Callable[[Kernel], object]]]:
    """Yield the names of cases, and functions that run one with a kernel."""
    records = [record(offset) for offset in range(ROWS)]
    queue = MessageQueue("bench", "broker-a", 0)

    def reading(names: list[str], size: int) -> Callable[[Kernel], object]:
        pulls = [Pulled(queue, at, at + size, b"".join(records[at : at + size])) for at in range(0, ROWS, size)]
        schema = arrow_schema_of(names)
        return lambda kernel: list(batches_of(pulls, schema, kernel=kernel))

    yield "all columns, 1,024 messages per answer", reading(column_names(), 1024)
    yield "all columns, 32 messages per answer", reading(column_names(), 32)
    yield "body", reading(["body"], 1024)
    yield "body and keys", reading(["body", "keys"], 1024)
    bodies = byte_column_or_nulls(pa.array([(b"%010d" % number) * 10 for number in range(ROWS)], pa.binary()))
    ids = {kernel.name: RowIds("write", 4, 9, kernel=kernel) for kernel in (NUMPY, compiled())}
    yield (
        "row hashes and ids",
        lambda kernel: ids[kernel.name].of_content(10_000, ["bench"], None, (), None, bodies, None),
    )
    stored = pa.record_batch(
        {
            "body": bodies.to_arrow(),
            "flag": np.zeros(ROWS, np.int32),
            "properties": pa.array(
                [[("KEYS", f"k{number:09d}"), ("SPARK_ATTEMPT", TOKEN)] for number in range(ROWS)],
                pa.map_(pa.string(), pa.string()),
            ),
        }
    )
    attempts = byte_column_or_nulls(pa.array([""] * ROWS))
    contents = {kernel.name: ContentHash(kernel=kernel) for kernel in (NUMPY, compiled())}
    yield "contents in a recovery", lambda kernel: contents[kernel.name].of_stored("bench", attempts, *stored.columns)


def cost(run: Callable[[Kernel], object], kernel: Kernel) -> float:
    """Return the nanoseconds of processor time per message."""
    start = time.process_time_ns()
    run(kernel)
    return (time.process_time_ns() - start) / ROWS


def paired(run: Callable[[Kernel], object], kernel: Kernel, rounds: int) -> list[tuple[float, float]]:
    """Return the costs with numpy and with a kernel in each round, after one to warm up."""
    return [(cost(run, NUMPY), cost(run, kernel)) for _ in range(rounds + 1)][1:]


def figures(rounds: int) -> Iterator[Figure]:
    """Measure the decoder alone."""
    kernel, aims = compiled(), {"all columns, 1,024 messages per answer": 3.0, "body": 8.0}
    for name, run in cases():
        if name in aims:
            taken = paired(run, kernel, 10 * rounds)
            numpy, own = (statistics.median(one) for one in zip(*taken, strict=True))
            note = f"{own:.0f} ns of processor time per message, with numpy {numpy:.0f}"
            ratios = [before / after for before, after in taken]
            yield Figure(f"decoding alone, compiled kernel against numpy: {name}", ratios, aims[name], note=note)


def read(address: str, topic: str, rows: int, kernel: str, *columns: str) -> None:
    """Read all rows of a topic, and print the processor seconds."""
    os.environ[VARIABLE] = kernel
    taken = []
    for _ in range(2):
        began, count = time.process_time(), 0
        for batch in read_arrow(topic, nameServer=address, columns=columns or None):
            count += batch.num_rows
        assert count == rows
        taken.append(time.process_time() - began)
    print(json.dumps(min(taken)))


def main(rounds: int = 31) -> None:
    """Print a line for each case."""
    kernel = compiled()
    print(f"{'':42} {'numpy':>7} {'kernel':>7} {'ratio':>6} {'fastest':>8}")
    for name, run in cases():
        taken = paired(run, kernel, rounds)
        numpy, own = (statistics.median(one) for one in zip(*taken, strict=True))
        ratio = statistics.median(before / after for before, after in taken)
        fastest = min(before for before, _ in taken) / min(after for _, after in taken)
        print(f"{name:42} {numpy:7.0f} {own:7.0f} {ratio:6.2f} {fastest:8.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        address, topic, rows, *rest = sys.argv[2:]
        read(address, topic, int(rows), *rest)
    else:
        main(*map(int, sys.argv[1:]))
