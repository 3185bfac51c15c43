"""A live display beside real jobs and brokers."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from rich.console import Console

from rocketmq_spark.errors import OptionError
from rocketmq_spark.spark.live import LiveDisplay, LiveView, live, notebook_screen, terminal_screen
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import SharedCluster
from tests.support.processes import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def numbers(spark: SparkSession, rows: int, partitions: int = 3) -> Any:
    return spark.range(0, rows, 1, partitions).selectExpr("cast(id as string) as body")


def test_pipe_gets_one_line_with_tasks_and_messages_of_the_job(
    spark: SparkSession,
    cluster: SharedCluster,
    topic: str,
    save: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    with live(spark, topic, cluster.name_server) as display:
        save(numbers(spark, 5_000))
    assert display.view.messages == 5_000
    assert display.view.tasks == (3, 0, 0, 3)
    assert sum(broker.messages for broker in display.view.brokers) == 5_000
    out, err = capfd.readouterr()
    assert out == ""
    assert err.endswith(f"{display.view}\n")
    assert "3 of 3 tasks ended · 5,000 messages arrived" in err


def test_only_jobs_and_messages_inside_the_block_count(
    spark: SparkSession, cluster: SharedCluster, topic: str, save: Callable[..., None]
) -> None:
    save(numbers(spark, 300))
    with live(spark, topic, cluster.name_server) as display:
        save(numbers(spark, 40, partitions=1))
        # A job with a shuffle: what Spark skips of it is no task.
        assert numbers(spark, 100).groupBy("body").count().count() == 100
    assert display.view.messages == 40
    assert display.view.tasks is not None
    ended, running, failed, total = display.view.tasks
    assert (running, failed) == (0, 0)
    assert ended == total > 4


def test_a_job_that_failed_keeps_the_number_of_its_tasks(
    spark: SparkSession, cluster: SharedCluster, topic: str, save: Callable[..., None]
) -> None:
    display = live(spark, topic, cluster.name_server)
    with pytest.raises(PySparkException, match="body is null"), display:
        save(spark.range(0, 4, 1, 2).selectExpr("if(id = 3, null, 'x') as body"))
    assert display.view.tasks is not None
    ended, running, failed, total = display.view.tasks
    assert (running, total) == (0, 2)
    assert ended < 2
    assert failed > 0


def test_a_terminal_keeps_the_last_state_of_a_block_that_failed(
    spark: SparkSession, cluster: SharedCluster, topic: str, save: Callable[..., None]
) -> None:
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=100, _environ={})
    transport = RemotingTransport([cluster.name_server])
    display = LiveDisplay(spark, topic, transport, screen=terminal_screen(console))

    def job() -> None:
        with display:
            save(numbers(spark, 70))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        job()
    assert display.view.over
    assert display.view.messages == 70
    last = terminal.getvalue().rpartition(f"topic {topic}"[:40])[2]
    assert "ended" in last
    # The first messages create the topic on one of the brokers.
    assert "broker-" in last
    assert "70" in last
    assert transport.closed


def test_a_notebook_sees_the_micro_batches_of_a_query(
    spark: SparkSession, cluster: SharedCluster, topic: str, tmp_path: Path
) -> None:
    views: list[LiveView] = []

    class Handle:
        update = staticmethod(views.append)

    def display(view: LiveView, *, display_id: bool) -> Handle:
        views.append(view)
        return Handle()

    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 50).option("numPartitions", 2).load()
    writer = rows.selectExpr("cast(value as string) as body").writeStream.format("rocketmq")
    writer = writer.options(nameServer=cluster.name_server, topic=topic, checkpointLocation=str(tmp_path))
    transport = RemotingTransport([cluster.name_server])
    with LiveDisplay(spark, topic, transport, screen=notebook_screen(display)):
        query = writer.trigger(processingTime="1 second").start()
        # The display shows a query while it runs.
        wait_for(lambda: views[-1].tasks is not None and views[-1].tasks.ended >= 4)
        wait_for(lambda: views[-1].messages >= 100)
        query.stop()
    assert [view.messages for view in views] == sorted(view.messages for view in views)
    assert views[0].messages == 0
    assert [view.over for view in views] == [False] * (len(views) - 1) + [True]


def test_failing_display_and_unreachable_servers_do_not_fail_the_job(
    spark: SparkSession, cluster: SharedCluster, topic: str, save: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(view: LiveView) -> None:
        raise OSError("the front end is gone")

    nobody = RemotingTransport(["127.0.0.1:1"])
    with caplog.at_level(logging.WARNING), LiveDisplay(spark, topic, nobody, screen=broken) as display:
        save(numbers(spark, 20))
    assert display.view.tasks == (3, 0, 0, 3)
    said = [record.getMessage() for record in caplog.records if "live display" in record.getMessage()]
    assert len(said) == 2
    assert any("display: OSError: the front end is gone" in message for message in said)
    assert any("name servers: looking up the topic failed" in message for message in said)


def test_options_that_make_no_sense_are_an_error_before_the_block(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    with pytest.raises(OptionError, match="no name server is given"):
        live(spark, "orders")
    with pytest.raises(OptionError, match="secret_key"):
        live(spark, "orders", "127.0.0.1:9876", access_key="spark")
