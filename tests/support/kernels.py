"""Runs the tests of a module with each kernel: ``pytestmark = pytest.mark.usefixtures("kernel")``.

`running` returns the kernel of the test. Helpers pass it on to what is tested.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark.arrow import decode
from rocketmq_spark.arrow.kernel import NUMPY, VARIABLE, Kernel, choose, compiled, default_kernel

_running: list[Kernel] = []


@functools.cache
def can_build() -> bool:
    """Return whether an install builds the compiled kernel here: with a C compiler and Python's headers."""
    if sys.byteorder != "little":
        return False
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    options = ["-I", sysconfig.get_path("include"), "-include", "Python.h", "-fsyntax-only", "-x", "c", os.devnull]
    try:
        return subprocess.run([*compiler, *options], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def check_built() -> str:
    """Return which kernel is installed, and why; exit if this machine can build the compiled one and it is missing."""
    built, expected = choose({}), "compiled" if can_build() else "numpy"
    if built.kernel.name != expected:
        raise SystemExit(f"kernel {built.kernel.name}, not {expected}: {built.reason}. Run make clean setup")
    reason = (
        "a C compiler and Python's headers are here" if can_build() else "C compiler or Python's headers are missing"
    )
    return f"kernel {expected}, as expected: {reason}"


def compiled_or_skip() -> Kernel:
    """Return the compiled kernel. Without it the test is skipped; in CI it fails if a C compiler is here."""
    try:
        return compiled()
    except ImportError as exc:
        if os.environ.get("CI") and can_build():
            raise
        pytest.skip(f"{exc}: install a C compiler, and run make setup")


@pytest.fixture(scope="module", params=["compiled", "numpy"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Select one kernel after the other."""
    _running.append(compiled_or_skip() if request.param == "compiled" else NUMPY)
    yield _running[-1]
    _running.pop()


def running() -> Kernel:
    """Return the kernel of the test; in a program that a test starts, that of its environment."""
    return _running[-1] if _running else default_kernel()


def environment() -> dict[str, str]:
    """Return the environment of a program that uses the kernel of the test."""
    return {**os.environ, VARIABLE: "0" if running() is NUMPY else "1"}


def batches_of(*args: Any, **named: Any) -> Iterator[pa.RecordBatch]:
    """Return what `rocketmq_spark.arrow.decode.batches_of` does with the kernel of the test."""
    return decode.batches_of(*args, **{**named, "kernel": running()})
