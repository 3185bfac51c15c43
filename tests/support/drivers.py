"""Drivers of Spark jobs in own processes, which tests kill and pause."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import psutil

from rocketmq_spark.cluster.process import Watchdog
from tests.support.processes import PATIENCE, SPARK_HOME, wait_for

CONNECT_SERVER: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"


class Driver:
    """A process that runs the program of a job, with its JVM and its Python workers.

    With Spark Connect, the JVM and the workers are those of `server`.
    """

    def __init__(
        self,
        command: list[str],
        environ: Mapping[str, str],
        output: Path,
        watchdog: Watchdog,
        server: Driver | None = None,
    ) -> None:
        self.output = output
        self.server = server
        self._is_killed = False
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._watchdog = watchdog
        # The JVM and its workers end with their parent, unless they are paused.
        watchdog.add(self._process.pid)
        self._watched = {self._process.pid}
        self._root = psutil.Process(self._process.pid)
        self._seen: set[psutil.Process] = set()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the driver that run, itself first."""
        if not self.is_alive:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            found = [self._root, *self._root.children(recursive=True)]
            self._seen.update(found)
            return found
        return []

    def jvms(self) -> list[psutil.Process]:
        if self.server is not None:
            return self.server.jvms()
        return [process for process in self.processes() if _name(process) == "java"]

    def workers(self) -> list[psutil.Process]:
        """Return the Python workers, their daemons, and the processes of sources and sinks."""
        if self.server is not None:
            return self.server.workers()
        return [process for process in self.processes()[1:] if _name(process).startswith("python")]

    def wait(self, progress: Callable[[], object] = lambda: None) -> int:
        """Wait for the end of the program, and return its exit code; fail if `progress` remains the same for long."""
        seen, deadline = progress(), time.monotonic() + PATIENCE
        while self.is_alive:
            if (now := progress()) != seen:
                seen, deadline = now, time.monotonic() + PATIENCE
            assert time.monotonic() < deadline, f"no progress after {seen} within {PATIENCE:g} s:\n{self.tail()}"
            time.sleep(0.1)
        return self._process.wait()

    def kill(self, *, workers: bool = True) -> None:
        """Kill the driver with SIGKILL; with `workers` false, its Python workers end only when they notice that."""
        processes = self.processes()
        if not workers:
            processes = [process for process in processes if _name(process) == "java"] + processes[:1]
        for process in processes:
            send(process, signal.SIGKILL)
        self._is_killed = True
        self._process.wait()

    def kill_program(self) -> None:
        """Kill the program with SIGKILL; its JVM and its workers end only when they notice that."""
        self.processes()
        self._is_killed = True
        send(self._root, signal.SIGKILL)
        self._process.wait()

    def kill_jvm(self) -> None:
        """Kill the JVM with SIGKILL. Without its server, a program ends too late, so it is killed as well."""
        self._is_killed = True
        if self.server is not None:
            self.server.kill_program()
            self.kill()
        for jvm in self.jvms():
            send(jvm, signal.SIGKILL)

    def check(self) -> None:
        """Fail if the program has failed without a kill."""
        assert self._process.poll() in (None, 0) or self._is_killed, f"the program cannot go on:\n{self.tail()}"

    def pause(self) -> list[psutil.Process]:
        """Pause all processes of the driver with SIGSTOP, and return them."""
        paused = pause(self.processes)
        for pid in {process.pid for process in paused} - self._watched:
            self._watchdog.add(pid)
            self._watched.add(pid)
        return paused

    def end(self) -> None:
        """Kill everything that still runs."""
        self.processes()
        for process in self._seen:
            send(process, signal.SIGKILL)
        self._process.wait()
        for pid in self._watched:
            self._watchdog.forget(pid)
        self._watched.clear()

    def tail(self) -> str:
        """Return the end of the output, also of the server."""
        tail = self.output.read_text(errors="replace")[-8000:]
        return tail if self.server is None else f"{tail}\n{self.server.tail()}"


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(process.name())
    return ""


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal, unless the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        # This compares the time of its start, so that no other process gets the signal.
        process.send_signal(number)


def pause(find: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    """Pause processes and their new children with SIGSTOP, and return them."""
    paused: list[psutil.Process] = []
    while new := [process for process in find() if process not in paused]:
        for process in new:
            send(process, signal.SIGSTOP)
        paused += new
    return paused


def resume(processes: list[psutil.Process]) -> None:
    """Continue paused processes."""
    for process in processes:
        send(process, signal.SIGCONT)


def connect_server(conf: Mapping[str, str], output: Path, watchdog: Watchdog) -> tuple[Driver, str]:
    """Start a server of Spark Connect, and return it and its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {**conf, "spark.connect.grpc.binding.port": str(port)}
    command = [str(SPARK_HOME / "bin" / "spark-submit"), "--class", CONNECT_SERVER]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    server = Driver(command, {**os.environ, "SPARK_HOME": str(SPARK_HOME)}, output, watchdog)

    def answers() -> bool:
        server.check()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    wait_for(answers)
    return server, f"sc://127.0.0.1:{port}"
