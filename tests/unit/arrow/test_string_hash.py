from __future__ import annotations

import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.arrow.columns import byte_column
from rocketmq_spark.arrow.hashes import string_hashes
from rocketmq_spark.model.hashes import string_hash
from rocketmq_spark.model.message import MessageQueue
from tests.support.encoding import batch_options, encode


def hashes(array: pa.Array) -> list[int]:
    column = byte_column(array)
    assert column is not None
    found: list[int] = string_hashes(column).tolist()
    return found


# The output of String.hashCode() (OpenJDK 17).
JAVA = {
    "a": 97,
    "hello": 99162322,
    "polygenelubricants": -2147483648,
    "order-00000017": 2011524037,
    "\U0001f600": 1772899,
    "h\u00e9": 3457,
    "caf\u00e9 \u65e5\u672c\U0001f600": -2049929175,
}


def test_hashes_are_java_s() -> None:
    assert hashes(pa.array([*JAVA])) == [*JAVA.values()]
    assert hashes(pa.array(["hello", "", "a"])) == [99162322, 0, 97]


@given(st.lists(st.none() | st.text(max_size=30), min_size=1).filter(lambda texts: any(texts)), st.booleans())
def test_any_column_hashes_as_its_strings_one_by_one(texts: list[str | None], large: bool) -> None:
    array = pa.array(["caf\u00e9", *texts, "x"], pa.large_string() if large else pa.string()).slice(1, len(texts))
    given_ = [value for value, text in zip(hashes(array), texts, strict=True) if text is not None]
    assert given_ == [string_hash(text) for text in texts if text is not None]


def test_ill_formed_text_hashes_like_its_java_replacement() -> None:
    array = pa.array([b"ok", b"caf\xe9", b"\xf0\x9f"]).view(pa.string())
    assert hashes(array) == [string_hash(text) for text in ("ok", "caf\ufffd", "\ufffd")]


def test_encoded_surrogate_hashes_as_one_replacement_character() -> None:
    # The results of new String(bytes, UTF_8) (OpenJDK 17); tests/interop/test_codecs.py compares random bytes.
    read = {
        b"\xed\xa0\x80": "\ufffd",
        b"\xed\xa0\xbd\xed\xb8\x80": "\ufffd\ufffd",
        b"a\xed\xbf\xbfb": "a\ufffdb",
        b"\xed\xa0": "\ufffd",
        b"\xed\xa0a": "\ufffda",
        b"\xed\x9f\xbf": "\ud7ff",
        b"\xe0\x80\x80": "\ufffd\ufffd\ufffd",
    }
    assert hashes(pa.array([*read]).view(pa.string())) == [string_hash(text) for text in read.values()]


@pytest.mark.parametrize("count", [1, 3, 7, 8])
def test_hash_selector_uses_the_absolute_java_remainder(count: int) -> None:
    queues = [MessageQueue("orders", "broker-a", number) for number in range(count)]
    keys = ["polygenelubricants", "hello", "\U0001f600", "negative-hash", "order-00000017"]
    assert any(string_hash(key) < 0 for key in keys)
    for array in (pa.array(keys), pa.array(keys).dictionary_encode()):
        batch = pa.RecordBatch.from_pydict({"body": pa.array(keys), "shardingKey": array})
        done = encode(
            [batch], batch_options(topic="orders", batching=False, queue_selector="hash"), queues_of=lambda _: queues
        )
        assert [queue for _, queue in done] == [queues[abs(int(math.fmod(string_hash(key), count)))] for key in keys]
