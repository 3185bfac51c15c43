"""What is wrong with the interpreter of a local session's workers: what a new user meets first.

Rule 1: only where it is sure: the workers run on this machine, and nothing brings the package along with the job.
Rule 2: it never fails, and what it can't find out it does not say: Spark will.

`rocketmq_spark.doctor` looks closer, and needs no session.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark import SparkContext

_LOCAL: Final = re.compile(r"local(\[.*\])?")
_OTHER, _MISSING = 3, 4
# Looked up, not imported: that takes as long as the interpreter's start. Any Python since 2 can read it.
_ASK: Final = (
    f"import sys; sys.version_info[:2] == {sys.version_info[:2]} or sys.exit({_OTHER}); "
    f"import importlib.util; sys.exit({_MISSING} * (importlib.util.find_spec('rocketmq_spark') is None))"
)
_TIMEOUT: Final = 10.0


def fault_of_workers(context: SparkContext) -> str | None:
    """Return what is wrong with the interpreter of a context's workers, None where nothing is, or nobody can tell."""
    if not _LOCAL.fullmatch(context.master or "") or context._python_includes or "PYTHONPATH" in context.environment:
        return None
    interpreter = shutil.which(context.pythonExec)
    if interpreter is None:
        return f"{context.pythonExec}, which Spark's workers are to run, is not there"
    # By their paths: the links of two virtual environments may lead to one program.
    if os.path.abspath(interpreter) == os.path.abspath(sys.executable):
        return None
    try:
        done = subprocess.run(
            [interpreter, "-c", _ASK], stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    faults = {
        _OTHER: f"is not Python {sys.version_info[0]}.{sys.version_info[1]}, as the driver is",
        _MISSING: "does not find rocketmq_spark",
    }
    fault = faults.get(done.returncode)
    return fault and f"{interpreter}, which Spark's workers run, {fault}"
