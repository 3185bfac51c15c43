"""Reads from a time and to a time, of every type of queue and of other releases: compared with the store times."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rocketmq_spark import Producer, read_arrow
from rocketmq_spark.admin import Admin
from rocketmq_spark.errors import OptionError
from tests.support.cluster import SharedCluster
from tests.support.processes import PATIENCE, wait_for
from tests.support.releases import cluster_of

pytestmark = pytest.mark.integration

# The rows of each batch. All rows of a batch have the same store time.
BATCHES = (1, 1, 70, 5, 1, 300, 1)


def write(name_server: str, topic: str, kind: Mapping[str, Any]) -> None:
    """Write the batches to the first queue of a broker, at different times; its second queue stays empty."""
    with Admin(name_server, timeout=PATIENCE) as admin:
        admin.create_topic(topic, 2, **kind)
    options = {"batchType": "inner"} if kind.get("inner") else {}
    with Producer("by-time", name_server=name_server) as producer:
        broker = producer.fetch_publish_message_queues(topic)[0].broker_name
        for number, count in enumerate(BATCHES):
            columns = {
                "body": ["x"] * count,
                "keys": [f"{number}-{row}" for row in range(count)],
                "brokerName": [broker] * count,
                "queueId": pa.array([0] * count, pa.int32()),
            }
            producer.send_arrow(pa.table(columns), topic, queueSelector="column", **options)
            # A different store time; the nearest message of 4.9.7 depends on the distance.
            time.sleep(0.005 + 0.01 * (number % 2))


def times_of(name_server: str, topic: str, **options: Any) -> list[int]:
    """Return the store times (ms) of the messages of a read, in the order of their offsets."""
    columns = ["queueOffset", "storeTimestamp"]
    table = read_arrow(topic, nameServer=name_server, columns=columns, **options).read_all().sort_by("queueOffset")
    milliseconds = pc.cast(table["storeTimestamp"], pa.timestamp("ms", "UTC"))
    return [int(stamp) for stamp in pc.cast(milliseconds, pa.int64()).to_pylist()]


@pytest.mark.parametrize(
    ("release", "kind"),
    [
        ("", {}),
        ("", {"inner": True}),
        ("", {"compaction": True}),
        pytest.param("5.2.0", {}, marks=pytest.mark.long),
        pytest.param("4.9.7", {}, marks=pytest.mark.long),
    ],
)
def test_reads_by_time_return_exactly_the_messages_of_the_span(
    request: pytest.FixtureRequest, topic: str, release: str, kind: dict[str, bool]
) -> None:
    shared: SharedCluster | None = None if release else request.getfixturevalue("cluster")
    with nullcontext(shared) if shared else cluster_of(release) as servers:
        server = servers.name_server
        write(server, topic, kind)
        wait_for(lambda: len(times_of(server, topic)) == sum(BATCHES))
        stored = times_of(server, topic)
        distinct = sorted(set(stored))
        assert stored == sorted(stored)
        assert len(distinct) == len(BATCHES)
        for time_ms in sorted({stamp + shift for stamp in distinct for shift in (-3, -1, 0, 1)}):
            older = sum(stamp < time_ms for stamp in stored)
            ended = times_of(server, topic, endingTimestamp=time_ms)
            assert ended == stored[:older], (time_ms, distinct)
            if older < len(stored):
                assert times_of(server, topic, startingTimestamp=time_ms) == stored[older:], (time_ms, distinct)
        later = stored[-1] + 1
        with pytest.raises(OptionError, match=rf"has no message .* UTC \({later} ms .*only older messages: 1\)"):
            times_of(server, topic, startingTimestamp=later)
        found = times_of(server, topic, startingTimestamp=later, startingOffsetsByTimestampStrategy="latest")
        assert found == []
