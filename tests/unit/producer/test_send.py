"""Synchronous, oneway and batch sends."""

from __future__ import annotations

import contextlib
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rocketmq_spark.errors import (
    MQBrokerException,
    MQClientException,
    RemotingConnectException,
    RemotingTimeoutException,
    RemotingTooMuchRequestException,
    RequestNotSupportedException,
    RocketMQError,
)
from rocketmq_spark.model.message import Message, MessageQueue, SendStatus
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.routing.connect import new_transport
from rocketmq_spark.testing import FakeCluster, Reply
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.peer import address_of
from tests.support.scripted import ScriptedTransport, route

Make = Callable[..., Producer]
MESSAGE = Message.of("T", b"x", tags="t", keys=["k1", "k2"])


def stored(transport: ScriptedTransport) -> list[Message]:
    return [message for messages in transport.stored.values() for message in messages]


def both(transport: ScriptedTransport, *replies: Reply) -> None:
    for broker in ("a", "b"):
        transport.play(broker, *replies)


def test_message_is_stored_and_the_result_names_its_place(producer: Producer, transport: ScriptedTransport) -> None:
    result = producer.send(MESSAGE)
    [message] = stored(transport)
    assert (message.body, message.tags, message.keys) == (b"x", "t", "k1 k2")
    assert (result.status, result.msg_id) == (SendStatus.SEND_OK, message.unique_id)
    assert result.message_queue in transport.stored
    assert (result.queue_offset, result.region_id, result.trace_on) == (0, "DefaultRegion", True)


@pytest.mark.parametrize("queue", [None, MessageQueue("T", "a", 0)])
def test_lookup_takes_at_most_the_time_of_the_send(make_producer: Make, queue: MessageQueue | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        producer = make_producer(transport=None, name_server=address_of(silent), send_msg_timeout=200)
        producer.start()
        with pytest.raises(RocketMQError) as raised:
            producer.send(MESSAGE, queue=queue)
    # The default of mqClientApiTimeout
    assert "within 3 s" not in str(raised.value)


def test_unique_id_is_the_same_on_every_attempt(producer: Producer, transport: ScriptedTransport) -> None:
    both(transport, Reply(error=RemotingConnectException("down")))
    result = producer.send(MESSAGE)
    properties = {request.batch.properties for request in transport.requests}
    assert (len(transport.requests), len(properties)) == (3, 1)
    assert f"UNIQ_KEY\x01{result.msg_id}\x02" in properties.pop()
    assert len(result.msg_id) == 32


@pytest.mark.parametrize("send", ["send", "send_async", "send_oneway"])
@pytest.mark.parametrize("delay", [{"delay_ms": 5}, {"delay_sec": 5}, {"deliver_ms": 5}])
def test_delayed_message_is_refused_where_a_broker_has_no_timers(
    producer: Producer, transport: ScriptedTransport, delay: dict[str, Any], send: str
) -> None:
    transport.release = "V4_9_7"
    for _ in range(2):
        transport.fail("topic_config", RequestNotSupportedException("asking", 3, "not supported", "a:10911"))
    call: Callable[[Message], Any] = getattr(producer, send)
    message = Message.of("T", b"x", **delay)
    with pytest.raises(MQClientException, match=r"broker a has RocketMQ 4\.9\.7, which ignores times of delivery"):
        call(message).result()
    assert transport.requests == []
    producer.send(Message.of("T", b"x", delay_time_level=1))
    assert len(transport.requests) == 1


@pytest.mark.parametrize("namespace", [None, "space"])
@pytest.mark.parametrize("succeeds", [True, False])
def test_message_of_the_caller_is_not_changed(
    make_producer: Make, transport: ScriptedTransport, namespace: str | None, succeeds: bool
) -> None:
    producer = make_producer(namespace=namespace)
    producer.start()
    message = Message.of("T", b"y" * 5000, tags="t")
    before = (message.topic, message.body, dict(message.properties))
    if succeeds:
        result = producer.send(message)
        assert result.message_queue.topic == "T"
    else:
        both(transport, *[Reply.code(13, "illegal")] * 3)
        with pytest.raises(MQBrokerException):
            producer.send(message)
    assert (message.topic, message.body, dict(message.properties)) == before
    sent = transport.requests[0]
    assert sent.batch.topic == "T"
    assert zlib.decompress(sent.batch.body[0]) == message.body
    assert ("INSTANCE_ID\x01space\x02" in sent.batch.properties) is bool(namespace)


def test_selectors_and_the_transport_get_names_without_namespace(
    make_producer: Make, transport: ScriptedTransport
) -> None:
    producer = make_producer(namespace="space")
    producer.start()
    seen: list[Any] = []

    def last(queues: Sequence[MessageQueue], message: Message, arg: object) -> MessageQueue:
        seen.append((queues[-1].topic, message.topic, arg))
        return queues[-1]

    assert producer.send(MESSAGE, selector=last, arg=7).message_queue == MessageQueue("T", "b", 1)
    assert producer.send(MESSAGE, MessageQueue("T", "a", 1)).message_queue == MessageQueue("T", "a", 1)
    assert seen == [("T", "T", 7)]
    assert {request.producer_group for request in transport.requests} == {"pg"}
    assert {queue.topic for queue in transport.stored} == {"T"}
    assert [queue.topic for queue in producer.fetch_publish_message_queues("T")] == ["T"] * 4


def test_a_batch_results_in_the_ids_of_its_members(producer: Producer, transport: ScriptedTransport) -> None:
    result = producer.send_batch([Message.of("T", f"{number}".encode()) for number in range(3)])
    messages = stored(transport)
    assert [message.body for message in messages] == [b"0", b"1", b"2"]
    assert result.msg_id == ",".join(str(message.unique_id) for message in messages)
    assert transport.requests[0].batch.batch


def test_messages_that_cannot_share_a_batch_are_rejected_with_the_cause(producer: Producer) -> None:
    with pytest.raises(MQClientException, match="message 1 is for topic 'U'") as caught:
        producer.send_batch([MESSAGE, Message.of("U", b"y")])
    assert (caught.value.response_code, type(caught.value.__cause__)) == (-1, MQClientException)


def test_no_name_server_is_10004_and_no_route_10005(make_producer: Make, transport: ScriptedTransport) -> None:
    nowhere = make_producer(name_server=None)
    nowhere.start()
    with pytest.raises(MQClientException, match="list of name servers is empty") as caught:
        nowhere.send(MESSAGE)
    assert caught.value.response_code == 10004
    assert transport.calls == []
    producer = make_producer()
    producer.start()
    with pytest.raises(MQClientException, match="topic U") as caught:
        producer.send(Message.of("U", b"x"))
    assert caught.value.response_code == 10005


def test_failed_route_lookup_is_10005_with_the_cause(producer: Producer, transport: ScriptedTransport) -> None:
    lost = RemotingConnectException("name server down")
    transport.fail("query_route", lost)
    with pytest.raises(MQClientException, match="name server down") as caught:
        producer.send(MESSAGE)
    assert (caught.value.response_code, caught.value.__cause__) == (10005, lost)


def test_outcomes_of_attempts_update_the_fault_table(make_producer: Make, transport: ScriptedTransport) -> None:
    producer = make_producer(send_latency_fault_enable=True)
    producer.start()
    transport.always["a"] = Reply(error=RemotingConnectException("down"))
    for _ in range(4):
        producer.send(MESSAGE)
    faults = producer._running().faults
    assert [faults.is_available(broker, time.monotonic()) for broker in ("a", "b")] == [False, True]
    assert sum(request.queue.broker_name == "a" for request in transport.requests) == 1


def test_send_to_an_explicit_queue_does_not_update_the_fault_table(
    make_producer: Make, transport: ScriptedTransport
) -> None:
    producer = make_producer(send_latency_fault_enable=True)
    producer.start()
    transport.play("a", Reply(error=RemotingConnectException("down")))
    with pytest.raises(RemotingConnectException):
        producer.send(MESSAGE, MessageQueue("T", "a", 0))
    assert producer._running().faults.is_available("a", time.monotonic())


def test_unknown_broker_is_looked_up_once_before_the_error(producer: Producer, transport: ScriptedTransport) -> None:
    with pytest.raises(MQClientException, match="no master of gone is known; known brokers: a, b") as caught:
        producer.send(MESSAGE, MessageQueue("T", "gone", 0))
    assert caught.value.response_code == -1
    assert [call[0] for call in transport.calls] == ["query_route"]


@pytest.mark.parametrize(("enabled", "port"), [(True, "10909"), (False, "10911")])
def test_the_vip_channel_is_two_ports_below_and_off_by_default(
    make_producer: Make, transport: ScriptedTransport, enabled: bool, port: str
) -> None:
    producer = make_producer(**({"vip_channel_enabled": True} if enabled else {}))
    producer.start()
    producer.send(MESSAGE)
    assert transport.requests[0].address.endswith(f":{port}")


def test_a_body_of_the_threshold_is_compressed_and_one_byte_less_is_not(
    producer: Producer, transport: ScriptedTransport
) -> None:
    for size in (4095, 4096):
        producer.send(Message.of("T", b"z" * size))
    plain, packed = transport.requests
    assert (plain.batch.sys_flag, plain.batch.body[0]) == (0, b"z" * 4095)
    assert (packed.batch.sys_flag, zlib.decompress(packed.batch.body[0])) == (0x301, b"z" * 4096)


@pytest.mark.parametrize(("name", "flag"), [("ZLIB", 0x301), ("lz4", 0x101), ("Zstd", 0x201), ("NONE", 0)])
def test_sys_flag_has_the_compression_type(
    make_producer: Make, transport: ScriptedTransport, name: str, flag: int
) -> None:
    producer = make_producer(compress_type=name)
    producer.start()
    producer.send(Message.of("T", b"z" * 9000))
    producer.send(Message.of("T", b"z").with_properties({"TRAN_MSG": "true"}))
    assert [request.batch.sys_flag for request in transport.requests] == [flag, 4]


def test_a_retry_topics_counters_go_into_the_header_on_every_attempt(
    producer: Producer, transport: ScriptedTransport
) -> None:
    transport.routes["%RETRY%G"] = transport.routes["T"]
    both(transport, Reply(error=RemotingConnectException("down")))
    counters = {"RECONSUME_TIME": "3", "MAX_RECONSUME_TIMES": "16"}
    producer.send(Message.of("%RETRY%G", b"x").with_properties(counters))
    # Java's second attempt finds neither of them; this producer reads them once per send.
    assert [(request.reconsume_times, request.max_reconsume_times) for request in transport.requests] == [(3, 16)] * 3
    producer.send(MESSAGE.with_properties(counters))
    assert (transport.requests[-1].reconsume_times, transport.requests[-1].max_reconsume_times) == (0, None)


def test_send_after_its_timeout_raises_too_much_request(producer: Producer, transport: ScriptedTransport) -> None:
    producer.send(MESSAGE)
    with pytest.raises(RemotingTooMuchRequestException, match="longer than its timeout of"):
        producer.send(MESSAGE, timeout_ms=-1)
    with pytest.raises(
        RemotingTooMuchRequestException, match="passed before the message was sent; raise send_msg_timeout"
    ):
        producer.send(MESSAGE, MessageQueue("T", "a", 0), timeout_ms=-1)
    assert len(transport.requests) == 1


def test_a_broker_error_has_code_remark_and_address(producer: Producer, transport: ScriptedTransport) -> None:
    both(transport, Reply.code(13, "the message is illegal"))
    with pytest.raises(MQBrokerException) as caught:
        producer.send(MESSAGE)
    error = caught.value
    assert (error.response_code, error.remark) == (13, "the message is illegal")
    assert error.broker_addr == "fake"


def test_result_has_the_queue_answered_by_the_broker(make_producer: Make, transport: ScriptedTransport) -> None:
    result = make_started(make_producer).send(MESSAGE, MessageQueue("T", "b", 1))
    assert result.message_queue == MessageQueue("T", "b", 1)


def make_started(make_producer: Make, **properties: Any) -> Producer:
    producer = make_producer(**properties)
    producer.start()
    return producer


def test_timeout_that_used_the_whole_budget_is_not_retried(make_producer: Make, transport: ScriptedTransport) -> None:
    transport.always = {"a": Reply(silent=True), "b": Reply(silent=True)}
    with pytest.raises(RemotingTooMuchRequestException):
        make_started(make_producer, send_msg_timeout=50).send(MESSAGE)
    assert len(transport.requests) == 1
    with pytest.raises(MQClientException) as caught:
        make_started(make_producer, send_msg_timeout=50, retry_times_when_send_failed=0).send(MESSAGE)
    assert (caught.value.response_code, type(caught.value.__cause__)) == (10002, RemotingTimeoutException)


def test_a_oneway_message_goes_once_and_a_lost_connection_is_10001(
    producer: Producer, transport: ScriptedTransport
) -> None:
    producer.send_oneway(MESSAGE)
    assert [message.body for message in stored(transport)] == [b"x"]
    assert (len(transport.oneways), transport.requests) == (1, [])
    both(transport, Reply(error=RemotingConnectException("down")))
    with pytest.raises(MQClientException, match="failed 1 times") as caught:
        producer.send_oneway(MESSAGE)
    assert caught.value.response_code == 10001


def test_explicit_queue_gets_one_attempt_and_its_error_is_raised(
    producer: Producer, transport: ScriptedTransport
) -> None:
    transport.play("a", Reply(error=RemotingConnectException("down")))
    with pytest.raises(RemotingConnectException, match="down"):
        producer.send(MESSAGE, MessageQueue("T", "a", 1))
    assert [request.queue for request in transport.requests] == [MessageQueue("T", "a", 1)]


def test_a_queue_of_another_topic_is_refused(producer: Producer, transport: ScriptedTransport) -> None:
    with pytest.raises(MQClientException, match="the message's topic is T; choose a queue of it"):
        producer.send(MESSAGE, MessageQueue("U", "a", 0))
    assert transport.requests == []


def test_selector_that_returns_none_fails_the_send(producer: Producer, transport: ScriptedTransport) -> None:
    # Java's SelectMessageQueueByMachineRoom always returns null; this one selects.
    with pytest.raises(MQClientException, match="returned None; it must return one of the 4 queues"):
        producer.send(MESSAGE, selector=lambda _queues, _message, _arg: None)
    assert transport.requests == []


def test_a_selectors_exception_is_the_cause(producer: Producer) -> None:
    def broken(_queues: object, _message: object, arg: object) -> MessageQueue:
        raise KeyError(arg)

    with pytest.raises(MQClientException, match="raised KeyError: 'arg'") as caught:
        producer.send(MESSAGE, selector=broken, arg="arg")
    assert isinstance(caught.value.__cause__, KeyError)


def test_send_with_selector_but_without_route_is_code_minus_one(producer: Producer) -> None:
    with pytest.raises(MQClientException) as caught:
        producer.send(Message.of("U", b"x"), selector=lambda queues, _message, _arg: queues[0])
    assert caught.value.response_code == -1


@pytest.mark.parametrize(
    ("message", "code"),
    [(Message("T", b""), 13), (Message("no spaces", b"x"), -1), (None, 13), (Message("", b"x"), -1)],
)
def test_invalid_message_is_rejected_before_any_request(
    producer: Producer, transport: ScriptedTransport, message: Any, code: int
) -> None:
    with pytest.raises(MQClientException) as caught:
        producer.send(message)
    assert (caught.value.response_code, transport.calls, transport.requests) == (code, [], [])


def test_many_threads_can_send_through_one_producer(producer: Producer, transport: ScriptedTransport) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda number: producer.send(Message.of("T", f"{number}".encode())), range(200)))
    assert sorted(int(message.body) for message in stored(transport)) == list(range(200))
    assert len({result.msg_id for result in results}) == 200
    assert [call[0] for call in transport.calls].count("query_route") <= 8


def test_fetched_queues_are_not_cached(producer: Producer, transport: ScriptedTransport) -> None:
    assert len(producer.fetch_publish_message_queues("T")) == 4
    transport.routes["T"] = route({"a": 1})
    assert producer.fetch_publish_message_queues("T") == [MessageQueue("T", "a", 0)]


def test_namespace_of_the_name_server_is_part_of_topic_and_group() -> None:
    options = Producer("pg", name_server="http://MQ_INST_1_a.mq.example:80").options
    transport = new_transport(options.connection, "")
    assert isinstance(transport, RemotingTransport)
    with transport:
        wrapped = [transport.namespace.wrap(name) for name in ("T", "pg")]
        assert wrapped == ["MQ_INST_1_a%T", "MQ_INST_1_a%pg"]
        assert [transport.namespace.unwrap(name) for name in wrapped] == ["T", "pg"]


@pytest.mark.parametrize("flag", [1, 0])
def test_message_with_a_wrong_flag_does_not_change_the_flag_of_later_ones(flag: int) -> None:
    with FakeCluster(["a"], topics={"T": 1}) as cluster, Producer("pg", name_server=cluster.name_server) as producer:
        with contextlib.suppress(MQClientException):
            producer.send(Message("T", b"x", flag=bool(flag)))
        producer.send(Message("T", b"x", flag=flag))
        sent = [request for request in cluster.brokers["a"].requests if request.code == RequestCode.SEND_MESSAGE_V2]
    assert sent[-1].ext_fields["h"] == str(flag)
