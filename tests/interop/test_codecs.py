"""Codecs, hashes, ids and name rules, compared with RocketMQ's Java classes; no server is needed."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark.arrow.columns import byte_column
from rocketmq_spark.arrow.hashes import string_hashes
from rocketmq_spark.errors import MQClientException, RouteNotFoundException
from rocketmq_spark.model.hashes import java_hash, queue_index, string_hash
from rocketmq_spark.model.message import Message
from rocketmq_spark.model.names import FORBIDDEN_TOPICS, check_group, is_blank, namespace_of, unwrap, wrap
from rocketmq_spark.model.properties import RESERVED_PROPERTIES
from rocketmq_spark.options.producer import ProducerOptions
from rocketmq_spark.producer.encode import MessageEncoder, check_message
from rocketmq_spark.protocol.compression import CompressionType, compress, decompress
from rocketmq_spark.protocol.remoting.records import decode_batch, decode_properties, encode_batch, encode_properties
from rocketmq_spark.protocol.remoting.responses import decode_topic_route
from rocketmq_spark.protocol.unique_id import UniqueIdGenerator
from rocketmq_spark.routing.route_cache import publish_info_of
from tests.support.java import Java, b64, line_of, un64

pytestmark = pytest.mark.integration

LIMIT = 4 * 1024 * 1024
COUNTS = [1, 2, 3, 4, 7, 8, 16, 1000]
RANGES = [(0x20, 0x7E), (0x20, 0x7E), (0xA0, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]


def texts(rng: random.Random, count: int, longest: int, shortest: int = 0) -> list[str]:
    """Texts of one script each, surrogate pairs too."""
    found = []
    for _ in range(count):
        low, high = rng.choice(RANGES)
        length = rng.randint(shortest, longest)
        found.append("".join(chr(rng.randint(low, high)) for _ in range(length)))
    return found


def property_maps(rng: random.Random, count: int) -> list[dict[str, str]]:
    return [
        dict(zip(texts(rng, size, 12, 1), texts(rng, size, 40, 1), strict=True))
        for size in (rng.randint(0, 6) for _ in range(count))
    ]


def test_ten_thousand_random_keys_map_to_the_queues_of_java(java: Java) -> None:
    keys = ["", "polygenelubricants", "\U0001f600", *texts(random.Random(5), 9_997, 40)]
    answers = java.run("Codecs", [{"do": "hash", "key": key, "counts": COUNTS} for key in keys])
    hashes = [string_hash(key) for key in keys]
    assert hashes == [answer["hash"] for answer in answers]
    assert min(hashes) == -(2**31)
    assert sum(value < 0 for value in hashes) > 1000
    assert [[queue_index(value, count) for count in COUNTS] for value in hashes] == [
        answer["indexes"] for answer in answers
    ]
    column = byte_column(pa.array(keys))
    assert column is not None
    assert string_hashes(column).tolist() == hashes


def test_a_key_with_half_a_surrogate_pair_hashes_as_java_hashes_it(java: Java) -> None:
    keys = ["\ud83d", "a\ude00b", "\ude00\ud83d"]
    answers = java.run("Codecs", [{"do": "hash", "key": key, "counts": [4]} for key in keys])
    assert [string_hash(key) for key in keys] == [answer["hash"] for answer in answers]


def test_ill_formed_utf_8_hashes_as_java_hashes_it(java: Java) -> None:
    rng = random.Random(8)
    # Leads, continuations and bytes of encoded surrogates, in any order.
    mixed = [
        bytes(rng.choices(b"a\x80\xa0\xbf\xc2\xe0\xe2\xed\xef\xf0\xf4\xf5\x90\x8f", k=rng.randint(1, 9)))
        for _ in range(5_000)
    ]
    surrogates = [
        b"\xed\xa0\x80",
        b"\xed\xa0\xbd\xed\xb8\x80",
        b"a\xed\xbf\xbf",
        b"\xed\xa0",
        b"\xed\xa0a",
        b"\xed\x9f\xbf",
    ]
    keys = [*surrogates, *mixed]
    answers = java.run("Codecs", [{"do": "hashOfBytes", "body": b64(key)} for key in keys])
    column = byte_column(pa.array(keys, pa.binary()))
    assert column is not None
    assert string_hashes(column).tolist() == [answer["hash"] for answer in answers]


def test_negative_32_bit_integers_hash_unlike_a_java_long(java: Java) -> None:
    small = [0, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, -(2**31) - 1, -(2**63), 1234567890123, -1234567890123]
    negative = [-1, -2, -1000, -(2**31)]
    answers = java.run("Codecs", [{"do": "hashOfLong", "key": key} for key in [*small, *negative]])
    # Java's Long of a negative number that fits an Integer has the hash of its complement.
    assert [answer["hash"] for answer in answers] == [java_hash(key) for key in small] + [
        java_hash(~key) for key in negative
    ]


def broker(name: str, addresses: dict[str, str]) -> dict[str, Any]:
    return {"brokerName": name, "cluster": "c", "brokerAddrs": addresses}


def queues(name: str, count: int, perm: int = 6) -> dict[str, Any]:
    return {"brokerName": name, "readQueueNums": count, "writeQueueNums": count, "perm": perm, "topicSysFlag": 0}


MAPPING = {"a": {"bname": "a", "topic": "T", "scope": "__global__", "epoch": 1, "totalQueues": 1, "currIdMap": {}}}
A, B = broker("a", {"0": "a:1"}), broker("b", {"0": "b:1"})


@pytest.mark.parametrize(
    "route",
    [
        {"queueDatas": [queues("b", 2), queues("a", 1)], "brokerDatas": [B, A]},
        {"queueDatas": [queues("a", 2), queues("b", 1, 4)], "brokerDatas": [A, B]},
        {"queueDatas": [queues("a", 1)], "brokerDatas": [A], "orderTopicConf": "b:2;a:1"},
        {"queueDatas": [queues("a", 1)], "brokerDatas": [A], "orderTopicConf": "a:2:9"},
        {"queueDatas": [queues("a", 1)], "brokerDatas": [A], "orderTopicConf": "a:2:;b:1:x:y;"},
        # The first of two entries counts, whether it has a master or not.
        {"queueDatas": [queues("a", 2)], "brokerDatas": [broker("a", {"1": "slave:1"}), A]},
        {"queueDatas": [queues("a", 2)], "brokerDatas": [A, broker("a", {"1": "slave:1"})]},
        # By UTF-16 units U+1F600 comes before U+FF01.
        {
            "queueDatas": [queues("\uff01", 1), queues("\U0001f600", 1)],
            "brokerDatas": [broker("\uff01", {"0": "x:1"}), broker("\U0001f600", {"0": "y:1"})],
        },
        # An empty order configuration takes a static topic for an ordinary one.
        {
            "queueDatas": [queues("a", 2)],
            "brokerDatas": [A],
            "orderTopicConf": "",
            "topicQueueMappingByBroker": MAPPING,
        },
        {"queueDatas": [queues("a", 2)], "brokerDatas": [A], "orderTopicConf": ""},
    ],
)
def test_queues_of_a_route_equal_those_of_java(java: Java, route: dict[str, Any]) -> None:
    [answer] = java.run("Codecs", [{"do": "publish", "route": json.dumps(route)}])
    info = publish_info_of("T", decode_topic_route(json.dumps(route).encode()))
    assert [[queue.broker_name, queue.queue_id] for queue in info.queues] == answer["queues"]


def test_static_topic_without_order_configuration_has_no_queues_in_java(java: Java) -> None:
    route = json.dumps({"queueDatas": [queues("a", 2)], "brokerDatas": [A], "topicQueueMappingByBroker": MAPPING})
    [answer] = java.run("Codecs", [{"do": "publish", "route": route}])
    assert all(name != "a" for name, _ in answer["queues"])
    with pytest.raises(RouteNotFoundException, match="static"):
        publish_info_of("T", decode_topic_route(route.encode()))


def test_property_strings_are_exchanged_with_java_in_both_directions(java: Java) -> None:
    maps = [{}, *property_maps(random.Random(6), 500)]
    ours = [encode_properties(values).decode() for values in maps]
    # Strings of mostly separators: who skips which entry.
    rng = random.Random(7)
    odd = ["".join(rng.choices("\x01\x02ab", k=rng.randint(0, 12))) for _ in range(1000)]
    requests: list[dict[str, Any]] = [{"do": "decodeProperties", "text": text} for text in ours + odd]
    requests += [{"do": "encodeProperties", "properties": {**values, "none": None}} for values in maps]
    answers = java.run("Codecs", requests)
    read = [answer["properties"] or {} for answer in answers[: len(ours) + len(odd)]]
    assert read[: len(maps)] == maps
    assert read[len(maps) :] == [decode_properties(text.encode()) for text in odd]
    written = [answer["text"] for answer in answers[len(ours) + len(odd) :]]
    assert [decode_properties(text.encode()) for text in written] == maps
    # The same entries, whatever the order; a trailing separator.
    assert [sorted(text.split("\x02")) for text in written] == [sorted(text.split("\x02")) for text in ours]


def bodies() -> list[bytes]:
    rng = random.Random(8)
    noise = rng.randbytes(1024 * 1024)
    words = b" ".join(rng.choices([b"queue", b"topic", b"broker", b"%d" % rng.getrandbits(40)], k=60_000))
    sizes = (1, 100, 4096, 64 * 1024, 64 * 1024 + 1, 256 * 1024 + 1, len(words))
    return [words[:size] for size in sizes] + [noise[:5000], noise[: 100 * 1024], noise + words * 4]


@pytest.mark.parametrize("kind", list(CompressionType), ids=lambda kind: kind.name)
def test_java_unpacks_our_bodies_and_we_unpack_java_s(java: Java, kind: CompressionType) -> None:
    plain = bodies()
    assert len(plain[-1]) > 2 * 1024 * 1024
    requests: list[dict[str, Any]] = [
        {"do": "decompress", "type": kind.name, "body": b64(compress(body, kind))} for body in plain
    ]
    requests += [{"do": "compress", "type": kind.name, "level": 5, "body": b64(body)} for body in plain]
    answers = [un64(answer["body"]) for answer in java.run("Codecs", requests)]
    assert answers[: len(plain)] == plain
    assert [decompress(body, kind.sys_flag) for body in answers[len(plain) :]] == plain


def messages(rng: random.Random, count: int) -> list[Message]:
    return [
        Message(
            "orders", rng.randbytes(rng.randint(1, 300)), rng.randint(-(2**31), 2**31 - 1), {"WAIT": "true", **more}
        )
        for more in property_maps(rng, count)
    ]


def facts(decoded: Sequence[Message]) -> list[tuple[bytes, int, dict[str, str]]]:
    return [(message.body, message.flag, dict(message.properties)) for message in decoded]


def test_batches_are_exchanged_with_java_in_both_directions(java: Java) -> None:
    members = messages(random.Random(9), 300)
    ids = UniqueIdGenerator(bytes([127, 0, 0, 1]))
    batch = MessageEncoder(ProducerOptions.of(max_message_size=LIMIT), ids.next_id).encode_batch(members)
    with_ids = [
        member.with_properties({"UNIQ_KEY": unique_id})
        for member, unique_id in zip(members, batch.msg_id.split(","), strict=True)
    ]
    lines = [line_of(member.topic, member.body, member.properties, member.flag) for member in with_ids]
    read, written = java.run(
        "Codecs",
        [{"do": "decodeBatch", "body": b64(bytes(batch.encoded.body[0]))}, {"do": "encodeBatch", "messages": lines}],
    )
    assert facts(with_ids) == [(un64(one["body"]), one["flag"], one["properties"]) for one in read["messages"]]
    assert written["refused"] is None
    body = un64(written["body"])
    assert len(body) == batch.encoded.nbytes == len(encode_batch(with_ids))
    assert facts(decode_batch(body, "orders")) == facts(with_ids)


def test_java_rejects_the_same_batches(java: Java) -> None:
    good = Message.of("orders", b"body")
    batches: list[list[Message]] = [
        [good, good],
        [good, Message.of("others", b"body")],
        [good, Message.of("orders", b"body", wait_store_msg_ok=False)],
        [Message("orders", b"body"), good],
        *([good, Message.of("orders", b"body", **delay)] for delay in DELAYS),
        [Message("orders", b"body", 0, {"DELAY": "0", "TIMER_DELAY_MS": "-1"}), good],
        [Message.of("%RETRY%group", b"body")],
        [Message.of("%DLQ%group", b"body")],
    ]
    requests = [
        {"do": "encodeBatch", "messages": [line_of(one.topic, one.body, one.properties) for one in batch]}
        for batch in batches
    ]
    refused = [answer["refused"] is not None for answer in java.run("Codecs", requests)]
    assert refused == [_refuses(batch) for batch in batches]
    assert refused == [False, True, True, False, True, True, True, True, False, True, False]


DELAYS: list[dict[str, Any]] = [{"delay_time_level": 1}, {"delay_ms": 1}, {"delay_sec": 1}, {"deliver_ms": 1}]


def _refuses(batch: Sequence[Message]) -> bool:
    try:
        MessageEncoder(ProducerOptions.of(max_message_size=LIMIT), lambda: "ID").encode_batch(batch)
    except MQClientException:
        return True
    return False


def test_namespaces_are_wrapped_and_unwrapped_like_java(java: Java) -> None:
    rng = random.Random(10)
    names = ["T", "%RETRY%G", "%DLQ%G", "A%T", "%RETRY%A%G", "B%T", "%DLQ%B%G", "%RETRY%%DLQ%G", "A", "A%", "%RETRY%"]
    names += ["TBW102", "rmq_sys_x", "RMQ_SYS_x", "CID_RMQ_SYS_x", "%RETRY%TBW102", *sorted(FORBIDDEN_TOPICS)]
    names += ["".join(rng.choices("AB%", k=rng.randint(1, 6))) for _ in range(200)]
    answers = java.run("Codecs", [{"do": "namespace", "namespace": "A", "resource": name} for name in names])
    assert [wrap("A", name) for name in names] == [answer["wrapped"] for answer in answers]
    assert [unwrap(name, "A") for name in names] == [answer["unwrapped"] for answer in answers]


def test_namespace_is_taken_from_addresses_like_java(java: Java) -> None:
    addresses = ["MQ_INST_1_a.b", "http://MQ_INST_1_a.b:80", "https://MQ_INST_1_a.b;c", "MQ_INST_1_a_b_c.d.e:8080"]
    addresses += ["MQ_INST_1.b", "MQ_INST_1_a:80", "x.MQ_INST_1_a.b", "127.0.0.1:9876", "MQ_INST_1_\u00e4.b"]
    addresses += ["http://a/MQ_INST_1_2.host:80"]
    answers = java.run("Codecs", [{"do": "namespaceOf", "address": address} for address in addresses])
    assert [namespace_of(address) for address in addresses] == [answer["namespace"] for answer in answers]


def test_topics_and_groups_are_rejected_like_java(java: Java) -> None:
    names = ["", " ", "\u3000", "\u00a0", "\u0085", "\t\x1c\x1f", "\u2007", "\u202f", "\u2028", "\U0001f600" * 64]
    names += ["a", "a b", "a.b", "a\n", "\u00e4", "%|_-9Zz", *("x" * length for length in (120, 121, 127, 128, 256))]
    names += ["TBW102", "RMQ_SYS_TRACE_TOPIC", "BenchmarkTest", *sorted(FORBIDDEN_TOPICS)]
    answers = java.run("Codecs", [{"do": "validate", "name": name} for name in names])
    assert [is_blank(name) for name in names] == [answer["blank"] for answer in answers]
    assert [_code(lambda: check_message(Message(name, b"x"), LIMIT)) for name in names] == [  # noqa: B023
        answer["topic"] for answer in answers
    ]
    assert [_code(lambda: check_group(name)) for name in names] == [answer["group"] for answer in answers]  # noqa: B023


def _code(check: object) -> int | None:
    assert callable(check)
    try:
        check()
    except MQClientException as exc:
        return exc.response_code
    return None


@pytest.mark.parametrize("address", [bytes([10, 0, 0, 7]), bytes(15) + b"\x01"], ids=["IPv4", "IPv6"])
def test_java_reads_address_process_and_time_from_our_ids(java: Java, address: bytes) -> None:
    now = time.time()
    ids = UniqueIdGenerator(address, wall_clock=lambda: now, getpid=lambda: 0x1_2345)
    [found] = java.run("Codecs", [{"do": "id", "id": ids.next_id()}])
    assert found["pid"] == 0x2345
    assert found["ip"] == ("10.0.0.7" if len(address) == 4 else "0000:0000:0000:0000:0000:0000:0000:0001")
    assert found["time"] == int(now * 1000)


def test_reserved_names_equal_those_of_java(java: Java) -> None:
    [answer] = java.run("Codecs", [{"do": "reserved"}])
    assert set(answer["names"]) == RESERVED_PROPERTIES
