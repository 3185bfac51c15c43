"""Hooks and message trace."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from rocketmq_spark.errors import MQBrokerException, MQClientException, RemotingConnectException
from rocketmq_spark.model.message import Message, MessageQueue, SendRequest, SendStatus
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.send_result import LocalTransactionState
from rocketmq_spark.producer.hooks import CheckForbiddenContext, CommunicationMode, SendMessageContext, TraceDispatcher
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.sink.trace import MAX_MESSAGE_BYTES, MessageType, PubTrace, trace_messages
from rocketmq_spark.testing import Reply
from tests.support.processes import PATIENCE
from tests.support.scripted import ScriptedTransport, route

Make = Callable[..., Producer]
MESSAGE = Message.of("T", b"x", tags="t", keys="k")


class Observer:
    """Notes what it sees; `trouble` is raised each time."""

    def __init__(self, trouble: Exception | None = None) -> None:
        self.seen: list[tuple[str, SendMessageContext]] = []
        self.trouble = trouble

    def send_message_before(self, context: SendMessageContext) -> None:
        self._note("before", context)

    def send_message_after(self, context: SendMessageContext) -> None:
        self._note("after", context)

    def _note(self, when: str, context: SendMessageContext) -> None:
        self.seen.append((when, context))
        if self.trouble is not None:
            raise self.trouble


def test_an_observer_sees_before_and_after_with_the_result(producer: Producer, transport: ScriptedTransport) -> None:
    observer = Observer()
    producer.register_send_message_hook(observer)
    result = producer.send(MESSAGE)
    assert [when for when, _ in observer.seen] == ["before", "after"]
    context = observer.seen[0][1]
    assert context is observer.seen[1][1]
    assert (context.send_result, context.exception) == (result, None)
    assert (context.producer_group, context.communication_mode) == ("pg", CommunicationMode.SYNC)
    assert context.broker_addr == transport.requests[0].address
    assert context.message.unique_id == result.msg_id


def test_context_has_the_exception_of_a_failed_send(producer: Producer, transport: ScriptedTransport) -> None:
    observer = Observer()
    producer.register_send_message_hook(observer)
    transport.always = dict.fromkeys("ab", Reply(error=RemotingConnectException("down")))
    with pytest.raises(MQClientException):
        producer.send(MESSAGE)
    transport.always = dict.fromkeys("ab", Reply.code(13, "illegal"))
    with pytest.raises(MQBrokerException):
        producer.send(MESSAGE)
    outcomes = [(when, type(context.exception).__name__) for when, context in observer.seen if when == "after"]
    assert outcomes == [("after", "RemotingConnectException")] * 3 + [("after", "MQBrokerException")]


def test_context_has_the_exception_of_an_interrupted_send(make_producer: Make) -> None:
    class Interrupted(ScriptedTransport):
        def send(self, *_args: object, **_kwargs: object) -> None:
            raise KeyboardInterrupt

        send_oneway = send

    observer = Observer()
    producer = make_producer(transport=Interrupted({"T": route({"a": 1})}))
    producer.start()
    producer.register_send_message_hook(observer)
    for send in (producer.send, producer.send_oneway):
        with pytest.raises(KeyboardInterrupt):
            send(MESSAGE)
    assert [(when, type(context.exception)) for when, context in observer.seen[1::2]] == [
        ("after", KeyboardInterrupt)
    ] * 2


def test_observer_sees_no_attempt_that_began_before_its_registration(
    producer: Producer, transport: ScriptedTransport
) -> None:
    early, late = Observer(), Observer()

    def register(_request: SendRequest) -> Reply:
        producer.register_send_message_hook(late)
        return Reply()

    producer.register_send_message_hook(early)
    transport.play("a", register)
    transport.play("b", register)
    producer.send(MESSAGE)
    assert (len(early.seen), late.seen) == (2, [])


def test_an_asynchronous_send_is_seen_once_after_with_its_final_outcome(
    producer: Producer, transport: ScriptedTransport
) -> None:
    # Java calls the hooks after an asynchronous send twice, first without a result.
    observer = Observer()
    producer.register_send_message_hook(observer)
    transport.play("a", Reply(error=RemotingConnectException("down")))
    transport.play("b", Reply(error=RemotingConnectException("down")))
    result = producer.send_async(MESSAGE).result(PATIENCE)
    producer.shutdown()
    assert [when for when, _ in observer.seen] == ["before", "after"]
    assert observer.seen[1][1].send_result == result


def test_failing_hook_does_not_affect_the_send_or_the_next_hook(producer: Producer) -> None:
    broken, well = Observer(ValueError("a hook's own trouble")), Observer()
    producer.register_send_message_hook(broken)
    producer.register_send_message_hook(well)
    assert producer.send(MESSAGE).status is SendStatus.SEND_OK
    assert len(broken.seen) == len(well.seen) == 2


def test_check_forbidden_hook_can_reject_sends_before_observers_see_them(
    producer: Producer, transport: ScriptedTransport
) -> None:
    observer, asked = Observer(), []

    def forbid(context: CheckForbiddenContext) -> None:
        asked.append(context)
        raise MQClientException("not on Sundays", 16)

    producer.register_send_message_hook(observer)
    producer.register_check_forbidden_hook(forbid)
    with pytest.raises(MQClientException, match="not on Sundays") as caught:
        producer.send(MESSAGE)
    assert (caught.value.response_code, len(asked)) == (10003, 3)
    assert (observer.seen, transport.requests) == ([], [])
    assert (asked[0].producer_group, asked[0].name_servers, asked[0].unit_mode) == ("pg", ("ns:9876",), False)
    with pytest.raises(MQClientException) as caught:
        producer.send(MESSAGE, MessageQueue("T", "a", 0))
    assert caught.value.response_code == 16


@pytest.mark.parametrize(
    ("properties", "kind"),
    [
        ({}, MessageType.NORMAL),
        ({"TRAN_MSG": "true"}, MessageType.TRANS_HALF),
        ({"TRAN_MSG": "TRUE"}, MessageType.NORMAL),
        ({"TRAN_MSG": "true", "DELAY": "3"}, MessageType.DELAY),
        ({"__STARTDELIVERTIME": "1"}, MessageType.DELAY),
        ({"TIMER_DELAY_MS": "500"}, MessageType.NORMAL),
    ],
)
def test_message_type_is_derived_from_delay_and_transaction_properties(
    producer: Producer, properties: dict[str, str], kind: MessageType
) -> None:
    observer = Observer()
    producer.register_send_message_hook(observer)
    producer.send(MESSAGE.with_properties(properties))
    assert observer.seen[0][1].message_type is kind


def record(msg_id: str = "ID", keys: str | None = "k1 k2", success: bool = True) -> PubTrace:
    return PubTrace(
        time_stamp=1_700_000_000_000,
        region_id="DefaultRegion",
        group_name="pg",
        topic="T",
        msg_id=msg_id,
        tags=None,
        keys=keys,
        store_host="1.2.3.4:10911",
        body_length=5,
        cost_time=7,
        message_type=MessageType.DELAY,
        offset_msg_id="OFF",
        success=success,
    )


def test_a_trace_record_has_its_fields_between_ones_and_ends_with_two() -> None:
    text = "Pub 1700000000000 DefaultRegion pg T ID null k1+k2 1.2.3.4:10911 5 7 3 OFF true"
    assert record().encode() == text.replace(" ", "\x01").replace("+", " ") + "\x02"


def test_trace_messages_respect_the_size_limit_and_carry_ids_and_keys() -> None:
    records = [record(msg_id=f"{number:032}", keys=f"key-{number}") for number in range(2000)]
    messages = list(trace_messages("TRACE", records))
    assert all(len(message.body) <= MAX_MESSAGE_BYTES for message in messages)
    assert b"".join(message.body for message in messages) == "".join(one.encode() for one in records).encode()
    assert len(messages) > 1
    keys = " ".join(str(message.keys) for message in messages).split()
    assert keys == [word for one in records for word in one.key_words]


def test_trace_messages_have_no_more_keys_than_fit_their_properties(producer: Producer) -> None:
    long_keys = [record(msg_id=f"{number:032}", keys="k" * 9000 + str(number)) for number in range(10)]
    of_a_batch = record(msg_id=",".join(f"{number:032}" for number in range(2000)), keys=None)
    messages = list(trace_messages("T", [*long_keys, of_a_batch, record(msg_id="last")]))
    assert all(producer.send(message).status is SendStatus.SEND_OK for message in messages)
    words = " ".join(str(message.keys) for message in messages).split()
    assert {word for one in long_keys for word in one.key_words} <= set(words)
    assert {f"{0:032}", f"{900:032}", "last"} <= set(words)
    records = [*long_keys, of_a_batch, record(msg_id="last")]
    assert b"".join(message.body for message in messages) == "".join(one.encode() for one in records).encode()


def test_records_after_a_failed_trace_send_are_still_sent(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Message] = []

    def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 1:
            raise ZeroDivisionError("a bug")

    dispatcher = TraceDispatcher("TRACE", send, 1)
    dispatcher.append(record("first"))
    dispatcher.append(record("second"))
    dispatcher.start()
    dispatcher.shutdown()
    assert [b"second" in message.body for message in sent] == [False, True]
    assert "1 records could not be sent to topic TRACE" in caplog.text


@pytest.fixture
def traced(make_producer: Make, transport: ScriptedTransport) -> Producer:
    transport.routes["RMQ_SYS_TRACE_TOPIC"] = route({"a": 1})
    producer = make_producer(enable_trace=True)
    producer.start()
    return producer


def traces(transport: ScriptedTransport) -> list[list[str]]:
    bodies = [
        message.body.decode()
        for queue, messages in transport.stored.items()
        if queue.topic == "RMQ_SYS_TRACE_TOPIC"
        for message in messages
    ]
    return [text.split("\x01") for body in bodies for text in body.split("\x02") if text]


def test_answered_sends_are_traced_and_flushed_at_shutdown(traced: Producer, transport: ScriptedTransport) -> None:
    results = [traced.send(MESSAGE), traced.send_async(MESSAGE).result(PATIENCE)]
    transport.always = dict.fromkeys("ab", Reply(status=SendStatus.FLUSH_DISK_TIMEOUT))
    results.append(traced.send(MESSAGE))
    traced.shutdown()
    found = traces(transport)
    assert [fields[5] for fields in found] == [result.msg_id for result in results]
    assert [fields[13] for fields in found] == ["true", "true", "false"]
    assert {tuple(fields[3:5] + fields[6:8]) for fields in found} == {("pg", "T", "t", "k")}


def test_failed_and_oneway_sends_are_not_traced(traced: Producer, transport: ScriptedTransport) -> None:
    transport.always = dict.fromkeys("ab", Reply(error=RemotingConnectException("down")))
    with pytest.raises(MQClientException):
        traced.send(MESSAGE)
    transport.always = {}
    traced.send_oneway(MESSAGE)
    traced.shutdown()
    assert traces(transport) == []


@pytest.mark.parametrize("name", [None, "own"])
def test_tracer_has_its_own_transport_and_leaves_checks_to_its_producer(
    make_producer: Make, transport: ScriptedTransport, caplog: pytest.LogCaptureFixture, name: str | None
) -> None:
    transport.routes["RMQ_SYS_TRACE_TOPIC"] = route({"a": 1})
    asked = threading.Event()

    class Listener:
        def execute_local_transaction(self, _message: Message, _arg: object) -> LocalTransactionState:
            return LocalTransactionState.UNKNOW

        def check_local_transaction(self, _message: MessageExt) -> LocalTransactionState:
            asked.set()
            return LocalTransactionState.COMMIT_MESSAGE

    producer = make_producer(enable_trace=True, transaction_listener=Listener(), instance_name=name)
    producer.start()
    producer.send_in_transaction(MESSAGE)
    transport.check_transaction("10.0.0.9:1", 0)
    assert asked.wait(PATIENCE)
    producer.shutdown()
    assert transport.closed
    assert len(traces(transport)) == 1
    assert "this transport is closed" not in caplog.text


def test_trace_of_a_producer_in_a_namespace_has_bare_names(make_producer: Make, transport: ScriptedTransport) -> None:
    transport.routes["RMQ_SYS_TRACE_TOPIC"] = route({"a": 1})
    producer = make_producer(enable_trace=True, namespace="space")
    producer.start()
    producer.send(MESSAGE)
    producer.shutdown()
    assert [fields[3:5] for fields in traces(transport)] == [["pg", "T"]]


def test_a_group_of_any_length_can_be_traced(make_producer: Make, transport: ScriptedTransport) -> None:
    transport.routes["RMQ_SYS_TRACE_TOPIC"] = route({"a": 1})
    producer = make_producer("g" * 120, enable_trace=True)
    producer.start()
    producer.send(MESSAGE)
    producer.shutdown()
    assert [fields[3] for fields in traces(transport)] == ["g" * 120]


def test_records_beyond_the_queue_are_dropped_and_counted() -> None:
    dispatcher = TraceDispatcher("TRACE", lambda _message: None)
    for number in range(2050):
        dispatcher.append(record(str(number)))
    assert dispatcher.discarded == 2


def test_failed_trace_send_is_logged_and_does_not_fail_the_producer(
    make_producer: Make, transport: ScriptedTransport, caplog: pytest.LogCaptureFixture
) -> None:
    del transport.routes["T"]
    transport.routes["T"] = route({"a": 1})
    producer = make_producer(enable_trace=True)
    producer.start()
    assert producer.send(MESSAGE).status is SendStatus.SEND_OK
    producer.shutdown()
    assert "1 records could not be sent to topic RMQ_SYS_TRACE_TOPIC" in caplog.text
