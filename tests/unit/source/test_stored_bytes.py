"""The size of a micro-batch in bytes, which the driver estimates by samples (``maxBytesPerTrigger``)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rocketmq_spark import Message, Producer
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.parsing import parse_source_options
from rocketmq_spark.source.plan import reading_transport
from rocketmq_spark.source.stream_offsets import StreamOffsets
from rocketmq_spark.testing import FakeCluster

BIG, SMALL, SILENT = (MessageQueue("orders", broker, 0) for broker in ("a", "b", "c"))
COUNT = 100


@contextmanager
def offsets_of(cluster: FakeCluster) -> Iterator[StreamOffsets]:
    given = {"nameServer": cluster.name_server, "subscribe": "orders", "readTimeoutMs": "1000", "pullTimeoutMs": "300"}
    options = parse_source_options(given, {}, streaming=True)
    offsets = StreamOffsets(options, reading_transport(options), time.monotonic)
    try:
        offsets.latest()
        yield offsets
    finally:
        offsets.close()


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(["a", "b", "c"], topics={"orders": 1}) as fake:
        with Producer("feed", name_server=fake.name_server) as producer:
            for queue, nbytes in ((BIG, 3000), (SMALL, 100), (SILENT, 100)):
                for _ in range(COUNT):
                    producer.send(Message.of("orders", b"x" * nbytes), queue)
        yield fake


def test_bytes_are_the_sizes_of_samples_times_the_messages(cluster: FakeCluster) -> None:
    ends = {BIG: COUNT, SMALL: COUNT // 2}
    with offsets_of(cluster) as offsets:
        nbytes = offsets.stored_bytes(dict.fromkeys(ends, 0), ends)
    # Head and properties of a stored message have 100 to 300 bytes.
    assert COUNT * 3100 + COUNT // 2 * 200 <= nbytes <= COUNT * 3300 + COUNT // 2 * 400


def test_nothing_to_read_has_a_byte(cluster: FakeCluster) -> None:
    with offsets_of(cluster) as offsets:
        assert offsets.stored_bytes({BIG: COUNT, SMALL: 7}, {BIG: COUNT, SMALL: 5}) == 1


def test_queues_of_a_silent_broker_count_with_the_mean(cluster: FakeCluster) -> None:
    with offsets_of(cluster) as offsets:
        alone = offsets.stored_bytes({SMALL: 0}, {SMALL: COUNT})
        cluster.brokers["c"].paused = True
        assert offsets.stored_bytes({SMALL: 0, SILENT: 0}, {SMALL: COUNT, SILENT: COUNT}) == pytest.approx(2 * alone)
        assert offsets.stored_bytes({SILENT: 0}, {SILENT: COUNT}) == pytest.approx(alone)


def test_size_of_messages_is_infinite_before_the_first_sample(cluster: FakeCluster) -> None:
    with offsets_of(cluster) as offsets:
        cluster.brokers["c"].paused = True
        assert offsets.stored_bytes({SILENT: 0}, {SILENT: COUNT}) == math.inf


@pytest.mark.parametrize("deleted", ["expired", "removed"])
def test_sample_begins_with_the_first_message_that_is_left(cluster: FakeCluster, deleted: str) -> None:
    with offsets_of(cluster) as offsets:
        whole = offsets.stored_bytes({BIG: 0}, {BIG: COUNT})
        getattr(cluster.brokers["a"].storage.store, deleted)[BIG] = COUNT - 10
        assert offsets.stored_bytes({BIG: 0}, {BIG: COUNT}) == pytest.approx(whole, rel=0.1)
