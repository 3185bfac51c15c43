"""A transport without a thread: the polling thread transfers its bytes and runs its callbacks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from rocketmq_spark.errors import (
    RemotingConnectException,
    RemotingException,
    RemotingTimeoutException,
    RocketMQError,
)
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import PullOutcome, PullRequest, PullStatus, PullTarget
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.peer import Peer, Session, refused_address
from tests.support.processes import PATIENCE

QUEUE = MessageQueue("orders", "a", 0)
TARGET = PullTarget(QUEUE, "group", 32, "*", "TAG")


@pytest.fixture
def polled() -> Iterator[RemotingTransport]:
    with RemotingTransport([], polled=True) as transport:
        yield transport


def answer_one(session: Session) -> None:
    request = session.read()
    offset = int(request.ext_fields.get("queueOffset", "0"))
    fields = {"nextBeginOffset": str(offset + 1), "minOffset": "0", "maxOffset": "100", "offset": "7"}
    session.answer(request, 0, fields, b"%d" % offset)


def answering(session: Session) -> None:
    while True:
        answer_one(session)


def poll_until(transport: RemotingTransport, outcomes: list[PullOutcome], count: int) -> None:
    gives_up = time.monotonic() + PATIENCE
    while len(outcomes) < count:
        assert time.monotonic() < gives_up
        transport.poll(1.0)


def test_many_pulls_are_answered_in_the_thread_that_polls(polled: RemotingTransport) -> None:
    outcomes: list[PullOutcome] = []
    threads: set[threading.Thread] = set()

    def on_pulled(outcome: PullOutcome) -> None:
        threads.add(threading.current_thread())
        outcomes.append(outcome)

    with Peer(answering) as peer:
        before = threading.active_count()
        for offset in range(50):
            polled.pull(PullRequest(TARGET, peer.address, offset), PATIENCE, on_pulled)
        assert outcomes == []
        poll_until(polled, outcomes, 50)
        # The only new thread is the peer's thread for the connection.
        assert threading.active_count() <= before + 1
    assert threads == {threading.current_thread()}
    assert [bytes(outcome.body) for outcome in outcomes] == [b"%d" % offset for offset in range(50)]


def test_blocking_call_also_polls(polled: RemotingTransport) -> None:
    outcomes: list[PullOutcome] = []
    with Peer(answering) as peer:
        polled.pull(PullRequest(TARGET, peer.address, 3), PATIENCE, outcomes.append)
        assert polled.max_offset(QUEUE, peer.address, PATIENCE) == 7
        poll_until(polled, outcomes, 1)
    assert outcomes[0].status is PullStatus.FOUND


def test_a_call_that_waits_is_refused_in_a_callback(polled: RemotingTransport) -> None:
    errors: list[RocketMQError] = []

    def on_pulled(_outcome: PullOutcome) -> None:
        with pytest.raises(RocketMQError, match="a blocking call in a callback") as raised:
            polled.max_offset(QUEUE, peer.address, PATIENCE)
        errors.append(raised.value)

    with Peer(answering) as peer:
        polled.pull(PullRequest(TARGET, peer.address, 0), PATIENCE, on_pulled)
        while not errors:
            polled.poll(1.0)


def test_answer_received_between_polls_counts_before_its_timeout() -> None:
    held_up, answered = 0.0, threading.Event()
    outcomes: list[PullOutcome] = []

    def answer_two(session: Session) -> None:
        answer_one(session)
        answer_one(session)
        answered.set()
        session.wait_for_hangup()

    with (
        Peer(answer_two) as peer,
        RemotingTransport([], polled=True, clock=lambda: time.monotonic() + held_up) as transport,
    ):
        transport.max_offset(QUEUE, peer.address, PATIENCE)
        transport.pull(PullRequest(TARGET, peer.address, 0), PATIENCE, outcomes.append)
        transport.poll(0.0)
        assert answered.wait(PATIENCE)
        # The answer is in the socket's buffer, and the pull's timeout passes before the next poll.
        held_up = 10 * PATIENCE
        poll_until(transport, outcomes, 1)
    assert outcomes[0].status is PullStatus.FOUND


def test_answer_that_arrives_while_a_callback_delays_the_thread_counts() -> None:
    delay, written, answered = 0.0, threading.Event(), threading.Event()
    outcomes: list[PullOutcome] = []

    def answer_late(session: Session) -> None:
        answer_one(session)
        request = session.read()
        written.wait(PATIENCE)
        session.answer(request, 0, {"nextBeginOffset": "1", "minOffset": "0", "maxOffset": "9"})
        answered.set()
        session.wait_for_hangup()

    def delayed(outcome: PullOutcome) -> None:
        nonlocal delay
        written.set()
        assert answered.wait(PATIENCE)
        # As if this thread had waited for a processor.
        delay = 10 * PATIENCE
        outcomes.append(outcome)

    with (
        Peer(answer_late) as late,
        Peer(answering) as peer,
        RemotingTransport([], polled=True, clock=lambda: time.monotonic() + delay) as transport,
    ):
        transport.max_offset(QUEUE, late.address, PATIENCE)
        transport.pull(PullRequest(TARGET, late.address, 0), PATIENCE, outcomes.append)
        transport.pull(PullRequest(TARGET, peer.address, 0), PATIENCE, delayed)
        poll_until(transport, outcomes, 2)
    assert [outcome.status for outcome in outcomes] == [PullStatus.FOUND, PullStatus.FOUND]


def test_answers_that_arrive_between_two_polls_do_not_time_out() -> None:
    """More bytes than one poll reads; a poll reads 2 MiB of a socket."""
    held_up, answered = 0.0, threading.Semaphore(0)
    outcomes: list[PullOutcome] = []
    body = bytes(1024 * 1024)

    def large(session: Session) -> None:
        while True:
            request = session.read()
            answered.release()
            session.answer(request, 0, {"nextBeginOffset": "1", "minOffset": "0", "maxOffset": "9"}, body)

    with (
        Peer(large) as peer,
        RemotingTransport([], polled=True, clock=lambda: time.monotonic() + held_up) as transport,
    ):
        for offset in range(16):
            transport.pull(PullRequest(TARGET, peer.address, offset), PATIENCE, outcomes.append)
        while not answered.acquire(blocking=False):
            transport.poll(0.01)
        held_up = 10 * PATIENCE
        poll_until(transport, outcomes, 16)
    assert {outcome.status for outcome in outcomes} == {PullStatus.FOUND}


def test_failures_are_reported_while_polling(polled: RemotingTransport) -> None:
    outcomes: list[PullOutcome] = []
    with Peer(Session.wait_for_hangup) as silent:
        polled.pull(PullRequest(TARGET, silent.address, 0), 0.1, outcomes.append)
        poll_until(polled, outcomes, 1)
    polled.pull(PullRequest(TARGET, refused_address(), 0), PATIENCE, outcomes.append)
    poll_until(polled, outcomes, 2)
    assert isinstance(outcomes[0].error, RemotingTimeoutException)
    assert isinstance(outcomes[1].error, RemotingConnectException)
    with pytest.raises(RemotingConnectException):
        polled.max_offset(QUEUE, refused_address(), PATIENCE)


def test_poll_without_pending_work_returns_and_does_not_raise(polled: RemotingTransport) -> None:
    polled.poll(0.0)
    polled.poll(0.01)


def test_close_fails_requests_in_flight(polled: RemotingTransport) -> None:
    outcomes: list[PullOutcome] = []
    with Peer(Session.wait_for_hangup) as silent:
        polled.pull(PullRequest(TARGET, silent.address, 0), PATIENCE, outcomes.append)
        polled.poll(0.05)
        polled.close()
        polled.close()
    assert len(outcomes) == 1
    assert isinstance(outcomes[0].error, RemotingException)
    with pytest.raises(RocketMQError, match="is closed"):
        polled.poll(0.0)


def test_polling_a_transport_with_a_thread_is_rejected() -> None:
    with RemotingTransport([]) as transport, pytest.raises(RocketMQError, match="has its own thread"):
        transport.poll(0.0)
