"""The doctor's checks of this machine, with the problems of new users."""

from __future__ import annotations

import configparser
import os
import sys
from pathlib import Path

import pytest

from rocketmq_spark.cli.doctor.machine import (
    FAILED,
    GRPC_PACKAGES,
    OK,
    OLDEST_PYTHON,
    PACKAGES,
    check_java,
    check_kernel,
    check_packages,
    check_python,
    check_workers,
)

ROOT = Path(__file__).parents[3]


def program(path: Path, *lines: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


def test_checked_versions_equal_the_required_ones_of_setup_cfg() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    assert config["options"]["python_requires"] == ">=" + ".".join(map(str, OLDEST_PYTHON))
    required = config["options"]["install_requires"].split() + config["options.extras_require"]["grpc"].split()
    for name, (oldest, before) in {**PACKAGES, **GRPC_PACKAGES}.items():
        assert f"{name}>={oldest}" + (f",<{before}" if before else "") in required


def test_current_python_is_supported() -> None:
    assert check_python().state == OK


@pytest.mark.parametrize(
    ("version", "finding"),
    [
        ("4.0.0", "4.0.0"),
        ("4.3.1", "4.3.1"),
        (None, "not installed here"),
        ("3.5.1", "3.5.1, but pyspark>=3.5.2,<4.4 is required"),
        ("4.4.0", "4.4.0, but pyspark>=3.5.2,<4.4 is required"),
    ],
)
def test_installed_package_version_is_checked(version: str | None, finding: str) -> None:
    (check,) = check_packages({"pyspark": PACKAGES["pyspark"]}, lambda _: version)
    assert check.finding == finding
    assert check.state == (OK if version == finding else FAILED)
    assert check.fix == ("" if version == finding else "pip install 'pyspark>=3.5.2,<4.4'")


def test_missing_packages_of_an_extra_suggest_the_extra() -> None:
    checks = check_packages(GRPC_PACKAGES, lambda _: None, "grpc")
    assert {check.fix for check in checks} == {"pip install 'rocketmq-spark[grpc]'"}


def test_the_kernel_is_shown_with_the_reason_of_its_choice() -> None:
    (check,) = check_kernel({"ROCKETMQ_SPARK_KERNEL": "0"})
    assert (check.state, check.finding) == (OK, "numpy: ROCKETMQ_SPARK_KERNEL=0 selects it")
    (check,) = check_kernel({})
    assert (check.state == OK) == check.finding.startswith("compiled")
    assert (check.state == OK) == (not check.fix)


def test_java_is_shown_with_its_release_and_place(tmp_path: Path) -> None:
    java = program(tmp_path / "bin" / "java", "echo 'openjdk version \"21.0.1\" 2023-10-17'")
    assert check_java({"JAVA_HOME": str(tmp_path)}).finding == f"21, {java}"


@pytest.mark.parametrize(
    ("environ", "finding"),
    [
        ({"PATH": ""}, "need Java and found none (JAVA_HOME is not set and PATH has none)"),
        ({"JAVA_HOME": "/nowhere", "PATH": ""}, "JAVA_HOME is /nowhere, which has no bin/java"),
    ],
)
def test_missing_java_is_reported_with_advice(environ: dict[str, str], finding: str) -> None:
    check = check_java(environ)
    assert (check.state, finding in check.finding) == (FAILED, True)
    assert "Java 17" in check.fix


def test_too_old_java_is_reported(tmp_path: Path) -> None:
    program(tmp_path / "bin" / "java", "echo 'java version \"1.8.0_392\"'")
    check = check_java({"JAVA_HOME": str(tmp_path)})
    assert "is Java 8" in check.finding
    assert check.fix.startswith("install Java 17 or newer")


def test_workers_that_can_import_the_package_are_ok() -> None:
    environ = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    check = check_workers(environ)
    assert (check.state, check.fix) == (OK, "")
    assert check.finding.endswith(f"{sys.executable} (PYSPARK_PYTHON)")


def advice_on_worker(folder: Path, *lines: str) -> tuple[str, str]:
    """Return the finding and the fix for workers whose interpreter is this shell script."""
    check = check_workers({"PYSPARK_PYTHON": str(program(folder / "python", *lines)), "PATH": os.environ["PATH"]})
    assert check.state == FAILED
    return check.finding, check.fix


def test_interpreter_without_our_packages_is_reported_with_missing_ones(tmp_path: Path) -> None:
    this = ", ".join(map(str, sys.version_info[:3]))
    finding, fix = advice_on_worker(
        tmp_path, f"""echo '{{"python": [{this}], "failed": {{"pyarrow": "ModuleNotFoundError: No module"}}}}'"""
    )
    assert finding.endswith("can't import pyarrow (ModuleNotFoundError: No module)")
    assert fix.startswith(f"export PYSPARK_PYTHON={sys.executable}")


def test_interpreter_of_another_python_version_is_reported_with_both(tmp_path: Path) -> None:
    finding, _ = advice_on_worker(tmp_path, """echo '{"python": [3, 9, 1], "failed": {}}'""")
    assert f"is Python 3.9.1, this one is {sys.version_info[0]}.{sys.version_info[1]}" in finding


def test_program_that_is_no_python_is_reported_with_its_last_output_line(tmp_path: Path) -> None:
    finding, _ = advice_on_worker(tmp_path, "echo 'no such option' >&2", "exit 2")
    assert finding.endswith("is not a working Python: no such option")


def test_missing_interpreter_is_reported_with_the_searched_name(tmp_path: Path) -> None:
    check = check_workers({"PATH": str(tmp_path)})
    assert check.finding == "python3 is missing (python3 on PATH, as PYSPARK_PYTHON is not set)"
    assert check_workers({"PYSPARK_PYTHON": "/nowhere/python", "PATH": ""}).finding.startswith(
        "/nowhere/python is missing"
    )
