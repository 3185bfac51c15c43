"""Settings of processes that make the suite faster. Tests pass without each of them.

A setting that saves less than half a minute of the suite does not belong here.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Final

from tests.harness import class_archive

# PR_SET_TIMERSLACK of prctl(2): its number, and nanoseconds.
_TIMER_SLACK: Final = 29
_LATE: Final = 20_000_000
_WORKER: Final = Path(__file__).with_name("worker_python")


def pytest_configure() -> None:
    """Change the environment of this process, which the processes of tests inherit."""
    # Without this, JVMs use their optimizing compiler, too. JVMs of tests end before that pays. Four servers then take
    # 16 s of processor time to start (with this 10 s), and a Spark session with 40 jobs takes 28 s (with this 16 s).
    os.environ["JDK_JAVA_OPTIONS"] = "-XX:TieredStopAtLevel=1"
    # Without this, an idle broker uses 5 % instead of 2.5 % of a core, because its threads wake up hundreds of times a
    # second. Up to ten brokers run at a time. The kernel may now wake them 20 ms late. Only Linux has the setting.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_TIMER_SLACK, ctypes.c_ulong(_LATE))
    # Without this, a new JVM of Spark takes 13 s of processor time until its first write has ended (with this 5 s). The
    # suite starts about thirty.
    os.environ["SPARK_SUBMIT_OPTS"] = class_archive.OPTIONS
    # Without this, tests with Spark take 9 % more processor time: Spark's workers import PySpark from a zip without
    # bytecode, so each of them compiles it.
    os.environ["WORKER_PYTHON"] = sys.executable
    os.environ["PYSPARK_PYTHON"] = str(_WORKER)
