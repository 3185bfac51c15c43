"""Writes over links that break, stall and change bytes: which faults remoting detects, with TLS and without."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import pytest
from pyspark.sql import SparkSession

from rocketmq_spark.model.hashes import ROW_ID, row_hash
from rocketmq_spark.spark.report import Metrics
from tests.support.cluster import SharedCluster
from tests.support.links import Fault, Passing, cut, delayed, flip, freeze, linked_cluster, unchanged
from tests.support.reading import read_topic
from tests.support.writes import Account, Ledger, numbered, retries_of, write

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]

ROWS = 10_000
MakeTopic = Callable[..., str]
WriteOver = Callable[..., Account]


@pytest.fixture
def write_over(
    spark: SparkSession, cluster: SharedCluster, topic: str, make_topic: MakeTopic, metrics: Metrics, ledger: Ledger
) -> WriteOver:
    """Write rows to the test's topic over a link to each broker, and return the account."""

    def write_over_links(
        fault: str,
        *,
        to_server: Passing = unchanged,
        to_client: Passing = unchanged,
        timeout: str = "1000",
        accepted: Sequence[str] = (),
    ) -> Account:
        make_topic("NORMAL", queues=4)
        brokers = [broker.address for broker in cluster.brokers]
        links = linked_cluster(cluster.name_server, brokers, to_server=to_server, to_client=to_client)
        with links as (name_server, _), ledger.watch([cluster.name_server], topic, brokers):
            options = {"rowId": "true", "batchBytes": "8k", "sendMsgTimeout": timeout}
            write(numbered(spark, ROWS, 100), name_server, topic, **options)
        retries = retries_of(metrics.to_dict())
        return ledger.settle(fault, cluster.name_server, topic, ROWS, retries, width=100, accepted=accepted)

    return write_over_links


def test_connections_cut_inside_a_frame_lose_no_row(write_over: WriteOver) -> None:
    requests, answers = Fault(cut, 300_000), Fault(cut, 50_000)
    account = write_over("connections cut in mid-frame", to_server=requests, to_client=answers)
    assert requests.times > 0
    assert answers.times > 0
    assert account.retries > 0


@pytest.mark.long
def test_links_that_freeze_inside_a_frame_lose_no_row(write_over: WriteOver) -> None:
    # Longer than the timeout of a request, and shorter than that of the test.
    requests, answers = Fault(freeze(3.0), 1_000_000), Fault(freeze(3.0), 200_000)
    account = write_over("half a frame, then nothing", to_server=requests, to_client=answers)
    assert requests.times + answers.times > 0
    assert account.retries > 0


@pytest.mark.long
def test_slow_link_to_brokers_causes_no_repeats(write_over: WriteOver) -> None:
    account = write_over("links of 100 ms", to_server=delayed(0.1), to_client=delayed(0.1), timeout="20000")
    assert (account.repeats, account.retries) == (0, 0)


def test_answers_in_which_bits_change_lose_no_row(write_over: WriteOver) -> None:
    answers = Fault(flip_in_answer, 10_000)
    account = write_over("bits changed in answers", to_client=answers)
    assert answers.times > 0
    assert account.retries > 0


def test_corrupted_body_is_stored_and_detected_by_its_row_id(
    write_over: WriteOver, cluster: SharedCluster, topic: str
) -> None:
    requests = Fault(flip_in_body, 300_000)
    write_over("bits changed in bodies", to_server=requests, accepted=["changedBody"])
    messages = read_topic(cluster.name_server, topic, ROWS, key=lambda message: message.properties["KEYS"])
    changed = [m for m in messages if not m.properties[ROW_ID].endswith(row_hash(topic, m.body, m.properties))]
    # A broker checks no checksum of a request: only those of TCP and TLS protect it.
    assert len(changed) == requests.times > 0
    assert all(b"/" in message.body for message in changed)


def flip_in_answer(data: bytes, at: int) -> Iterator[bytes]:
    """Change a bit anywhere except in an opaque, because an answer with a changed opaque may match another request."""
    for opaque in re.finditer(rb'"opaque":-?\d+', data):
        if opaque.start() <= at < opaque.end():
            return unchanged(data)
    return flip(data, at)


def flip_in_body(data: bytes, at: int) -> Iterator[bytes]:
    """Replace one dot of a body's padding by a slash."""
    dots = b"." * 20
    found = data.find(dots, at) if dots in data[at:] else data.find(dots)
    assert found >= 0
    yield data[:found] + b"/" + data[found + 1 :]
