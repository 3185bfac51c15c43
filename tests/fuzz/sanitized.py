"""Builds the kernel with AddressSanitizer and UndefinedBehaviorSanitizer, and compares decoders with it.

Run: make fuzz ANSWERS=1000000 (python -m tests.fuzz.sanitized ANSWERS [FIRST])

Python is not built with sanitizers, so their library is loaded first, and leaks are not reported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from rocketmq_spark.arrow.kernel import VARIABLE
from tests.tools.packages import ROOT

_FLAGS: Final = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"


def library() -> str | None:
    """Return the path of AddressSanitizer for gcc, None if it is not installed."""
    if not shutil.which("gcc"):
        return None
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    # gcc answers with the bare name for a file that it does not find.
    return found.strip() if os.sep in found else None


def build(folder: Path) -> None:
    """Build the package into `folder`; exit if gcc or its sanitizers are missing."""
    environ = {**os.environ, VARIABLE: "1", "CC": "gcc", "CFLAGS": _FLAGS, "LDFLAGS": _FLAGS}
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(folder / "base"), "--build-lib"]
    _run([*command, str(folder / "lib")], ROOT, environ, capture_output=True)


def run(folder: Path, answers: int, first: int, *, shown: bool = False) -> str:
    """Compare answers with the package in `folder`, and return what the comparison prints; exit if it fails."""
    environ = {
        **os.environ,
        "LD_PRELOAD": library() or "",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # The built package first, the tests from this tree.
        "PYTHONPATH": os.pathsep.join([str(folder / "lib"), str(ROOT)]),
        # The allocators of Python and Arrow would hide faults from the sanitizer.
        "PYTHONMALLOC": "malloc",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }
    command = [sys.executable, "-m", "tests.fuzz", str(answers), str(first)]
    return _run(command, folder / "lib", environ, capture_output=not shown)


def _run(command: list[str], folder: Path, environ: dict[str, str], *, capture_output: bool) -> str:
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=capture_output, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} has failed:\n{done.stdout}{done.stderr}")
    return done.stdout or ""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="rocketmq-spark-fuzz-") as name:
        build(Path(name))
        run(Path(name), int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, shown=True)
