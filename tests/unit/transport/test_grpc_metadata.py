"""The metadata of every gRPC call."""

from __future__ import annotations

import hashlib
import hmac
import logging
import random
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from rocketmq_spark import __version__
from rocketmq_spark.errors import CredentialsError, MQBrokerException, OptionError, UserRefusedException
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, EndTransaction
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.testing import Reply
from rocketmq_spark.testing.fake_proxy import Call, FakeProxy
from rocketmq_spark.testing.fake_proxy_messages import status_reply
from rocketmq_spark.transport.grpc.metadata import MetadataSource
from rocketmq_spark.transport.grpc.transport import GrpcTransport
from tests.support.contract import Outcomes, single
from tests.support.processes import PATIENCE, wait_for
from tests.support.proxies import running_proxy
from tests.support.scripted import ManualClock
from tests.support.transports import Grpc

SECRETS = ("hush-hush", "token-token")
USER = Credentials("the-user", *SECRETS)
# 2026-03-04 05:06:07 UTC.
MOMENT = 1_772_600_767.0


@pytest.fixture
def proxy() -> Iterator[FakeProxy]:
    with running_proxy({"orders": "MIXED"}) as proxy:
        yield proxy


def every_call(proxy: FakeProxy, transport: GrpcTransport) -> None:
    """Make a call of every kind."""
    seam = Grpc(transport, proxy, None)
    transport.on_check_transaction = Outcomes()
    transport.query_route("orders", PATIENCE)
    seam.send(single("orders", b"one"))
    [half] = seam.send(single("orders", b"half", TRAN_MSG="true"))
    # The stream is ready when the proxy has accepted the settings.
    deadline = time.monotonic() + PATIENCE
    while not proxy.requests("Heartbeat"):
        assert time.monotonic() < deadline
        transport.heart_beat(proxy.address, "", [], PATIENCE)
        time.sleep(0.01)
    end = EndTransaction(
        topic="orders",
        producer_group="pg",
        tran_state_table_offset=-1,
        commit_log_offset=-1,
        commit_or_rollback=TRANSACTION_COMMIT_TYPE,
        msg_id=half.transaction_id,
        transaction_id=half.transaction_id,
        broker_name=proxy.address,
    )
    transport.end_transaction_oneway(proxy.address, end, PATIENCE)
    transport.unregister_client(proxy.address, "", "pg", PATIENCE)


def test_every_call_has_all_metadata_keys(proxy: FakeProxy) -> None:
    with GrpcTransport([proxy.address], client_id="10.0.0.1@7", credentials=USER, namespace="ns") as transport:
        every_call(proxy, transport)
        # One call is one-way: it may still be under way.
        methods = {"QueryRoute", "SendMessage", "Telemetry", "Heartbeat", "EndTransaction", "NotifyClientTermination"}
        wait_for(lambda: {call.method for call in proxy.calls} == methods)
    ids, requests = set(), set()
    for call in proxy.calls:
        metadata = call.metadata
        assert metadata["x-mq-language"] == "PYTHON"
        assert metadata["x-mq-protocol"] == "v2"
        assert metadata["x-mq-client-version"] == __version__
        assert metadata["x-mq-namespace"] == "ns"
        assert metadata["x-mq-session-token"] == SECRETS[1]
        ids.add(metadata["x-mq-client-id"])
        requests.add(metadata["x-mq-request-id"])
        signature = hmac.new(SECRETS[0].encode(), metadata["x-mq-date-time"].encode(), hashlib.sha1).hexdigest()
        scheme, _, rest = metadata["authorization"].partition(" ")
        named = dict(part.split("=") for part in rest.split(", "))
        assert scheme == "MQv2-HMAC-SHA1"
        assert named.pop("Signature").lower() == signature
        assert named == {"Credential": "the-user", "SignedHeaders": "x-mq-date-time"}
    assert [one.startswith("10.0.0.1@7@") for one in ids] == [True]
    assert len(requests) == len(proxy.calls)
    assert {service.SendMessageRequest.FromString(call.request).messages[0].topic.resource_namespace
            for call in proxy.requests("SendMessage")} == {"ns"}  # fmt: skip


def test_calls_without_credentials_are_not_signed(proxy: FakeProxy) -> None:
    with GrpcTransport([proxy.address], client_id="test") as transport:
        transport.query_route("orders", PATIENCE)
    [call] = proxy.calls
    assert not {"authorization", "x-mq-session-token"} & call.metadata.keys()
    assert call.metadata["x-mq-namespace"] == ""
    assert "x-mq-date-time" in call.metadata


def test_signature_is_renewed_once_per_second() -> None:
    clock = ManualClock(MOMENT)
    source = MetadataSource("test", "1", USER, wall_clock=clock)
    seen = []
    for now in (MOMENT, MOMENT + 0.9, MOMENT + 1.0, MOMENT + 3600.0):
        clock.now = now
        seen.append(source.fresh()[1])
    assert [dict(metadata)["x-mq-date-time"] for metadata in seen] == [
        "20260304T050607Z",
        "20260304T050607Z",
        "20260304T050608Z",
        "20260304T060607Z",
    ]
    assert len({dict(metadata)["authorization"] for metadata in seen}) == 3


class Renewed:
    """A provider that returns new credentials at each call, or fails."""

    def __init__(self, *given: Credentials) -> None:
        self.given = list(given)

    def credentials(self) -> Credentials:
        if not self.given:
            raise CredentialsError("the vault is sealed")
        return self.given.pop(0)


def test_credentials_are_fetched_at_most_once_per_second() -> None:
    clock = ManualClock(MOMENT)
    source = MetadataSource(
        "test", "1", Renewed(USER, Credentials("second", "s"), Credentials("third", "s", "t")), wall_clock=clock
    )
    seen = []
    for clock.now in (MOMENT, MOMENT + 0.5, MOMENT + 1, MOMENT + 2):
        metadata = dict(source.fresh()[1])
        user = metadata["authorization"].partition("Credential=")[2].partition(",")[0]
        seen.append((user, metadata.get("x-mq-session-token")))
    assert seen == [("the-user", "token-token"), ("the-user", "token-token"), ("second", None), ("third", "t")]


class Rotating:
    """A provider that returns the same credentials until they are rejected."""

    def __init__(self) -> None:
        self.held = Credentials("old", "old secret")

    def credentials(self) -> Credentials:
        return self.held

    def refused(self, credentials: Credentials) -> None:
        assert credentials is self.held
        self.held = Credentials("new", "new secret")


def user_of(call: Call) -> str:
    return call.metadata["authorization"].partition("Credential=")[2].partition(",")[0]


def test_rejected_credentials_are_reported_and_fetched_again(
    proxy: FakeProxy,
) -> None:
    # The same second, so a cached signature would be equal.
    given: dict[str, Any] = {"client_id": "test", "wall_clock": ManualClock(MOMENT)}
    with GrpcTransport([proxy.address], credentials=Rotating(), **given) as transport:
        seam = Grpc(transport, proxy, None)
        for code, message in ((40100, "User:old has no permission to access Topic:orders"), (40100, "no such user")):
            proxy.play(Reply.code(code, message))
            seam.send(single("orders", b"refused"))
        seam.send(single("orders", b"taken"))
    assert [user_of(call) for call in proxy.requests("SendMessage")] == ["old", "old", "new"]


def test_rejected_blocking_call_reports_its_credentials(proxy: FakeProxy) -> None:
    answer = proxy.handlers["QueryRoute"]
    proxy.handlers["QueryRoute"] = lambda request, context: (
        status_reply(40100, "check signature failed.") if b"secret" in request else answer(request, context)
    )
    with GrpcTransport([proxy.address], client_id="test", credentials=Rotating()) as transport:
        with pytest.raises(UserRefusedException):
            transport.query_route("secret", PATIENCE)
        transport.query_route("orders", PATIENCE)
    assert [user_of(call) for call in proxy.calls] == ["old", "new"]


def test_send_without_credentials_fails_unsent(proxy: FakeProxy) -> None:
    outcomes = Outcomes()
    with GrpcTransport([proxy.address], client_id="test", credentials=Renewed()) as transport:
        seam = Grpc(transport, proxy, None)
        queue, address = seam.elsewhere(proxy.address)
        transport.send(seam.request(single("orders", b"one"), (queue, address)), PATIENCE, outcomes)
        assert isinstance(outcomes.wait(1)[0].error, CredentialsError)
        with pytest.raises(CredentialsError, match="the vault is sealed"):
            transport.query_route("orders", PATIENCE)
    assert list(proxy.calls) == []


def test_credentials_that_no_header_can_hold_fail_only_the_send(proxy: FakeProxy) -> None:
    outcomes = Outcomes()
    with GrpcTransport(
        [proxy.address], client_id="test", credentials=Renewed(Credentials("u", "s", "tökèn"))
    ) as transport:
        seam = Grpc(transport, proxy, None)
        transport.send(seam.request(single("orders", b"one"), seam.elsewhere(proxy.address)), PATIENCE, outcomes)
        error = outcomes.wait(1)[0].error
        assert isinstance(error, CredentialsError)
        assert "securityToken" in str(error)
        assert not transport.closed


def test_signature_equals_a_known_one() -> None:
    # printf 20260304T050607Z | openssl dgst -sha1 -hmac hush-hush
    source = MetadataSource("test", "1", USER, wall_clock=ManualClock(MOMENT))
    assert dict(source.fresh()[1])["authorization"] == (
        "MQv2-HMAC-SHA1 Credential=the-user, SignedHeaders=x-mq-date-time, "
        "Signature=820043B3DC62ACDCB52FC8A4E13F784CF82FEF07"
    )


def test_no_secret_is_shown(proxy: FakeProxy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    proxy.handlers["QueryRoute"] = lambda *_: status_reply(40100, "check signature failed.")
    proxy.play(Reply.code(40100, "User:the-user is not found."))
    with GrpcTransport([proxy.address], client_id="test", credentials=USER) as transport:
        seam = Grpc(transport, proxy, None)
        with pytest.raises(MQBrokerException, match="40100 UNAUTHORIZED") as raised:
            transport.query_route("orders", PATIENCE)
        [outcome] = seam.send(single("orders", b"one"))
        [dead] = seam.send(single("orders", b"one"), where=seam.dead())
        shown = [repr(transport), repr(vars(transport)), repr(MetadataSource("test", "1", USER)), caplog.text]
        for error in (raised.value, outcome.error, dead.error):
            shown += [str(error), repr(error), repr(vars(error)), "".join(traceback.format_exception(error))]
    assert [secret for secret in SECRETS if any(secret in text for text in shown)] == []


@pytest.mark.parametrize(
    ("option", "settings"),
    [
        ("namespace", {"namespace": "naïve"}),
        ("namespace", {"namespace": "a\nb"}),
        ("accessKey", {"credentials": Credentials("müller", *SECRETS)}),
        ("securityToken", {"credentials": Credentials("the-user", "sk", f"{SECRETS[1]}\x7f")}),
    ],
)
def test_option_that_no_header_can_hold_is_rejected_by_the_constructor(
    option: str, settings: dict[str, object]
) -> None:
    with pytest.raises(OptionError, match=f"option {option}: .* printable ASCII") as raised:
        GrpcTransport(["localhost:8081"], client_id="test", **settings)  # type: ignore[arg-type]
    assert SECRETS[1] not in str(raised.value)


def test_a_client_id_of_any_text_is_sent_as_ascii() -> None:
    source = MetadataSource("10.0.0.1@Zürich\t", "1", random=random.Random(7))
    assert source.client_id.isascii()
    assert source.client_id.isprintable()
    assert dict(source.fresh()[1])["x-mq-client-id"] == source.client_id


def test_two_clients_of_one_name_have_different_ids() -> None:
    assert len({MetadataSource("test", "1").client_id for _ in range(50)}) == 50
