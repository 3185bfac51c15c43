"""Messages without UNIQ_KEY (``uniqueKey=false``), read by RocketMQ's own clients and by our source."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pyarrow as pa
import pytest

from rocketmq_spark import Producer
from tests.support.cluster import SharedCluster
from tests.support.java import CLIENTS, WITHIN, Java, ReadWith, un64
from tests.support.reading import read_topic

pytestmark = pytest.mark.integration

ROWS = 40


@pytest.fixture
def written(cluster: SharedCluster, make_topic: Callable[..., str]) -> str:
    """A topic with the bodies 0 to 39, which were sent in batches without unique ids."""
    topic = make_topic("NORMAL", f"anonymous-{uuid.uuid4().hex[:8]}")
    rows = {"body": [str(row) for row in range(ROWS)], "keys": [f"k{row % 3}" for row in range(ROWS)]}
    with Producer("pg", name_server=cluster.name_server) as producer:
        summary = producer.send_arrow(pa.table(rows), topic, uniqueKey=False, batchBytes="1k")
    assert sum(broker["rows"] for broker in summary.to_dict().values()) == ROWS
    return topic


def test_the_message_id_is_that_of_the_place(java: Java, cluster: SharedCluster, written: str) -> None:
    lines = java.read_topics(cluster.name_server, [written], ROWS)
    assert sorted(int(line["body"]) for line in lines) == list(range(ROWS))
    assert all("UNIQ_KEY" not in line["properties"] for line in lines)
    by_java = {line["body"]: line["msgId"] for line in lines}
    assert [line["offsetMsgId"] for line in lines] == [line["msgId"] for line in lines]
    assert len(set(by_java.values())) == ROWS
    found = read_topic(cluster.name_server, written, ROWS)
    assert {message.body: message.offset_msg_id for message in found} == by_java


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_reads_each_message_with_a_distinct_id(
    cluster: SharedCluster, read_with: ReadWith, written: str, client: str
) -> None:
    found = read_with(client, cluster, [written], ROWS)
    assert sorted(int(one.seen.body) for one in found) == list(range(ROWS))
    assert len({one.id for one in found}) == ROWS


@pytest.mark.long
def test_a_refused_message_comes_again(java: Java, cluster: SharedCluster, written: str) -> None:
    request = {
        "nameServer": cluster.name_server,
        "topic": written,
        "group": f"retrier-{uuid.uuid4().hex[:8]}",
        "count": ROWS,
        "withinMs": int(WITHIN * 1000),
    }
    lines = java.run("Retrier", [request])
    deliveries = sorted((int(un64(line["body"])), line["reconsumeTimes"]) for line in lines)
    assert sorted(set(deliveries)) == [(row, times) for row in range(ROWS) for times in (0, 1)]
