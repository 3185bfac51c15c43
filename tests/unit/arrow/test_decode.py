"""The columns of a read: both kernels equal the row-by-row decoder."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.arrow import decode as decoder
from rocketmq_spark.arrow.messages import Irregular, Messages
from rocketmq_spark.arrow.stored import records_of, rows_of, split_properties
from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.message_ext import MessageExt, Pulled
from rocketmq_spark.protocol.compression import CompressionType, compress
from rocketmq_spark.protocol.remoting.records import decode_properties, encode_batch, encode_properties
from tests.support.kernels import batches_of, environment, running
from tests.support.strategies import batches, encode_stored_record, stored_messages

pytestmark = pytest.mark.usefixtures("kernel")

QUEUE = MessageQueue("orders", "broker-a", 3)
STRINGS = pa.map_(pa.string(), pa.string())
SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("body", pa.binary()),
        ("tags", pa.string()),
        ("keys", pa.string()),
        ("properties", STRINGS),
        ("flag", pa.int32()),
        ("brokerName", pa.string()),
        ("queueId", pa.int32()),
        ("queueOffset", pa.int64()),
        ("msgId", pa.string()),
        ("offsetMsgId", pa.string()),
        ("bornTimestamp", pa.timestamp("us", "UTC")),
        ("storeTimestamp", pa.timestamp("us", "UTC")),
        ("bornHost", pa.string()),
        ("reconsumeTimes", pa.int32()),
    ]
)
PLAIN = MessageExt(
    topic="orders",
    body=b"body",
    flag=0,
    properties={"KEYS": "k1 k2", "TAGS": "a", "UNIQ_KEY": "0A0B", "region": "eu"},
    queue_id=3,
    queue_offset=0,
    physical_offset=4096,
    sys_flag=0,
    born_timestamp=1_700_000_000_123,
    born_host="10.0.0.1:40000",
    store_timestamp=1_700_000_000_456,
    store_host="10.0.0.2:10911",
    reconsume_times=0,
    prepared_transaction_offset=0,
    body_crc=0,
)
TIMES = st.integers(-(2**50), 2**50) | st.integers(-(2**63), 2**63 - 1)


def sound(message: MessageExt, **changes: Any) -> MessageExt:
    """Return the message with a correct checksum."""
    changed = dataclasses.replace(message, **changes)
    return dataclasses.replace(changed, body_crc=zlib.crc32(changed.body) & 0x7FFFFFFF)


def decode(pulls: Sequence[Pulled], schema: pa.Schema, *parameters: Any, **named: Any) -> pa.RecordBatch:
    """Return what `batches_of` yields as one record batch."""
    return _joined(batches_of(pulls, schema, *parameters, **named), schema)


def decode_rows(pulls: Sequence[Pulled], schema: pa.Schema, *parameters: Any, **named: Any) -> pa.RecordBatch:
    """Return what the decoder of one message at a time yields as one record batch."""
    return _joined(decoder.decode_rows(pulls, schema, *parameters, **named), schema)


def _joined(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    table = pa.Table.from_batches(list(batches), schema).combine_chunks()
    (joined,) = table.to_batches() or [pa.RecordBatch.from_pylist([], schema)]
    return joined


def pulled(messages: Sequence[MessageExt], start: int = 0, end: int = 2**63 - 1, queue: MessageQueue = QUEUE) -> Pulled:
    return Pulled(queue, start, end, b"".join(map(encode_stored_record, messages)))


@st.composite
def readable(draw: st.DrawFn) -> MessageExt:
    """Draw records with valid checksums and compression flags; some hold a batch."""
    message = draw(stored_messages())
    sys_flag, body, properties = message.sys_flag & 0x30, message.body, message.properties
    if draw(st.integers(0, 4)) == 0:
        sys_flag |= 0xC0
        items = draw(batches(max_size=2))
        body, properties = encode_batch(items), {**properties, "INNER_NUM": str(len(items))}
    if draw(st.integers(0, 4)) == 0:
        kind = draw(st.sampled_from(CompressionType))
        sys_flag |= kind.sys_flag
        body = compress(body, kind)
    return sound(
        message,
        body=body,
        properties=properties,
        sys_flag=sys_flag,
        born_timestamp=draw(TIMES),
        store_timestamp=draw(TIMES),
        queue_offset=draw(st.integers(0, 50)),
    )


@given(
    st.lists(
        st.tuples(st.lists(readable(), max_size=2), st.integers(0, 30), st.integers(0, 60)), min_size=1, max_size=2
    ),
    st.sets(st.sampled_from(SCHEMA.names), min_size=1),
    st.none() | st.frozensets(st.sampled_from(["a", "b"])),
)
def test_columnar_decoder_equals_row_by_row_decoder(
    parts: list[tuple[list[MessageExt], int, int]], names: set[str], tags: frozenset[str] | None
) -> None:
    pulls = [
        pulled(messages, start, end, MessageQueue("orders", f"broker-{number}", 3))
        for number, (messages, start, end) in enumerate(parts)
    ]
    schema = pa.schema([field for field in SCHEMA if field.name in names])
    assert decode(pulls, schema, tags) == decode_rows(pulls, schema, tags)


def regular(count: int, **changes: object) -> list[MessageExt]:
    return [sound(PLAIN, queue_offset=offset, body=b"body %d" % offset, **changes) for offset in range(count)]


@pytest.mark.parametrize("tags", [None, frozenset(["a"])])
@pytest.mark.parametrize("inner", [False, True])
def test_bodies_that_unpack_to_very_much_are_spread_over_record_batches(
    inner: bool, tags: frozenset[str] | None
) -> None:
    sizes = [60_000, 30_000, 20_000, 90_000, 0, 300_000, 1, 1]
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]
    flag = CompressionType.ZLIB.sys_flag
    if inner:
        whole = compress(
            encode_batch([Message("orders", body, 0, {"TAGS": "a"}) for body in bodies]), CompressionType.ZLIB, 5
        )
        messages = [sound(PLAIN, sys_flag=flag | 0xC0, body=whole, properties={"INNER_NUM": "8"})]
    else:
        packed = [compress(body, CompressionType.ZLIB, 5) for body in bodies]
        messages = [sound(PLAIN, queue_offset=at, sys_flag=flag, body=body) for at, body in enumerate(packed)]
    pulls = [pulled(messages[:3], 0, 3), pulled(messages[3:], 3, 8)] if not inner else [pulled(messages, 0, 8)]
    batches = batches_of(pulls, SCHEMA, tags, most_unpacked=100_000)
    found = [batch.column("body").to_pylist() for batch in batches]
    assert [body for batch in found for body in batch] == bodies
    assert all(len(batch) == 1 or sum(map(len, batch)) <= 100_000 for batch in found)
    assert len(found) < len(bodies)


def test_messages_of_one_offset_stay_in_one_batch_if_they_fit() -> None:
    body = compress(bytes(900), CompressionType.ZLIB)
    message = sound(PLAIN, queue_offset=7, sys_flag=CompressionType.ZLIB.sys_flag, body=body)
    pull = pulled([message] * 3, 7, 8)
    (batch,) = batches_of([pull], SCHEMA)
    assert batch.column("body").to_pylist() == [bytes(900)] * 3
    # A damaged queue may return two messages of one offset; the reader must continue.
    small = batches_of([pull], SCHEMA, most_unpacked=1000)
    assert [batch.column("body").to_pylist() for batch in small] == [[bytes(900)]] * 3
    assert list(batches_of([pull], SCHEMA, frozenset("b"), most_unpacked=1000)) == []
    # A single record may be larger than the limit for several.
    (batch,) = batches_of([pulled([message], 7, 8)], SCHEMA, most_unpacked=100)
    assert batch.num_rows == 1


def test_messages_that_unpack_to_too_much_keep_the_order_of_the_answer() -> None:
    body, flag = compress(bytes(900), CompressionType.ZLIB), CompressionType.ZLIB.sys_flag
    # Of a damaged queue.
    pull = pulled([sound(PLAIN, queue_offset=at, sys_flag=flag, body=body) for at in (5, 3, 4)], 0, 10)
    found = pa.Table.from_batches(batches_of([pull], SCHEMA, most_unpacked=1000))
    assert found.column("queueOffset").to_pylist() == [5, 3, 4]


def test_an_answer_that_unpacks_to_too_much_is_decoded_once_more() -> None:
    tried = []

    def messages(*arguments: Any) -> Messages:
        tried.append(arguments)
        return running().messages(*arguments)

    kernel = dataclasses.replace(running(), messages=messages)
    body, flag = compress(bytes(900), CompressionType.ZLIB), CompressionType.ZLIB.sys_flag
    # As of a hostile broker: a search for a border between these offsets would take many steps.
    pull = pulled([sound(PLAIN, queue_offset=2**at, sys_flag=flag, body=body) for at in range(63)])
    found = decoder.batches_of([pull], SCHEMA, most_unpacked=9_000, kernel=kernel)
    assert sum(batch.num_rows for batch in found) == 63
    assert len(tried) == 1


def test_a_message_at_the_largest_offset_is_read() -> None:
    message = sound(PLAIN, queue_offset=2**63 - 1)
    (batch,) = batches_of([pulled([message], 2**63 - 1, 2**63)], SCHEMA)
    assert batch.column("queueOffset").to_pylist() == [2**63 - 1]


@pytest.mark.parametrize("host", ["10.0.0.9:1", "[2001:db8::1]:40000"])
@pytest.mark.parametrize("topic", ["orders", "o" * 200])
def test_stored_records_take_the_columnar_path(host: str, topic: str) -> None:
    v6 = 0x30 if host.startswith("[") else 0
    inner = sound(
        PLAIN, queue_offset=3, sys_flag=0xC0 | v6, born_host=host, store_host=host, topic=topic,
        body=encode_batch([Message("orders", b"x", 7, {"KEYS": "k"}), Message("orders", b"y", 0, {"TAGS": "b"})]),
        properties={"INNER_NUM": "2"},
    )  # fmt: skip
    messages = [*regular(3, sys_flag=v6, born_host=host, store_host=host, topic=topic), inner]
    body = pulled(messages).body
    records = records_of(body)
    rows = rows_of(records, body)
    assert rows.queue_offset.tolist() == [0, 1, 2, 3, 4]
    assert split_properties(pa.array([encode_properties(message.properties) for message in messages])) is not None
    found = decode([pulled(messages)], SCHEMA).to_pylist()
    assert found == decode_rows([pulled(messages)], SCHEMA).to_pylist()
    assert [row["body"] for row in found] == [b"body 0", b"body 1", b"body 2", b"x", b"y"]
    assert [row["flag"] for row in found] == [0, 0, 0, 7, 0]
    assert {row["bornHost"] for row in found} == {host}


def test_message_without_a_unique_id_gets_its_offset_message_id() -> None:
    messages = [sound(PLAIN, properties={}), sound(PLAIN, queue_offset=1)]
    for decode_with in (decode, decode_rows):
        assert decode_with([pulled(messages)], SCHEMA).column("msgId").to_pylist() == [
            "0A00000200002A9F0000000000001000",
            "0A0B",
        ]


def test_only_requested_offsets_and_tags_are_decoded() -> None:
    messages = [sound(message, properties={"TAGS": "ab"[message.queue_offset % 2]}) for message in regular(10)]
    for decode_with in (decode, decode_rows):
        found = decode_with([pulled(messages, 2, 8)], pa.schema([("queueOffset", pa.int64())]), frozenset("b"))
        assert found.column("queueOffset").to_pylist() == [3, 5, 7]


def test_times_are_instants() -> None:
    found = decode([pulled(regular(1))], SCHEMA).column("storeTimestamp")
    assert found.cast(pa.int64()).to_pylist() == [1_700_000_000_456_000]


def test_a_time_that_no_timestamp_can_hold_is_null() -> None:
    last = (2**63 - 1) // 1000
    claimed = [last + 1, last, 0, -last, -last - 1, 2**63 - 1, -(2**63)]
    records = [sound(PLAIN, queue_offset=offset, born_timestamp=time) for offset, time in enumerate(claimed)]
    for decode_with in (decode, decode_rows):
        found = decode_with([pulled(records)], SCHEMA).column("bornTimestamp").cast(pa.int64()).to_pylist()
        assert found == [None, last * 1000, 0, -last * 1000, None, None, None]


def test_no_record_at_all_is_an_empty_batch() -> None:
    for decode_with in (decode, decode_rows):
        assert decode_with([Pulled(QUEUE, 0, 5, b"")], SCHEMA).num_rows == 0


@given(st.binary(max_size=300), st.lists(readable(), max_size=1), st.data())
def test_damaged_bytes_are_an_error_that_names_the_queue(
    junk: bytes, messages: list[MessageExt], data: st.DataObject
) -> None:
    body = bytearray(b"".join((pulled(messages).body, junk)))
    if body:
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    pull = Pulled(QUEUE, 0, 2**63 - 1, bytes(body))
    assert read_by(decode, pull) == read_by(decode_rows, pull)


def read_by(decode_with: Callable[..., pa.RecordBatch], pull: Pulled) -> pa.RecordBatch | str:
    try:
        return decode_with([pull], SCHEMA)
    except RemotingCommandException as exc:
        # The error names the queue.
        return str(exc).split("orders/broker-a/3")[1]


def test_a_wrong_checksum_names_queue_and_offset() -> None:
    broken = dataclasses.replace(regular(3)[2], body=b"BODY 2")
    with pytest.raises(
        RemotingCommandException, match=r"orders/broker-a/3, the message at offset 2 .* the body has the checksum"
    ):
        decode([pulled([*regular(2), broken])], SCHEMA)


def test_body_that_does_not_match_its_flag_is_an_error_with_its_place() -> None:
    broken = sound(regular(2)[1], sys_flag=0x101)
    with pytest.raises(RemotingCommandException, match=r"orders/broker-a/3, the message at offset 1 .*: decompressing"):
        decode([pulled([*regular(1), broken])], SCHEMA)


@pytest.mark.parametrize("cut", [1, 50, 90])
def test_a_record_that_is_cut_off_is_refused(cut: int) -> None:
    whole = pulled(regular(2)).body
    with pytest.raises(RemotingCommandException, match="reading orders/broker-a/3, the messages 5 to 6 cannot be read"):
        decode([Pulled(QUEUE, 5, 7, whole[:-cut])], SCHEMA)
    with pytest.raises(Irregular):
        running().messages([whole[:-cut]], [0], [9], 9)


def test_a_record_that_reaches_into_the_next_answer_is_refused() -> None:
    whole, cut = pulled(regular(2)).body, len(pulled(regular(1)).body) + 30
    with pytest.raises(Irregular):
        running().messages([whole[:cut], whole[cut:]], [0, 0], [9, 9], 9)
    with pytest.raises(RemotingCommandException, match=r"the message at offset 1 cannot be read: .* 30 left"):
        decode([Pulled(QUEUE, 0, 2, whole[:cut]), Pulled(QUEUE, 2, 9, whole[cut:])], SCHEMA)


PIECES = st.sampled_from([b"\x01", b"\x02", b"a", b"KEYS", b"TAGS", "é".encode(), b"\xc3", b"\xa9", b"a\x01b\x02"])


@given(st.lists(st.lists(PIECES, max_size=8).map(b"".join), max_size=8))
def test_vectorised_split_equals_the_row_by_row_split_or_declines(texts: list[bytes]) -> None:
    found = split_properties(pa.array(texts, pa.binary()))
    if found is not None:
        maps = found.as_maps(STRINGS).to_pylist()
        assert [dict(entries) for entries in maps] == [decode_properties(text) for text in texts]
        assert found.value_of("KEYS").to_pylist() == [decode_properties(text).get("KEYS") for text in texts]


@pytest.mark.parametrize("last", [b"", b"\x02"])
def test_regular_property_strings_are_split(last: bytes) -> None:
    texts = [b"", b"KEYS\x01k" + last, b"TAGS\x01t\x02KEYS\x01k k" + last, b""]
    found = split_properties(pa.array(texts, pa.binary()))
    assert found is not None
    assert found.value_of("TAGS").to_pylist() == [None, None, "t", None]
    assert [dict(entries) for entries in found.as_maps(STRINGS).to_pylist()] == [
        decode_properties(text) for text in texts
    ]


@pytest.mark.parametrize("others", [[], [b"KEYS\x01k\x02"]])
def test_property_strings_in_which_a_name_comes_twice_are_not_split(others: list[bytes]) -> None:
    texts = [b"region\x01eu\x02region\x01us\x02"] * 3 + others
    assert split_properties(pa.array(texts, pa.binary())) is None


def test_rows_with_similar_concatenated_names_are_split_correctly() -> None:
    texts = [b"ab\x01v\x02c\x01w\x02", b"a\x01v\x02bc\x01w\x02"]
    found = split_properties(pa.array(texts, pa.binary()))
    assert found is not None
    assert found.as_maps(STRINGS).to_pylist() == [[("ab", "v"), ("c", "w")], [("a", "v"), ("bc", "w")]]


def test_nothing_of_pandas_is_imported() -> None:
    script = (
        "import sys; from tests.unit.arrow import test_decode as t; "
        "loaded = 'pandas' in sys.modules; t.decode([t.pulled(t.regular(5))], t.SCHEMA, frozenset('a')); "
        "sys.exit('pandas' in sys.modules and not loaded)"
    )
    run = subprocess.run([sys.executable, "-c", script], env=environment(), check=False, timeout=60)
    assert run.returncode == 0


def inner_batch(count: int, **changes: object) -> MessageExt:
    item = Message("orders", b"", 0, {})
    properties = {"INNER_NUM": str(count)}
    return sound(PLAIN, queue_offset=0, body=encode_batch([item]) * count, properties=properties, **changes)


@pytest.mark.parametrize("count", [32_768, 65_536])
def test_an_inner_batch_of_more_messages_than_a_broker_counts_is_refused(count: int) -> None:
    with pytest.raises(
        RemotingCommandException, match=r"the inner batch at offset 0 has more messages than offsets, which are 1"
    ):
        list(batches_of([pulled([inner_batch(count, sys_flag=0xC0)], 0, 10**9)], SCHEMA))


def test_messages_without_a_body_are_spread_over_record_batches_too() -> None:
    whole = inner_batch(100)
    packed = compress(whole.body, CompressionType.ZLIB)
    message = sound(whole, body=packed, sys_flag=CompressionType.ZLIB.sys_flag | 0xC0)
    batches = batches_of([pulled([message], 0, 100)], SCHEMA, most_unpacked=10_000)
    found = [batch.column("queueOffset").to_pylist() for batch in batches]
    assert [offset for batch in found for offset in batch] == list(range(100))
    assert max(map(len, found)) <= 20
