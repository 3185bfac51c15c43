"""Hypothesis strategies for the values that travel through the package, and plain encoders of what servers send.

The encoders here are written apart from the package's own code, so that a decoder never meets its own mistakes.
"""

from __future__ import annotations

import ipaddress
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from rocketmq_spark.model.hashes import ROW_ID
from rocketmq_spark.model.message import Message
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.properties import ATTEMPT, RESERVED_PROPERTIES
from rocketmq_spark.model.route import BrokerData, QueueData, TopicRouteData
from rocketmq_spark.protocol.remoting.command import LANGUAGES, RemotingCommand

int16s = st.integers(-(2**15), 2**15 - 1)
int32s = st.integers(-(2**31), 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)

topics = st.text("%|abcXYZ019_-", min_size=1, max_size=127)
broker_names = st.text("abcXYZ019-_", min_size=1, max_size=12)
addresses = st.builds("10.0.{}.{}:{}".format, st.integers(0, 255), st.integers(1, 254), st.integers(1, 65535))

# Anything Unicode but the two separators of a property string.
property_texts = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), min_size=1, max_size=20)
properties = st.dictionaries(property_texts, property_texts, max_size=5)

ext_fields = st.dictionaries(st.text(min_size=1, max_size=12), st.text(min_size=1, max_size=30), max_size=6)


@st.composite
def commands(draw: st.DrawFn, codes: st.SearchStrategy[int] = int16s) -> RemotingCommand:
    """Requests and responses that both header types can carry."""
    return RemotingCommand(
        code=draw(codes),
        opaque=draw(int32s),
        ext_fields=draw(ext_fields),
        body=draw(st.binary(max_size=200)),
        flag=draw(st.integers(0, 3)),
        remark=draw(st.text(max_size=20)),
        language=draw(st.sampled_from(LANGUAGES)),
        version=draw(st.integers(0, 2**15 - 1)),
    )


@st.composite
def messages(draw: st.DrawFn, topic: st.SearchStrategy[str] = topics) -> Message:
    """Messages with any body (empty too), flag and properties."""
    return Message(draw(topic), draw(st.binary(max_size=100)), draw(int32s), draw(properties))


@st.composite
def batches(draw: st.DrawFn, max_size: int = 8) -> list[Message]:
    """One to `max_size` messages of one topic."""
    topic = st.just(draw(topics))
    return draw(st.lists(messages(topic), min_size=1, max_size=max_size))


@st.composite
def routes(draw: st.DrawFn) -> TopicRouteData:
    """Route tables as the package gives them: sorted by broker name, which is unique."""
    names = sorted(draw(st.sets(broker_names, max_size=4)))
    counts, perms = st.integers(0, 64), st.integers(0, 15)
    addrs = st.dictionaries(st.integers(0, 5), addresses, max_size=3)
    return TopicRouteData(
        queue_datas=tuple(QueueData(name, draw(counts), draw(counts), draw(perms), draw(counts)) for name in names),
        broker_datas=tuple(BrokerData(name, draw(addrs), draw(broker_names)) for name in names),
        order_topic_conf=draw(st.none() | st.just("broker-a:4;broker-b:4")),
        static_topic=draw(st.booleans()),
    )


@st.composite
def hosts(draw: st.DrawFn, ip: st.SearchStrategy[Any]) -> str:
    """``address:port`` as the package writes it."""
    address, port = draw(ip), draw(st.integers(0, 65535))
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


@st.composite
def stored_messages(draw: st.DrawFn) -> MessageExt:
    """Records of either magic and all mixes of address families."""
    born_v6, store_v6 = draw(st.booleans()), draw(st.booleans())
    body = draw(st.binary(max_size=60))
    return MessageExt(
        topic=draw(topics | st.text("%RETRYabc", min_size=128, max_size=255)),
        queue_id=draw(int32s),
        queue_offset=draw(int64s),
        physical_offset=draw(int64s),
        flag=draw(int32s),
        sys_flag=draw(st.integers(0, 0x7FF)) & ~0x30 | (0x10 if born_v6 else 0) | (0x20 if store_v6 else 0),
        born_timestamp=draw(int64s),
        born_host=draw(hosts(st.ip_addresses(v=6 if born_v6 else 4))),
        store_timestamp=draw(int64s),
        store_host=draw(hosts(st.ip_addresses(v=6 if store_v6 else 4))),
        reconsume_times=draw(int32s),
        prepared_transaction_offset=draw(int64s),
        body_crc=zlib.crc32(body) & 0x7FFFFFFF,
        body=body,
        properties=draw(properties),
    )


@st.composite
def chunkings(draw: st.DrawFn, data: bytes, max_cuts: int = 12) -> list[bytes]:
    """`data` cut into pieces, some of them perhaps empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=max_cuts)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# A half message as a broker has it.
HALF = MessageExt(
    topic="orders",
    body=b"half",
    properties={"TRAN_MSG": "true", "PGROUP": "pg", "UNIQ_KEY": "U1"},
    queue_id=3,
    queue_offset=5,
    physical_offset=36_804_876,
    sys_flag=0,
    born_timestamp=1_700_000_000_000,
    born_host="127.0.0.1:50000",
    store_timestamp=1_700_000_000_001,
    store_host="127.0.0.1:10911",
    reconsume_times=0,
    prepared_transaction_offset=0,
    body_crc=0,
)


def encode_stored_record(message: MessageExt) -> bytes:
    """Encode a record as a broker stores it; the topic's length chooses the magic."""
    topic = message.topic.encode()
    text = "".join(f"{name}\x01{value}\x02" for name, value in message.properties.items()).encode()
    long_topic = len(topic) > 127
    pieces = [
        struct.pack(">I", 0xDAA320AB if long_topic else 0xDAA320A7),
        struct.pack(">IiiqqiQ", message.body_crc, message.queue_id, message.flag, message.queue_offset,
                    message.physical_offset, message.sys_flag, message.born_timestamp % 2**64),
        _host(message.born_host),
        struct.pack(">q", message.store_timestamp),
        _host(message.store_host),
        struct.pack(">iqi", message.reconsume_times, message.prepared_transaction_offset, len(message.body)),
        message.body,
        struct.pack(">H" if long_topic else ">B", len(topic)),
        topic,
        struct.pack(">H", len(text)),
        text,
    ]  # fmt: skip
    record = b"".join(pieces)
    return struct.pack(">i", 4 + len(record)) + record


def _host(host: str) -> bytes:
    address, _, port = host.rpartition(":")
    return ipaddress.ip_address(address.strip("[]")).packed + struct.pack(">i", int(port))


def encode_route(route: TopicRouteData, *, standard: bool = True) -> bytes:
    """Encode a route as a name server answers it; unless `standard`, with numeric keys unquoted as fastjson does."""
    body: dict[str, Any] = {
        "brokerDatas": [
            {
                "brokerAddrs": dict(broker.broker_addrs),
                "brokerName": broker.broker_name,
                "cluster": broker.cluster,
                "enableActingMaster": False,
            }
            for broker in route.broker_datas
        ],
        "filterServerTable": {},
        "queueDatas": [
            {
                "brokerName": queue.broker_name,
                "perm": queue.perm,
                "readQueueNums": queue.read_queue_nums,
                "topicSysFlag": queue.topic_sys_flag,
                "writeQueueNums": queue.write_queue_nums,
            }
            for queue in route.queue_datas
        ],
    }
    if route.order_topic_conf is not None:
        body["orderTopicConf"] = route.order_topic_conf
    if route.static_topic:
        body["topicQueueMappingByBroker"] = {"broker-a": {"currIdMap": {0: 0, 1: 1}, "totalQueues": 2}}
    return fastjson(body, quote_numbers=standard).encode()


def fastjson(value: object, *, quote_numbers: bool = False) -> str:
    """Write JSON as fastjson does: int keys of a mapping are not quoted unless `quote_numbers` says so."""
    if isinstance(value, Mapping):
        items = []
        for key, item in value.items():
            name = str(key) if isinstance(key, int) and not quote_numbers else json.dumps(str(key), ensure_ascii=False)
            items.append(f"{name}:{fastjson(item, quote_numbers=quote_numbers)}")
        return "{" + ",".join(items) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(fastjson(item, quote_numbers=quote_numbers) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


# Columns of a write. The characters leave out what the rules forbid; `|` would be a second tag.
column_texts = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02|"), max_size=12)
visible_texts = column_texts.filter(lambda text: any(char > " " for char in text))
key_items = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02 "), min_size=1, max_size=8)
_TAKEN = {*RESERVED_PROPERTIES, ROW_ID, ATTEMPT}
property_names = visible_texts.filter(lambda name: name not in _TAKEN and not name.startswith("INNER_"))


def _column_values(draw: st.DrawFn) -> dict[str, st.SearchStrategy[Any]]:
    text_body = draw(st.booleans())
    body = st.text(min_size=1, max_size=40).map(str.encode) if text_body else st.binary(min_size=1, max_size=60)
    # Bodies that shrink when they are compressed.
    body |= st.sampled_from([b"a" * 60, b"long, long, " * 9])
    listed = st.lists(key_items, max_size=3)
    values: dict[str, st.SearchStrategy[Any]] = {
        "text" if text_body else "body": body,
        "topic": st.sampled_from(["orders", "refunds"]),
        "tags": st.none() | visible_texts.filter(lambda tag: tag[0] > " " and tag[-1] > " "),
        "keys": st.none() | (listed if draw(st.booleans()) else column_texts),
        "properties": st.none()
        | st.dictionaries(property_names, visible_texts, max_size=3).map(lambda some: [*some.items()]),
        "flag": st.none() | int32s,
        "shardingKey": st.none() | column_texts,
        "waitStoreMsgOK": st.none() | st.booleans(),
    }
    return values


@st.composite
def row_tables(
    draw: st.DrawFn, max_rows: int = 30, *, delays: bool = False
) -> tuple[list[dict[str, Any]], list[pa.RecordBatch]]:
    """Rows as plain values, and the same rows as record batches: any set of columns, any Arrow layout, any chunking.

    `properties` is a list of pairs, as Arrow gives a map. With `delays` there may be a column of delays.
    """
    values = _column_values(draw)
    optional = draw(st.sets(st.sampled_from(["tags", "keys", "properties", "flag", "shardingKey", "waitStoreMsgOK"])))
    if delays:
        name, most = draw(st.sampled_from([("delayTimeLevel", 18), ("delayMs", 86_400_000), ("deliverTime", 2**41)]))
        values[name] = st.none() | st.integers(1, most)
        optional |= draw(st.sampled_from([set(), {name}]))
    body = next(iter(values))
    columns = {name: values[name] for name in (body, "topic", *sorted(optional))}
    rows = draw(st.lists(st.fixed_dictionaries(columns), max_size=max_rows))
    # Rows before and after, which slicing takes away again: offsets that do not start at 0, buffers that do not end.
    lead, trail = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    around = draw(st.fixed_dictionaries(columns))
    padded = [around] * lead + rows + [around] * trail
    arrays = {name: draw(column_arrays(name, [row[name] for row in padded])) for name in columns}
    arrays[draw(st.sampled_from(["body", "value"]))] = arrays.pop(body)
    whole = pa.RecordBatch.from_pydict(arrays).slice(lead, len(rows))
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    batches = [whole.slice(start, end - start) for start, end in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    return [{"body": row[body], **{name: row[name] for name in columns if name != body}} for row in rows], batches


@st.composite
def column_arrays(draw: st.DrawFn, name: str, values: list[Any]) -> pa.Array:
    """One column in one of the Arrow types that a write accepts for it."""
    if all(value is None for value in values) and draw(st.booleans()):
        return pa.nulls(len(values))
    if name == "flag":
        return pa.array(values, pa.int32() if draw(st.booleans()) else pa.int64())
    if name in ("delayTimeLevel", "delayMs"):
        return pa.array(values, pa.int32() if draw(st.booleans()) else pa.int64())
    if name == "deliverTime":
        return pa.array(values, pa.timestamp("ms", "UTC"))
    if name == "waitStoreMsgOK":
        return pa.array(values, pa.bool_())
    text = draw(st.sampled_from([pa.string(), pa.large_string(), pa.string_view()]))
    if name == "properties":
        item = draw(st.sampled_from([pa.string(), pa.large_string()]))
        return pa.array(values, pa.map_(pa.string(), item))
    if any(isinstance(value, list) for value in values):
        plain = text if text != pa.string_view() else pa.string()
        return pa.array(values, pa.list_(plain) if draw(st.booleans()) else pa.large_list(plain))
    binary = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    array = pa.array(
        [value.decode() if name == "text" else value for value in values], binary[text] if name == "body" else text
    )
    if text != pa.string_view() and draw(st.booleans()):
        return draw(dictionary_arrays(array))
    return array


@st.composite
def dictionary_arrays(draw: st.DrawFn, array: pa.Array) -> pa.Array:
    """Return `array` dictionary-encoded, with nulls in the indices or in the dictionary, and with unused entries."""
    encoded = array.dictionary_encode(null_encoding=draw(st.sampled_from(["mask", "encode"])))
    unused = pa.array([b"unused"], pa.binary()).cast(array.type)
    return pa.DictionaryArray.from_arrays(encoded.indices, pa.concat_arrays([encoded.dictionary, unused]))


# What stands where a length, a count or a number is expected.
_NUMBERS = tuple(
    value.to_bytes(size, "big", signed=True)
    for size, value in (
        *((4, value) for value in (-1, 0, 1, -(2**31), 2**31 - 1, 0xFFFFFF, 1 << 24, 64 << 20)),
        *((2, value) for value in (-1, 0, -(2**15), 2**15 - 1)),
        *((8, value) for value in (-1, -(2**63), 2**63 - 1)),
        *((1, value) for value in (-1, 0, 1, 127)),
    )
)
# What stands where a text, or a value of JSON, is expected.
_TEXTS = (
    *(b"[" * 1200, b'{"a":' * 1200, b"[" * 60 + b"]" * 60, b'{"a":' * 40 + b"1" + b"}" * 40, b"{}", b"[]"),
    *(b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-0", b"9" * 20, b"2147483648", b"9" * 5000, b"1.5"),
    *(rb"\ud800", rb"\udfff", rb"\u0000", rb"\uD83D\uDE00", b"\\", b'"', b'":"', b",", b":", b";"),
    *(
        b"\xff",
        b"\xed\xa0\x80",
        b"\xc0\x80",
        b"\0",
        b"\1",
        b"\2",
        b"\xef\xbb\xbf",
        "٣".encode(),
        b"-",
        b"+1",
        b" " * 50,
    ),
    *(b"0x10", b"1_000", b"broker-a:99999999999;", b"7F" * 16, b"\r\n", b"A" * 700),
)


def damaged(seeds: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """Yield `count` inputs made of `seeds`, each damaged once or twice, a few of them nothing but noise."""
    rng = np.random.default_rng(seed)
    # All dice at once: one call per input would cost more than what is tested.
    kinds = rng.integers(0, len(_DAMAGES), count).tolist()
    chosen = rng.integers(0, len(seeds), (count, 2)).tolist()
    dice = rng.integers(0, 2**31, (count, 4)).tolist()
    twice = (rng.random(count) < 0.3).tolist()
    for kind, (first, second), (at, until, value, again), more in zip(kinds, chosen, dice, twice, strict=True):
        data = _DAMAGES[kind](seeds[first], seeds[second], at, until, value)
        if more:
            data = _DAMAGES[again % len(_DAMAGES)](data, seeds[first], value, at, until)
        yield data


def _flipped(data: bytes, _: bytes, at: int, until: int, value: int) -> bytes:
    changed = bytearray(data)
    if changed:
        changed[at % len(changed)] ^= 1 << value % 8
        changed[until % len(changed)] = value >> 8 & 0xFF
    return bytes(changed)


def _numbered(data: bytes, _: bytes, at: int, until: int, value: int) -> bytes:
    number = _NUMBERS[value % len(_NUMBERS)]
    # Lengths stand at the front more often than elsewhere.
    place = at % (len(data) + 1) if until % 2 else at % min(len(data) + 1, 24)
    return data[:place] + number + data[place + len(number) :]


def _worded(data: bytes, _: bytes, at: int, until: int, value: int) -> bytes:
    place = at % (len(data) + 1)
    return data[:place] + _TEXTS[value % len(_TEXTS)] + data[place + until % 8 :]


def _valued(data: bytes, _: bytes, at: int, until: int, value: int) -> bytes:
    """Put something else in the place of a whole value of JSON."""
    start = data.find(b":", at % (len(data) + 1)) + 1
    end = min((found for found in (data.find(mark, start) for mark in (b",", b"}", b"]")) if found >= 0), default=start)
    return data[:start] + _TEXTS[value % len(_TEXTS)] + data[end:] if until % 4 else data[:start] + data[end:]


def _cut(data: bytes, _: bytes, at: int, until: int, value: int) -> bytes:
    return data[: at % (len(data) + 1)] if value % 2 else data[until % (len(data) + 1) :]


def _spliced(data: bytes, other: bytes, at: int, until: int, _: int) -> bytes:
    return data[: at % (len(data) + 1)] + other[until % (len(other) + 1) :]


def _doubled(data: bytes, _: bytes, at: int, until: int, value: int) -> bytes:
    start = at % (len(data) + 1)
    piece = data[start : start + until % 60]
    return data[:start] + piece * (2 + value % 30) + data[start:]


def _noise(_: bytes, __: bytes, at: int, until: int, value: int) -> bytes:
    return np.random.default_rng(value).bytes(at % 64) + until.to_bytes(4, "big")


_DAMAGES = (_flipped, _numbered, _worded, _valued, _cut, _spliced, _doubled, _noise)
