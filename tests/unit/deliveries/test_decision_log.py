"""The decision log: homes, records, and readers that start in the middle."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.exactly_once.halves import read_halves
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.records import VERSION, Decision
from rocketmq_spark.errors import DataLossError, MQClientException, RouteNotFoundException
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.testing import FakeCluster
from tests.support.processes import wait_for
from tests.support.two_phase import ID, TOPIC, WRITE, Driver, MovedClock, driver, visible

ROWS = [f"row-{number}" for number in range(20)]


@pytest.fixture
def second(cluster: FakeCluster, clock: MovedClock) -> Iterator[Driver]:
    with driver(cluster, clock) as running:
        yield running


def commit(job: Driver, write: Write) -> None:
    halves, group = job.prepare(ROWS, write)
    job.two_phase.commit(write, halves, group)


def store_beside(cluster: FakeCluster, job: Driver, count: int, body: bytes = b"{}", tag: str = "other") -> None:
    """Store messages of another program in the home of a log."""
    home = job.log.home
    assert home is not None
    broker = cluster.brokers[home.broker_name]
    with broker.lock:
        messages = [Message(home.topic, body, properties={"TAGS": tag})] * count
        broker.storage.store.put(home, messages, time.time())


def decisions() -> int:
    return sum(isinstance(one, Decision) for one in gc.get_objects())


def test_drivers_draw_the_same_home(first: Driver, second: Driver) -> None:
    assert second.open().log.home == first.log.home
    homes = set()
    for number in range(20):
        log = DecisionLog(f"job-{number}", first.options.transaction_topic)
        log.open(first.brokers, everything=True)
        homes.add(log.home)
    assert len(homes) == 2


class ReversedDraw(DecisionLog):
    """Draws another home than a usual log."""

    def _draw(self, queue: MessageQueue) -> bytes:
        return bytes(255 - byte for byte in super()._draw(queue))


def test_a_reader_finds_a_home_that_would_not_be_drawn(cluster: FakeCluster, clock: MovedClock, first: Driver) -> None:
    with driver(cluster, clock, log=ReversedDraw) as second:
        assert second.open().log.home != first.log.home
        commit(first, WRITE)
        assert second.open().log.home == first.log.home
        assert second.log.writes[WRITE].done


def test_a_home_that_is_down_is_an_error(cluster: FakeCluster, first: Driver, clock: MovedClock) -> None:
    commit(first, WRITE)
    assert first.log.home is not None
    cluster.kill(first.log.home.broker_name)
    with (
        driver(cluster, clock) as second,
        pytest.raises(
            RouteNotFoundException, match=f"no name server lists a master of broker {first.log.home.broker_name}"
        ),
    ):
        second.open()


def test_a_home_that_is_newer_than_the_cached_route_is_found(cluster: FakeCluster, clock: MovedClock) -> None:
    """A process has cached the route while the broker was down. Only this broker has records."""
    old, new = cluster.brokers
    cluster.kill(new)
    with driver(cluster, clock) as first:
        commit(first.open(), WRITE)
    cluster.restart(new)
    cluster.kill(old)
    cluster.create_topic(TOPIC, 2)
    with driver(cluster, clock) as second, driver(cluster, clock) as other:
        topic = second.options.transaction_topic
        assert second.brokers.routes().look_up(topic).broker_names == {new}
        cluster.restart(old)
        wait_for(lambda: other.brokers.fresh_route(topic).broker_names == {old, new})
        assert second.open().log.home == first.log.home
        assert second.log.writes[WRITE].done


@pytest.mark.parametrize("store", [DecisionLog.claim_home, DecisionLog.append_homes])
def test_a_log_waits_until_name_servers_list_a_broker_that_restarts(
    cluster: FakeCluster, first: Driver, store: Callable[[DecisionLog, Brokers, Write, set[str]], object]
) -> None:
    assert first.log.home is not None
    (other,) = cluster.brokers.keys() - {first.log.home.broker_name}
    cluster.kill(other)
    first.brokers.refresh_route(first.log.topic)
    cluster.restart(other)
    store(first.log, first.brokers, WRITE, {other})


def test_halves_beyond_one_record_are_in_several(first: Driver, second: Driver) -> None:
    halves, group = first.prepare(ROWS)
    rows = np.arange(200_001)
    many = replace(
        halves,
        codes=(rows % len(halves.queues)).astype(np.int32),
        commit_log_offsets=rows * 1_000,
        queue_offsets=rows,
    )
    first.two_phase._decide(WRITE, 1, group, many, first.options.transaction_timeout_ms)
    decision = second.open().log.writes[WRITE].last
    assert len(decision.manifests) == 3
    read = read_halves(second.brokers, second.log, decision)
    assert [read[row] for row in (0, 99_999, 100_000, 200_000)] == [many[row] for row in (0, 99_999, 100_000, 200_000)]
    assert len(read) == 200_001


def test_a_reader_of_a_stream_starts_at_the_last_micro_batch(cluster: FakeCluster, first: Driver) -> None:
    for number in range(5):
        commit(first, Write(str(number), "query"))
    # The search has to go back beyond its first window.
    store_beside(cluster, first, 1_500)
    with_old = DecisionLog(ID, first.options.transaction_topic)
    with_old.open(first.brokers, everything=False)
    assert with_old.newest == Write("4", "query")
    assert set(with_old.writes) == {Write("4", "query")}
    assert with_old.writes[Write("4", "query")].done


def test_a_late_record_of_an_old_micro_batch_hides_no_decision(first: Driver, second: Driver) -> None:
    for number in range(2):
        commit(first, Write(str(number), "query"))
    frozen = DecisionLog(ID, first.options.transaction_topic)
    frozen.open(first.brokers, everything=False)
    first.decide_and_crash(ROWS, 5, Write("2", "query"))
    frozen.append_done(first.brokers, Write("1", "query"))
    second.log.open(second.brokers, everything=False)
    assert not second.log.writes[Write("2", "query")].done


def test_records_of_other_ids_are_ignored(first: Driver, clock: MovedClock, cluster: FakeCluster) -> None:
    commit(first, WRITE)
    others = DecisionLog("other", first.options.transaction_topic)
    others.records.tag = first.log.records.tag
    others.open(first.brokers, everything=True)
    assert others.writes == {}


def test_a_log_that_lost_records_is_an_error(cluster: FakeCluster, first: Driver) -> None:
    commit(first, WRITE)
    first.log.position += 5
    with pytest.raises(DataLossError, match="has lost messages"):
        first.log.refresh(first.brokers)


def test_the_first_write_names_its_home_on_all_brokers(cluster: FakeCluster, first: Driver, clock: MovedClock) -> None:
    assert first.log.home is not None
    home = first.log.home.broker_name
    halves, group = first.prepare(ROWS)
    on_home = [code for code, queue in enumerate(halves.queues) if queue.broker_name == home]
    rows = halves.select(np.flatnonzero(np.isin(halves.codes, on_home)))
    part = replace(rows, youngest=tuple(half for half in rows.youngest if half.queue.broker_name == home))
    first.two_phase.commit(WRITE, part, group)
    cluster.kill(home)
    why = f"no name server lists a master of broker {home}"
    with driver(cluster, clock) as second, pytest.raises(RouteNotFoundException, match=why):
        second.open()


CONTENDED = "another driver of transactionalId=job begins a decision log in another queue"


def move(job: Driver) -> None:
    """Let a driver without decisions have another home, as if the brokers of its home were down."""
    job.log.home = next(queue for queue in job.log.records.queues(job.brokers) if queue != job.log.home)
    job.log.position = 0


@pytest.fixture(params=["the first driver", "the second driver"])
def apart(request: pytest.FixtureRequest, first: Driver, second: Driver) -> None:
    """Let one of two drivers without decisions have another home."""
    second.open()
    move(first if request.param == "the first driver" else second)


def written_once(cluster: FakeCluster, clock: MovedClock) -> bool:
    """Have a third driver write; return whether each row is visible once."""
    with driver(cluster, clock) as third:
        commit(third.open(), WRITE)
    return visible(cluster) == Counter(ROWS)


@pytest.mark.usefixtures("apart")
def test_a_driver_notices_the_decision_in_another_home(
    cluster: FakeCluster, clock: MovedClock, first: Driver, second: Driver
) -> None:
    commit(first, WRITE)
    with pytest.raises(MQClientException, match=CONTENDED):
        commit(second, WRITE)
    assert second.open().log.home == first.log.home
    assert second.log.writes[WRITE].done
    assert written_once(cluster, clock)


@pytest.mark.parametrize("moved", ["the deciding driver", "the other driver"])
def test_a_decision_does_not_count_if_another_home_was_claimed_before(
    cluster: FakeCluster, clock: MovedClock, second: Driver, moved: str
) -> None:
    class ClaimedMeanwhile(DecisionLog):
        def append_decision(self, *args: Any) -> Any:
            # Between the check and the decision of this driver.
            with pytest.raises(MQClientException, match=CONTENDED):
                second.log.claim_home(second.brokers, WRITE, ())
            return super().append_decision(*args)

    with driver(cluster, clock, log=ClaimedMeanwhile) as deciding:
        deciding.open()
        second.open()
        move(deciding if moved == "the deciding driver" else second)
        with pytest.raises(MQClientException, match=CONTENDED):
            commit(deciding, WRITE)
    assert visible(cluster) == Counter()
    assert written_once(cluster, clock)


@pytest.mark.usefixtures("apart")
def test_claims_of_drivers_that_died_do_not_stop_others(
    cluster: FakeCluster, clock: MovedClock, first: Driver, second: Driver
) -> None:
    first.log.claim_home(first.brokers, WRITE, ())
    with pytest.raises(MQClientException, match=CONTENDED):
        second.log.claim_home(second.brokers, WRITE, ())
    assert written_once(cluster, clock)


@pytest.mark.usefixtures("apart")
def test_a_claimed_home_that_is_down_is_an_error(
    cluster: FakeCluster, clock: MovedClock, first: Driver, second: Driver
) -> None:
    for job in (first, second):
        with contextlib.suppress(MQClientException):
            job.log.claim_home(job.brokers, WRITE, ())
    # The driver that claimed it could still decide.
    home = min(first.log.home, second.log.home, key=first.log._draw)  # type: ignore[arg-type]
    assert home is not None
    cluster.kill(home.broker_name)
    why = f"no name server lists a master of broker {home.broker_name}"
    with driver(cluster, clock) as third, pytest.raises(RouteNotFoundException, match=why):
        third.open()


def test_records_that_are_written_during_the_search_are_read(
    cluster: FakeCluster, clock: MovedClock, first: Driver
) -> None:
    class WrittenMeanwhile(DecisionLog):
        def _homes(self, *args: Any) -> Any:
            homes = super()._homes(*args)
            commit(first, WRITE)
            return homes

    with driver(cluster, clock, log=WrittenMeanwhile) as second:
        second.open()
        second.log.refresh(second.brokers)
        assert second.log.writes[WRITE].done


# A log that others write to


def forge(cluster: FakeCluster, job: Driver, *records: dict[str, Any] | bytes) -> None:
    """Store messages with the tag of a log in its home; objects get the fields that each record has."""
    head = {"version": VERSION, "id": ID, "write": "forged", "query": "", "since": 0}
    for record in records:
        body = record if isinstance(record, bytes) else json.dumps({**head, **record}).encode()
        store_beside(cluster, job, 1, body, job.log.records.tag)


def decision_of(number: int, claim: int) -> dict[str, Any]:
    lists: dict[str, Any] = {"manifests": [], "digest": hashlib.sha256().hexdigest(), "floors": [], "youngest": []}
    facts = {"round": 1, "group": f"{ID}#{number}#1#r", "rows": 0, "timeout_ms": 60_000, "claim": claim}
    return {"kind": "decision", "write": str(number), **facts, **lists}


def pulls(cluster: FakeCluster) -> list[RemotingCommand]:
    """Return a list of all pulls from now on."""
    seen: list[RemotingCommand] = []
    for broker in cluster.brokers.values():
        broker.always[RequestCode.PULL_MESSAGE] = seen.append
    return seen


FOREIGN: list[dict[str, Any] | bytes] = [
    b"\xff",
    b"[]",
    b"{}",
    b"[" * 100_000,
    {"kind": "decision"},
    {"kind": "home", "home": [None, {}, []]},
    {"kind": "done", "write": "1", "query": "q", "since": 10**30},
    {**decision_of(1, 0), "timeout_ms": 10**15},
    {**decision_of(1, 0), "floors": [["T", "a", 0, "0"]]},
]


def test_messages_that_are_no_records_are_ignored_and_warned_of_once(
    cluster: FakeCluster, first: Driver, second: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    commit(first, WRITE)
    forge(cluster, first, *FOREIGN, b'{"id": "\x1b[2J"}')
    second.open()
    assert second.log.writes[WRITE].done
    assert set(second.log.writes) == {WRITE}
    assert len(second.log.records.ignored) == len(FOREIGN) + 1
    second.open()
    (warning,) = [record.getMessage() for record in caplog.records if "no valid record" in record.getMessage()]
    assert f"transactionalId={ID}: queue {first.log.home}, offset " in warning
    assert "\x1b" not in warning


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_record_of_another_version_stops_every_reader(
    cluster: FakeCluster, first: Driver, second: Driver, version: int
) -> None:
    commit(first, WRITE)
    forge(cluster, first, {"version": version, "kind": "merged"})
    with pytest.raises(MQClientException, match=rf"has a record of version {version}, .* Finish with the release that"):
        second.open()
    with pytest.raises(MQClientException, match=f"version {version}"):
        first.log.refresh(first.brokers)


@pytest.mark.parametrize("claims", ["0", "falling", "rising"])
def test_reading_is_linear_whatever_records_claim(
    cluster: FakeCluster, first: Driver, second: Driver, claims: str
) -> None:
    commit(first, WRITE)
    store_beside(cluster, first, 800)
    values = {"0": [0] * 800, "falling": range(800, 0, -1), "rising": range(800)}[claims]
    forge(cluster, first, *map(decision_of, range(800), values))
    seen = pulls(cluster)
    second.open()
    assert len(second.log.writes) == 801
    # A pull of a fake broker has 32 messages. The search and the reading need about 50 each, the other queues a few.
    assert len(seen) < 150


def test_reading_from_the_middle_is_linear_whatever_records_claim(cluster: FakeCluster, first: Driver) -> None:
    commit(first, Write("0", "query"))
    log = DecisionLog(ID, first.options.transaction_topic)
    store_beside(cluster, first, 800)
    log.open(first.brokers, everything=False)
    forge(cluster, first, *({**decision_of(number, 800 - number), "since": 0} for number in range(800)))
    seen = pulls(cluster)
    log.refresh(first.brokers)
    assert len(log.writes) == 801
    assert len(seen) < 80


def test_a_search_holds_few_large_records(cluster: FakeCluster, first: Driver) -> None:
    commit(first, WRITE)
    start_offsets = [["T", "b" * 400, number, 0] for number in range(600)]
    # 60 records of 250 kB; a search holds 1 MiB.
    forge(cluster, first, *({**decision_of(number, 0), "floors": start_offsets} for number in range(60)))
    home = first.log.home
    assert home is not None
    search = first.log.records.search(first.brokers, home, first.brokers.max_offsets([home])[home])
    numbers = []
    # Other tests of this process may have left some.
    others = decisions()
    for record in search:
        numbers.append(record.write.name)
        assert decisions() - others < 10
    assert [name for name in numbers if name.isdigit()] == [str(number) for number in range(59, -1, -1)]


def test_a_decision_is_void_in_each_reading_direction(cluster: FakeCluster, first: Driver, second: Driver) -> None:
    home = first.log.home
    assert home is not None
    same, other = ["", home.broker_name, home.queue_id], ["", "broker-9", 0]
    forge(
        cluster,
        first,
        {"kind": "claim", "home": same},
        {"kind": "claim", "home": other},
        decision_of(0, 0),
        decision_of(1, 1),
        decision_of(2, 2),
    )
    second.open()
    assert second.log.home == home
    assert set(second.log.writes) == {Write("2")}
