"""Which Java runs the local cluster's servers.

Rule 1: ``JAVA_HOME`` decides if it has a ``bin/java``; else the first ``java`` on ``PATH``. No search elsewhere.
Rule 2: what is too old is an error, never a reason to look further: the user said which Java they want.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rocketmq_spark.errors import ClusterError

MINIMUM: Final = 17
"""What Spark 4 needs too."""

_WHAT_TO_DO: Final = f"install Java {MINIMUM} or newer and set JAVA_HOME to its folder"

# 'openjdk version "17.0.15" 2025-04-15', 'java version "1.8.0_392"', 'openjdk version "26-ea"'.
_VERSION: Final = re.compile(r'^\w+ version "(\d+)(?:\.(\d+))?', re.MULTILINE)


def parse_java_version(text: str) -> int | None:
    """Return the feature release (8, 17, 21 ...) in the output of ``java -version``, or None if there is none."""
    match = _VERSION.search(text)
    if match is None:
        return None
    major, minor = int(match[1]), int(match[2] or 0)
    return minor if major == 1 else major


def find_java(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the Java to run, after asking it for its version.

    Parameters
    ----------
    environ : mapping of str to str, default os.environ
        ``JAVA_HOME`` and ``PATH`` are read.

    Raises
    ------
    ClusterError
        There is none, it doesn't run, or it is older than 17; one line that says what to do.
    """
    java = _candidate(environ)
    version = java_version(java)
    if version < MINIMUM:
        raise ClusterError(f"{java} is Java {version}, the RocketMQ server needs {MINIMUM} or newer; {_WHAT_TO_DO}")
    return java


def java_version(java: Path) -> int:
    """Ask a Java for its feature release.

    Raises
    ------
    ClusterError
        It doesn't run.
    """
    try:
        answer = subprocess.run(
            [java, "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ClusterError(f"asking {java} for its version: {exc}; {_WHAT_TO_DO}") from exc
    text = answer.stdout.decode(errors="replace")
    version = parse_java_version(text)
    # macOS has a /usr/bin/java that only says where to get one.
    if answer.returncode != 0 or version is None:
        first = next(iter(text.strip().splitlines()), "no output")
        raise ClusterError(f"{java} -version failed with exit code {answer.returncode} ({first}); {_WHAT_TO_DO}")
    return version


def _candidate(environ: Mapping[str, str]) -> Path:
    home = environ.get("JAVA_HOME", "")
    if home:
        java = Path(home, "bin", "java")
        if os.access(java, os.X_OK):
            return java
    found = shutil.which("java", path=environ.get("PATH", os.defpath))
    if found is None:
        where = f"neither in JAVA_HOME={home} nor on PATH" if home else "JAVA_HOME is not set and PATH has none"
        raise ClusterError(f"the local cluster needs Java and found none ({where}); {_WHAT_TO_DO}")
    return Path(found)
