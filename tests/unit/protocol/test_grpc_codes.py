from __future__ import annotations

import pickle
from collections.abc import Callable

import grpc
import pytest

from rocketmq_spark.errors import (
    BrokerBusyException,
    BrokerOutcomeUnknownException,
    BrokerUnavailableException,
    DelayRefusedException,
    MessageRefusedException,
    MQBrokerException,
    RemotingCertificateException,
    RemotingCommandException,
    RemotingConnectException,
    RemotingSendRequestException,
    RemotingTimeoutException,
    RemotingTlsException,
    RocketMQError,
    TopicRouteStaleException,
    UserRefusedException,
)
from rocketmq_spark.model.message import SendStatus
from rocketmq_spark.protocol.grpc._pb import definition_pb2
from rocketmq_spark.protocol.grpc.codes import STORED, Code, call_error, code_name, proxy_error
from rocketmq_spark.protocol.tls import NOT_TRUSTED, OUT_OF_DATE, SPEAKS_NO_TLS, TOO_OLD, other_name

FATAL = MQBrokerException
REFUSED = MessageRefusedException
BUSY = BrokerBusyException
UNAVAILABLE = BrokerUnavailableException
STALE = TopicRouteStaleException
UNKNOWN = BrokerOutcomeUnknownException

# Every code of the protocol, with its class in the answer to a send.
BY_CLASS: dict[type[MQBrokerException] | None, set[int]] = {
    None: {20000, 50002, 50401, 50402},
    BUSY: {42900},
    STALE: {40402},
    REFUSED: {
        *(40000, 40004, 40005, 40006, 40007, 40009),
        *(41300, 41301, 41302, 43100, 43101),
    },
    DelayRefusedException: {40012},
    FATAL: {
        *(40001, 40002, 40003, 40008, 40010, 40011, 40013, 40014, 40015, 40016, 40017, 40018, 40019, 40020),
        *(40200, 40300, 40400, 40401, 40403, 40404, 42800, 42901, 42902),
        *(50100, 50500, 50501, 50502),
    },
    UserRefusedException: {40100},
    # The last three codes do not answer sends, so the messages may be stored.
    UNKNOWN: {40800, 50000, 50001, 50400, 0, 30000, 60000},
}


def test_codes_equal_those_of_the_proto_file() -> None:
    assert {code.name: code.value for code in Code} == dict(definition_pb2.Code.items())


@pytest.mark.parametrize("code", Code)
def test_every_proxy_code_has_exactly_one_error_class(code: Code) -> None:
    [expected] = [error for error, codes in BY_CLASS.items() if code in codes]
    assert (code in STORED) == (expected is None)
    if expected is not None:
        assert type(proxy_error(code, "", "p:8081", "sending")) is expected


def test_stored_codes_are_the_four_that_acknowledge() -> None:
    assert STORED == {
        20000: SendStatus.SEND_OK,
        50002: SendStatus.SLAVE_NOT_AVAILABLE,
        50401: SendStatus.FLUSH_DISK_TIMEOUT,
        50402: SendStatus.FLUSH_SLAVE_TIMEOUT,
    }


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (40099, REFUSED),
        (40199, FATAL),
        (40499, FATAL),
        (40899, UNKNOWN),
        (41399, REFUSED),
        (42999, BUSY),
        (43199, REFUSED),
        (45000, FATAL),
        (49999, FATAL),
        (50099, UNKNOWN),
        (50199, FATAL),
        (50499, UNKNOWN),
        (50599, FATAL),
        (59999, UNKNOWN),
        # No reply says whether the messages are stored.
        (-1, UNKNOWN),
        (20001, UNKNOWN),
        (39999, UNKNOWN),
        (60001, UNKNOWN),
    ],
)
def test_unknown_code_is_classified_by_its_hundreds(code: int, error: type[MQBrokerException]) -> None:
    raised = proxy_error(code, "", "p:8081", "sending")
    assert type(raised) is error
    assert str(raised) == f"sending: p:8081 answered {code} UNKNOWN: (no message)"


@pytest.mark.parametrize(
    ("code", "message", "error"),
    [
        (40014, "the expected type is UNSPECIFIED, but actual type is NORMAL", STALE),
        (40014, "the expected type is FIFO, but actual type is NORMAL", FATAL),
        (40300, "no writable queue", STALE),
        (40300, "", FATAL),
        (40100, "User:u has no permission to access Topic:T", FATAL),
        (40100, "authentication header is incorrect.", UserRefusedException),
        (50001, "RuntimeException: Message body size exceeded", REFUSED),
        (50001, "Delayed messages are not supported for batching", REFUSED),
        (50001, "the message is illegal, maybe msg body or properties length not matched.", REFUSED),
        (50001, "recall handle is invalid", FATAL),
        (50001, "recall failed, operation is forbidden", FATAL),
        (50001, "cannot found transaction data", FATAL),
        (50001, "[PC_SYNCHRONIZED]broker busy, start flow control for a while", BUSY),
        (50001, "timer message is under flow control, max num limit is 1", BUSY),
        (50001, "create mapped file failed, server is busy or broken.", UNAVAILABLE),
        (50001, "CODE: 16  DESC: the broker[127.0.0.1] sending message is forbidden", STALE),
        (50001, "java.lang.NullPointerException", UNKNOWN),
        (50000, "message body size exceeded", UNKNOWN),
    ],
)  # fmt: skip
def test_message_text_selects_the_error_class_of_an_ambiguous_code(
    code: int, message: str, error: type[MQBrokerException]
) -> None:
    raised = proxy_error(code, message, "p:8081", "sending")
    assert type(raised) is error
    assert (raised.response_code, raised.remark, raised.broker_addr) == (code, message, "p:8081")


# Error texts of grpcio 1.85.
CONNECTING = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
HANDSHAKE = CONNECTING + "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: SSL routines:OPENSSL_internal:"
HOSTNAME = (
    CONNECTING + "Custom verification check failed with error: UNAUTHENTICATED: Hostname Verification Check failed."
)
DETAILS = [
    ("UNAVAILABLE", CONNECTING + "Failed to connect to remote host: Connection refused", RemotingConnectException),
    ("UNAVAILABLE", CONNECTING + "Socket closed", RemotingConnectException),
    ("UNAVAILABLE", "errors resolving p.invalid:8081: [field:hostname lookup error]", RemotingConnectException),
    ("UNAVAILABLE", "DNS resolution failed for p.invalid:8081", RemotingConnectException),
    ("UNAVAILABLE", HANDSHAKE + "WRONG_VERSION_NUMBER", RemotingTlsException),
    ("UNAVAILABLE", HANDSHAKE + "CERTIFICATE_VERIFY_FAILED: self signed", RemotingCertificateException),
    ("UNAVAILABLE", HOSTNAME, RemotingCertificateException),
    ("UNAVAILABLE", CONNECTING + "Failed to create security handshaker.", RemotingCertificateException),
    ("UNAVAILABLE", "Socket closed", RemotingSendRequestException),
    ("UNAVAILABLE", "recvmsg:Connection reset by peer (104)", RemotingSendRequestException),
    ("RESOURCE_EXHAUSTED", "gRPC message exceeds maximum size 4194304: 4194400", MessageRefusedException),
    ("RESOURCE_EXHAUSTED", "Received message larger than max (5000000 vs. 4194304)", MessageRefusedException),
    ("RESOURCE_EXHAUSTED", "SERVER: Received message larger than max (5000000 vs. 4194304)", MessageRefusedException),
    (
        "RESOURCE_EXHAUSTED",
        "CLIENT: Received message larger than max (16777217 vs. 16777216)",
        RemotingCommandException,
    ),
    (
        "RESOURCE_EXHAUSTED",
        "Stream removed (CLIENT: Received message larger than max (16777217 vs. 16777216))",
        RemotingCommandException,
    ),
    ("RESOURCE_EXHAUSTED", "Decompressed message larger than max", RemotingCommandException),
]


@pytest.mark.parametrize(("status", "details", "error"), DETAILS)
def test_status_details_distinguish_failed_from_broken_connections(
    status: str, details: str, error: type[RocketMQError]
) -> None:
    raised = call_error(status, details, "p:8081", "sending")
    assert type(raised) is error
    assert str(raised).startswith(f"sending: p:8081: gRPC {status}: {details} (")


REMEDIES = [
    (HANDSHAKE + "CERTIFICATE_VERIFY_FAILED: self signed", None, NOT_TRUSTED),
    (HANDSHAKE + "CERTIFICATE_VERIFY_FAILED: certificate has expired", None, OUT_OF_DATE),
    (HOSTNAME, None, other_name("p", None)),
    (HOSTNAME, "inside.example", other_name("p", "inside.example")),
    (HANDSHAKE + "WRONG_VERSION_NUMBER", None, SPEAKS_NO_TLS),
    (HANDSHAKE + "TLSV1_ALERT_PROTOCOL_VERSION: SSL alert number 70", None, TOO_OLD),
    (HANDSHAKE + "UNSUPPORTED_PROTOCOL", None, TOO_OLD),
]


@pytest.mark.parametrize(("details", "server_name", "remedy"), REMEDIES)
def test_tls_errors_have_the_same_advice_as_over_remoting(details: str, server_name: str | None, remedy: str) -> None:
    raised = call_error("UNAVAILABLE", details, "p:8081", "sending", server_name)
    assert isinstance(raised, RemotingTlsException)
    assert str(raised).endswith(f"({remedy})")


BY_STATUS: dict[type[RocketMQError], set[str]] = {
    BUSY: {"RESOURCE_EXHAUSTED"},
    FATAL: {"INVALID_ARGUMENT", "PERMISSION_DENIED", "UNIMPLEMENTED"},
    UserRefusedException: {"UNAUTHENTICATED"},
    RemotingTimeoutException: {"DEADLINE_EXCEEDED"},
    # It is unknown whether the messages are stored, also for OK without a reply.
    RemotingSendRequestException: {
        *("UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN"),
        *("OK", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "DATA_LOSS"),
    },
}


@pytest.mark.parametrize("status", grpc.StatusCode, ids=lambda status: status.name)
def test_every_grpc_status_has_exactly_one_error_class(status: grpc.StatusCode) -> None:
    [expected] = [error for error, names in BY_STATUS.items() if status.name in names]
    assert type(call_error(status.name, "", "p:8081", "sending")) is expected


def test_only_transient_errors_are_retried_and_only_message_errors_split() -> None:
    retriable = {error for error in BY_CLASS if error is not None and error.retriable}
    assert retriable == {BUSY, STALE, UNKNOWN}
    assert {error for error in BY_CLASS if error is not None and error.split} == {REFUSED, DelayRefusedException}


def test_wrong_message_type_error_explains_types_and_topic_change() -> None:
    text = str(proxy_error(40014, "the expected type is NORMAL, but actual type is FIFO", "p:8081", "sending"))
    assert text.startswith("sending: p:8081 answered 40014 MESSAGE_PROPERTY_CONFLICT_WITH_TYPE: the expected type is")
    assert "a shardingKey makes a FIFO message, a delay a DELAY message" in text
    assert "mqadmin updateTopic ... -a +message.type=FIFO" in text


def test_unknown_topic_is_not_reported_as_a_wrong_message_type() -> None:
    text = str(proxy_error(40014, "the expected type is UNSPECIFIED, but actual type is FIFO", "p:8081", "sending"))
    assert "create the topic" in text
    assert "shardingKey" not in text


@pytest.mark.parametrize(
    "make",
    [
        lambda: proxy_error(Code.TOO_MANY_REQUESTS, "flow limit", "p:8081", "sending"),
        lambda: call_error("UNAUTHENTICATED", "no", "p:8081", "sending"),
        lambda: call_error("UNAVAILABLE", "Socket closed", "p:8081", "sending"),
    ],
)
def test_errors_survive_pickling(make: Callable[[], RocketMQError]) -> None:
    raised = make()
    again = pickle.loads(pickle.dumps(raised))
    assert (type(again), again.args, str(again)) == (type(raised), raised.args, str(raised))


def test_grpc_statuses_map_to_the_equivalent_proxy_codes() -> None:
    statuses = ("INVALID_ARGUMENT", "PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED")
    raised = [call_error(status, "", "p:8081", "sending") for status in statuses]
    codes = [error.response_code for error in raised if isinstance(error, MQBrokerException)]
    assert codes == [40000, 40300, 40100, 50100, 42900]


def test_code_names() -> None:
    assert [code_name(code) for code in (20000, 42900, 77)] == ["OK", "TOO_MANY_REQUESTS", "UNKNOWN"]
