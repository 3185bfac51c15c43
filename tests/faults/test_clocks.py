"""Writes and reads while the wall clock of a broker or of a driver with its tasks is set back by ten minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql.types import StructType

from rocketmq_spark import read_arrow
from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import OptionError
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.spark.stream_reader import stream_reader
from tests.support.auditor import audit, numbered_rows
from tests.support.clocks import BACK, FakeClock
from tests.support.cluster import SHORT_DEADLINES, started
from tests.support.java import Java
from tests.support.once import BODIES, KEYS, MANY_BODIES, check_once
from tests.support.processes import PATIENCE
from tests.support.streams import Feed, column_of, source_options
from tests.support.writes import WIDTH, make_topic

pytestmark = [pytest.mark.faults, pytest.mark.integration, pytest.mark.long]

REPOSITORY = Path(__file__).parents[2]
SCHEMA = StructType().add("keys", "string")
ROWS = 1_000


@pytest.fixture(scope="module")
def broker_clock(tmp_path_factory: pytest.TempPathFactory) -> FakeClock:
    return FakeClock(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def _clocked(broker_clock: FakeClock) -> Iterator[LocalCluster]:
    with started(LocalCluster(broker_properties=SHORT_DEADLINES, start_timeout=PATIENCE)) as cluster:
        cluster.brokers[0].kill()
        with broker_clock.for_new_processes():
            cluster.brokers[0].restart()
        yield cluster


@pytest.fixture
def clocked(_clocked: LocalCluster, broker_clock: FakeClock, topic: str) -> Iterator[LocalCluster]:
    """A broker with a clock of its own, and the test's topic, which has two queues."""
    make_topic(_clocked, topic, queues=2)
    yield _clocked
    broker_clock.set(0)


@pytest.fixture(params=["broker", "driver"])
def write(
    request: pytest.FixtureRequest, clocked: LocalCluster, broker_clock: FakeClock, topic: str, tmp_path: Path
) -> Callable[[str], list[str]]:
    """A case of ``clocked_write.py``, whose clock or that of the broker is set back; returns the errors."""
    own_clock = FakeClock(tmp_path)
    file = broker_clock.file if request.param == "broker" else own_clock.file

    def write(case: str) -> list[str]:
        command = [sys.executable, "-m", "tests.programs.clocked_write", clocked.name_server, topic, str(file), case]
        environ = {**os.environ, **own_clock.environ}
        done = subprocess.run(
            command, env=environ, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, done.stderr
        errors: list[str] = json.loads(done.stdout.splitlines()[-1])
        return errors

    return write


def seconds(times: pa.ChunkedArray) -> list[int]:
    return [int(time) for time in pc.cast(pc.cast(times, pa.timestamp("s", "UTC"), safe=False), pa.int64()).to_pylist()]


def test_default_delivery_stores_every_row(
    write: Callable[[str], list[str]], clocked: LocalCluster, topic: str, java: Java
) -> None:
    assert write("at_least_once") == []
    audit(java, clocked.name_server, numbered_rows(topic, range(4_000), WIDTH, repeats=True)).check()
    columns = ["bornTimestamp", "storeTimestamp"]
    table = read_arrow(topic, nameServer=clocked.name_server, columns=columns).read_all()
    # The fault has occurred.
    spans = [max(times) - min(times) for times in map(seconds, (table[0], table[1]))]
    assert max(spans) > -BACK / 2


def test_effectively_once_write_stores_every_row_once(
    write: Callable[[str], list[str]], clocked: LocalCluster, topic: str, java: Java
) -> None:
    assert write("effectively_once") == []
    check_once(java, clocked.name_server, topic, BODIES, keys=KEYS)


@pytest.mark.parametrize("case", ["before_a_commit", "in_a_commit", "before_half_messages"])
def test_exactly_once_write_stores_every_row_once(
    write: Callable[[str], list[str]], clocked: LocalCluster, topic: str, java: Java, case: str
) -> None:
    errors = write(case)
    if case == "before_half_messages":
        assert len(errors) == 1
        assert "the clocks of a client and of broker broker-0 differ by " in errors[0]
    else:
        assert errors == []
    check_once(java, clocked.name_server, topic, MANY_BODIES if case == "in_a_commit" else BODIES)


def test_stream_reads_every_row_once(clocked: LocalCluster, broker_clock: FakeClock, topic: str) -> None:
    options = source_options(clocked, topic, streaming=True, startingOffsets="earliest")
    stream = stream_reader(options, SCHEMA)
    read = list[str]()
    with Producer("feed", name_server=clocked.name_server) as producer:
        feed = Feed(producer, clocked.name_server, topic)
        try:
            offset = stream.initialOffset()
            for clock in (0, BACK, 0):
                broker_clock.set(clock)
                feed(ROWS)
                end = stream.latestOffset(offset)
                for task in stream.partitions(offset, end):
                    read += column_of(stream.read(task), "keys")
                offset = end
        finally:
            stream.stop()
    assert sorted(read) == sorted(f"k{number}" for number in range(3 * ROWS))


def test_read_by_time_finds_rows_by_the_advice_or_is_an_error(
    clocked: LocalCluster, broker_clock: FakeClock, topic: str
) -> None:
    def read(start: int) -> list[tuple[int, str]]:
        columns = ["keys", "storeTimestamp"]
        table = read_arrow(topic, nameServer=clocked.name_server, columns=columns, startingTimestamp=start).read_all()
        return list(zip(seconds(table["storeTimestamp"]), table["keys"].to_pylist(), strict=True))

    with Producer("feed", name_server=clocked.name_server) as producer:
        feed = Feed(producer, clocked.name_server, topic)
        for clock in (0, BACK):
            broker_clock.set(clock)
            for queue in range(2):
                feed(ROWS, to=("broker-0", queue))
    rows = read(0)
    assert len(rows) == 4 * ROWS
    first = min(time for time, _ in rows if time > max(time for time, _ in rows) + BACK / 2)
    # The advice of docs/reading.md: begin earlier by as much as the clock was set back, and filter.
    assert sorted(row for row in read((first + BACK) * 1000) if row[0] >= first) == sorted(
        row for row in rows if row[0] >= first
    )
    # The newest rows of each queue are older.
    with pytest.raises(OptionError, match=r"has no message stored at the starting time .* its last message is of "):
        read((first + 1) * 1000)
