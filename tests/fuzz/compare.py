"""Compares the compiled kernel, numpy and `decode_rows` on random answers and rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rocketmq_spark.arrow.columns import ByteColumn
from rocketmq_spark.arrow.decode import _MOST_UNPACKED, _Columns, decode_rows
from rocketmq_spark.arrow.gather import Workspace
from rocketmq_spark.arrow.kernel import NUMPY, Kernel, compiled
from rocketmq_spark.arrow.messages import Irregular
from rocketmq_spark.arrow.numpy_hashes import KEYS, Strings
from rocketmq_spark.arrow.read_columns import arrow_schema_of, column_names
from rocketmq_spark.model.hashes import STEP
from rocketmq_spark.model.message_ext import Pulled
from rocketmq_spark.protocol.remoting.records import first_queue_offset
from tests.fuzz.answers import Draws

ALL = column_names(raw=True)
SCHEMAS = [
    arrow_schema_of(names)
    for names in (ALL, ALL, ALL[:-1], ["body"], ["keys", "flag"], ["offsetMsgId"], ["properties"])
]
KINDS = {"inner batches": 0xC0, "born host v6": 0x10, "store host v6": 0x20, "compressed": 0x1}
TAGS = [None, None, None, frozenset("a"), frozenset()]


def compare(seed: int, kernel: Kernel, outcomes: Counter[str]) -> None:
    """Decode the answers of a seed with all decoders; raise an AssertionError if they differ."""
    pulls = Draws(seed).pulls()
    # Not the numbers that draw the answer, so that each schema gets every kind of damage.
    draw = random.Random(f"columns {seed}")
    schema, tags = draw.choice(SCHEMAS), draw.choice(TAGS)
    found = {one.name: _columns(pulls, schema, tags, one) for one in (kernel, NUMPY)}
    for name, batch in found.items():
        outcomes[f"{name}, {'read' if batch is not None else 'irregular'}"] += 1
    outcomes["answers"] += 1
    for pull in pulls:
        outcomes["each offset"] += _compare_offsets(pull, kernel)
    if found[kernel.name] is not None:
        outcomes.update(_kinds(pulls, kernel))
    if all(batch is None for batch in found.values()):
        return
    rows = list(decode_rows(pulls, schema, tags, lambda _: True))
    expected = pa.Table.from_batches(rows, schema).combine_chunks()
    for name, batch in found.items():
        if batch is not None:
            batch.validate(full=True)
            same = pa.Table.from_batches([batch]).equals(expected)
            assert same, f"{name} and decode_rows differ in {schema.names}: python -m tests.fuzz 1 {seed}"


def _compare_offsets(pull: Pulled, kernel: Kernel) -> bool:
    """Return whether an answer has a record for each of its offsets."""
    start = first_queue_offset(pull.body) or 0
    # Up to the largest offset: the next one would be negative.
    ends = [min(start + count, 2**63 - 1) for count in (0, 1, 2, 3, 8)]
    for_each = [[one.has_each_offset(pull.body, start, end) for end in ends] for one in (kernel, NUMPY)]
    assert for_each[0] == for_each[1], for_each
    return any(for_each[0])


def _kinds(pulls: Sequence[Pulled], kernel: Kernel) -> set[str]:
    """Return which kinds of messages the kernel has read."""
    bodies, starts, ends = zip(*((pull.body, pull.start, pull.end) for pull in pulls), strict=True)
    messages = kernel.messages(bodies, starts, ends, 2**31)
    for most in (0, 2):
        assert len(kernel.messages(bodies, starts, ends, most)) == min(len(messages), most + 1)
    flags = set(messages.sys_flags().to_pylist())
    kinds = {name for name, bits in KINDS.items() if any(flag & bits == bits for flag in flags)}
    hosts = {flag & 0x30 for flag in flags}
    return kinds | ({"mixed hosts"} if len(hosts) > 1 else set())


def _columns(
    pulls: Sequence[Pulled], schema: pa.Schema, tags: frozenset[str] | None, kernel: Kernel
) -> pa.RecordBatch | None:
    # Only numpy may leave it to Arrow to refuse what is no text.
    refusals = (Irregular, pa.ArrowInvalid) if kernel is NUMPY else Irregular
    try:
        return _Columns(pulls, _MOST_UNPACKED, kernel).batch(schema, tags)
    except refusals:
        return None


def compare_hashes(seed: int, kernel: Kernel) -> None:
    """Hash random columns with both kernels; raise an AssertionError if they differ."""
    rng = random.Random(seed)
    rows = rng.randrange(1, 9)
    columns = [_strings(rng, rows) for _ in range(rng.randrange(1, 4))]
    keys = np.frombuffer(rng.randbytes(KEYS * 8), np.uint64)
    seeds = rng.choice([(0,), (0, STEP)])
    for one, other in (
        [each.hash_sums(columns, Workspace(), seeds) for each in (kernel, NUMPY)],
        [each.nh_sums(columns, Workspace(), keys) for each in (kernel, NUMPY)],
    ):
        assert np.array_equal(one, other), f"seed {seed}: {one} and {other}"


def _strings(rng: random.Random, rows: int) -> Strings:
    sizes = [rng.choice([0, 1, 7, 8, 9, 100, rng.randrange(300)]) for _ in range(rows)]
    if rng.random() < 0.1:
        sizes[0] = rng.choice([16_383, 16_384, 16_385, 32_768, 50_000])
    before = rng.randrange(9)
    data = np.frombuffer(rng.randbytes(before + sum(sizes)), np.uint8)
    offsets = np.cumsum([before, *sizes]).astype(rng.choice([np.int32, np.int64]))
    valid = np.array([rng.random() < 0.8 for _ in sizes]) if rng.random() < 0.5 else None
    return Strings(
        ByteColumn(offsets, data, valid), rng.choice([b"", b"KEYS\x01", b"\x02"]), rng.choice([b"\x02", b"12345678"])
    )


def run(first: int, count: int) -> Counter[str]:
    """Compare `count` answers, and a tenth as many columns of rows; return how many each decoder has read."""
    kernel, outcomes = compiled(), Counter[str]()
    for seed in range(first, first + count):
        compare(seed, kernel, outcomes)
        if seed % 10 == 0:
            compare_hashes(seed, kernel)
    return outcomes
