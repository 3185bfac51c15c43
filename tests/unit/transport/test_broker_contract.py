"""The contract of transports for requests that only brokers support (rocketmq_spark/transport/base.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.model.message import Message, MessageQueue, SendRequest, SendStatus
from rocketmq_spark.model.message_ext import decode_message_id
from rocketmq_spark.model.send_result import EndTransaction
from rocketmq_spark.testing import Reply
from tests.support.contract import ReadPromises
from tests.support.processes import PATIENCE
from tests.support.transports import ADDED, BROKERS, QUEUE, Brokers, opened_seam


@pytest.fixture(params=BROKERS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Brokers]:
    with opened_seam(request.param, request) as brokers:
        assert isinstance(brokers, Brokers)
        yield brokers


def test_a_batch_is_stored_and_acknowledged_with_its_first_offset(
    cluster: Brokers, batch_to: Callable[..., SendRequest], outcomes: Any
) -> None:
    for bodies in ((b"one", b"two"), (b"three",)):
        cluster.transport.send(batch_to(cluster.address, *bodies), PATIENCE, outcomes)
    cluster.pass_time(0.0)
    outcomes.wait(2)
    assert [(one.queue, one.status, one.error, one.queue_offset) for one in outcomes] == [
        (QUEUE, SendStatus.SEND_OK, None, 0),
        (QUEUE, SendStatus.SEND_OK, None, 2),
    ]
    assert [message.body for message in cluster.stored(1)] == [b"one", b"two", b"three"]
    assert cluster.transport.max_offset(QUEUE, cluster.address, PATIENCE) == 3
    assert cluster.transport.min_offset(QUEUE, cluster.address, PATIENCE) == 0


def test_a_single_message_keeps_its_flag_and_properties(
    cluster: Brokers, request_to: Callable[..., SendRequest], outcomes: Any
) -> None:
    properties = "TAGS\x01a\x02KEYS\x01k\x02UNIQ_KEY\x01U1\x02"
    request = request_to(cluster.address, (b"in ", b"pieces"), properties=properties, flag=9)
    cluster.transport.send(request, PATIENCE, outcomes)
    cluster.pass_time(0.0)
    outcomes.wait(1)
    assert cluster.stored(1) == [Message("orders", b"in pieces", 9, {"TAGS": "a", "KEYS": "k", "UNIQ_KEY": "U1"})]


def test_a_stored_message_can_be_viewed_and_found_by_its_time(
    cluster: Brokers, batch_to: Callable[..., SendRequest], request_to: Callable[..., SendRequest], outcomes: Any
) -> None:
    transport, address = cluster.transport, cluster.address
    assert transport.earliest_msg_store_time(QUEUE, address, PATIENCE) == -1
    transport.send(batch_to(address, b"one", b"two"), PATIENCE, outcomes)
    transport.send(request_to(address, b"three", properties="KEYS\x01k\x02", flag=9), PATIENCE, outcomes)
    cluster.pass_time(0.0)
    outcomes.wait(2)
    assert outcomes[0].offset_msg_id.count(",") == 1
    _, physical_offset = decode_message_id(outcomes[1].offset_msg_id)
    viewed = transport.view_message(address, physical_offset, PATIENCE, topic="orders")
    assert (viewed.topic, viewed.body, viewed.flag, viewed.keys) == ("orders", b"three", 9, "k")
    assert viewed.properties.keys() - {*ADDED, "UNIQ_KEY"} == {"KEYS"}
    assert (viewed.queue_id, viewed.queue_offset, viewed.offset_msg_id) == (0, 2, outcomes[1].offset_msg_id)
    assert viewed.born_timestamp == 1_700_000_000_000
    earliest = transport.earliest_msg_store_time(QUEUE, address, PATIENCE)
    assert earliest <= viewed.store_timestamp
    assert transport.search_offset(QUEUE, earliest, address, PATIENCE) == 0
    assert transport.search_offset(QUEUE, viewed.store_timestamp + 1, address, PATIENCE) == 3
    with pytest.raises(MQClientException, match="commit-log offset 4711"):
        transport.view_message(address, 4711, PATIENCE)


def test_a_oneway_send_is_stored_without_an_outcome(cluster: Brokers, batch_to: Callable[..., SendRequest]) -> None:
    cluster.transport.send_oneway(batch_to(cluster.address, b"one", b"two"), PATIENCE)
    # An answer on the same connection shows that the broker has executed the oneway request before it.
    assert cluster.transport.max_offset(QUEUE, cluster.address, PATIENCE) == 2
    assert [message.body for message in cluster.stored(1)] == [b"one", b"two"]


def test_oneway_send_does_not_report_rejection(cluster: Brokers, batch_to: Callable[..., SendRequest]) -> None:
    cluster.play(Reply.code(13, "the message is illegal"))
    cluster.transport.send_oneway(batch_to(cluster.address, b"one"), PATIENCE)
    assert cluster.transport.max_offset(QUEUE, cluster.address, PATIENCE) == 0


def test_half_message_is_checked_and_the_answer_has_the_check_offsets(
    cluster: Brokers, request_to: Callable[..., SendRequest], outcomes: Any, collected: Any
) -> None:
    checks = collected()
    cluster.transport.on_check_transaction = checks
    properties = "UNIQ_KEY\x01U1\x02TRAN_MSG\x01true\x02PGROUP\x01pg\x02"
    cluster.transport.send(request_to(cluster.address, b"half", properties=properties, sys_flag=4), PATIENCE, outcomes)
    cluster.pass_time(0.0)
    [outcome] = outcomes.wait(1)
    assert cluster.stored(0) == []
    _, physical_offset = decode_message_id(outcome.offset_msg_id)
    cluster.transport.heart_beat(cluster.address, "client", ["pg"], PATIENCE)
    asked = cluster.check_transaction(physical_offset)
    [check] = checks.wait(1)
    assert check == asked
    assert (check.address, check.producer_group, check.unique_id) == (cluster.address, "pg", "U1")
    assert (check.message.topic, check.message.body) == ("orders", b"half")
    assert check.commit_log_offset != physical_offset
    assert check.answer(8, "found it") == EndTransaction(
        topic="orders",
        producer_group="pg",
        tran_state_table_offset=check.tran_state_table_offset,
        commit_log_offset=check.commit_log_offset,
        commit_or_rollback=8,
        msg_id="U1",
        transaction_id="U1",
        broker_name="broker-a",
        from_transaction_check=True,
        remark="found it",
    )
    cluster.transport.end_transaction_oneway(check.address, check.answer(8), PATIENCE)
    assert cluster.transport.max_offset(QUEUE, cluster.address, PATIENCE) == 1
    assert [message.body for message in cluster.stored(1)] == [b"half"]


def test_answered_end_of_a_transaction_reports_its_outcome(
    cluster: Brokers, request_to: Callable[..., SendRequest], outcomes: Any, collected: Any
) -> None:
    checks, ends = collected(), collected()
    cluster.transport.on_check_transaction = checks
    properties = "UNIQ_KEY\x01U1\x02TRAN_MSG\x01true\x02PGROUP\x01pg\x02"
    cluster.transport.send(request_to(cluster.address, b"half", properties=properties, sys_flag=4), PATIENCE, outcomes)
    cluster.pass_time(0.0)
    [outcome] = outcomes.wait(1)
    cluster.transport.heart_beat(cluster.address, "client", ["pg"], PATIENCE)
    cluster.check_transaction(decode_message_id(outcome.offset_msg_id)[1])
    [check] = checks.wait(1)
    cluster.transport.end_transaction(cluster.address, check.answer(8), PATIENCE, ends)
    cluster.pass_time(0.0)
    assert ends.wait(1) == [None]
    assert [message.body for message in cluster.stored(1)] == [b"half"]
    with pytest.raises(ValueError, match="without a commit or rollback: brokers do not answer"):
        cluster.transport.end_transaction(cluster.address, check.answer(0), PATIENCE, ends)


def test_a_topic_that_was_created_has_queues(cluster: Brokers) -> None:
    cluster.transport.create_topic(cluster.address, "new", 4, 6, PATIENCE)
    assert cluster.transport.max_offset(MessageQueue("new", "broker-a", 0), cluster.address, PATIENCE) == 0


class TestReadPromises(ReadPromises):
    """The contract of every transport that can read."""

    @pytest.fixture
    def seam(self, cluster: Brokers) -> Brokers:
        return cluster
