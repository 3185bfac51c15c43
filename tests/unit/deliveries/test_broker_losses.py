"""A broker that lost the decision log of a job, or half messages before the decision: an error, and no repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import pytest

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.exactly_once.commit import TwoPhaseCommit
from rocketmq_spark.deliveries.exactly_once.delivery import Prepared
from rocketmq_spark.deliveries.exactly_once.halves import concat
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.half import Half
from rocketmq_spark.errors import BrokerBusyException, DataLossError, DeliveryError
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue
from rocketmq_spark.testing import FakeCluster
from tests.support.resume import (
    ROWS,
    WRITE,
    Killed,
    complete,
    dying_after_stored_rows,
    new_plan,
    refresh_routes,
    run_task,
)
from tests.support.two_phase import TOPIC, Driver, MovedClock, driver, visible

WHY = r"queue \S+ has no record of it, and other queues of topic \S+ say that its records were there"


def replace_by_empty(cluster: FakeCluster, name: str) -> None:
    """Replace a broker by an empty one of the same name."""
    cluster.brokers[name].settings.flush_interval = 3600.0
    cluster.kill(name, lose_unflushed=True)
    cluster.restart(name)


@pytest.mark.parametrize("done", [False, True], ids=["died", "done"])
def test_a_write_whose_log_is_lost_is_not_written_again(cluster: FakeCluster, job: Driver, *, done: bool) -> None:
    plan = new_plan(job)
    if done:
        complete(job, plan, WRITE, run_task(job, plan, WRITE))
    else:
        with pytest.raises(Killed):
            run_task(job, plan, WRITE, **dying_after_stored_rows(cluster, 100))
    replace_by_empty(cluster, plan.home.broker_name)
    refresh_routes(job)
    left = visible(cluster)
    with pytest.raises(DataLossError, match=WHY):
        new_plan(job)
    assert visible(cluster) == left


def test_a_decided_write_whose_log_is_lost_is_not_decided_again(cluster: FakeCluster, clock: MovedClock) -> None:
    with driver(cluster, clock) as job:
        job.open().decide_and_crash(ROWS[:40], 20)
        assert job.log.home is not None
        replace_by_empty(cluster, job.log.home.broker_name)
    with driver(cluster, clock) as job, pytest.raises(DataLossError, match=WHY):
        job.open()


def test_a_log_whose_records_have_expired_begins_anew(cluster: FakeCluster, job: Driver) -> None:
    plan = new_plan(job)
    complete(job, plan, WRITE, run_task(job, plan, WRITE))
    store = cluster.brokers[plan.home.broker_name].storage.store
    store.expired[plan.home] = store.end(plan.home)
    again = new_plan(job)
    assert again.home == plan.home
    assert not again.done


@pytest.mark.parametrize("filled", [False, True], ids=["", "filled by others"])
def test_a_write_whose_half_messages_are_lost_is_not_decided(
    cluster: FakeCluster, clock: MovedClock, *, filled: bool
) -> None:
    with driver(cluster, clock) as job:
        job.open()
        halves, group = job.prepare(ROWS[:40])
        replace_by_empty(cluster, "broker-0")
        if filled:
            job.prepare(ROWS[:80])
        with pytest.raises(DeliveryError, match="broker broker-0 lacks a half message that it has acknowledged"):
            job.two_phase.commit(WRITE, halves, group)
        assert not job.log.writes
        job.two_phase.commit(WRITE, *job.prepare(ROWS[:40]))
    assert visible(cluster) == Counter(ROWS[:40])


def test_a_write_is_not_decided_if_later_tasks_replace_lost_half_messages(
    cluster: FakeCluster, clock: MovedClock
) -> None:
    with driver(cluster, clock) as job:
        planned = job.plan(WRITE, write_id=WRITE.name)
        first, group = job.prepare(ROWS[:40])
        replace_by_empty(cluster, "broker-0")
        # Other messages, so that later half messages have other offsets in the commit log.
        cluster.brokers["broker-0"].storage.store.put(MessageQueue(TOPIC, "broker-0", 0), [Message(TOPIC, b"x")] * 7, 0)
        later, _ = job.prepare(ROWS[40:80])
        both = Prepared(group, concat([first, later]).to_bytes())
        with pytest.raises(DeliveryError, match="a half message at an offset of an earlier one"):
            job.commit(planned, WRITE, [both])


def test_a_round_is_not_decided_if_later_half_messages_replace_lost_ones() -> None:
    with FakeCluster(brokers=1, topics={TOPIC: 1}) as cluster:
        clock, (broker,) = MovedClock(cluster), cluster.brokers.values()

        class FailingBroker(TwoPhaseCommit):
            """A recovery whose broker loses some of the first new half messages before it stores the others."""

            def _content(self, half: Half, group: str, properties: str) -> tuple[EncodedBatch, MessageQueue]:
                if half == halves[300]:
                    broker.storage.store.truncate(len(broker.storage.store.log) - 40)
                return super()._content(half, group, properties)

        with driver(cluster, clock) as first:
            halves, _ = first.open().decide_and_crash(ROWS, 10)
        text = "a half message at an offset of an earlier one"
        with driver(cluster, clock, commit=FailingBroker) as second, pytest.raises(DeliveryError, match=text):
            second.open().two_phase.finish(WRITE)
        with driver(cluster, clock) as third:
            third.open().two_phase.finish(WRITE)
        assert visible(cluster) == Counter(ROWS)


def test_lost_commits_are_noticed_if_others_fill_their_offsets(cluster: FakeCluster, clock: MovedClock) -> None:
    class FailingBroker(DecisionLog):
        """A log before whose barrier a broker fails, and loses commits that it has answered with success."""

        failed = False

        def await_stored(self, brokers: Brokers, write: Write, broker_names: Collection[str]) -> None:
            if not self.failed:
                self.failed, store = True, cluster.brokers["broker-0"].storage.store
                cluster.kill("broker-0")
                lost = store.log[-3:]
                assert all(entry.read.topic == TOPIC for entry in lost)
                store.truncate(len(store.log) - 3)
                cluster.restart("broker-0")
                for entry in lost:
                    store.put(entry.stored_in, [Message(TOPIC, b"other")], 0)
                refresh_routes(job)
            super().await_stored(brokers, write, broker_names)

    with driver(cluster, clock, log=FailingBroker) as job:
        report = job.open().two_phase.commit(WRITE, *job.prepare(ROWS[:40]))
    assert visible(cluster) == Counter({**Counter(ROWS[:40]), "other": 3})
    assert report.recovered_rows == 3


def test_requests_go_to_the_new_master_if_the_old_one_is_busy() -> None:
    with FakeCluster(brokers=1, slaves=1, topics={TOPIC: 1}) as cluster:
        running = Driver(cluster.name_server, deliveryTimeoutMs="10000")
        try:
            running.instance.start()
            (queue,) = running.queues
            old = cluster.brokers[queue.broker_name].address
            new = cluster.promote(queue.broker_name).address

            def ask(address: str, _timeout: float) -> str:
                if address == old:
                    raise BrokerBusyException("asking", 2, "busy", address)
                return address

            assert running.brokers.request(queue, ask) == new
        finally:
            running.close()
