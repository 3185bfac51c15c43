"""One server of a local cluster as a JVM process: start, stop, kill, pause, resume, and why it died.

Rule 1: only processes started here are ever signalled, by pid, and only until they have been waited for.
Rule 2: each runs in a session of its own: a terminal's Ctrl-C reaches us first, and we end them in order.
Rule 3: none outlives this process, however it ends; see :class:`Watchdog`.
Rule 4: a process that ended without being told to is an error that says why, with the place of its log.
Rule 5: what it writes is for its owner only: there may be secrets in it.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rocketmq_spark.errors import ClusterError

# Lines in: "+ pid", "- pid", and "release" at an orderly end. End of input: our process is gone. The pids are then not
# ours to wait for any more, but they were alive, or unreaped, a moment ago, so none of them names another process yet.
_WATCHDOG: Final = r"""
pids=" "
while read -r op pid; do
    case "$op" in
        +) pids="$pids$pid " ;;
        -) pids="${pids%% $pid *} ${pids#* $pid }" ;;
        release) exit 0 ;;
    esac
done
for pid in $pids; do kill -9 "$pid" 2>/dev/null; done
if [ -n "$1" ]; then sleep 1; rm -rf -- "$1"; fi
"""

_LOG_TAIL: Final = 256 * 1024
_TELLING: Final = re.compile(
    r"\b(ERROR|FATAL)\b|(Exception|Error)(:|$)|insufficient memory|[Cc]ould not|Unrecognized|SIG(BUS|SEGV)"
)
_ROUTINE: Final = re.compile(r" INFO \w+ ")  # a broker logs its whole configuration, "timerSkipUnknownError=false" too

PORT_TAKEN: Final = re.compile(r"Address already in use|Failed to bind")

_WHAT_TO_DO: Final = (
    (PORT_TAKEN, "a port is taken: stop what listens there or name another port"),
    (
        re.compile(
            r"OutOfMemoryError|insufficient memory|Could not reserve enough space|unable to create native thread"
        ),
        "too little memory: free some, start fewer brokers, or give jvm_options such as -Xmx",
    ),
    (
        re.compile(r"No space left on device|SIGBUS|Disk quota exceeded"),
        "the disk is full: free some, or set directory=",
    ),
    (re.compile(r"Lock failed"), "another broker uses this folder: stop it or set directory="),
    (
        re.compile(r"Unrecognized (VM )?option|Could not create the Java Virtual Machine|during initialization of VM"),
        "the JVM refused its options: check jvm_options",
    ),
)
_KILLED: Final = "killed from outside, by the system if memory ran out: free some, or start fewer brokers"


class State(enum.Enum):
    """What a server is doing, as far as we know and wanted."""

    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    KILLED = "killed"
    DIED = "died"


class Watchdog:
    """Kills what it was told of when this process is gone without an orderly end, SIGKILL included.

    A shell of its own session that reads a pipe only this process writes to: when we end, however, the pipe ends.
    Not ``PR_SET_PDEATHSIG``: it is Linux only, needs a ``preexec_fn`` (unsafe once there are threads), and fires when
    the *thread* that started the process ends, which may be long before the process does.

    Parameters
    ----------
    remove : Path, optional
        A folder to remove then, too.
    """

    def __init__(self, remove: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "rocketmq-spark-watchdog", str(remove or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    @property
    def pid(self) -> int:
        """The shell's process id."""
        return self._shell.pid

    def add(self, pid: int) -> None:
        """Kill this process too when we are gone."""
        self._tell(f"+ {pid}")

    def forget(self, pid: int) -> None:
        """Leave a process alone: it was waited for, and its pid may soon be another's."""
        self._tell(f"- {pid}")

    def release(self) -> None:
        """End, and kill nothing."""
        self._tell("release")
        if self._shell.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._shell.stdin.close()
        self._shell.wait()

    def _tell(self, line: str) -> None:
        # If someone killed the shell, the orderly ways to end still work: that is all the good it could do.
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            assert self._shell.stdin is not None
            self._shell.stdin.write(line + "\n")
            self._shell.stdin.flush()


class ServerProcess:
    """One JVM.

    Parameters
    ----------
    name : str
        ``broker-0``, ``namesrv``, ``proxy``.
    command : sequence of str
    folder : Path
        Its working directory; ``console.log`` (what it prints) is written there, ``server.log`` by itself.
    env : mapping of str to str
        Its whole environment.
    watchdog : Watchdog
    hide : callable, optional
        Returns what it is given without secrets: errors quote the logs.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        env: Mapping[str, str],
        watchdog: Watchdog,
        hide: Callable[[str], str] = str,
    ) -> None:
        self.name = name
        self.console = folder / "console.log"
        self.log = folder / "server.log"
        self._command = list(command)
        self._folder = folder
        self._env = dict(env)
        self._watchdog = watchdog
        self._hide = hide
        self._process: subprocess.Popen[bytes] | None = None
        self._state = State.NEW
        self._ending = State.DIED  # what an end means: a death, unless we asked for it
        self._starts_at = {self.console: 0, self.log: 0}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<ServerProcess {self.name} {self.state.value} pid={self.pid}>"

    @property
    def pid(self) -> int | None:
        """The process id while it is alive."""
        return self._process.pid if self.is_alive and self._process is not None else None

    @property
    def is_alive(self) -> bool:
        """Whether the process exists; a paused one does."""
        with self._lock:
            if self._process is None:
                return False
            if self._process.poll() is None:
                return True
            self._ended()
            return False

    @property
    def state(self) -> State:
        """What it is doing now."""
        self.is_alive  # noqa: B018  looks, and notes a death
        return self._state

    def start(self) -> None:
        """Start the JVM; returns at once."""
        with self._lock:
            if self.is_alive:
                raise ClusterError(f"{self.name} runs already (pid {self.pid})")
            for file in self._starts_at:
                self._starts_at[file] = file.stat().st_size if file.exists() else 0
            try:
                with open(self.console, "ab", opener=_for_its_owner) as console:
                    self._process = subprocess.Popen(
                        self._command,
                        cwd=self._folder,
                        env=self._env,
                        stdin=subprocess.DEVNULL,
                        stdout=console,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        umask=0o077,
                    )
            except OSError as exc:
                raise ClusterError(f"starting {self.name} with {self._command[0]}: {exc}") from exc
            self._watchdog.add(self._process.pid)
            self._state, self._ending = State.RUNNING, State.DIED

    def terminate(self) -> None:
        """Ask it to end (SIGTERM), resuming it first if it is paused; returns at once."""
        with self._lock:
            if self.is_alive and self._process is not None:
                self._ending = State.STOPPED
                self._process.terminate()
                if self._state is State.PAUSED:
                    self._process.send_signal(signal.SIGCONT)
                    self._state = State.RUNNING

    def wait_stopped(self, timeout: float) -> None:
        """Wait for the end that :meth:`terminate` asked for; after `timeout` seconds, kill."""
        process = self._process
        if process is None:
            return
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._ended()

    def kill(self) -> None:
        """End it now (SIGKILL), paused or not, and wait until it is gone."""
        process = self._process
        if process is None:
            return
        if self.is_alive:
            self._ending = State.KILLED
        process.kill()  # does nothing if it was waited for
        process.wait()
        self._ended()

    def pause(self) -> None:
        """Freeze it (SIGSTOP): its connections stay, and answer nothing."""
        self._signal(signal.SIGSTOP, State.PAUSED)

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        self._signal(signal.SIGCONT, State.RUNNING)

    def release(self) -> None:
        """Let it live on after us; it can't be stopped through this object any more."""
        if self._process is not None:
            self._watchdog.forget(self._process.pid)
            self._process.returncode = 0  # or subprocess warns that it is still running
            self._process = None

    def why(self) -> str:
        """Return why it ended: exit code or signal, what its logs say, what to do, and where the log is."""
        if self.state not in (State.DIED, State.STOPPED, State.KILLED):
            return f"{self.name} is {self._state.value}"
        if self._state is not State.DIED:
            return f"{self.name} was {self._state.value} and not started again"
        code = self._process.returncode if self._process is not None else 0
        end = f"ended with exit code {code}" if code >= 0 else f"ended by {_signal_name(-code)}"
        lines = self.telling_lines()
        text = "\n".join(lines)
        hints = [hint for pattern, hint in _WHAT_TO_DO if pattern.search(text)]
        if not hints and code == -signal.SIGKILL:
            hints = [_KILLED]
        parts = [f"{self.name} {end}", *hints[:1]]
        if lines:
            parts.append("it said: " + " | ".join(lines))
        return "; ".join([*parts, f"its logs are {self.log} and {self.console.name} beside it"])

    def telling_lines(self, most: int = 3) -> list[str]:
        """Return the lines of its logs, since its last start, that say most about its end; console first."""
        said = [line for file in (self.console, self.log) for line in _tail(file, self._starts_at[file])]
        said = [self._hide(line) for line in said if not _ROUTINE.search(line)]
        telling = list(dict.fromkeys(line for line in said if _TELLING.search(line)))
        first_causes = [line for line in telling if any(hint.search(line) for hint, _ in _WHAT_TO_DO)]
        chosen = (first_causes or telling)[:most] or said[-most:]
        return [line if len(line) <= 300 else line[:297] + "..." for line in chosen]

    def _signal(self, number: signal.Signals, state: State) -> None:
        with self._lock:
            if not self.is_alive or self._process is None:
                raise ClusterError(f"{number.name} to {self.name}: {self.why()}")
            self._process.send_signal(number)
            self._state = state

    def _ended(self) -> None:
        with self._lock:
            if self._process is not None and self._state in (State.RUNNING, State.PAUSED):
                self._watchdog.forget(self._process.pid)
                self._state = self._ending


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _tail(file: Path, start: int) -> list[str]:
    try:
        with file.open("rb") as opened:
            end = opened.seek(0, os.SEEK_END)
            opened.seek(max(start if start <= end else 0, end - _LOG_TAIL))  # shorter than before: it was rolled
            text = opened.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
