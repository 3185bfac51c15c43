"""Keyed hashes of contents: equal for equal contents, and different for all others."""

from __future__ import annotations

import random
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocketmq_spark.arrow.block import read_block
from rocketmq_spark.arrow.columns import byte_column_or_nulls
from rocketmq_spark.arrow.content import ContentHash
from rocketmq_spark.arrow.hashes import RowIds
from rocketmq_spark.arrow.numpy_hashes import Strings
from rocketmq_spark.deliveries.effectively_once.stored import hashes_of, read_stored
from rocketmq_spark.deliveries.log.scan import Known
from rocketmq_spark.model.hashes import STEP, entry_hash
from rocketmq_spark.model.message import EncodedBatch, Message
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.compression import CompressionType
from rocketmq_spark.protocol.remoting.records import encode_single
from rocketmq_spark.testing import FakeCluster
from tests.support.encoding import batch_options, encode
from tests.support.kernels import running
from tests.support.strategies import row_tables
from tests.support.two_phase import TOPIC, Driver, MovedClock, driver

pytestmark = pytest.mark.usefixtures("kernel")

OPTIONS = parse_sink_options({"nameServer": "127.0.0.1:1", "topic": "T"}, {})
TOKEN = "token-of-the-attempt-1"
MAP = pa.map_(pa.string(), pa.string())


@pytest.fixture(scope="module")
def job() -> Iterator[Driver]:
    with FakeCluster(brokers=1, topics={TOPIC: 2}) as cluster, driver(cluster, MovedClock(cluster)) as running:
        yield running


def hashes(content: ContentHash, columns: dict[str, Any], first_row: int = 0) -> list[Any]:
    """Return the hashes of rows as pairs of numbers."""
    batch = pa.record_batch({name: pa.array(*values) for name, values in columns.items()})
    return list(zip(*content.of_block(read_block(batch, OPTIONS), first_row).tolist(), strict=True))


def bodies_of(*values: bytes) -> tuple[list[bytes], pa.DataType]:
    return [*values], pa.binary()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    row_tables(max_rows=12),
    st.booleans(),
    st.sampled_from(["plain", "single", "compressed", "inner", "row ids"]),
    st.none() | st.just("standard"),
)
def test_rows_have_the_same_hashes_before_and_after_they_are_stored(
    job: Driver, table: Any, numbered: bool, how: str, tags: str | None
) -> None:
    _, record_batches = table
    compressed: dict[str, Any] = (
        {"compress_type": CompressionType.ZLIB, "compress_over": 20} if how == "compressed" else {}
    )
    options = batch_options(
        topic=TOPIC, tags=tags, batching=how != "single", inner_batches=how == "inner", **compressed
    )
    content = ContentHash(numbered, kernel=running())
    row_ids = RowIds("w", -1, 0) if how == "row ids" and not numbered else None
    own: list[Any] = []
    number = 0
    for batch in record_batches:
        block = read_block(batch, options, row_ids, number)
        own += zip(*content.of_block(block, number).tolist(), strict=True)
        number += batch.num_rows
    starts = job.brokers.max_offsets(job.queues)
    ready = encode(record_batches, options, row_ids=row_ids, attempt=TOKEN)
    if numbered:
        # As with ``ordered``, which needs a sharding key in each row.
        ready = numbered_batches(record_batches, options)
    job.brokers.send_records([(one, job.queues[number % 2]) for number, (one, _) in enumerate(ready)], lambda *_: None)
    ends = job.brokers.max_offsets(job.queues)
    floors = {queue: Known(start) for queue, start in starts.items()}
    parts = read_stored(job.brokers, floors, ends, {TOKEN}, content)
    stored = [pair for part in parts for pair in zip(*part.hashes.tolist(), strict=True)]
    assert Counter(stored) == Counter(own)
    if how != "inner":
        sent = [pair for one, _ in ready for pair in zip(*hashes_of(content, one).tolist(), strict=True)]
        assert Counter(sent) == Counter(own)


def numbered_batches(record_batches: list[pa.RecordBatch], options: SinkOptions) -> list[Any]:
    """Return the rows one by one, each with its number behind the token."""
    rows = [batch.slice(row, 1) for batch in record_batches for row in range(batch.num_rows)]
    return [one for number, row in enumerate(rows) for one in encode([row], options, attempt=f"{TOKEN}/{number}")]


def test_each_part_of_a_row_changes_its_hash() -> None:
    content = ContentHash(kernel=running())
    changes: dict[str, tuple[Any, ...]] = {
        "body": bodies_of(b"other"),
        "tags": (["t"],),
        "keys": (["k"],),
        "shardingKey": (["s"],),
        "flag": ([1], pa.int32()),
        "properties": ([[("a", "b")]], MAP),
    }
    plain: dict[str, Any] = {"body": bodies_of(b"body")}
    found = [hashes(content, {**plain, name: change})[0] for name, change in changes.items()]
    found += [
        hashes(content, plain)[0],
        hashes(content, {**plain, "properties": ([[("b", "a")]], MAP)})[0],
        hashes(content, {**plain, "properties": ([[("a", "b"), ("c", "d")]], MAP)})[0],
        hashes(content, {**plain, "keys": (["a\x00"],)})[0],
        hashes(content, {"body": bodies_of(b"body\x00")})[0],
        hashes(ContentHash(numbered=True, seed=content.seed, kernel=running()), plain)[0],
        hashes(ContentHash(numbered=True, seed=content.seed, kernel=running()), plain, 1)[0],
    ]
    for lane in range(2):
        assert len({pair[lane] for pair in found}) == len(found)


def test_absent_parts_and_the_order_of_properties_change_nothing() -> None:
    content = ContentHash(kernel=running())
    body: dict[str, Any] = {"body": bodies_of(b"body")}
    nothing: dict[str, Any] = {
        "keys": ([""],),
        "shardingKey": ([None], pa.string()),
        "flag": ([0], pa.int32()),
        "properties": ([[]], MAP),
    }
    assert hashes(content, {**body, **nothing}) == hashes(content, body)
    one, other = ("a", "1"), ("b", "2")
    rows = {"body": bodies_of(b"x", b"x"), "properties": ([[one, other], [other, one]], MAP)}
    first, second = hashes(content, rows)
    assert first == second
    assert hashes(ContentHash(kernel=running()), body) != hashes(content, body)


def test_rows_prepared_for_one_seed_of_the_row_hash_differ() -> None:
    """Two words that are exchanged, each moved by a step, have one hash in ``SPARK_ROW_ID``, whatever the seed."""
    content, mask = ContentHash(kernel=running()), 2**64 - 1
    rng = random.Random(1)
    for _ in range(100):
        head, one, other = rng.randbytes(7), rng.getrandbits(64), rng.getrandbits(64)
        body = head + struct.pack("<QQ", one, other)
        forged = head + struct.pack("<QQ", (other + STEP) & mask, (one - STEP) & mask)
        for seed in (0, STEP, rng.getrandbits(64)):
            assert entry_hash(b"\x02" + body, seed) == entry_hash(b"\x02" + forged, seed)
        (first, second) = hashes(content, {"body": bodies_of(body, forged)})
        assert first[0] != second[0]
        assert first[1] != second[1]


@pytest.mark.parametrize("size", [1, 8, 300])
def test_similar_strings_have_different_hashes(size: int) -> None:
    # Differences for which a sum of words collides: words exchanged, moved, or changed by opposite amounts.
    rng = np.random.default_rng(size)
    base = rng.integers(0, 256, size * 8, np.uint8)
    values = {base.tobytes()}
    words = base.view("<u8")
    for step in (1, 2**31, 2**32, 2**63):
        for at in range(min(size, 9)):
            changed = words.copy()
            changed[at : at + 1] += np.uint64(step)
            following = (at + 1) % size
            changed[following : following + 1] -= np.uint64(step)
            values.add(changed.tobytes())
            values.add(np.roll(words, at).tobytes())
    values.update(bytes(length) for length in range(1, 100))
    found = hashes(ContentHash(kernel=running()), {"body": bodies_of(*values)})
    for lane in range(2):
        assert len({pair[lane] for pair in found}) == len(values)


def test_long_strings_are_hashed_piece_by_piece() -> None:
    content = ContentHash(kernel=running())
    piece = 16 * 1024
    rng = random.Random(2)
    one, other, rest = rng.randbytes(piece), rng.randbytes(piece), rng.randbytes(77)
    # The tag of a body shifts its pieces by a byte.
    values = [
        one + other + rest,
        other + one + rest,
        one + other,
        one * 2,
        one * 3,
        one,
        bytes(piece),
        bytes(2 * piece),
    ]
    found = hashes(content, {"body": bodies_of(*values)})
    assert len(set(found)) == len(values)
    assert [hashes(content, {"body": bodies_of(value)})[0] for value in values] == found
    # Whatever is hashed at the same time.
    assert hashes(content, {"body": bodies_of(b"x" * 2_000_000, *values)})[1:] == found


def test_a_million_similar_strings_have_a_million_hashes() -> None:
    column = byte_column_or_nulls(pa.array(np.arange(1_000_000)).cast(pa.string()))
    sums = ContentHash(kernel=running())._sums([Strings(column, b"", b"\x02")])
    for lane in range(2):
        assert len(np.unique(sums[lane])) == 1_000_000


def test_no_seed_is_shown() -> None:
    content = ContentHash(kernel=running())
    assert str(content.seed) not in repr(content)
    assert ContentHash(kernel=running()).seed != content.seed


def test_requests_resolved_at_the_same_time_get_their_own_hashes() -> None:
    content = ContentHash(kernel=running())
    bodies = [[bytes([number]) * size for size in range(1, 3000, number)] for number in range(7, 11)]
    tables = [pa.record_batch({"body": pa.array(of_batch, pa.binary())}) for of_batch in bodies]
    batches = [encode([table], batch_options(topic=TOPIC), attempt=TOKEN)[0][0] for table in tables]
    expected = [hashes_of(content, batch).tolist() for batch in batches]

    def differs(batch: EncodedBatch, right: list[Any]) -> int:
        return sum(hashes_of(content, batch).tolist() != right for _ in range(10))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(batches)) as threads:
            assert sum(threads.map(differs, batches, expected)) == 0
    finally:
        sys.setswitchinterval(interval)


def test_an_empty_property_of_a_stored_message_is_no_content() -> None:
    # Readers of RocketMQ drop such an entry, and a write refuses it.
    content, attempt = ContentHash(kernel=running()), {"SPARK_ATTEMPT": TOKEN}
    with_empty, without, other = (
        hashes_of(content, encode_single(Message(TOPIC, b"body", 0, attempt | properties))).tolist()
        for properties in ({"a": "1", "b": ""}, {"a": "1"}, {"a": "1", "b": "2"})
    )
    assert with_empty == without != other
