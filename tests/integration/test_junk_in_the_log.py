"""Both once-deliveries, while another producer has filled the topic of the decision log with junk, on a real broker."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark import Producer, read_arrow
from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.log.delivery import forget_logs
from rocketmq_spark.deliveries.log.record_store import RecordStore
from rocketmq_spark.deliveries.log.records import VERSION
from rocketmq_spark.metrics import WriteSummary
from tests.support.cluster import SharedCluster
from tests.support.memory import peak_memory
from tests.support.processes import wait_for
from tests.support.resume import complete, new_plan, run_task
from tests.support.two_phase import ID, Driver
from tests.support.writes import make_topic

pytestmark = pytest.mark.integration

ROWS = [f"row-{number}" for number in range(100)]
AT_ONCE = 50_000
MIB = 1024 * 1024
# Numbers that no record may have.
HOSTILE: list[object] = [2**63, -1, 10**30, 1e300, True, None, [], {}, "1"]


def junk(topic: str, log: str, count: int) -> Iterator[pa.Table]:
    """Yield messages: a fifth has the tag of each delivery's log, the others have tags of other logs or none."""
    rng = random.Random(7)
    names = (ID, f"{ID}#{topic}")
    tags = [RecordStore(name, log).tag for name in names]

    def record(name: str, **changes: object) -> bytes:
        fields = {"version": VERSION, "kind": "done", "id": name, "write": "w", "query": "", "since": 0, "floors": []}
        return json.dumps({**fields, **changes}).encode()

    def message(number: int) -> tuple[str | None, bytes]:
        name, tag = names[number % 2], tags[number % 2]
        match number // 2 % 5:
            case 0:
                choice = rng.randrange(3)
                if choice == 0:
                    return tag, rng.randbytes(rng.randrange(1, 300))
                if choice == 1:
                    return tag, record(name)[: rng.randrange(1, 60)]
                field = rng.choice(["since", "write"])
                return tag, record(name, **{field: rng.choice(HOSTILE[:-1])})
            case 1 | 2:
                other = f"other-{rng.randrange(10**6)}"
                return RecordStore(other, log).tag, record(other)
            case 3:
                # Another log with the same tag cannot be made, but any message may have it.
                return None, record(name)
            case _:
                return None, rng.randbytes(rng.randrange(1, 300))

    for start in range(0, count, AT_ONCE):
        columns = zip(*map(message, range(start, min(count, start + AT_ONCE))), strict=True)
        yield pa.table(dict(zip(("tags", "body"), map(list, columns), strict=True)))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [2_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_junk_in_the_log_stops_no_write(cluster: SharedCluster, topic: str, count: int) -> None:
    log = f"log-{topic}"
    make_topic(cluster, topic, on=cluster.brokers[:1])
    make_topic(cluster, log, queues=1, on=cluster.brokers[:1])
    with Producer("junk", name_server=cluster.name_server) as producer:
        for table in junk(topic, log, count):
            producer.send_arrow(table, log)
    before, written = peak_memory(), Counter[str]()
    for key in ({}, {"transactionalKey": "a-key-of-this-test"}):
        given: dict[str, Any] = {"topic": topic, "transactionTopic": log, "deliveryTimeoutMs": "600000", **key}
        for number in range(2):
            write = Write(f"write-{number}-{len(key)}")
            with closing(Driver(cluster.name_server, delivery="effectivelyOnce", fenceMs="0", **given)) as job:
                plan = new_plan(job, write)
                complete(job, plan, write, run_task(job, plan, write, rows=ROWS, summary=WriteSummary()))
            forget_logs()
            with closing(Driver(cluster.name_server, **given)) as job:
                job.two_phase.prepare({queue.broker_name for queue in job.queues})
                job.open().two_phase.commit(write, *job.prepare(ROWS, write))
                assert job.log.records.ignored
            written.update(ROWS * 2)

    def stored() -> Counter[str]:
        bodies = read_arrow(topic, nameServer=cluster.name_server, columns=["body"]).read_all()["body"].to_pylist()
        return Counter(body.decode() for body in bodies)

    wait_for(lambda: stored() == written)
    # A search holds the records of a window, at most 1 MiB, and an answer.
    assert peak_memory() - before < 64 * MIB
