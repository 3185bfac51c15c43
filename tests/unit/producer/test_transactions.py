"""Transactional messages."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.errors import MQClientException, RemotingConnectException
from rocketmq_spark.model.message import Message, SendStatus
from rocketmq_spark.model.message_ext import MessageExt, decode_message_id
from rocketmq_spark.model.send_result import EndTransaction, LocalTransactionState, TransactionCheck
from rocketmq_spark.producer.hooks import EndTransactionContext
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.protocol.compression import COMPRESSED_FLAG
from rocketmq_spark.testing import Reply
from tests.support.processes import PATIENCE, wait_for
from tests.support.scripted import ScriptedTransport

COMMIT, ROLLBACK, UNKNOW = LocalTransactionState
Make = Callable[..., Producer]


class Listener:
    """Returns the test's answers, and records its calls."""

    def __init__(self, execute: object = COMMIT, check: object = COMMIT) -> None:
        self.execute, self.check = execute, check
        self.executed: list[tuple[Message, Any]] = []
        self.checked: list[MessageExt] = []
        self.asked = threading.Event()

    def execute_local_transaction(self, message: Message, arg: Any) -> LocalTransactionState | None:
        self.executed.append((message, arg))
        return self._say(self.execute)

    def check_local_transaction(self, message: MessageExt) -> LocalTransactionState | None:
        self.checked.append(message)
        self.asked.set()
        return self._say(self.check)

    @staticmethod
    def _say(answer: Any) -> LocalTransactionState | None:
        if isinstance(answer, Exception):
            raise answer
        assert answer is None or isinstance(answer, LocalTransactionState)
        return answer


def started(make_producer: Make, listener: Listener, **properties: Any) -> Producer:
    producer = make_producer(transaction_listener=listener, **properties)
    producer.start()
    return producer


def ends(transport: ScriptedTransport) -> list[tuple[str, EndTransaction]]:
    return [(call[1], call[2]) for call in transport.calls if call[0] == "end_transaction"]


def visible(transport: ScriptedTransport) -> list[Message]:
    return [
        message for queue, messages in transport.stored.items() for message in messages if queue.topic.endswith("T")
    ]


def test_a_half_message_is_marked_and_has_no_delay(
    make_producer: Make, transport: ScriptedTransport, caplog: pytest.LogCaptureFixture
) -> None:
    producer = started(make_producer, Listener())
    producer.send_in_transaction(Message.of("T", b"x", delay_time_level=3), 7)
    producer.send_in_transaction(Message.of("T", b"x", delay_ms=500), 7)
    for request in transport.requests:
        assert request.batch.sys_flag == 4
        properties = request.batch.properties
        assert "TRAN_MSG\x01true\x02" in properties
        assert "PGROUP\x01pg\x02" in properties
        assert "DELAY" not in properties
    # Java sends timer properties; the broker would lose the message.
    assert "a half message to topic T can't be delayed: properties dropped: TIMER_DELAY_MS" in caplog.text


@pytest.mark.parametrize(
    ("answer", "state", "code"),
    [(COMMIT, COMMIT, 8), (ROLLBACK, ROLLBACK, 12), (UNKNOW, UNKNOW, 0), (None, UNKNOW, 0)],
)
def test_local_transaction_state_is_sent_to_the_broker(
    make_producer: Make, transport: ScriptedTransport, answer: object, state: LocalTransactionState, code: int
) -> None:
    listener = Listener(answer)
    result = started(make_producer, listener).send_in_transaction(Message.of("T", b"x"), 7)
    assert (result.status, result.local_transaction_state) == (SendStatus.SEND_OK, state)
    [(message, arg)] = listener.executed
    assert (message.topic, message.body, arg, message.unique_id) == ("T", b"x", 7, result.msg_id)
    [(address, end)] = ends(transport)
    assert address == transport.requests[0].address
    assert (end.commit_or_rollback, end.producer_group, end.topic, end.msg_id) == (code, "pg", "T", result.msg_id)
    assert end.commit_log_offset == decode_message_id(result.offset_msg_id)[1]
    assert (end.tran_state_table_offset, end.from_transaction_check, end.remark) == (result.queue_offset, False, "")
    assert len(visible(transport)) == (1 if answer is COMMIT else 0)


def test_a_local_transaction_that_raises_is_unknown_with_a_remark(
    make_producer: Make, transport: ScriptedTransport
) -> None:
    result = started(make_producer, Listener(KeyError("stock"))).send_in_transaction(Message.of("T", b"x"))
    assert result.local_transaction_state is UNKNOW
    assert ends(transport)[0][1].remark == "executing the local transaction raised KeyError: 'stock'"


def test_unsafe_half_message_is_rolled_back_without_its_transaction(
    make_producer: Make, transport: ScriptedTransport
) -> None:
    transport.always = dict.fromkeys("ab", Reply(status=SendStatus.SLAVE_NOT_AVAILABLE))
    listener = Listener()
    result = started(make_producer, listener).send_in_transaction(Message.of("T", b"x"))
    assert (result.status, result.local_transaction_state) == (SendStatus.SLAVE_NOT_AVAILABLE, ROLLBACK)
    assert listener.executed == []
    assert ends(transport)[0][1].commit_or_rollback == 12


def test_an_end_that_can_not_be_sent_does_not_raise_and_is_not_repeated(
    make_producer: Make, transport: ScriptedTransport, caplog: pytest.LogCaptureFixture
) -> None:
    transport.fail("end_transaction", RemotingConnectException("broker down"))
    result = started(make_producer, Listener()).send_in_transaction(Message.of("T", b"x"))
    assert result.local_transaction_state is COMMIT
    assert (result.ended, str(result.end_error)) == (False, "broker down")
    assert len(ends(transport)) == 1
    assert "the broker will check it later" in caplog.text


@pytest.mark.parametrize(("state", "ended"), [(COMMIT, True), (ROLLBACK, True), (UNKNOW, False)])
def test_result_reports_whether_the_broker_acknowledged_the_end(
    make_producer: Make, state: LocalTransactionState, *, ended: bool
) -> None:
    result = started(make_producer, Listener(state)).send_in_transaction(Message.of("T", b"x"))
    assert (result.ended, result.end_error) == (ended, None)
    assert result.facts()["end_error"] is None


def test_unsent_half_message_never_runs_its_transaction(make_producer: Make, transport: ScriptedTransport) -> None:
    lost = Reply(error=RemotingConnectException("down"))
    transport.always = {"a": lost, "b": lost}
    listener = Listener()
    with pytest.raises(MQClientException, match="sending a half message to topic T") as caught:
        started(make_producer, listener).send_in_transaction(Message.of("T", b"x"))
    assert (caught.value.response_code, listener.executed, ends(transport)) == (10001, [], [])


@pytest.mark.parametrize("answer", ["COMMIT_MESSAGE", True, []])
def test_invalid_transaction_state_is_unknown_with_a_remark(
    make_producer: Make, transport: ScriptedTransport, answer: Any
) -> None:
    def execute(_message: Message, _arg: Any) -> Any:
        return answer

    producer = started(make_producer, Listener())
    result = producer.send_in_transaction(Message.of("T", b"x"), executor=execute)
    assert result.local_transaction_state is UNKNOW
    [(_, end)] = ends(transport)
    assert end.commit_or_rollback == 0
    assert f"returned {answer!r}; return a LocalTransactionState or None" in end.remark


@pytest.mark.parametrize("namespace", [None, "space"])
def test_no_message_is_code_13(make_producer: Make, namespace: str | None) -> None:
    producer = started(make_producer, Listener(), namespace=namespace)
    for call in (producer.send, producer.send_oneway, producer.send_in_transaction):
        with pytest.raises(MQClientException) as caught:
            call(None)  # type: ignore[arg-type]
        assert caught.value.response_code == 13


def test_transaction_id_is_the_unique_id_at_execution_and_checks(
    make_producer: Make, transport: ScriptedTransport
) -> None:
    # Applications use it as the key of their local transactions, like the listener of Java's quick start.
    listener = Listener(UNKNOW, COMMIT)
    producer = started(make_producer, listener)
    result = producer.send_in_transaction(Message.of("T", b"x"))
    ask(transport)
    assert listener.asked.wait(PATIENCE)
    producer.shutdown()
    assert [listener.executed[0][0].transaction_id, listener.checked[0].transaction_id] == [result.msg_id] * 2


def test_executor_argument_replaces_the_listener(make_producer: Make, transport: ScriptedTransport) -> None:
    listener = Listener()
    producer = started(make_producer, listener)
    seen: list[Any] = []

    def execute(message: Message, arg: Any) -> LocalTransactionState:
        seen.append((message.body, arg))
        return ROLLBACK

    assert producer.send_in_transaction(Message.of("T", b"x"), 3, executor=execute).local_transaction_state is ROLLBACK
    assert (seen, listener.executed) == ([(b"x", 3)], [])


def test_without_a_listener_a_transaction_is_refused(producer: Producer) -> None:
    with pytest.raises(MQClientException, match="has no transaction_listener"):
        producer.send_in_transaction(Message.of("T", b"x"))


def ask(transport: ScriptedTransport) -> str:
    """Make the broker check the first half message; return the broker's address."""
    transport.check_transaction("10.0.0.9:1", 0)
    return "10.0.0.9:1"


@pytest.mark.parametrize(
    ("answer", "code", "remark"),
    [
        (COMMIT, 8, ""),
        (ROLLBACK, 12, ""),
        (None, 0, ""),
        (OSError("database down"), 0, "checking the local transaction raised OSError: database down"),
    ],
)
def test_check_is_answered_to_the_address_that_sent_it(
    make_producer: Make, transport: ScriptedTransport, answer: object, code: int, remark: str
) -> None:
    listener = Listener(UNKNOW, answer)
    producer = started(make_producer, listener)
    sent = producer.send_in_transaction(Message.of("T", b"x", keys="k"))
    asker = ask(transport)
    assert listener.asked.wait(PATIENCE)
    producer.shutdown()
    assert [(message.topic, message.body, message.keys) for message in listener.checked] == [("T", b"x", "k")]
    (address, end) = ends(transport)[-1]
    assert (address, end.commit_or_rollback, end.from_transaction_check) == (asker, code, True)
    assert (end.remark, end.producer_group, end.msg_id, end.topic) == (remark, "pg", sent.msg_id, "T")


def test_check_of_a_running_transaction_is_left_to_the_broker_to_repeat(
    make_producer: Make, transport: ScriptedTransport, caplog: pytest.LogCaptureFixture
) -> None:
    """The listener may not know the transaction yet, and would roll it back."""
    caplog.set_level(logging.DEBUG)

    class Running(Listener):
        def execute_local_transaction(self, message: Message, arg: Any) -> LocalTransactionState | None:
            ask(transport)
            wait_for(lambda: "which still runs; the broker will repeat the check" in caplog.text)
            return COMMIT

    listener = Running(check=ROLLBACK)
    producer = started(make_producer, listener)
    sent = producer.send_in_transaction(Message.of("T", b"x"))
    assert (listener.checked, [end.from_transaction_check for _, end in ends(transport)]) == ([], [False])
    assert sent.ended
    # A later check is answered: the broker may have lost the end.
    ask(transport)
    assert listener.asked.wait(PATIENCE)
    producer.shutdown()
    assert ends(transport)[-1][1].from_transaction_check


@pytest.mark.parametrize("compress_type", ["ZLIB", "LZ4", "ZSTD"])
def test_listener_gets_the_decompressed_body_at_a_check(
    make_producer: Make, transport: ScriptedTransport, compress_type: str
) -> None:
    listener = Listener(UNKNOW, COMMIT)
    producer = started(make_producer, listener, compress_type=compress_type, send_msg_timeout=60_000)
    producer.send_in_transaction(Message.of("T", b"x" * 8000))
    assert transport.requests[0].batch.nbytes < 8000
    ask(transport)
    assert listener.asked.wait(PATIENCE)
    producer.shutdown()
    [message] = listener.checked
    # The flag fits the body, for listeners that decompress by it.
    assert (message.body, message.sys_flag & COMPRESSED_FLAG) == (b"x" * 8000, 0)


@pytest.mark.parametrize(
    ("sys_flag", "why"), [(0x301, "decompressing a body of 1 bytes with ZLIB"), (0x701, "compression type 7")]
)
def test_check_with_unreadable_body_is_unknown_and_later_checks_succeed(
    make_producer: Make, transport: ScriptedTransport, caplog: pytest.LogCaptureFixture, sys_flag: int, why: str
) -> None:
    listener = Listener(UNKNOW, COMMIT)
    producer = started(make_producer, listener)
    producer.send_in_transaction(Message.of("T", b"x"))
    checks: list[TransactionCheck] = []
    on_check, transport.on_check_transaction = transport.on_check_transaction, checks.append
    ask(transport)
    assert on_check is not None
    on_check(replace(checks[0], message=replace(checks[0].message, sys_flag=sys_flag | 4)))
    on_check(checks[0])
    assert listener.asked.wait(PATIENCE)
    producer.shutdown()
    assert len(listener.checked) == 1
    unreadable, readable = (end for _, end in ends(transport)[1:])
    assert (unreadable.commit_or_rollback, readable.commit_or_rollback) == (0, 8)
    assert why in unreadable.remark
    assert why in caplog.text


def test_check_of_an_unknown_group_is_logged_and_ignored(
    make_producer: Make, transport: ScriptedTransport, caplog: pytest.LogCaptureFixture
) -> None:
    gone = started(make_producer, Listener(UNKNOW), instance_name="shared")
    other = make_producer("other", instance_name="shared", transaction_listener=Listener())
    other.start()
    gone.send_in_transaction(Message.of("T", b"x"))
    gone.shutdown()
    before = ends(transport)
    transport.check_transaction("10.0.0.9:1", 0)
    assert "this process has no transactional producer of group 'pg'" in caplog.text
    other.shutdown()
    assert ends(transport) == before


def test_a_producer_without_a_listener_logs_and_ignores_a_check(
    make_producer: Make, transport: ScriptedTransport, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_producer()
    plain.start()
    plain.send(Message.of("T", b"x").with_properties({"TRAN_MSG": "true", "PGROUP": "pg"}))
    ask(transport)
    plain.shutdown()
    assert "producer pg has no transaction_listener" in caplog.text
    assert ends(transport) == []


def test_listener_sees_topics_without_namespace(make_producer: Make, transport: ScriptedTransport) -> None:
    listener = Listener(UNKNOW, COMMIT)
    producer = started(make_producer, listener, namespace="space")
    producer.send_in_transaction(Message.of("T", b"x"))
    ask(transport)
    assert listener.asked.wait(PATIENCE)
    producer.shutdown()
    assert [listener.executed[0][0].topic, listener.checked[0].topic] == ["T", "T"]
    assert {(end.producer_group, end.topic) for _, end in ends(transport)} == {("pg", "T")}


def test_end_transaction_hooks_see_both_ends_and_their_errors_are_ignored(
    make_producer: Make, transport: ScriptedTransport
) -> None:
    listener = Listener(UNKNOW, COMMIT)
    producer = started(make_producer, listener)
    seen: list[EndTransactionContext] = []

    def hook(context: EndTransactionContext) -> None:
        seen.append(context)
        raise ValueError("a hook's own trouble")

    producer.register_end_transaction_hook(hook)
    result = producer.send_in_transaction(Message.of("T", b"x"))
    ask(transport)
    assert listener.asked.wait(PATIENCE)
    producer.shutdown()
    assert [(context.transaction_state, context.from_transaction_check) for context in seen] == [
        (UNKNOW, False),
        (COMMIT, True),
    ]
    assert {context.msg_id for context in seen} == {result.msg_id}
    assert len(ends(transport)) == 2
