"""An archive of the classes that Spark loads, from which the JVMs of tests start (class data sharing of Java).

A JVM ignores the archive if it does not exist, or is of another Java or another PySpark.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.support.processes import PATIENCE, PROGRAMS, SPARK_HOME

# In the environment, whose jars it fits.
_ARCHIVE: Final = Path(sys.prefix, "spark-classes.jsa")
# A new JVM of Spark uses them. Without `-Xlog` it prints a warning if the archive does not fit.
OPTIONS: Final = f"-XX:+UseSerialGC -XX:SharedArchiveFile={_ARCHIVE} -Xlog:cds=off -Xlog:cds+dynamic=off"


def make() -> None:
    """Make the archive, unless it exists. One process does this, and the others wait for it."""
    with _ARCHIVE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _ARCHIVE.exists():
            return
        draft = _ARCHIVE.with_suffix(".draft")
        options = f"-XX:+UseSerialGC -XX:ArchiveClassesAtExit={draft}"
        subprocess.run(
            [str(SPARK_HOME / "bin" / "spark-submit"), str(PROGRAMS / "small_session.py")],
            env={**os.environ, "SPARK_SUBMIT_OPTS": options, "SPARK_HOME": str(SPARK_HOME)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
        )
        if draft.exists():
            draft.replace(_ARCHIVE)
