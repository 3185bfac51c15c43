from __future__ import annotations

import random
from datetime import datetime

import numpy as np
import pyarrow as pa
import pytest

from rocketmq_spark.arrow.encoders import UniqueIds
from rocketmq_spark.arrow.gather import assemble
from rocketmq_spark.protocol.remoting.records import decode_batch, unique_id, unique_id_prefix
from tests.support.encoding import encode, joined, new_ids


def text_of(ids: UniqueIds, first: int, rows: np.ndarray) -> list[str]:
    frame = ids.frame(first, rows)
    whole = bytes(assemble([frame], len(rows), len(rows) * ids.LENGTH)).decode()
    return [whole[at : at + ids.LENGTH] for at in range(0, len(whole), ids.LENGTH)]


def test_vectorised_ids_equal_single_ids_in_any_order_and_over_a_carry() -> None:
    ids = new_ids()
    rows = np.array([0, 70_000, 5, 65_535, 65_536, 131_072])
    for first in (ids.reserve(0), 0x0000_0000_FFF0, 0x0000_FFFF_FFFF, 0xFFFF_FFFF_FFFF):
        assert text_of(ids, first, rows) == [unique_id(ids.prefix, first + row) for row in rows.tolist()]
        assert text_of(ids, first, rows[:1]) == [unique_id(ids.prefix, first)]


def test_the_sequence_starts_at_the_milliseconds_of_the_month() -> None:
    when = datetime(2024, 5, 1, 0, 0, 12, 345_000)
    ids = new_ids(when.timestamp)
    assert ids.reserve(3) == 12_345 << 16
    assert ids.reserve(1) == (12_345 << 16) + 3
    assert repr(ids) == f"<UniqueIds {ids.prefix.hex().upper()} next={(12_345 << 16) + 4:012X}>"


def test_the_prefix_is_address_process_and_a_random_number() -> None:
    ids = UniqueIds(ip=bytes([10, 0, 0, 7]), pid=0x12345, wall_clock=lambda: 0.0, rng=random.Random(5))
    assert ids.prefix == unique_id_prefix(bytes([10, 0, 0, 7]), 0x2345, random.Random(5).getrandbits(32))


def test_the_address_has_four_bytes() -> None:
    with pytest.raises(ValueError, match="4 bytes of an IPv4 address, got 16"):
        UniqueIds(ip=bytes(16), pid=1, wall_clock=lambda: 0.0, rng=random.Random(5))


def test_rows_of_a_partition_have_successive_ids_over_a_carry() -> None:
    ids = new_ids()
    first = ids.reserve(65_500) + 65_500
    batch = pa.RecordBatch.from_pydict({"body": pa.array(["x"] * 30)})
    done = encode([batch, batch], unique_ids=ids)
    found = [message.properties["UNIQ_KEY"] for one, _ in done for message in decode_batch(joined(one))]
    assert found == [unique_id(ids.prefix, first + row) for row in range(60)]
