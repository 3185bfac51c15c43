"""A Declarative Pipeline, as its page shows it: a streaming table of a topic, and a sink that writes to a topic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rocketmq_spark.model.message import Message
from rocketmq_spark.producer.producer import Producer
from tests.support.cluster import SharedCluster
from tests.support.markdown import ROOT, blocks
from tests.support.processes import PATIENCE, PYSPARK, SPARK_HOME
from tests.support.reading import read_topic

pytestmark = [
    pytest.mark.spark,
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.skipif(PYSPARK < (4, 1), reason="PySpark before 4.1 has no Declarative Pipelines"),
]


def test_a_pipeline_reads_a_topic_and_writes_to_a_topic(cluster: SharedCluster, topic: str, tmp_path: Path) -> None:
    pytest.importorskip("grpc_status", reason="pipelines need pyspark[pipelines]")
    orders, copy = topic, f"{topic}-copy"
    page = {block.language: block.text for block in blocks(ROOT / "docs" / "pipelines.md")}
    code = page["python"].replace("127.0.0.1:9876", cluster.name_server)
    code = code.replace('"orders-copy"', f'"{copy}"').replace('"orders"', f'"{orders}"')
    (tmp_path / "transformations").mkdir()
    (tmp_path / "transformations" / "orders.py").write_text(code)
    (tmp_path / "spark-pipeline.yml").write_text(page["yaml"].replace("/tmp/orders-pipeline", f"{tmp_path}/storage"))
    with Producer("pipelines", name_server=cluster.name_server) as producer:
        for number in range(20):
            producer.send(Message(orders, b"%d" % number))
    done = subprocess.run(
        [SPARK_HOME / "bin" / "spark-pipelines", *page["sh"].split()[1:], "--conf", "spark.ui.enabled=false"],
        env={
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {message.body for message in read_topic(cluster.name_server, copy, 20)} == {b"%d" % n for n in range(20)}
