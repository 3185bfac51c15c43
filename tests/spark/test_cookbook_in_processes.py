"""The recipes of docs/cookbook.md that need jars of others. Each runs in another process with its own session."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rocketmq_spark.errors import ClusterError
from tests.benchmarks.kafka import CONNECTOR, KAFKA, Kafka, jars_of
from tests.support.cluster import SharedCluster, unavailable
from tests.support.lake import run_program
from tests.support.markdown import ROOT
from tests.support.processes import PATIENCE

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.long]


def test_lake_tables_have_each_message_once(
    cluster: SharedCluster, make_topic: Callable[..., str], topic: str, tmp_path: Path
) -> None:
    topics = {name: make_topic("NORMAL", f"{topic[-60:]}-{name}") for name in ("orders", "customer-changes")}
    try:
        run_program("lake", {"name_server": cluster.name_server, "folder": str(tmp_path), "topics": topics})
    except ClusterError as exc:
        unavailable(exc)


def test_rows_that_differ_from_kafka_are_named(
    cluster: SharedCluster, make_topic: Callable[..., str], topic: str, tmp_path: Path
) -> None:
    orders = make_topic("NORMAL", f"{topic[-60:]}-orders")
    try:
        jars = ",".join(map(str, jars_of(*CONNECTOR)))
        jars_of(*KAFKA)
    except ClusterError as exc:
        unavailable(exc)
    with Kafka(keeps=True) as kafka:
        arguments = {"jars": jars, "name_server": cluster.name_server, "kafka": kafka.address, "topic": orders}
        command = [
            sys.executable,
            "-m",
            "tests.programs.move_from_kafka",
            json.dumps({**arguments, "folder": str(tmp_path)}),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
