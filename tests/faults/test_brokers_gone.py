"""Brokers that are killed or paused during a write: one or all, temporarily or permanently."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from rocketmq_spark.cluster import Broker, LocalCluster
from rocketmq_spark.errors import DeliveryError
from rocketmq_spark.producer.producer import Producer
from tests.support.auditor import ROW_ID, audit, numbered_rows
from tests.support.java import Java
from tests.support.writes import (
    PIECE,
    SMALL,
    WIDTH,
    Trial,
    account_of,
    broken,
    check_account,
    counted,
    in_mid_write,
    make_topic,
    numbered,
    rows,
    write,
)

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]


def paused(seconds: float, *brokers: Broker) -> tuple[float, float]:
    """Pause brokers for a time; return its start and end."""
    for broker in brokers:
        broker.pause()
    start = time.monotonic()
    time.sleep(seconds)
    end = time.monotonic()
    for broker in brokers:
        broker.resume()
    return start, end


def test_broker_killed_and_restarted_during_write_loses_no_row(trial: Trial, *, full: bool) -> None:
    victim = trial.cluster.brokers[0]

    def kill_and_restart() -> None:
        victim.kill()
        victim.restart()

    rows, per_second = (150_000, 5_000) if full else (12_000, 6_000)
    trial.write(rows, kill_and_restart, per_second=per_second)
    account = trial.settle("broker killed and started again")
    assert account.retries > 0


@pytest.mark.long
def test_rows_of_permanently_killed_broker_go_to_the_other_broker(trial: Trial) -> None:
    victim, other = trial.cluster.brokers
    trial.write(100_000, victim.kill, per_second=10_000)
    assert not victim.is_alive
    assert trial.metrics.to_dict()[other.name]["rows"] > 50_000
    # Only the broker itself can read the messages that it has acknowledged, from its disk.
    victim.restart()
    account = trial.settle("broker killed permanently")
    assert account.retries > 0


@pytest.mark.parametrize("faults", [False, pytest.param(True, marks=pytest.mark.long)], ids=["off", "on"])
def test_rows_in_flight_to_a_paused_broker_are_resent_and_none_is_lost(
    trial: Trial, *, faults: bool, full: bool
) -> None:
    victim, other = trial.cluster.brokers
    pause, timeout, per_second = (20.0, 3_000, 4_000) if full else (2.0, 500, 4_000)
    rows = int(per_second * (pause + 2))
    options = {"sendLatencyFaultEnable": faults, "sendMsgTimeout": timeout}
    trial.write(rows, lambda: paused(pause, victim), per_second=per_second, **options)
    facts = trial.metrics.to_dict()
    account = trial.settle(f"broker paused {pause:.0f} s, sendLatencyFaultEnable {'on' if faults else 'off'}")
    assert facts[victim.name]["retries_by_reason"]["RemotingTimeoutException"] > 0
    assert (facts[victim.name]["isolated_times"] > 0) is faults
    # The other broker gets the rows that this one does not accept.
    assert facts[other.name]["rows"] > facts[victim.name]["rows"]
    if full:
        assert account.longest_stall < pause


def pace_beside_a_paused_broker(trial: Trial, seconds: float) -> float:
    """Return the rate of a write with a paused broker, relative to a write without that broker."""
    victim, other = trial.cluster.brokers
    name_server, alone = trial.cluster.name_server, f"{trial.topic}-alone"
    # One row per request: the highest number of requests, so that any wait for the paused broker shows.
    options = {"batching": False, "sendLatencyFaultEnable": True, "rowId": True}
    make_topic(trial.cluster, alone, on=[other])
    rows = numbered(trial.spark, 60_000, 200)
    # The first write is slow, because Spark starts its workers and the brokers' JVMs compile their code.
    write(rows, name_server, alone, **options)
    with trial.ledger.watch([name_server], alone, [other.address]):
        write(rows, name_server, alone, **options)
    undisturbed = trial.ledger.pace
    trial.metrics.reset()
    held = list[tuple[float, float]]()
    trial.write(
        int(undisturbed * seconds * 1.6), lambda: held.append(paused(seconds, victim)), per_second=None, **options
    )
    ((start, end),) = held
    share = trial.ledger.stored_between(start, end) / (end - start) / undisturbed
    trial.settle(f"broker paused {seconds:.0f} s, faults on: {share:.2f} of the pace without it")
    return share


@pytest.mark.long
def test_paused_broker_does_not_slow_write_with_fault_strategy(trial: Trial) -> None:
    share = pace_beside_a_paused_broker(trial, 20.0)
    if share < 0.6:
        # Both paces are the machine's too: 1.13, 1.01, 0.62 and 0.61 were seen where other things ran beside. A wait
        # for the paused broker would be there the second time as well.
        share = pace_beside_a_paused_broker(replace(trial, topic=f"{trial.topic}-again"), 20.0)
    assert share >= 0.6


@pytest.mark.long
def test_write_with_all_brokers_down_fails_in_time_and_reports_stored_rows(
    trial: Trial, spark: SparkSession, java: Java, *, full: bool
) -> None:
    cluster, topic, rows = trial.cluster, trial.topic, 20_000
    timeout, attempts = (5_000, 2) if full else (1_000, 2)
    failed_at = list[float]()
    options = {"deliveryTimeoutMs": timeout, "sendMsgTimeout": 1_000, "rowId": True, "maxRatePerSecond": 5_000, **SMALL}
    make_topic(cluster, topic)
    with in_mid_write(cluster.name_server, topic, rows // 10, lambda: failed_at.append(go_away(cluster))):
        with pytest.raises(PySparkException) as raised:
            write(numbered(spark, rows, WIDTH), cluster.name_server, topic, **options)
        took = time.monotonic() - failed_at[0]
    error = str(raised.value)
    assert f"deliveryTimeoutMs={timeout}" in error
    assert re.search(r"Rows of this task stored: .*Read but not sent: \d+", error)
    # Each of Spark's attempts takes its time; a hang would take pytest's.
    assert took < attempts * (timeout / 1000 + 10)
    for broker in cluster.brokers:
        broker.resume()
    given = numbered_rows(topic, range(rows), WIDTH, repeats=True, optional=True)
    found = audit(java, cluster.name_server, given, marks=[ROW_ID])
    found.check()
    assert found.found >= rows // 10


def go_away(cluster: LocalCluster) -> float:
    for broker in cluster.brokers:
        broker.pause()
    return time.monotonic()


def test_write_with_all_brokers_down_reports_correct_row_counts(
    two_brokers: LocalCluster, topic: str, java: Java
) -> None:
    count, taken = 20_000, list[int]()
    make_topic(two_brokers, topic)
    gone = broken(rows(count), 10, two_brokers, topic, lambda: go_away(two_brokers), messages=PIECE)
    batches = counted(gone, taken)
    with Producer("pg", name_server=two_brokers.name_server, send_msg_timeout=1_000) as producer:
        with pytest.raises(DeliveryError) as raised:
            producer.send_arrow(batches, topic, deliveryTimeoutMs="2000", **SMALL)
        # Before the producer says farewell to them, and waits for their answers.
        for broker in two_brokers.brokers:
            broker.resume()
    assert "deliveryTimeoutMs=2000" in str(raised.value)
    account = account_of(raised.value)
    assert 0 < account[0] < count
    given = numbered_rows(topic, range(sum(taken)), WIDTH, repeats=True, optional=True)
    check_account(audit(java, two_brokers.name_server, given, marks=["UNIQ_KEY"]), account)
