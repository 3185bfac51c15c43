"""Shell scripts in place of Java, so that no name of the package needs patching."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def make_java() -> Callable[[Path, str], Path]:
    """Return a function that writes an executable ``java`` with the given shell lines into a folder."""

    def make(folder: Path, script: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        java = folder / "java"
        java.write_text(f"#!/bin/sh\n{script}", encoding="utf-8")
        java.chmod(0o755)
        return java

    return make
