"""Compaction topics of real brokers, which keep the newest message of each key and drop messages without one."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark.admin import Admin
from rocketmq_spark.errors import (
    DeliveryError,
    InvalidRowError,
    MQBrokerException,
    MQClientException,
    OptionError,
    RocketMQError,
)
from rocketmq_spark.model.message import Message
from rocketmq_spark.model.route import masters_of
from rocketmq_spark.producer.producer import Producer
from tests.support.cluster import USER, SharedCluster
from tests.support.processes import PATIENCE, wait_for
from tests.support.reading import read_topic

pytestmark = pytest.mark.integration

KEYLESS = pa.table({"body": [f"{row}" for row in range(6)], "keys": ["a", None, "", " \t", "\u3000", "b"]})


def compaction_topic(cluster: SharedCluster, topic: str, attributes: str = "") -> str:
    """Create a compaction topic of one queue on each broker, and return its name once all routes have it."""
    with Admin(cluster.name_server, **cluster.admin_settings, timeout=PATIENCE) as admin:
        masters = masters_of(admin.transport.cluster_info(PATIENCE).brokers)
        for address in masters.values():
            admin.transport.create_topic(
                address, topic, 1, 6, PATIENCE, attributes=f"+cleanup.policy=COMPACTION{attributes}"
            )

        def in_route() -> bool:
            try:
                return len(admin.transport.query_route(topic, PATIENCE).queue_datas) == len(masters)
            except MQBrokerException:
                return False

        wait_for(in_route)
    return topic


def bodies(cluster: SharedCluster, topic: str, expected: int) -> list[bytes]:
    messages = read_topic(cluster.name_server, topic, expected, within=PATIENCE, **cluster.transport_settings)
    return sorted(message.body for message in messages)


@pytest.fixture
def compacted(cluster: SharedCluster, topic: str) -> str:
    return compaction_topic(cluster, topic)


def test_rows_without_a_key_are_invalid_and_the_others_are_stored(cluster: SharedCluster, compacted: str) -> None:
    with Producer("pg-compaction", name_server=cluster.name_server) as producer:
        with pytest.raises(InvalidRowError, match=r"row 1 .*keys is null or blank; a compaction topic"):
            producer.send_arrow(KEYLESS, compacted)
        with pytest.raises(InvalidRowError, match="keys is null or blank"):
            producer.send_arrow(KEYLESS.append_column("topic", pa.array([compacted] * 6)))
        producer.send_arrow(KEYLESS, compacted, onError="skip")
        assert bodies(cluster, compacted, 2) == [b"0", b"5"]
        letters = f"{compacted}-dead"
        producer.send_arrow(KEYLESS, compacted, onError="deadLetter", deadLetterTopic=letters)
        assert bodies(cluster, letters, 4) == [b"1", b"2", b"3", b"4"]
        with pytest.raises(MQClientException, match="message 1 has no keys, and brokers of a compaction topic"):
            producer.send_batch([Message.of(compacted, b"x", keys="x"), Message.of(compacted, b"y")])
        producer.send_batch([Message.of(compacted, b"x", keys="x"), Message.of(compacted, b"y", keys="y")])
        assert bodies(cluster, compacted, 6) == [b"0", b"0", b"5", b"5", b"x", b"y"]


def test_inner_batches_to_a_compaction_topic_are_refused(cluster: SharedCluster, topic: str) -> None:
    compaction_topic(cluster, topic, ",+queue.type=BatchCQ")
    rows = pa.table({"body": ["x"], "keys": ["k"]})
    with Producer("pg-compaction", name_server=cluster.name_server) as producer:
        with pytest.raises(OptionError, match=r"batchType=inner: topic .* is a compaction topic"):
            producer.send_arrow(rows, topic, batchType="inner")
        producer.send_arrow(rows, topic)
    assert bodies(cluster, topic, 1) == [b"x"]


@pytest.mark.parametrize("over_grpc", [False, True])
def test_write_without_keys_fails_where_the_configuration_is_unknown(
    cluster: SharedCluster, secured: SharedCluster, topic: str, *, over_grpc: bool
) -> None:
    # A user with the right Pub alone may not ask for the configuration, and a proxy does not support the request.
    name = f"allowed-{topic}"
    servers: dict[str, Any] = {"endpoints": cluster.endpoints}
    if not over_grpc:
        servers = {
            **secured.admin_settings,
            "name_server": secured.name_server,
            "access_key": USER.access_key,
            "secret_key": USER.secret_key,
            "security_token": USER.security_token,
        }
    compaction_topic(cluster if over_grpc else secured, name)
    with Producer("pg-compaction", **servers) as producer:
        producer.send_arrow(pa.table({"body": ["x", "y"], "keys": ["x", "y"]}), name)
        with pytest.raises(RocketMQError, match=r"a compaction topic, .*every row needs a key") as failed:
            producer.send_arrow(pa.table({"body": ["1", "2", "3"], "keys": ["a", None, None]}), name)
        assert isinstance(failed.value, DeliveryError | MQBrokerException)
