"""The offsets of a streaming query while queues appear, disappear, fail and return."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.errors import (
    DataLossError,
    MQBrokerException,
    NoBrokersException,
    ReadError,
    RemotingConnectException,
    RemotingTimeoutException,
    RequestNotSupportedException,
    RouteNotFoundException,
    TopicRouteStaleException,
)
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.message_ext import PullOutcome
from rocketmq_spark.options.offsets import OffsetSpec
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.protocol.remoting.codes import broker_error
from rocketmq_spark.protocol.remoting.responses import ClusterInfo
from rocketmq_spark.source.ranges import OffsetRange
from rocketmq_spark.source.stream_offsets import StreamOffsets
from tests.support.processes import PATIENCE, wait_for
from tests.support.scripted import ManualClock, PullReply, ScriptedTransport, route
from tests.unit.source.conftest import A0, A1, B0, B1, QUEUES, Make, Reader

LATEST = OffsetSpec("latest")
# What a broker answers about a topic that it does not have.
UNKNOWN = PullReply(outcome=PullOutcome(None, error=TopicRouteStaleException("no such topic", 17, "", "a:10911")))


def failing(reader: Reader, call: str, error: Callable[[str], Exception], *addresses: str) -> None:
    """Make calls to these addresses fail from now on; without addresses, none."""
    works = getattr(type(reader.transport), call).__get__(reader.transport)

    def called(*arguments: Any) -> Any:
        found = works(*arguments)
        if arguments[-2] in addresses:
            raise error(arguments[-2])
        return found

    setattr(reader.transport, call, called)


def test_new_query_starts_at_the_configured_offsets(make_reader: Make) -> None:
    reader = make_reader(starting_offsets=LATEST)
    reader.fill({A0: 3, B1: 1})
    assert reader.cluster.starts() == reader.cluster.latest() == {A0: 3, A1: 0, B0: 0, B1: 1}


def test_new_query_for_a_missing_topic_fails_at_once(make_reader: Make) -> None:
    with pytest.raises(RouteNotFoundException):
        make_reader(subscribe=("nothing",)).cluster.starts()


def test_available_offsets_are_the_ends_and_new_queues_start_at_earliest(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    reader = make_reader()
    reader.fill({A0: 5, B0: 4})
    reader.transport.expired[B0] = 2
    known = {A0: 3, A1: 0}
    available = reader.cluster.available(known)
    assert available == {A0: 5, A1: 0, B0: 4, B1: 0}
    assert reader.cluster.begun(known, available) == {A0: 3, A1: 0, B0: 2, B1: 0}
    assert "reading new queues from their earliest message: orders/b/0, orders/b/1" in caplog.text
    assert reader.cluster.ranges(known, available) == [
        *(OffsetRange(A0, 3, 5), OffsetRange(A1, 0, 0)),
        *(OffsetRange(B0, 2, 4), OffsetRange(B1, 0, 0)),
    ]


def test_missing_queue_is_lost_data_or_keeps_its_offset(make_reader: Make, caplog: pytest.LogCaptureFixture) -> None:
    gone = MessageQueue("orders", "a", 7)
    with pytest.raises(DataLossError, match=r"queue orders/a/7 is gone: .* from offset 9 on"):
        make_reader().cluster.available({A0: 0, gone: 9})
    reader = make_reader(fail_on_data_loss=False)
    for _ in range(2):
        # Without its offset, the query would read the queue again when it returns.
        assert reader.cluster.available({A0: 0, gone: 9})[gone] == 9
    assert caplog.text.count("orders/a/7 is gone") == 1


@pytest.mark.parametrize("target", [None, dict.fromkeys(QUEUES, 0)])
def test_removed_queue_is_lost_data_only_if_it_has_unread_messages(
    make_reader: Make, target: dict[MessageQueue, int] | None
) -> None:
    removed = MessageQueue("orders", "a", 7)
    known = {**dict.fromkeys(QUEUES, 0), removed: 9}
    reader = make_reader()
    reader.fill({removed: 9})
    for _ in range(2):
        assert reader.cluster.available(known, target) == known
    # Write queues that were not removed still get messages.
    reader.fill({removed: 1})
    with pytest.raises(DataLossError, match=r"queue orders/a/7 is gone: .* from offset 9 on .*updateTopic -r"):
        reader.cluster.available(known, target)


def with_old_route(make_reader: Make, *, fail_on_data_loss: bool) -> Reader:
    """Return a reader whose route lacks queue `A1`: no registration of its broker has reached the name server since."""
    reader = make_reader(fail_on_data_loss=fail_on_data_loss)
    reader.transport.query_route = lambda topic, timeout: route({"a": 1, "b": 2})
    reader.fill({A0: 5, A1: 9})
    return reader


@pytest.mark.parametrize("fail_on_data_loss", [True, False])
def test_queue_that_an_old_route_lacks_is_read(
    make_reader: Make, caplog: pytest.LogCaptureFixture, *, fail_on_data_loss: bool
) -> None:
    reader = with_old_route(make_reader, fail_on_data_loss=fail_on_data_loss)
    known = dict.fromkeys(QUEUES, 0) | {A1: 3}
    assert reader.cluster.available(known) == known | {A0: 5, A1: 9}
    assert reader.cluster.available(known, {A0: 4, A1: 7}) == known | {A0: 4, A1: 7}
    assert reader.cluster.ranges({A0: 1, A1: 3}, {A0: 5, A1: 9}) == [OffsetRange(A0, 1, 5), OffsetRange(A1, 3, 9)]
    assert "is gone" not in caplog.text


@pytest.mark.parametrize("fail_on_data_loss", [True, False])
def test_closed_queue_that_an_old_route_lacks_is_not_gone(
    make_reader: Make, caplog: pytest.LogCaptureFixture, *, fail_on_data_loss: bool
) -> None:
    reader = with_old_route(make_reader, fail_on_data_loss=fail_on_data_loss)
    forbidden = broker_error(16, "the topic[orders] pulling message is forbidden", "a:10911", "pulling")
    reader.transport.always_pull[A1] = PullReply(PullOutcome(None, error=forbidden))
    # A query that is restarted repeats its last micro-batch.
    with pytest.raises(ReadError, match=r"requests about queue orders/a/1: .* pulling message is forbidden"):
        reader.cluster.ranges({A0: 1, A1: 3}, {A0: 5, A1: 9})
    assert "is gone" not in caplog.text


@pytest.mark.parametrize("fail_on_data_loss", [True, False])
def test_topic_without_a_route_is_waited_for_if_a_proxy_lists_no_brokers(
    make_reader: Make, caplog: pytest.LogCaptureFixture, *, fail_on_data_loss: bool
) -> None:
    reader, old = (
        make_reader(subscribe=("orders", "old"), fail_on_data_loss=fail_on_data_loss),
        MessageQueue("old", "a", 0),
    )
    reader.fill({A0: 5})
    reader.transport.fail("cluster_info", RequestNotSupportedException("unknown request", 3, "", "n:9876"))
    # A proxy lists no topic whose broker is down.
    with pytest.raises(ReadError, match="requests about queue old/a/0: no broker answered within readTimeoutMs"):
        reader.cluster.ranges({A0: 1, old: 3}, {A0: 5, old: 9})
    assert "unknown if the queues old/a/0 are gone" in caplog.text


def test_removed_queue_is_reported_once_when_it_gets_messages(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    removed = MessageQueue("orders", "a", 7)
    reader = make_reader(fail_on_data_loss=False)
    for number in range(3):
        # Without its offset, the query would read the queue again when it returns.
        assert reader.cluster.available({A0: 0, removed: 0})[removed] == 0
        assert caplog.text.count("orders/a/7 is gone") == (number > 0)
        reader.fill({removed: 1})


def test_removed_queue_is_judged_by_its_master_alone(make_reader: Make) -> None:
    removed = MessageQueue("orders", "a", 7)
    reader = make_reader(read_timeout_ms=60_000)
    known = {**dict.fromkeys(QUEUES, 0), removed: 9}
    reader.fill({removed: 5})
    reader.addresses("a", {1: "slave:1"})
    # A slave may be behind.
    assert reader.cluster.available(known) == known
    reader.addresses("a", {})
    for _ in range(3):
        assert reader.cluster.available(known) == known
        reader.clock.advance(61.0)
    with pytest.raises(ReadError, match=r"requesting the end of orders/a/.: no broker has answered"):
        reader.cluster.available(known)
    reader.addresses("a", {0: "a:10911"})
    reader.clock.advance(2.0)
    with pytest.raises(DataLossError, match="queue orders/a/7 is gone"):
        reader.cluster.available(known)


@pytest.mark.parametrize("fail_on_data_loss", [True, False])
def test_topic_that_readers_may_no_longer_read_is_not_gone(make_reader: Make, *, fail_on_data_loss: bool) -> None:
    reader, known = make_reader(fail_on_data_loss=fail_on_data_loss), dict.fromkeys(QUEUES, 1)
    reader.fill(dict.fromkeys(QUEUES, 2))
    assert reader.cluster.available(known) == dict.fromkeys(QUEUES, 2)
    reader.transport.routes["orders"] = route({"a": 2, "b": 2}, perm=2)
    reader.clock.advance(2.0)
    # A running query, a new one, and one that is restarted with Trigger.AvailableNow.
    for plan in (lambda: reader.cluster.available(known), reader.cluster.starts, reader.cluster.target):
        with pytest.raises(ReadError, match="broker a rejects reads, because the topic's permission there is w"):
            plan()
    reader.transport.routes["orders"] = route({"a": 2, "b": 2})
    reader.clock.advance(2.0)
    assert reader.cluster.available(known) == dict.fromkeys(QUEUES, 2)


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ({"subscribe": ("orders",)}, QUEUES),
        ({"subscribe": (), "subscribe_pattern": "ord.*"}, QUEUES),
        ({"subscribe": (), "assign": frozenset({A0})}, [A0]),
    ],
)
def test_queues_that_are_no_longer_subscribed_keep_their_offset(
    make_reader: Make, options: dict[str, Any], read: list[MessageQueue]
) -> None:
    # The checkpoint has queues that the query no longer reads.
    reader, old, gone = make_reader(**options), MessageQueue("old", "a", 0), MessageQueue("old", "a", 7)
    reader.transport.routes["old"] = route({"a": 1})
    reader.fill({**dict.fromkeys(QUEUES, 5), old: 9})
    known = {**dict.fromkeys(QUEUES, 0), old: 2, gone: 3}
    available = reader.cluster.available(known)
    assert available == {**known, **dict.fromkeys(read, 5)}
    assert reader.cluster.available(known, {**dict.fromkeys(QUEUES, 4), old: 9}) == {**known, **dict.fromkeys(read, 4)}
    reader.cluster.commit(available)
    assert {queue for queue, *_ in reader.asked("update_consumer_offset")} == set(read)
    # What was planned before is read to its end.
    assert reader.cluster.ranges({old: 2}, {old: 9}) == [OffsetRange(old, 2, 9)]


def test_queue_created_after_the_planned_end_waits_for_the_next_batch(make_reader: Make) -> None:
    # Spark asks for the initial offset again when the first micro-batch is run again.
    reader = make_reader()
    reader.fill({A0: 5, B0: 2})
    assert reader.cluster.ranges({A0: 3, B0: 0}, {A0: 5}) == [OffsetRange(A0, 3, 5)]


def test_target_limits_offsets_without_requests_for_the_ends(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill(dict.fromkeys(QUEUES, 5))
    target = reader.cluster.latest()
    reader.fill(dict.fromkeys(QUEUES, 9))
    asked = len(reader.asked("max_offset"))
    known = dict.fromkeys(QUEUES, 3)
    later = MessageQueue("orders", "c", 0)
    assert reader.cluster.available({**known, later: 1}, target) == {**dict.fromkeys(QUEUES, 5), later: 1}
    assert len(reader.asked("max_offset")) == asked
    with pytest.raises(DataLossError, match="queue orders/a/7 is gone"):
        reader.cluster.available({**known, MessageQueue("orders", "a", 7): 9}, target)


def test_target_from_a_slave_does_not_move_offsets_back(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 12})
    assert reader.cluster.available({A0: 10, A1: 0}, {A0: 5, A1: 0}) == {A0: 10, A1: 0}
    assert reader.asked("max_offset") == [(A0, "a:10911")]


@pytest.mark.parametrize("fails", [True, False])
def test_target_below_the_read_offset_is_lost_data_if_the_master_agrees(make_reader: Make, fails: bool) -> None:
    reader = make_reader(fail_on_data_loss=fails)
    reader.fill({A0: 5})
    if fails:
        with pytest.raises(DataLossError, match="orders/a/0 ends at offset 5, but the query has read up to offset 10"):
            reader.cluster.available({A0: 10}, {A0: 5})
    else:
        assert reader.cluster.available({A0: 10}, {A0: 5}) == {A0: 5}


def test_target_skips_silent_brokers_unless_data_loss_fails(make_reader: Make) -> None:
    reader = make_reader(fail_on_data_loss=False)
    reader.fill(dict.fromkeys(QUEUES, 5))
    failing(reader, "max_offset", RemotingTimeoutException, "b:10911")
    target = reader.cluster.target()
    assert target == {A0: 5, A1: 5}
    failing(reader, "max_offset", RemotingTimeoutException)
    assert reader.cluster.available(dict.fromkeys(QUEUES, 3), target) == {A0: 5, A1: 5, B0: 3, B1: 3}
    reader = make_reader(read_timeout_ms=5000)
    failing(reader, "max_offset", RemotingTimeoutException, "b:10911")
    # No time passes before broker a has answered.
    reader.while_asleep = lambda: wait_for(lambda: {A0, A1} <= {queue for queue, _ in reader.asked("max_offset")})
    with pytest.raises(ReadError, match="orders/b/"):
        reader.cluster.target()


def test_target_waits_for_a_missing_broker_and_then_names_it(make_reader: Make) -> None:
    reader = make_reader(read_timeout_ms=5000)
    reader.fill(dict.fromkeys(QUEUES, 5))
    reader.transport.routes["orders"] = route({"a": 2})
    target = reader.cluster.target()
    assert reader.cluster.completed(target, {A0: 3, A1: 3}) == {A0: 5, A1: 5}
    with pytest.raises(
        ReadError, match=r"broker b is in no route.*of orders/b/0, orders/b/1.*readTimeoutMs=5000.*failOn"
    ):
        reader.cluster.completed(target, dict.fromkeys(QUEUES, 3))
    assert sum(reader.slept) == pytest.approx(5.0)


def test_target_has_the_queues_of_a_broker_that_comes_back_in_time(make_reader: Make) -> None:
    reader = make_reader(read_timeout_ms=5000)
    reader.fill(dict.fromkeys(QUEUES, 5))
    whole = reader.transport.routes["orders"]
    reader.transport.routes["orders"] = route({"a": 2})
    target, known = reader.cluster.target(), dict.fromkeys(QUEUES, 3)

    def start_broker() -> None:
        if sum(reader.slept) > 2.0:
            reader.transport.routes["orders"] = whole

    reader.while_asleep = start_broker
    completed = reader.cluster.completed(target, known)
    assert completed == dict.fromkeys(QUEUES, 5)
    assert reader.cluster.available(known, completed) == completed


OLD = MessageQueue("old", "c", 0)


@pytest.mark.parametrize("returns", [True, False])
def test_target_waits_for_the_only_broker_of_a_topic(make_reader: Make, returns: bool) -> None:
    reader = make_reader(subscribe=(), subscribe_pattern="o.*", read_timeout_ms=5000)
    reader.fill({OLD: 5})
    target, known = reader.cluster.target(), {**dict.fromkeys(QUEUES, 0), OLD: 3}

    def start_broker() -> None:
        if returns and sum(reader.slept) > 2.0:
            reader.transport.routes["old"] = route({"c": 1})

    reader.while_asleep = start_broker
    if returns:
        completed = reader.cluster.completed(target, known)
        assert completed == {**dict.fromkeys(QUEUES, 0), OLD: 5}
        assert reader.cluster.available(known, completed) == completed
    else:
        with pytest.raises(ReadError, match=r"broker c is in no route, .* of old/c/0\. .*readTimeoutMs=5000"):
            reader.cluster.completed(target, known)
        assert sum(reader.slept) == pytest.approx(5.0)


@pytest.mark.parametrize("fails", [True, False])
def test_topic_whose_only_broker_is_down_is_not_gone_after_a_restart(
    make_reader: Make, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    reader = make_reader(subscribe=(), subscribe_pattern="o.*", read_timeout_ms=60_000, fail_on_data_loss=fails)
    reader.fill({A0: 5, OLD: 5})
    known = {A0: 0, OLD: 3}
    for _ in range(2):
        assert reader.cluster.available(known) == {A0: 5, A1: 0, B0: 0, B1: 0, OLD: 3}
        reader.clock.advance(31.0)
    if fails:
        with pytest.raises(ReadError, match="requesting the end of old/c/0: no broker has answered"):
            reader.cluster.available(known)
    reader.transport.routes["old"] = route({"c": 1})
    reader.clock.advance(2.0)
    assert reader.cluster.available(known)[OLD] == 5
    assert "is gone" not in caplog.text


class RegistersLate(ScriptedTransport):
    """A broker registers before the name servers list the brokers, and after they have said that they have no route."""

    def cluster_info(self, timeout: float) -> ClusterInfo:
        self.routes["old"] = route({"c": 1})
        return super().cluster_info(timeout)


def test_topic_whose_broker_registers_while_it_is_looked_up_is_not_gone() -> None:
    options = SourceOptions.of(name_server=("n:9876",), subscribe_pattern="o.*", fail_on_data_loss=True)
    clock = ManualClock(1_000.0)
    with RegistersLate({"orders": route({"a": 1})}, clock=clock) as transport:
        transport.keep(OLD, [Message("old", b"x")] * 5)
        cluster = StreamOffsets(options, transport, clock, sleep=clock.advance)
        assert cluster.available({A0: 0, OLD: 3}) == {A0: 0, OLD: 5}
    with RegistersLate({"orders": route({"a": 1})}, clock=clock) as transport:
        transport.keep(OLD, [Message("old", b"x")] * 5)
        cluster = StreamOffsets(options, transport, clock, sleep=clock.advance)
        assert [part for part in cluster.ranges({OLD: 3}, {OLD: 5}) if part.size] == [OffsetRange(OLD, 3, 5)]


def test_only_the_removed_queues_of_a_topic_are_gone_if_its_broker_registers_late(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = SourceOptions.of(name_server=("n:9876",), subscribe_pattern="o.*", fail_on_data_loss=False)
    clock, removed = ManualClock(1_000.0), MessageQueue("old", "c", 1)
    with RegistersLate({"orders": route({"a": 1})}, clock=clock) as transport:
        transport.keep(OLD, [Message("old", b"x")] * 5)
        cluster = StreamOffsets(options, transport, clock, sleep=clock.advance)
        ranges = cluster.ranges({OLD: 3, removed: 2}, {OLD: 5, removed: 4})
    assert ranges == [OffsetRange(OLD, 3, 5)]
    assert "queue old/c/1 is gone" in caplog.text


def test_target_has_the_queues_of_a_broker_that_already_returned(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill(dict.fromkeys(QUEUES, 5))
    whole = reader.transport.routes["orders"]
    reader.transport.routes["orders"] = route({"a": 2})
    target = reader.cluster.target()
    reader.transport.routes["orders"] = whole
    reader.clock.advance(2.0)
    assert reader.cluster.queues.present() == QUEUES
    assert reader.cluster.completed(target, dict.fromkeys(QUEUES, 3)) == dict.fromkeys(QUEUES, 5)
    assert reader.slept == []


def test_target_omits_missing_brokers_without_fail_on_data_loss(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader(fail_on_data_loss=False)
    reader.fill(dict.fromkeys(QUEUES, 5))
    reader.transport.routes["orders"] = route({"a": 2})
    target, known = reader.cluster.target(), dict.fromkeys(QUEUES, 3)
    for _ in range(2):
        target = reader.cluster.completed(target, known)
        assert reader.cluster.available(known, target) == {A0: 5, A1: 5, B0: 3, B1: 3}
    assert reader.slept == []
    assert caplog.text.count("broker b is in no route") == 1


def test_target_does_not_wait_for_deleted_or_unsubscribed_queues(make_reader: Make) -> None:
    reader = make_reader()
    gone, other = MessageQueue("orders", "a", 7), MessageQueue("old", "c", 0)
    target = reader.cluster.target()
    known = {**dict.fromkeys(QUEUES, 0), gone: 9, other: 1}
    completed = reader.cluster.completed(target, known)
    assert reader.slept == []
    with pytest.raises(DataLossError, match="queue orders/a/7 is gone"):
        reader.cluster.available(known, completed)


def test_assigned_queue_of_a_missing_broker_keeps_its_offset(make_reader: Make) -> None:
    reader = make_reader(subscribe=(), assign=frozenset({A0, B0}))
    reader.fill({A0: 5, B0: 5})
    assert reader.cluster.available({A0: 3, B0: 3}) == {A0: 5, B0: 5}
    reader.clock.advance(2.0)
    reader.transport.routes["orders"] = route({"a": 2})
    assert reader.cluster.available({A0: 3, B0: 3}) == {A0: 5, B0: 3}


def test_routes_are_requested_at_most_once_per_second(make_reader: Make) -> None:
    reader = make_reader()
    for _ in range(5):
        reader.cluster.available({A0: 0})
        reader.clock.advance(0.5)
    assert len(reader.asked("query_route")) == 3


def test_silent_broker_is_tolerated_forever_without_fail_on_data_loss(make_reader: Make) -> None:
    reader = make_reader(read_timeout_ms=60_000, fail_on_data_loss=False)
    known = dict.fromkeys(QUEUES, 0)
    failing(reader, "max_offset", RemotingConnectException, "b:10911")
    for _ in range(9):
        assert reader.cluster.available(known) == known
        reader.clock.advance(14.0)


def test_queues_of_a_silent_broker_keep_their_offset(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill(dict.fromkeys(QUEUES, 5))
    failing(reader, "max_offset", RemotingConnectException, "b:10911")
    assert reader.cluster.available(dict.fromkeys(QUEUES, 3)) == {A0: 5, A1: 5, B0: 3, B1: 3}
    # A new queue does not exist yet.
    assert reader.cluster.available({A0: 3, B0: 3}) == {A0: 5, A1: 5, B0: 3}


def test_broker_can_return_to_the_route(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill(dict.fromkeys(QUEUES, 5))
    whole = reader.transport.routes["orders"]
    reader.transport.routes["orders"] = route({"a": 2})
    known = dict.fromkeys(QUEUES, 3)
    assert reader.cluster.available(known) == {A0: 5, A1: 5, B0: 3, B1: 3}
    reader.transport.routes["orders"] = whole
    reader.clock.advance(1.5)
    assert reader.cluster.available(known) == dict.fromkeys(QUEUES, 5)


@pytest.mark.parametrize(
    ("tries", "seconds"),
    [pytest.param(5, 14.0, id="many failures"), pytest.param(2, 600.0, id="a long micro-batch between two failures")],
)
def test_silent_broker_fails_after_read_timeout_naming_queue_and_option(
    make_reader: Make, tries: int, seconds: float
) -> None:
    reader = make_reader(read_timeout_ms=60_000)
    known = dict.fromkeys(QUEUES, 0)
    failing(reader, "max_offset", RemotingConnectException, "b:10911")
    for _ in range(tries):
        assert reader.cluster.available(known) == known
        reader.clock.advance(seconds)
    with pytest.raises(ReadError, match=r"end of orders/b/0: .*readTimeoutMs=60000. The last try: b:10911"):
        reader.cluster.available(known)


def test_answer_of_a_broker_resets_its_timeout(make_reader: Make) -> None:
    reader = make_reader(read_timeout_ms=60_000)
    known = dict.fromkeys(QUEUES, 0)
    for _ in range(9):
        reader.transport.fail("max_offset", RemotingConnectException("refused"))
        reader.cluster.available({A0: 0})
        reader.clock.advance(61.0)
        assert reader.cluster.available(known) == known


def test_a_refusal_is_raised_at_once(make_reader: Make) -> None:
    reader = make_reader()
    reader.transport.fail("max_offset", MQBrokerException("no permission", 16, "", "a:10911"))
    with pytest.raises(MQBrokerException, match="no permission"):
        reader.cluster.available({A0: 0})


def test_slave_that_is_behind_is_no_data_loss(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 5})
    reader.addresses("a", {1: "slave:1"})
    assert reader.cluster.available({A0: 9}) == {A0: 9, A1: 0, B0: 0, B1: 0}


def test_answer_of_a_slave_is_recognised_after_a_switch_to_the_master(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 5})
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    works, asked = reader.transport.max_offset, threading.Event()

    def of_master(queue: MessageQueue, address: str, timeout: float) -> int:
        if address == "master:1":
            raise RemotingConnectException("refused")
        return 5

    def of_slave(queue: MessageQueue, address: str, timeout: float) -> int:
        if queue == A0:
            asked.set()
        elif queue == A1 and asked.wait(PATIENCE):
            # The read returns to the master while the slave's answer for the other queue is in flight.
            raise RemotingTimeoutException("no answer")
        return works(queue, address, timeout)

    reader.transport.max_offset = of_master
    assert reader.cluster.available({A0: 9})[A0] == 9
    reader.transport.max_offset = of_slave
    assert reader.cluster.available({A0: 9})[A0] == 9


def test_queue_that_ends_before_the_read_offset_is_lost_data(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader()
    reader.fill({A0: 5})
    with pytest.raises(DataLossError, match="orders/a/0 ends at offset 5, but the query has read up to offset 9"):
        reader.cluster.available({A0: 9})
    reader = make_reader(fail_on_data_loss=False)
    reader.fill({A0: 5})
    available = reader.cluster.available({A0: 9})
    assert available[A0] == 5
    assert reader.cluster.ranges({A0: 9}, {A0: 5}) == [OffsetRange(A0, 5, 5)]


@pytest.mark.parametrize("running", [True, False], ids=["running", "begun again"])
def test_deleted_topic_does_not_stop_others_without_fail_on_data_loss(
    make_reader: Make, caplog: pytest.LogCaptureFixture, running: bool
) -> None:
    reader, old = make_reader(subscribe=("orders", "old"), fail_on_data_loss=False), MessageQueue("old", "a", 0)
    reader.transport.routes["old"] = route({"a": 1})
    reader.fill({A0: 5, old: 3})
    if running:
        assert reader.cluster.available({A0: 0, old: 0}) == {A0: 5, A1: 0, B0: 0, B1: 0, old: 3}
    del reader.transport.routes["old"], reader.transport.stored[old]
    reader.transport.always_pull[old] = UNKNOWN
    for _ in range(3):
        reader.clock.advance(2.0)
        # A broker that still has the route asked for says that there is nothing.
        assert reader.cluster.available({A0: 2, old: 3}) == {A0: 5, A1: 0, B0: 0, B1: 0, old: 0 if running else 3}
    assert sum("topic old is gone" in text for text in caplog.messages) == 1
    assert not any("no name server" in text or "waits for its broker" in text for text in caplog.messages)


@pytest.mark.parametrize("fewer", [False, True], ids=["deleted topic", "fewer read queues"])
def test_a_repeated_micro_batch_of_queues_that_are_gone_is_lost_data(
    make_reader: Make, caplog: pytest.LogCaptureFixture, fewer: bool
) -> None:
    gone = MessageQueue("orders", "a", 7) if fewer else MessageQueue("old", "a", 0)
    starts, ends = {A0: 1, gone: 3}, {A0: 5, gone: 9}
    for fail_on_data_loss in (True, False):
        # Spark repeats a micro-batch at the start of a query, before it asks for the latest offsets.
        reader = make_reader(subscribe=("orders", gone.topic), fail_on_data_loss=fail_on_data_loss)
        reader.fill({A0: 5})
        if not fewer:
            reader.transport.always_pull[gone] = UNKNOWN
        if fail_on_data_loss:
            text = rf"queue {gone} is gone: its messages from offset 3 on can't be read, .* failOnDataLoss=false"
            with pytest.raises(DataLossError, match=text):
                reader.cluster.ranges(starts, ends)
        else:
            assert reader.cluster.ranges(starts, ends) == [OffsetRange(A0, 1, 5)]
    assert f"queue {gone} is gone" in caplog.text


@pytest.mark.parametrize("end", [0, 3])
def test_a_repeated_micro_batch_leaves_out_a_shorter_queue_that_is_gone(make_reader: Make, end: int) -> None:
    reader, old = make_reader(subscribe=("orders", "old"), fail_on_data_loss=False), MessageQueue("old", "a", 0)
    reader.fill({A0: 5})
    reader.transport.always_pull[old] = UNKNOWN
    ranges = reader.cluster.ranges({A0: 1, old: 9}, {A0: 5, old: end}, {old: 1_000}, {})
    assert ranges == [OffsetRange(A0, 1, 5)]


def test_a_repeated_micro_batch_leaves_out_a_new_queue_that_is_gone(make_reader: Make) -> None:
    reader, new = make_reader(subscribe=("orders", "old"), fail_on_data_loss=False), MessageQueue("old", "a", 0)
    reader.fill({A0: 5})
    # It had no messages, so no data is lost.
    ranges = reader.cluster.ranges({A0: 1}, {A0: 5, new: 0})
    assert [part for part in ranges if part.size] == [OffsetRange(A0, 1, 5)]


def test_a_repeated_micro_batch_waits_for_a_topic_that_comes_back(make_reader: Make) -> None:
    reader = make_reader(fail_on_data_loss=False)
    reader.fill({A0: 5})
    missing = reader.transport.routes.pop("orders")

    def register() -> None:
        if len(reader.slept) == 3:
            reader.transport.routes["orders"] = missing

    reader.while_asleep = register
    assert reader.cluster.ranges({A0: 1}, {A0: 5}) == [OffsetRange(A0, 1, 5)]


@pytest.mark.parametrize("answers", [True, False], ids=["", "answer lost"])
def test_a_repeated_micro_batch_reads_a_broker_that_has_just_come_back(make_reader: Make, *, answers: bool) -> None:
    reader = make_reader(fail_on_data_loss=False, pull_timeout_ms=500)
    reader.fill({A0: 5})
    missing = reader.transport.routes.pop("orders")
    if not answers:
        reader.transport.play_pulls(A0, PullReply(outcome=PullOutcome(None, error=RemotingTimeoutException("lost"))))

    def register() -> None:
        # The driver keeps the answer of the name servers that no broker has the topic for a second.
        reader.transport.routes["orders"] = missing

    reader.while_asleep = register
    assert reader.cluster.ranges({A0: 1}, {A0: 5}) == [OffsetRange(A0, 1, 5)]


@pytest.mark.parametrize("target", [None, {A0: 5}])
def test_topic_of_a_pattern_deleted_between_two_runs_is_lost_data(
    make_reader: Make, target: dict[MessageQueue, int] | None
) -> None:
    reader, old = make_reader(subscribe_pattern="o.*", subscribe=()), MessageQueue("old", "a", 0)
    reader.transport.always_pull[old] = UNKNOWN
    with pytest.raises(DataLossError, match="queue old/a/0 is gone: its messages from offset 3 on can't be read"):
        reader.cluster.available({A0: 0, old: 3}, target)


def test_deleted_topic_fails_a_query_with_fail_on_data_loss(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 5})
    reader.cluster.available({A0: 0})
    del reader.transport.routes["orders"], reader.transport.stored[A0]
    reader.clock.advance(2.0)
    with pytest.raises(DataLossError, match=r"orders/a/0 ends at offset 0, but .* offset 5: the topic was deleted, or"):
        reader.cluster.available({A0: 5})
    again = make_reader(subscribe=("old",))
    with pytest.raises(RouteNotFoundException, match=r"reading topic old: .*TOPIC_NOT_EXIST"):
        again.cluster.available({MessageQueue("old", "a", 0): 3})


def test_name_servers_without_brokers_do_not_mean_deleted_topics(make_reader: Make) -> None:
    reader = make_reader(fail_on_data_loss=False)
    reader.transport.fail("query_route", NoBrokersException("empty", 17, "", "n:9876"))
    with pytest.raises(RouteNotFoundException, match="empty"):
        reader.cluster.available({A0: 3})


def test_hanging_broker_is_not_queried_for_each_queue(make_reader: Make) -> None:
    reader = make_reader()
    reader.transport.routes["orders"] = route({"a": 2, "b": 500})
    known = dict.fromkeys([MessageQueue("orders", "b", number) for number in range(500)], 0)
    failing(reader, "max_offset", RemotingTimeoutException, "b:10911")
    assert reader.cluster.available(known) == {A0: 0, A1: 0, **known}
    assert len([address for _, address in reader.asked("max_offset") if address == "b:10911"]) <= 16
    failing(reader, "update_consumer_offset", RemotingTimeoutException, "b:10911")
    reader.cluster.commit(known)
    assert len(reader.asked("update_consumer_offset")) <= 16
    failing(reader, "register_consumer", RemotingTimeoutException, "b:10911")
    reader.clock.advance(60.0)
    asked = len(reader.asked("register_consumer"))
    reader.cluster.commit(dict.fromkeys(known, 1))
    assert len(reader.asked("register_consumer")) == asked + 1


def test_commits_contain_the_group_and_go_to_each_broker(make_reader: Make) -> None:
    reader = make_reader(consumer_group="cg", namespace="ns")
    reader.cluster.commit({A0: 3, B1: 4})
    assert sorted(reader.asked("update_consumer_offset")) == [
        (A0, "cg", 3, "a:10911"),
        (B1, "cg", 4, "b:10911"),
    ]


def test_concurrent_commits_lose_no_offset_at_the_broker(make_reader: Make) -> None:
    tables: dict[tuple[str, str], dict[MessageQueue, int]] = {}

    def commit_offset(queue: MessageQueue, group: str, offset: int, address: str, timeout: float) -> None:
        """Do what ConsumerOffsetManager.commitOffset does, with its race."""
        table = tables.get((queue.topic, address))
        if table is None:
            time.sleep(0.02)
            tables[queue.topic, address] = {queue: offset}
        else:
            table[queue] = offset

    names = ("orders", "bills")
    reader = make_reader(subscribe=names)
    for name in names:
        reader.transport.routes[name] = route({"a": 8, "b": 8})
    reader.transport.update_consumer_offset = commit_offset
    committed = {MessageQueue(name, broker, number): number for name in names for broker in "ab" for number in range(8)}
    reader.cluster.commit(committed)
    assert {queue: offset for table in tables.values() for queue, offset in table.items()} == committed


def test_group_is_registered_before_commits_and_again_later(make_reader: Make) -> None:
    reader = make_reader(consumer_group="cg")
    for number, seconds in enumerate((0.0, 20.0, 20.0)):
        reader.clock.advance(seconds)
        reader.cluster.commit({A0: number, A1: number})
    assert reader.asked("register_consumer") == [("spark", "cg", "a:10911")] * 2
    names = [name for name, *_ in reader.transport.calls]
    assert names.index("register_consumer") < names.index("update_consumer_offset")


def test_a_commit_that_fails_is_logged_and_not_raised(make_reader: Make, caplog: pytest.LogCaptureFixture) -> None:
    reader = make_reader()
    reader.transport.fail(
        "update_consumer_offset",
        RemotingConnectException("refused"),
        MQBrokerException("no permission", 16, "", "a:10911"),
    )
    reader.cluster.commit({})
    reader.cluster.commit(dict.fromkeys([A0, B0], 3))
    reader.clock.advance(2.0)
    reader.transport.fail("query_route", MQBrokerException("no permission", 16, "", "n:9876"))
    reader.cluster.commit({A0: 4})
    assert len([record for record in caplog.records if record.getMessage().startswith("commitOffsets")]) == 3


def test_offsets_of_missing_queues_are_committed_after_their_return(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader(subscribe=("orders", "zebra"), fail_on_data_loss=False)
    gone, away = MessageQueue("zebra", "a", 0), MessageQueue("orders", "c", 0)
    for number in range(2):
        reader.cluster.commit({**dict.fromkeys(QUEUES, number), gone: 3, away: 3})
    assert len(reader.asked("update_consumer_offset")) == 2 * len(QUEUES)
    reader.transport.routes |= {"orders": route({"a": 2, "b": 2, "c": 1}), "zebra": route({"a": 1})}
    reader.clock.advance(2.0)
    reader.cluster.commit({gone: 3, away: 3})
    assert {queue for queue, *_ in reader.asked("update_consumer_offset")} == {*QUEUES, gone, away}
    assert not any(text.startswith("commitOffsets") for text in caplog.messages)


def test_unacknowledged_commit_is_repeated_later(make_reader: Make) -> None:
    reader = make_reader()
    reader.transport.fail("update_consumer_offset", MQBrokerException("no permission", 16, "", "a:10911"))
    for seconds in (0.0, 1.0, 30.0, 1.0, 300.0):
        reader.clock.advance(seconds)
        reader.cluster.commit({A0: 3})
    committed = [(queue, offset) for queue, _, offset, _ in reader.asked("update_consumer_offset")]
    assert committed == [(A0, 3), (A0, 3)]


def test_change_of_one_queue_commits_all_queues_and_registers_everywhere(make_reader: Make) -> None:
    """The broker that got the commit may be gone: a slave replaced it, or it lost the offset."""
    reader = make_reader()
    for number in range(3):
        reader.cluster.commit({A0: 3 + number, B0: 5})
        reader.clock.advance(31.0)
    assert Counter(queue for queue, *_ in reader.asked("update_consumer_offset")) == {A0: 3, B0: 3}
    assert Counter(address for *_, address in reader.asked("register_consumer")) == {"a:10911": 3, "b:10911": 3}


def test_rejected_first_commit_of_a_topic_skips_its_other_queues(make_reader: Make) -> None:
    reader = make_reader()
    reader.transport.fail("update_consumer_offset", MQBrokerException("busy", 2, "", "a:10911"))
    reader.cluster.commit({A0: 3, A1: 4})
    assert [queue for queue, *_ in reader.asked("update_consumer_offset")] == [A1]
    reader.cluster.commit({A0: 3, A1: 5})
    assert [queue for queue, *_ in reader.asked("update_consumer_offset")] == [A1, A1, A0]


def test_silent_broker_causes_one_heartbeat_and_one_warning(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    topics = [f"t{number}" for number in range(12)]
    reader = make_reader(subscribe=tuple(topics))
    reader.transport.routes |= {name: route({"a": 4, "b": 4}) for name in topics}
    failing(reader, "register_consumer", RemotingTimeoutException, "a:10911")
    offsets = {MessageQueue(name, broker, number): 3 for name in topics for broker in "ab" for number in range(4)}
    reader.cluster.commit(offsets)
    assert Counter(address for *_, address in reader.asked("register_consumer")) == {"a:10911": 1, "b:10911": 1}
    assert {address for *_, address in reader.asked("update_consumer_offset")} == {"b:10911"}
    assert [text[:16] for text in caplog.messages] == ["commitOffsets: t"]


APPLICATION = "10.0.0.1@1234#567890123"


def test_group_with_a_running_application_is_not_changed(make_reader: Make, caplog: pytest.LogCaptureFixture) -> None:
    reader = make_reader(consumer_group="shop")
    reader.transport.members["shop", "a:10911"] = {"10.0.0.2@spark#17", APPLICATION}
    for number in range(3):
        reader.cluster.commit(dict.fromkeys(QUEUES, number))
    assert {address for *_, address in reader.asked("register_consumer")} == {"b:10911"}
    assert {address for *_, address in reader.asked("update_consumer_offset")} == {"b:10911"}
    assert len(caplog.messages) == 1
    assert f"consumerGroup=shop is also used by {APPLICATION} at a:10911" in caplog.text
    # When the application has left, all missed offsets are committed.
    reader.transport.members.clear()
    reader.clock.advance(31.0)
    reader.cluster.commit(dict.fromkeys(QUEUES, 2))
    assert (A0, "shop", 2, "a:10911") in reader.asked("update_consumer_offset")


def test_application_started_later_is_detected_before_the_next_commit(make_reader: Make) -> None:
    reader = make_reader()
    reader.cluster.commit({A0: 1})
    reader.transport.members[reader.options.consumer_group, "a:10911"].add(APPLICATION)
    reader.clock.advance(31.0)
    reader.cluster.commit({A0: 2})
    assert len(reader.asked("register_consumer")) == len(reader.asked("update_consumer_offset")) == 1


@pytest.mark.parametrize(
    ("client_id", "ours"),
    [
        ("10.0.0.2@spark#17", True),
        ("10.0.0.2@nightly#17@unit", True),
        ("spark", True),
        (APPLICATION, False),
        (f"{APPLICATION}@unit", False),
        ("10.0.0.1@DEFAULT", False),
        ("10.0.0.1@1234", False),
        ("host@1234@0@2x3k", False),
    ],
)
def test_readers_and_applications_are_distinguished_by_client_id(make_reader: Make, client_id: str, ours: bool) -> None:
    reader = make_reader()
    reader.transport.members[reader.options.consumer_group, "a:10911"] = {client_id}
    reader.cluster.commit({A0: 1})
    assert bool(reader.asked("update_consumer_offset")) is ours


def test_each_micro_batch_is_planned_within_its_own_deadline(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader(read_timeout_ms=5000)
    reader.fill(dict.fromkeys(QUEUES, 5))
    known = dict.fromkeys(QUEUES, 0)
    plans = (
        reader.cluster.target,
        lambda: reader.cluster.available(known),
        lambda: reader.cluster.ranges(known, dict.fromkeys(QUEUES, 5)),
        lambda: reader.cluster.commit(dict.fromkeys(QUEUES, int(reader.clock()))),
    )
    for _ in range(2):
        for number, plan in enumerate(plans):
            reader.clock.advance(3600.0)
            before = len(reader.asked("query_route"))
            plan()
            # All but `ranges` need the routes of now.
            assert (len(reader.asked("query_route")) > before) is (number != 2)
    assert caplog.messages == []


def test_stream_continues_with_cached_routes_while_name_servers_are_slow(make_reader: Make) -> None:
    topics = tuple(f"t{number}" for number in range(50))
    reader = make_reader(subscribe=topics, read_timeout_ms=60_000)
    reader.transport.routes |= {name: route({"a": 1}) for name in topics}
    known = {MessageQueue(name, "a", 0): 0 for name in topics}
    assert reader.cluster.available(known) == known
    works = reader.transport.query_route

    def silent(topic: str, timeout: float) -> Any:
        reader.clock.advance(max(0.0, timeout))
        reader.transport.fail("query_route", RemotingTimeoutException("no answer"))
        return works(topic, timeout)

    reader.transport.query_route = silent
    for count in range(1, 6):
        reader.clock.advance(30.0)
        reader.fill(dict.fromkeys(known, 1))
        assert reader.cluster.available(known) == dict.fromkeys(known, count)


def test_close_closes_the_transport(make_reader: Make) -> None:
    reader = make_reader()
    reader.cluster.close()
    assert reader.transport.closed
