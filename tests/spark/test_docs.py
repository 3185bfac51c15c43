"""The code blocks of the documentation run, or raise the error that the page shows."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from rocketmq_spark import Message, Producer
from rocketmq_spark.spark.report import Metrics
from rocketmq_spark.testing import FakeCluster
from tests.support.cluster import SharedCluster
from tests.support.markdown import ROOT, Block, blocks
from tests.support.processes import PATIENCE

pytestmark = [pytest.mark.spark, pytest.mark.integration]

QUICKSTART = blocks(ROOT / "docs" / "quickstart.md")
# A mistake is a block of Python, followed by a block with its error.
MISTAKES = [
    pytest.param(code.text, error.text, id=f"line {code.line}")
    for code, error in pairwise(blocks(ROOT / "docs" / "troubleshooting.md"))
    if (code.language, error.language) == ("python", "text")
]

Here = Callable[[str], str]


@pytest.fixture
def here(cluster: SharedCluster, topic: str, tmp_path: Path) -> Here:
    """Replace the addresses, topic and folder of a text by those of the test."""

    def put(text: str) -> str:
        text = text.replace("127.0.0.1:9876", cluster.name_server).replace("/tmp/", f"{tmp_path}/")
        text = text.replace("rocketmq_spark.LocalCluster()", "contextlib.nullcontext(cluster)")
        return re.sub(r'(?<=")orders(?=[-"])|(?<=topic )orders\b', topic, text)

    return put


@pytest.fixture
def names(
    spark: SparkSession, metrics: Metrics, cluster: SharedCluster, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Names that the code uses. `getOrCreate` returns the session of the tests."""
    # The code of the pages sets this variable; restore it after the test.
    monkeypatch.setenv("PYSPARK_PYTHON", os.environ["PYSPARK_PYTHON"])
    rows = spark.range(10)
    return {
        "spark": spark,
        "cluster": cluster,
        "contextlib": contextlib,
        "df": rows.selectExpr("'text' AS body"),
        "orders": rows,
    }


def run(code: list[Block], here: Here, names: dict[str, Any]) -> None:
    assert code
    for block in code:
        exec(compile(here(block.text), f"line {block.line}", "exec"), names)


def python_of(page: list[Block], section: str) -> list[Block]:
    return [block for block in page if block.language == "python" and block.section == section]


def test_quickstart_runs_from_top_to_bottom(here: Here, names: dict[str, Any]) -> None:
    run(python_of(QUICKSTART, "On this machine"), here, names)
    copied = names["spark"].read.format("rocketmq").option("nameServer", names["cluster"].name_server)
    assert copied.load(here('"orders-copy"').strip('"')).count() == 10_000
    assert {row["customer"] for row in names["read_back"].collect()} == {f"customer {number}" for number in range(100)}


def test_readme_quick_start_runs(here: Here, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    # The second block is a stream with omitted addresses.
    run(python_of(blocks(ROOT / "README.md"), "Quick start")[:1], here, names)
    assert sum(facts["rows"] for facts in names["metrics"].to_dict().values()) == 100_000
    assert "p50 ms" in capsys.readouterr().out


def test_producer_page_code_runs(here: Here, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    page = [block for block in blocks(ROOT / "docs" / "producer.md") if block.language == "python"]
    run(page, here, names)
    assert "COMMIT_MESSAGE" in capsys.readouterr().out
    assert sum(facts["rows"] for facts in names["written"].to_dict().values()) == 2


def test_first_stream_of_the_delivery_page_copies_messages(
    spark: SparkSession, metrics: Metrics, tmp_path: Path
) -> None:
    block = next(block for block in blocks(ROOT / "docs" / "delivery.md") if block.language == "python")
    sent = Message.of("events", b"one", tags="new", keys="o-1", properties={"source": "web"})
    with FakeCluster(topics={"events": 1, "events-copy": 1}) as fake:
        with Producer("events-service", name_server=fake.name_server) as producer:
            producer.send(sent)
        code = block.text.replace("127.0.0.1:9876", fake.name_server).replace("/tmp/", f"{tmp_path}/")
        names: dict[str, Any] = {"spark": spark}
        exec(compile(code, f"line {block.line}", "exec"), names)
        try:
            names["query"].processAllAvailable()
        finally:
            names["query"].stop()
        (copy,) = fake.messages("events-copy")
    assert (copy.body, copy.tags, copy.keys, copy.properties["source"]) == (b"one", "new", "o-1", "web")


def test_testing_page_has_tests_that_pass(tmp_path: Path) -> None:
    page = blocks(ROOT / "docs" / "testing.md")
    (block,) = [block for block in page if block.language == "python" and "import pytest" in block.text]
    (tmp_path / "test_orders.py").write_text(block.text, "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path, check=False)
    assert "3 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("code", "error"), MISTAKES)
def test_documented_mistake_raises_the_documented_error(
    code: str, error: str, here: Here, names: dict[str, Any]
) -> None:
    expected = " ".join(here(error).split())
    with pytest.raises(Exception, match=r".*") as raised:
        exec(compile(here(code), "mistake", "exec"), names)
    text = f"{type(raised.value).__name__}: {raised.value}"
    assert re.search(re.escape(expected).replace(r"\.\.\.", ".*"), " ".join(text.split())), text


def test_documents_contain_mistakes_to_test() -> None:
    assert len(MISTAKES) > 6
