"""Whether to send again, and how long to wait."""

from __future__ import annotations

import pytest

from rocketmq_spark.errors import (
    BrokerBusyException,
    BrokerUnavailableException,
    MQBrokerException,
    RemotingConnectException,
    RemotingTimeoutException,
    RocketMQError,
)
from rocketmq_spark.model.message import EncodedBatch, MessageQueue, SendOutcome, SendStatus
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.sink.in_flight import PendingBatch, RetryPolicy, Verdict

QUEUE = MessageQueue("T", "a", 0)


def failed(error: RocketMQError) -> SendOutcome:
    return SendOutcome(QUEUE, None, error, 1.0)


def answered(status: SendStatus) -> SendOutcome:
    return SendOutcome(QUEUE, status, None, 1.0)


def policy(times: int = 2, *, another: bool = False, require: bool = True) -> RetryPolicy:
    options = SinkOptions.of(
        name_server=("ns:1",),
        retry_times_when_send_failed=times,
        retry_times_when_send_async_failed=times,
        retry_another_broker_when_not_store_ok=another,
        require_store_ok=require,
    )
    return RetryPolicy(options)


def batch(*, bound: bool = False) -> PendingBatch:
    return PendingBatch(EncodedBatch("T", (b"",), 1, 0), QUEUE if bound else None)


def busy() -> SendOutcome:
    return failed(BrokerBusyException("busy", 2, "[TIMEOUT_CLEAN_QUEUE]", "a:1"))


def test_send_ok_is_stored() -> None:
    assert policy().decide(batch(), answered(SendStatus.SEND_OK)) is Verdict.STORED


def test_failures_try_other_brokers_before_each_backoff() -> None:
    tried, verdicts = batch(), []
    for _ in range(7):
        verdicts.append(policy().decide(tried, failed(RemotingConnectException("refused"))))
    other, later = Verdict.OTHER_BROKER, Verdict.LATER
    assert verdicts == [other, other, later, other, other, later, other]
    assert tried.waits == 2


def test_flow_control_always_retries_the_same_queue() -> None:
    tried = batch()
    assert {policy().decide(tried, busy()) for _ in range(50)} == {Verdict.SAME_QUEUE}
    assert tried.waits == 50


@pytest.mark.parametrize("error", [RemotingTimeoutException("t"), BrokerUnavailableException("full", 14, "", "a:1")])
def test_bound_rows_wait_for_their_queue(error: RocketMQError) -> None:
    assert policy().decide(batch(bound=True), failed(error)) is Verdict.SAME_QUEUE


def test_permanent_rejection_is_given_up() -> None:
    illegal = MQBrokerException("13", 13, "the message is illegal", "a:1")
    assert policy().decide(batch(), failed(illegal)) is Verdict.GIVE_UP


@pytest.mark.parametrize("status", [status for status in SendStatus if status is not SendStatus.SEND_OK])
@pytest.mark.parametrize("times", [0, 1, 2, 5])
def test_unsafe_rows_are_resent_retry_times_and_then_given_up(status: SendStatus, times: int) -> None:
    tried = batch()
    verdicts = [policy(times).decide(tried, answered(status)) for _ in range(times + 1)]
    assert verdicts == [Verdict.SAME_QUEUE] * times + [Verdict.GIVE_UP]


def test_unsafe_rows_go_to_another_broker_on_request_unless_bound() -> None:
    outcome = answered(SendStatus.SLAVE_NOT_AVAILABLE)
    assert policy(another=True).decide(batch(), outcome) is Verdict.LATER
    assert policy(another=True).decide(batch(bound=True), outcome) is Verdict.SAME_QUEUE


def test_any_stored_answer_is_accepted_without_require_store_ok() -> None:
    outcome = answered(SendStatus.FLUSH_DISK_TIMEOUT)
    assert policy(require=False).decide(batch(), outcome) is Verdict.STORED
    tried = batch()
    lenient = policy(1, another=True, require=False)
    assert lenient.decide(tried, outcome) is Verdict.LATER
    assert lenient.decide(tried, outcome) is Verdict.STORED
