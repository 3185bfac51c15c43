"""The cluster commands without a JVM: their output and exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark.cli.app import main
from rocketmq_spark.cli.cluster_commands import _how_to_use
from rocketmq_spark.cluster.state import ClusterState, ServerRecord, StateFile, process_start
from rocketmq_spark.errors import escaped

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def state_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateFile:
    monkeypatch.setenv("ROCKETMQ_SPARK_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("ROCKETMQ_SPARK_CACHE", str(tmp_path / "cache"))
    return StateFile(tmp_path / "state")


@pytest.fixture
def running(state_file: StateFile, tmp_path: Path) -> Iterator[ClusterState]:
    """A cluster of one process in place of a broker."""
    log = tmp_path / "server.log"
    log.write_text("one\ntwo\nthree\n")
    with subprocess.Popen(["sleep", "600"]) as process:
        server = ServerRecord(
            "broker-0", "Broker", "127.0.0.1:10911", process.pid, process_start(process.pid) or "", str(log)
        )
        state = ClusterState("127.0.0.1:9876", "127.0.0.1:8081", str(tmp_path / "cluster"), True, (server,))
        with state_file.locked():
            state_file.save(state)
        yield state
        process.kill()


def test_status_and_down_without_a_cluster_succeed_and_report_it(capsys: Capture) -> None:
    for command in ("status", "down"):
        assert main(["cluster", command]) == 0
        assert capsys.readouterr().out.startswith("no cluster is running; start one with:")


def test_nothing_running_as_json(capsys: Capture) -> None:
    assert main(["cluster", "status", "--json"]) == 0
    nothing = dict.fromkeys(("name_server", "endpoints", "directory", "temporary", "options"))
    assert json.loads(capsys.readouterr().out) == {**nothing, "servers": [], "running": False}


def test_logs_without_a_cluster_fail_with_one_line(capsys: Capture) -> None:
    assert main(["cluster", "logs"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rocketmq-spark: no cluster is running")
    assert captured.err.count("\n") == 1


def test_status_shows_each_server(running: ClusterState, capsys: Capture) -> None:
    assert main(["cluster", "status"]) == 0
    out = capsys.readouterr().out
    assert "broker-0  running  127.0.0.1:10911" in out
    assert running.directory in out


def test_status_as_json_has_addresses_and_states(running: ClusterState, capsys: Capture) -> None:
    assert main(["cluster", "status", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["running"] is True
    assert status["name_server"] == running.name_server
    assert [server["state"] for server in status["servers"]] == ["running"]


def test_up_fails_if_a_cluster_is_running(running: ClusterState, capsys: Capture) -> None:
    assert main(["cluster", "up"]) == 1
    assert f"a cluster is already running, its name server is {running.name_server}" in capsys.readouterr().err


def test_down_stops_it_and_forgets_it(running: ClusterState, state_file: StateFile, capsys: Capture) -> None:
    assert main(["cluster", "down"]) == 0
    assert capsys.readouterr().out == "the cluster is stopped\n"
    assert not running.is_alive()
    assert state_file.load() is None


@pytest.mark.usefixtures("running")
def test_logs_show_the_last_lines(capsys: Capture) -> None:
    assert main(["cluster", "logs", "broker-0", "-n", "2"]) == 0
    assert capsys.readouterr().out == "two\nthree\n"


def test_logs_show_control_characters_as_their_codes(running: ClusterState, capsys: Capture) -> None:
    hostile = "topic a\rforged\x1b[2J\x9b\u2028\u202e"
    Path(running.servers[0].log).write_text(f"{hostile}\n\tat Main\n", newline="\n")
    assert main(["cluster", "logs"]) == 0
    assert capsys.readouterr().out == f"{escaped(hostile)}\n    at Main\n"


@pytest.mark.usefixtures("running")
def test_logs_of_an_unknown_server_fail_listing_the_known_ones(capsys: Capture) -> None:
    assert main(["cluster", "logs", "broker-9"]) == 1
    assert "the cluster has no server broker-9; it has broker-0" in capsys.readouterr().err


def test_up_without_java_fails_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["cluster", "up"]) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("rocketmq-spark: the local cluster needs Java and found none")
    assert "Traceback" not in captured.err


def test_wrong_command_line_is_exit_code_2(capsys: Capture) -> None:
    assert main(["cluster", "up", "--brokers", "0"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_module_can_be_run_as_the_command() -> None:
    command = [sys.executable, "-m", "rocketmq_spark", "cluster", "status"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith("no cluster is running")


def test_help_imports_neither_spark_nor_arrow() -> None:
    script = (
        "import sys; from rocketmq_spark.cli.app import main; code = main(['cluster', '--help']);"
        "heavy = {'pyspark', 'pyarrow', 'numpy', 'pandas'} & set(sys.modules); sys.exit(code or heavy or 0)"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr.strip()) == (0, "")


def test_a_demo_over_another_transport_is_a_wrong_command_line(capsys: Capture) -> None:
    assert main(["demo", "--transport", "http"]) == 2
    shown = capsys.readouterr().err
    assert "remoting" in shown
    assert "grpc" in shown


def test_usage_of_a_cluster_with_a_proxy_shows_both_protocols(running: ClusterState) -> None:
    shown = _how_to_use(running)
    assert f'.option("nameServer", "{running.name_server}").option("topic", "orders")' in shown
    assert f'.option("endpoints", "{running.endpoints}").option("topic", "orders")' in shown
    assert "open on every address of this machine" in shown
    without_proxy = _how_to_use(dataclasses.replace(running, endpoints=None))
    assert "endpoints" not in without_proxy
    assert "every address" not in without_proxy


def test_up_and_status_show_the_connection_options(
    running: ClusterState, state_file: StateFile, capsys: Capture
) -> None:
    options = {"accessKey": "admin", "secretKey": "file:/secured/admin.secret"}
    secured = dataclasses.replace(running, options=options)
    shown = _how_to_use(secured)
    assert json.loads(shown[shown.index("{") : shown.index("}") + 1]) == options
    for address in (f'"nameServer", "{running.name_server}"', f'"endpoints", "{running.endpoints}"'):
        assert f".option({address}).options(**security)" in shown
    with state_file.locked():
        state_file.save(secured)
    assert main(["cluster", "status"]) == 0
    assert "option secretKey file:/secured/admin.secret" in capsys.readouterr().out
    assert main(["cluster", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"] == options
