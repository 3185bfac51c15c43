"""Fixtures of the transport's tests: requests, a place for outcomes, transports that are closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocketmq_spark.model.message import Buffer, EncodedBatch, Message, MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.protocol.remoting.records import encode_batch
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.contract import Outcomes
from tests.support.processes import PATIENCE
from tests.support.transports import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def outcomes() -> Outcomes:
    return Outcomes()


@pytest.fixture
def collected() -> Callable[[], Outcomes]:
    return Outcomes


@pytest.fixture
def request_to() -> Callable[..., SendRequest]:
    def make(address: str, body: Buffer | tuple[Buffer, ...] = b"hello", **changes: Any) -> SendRequest:
        pieces = body if isinstance(body, tuple) else (body,)
        queue = changes.pop("queue", MessageQueue("orders", "broker-a", 0))
        batch = EncodedBatch(
            topic=queue.topic,
            body=pieces,
            rows=changes.pop("rows", 1),
            nbytes=sum(map(len, pieces)),
            batch=changes.pop("batch", False),
            properties=changes.pop("properties", ""),
            flag=changes.pop("flag", 0),
            sys_flag=changes.pop("sys_flag", 0),
        )
        return SendRequest(batch, queue, address, "pg", "TBW102", 4, 1_700_000_000_000, **changes)

    return make


@pytest.fixture
def batch_to(request_to: Callable[..., SendRequest]) -> Callable[..., SendRequest]:
    def make(address: str, *bodies: bytes, **changes: Any) -> SendRequest:
        body = encode_batch([Message("orders", item) for item in bodies])
        return request_to(address, body, rows=len(bodies), batch=True, **changes)

    return make


@pytest.fixture
def make_transport() -> Iterator[Callable[..., RemotingTransport]]:
    made: list[RemotingTransport] = []

    def make(*name_servers: str, **settings: Any) -> RemotingTransport:
        made.append(RemotingTransport(name_servers, **settings))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def transport(make_transport: Callable[..., RemotingTransport]) -> RemotingTransport:
    return make_transport()


@pytest.fixture
def send_and_wait(transport: RemotingTransport) -> Callable[..., SendOutcome]:
    def send(request: SendRequest, timeout: float = PATIENCE) -> SendOutcome:
        outcomes = Outcomes()
        transport.send(request, timeout, outcomes)
        outcome = outcomes.wait(1)[0]
        assert isinstance(outcome, SendOutcome)
        return outcome

    return send
