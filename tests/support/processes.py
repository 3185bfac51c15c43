"""Processes that tests start, find, and expect to have ended."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final

import psutil
import pyspark
import pytest

from rocketmq_spark.cluster.process import ServerProcess, Watchdog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def processes() -> dict[int, int]:
    """Return the parents of all processes that run, by their ids."""
    # A zombie has ended; its parent has not read its exit code yet.
    return {
        process.pid: process.info["ppid"]
        for process in psutil.process_iter(["ppid", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
    }


def descendants(pid: int) -> set[int]:
    """Return the ids of all processes below one."""
    parents, found, new = processes(), set[int](), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found |= new
    return found


PROGRAMS = Path(__file__).parents[1] / "programs"
SPARK_HOME = Path(pyspark.__file__).parent

# JVMs on a busy machine.
_WITHIN = 200.0
_MASTER = re.compile(r"Starting Spark master at (spark://\S+)")


class StandaloneCluster:
    """A Spark master and workers of one core each. Logs and the files of applications go to `folder`."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self._folder = folder
        self._watchdog = Watchdog()
        self._submissions: list[Submission] = []
        self._master = self._process("master", ["master.Master", "--host", "127.0.0.1", "--port", "0"])
        self._master.start()
        try:
            self.url = self._await_master()
            self.workers = [
                self._process(
                    f"worker-{number}",
                    ["worker.Worker", "--host", f"127.0.0.{number}", "--cores", "1", "--memory", "1g"],
                    ["--work-dir", str(folder / f"work-{number}"), self.url],
                )
                for number in range(1, workers + 1)
            ]
            for worker in self.workers:
                worker.start()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> StandaloneCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End running drivers, then master and workers. Executors end with their worker."""
        for submission in self._submissions:
            submission.kill()
        processes = [*getattr(self, "workers", ()), self._master]
        for process in processes:
            process.terminate()
        for process in processes:
            process.await_stopped(20.0)
        self._watchdog.release()

    def submit(
        self,
        program: str,
        arguments: Mapping[str, Any],
        *options: str,
        conf: Mapping[str, str] | None = None,
        python: str = sys.executable,
        folder: Path | None = None,
    ) -> Submission:
        """Start a program of ``tests/programs`` as a driver on this machine.

        `arguments` are its only argument, as JSON. `options` are options of ``spark-submit``. `python` is the
        interpreter of driver and executors. The driver runs in `folder`.
        """
        settings = {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.ui.enabled": "false",
            **(conf or {}),
        }
        command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", self.url, *options]
        for name, value in settings.items():
            command += ["--conf", f"{name}={value}"]
        command += [str(PROGRAMS / f"{program}.py"), json.dumps(arguments)]
        self._submissions.append(Submission(command, _environment(python), folder or self._folder))
        return self._submissions[-1]

    def logs(self) -> str:
        """Return what executors have printed."""
        files = self._folder.glob("work-*/app-*/*/stderr")
        return "\n".join(file.read_text(errors="replace") for file in sorted(files))

    def executors(self) -> list[int]:
        """Return the ids of the executors' processes."""
        pids = {worker.pid for worker in self.workers}
        return [pid for pid, parent in processes().items() if parent in pids]

    def _process(self, name: str, *arguments: Sequence[str]) -> ServerProcess:
        folder = self._folder / name
        folder.mkdir(parents=True)
        (main, *rest), *more = arguments
        command = ["/bin/bash", str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{main}"]
        command += ["--webui-port", "0", *rest, *(argument for part in more for argument in part)]
        return ServerProcess(name, command, folder, _environment(sys.executable), self._watchdog)

    def _await_master(self) -> str:
        deadline = time.monotonic() + _WITHIN
        while True:
            assert self._master.is_alive, self._master.why()
            found = _MASTER.search(self._master.console.read_text(errors="replace"))
            if found is not None:
                return found[1]
            assert time.monotonic() < deadline, self._master.console
            time.sleep(0.1)


class Submission:
    """A running driver. Its working folder is `folder`, which also gets its output."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        self._folder = folder
        with self._printed("out", "wb") as out, self._printed("err", "wb") as err:
            # In a new session, because the driver is a JVM and a Python process, and `kill` must end both.
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def result(self, within: float = _WITHIN) -> Any:
        """Wait for the end of the driver, and return the JSON of its last line."""
        try:
            code = self._process.wait(within)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the driver has not ended within {within:g} s:\n{self._tail()}") from None
        assert code == 0, self._tail()
        with self._printed("out", "rb") as out:
            return json.loads(out.read().decode().splitlines()[-1])

    def kill(self) -> None:
        """Kill the driver with SIGKILL."""
        if self.is_alive:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _printed(self, name: str, mode: str) -> IO[bytes]:
        return (self._folder / f"driver.{name}").open(mode)

    def _tail(self) -> str:
        # Spark logs to stderr. Python prints to stdout, errors included.
        with self._printed("out", "rb") as out, self._printed("err", "rb") as err:
            return "\n".join(file.read().decode(errors="replace")[-3000:] for file in (err, out))


def _environment(python: str) -> dict[str, str]:
    kept = {
        name: os.environ[name]
        for name in ("PATH", "JAVA_HOME", "JDK_JAVA_OPTIONS", "HOME", "LANG", "TMPDIR")
        if name in os.environ
    }
    return {
        **kept,
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": python,
    }


# Limit of every wait, seconds. It ends tests that hang; a busy machine of a fifth of the usual speed stays below it.
PATIENCE = 600.0


def wait_for(
    condition: Callable[[], bool],
    within: float = PATIENCE,
    *,
    why: Callable[[], str] = lambda: "not so",
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    """Wait until a condition holds, and call `meanwhile` again and again; after `within` seconds fail with `why`."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"{why()} after {within:g} s"
        meanwhile()
        time.sleep(0.05)


PYSPARK: Final = tuple(map(int, version("pyspark").split(".")[:2]))
NEEDS_LIMITS: Final = pytest.mark.skipif(PYSPARK < (4, 2), reason="PySpark 4.2 and newer limit micro-batches")


def at_most(rows: int) -> dict[str, Any]:
    """Return the options that limit a micro-batch; none if this PySpark has no such limit."""
    return {"maxOffsetsPerTrigger": rows} if PYSPARK >= (4, 2) else {}


def with_jvm(builder: SparkSession.Builder) -> SparkSession:
    """Start Spark. It forks for its JVM; a gRPC server that is shutting down after a test can make the fork crash."""
    from pyspark.errors import PySparkRuntimeError

    for _ in range(5):
        with warnings.catch_warnings():
            # Spark leaves the pipe to a JVM that did not start open. The garbage collector closes it.
            warnings.simplefilter("ignore", ResourceWarning)
            with contextlib.suppress(PySparkRuntimeError):
                return builder.getOrCreate()
            gc.collect()
        time.sleep(2)
    return builder.getOrCreate()
