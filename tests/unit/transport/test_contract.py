"""The contract of every transport (rocketmq_spark/transport/base.py), with test servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rocketmq_spark.errors import (
    BrokerBusyException,
    MQBrokerException,
    RemotingSendRequestException,
    RemotingTimeoutException,
)
from rocketmq_spark.model.message import SendStatus
from rocketmq_spark.testing import Reply
from tests.support.contract import SOON, Outcomes, Promises, Seam, batch
from tests.support.processes import PATIENCE
from tests.support.transports import TRANSPORTS, Played, opened_seam


@pytest.fixture(params=TRANSPORTS)
def seam(request: pytest.FixtureRequest) -> Iterator[Seam]:
    with opened_seam(request.param, request) as transport:
        yield transport


@pytest.fixture
def played(seam: Played) -> Played:
    return seam


class TestPromises(Promises):
    """The contract of every transport."""


@pytest.mark.parametrize("status", SendStatus)
def test_every_status_of_a_stored_batch_is_returned(played: Played, status: SendStatus) -> None:
    played.play(Reply(status))
    [outcome] = played.send(batch("orders", b"one"))
    assert (outcome.status, outcome.error) == (status, None)
    assert len(played.stored(1)) == 1


@pytest.mark.parametrize("kind", Played.refusals)
def test_rejection_is_the_error_of_its_code(played: Played, kind: type[MQBrokerException]) -> None:
    reply = played.refusals[kind]
    played.play(reply)
    [outcome] = played.send(batch("orders", b"one"))
    assert outcome.status is None
    assert type(outcome.error) is kind
    assert isinstance(reply.error, MQBrokerException)
    assert (outcome.error.response_code, outcome.error.remark) == (reply.error.response_code, reply.error.remark)
    assert played.stored(0) == []


@pytest.mark.parametrize("stored", [False, True])
def test_lost_answer_is_a_timeout_after_which_rows_may_be_stored(played: Played, stored: bool) -> None:
    # The connection is open, so only the answer is missing.
    played.send(batch("orders", b"before"))
    played.play(Reply(silent=True, stored=stored))
    [outcome] = played.send(batch("orders", b"one"), timeout=SOON)
    assert outcome.status is None
    assert isinstance(outcome.error, RemotingTimeoutException)
    assert outcome.error.maybe_stored is True
    assert outcome.latency_ms >= SOON * 1000.0
    assert len(played.stored(1)) == 1 + stored


def test_callback_can_send_again(played: Played) -> None:
    played.play(played.refusals[BrokerBusyException])
    outcomes = Outcomes()

    def again(outcome: Any) -> None:
        assert outcome.error.flow_control
        played.transport.send(played.request(batch("orders", b"again")), PATIENCE, outcomes)

    played.transport.send(played.request(batch("orders", b"once")), PATIENCE, again)
    played.pass_time(0.0)
    played.pass_time(0.0)
    outcomes.wait(1)
    assert [message.body for message in played.stored(1)] == [b"again"]


def test_close_fails_unanswered_requests_whose_rows_may_be_stored(played: Played) -> None:
    played.send(batch("orders", b"before"))
    outcomes = Outcomes()
    for _ in range(5):
        played.play(Reply(silent=True))
        played.transport.send(played.request(batch("orders", b"one")), PATIENCE, outcomes)
    # The answer to a later call shows that these five were written.
    played.transport.probe(played.queue, played.address, PATIENCE)
    played.transport.close()
    assert [type(outcome.error) for outcome in outcomes] == [RemotingSendRequestException] * 5
    assert all(outcome.error.maybe_stored for outcome in outcomes)
