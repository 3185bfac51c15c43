"""gRPC in the driver and in Spark's forked workers, with each value of `GRPC_ENABLE_FORK_SUPPORT`.

gRPC reads the variable at its first use, and a call that hangs ignores its timeout. Each case therefore runs in its own
process, with its own JVM.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest

from tests.support.cluster import SharedCluster
from tests.support.processes import PATIENCE
from tests.support.reading import read_topic

pytestmark = [pytest.mark.spark, pytest.mark.integration]

ROWS = 200

SCRIPT = """
import sys
from pyspark.sql import SparkSession
import rocketmq_spark
from rocketmq_spark import Message, Producer

endpoints, topic = sys.argv[1:]
builder = SparkSession.builder.master("local[2]")
for key, value in {"spark.ui.enabled": "false", "spark.log.level": "ERROR", "spark.driver.host": "127.0.0.1",
                   "spark.driver.bindAddress": "127.0.0.1"}.items():
    builder = builder.config(key, value)
# Before gRPC is used: PySpark starts its JVM in a way that gRPC 1.81 and newer do not always survive.
spark = builder.getOrCreate()
# Open, and with a channel in use, while Spark starts its workers and writes.
with Producer("driver", endpoints=endpoints) as producer:
    producer.send(Message.of(topic, b"before"))
    metrics = rocketmq_spark.register(spark)
    # Twice: the second write finds workers that have used gRPC.
    for half in range(2):
        frame = spark.range(half * ROWS // 2, (half + 1) * ROWS // 2, 1, 2).selectExpr("cast(id as string) as body")
        frame.write.format("rocketmq").option("endpoints", endpoints).option("topic", topic).save()
    producer.send(Message.of(topic, b"after"))
    print("rows", sum(facts["rows"] for facts in metrics.to_dict().values()))
    spark.stop()
"""


@pytest.mark.parametrize("fork_support", [None, *(pytest.param(value, marks=pytest.mark.long) for value in "01")])
def test_driver_and_forked_workers_both_send_over_grpc(
    cluster: SharedCluster, make_topic: Callable[..., str], fork_support: str | None
) -> None:
    topic = make_topic("NORMAL")
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    if fork_support is not None:
        environment["GRPC_ENABLE_FORK_SUPPORT"] = fork_support
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("ROWS", str(ROWS)), cluster.endpoints, topic],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"rows {ROWS}\n" in done.stdout
    bodies = Counter(message.body for message in read_topic(cluster.name_server, topic, ROWS + 2))
    assert bodies == Counter([b"before", b"after", *(b"%d" % number for number in range(ROWS))])
