"""Effectively-once writes: speed without faults, the reading after a fault, and the cost of a micro-batch.

Run: make bench PART=effectively_once (python -m tests.benchmarks.bench_effectively_once [rounds])

The rows have 100 bytes. Each round writes the same rows with ``rowId=true`` and with the default delivery. The reading
is that of one task, from a broker with 1,024 messages per answer, and each of its rows is looked for. The cost of a
micro-batch is that of plans, of the records and reads of the log in its task, and of its end: all but the sending.
"""

from __future__ import annotations

import itertools
import sys
import time
import uuid
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark import Admin, LocalCluster
from rocketmq_spark.arrow.block import read_block
from rocketmq_spark.arrow.content import ContentHash
from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.effectively_once.attempt import Attempt
from rocketmq_spark.deliveries.effectively_once.complete import complete
from rocketmq_spark.deliveries.effectively_once.plan import plan_write
from rocketmq_spark.deliveries.effectively_once.stored import read_stored
from rocketmq_spark.deliveries.effectively_once.stored_rows import StoredRows
from rocketmq_spark.deliveries.effectively_once.tokens import attempt_token
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.keys import NO_KEYS
from rocketmq_spark.deliveries.log.scan import UNKNOWN
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.connect import new_transport
from rocketmq_spark.sink.task import SendContext, SendRules, write_rows
from tests.benchmarks.bench_exactly_once import session
from tests.benchmarks.contest import FORGETFUL, Figure, await_rest, by_name, ratios, rounds_of, show
from tests.benchmarks.spark_sink import used

ROWS = 2_000_000
STORED = 1_000_000
QUEUES = 64
ONCE = {"delivery": "effectivelyOnce", "transactionalId": "bench"}


class Job:
    """Runs the driver's and the tasks' part of micro-batches in this process."""

    def __init__(self, name_server: str, topic: str) -> None:
        options = parse_sink_options({"nameServer": name_server, "topic": topic, **ONCE}, {})
        connection = options.connection
        self._instance = ClientInstance("bench", new_transport(connection, "bench"), connection)
        self._instance.start()
        # An instance without a producer closes after a while.
        self._instance.register(options.producer_group)
        self.brokers = Brokers(options, self._instance)
        self._log = DecisionLog(f"bench#{topic}", options.transaction_topic)
        self._numbers = itertools.count()

    def micro_batch(self, rows: int) -> float:
        """Write a micro-batch; return the seconds of all but the sending. Spark plans each micro-batch twice."""
        write = Write(str(next(self._numbers)), "query")
        began = time.perf_counter()
        for _ in range(2):
            plan = plan_write(self.brokers, self._log, None)
        sending = 0.0
        recorder = Recorder("query", write.batch_id, 0)
        batches = self._batches(rows)
        context = SendContext(options=self.brokers.options, instance=self._instance)

        def send(batches: Iterator[pa.RecordBatch], *, row_id_name: str = "", rules: SendRules | None = None) -> None:
            nonlocal sending
            assert rules is not None
            sending -= time.perf_counter()
            write_rows(context, recorder, batches, row_id_name, rules)
            sending += time.perf_counter()

        attempted = Attempt(self.brokers, plan, write, 0).run(recorder, iter(batches), send)
        assert attempted is not None
        names = {queue.broker_name for queue in plan.start_offsets[-1].by_queue}
        complete(self.brokers, self._log, plan, write, [attempted], names)
        return time.perf_counter() - began - sending

    def read(self) -> float:
        """Return the messages per second of the reading of one task."""
        queues = dict.fromkeys(self.brokers.routes().look_up(str(self.brokers.options.topic)).queues, UNKNOWN)
        content, write = ContentHash(), Write("0", "query")
        (attempt_id,) = self._log.writes[write].begun[0]
        tokens = {attempt_token(NO_KEYS, "", self._log.transactional_id, write, 0, attempt_id)}
        batches = self._batches(STORED)
        blocks = [read_block(batch, self.brokers.options) for batch in batches]
        began = time.perf_counter()
        ends = self.brokers.max_offsets(queues)
        stored = StoredRows(content, read_stored(self.brokers, queues, ends, tokens, content))
        found = [stored.take(block, 0, None) for block in blocks]
        seconds = time.perf_counter() - began
        assert len(stored) == STORED
        assert all(rows is not None and rows.mask.all() for rows in found)
        stored.check_end()
        return STORED / seconds

    def _batches(self, rows: int) -> list[pa.RecordBatch]:
        bodies = pc.utf8_rpad(pa.array(range(rows)).cast(pa.string()), 100, ".")
        batches: list[pa.RecordBatch] = pa.table({"body": bodies.cast(pa.binary())}).to_batches(max_chunksize=10_000)
        return batches

    def close(self) -> None:
        """Close the connections."""
        self._instance.unregister(self.brokers.options.producer_group)
        self._instance.close()


def figures(rounds: int) -> Iterator[Figure]:
    """Measure everything here."""
    with LocalCluster(broker_properties=FORGETFUL) as cluster, Admin(cluster.name_server) as admin:
        admin.create_topic("bench", 8)
        spark = session()
        rows = spark.range(0, ROWS, 1, 2).selectExpr("rpad(cast(id AS string), 100, '.') AS body")
        deliveries = {"effectivelyOnce": ONCE, "atLeastOnce": {"rowId": "true"}, "plain": {}}

        def write(name: str) -> tuple[float, float]:
            options = {"nameServer": cluster.name_server, "topic": "bench", **deliveries[name]}
            if "transactionalId" in options:
                options["writeId"] = uuid.uuid4().hex
            began, before = time.perf_counter(), used()["python"]
            rows.write.format("rocketmq").options(**options).mode("append").save()
            return ROWS / (time.perf_counter() - began), used()["python"] - before

        written = rounds_of(list(deliveries), rounds, write)
        spark.stop()
        taken = by_name([{name: rate for name, (rate, _) in one.items()} for one in written])
        cpu = by_name([{f"{name}, CPU": seconds for name, (_, seconds) in one.items()} for one in written])
        once = taken["effectivelyOnce"]
        yield Figure("effectively-once writes, against rowId=true", ratios(once, taken["atLeastOnce"]), 0.95)
        yield Figure("effectively-once writes, against plain rows", ratios(once, taken["plain"]), 0.95)
        spent = ratios(cpu["effectivelyOnce, CPU"], cpu["plain, CPU"])
        yield Figure("CPU of Python's workers, effectively-once writes against plain rows", spent, 1.05, True)
    with LocalCluster() as cluster, Admin(cluster.name_server) as admin:
        admin.create_topic("stored", 8)
        job = Job(cluster.name_server, "stored")
        job.micro_batch(STORED)
        await_rest(cluster)
        speeds = [job.read() / 1000 for _ in range(rounds + 1)][1:]
        job.close()
        yield Figure("recovery of effectively-once writes, thousand messages/s read by a task", speeds, 600)
        admin.create_topic("marks", QUEUES)
        job = Job(cluster.name_server, "marks")
        for _ in range(20):
            job.micro_batch(1_000)
        costs = [job.micro_batch(1_000) * 1000 for _ in range(10 * rounds)]
        job.close()
        yield Figure(f"ms for plans and end of an effectively-once micro-batch, {QUEUES} queues", costs, 30, True)


if __name__ == "__main__":
    show(figures, sys.argv[1:], 3)
