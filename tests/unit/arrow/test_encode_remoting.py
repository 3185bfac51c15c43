from __future__ import annotations

import datetime
import gc
import io
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.arrow.batcher import LINGER_S
from rocketmq_spark.arrow.hashes import RowIds
from rocketmq_spark.arrow.invalid_rows import InvalidRows
from rocketmq_spark.errors import InvalidRowError, RouteNotFoundException, SchemaError
from rocketmq_spark.model.hashes import consistent_hash
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.compression import CompressionType, decompress
from rocketmq_spark.protocol.remoting.records import MAX_BATCH_ROWS, MAX_BODY, decode_batch, decode_properties
from tests.support.encoding import batch_options, check, encode, joined, new_batcher, queues_of
from tests.support.strategies import row_tables

# Bytes of an item besides body and properties, and of the property UNIQ_KEY.
ITEM = 22 + 42


# It reads the rows' batches from its input and encodes them.
ENCODER = """
import sys
import pyarrow as pa
from rocketmq_spark.arrow.hashes import RowIds
from rocketmq_spark.protocol.remoting.records import decode_properties
from tests.support.encoding import batch_options, encode
batches = list(pa.ipc.open_stream(sys.stdin.buffer))
done = encode(batches, batch_options(topic=None, tags="t"), row_ids=RowIds("w-1", 0, 0, None))
singles = [decode_properties(batch.properties.encode()) for batch, _ in done if not batch.batch]
delays = sorted((name, value) for properties in singles for name, value in properties.items() if "DEL" in name)
print(sum(batch.rows for batch, _ in done), *map("=".join, delays), "pandas" in sys.modules)
"""


def bodies(*values: bytes | None, **columns: object) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"body": pa.array(values, pa.binary()), **columns})


def test_a_worker_encodes_every_kind_of_column_without_importing_pandas() -> None:
    time = datetime.datetime(2030, 1, 1, tzinfo=datetime.timezone.utc)
    columns = {
        "topic": pa.array(["T", "U", "T", "T"]),
        "tags": pa.array(["a", None, "b", "c"]),
        "keys": pa.array([["k", "l"], ["m"], None, None]),
        "shardingKey": pa.array(["é", "ß", "\U0001f600", None]),
        "flag": pa.array([1, None, 2, None], pa.int32()),
        "waitStoreMsgOK": pa.array([None, False, True, None]),
        "delayTimeLevel": pa.array([None, 3, None, None]),
        "delayMs": pa.array([None, None, 500, None], pa.uint64()),
        "deliverTime": pa.array([None, None, None, time]),
        "properties": pa.array([[("n", "1")], None, [("ü", "ø")], None], pa.map_(pa.string(), pa.string())),
    }
    batch = bodies(b"one", b"two", b"three", b"four", **columns)
    given = io.BytesIO()
    with pa.ipc.new_stream(given, batch.schema) as stream:
        stream.write_batch(batch)
    encoder = [sys.executable, "-c", ENCODER]
    done = subprocess.run(encoder, input=given.getvalue(), capture_output=True, timeout=60, check=False)
    delays = [b"DELAY=3", b"TIMER_DELAY_MS=500", b"TIMER_DELIVER_MS=%d" % (time.timestamp() * 1000)]
    assert (done.stdout.split(), done.stderr) == ([b"4", *delays, b"False"], b"")


def plain_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


@given(
    row_tables(),
    st.builds(
        batch_options,
        topic=st.none() | st.just("orders"),
        tags=st.none() | st.just("standard"),
        max_message_size=st.sampled_from([150, 400, MAX_BODY]),
        batch_bytes=st.integers(100, 2000),
        batching=st.booleans(),
        unique_key=st.booleans(),
        queue_selector=st.sampled_from([None, "hash", "roundRobin", "random"]),
        max_pending_bytes=st.sampled_from([500, 10_000]),
        compress_type=st.none() | st.sampled_from(CompressionType),
        compress_over=st.sampled_from([0, 1, 20, 40]),
    ),
    st.integers(1, 3000),
)
def test_any_rows_in_any_layout_equal_the_row_by_row_encoder(
    table: tuple[list[dict[str, Any]], list[pa.RecordBatch]], batch_settings: SinkOptions, chunk_bytes: int
) -> None:
    rows, record_batches = table
    check(encode(record_batches, batch_settings, chunk_bytes=chunk_bytes), rows, batch_settings)


def test_a_row_with_a_delay_goes_as_a_single_message() -> None:
    batch = bodies(
        *[b"x"] * 5,
        tags=pa.array(["a", None, "b", "c", "d"]),
        flag=pa.array([1, 2, None, 4, 5]),
        delayTimeLevel=pa.array([None, 18, None, None, None], pa.int8()),
        delayMs=pa.array([None, None, 1500, None, None]),
        deliverTime=pa.array([None, None, None, 1_700_000_000_123_999, None], pa.timestamp("us", "Europe/Berlin")),
    )
    rows = plain_rows(batch)
    rows[3]["deliverTime"] = 1_700_000_000_123
    settings_ = batch_options(topic="orders")
    done = encode([batch], settings_)
    check(done, rows, settings_)
    assert [one.properties.split("\x02")[-3] for one, _ in done if not one.batch] == [
        "DELAY\x0118",
        "TIMER_DELAY_MS\x011500",
        "TIMER_DELIVER_MS\x011700000000123",
    ]


def test_entries_under_null_lists_and_maps_are_ignored() -> None:
    offsets = pa.array([0, 1, 3, 4], pa.int32())
    items = pa.array(["k1", "hidden", "hidden too", "k2"])
    keys = pa.ListArray.from_arrays(offsets, items, mask=pa.array([False, True, False]))
    properties = pa.MapArray.from_arrays(offsets, items, pa.array(["v1", "", None, "v2"]))
    hidden = pa.Array.from_buffers(
        properties.type, 3, [pa.py_buffer(b"\x05"), *properties.buffers()[1:2]], children=[properties.values]
    )
    assert hidden.null_count == 1
    rows: list[dict[str, Any]] = [
        {"body": b"a", "keys": ["k1"], "properties": [("k1", "v1")]},
        {"body": b"b"},
        {"body": b"c", "keys": ["k2"], "properties": [("k2", "v2")]},
    ]
    settings_ = batch_options(topic="orders")
    check(encode([bodies(b"a", b"b", b"c", keys=keys, properties=hidden)], settings_), rows, settings_)


def test_rows_beyond_two_gib_of_a_buffer_are_encoded() -> None:
    # Untouched zero pages take no memory.
    data, far = np.zeros(2**31 + 100, np.uint8), 2**31 + 50
    data[far : far + 7] = np.frombuffer(b"one-two", np.uint8)
    offsets = np.array([0, far, far + 3, far + 7])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    array = pa.Array.from_buffers(pa.large_string(), 3, buffers).slice(1)
    batch = pa.RecordBatch.from_pydict({"body": array, "keys": array, "shardingKey": array})
    rows = [{"body": text.encode(), "keys": text, "shardingKey": text} for text in ("one", "-two")]
    check(encode([batch]), rows, batch_options(topic="orders"))


def test_batch_has_at_most_the_rows_that_a_broker_can_count() -> None:
    done = encode([bodies(*[b"x"] * 70_000)], batch_options(topic="orders", batch_bytes=MAX_BODY))
    assert [batch.rows for batch, _ in done] == [MAX_BATCH_ROWS, MAX_BATCH_ROWS, 6_000]


def test_row_above_the_batch_limit_becomes_a_single_message() -> None:
    fits = MAX_BODY - ITEM
    done = encode([bodies(bytes(fits), bytes(fits + 1), bytes(MAX_BODY))])
    assert [(batch.batch, batch.nbytes) for batch, _ in done] == [
        (True, MAX_BODY),
        (False, fits + 1),
        (False, MAX_BODY),
    ]


def test_row_larger_than_batch_bytes_gets_its_own_batch() -> None:
    done = encode([bodies(b"a", bytes(5000), b"b", b"c")], batch_options(topic="orders", batch_bytes=1000))
    assert [(batch.batch, batch.rows) for batch, _ in done] == [(True, 1), (True, 1), (True, 2)]


@pytest.mark.parametrize("chunk_bytes", [1, 2 * MAX_BODY])
def test_rows_of_one_key_keep_order_around_a_too_large_row(chunk_bytes: int) -> None:
    settings_ = batch_options(topic="orders", max_message_size=300)
    batch = bodies(b"first", bytes(290), b"last", bytes(291), shardingKey=pa.array(["k"] * 4))
    done = encode([batch], settings_, chunk_bytes=chunk_bytes)
    assert [decode_batch(joined(one))[0].body if one.batch else joined(one) for one, _ in done] == [
        b"first",
        bytes(290),
        b"last",
        bytes(291),
    ]


def test_rows_fill_a_batch_across_record_batches() -> None:
    batcher = new_batcher(batch_options(topic="orders", batch_bytes=10 * (ITEM + 1)))
    assert list(batcher.add(bodies(*[b"x"] * 7), 0.0)) == []
    assert (batcher.pending_rows, batcher.pending_bytes) == (7, 7 * (ITEM + 1))
    ((full, queue),) = batcher.add(bodies(*[b"y"] * 7), 0.0)
    assert (full.rows, full.nbytes, len(full.body), queue) == (10, 10 * (ITEM + 1), 2, None)
    assert (batcher.pending_rows, batcher.pending_bytes) == (4, 4 * (ITEM + 1))
    ((rest, _),) = batcher.flush()
    assert (rest.rows, batcher.pending_rows, batcher.pending_bytes) == (4, 0, 0)


def test_many_small_record_batches_make_few_pieces() -> None:
    batcher = new_batcher()
    for _ in range(2000):
        list(batcher.add(bodies(bytes(100)), 0.0))
    ((done, _),) = batcher.flush()
    assert (done.rows, len(done.body)) == (2000, 5)
    assert len(decode_batch(joined(done))) == 2000


def test_full_batches_are_slices_of_one_buffer() -> None:
    batcher = new_batcher(batch_options(topic="orders", batch_bytes=10 * (ITEM + 1)))
    first, second = batcher.add(bodies(*[b"x"] * 25), 0.0)
    assert memoryview(first[0].body[0]).obj is memoryview(second[0].body[0]).obj


def test_full_groups_do_not_keep_a_shared_chunk_alive() -> None:
    rows, per_key = 4000, 100
    keys = pa.array([str(row % (rows // per_key)) for row in range(rows)])
    batcher = new_batcher(batch_options(topic="orders", batch_bytes=20_000))
    full = [batch for batch, _ in batcher.add(bodies(*[bytes(200)] * rows, shardingKey=keys), 0.0)]
    views = [memoryview(piece) for batch in full for piece in batch.body]
    buffers = {id(view.obj): memoryview(view.obj).nbytes for view in views}
    assert full
    assert sum(buffers.values()) == sum(batch.nbytes for batch in full)


def test_group_is_flushed_after_its_first_row_waited_for_the_linger_time() -> None:
    def known(_topic: str) -> bool:
        return True

    batcher = new_batcher()
    list(batcher.add(bodies(b"early", shardingKey=pa.array(["a"])), 10.0))
    list(batcher.add(bodies(b"late", shardingKey=pa.array(["b"])), 10.0 + LINGER_S / 2))
    assert list(batcher.expired(10.0 + LINGER_S * 0.9, known)) == []
    assert [batch.rows for batch, _ in batcher.expired(10.0 + LINGER_S * 1.2, known)] == [1]
    list(batcher.add(bodies(b"later", shardingKey=pa.array(["b"])), 10.0 + LINGER_S * 1.3))
    assert [batch.rows for batch, _ in batcher.expired(10.0 + LINGER_S * 2, known)] == [2]


def test_unknown_column_is_an_error_of_the_task_too() -> None:
    with pytest.raises(SchemaError, match="unknown column delayLevel: did you mean delayTimeLevel"):
        list(new_batcher().add(bodies(b"x", delayLevel=pa.array([3])), 0.0))


def test_search_for_expired_batches_ends_at_the_first_young_one() -> None:
    class Clock(float):
        compared = 0

        def __sub__(self, since: float) -> float:
            Clock.compared += 1
            return float(self) - since

    batcher = new_batcher(batch_options(topic=None))
    list(batcher.add(bodies(b"old", topic=pa.array(["old"])), 0.0))
    list(batcher.add(bodies(*[b"young"] * 500, topic=pa.array([f"T{number}" for number in range(500)])), 10.0))
    assert [batch.topic for batch, _ in batcher.expired(Clock(10.0), lambda _topic: True)] == ["old"]
    assert Clock.compared == 2


def test_group_of_a_topic_without_a_route_is_not_expired() -> None:
    batcher = new_batcher(batch_options(topic=None))
    list(batcher.add(bodies(b"x", b"y", topic=pa.array(["known", "unknown"])), 0.0))
    assert [batch.topic for batch, _ in batcher.expired(10.0, "known".__eq__)] == ["known"]
    assert [batch.topic for batch, _ in batcher.flush()] == ["unknown"]


def test_largest_group_is_flushed_above_max_pending_bytes() -> None:
    small, large = bodies(bytes(100), bytes(100), shardingKey=pa.array(["a", "a"])), bodies(*[bytes(100)] * 3)
    one = 100 + ITEM
    limit = 2 * (one + len("__SHARDINGKEY") + 3) + 2 * one
    batcher = new_batcher(batch_options(topic="orders", max_pending_bytes=limit))
    assert list(batcher.add(small, 0.0)) == []
    assert [(batch.rows, queue) for batch, queue in batcher.add(large, 0.0)] == [(3, None)]
    assert batcher.pending_rows == 2


def test_pending_rows_do_not_keep_their_record_batch_alive() -> None:
    class Memory(np.ndarray):
        """An array that allows weak references."""

    memory = np.frombuffer(b"payload" * 100, np.uint8).view(Memory)
    offsets = pa.py_buffer(np.arange(0, 701, 7, dtype=np.int32))
    batch = bodies()
    body = pa.Array.from_buffers(pa.binary(), 100, [None, offsets, pa.py_buffer(memory)])
    batch = pa.RecordBatch.from_pydict({"body": body, "keys": body.cast(pa.string())})
    alive = weakref.ref(memory)
    batcher = new_batcher()
    before = pa.total_allocated_bytes()
    assert list(batcher.add(batch, 0.0)) == []
    assert pa.total_allocated_bytes() == before
    del batch, body, memory
    gc.collect()
    assert alive() is None
    assert sum(done.rows for done, _ in batcher.flush()) == 100


def test_rows_without_wait_store_msg_ok_get_separate_batches() -> None:
    batch = bodies(b"a", b"b", b"c", waitStoreMsgOK=pa.array([True, False, None]))
    done = encode([batch])
    assert {one.properties: [item.body for item in decode_batch(joined(one))] for one, _ in done} == {
        "": [b"a", b"c"],
        "WAIT\x01false\x02": [b"b"],
    }
    (item,) = decode_batch(joined(next(one for one, _ in done if one.properties)))
    assert item.properties["WAIT"] == "false"


def test_a_retry_topic_gets_no_batches() -> None:
    done = encode([bodies(b"a", b"b", topic=pa.array(["%RETRY%group", "orders"]))], batch_options())
    assert {one.topic: one.batch for one, _ in done} == {"%RETRY%group": False, "orders": True}


@pytest.mark.parametrize("batching", [True, False])
def test_text_that_is_not_utf8_is_an_invalid_row(batching: bool) -> None:
    tags = pa.array([b"caf\xe9"]).view(pa.string())
    with pytest.raises(InvalidRowError, match=r"row 0 .*tags is not valid UTF-8"):
        encode([bodies(b"a", tags=tags)], batch_options(topic="orders", batching=batching))


def test_queues_are_looked_up_only_for_bound_rows() -> None:
    asked = []

    def ask(topic: str) -> list[MessageQueue]:
        asked.append(topic)
        return queues_of(topic)

    batch = bodies(b"a", b"b", b"c", topic=pa.array(["x", "y", "z"]), shardingKey=pa.array([None, "k", ""]))
    encode([bodies(b"a")], queues_of=ask)
    encode([batch], batch_options(queue_selector="roundRobin"), queues_of=ask)
    assert asked == []
    encode([batch], batch_options(), queues_of=ask)
    assert asked == ["y"]


def test_record_batch_can_be_added_again_after_a_missing_route() -> None:
    routes = [[], queues_of("orders")]
    batcher = new_batcher(queues_of=lambda _: routes.pop(0))
    batch = bodies(b"a", shardingKey=pa.array(["k"]))
    with pytest.raises(RouteNotFoundException, match=r"orders.*no writable queue"):
        batcher.add(batch, 0.0)
    list(batcher.add(batch, 0.0))
    with pytest.raises(InvalidRowError, match="row 1 "):
        batcher.add(bodies(None), 0.0)


def test_a_row_is_bound_to_the_queue_that_it_names() -> None:
    batch = bodies(
        b"a",
        b"b",
        b"c",
        topic=pa.array(["orders", "orders", "refunds"]),
        queueId=pa.array([1, None, 0], pa.int64()),
        brokerName=pa.array(["broker-a", "broker-a", "broker-b"]),
    )
    done = encode([batch], batch_options(queue_selector="column"))
    assert {joined(one)[20:21]: queue for one, queue in done} == {
        b"a": MessageQueue("orders", "broker-a", 1),
        b"b": None,
        b"c": MessageQueue("refunds", "broker-b", 0),
    }


def test_a_queue_id_needs_no_broker_name_where_the_topic_has_one_broker() -> None:
    queues = [MessageQueue("orders", "only", number) for number in (0, 1)]
    batch = bodies(b"a", queueId=pa.array([1]))
    ((_, queue),) = encode([batch], batch_options(topic="orders", queue_selector="column"), queues_of=lambda _: queues)
    assert queue == queues[1]


def test_queue_columns_are_ignored_by_other_selectors() -> None:
    batch = bodies(b"a", queueId=pa.array([-5]), brokerName=pa.array(["gone"]))
    assert [queue for _, queue in encode([batch])] == [None]


def test_record_batches_without_rows_give_nothing() -> None:
    assert encode([bodies(), pa.RecordBatch.from_pydict({"body": pa.nulls(0), "tags": pa.nulls(0)})]) == []


def test_invalid_rows_go_to_the_callback_and_valid_rows_are_encoded() -> None:
    handed: list[InvalidRows] = []
    batch = bodies(b"a", None, b"c", b"", b"e", tags=pa.array(["t", None, "t", None, "x|y"]))
    batcher = new_batcher(on_invalid=handed.append)
    list(batcher.add(bodies(b"before"), 0.0))
    list(batcher.add(batch, 0.0))
    ((one, _),) = batcher.flush()
    assert [item.body for item in decode_batch(joined(one))] == [b"before", b"a", b"c"]
    (invalid,) = handed
    assert [batch.column("body")[row].as_py() for row in invalid.rows] == [None, b"", b"e"]
    assert invalid.by_rule() == {"body is null": 1, "body is empty": 1, "tags holds '|'": 1}
    assert batcher.taken_rows == 3
    assert [(error.row, error.rule) for error in invalid.errors()] == [
        (2, "body is null"),
        (4, "body is empty"),
        (5, "tags holds '|'"),
    ]


def test_the_state_shows_in_the_repr() -> None:
    batcher = new_batcher()
    list(batcher.add(bodies(b"x"), 0.0))
    assert repr(batcher) == f"<RemotingBatcher partition=3 rows=1 groups=1 pending=1 rows, {ITEM + 1} bytes>"


LONG = b"the same again and again " * 200


@pytest.mark.parametrize("kind", CompressionType)
def test_long_bodies_are_compressed_one_by_one_in_separate_batches(kind: CompressionType) -> None:
    values = [LONG[:4095], LONG[:4096], b"x", LONG, np.random.default_rng(1).bytes(5_000)]
    done = encode([bodies(*values)], batch_options(topic="orders", compress_type=kind))
    found: dict[int, list[bytes]] = {}
    for one, _ in done:
        for item in decode_batch(joined(one)):
            found.setdefault(one.sys_flag, []).append(decompress(item.body, one.sys_flag))
    # A body that compression does not shorten is sent uncompressed.
    assert found == {0: [values[0], values[2], values[4]], kind.sys_flag: [values[1], values[3]]}
    assert sum(one.nbytes for one, _ in done if one.sys_flag) < 1_000


def test_single_message_is_compressed_with_its_flag() -> None:
    batch = bodies(LONG, b"short", delayTimeLevel=pa.array([1, 1]))
    done = encode([batch], batch_options(topic="orders", compress_type=CompressionType.ZLIB))
    assert [(one.batch, one.sys_flag, decompress(joined(one), one.sys_flag)) for one, _ in done] == [
        (False, 0x301, LONG),
        (False, 0, b"short"),
    ]


def test_max_message_size_applies_to_the_uncompressed_body() -> None:
    settings_ = batch_options(topic="orders", max_message_size=4_500, compress_type=CompressionType.ZLIB)
    with pytest.raises(InvalidRowError, match="body is longer than maxMessageSize"):
        encode([bodies(LONG)], settings_)


def test_invalid_rows_are_not_compressed() -> None:
    handed: list[InvalidRows] = []
    batch = bodies(LONG, LONG, tags=pa.array(["a|b", "c"]))
    settings_ = batch_options(topic="orders", compress_type=CompressionType.LZ4)
    ((one, _),) = encode([batch], settings_, on_invalid=handed.append)
    assert (one.rows, one.sys_flag, len(handed[0])) == (1, 0x101, 1)


def test_inner_batch_has_its_own_id_in_the_header_and_plain_bodies() -> None:
    batch = bodies(LONG, LONG, waitStoreMsgOK=pa.array([True, False]))
    done = encode(
        [batch], batch_options(topic="orders", inner_batches=True, compress_type=CompressionType.ZLIB, compress_over=1)
    )
    headers = [decode_properties(one.properties.encode()) for one, _ in done]
    items = [item.properties["UNIQ_KEY"] for one, _ in done for item in decode_batch(joined(one))]
    assert [sorted(header) for header in headers] == [["UNIQ_KEY"], ["UNIQ_KEY", "WAIT"]]
    assert len({*items, *(header["UNIQ_KEY"] for header in headers)}) == 4
    assert [(one.sys_flag, decode_batch(joined(one))[0].body) for one, _ in done] == [(0, LONG), (0, LONG)]


def test_rows_with_a_priority_or_a_lite_topic_are_single_messages() -> None:
    lites = [f"chat-{number}" for number in range(20)]
    batch = bodies(*[b"x"] * 24, priority=[None, 0, 7, None] + [None] * 20, liteTopic=[None, None, None, None, *lites])
    done = encode([batch])
    plain, singles = [ready for ready in done if ready[0].batch], [ready for ready in done if not ready[0].batch]
    assert [one.rows for one, _ in plain] == [2]
    found = [(decode_properties(one.properties.encode()), queue) for one, queue in singles]
    assert [properties.get("_SYS_MSG_PRIORITY_") for properties, _ in found] == ["0", "7"] + [None] * 20
    assert [properties.get("__LITE_TOPIC") for properties, _ in found] == [None, None, *lites]
    queues = queues_of("orders")
    assert [queue for _, queue in found] == [
        *(None, None),
        *(queues[consistent_hash(lite, len(queues))] for lite in lites),
    ]
    assert len({queue for _, queue in found[2:]}) == len(queues)
    in_turn = encode([batch], batch_options(topic="orders", queue_selector="roundRobin"))
    assert {queue for _, queue in in_turn} == {None}


@pytest.mark.parametrize("of_columns", [("tags", "body"), None])
def test_dictionaries_of_views_are_encoded_like_other_columns(of_columns: tuple[str, ...] | None) -> None:
    def of(places: list[int | None], kind: pa.DataType) -> pa.Array:
        dictionary = pa.array(["unused", "a", None, "b"], pa.string()).cast(kind)
        return pa.DictionaryArray.from_arrays(pa.array(places, pa.int8()), dictionary)

    def encoded(text: pa.DataType, binary: pa.DataType) -> list[tuple[MessageQueue | None, bytes]]:
        columns = {name: of([1, 3, None, 2], text) for name in ("tags", "shardingKey")}
        columns["keys"] = pa.ListArray.from_arrays([0, 2, 2, 3, 3], of([1, 3, 1], text))
        rows = pa.record_batch({"body": of([3, 1, 3, 3], binary), "topic": of([1, 3, 1, 3], text), **columns})
        settings = batch_options(row_id=of_columns or True)
        return [
            (queue, joined(batch))
            for batch, queue in encode([rows], settings, row_ids=RowIds("write", -1, 0, of_columns))
        ]

    assert encoded(pa.string_view(), pa.binary_view()) == encoded(pa.string(), pa.binary())
