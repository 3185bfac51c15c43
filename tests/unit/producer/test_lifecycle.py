"""Start and shutdown."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from rocketmq_spark.errors import MQClientException, OptionError
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.route import TopicRouteData
from rocketmq_spark.model.send_result import LocalTransactionState
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.producer.service import ServiceState
from rocketmq_spark.testing import Reply
from tests.support.processes import PATIENCE
from tests.support.scripted import ScriptedTransport, route

Make = Callable[..., Producer]
MESSAGE = Message.of("T", b"x")


def client_id(producer: Producer) -> str:
    assert producer._service is not None
    return producer._service.client_id


def state_of(producer: Producer) -> ServiceState:
    """Return the present state. (mypy takes a property for unchanged after a comparison.)"""
    return producer.state


def test_send_before_start_fails_naming_the_state(make_producer: Make) -> None:
    producer = make_producer()
    assert producer.state is ServiceState.CREATE_JUST
    with pytest.raises(MQClientException, match=r"producer pg is in state CREATE_JUST: call start\(\) first") as caught:
        producer.send(MESSAGE)
    assert caught.value.response_code == -1
    producer.start()
    assert state_of(producer) is ServiceState.RUNNING
    producer.send(MESSAGE)


@pytest.mark.parametrize(
    "call",
    [
        lambda producer: producer.send_async(MESSAGE),
        lambda producer: producer.send_oneway(MESSAGE),
        lambda producer: producer.send_batch([MESSAGE]),
        lambda producer: producer.send_in_transaction(MESSAGE),
        lambda producer: producer.create_topic("TBW102", "new", 4),
        lambda producer: producer.fetch_publish_message_queues("T"),
        lambda producer: producer.max_offset(MessageQueue("T", "a", 0)),
    ],
)
def test_every_call_needs_a_running_producer(make_producer: Make, call: Callable[[Producer], object]) -> None:
    producer = make_producer()
    with pytest.raises(MQClientException, match="CREATE_JUST"):
        call(producer)
    producer.start()
    producer.shutdown()
    with pytest.raises(MQClientException, match="SHUTDOWN_ALREADY"):
        call(producer)


def test_a_second_start_is_refused_and_names_the_state(producer: Producer) -> None:
    with pytest.raises(MQClientException, match="can't start in state RUNNING"):
        producer.start()
    assert state_of(producer) is ServiceState.RUNNING


def test_invalid_group_fails_the_start_permanently(make_producer: Make) -> None:
    producer = make_producer("not a group")
    with pytest.raises(MQClientException, match="not a group"):
        producer.start()
    assert producer.state is ServiceState.START_FAILED
    with pytest.raises(MQClientException, match="can't start in state START_FAILED"):
        producer.start()
    producer.shutdown()
    assert producer.state is ServiceState.START_FAILED


def test_duplicate_group_is_rejected_and_can_start_after_renaming(make_producer: Make) -> None:
    first, second = make_producer(instance_name="shared"), make_producer(instance_name="shared")
    first.start()
    with pytest.raises(MQClientException, match=r"group pg: client .*@shared has one already"):
        second.start()
    assert second.state is ServiceState.CREATE_JUST
    second.producer_group = "another"
    second.start()
    assert state_of(second) is ServiceState.RUNNING


@pytest.mark.parametrize("group", ["DEFAULT_PRODUCER", "", "  ", "a b", "g" * 121, "gruß"])
def test_start_with_an_invalid_group_is_rejected(make_producer: Make, group: str) -> None:
    producer = make_producer(group)
    with pytest.raises(MQClientException) as caught:
        producer.start()
    assert caught.value.response_code == -1


@pytest.mark.parametrize("group", ["g" * 120, "%RETRY%g", "a|b-c_D9"])
def test_start_with_a_valid_group_does_not_raise(make_producer: Make, group: str) -> None:
    make_producer(group).start()


def test_default_instance_name_has_pid_and_time_and_a_given_one_is_kept(make_producer: Make) -> None:
    defaults = [make_producer(instance_name=None), make_producer(instance_name=None)]
    named = make_producer(instance_name="mine", client_ip="1.2.3.4")
    for producer in (*defaults, named):
        producer.start()
    assert client_id(named) == "1.2.3.4@mine"
    names = [client_id(producer).partition("@")[2] for producer in defaults]
    assert all(re.fullmatch(rf"{os.getpid()}#[0-9]+", name) for name in names)
    assert names[0] != names[1]


def test_a_unit_name_is_the_third_part_of_the_client_id(make_producer: Make) -> None:
    producer = make_producer(client_ip="1.2.3.4", instance_name="i", unit_name="cell")
    producer.start()
    assert client_id(producer) == "1.2.3.4@i@cell"


def test_producers_of_one_client_id_share_an_instance_until_the_last_stop(
    make_producer: Make, transport: ScriptedTransport
) -> None:
    first, second = make_producer("g1", instance_name="both"), make_producer("g2", instance_name="both")
    first.start()
    second.start()
    assert first._running() is second._running()
    instance = first._running()
    first.shutdown()
    assert not instance.closed
    second.send(MESSAGE)
    second.shutdown()
    assert instance.closed
    assert transport.closed


def test_second_shutdown_does_not_raise_but_a_later_start_is_rejected(producer: Producer) -> None:
    producer.shutdown()
    producer.shutdown()
    assert producer.state is ServiceState.SHUTDOWN_ALREADY
    with pytest.raises(MQClientException, match="can't start in state SHUTDOWN_ALREADY: make a new producer"):
        producer.start()


def test_a_shutdown_before_the_start_changes_nothing(make_producer: Make) -> None:
    producer = make_producer()
    producer.shutdown()
    assert producer.state is ServiceState.CREATE_JUST
    producer.start()


def test_given_topics_are_looked_up_at_start_and_a_missing_one_is_logged(
    make_producer: Make, transport: ScriptedTransport, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make_producer(topics=["T", "missing"])
    producer.start()
    assert [call[1] for call in transport.calls if call[0] == "query_route"] == ["T", "missing", "TBW102"]
    assert "looking up topic missing at the start failed" in caplog.text
    assert producer.state is ServiceState.RUNNING


def test_interrupted_start_leaves_no_client_instance(make_producer: Make, transport: ScriptedTransport) -> None:
    class Interrupted(ScriptedTransport):
        def query_route(self, topic: str, timeout: float) -> TopicRouteData:
            raise KeyboardInterrupt

    interrupted = Interrupted({})
    producer = make_producer(transport=interrupted, instance_name="again", topics=["T"])
    with pytest.raises(KeyboardInterrupt):
        producer.start()
    assert producer.state is ServiceState.START_FAILED
    assert interrupted.closed
    make_producer(instance_name="again").start()


def test_start_that_cannot_create_threads_leaves_no_client_instance(
    make_producer: Make, transport: ScriptedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    producer = make_producer(instance_name="again")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError):
            producer.start()
    assert transport.closed
    make_producer(instance_name="again", transport=ScriptedTransport({})).start()


def test_nothing_is_opened_before_the_first_send(make_producer: Make, transport: ScriptedTransport) -> None:
    make_producer().start()
    assert (transport.requests, transport.calls) == ([], [])


def test_a_with_statement_starts_and_ends_it(make_producer: Make) -> None:
    with make_producer() as producer:
        assert producer.state is ServiceState.RUNNING
        producer.send_async(MESSAGE)
    assert state_of(producer) is ServiceState.SHUTDOWN_ALREADY


def test_shutdown_waits_for_sends_in_flight_and_leaves_no_thread(
    make_producer: Make, transport: ScriptedTransport
) -> None:
    before = set(threading.enumerate())
    producer = make_producer()
    producer.start()
    transport.always = {"a": Reply(delay=0.2), "b": Reply(delay=0.2)}
    futures = [producer.send_async(MESSAGE) for _ in range(5)]
    producer.shutdown()
    assert [future.result(0).queue_offset >= 0 for future in futures] == [True] * 5
    left = {thread for thread in set(threading.enumerate()) - before if not thread.name.startswith("rocketmq-client")}
    assert not left


def test_forked_child_is_rejected_and_does_not_affect_the_parent(
    producer: Producer, transport: ScriptedTransport
) -> None:
    producer.send(MESSAGE)
    child = os.fork()
    if child == 0:
        try:
            producer.send(MESSAGE)
        except MQClientException as exc:
            refused = f"its fork {os.getpid()}" in str(exc)
            producer.shutdown()
            os._exit(0 if refused else 3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    producer.send(MESSAGE)
    assert len(transport.requests) == 2


def test_a_producer_can_not_be_pickled(producer: Producer) -> None:
    with pytest.raises(TypeError, match="holds connections and can't be pickled"):
        pickle.dumps(producer)


@pytest.mark.parametrize(
    ("properties", "text"),
    [
        ({"send_msg_timout": 1}, "unknown property 'send_msg_timout': did you mean send_msg_timeout"),
        ({"send_msg_timeout": 0}, "property send_msg_timeout is 0, which is not allowed"),
        ({"compress_type": "gzip"}, "property compress_type is 'gzip'"),
        ({"secret_key": "s3cret"}, "secret_key is given without access_key"),
        ({"name_server": "nowhere"}, "property name_server is 'nowhere'"),
    ],
)
def test_invalid_property_is_rejected_by_the_constructor(make_producer: Make, properties: object, text: str) -> None:
    with pytest.raises(OptionError, match=re.escape(text)) as caught:
        make_producer(**properties)  # type: ignore[arg-type]
    assert "s3cret" not in str(caught.value)


def test_secrets_are_in_no_repr(make_producer: Make) -> None:
    producer = make_producer(access_key="ak", secret_key="s3cret", security_token="t0ken")
    assert "s3cret" not in repr(producer) + repr(producer.options)
    assert "t0ken" not in repr(producer) + repr(producer.options)


def test_callback_can_shut_its_producer_down(make_producer: Make, transport: ScriptedTransport) -> None:
    transport.routes["RMQ_SYS_TRACE_TOPIC"] = route({"a": 1})
    producer = make_producer(enable_trace=True)
    producer.start()
    outcome: list[BaseException | None] = []
    done = threading.Event()

    def shut_down(_future: object) -> None:
        try:
            producer.shutdown()
            outcome.append(None)
        except RuntimeError as exc:
            outcome.append(exc)
        finally:
            done.set()

    producer.send_async(MESSAGE, callback=shut_down)
    assert done.wait(PATIENCE)
    assert outcome == [None]
    assert producer._service is not None
    assert producer._service._tracer is not None
    assert not producer._service._tracer.instance.users
    assert transport.closed


def test_listener_can_shut_its_producer_down(make_producer: Make, transport: ScriptedTransport) -> None:
    outcome: list[BaseException | None] = []
    done = threading.Event()

    class Listener:
        def execute_local_transaction(self, _message: Message, _arg: object) -> LocalTransactionState:
            return LocalTransactionState.UNKNOW

        def check_local_transaction(self, _message: MessageExt) -> LocalTransactionState:
            try:
                producer.shutdown()
                outcome.append(None)
            except RuntimeError as exc:
                outcome.append(exc)
            finally:
                done.set()
            return LocalTransactionState.UNKNOW

    producer = make_producer(transaction_listener=Listener())
    producer.start()
    producer.send_in_transaction(MESSAGE)
    transport.check_transaction("10.0.0.9:1", 0)
    assert done.wait(PATIENCE)
    assert outcome == [None]
    assert transport.closed


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT interrupts; what a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupted_shutdown_still_closes_the_transport(
    make_producer: Make, transport: ScriptedTransport, ctrl_c: None
) -> None:
    producer = make_producer(send_msg_timeout=int(PATIENCE * 1000))
    producer.start()
    transport.always = {"a": Reply(silent=True), "b": Reply(silent=True)}
    futures = [producer.send_async(MESSAGE) for _ in range(2)]
    main = threading.get_ident()
    # Like Ctrl-C: it arrives while the main thread waits for batches in flight.
    timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        producer.shutdown()
    timer.join()
    assert transport.closed
    assert all(future.done() for future in futures)


def test_concurrent_shutdowns_do_not_raise() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    errors: list[MQClientException] = []
    try:
        for _ in range(60):
            producer = Producer("pg", transport=ScriptedTransport({}), name_server="ns:9876")
            producer.start()
            together = threading.Barrier(4)
            threads = [threading.Thread(target=shut_down_with, args=(producer, together, errors)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []


def shut_down_with(producer: Producer, others: threading.Barrier, errors: list[MQClientException]) -> None:
    others.wait()
    try:
        producer.shutdown()
    except MQClientException as exc:
        errors.append(exc)


def test_unstarted_producer_can_start_in_a_forked_child() -> None:
    producer = Producer("pg", transport=ScriptedTransport({"T": route({"a": 1})}), name_server="ns:9876")
    child = os.fork()
    if child == 0:
        try:
            producer.start()
            producer.send_oneway(MESSAGE)
            producer.shutdown()
            os._exit(0 if producer.state is ServiceState.SHUTDOWN_ALREADY else 3)
        except MQClientException:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert producer.state is ServiceState.CREATE_JUST
