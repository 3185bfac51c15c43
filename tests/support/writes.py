"""Writes of numbered rows, with faults during the write."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from rocketmq_spark.admin import queue_offsets
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.routing.route_cache import publish_info_of
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.auditor import ROW_ID, Found, audit, numbered_rows
from tests.support.java import Java
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rocketmq_spark.cluster import Broker, LocalCluster
    from rocketmq_spark.spark.report import Metrics
    from tests.support.cluster import SharedCluster, SharedServer

_EVERY = 0.05
# A paused broker does not answer; the watching thread must not wait long for it.
_PATIENCE = 0.5


class Account(NamedTuple):
    """One line of the table; `longest_stall` is in seconds, `most` how often the most repeated row is there."""

    fault: str
    rows: int
    stored: int
    repeats: int
    retries: int
    longest_stall: float
    most: int


class Ledger:
    """The account of one write. `java` runs the auditor; `tell` is called with the settled account."""

    def __init__(self, java: Java, tell: Callable[[Account], None]) -> None:
        self._java = java
        self._tell = tell
        # When a broker had stored more than before, which, and how many messages more.
        self._grown: list[tuple[float, str, int]] = []

    def stored_between(self, start: float, end: float) -> int:
        """Return how many messages the watched brokers have stored in that time (monotonic seconds)."""
        return sum(more for at, _, more in self._grown if start <= at < end)

    def last_stored(self, broker: str) -> float:
        """Return when a broker was last seen to have stored something, monotonic seconds; 0 before that."""
        return max((at for at, address, _ in self._grown if address == broker), default=0.0)

    @property
    def pace(self) -> float:
        """Messages stored per second, from the first ones to the last of the write."""
        at = [at for at, _, _ in self._grown]
        return sum(more for _, _, more in self._grown) / (max(at) - min(at))

    @property
    def longest_stall(self) -> float:
        """The longest time without a message stored, seconds; from the first ones to the last of the write."""
        pairs = itertools.pairwise(sorted(at for at, _, _ in self._grown))
        return max((later - earlier for earlier, later in pairs), default=0.0)

    @contextlib.contextmanager
    def watch(self, name_servers: Sequence[str], topic: str, brokers: Sequence[str]) -> Iterator[None]:
        """Watch how many messages the brokers store, for as long as the write runs.

        The topic must exist. `brokers` are addresses; one thread polls each.
        """
        self._grown, over = [], threading.Event()
        with RemotingTransport(name_servers) as transport:
            queues = defaultdict[str, list[MessageQueue]](list)
            info = publish_info_of(topic, transport.query_route(topic, 5.0))
            for queue in info.queues:
                queues[info.addresses[queue.broker_name]].append(queue)

            def ask(broker: str) -> None:
                most = None
                while not over.wait(_EVERY):
                    with contextlib.suppress(RocketMQError):
                        now = sum(transport.max_offset(queue, broker, _PATIENCE) for queue in queues[broker])
                        if most is not None and now > most:
                            self._grown.append((time.monotonic(), broker, now - most))
                        # A restarted broker reports fewer for a while.
                        most = now if most is None else max(most, now)

            threads = [threading.Thread(target=ask, args=(broker,)) for broker in brokers]
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                over.set()
                for thread in threads:
                    thread.join()

    def settle(
        self,
        fault: str,
        name_server: str,
        topic: str,
        rows: int,
        retries: int,
        *,
        width: int,
        marks: Sequence[str] = (ROW_ID,),
        groups: int = 0,
        accepted: Sequence[str] = (),
    ) -> Account:
        """Compare all messages with numbered rows of a width after all brokers have recovered, and add the account.

        Rows may be repeated, and repeats must be marked. `retries` is the figure of the write's metrics. Findings of
        the kinds in `accepted` are no error.
        """
        given = numbered_rows(topic, range(rows), width, groups=groups, repeats=True)
        found = audit(self._java, name_server, given, marks=marks)
        account = Account(fault, rows, found.messages, found.repeats, retries, self.longest_stall, found.most)
        self._tell(account)
        found.check(*accepted)
        return account


# Small requests, so that some are in flight whenever a fault begins.
SMALL = {"batchBytes": "16k"}
# Bytes of a body of most rows.
WIDTH = 200
# Rows of a record batch where Spark does not make the batches.
PIECE = 500


def numbered(spark: SparkSession, rows: int, nbytes: int, partitions: int = 4) -> DataFrame:
    """Rows with their number as body, filled up to `nbytes`, and as key."""
    number = F.col("id").cast("string")
    columns = F.rpad(number, nbytes, ".").alias("body"), F.concat(F.lit("k"), number).alias("keys")
    return spark.range(0, rows, 1, partitions).select(*columns)


def keys_of(rows: int) -> set[str]:
    """Return the keys of the rows that `numbered` makes."""
    return {f"k{number}" for number in range(rows)}


def account_of(error: BaseException) -> tuple[int, int, int]:
    """Return how many rows are stored, not sent, and unknown, as the error of a write says."""
    found = re.search(r"stored: (.*)\. Read but not sent: (\d+)(?:; outcome unknown: (\d+))?", str(error))
    assert found is not None, error
    return sum(map(int, re.findall(r" (\d+) rows", found[1]))), int(found[2]), int(found[3] or 0)


def check_account(found: Found, account: tuple[int, int, int]) -> None:
    """Fail unless the account of a failed write fits what is stored of the rows that it took."""
    stored, not_sent, unknown = account
    assert stored + not_sent + unknown == found.rows
    assert stored <= found.found <= stored + unknown
    found.check()


def write(frame: DataFrame, name_server: str, topic: str, **options: Any) -> None:
    """Save rows to a topic."""
    writer = frame.write.format("rocketmq").option("nameServer", name_server).option("topic", topic)
    writer.options(**options).save()


def retries_of(facts: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the number of retries of a write, from `Metrics.to_dict`."""
    return sum(int(broker["retries"]) for broker in facts.values())


def messages_in(name_server: str, topic: str) -> int:
    """Return the number of messages in a topic; 0 if it does not exist."""
    try:
        return sum(offsets.messages for offsets in queue_offsets([name_server], topic))
    except RocketMQError:
        return 0


def await_messages(name_server: str, topic: str, count: int) -> None:
    """Wait until a topic has so many messages."""
    wait_for(lambda: messages_in(name_server, topic) >= count)


def rows(count: int, groups: int = 0) -> Iterator[pa.RecordBatch]:
    """Yield `count` numbered rows, `PIECE` at a time, with `groups` sharding keys in turn."""
    for start in range(0, count, PIECE):
        numbers = range(start, min(start + PIECE, count))
        columns = {"body": [str(number).ljust(WIDTH, ".") for number in numbers], "keys": [f"k{n}" for n in numbers]}
        if groups:
            columns["shardingKey"] = [f"group-{number % groups}" for number in numbers]
        yield pa.RecordBatch.from_pydict(columns)


def broken(
    batches: Iterable[pa.RecordBatch],
    before: int,
    cluster: LocalCluster,
    topic: str,
    fault: Callable[[], object],
    *,
    messages: int = PIECE // 2,
) -> Iterator[pa.RecordBatch]:
    """Yield the batches. Call `fault` before batch number `before`, once `messages` messages are stored."""
    for number, batch in enumerate(batches):
        if number == before:
            await_messages(cluster.name_server, topic, messages)
            fault()
        yield batch


def counted(batches: Iterable[pa.RecordBatch], taken: list[int]) -> Iterator[pa.RecordBatch]:
    """Yield the batches, and append the rows of each to `taken`."""
    for batch in batches:
        taken.append(batch.num_rows)
        yield batch


def failing_late(frame: DataFrame, name_server: str, topic: str, rows: int) -> DataFrame:
    """Return the frame. Its partition 0 fails once, when the topic holds more than `rows` rows."""

    def passed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        if context is None or context.partitionId() or context.attemptNumber():
            return
        wait_for(lambda: messages_in(name_server, topic) > rows)
        raise RuntimeError("the first attempt fails on purpose")

    return frame.mapInArrow(passed_on, frame.schema)


@contextlib.contextmanager
def in_mid_write(name_server: str, topic: str, messages: int, fault: Callable[[], object]) -> Iterator[None]:
    """Call `fault` on a thread, once a topic holds `messages` messages.

    The end of the block waits for the fault, and raises its exception.
    """

    def happen() -> None:
        await_messages(name_server, topic, messages)
        fault()

    with ThreadPoolExecutor(1) as pool:
        happening = pool.submit(happen)
        yield
        happening.result()


def make_topic(
    cluster: LocalCluster | SharedCluster,
    topic: str,
    *,
    queues: int = 4,
    perm: int = 6,
    on: Sequence[Broker | SharedServer] = (),
) -> None:
    """Create or change a topic `on` some brokers (default: all), and wait until the name server has its route."""
    wanted = {broker.name: (queues, perm) for broker in on or cluster.brokers}

    def known() -> bool:
        with contextlib.suppress(RocketMQError):
            route = transport.query_route(topic, 5.0)
            found = {data.broker_name: (data.write_queue_nums, data.perm) for data in route.queue_datas}
            return wanted.items() <= found.items()
        return False

    with RemotingTransport([cluster.name_server]) as transport:
        for broker in on or cluster.brokers:
            transport.create_topic(broker.address, topic, queues, perm, 5.0)
        wait_for(known)


@dataclass
class Trial:
    """One write with a fault, from its topic to its account."""

    spark: SparkSession
    cluster: LocalCluster
    topic: str
    metrics: Metrics
    ledger: Ledger
    rows: int = 0

    @property
    def queues(self) -> set[tuple[str, str]]:
        """Broker name and id of every queue that received rows."""
        facts = self.metrics.to_dict()
        return {(broker, queue) for broker in facts for queue in facts[broker]["queues"].get(self.topic, ())}

    def write(
        self,
        rows: int,
        fault: Callable[[], object] = lambda: None,
        *,
        per_second: int | None,
        partitions: int = 4,
        **options: Any,
    ) -> None:
        """Write `rows` rows, and call `fault` when a tenth of them is stored.

        With `per_second`, the write lasts at least ``rows / per_second`` seconds on any machine, so the fault falls
        into it.
        """
        make_topic(self.cluster, self.topic)
        self.rows, name_server = rows, self.cluster.name_server
        rate = {} if per_second is None else {"maxRatePerSecond": per_second}
        given = {"nameServer": name_server, "rowId": True, **rate, **SMALL, **options}
        watched = self.ledger.watch([name_server], self.topic, [broker.address for broker in self.cluster.brokers])
        with watched, in_mid_write(name_server, self.topic, rows // 10, fault):
            write(numbered(self.spark, rows, WIDTH, partitions), given.pop("nameServer"), self.topic, **given)

    def settle(self, fault: str) -> Account:
        """Read all rows back, and add the account to the table."""
        retries = retries_of(self.metrics.to_dict())
        return self.ledger.settle(fault, self.cluster.name_server, self.topic, self.rows, retries, width=WIDTH)
