"""RocketMQ's own command line, run against the server's jars."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from rocketmq_spark.cluster.jars import server_jars
from rocketmq_spark.cluster.java import find_java
from tests.conftest import SERIAL_GC


def mqadmin(folder: Path, *arguments: str) -> str:
    """Run ``mqadmin``, and return what it prints; its log files go below a folder."""
    classpath = os.pathsep.join(map(str, server_jars(find_java)))
    command = [str(find_java()), SERIAL_GC, f"-Duser.home={folder}", "-cp", classpath]
    command += ["org.apache.rocketmq.tools.command.MQAdminStartup", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, cwd=folder)
    return done.stdout
