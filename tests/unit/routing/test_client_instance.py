"""The client instance that producers of one process share."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.errors import (
    NoBrokersException,
    RemotingConnectException,
    RemotingTimeoutException,
    RocketMQError,
    RouteNotFoundException,
    UserRefusedException,
)
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.route import BrokerData, QueueData, TopicRouteData
from rocketmq_spark.options.connection import ConnectionOptions
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.routing.client_instance import ClientInstance, registry
from rocketmq_spark.routing.fault_strategy import FaultSite
from rocketmq_spark.sink.routes import RouteFinder
from rocketmq_spark.sink.sender import BatchSender
from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.processes import wait_for
from tests.support.scripted import ManualClock, ScriptedTransport, route

OPTIONS = ConnectionOptions(name_server=("ns:1",))


def instance_of(
    clock: ManualClock | None = None, options: ConnectionOptions = OPTIONS, **routes: TopicRouteData
) -> tuple[ClientInstance, ScriptedTransport]:
    transport = ScriptedTransport(routes or {"T": route({"a": 1, "b": 1})})
    return ClientInstance("ip@name", transport, options, clock=clock or ManualClock()), transport


def with_slaves(**brokers: dict[int, str]) -> TopicRouteData:
    """Return a route of one queue on each broker, with these addresses by broker id."""
    names = sorted(brokers)
    return TopicRouteData(
        tuple(QueueData(name, 1, 1, 6) for name in names), tuple(BrokerData(name, brokers[name]) for name in names)
    )


def calls(transport: ScriptedTransport, name: str) -> list[tuple[Any, ...]]:
    return [call for call in transport.calls if call[0] == name]


def test_heartbeat_round_ends_after_30_s_and_the_next_continues_there() -> None:
    clock = ManualClock()
    names = [f"b{number:02}" for number in range(25)]
    instance, transport = instance_of(clock, T=route(dict.fromkeys(names, 1)))
    instance.register("g")
    instance.routes.look_up("T", 1.0)
    addresses: list[str] = []

    def silent(address: str, *_: object) -> None:
        addresses.append(address)
        clock.advance(3.0)
        raise RemotingTimeoutException("no answer")

    transport.heart_beat = transport.unregister_client = silent  # type: ignore[assignment]
    every = sorted(instance.routes.masters().values())
    for first in (0, 10, 20):
        addresses.clear()
        instance.heart_beat()
        assert addresses == (every[first:] + every[:first])[:10]
    # Unregistration does not wait longer either.
    addresses.clear()
    instance.close()
    assert len(addresses) == 10


def test_heartbeats_continue_while_name_servers_answer_slowly() -> None:
    clock = ManualClock()
    beats: list[float] = []

    class Servers(ScriptedTransport):
        slow = False

        def query_route(self, topic: str, timeout: float) -> TopicRouteData:
            if self.slow:
                clock.advance(timeout)
            return super().query_route(topic, timeout)

        def heart_beat(self, *_: object) -> None:
            beats.append(clock.now)

    topics = [f"T{number}" for number in range(60)]
    transport = Servers({topic: route({"a": 1}) for topic in topics})
    instance = ClientInstance("ip@name", transport, OPTIONS, clock=clock)
    instance.register("g")
    for topic in topics:
        instance.routes.look_up(topic, 1.0)
    transport.slow = True
    clock.advance(30.0)
    instance.run_due(clock.now)
    # A broker closes the connection of a producer after 120 s without a heart-beat.
    assert [round(beat) for beat in beats] == [33, 63, 93, 123, 153, 183]


def test_equal_keys_share_an_instance_that_stays_after_its_last_user() -> None:
    instances: list[ClientInstance] = []

    def make() -> ClientInstance:
        instances.append(instance_of()[0])
        return instances[-1]

    try:
        first, second = registry.acquire("k", "g", make), registry.acquire("k", "g", make)
        assert first is second
        assert (first.users, len(instances)) == (2, 1)
        first.unregister("g")
        second.unregister("g")
        assert first.users == 0
        assert registry.acquire("k", "g", make) is first
        assert registry.acquire("other", "g", make) is not first
    finally:
        registry.close_all()
    assert all(instance.closed for instance in instances)


def test_closed_instance_is_not_reused() -> None:
    try:
        first = registry.acquire("k", "g", lambda: instance_of()[0])
        first.close()
        assert registry.acquire("k", "g", lambda: instance_of()[0]) is not first
    finally:
        registry.close_all()


def test_instance_with_a_closed_transport_is_not_reused() -> None:
    try:
        instance, transport = instance_of()
        assert registry.acquire("k", "g", lambda: instance) is instance
        transport.close()
        assert registry.acquire("k", "g", lambda: instance_of()[0]) is not instance
    finally:
        registry.close_all()


def test_an_instance_of_another_process_is_not_returned() -> None:
    try:
        registry.acquire("k", "g", lambda: instance_of()[0])
        child = os.fork()
        if child == 0:
            forked = registry.acquire("k", "g", lambda: instance_of()[0])
            os._exit(0 if forked.pid == os.getpid() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        registry.close_all()


def beats(transport: ScriptedTransport) -> list[str]:
    """Take the addresses of the heart-beats so far."""
    found = [call[1] for call in calls(transport, "heart_beat")]
    transport.calls.clear()
    return found


def test_heartbeats_name_all_groups_to_masters_every_30_s() -> None:
    found = with_slaves(a={0: "a:1", 1: "a:2"}, b={0: "b:1"}, c={1: "c:2"})
    instance, transport = instance_of(None, T=found)
    instance.register("g1")
    instance.register("g2")
    assert instance.run_due(0.0) == 1.0
    instance.routes.look_up("T", 1.0)
    transport.calls.clear()
    instance.run_due(1.0)
    assert transport.calls == [("heart_beat", address, "ip@name", ("g1", "g2")) for address in ("a:1", "b:1")]
    transport.calls.clear()
    instance.run_due(30.9)
    assert beats(transport) == []
    instance.run_due(31.0)
    assert beats(transport) == ["a:1", "b:1"]


def test_new_broker_gets_its_heartbeat_at_once() -> None:
    instance, transport = instance_of()
    instance.register("g")
    instance.run_due(1.0)
    assert beats(transport) == []
    instance.routes.look_up("T", 1.0)
    instance.run_due(1.5)
    assert beats(transport) == ["a:10911", "b:10911"]
    transport.routes["T"] = route({"b": 1, "c": 1})
    instance.routes.refresh("T", 1.0)
    instance.run_due(2.0)
    assert beats(transport) == ["c:10911"]
    instance.run_due(2.5)
    assert beats(transport) == []


def test_new_route_triggers_the_first_heartbeat() -> None:
    # The clock stands still, so only the wake-up can make the first heart-beat due.
    heard = threading.Event()
    instance, transport = instance_of()
    transport.heart_beat = lambda *_: heard.set()
    instance.register("g")
    instance.start()
    try:
        instance.routes.look_up("T", 1.0)
        assert heard.wait(10)
    finally:
        instance.close()


def test_heartbeats_need_a_producer_and_a_broker() -> None:
    instance, transport = instance_of()
    instance.routes.look_up("T", 1.0)
    assert instance.heart_beat()
    assert beats(transport) == []
    instance.register("g")
    assert instance.heart_beat()
    assert beats(transport) == ["a:10911", "b:10911"]


def test_concurrent_heartbeat_round_is_skipped() -> None:
    instance, transport = instance_of()
    instance.register("g")
    instance.routes.look_up("T", 1.0)
    inner: list[bool] = []
    transport.heart_beat = lambda *_: inner.append(instance.heart_beat())
    assert instance.heart_beat()
    assert inner == [False, False]


def test_failed_heartbeat_does_not_affect_other_brokers() -> None:
    instance, transport = instance_of()
    instance.register("g")
    instance.routes.look_up("T", 1.0)
    transport.fail("heart_beat", RemotingConnectException("a:10911 refused"))
    instance.run_due(1.0)
    assert [call[1] for call in calls(transport, "heart_beat")] == ["a:10911", "b:10911"]


def test_rejected_user_is_logged_once_until_accepted_and_not_at_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    instance, transport = instance_of()
    refusal = UserRefusedException("16 NO_PERMISSION: check signature failed.", 16, "check signature failed.", "a:1")
    instance.register("g")
    instance.routes.look_up("T", 1.0)

    def warnings(do: Callable[[], object]) -> int:
        caplog.clear()
        do()
        return sum(record.levelno >= logging.WARNING for record in caplog.records)

    def refuse() -> None:
        transport.fail("heart_beat", refusal, refusal)
        instance.heart_beat()

    assert [warnings(refuse), warnings(refuse)] == [1, 0]
    assert warnings(instance.heart_beat) == 0
    assert warnings(refuse) == 1
    transport.fail("unregister_client", refusal, RemotingConnectException("b:10911 refused"))
    assert warnings(instance.close) == 1, "of the one that can't be reached"
    assert "unregistering group g at b:10911 failed: b:10911 refused" in caplog.text


def test_unreachable_address_is_logged_once_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    instance, transport = instance_of()
    instance.register("g")
    instance.routes.look_up("T", 1.0)

    def warnings(do: Callable[[], object], failing: str) -> list[str]:
        caplog.clear()
        transport.fail(failing, *[RemotingConnectException("refused")] * 2)
        do()
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    assert warnings(instance.heart_beat, "heart_beat") == [
        f"heartbeat at {broker}:10911 failed: refused" for broker in "ab"
    ]
    assert warnings(instance.heart_beat, "heart_beat") == []
    instance.heart_beat()
    assert len(warnings(instance.heart_beat, "heart_beat")) == 2
    assert warnings(instance.close, "unregister_client") == []


def test_failing_refreshes_are_logged_once_until_a_server_answers(caplog: pytest.LogCaptureFixture) -> None:
    instance, transport = instance_of(None, T=route({"a": 1}), U=route({"a": 1}))
    for topic in "TU":
        instance.routes.look_up(topic, 1.0)
    rounds = iter(range(1, 9))

    def warnings(*failures: RemotingConnectException) -> list[str]:
        caplog.clear()
        transport.fail("query_route", *failures)
        instance.run_due(next(rounds) * 30.0)
        texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        return [text.partition(" (")[0] for text in texts]

    refused = RemotingConnectException("refused")
    no_server = ["looking up the route of topic T: refused"]
    # A round ends at the first topic for which no server answers.
    assert warnings(refused) == no_server
    assert warnings(refused) == []
    assert warnings() == []
    assert warnings(refused) == no_server
    del transport.routes["T"]
    [unknown] = warnings()
    assert unknown.startswith("looking up the route of topic T: no name server knows it")
    assert warnings() == []
    transport.routes["T"] = route({"a": 1})
    assert warnings() == []
    del transport.routes["T"]
    assert warnings() == [unknown]


def test_a_cluster_that_has_stopped_is_one_warning_for_each_server(caplog: pytest.LogCaptureFixture) -> None:
    with FakeCluster(["a", "b"], topics={"T": 1, "U": 1}) as cluster:
        options = ConnectionOptions(name_server=(cluster.name_server,))
        transport = RemotingTransport([cluster.name_server])
        instance = ClientInstance("ip@name", transport, options, clock=ManualClock())
        instance.register("g")
        for topic in "TU":
            instance.routes.look_up(topic, 5.0)
        servers = [cluster.name_server, *(broker.address for broker in cluster.brokers.values())]
    caplog.clear()
    try:
        for minute in range(1, 4):
            instance.run_due(minute * 60.0)
    finally:
        instance.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == len(servers), warnings
    assert all(sum(server in text for text in warnings) == 1 for server in servers)


def test_route_lookup_failing_due_to_close_logs_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = ScriptedTransport({})
    instances: list[ClientInstance] = []

    def fail(*_: object, **__: object) -> TopicRouteData:
        for instance in instances:
            instance.close()
        raise RemotingConnectException("the transport was closed")

    transport.query_route = fail
    instance = ClientInstance("ip@name", transport, OPTIONS, clock=ManualClock())
    with pytest.raises(RouteNotFoundException):
        instance.routes.look_up("T", 1.0)
    instances.append(instance)
    instance.run_due(30.0)
    assert instance.closed
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_heartbeat_failing_due_to_close_logs_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    instance, transport = instance_of()

    def fail(*_: object, **__: object) -> None:
        instance.close()
        raise RemotingConnectException("the transport was closed")

    instance.register("g")
    instance.routes.look_up("T", 1.0)
    transport.heart_beat = fail
    with caplog.at_level(logging.DEBUG, "rocketmq_spark.producer"):
        instance.heart_beat()
    levels = [record.levelno for record in caplog.records if "heartbeat at" in record.getMessage()]
    assert set(levels) == {logging.DEBUG}


def test_clients_that_start_together_look_up_routes_at_different_times() -> None:
    dues = []
    for number in range(200):
        instance = ClientInstance(f"10.0.0.1@{number}", ScriptedTransport({}), OPTIONS, clock=ManualClock())
        instance.run_due(1.0)
        dues.append(instance.run_due(1.0))
    assert min(dues) >= 15.0
    assert max(dues) <= 30.0
    seconds = Counter(int(due) for due in dues)
    assert max(seconds.values()) < 30


@pytest.mark.parametrize(
    "error", [RemotingConnectException("refused"), NoBrokersException("no broker", 17, "", "10.0.0.1:9876")]
)
def test_a_round_ends_when_no_route_can_be_known(error: RocketMQError) -> None:
    topics = [f"T{number}" for number in range(50)]
    instance, transport = instance_of(None, OPTIONS, **{topic: route({"a": 1}) for topic in topics})
    for topic in topics:
        instance.routes.look_up(topic, 1.0)
    transport.calls.clear()
    transport.fail("query_route", *[error] * 50)
    instance.run_due(30.0)
    assert len(calls(transport, "query_route")) == 1
    instance.run_due(60.0)
    assert len(calls(transport, "query_route")) == 2


def test_every_requested_topic_is_refreshed_every_30_s() -> None:
    instance, transport = instance_of(None, T=route({"a": 1}))
    instance.routes.look_up("T", 1.0)
    with pytest.raises(RouteNotFoundException):
        instance.routes.look_up("U", 1.0)
    transport.calls.clear()
    # The first time is earlier, and depends on the client id.
    instance.run_due(14.9)
    assert calls(transport, "query_route") == []
    instance.run_due(30.0)
    transport.calls.clear()
    instance.run_due(59.9)
    assert calls(transport, "query_route") == []
    transport.routes |= {"T": route({"a": 8}), "U": route({"a": 1})}
    instance.run_due(60.0)
    assert [call[1] for call in calls(transport, "query_route")] == ["T", "U"]
    assert len(instance.routes.look_up("T", 1.0).queues) == 8


def test_addresses_and_brokers_without_a_route_are_removed() -> None:
    instance, transport = instance_of(
        None, T=with_slaves(a={0: "a:1", 1: "a:2"}, b={0: "b:1"}), U=with_slaves(c={0: "c:1"})
    )
    instance.register("g")
    instance.routes.look_up("T", 1.0)
    instance.routes.look_up("U", 1.0)
    transport.routes["T"] = with_slaves(b={0: "b:1"})
    transport.routes["U"] = with_slaves(c={0: "c:1"}, d={0: "a:2"})
    instance.routes.refresh("T", 1.0)
    assert instance.routes.addresses() == ("a:1", "a:2", "b:1", "c:1")
    instance.routes.refresh("U", 1.0)
    transport.calls.clear()
    instance.run_due(1.0)
    assert beats(transport) == ["a:2", "b:1", "c:1"]
    assert instance.routes.masters() == {"b": "b:1", "c": "c:1", "d": "a:2"}
    transport.routes["U"] = with_slaves(c={0: "c:1"})
    instance.routes.refresh("U", 1.0)
    instance.run_due(31.0)
    assert instance.routes.addresses() == ("b:1", "c:1")


def test_route_update_reaches_every_producer_of_the_instance() -> None:
    instance, transport = instance_of()
    sink = SinkOptions(connection=OPTIONS)
    producers = [BatchSender(RouteFinder(sink, instance), Recorder("w", -1, number)) for number in range(2)]
    assert [len(producer.routes.queues_of("T")) for producer in producers] == [2, 2]
    transport.routes["T"] = route({"a": 8})
    instance.run_due(30.0)
    assert [len(producer.routes.queues_of("T")) for producer in producers] == [8, 8]


def test_requested_refresh_happens_at_once_but_at_most_once_a_second() -> None:
    instance, transport = instance_of()
    instance.refresh_route("T")
    instance.refresh_route("T")
    instance.run_due(5.0)
    assert len(calls(transport, "query_route")) == 1
    instance.refresh_route("T")
    assert instance.run_due(5.2) == 6.0
    assert len(calls(transport, "query_route")) == 1
    instance.run_due(6.0)
    assert len(calls(transport, "query_route")) == 2


def test_close_unregisters_at_all_addresses_and_ignores_failures() -> None:
    instance, transport = instance_of(None, T=with_slaves(a={0: "a:1", 1: "a:2"}, b={0: "b:1"}))
    instance.register("g")
    instance.routes.look_up("T", 1.0)
    transport.fail("unregister_client", RemotingConnectException("a:1 refused"))
    instance.close()
    instance.close()
    assert [call[1:] for call in calls(transport, "unregister_client")] == [
        (address, "ip@name", "g") for address in ("a:1", "a:2", "b:1")
    ]


def test_removed_group_is_unregistered_everywhere_and_not_in_heartbeats() -> None:
    instance, transport = instance_of(None, T=with_slaves(a={0: "a:1", 1: "a:2"}))
    instance.register("g1")
    instance.register("g2")
    instance.routes.look_up("T", 1.0)
    transport.fail("unregister_client", RemotingConnectException("a:1 refused"))
    instance.forget("g1")
    assert [call[1:] for call in calls(transport, "unregister_client")] == [
        ("a:1", "ip@name", "g1"),
        ("a:2", "ip@name", "g1"),
    ]
    assert instance.users == 1
    instance.heart_beat()
    assert calls(transport, "heart_beat") == [("heart_beat", "a:1", "ip@name", ("g2",))]
    assert instance.idle_for(5.0) == 0.0
    instance.forget("g2")
    assert instance.idle_for(5.0) == 5.0


DETECTING = replace(OPTIONS, send_latency_fault_enable=True, start_detector_enable=True, detect_timeout=250)


def test_detector_probes_unreachable_brokers_every_3_s() -> None:
    instance, transport = instance_of(None, DETECTING)
    instance.routes.look_up("T", 1.0)
    for broker in ("a", "b", "gone"):
        instance.faults.update(FaultSite.REMOTING_FAILED, broker, 1.0, 0.0)
    transport.fail("max_offset", RemotingTimeoutException("a:10911 silent"))
    assert instance.detect_due(2.9) == 3.0
    assert calls(transport, "max_offset") == []
    assert instance.detect_due(3.0) == 6.0
    assert calls(transport, "max_offset") == [
        ("max_offset", MessageQueue("T", broker, 0), f"{broker}:10911") for broker in "ab"
    ]
    reachable = {name: item.reachable for name, item in instance.faults.table.items().items()}
    assert reachable == {"a": False, "b": True}


def test_hanging_probe_does_not_delay_heartbeats() -> None:
    probing, heard, release = threading.Event(), threading.Event(), threading.Event()
    clock = ManualClock()
    instance, transport = instance_of(clock, DETECTING)

    def hang(queue: MessageQueue, address: str, timeout: float) -> int:
        assert timeout == 0.25
        probing.set()
        release.wait(30)
        return 0

    transport.max_offset = hang
    transport.heart_beat = lambda *_: heard.set()
    instance.register("g")
    transport.routes["U"] = route({"c": 1})
    instance.routes.look_up("T", 1.0)
    instance.faults.update(FaultSite.REMOTING_FAILED, "a", 1.0, 0.0)
    clock.advance(3.0)
    instance.start()
    try:
        assert probing.wait(10)
        heard.clear()
        instance.routes.look_up("U", 1.0)
        assert heard.wait(10)
    finally:
        release.set()
        instance.close()


@pytest.mark.parametrize("enabled", [False, True])
def test_detector_thread_runs_only_with_its_option(enabled: bool) -> None:
    options = replace(OPTIONS, send_latency_fault_enable=True, start_detector_enable=enabled)
    client_id = f"ip@detector-{enabled}"
    instance = ClientInstance(client_id, ScriptedTransport({}), options, clock=ManualClock())
    instance.start()
    try:
        names = {thread.name for thread in threading.enumerate() if thread.name.endswith(client_id)}
        assert names == {f"rocketmq-client-{client_id}"} | ({f"rocketmq-detector-{client_id}"} if enabled else set())
    finally:
        instance.close()


def test_an_idle_instance_closes_itself_after_its_time() -> None:
    transport = ScriptedTransport({})
    options = ConnectionOptions(name_server=("ns:1",))
    instance = registry.acquire("idle", "g", lambda: ClientInstance("ip@name", transport, options, idle_seconds=0.05))
    instance.unregister("g")
    assert instance._worker.join(10)
    assert instance.closed


def test_sockets_are_closed_when_an_idle_instance_closes() -> None:
    with FakeCluster(topics={"T": 1}) as cluster:
        options = ConnectionOptions(name_server=(cluster.name_server,))
        addresses = [cluster.name_server, cluster.brokers["broker-0"].address]

        def make() -> ClientInstance:
            transport = RemotingTransport([cluster.name_server])
            return ClientInstance("ip@name", transport, options, idle_seconds=0.05)

        instance = registry.acquire("idle", "g", make)
        try:
            instance.routes.look_up("T", 5.0)
            # A new broker gets a heart-beat at once.
            wait_for(lambda: len(cluster.brokers["broker-0"].requests) > 0)
            assert [cluster.connections(address) for address in addresses] == [1, 1]
            instance.unregister("g")
            # A server closes its end only after it has read the end of the stream.
            wait_for(lambda: [cluster.connections(address) for address in addresses] == [0, 0])
        finally:
            instance.close()
