"""The official Java client for proxies, a jar that only tests need.

It has all it needs inside, under names of its own: no other jar is fetched, and none is in its way.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from rocketmq_spark.cluster.config import render
from rocketmq_spark.cluster.jars import find_ivy
from rocketmq_spark.cluster.java import find_java
from rocketmq_spark.errors import ClusterError
from tests.jar_lists import listed_jars
from tests.waiting import PATIENCE

RELEASE = "5.2.0"
PLACE = f"rocketmq-client-java-{RELEASE}"


def grpc_client_jar() -> Path:
    """Return the jar, fetching it first if this user has never done so (27 MB).

    Raises
    ------
    ClusterError
        It can't be fetched, or it is not the listed one; the text has Ivy's last output.
    """
    (jar,) = listed_jars(PLACE, fetch_client)
    return jar


def fetch_client(work: Path) -> None:
    """Fetch the jar into ``work/jars``."""
    settings = os.environ.get("ROCKETMQ_SPARK_IVY_SETTINGS") or str(work / "ivysettings.xml")
    (work / "ivysettings.xml").write_text(render("ivysettings.xml"), encoding="utf-8")
    command = [str(find_java()), f"-Divy.default.ivy.user.dir={work / 'home'}", "-jar", str(find_ivy())]
    command += ["-settings", settings, "-cache", str(work / "ivy"), "-confs", "default"]
    command += ["-dependency", "org.apache.rocketmq", "rocketmq-client-java", RELEASE]
    done = subprocess.run(
        [*command, "-retrieve", f"{work}/jars/[artifact]-[revision].[ext]"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if done.returncode:
        raise ClusterError(f"fetching {PLACE}.jar: {done.stdout[-2000:]}")
