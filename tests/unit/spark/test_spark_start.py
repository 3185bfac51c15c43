"""Spark's start in tests: a JVM that crashes at its start is started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.java_gateway import launch_gateway

from tests.support.processes import with_jvm


class Builder:
    """A session builder whose first JVM crashes."""

    def __init__(self) -> None:
        self.tries = 0

    def getOrCreate(self) -> Any:  # noqa: N802 - Spark's name
        self.tries += 1
        return launch_gateway() if self.tries == 1 else "session"


def test_a_jvm_that_crashes_as_it_starts_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\nexit 1\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr("tests.support.processes.time.sleep", lambda _: None)
    builder: Any = Builder()
    session: Any = with_jvm(builder)
    assert session == "session"
    assert builder.tries == 2
