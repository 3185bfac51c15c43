"""Messages sent over gRPC, read by RocketMQ's own clients. Tests of transactions are in tests/integration."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from rocketmq_spark import Message, Producer
from tests.support.cluster import SharedCluster
from tests.support.java import CLIENTS, ReadWith, Seen
from tests.support.reading import read_topic

pytestmark = pytest.mark.integration

NUMBERS = range(60)
LARGE = b" ".join(random.Random(5).choices([b"queue", b"topic", b"broker", b"a message of many words"], k=5_000))


def table() -> pa.Table:
    properties = [[("n", str(number)), ("ü", "ø")] for number in NUMBERS]
    return pa.table(
        {
            "body": [f"row {number} é" for number in NUMBERS],
            "tags": [f"t{number % 3}" if number % 4 else None for number in NUMBERS],
            "keys": [[f"k{number}", "of-all"] for number in NUMBERS],
            "properties": pa.array(properties, pa.map_(pa.string(), pa.string())),
        }
    )


def rows_of(topic: str) -> Iterator[Seen]:
    for row in table().to_pylist():
        keys, properties = tuple(sorted(row["keys"])), tuple(sorted(row["properties"]))
        yield Seen(topic, row["body"].encode(), keys, row["tags"], None, properties)


@pytest.mark.parametrize("client", CLIENTS)
def test_official_client_reads_messages_sent_over_grpc(
    cluster: SharedCluster, make_topic: Callable[..., str], topic: str, read_with: ReadWith, client: str
) -> None:
    kinds = {"normal": "NORMAL", "fifo": "FIFO", "delay": "DELAY", "zlib": "NORMAL"}
    topics = [make_topic(kind, f"{name}-{topic}") for name, kind in kinds.items()]
    normal, fifo, delay, zlib = topics
    began = int(time.time() * 1000)
    single = Message.of(normal, b"single", tags="t", keys=["a", "b"], properties={"own": "1"})
    ordered = [Message.of(fifo, b"%d" % number, sharding_key=f"g{number % 2}") for number in range(10)]
    delayed = [Message.of(delay, b"delayed", delay_ms=1000, keys="d"), Message.of(delay, b"due", deliver_ms=began)]
    with Producer("pg", endpoints=cluster.endpoints) as producer:
        producer.send_arrow(table(), normal, batchBytes="4k")
        batch = producer.send_batch([Message.of(normal, b"one"), Message.of(normal, b"two", keys="k")])
        alone = {message.body: producer.send(message).msg_id for message in (single, *ordered, *delayed)}
    with Producer("pg", endpoints=cluster.endpoints, compress_type="ZLIB") as producer:
        producer.send_arrow(pa.table({"body": [LARGE, b"short"]}), zlib)
        producer.send(Message.of(zlib, LARGE[1:]))
    assert sum(len(message.body) for message in read_topic(cluster.name_server, zlib, 3)) < len(LARGE)
    expected = [
        *rows_of(normal),
        *(Seen(normal, b"one"), Seen(normal, b"two", ("k",))),
        Seen(normal, b"single", ("a", "b"), "t", None, (("own", "1"),)),
        *(Seen(fifo, message.body, group=message.sharding_key) for message in ordered),
        *(Seen(delay, b"delayed", ("d",)), Seen(delay, b"due")),
        *(Seen(zlib, body) for body in (LARGE, b"short", LARGE[1:])),
    ]
    found = read_with(client, cluster, topics, len(expected))
    assert Counter(one.seen for one in found) == Counter(expected)
    ids = {one.seen.body: one.id for one in found}
    assert {body: ids[body] for body in alone} == alone
    assert f"{ids[b'one']},{ids[b'two']}" == batch.msg_id
    assert len(set(ids.values())) == len(found)
    assert all(began <= one.born <= time.time() * 1000 for one in found)
