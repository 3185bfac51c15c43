"""What a streaming query asks of a cluster whose queues come, go, fall silent and come back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.consumer.ranges import OffsetRange
from rocketmq_spark.errors import (
    DataLossError,
    MQBrokerException,
    ReadError,
    RemotingConnectException,
    RemotingTimeoutException,
    RouteNotFoundException,
)
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.offset_json import OffsetSpec
from rocketmq_spark.transport.scripted import route
from tests.peer import PATIENCE
from tests.unit.consumer.conftest import A0, A1, B0, B1, QUEUES, Make, Reader

LATEST = OffsetSpec("latest")


def failing(made: Reader, call: str, error: Callable[[str], Exception], *addresses: str) -> None:
    """Let a call to these addresses fail from now on; without any, to none."""
    works = getattr(type(made.transport), call).__get__(made.transport)

    def called(*arguments: Any) -> Any:
        found = works(*arguments)
        if arguments[-2] in addresses:
            raise error(arguments[-2])
        return found

    setattr(made.transport, call, called)


def test_a_new_query_begins_where_the_options_say(reader: Make) -> None:
    made = reader(starting_offsets=LATEST)
    made.fill({A0: 3, B1: 1})
    assert made.cluster.starts() == made.cluster.latest() == {A0: 3, A1: 0, B0: 0, B1: 1}


def test_a_query_that_could_not_begin_says_so_at_once(reader: Make) -> None:
    with pytest.raises(RouteNotFoundException):
        reader(subscribe=("nothing",)).cluster.starts()


def test_what_is_available_are_the_ends_and_new_queues_begin_at_their_first_message(
    reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    made = reader()
    made.fill({A0: 5, B0: 4})
    made.transport.expired[B0] = 2
    known = {A0: 3, A1: 0}
    available = made.cluster.available(known)
    assert available == {A0: 5, A1: 0, B0: 4, B1: 0}
    assert made.cluster.begun(known, available) == {A0: 3, A1: 0, B0: 2, B1: 0}
    assert "new queues, read from their earliest message on: orders/b/0, orders/b/1" in caplog.text
    assert made.cluster.ranges(known, available) == [
        *(OffsetRange(A0, 3, 5), OffsetRange(A1, 0, 0)),
        *(OffsetRange(B0, 2, 4), OffsetRange(B1, 0, 0)),
    ]


def test_a_queue_that_is_gone_is_lost_data_or_left_out(reader: Make, caplog: pytest.LogCaptureFixture) -> None:
    gone = MessageQueue("orders", "a", 7)
    with pytest.raises(DataLossError, match=r"queue orders/a/7 is gone: .* behind offset 9"):
        reader().cluster.available({A0: 0, gone: 9})
    made = reader(fail_on_data_loss=False)
    for _ in range(2):
        # Whoever forgot it would read it again, should it come back.
        assert made.cluster.available({A0: 0, gone: 9})[gone] == 9
    assert caplog.text.count("orders/a/7 is gone") == 1


def test_a_queue_that_came_after_an_end_was_told_is_left_to_the_next_micro_batch(reader: Make) -> None:
    # Spark asks for the beginning of a query's first micro-batch anew when that is run again.
    made = reader()
    made.fill({A0: 5, B0: 2})
    assert made.cluster.ranges({A0: 3, B0: 0}, {A0: 5}) == [OffsetRange(A0, 3, 5)]


def test_with_a_target_nothing_behind_it_is_read_and_nobody_is_asked_for_ends(reader: Make) -> None:
    made = reader()
    made.fill(dict.fromkeys(QUEUES, 5))
    target = made.cluster.latest()
    made.fill(dict.fromkeys(QUEUES, 9))
    asked = len(made.asked("max_offset"))
    known = dict.fromkeys(QUEUES, 3)
    later = MessageQueue("orders", "c", 0)
    assert made.cluster.available({**known, later: 1}, target) == {**dict.fromkeys(QUEUES, 5), later: 1}
    assert len(made.asked("max_offset")) == asked
    with pytest.raises(DataLossError, match="queue orders/a/7 is gone"):
        made.cluster.available({**known, MessageQueue("orders", "a", 7): 9}, target)


def test_a_queue_of_assign_whose_broker_is_away_is_waited_for(reader: Make) -> None:
    made = reader(subscribe=(), assign=(A0, B0))
    made.fill({A0: 5, B0: 5})
    assert made.cluster.available({A0: 3, B0: 3}) == {A0: 5, B0: 5}
    made.clock.advance(2.0)
    made.transport.routes["orders"] = route({"a": 2})
    assert made.cluster.available({A0: 3, B0: 3}) == {A0: 5, B0: 3}


def test_name_servers_are_not_asked_at_every_turn(reader: Make) -> None:
    made = reader()
    for _ in range(5):
        made.cluster.available({A0: 0})
        made.clock.advance(0.5)
    assert len(made.asked("query_route")) == 3


def test_without_fail_on_data_loss_silence_has_no_end(reader: Make) -> None:
    made = reader(read_timeout_ms=60_000, fail_on_data_loss=False)
    known = dict.fromkeys(QUEUES, 0)
    failing(made, "max_offset", RemotingConnectException, "b:10911")
    for _ in range(9):
        assert made.cluster.available(known) == known
        made.clock.advance(14.0)


def test_a_silent_queue_stays_where_it_is_and_stops_no_other(reader: Make) -> None:
    made = reader()
    made.fill(dict.fromkeys(QUEUES, 5))
    failing(made, "max_offset", RemotingConnectException, "b:10911")
    assert made.cluster.available(dict.fromkeys(QUEUES, 3)) == {A0: 5, A1: 5, B0: 3, B1: 3}
    # One that is new is not there yet.
    assert made.cluster.available({A0: 3, B0: 3}) == {A0: 5, A1: 5, B0: 3}


def test_a_broker_that_the_route_has_lost_may_come_back(reader: Make) -> None:
    made = reader()
    made.fill(dict.fromkeys(QUEUES, 5))
    whole = made.transport.routes["orders"]
    made.transport.routes["orders"] = route({"a": 2})
    known = dict.fromkeys(QUEUES, 3)
    assert made.cluster.available(known) == {A0: 5, A1: 5, B0: 3, B1: 3}
    made.transport.routes["orders"] = whole
    made.clock.advance(1.5)
    assert made.cluster.available(known) == dict.fromkeys(QUEUES, 5)


@pytest.mark.parametrize(
    ("tries", "seconds"),
    [pytest.param(5, 14.0, id="many failures"), pytest.param(2, 600.0, id="a long micro-batch between two failures")],
)
def test_silence_has_an_end_that_names_queue_and_option(reader: Make, tries: int, seconds: float) -> None:
    made = reader(read_timeout_ms=60_000)
    known = dict.fromkeys(QUEUES, 0)
    failing(made, "max_offset", RemotingConnectException, "b:10911")
    for _ in range(tries):
        assert made.cluster.available(known) == known
        made.clock.advance(seconds)
    with pytest.raises(ReadError, match=r"end of orders/b/0: .*readTimeoutMs=60000. The last try: b:10911"):
        made.cluster.available(known)


def test_silence_that_ended_is_forgotten(reader: Make) -> None:
    made = reader(read_timeout_ms=60_000)
    known = dict.fromkeys(QUEUES, 0)
    for _ in range(9):
        made.transport.fail("max_offset", RemotingConnectException("refused"))
        made.cluster.available({A0: 0})
        made.clock.advance(61.0)
        assert made.cluster.available(known) == known


def test_a_refusal_is_raised_at_once(reader: Make) -> None:
    made = reader()
    made.transport.fail("max_offset", MQBrokerException("no permission", 16, "", "a:10911"))
    with pytest.raises(MQBrokerException, match="no permission"):
        made.cluster.available({A0: 0})


def test_a_slave_that_is_behind_loses_nothing(reader: Make) -> None:
    made = reader()
    made.fill({A0: 5})
    made.addresses("a", {1: "slave:1"})
    assert made.cluster.available({A0: 9}) == {A0: 9, A1: 0, B0: 0, B1: 0}


def test_a_slaves_answer_is_a_slaves_though_the_master_is_next(reader: Make) -> None:
    made = reader()
    made.fill({A0: 5})
    made.addresses("a", {0: "master:1", 1: "slave:1"})
    works, asked = made.transport.max_offset, threading.Event()

    def of_master(queue: MessageQueue, address: str, timeout: float) -> int:
        if address == "master:1":
            raise RemotingConnectException("refused")
        return 5

    def of_slave(queue: MessageQueue, address: str, timeout: float) -> int:
        if queue == A0:
            asked.set()
        elif queue == A1 and asked.wait(PATIENCE):
            # Turns back to the master, while the slave's answer for the other queue is on its way.
            raise RemotingTimeoutException("no answer")
        return works(queue, address, timeout)

    made.transport.max_offset = of_master
    assert made.cluster.available({A0: 9})[A0] == 9
    made.transport.max_offset = of_slave
    assert made.cluster.available({A0: 9})[A0] == 9


def test_a_queue_that_ends_before_what_was_read_is_lost_data(reader: Make, caplog: pytest.LogCaptureFixture) -> None:
    made = reader()
    made.fill({A0: 5})
    with pytest.raises(DataLossError, match="orders/a/0 ends at offset 5, and 9 was reached before"):
        made.cluster.available({A0: 9})
    made = reader(fail_on_data_loss=False)
    made.fill({A0: 5})
    available = made.cluster.available({A0: 9})
    assert available[A0] == 5
    assert made.cluster.ranges({A0: 9}, {A0: 5}) == [OffsetRange(A0, 5, 5)]


def test_a_broker_that_hangs_is_waited_for_a_few_times_and_not_once_for_each_queue(reader: Make) -> None:
    made = reader()
    made.transport.routes["orders"] = route({"a": 2, "b": 500})
    known = dict.fromkeys([MessageQueue("orders", "b", number) for number in range(500)], 0)
    failing(made, "max_offset", RemotingTimeoutException, "b:10911")
    assert made.cluster.available(known) == {A0: 0, A1: 0, **known}
    assert len([address for _, address in made.asked("max_offset") if address == "b:10911"]) <= 16
    failing(made, "update_consumer_offset", RemotingTimeoutException, "b:10911")
    made.cluster.commit(known)
    assert len(made.asked("update_consumer_offset")) <= 16


def test_commits_go_to_the_brokers_with_the_groups_name(reader: Make) -> None:
    made = reader(consumer_group="cg", namespace="ns")
    made.transport.routes["ns%orders"] = made.transport.routes["orders"]
    made.cluster.commit({A0: 3, B1: 4})
    on_wire = [replace(queue, topic="ns%orders") for queue in (A0, B1)]
    assert sorted(made.asked("update_consumer_offset")) == [
        (on_wire[0], "cg", 3, "a:10911"),
        (on_wire[1], "cg", 4, "b:10911"),
    ]


def test_a_broker_is_told_of_the_group_before_its_offsets_and_now_and_then(reader: Make) -> None:
    made = reader(consumer_group="cg")
    for seconds in (0.0, 20.0, 20.0):
        made.clock.advance(seconds)
        made.cluster.commit({A0: 3, A1: 4})
    assert made.asked("register_consumer") == [("spark", "cg", "a:10911")] * 2
    names = [name for name, *_ in made.transport.calls]
    assert names.index("register_consumer") < names.index("update_consumer_offset")


def test_a_commit_that_fails_is_logged_and_not_raised(reader: Make, caplog: pytest.LogCaptureFixture) -> None:
    made = reader()
    made.transport.fail(
        "update_consumer_offset",
        RemotingConnectException("refused"),
        MQBrokerException("no permission", 16, "", "a:10911"),
    )
    made.cluster.commit({})
    made.cluster.commit(dict.fromkeys([A0, B0, MessageQueue("orders", "gone", 0)], 3))
    assert len([record for record in caplog.records if record.getMessage().startswith("commitOffsets")]) == 3


def test_close_closes_the_transport(reader: Make) -> None:
    made = reader()
    made.cluster.close()
    assert made.transport.closed
