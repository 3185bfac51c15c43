"""What producers of one process share (spec/producer.md section 17, lines 9 to 14, on a handed-in clock)."""

from __future__ import annotations

import os
from typing import Any

from rocketmq_spark.errors import RemotingConnectException
from rocketmq_spark.options import SinkOptions
from rocketmq_spark.producer.client_instance import ClientInstance, acquire_instance, close_instances
from rocketmq_spark.transport.script import ManualClock, route
from rocketmq_spark.transport.scripted import ScriptedTransport


def instance_of(clock: ManualClock | None = None, **routes: Any) -> tuple[ClientInstance, ScriptedTransport]:
    transport = ScriptedTransport(routes or {"T": route({"a": 1, "b": 1})})
    options = SinkOptions(name_server=("ns:1",))
    return ClientInstance("ip@name", transport, options, clock=clock or ManualClock()), transport


def calls(transport: ScriptedTransport, name: str) -> list[tuple[Any, ...]]:
    return [call for call in transport.calls if call[0] == name]


def test_9_equal_keys_share_an_instance_and_the_last_user_leaves_it_warm() -> None:
    made: list[ClientInstance] = []

    def make() -> ClientInstance:
        made.append(instance_of()[0])
        return made[-1]

    try:
        first, second = acquire_instance("k", "g", make), acquire_instance("k", "g", make)
        assert first is second
        assert (first.users, len(made)) == (2, 1)
        first.unregister("g")
        second.unregister("g")
        assert first.users == 0
        assert acquire_instance("k", "g", make) is first
        assert acquire_instance("other", "g", make) is not first
    finally:
        close_instances()
    assert all(instance.closed for instance in made)


def test_an_instance_that_closed_is_not_handed_out_again() -> None:
    try:
        first = acquire_instance("k", "g", lambda: instance_of()[0])
        first.close()
        assert acquire_instance("k", "g", lambda: instance_of()[0]) is not first
    finally:
        close_instances()


def test_an_instance_whose_transport_broke_down_is_not_handed_out_again() -> None:
    try:
        instance, transport = instance_of()
        assert acquire_instance("k", "g", lambda: instance) is instance
        transport.close()
        assert acquire_instance("k", "g", lambda: instance_of()[0]) is not instance
    finally:
        close_instances()


def test_an_instance_that_another_process_made_is_not_handed_out() -> None:
    try:
        acquire_instance("k", "g", lambda: instance_of()[0])
        child = os.fork()
        if child == 0:
            forked = acquire_instance("k", "g", lambda: instance_of()[0])
            os._exit(0 if forked.pid == os.getpid() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        close_instances()


def test_10_heart_beats_go_to_the_masters_and_name_all_groups_every_thirty_seconds() -> None:
    clock = ManualClock()
    instance, transport = instance_of(clock)
    instance.register("g1")
    instance.register("g2")
    instance.routes.find("T", 1.0)
    assert instance.run_due(0.0) == 1.0
    assert calls(transport, "heart_beat") == []
    instance.run_due(1.0)
    assert calls(transport, "heart_beat") == [
        ("heart_beat", "a:10911", "ip@name", ("g1", "g2")),
        ("heart_beat", "b:10911", "ip@name", ("g1", "g2")),
    ]
    instance.run_due(30.9)
    assert len(calls(transport, "heart_beat")) == 2
    instance.run_due(31.0)
    assert len(calls(transport, "heart_beat")) == 4


def test_11_a_heart_beat_that_fails_stops_neither_the_others_nor_the_schedule() -> None:
    instance, transport = instance_of()
    instance.register("g")
    instance.routes.find("T", 1.0)
    transport.fail("heart_beat", RemotingConnectException("a:10911 refused"))
    instance.run_due(1.0)
    assert [call[1] for call in calls(transport, "heart_beat")] == ["a:10911", "b:10911"]


def test_12_every_topic_ever_looked_up_is_refreshed_every_thirty_seconds() -> None:
    instance, transport = instance_of(None, T=route({"a": 1}), U=route({"a": 1}))
    instance.routes.find("T", 1.0)
    instance.routes.find("U", 1.0)
    transport.calls.clear()
    instance.run_due(29.9)
    assert calls(transport, "query_route") == []
    transport.routes["T"] = route({"a": 8})
    instance.run_due(30.0)
    assert [call[1] for call in calls(transport, "query_route")] == ["T", "U"]
    assert len(instance.routes.find("T", 1.0).queues) == 8


def test_13_a_broker_that_is_in_no_route_any_more_gets_no_heart_beat() -> None:
    instance, transport = instance_of()
    instance.register("g")
    instance.routes.find("T", 1.0)
    transport.routes["T"] = route({"b": 1})
    instance.routes.refresh("T", 1.0)
    instance.run_due(1.0)
    assert [call[1] for call in calls(transport, "heart_beat")] == ["b:10911"]


def test_a_wanted_refresh_happens_at_once_and_then_at_most_once_a_second() -> None:
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


def test_14_closing_unregisters_where_a_heart_beat_went_and_ignores_failures() -> None:
    instance, transport = instance_of()
    instance.register("g")
    instance.routes.find("T", 1.0)
    instance.run_due(1.0)
    transport.fail("unregister_client", RemotingConnectException("a:10911 refused"))
    instance.close()
    instance.close()
    assert [call[1:] for call in calls(transport, "unregister_client")] == [
        ("a:10911", "ip@name", "g"),
        ("b:10911", "ip@name", "g"),
    ]


def test_an_idle_instance_closes_itself_after_its_time() -> None:
    transport = ScriptedTransport({})
    options = SinkOptions(name_server=("ns:1",))
    instance = acquire_instance("idle", "g", lambda: ClientInstance("ip@name", transport, options, idle_seconds=0.05))
    instance.unregister("g")
    assert instance._thread is not None
    instance._thread.join(10)
    assert instance.closed
