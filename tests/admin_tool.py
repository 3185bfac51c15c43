"""RocketMQ's own command line, run against the server's jars."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from rocketmq_spark.cluster.jars import server_jars
from rocketmq_spark.cluster.java import find_java
from tests.conftest import SERIAL_GC
from tests.waiting import PATIENCE


def mqadmin(folder: Path, *arguments: str) -> str:
    """Run ``mqadmin``, and return what it prints; what it writes goes below a folder."""
    classpath = os.pathsep.join(map(str, server_jars(find_java)))
    folders = [f"-Duser.home={folder}", f"-Djava.io.tmpdir={folder}"]
    command = [str(find_java()), SERIAL_GC, *folders, "-cp", classpath]
    command += ["org.apache.rocketmq.tools.command.MQAdminStartup", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE, cwd=folder)
    return done.stdout
