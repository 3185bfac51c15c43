"""Reads from a time and to a time, of one topic: compared with the store times of its messages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rocketmq_spark import Producer, read_arrow
from rocketmq_spark.admin import Admin
from rocketmq_spark.errors import OptionError
from tests.support.processes import PATIENCE, wait_for

# The rows of each batch. All rows of a batch have the same store time.
BATCHES = (1, 1, 70, 5, 1, 300, 1)
_DAY_MS = 24 * 3_600_000


def write_at_different_times(name_server: str, topic: str, kind: Mapping[str, Any]) -> None:
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


def check_reads_by_time(name_server: str, topic: str, kind: Mapping[str, Any]) -> None:
    """Write a topic, and fail unless each read by time returns exactly the messages of its span."""
    write_at_different_times(name_server, topic, kind)
    wait_for(lambda: len(times_of(name_server, topic)) == sum(BATCHES))
    stored = times_of(name_server, topic)
    distinct = sorted(set(stored))
    assert stored == sorted(stored)
    assert len(distinct) == len(BATCHES)
    moments = {stamp + shift for stamp in distinct for shift in (-3, -1, 0, 1)}
    for time_ms in sorted({*moments, distinct[0] - _DAY_MS, distinct[-1] + _DAY_MS}):
        older = sum(stamp < time_ms for stamp in stored)
        ended = times_of(name_server, topic, endingTimestamp=time_ms)
        assert ended == stored[:older], (time_ms, distinct)
        if older < len(stored):
            assert times_of(name_server, topic, startingTimestamp=time_ms) == stored[older:], (time_ms, distinct)
    for later in (stored[-1] + 1, stored[-1] + _DAY_MS):
        with pytest.raises(OptionError, match=rf"has no message .* UTC \({later} ms .*only older messages: 1\)"):
            times_of(name_server, topic, startingTimestamp=later)
        latest = {"startingTimestamp": later, "startingOffsetsByTimestampStrategy": "latest"}
        assert times_of(name_server, topic, **latest) == []
