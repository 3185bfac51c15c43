"""Producers against a scripted cluster of two brokers."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

from rocketmq_spark import aio
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.send_result import SendResult
from rocketmq_spark.producer.producer import Producer
from tests.support.scripted import ScriptedTransport, route

T = TypeVar("T")
_numbers = itertools.count()


class AsyncioProducer:
    """An asyncio producer in a separate event loop, with the calls of the producer for threads."""

    def __init__(self, group: str, **properties: Any) -> None:
        self._producer = aio.Producer(group, **properties)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def start(self) -> None:
        self._run(self._producer.start()).result()

    def send_async(self, message: Message, queue: MessageQueue | None = None, **options: Any) -> Future[SendResult]:
        async def send() -> SendResult:
            return await self._producer.send(message, queue, **options)

        return self._run(send())

    def send_batch_async(self, messages: list[Message], **options: Any) -> Future[SendResult]:
        async def send() -> SendResult:
            return await self._producer.send_batch(messages, **options)

        return self._run(send())

    def shutdown(self) -> None:
        self._run(self._producer.shutdown()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


@pytest.fixture
def transport() -> Iterator[ScriptedTransport]:
    with ScriptedTransport({"T": route({"a": 2, "b": 2})}, threaded=True) as scripted:
        yield scripted


@pytest.fixture
def make_producer(transport: ScriptedTransport) -> Iterator[Callable[..., Producer]]:
    """Make a producer, not started, that is shut down at the end; keyword arguments are its properties."""
    producers: list[Producer] = []

    def make(group: str = "pg", **properties: Any) -> Producer:
        settings = {"transport": transport, "name_server": "ns:9876", "instance_name": f"test-{next(_numbers)}"}
        producers.append(Producer(group, **{**settings, **properties}))
        return producers[-1]

    yield make
    for producer in producers:
        producer.shutdown()


@pytest.fixture
def producer(make_producer: Callable[..., Producer]) -> Producer:
    started = make_producer()
    started.start()
    return started


@pytest.fixture(params=[Producer, AsyncioProducer])
def start_any(
    request: pytest.FixtureRequest, transport: ScriptedTransport
) -> Iterator[Callable[..., Producer | AsyncioProducer]]:
    """Start a producer of either kind that is shut down at the end; keyword arguments are its properties."""
    producers: list[Producer | AsyncioProducer] = []

    def start(**properties: Any) -> Producer | AsyncioProducer:
        settings = {"transport": transport, "name_server": "ns:9876", "instance_name": f"test-{next(_numbers)}"}
        producers.append(request.param("pg", **{**settings, **properties}))
        producers[-1].start()
        return producers[-1]

    yield start
    for producer in producers:
        producer.shutdown()
