"""The requests for which a signature is valid, and the servers that require one, on a real cluster with access
control."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.model.message import Message, SendStatus
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.protocol.remoting.headers import signed
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import USER, SharedCluster, create_topic
from tests.support.processes import PATIENCE

pytestmark = pytest.mark.integration


@pytest.fixture
def stranger(secured: SharedCluster) -> Iterator[RemotingTransport]:
    """The transport of an attacker without a secret key, who replays captured fields."""
    with RemotingTransport([secured.name_server], tls=secured.tls) as transport:
        yield transport


def replay(
    stranger: RemotingTransport, secured: SharedCluster, code: int, fields: dict[str, str], body: bytes = b""
) -> RemotingCommand:
    return stranger.client.invoke(secured.brokers[0].address, code, fields, body, PATIENCE)


def test_signature_is_valid_for_other_requests_with_the_same_fields(
    secured: SharedCluster, stranger: RemotingTransport
) -> None:
    topic = create_topic(secured, f"allowed-{uuid.uuid4().hex[:8]}", "NORMAL")
    assert secured.admin is not None
    # The fields of an administrator's request for a topic's configuration.
    captured = signed({"topic": topic}, (), secured.admin)
    assert replay(stranger, secured, RequestCode.GET_TOPIC_CONFIG, captured).code == ResponseCode.SUCCESS
    settings = replay(stranger, secured, RequestCode.GET_BROKER_CONFIG, captured)
    assert b"brokerName=" in bytes(settings.body)
    another = replay(stranger, secured, RequestCode.DELETE_TOPIC_IN_BROKER, {**captured, "topic": f"{topic}x"})
    assert (another.code, another.remark) == (ResponseCode.NO_PERMISSION, "check signature failed.")
    # The signature covers neither the names of the fields nor the boundaries of their values.
    split = signed({"a": topic[:5], "b": topic[5:]}, (), secured.admin) | {"topic": topic}
    del split["a"], split["b"]
    assert replay(stranger, secured, RequestCode.DELETE_TOPIC_IN_BROKER, split).code == ResponseCode.SUCCESS
    gone = replay(stranger, secured, RequestCode.GET_TOPIC_CONFIG, captured)
    assert gone.code == ResponseCode.TOPIC_NOT_EXIST


def test_signature_of_a_user_with_few_rights_deletes_no_topic(
    secured: SharedCluster, stranger: RemotingTransport
) -> None:
    topic = create_topic(secured, f"allowed-{uuid.uuid4().hex[:8]}", "NORMAL")
    captured = signed({"topic": topic}, (), USER)
    refused = replay(stranger, secured, RequestCode.DELETE_TOPIC_IN_BROKER, captured)
    assert refused.code == ResponseCode.NO_PERMISSION
    assert "has no permission to access" in refused.remark
    # Brokers of 5.5.0 return and change their configuration without checking rights.
    assert replay(stranger, secured, RequestCode.GET_BROKER_CONFIG, captured).code == ResponseCode.SUCCESS
    setting = b"maxTransferCountOnMessageInMemory=32\n"
    body = signed({"b": topic}, (setting,), USER)
    assert replay(stranger, secured, RequestCode.UPDATE_BROKER_CONFIG, body, setting).code == ResponseCode.SUCCESS


def test_name_server_of_rocketmq_answers_unsigned_requests(secured: SharedCluster) -> None:
    with RemotingTransport(
        [secured.name_server], tls=secured.tls, credentials=Credentials("nobody", "wrong")
    ) as asking:
        assert asking.cluster_info(PATIENCE).brokers
        assert asking.query_route("TBW102", PATIENCE).queue_datas


def test_proxy_as_name_server_needs_signed_requests(secured: SharedCluster) -> None:
    topic = create_topic(secured, f"allowed-{uuid.uuid4().hex[:8]}", "NORMAL")
    given = {**secured.admin_settings, "name_server": secured.proxy.address, "send_msg_timeout": 60_000}
    with (
        Producer("pg-unsigned", **given) as unsigned,
        pytest.raises(RocketMQError, match=r"username cannot be null\. .*Set signNameServerRequests=true"),
    ):
        unsigned.send(Message.of(topic, b"x"))
    with Producer("pg-signed", sign_name_server_requests=True, **given) as producer:
        assert producer.send(Message.of(topic, b"x")).status is SendStatus.SEND_OK
