"""Reads of expired messages on every release. It is the last module of the folder, because it deletes messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

from rocketmq_spark import Producer
from rocketmq_spark.admin import queue_offsets
from rocketmq_spark.options.kinds import MIB
from tests.support.cluster import commit_log, forget
from tests.support.processes import PATIENCE, at_most, wait_for
from tests.support.releases import ReleaseCluster, leave_out
from tests.support.streams import Feed, Kept
from tests.support.writes import make_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.integration]


def test_expired_messages_fail_a_read_unless_data_loss_is_allowed(
    spark: SparkSession,
    servers: ReleaseCluster,
    release: str,
    topic: str,
    load: Callable[..., DataFrame],
    tmp_path: Path,
) -> None:
    leave_out("expired messages", release)
    broker = servers.brokers[0]
    make_topic(servers, topic, queues=1, on=[broker])
    before = len(commit_log(broker))

    def read_available(**options: Any) -> list[str]:
        given = {"nameServer": servers.name_server, "startingOffsets": "earliest", **options}
        frame, kept = spark.readStream.format("rocketmq").options(**given).load(topic), Kept()
        writer = frame.writeStream.foreachBatch(kept).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(int(PATIENCE))
        return sorted(kept.keys.elements())

    with Producer("feed", name_server=servers.name_server, compress_type="NONE") as producer:
        feed = Feed(producer, servers.name_server, topic)
        keys = [key for _ in range(5) for key in feed(1, nbytes=MIB)]
        assert read_available() == sorted(keys)
        keys += [key for _ in range(35) for key in feed(1, nbytes=MIB)]
    stamps = {
        row.queueOffset: row.storeTimestamp for row in load(topic).select("queueOffset", "storeTimestamp").collect()
    }
    forget(broker, files=before + 1)

    def state() -> tuple[int, int]:
        (found,) = queue_offsets([servers.name_server], topic)
        return found.min_offset, found.max_offset

    # A broker that has lost files corrects the first offsets of its queues a moment after its start.
    wait_for(lambda: state()[0] > 5)
    left, end = state()
    assert left < 40
    assert end == 40
    starts = json.dumps({topic: {broker.name: {"0": 5}}})
    gone = rf"messages 5 to {left - 1} of .* are not there any more.*failOnDataLoss"
    with pytest.raises(PySparkException, match=gone):
        load(topic, startingOffsets=starts).collect()
    with pytest.raises(PySparkException, match=gone):
        read_available()
    assert read_available(failOnDataLoss="false", **at_most(4)) == sorted(keys[left:])

    def offsets(**options: str) -> list[int]:
        found = load(topic, **options).select("keys", "queueOffset").collect()
        assert all(row["keys"] == keys[row.queueOffset] for row in found)
        return sorted(row.queueOffset for row in found)

    assert offsets() == list(range(left, 40))
    assert offsets(startingOffsets=starts, failOnDataLoss="false") == list(range(left, 40))
    stop = json.dumps({topic: {broker.name: {"0": 8}}})
    assert offsets(startingOffsets=starts, endingOffsets=stop, failOnDataLoss="false") == []
    with pytest.raises(PySparkException, match=r"messages 5 to 7 of .* are not there any more"):
        load(topic, startingOffsets=starts, endingOffsets=stop).collect()
    for offset in (5, left - 1, left, left + 1, 39):
        time_ms = int(stamps[offset].replace(tzinfo=timezone.utc).timestamp() * 1000)
        first = min(place for place, stamp in stamps.items() if stamp >= stamps[offset])
        assert offsets(startingTimestamp=str(time_ms)) == list(range(max(first, left), 40))
        assert offsets(endingTimestamp=str(time_ms)) == list(range(left, max(first, left)))
