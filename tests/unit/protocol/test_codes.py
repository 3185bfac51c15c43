from __future__ import annotations

import pytest

from rocketmq_spark.errors import (
    BrokerBusyException,
    BrokerOutcomeUnknownException,
    BrokerUnavailableException,
    BusyOutcomeUnknownException,
    ColdReadException,
    MQBrokerException,
    RequestNotSupportedException,
    TopicRouteStaleException,
    UserRefusedException,
)
from rocketmq_spark.model.message import SendStatus
from rocketmq_spark.protocol.remoting.codes import STORED, RequestCode, ResponseCode, broker_error, code_name

REJECTED = MQBrokerException
BUSY = BrokerBusyException
UNAVAILABLE = BrokerUnavailableException
STALE = TopicRouteStaleException
UNKNOWN = BrokerOutcomeUnknownException

ACL = "org.apache.rocketmq.acl.common.AclException"
ACL_AT = "org.apache.rocketmq.acl.plain.PlainPermissionManager.validate(PlainPermissionManager.java:683)"

NO_GROUP = (
    'Cannot invoke "x.ConsumerGroupInfo.getConsumeType()" because the return value of "x.getConsumerGroupInfo(String)"'
)
PULLING = "org.apache.rocketmq.broker.processor.PullMessageProcessor.processRequest(PullMessageProcessor.java:516)"


def test_stored_codes_are_the_four_that_acknowledge() -> None:
    assert STORED == {
        0: SendStatus.SEND_OK,
        10: SendStatus.FLUSH_DISK_TIMEOUT,
        11: SendStatus.SLAVE_NOT_AVAILABLE,
        12: SendStatus.FLUSH_SLAVE_TIMEOUT,
    }


@pytest.mark.parametrize(
    ("code", "remark", "error"),
    [
        (1, "create mapped file failed, server is busy or broken.", UNAVAILABLE),
        (1, "in-sync replicas not enough", UNKNOWN),
        (1, "broker unable to service, until 2024-01-01 00:00:00", UNAVAILABLE),
        (1, "name server not ready", UNAVAILABLE),
        (1, "[PC_SYNCHRONIZED]broker busy, start flow control for a while", BusyOutcomeUnknownException),
        (2, "[PC_SYNCHRONIZED]broker busy, start flow control for a while", BUSY),
        (1, "broker busy, start flow control for a while", BUSY),
        (1, "timer message is under flow control, max num limit is 1", BUSY),
        (1, "wait response on the channel <127.0.0.1:10911> timeout, 3000(ms)", UNKNOWN),
        (1, "send request to <127.0.0.1:10911> failed", UNKNOWN),
        (1, "UNKNOWN_ERROR", UNKNOWN),
        (1, "", UNKNOWN),
        (1, "java.lang.NullPointerException, org.apache.rocketmq.X", REJECTED),
        # Of a cold read, with and without Java's details.
        (1, f"java.lang.NullPointerException: {NO_GROUP} is null, {PULLING}", ColdReadException),
        (1, f"java.lang.NullPointerException, {PULLING}", ColdReadException),
        (2, "This consumer group is reading cold data. It has been flow control", ColdReadException),
        (1, "java.nio.BufferUnderflowException", REJECTED),
        (1, "java.lang.NumberFormatException: For input string", REJECTED),
        (1, "RuntimeException: message body size exceeded", REJECTED),
        (1, "CODE: 1  DESC: java.lang.NullPointerException", REJECTED),
        (1, "accurate timer message is not enabled, timerWheelEnable is false", REJECTED),
        (1, "unsupported key: +a", REJECTED),
        # Rejections by the access control of 4.9.7 and 5.2.0.
        (1, f"{ACL}: Check signature failed for accessKey=u1, {ACL_AT}", UserRefusedException),
        (1, f"{ACL}: No acl config for u1, {ACL_AT}", UserRefusedException),
        (1, f"{ACL}: No accessKey is configured, {ACL_AT}", UserRefusedException),
        (1, f"{ACL}: No PlainAccessResource for accessKey=u1, {ACL_AT}", UserRefusedException),
        (1, f"{ACL}: No default permission for topic:T, {ACL_AT}", REJECTED),
        (1, f"{ACL}: Need admin permission for request code=17, but accessKey=u1 is not, {ACL_AT}", REJECTED),
        (16, "Check signature failed for accessKey=u1", UserRefusedException),
        (16, "No permission for topic:T", REJECTED),
        (2, "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while", BUSY),
        (2, "[OVERLOAD]system busy, start flow control for a while", BUSY),
        (3, " request type 33 not supported", RequestNotSupportedException),
        (4, "", REJECTED),
        (10, "", REJECTED),
        (13, "the message is illegal", REJECTED),
        (14, "service not available now", UNAVAILABLE),
        (15, "Request doesn't have field bname", REJECTED),
        (16, "check signature failed.", UserRefusedException),
        (16, "User:u1 is not found.", UserRefusedException),
        (16, "User:u1 is disabled.", UserRefusedException),
        (16, "username cannot be null.", UserRefusedException),
        (1, "username cannot be null.", UserRefusedException),
        (1, "check signature failed.", UserRefusedException),
        (1, "User:spark has no permission to access Topic:orders from 127.0.0.1", MQBrokerException),
        (16, "User:u1 has no permission to access Topic:T from 127.0.0.1, no matched policies.", REJECTED),
        (16, "Sending message to topic[SCHEDULE_TOPIC_XXXX] is forbidden.", REJECTED),
        (16, "the broker[127.0.0.1] sending message is forbidden", STALE),
        (16, "the topic[T] sending message is forbidden", STALE),
        (16, "CODE: 16  DESC: the topic[T] sending message is forbidden", STALE),
        (16, "the topic[T] pulling message is forbidden", STALE),
        (17, "No topic route info in name server for the topic: T", STALE),
        (18, "", REJECTED),
        (26, "subscription group not exist", REJECTED),
        (29, "request queueId[99] is illegal, TopicConfig [..] Producer: 127.0.0.1", STALE),
        (29, "The specified topic contains illegal characters", REJECTED),
        (204, "", REJECTED),
        (205, "", REJECTED),
        (215, "", BUSY),
        (501, "T-3 does not exit in request process of current broker b", STALE),
        (604, "", REJECTED),
        (1500, "please go away", UNAVAILABLE),
        (2007, "", REJECTED),
        (-1000, "", UNKNOWN),
        (-1002, "", UNKNOWN),
        (-1004, "", UNKNOWN),
        (-1006, "", UNKNOWN),
    ],
)
def test_response_code_and_remark_select_the_error_class(
    code: int, remark: str, error: type[MQBrokerException]
) -> None:
    raised = broker_error(code, remark, "127.0.0.1:10911", "sending")
    assert type(raised) is error
    assert (raised.response_code, raised.remark, raised.broker_addr) == (code, remark, "127.0.0.1:10911")


@pytest.mark.parametrize("code", [code for code in ResponseCode if code not in STORED])
def test_error_text_has_action_address_and_answer(code: ResponseCode) -> None:
    text = str(broker_error(code, "its own words", "10.0.0.1:10911", "sending 500 rows to orders/broker-a/3"))
    assert text.startswith(
        f"sending 500 rows to orders/broker-a/3: 10.0.0.1:10911 answered {int(code)} {code.name}: its own words"
    )


def test_error_text_of_a_common_answer_ends_with_advice() -> None:
    assert str(broker_error(17, "No topic route info", "10.0.0.1:9876", "looking up orders")) == (
        "looking up orders: 10.0.0.1:9876 answered 17 TOPIC_NOT_EXIST: No topic route info"
        " (create the topic, or check its name and the nameServer option)"
    )


@pytest.mark.parametrize(
    ("remark", "hint"),
    [
        ("User:u has no permission to access Topic:T from 127.0.0.1, no matched policies.", "on Topic:T, or check"),
        ("User:u has no permission to access Group:a%g, no matched policies.", "on Group:a%g, or check accessKey)"),
        ("No default permission for topic:T, org.apache.rocketmq.acl", "needs on topic:T, or check accessKey)"),
        ("User:u is not found.", "(check accessKey, secretKey and securityToken)"),
        ("Sending message to topic[X] is forbidden.", "the user's rights, and the topic's perm"),
    ],
)
def test_advice_of_a_rejection_names_the_rejected_resource(remark: str, hint: str) -> None:
    assert hint in str(broker_error(16, remark, "a:1", "pulling"))


def test_text_of_an_unknown_code_without_a_remark() -> None:
    assert str(broker_error(9999, "", "a:1", "pulling")) == "pulling: a:1 answered 9999 UNKNOWN: (no remark)"


def test_code_names() -> None:
    assert [code_name(code) for code in (0, 2, -1006, 77)] == ["SUCCESS", "SYSTEM_BUSY", "RPC_TIME_OUT", "UNKNOWN"]


def test_codes_that_go_into_golden_frames() -> None:
    assert {code.name: code.value for code in RequestCode if code in (11, 34, 35, 105, 310, 320)} == {
        "PULL_MESSAGE": 11,
        "HEART_BEAT": 34,
        "UNREGISTER_CLIENT": 35,
        "GET_ROUTEINFO_BY_TOPIC": 105,
        "SEND_MESSAGE_V2": 310,
        "SEND_BATCH_MESSAGE": 320,
    }
