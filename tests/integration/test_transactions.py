"""Half messages, their ends and the broker's checks, on a real broker that checks early, and its proxy."""

from __future__ import annotations

import queue as queues
from typing import Any

import pytest

from rocketmq_spark.model.message import Message
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.names import wrap
from rocketmq_spark.model.send_result import (
    TRANSACTION_COMMIT_TYPE,
    TRANSACTION_NOT_TYPE,
    TRANSACTION_ROLLBACK_TYPE,
    LocalTransactionState,
    TransactionCheck,
)
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import SharedCluster
from tests.support.java import Java, line_of
from tests.support.processes import PATIENCE
from tests.support.reading import read_topic
from tests.support.transactions import Transactional, topic_of

pytestmark = pytest.mark.integration

# A proxy reports a new producer group to its brokers every 20 s; before that the brokers check nothing.


def test_committed_half_message_becomes_visible_and_rolled_back_one_not(
    tuned: SharedCluster,
) -> None:
    with RemotingTransport([tuned.name_server]) as transport:
        topic = topic_of(tuned, transport)
        producer = Transactional(transport, tuned.brokers[0].address, topic)
        producer.end(producer.send_half(b"rolled back"), TRANSACTION_ROLLBACK_TYPE, "the account is closed")
        producer.end(producer.send_half(b"committed"), TRANSACTION_COMMIT_TYPE)
        unanswered = producer.send_half(b"unanswered")
        # The check of the younger one: by then the broker has been through the older ones too.
        check = producer.next_check()
        assert (check.message.body, check.msg_id) == (b"unanswered", unanswered.msg_id)
        [stored] = read_topic(tuned.name_server, topic, 1)
        assert (stored.body, stored.queue_id, stored.properties["KEYS"]) == (b"committed", 0, "k1")
        assert stored.sys_flag & 0xC == TRANSACTION_COMMIT_TYPE


def test_broker_answers_each_end_and_delivers_a_second_commit_again(tuned: SharedCluster) -> None:
    with RemotingTransport([tuned.name_server]) as transport:
        topic = topic_of(tuned, transport)
        producer = Transactional(transport, tuned.brokers[0].address, topic)
        rolled_back, half, other = (producer.send_half(body) for body in (b"rolled back", b"committed", b"other"))
        assert producer.answered_end(rolled_back, commit_or_rollback=TRANSACTION_ROLLBACK_TYPE) is None
        wrong_group = producer.answered_end(half, producer_group="another")
        assert "The producer group wrong" in str(wrong_group)
        assert [producer.answered_end(half) for _ in range(2)] == [None, None]
        assert producer.answered_end(other) is None
        bodies = [message.body for message in read_topic(tuned.name_server, topic, 3)]
        assert bodies == [b"committed", b"committed", b"other"]


def test_check_answer_decides_about_undecided_half_message(tuned: SharedCluster) -> None:
    with RemotingTransport([tuned.name_server]) as transport:
        address = tuned.brokers[0].address
        topic = topic_of(tuned, transport)
        producer = Transactional(transport, address, topic)
        halves = {body: producer.send_half(body) for body in (b"to commit", b"to roll back", b"undecided")}
        for half in halves.values():
            producer.end(half, TRANSACTION_NOT_TYPE, "don't know yet")
        answers = {b"to commit": TRANSACTION_COMMIT_TYPE, b"to roll back": TRANSACTION_ROLLBACK_TYPE}
        checks: dict[bytes, TransactionCheck] = {}
        asked = 0
        while len(checks) < 3 or asked < 3:
            check = producer.next_check()
            asked += check.message.body == b"undecided"
            if check.message.body not in checks and check.message.body in answers:
                answer = check.answer(answers[check.message.body])
                transport.end_transaction_oneway(check.address, answer, PATIENCE)
            checks.setdefault(check.message.body, check)
        for body, check in checks.items():
            half = halves[body]
            assert (check.address, check.broker_name, check.producer_group) == (address, "broker-0", producer.group)
            assert (check.message.topic, check.message.body) == (topic, body)
            assert check.msg_id == check.transaction_id == check.unique_id == half.msg_id
            # The RocksDB store asks without a new copy. With the default store the offsets are those of a copy.
            assert check.commit_log_offset == half.commit_log_offset
            assert check.tran_state_table_offset == half.tran_state_table_offset
        assert [message.body for message in read_topic(tuned.name_server, topic, 1)] == [b"to commit"]


def test_proxy_forwards_checks_and_only_their_answers_count(tuned: SharedCluster) -> None:
    with RemotingTransport([tuned.proxy.address]) as transport:
        topic = topic_of(tuned, transport)
        producer = Transactional(transport, tuned.proxy.address, topic)
        half = producer.send_half(b"half")
        # The answer is success, without effect: a 5.5.0 proxy knows only half messages that were sent over gRPC.
        producer.end(half, TRANSACTION_COMMIT_TYPE)
        check = producer.next_check()
        assert (check.address, check.broker_name, check.offset_msg_id) == (tuned.proxy.address, "", "")
        assert (check.message.topic, check.message.body, check.unique_id) == (topic, b"half", half.msg_id)
        assert read_topic(tuned.name_server, topic) == []
        transport.end_transaction_oneway(check.address, check.answer(TRANSACTION_COMMIT_TYPE), PATIENCE)
        assert [message.body for message in read_topic(tuned.name_server, topic, 1)] == [b"half"]


@pytest.mark.parametrize("namespace", ["", "space"])
def test_transaction_listener_decides_about_pending_half_messages(tuned: SharedCluster, namespace: str) -> None:
    class Listener:
        """Leaves each transaction open at first, and decides at the broker's check."""

        def __init__(self) -> None:
            self.checked: queues.Queue[bytes] = queues.Queue()

        def execute_local_transaction(self, message: Message, arg: object) -> LocalTransactionState:
            return LocalTransactionState.UNKNOW

        def check_local_transaction(self, message: MessageExt) -> LocalTransactionState:
            self.checked.put(message.body)
            if message.body == b"becomes visible":
                return LocalTransactionState.COMMIT_MESSAGE
            return LocalTransactionState.ROLLBACK_MESSAGE

    with RemotingTransport([tuned.name_server], namespace=namespace) as transport:
        topic = topic_of(tuned, transport)
    wired = wrap(namespace, topic)
    listener = Listener()
    settings: dict[str, Any] = {"name_server": tuned.name_server, "heartbeat_broker_interval": 1000}
    settings |= {"namespace": namespace} if namespace else {}
    with Producer(f"pg-{topic}", transaction_listener=listener, **settings) as producer:
        for body in (b"never does", b"becomes visible"):
            result = producer.send_in_transaction(Message.of(topic, body))
            assert result.local_transaction_state is LocalTransactionState.UNKNOW
        assert read_topic(tuned.name_server, wired) == []
        asked = {listener.checked.get(timeout=PATIENCE) for _ in range(2)}
        assert asked == {b"never does", b"becomes visible"}
        # A broker that asks again before it has noted the answer gets a second one, and delivers the message again.
        assert {message.body for message in read_topic(tuned.name_server, wired, 1)} == {b"becomes visible"}
        # Were the rolled-back one to come, it would come with the checks of a younger one.
        producer.send_in_transaction(Message.of(topic, b"younger"))
        while listener.checked.get(timeout=PATIENCE) != b"younger":
            pass
        assert {message.body for message in read_topic(tuned.name_server, wired)} == {b"becomes visible"}


@pytest.mark.parametrize("compress_type", ["ZLIB", "LZ4", "ZSTD", "over gRPC"])
def test_listener_gets_the_decompressed_body_of_a_large_message(tuned: SharedCluster, compress_type: str) -> None:
    class Listener:
        def __init__(self) -> None:
            self.checked: queues.Queue[bytes] = queues.Queue()

        def execute_local_transaction(self, message: Message, arg: object) -> LocalTransactionState:
            return LocalTransactionState.UNKNOW

        def check_local_transaction(self, message: MessageExt) -> LocalTransactionState:
            self.checked.put(message.body)
            return LocalTransactionState.ROLLBACK_MESSAGE

    with RemotingTransport([tuned.name_server]) as transport:
        topic = topic_of(tuned, transport)
    listener, body = Listener(), b"0123456789" * 800
    settings: dict[str, Any] = {"name_server": tuned.name_server, "compress_type": compress_type}
    if compress_type == "over gRPC":
        settings = {"endpoints": tuned.endpoints, "compress_type": "ZLIB"}
    settings |= {"heartbeat_broker_interval": 1000, "send_msg_timeout": int(PATIENCE * 1000)}
    with Producer(f"pg-{topic}", transaction_listener=listener, **settings) as producer:
        producer.send_in_transaction(Message.of(topic, body))
        assert listener.checked.get(timeout=PATIENCE) == body


def test_a_java_producer_s_transaction_becomes_visible_when_committed(java: Java, tuned: SharedCluster) -> None:
    with RemotingTransport([tuned.name_server]) as transport:
        topic = topic_of(tuned, transport)
    states = ["COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "COMMIT_MESSAGE"]
    requests = [
        {"messages": [line_of(topic, b"%d" % number)], "transaction": state} for number, state in enumerate(states)
    ]
    # An END_TRANSACTION has no answer. The answer to a later message shows that it was sent.
    requests.append({"messages": [line_of(topic, b"3")]})
    *results, _ = java.send(tuned.name_server, requests)
    assert [one["msgId"] for one in results] == [one["transactionId"] for one in results]
    stored = read_topic(tuned.name_server, topic, 3)
    assert sorted(message.body for message in stored) == [b"0", b"2", b"3"]


def test_a_java_consumer_sees_a_committed_message_and_no_other(java: Java, tuned: SharedCluster) -> None:
    class Listener:
        def execute_local_transaction(self, message: Message, arg: LocalTransactionState) -> LocalTransactionState:
            return arg

        def check_local_transaction(self, message: object) -> LocalTransactionState:
            return LocalTransactionState.UNKNOW

    with RemotingTransport([tuned.name_server]) as transport:
        topic = topic_of(tuned, transport)
    group = f"pg-{topic}"
    with Producer(group, name_server=tuned.name_server, transaction_listener=Listener()) as producer:
        for state in LocalTransactionState:
            producer.send_in_transaction(Message.of(topic, state.name.encode(), keys="k"), state)
    found = java.read_topic(tuned.name_server, topic, 2, within=8.0)
    assert [(line["body"], line["properties"]["KEYS"]) for line in found] == [(b"COMMIT_MESSAGE", "k")]
