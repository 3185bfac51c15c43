"""Leases: an attempt that another one has replaced stops, on a fake cluster whose clock the tests move."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from threading import Thread

import pytest

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.effectively_once.attempt import Attempt
from rocketmq_spark.deliveries.effectively_once.complete import complete as complete_write
from rocketmq_spark.deliveries.effectively_once.lease import Lease, instant
from rocketmq_spark.deliveries.effectively_once.plan import ResumePlan
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.errors import DeliveryError, InputChangedError, RocketMQError
from rocketmq_spark.model.message import Message, MessageQueue, SendRequest
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.protocol.remoting.records import encode_single
from rocketmq_spark.testing import FakeCluster, Reply
from rocketmq_spark.testing.fake_broker import FakeBroker
from tests.support.processes import wait_for
from tests.support.resume import ROWS, WRITE, complete, new_plan, run_task
from tests.support.two_phase import TOPIC, Driver, MovedClock, driver, visible

MICRO_BATCH = Write("0", "query")
# Of the leases that the tests hold. It is so long that only a test's clock ends one.
FENCE_MS = 600_000
LENGTH = FENCE_MS / 1000 * 2 / 3


def at(number: int, call: Callable[[], object]) -> Callable[[int], object]:
    """Return what a task calls before its rows: a function before one of them."""
    return lambda start: call() if start == number else None


def new_lease(job: Driver, plan: ResumePlan, write: Write = WRITE) -> Lease:
    job.brokers.options = replace(job.brokers.options, fence_ms=FENCE_MS)
    log, asked = DecisionLog(plan.log_name, plan.home.topic), instant(job.brokers.runtime)
    log.home, log.position = plan.home, plan.position
    log.append_begun(job.brokers, write, 0, "attempt", plan.begins, plan.since)
    return Lease(job.brokers, log, write, 0, "attempt", asked)


def read(lease: Lease) -> RocketMQError | None:
    """Wait for a reading of the home that the lease has begun."""
    results = lease.brokers.runtime.queue()
    lease.on_read = results.put
    lease.left()
    result: RocketMQError | None = results.get(timeout=30)
    return result


def test_a_lease_ends_after_two_thirds_of_the_fence_unless_it_is_renewed(job: Driver, clock: MovedClock) -> None:
    lease = new_lease(job, new_plan(job))
    assert 0 < lease.left() <= LENGTH
    clock.ahead += LENGTH
    assert lease.left() <= 0
    assert read(lease) is None
    assert 0 < lease.left() <= LENGTH


class Suspended(MovedClock):
    """A system whose clock stands still while it is stopped, and is set by other machines afterwards."""

    set_ahead = 0.0

    def wall_clock(self) -> float:
        return super().wall_clock() + self.set_ahead


def test_a_system_that_was_stopped_notices_it_when_its_time_is_set(job: Driver, cluster: FakeCluster) -> None:
    job.brokers.runtime = clock = Suspended(cluster)
    lease = new_lease(job, new_plan(job))
    assert lease.left() > 0
    clock.set_ahead += 3600.0
    assert lease.left() <= 0
    assert read(lease) is None
    assert lease.left() > 0
    # A time that is set back never makes a lease longer.
    clock.set_ahead -= 7200.0
    assert lease.left() <= LENGTH


def test_a_reading_counts_from_its_beginning(job: Driver, clock: MovedClock, cluster: FakeCluster) -> None:
    plan = new_plan(job)
    lease = new_lease(job, plan)

    def freeze(_: RemotingCommand) -> None:
        clock.ahead += LENGTH

    clock.ahead += LENGTH
    cluster.brokers[plan.home.broker_name].play(freeze, code=RequestCode.GET_MAX_OFFSET)
    assert read(lease) is None
    assert lease.left() <= 0


def test_a_replaced_attempt_stops_and_its_successor_sends_the_rest(
    cluster: FakeCluster, job: Driver, clock: MovedClock
) -> None:
    plan = new_plan(job)
    done = []
    expected = (
        r"write write-1, partition 0: attempt [0-9a-f]{16}-[0-9a-f]{16} was replaced by attempt [0-9a-f]{16}-[0-9a-f]"
        r"{16} of the same driver, because Spark has started the task again. It began at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
        r" UTC. So it has stopped, and sends no more rows. Its successor finds the rows that are stored, and sends the "
        r"others. Rows of this task stored: .* Read but not sent: \d+"
    )
    with pytest.raises(DeliveryError, match=expected):
        run_task(job, plan, WRITE, before=at(200, lambda: done.append(run_task(job, plan, WRITE))))
    assert visible(cluster) == Counter(ROWS)
    assert complete(job, plan, WRITE, *done).repeated_rows == 0


def test_an_attempt_that_was_frozen_until_its_log_expired_stops(
    cluster: FakeCluster, job: Driver, clock: MovedClock
) -> None:
    """The records of its successor have expired, too."""
    plan = new_plan(job)
    lease = new_lease(job, plan)
    complete(job, plan, WRITE, run_task(job, plan, WRITE))
    store = cluster.brokers[plan.home.broker_name].storage.store
    store.expired[plan.home] = store.end(plan.home)
    clock.ahead += 100 * 3600.0
    error = read(lease)
    assert isinstance(error, DeliveryError)
    assert f"reading queue {plan.home}: its messages" in str(error)


def demote(cluster: FakeCluster, name: str) -> FakeBroker:
    """Make a slave the master, and return it. The old master becomes a slave that answers, and gets no new messages."""
    old, (new,) = cluster.brokers[name], cluster.slaves[name]
    wait_for(lambda: len(new.storage.store.log) == len(old.storage.store.log))
    with old.lock:
        old.broker_id, old.slaves = 1, []
    cluster.brokers[name], cluster.slaves[name] = new, [old]
    new.promote([])
    new.on_change()
    return new


def test_a_reading_finds_the_new_master_while_the_old_one_answers() -> None:
    with FakeCluster(brokers=1, slaves=1, topics={TOPIC: 1}) as cluster:
        clock, options = MovedClock(cluster), {"delivery": "effectivelyOnce", "fenceMs": "0"}
        with driver(cluster, clock, **options, pollNameServerInterval="3600000") as job:
            job.instance.start()
            plan = new_plan(job)
            lease = new_lease(job, plan)
            new = demote(cluster, plan.home.broker_name)
            with driver(cluster, clock, **options) as successor:
                wait_for(lambda: successor.brokers.fresh_route(TOPIC).addresses[new.name] == new.address)
                run_task(successor, new_plan(successor), WRITE)
            clock.ahead += LENGTH
            error = read(lease)
            if error is None:
                # The look-up took longer than the reading. The fence of the successor covers the next one.
                wait_for(lambda: job.instance.routes.master_of(new.name) == new.address)
                clock.ahead += LENGTH
                error = read(lease)
            assert isinstance(error, DeliveryError)
            assert "was replaced" in str(error)


class Counting(MovedClock):
    """Counts the threads that are started."""

    started = 0

    def start(self, run: Callable[[], None], name: str) -> Thread:
        self.started += 1
        return super().start(run, name)


def test_a_replaced_attempt_reads_its_log_no_more_while_its_requests_end(job: Driver, cluster: FakeCluster) -> None:
    job.brokers.runtime = runtime = Counting(cluster)
    plan = new_plan(job)
    lease = new_lease(job, plan)
    run_task(job, plan, WRITE)
    runtime.ahead += LENGTH
    assert isinstance(read(lease), DeliveryError)
    started = runtime.started
    assert lease.left() <= 0
    assert runtime.started == started


def test_a_replaced_attempt_of_another_driver_says_so(cluster: FakeCluster, job: Driver) -> None:
    old = new_plan(job, None)
    with pytest.raises(DeliveryError, match=r"was replaced by attempt [-0-9a-f]{33} of another driver"):
        run_task(job, old, MICRO_BATCH, before=at(200, lambda: run_task(job, new_plan(job, None), MICRO_BATCH)))
    assert visible(cluster) == Counter(ROWS)


def test_an_attempt_waits_for_the_longest_fence_of_earlier_attempts(job: Driver, clock: MovedClock) -> None:
    """A user may lower ``fenceMs`` while an earlier attempt still runs, with the leases of its own fence."""
    plan = new_plan(job)
    run_task(job, replace(plan, begins=replace(plan.begins, fence_ms=20_000)), WRITE)
    ahead = clock.ahead
    run_task(job, new_plan(job), WRITE)
    assert clock.ahead - ahead >= 20.0


def test_an_attempt_stops_when_another_driver_has_completed_its_micro_batch(
    cluster: FakeCluster, patient_job: Driver
) -> None:
    job, old = patient_job, new_plan(patient_job, None)

    def other_driver(*numbers: int) -> None:
        log = DecisionLog(old.log_name, old.home.topic)
        log.open(job.brokers, everything=True)
        for number in numbers:
            log.append_done_at(job.brokers, Write(str(number), "query"), {}, old.since)
        job.brokers.runtime.sleep(1.0)

    with pytest.raises(DeliveryError, match=r"replaced by another driver, which has completed the write at .* UTC"):
        run_task(job, old, MICRO_BATCH, before=at(200, lambda: other_driver(0)))
    with pytest.raises(DeliveryError, match="which has completed the micro-batch, and continued with 2"):
        run_task(job, new_plan(job, None), MICRO_BATCH, before=at(200, lambda: other_driver(1, 2)))
    assert not visible(cluster) - Counter(ROWS[:200])


def test_an_attempt_completed_by_another_driver_sends_nothing(cluster: FakeCluster, job: Driver) -> None:
    frozen, plan = new_plan(job, None), new_plan(job, None)
    complete(job, plan, MICRO_BATCH, run_task(job, plan, MICRO_BATCH))
    for part in (0, 1):
        with pytest.raises(DeliveryError, match="replaced by another driver, which has completed the write at"):
            run_task(job, frozen, MICRO_BATCH, part)
    assert visible(cluster) == Counter(ROWS)
    # What the frozen driver has recorded is no partition of the micro-batch.
    plan = new_plan(job, None)
    complete(job, plan, MICRO_BATCH, run_task(job, plan, MICRO_BATCH))
    assert visible(cluster) == Counter(ROWS)


def test_a_completed_micro_batch_with_more_partitions_sends_no_row(cluster: FakeCluster, job: Driver) -> None:
    plan = new_plan(job, None)
    complete(job, plan, MICRO_BATCH, run_task(job, plan, MICRO_BATCH))
    with pytest.raises(InputChangedError, match="was completed without rows in partition 1, and now it has some"):
        run_task(job, new_plan(job, None), MICRO_BATCH, 1)
    assert visible(cluster) == Counter(ROWS)


def test_a_completed_micro_batch_may_be_repeated(cluster: FakeCluster, job: Driver, clock: MovedClock) -> None:
    plan = new_plan(job, None)
    complete(job, plan, MICRO_BATCH, run_task(job, plan, MICRO_BATCH))

    def wait() -> None:
        clock.ahead += 60.0

    plan = new_plan(job, None)
    complete(job, plan, MICRO_BATCH, run_task(job, plan, MICRO_BATCH, before=at(200, wait)))
    assert visible(cluster) == Counter(ROWS)


def max_offsets(cluster: FakeCluster, plan: ResumePlan) -> int:
    requests = cluster.brokers[plan.home.broker_name].requests
    return sum(
        request.code == RequestCode.GET_MAX_OFFSET and request.ext_fields["topic"] == plan.home.topic
        for request in requests
    )


def test_a_lease_costs_no_request_while_no_rows_are_sent(cluster: FakeCluster, job: Driver, clock: MovedClock) -> None:
    plan, counts = new_plan(job), list[int]()

    def wait() -> None:
        counts.append(max_offsets(cluster, plan))
        clock.ahead += 3600.0

    run_task(job, plan, WRITE, before=at(200, wait))
    assert visible(cluster) == Counter(ROWS)
    # One reading before the next row. A slow machine may need more.
    assert max_offsets(cluster, plan) > counts[0]


def test_rows_wait_while_the_home_is_not_readable(cluster: FakeCluster, job: Driver, clock: MovedClock) -> None:
    plan = new_plan(job)
    broker = cluster.brokers[plan.home.broker_name]

    def lose_the_home() -> None:
        clock.ahead += 60.0
        busy = Reply.code(ResponseCode.SYSTEM_BUSY)
        broker.play(busy, code=RequestCode.GET_MAX_OFFSET, times=3)

    run_task(job, plan, WRITE, before=at(200, lose_the_home))
    assert visible(cluster) == Counter(ROWS)


def test_an_attempt_fails_if_the_home_is_not_readable_until_the_delivery_timeout(
    cluster: FakeCluster, job: Driver, clock: MovedClock
) -> None:
    plan = new_plan(job)
    broker, stored = cluster.brokers[plan.home.broker_name], list[int]()

    def lose_the_home() -> None:
        # Before the lease ends, or a reading in between could renew it.
        broker.play(Reply.code(ResponseCode.SYSTEM_BUSY), code=RequestCode.GET_MAX_OFFSET, times=10_000)
        clock.ahead += 60.0
        stored.append(sum(visible(cluster).values()))

    with pytest.raises(
        DeliveryError, match="cannot find out whether another attempt has replaced it, because it canno"
    ):
        run_task(job, plan, WRITE, before=at(380, lose_the_home))
    # Rows that were taken before may have been sent. The last ones were not.
    assert ROWS[-1] not in visible(cluster)


def test_the_driver_stops_a_repeated_stage_before_it_completes_the_write(
    cluster: FakeCluster, job: Driver, clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    plan = new_plan(job)
    done = run_task(job, plan, WRITE)
    zombie = Attempt(job.brokers, plan, WRITE, 0)
    zombie._begin()
    assert complete(job, plan, WRITE, done).repeated_rows == 0
    assert "Spark has also started partition 0 again; waiting until these attempts send no more" in caplog.text
    clock.ahead += 10.0
    error = read(zombie.lease)
    assert isinstance(error, DeliveryError)
    assert "completed the write" in str(error)


@pytest.mark.parametrize("partition", [0, 1])
def test_a_driver_that_was_frozen_reads_the_log_again_before_it_completes_the_write(
    job: Driver, partition: int
) -> None:
    plan = new_plan(job, None)
    done = run_task(job, plan, MICRO_BATCH)
    assert done is not None

    class Frozen(DecisionLog):
        def append_homes(self, brokers: Brokers, write: Write, broker_names: set[str]) -> dict[MessageQueue, int]:
            brokers.runtime.sleep(1.0)
            Attempt(brokers, new_plan(job, None), MICRO_BATCH, partition)._begin()
            return super().append_homes(brokers, write, broker_names)

    log = Frozen(plan.log_name, plan.home.topic)
    names = {queue.broker_name for queue in job.queues}
    error = f"another driver of transactionalId=job has begun partition {partition} later than"
    with pytest.raises(DeliveryError, match=error):
        complete_write(job.brokers, log, plan, MICRO_BATCH, [done], names)


def test_a_request_of_a_frozen_process_is_not_written(cluster: FakeCluster, job: Driver) -> None:
    # The transport compares with its clock when it writes, so a freeze after the check of the lease does no harm.
    queue, outcomes = job.queues[0], job.brokers.runtime.queue()
    batch = encode_single(Message(queue.topic, b"row", 0, {}))
    address = job.brokers.address_of(queue)
    request = SendRequest(batch, queue, address, "group", "TBW102", 4, 0, write_by=time.monotonic() - 1e-9)
    job.brokers.transport.send(request, 30.0, outcomes.put)
    assert "it was not sent in time" in str(outcomes.get(timeout=30).error)
    assert not visible(cluster)
