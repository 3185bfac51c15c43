"""How the remoting transport signs each request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rocketmq_spark.errors import CredentialsError, MQBrokerException, MQClientException, UserRefusedException
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.model.message import SendRequest, SendStatus
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.protocol.remoting.headers import signed
from rocketmq_spark.testing import FakeCluster, Reply
from rocketmq_spark.testing.fake_broker import FakeBroker
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support import fakes
from tests.support.peer import Peer, Session, refused_address
from tests.support.processes import PATIENCE
from tests.support.scripted import route

CREDENTIALS = Credentials("the-user", "hush-hush", "token-token")


def is_signed(request: RemotingCommand) -> bool:
    fields = dict(request.ext_fields)
    signature = fields.pop("Signature", None)
    return signature is not None and signed(fields, (request.body,), CREDENTIALS)["Signature"] == signature


def test_every_kind_of_request_is_signed(
    make_transport: Callable[..., RemotingTransport], request_to: Callable[..., SendRequest], outcomes: Any
) -> None:
    with FakeCluster(topics={"orders": 4}) as cluster:
        peer = cluster.brokers["broker-0"]
        transport = make_transport(cluster.name_server, credentials=CREDENTIALS, sign_name_server_requests=True)
        transport.query_route("orders", PATIENCE)
        transport.heart_beat(peer.address, "client", ["pg"], PATIENCE)
        transport.create_topic(peer.address, "orders", 4, 6, PATIENCE)
        transport.send_oneway(request_to(peer.address), PATIENCE)
        request = request_to(peer.address, (b"in ", b"pieces"), properties="TAGS\x01a\x02")
        transport.send(request, PATIENCE, outcomes)
        outcomes.wait(1)
        transport.unregister_client(peer.address, "client", "pg", PATIENCE)
    requests = [*cluster.name_servers[0].requests, *peer.requests]
    assert [request.code for request in requests] == [105, 34, 17, 310, 310, 35]
    assert [is_signed(request) for request in requests] == [True] * 6
    assert {request.ext_fields["AccessKey"] for request in requests} == {"the-user"}
    assert {request.ext_fields["SecurityToken"] for request in requests} == {"token-token"}
    assert b"hush-hush" not in b"".join(str(request.ext_fields).encode() for request in requests)


def test_requests_to_name_servers_are_not_signed_by_default(make_transport: Callable[..., RemotingTransport]) -> None:
    with FakeCluster(topics={"orders": 4}) as cluster:
        transport = make_transport(cluster.name_server, credentials=CREDENTIALS)
        transport.query_route("orders", PATIENCE)
        transport.topics(PATIENCE)
        transport.cluster_info(PATIENCE)
        with pytest.raises(MQBrokerException, match="No topic route info"):
            transport.query_route("unknown", PATIENCE)
        # A request to a broker, at the address of the name server.
        with pytest.raises(MQBrokerException, match="not supported"):
            transport.topic_config(cluster.name_server, "orders", PATIENCE)
    requests = list(cluster.name_servers[0].requests)
    assert [request.code for request in requests] == [105, 206, 106, 105, 106, 351]
    assert [is_signed(request) for request in requests] == [False] * 5 + [True]
    assert [sorted(request.ext_fields) for request in requests[:5]] == [["topic"], [], [], ["topic"], []]


@pytest.mark.parametrize("code", [ResponseCode.SYSTEM_ERROR, ResponseCode.NO_PERMISSION])
def test_name_server_that_demands_signatures_is_an_error_with_advice(
    make_transport: Callable[..., RemotingTransport], code: ResponseCode
) -> None:
    def refuse(session: Session) -> None:
        while True:
            session.answer(session.read(), code, remark="username cannot be null.")

    with Peer(refuse) as peer:
        transport = make_transport(peer.address, credentials=CREDENTIALS)
        for ask in (lambda: transport.query_route("orders", PATIENCE), lambda: transport.topics(PATIENCE)):
            with pytest.raises(
                UserRefusedException, match=r"username cannot be null\. .*Set signNameServerRequests=true"
            ):
                ask()
        signing = make_transport(peer.address, credentials=CREDENTIALS, sign_name_server_requests=True)
        with pytest.raises(UserRefusedException, match="check accessKey, secretKey"):
            signing.query_route("orders", PATIENCE)


def test_without_credentials_nothing_is_added(make_transport: Callable[..., RemotingTransport]) -> None:
    with fakes.name_server({"orders": route({"broker-a": 4})}) as peer:
        make_transport(peer.address).query_route("orders", PATIENCE)
    assert peer.requests[0].ext_fields == {"topic": "orders"}


def test_heart_beat_is_signed(make_transport: Callable[..., RemotingTransport]) -> None:
    with fakes.broker() as peer:
        transport = make_transport(credentials=CREDENTIALS)
        transport.heart_beat(peer.address, "client", ["pg"], PATIENCE)
    [request] = peer.requests
    assert is_signed(request)


class Sealed:
    """A provider that returns nothing until it is opened."""

    def __init__(self) -> None:
        self.opened: Credentials | None = None

    def credentials(self) -> Credentials:
        if self.opened is None:
            raise CredentialsError("the vault is sealed")
        return self.opened


def test_credentials_are_fetched_for_each_request(make_transport: Callable[..., RemotingTransport]) -> None:
    provider = Sealed()
    with fakes.name_server({"orders": route({"broker-a": 4})}) as peer:
        transport = make_transport(peer.address, credentials=provider, sign_name_server_requests=True)
        for name in ("first", "second"):
            provider.opened = Credentials(name, "hush-hush", f"token of {name}")
            transport.query_route("orders", PATIENCE)
    seen = [(request.ext_fields["AccessKey"], request.ext_fields["SecurityToken"]) for request in peer.requests]
    assert seen == [("first", "token of first"), ("second", "token of second")]


def test_send_without_credentials_fails_unsent_and_returns_its_permit(
    make_transport: Callable[..., RemotingTransport], request_to: Callable[..., SendRequest], outcomes: Any
) -> None:
    provider = Sealed()
    with fakes.broker() as peer:
        transport = make_transport(credentials=provider, client_async_semaphore_value=1)
        for turn in (1, 2):
            transport.send(request_to(peer.address), PATIENCE, outcomes)
            error = outcomes.wait(turn)[-1].error
            assert isinstance(error, CredentialsError)
            assert (error.retriable, error.maybe_stored) == (False, False)
        with pytest.raises(CredentialsError, match="the vault is sealed"):
            transport.heart_beat(peer.address, "client", ["pg"], PATIENCE)
        assert len(peer.requests) == 0
        provider.opened = CREDENTIALS
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        assert outcomes.wait(3)[-1].status is SendStatus.SEND_OK


class Counting:
    """A provider that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def credentials(self) -> Credentials:
        self.calls += 1
        return CREDENTIALS


def test_request_resent_after_go_away_keeps_its_signature(
    make_transport: Callable[..., RemotingTransport], request_to: Callable[..., SendRequest], outcomes: Any
) -> None:
    requests: list[RemotingCommand] = []

    def go_away(session: Session) -> None:
        requests.append(session.read())
        session.answer(requests[-1], ResponseCode.GO_AWAY)
        session.wait_for_hangup()

    def serve(session: Session) -> None:
        requests.append(session.read())
        session.answer_send(requests[-1])
        session.wait_for_hangup()

    provider = Counting()
    with Peer(go_away, serve) as peer:
        transport = make_transport(credentials=provider)
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        assert outcomes.wait(1)[0].status is SendStatus.SEND_OK
    assert [is_signed(request) for request in requests] == [True, True]
    assert requests[0].ext_fields == requests[1].ext_fields
    # On the thread of all connections, a provider must not be asked: it may take half a minute.
    assert provider.calls == 1


def test_text_that_is_not_unicode_is_an_error_that_shows_no_secret(
    make_transport: Callable[..., RemotingTransport], request_to: Callable[..., SendRequest]
) -> None:
    transport = make_transport(credentials=CREDENTIALS)
    request = dataclasses.replace(request_to(refused_address()), producer_group="\ud800")
    with pytest.raises(MQClientException, match="valid Unicode") as raised:
        transport.send(request, PATIENCE, lambda _: None)
    errors = repr([raised.value, raised.value.__cause__, raised.value.__context__])
    assert "hush-hush" not in errors
    assert "token-token" not in errors


def test_a_transport_shows_no_secret(make_transport: Callable[..., RemotingTransport]) -> None:
    transport = make_transport("127.0.0.1:9876", credentials=CREDENTIALS)
    assert "hush-hush" not in repr(transport) + repr(vars(transport))


class Rotating:
    """A provider that returns the same credentials until they are rejected."""

    def __init__(self, gives: str = "new") -> None:
        self.held = Credentials("old", "old secret", expires_at=1.0)
        self.refusals: list[Credentials] = []
        self._gives = gives

    def credentials(self) -> Credentials:
        return self.held

    def refused(self, credentials: Credentials) -> None:
        self.refusals.append(credentials)
        self.held = Credentials(self._gives, f"{self._gives} secret", expires_at=2.0)


def test_rejected_credentials_are_reported_but_missing_permissions_are_not(
    make_transport: Callable[..., RemotingTransport], request_to: Callable[..., SendRequest], outcomes: Any
) -> None:
    provider = Rotating()
    old = provider.held
    no_right = Reply.code(ResponseCode.NO_PERMISSION, "User:old has no permission to access Topic:orders")
    with fakes.broker() as peer:
        peer.play(no_right, Reply.code(ResponseCode.NO_PERMISSION, "check signature failed."))
        transport = make_transport(credentials=provider)
        for turn in (1, 2, 3):
            transport.send(request_to(peer.address), PATIENCE, outcomes)
            outcomes.wait(turn)
    assert [type(outcome.error) for outcome in outcomes.wait(3)] == [
        MQBrokerException,
        UserRefusedException,
        type(None),
    ]
    assert [id(reported) for reported in provider.refusals] == [id(old)], "and not of a missing right"
    assert [request.ext_fields["AccessKey"] for request in peer.requests] == ["old", "old", "new"]


@contextmanager
def broker_with_user(name: str) -> Iterator[FakeBroker]:
    """Run a broker that accepts heart-beats of one user."""

    def check(request: RemotingCommand) -> Reply | None:
        known = request.ext_fields["AccessKey"] == name
        return None if known else Reply.code(ResponseCode.NO_PERMISSION, "check signature failed.")

    with fakes.broker() as broker:
        broker.always[RequestCode.HEART_BEAT] = check
        yield broker


def test_blocking_call_is_retried_once_with_new_credentials(
    make_transport: Callable[..., RemotingTransport],
) -> None:
    with broker_with_user("new") as peer:
        make_transport(credentials=Rotating()).heart_beat(peer.address, "client", ["pg"], PATIENCE)
    assert [request.ext_fields["AccessKey"] for request in peer.requests] == ["old", "new"]


@pytest.mark.parametrize(("gives", "sent"), [("new", ["old", "new"]), ("old", ["old"])])
def test_blocking_call_is_not_retried_again_if_new_credentials_fail(
    make_transport: Callable[..., RemotingTransport], gives: str, sent: list[str]
) -> None:
    with broker_with_user("another") as peer, pytest.raises(UserRefusedException, match="check signature failed"):
        make_transport(credentials=Rotating(gives)).heart_beat(peer.address, "client", ["pg"], PATIENCE)
    assert [request.ext_fields["AccessKey"] for request in peer.requests] == sent
