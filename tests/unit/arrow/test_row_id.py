"""SPARK_ROW_ID: equal in repeats of a row, different in all other rows."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.arrow.columns import ByteColumn, byte_column, byte_column_or_nulls
from rocketmq_spark.arrow.gather import Workspace
from rocketmq_spark.arrow.hashes import RowIds, repeatable
from rocketmq_spark.arrow.numpy_hashes import Strings
from rocketmq_spark.arrow.schema import check_row_id
from rocketmq_spark.errors import InvalidRowError, SchemaError
from rocketmq_spark.model.hashes import STEP, entry_hash, is_repeatable, row_hash
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.records import decode_batch, decode_properties
from tests.support.encoding import batch_options, encode, joined
from tests.support.kernels import running
from tests.support.strategies import row_tables

pytestmark = pytest.mark.usefixtures("kernel")

PROPERTIES = pa.map_(pa.string(), pa.string())


def ids_of(
    batches: list[pa.RecordBatch], settings_: SinkOptions | None = None, columns: tuple[str, ...] | None = None
) -> list[str]:
    """Return the ids in the order of the rows; each must equal the id that a reader computes."""
    found: dict[str, str] = {}
    row_ids = RowIds("w-1", 4, 9, columns, kernel=running())
    for one, _ in encode(batches, settings_ or batch_options(topic="orders"), row_ids=row_ids):
        messages = decode_batch(joined(one)) if one.batch else None
        for message in messages or ():
            found[message.properties["UNIQ_KEY"]] = message.properties["SPARK_ROW_ID"]
            if columns is None:
                expected = row_hash(one.topic, message.body, message.properties, message.flag)
                assert message.properties["SPARK_ROW_ID"].split("/")[-1] == expected
        if messages is None:
            properties = decode_properties(one.properties.encode())
            found[properties["UNIQ_KEY"]] = properties["SPARK_ROW_ID"]
            if columns is None:
                expected = row_hash(one.topic, joined(one), properties, one.flag)
                assert properties["SPARK_ROW_ID"].split("/")[-1] == expected
    # Row k has the k-th client id.
    return [found[key] for key in sorted(found)]


def bodies(*values: bytes, **columns: object) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"body": pa.array(values, pa.binary()), **columns})


def at(milliseconds: int) -> pa.Array:
    return pa.array([milliseconds], pa.timestamp("ms", "UTC"))


@given(
    st.lists(st.none() | st.binary(max_size=40), max_size=20),
    st.binary(max_size=9),
    st.binary(min_size=1, max_size=9),
    st.sampled_from([0, STEP]),
)
def test_vectorised_hash_equals_the_hash_of_each_string(
    values: list[bytes | None], head: bytes, tail: bytes, seed: int
) -> None:
    column = byte_column(pa.array(values, pa.binary()).slice(len(values) // 3))
    if column is None:
        return
    expected = [0 if value is None else entry_hash(head + value + tail, seed) for value in values[len(values) // 3 :]]
    (hashes,) = running().hash_sums([Strings(column, head, tail)], Workspace(), (seed,))
    assert hashes.tolist() == expected


def test_the_hashes_of_a_row_are_added() -> None:
    values, others = [b"a", None, b"", b"long" * 70_000], [None, b"bb", b"c", b""]
    columns = [
        Strings(byte_column_or_nulls(pa.array(values, pa.binary())), b"KEYS\x01", b"\x02"),
        Strings(byte_column_or_nulls(pa.array(others, pa.large_binary())), b"\x02"),
    ]
    expected = [
        (0 if value is None else entry_hash(b"KEYS\x01" + value + b"\x02"))
        + (0 if other is None else entry_hash(b"\x02" + other))
        for value, other in zip(values, others, strict=True)
    ]
    (sums,) = running().hash_sums(columns, Workspace(), (0,))
    assert sums.tolist() == [total % 2**64 for total in expected]


def test_a_hash_does_not_depend_on_the_size_of_pieces() -> None:
    values = [bytes([number % 251]) * 300_000 for number in range(5)]
    column = byte_column(pa.array(values, pa.binary()))
    assert isinstance(column, ByteColumn)
    (hashes,) = running().hash_sums([Strings(column, b"\x02")], Workspace(), (0,))
    assert hashes.tolist() == [entry_hash(b"\x02" + value) for value in values]


def test_row_hash_is_stable() -> None:
    assert row_hash("orders", b"hello", {"KEYS": "k1", "TAGS": "t", "UNIQ_KEY": "x", "mine": "1"}) == "a961018d6d52eebe"
    assert row_hash("orders", b"hello", {"DELAY": "3", "REAL_TOPIC": "orders"}, -7) == "11c5eefbab7d1dff"


def test_a_million_similar_strings_have_a_million_hashes() -> None:
    # Differences for which a weak hash collides: one byte, swapped words, the length.
    numbers = pa.array(np.arange(1_000_000)).cast(pa.string())
    column = byte_column(numbers)
    assert isinstance(column, ByteColumn)
    (hashes,) = running().hash_sums([Strings(column, b"", b"\x02")], Workspace(), (0,))
    assert len(np.unique(hashes)) == 1_000_000


@given(
    row_tables(delays=True),
    st.builds(
        batch_options,
        topic=st.none() | st.just("orders"),
        tags=st.none() | st.just("standard"),
        batching=st.booleans(),
        queue_selector=st.sampled_from([None, "random"]),
    ),
)
def test_row_ids_contain_place_and_hash_that_readers_can_compute(table: Any, batch_settings: SinkOptions) -> None:
    rows, record_batches = table
    ids = ids_of(record_batches, batch_settings)
    assert [one.rsplit("/", 1)[0] for one in ids] == [f"w-1/4/9/{number}" for number in range(len(rows))]


@pytest.mark.parametrize("first_row", [0, 995, 9_995, 10_000, 1_234_567, 99_999_995])
def test_row_ids_contain_the_number_of_the_row(first_row: int) -> None:
    content = [bytes([65 + row]) for row in range(10)]
    prop = RowIds("w-1", 4, 9, kernel=running()).of_content(
        first_row, ["orders"], None, (), None, byte_column_or_nulls(pa.array(content, pa.binary())), None
    )
    expected = [f"w-1/4/9/{first_row + row}/{row_hash('orders', body, {}, 0)}" for row, body in enumerate(content)]
    column = prop.column(10)
    assert [column.text(row) for row in range(10)] == expected
    assert prop.sizes(10).tolist() == [len("SPARK_ROW_ID") + 2 + len(row_id) for row_id in expected]


@given(row_tables(delays=True), st.integers(1, 5))
def test_ids_do_not_depend_on_how_rows_are_cut_into_record_batches(table: Any, size: int) -> None:
    _, record_batches = table
    whole = pa.Table.from_batches(record_batches)
    again = whole.to_batches(max_chunksize=size)
    assert ids_of(again, batch_options()) == ids_of(record_batches, batch_options())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (bodies(b"a"), bodies(b"b")),
        (bodies(b"a", keys=["k"]), bodies(b"a", tags=["k"])),
        (bodies(b"a", keys=["k"]), bodies(b"a")),
        (bodies(b"a", keys=["k"]), bodies(b"a", shardingKey=["k"])),
        (
            bodies(b"a", properties=pa.array([[("src", "00000-A"), ("dst", "00000-B")]], PROPERTIES)),
            bodies(b"a", properties=pa.array([[("src", "00000-B"), ("dst", "00000-A")]], PROPERTIES)),
        ),
        (bodies(b"a", topic=["x"]), bodies(b"a", topic=["y"])),
        (bodies(b"a", flag=[1]), bodies(b"a", flag=[2])),
        (bodies(b"a", flag=[-1]), bodies(b"a")),
        (bodies(b"a", delayTimeLevel=[1]), bodies(b"a", delayTimeLevel=[2])),
        (bodies(b"a", delayMs=[1]), bodies(b"a", delayMs=[2])),
        (bodies(b"a", deliverTime=at(1)), bodies(b"a", deliverTime=at(2))),
        (bodies(b"a", delayMs=[1]), bodies(b"a", deliverTime=at(1))),
        (bodies(b"a", delayTimeLevel=[1]), bodies(b"a")),
    ],
)
def test_different_rows_have_different_ids(one: pa.RecordBatch, other: pa.RecordBatch) -> None:
    assert ids_of([one], batch_options(topic=None if "topic" in one.schema.names else "t")) != ids_of(
        [other], batch_options(topic=None if "topic" in other.schema.names else "t")
    )


@pytest.mark.parametrize(
    "column",
    [
        {"flag": pa.array([0])},
        {"flag": pa.array([None], pa.int32())},
        {"delayTimeLevel": pa.array([None], pa.int32())},
        {"delayMs": pa.nulls(1)},
        {"waitStoreMsgOK": pa.array([False])},
        {"queueId": pa.array([1]), "brokerName": pa.array(["broker-a"])},
    ],
)
def test_row_id_ignores_unset_columns_and_routing_columns(column: dict[str, pa.Array]) -> None:
    settings_ = batch_options(topic="orders", queue_selector="column")
    assert ids_of([bodies(b"a", **column)], settings_) == ids_of([bodies(b"a")], settings_)


def test_row_id_ignores_the_order_of_map_entries() -> None:
    one, other = ([("a", "1"), ("b", "2")], [("b", "2"), ("a", "1")])
    assert ids_of([bodies(b"x", properties=pa.array([one], PROPERTIES))]) == ids_of(
        [bodies(b"x", properties=pa.array([other], PROPERTIES))]
    )


def test_column_ids_are_unique_and_independent_of_row_order() -> None:
    columns = {"keys": [f"k{number}" for number in range(2_000)], "queueOffset": list(range(2_000))}
    batch = bodies(*[b"x"] * 2_000, **{name: pa.array(values) for name, values in columns.items()})
    ids = ids_of([batch], columns=("keys", "queueOffset"))
    assert len(set(ids)) == 2_000
    order = np.random.default_rng(1).permutation(2_000)
    assert ids_of([batch.take(pa.array(order))], columns=("queueOffset", "keys")) == [ids[row] for row in order]
    assert {one.rsplit("/", 1)[0] for one in ids} == {"w-1/4"}
    assert {len(one.rsplit("/", 1)[1]) for one in ids} == {32}


def test_column_ids_do_not_depend_on_record_batch_boundaries() -> None:
    columns = {"keys": pa.array([None, ["a"], [], ["b"]]), "tags": pa.array(["t", None, "u", None])}
    batch = bodies(b"x", b"x", b"x", b"x", **columns)
    alone = [batch.slice(row, 1) for row in range(4)]
    assert ids_of(alone, columns=("keys", "tags")) == ids_of([batch], columns=("keys", "tags"))


def test_every_type_of_column_makes_an_id() -> None:
    values = {
        "keys": pa.array([["a", "b"], ["c"], None, []]),
        "tags": pa.array(["t", "u", None, "v"]).dictionary_encode(),
        "flag": pa.array([1, 2, None, 3], pa.int32()),
        "waitStoreMsgOK": pa.array([True, False, None, True]),
        "storeTimestamp": pa.array([1, 2, None, 3], pa.timestamp("us", "UTC")),
        "msgId": pa.array([b"1", b"2", None, b"3"], pa.large_binary()),
        "bornHost": pa.nulls(4),
    }
    batch = bodies(b"x", b"x", b"x", b"x", **values)
    check_row_id(batch.schema, tuple(values))
    # An empty list of keys equals null.
    different = dict.fromkeys(values, 4) | {"bornHost": 1, "waitStoreMsgOK": 3, "keys": 3}
    assert {name: len(set(ids_of([batch], columns=(name,)))) for name in values} == different


def test_missing_or_unsupported_row_id_column_is_rejected() -> None:
    schema = pa.schema({"body": pa.binary(), "properties": PROPERTIES})
    with pytest.raises(SchemaError, match=r"rowId=columns:order_id: there is no column order_id among \['body'"):
        check_row_id(schema, ("order_id",))
    with pytest.raises(SchemaError, match=r"rowId=columns:body,properties: column properties is map<"):
        check_row_id(schema, ("body", "properties"))


@pytest.mark.parametrize("copied", [False, True])
def test_an_id_among_the_properties_is_dropped_unless_rows_are_copied(copied: bool) -> None:
    batch = bodies(b"x", properties=pa.array([[("SPARK_ROW_ID", "older"), ("a", "1")]], PROPERTIES))
    if copied:
        batch = batch.append_column("queueOffset", pa.array([1]))
    for keep, expected in ((False, {"a": "1"}), (True, {"a": "1", "SPARK_ROW_ID": "older"})):
        ((one, _),) = encode([batch], batch_options(topic="T", keep_row_id=keep))
        properties = dict(decode_batch(joined(one))[0].properties)
        assert properties.pop("UNIQ_KEY")
        assert properties == expected


def test_row_id_property_name_is_reserved_if_the_connector_writes_it() -> None:
    batch = bodies(b"x", properties=pa.array([[("SPARK_ROW_ID", "older")]], PROPERTIES))
    with pytest.raises(InvalidRowError, match=r"reserved \(SPARK_ROW_ID\)"):
        ids_of([batch])
    # A copy job drops it, like the other names that the connector writes.
    (copied,) = ids_of([batch.append_column("queueOffset", pa.array([1]))])
    assert copied.startswith("w-1/4/9/0/")


def test_hash_of_zeros_depends_on_their_number() -> None:
    hashes = {entry_hash(bytes(size)) for size in range(1, 100)}
    assert len(hashes) == 99


@given(row_tables(), st.data())
def test_vectorised_id_check_equals_the_row_by_row_check(table: Any, data: st.DataObject) -> None:
    rows: list[list[Any]] = []
    for one, _ in encode(table[1], batch_options(), row_ids=RowIds("w-1", -1, 9)):
        messages = decode_batch(joined(one), one.topic) if one.batch else ()
        rows += [
            [message.properties["SPARK_ROW_ID"], message.topic, message.body, message.flag, dict(message.properties)]
            for message in messages
        ]
    unchanged = [data.draw(st.sampled_from(["unchanged", "topic", "body", "flag", "property", "id"])) for _ in rows]
    for row, change in zip(rows, unchanged, strict=True):
        if change == "topic":
            row[1] = "other"
        elif change == "body":
            row[2] += b"."
        elif change == "flag":
            row[3] = (row[3] + 1) % 2**31
        elif change == "property":
            row[4]["one more"] = "x"
        elif change == "id":
            row[0] = data.draw(st.sampled_from([None, "", "x", "w/-1/" + "0" * 32, "w/0/0/1/" + "0" * 16]))
        # Properties that brokers and readers add.
        row[4] |= {"INNER_BASE": "4", "CLUSTER": "c"}
    kinds = (pa.string(), pa.string(), pa.binary(), pa.int32(), PROPERTIES)
    columns = [
        pa.array([list(row[place].items()) if place == 4 else row[place] for row in rows], kind)
        for place, kind in enumerate(kinds)
    ]
    found = repeatable(*columns).to_pylist()
    assert found == [is_repeatable(*row) for row in rows]
    assert all(fits for fits, change in zip(found, unchanged, strict=True) if change == "unchanged")
    assert not any(fits for fits, change in zip(found, unchanged, strict=True) if change not in ("unchanged", "id"))


def test_rows_without_topic_or_body_are_not_repeatable() -> None:
    rows = [("w/0/" + "0" * 32, None, b"x", None, None), ("w/0/" + "0" * 32, "T", None, None, None)]
    kinds = (pa.string(), pa.string(), pa.binary(), pa.int32(), PROPERTIES)
    columns = [pa.array([row[place] for row in rows], kind) for place, kind in enumerate(kinds)]
    assert repeatable(*columns).to_pylist() == [is_repeatable(*row) for row in rows] == [False, False]


def test_finding_repeatable_rows_imports_no_pandas() -> None:
    script = (
        "import sys; import pyarrow as pa; from rocketmq_spark.arrow.hashes import repeatable; "
        "kinds = [pa.string(), pa.string(), pa.binary(), pa.int32(), pa.map_(pa.string(), pa.string())]; "
        "found = repeatable(*(pa.nulls(2, kind) for kind in kinds)).to_pylist(); "
        "sys.exit(found != [False, False] or 'pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0
