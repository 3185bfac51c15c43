"""The state file of `cluster up`: which processes may be stopped."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark.cluster.config import user_folder
from rocketmq_spark.cluster.state import ClusterState, ServerRecord, StateFile, _ps, process_start
from rocketmq_spark.errors import ClusterError


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def record(pid: int, started: str | None = None, kind: str = "Broker") -> ServerRecord:
    known = started if started is not None else process_start(pid) or "never"
    return ServerRecord("broker-0", kind, "127.0.0.1:10911", pid, known, "server.log")


def cluster(directory: Path, *servers: ServerRecord, temporary: bool = True) -> ClusterState:
    return ClusterState("127.0.0.1:9876", None, str(directory), temporary, servers)


def test_state_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state")
    state = cluster(tmp_path, record(os.getpid()), record(1, "long ago", "NameServer"))
    with file.locked():
        file.save(state)
    assert file.load() == state
    file.remove()
    assert file.load() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"servers": [{}]}', '{"servers": []}', "null"])
def test_damaged_state_file_is_an_error_with_its_path_and_advice(tmp_path: Path, text: str) -> None:
    file = StateFile(tmp_path)
    file.path.write_text(text)
    with pytest.raises(ClusterError, match=r"reading the saved cluster in .*cluster\.json: .*then remove the file"):
        file.load()


def test_process_is_identified_by_its_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    assert process_start(sleeper.pid) == process_start(sleeper.pid)
    assert process_start(sleeper.pid) != process_start(os.getpid())
    assert record(sleeper.pid).state() == "running"


def test_start_without_proc_is_the_same_in_every_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC0")
    started = _ps(os.getpid(), "lstart")
    assert started
    monkeypatch.setenv("TZ", "AAA-10")
    assert _ps(os.getpid(), "lstart") == started


def test_zombie_process_counts_as_died(sleeper: subprocess.Popen[bytes]) -> None:
    known = record(sleeper.pid)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(sleeper.pid) is None
    assert known.state() == "died"


def test_recycled_pid_counts_as_died_and_gets_no_signal(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    recycled = record(sleeper.pid, "another boot/12345")
    assert recycled.state() == "died"
    state = cluster(tmp_path / "gone", recycled)
    assert not state.is_alive()
    state.stop()
    assert sleeper.poll() is None


@pytest.mark.parametrize("kind", ["Broker", "NameServer"])
@pytest.mark.parametrize("temporary", [True, False])
def test_stop_ends_a_paused_server(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], kind: str, temporary: bool
) -> None:
    store = tmp_path / "cluster"
    store.mkdir()
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    server = record(sleeper.pid, kind=kind)
    assert server.state() == "paused"
    cluster(store, server, temporary=temporary).stop()
    assert server.state() == "died"
    assert store.exists() is not temporary


def test_two_commands_at_once_are_refused(tmp_path: Path) -> None:
    with StateFile(tmp_path).locked(), pytest.raises(ClusterError, match="up or down is running"):
        StateFile(tmp_path).locked().__enter__()


def test_unwritable_state_folder_is_a_cluster_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="set ROCKETMQ_SPARK_STATE to another folder"):
        StateFile(tmp_path / "file" / "state").locked().__enter__()


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"ROCKETMQ_SPARK_STATE": "/a", "XDG_STATE_HOME": "/b"}, "/a"),
        ({"XDG_STATE_HOME": "/b"}, "/b/rocketmq-spark"),
        ({}, os.path.expanduser("~/.local/state/rocketmq-spark")),
    ],
)
def test_state_folder_is_the_one_the_user_chose(environ: dict[str, str], folder: str) -> None:
    assert user_folder("STATE", ".local/state", environ) == Path(folder)
