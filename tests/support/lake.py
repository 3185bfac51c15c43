"""PySpark with Delta and Iceberg, for the recipes that write to a lake.

No release of both exists for the PySpark of the tests, so these recipes run with an older one, in a process of their
own. It has the packages of this environment, except PySpark.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rocketmq_spark.cluster.jars import cache_folder
from rocketmq_spark.errors import ClusterError
from tests.benchmarks.kafka import jars_of
from tests.support.markdown import ROOT
from tests.support.processes import PATIENCE, PYSPARK

RELEASE: Final = "4.1.4"
_PY4J: Final = "0.10.9.9"
DELTA: Final = ("io.delta", "delta-spark_4.1_2.13", "4.4.0")
DELTA_STORAGE: Final = ("io.delta", "delta-storage", "4.4.0")
ICEBERG: Final = ("org.apache.iceberg", "iceberg-spark-runtime-4.1_2.13", "1.12.0")
MODULES: Final = (DELTA, DELTA_STORAGE, ICEBERG)


def run_program(name: str, arguments: Mapping[str, Any]) -> str:
    """Run a program of ``tests/programs`` with this PySpark and these jars, and return its output.

    Its only argument is `arguments` as JSON, with the paths of the jars as ``jars``.
    """
    jars = [str(jar) for module in MODULES for jar in jars_of(*module, alone=True)]
    kept = {name: value for name, value in os.environ.items() if name not in ("SPARK_HOME", "SPARK_SUBMIT_OPTS")}
    environ = {**kept, "PYTHONPATH": os.pathsep.join(filter(None, (_pyspark(), str(ROOT))))}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.programs.{name}", json.dumps({**arguments, "jars": ",".join(jars)})],
        cwd=ROOT,
        env={**environ, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def _pyspark() -> str:
    """Return the folder with PySpark, which is installed once per user; "" if it is in this environment."""
    if tuple(map(int, RELEASE.split(".")[:2])) == PYSPARK:
        return ""
    folder = cache_folder() / f"pyspark-{RELEASE}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / ".pyspark.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            work = tempfile.mkdtemp(prefix=".pyspark-", dir=folder.parent)
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", work]
            command += [f"pyspark=={RELEASE}", f"py4j=={_PY4J}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
            if done.returncode:
                shutil.rmtree(work)
                raise ClusterError(f"installing PySpark {RELEASE} failed: {done.stderr[-500:]}")
            Path(work).rename(folder)
    return str(folder)
