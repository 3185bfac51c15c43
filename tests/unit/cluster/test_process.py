"""A server's process: its states, why it ended, and that none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rocketmq_spark.cluster.process import ServerProcess, State, Watchdog
from rocketmq_spark.cluster.state import process_start
from rocketmq_spark.errors import ClusterError
from tests.support.processes import wait_for

Start = Callable[[str], ServerProcess]


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    dog = Watchdog()
    yield dog
    dog.release()


@pytest.fixture
def start(tmp_path: Path, watchdog: Watchdog) -> Iterator[Start]:
    """Return a function that starts a shell script as a server."""
    started: list[ServerProcess] = []

    def start_script(script: str) -> ServerProcess:
        process = ServerProcess("broker-0", ["/bin/sh", "-c", script], tmp_path, dict(os.environ), watchdog)
        process.start()
        started.append(process)
        return process

    yield start_script
    for process in started:
        process.kill()


def test_process_goes_through_its_states(start: Start) -> None:
    process = start("exec sleep 600")
    states = [process.state]
    process.pause()
    states.append(process.state)
    assert process.is_alive
    process.resume()
    states.append(process.state)
    process.kill()
    states.append(process.state)
    assert process.pid is None
    process.start()
    assert [*states, process.state] == [State.RUNNING, State.PAUSED, State.RUNNING, State.KILLED, State.RUNNING]


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="needs os.waitid")
def test_paused_process_executes_nothing_when_pause_returns(start: Start) -> None:
    process = start("while :; do :; done")
    assert process.pid is not None
    for _ in range(200):
        process.pause()
        assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        process.resume()


def test_paused_process_can_be_stopped(start: Start) -> None:
    process = start("exec sleep 600")
    process.pause()
    process.terminate()
    process.await_stopped(60)
    assert process.state is State.STOPPED


def test_process_that_ignores_the_request_to_end_is_killed(start: Start, tmp_path: Path) -> None:
    process = start("trap '' TERM; : > deaf; while :; do sleep 1; done")
    wait_for((tmp_path / "deaf").exists)
    process.terminate()
    process.await_stopped(0.1)
    assert process.state is State.STOPPED
    assert not process.is_alive


def test_process_that_runs_is_not_started_twice(start: Start) -> None:
    process = start("exec sleep 600")
    with pytest.raises(ClusterError, match="broker-0 is already running"):
        process.start()


def test_dead_process_can_not_be_paused(start: Start) -> None:
    process = start("exit 3")
    wait_for(lambda: process.state is State.DIED)
    with pytest.raises(ClusterError, match="SIGSTOP to broker-0: broker-0 ended with exit code 3"):
        process.pause()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("java.net.BindException: Address already in use", "a port is in use"),
        ("Exception in thread main java.lang.OutOfMemoryError: Java heap space", "too little memory"),
        ("There is insufficient memory for the Java Runtime Environment to continue.", "too little memory"),
        ("java.io.IOException: No space left on device", "the disk is full"),
        ("#  SIGBUS (0x7) at pc=0x00007f", "the disk is full"),
        ("java.lang.RuntimeException: Lock failed,MQ already started", "another broker uses the same store"),
        ("Unrecognized VM option 'Nonsense'", "the JVM rejected its options: check jvm_options"),
    ],
)
def test_exit_reason_is_derived_from_the_output(start: Start, said: str, reason: str) -> None:
    process = start(f'echo starting; echo "{said}"; echo the end; exit 1')
    wait_for(lambda: process.state is State.DIED)
    why = process.why()
    assert why.startswith(f"broker-0 ended with exit code 1; {reason}")
    assert f"it logged: {said}; its logs are {process.log}" in why


def test_errors_of_the_server_log_are_quoted_but_routine_lines_are_not(start: Start) -> None:
    lines = (
        "2026-01-01 00:00:00.000 INFO RocketmqBroker main - timerSkipUnknownError=false",
        "2026-01-01 00:00:00.000 ERROR RocketmqStore main - create mapped file failed",
    )
    process = start("".join(f"echo '{line}' >> server.log; " for line in lines) + "exit 1")
    wait_for(lambda: process.state is State.DIED)
    assert process.relevant_lines() == [lines[1]]


def test_output_of_an_earlier_run_is_ignored(start: Start, tmp_path: Path) -> None:
    (tmp_path / "console.log").write_text("java.lang.OutOfMemoryError: yesterday\n")
    process = start("echo no idea; exit 1")
    wait_for(lambda: process.state is State.DIED)
    assert process.relevant_lines() == ["no idea"]


def test_sigkill_without_output_suggests_missing_memory(start: Start) -> None:
    process = start("kill -9 $$")
    wait_for(lambda: process.state is State.DIED)
    assert process.why().startswith(
        "broker-0 ended by SIGKILL; killed by another process, or by the system if memory ran out"
    )


def test_requested_end_is_not_reported_as_a_crash(start: Start) -> None:
    process = start("exec sleep 600")
    process.kill()
    assert process.why() == "broker-0 was killed and not started again"


def test_missing_program_is_a_cluster_error(tmp_path: Path, watchdog: Watchdog) -> None:
    process = ServerProcess("broker-0", ["/no/java"], tmp_path, {}, watchdog)
    with pytest.raises(ClusterError, match="starting broker-0 with /no/java"):
        process.start()


PARENT = """
import subprocess, sys, time
from pathlib import Path
from rocketmq_spark.cluster.process import Watchdog
folder = Path(sys.argv[1])
watchdog = Watchdog(folder)
listed, forgotten = (subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2))
watchdog.add(listed.pid)
watchdog.add(forgotten.pid)
# A process that is not in the list changes nothing.
watchdog.forget(2**22)
watchdog.forget(2**22)
watchdog.forget(forgotten.pid)
print(listed.pid, forgotten.pid, flush=True)
time.sleep(600)
"""


def test_killed_parent_takes_its_servers_and_their_folder_along(tmp_path: Path) -> None:
    folder = tmp_path / "store of 'quotes'"
    (folder / "commitlog").mkdir(parents=True)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        listed, forgotten = map(int, parent.stdout.readline().split())
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: process_start(listed) is None)
    wait_for(lambda: not folder.exists())
    assert process_start(forgotten) is not None
    os.kill(forgotten, signal.SIGKILL)


def test_released_watchdog_kills_no_process(tmp_path: Path) -> None:
    dog = Watchdog(tmp_path)
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        dog.add(sleeper.pid)
        dog.release()
        assert sleeper.poll() is None
        assert tmp_path.exists()
        sleeper.kill()
