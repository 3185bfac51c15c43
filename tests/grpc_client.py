"""The official Java client for proxies, a jar that nothing but tests needs: fetched as the server's jars are.

It has all it needs inside, under names of its own: no other jar is fetched, and none is in its way.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from rocketmq_spark.cluster.config import render
from rocketmq_spark.cluster.jars import cache_folder, find_ivy
from rocketmq_spark.errors import ClusterError
from tests.waiting import PATIENCE

RELEASE = "5.2.0"


def grpc_client_jar(java: Path) -> Path:
    """Return the jar, fetching it first if this user has never done so (27 MB).

    Raises
    ------
    ClusterError
        It can't be had; the text is what Ivy said last.
    """
    cache = cache_folder()
    jar = cache / f"rocketmq-client-java-{RELEASE}.jar"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".client.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if jar.exists():
            return jar
        for stale in cache.glob(".client-*"):  # left by a process that was killed: we hold the lock
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".client-", dir=cache) as work:
            _fetch(java, Path(work), jar)
    return jar


def _fetch(java: Path, work: Path, jar: Path) -> None:
    settings = os.environ.get("ROCKETMQ_SPARK_IVY_SETTINGS") or str(work / "ivysettings.xml")
    (work / "ivysettings.xml").write_text(render("ivysettings.xml"), encoding="utf-8")
    command = [str(java), f"-Divy.default.ivy.user.dir={work / 'home'}", "-jar", str(find_ivy())]
    command += ["-settings", settings, "-cache", str(work / "ivy"), "-confs", "default"]
    command += ["-dependency", "org.apache.rocketmq", "rocketmq-client-java", RELEASE]
    done = subprocess.run(
        [*command, "-retrieve", f"{work}/[artifact]-[revision].[ext]"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if done.returncode or not (work / jar.name).exists():
        raise ClusterError(f"fetching {jar.name}: {done.stdout[-2000:]}")
    # Whole, or not there at all.
    (work / jar.name).rename(jar)
