"""Requests that a broker sends to its client: transaction checks and unknown codes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.model.send_result import TransactionCheck
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.testing.fake_broker import check_request
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.frames import encode_command
from tests.support.peer import Peer, Session
from tests.support.processes import PATIENCE
from tests.support.strategies import HALF, encode_stored_record

CHECK = TransactionCheck(
    address="",
    message=HALF,
    tran_state_table_offset=5,
    commit_log_offset=36_804_876,
    msg_id="U1",
    transaction_id="U1",
    offset_msg_id=HALF.offset_msg_id,
    broker_name="broker-a",
)
RECORD = encode_stored_record(HALF)


def asked(body: bytes = RECORD) -> RemotingCommand:
    """Return a broker's check with a body that the package's own encoder has not made."""
    return replace(check_request(CHECK), body=body)


def asks(*commands: RemotingCommand) -> Callable[[Session], None]:
    """Ask between a request and its answer."""

    def script(session: Session) -> None:
        request = session.read()
        for command in commands:
            session.sock.sendall(encode_command(command))
        session.answer(request)
        session.serve()

    return script


def test_a_check_reaches_the_handler_on_the_transports_thread(transport: RemotingTransport, collected: Any) -> None:
    checks = collected()
    transport.on_check_transaction = checks
    with Peer(asks(asked())) as peer:
        transport.heart_beat(peer.address, "client", ["pg"], PATIENCE)
        assert checks.wait(1) == [replace(CHECK, address=peer.address)]
    assert [thread.name for thread in checks.threads] == ["rocketmq-spark-transport"]


def test_a_check_without_a_handler_is_dropped(transport: RemotingTransport) -> None:
    with Peer(asks(asked())) as peer:
        transport.heart_beat(peer.address, "client", ["pg"], PATIENCE)
        transport.heart_beat(peer.address, "client", ["pg"], PATIENCE)
        assert len(peer.sessions) == 1


@pytest.mark.parametrize("body", [b"", b"\0\0\0\x05x", RECORD[:-1], RECORD + RECORD, b"\xff" * 200])
def test_unreadable_check_is_logged_and_has_no_other_effect(
    transport: RemotingTransport, collected: Any, caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    checks = collected()
    transport.on_check_transaction = checks
    pushed = (asked(body), asked())
    with Peer(asks(*pushed)) as peer, caplog.at_level(logging.ERROR, "rocketmq_spark.transport"):
        transport.heart_beat(peer.address, "client", ["pg"], PATIENCE)
        checks.wait(1)
        assert len(peer.sessions) == 1
    assert len(checks) == 1
    [record] = caplog.records
    assert record.getMessage() == f"{peer.address}: handling a transaction check failed; the broker will repeat it"


@pytest.mark.parametrize("name", ["commitLogOffset", "tranStateTableOffset"])
def test_check_without_its_offsets_is_logged_and_has_no_other_effect(
    transport: RemotingTransport, collected: Any, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    checks = collected()
    transport.on_check_transaction = checks
    whole = asked()
    fields = {key: value for key, value in whole.ext_fields.items() if key != name}
    pushed = (replace(whole, ext_fields=fields), whole)
    with Peer(asks(*pushed)) as peer, caplog.at_level(logging.ERROR, "rocketmq_spark.transport"):
        transport.heart_beat(peer.address, "client", ["pg"], PATIENCE)
        checks.wait(1)
    [record] = caplog.records
    assert record.exc_info is not None
    assert name in str(record.exc_info[1])


def test_failing_handler_is_logged_and_has_no_other_effect(
    transport: RemotingTransport, caplog: pytest.LogCaptureFixture
) -> None:
    def raising(_check: TransactionCheck) -> None:
        raise ZeroDivisionError("in the handler")

    transport.on_check_transaction = raising
    with Peer(asks(asked())) as peer, caplog.at_level(logging.ERROR, "rocketmq_spark.transport"):
        transport.heart_beat(peer.address, "client", ["pg"], PATIENCE)
        transport.heart_beat(peer.address, "client", ["pg"], PATIENCE)
        assert len(peer.sessions) == 1
    [record] = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_handler_can_answer_from_another_thread(transport: RemotingTransport, collected: Any) -> None:
    answers = collected()

    def script(session: Session) -> None:
        request = session.read()
        session.sock.sendall(encode_command(asked()))
        session.answer(request)
        answers(session.read())
        session.wait_for_hangup()

    def answer(check: TransactionCheck) -> None:
        transport.end_transaction_oneway(check.address, check.answer(8), PATIENCE)

    transport.on_check_transaction = lambda check: threading.Thread(target=answer, args=(check,)).start()
    with Peer(script) as peer:
        transport.heart_beat(peer.address, "client", ["pg"], PATIENCE)
        [command] = answers.wait(1)
    assert (command.code, command.flag) == (RequestCode.END_TRANSACTION, 2)
    # The message's own topic, not the half topic of the check's header.
    assert command.ext_fields == {
        "topic": "orders",
        "producerGroup": "pg",
        "tranStateTableOffset": "5",
        "commitLogOffset": "36804876",
        "commitOrRollback": "8",
        "fromTransactionCheck": "true",
        "msgId": "U1",
        "transactionId": "U1",
        "bname": "broker-a",
    }


def test_other_requests_are_refused_with_a_handler_too(transport: RemotingTransport, collected: Any) -> None:
    refusals = collected()
    transport.on_check_transaction = collected()

    def script(session: Session) -> None:
        request = session.read()
        session.sock.sendall(encode_command(RemotingCommand(RequestCode.GET_CONSUMER_RUNNING_INFO, 7)))
        refusals(session.read())
        session.answer(request)

    with Peer(script) as peer:
        transport.heart_beat(peer.address, "client", ["pg"], PATIENCE)
    [refusal] = refusals
    assert (refusal.code, refusal.opaque, refusal.flag) == (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, 7, 1)
