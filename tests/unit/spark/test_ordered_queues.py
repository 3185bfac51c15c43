"""Which queues an ordered stream keeps for the time when brokers are down."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StringType, StructType

from rocketmq_spark.errors import RouteNotFoundException
from rocketmq_spark.model.route import QueueData
from rocketmq_spark.routing.client_instance import registry
from rocketmq_spark.spark.datasource import RocketMQDataSource
from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.testing.fake_name_server import FakeNameServer
from tests.support import fakes
from tests.support.scripted import route
from tests.support.scripted_broker import with_broker

KEYED = StructType().add("body", StringType()).add("shardingKey", StringType())


def bound_to(peer: FakeNameServer, checkpoint: Path) -> Mapping[str, int]:
    """Return the number of queues of each broker to which a new driver binds keys."""
    registry.close_all()
    options = {"nameServer": peer.address, "topic": "t", "ordered": "true", "checkpointLocation": str(checkpoint)}
    try:
        writer: Any = RocketMQDataSource(options).streamWriter(KEYED, overwrite=False)
        return Counter(queue.broker_name for queue in writer.lookup.queues)
    finally:
        registry.close_all()


def test_brokers_that_no_name_server_lists_any_more_are_forgotten(tmp_path: Path) -> None:
    with FakeCluster(["a", "b"], topics={"t": 2}) as cluster, fakes.name_server() as peer:
        true = route({})
        for name, broker in cluster.brokers.items():
            true = with_broker(true, QueueData(name, 2, 2, 6), broker.address)
        # Another number for a broker that exists, at an address that does not answer, and brokers that do not exist.
        lies = with_broker(true, QueueData("b", 600, 600, 6), "b:1")
        for number in range(20):
            lies = with_broker(lies, QueueData(f"x{number}", 30, 30, 6), f"x{number}:1")
        peer.routes["t"] = true
        assert bound_to(peer, tmp_path) == {"a": 2, "b": 2}
        peer.routes["t"] = lies
        assert sum(bound_to(peer, tmp_path).values()) == 2 + 600 + 600
        peer.routes["t"] = with_broker(route({}), QueueData("a", 2, 2, 6), cluster.brokers["a"].address)
        assert bound_to(peer, tmp_path) == {"a": 2, "b": 2}
        assert json.loads((tmp_path / "rocketmq-queues-t.json").read_text()) == {"a": 2, "b": 2}


def test_the_kept_queues_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "rocketmq-queues-t.json").write_text(json.dumps({"b": 60_000, "c": 60_000}))
    with (
        fakes.name_server({"t": route({"a": 2})}) as peer,
        pytest.raises(RouteNotFoundException, match="120002 queues on 3 brokers, at most 100000 are allowed"),
    ):
        bound_to(peer, tmp_path)
