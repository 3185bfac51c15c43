"""Drivers of Spark jobs in own processes, which tests kill and pause."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import psutil

from rocketmq_spark.cluster.process import Watchdog
from tests.support.peer import refused_address
from tests.support.processes import PATIENCE, SPARK_HOME, wait_for

CONNECT_SERVER: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"
# All processes of a driver inherit this variable, whose value no other driver has.
_MARK: Final = "ROCKETMQ_SPARK_TEST_DRIVER"


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
        self._mark = uuid.uuid4().hex
        # A killed JVM leaves its temporary files behind.
        temporary = output.with_suffix(".tmp")
        temporary.mkdir()
        options = f"{environ.get('JDK_JAVA_OPTIONS', '')} -Djava.io.tmpdir={temporary}"
        folders = {"TMPDIR": str(temporary), "SPARK_LOCAL_DIRS": str(temporary), "JDK_JAVA_OPTIONS": options}
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env={**environ, **folders, _MARK: self._mark},
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

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the driver that run, itself first."""
        if not self.is_alive:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self._root, *self._root.children(recursive=True)]
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

    def kill(self, *, workers: bool = True) -> bool:
        """Kill the driver with SIGKILL, and return whether that has ended it.

        With `workers` false, its Python workers end only when they notice that.
        """
        processes = self.processes()
        if not workers:
            processes = [process for process in processes if _name(process) == "java"] + processes[:1]
        for process in processes:
            send(process, signal.SIGKILL)
        return self._await_kill()

    def kill_program(self) -> bool:
        """Kill the program with SIGKILL, and return whether that has ended it.

        Its JVM and its workers end only when they notice that.
        """
        send(self._root, signal.SIGKILL)
        return self._await_kill()

    def _await_kill(self) -> bool:
        is_killed = self._process.wait() == -signal.SIGKILL
        self._is_killed |= is_killed
        return is_killed

    def kill_jvm(self) -> bool:
        """Kill the JVM with SIGKILL, and return whether it ran.

        Without its server, a program of Spark Connect ends too late, so it is killed as well.
        """
        if self.server is not None:
            is_killed = self.server.kill_program()
            self.kill()
            return is_killed
        is_killed = True in [send(jvm, signal.SIGKILL) for jvm in self.jvms()]
        self._is_killed |= is_killed
        return is_killed

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
        """Kill everything that still runs, also what has lost its parent."""
        while left := [process for process in psutil.process_iter() if self._started(process)]:
            for process in left:
                send(process, signal.SIGKILL)
            time.sleep(0.05)
        self._process.wait()
        for pid in self._watched:
            self._watchdog.forget(pid)
        self._watched.clear()

    def _started(self, process: psutil.Process) -> bool:
        # A process that has ended, or belongs to another user, has no environment.
        with contextlib.suppress(psutil.Error):
            return bool(process.environ().get(_MARK) == self._mark)
        return False

    def tail(self) -> str:
        """Return the end of the output, also of the server."""
        tail = self.output.read_text(errors="replace")[-8000:]
        return tail if self.server is None else f"{tail}\n{self.server.tail()}"


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(process.name())
    return ""


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Send a signal, and return whether the process ran."""
    with contextlib.suppress(psutil.NoSuchProcess):
        runs = bool(process.status() != psutil.STATUS_ZOMBIE)
        # This compares the time of its start, so that no other process gets the signal.
        process.send_signal(number)
        return runs
    return False


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
    address = refused_address()
    host, _, port = address.partition(":")
    settings = {**conf, "spark.connect.grpc.binding.port": port}
    command = [str(SPARK_HOME / "bin" / "spark-submit"), "--class", CONNECT_SERVER]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    server = Driver(command, {**os.environ, "SPARK_HOME": str(SPARK_HOME)}, output, watchdog)

    def answers() -> bool:
        server.check()
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
            return True
        return False

    wait_for(answers)
    return server, f"sc://{address}"
