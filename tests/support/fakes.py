"""Parts of a `FakeCluster`: a name server that has routes but no brokers, or one broker."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rocketmq_spark.model.route import TopicRouteData
from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.testing.fake_broker import FakeBroker
from rocketmq_spark.testing.fake_name_server import FakeNameServer


@contextmanager
def name_server(
    routes: Mapping[str, TopicRouteData] | None = None, *, tls: ssl.SSLContext | None = None
) -> Iterator[FakeNameServer]:
    """Run a name server with these routes."""
    with FakeCluster(0, tls=tls) as cluster:
        cluster.name_servers[0].routes.update(routes or {})
        yield cluster.name_servers[0]


@contextmanager
def broker(
    name: str = "broker-a", topics: Mapping[str, int] | None = None, *, tls: ssl.SSLContext | None = None
) -> Iterator[FakeBroker]:
    """Run a broker with these topics, which also creates topics."""
    with FakeCluster([name], topics=topics, tls=tls) as cluster:
        yield cluster.brokers[name]
