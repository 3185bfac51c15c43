"""Starts and stops the JVM processes of a local cluster, and finds Java.

`ServerProcess` signals only a JVM that it started and has not waited for: later another process may have the pid. Each
JVM runs in its own session, so a terminal's Ctrl-C does not reach it. A `Watchdog` kills the JVMs if this process ends
without `Watchdog.release`.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rocketmq_spark.errors import ClusterError

# Its input ends with the Python process. All pids were alive or unreaped until then, so no other process has them.
_WATCHDOG: Final = r"""
pids=" "
while read -r op pid; do
    case "$op" in
        +) pids="$pids$pid " ;;
        -) case "$pids" in *" $pid "*) pids="${pids%% $pid *} ${pids#* $pid }" ;; esac ;;
        release) exit 0 ;;
    esac
done
for pid in $pids; do kill -9 "$pid" 2>/dev/null; done
if [ -n "$1" ]; then sleep 1; rm -rf -- "$1"; fi  # A killed JVM may still create files for a moment
"""

# Seconds for an orderly end. A broker takes 13 to 18, because it waits for its own threads.
STOP_TIMEOUT: Final = 40.0

_LOG_TAIL: Final = 256 * 1024
_RELEVANT: Final = re.compile(
    r"\b(ERROR|FATAL)\b|(Exception|Error)(:|$)|insufficient memory|[Cc]ould not|Unrecognized|SIG(BUS|SEGV)"
)
# A broker logs its whole configuration at INFO, with names such as "timerSkipUnknownError=false".
_ROUTINE: Final = re.compile(r" INFO \w+ ")

PORT_TAKEN: Final = "Address already in use|Failed to bind"

# Advice by a pattern in the logs; the first match counts.
_WHAT_TO_DO: Final = {
    PORT_TAKEN: "a port is in use: stop the program that uses it, or choose another port",
    "OutOfMemoryError|insufficient memory|Could not reserve enough space|unable to create native thread": (
        "too little memory: free some memory, start fewer brokers, or reduce -Xmx in jvm_options"
    ),
    "No space left on device|SIGBUS|Disk quota exceeded": "the disk is full: free some space, or set directory=",
    "Lock failed": "another broker uses the same store: stop it, or set directory= to another folder",
    "Unrecognized (VM )?option|Could not create the Java Virtual Machine|during initialization of VM": (
        "the JVM rejected its options: check jvm_options"
    ),
}
_KILLED: Final = (
    "killed by another process, or by the system if memory ran out: free some memory, or start fewer brokers"
)


class State(enum.Enum):
    """The state of a server: STOPPED and KILLED by this process, DIED otherwise."""

    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    KILLED = "killed"
    DIED = "died"


class Watchdog:
    """Kills the added processes, and removes the folder `remove`, when this process ends without `release`.

    A shell in its own session reads a pipe that only this process writes to, and acts at its end, also after SIGKILL.
    ``PR_SET_PDEATHSIG`` is Linux only, needs a ``preexec_fn``, and fires when the *thread* that started it ends.
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

    def add(self, pid: int) -> None:
        """Add a process to kill."""
        self._write(f"+ {pid}")

    def forget(self, pid: int) -> None:
        """Remove a process that was waited for, because its pid may soon belong to another process."""
        self._write(f"- {pid}")

    def release(self) -> None:
        """End without killing anything."""
        self._write("release")
        if self._shell.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._shell.stdin.close()
        self._shell.wait()

    def _write(self, line: str) -> None:
        # If the shell was killed, only this protection is lost.
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            assert self._shell.stdin is not None
            self._shell.stdin.write(line + "\n")
            self._shell.stdin.flush()


class ServerProcess:
    """One JVM process, and the reason of its end.

    Its directory `folder` has ``console.log`` (its output) and ``server.log`` (its own log). Only their owner may read
    them, because they may contain secrets. `hide` removes secrets from quoted lines. `env` is the whole environment.
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
        self.folder = folder
        self.console = folder / "console.log"
        self.log = folder / "server.log"
        self._command = list(command)
        self._env = dict(env)
        self._watchdog = watchdog
        self._hide = hide
        self._process: subprocess.Popen[bytes] | None = None
        self._state = State.NEW
        # The state after the end of the process: DIED, unless this process ends it.
        self._ending = State.DIED
        self._sizes_at_start = {self.console: 0, self.log: 0}
        self._lock = threading.RLock()

    @property
    def pid(self) -> int | None:
        """The process id while it is alive."""
        process = self._living()
        return None if process is None else process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process exists, also if it is paused."""
        return self._living() is not None

    @property
    def state(self) -> State:
        """The state of the process."""
        self._living()
        return self._state

    def start(self) -> None:
        """Start the JVM; returns at once."""
        with self._lock:
            if self.is_alive:
                raise ClusterError(f"{self.name} is already running (pid {self.pid}): call restart() instead")
            for file in self._sizes_at_start:
                self._sizes_at_start[file] = file.stat().st_size if file.exists() else 0
            try:
                with open(self.console, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as console:
                    self._process = subprocess.Popen(
                        self._command,
                        cwd=self.folder,
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
        """Request its end (SIGTERM), also if it is paused; returns at once."""
        with self._lock:
            process = self._living()
            if process is None:
                return
            self._ending = State.STOPPED
            process.terminate()
            if self._state is State.PAUSED:
                process.send_signal(signal.SIGCONT)
                self._state = State.RUNNING

    def await_stopped(self, timeout: float = STOP_TIMEOUT) -> None:
        """Wait for its end after `terminate`; kill it after `timeout` seconds."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._living()

    def kill(self) -> None:
        """Kill it (SIGKILL) and wait for its end."""
        process = self._living()
        if process is not None:
            self._ending = State.KILLED
            process.kill()
            process.wait()
            self._living()

    def pause(self) -> None:
        """Pause it (SIGSTOP): its connections stay open, and it answers nothing."""
        self._signal(signal.SIGSTOP, State.PAUSED)

    def resume(self) -> None:
        """Continue a paused process (SIGCONT)."""
        self._signal(signal.SIGCONT, State.RUNNING)

    def detach(self) -> None:
        """Leave it running after this process; this object no longer controls it."""
        if self._process is not None:
            self._watchdog.forget(self._process.pid)
            self._process.returncode = 0  # Otherwise subprocess warns that it is still running
            self._process = None

    def why(self) -> str:
        """Return why it ended: exit code or signal, advice, the relevant lines of its logs, and their path."""
        if self.state is State.NEW:
            return f"{self.name} was never started"
        if self._state in (State.RUNNING, State.PAUSED):
            return f"{self.name} is {self._state.value}"
        if self._state is not State.DIED:
            return f"{self.name} was {self._state.value} and not started again"
        code = self._process.returncode if self._process is not None else 0
        names = {number.value: number.name for number in signal.Signals}
        end = f"ended with exit code {code}" if code >= 0 else f"ended by {names.get(-code, f'signal {-code}')}"
        lines = self.relevant_lines()
        text = "\n".join(lines)
        hints = [hint for pattern, hint in _WHAT_TO_DO.items() if re.search(pattern, text)]
        if not hints and code == -signal.SIGKILL:
            hints = [_KILLED]
        parts = [f"{self.name} {end}", *hints[:1]]
        if lines:
            parts.append("it logged: " + " | ".join(lines))
        return "; ".join([*parts, f"its logs are {self.log} and {self.console.name} beside it"])

    def relevant_lines(self, most: int = 3) -> list[str]:
        """Return the log lines since its start that best explain its end, those of the console first."""
        lines = [line for file in (self.console, self.log) for line in _tail(file, self._sizes_at_start[file])]
        lines = [self._hide(line) for line in lines if not _ROUTINE.search(line)]
        errors = list(dict.fromkeys(line for line in lines if _RELEVANT.search(line)))
        first_causes = [line for line in errors if re.search("|".join(_WHAT_TO_DO), line)]
        chosen = (first_causes or errors)[:most] or lines[-most:]
        return [line if len(line) <= 300 else line[:297] + "..." for line in chosen]

    def _signal(self, number: signal.Signals, state: State) -> None:
        with self._lock:
            process = self._living()
            if process is None:
                raise ClusterError(f"{number.name} to {self.name}: {self.why()}")
            process.send_signal(number)
            if state is State.PAUSED and hasattr(os, "waitid"):
                # Its threads may execute for some time after the signal was sent.
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            self._state = state

    def _living(self) -> subprocess.Popen[bytes] | None:
        """Return the process while it exists, and note its end."""
        with self._lock:
            if self._process is None or self._process.poll() is None:
                return self._process
            if self._state in (State.RUNNING, State.PAUSED):
                self._watchdog.forget(self._process.pid)
                self._state = self._ending
            return None


def _tail(file: Path, start: int) -> list[str]:
    try:
        with file.open("rb") as opened:
            end = opened.seek(0, os.SEEK_END)
            opened.seek(max(start if start <= end else 0, end - _LOG_TAIL))  # A shorter file was rolled
            text = opened.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


# The oldest Java that Spark 4 supports.
_MIN_JAVA: Final = 17

_INSTALL_JAVA: Final = f"install Java {_MIN_JAVA} or newer and set JAVA_HOME to its folder"

# 'openjdk version "17.0.15" 2025-04-15', 'java version "1.8.0_392"', 'openjdk version "26-ea"'.
_VERSION: Final = re.compile(r'^\w+ version "(?:1\.)?(\d+)', re.MULTILINE)


def parse_java_version(text: str) -> int | None:
    """Return the feature release (8, 17, 21 ...) in the output of ``java -version``, or None."""
    match = _VERSION.search(text)
    return int(match[1]) if match else None


def find_java(environ: Mapping[str, str] = os.environ) -> Path:
    """Return ``$JAVA_HOME/bin/java``, else the first ``java`` on ``PATH``.

    Raises a ClusterError if it is missing, doesn't run, or is older than 17. No other is searched: the user chose it.
    """
    home = environ.get("JAVA_HOME", "")
    folders = (str(Path(home, "bin")) if home else "", environ.get("PATH", os.defpath))
    path = shutil.which("java", path=os.pathsep.join(filter(None, folders)))
    if path is None:
        where = f"neither in JAVA_HOME={home} nor on PATH" if home else "JAVA_HOME is not set and PATH has none"
        raise ClusterError(f"the local cluster needs Java and found none ({where}); {_INSTALL_JAVA}")
    java = Path(path)
    version = java_version(java)
    if version < _MIN_JAVA:
        raise ClusterError(f"{java} is Java {version}, the RocketMQ server needs {_MIN_JAVA} or newer; {_INSTALL_JAVA}")
    return java


def java_version(java: Path) -> int:
    """Return the feature release of a Java; raises a ClusterError if it doesn't run."""
    try:
        answer = subprocess.run(
            [java, "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ClusterError(f"asking {java} for its version: {exc}; {_INSTALL_JAVA}") from exc
    text = answer.stdout.decode(errors="replace")
    version = parse_java_version(text)
    # On macOS /usr/bin/java may only print how to install Java.
    if answer.returncode != 0 or version is None:
        first = next(iter(text.strip().splitlines()), "no output")
        raise ClusterError(f"{java} -version failed with exit code {answer.returncode} ({first}); {_INSTALL_JAVA}")
    return version
