"""The record of the cluster that ``rocketmq-spark cluster up`` left running: one file per user by default.

The file has the pid and start time of each process. So a pid that another process has now counts as a dead server, and
gets no signal. The file is replaced as a whole. It is removed only after all its servers count as dead, as do those in
another pid namespace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rocketmq_spark.cluster.config import os_errors, user_folder
from rocketmq_spark.cluster.local import LocalCluster
from rocketmq_spark.cluster.process import STOP_TIMEOUT
from rocketmq_spark.errors import ClusterError

_POLL: Final = 0.1


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """One server: `kind` is the name of its class, `started` the `process_start` of its pid."""

    name: str
    kind: str
    address: str
    pid: int
    started: str
    log: str

    def state(self) -> str:
        """Return ``running``, ``paused`` or ``died``."""
        if process_start(self.pid) != self.started:
            return "died"
        return "paused" if _status(self.pid).startswith("T") else "running"


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster that was left running."""

    name_server: str
    endpoints: str | None
    directory: str
    temporary: bool  # True if `stop` removes the directory
    servers: tuple[ServerRecord, ...]
    options: Mapping[str, str] = field(default_factory=dict)  # Of security; a secret is a reference to its file

    @classmethod
    def of(cls, cluster: LocalCluster) -> ClusterState:
        """Return the state of a running cluster."""
        records = []
        for server in cluster.servers:
            pid = server.pid
            started = process_start(pid) if pid is not None else None
            if pid is None or started is None:
                raise ClusterError(server.why())
            kind = type(server).__name__
            records.append(ServerRecord(server.name, kind, server.address, pid, started, str(server.log)))
        return cls(
            name_server=cluster.name_server,
            endpoints=cluster.endpoints if cluster.proxy else None,
            directory=str(cluster.directory),
            temporary=cluster.is_temporary,
            servers=tuple(records),
            options={name: value for name, value in cluster.options.items() if name != "nameServer"},
        )

    def is_alive(self) -> bool:
        """Return whether any of its servers is running."""
        return any(server.state() != "died" for server in self.servers)

    def require_running(self, *kinds: str) -> None:
        """Raise a ClusterError if a server of one of these kinds has died, or runs in another pid namespace."""
        for server in self.servers:
            if server.kind in kinds and server.state() == "died":
                raise ClusterError(
                    f"{server.name} (pid {server.pid}) of the cluster started with `rocketmq-spark cluster up` has "
                    f"died. Another program may listen at {server.address}, so the cluster's address and keys are not "
                    "used. Restart the cluster (rocketmq-spark cluster down, then up), or choose another one with"
                    " -n host:9876, and if necessary --access-key and --secret-key"
                )

    def stop(self) -> None:
        """Stop its servers and wait for their end; remove its temporary folder."""
        # A temporary store is removed, so its brokers need not flush it.
        first = signal.SIGKILL if self.temporary else signal.SIGTERM
        # The name server must outlive the brokers, which unregister; it stores nothing.
        followers = [server for server in self.servers if server.kind != "NameServer"]
        for server in followers:
            _send(server, first)
            _send(server, signal.SIGCONT)
        _await_end(followers)
        for server in self.servers:
            _send(server, signal.SIGKILL)
        alive = ", ".join(f"{server.name} (pid {server.pid})" for server in _await_end(self.servers))
        if alive:
            raise ClusterError(f"stopping the cluster: the system could not kill {alive} yet; try again later")
        if self.temporary:
            shutil.rmtree(self.directory, ignore_errors=True)


class StateFile:
    """The file of this user. Its folder, by default the user's own, is created when something is saved."""

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (folder or user_folder("STATE", ".local/state")) / "cluster.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock for commands that change the cluster; raises a ClusterError if another command holds it."""
        folder = self.path.parent
        with os_errors(f"writing to {folder}", "set ROCKETMQ_SPARK_STATE to another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / ".lock").open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise ClusterError("another rocketmq-spark cluster up or down is running; wait for its end") from exc
            yield

    def load(self) -> ClusterState | None:
        """Return the saved cluster, running or not, or None; raises a ClusterError for a damaged file."""
        try:
            fields: dict[str, Any] = json.loads(self.path.read_bytes())
            servers = tuple(ServerRecord(**server) for server in fields.pop("servers"))
            return ClusterState(**fields, servers=servers)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
            raise ClusterError(
                f"reading the saved cluster in {self.path}: {type(exc).__name__}: {exc}; stop its RocketMQ servers by "
                "hand, then remove the file"
            ) from exc

    def save(self, state: ClusterState) -> None:
        """Save a cluster."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(state), indent=1), encoding="utf-8")
        partial.replace(self.path)

    def remove(self) -> None:
        """Remove the saved cluster."""
        self.path.unlink(missing_ok=True)


def process_start(pid: int) -> str | None:
    """Return the start time of a process in the system's format, or None if it has ended or is a zombie."""
    if Path("/proc/self/stat").exists():
        fields = _proc_stat(pid)
        if not fields or fields[0] in "ZX":
            return None
        # Clock ticks since boot. The boot id changes when the machine restarts.
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{fields[19]}"
    # The resolution is a second (macOS), which suffices, because a pid is reused only after its end.
    return None if _status(pid).startswith("Z") else _ps(pid, "lstart") or None


def _status(pid: int) -> str:
    if Path("/proc/self/stat").exists():
        return next(iter(_proc_stat(pid)), "")
    return _ps(pid, "stat")


def _proc_stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` from the third one, the status, on."""
    try:
        # The second field, the program's name in parentheses, may contain blanks and parentheses.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _ps(pid: int, column: str) -> str:
    command = ["ps", "-o", f"{column}=", "-p", str(pid)]
    # `lstart` is a local time in words. Another time zone or language must not make a process count as died.
    env = {**os.environ, "LC_ALL": "C", "TZ": "UTC0"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env).stdout.strip()


def _await_end(servers: Sequence[ServerRecord]) -> list[ServerRecord]:
    """Wait up to 40 s for the end of the servers, and return the servers that still run."""
    deadline = time.monotonic() + STOP_TIMEOUT
    while (alive := [server for server in servers if server.state() != "died"]) and time.monotonic() <= deadline:
        time.sleep(_POLL)
    return alive


def _send(server: ServerRecord, number: signal.Signals) -> None:
    if server.state() == "died":
        return
    try:
        os.kill(server.pid, number)
    except ProcessLookupError:
        pass  # It ended after the check
    except PermissionError as exc:
        raise ClusterError(
            f"stopping {server.name} (pid {server.pid}): {exc}; it belongs to another user: stop it as that user"
        ) from exc
