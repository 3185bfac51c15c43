"""The recipes of docs/payloads.md: rows come back as they were written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from rocketmq_spark.spark.report import Metrics
from tests.support.cluster import SharedCluster
from tests.support.markdown import ROOT, blocks
from tests.support.processes import PATIENCE

pytestmark = [pytest.mark.spark, pytest.mark.integration]

PAGE = blocks(ROOT / "docs" / "payloads.md")
PROTO = next(block.text for block in PAGE if block.language == "proto")


def code_of(section: str, cluster: SharedCluster, topic: str) -> str:
    """Return the Python code of a section, with the address and the topics of a test."""
    text = "\n".join(block.text for block in PAGE if (block.language, block.section) == ("python", section))
    return re.sub(r'(?<=")orders(?=-)', topic, text).replace("127.0.0.1:9876", cluster.name_server)


@pytest.mark.parametrize(
    ("section", "result"), [("JSON", "from_json"), ("Avro", "from_binary"), ("Protobuf", "decoded")]
)
def test_rows_come_back_as_they_were_written(
    spark: SparkSession, metrics: Metrics, cluster: SharedCluster, topic: str, tmp_path: Path, section: str, result: str
) -> None:
    if section == "Protobuf":
        (tmp_path / "orders.proto").write_text(PROTO)
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(tmp_path), f"--python_out={tmp_path}"]
        subprocess.run([*command, "orders.proto"], check=True, timeout=PATIENCE)
        spark.sparkContext.addPyFile(str(tmp_path / "orders_pb2.py"))
    names: dict[str, Any] = {"spark": spark}
    exec(code_of("", cluster, topic) + code_of(section, cluster, topic), names)
    assert sorted(names[result].collect()) == sorted(names["orders"].collect())
    assert names[result].count() == 100


@pytest.mark.long
def test_a_stream_is_copied_from_kafka_to_rocketmq_and_back(cluster: SharedCluster, topic: str, tmp_path: Path) -> None:
    from tests.benchmarks.kafka import CONNECTOR, Kafka, jars_of

    with Kafka(keeps=True) as kafka:
        code = code_of("", cluster, topic) + code_of("Kafka", cluster, topic)
        code = code.replace("127.0.0.1:9092", kafka.address).replace("/tmp/", f"{tmp_path}/")
        (tmp_path / "recipe.py").write_text(code)
        jars = ",".join(map(str, jars_of(*CONNECTOR)))
        command = [sys.executable, "-m", "tests.programs.copy_kafka", jars, str(tmp_path / "recipe.py"), topic]
        subprocess.run([*command, kafka.address], check=True, cwd=ROOT, timeout=PATIENCE)
