"""The attempts of one send, with a manual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from rocketmq_spark.errors import (
    BatchRefusedException,
    MQBrokerException,
    MQClientException,
    RemotingCertificateException,
    RemotingConnectException,
    RemotingException,
    RemotingSendRequestException,
    RemotingTimeoutException,
    RemotingTlsException,
    RemotingTooMuchRequestException,
    UserRefusedException,
)
from rocketmq_spark.model.message import MessageQueue, SendStatus
from rocketmq_spark.model.send_result import SendResult
from rocketmq_spark.options.producer import GRPC_RETRY_RESPONSE_CODES, RETRY_RESPONSE_CODES
from rocketmq_spark.producer.attempt import Deadline, SendLoop
from rocketmq_spark.protocol.grpc.codes import proxy_error
from rocketmq_spark.protocol.remoting.codes import broker_error
from tests.support.scripted import ManualClock

DEFAULT = SendLoop(2, RETRY_RESPONSE_CODES, False, -1)


def refusal(code: int) -> MQBrokerException:
    return broker_error(code, "no", "b:1", "sending")


def answer(status: SendStatus = SendStatus.SEND_OK) -> SendResult:
    return SendResult(status, "ID", MessageQueue("T", "a", 0), 0)


@dataclass
class Broker:
    """Answers attempts from a script; each takes `takes` seconds."""

    script: Sequence[SendResult | BaseException]
    takes: float = 0.0
    names: str = "ab"
    clock: ManualClock = field(default_factory=ManualClock)
    given: list[float] = field(default_factory=list)
    brokers: list[str] = field(default_factory=list)
    selections: list[tuple[str | None, bool]] = field(default_factory=list)

    def select(self, last: str | None, retry: bool) -> MessageQueue | None:
        self.selections.append((last, retry))
        return MessageQueue("T", self.names[-1] if last == "a" else "a", 0)

    def attempt(self, queue: MessageQueue, left: float) -> SendResult:
        self.brokers.append(queue.broker_name)
        self.given.append(left)
        self.clock.advance(self.takes)
        outcome = self.script[len(self.given) - 1]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def run(self, loop: SendLoop = DEFAULT, seconds: float = 3.0) -> SendResult | None:
        return loop.run("T", Deadline(seconds, self.clock), self.select, self.attempt)


def failed(broker: Broker, loop: SendLoop = DEFAULT, seconds: float = 3.0) -> MQClientException:
    with pytest.raises(MQClientException) as caught:
        broker.run(loop, seconds)
    return caught.value


@pytest.mark.parametrize(("retry_times", "attempts"), [(2, 3), (0, 1)])
def test_at_most_one_attempt_more_than_the_retries(retry_times: int, attempts: int) -> None:
    broker = Broker([RemotingConnectException("down")] * 5)
    failed(broker, replace(DEFAULT, retry_times=retry_times))
    assert len(broker.given) == attempts


@pytest.mark.parametrize("error", [RemotingTimeoutException("slow"), MQClientException("no such broker")])
def test_remoting_and_client_errors_are_tried_on_another_broker(error: Exception) -> None:
    broker = Broker([error, answer()])
    assert broker.run() == answer()
    assert broker.brokers == ["a", "b"]
    assert broker.selections == [(None, False), ("a", True)]


def test_with_two_brokers_the_attempts_alternate() -> None:
    broker = Broker([RemotingConnectException("down")] * 3)
    failed(broker)
    assert broker.brokers == ["a", "b", "a"]


@pytest.mark.parametrize(
    "error",
    [
        refusal(16),
        # The rejection of a user by brokers before 5.3.
        UserRefusedException("refused", 1, "AclException: No acl config for u", "a:1"),
        broker_error(1, "AclException: No default permission for T", "a:1", "sending"),
        broker_error(1, "the request is rejected: no permission to access Topic:T", "a:1", "sending"),
        proxy_error(40300, "no", "a:1", "sending"),
        RemotingCertificateException("not trusted"),
        RemotingTlsException("no TLS"),
    ],
)
def test_permanent_rejection_by_a_broker_is_tried_once_per_broker(error: Exception) -> None:
    broker = Broker([error] * 3)
    loop = replace(DEFAULT, retry_response_codes=RETRY_RESPONSE_CODES | GRPC_RETRY_RESPONSE_CODES)
    assert failed(broker, loop).__cause__ is error
    assert broker.brokers == ["a", "b"]


@pytest.mark.parametrize("brokers", ["a", "ab"])
@pytest.mark.parametrize("code", sorted(RETRY_RESPONSE_CODES - {16}))
def test_a_code_of_the_list_is_retried_as_often_as_in_java(code: int, brokers: str) -> None:
    broker = Broker([refusal(code)] * 3, names=brokers)
    assert failed(broker).response_code == code
    assert broker.brokers == list("aba" if brokers == "ab" else "aaa")


@pytest.mark.parametrize("code", sorted(GRPC_RETRY_RESPONSE_CODES - {40300}))
def test_a_code_of_the_list_for_proxies_is_retried_as_often_as_in_java(code: int) -> None:
    loop = replace(DEFAULT, retry_response_codes=GRPC_RETRY_RESPONSE_CODES)
    broker = Broker([proxy_error(code, "no", "a:1", "sending")] * 3, names="a")
    assert failed(broker, loop).response_code == code
    assert broker.brokers == ["a"] * 3


def test_a_code_that_is_not_of_the_list_is_raised_at_once() -> None:
    broker = Broker([refusal(13), answer()])
    with pytest.raises(MQBrokerException) as caught:
        broker.run()
    assert (caught.value.response_code, len(broker.given)) == (13, 1)


@pytest.mark.parametrize("error", [MQClientException("flag", 13), BatchRefusedException("flag", 13)])
def test_a_message_that_the_client_rejects_is_not_sent_again(error: MQClientException) -> None:
    broker = Broker([error, answer()])
    assert failed(broker) is error
    assert len(broker.given) == 1
    late = answer(SendStatus.FLUSH_DISK_TIMEOUT)
    assert Broker([late, error]).run(STRICT) is late


def test_a_code_added_to_the_list_is_retried() -> None:
    codes = set(RETRY_RESPONSE_CODES)
    loop = replace(DEFAULT, retry_response_codes=codes)
    codes |= {3, 13, 4001}
    for code in (3, 13, 4001):
        assert Broker([refusal(code), refusal(code), answer()], names="a").run(loop) == answer()


def test_an_interruption_is_raised_at_once() -> None:
    broker = Broker([KeyboardInterrupt(), answer()])
    with pytest.raises(KeyboardInterrupt):
        broker.run()
    assert len(broker.given) == 1


def test_status_that_is_not_ok_is_returned_unchanged() -> None:
    late = answer(SendStatus.FLUSH_DISK_TIMEOUT)
    broker = Broker([late, answer()])
    assert broker.run() is late


STRICT = replace(DEFAULT, retry_another_broker_when_not_store_ok=True)


def test_not_ok_status_is_retried_on_request_and_the_last_one_returned() -> None:
    statuses = [SendStatus.FLUSH_DISK_TIMEOUT, SendStatus.SLAVE_NOT_AVAILABLE, SendStatus.FLUSH_SLAVE_TIMEOUT]
    broker = Broker([answer(status) for status in statuses])
    result = broker.run(STRICT)
    assert result is not None
    assert (result.status, broker.brokers) == (SendStatus.FLUSH_SLAVE_TIMEOUT, ["a", "b", "a"])
    assert Broker([answer(statuses[0]), answer()]).run(STRICT) == answer()


@pytest.mark.parametrize("later", [RemotingTimeoutException("slow"), refusal(13), refusal(2)])
def test_earlier_result_is_preferred_to_a_later_failure(later: Exception) -> None:
    late = answer(SendStatus.FLUSH_DISK_TIMEOUT)
    assert Broker([late, later, later]).run(STRICT) is late


def test_earlier_result_is_preferred_to_an_expired_budget() -> None:
    late = answer(SendStatus.FLUSH_DISK_TIMEOUT)
    assert Broker([late, answer()], takes=4.0).run(STRICT) is late


def test_expired_budget_raises_too_much_request() -> None:
    broker = Broker([RemotingTimeoutException("slow")] * 3, takes=3.1)
    with pytest.raises(
        RemotingTooMuchRequestException, match="it took 3100 ms, longer than its timeout of 3000 ms; tried a"
    ):
        broker.run()
    assert broker.given == [3.0]


def test_expired_budget_says_whether_an_attempt_may_have_stored() -> None:
    for error, stored in ((RemotingTimeoutException("slow"), True), (RemotingConnectException("down"), False)):
        with pytest.raises(RemotingTooMuchRequestException) as caught:
            Broker([error] * 3, takes=3.1).run()
        assert caught.value.maybe_stored is stored


def test_last_attempt_begins_with_exactly_no_time_left() -> None:
    broker = Broker([RemotingTimeoutException("slow"), answer()], takes=3.0)
    assert broker.run() == answer()
    assert broker.given == [3.0, 0.0]


def test_cap_per_request_leaves_time_for_retries_but_not_for_the_last() -> None:
    broker = Broker([RemotingTimeoutException("slow")] * 3, takes=1.0)
    failed(broker, replace(DEFAULT, max_timeout_per_request=1.0), seconds=10.0)
    assert broker.given == [1.0, 1.0, 8.0]


@pytest.mark.parametrize(
    ("last", "code"),
    [
        (RemotingConnectException("down"), 10001),
        (RemotingTimeoutException("slow"), 10002),
        (MQClientException("no such broker"), 10003),
        (refusal(2), 2),
        (RemotingSendRequestException("reset"), -1),
        (RemotingTooMuchRequestException("full"), -1),
        (RemotingException("?"), -1),
    ],
)
def test_final_code_depends_on_the_last_error(last: Exception, code: int) -> None:
    assert failed(Broker([last] * 3)).response_code == code


def test_missing_queue_is_code_minus_one() -> None:
    broker = Broker([])
    nothing: Callable[[str | None, bool], None] = lambda _last, _retry: None  # noqa: E731
    with pytest.raises(MQClientException, match="no queue could be selected") as caught:
        DEFAULT.run("T", Deadline(3.0, broker.clock), nothing, broker.attempt)
    assert caught.value.response_code == -1


def test_final_error_has_attempts_duration_topic_brokers_and_last_cause() -> None:
    last = RemotingSendRequestException("reset by peer")
    error = failed(Broker([RemotingConnectException("down"), refusal(2), last], takes=0.5))
    assert str(error) == (
        "sending to topic T failed 3 times in 1500 ms, brokers [a, b, a]; "
        "last: RemotingSendRequestException: reset by peer"
    )
    assert error.__cause__ is last
