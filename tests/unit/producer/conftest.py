"""Producers against a scripted cluster of two brokers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.testing.scripted import ScriptedTransport, route

_numbers = itertools.count()


@pytest.fixture
def transport() -> Iterator[ScriptedTransport]:
    with ScriptedTransport({"T": route({"a": 2, "b": 2})}, threaded=True) as scripted:
        yield scripted


@pytest.fixture
def make_producer(transport: ScriptedTransport) -> Iterator[Callable[..., Producer]]:
    """Make a producer, not started, that is shut down at the end; keyword arguments are its properties."""
    made: list[Producer] = []

    def make(group: str = "pg", **properties: Any) -> Producer:
        settings = {"transport": transport, "name_server": "ns:9876", "instance_name": f"test-{next(_numbers)}"}
        made.append(Producer(group, **{**settings, **properties}))
        return made[-1]

    yield make
    for producer in made:
        producer.shutdown()


@pytest.fixture
def producer(make_producer: Callable[..., Producer]) -> Producer:
    started = make_producer()
    started.start()
    return started
