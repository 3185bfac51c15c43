"""The programs of ``tests/benchmarks/java``: the official client, from the jars that `LocalCluster` runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from rocketmq_spark.cluster.jars import server_jars
from rocketmq_spark.cluster.process import find_java

SOURCES = Path(__file__).with_name("java")


class JavaClient:
    """Compiles the programs, and runs them. Their classes and files go to `folder`."""

    def __init__(self, folder: Path) -> None:
        self._java, self._folder = find_java(), folder
        self._class_path = os.pathsep.join(map(str, (folder, *server_jars(find_java))))
        compiler = self._java.resolve().with_name("javac")
        command = [str(compiler), "-proc:none", "-nowarn", "-cp", self._class_path, "-d", str(folder)]
        self._run([*command, *map(str, sorted(SOURCES.glob("*.java")))])

    def run(self, program: str, *arguments: object) -> str:
        """Run a program in a new JVM, and return the last line of its output."""
        return self._run(self.command(program, *arguments)).splitlines()[-1]

    def command(self, program: str, *arguments: object) -> list[str]:
        """Return the command that runs a program."""
        # The client's log goes below the user's home.
        command = [str(self._java), f"-Duser.home={self._folder}", "-Xmx1g", "-cp", self._class_path, program]
        return [*command, *map(str, arguments)]

    def _run(self, command: list[str]) -> str:
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout
