"""Fixtures for writes and reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rocketmq_spark.spark.report import Metrics
    from tests.support.cluster import SharedCluster


@pytest.fixture
def save(cluster: SharedCluster, topic: str, metrics: Metrics) -> Callable[..., None]:
    """Save a DataFrame to the test's topic; keyword arguments are options."""

    def save_to_topic(frame: DataFrame, **options: Any) -> None:
        writer = frame.write.format("rocketmq").mode("append")
        writer.options(**{"nameServer": cluster.name_server, "topic": topic, **options}).save()

    return save_to_topic


@pytest.fixture
def load(spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics) -> Callable[..., DataFrame]:
    """Read the test's topic, or the topics of the keyword arguments, which are options."""

    def load_from(**options: Any) -> DataFrame:
        reader = spark.read.format("rocketmq").option("nameServer", cluster.name_server)
        if not {"subscribe", "topic", "subscribePattern", "assign", "startingOffsets"} & options.keys():
            reader = reader.option("subscribe", topic)
        return reader.options(**options).load()

    return load_from
