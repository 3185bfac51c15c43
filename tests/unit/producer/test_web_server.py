"""The web server of docs/producer.md tells an invalid message from an outage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import httpx
import pytest

from rocketmq_spark.errors import (
    BatchRefusedException,
    BrokerBusyException,
    InvalidRowError,
    MessageRefusedException,
    MQBrokerException,
    MQClientException,
    RemotingTimeoutException,
    ReservedPropertyError,
    RocketMQError,
    RouteNotFoundException,
)
from rocketmq_spark.testing import FakeCluster, Reply
from tests.support.markdown import ROOT, blocks

Post: TypeAlias = Callable[[str, bytes], httpx.Response]


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    with FakeCluster(topics={"orders": 2}) as cluster:
        yield cluster


@pytest.fixture
def post(fake: FakeCluster) -> Post:
    """Start the web server, post an order to it, and end it."""
    page = blocks(ROOT / "docs" / "producer.md")
    (block,) = [block for block in page if block.language == "python" and "FastAPI" in block.text]
    names: dict[str, Any] = {}
    exec(block.text.replace("127.0.0.1:9876", fake.name_server), names)
    app = names["app"]

    async def once(path: str, content: bytes) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as one:
            return await one.post(path, content=content)

    return lambda path, content: asyncio.run(once(path, content))


def test_order_is_stored_and_answered_with_its_id(post: Post, fake: FakeCluster) -> None:
    answer = post("/orders/o-1", b"espresso")
    assert answer.status_code == 200
    [message] = fake.messages("orders")
    assert (message.body, message.keys) == (b"espresso", "o-1")
    assert answer.json() == {"id": message.unique_id, "status": "SEND_OK"}


@pytest.mark.parametrize(
    ("path", "content", "reason"),
    [
        ("/orders/o-1", b"", "its body is empty"),
        ("/orders/o-1", b"x" * (4 * 1024 * 1024 + 1), "max_message_size allows"),
        ("/orders/two%20words", b"x", "without a space"),
        ("/orders/a%01b", b"x", "0x01"),
    ],
)
def test_invalid_message_is_the_callers_fault(
    post: Post, fake: FakeCluster, path: str, content: bytes, reason: str
) -> None:
    answer = post(path, content)
    assert answer.status_code == 400
    assert reason in answer.json()["detail"]
    assert list(fake.messages("orders")) == []


def test_message_that_the_broker_rejects_is_the_callers_fault(post: Post, fake: FakeCluster) -> None:
    fake.brokers["broker-0"].always[None] = Reply.code(13, "message is illegal")
    assert post("/orders/o-1", b"x").status_code == 400


def test_outage_is_the_services_fault(post: Post, fake: FakeCluster) -> None:
    fake.kill("broker-0")
    assert post("/orders/o-1", b"x").status_code == 503


@pytest.mark.parametrize(
    ("error", "invalid"),
    [
        (MQClientException("", 13), True),
        (MQClientException("", 10001), False),
        (MQBrokerException("", 13, "", "a:1"), True),
        (MQBrokerException("", 16, "", "a:1"), False),
        (MessageRefusedException("", 40004, "", "a:1"), True),
        (BatchRefusedException(""), True),
        (InvalidRowError(""), True),
        (ReservedPropertyError(""), True),
        (BrokerBusyException("", 2, "", "a:1"), False),
        (RemotingTimeoutException(""), False),
        (RouteNotFoundException(""), False),
        (RocketMQError(""), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_say_whether_the_message_is_invalid(error: RocketMQError, invalid: bool) -> None:
    assert error.invalid_message is invalid
