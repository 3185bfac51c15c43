"""Writes of numbered rows, and the faults that happen to them meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from rocketmq_spark.admin import queue_offsets
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.hashes import ROW_ID
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.routing.route_cache import publish_info_of
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.java import Java
from tests.support.processes import PATIENCE, wait_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rocketmq_spark.cluster import Broker, LocalCluster
    from rocketmq_spark.spark.report import Metrics

_EVERY = 0.05
# A broker builds its queues in the background, and after a crash once more: what it holds is known when it stays so.
_SETTLED = 1.0
_SETTLES_WITHIN = 60.0
# A paused broker answers nothing: whoever asks it must not be held up for long.
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
    """The account of one write.

    Parameters
    ----------
    java : Java
        Reads the rows back.
    tell : callable
        Told the account when it is settled.
    """

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
        """Watch what the brokers store for as long as the write runs.

        Parameters
        ----------
        name_servers : sequence of str
        topic : str
            Exists already.
        brokers : sequence of str
            Addresses, each asked by a thread of its own.
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
                        # A broker that starts again has fewer for a while.
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
        keys: set[str],
        retries: int,
        *,
        begins: Callable[[str], bytes] = lambda _key: b"",
    ) -> Account:
        """Read everything back once all brokers are up again; look whether it is whole, and every repeat marked.

        Parameters
        ----------
        fault : str
        name_server, topic : str
        keys : set of str
            Of the rows that went in.
        retries : int
            As the write's metrics have them.
        begins : callable, optional
            ``key -> bytes``: how the body of a row begins.
        """
        held = _held(name_server, topic)
        lines = self._java.read_topic(name_server, topic, held, within=PATIENCE)
        ids, times = defaultdict[str, set[str]](set), Counter[str]()
        for line in lines:
            ids[line["properties"]["KEYS"]].add(line["properties"][ROW_ID])
            times[line["properties"]["KEYS"]] += 1
        account = Account(
            fault,
            len(keys),
            len(lines),
            len(lines) - len(ids),
            retries,
            self.longest_stall,
            max(times.values(), default=0),
        )
        self._tell(account)
        assert len(lines) == held
        assert ids.keys() == keys, f"missing: {sorted(keys - ids.keys())[:5]}, strange: {sorted(ids.keys() - keys)[:5]}"
        # A repeat is marked by the id that it shares; no two rows do.
        assert {len(found) for found in ids.values()} <= {1}
        assert len(set().union(*ids.values())) == len(keys)
        altered = [line["body"] for line in lines if not line["body"].startswith(begins(line["properties"]["KEYS"]))]
        assert not altered, f"{len(altered)} bodies are not their rows': {altered[:3]}"
        return account


def _held(name_server: str, topic: str) -> int:
    """Return how many messages a topic holds once that number stays the same."""
    deadline, since, held = time.monotonic() + _SETTLES_WITHIN, time.monotonic(), -1
    while time.monotonic() < min(since + _SETTLED, deadline):
        now = sum(offsets.messages for offsets in queue_offsets([name_server], topic))
        if now != held:
            since, held = time.monotonic(), now
        time.sleep(_EVERY)
    return held


# Small requests, so that whenever a fault comes some are on their way.
SMALL = {"batchBytes": "16k"}
# How many rows come at a time where they do not come from Spark.
PIECE = 500


def numbered(spark: SparkSession, rows: int, nbytes: int, partitions: int = 4) -> DataFrame:
    """Rows with their number as body, filled up to `nbytes`, and as key."""
    number = F.col("id").cast("string")
    columns = F.rpad(number, nbytes, ".").alias("body"), F.concat(F.lit("k"), number).alias("keys")
    return spark.range(0, rows, 1, partitions).select(*columns)


def keys_of(rows: int) -> set[str]:
    """The keys of so many numbered rows."""
    return {f"k{number}" for number in range(rows)}


def body_of(key: str) -> bytes:
    """How the body of the row with that key begins."""
    return key[1:].encode() + b"."


def write(frame: DataFrame, name_server: str, topic: str, **options: Any) -> None:
    """Save rows to a topic."""
    writer = frame.write.format("rocketmq").option("nameServer", name_server).option("topic", topic)
    writer.options(**options).save()


def retries_of(facts: Mapping[str, Mapping[str, Any]]) -> int:
    """How often a write has tried again, from what `Metrics.to_dict` says of each broker."""
    return sum(int(broker["retries"]) for broker in facts.values())


def messages_in(name_server: str, topic: str) -> int:
    """How many messages a topic holds just now; 0 while it is not there."""
    try:
        return sum(offsets.messages for offsets in queue_offsets([name_server], topic))
    except RocketMQError:
        return 0


def rows(count: int, groups: int = 0) -> Iterator[pa.RecordBatch]:
    """Yield so many numbered rows, `PIECE` at a time, of so many message groups in turn."""
    for start in range(0, count, PIECE):
        numbers = range(start, min(start + PIECE, count))
        columns = {"body": [str(number).ljust(200, ".") for number in numbers], "keys": [f"k{n}" for n in numbers]}
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
    """Yield the batches; in their midst, with so many messages stored and many on their way, have the fault happen."""
    for number, batch in enumerate(batches):
        if number == before:
            wait_for(lambda: messages_in(cluster.name_server, topic) >= messages)
            fault()
        yield batch


def counted(batches: Iterable[pa.RecordBatch], taken: list[int]) -> Iterator[pa.RecordBatch]:
    """Yield the batches, and note how many rows each has."""
    for batch in batches:
        taken.append(batch.num_rows)
        yield batch


def failing_late(frame: DataFrame, name_server: str, topic: str, rows: int) -> DataFrame:
    """Return the frame; its partition 0, tried first, waits until more than `rows` are stored behind it, and fails."""

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
    """Have the fault happen, on a thread of its own, once a topic holds so many messages.

    Leaving waits for the end of the fault, and raises what it raised.
    """

    def happen() -> None:
        wait_for(lambda: messages_in(name_server, topic) >= messages)
        fault()

    with ThreadPoolExecutor(1) as pool:
        happening = pool.submit(happen)
        yield
        happening.result()


def make_topic(cluster: LocalCluster, topic: str, *, queues: int = 4, perm: int = 6, on: Sequence[Broker] = ()) -> None:
    """Create or change a topic on some brokers, or on all, and wait until the name server knows."""
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
    """One write that a fault happens to, from its topic to its account."""

    spark: SparkSession
    cluster: LocalCluster
    topic: str
    metrics: Metrics
    ledger: Ledger
    rows: int = 0

    @property
    def queues(self) -> set[tuple[str, str]]:
        """Broker and id of every queue that got rows."""
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
        """Write so many rows, and have the fault happen when a tenth of them is stored.

        A rate gives the fault its time: whatever the machine, the write takes ``rows / per_second`` seconds.
        """
        make_topic(self.cluster, self.topic)
        self.rows, name_server = rows, self.cluster.name_server
        rate = {} if per_second is None else {"maxRatePerSecond": per_second}
        given = {"nameServer": name_server, "rowId": True, **rate, **SMALL, **options}
        watched = self.ledger.watch([name_server], self.topic, [broker.address for broker in self.cluster.brokers])
        with watched, in_mid_write(name_server, self.topic, rows // 10, fault):
            write(numbered(self.spark, rows, 200, partitions), given.pop("nameServer"), self.topic, **given)

    def settle(self, fault: str) -> Account:
        """Read everything back, and enter it in the table under the fault's name."""
        keys, retries = keys_of(self.rows), retries_of(self.metrics.to_dict())
        return self.ledger.settle(fault, self.cluster.name_server, self.topic, keys, retries, begins=body_of)
