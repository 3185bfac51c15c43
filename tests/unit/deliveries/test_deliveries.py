"""The table of deliveries: the pages name each of them, and a process loads only the one that it uses."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from rocketmq_spark.deliveries import DELIVERIES
from rocketmq_spark.deliveries.base import delivery_of
from rocketmq_spark.options.sink import SinkOptions

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("page", ["writing.md", "delivery.md", "migration.md"])
@pytest.mark.parametrize("name", DELIVERIES)
def test_the_page_names_the_delivery(page: str, name: str) -> None:
    assert name in (DOCS / page).read_text("utf-8")


@pytest.mark.parametrize("name", DELIVERIES)
def test_a_result_has_only_values_that_a_row_of_spark_can_hold(name: str) -> None:
    delivery = delivery_of(SinkOptions.of(name_server=("a:1",), delivery=name))
    assert {field.type for field in fields(delivery.RESULT)} <= {"str", "int", "bool", "bytes"}


def test_a_task_of_the_default_delivery_imports_no_other_delivery() -> None:
    script = """
import pickle, sys
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.deliveries.base import delivery_of
options = parse_sink_options({"nameServer": "a:1", "topic": "t"}, {})
from rocketmq_spark.spark.writer import RocketMQBatchWriter
import rocketmq_spark.sink.task
writer = RocketMQBatchWriter(delivery_of(options).plan(options, lambda: None), None)
pickle.loads(pickle.dumps(writer))
print(*sorted(name for name in sys.modules if name.startswith("rocketmq_spark.deliveries")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    folder = "rocketmq_spark.deliveries"
    assert done.stdout.split() == [folder, f"{folder}.at_least_once", f"{folder}.base"]


def test_a_task_without_rows_and_the_end_of_a_plain_write_import_no_connections() -> None:
    script = """
import sys
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.deliveries.base import delivery_of
from rocketmq_spark.spark.writer import RocketMQBatchWriter
options = parse_sink_options({"nameServer": "a:1", "topic": "t"}, {})
writer = RocketMQBatchWriter(delivery_of(options).plan(options, lambda: None), None)
messages = [writer.write(iter(()))]
writer.commit(messages)
writer.abort(messages)
print(*sorted(name for name in sys.modules if name.startswith(("rocketmq_spark.sink", "rocketmq_spark.transport"))))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []
