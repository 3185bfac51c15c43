"""Whether the interpreter of a local session's workers finds this package: what a new user meets first.

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
_MISSING: Final = 3
# Looked up, not imported: that takes as long as the interpreter's start.
_ASK: Final = f"import importlib.util, sys; sys.exit({_MISSING} * (importlib.util.find_spec('rocketmq_spark') is None))"
_TIMEOUT: Final = 10.0


def lacking_interpreter(context: SparkContext) -> str | None:
    """Return the path of the interpreter of a context's workers if it does not find this package, else None."""
    if not _LOCAL.fullmatch(context.master or "") or context._python_includes or "PYTHONPATH" in context.environment:
        return None
    interpreter = shutil.which(context.pythonExec)
    # By their paths: the links of two virtual environments may lead to one program.
    if interpreter is None or os.path.abspath(interpreter) == os.path.abspath(sys.executable):
        return None
    try:
        done = subprocess.run(
            [interpreter, "-c", _ASK], stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return interpreter if done.returncode == _MISSING else None
