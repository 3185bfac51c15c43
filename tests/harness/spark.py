"""The Spark session of each process, and its metrics."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from rocketmq_spark.errors import ClusterError
from tests.harness import class_archive
from tests.support.processes import PYSPARK, with_jvm

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rocketmq_spark.spark.report import Metrics


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before PySpark 4.2, `collect` leaves its socket to the garbage collector, which warns."""
    if PYSPARK < (4, 2):
        for item in items:
            if item.get_closest_marker("spark"):
                item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


def avro_jar() -> str:
    """Return the path of Spark's package for Avro, or "" if it cannot be fetched. Only the recipe for Avro needs it."""
    from tests.benchmarks.kafka import AVRO, jars_of

    try:
        return next(str(jar) for jar in jars_of(*AVRO) if jar.name.startswith("spark-avro"))
    except (ClusterError, subprocess.CalledProcessError):
        return ""


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A classic session. `local[2,2]` runs a failed task again, as a Spark cluster does."""
    from pyspark.sql import SparkSession

    class_archive.make()
    session = with_jvm(
        SparkSession.builder.master("local[2,2]")
        .appName("rocketmq-spark tests")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.jars", avro_jar())
    )
    yield session
    session.stop()


@pytest.fixture
def small_record_batches(spark: SparkSession) -> Iterator[None]:
    """Use record batches of 500 rows, so that tasks get rows early."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
    yield
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


@pytest.fixture
def metrics(spark: SparkSession) -> Iterator[Metrics]:
    """The metrics of a source that is registered for this test, with the hook on `save`."""
    from rocketmq_spark.spark.register import register, unregister

    yield register(spark)
    unregister()
