"""Overloaded brokers: they reject sends, or their link is slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from pyspark.sql import SparkSession

from rocketmq_spark.cluster import Broker
from rocketmq_spark.spark.report import Metrics
from tests.support.cluster import SharedCluster, create_topic, set_config
from tests.support.links import slow_cluster
from tests.support.processes import wait_for
from tests.support.writes import Ledger, Trial, numbered, retries_of, write

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]


def answer_busy(brokers: Sequence[Broker], over: Callable[[], bool]) -> None:
    """Make brokers reject every send during the block: they require a buffer of a pool that is empty."""
    for broker in brokers:
        set_config(broker, transientStorePoolEnable="true")
    try:
        wait_for(over)
    finally:
        for broker in brokers:
            set_config(broker, transientStorePoolEnable="false")


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.long)], ids=["one", "all"])
def test_broker_that_answers_system_busy_is_waited_for_and_not_isolated(
    trial: Trial, *, everywhere: bool, full: bool
) -> None:
    victim, other = trial.cluster.brokers
    brokers, seconds, per_second = [victim, other] if everywhere else [victim], 10.0 if full else 2.0, 3_000

    def over() -> bool:
        """Return whether the busy brokers have stored nothing for a while, although the other broker has."""
        now = time.monotonic() if everywhere else trial.ledger.last_stored(other.address)
        return now > max(trial.ledger.last_stored(broker.address) for broker in brokers) + seconds

    rows = int(per_second * (seconds + 4))
    # Two tasks, because a third could start only after the first ones have sent the rows for the busy broker.
    options = {"sendLatencyFaultEnable": True, "partitions": 2}
    trial.write(rows, lambda: answer_busy(brokers, over), per_second=per_second, **options)
    facts = trial.metrics.to_dict()
    account = trial.settle(f"SYSTEM_BUSY for {seconds:.0f} s, from {'all brokers' if everywhere else 'one broker'}")
    for broker in brokers:
        assert facts[broker.name]["retries_by_reason"].keys() == {"BrokerBusyException 2"}
        assert facts[broker.name]["isolated_times"] == 0
    # A rejected row is not stored.
    assert account.repeats == 0
    if everywhere:
        assert account.longest_stall > seconds / 2


@pytest.mark.long
def test_broker_that_rejects_requests_after_5_ms_gets_all_rows(trial: Trial) -> None:
    broker = trial.cluster.brokers[0]
    set_config(broker, waitTimeMillsInSendQueue=5)
    try:
        trial.write(100_000, per_second=None, batchBytes="1m")
    finally:
        set_config(broker, waitTimeMillsInSendQueue=1000)
    assert trial.metrics.to_dict()[broker.name]["rows"] > 0
    trial.settle("broker that refuses what waits 5 ms")


@pytest.mark.long
def test_a_slow_link_causes_no_storm_of_repeats(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, ledger: Ledger
) -> None:
    rows, ten_megabit = 40_000, 10_000_000 / 8
    brokers = [broker.address for broker in cluster.brokers]
    create_topic(cluster, topic, "NORMAL")
    with (
        slow_cluster(cluster.name_server, brokers, ten_megabit) as name_server,
        ledger.watch([cluster.name_server], topic, brokers),
    ):
        write(numbered(spark, rows, 300), name_server, topic, rowId=True)
    retries = retries_of(metrics.to_dict())
    account = ledger.settle("links of 10 Mbit/s", cluster.name_server, topic, rows, retries, width=300)
    assert account.stored <= rows * 1.05
