"""The life cycle of a transport: its thread, its process, its callbacks, its resources."""

from __future__ import annotations

import errno
import logging
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.errors import (
    RemotingConnectException,
    RemotingSendRequestException,
    RemotingTimeoutException,
    RocketMQError,
)
from rocketmq_spark.model.message import SendOutcome, SendRequest, SendStatus
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from rocketmq_spark.transport.runtime import Runtime
from tests.support.peer import Peer, Session
from tests.support.processes import PATIENCE

RequestTo = Callable[..., SendRequest]


def transport_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rocketmq-spark")]


def test_thread_runs_only_between_first_request_and_close(request_to: RequestTo, outcomes: Any) -> None:
    before = len(transport_threads())
    transport = RemotingTransport(["127.0.0.1:9876"])
    assert len(transport_threads()) == before
    assert "not started" in repr(transport)
    with Peer(Session.serve) as peer:
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        outcomes.wait(1)
        assert len(transport_threads()) == before + 1
        transport.close()
    assert len(transport_threads()) == before
    assert "closed" in repr(transport)


def test_repr_shows_servers_connections_and_counts(
    make_transport: Callable[..., RemotingTransport], request_to: RequestTo, outcomes: Any
) -> None:
    transport = make_transport("ns1:9876", "ns2:9876")
    with Peer(Session.wait_for_hangup) as peer:
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        transport.client.invoke_oneway(peer.address, RequestCode.HEART_BEAT, {}, b"", PATIENCE)
        assert repr(transport) == (
            "<RemotingTransport name_servers=ns1:9876;ns2:9876 "
            f"<IoLoop running, [<Connection {peer.address} OPEN, 1 in flight, 0 unsent>]>>"
        )


def test_close_fails_requests_in_flight_and_can_be_repeated(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any
) -> None:
    with Peer(Session.wait_for_hangup) as peer:
        for _ in range(3):
            transport.send(request_to(peer.address), PATIENCE, outcomes)
        transport.client.invoke_oneway(peer.address, RequestCode.HEART_BEAT, {}, b"", PATIENCE)
        transport.close()
        transport.close()
    assert [type(outcome.error) for outcome in outcomes] == [RemotingSendRequestException] * 3
    assert "the transport was closed" in str(outcomes[0].error)


def test_closed_transport_rejects_requests(transport: RemotingTransport, request_to: RequestTo, outcomes: Any) -> None:
    transport.close()
    with pytest.raises(RocketMQError, match="closed: make a new one"):
        transport.send(request_to("127.0.0.1:1"), PATIENCE, outcomes)
    with pytest.raises(RocketMQError, match="closed: make a new one"):
        transport.heart_beat("127.0.0.1:1", "client", ["pg"], PATIENCE)
    assert outcomes == []


def test_outcomes_come_on_the_transports_own_thread(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any
) -> None:
    with Peer(Session.serve) as peer:
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        transport.send(request_to("127.0.0.1:1"), PATIENCE, outcomes)
        outcomes.wait(2)
    assert {thread.name for thread in outcomes.threads} == {"rocketmq-spark-transport"}


def test_failing_callback_is_logged_and_other_sends_succeed(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def raising(_outcome: SendOutcome) -> None:
        raise ZeroDivisionError("in the callback")

    with Peer(Session.serve) as peer, caplog.at_level(logging.ERROR, "rocketmq_spark.transport"):
        transport.send(request_to(peer.address), PATIENCE, raising)
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        outcomes.wait(1)
    assert outcomes[0].status is SendStatus.SEND_OK
    [record] = caplog.records
    assert "the callback of SEND_MESSAGE_V2" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_callback_can_send_again(transport: RemotingTransport, request_to: RequestTo, outcomes: Any) -> None:
    def hang_up(session: Session) -> None:
        session.read()

    with Peer(hang_up, Session.serve) as peer:

        def again(outcome: SendOutcome) -> None:
            assert outcome.error is not None
            transport.send(request_to(peer.address), PATIENCE, outcomes)

        transport.send(request_to(peer.address), PATIENCE, again)
        outcomes.wait(1)
    assert outcomes[0].status is SendStatus.SEND_OK


def test_callback_can_close_but_cannot_make_a_blocking_call(
    transport: RemotingTransport, request_to: RequestTo, collected: Any
) -> None:
    errors = collected()
    with Peer(Session.serve) as peer:

        def blocking(_outcome: SendOutcome) -> None:
            try:
                transport.heart_beat(peer.address, "client", ["pg"], PATIENCE)
            except RocketMQError as exc:
                errors(exc)
            transport.close()

        transport.send(request_to(peer.address), PATIENCE, blocking)
        errors.wait(1)
    assert "would wait for its own thread" in str(errors[0])
    with pytest.raises(RocketMQError, match="closed"):
        transport.heart_beat("127.0.0.1:1", "client", ["pg"], PATIENCE)


def test_a_transport_cant_be_pickled(transport: RemotingTransport) -> None:
    with pytest.raises(TypeError, match="pickle its options"):
        pickle.dumps(transport)


def test_body_is_not_referenced_after_its_outcome(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any
) -> None:
    answered, lost = bytes(100_001), bytes(100_002)
    before = sys.getrefcount(answered), sys.getrefcount(lost)

    def one_of_two(session: Session) -> None:
        session.answer_send(session.read())
        session.read()

    with Peer(one_of_two) as peer:
        transport.send(request_to(peer.address, answered), PATIENCE, outcomes)
        outcomes.wait(1)
        transport.send(request_to(peer.address, lost), PATIENCE, outcomes)
        outcomes.wait(2)
        # A turn of the loop later its local variables are gone too; the outcomes, and the error in one, stay.
        with pytest.raises(RemotingConnectException) as raised:
            transport.client.invoke("127.0.0.1:1", RequestCode.HEART_BEAT, {}, lost, PATIENCE)
        del raised
        after = sys.getrefcount(answered), sys.getrefcount(lost)
    assert outcomes[1].error is not None
    assert after == before


def test_failed_thread_closes_the_transport_and_reports_the_reason(
    make_transport: Callable[..., RemotingTransport], request_to: RequestTo, outcomes: Any, caplog: Any
) -> None:
    broken = threading.Event()

    def clock() -> float:
        if broken.is_set() and threading.current_thread() in transport_threads():
            broken.clear()
            raise SystemExit("the interpreter is going down")
        return time.monotonic()

    transport = make_transport(clock=clock)
    with Peer(Session.wait_for_hangup) as peer:
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        transport.client.invoke_oneway(peer.address, RequestCode.HEART_BEAT, {}, b"", PATIENCE)
        assert not transport.closed
        broken.set()
        # A new address, for which the thread must wake up.
        with pytest.raises(RocketMQError, match="going down"):
            transport.heart_beat("127.0.0.1:1", "client", ["pg"], PATIENCE)
    assert transport.closed
    assert "going down" in str(outcomes.wait(1)[0].error)
    with pytest.raises(RocketMQError, match=r"failed \(SystemExit\(.*\)\): make a new one"):
        transport.send(request_to("127.0.0.1:1"), PATIENCE, outcomes)
    assert "the transport's thread failed" in caplog.text


def test_blocking_call_ends_even_if_the_clock_does_not_advance(
    make_transport: Callable[..., RemotingTransport],
) -> None:
    transport = make_transport(clock=lambda: 0.0)
    text = "did not end the request within"
    with Peer(Session.wait_for_hangup) as peer, pytest.raises(RemotingTimeoutException, match=text):
        transport.client.invoke(peer.address, RequestCode.HEART_BEAT, {}, b"", 0.01)


def test_forked_child_is_rejected_and_does_not_affect_the_parent() -> None:
    # In another process, because this one has threads, and forking it would test something else.
    script = """
        import os, sys
        from rocketmq_spark.errors import RocketMQError
        from rocketmq_spark.transport.remoting.transport import RemotingTransport
        from tests.support.peer import Peer, Session

        with Peer(Session.serve) as peer:
            transport = RemotingTransport([])
            transport.heart_beat(peer.address, "client", ["pg"], 20.0)
            child = os.fork()
            if child == 0:
                try:
                    transport.heart_beat(peer.address, "client", ["pg"], 20.0)
                except RocketMQError as exc:
                    refused = f"made in process {os.getppid()} and can't be used in process {os.getpid()}" in str(exc)
                    transport.close()
                    os._exit(0 if refused else 3)
                os._exit(4)
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            transport.heart_beat(peer.address, "client", ["pg"], 20.0)
            transport.close()
            print("sessions", len(peer.sessions))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("child 0\nsessions 1\n", "")


@pytest.mark.parametrize("polled", [False, True])
def test_transport_works_after_a_start_without_free_descriptors(
    request_to: RequestTo, outcomes: Any, *, polled: bool
) -> None:
    class Full(Runtime):
        full = True

        def socketpair(self) -> tuple[socket.socket, socket.socket]:
            if self.full:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().socketpair()

    runtime = Full()
    with Peer(Session.serve) as peer, RemotingTransport([], runtime=runtime, polled=polled) as transport:
        for _ in range(2):
            with pytest.raises(RocketMQError, match=r"transport's thread failed: .*Too many open files.*ulimit -n"):
                transport.send(request_to(peer.address), PATIENCE, outcomes)
        assert outcomes == []
        runtime.full = False
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        while polled and not outcomes:
            transport.poll(1.0)
        assert outcomes.wait(1)[0].status is SendStatus.SEND_OK


def test_request_fails_each_time_while_the_thread_can_not_start(request_to: RequestTo, outcomes: Any) -> None:
    class Full(Runtime):
        def start(self, run: Callable[[], None], name: str) -> threading.Thread:
            raise RuntimeError("can't start new thread")

    transport = RemotingTransport(["127.0.0.1:9876"], runtime=Full())
    for _ in range(2):
        with pytest.raises(RocketMQError, match="starting the transport's thread failed: can't start new thread"):
            transport.send(request_to("127.0.0.1:10911"), PATIENCE, outcomes)
