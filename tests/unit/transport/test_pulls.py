"""Pulls over real sockets: the bytes of requests, and the outcome of each response code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.errors import (
    BrokerBusyException,
    MQBrokerException,
    RemotingCommandException,
    RemotingConnectException,
    RemotingSendRequestException,
    RemotingTimeoutException,
    TopicRouteStaleException,
)
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import PullOutcome, PullRequest, PullStatus, PullTarget
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.contract import Outcomes
from tests.support.peer import Peer, Session, refused_address
from tests.support.processes import PATIENCE
from tests.vectors import load

[G6] = [frame for frame in load("remoting_frames.json")["frames"] if frame["name"].startswith("G6")]
QUEUE = MessageQueue("spec_rm_t1", "broker-a", 0)
TARGET = PullTarget(QUEUE, "spec_cg", 2, "*", "TAG")
FIELDS = {"nextBeginOffset": "18", "minOffset": "1", "maxOffset": "40"}


def pulled(transport: RemotingTransport, address: str, suspend_ms: int = 0, timeout: float = PATIENCE) -> PullOutcome:
    outcomes = Outcomes()
    transport.pull(PullRequest(TARGET, address, 16, suspend_ms), timeout, outcomes)
    outcome = outcomes.wait(1)[0]
    assert isinstance(outcome, PullOutcome)
    return outcome


def answering(*args: Any, **kwargs: Any) -> tuple[Callable[[Session], None], list[RemotingCommand]]:
    """A script that answers every request alike, and what it was asked."""
    asked: list[RemotingCommand] = []

    def serve(session: Session) -> None:
        while True:
            asked.append(session.read())
            session.answer(asked[-1], *args, **kwargs)

    return serve, asked


def test_pull_request_has_the_golden_fields_and_the_broker_name(transport: RemotingTransport) -> None:
    serve, asked = answering(0, FIELDS)
    with Peer(serve) as peer:
        pulled(transport, peer.address)
        pulled(transport, peer.address, suspend_ms=5000)
    golden = G6["request"]["meaning"]["ext_fields"]
    assert [command.code for command in asked] == [RequestCode.PULL_MESSAGE] * 2
    assert asked[0].ext_fields == {**golden, "bname": "broker-a"}
    assert list(asked[0].ext_fields)[: len(golden)] == list(golden)
    # Bit 2: the broker may hold it.
    assert asked[1].ext_fields == {**asked[0].ext_fields, "sysFlag": "6", "suspendTimeoutMillis": "5000"}


def test_records_of_the_golden_answer_are_unchanged(transport: RemotingTransport) -> None:
    body = bytes.fromhex(G6["response"]["meaning"]["body_hex"])
    serve, _ = answering(0, G6["response"]["meaning"]["ext_fields"], body)
    with Peer(serve) as peer:
        outcome = pulled(transport, peer.address)
    assert (outcome.status, outcome.error) == (PullStatus.FOUND, None)
    assert (outcome.next_begin_offset, outcome.min_offset, outcome.max_offset) == (18, 0, 18)
    assert bytes(outcome.body) == body


@pytest.mark.parametrize("status", PullStatus)
def test_every_pull_result_of_a_broker_is_a_status(transport: RemotingTransport, status: PullStatus) -> None:
    serve, _ = answering(status.value, FIELDS)
    with Peer(serve) as peer:
        assert pulled(transport, peer.address) == PullOutcome(status, 18, 1, 40, b"")


@pytest.mark.parametrize(
    ("remark", "status"),
    [
        ("NO_MATCHED_MESSAGE", PullStatus.NO_MATCHED_MSG),
        ("OFFSET_OVERFLOW_ONE", PullStatus.NO_MATCHED_MSG),
        ("MESSAGE_WAS_REMOVING", PullStatus.OFFSET_ILLEGAL),
        # A slave whose master is alive answers with code 20 whatever it has found.
        ("OFFSET_TOO_SMALL", PullStatus.OFFSET_ILLEGAL),
    ],
)
def test_remark_of_code_20_distinguishes_filtered_and_deleted_messages(
    transport: RemotingTransport, remark: str, status: PullStatus
) -> None:
    serve, _ = answering(20, FIELDS, remark=remark)
    with Peer(serve) as peer:
        assert pulled(transport, peer.address) == PullOutcome(status, 18, 1, 40, b"")
        assert transport.pull_now(PullRequest(TARGET, peer.address, 17), PATIENCE).status is status


@pytest.mark.parametrize(
    ("code", "kind"),
    [(2, BrokerBusyException), (17, TopicRouteStaleException), (16, MQBrokerException), (26, MQBrokerException)],
)
def test_error_code_of_a_pull_determines_the_error_class(
    transport: RemotingTransport, code: int, kind: type[MQBrokerException]
) -> None:
    serve, _ = answering(code, FIELDS, remark="its words")
    with Peer(serve) as peer:
        outcome = pulled(transport, peer.address)
    assert outcome.status is None
    assert isinstance(outcome.error, kind)
    assert (outcome.error.response_code, outcome.error.remark) == (code, "its words")
    assert f"pulling from {QUEUE}" in str(outcome.error)


@pytest.mark.parametrize("code", [20, 21])
def test_reset_of_the_groups_offset_is_no_deleted_message(transport: RemotingTransport, code: int) -> None:
    serve, _ = answering(code, FIELDS, remark="OFFSET_RESET")
    with Peer(serve) as peer:
        outcome = pulled(transport, peer.address)
    assert outcome.status is None
    assert isinstance(outcome.error, BrokerBusyException)


@pytest.mark.parametrize("fields", [{}, {**FIELDS, "nextBeginOffset": "x"}])
def test_an_answer_without_its_offsets_is_an_error(transport: RemotingTransport, fields: dict[str, str]) -> None:
    serve, _ = answering(0, fields)
    with Peer(serve) as peer:
        outcome = pulled(transport, peer.address)
    assert isinstance(outcome.error, RemotingCommandException)


def test_every_failure_of_a_pull_is_an_error_outcome(transport: RemotingTransport) -> None:
    assert isinstance(pulled(transport, refused_address()).error, RemotingConnectException)

    def hang_up(session: Session) -> None:
        session.read()
        session.reset()

    with Peer(hang_up) as peer:
        assert isinstance(pulled(transport, peer.address).error, RemotingSendRequestException)
    with Peer(Session.wait_for_hangup) as peer:
        assert isinstance(pulled(transport, peer.address, timeout=0.1).error, RemotingTimeoutException)
        transport.close()


def test_timeout_of_a_suspended_pull_is_extended(transport: RemotingTransport) -> None:
    def hold(session: Session) -> None:
        request = session.read()
        waiting.wait(0.4)
        session.answer(request, 19, FIELDS)
        session.wait_for_hangup()

    waiting = threading.Event()
    with Peer(hold) as peer:
        assert pulled(transport, peer.address, suspend_ms=20_000, timeout=0.1).status is PullStatus.NO_NEW_MSG
        transport.close()


def test_answers_of_pulls_can_arrive_in_any_order(transport: RemotingTransport) -> None:
    def backwards(session: Session) -> None:
        requests = [session.read() for _ in range(3)]
        for request in reversed(requests):
            after = str(int(request.ext_fields["queueOffset"]) + 1)
            session.answer(request, 0, {**FIELDS, "nextBeginOffset": after})
        session.wait_for_hangup()

    found: dict[int, PullOutcome] = {}
    outcomes = Outcomes()

    def kept(offset: int) -> Callable[[PullOutcome], None]:
        def on_pulled(outcome: PullOutcome) -> None:
            found[offset] = outcome
            outcomes(outcome)

        return on_pulled

    with Peer(backwards) as peer:
        for offset in (5, 6, 7):
            transport.pull(PullRequest(TARGET, peer.address, offset), PATIENCE, kept(offset))
        outcomes.wait(3)
        transport.close()
    assert {offset: outcome.next_begin_offset for offset, outcome in found.items()} == {5: 6, 6: 7, 7: 8}


@pytest.mark.parametrize(
    ("code", "remark", "body", "ids"),
    [
        (
            0,
            "",
            b'{"consumerIdList":["10.0.0.1@1234#567","10.0.0.2@spark#17"]}',
            ("10.0.0.1@1234#567", "10.0.0.2@spark#17"),
        ),
        (1, "no consumer for this group, cg", b"", ()),
        (1, 'Cannot invoke "ConsumerGroupInfo.getAllClientId()" because "consumerGroupInfo" is null', b"", ()),
    ],
)
def test_consumers_of_a_group_are_requested_from_a_broker(
    transport: RemotingTransport, code: int, remark: str, body: bytes, ids: tuple[str, ...]
) -> None:
    serve, asked = answering(code, remark=remark, body=body)
    with Peer(serve) as peer:
        assert transport.consumers("cg", peer.address, PATIENCE) == ids
    assert asked[0].code == RequestCode.GET_CONSUMER_LIST_BY_GROUP
    assert asked[0].ext_fields == {"consumerGroup": "cg"}


@pytest.mark.parametrize(
    ("code", "remark", "body", "error"),
    [
        (1, "oops", b"", MQBrokerException),
        (0, "", b"", RemotingCommandException),
        (0, "", b'{"consumerIdList":[1]}', RemotingCommandException),
    ],
)
def test_invalid_consumer_list_is_an_error_and_not_an_empty_group(
    transport: RemotingTransport, code: int, remark: str, body: bytes, error: type[Exception]
) -> None:
    serve, _ = answering(code, remark=remark, body=body)
    with Peer(serve) as peer, pytest.raises(error):
        transport.consumers("cg", peer.address, PATIENCE)


@pytest.mark.parametrize(
    ("code", "fields", "offset"),
    [(0, {"offset": "0"}, 0), (0, {"offset": "7"}, 7), (0, {"offset": "-1"}, None), (22, {}, None)],
)
def test_offset_of_a_group_is_requested_for_one_queue(
    transport: RemotingTransport, code: int, fields: dict[str, str], offset: int | None
) -> None:
    serve, asked = answering(code, fields)
    with Peer(serve) as peer:
        assert transport.consumer_offset(QUEUE, "cg", peer.address, PATIENCE) == offset
    assert asked[0].code == RequestCode.QUERY_CONSUMER_OFFSET
    assert asked[0].ext_fields == {
        "consumerGroup": "cg",
        "topic": "spec_rm_t1",
        "queueId": "0",
        "setZeroIfNotFound": "false",
        "bname": "broker-a",
    }


@pytest.mark.parametrize(
    ("body", "offset"),
    [
        ('{"offsetTable":{"spec_rm_t1@cg":{0:0,1:7}}}', 0),
        ('{"offsetTable":{"spec_rm_t1@cg":{1:7}}}', None),
        ('{"offsetTable":{"spec_rm_t1@another":{0:7}}}', None),
    ],
)
def test_offset_0_of_an_old_broker_is_compared_with_its_table(
    transport: RemotingTransport, body: str, offset: int | None
) -> None:
    asked: list[int] = []

    def serve(session: Session) -> None:
        while True:
            command = session.read()
            asked.append(command.code)
            # 4.9.7.
            session.answer(command, 0, {"offset": "0"}, body=body.encode(), version=407)

    with Peer(serve) as peer:
        assert transport.consumer_offset(QUEUE, "cg", peer.address, PATIENCE) == offset
    assert asked == [RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.GET_ALL_CONSUMER_OFFSET]


@pytest.mark.parametrize("body", ["", "[]", '{"offsetTable":[]}', '{"offsetTable":{"spec_rm_t1@cg":{0:"7"}}}'])
def test_invalid_table_of_offsets_is_an_error(transport: RemotingTransport, body: str) -> None:
    serve, _ = answering(0, {"offset": "0"}, body=body.encode(), version=407)
    with Peer(serve) as peer, pytest.raises(RemotingCommandException):
        transport.consumer_offset(QUEUE, "cg", peer.address, PATIENCE)


@pytest.mark.parametrize("offset", ["", "many", str(2**63)])
def test_invalid_offset_of_a_group_is_an_error(transport: RemotingTransport, offset: str) -> None:
    serve, _ = answering(0, {"offset": offset})
    with Peer(serve) as peer, pytest.raises(RemotingCommandException):
        transport.consumer_offset(QUEUE, "cg", peer.address, PATIENCE)


def test_committed_offset_goes_to_its_queue_and_a_rejection_is_raised(transport: RemotingTransport) -> None:
    serve, asked = answering(0)
    with Peer(serve) as peer:
        transport.update_consumer_offset(QUEUE, "cg", 12, peer.address, PATIENCE)
    assert asked[0].code == RequestCode.UPDATE_CONSUMER_OFFSET
    assert asked[0].ext_fields == {
        "consumerGroup": "cg",
        "topic": "spec_rm_t1",
        "queueId": "0",
        "commitOffset": "12",
        "bname": "broker-a",
    }
    serve, _ = answering(26, remark="no group")
    with Peer(serve) as peer, pytest.raises(MQBrokerException, match=r"committing offset 12 of .* for the group cg"):
        transport.update_consumer_offset(QUEUE, "cg", 12, peer.address, PATIENCE)
