"""Fixtures of the transport's tests: requests, a place for outcomes, transports that are closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocketmq_spark.model.message import SendOutcome, SendRequest
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.contract import Outcomes
from tests.support.processes import PATIENCE
from tests.support.transports import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def collected() -> Callable[[], Outcomes]:
    return Outcomes


@pytest.fixture
def make_transport() -> Iterator[Callable[..., RemotingTransport]]:
    transports: list[RemotingTransport] = []

    def make(*name_servers: str, **settings: Any) -> RemotingTransport:
        transports.append(RemotingTransport(name_servers, **settings))
        return transports[-1]

    yield make
    for transport in transports:
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
