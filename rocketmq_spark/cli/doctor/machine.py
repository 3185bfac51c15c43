"""The doctor's checks of this machine: Python, its packages, Java, and the Python interpreter of Spark's workers.

They use ``JAVA_HOME``, ``PATH`` and ``PYSPARK_PYTHON`` as Spark does, but read no Spark configuration such as
``spark.pyspark.python``. Of this interpreter's packages only the installed versions are looked up. The workers'
interpreter imports rocketmq_spark, pyarrow and numpy.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from rocketmq_spark.cluster.process import find_java, java_version
from rocketmq_spark.errors import ClusterError

OK: Final = "ok"
WARNING: Final = "warning"
FAILED: Final = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """A finding and its advice in one line each; `state` is ``ok``, ``warning`` or ``failed``, `fix` may be ""."""

    check: str
    state: str
    finding: str
    fix: str = ""


OLDEST_PYTHON: Final = (3, 10)
# The oldest release, and the first unsupported one. A test compares them with setup.cfg.
PACKAGES: Final = {"pyspark": ("3.5.2", "4.4"), "pyarrow": ("18", ""), "numpy": ("1.26", "")}
GRPC_PACKAGES: Final = {"grpcio": ("1.76.0", ""), "protobuf": ("6.31.1", "8")}

_NEEDED_BY_WORKERS: Final = ("rocketmq_spark", "pyarrow", "numpy")
# The current folder, which ``-c`` adds to the path, is removed: a worker starts elsewhere.
_ASK_WORKER: Final = """
import importlib, json, sys
sys.path[:] = [folder for folder in sys.path if folder]
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as exc:
        failed[name] = f"{type(exc).__name__}: {exc}"
print(json.dumps({"python": sys.version_info[:3], "failed": failed}))
"""
_WORKER_TIMEOUT: Final = 60.0


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_python() -> Check:
    """Check the version of this interpreter."""
    finding = f"{_dotted(sys.version_info[:3])}, {sys.executable}"
    if sys.version_info[:2] >= OLDEST_PYTHON:
        return Check("Python", OK, finding)
    return Check("Python", FAILED, finding, f"use Python {_dotted(OLDEST_PYTHON)} or newer")


def check_packages(
    packages: Mapping[str, tuple[str, str]] = PACKAGES,
    version_of: Callable[[str], str | None] = installed_version,
    extra: str = "",
) -> list[Check]:
    """Check the required packages; `extra` of rocketmq-spark installs them."""
    checks = []
    for name, (oldest, before) in packages.items():
        required = f"{name}>={oldest}" + (f",<{before}" if before else "")
        fix = f"pip install '{f'rocketmq-spark[{extra}]' if extra else required}'"
        version = version_of(name)
        if version is None:
            checks.append(Check(name, FAILED, "not installed here", fix))
        elif _numbers(version) < _numbers(oldest) or (before and _numbers(version) >= _numbers(before)):
            checks.append(Check(name, FAILED, f"{version}, but {required} is required", fix))
        else:
            checks.append(Check(name, OK, version))
    return checks


def check_kernel(environ: Mapping[str, str] = os.environ) -> list[Check]:
    """Check whether reads and row ids use the compiled kernel; without numpy and pyarrow nothing is reported."""
    try:
        from rocketmq_spark.arrow.kernel import choose
    except ImportError:
        return []
    choice = choose(environ)
    finding = f"{choice.kernel.name}: {choice.reason}"
    return [Check("kernel", WARNING if choice.fix else OK, finding, choice.fix)]


def check_java(environ: Mapping[str, str] = os.environ) -> Check:
    """Check the Java of Spark and of a local cluster."""
    home = environ.get("JAVA_HOME", "")
    if home and not os.access(Path(home, "bin", "java"), os.X_OK):
        finding = f"JAVA_HOME is {home}, which has no bin/java: Spark would not start"
        return Check("Java", FAILED, finding, "set JAVA_HOME to the folder of Java 17 or newer, or unset it")
    try:
        java = find_java(environ)
        return Check("Java", OK, f"{java_version(java)}, {java}")
    except ClusterError as exc:
        finding, _, fix = " ".join(str(exc).split()).rpartition("; ")
        return Check(
            "Java", FAILED, finding.replace("the local cluster needs", "Spark and the local cluster need"), fix
        )


def check_workers(environ: Mapping[str, str] = os.environ) -> Check:
    """Check that the interpreter of Spark's workers runs, and imports the packages that workers need."""
    chosen = environ.get("PYSPARK_PYTHON", "")
    name, origin = chosen or "python3", "PYSPARK_PYTHON" if chosen else "python3 on PATH, as PYSPARK_PYTHON is not set"
    use_this = f"export PYSPARK_PYTHON={sys.executable} on the driver, and the same Python on every node"

    def failed(finding: str, fix: str = use_this) -> Check:
        return Check("Spark's workers", FAILED, finding, fix)

    interpreter = shutil.which(name, path=environ.get("PATH", os.defpath))
    if interpreter is None:
        return failed(f"{name} is missing ({origin})")
    shown = f"{interpreter} ({origin})"
    try:
        done = subprocess.run(
            [interpreter, "-c", _ASK_WORKER, *_NEEDED_BY_WORKERS],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_WORKER_TIMEOUT,
            check=False,
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        python, missing = tuple(answer["python"]), answer["failed"]
    except (OSError, subprocess.TimeoutExpired) as exc:
        return failed(f"{shown} does not run: {exc}")
    except (ValueError, IndexError, KeyError, TypeError):
        last = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")
        return failed(f"{shown} is not a working Python: {last}")
    if python[:2] != sys.version_info[:2]:
        versions = f"Python {_dotted(python)}, this one is {_dotted(sys.version_info[:2])}"
        return failed(f"{shown} is {versions}: Spark requires the same version in driver and workers")
    if missing:
        reasons = "; ".join(f"{module} ({why})" for module, why in missing.items())
        fix = f"{use_this}; or install the package there: {interpreter} -m pip install . (in a clone)"
        return failed(f"{shown} can't import {reasons}", fix)
    return Check("Spark's workers", OK, f"Python {_dotted(python)}, {shown}")


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall("[0-9]+", version)[:3]]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
