"""One Spark session for all tests of this folder; `local[2,4]` retries a failed task, as a cluster does."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from rocketmq_spark.spark.report import Metrics

from rocketmq_spark.spark.register import register, unregister


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2,4]")
        .appName("rocketmq-spark tests")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.fixture
def metrics(spark: SparkSession) -> Iterator[Metrics]:
    yield register(spark)
    unregister()


@pytest.fixture
def save(cluster: Any, topic: str) -> Callable[..., None]:
    """Save a DataFrame to the test's topic; keyword arguments are options."""

    def save_to_topic(frame: DataFrame, **options: Any) -> None:
        writer = frame.write.format("rocketmq").mode("append")
        writer.options(**{"nameServer": cluster.name_server, "topic": topic, **options}).save()

    return save_to_topic
