"""Each rule for rows, and the error text of a row that breaks it."""

from __future__ import annotations

import random
from dataclasses import replace

import pyarrow as pa
import pytest

from rocketmq_spark.arrow.invalid_rows import InvalidRows
from rocketmq_spark.errors import InvalidRowError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.properties import RESERVED_PROPERTIES
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.compression import CompressionType
from rocketmq_spark.protocol.remoting.records import LARGEST_BODY, decode_batch
from tests.support.encoding import batch_options, encode, joined, new_batcher

TOPIC = batch_options(topic="orders")
PROPERTIES = pa.map_(pa.string(), pa.string())


def batch_of(name: str, *values: object, arrow_type: pa.DataType | None = None, **columns: object) -> pa.RecordBatch:
    """Return a batch with valid bodies and one more column."""
    arrays = {name: pa.array(values, arrow_type), **columns}
    return pa.RecordBatch.from_pydict({"body": pa.array([b"x"] * len(values)), **arrays})


def error_of(batch: pa.RecordBatch, settings: SinkOptions = TOPIC, **more: object) -> InvalidRowError:
    with pytest.raises(InvalidRowError) as raised:
        encode([batch], settings, **more)
    return raised.value


def maps(*values: object) -> pa.RecordBatch:
    return batch_of("properties", *values, arrow_type=PROPERTIES)


def any_bytes(*values: bytes) -> pa.StringArray:
    """Return a string column with any bytes, as Spark's ``cast(binary as string)`` makes it."""
    return pa.array(values, pa.binary()).view(pa.string())


def property_bytes(names: list[bytes], values: list[bytes]) -> pa.MapArray:
    """Return a column with one property per row."""
    return pa.MapArray.from_arrays(range(len(names) + 1), any_bytes(*names), any_bytes(*values))


CASES = {
    "null body": (batch_of("body", b"x", None), "body is null", "a body has 1 to 4194304 bytes"),
    "void body": (batch_of("body", None, None), "body is null", "onError"),
    "empty body": (batch_of("body", "x", ""), "body is empty", "a body has 1 to"),
    "empty value": (
        pa.RecordBatch.from_pydict({"value": pa.array(["x", ""], pa.large_string())}),
        "body is empty",
        "a body has 1 to",
    ),
    "tags with a pipe": (batch_of("tags", "a", "a|b"), "tags holds '|'", "one tag a message"),
    "blank tags": (batch_of("tags", "a", " \t"), "tags is blank", "use null"),
    "empty tags": (batch_of("tags", "a", ""), "tags is blank", "use null"),
    "tags that end with a blank": (batch_of("tags", "a b", "a "), "tags begins or ends with a blank", "trim it"),
    "tags that begin with a tab": (
        batch_of("tags", "grün", "\ta"),
        "tags begins or ends with a blank",
        "no subscription matches",
    ),
    "separator in tags": (batch_of("tags", "a", "b\x01"), "tags holds the character 0x01 or 0x02", "remove"),
    "separator in keys": (batch_of("keys", "a", "\x02b"), "keys holds the character 0x01", "remove"),
    "separator in a key item": (batch_of("keys", ["a"], ["b", "\x01"]), "keys holds the character", "remove"),
    "space in a key item": (batch_of("keys", ["a"], ["b", "c d"]), "an item of keys holds a space", "separates keys"),
    "empty key item": (batch_of("keys", ["a"], ["b", ""]), "an item of keys is null or empty", "at least one"),
    "null key item": (batch_of("keys", ["a"], ["b", None]), "an item of keys is null or empty", "at least one"),
    "only null key items": (batch_of("keys", [], [None]), "an item of keys is null or empty", "at least one"),
    "separator in shardingKey": (
        batch_of("shardingKey", "a", "b\x02c"),
        "shardingKey holds the character 0x01 or 0x02",
        "remove",
    ),
    "reserved property": (
        maps([("a", "1")], [("b", "2"), ("TAGS", "x")]),
        r"the name of a property is reserved \(TAGS\)",
        "use the column meant for it .* write also its column msgId",
    ),
    "delay as property": (maps([("a", "1")], [("DELAY", "3")]), r"reserved \(DELAY\)", "delayTimeLevel"),
    "inner batch property": (maps([("a", "1")], [("INNER_NUM", "3")]), r"reserved \(INNER_NUM\)", "another name"),
    "blank property name": (maps([("a", "1")], [(" ", "2")]), "the name of a property is blank", "visible"),
    "empty property name": (maps([("a", "1")], [("", "2")]), "the name of a property is blank", "visible"),
    "blank property value": (maps([("a", "1")], [("b", " \n")]), r"the value of a property is blank \(b\)", "visible"),
    "empty property value": (maps([("a", "1")], [("b", "")]), "the value of a property is blank", "visible"),
    "null property value": (
        maps([("a", "1")], [("c", "2"), ("b", None)]),
        r"the value of a property is null \(b\)",
        r"map_filter\(properties, \(k, v\) -> v is not null\)",
    ),
    "separator in a name": (maps([("a", "1")], [("b\x01", "2")]), "the name of a property holds", "remove"),
    "separator in a value": (maps([("a", "1")], [("b", "\x022")]), r"the value of a property holds .* \(b\)", "remove"),
    **{
        f"{column} with bytes of another charset": (
            batch_of("flag", 0, 0, **{column: any_bytes(b"gr\xc3\xbcn", b"caf\xe9")}),
            rf"{column} is not valid UTF-8 \(caf\\xe9\)",
            "own charset",
        )
        for column in ("tags", "keys", "shardingKey")
    },
    "property name with a surrogate": (
        batch_of("flag", 0, 0, properties=property_bytes([b"a", b"\xed\xa0\x80"], [b"1", b"2"])),
        "the name of a property is not valid UTF-8",
        "own charset",
    ),
    "property value with bytes of another charset": (
        batch_of("flag", 0, 0, properties=property_bytes([b"a", b"b"], [b"1", b"\xff"])),
        r"the value of a property is not valid UTF-8 \(\\xff\)",
        "own charset",
    ),
    "name twice": (
        maps([("a", "1"), ("b", "1")], [("b", "1"), ("a", "2"), ("b", "3")]),
        "a name occurs twice",
        "merge",
    ),
    "large flag": (batch_of("flag", 2**31 - 1, 2**31), r"flag is out of range \(2147483648\)", "-2147483648 to"),
    "largest unsigned flag": (
        batch_of("flag", 1, 2**64 - 1, arrow_type=pa.uint64()),
        "flag is out of range",
        "32 bits",
    ),
    "level 0": (batch_of("delayTimeLevel", 1, 0), r"delayTimeLevel is out of range \(0\)", "1 to 18"),
    "level 19": (batch_of("delayTimeLevel", 18, 19), r"delayTimeLevel is out of range \(19\)", "1 to 18"),
    "no delay": (batch_of("delayMs", 1, 0), r"delayMs is out of range \(0\)", "1 to"),
    "a delay beyond Java's clock": (
        batch_of("delayMs", 2**62, 2**63 - 1),
        rf"delayMs is out of range \({2**63 - 1}\)",
        f"1 to {2**62} is allowed",
    ),
    "a delay in unsigned numbers": (
        batch_of("delayMs", 1, 2**64 - 1, arrow_type=pa.uint64()),
        "delayMs is out of range",
        "use null for no delay",
    ),
    "before the epoch": (
        batch_of("deliverTime", 1000, -1, arrow_type=pa.timestamp("us", "UTC")),
        "deliverTime is out of range",
        "1 or more",
    ),
    "priority below 0": (batch_of("priority", 1, -1), r"priority is out of range \(-1\)", "use null for no priority"),
    "priority beside a shardingKey": (
        batch_of("priority", 5, 5, shardingKey=pa.array([None, "s"])),
        "priority is set beside shardingKey",
        "set all but one",
    ),
    "priority beside a delay and a lite topic": (
        batch_of("priority", 5, 5, delayMs=pa.array([None, 3]), liteTopic=pa.array([None, "a"])),
        "priority is set beside delayMs or liteTopic",
        "set all but one",
    ),
    "lite topic beside a delay": (
        batch_of("liteTopic", "a", "b", deliverTime=pa.array([None, 9_000_000], pa.timestamp("us", "UTC"))),
        "liteTopic is set beside deliverTime",
        "set all but one",
    ),
    "illegal lite topic": (
        batch_of("liteTopic", "a-_9", "a.b"),
        r"liteTopic has an illegal character \(a\.b\)",
        "letters, digits",
    ),
    "empty lite topic": (batch_of("liteTopic", "a", ""), "liteTopic is empty", "use null for no lite topic"),
    "long lite topic": (batch_of("liteTopic", "a" * 64, "a" * 65), "liteTopic is too long", "64 bytes"),
    "two delays": (
        batch_of("delayMs", 5, 5, delayTimeLevel=pa.array([None, 3])),
        "delayMs is set beside another delay",
        "one of delayTimeLevel, delayMs, deliverTime",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_invalid_row_error_names_row_rule_and_fix(name: str) -> None:
    batch, rule, advice = CASES[name]
    settings = TOPIC
    error = error_of(batch, settings)
    first = 0 if name == "void body" else 1
    assert error.row == first
    assert str(error).startswith(f"partition 3, row {first} (topic orders, keys ")
    with pytest.raises(InvalidRowError, match=rule):
        raise error
    with pytest.raises(InvalidRowError, match=advice):
        raise error


TOPICS = {
    "null topic": (None, "topic is null", "fill the column"),
    "blank topic": (" ", "topic is blank", "name one"),
    "illegal topic": ("a.b", "topic has an illegal character", "letters, digits"),
    "long topic": ("t" * 128, "topic is too long", "127 characters"),
    "forbidden topic": ("SCHEDULE_TOPIC_XXXX", "topic is the broker's own", "may not send"),
}


@pytest.mark.parametrize("name", TOPICS)
def test_topic_column_is_checked_only_if_it_is_used(name: str) -> None:
    topic, rule, advice = TOPICS[name]
    batch = batch_of("topic", "t" * 127, topic)
    error = error_of(batch, batch_options())
    assert (error.row, error.rule) == (1, rule)
    assert advice in str(error)
    assert [one.topic for one, _ in encode([batch], TOPIC)] == ["orders"]


def test_the_namespace_counts_for_the_length_of_a_topic() -> None:
    settings = batch_options(namespace="ns")
    error = error_of(batch_of("topic", "t" * 124, "t" * 125), settings)
    assert (error.row, error.rule) == (1, "topic is too long")
    assert "127 characters are allowed, including the namespace" in str(error)
    assert error_of(batch_of("topic", "%RETRY%" + "t" * 117, "%RETRY%" + "t" * 118), settings).row == 1


def test_rows_are_counted_over_the_whole_partition() -> None:
    batcher = new_batcher()
    for values in ([b"a", b"b"], [], [b"c"]):
        list(batcher.add(batch_of("body", *values, arrow_type=pa.binary()), 0.0))
    with pytest.raises(InvalidRowError, match=r"^partition 3, row 4 \(topic orders, keys k-5\): body is empty; "):
        batcher.add(batch_of("body", b"d", b"", keys=pa.array(["k-4", "k-5"])), 0.0)


def test_first_invalid_row_is_reported_for_any_rule() -> None:
    batch = batch_of("tags", "a", "b|c", "d", flag=pa.array([0, 0, 2**40]))
    assert error_of(batch).row == 1


def test_values_under_a_null_are_not_checked() -> None:
    hidden = pa.Array.from_buffers(pa.string(), 2, [pa.py_buffer(b"\x02"), *pa.array([" |\x01", "ok"]).buffers()[1:]])
    ((one, _),) = encode(
        [batch_of("body", "a", "b", tags=hidden, keys=hidden, shardingKey=hidden)],
        batch_options(topic="orders", queue_selector="random"),
    )
    assert [message.properties.get("TAGS") for message in decode_batch(joined(one))] == [None, "ok"]


def test_body_size_is_bounded_by_max_message_size() -> None:
    settings = batch_options(topic="orders", max_message_size=200)
    error = error_of(batch_of("body", bytes(200), bytes(201)), settings)
    assert (error.row, error.rule) == (1, "body is longer than maxMessageSize")
    assert "(201 bytes); 200 bytes are allowed" in str(error)


def properties_of(size: int) -> pa.RecordBatch:
    """Return a row whose whole property string has `size` bytes, UNIQ_KEY's 42 and the name's 3 among them."""
    return maps([("n", "v" * (size - 42 - 3))])


def test_batch_item_can_have_32767_bytes_of_properties() -> None:
    ((one, _),) = encode([properties_of(32_767)])
    assert len(decode_batch(joined(one))[0].properties["n"]) == 32_767 - 45
    error = error_of(properties_of(32_768))
    assert (error.rule, "(32768 bytes)" in str(error)) == ("properties are too long", True)


def test_single_message_reserves_space_for_properties_of_the_broker() -> None:
    single = batch_options(topic="orders", batching=False)
    ((one, _),) = encode([properties_of(32_000)], single)
    assert len(one.properties) == 32_000
    assert error_of(properties_of(32_001), single).rule == "properties are too long"


@pytest.mark.parametrize("name", sorted(RESERVED_PROPERTIES))
def test_a_copy_job_drops_reserved_names(name: str) -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "body": pa.array([b"x", b"y", b"z"]),
            "properties": pa.array([[("a", "1"), (name, ""), ("b", "2")], [(name, "x")], None], PROPERTIES),
            "queueOffset": pa.array([7, 8, 9]),
        }
    )
    ((one, _),) = encode([batch])
    properties = [dict(message.properties) for message in decode_batch(joined(one))]
    for some in properties:
        del some["UNIQ_KEY"]
    assert properties == [{"a": "1", "b": "2"}, {}, {}]


def test_sharding_key_property_is_allowed_only_without_its_column() -> None:
    properties = pa.array([[("__SHARDINGKEY", "mine")]], PROPERTIES)
    batch = pa.RecordBatch.from_pydict({"body": ["x"], "properties": properties})
    ((one, _),) = encode([batch])
    assert decode_batch(joined(one))[0].properties["__SHARDINGKEY"] == "mine"
    assert "reserved (__SHARDINGKEY)" in str(error_of(batch.append_column("shardingKey", pa.array(["k"]))))


def test_many_different_names_in_a_block_are_still_checked_for_repeats() -> None:
    rows = [[(f"name-{row}-{item}", "v") for item in range(3)] for row in range(100)]
    assert sum(one.rows for one, _ in encode([maps(*rows)])) == 100
    rows[70].append(("name-70-1", "again"))
    assert error_of(maps(*rows)).row == 70


@pytest.mark.parametrize("missing", [None, ""])
def test_an_ordered_write_needs_a_sharding_key_in_every_row(missing: str | None) -> None:
    settings = batch_options(topic="orders", ordered=True)
    error = error_of(batch_of("shardingKey", "k", missing), settings)
    assert (error.row, error.rule) == (1, "shardingKey is null or empty")
    assert error_of(batch_of("tags", "a"), settings).row == 0


@pytest.mark.parametrize(("queue_id", "broker"), [(2, "broker-a"), (0, "broker-c"), (0, None)])
def test_row_with_an_unknown_queue_is_invalid(queue_id: int, broker: str | None) -> None:
    batch = batch_of("queueId", 1, queue_id, None, brokerName=pa.array(["broker-a", broker, "broker-c"]))
    error = error_of(batch, batch_options(topic="orders", queue_selector="column"))
    assert error.row == 1
    assert f"(brokerName {broker or 'null'}, queueId {queue_id})" in str(error)
    assert "the topic's writable queues are broker-a: 0..1, broker-b: 0" in str(error)


def test_a_queue_id_is_not_negative() -> None:
    error = error_of(
        batch_of("queueId", 0, -1),
        batch_options(topic="orders", queue_selector="column"),
        queues_of=lambda topic: [MessageQueue(topic, "only", 0)],
    )
    assert (error.row, error.rule) == (1, "queueId is out of range")


def test_long_values_are_cut_in_the_text() -> None:
    error = error_of(batch_of("body", None, keys=pa.array(["k" * 5000])))
    assert "keys " + "k" * 100 + ")" in str(error)


@pytest.mark.parametrize(
    ("names", "rule"),
    [
        (["a", "TAGS"], "the name of a property is reserved"),
        (["a", " "], "the name of a property is blank"),
        (["a", "b\x01"], "the name of a property holds the character 0x01 or 0x02"),
        (["a", "b", "a"], "a name occurs twice among the properties"),
    ],
)
def test_names_that_all_rows_share_are_checked(names: list[str], rule: str) -> None:
    error = error_of(maps(*[[(name, "1") for name in names]] * 3))
    assert (error.row, error.rule) == (0, rule)


def test_names_are_distinguished_by_their_ends() -> None:
    # All names together are the same bytes in both rows.
    error = error_of(maps([("TAGSa", "1"), ("b", "2")], [("TAGS", "1"), ("ab", "2")]))
    assert (error.row, error.rule) == (1, "the name of a property is reserved")


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_compressed_body_that_exceeds_a_frame_is_an_invalid_row(on_error: str) -> None:
    size = LARGEST_BODY + 1
    noise = random.Random(0).randbytes(1024) * (size // 1024 + 1)
    rows = pa.RecordBatch.from_pydict({"body": [b"a", noise[:size], bytes(2 * size)], "keys": ["k0", "k1", "k2"]})
    compressed = batch_options(topic="orders", max_message_size=2 * size, compress_type=CompressionType.ZLIB)
    assert sum(one.rows for one, _ in encode([rows], compressed)) == 3
    plain = replace(compressed, compress_type="NONE")
    if on_error == "fail":
        with pytest.raises(
            InvalidRowError, match=r"row 1 .*keys k1\): body is too long for a frame; after compression"
        ):
            encode([rows], plain)
        return
    found: list[InvalidRows] = []
    encoded = encode([rows], plain, on_invalid=found.append)
    assert [one.rows for one, _ in encoded] == [1]
    assert [(int(one.first_row), one.by_rule()) for one in found] == [
        (1, {"body is too long for a frame": 1}),
        (2, {"body is too long for a frame": 1}),
    ]
