"""The check that a broker rejects late ends."""

from __future__ import annotations

import pytest

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.testing import FakeCluster, Reply
from tests.support.two_phase import Driver

NAMES = {"broker-0", "broker-1"}


def test_brokers_with_a_fence_pass_once_per_process(cluster: FakeCluster, first: Driver) -> None:
    first.two_phase.prepare(NAMES)
    cluster.brokers["broker-0"].play(Reply(), code=RequestCode.END_TRANSACTION)
    first.two_phase.prepare(NAMES)
    assert [message.body for message in cluster.messages("rocketmq-spark-decisions")] == []


def test_a_broker_that_executes_late_ends_is_refused(cluster: FakeCluster, first: Driver) -> None:
    cluster.brokers["broker-1"].storage.settings.transaction_timeout = 365 * 24 * 3600.0
    with pytest.raises(MQClientException, match=r"broker broker-1 .*: it must reject the end .*answered: success"):
        first.two_phase.prepare(NAMES)


def test_a_broker_that_rejects_new_half_messages_is_refused(cluster: FakeCluster, first: Driver) -> None:
    late = Reply.code(ResponseCode.ILLEGAL_OPERATION, "expired")
    cluster.brokers["broker-0"].play(late, code=RequestCode.END_TRANSACTION, times=3)
    with pytest.raises(MQClientException, match="rejects the end of a new half message"):
        first.two_phase.prepare(NAMES)


def test_the_check_is_repeated_after_a_broken_connection(cluster: FakeCluster, first: Driver) -> None:
    cluster.brokers["broker-0"].play(Reply(closes=True, stored=True), code=RequestCode.END_TRANSACTION)
    first.two_phase.prepare(NAMES)
