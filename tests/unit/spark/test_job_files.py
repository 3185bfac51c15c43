"""Modules that ship with a job: Spark gives the planner of streaming reads a wrong folder for them."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path

import pytest

from rocketmq_spark.spark.datasource import find_job_files


def test_modules_and_archives_are_found_in_the_folder_above(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "brought_as_a_file.py").touch()
    with zipfile.ZipFile(tmp_path / "brought.zip", "w") as archive:
        archive.writestr("brought_in_an_archive.py", "")
    entries = [str(tmp_path / "streaming_job" / name) for name in ("", "brought.zip", "absent.zip")]
    monkeypatch.setattr(sys, "path", [*entries, *sys.path])
    find_job_files()
    for name in ("brought_as_a_file", "brought_in_an_archive"):
        importlib.import_module(name)
    assert entries[2] in sys.path


def test_existing_folder_on_the_path_is_unchanged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "streaming_job").mkdir()
    before = [str(tmp_path / "streaming_job"), *sys.path]
    monkeypatch.setattr(sys, "path", before.copy())
    find_job_files()
    assert sys.path == before
