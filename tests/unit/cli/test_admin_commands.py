"""The commands about a cluster: their output on stdout and stderr, and their exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rocketmq_spark.cli.app import app, main
from rocketmq_spark.cli.connection import Connection, connected
from rocketmq_spark.cluster.state import ClusterState, ServerRecord, StateFile, process_start
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.properties import SHARDING_KEY, TIMER_DELAY_MS
from rocketmq_spark.model.route import BrokerData, QueueData, TopicRouteData
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.testing import FakeCluster, Reply
from tests.support.peer import refused_address
from tests.support.proxies import running_proxy
from tests.support.transports import Authority

Capture = pytest.CaptureFixture[str]
Run = Callable[..., tuple[int, str, str]]

COMMANDS = ("topics", "route", "offsets", "brokers", "create-topic", "send", "peek", "transactions", "doctor")
OF_A_TOPIC = ("route", "offsets", "peek")


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without a local cluster and without variables of the package."""
    monkeypatch.setenv("ROCKETMQ_SPARK_STATE", str(tmp_path / "state"))
    for name in ("NAMESRV_ADDR", "ROCKETMQ_ACCESS_KEY", "ROCKETMQ_SECRET_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(fake: FakeCluster, capsys: Capture) -> Run:
    """Run a command about the server, and return its exit code, stdout and stderr."""

    def invoke(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments, "-n", fake.name_server])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


@pytest.fixture
def as_json(run: Run) -> Callable[..., Any]:
    """Run a command that succeeds, and return its JSON."""

    def invoke(*arguments: str) -> Any:
        code, out, err = run(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return invoke


def body_at(fake: FakeCluster, receipt: dict[str, Any]) -> bytes:
    """Return the body of the message that a receipt is about."""
    queue = MessageQueue(receipt["topic"], receipt["broker_name"], receipt["queue_id"])
    (message,) = fake.brokers[queue.broker_name].storage.store.messages(
        queue, receipt["queue_offset"], receipt["queue_offset"] + 1
    )
    return message.body


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_the_same_connection(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "ROCKETMQ_SECRET_KEY": "hush-hush"})
    assert shown.exit_code == 0
    for option in ("--name-server", "--access-key", "--secret-key", "--tls", "--timeout", "--json"):
        assert option in shown.output
    assert "Other users can see command lines" in shown.output
    assert "hush-hush" not in shown.output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_a_commands_own_options_before_those_of_the_connection(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    own, _, connection = shown.partition("─ Connection ─")
    assert "--json" in own
    assert not set(re.findall(r"--[a-z-]+", own)) & {"--name-server", "--tls", "--access-key", "--timeout"}
    assert set(re.findall(r"--[a-z-]+", connection)) >= {"--name-server", "--tls", "--access-key", "--timeout"}


def test_a_number_as_name_server_of_a_peek_suggests_the_option_for_counts(capsys: Capture) -> None:
    assert main(["peek", "orders", "-n", "5"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "-n 5 is no address" in err
    assert "The number of messages is -c" in err


def test_a_route_is_shown_and_is_json(run: Run, as_json: Callable[..., Any], fake: FakeCluster) -> None:
    assert as_json("route", "orders") == [
        {
            "broker_name": "a",
            "cluster": "DefaultCluster",
            "addresses": {"0": fake.brokers["a"].address},
            "read_queues": 2,
            "write_queues": 2,
            "permission": "rw",
        }
    ]
    assert fake.brokers["a"].address in run("route", "orders")[1]


def test_offsets_are_shown_with_their_sum_and_as_json(run: Run, as_json: Callable[..., Any]) -> None:
    assert [row["messages"] for row in as_json("offsets", "orders")] == [2, 1]
    assert run("offsets", "orders")[1].splitlines()[-1] == "3 messages in 2 queues"


def test_a_peek_is_shown_and_is_json(run: Run, as_json: Callable[..., Any]) -> None:
    (newest,) = as_json("peek", "orders", "-c", "1")
    assert newest == {
        "store_time": "2023-11-14T22:13:20.500Z",
        "broker_name": "a",
        "queue_id": 0,
        "queue_offset": 1,
        "tags": "t0",
        "keys": "k",
        "properties": {"colour": "red"},
        "body": {"base64": "dGhyZWUg/w=="},
    }
    assert "zwei ü" in run("peek", "orders", "--tag", "t1")[1]


def test_incomplete_topics_and_brokers_exit_with_1_and_name_missing_parts(run: Run) -> None:
    for command in ("topics", "brokers"):
        code, out, err = run(command, "--json")
        assert code == 1
        assert json.loads(out)
        assert err.startswith("rocketmq-spark: missing: ")
        assert "gone" in err
        assert err.count("\n") == 1


def test_a_new_topic_is_shown_as_its_route(as_json: Callable[..., Any], fake: FakeCluster) -> None:
    del fake.name_servers[0].routes["half"]
    (created,) = as_json("create-topic", "new", "-q", "3", "--type", "fifo", "--inner")
    assert created["write_queues"] == 3
    assert fake.brokers["a"].storage.topics["new"].attributes == {"message.type": "FIFO", "queue.type": "BatchCQ"}


def test_send_options_become_message_fields(as_json: Callable[..., Any], fake: FakeCluster) -> None:
    options = ("--tags", "t", "--keys", "k1 k2", "--property", "a=b=c", "--property", "d=e", "--delay-ms", "1000")
    receipt = as_json("send", "orders", "hello", *options, "--sharding-key", "customer-7")
    assert (receipt["status"], receipt["topic"], receipt["broker_name"]) == ("SEND_OK", "orders", "a")
    stored = fake.brokers["a"].storage.store.log[-1]
    sent = stored.sent
    assert stored.meant_for == MessageQueue("orders", "a", receipt["queue_id"])
    assert (sent.body, sent.tags, sent.keys) == (b"hello", "t", "k1 k2")
    assert sent.user_properties == {"a": "b=c", "d": "e", SHARDING_KEY: "customer-7"}
    assert sent.properties[TIMER_DELAY_MS] == "1000"
    assert as_json("send", "orders", "again", "--sharding-key", "customer-7")["queue_id"] == receipt["queue_id"]


def test_receipt_has_all_keys_as_json_and_only_set_ones_in_the_table(
    run: Run, as_json: Callable[..., Any], fake: FakeCluster
) -> None:
    receipt = as_json("send", "orders", "x")
    assert [*receipt][-2:] == ["offset_msg_id", "recall_handle"]
    assert receipt["recall_handle"] is None
    shown = run("send", "orders", "x")[1]
    assert "offset msg id" in shown
    assert "recall handle" not in shown


def test_text_that_is_no_unicode_is_sent_as_its_bytes(as_json: Callable[..., Any], fake: FakeCluster) -> None:
    # Python decodes an argument with the byte 0xff to this text.
    receipt = as_json("send", "orders", os.fsdecode(b"\xff caf\xc3\xa9"))
    assert body_at(fake, receipt) == b"\xff caf\xc3\xa9"


@pytest.mark.parametrize("option", ["--tags", "--keys", "--property", "--sharding-key"])
def test_send_options_with_invalid_unicode_are_rejected(run: Run, option: str) -> None:
    name = "a=" if option == "--property" else ""
    code, out, err = run("send", "orders", "x", option, name + os.fsdecode(b"\xff"))
    assert (code, out, err.count("\n")) == (1, "", 1)


def test_unchecked_certificates_are_warned_of_once(tmp_path: Path, capsys: Capture) -> None:
    authority = Authority(tmp_path)
    with FakeCluster(topics={"orders": 1}, tls=authority.context("server", "DNS:elsewhere.example")) as fake:
        for command in (["route", "orders"], ["send", "orders", "x"]):
            assert main([*command, "-n", fake.name_server, "--tls", "--tls-insecure-skip-verify"]) == 0
            assert capsys.readouterr().err == (
                "rocketmq-spark: certificates are not verified (--tls-insecure-skip-verify)\n"
            )


def test_body_is_read_from_standard_input(
    as_json: Callable[..., Any], fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff bytes\n")))
    receipt = as_json("send", "orders", "-")
    assert body_at(fake, receipt) == b"\xff bytes\n"


def test_prompt_is_shown_for_a_body_from_a_terminal(
    run: Run, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(ours, "wb", buffering=0) as keyboard, os.fdopen(theirs, "r") as terminal:
        keyboard.write(b"typed\n\x04")
        monkeypatch.setattr(sys, "stdin", terminal)
        code, _, err = run("send", "orders")
    assert (code, err) == (0, "rocketmq-spark: type the message, then press Ctrl-D on an empty line\n")
    assert b"typed\n" in [message.body for message in fake.messages("orders")]


@pytest.mark.parametrize("tags", ["a|b", " "])
def test_invalid_tag_is_rejected_before_sending(run: Run, fake: FakeCluster, tags: str) -> None:
    stored = len(fake.messages("orders"))
    code, out, err = run("send", "orders", "x", "--tags", tags)
    assert (code, out) == (1, "")
    assert err.startswith(f"rocketmq-spark: option --tags is {tags!r}, which is not allowed: allowed is one tag")
    assert len(fake.messages("orders")) == stored


@pytest.mark.parametrize("command", [[], ["cluster"], ["cluster", "up"], ["demo"], *([name] for name in COMMANDS)])
def test_h_is_help(command: list[str], capsys: Capture) -> None:
    assert main([*command, "-h"]) == 0
    assert "Usage: rocketmq-spark" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option",
    [
        ("--property", "nope"),
        ("--property", "TAGS=x"),
        ("--property", "a=1", "--property", "a=2"),
        ("--delay-ms", "-1"),
    ],
)
def test_invalid_send_option_is_a_one_line_error(run: Run, option: tuple[str, ...]) -> None:
    code, out, err = run("send", "orders", "x", *option)
    assert (code, out, err.count("\n")) == (1, "", 1)


@pytest.mark.parametrize("command", OF_A_TOPIC)
def test_missing_topic_is_a_one_line_error_with_a_similar_name(run: Run, command: str) -> None:
    code, out, err = run(command, "ordres", "--json")
    assert (code, out) == (1, "")
    assert err.startswith("rocketmq-spark: topic ordres does not exist: ")
    assert err.endswith("did you mean orders?\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [*(name for name in COMMANDS if name != "doctor")])
def test_wrong_port_is_a_one_line_error_with_advice(command: str, capsys: Capture) -> None:
    address = refused_address()
    topic = [] if command in ("topics", "brokers") else ["orders"]
    body = ["x"] if command == "send" else []
    assert main([command, *topic, *body, "-n", address]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"rocketmq-spark: name server {address}: no server listens; start a name server (on this machine: "
        "rocketmq-spark cluster up), or check the address\n"
    )


def test_error_does_not_mention_an_unreachable_redundant_name_server(fake: FakeCluster, capsys: Capture) -> None:
    gone = BrokerData("gone", {0: refused_address()}, "DefaultCluster")
    fake.name_servers[0].routes["lost"] = TopicRouteData((QueueData("gone", 2, 2, 6),), (gone,))
    assert main(["offsets", "lost", "-n", f"{refused_address()};{fake.name_server}"]) == 1
    assert "name server" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["topics"], "no name server is given: use -n host:9876"),
        (["topics", "-n", "localhost"], "option name_server is 'localhost', which is not allowed"),
        (["topics", "-n", "a:1", "--timeout", "0"], "timeout is 0.0"),
        (["topics", "-n", "a:1", "--timeout", "inf"], "timeout is inf: allowed are seconds per request"),
        (["topics", "-n", "a:1", "--timeout", "1e12"], "timeout is 1000000000000.0: "),
        (["send", "t", "x", "-n", "a:1", "--timeout", "3601"], "timeout is 3601.0: "),
        (["doctor", "--endpoints", "a:1", "--timeout", "inf"], "timeout is inf: "),
        (["topics", "-n", "a:1", "--access-key", "u"], "access_key is given without secret_key"),
        (["topics", "-n", "a:1", "--tls", "--tls-ca-file", "/no/such.pem"], "option tlsCaFile: reading '/no/such.pem'"),
    ],
)
def test_invalid_options_are_one_line_errors(arguments: list[str], said: str, capsys: Capture) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"rocketmq-spark: {said}")
    assert captured.err.count("\n") == 1


def test_a_typo_in_an_option_is_answered_with_the_right_one(capsys: Capture) -> None:
    assert main(["topics", "--acess-key", "u"]) == 2
    assert "--access-key" in capsys.readouterr().err


def test_environment_sets_name_server_and_user(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", fake.name_server)
    monkeypatch.setenv("ROCKETMQ_ACCESS_KEY", "someone")
    monkeypatch.setenv("ROCKETMQ_SECRET_KEY", "hush-hush")
    assert main(["route", "orders", "--sign-name-server-requests"]) == 0
    assert fake.name_servers[0].requests[-1].ext_fields["AccessKey"] == "someone"
    assert "hush-hush" not in str(fake.name_servers[0].requests)


def test_running_cluster_is_the_default_name_server(fake: FakeCluster, tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state")
    this = ServerRecord("namesrv", "NameServer", fake.name_server, os.getpid(), process_start(os.getpid()) or "", "log")
    with file.locked():
        file.save(ClusterState(fake.name_server, None, str(tmp_path), True, (this,)))
    assert main(["route", "orders"]) == 0
    with file.locked():
        file.save(ClusterState(fake.name_server, None, str(tmp_path), True, (replace(this, started="another"),)))
    # A cluster whose servers died counts as stopped.
    assert main(["route", "orders"]) == 1


def test_keys_of_the_running_cluster_are_the_default_credentials(
    fake: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "admin.secret").write_text("hush-hush")
    file = StateFile(tmp_path / "state")
    this = ServerRecord("namesrv", "NameServer", fake.name_server, os.getpid(), process_start(os.getpid()) or "", "log")
    options = {"accessKey": "admin", "secretKey": f"file:{tmp_path}/admin.secret"}
    with file.locked():
        file.save(ClusterState(fake.name_server, None, str(tmp_path), True, (this,), options))
    assert main(["route", "orders", "--sign-name-server-requests"]) == 0
    assert fake.name_servers[0].requests[-1].ext_fields["AccessKey"] == "admin"
    monkeypatch.setenv("ROCKETMQ_ACCESS_KEY", "someone")
    monkeypatch.setenv("ROCKETMQ_SECRET_KEY", "hush-hush")
    assert main(["route", "orders", "--sign-name-server-requests"]) == 0
    assert fake.name_servers[0].requests[-1].ext_fields["AccessKey"] == "someone"
    # Another cluster has other keys.
    for name in ("ROCKETMQ_ACCESS_KEY", "ROCKETMQ_SECRET_KEY"):
        monkeypatch.delenv(name)
    assert main(["route", "orders", "-n", fake.name_server]) == 0
    assert "AccessKey" not in fake.name_servers[0].requests[-1].ext_fields


@pytest.mark.parametrize("dead", ["namesrv", "broker-0"])
def test_keys_of_a_cluster_with_a_dead_server_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, dead: str
) -> None:
    (tmp_path / "admin.secret").write_text("hush-hush")
    options = {"accessKey": "admin", "secretKey": f"file:{tmp_path}/admin.secret"}
    file = StateFile(tmp_path / "state")
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        address = f"127.0.0.1:{other.getsockname()[1]}"
        started = process_start(os.getpid()) or ""
        servers = [
            ServerRecord("namesrv", "NameServer", address, os.getpid(), started, "log"),
            ServerRecord("broker-0", "Broker", "127.0.0.1:10911", os.getpid(), started, "log"),
            ServerRecord("proxy", "Proxy", "127.0.0.1:8080", os.getpid(), started, "log"),
        ]
        # The same pid, started at another time: the recorded process is gone.
        records = tuple(replace(one, started="another boot/1") if one.name == dead else one for one in servers)
        with file.locked():
            file.save(ClusterState(address, None, str(tmp_path), True, records, options))
        for with_keys in (False, True):
            if with_keys:
                monkeypatch.setenv("ROCKETMQ_ACCESS_KEY", "someone")
                monkeypatch.setenv("ROCKETMQ_SECRET_KEY", "hush-hush")
            assert main(["topics"]) == 1
            err = capsys.readouterr().err
            assert err.startswith(f"rocketmq-spark: {dead} (pid ")
            assert "of the cluster started with `rocketmq-spark cluster up` has died" in err
            assert "-n host:9876" in err
            assert "--access-key" in err
            assert err.count("\n") == 1
        with pytest.raises(BlockingIOError):
            other.accept()


def test_keys_are_not_used_for_the_endpoints_of_a_dead_proxy(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "admin.secret").write_text("hush-hush")
    options = {"accessKey": "admin", "secretKey": f"file:{tmp_path}/admin.secret"}
    file = StateFile(tmp_path / "state")
    this = ServerRecord("namesrv", "NameServer", "n:9876", os.getpid(), process_start(os.getpid()) or "", "log")
    with running_proxy() as proxy:
        dead = replace(this, name="proxy", kind="Proxy", address=proxy.address, started="another boot/1")
        with file.locked():
            file.save(ClusterState("n:9876", proxy.address, str(tmp_path), True, (this, dead), options))
        assert main(["doctor", "--endpoints", proxy.address]) == 1
        assert list(proxy.calls) == []
    assert f"proxy (pid {os.getpid()}) of the cluster" in capsys.readouterr().err


def test_dead_broker_of_a_cluster_without_keys_is_ignored(fake: FakeCluster, tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state")
    this = ServerRecord("namesrv", "NameServer", fake.name_server, os.getpid(), process_start(os.getpid()) or "", "log")
    dead = replace(this, name="broker-0", kind="Broker", started="another boot/1")
    with file.locked():
        file.save(ClusterState(fake.name_server, None, str(tmp_path), True, (this, dead)))
    assert main(["route", "orders"]) == 0


@pytest.mark.parametrize("is_cluster_proxy", [True, False])
def test_keys_of_the_running_cluster_are_sent_only_to_its_own_proxies(
    tmp_path: Path, capsys: Capture, is_cluster_proxy: bool
) -> None:
    (tmp_path / "admin.secret").write_text("hush-hush")
    file = StateFile(tmp_path / "state")
    this = ServerRecord("namesrv", "NameServer", "n:9876", os.getpid(), process_start(os.getpid()) or "", "log")
    options = {"accessKey": "admin", "secretKey": f"file:{tmp_path}/admin.secret"}
    with running_proxy() as proxy:
        endpoints = proxy.address if is_cluster_proxy else "127.0.0.1:1"
        running = (this, replace(this, name="proxy", kind="Proxy", address=endpoints))
        with file.locked():
            file.save(ClusterState("n:9876", endpoints, str(tmp_path), True, running, options))
        main(["doctor", "--endpoints", proxy.address, "--json"])
        (metadata,) = [one.metadata for one in proxy.calls if one.method == "QueryRoute"]
    assert ("Credential=admin" in metadata.get("authorization", "")) is is_cluster_proxy
    assert f"proxy {proxy.address}" in capsys.readouterr().out


def test_unknown_option_in_the_cluster_state_is_a_one_line_error(tmp_path: Path, capsys: Capture) -> None:
    file = StateFile(tmp_path / "state")
    this = ServerRecord("namesrv", "NameServer", "n:9876", os.getpid(), process_start(os.getpid()) or "", "log")
    with file.locked():
        file.save(ClusterState("n:9876", None, str(tmp_path), True, (this,), {"newOption": "x"}))
    assert main(["topics"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("rocketmq-spark: the running cluster has the option newOption")
    assert err.count("\n") == 1


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_impossible_host_name_is_a_one_line_error(host: str, capsys: Capture) -> None:
    assert main(["topics", "-n", f"{host}:9876"]) == 1
    assert capsys.readouterr().err == (
        f"rocketmq-spark: name server {host}:9876: the host's name is unknown here; check the spelling, or give the "
        "host's IP address\n"
    )


def test_text_that_the_terminal_cannot_encode_is_escaped() -> None:
    command = [sys.executable, "-m", "rocketmq_spark", "doctor", "-n", refused_address()]
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    answer = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert (answer.returncode, answer.stderr) == (1, "")
    assert "\\u2192 start a name server" in answer.stdout


def test_control_characters_from_servers_are_escaped_in_all_output(fake: FakeCluster, run: Run) -> None:
    for code in (RequestCode.GET_MAX_OFFSET, RequestCode.GET_BROKER_RUNTIME_INFO):
        fake.brokers["a"].always[code] = Reply.code(1, "evil \x1b]0;title\x07")
    gone = BrokerData("gone\x9b2J", {0: refused_address()}, "DefaultCluster")
    fake.name_servers[0].routes["half"] = TopicRouteData((QueueData("gone\x9b2J", 1, 1, 6),), (gone,))
    for command in (["offsets", "orders"], ["brokers"], ["doctor"]):
        status, out, err = run(*command)
        assert status == 1
        assert "evil \\x1b]0;title\\x07" in out + err
        assert not set("\x1b\x9b") & set(out + err)


def test_doctor_exits_with_1_if_a_check_failed(run: Run, fake: FakeCluster) -> None:
    code, out, _ = run("doctor", "--json")
    findings = json.loads(out)
    assert code == 1
    assert {
        "check": f"name server {fake.name_server}",
        "state": "ok",
        "finding": "knows a, gone",
        "fix": "",
    } in findings
    assert [one["check"] for one in findings if one["state"] == "failed"] == ["broker gone"]
    code, out, _ = run("doctor", "--topic", "orders")
    assert code == 1
    assert "→ if it runs, set brokerIP1" in out
    assert "1 failed" in out


def test_advice_of_the_doctor_is_one_unwrapped_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / f"{'an-environment-' * 12}" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho no such module >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setenv("PYSPARK_PYTHON", str(python))
    fix = f"        → export PYSPARK_PYTHON={sys.executable} on the driver, and the same Python on every node"
    for terminal in ({"FORCE_COLOR": "1", "TERM": "xterm"}, {}):
        monkeypatch.setenv("COLUMNS", "60")
        for name, value in terminal.items():
            monkeypatch.setenv(name, value)
        assert main(["doctor", "-n", refused_address()]) == 1
        lines = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
        assert fix in lines
        assert [line for line in lines if str(python) in line]
        monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert [
        line for line in lines if line.endswith(f"{python} (PYSPARK_PYTHON) is not a working Python: no such module")
    ]


def test_command_receives_its_connection_and_its_own_options() -> None:
    seen: list[tuple[Connection, int]] = []

    def command(connection: Connection, count: int = 3) -> None:
        seen.append((connection, count))

    one = typer.Typer()
    one.command()(connected(command))
    assert CliRunner().invoke(one, ["--count", "5", "-n", "a:1", "--json"]).exit_code == 0
    ((connection, count),) = seen
    assert (connection.options["name_server"], connection.as_json, count) == ("a:1", True, 5)
    assert "a:1" not in repr(connection)
