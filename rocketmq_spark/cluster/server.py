"""What all servers of a local cluster have in common: a folder, a process, a way to be started and awaited.

Rule 1: ready means used, not "port open"; what that is, each kind of server says in `_ask`.
Rule 2: a server keeps its ports and its folder over stop and restart.
Rule 3: ports that we chose are chosen again if someone takes one before the JVM does; the user's are not.
Rule 4: the user's JVM options come last on every command line, so they win.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rocketmq_spark.cluster.config import render
from rocketmq_spark.cluster.probe import Probe
from rocketmq_spark.cluster.process import PORT_TAKEN, ServerProcess, State, Watchdog
from rocketmq_spark.cluster.security import Security
from rocketmq_spark.errors import ClusterError, RocketMQError

STOP_TIMEOUT: Final = 40.0
"""How long an orderly end may take, seconds. A broker that waits for its own threads takes 13 to 18."""

_PORT_TRIES: Final = 4
_POLL: Final = 0.1

_EVERY_JVM: Final = (
    *("-Xss512k", "-XX:+ExitOnOutOfMemoryError", "-XX:+PerfDisableSharedMem", "-XX:ErrorFile=hs_err.log"),
    "-XX:-CreateCoredumpOnCrash",
    "-Djava.net.preferIPv4Stack=true",
    # Making a certificate at each start takes a third of a broker's boot.
    "-Dtls.server.mode=disabled",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
)

_COLLECTOR: Final = re.compile(r"-XX:\+Use\w+GC")


@dataclass
class Site:
    """What the servers of one cluster share."""

    java: Path
    jars: Sequence[Path]
    directory: Path
    watchdog: Watchdog
    probe: Probe
    jvm_options: Sequence[str]
    start_timeout: float
    name_server: str = ""
    ports: set[int] = field(default_factory=set)
    security: Security = field(default_factory=Security)

    def secure(self, security: Security) -> None:
        """Have the servers that are started from now on demand this, and satisfy it in asking them."""
        self.security = security
        self.probe = Probe(credentials=security.admin, tls=security.context())

    def command(self, folder: Path, memory: Sequence[str], main: str, arguments: Sequence[str]) -> list[str]:
        """Return the command line of one JVM; the user's options come last, so they win."""
        if any(_COLLECTOR.fullmatch(option) for option in self.jvm_options):
            memory = [option for option in memory if not _COLLECTOR.fullmatch(option)]
        own = [
            f"-Duser.home={folder}",
            f"-Djava.io.tmpdir={folder / 'tmp'}",
            f"-Drmq.logback.configurationFile={folder / 'logback.xml'}",
        ]
        security = self.security.jvm_options
        return [str(self.java), *memory, *_EVERY_JVM, *own, *security, *self.jvm_options, main, *arguments]


class Server(ABC):
    """One server of a local cluster, and its process.

    Attributes
    ----------
    name : str
    folder : Path
        Its configuration, logs and store.
    """

    def __init__(self, site: Site, name: str) -> None:
        self.name = name
        self.folder = site.directory / name
        self._site = site
        self._process: ServerProcess | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.state.value} {self.address} pid={self.pid}>"

    @property
    @abstractmethod
    def address(self) -> str:
        """``host:port`` of its remoting protocol."""

    @property
    @abstractmethod
    def ports(self) -> tuple[int, ...]:
        """Every port it listens on."""

    @property
    def log(self) -> Path:
        """Its log; what it printed is in ``console.log`` beside it."""
        return self.folder / "server.log"

    @property
    def pid(self) -> int | None:
        """The process id while it is alive."""
        return self._process.pid if self._process else None

    @property
    def is_alive(self) -> bool:
        """Whether its process exists; a paused one does."""
        return self._process is not None and self._process.is_alive

    @property
    def was_launched(self) -> bool:
        """Whether its process was ever started, so that there are logs."""
        return self._process is not None

    @property
    def state(self) -> State:
        """What it is doing, as far as we know and wanted."""
        return self._process.state if self._process else State.NEW

    def stop(self) -> None:
        """End it in order (SIGTERM) and wait until it is gone; a broker unregisters and flushes first, 13 to 18 s."""
        self.terminate()
        self.wait_stopped()

    def kill(self) -> None:
        """End it at once (SIGKILL) and wait until it is gone."""
        if self._process:
            self._process.kill()

    def pause(self) -> None:
        """Freeze it (SIGSTOP): connections stay open and nothing is answered."""
        self._running().pause()

    def resume(self) -> None:
        """Let a paused server go on (SIGCONT)."""
        self._running().resume()

    def restart(self) -> None:
        """Start it again, same ports, same store, stopping it first if it is alive; returns when it is ready.

        Raises
        ------
        ClusterError
            It died, or isn't ready within the cluster's `start_timeout`.
        """
        if self.is_alive:
            self.stop()
        self.launch()
        self.await_ready(time.monotonic() + self._site.start_timeout, keep_ports=True)

    def why(self) -> str:
        """Return why it ended, what its logs say, and what to do."""
        return self._process.why() if self._process else f"{self.name} was never started"

    def launch(self) -> None:
        """Write its configuration and start its JVM; returns at once."""
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        (self.folder / "logback.xml").write_text(render("logback.xml"), encoding="utf-8")
        env = {name: value for name, value in os.environ.items() if name not in ("NAMESRV_ADDR", "RMQ_PROXY_HOME")}
        env["CLASSPATH"] = os.pathsep.join(map(str, self._site.jars))
        env["ROCKETMQ_HOME"] = str(self.folder)
        command, hide = self._configure(), self._site.security.hidden
        self._process = ServerProcess(self.name, command, self.folder, env, self._site.watchdog, hide)
        self._process.start()

    def await_ready(self, deadline: float, *, keep_ports: bool = False) -> None:
        """Wait until it serves; `deadline` is monotonic seconds. A ClusterError says why it does not."""
        for tries_left in reversed(range(_PORT_TRIES)):
            last = self._poll_until(deadline)
            if last is None:
                return
            if self.is_alive:
                raise ClusterError(
                    f"{self.name} isn't ready after {self._site.start_timeout:g} s: {last}; its log is {self.log};"
                    " a slow machine may need a larger start_timeout"
                )
            if not tries_left or not self._may_try_again(keep_ports):
                raise ClusterError(f"starting the cluster: {self.why()}") from last
            self.launch()

    def terminate(self) -> None:
        """Ask it to end; returns at once."""
        if self._process:
            self._process.terminate()

    def wait_stopped(self) -> None:
        """Wait for the end that :meth:`terminate` asked for."""
        if self._process:
            self._process.wait_stopped(STOP_TIMEOUT)

    def release(self) -> None:
        """Let it live on after us."""
        if self._process:
            self._process.release()

    def remove_all_but_logs(self) -> None:
        """Remove what takes room, and what may hold secrets: store, configuration, users."""
        for entry in self.folder.iterdir() if self.folder.exists() else ():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            elif ".log" not in entry.name:
                entry.unlink(missing_ok=True)

    @abstractmethod
    def _configure(self) -> list[str]:
        """Write what it reads at start; return its command line."""

    @abstractmethod
    def _ask(self) -> None:
        """Raise a RocketMQError unless it is ready."""

    @abstractmethod
    def _choose_ports(self) -> bool:
        """Choose free ports where the user named none; tell whether any was chosen."""

    def _may_try_again(self, keep_ports: bool) -> bool:
        assert self._process is not None
        taken = any(PORT_TAKEN.search(line) for line in self._process.telling_lines(most=20))
        return taken and not keep_ports and self._choose_ports()

    def _poll_until(self, deadline: float) -> RocketMQError | None:
        while True:
            try:
                self._ask()
                return None
            except RocketMQError as exc:
                if not self.is_alive or time.monotonic() >= deadline:
                    return exc
            time.sleep(_POLL)

    def _running(self) -> ServerProcess:
        if self._process is None:
            raise ClusterError(f"{self.name} was never started")
        return self._process
