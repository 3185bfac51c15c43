"""The address of the broker for each request of a read."""

from __future__ import annotations

from typing import Any

import pytest

from rocketmq_spark.errors import (
    BrokerBusyException,
    RemotingTimeoutException,
    RouteNotFoundException,
)
from tests.unit.source.conftest import A0, A1, B0, B1, Make


def test_master_is_used_first_and_slaves_after_failures(make_reader: Make) -> None:
    reader = make_reader()
    reader.addresses("a", {0: "master:1", 1: "slave:1", 2: "slave:2"})
    reader.queues.look_up()
    assert reader.queues.brokers.address(A0) == "master:1"
    assert reader.queues.brokers.is_master(A0, "master:1")
    asked: list[str] = []
    for _ in range(4):
        asked.append(reader.queues.brokers.address(A0))
        reader.queues.brokers.failed(A0, asked[-1])
    assert asked == ["master:1", "slave:1", "slave:2", "master:1"]
    assert not reader.queues.brokers.is_master(A0, "slave:1")
    # All queues of one broker change their address, and none of another broker.
    assert reader.queues.brokers.address(A1) == "slave:1"
    assert reader.queues.brokers.address(B0) == "b:10911"


def test_broker_without_a_role_is_asked_after_master_and_slaves(make_reader: Make) -> None:
    reader = make_reader()
    reader.addresses("a", {-1: "no-role:1", 0: "master:1", 2: "slave:1"})
    reader.queues.look_up()
    asked: list[str] = []
    for _ in range(3):
        asked.append(reader.queues.brokers.address(A0))
        reader.queues.brokers.failed(A0, asked[-1])
    assert asked == ["master:1", "slave:1", "no-role:1"]


def test_slave_is_used_while_there_is_no_master(make_reader: Make) -> None:
    reader = make_reader()
    reader.addresses("a", {1: "slave:1"})
    assert A0 in reader.queues.look_up()
    assert reader.queues.brokers.address(A0) == "slave:1"


def test_master_is_retried_and_preferred_after_it_answers(make_reader: Make) -> None:
    reader = make_reader(pull_timeout_ms=5_000)
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    reader.queues.brokers.failed(A0, reader.queues.brokers.address(A0))
    assert reader.queues.brokers.address(A0) == "slave:1"
    reader.clock.advance(5.0)
    # One request tries it, the others go to the slave meanwhile.
    assert [reader.queues.brokers.address(A0) for _ in range(3)] == ["master:1", "slave:1", "slave:1"]
    reader.queues.brokers.failed(A0, "master:1")
    assert reader.queues.brokers.address(A0) == "slave:1"
    reader.queues.brokers.answered(A0, "slave:1")
    assert reader.queues.brokers.address(A0) == "slave:1"
    reader.clock.advance(5.0)
    assert reader.queues.brokers.address(A0) == "master:1"
    reader.queues.brokers.answered(A0, "master:1")
    assert [reader.queues.brokers.address(A0) for _ in range(3)] == ["master:1"] * 3


def test_slave_is_trusted_after_its_master_failed_for_read_timeout(make_reader: Make) -> None:
    reader = make_reader(pull_timeout_ms=5_000, read_timeout_ms=20_000)
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    reader.queues.look_up()
    assert reader.queues.brokers.trusts(A0, "master:1")
    assert not reader.queues.brokers.trusts(A0, "slave:1")
    for _ in range(4):
        reader.queues.brokers.failed(A0, "master:1")
        assert reader.queues.brokers.address(A0, trusted=True) == "master:1"
        assert not reader.queues.brokers.trusts(A0, "slave:1")
        reader.clock.advance(5.0)
    assert reader.queues.brokers.trusts(A0, "slave:1")
    assert [reader.queues.brokers.address(A0, trusted=True) for _ in range(2)] == ["master:1", "slave:1"]
    reader.queues.brokers.answered(A0, "master:1")
    assert not reader.queues.brokers.trusts(A0, "slave:1")


def test_concurrent_failures_switch_the_address_once(make_reader: Make) -> None:
    reader = make_reader()
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    reader.queues.look_up()
    for queue in (A0, A1, A0):
        reader.queues.brokers.failed(queue, "master:1")
    assert reader.queues.brokers.address(A0) == "slave:1"


def test_route_is_requested_again_after_a_failure_at_a_limited_rate(make_reader: Make) -> None:
    reader = make_reader()
    reader.queues.look_up()
    reader.queues.brokers.failed(A0, "a:10911")
    assert len(reader.asked("query_route")) == 1
    reader.clock.advance(1.5)
    reader.addresses("a", {0: "moved:1"})
    for queue in (A0, A1):
        reader.queues.brokers.failed(queue, "a:10911")
    assert len(reader.asked("query_route")) == 2
    assert reader.queues.brokers.address(A0) == "moved:1"


def test_broker_without_a_route_has_no_address(make_reader: Make) -> None:
    reader = make_reader()
    reader.queues.look_up()
    reader.clock.advance(2.0)
    reader.addresses("a", {})
    reader.queues.brokers.failed(A0, "a:10911")
    with pytest.raises(RouteNotFoundException, match="has a broker a in the topic's route now"):
        reader.queues.brokers.address(A0)
    reader.queues.brokers.failed(A0, "")
    reader.clock.advance(2.0)
    reader.addresses("a", {0: "back:1"})
    reader.queues.brokers.failed(A0, "")
    assert reader.queues.brokers.address(A0) == "back:1"


def test_missing_route_is_requested_at_most_once_per_second(make_reader: Make) -> None:
    # In a task, which has not looked up queues.
    reader = make_reader()
    old = reader.transport.routes.pop("orders")
    for queue in (A0, A1, B0, B1):
        with pytest.raises(RouteNotFoundException, match="No topic route info"):
            reader.queues.brokers.address(queue)
        reader.queues.brokers.failed(queue, "")
    assert len(reader.asked("query_route")) == 1
    reader.clock.advance(1.1)
    reader.transport.routes["orders"] = old
    assert reader.queues.brokers.address(A0) == "a:10911"


def test_slow_name_server_is_not_queried_for_each_failure(make_reader: Make) -> None:
    reader = make_reader()
    reader.queues.look_up()
    reader.clock.advance(5.0)
    slow = reader.transport.query_route

    def asked(topic: str, timeout: float) -> Any:
        reader.clock.advance(10.0)
        reader.transport.fail("query_route", RemotingTimeoutException("no answer"))
        return slow(topic, timeout)

    reader.transport.query_route = asked
    for queue in (A0, A1, B0, B1) * 4:
        reader.queues.brokers.failed(queue, reader.queues.brokers.address(queue))
    assert len(reader.asked("query_route")) == 2


def test_busy_broker_is_retried_instead_of_its_slave(make_reader: Make) -> None:
    reader = make_reader()
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    reader.transport.fail("max_offset", BrokerBusyException("busy", 2, "", "master:1"))
    assert reader.resolver.latest([A0]) == {A0: 0}
    assert [address for _, address in reader.asked("max_offset")] == ["master:1", "master:1"]
