"""The power of a broker with `flushDiskType=SYNC_FLUSH` is cut: what it has acknowledged is still there."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.deliveries.exactly_once.fence import forget_checks
from rocketmq_spark.deliveries.log.delivery import forget_logs
from rocketmq_spark.errors import DeliveryError
from rocketmq_spark.producer.producer import Producer
from tests.support.auditor import audit, numbered_rows
from tests.support.cluster import SHORT_DEADLINES, started
from tests.support.java import Java
from tests.support.once import BODIES, COMMIT_MS, KEYS, check_once, committing, resuming
from tests.support.power import Disk
from tests.support.processes import PATIENCE
from tests.support.resume import complete, new_plan, run_task
from tests.support.two_phase import WRITE
from tests.support.writes import SMALL, WIDTH, account_of, await_messages, make_topic, messages_in, rows

pytestmark = [pytest.mark.faults, pytest.mark.integration, pytest.mark.long]


@pytest.fixture(scope="module")
def _disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    folder = tmp_path_factory.mktemp("power")
    disk = Disk(folder / "image", folder / "broker-0")
    if not disk.mount():
        pytest.skip("power of one broker cut: this user may not mount an ext4 file system of the test's own")
    yield disk
    disk.remove()


@pytest.fixture(scope="module")
def flushing(_disk: Disk) -> Iterator[LocalCluster]:
    """A broker that flushes each message to a disk whose power can be cut, and another one."""
    properties = {**SHORT_DEADLINES, "flushDiskType": "SYNC_FLUSH"}
    cluster = LocalCluster(
        brokers=2, directory=_disk._folder.parent, broker_properties=properties, start_timeout=PATIENCE
    )
    with started(cluster):
        yield cluster
        for broker in cluster.brokers:
            # Nothing in them is worth an orderly end.
            broker.kill()


class Power:
    """The power of the first broker."""

    def __init__(self, cluster: LocalCluster, disk: Disk) -> None:
        self.broker = cluster.brokers[0]
        self.disk = disk

    def fail(self) -> None:
        """Cut the power, and start the broker again."""
        # It must acknowledge nothing more.
        self.broker.pause()
        self.disk.cut()
        self.broker.kill()
        self.disk.restore()
        self.broker.restart()


@pytest.fixture
def power(flushing: LocalCluster, _disk: Disk, topic: str) -> Iterator[Power]:
    make_topic(flushing, topic, queues=2)
    yield Power(flushing, _disk)
    forget_checks()
    forget_logs()


def test_a_power_failure_takes_no_acknowledged_row(
    flushing: LocalCluster, power: Power, topic: str, java: Java
) -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(rows(4_000)):
            if number == 4:
                await_messages(flushing.name_server, topic, 1_000)
                power.fail()
            yield batch

    with Producer("pg", name_server=flushing.name_server) as producer:
        producer.send_arrow(broken(), topic, **SMALL)
    audit(java, flushing.name_server, numbered_rows(topic, range(4_000), WIDTH, repeats=True)).check()


def test_effectively_once_stores_each_row_once(flushing: LocalCluster, power: Power, topic: str, java: Java) -> None:
    def fault(number: int) -> None:
        if number == 1_000:
            await_messages(flushing.name_server, topic, 500)
            power.fail()

    with resuming(flushing, topic) as job:
        plan = new_plan(job)
        complete(job, plan, WRITE, run_task(job, plan, WRITE, rows=BODIES, before=fault))
    check_once(java, flushing.name_server, topic, BODIES, keys=KEYS)


@pytest.mark.parametrize("when", ["prepared", "decided", "partly committed", "committed"])
def test_exactly_once_shows_each_row_once(
    flushing: LocalCluster, power: Power, topic: str, java: Java, *, when: str
) -> None:
    bodies = BODIES[:400]
    # The next driver waits for the end of a decided write.
    unhurried = {"timeout_ms": COMMIT_MS} if when == "prepared" else {}
    with committing(flushing, topic, **unhurried) as job:
        if when == "prepared":
            halves = job.prepare(bodies)
            power.fail()
            job.two_phase.commit(WRITE, *halves)
        else:
            job.decide_and_crash(bodies, {"decided": 0, "partly committed": 250, "committed": 400}[when])
            power.fail()
    with committing(flushing, topic) as job:
        job.two_phase.finish(WRITE)
    check_once(java, flushing.name_server, topic, bodies)


def test_a_disk_that_fails_takes_no_acknowledged_row(flushing: LocalCluster, power: Power, topic: str) -> None:
    alone = f"{topic}-alone"
    make_topic(flushing, alone, queues=2, on=[power.broker])
    with Producer("pg", name_server=flushing.name_server) as producer:
        producer.send_arrow(rows(500), alone, **SMALL)
        power.disk.cut()
        with pytest.raises(DeliveryError) as raised:
            producer.send_arrow(rows(500), alone, deliveryTimeoutMs="10000", **SMALL)
    stored, _, unknown = account_of(raised.value)
    power.broker.kill()
    power.disk.restore()
    power.broker.restart()
    await_messages(flushing.name_server, alone, 500 + stored)
    assert messages_in(flushing.name_server, alone) <= 500 + stored + unknown
