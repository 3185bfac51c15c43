"""Java's hash codes, and the queue that a hash selects."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.model.hashes import consistent_hash, java_hash, queue_index, string_hash
from tests.vectors import load

JAVA = load("java_codecs.json")


@pytest.mark.parametrize("vector", JAVA["string_hash"], ids=lambda vector: vector["utf16_hex"] or "empty")
def test_string_hash_equals_java(vector: dict[str, Any]) -> None:
    # "surrogatepass": Java's strings may hold lone surrogates.
    text = bytes.fromhex(vector["utf16_hex"]).decode("utf-16-be", "surrogatepass")
    assert java_hash(text) == string_hash(text) == vector["hash"]


@given(st.text(st.characters(codec=None), max_size=30))
def test_string_hash_is_javas_formula_over_utf_16_units(text: str) -> None:
    units = struct.unpack(
        f">{len(text.encode('utf-16-be', 'surrogatepass')) // 2}H", text.encode("utf-16-be", "surrogatepass")
    )
    value = sum(unit * 31**power for power, unit in enumerate(reversed(units)))
    assert string_hash(text) == (value + 2**31) % 2**32 - 2**31


# The output of Integer.hashCode, Long.hashCode and Boolean.hashCode (OpenJDK 17).
@pytest.mark.parametrize(
    ("arg", "expected"),
    [
        (0, 0), (-1, -1), (2**31 - 1, 2147483647), (-(2**31), -2147483648),
        (2**31, -2147483648), (-(2**31) - 1, -2147483648), (2**32, 1), (2**63 - 1, -2147483648),
        (-(2**63), -2147483648), (1234567890123, 1912276436), (-1234567890123, 1912276437),
        (True, 1231), (False, 1237),
    ],
)  # fmt: skip
def test_numbers_and_booleans_hash_like_java(arg: object, expected: int) -> None:
    assert expected == java_hash(arg)


@pytest.mark.parametrize("arg", [b"abc", bytearray(b"abc"), None, 1.5, ("a",)])
def test_types_that_java_would_hash_differently_are_rejected(arg: object) -> None:
    with pytest.raises(TypeError, match=rf"{type(arg).__name__}.*allowed are str, int and bool"):
        java_hash(arg)


@pytest.mark.parametrize("arg", [2**63, -(2**63) - 1])
def test_an_integer_beyond_64_bits_is_refused(arg: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        java_hash(arg)


# Math.abs(Integer.MIN_VALUE % 7) and Math.abs(-13 % 8) as Java printed them.
@pytest.mark.parametrize(("value", "queues", "expected"), [(-(2**31), 7, 2), (-13, 8, 5), (13, 8, 5), (-(2**31), 8, 0)])
def test_queue_index_is_the_absolute_java_remainder(value: int, queues: int, expected: int) -> None:
    assert expected == queue_index(value, queues)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1), st.integers(1, 10_000))
def test_queue_index_works_on_arrays(values: list[int], queues: int) -> None:
    indexes = queue_index(np.array(values), np.array([queues])).tolist()
    assert indexes == [queue_index(value, queues) for value in values]
    assert indexes == [abs(int(math.fmod(value, queues))) for value in values]


# The output of Guava 32.0.1. The generator's first number is its largest one for the last two keys.
@pytest.mark.parametrize(
    ("key", "of_4", "of_8", "of_16"),
    [("abc", 0, 7, 8), ("orders-17", 2, 2, 2), ("3dccpqj", 0, 0, 0), ("0Mduw_f", 0, 0, 0)],
)
def test_consistent_hash_selects_the_bucket_that_guava_selects(key: str, of_4: int, of_8: int, of_16: int) -> None:
    assert [consistent_hash(key, buckets) for buckets in (4, 8, 16)] == [of_4, of_8, of_16]
