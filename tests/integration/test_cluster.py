"""The local cluster: its servers start, stop, freeze and restart, and report why they cannot."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rocketmq_spark import Message, Producer, SendStatus
from rocketmq_spark.cluster import Broker, LocalCluster, NameServer, State
from rocketmq_spark.cluster.config import is_free, properties_of
from rocketmq_spark.cluster.jars import server_jars
from rocketmq_spark.cluster.probe import Probe
from rocketmq_spark.cluster.process import Watchdog, find_java
from rocketmq_spark.cluster.security import client_options
from rocketmq_spark.cluster.servers import Site
from rocketmq_spark.cluster.state import process_start
from rocketmq_spark.errors import ClusterError, RemotingConnectException, RemotingTimeoutException, RocketMQError
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.protocol.remoting.headers import GetMaxOffsetRequestHeader
from rocketmq_spark.protocol.remoting.responses import read_long

# The shared cluster comes first: where no server can run, its fixture says so for all of these.
from tests.support.cluster import SharedCluster, SharedServer
from tests.support.processes import PATIENCE, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("cluster")]

PROBE = Probe(timeout=PATIENCE)
# A short timeout, for servers that do not answer.
HASTY = Probe(timeout=1.0)


def max_offset(broker: Broker, topic: str, probe: Probe = PROBE) -> int:
    header = GetMaxOffsetRequestHeader(topic=topic, queue_id=0, broker_name=broker.name)
    answer = probe.ask(broker.address, RequestCode.GET_MAX_OFFSET, header.to_ext_fields(), "asking for the offset")
    return read_long(answer.ext_fields, "offset")


def test_new_topic_can_be_written_at_once_on_every_broker(cluster: SharedCluster, topic: str) -> None:
    assert [broker.name for broker in cluster.brokers] == ["broker-0", "broker-1"]
    for broker in cluster.brokers:
        assert PROBE.send(broker.address, broker.name, topic, b"first").queue_offset == 0
        assert PROBE.send(broker.address, broker.name, topic, b"second").queue_offset == 1


def test_servers_listen_on_this_machine_only(cluster: SharedCluster) -> None:
    assert re.fullmatch(r"127\.0\.0\.1:\d+", cluster.name_server)
    addresses = PROBE.registered_brokers(cluster.name_server)
    assert addresses == {broker.name: broker.address for broker in cluster.brokers}
    assert all(address.startswith("127.0.0.1:") for address in addresses.values())
    for address in (cluster.name_server, *addresses.values()):
        with socket.socket() as elsewhere:
            # A server that listens on all addresses would answer on this one.
            elsewhere.settimeout(2)
            assert elsewhere.connect_ex(("127.0.0.2", int(address.rpartition(":")[2]))) != 0


def as_slave(broker: SharedServer) -> bytes:
    """Ask a broker for its commit log as a slave does, and return what it sends until it hangs up."""
    properties = properties_of(Path(broker.log).with_name("broker.conf").read_text())
    received = bytearray()
    with socket.create_connection(("127.0.0.1", int(properties["haListenPort"])), PATIENCE) as connection:
        connection.sendall(struct.pack(">q", 0))
        deadline = time.monotonic() + PATIENCE
        while data := connection.recv(65_536):
            received += data
            assert time.monotonic() < deadline
    return bytes(received)


def test_replication_port_sends_no_messages(cluster: SharedCluster, topic: str) -> None:
    for broker in cluster.brokers:
        PROBE.send(broker.address, broker.name, topic, b"for nobody else")
        for _ in range(5):
            # The broker sends offset and length of a part of the commit log, then the part.
            assert {length for _, length in struct.iter_unpack(">qi", as_slave(broker))} <= {0}


def written_files(pid: int) -> Iterator[Path]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            flags = re.search(r"flags:\s+(\d+)", Path(f"/proc/{pid}/fdinfo/{link.name}").read_text())
            if flags and int(flags[1], 8) & (os.O_WRONLY | os.O_RDWR) and link.is_file():
                yield link.resolve(strict=True)


def test_broker_freezes_dies_and_comes_back_with_its_messages(tmp_path: Path, topic: str) -> None:
    with LocalCluster(
        directory=tmp_path, broker_properties={"maxMessageSize": 1000}, start_timeout=PATIENCE
    ) as cluster:
        (broker,) = cluster.brokers
        address = broker.address
        assert broker.properties["maxMessageSize"] == "1000"
        PROBE.send(address, broker.name, topic, b"x" * 1000)
        with pytest.raises(RocketMQError, match="13 MESSAGE_ILLEGAL"):
            PROBE.send(address, broker.name, topic, b"x" * 1001)

        broker.pause()
        assert (broker.state, broker.is_alive) == (State.PAUSED, True)
        with pytest.raises(RemotingTimeoutException):
            max_offset(broker, topic, HASTY)
        broker.resume()
        assert max_offset(broker, topic) == 1

        # The store's files are memory-mapped: acknowledged messages survive the process, even if they were not flushed.
        broker.kill()
        assert (broker.state, broker.pid) == (State.KILLED, None)
        with pytest.raises(RemotingConnectException):
            max_offset(broker, topic)
        cluster.check()
        broker.restart()
        assert (broker.state, broker.address) == (State.RUNNING, address)
        assert max_offset(broker, topic) == 1

        # A broker registers every 30 s. Its first registration, at its start, can fail on a fast machine.
        cluster.servers[0].restart()
        broker.await_ready(time.monotonic() + PATIENCE)
        assert PROBE.registered_brokers(cluster.name_server) == {broker.name: address}

        broker.stop()
        assert (broker.state, broker.pid) == (State.STOPPED, None)
        assert PROBE.registered_brokers(cluster.name_server) == {}
    assert broker.log.exists()

    with LocalCluster(directory=tmp_path, start_timeout=PATIENCE) as again:
        assert max_offset(again.brokers[0], topic) == 1
        again.brokers[0].kill()  # faster than an orderly stop


def test_two_clusters_share_nothing_and_proxy_serves_its_own_cluster(
    cluster: SharedCluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalCluster(proxy=True, start_timeout=PATIENCE) as other:
        check_that_open_ports_were_reported(other, caplog.text)
        theirs = {
            cluster.name_server,
            cluster.endpoints,
            *(server.address for server in (*cluster.brokers, cluster.proxy)),
        }
        ports = [port for server in other.servers for port in server.ports]
        assert len(set(ports)) == len(ports)
        assert not {int(address.rpartition(":")[2]) for address in theirs} & set(ports)
        assert repr(other) == (
            f"<LocalCluster namesrv running {other.name_server},"
            f" broker-0 running {other.brokers[0].address}, proxy running {other.servers[-1].address}>"
        )
        with pytest.raises(ClusterError, match="is already running"):
            other.start()
        if Path("/proc/self/fd").exists():
            check_that_servers_write_in_their_folder(other)
        assert PROBE.registered_brokers(other.name_server) == {"broker-0": other.brokers[0].address}

        proxy = other.proxy
        assert proxy is not None
        host, _, port = other.endpoints.rpartition(":")
        socket.create_connection((host, int(port)), 5).close()
        PROBE.send(other.brokers[0].address, "broker-0", topic, b"made at the broker")
        wait_for(lambda: topic in topics(other.name_server))
        (known,) = PROBE.route(proxy.address, topic).broker_datas
        assert (known.broker_name, known.master) == ("broker-0", proxy.address)
        assert topic not in topics(cluster.name_server)
        folder = other.directory
    assert not folder.exists()
    assert proxy.state is State.KILLED


def check_that_open_ports_were_reported(cluster: LocalCluster, log: str) -> None:
    assert cluster.proxy is not None
    grpc, remoting = cluster.proxy.ports
    assert f"the proxy's ports {grpc} and {remoting} are open on every address of this machine" in log
    assert "auth=True" in log
    for port in (grpc, remoting):
        # A proxy that listens on one address only needs no warning.
        socket.create_connection(("127.0.0.2", port), PATIENCE).close()


def check_that_servers_write_in_their_folder(cluster: LocalCluster) -> None:
    for server in cluster.servers:
        assert server.pid is not None
        files = list(written_files(server.pid))
        assert server.log.resolve() in files
        assert [file for file in files if not file.is_relative_to(cluster.directory.resolve())] == []


def topics(name_server: str) -> list[str]:
    answer = PROBE.ask(name_server, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {}, "asking for topics")
    names: list[str] = json.loads(bytes(answer.body))["topicList"]
    return names


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary folders, so that the test can find left-over ones."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_server_that_cannot_start_reports_reason_and_keeps_its_log(temporary: Path) -> None:
    with pytest.raises(ClusterError) as error:
        LocalCluster(jvm_options=["-Xmx3m"]).start()
    text = str(error.value)
    assert text.startswith("starting the cluster: namesrv ended with exit code 1;")
    log = re.search(r"its logs are (\S+) and console\.log beside it", text)
    assert log is not None
    assert Path(log[1]).is_relative_to(temporary)
    assert "size" in Path(log[1]).with_name("console.log").read_text()


@pytest.mark.usefixtures("temporary")
def test_broker_that_rejects_its_properties_reports_the_reason() -> None:
    with pytest.raises(ClusterError, match=r"broker-0 ended with .* it logged: .*Slave's brokerId must be > 0"):
        LocalCluster(broker_properties={"brokerRole": "SLAVE"}).start()


@pytest.mark.usefixtures("temporary")
def test_secured_cluster_that_cannot_start_leaves_no_secret(temporary: Path) -> None:
    with pytest.raises(ClusterError, match=r"Slave's brokerId must be > 0") as error:
        LocalCluster(auth=True, tls=True, broker_properties={"brokerRole": "SLAVE"}).start()
    left = {file.name: file.read_text(errors="replace") for file in temporary.rglob("*") if file.is_file()}
    assert {"server.log", "console.log", "ca.pem"} <= set(left)
    for text in (str(error.value), *left.values()):
        assert not re.search("PRIVATE KEY|password|secretKey", text)


@pytest.mark.usefixtures("temporary")
def test_broker_that_dies_later_is_noticed_and_its_log_kept(caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster() as cluster:
        (broker,) = cluster.brokers
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGKILL)
        wait_for(lambda: not broker.is_alive)
        with pytest.raises(ClusterError, match="broker-0 ended by SIGKILL; killed by another process"):
            cluster.check()
    assert "broker-0 ended by SIGKILL" in caplog.text
    assert broker.log.exists()
    assert not (broker.folder / "store").exists()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site for single servers without a cluster."""
    jars = server_jars(find_java)
    watchdog = Watchdog()
    yield Site(find_java(), jars, tmp_path, watchdog, Probe(), jvm_options=(), start_timeout=PATIENCE)
    watchdog.release()


def test_port_taken_just_before_start_is_replaced(site: Site) -> None:
    name_server = NameServer(site, None)
    lost = name_server.ports[0]
    try:
        with socket.socket() as thief:
            thief.bind(("127.0.0.1", lost))
            thief.listen()
            name_server.start()
            name_server.await_ready(time.monotonic() + site.start_timeout)
        assert name_server.is_alive
        assert name_server.ports[0] != lost
        assert PROBE.registered_brokers(site.name_server) == {}
    finally:
        name_server.kill()


def test_port_that_the_user_named_is_not_replaced(site: Site) -> None:
    name_server = NameServer(site, NameServer(site, None).ports[0])
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", name_server.ports[0]))
        thief.listen()
        name_server.start()
        with pytest.raises(ClusterError, match=r"a port is in use: .*it logged: .*(Failed to bind|already in use)"):
            name_server.await_ready(time.monotonic() + site.start_timeout)


PARENT = """
import time
from rocketmq_spark.cluster import LocalCluster
cluster = LocalCluster()
cluster.start()
print(cluster.directory, *(server.pid for server in cluster.servers), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_servers_do_not_outlive_the_program_that_started_them(number: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        folder, *pids = parent.stdout.readline().split()
        assert len(pids) == 2
        parent.send_signal(number)
    wait_for(lambda: all(process_start(int(pid)) is None for pid in pids))
    wait_for(lambda: not Path(folder).exists())


Run = Callable[..., subprocess.CompletedProcess[str]]


def command_line(state: Path) -> Run:
    env = {**os.environ, "ROCKETMQ_SPARK_STATE": str(state)}

    def run(*arguments: str, command: str = "cluster") -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "rocketmq_spark", command, *arguments]
        return subprocess.run(line, env=env, capture_output=True, text=True, check=False)

    return run


def test_cluster_of_the_command_line_runs_on_until_down(tmp_path: Path, topic: str) -> None:
    run = command_line(tmp_path)
    up = run("up")
    assert up.returncode == 0, up.stderr
    try:
        status = json.loads(run("status", "--json").stdout)
        assert f"name server  {status['name_server']}\n" in up.stdout
        assert [server["state"] for server in status["servers"]] == ["running", "running"]
        (address,) = PROBE.registered_brokers(status["name_server"]).values()
        PROBE.send(address, "broker-0", topic, b"after up has returned")
        assert "boot success" in run("logs", "broker-0", "-n", "1000").stdout
        assert run("up").returncode == 1
    finally:
        down = run("down")
    assert (down.returncode, down.stdout) == (0, "the cluster is stopped\n")
    assert all(process_start(server["pid"]) is None for server in status["servers"])
    assert not Path(status["directory"]).exists()


def take_over(address: str) -> socket.socket:
    """Listen at an address as soon as its server is gone."""
    host, _, port = address.rpartition(":")
    wait_for(lambda: is_free(int(port)))
    return socket.create_server((host, int(port)))


def test_dead_name_servers_port_gets_no_signed_request(tmp_path: Path) -> None:
    run = command_line(tmp_path)
    up = run("up", "--auth")
    assert up.returncode == 0, up.stderr
    try:
        status = json.loads(run("status", "--json").stdout)
        name_server, broker = status["servers"]
        # A running broker would connect to the port to register.
        os.kill(broker["pid"], signal.SIGSTOP)
        os.kill(name_server["pid"], signal.SIGKILL)
        with take_over(status["name_server"]) as other:
            other.setblocking(False)
            for command in ("topics", "brokers", "doctor"):
                refused = run(command=command)
                assert refused.returncode == 1
                assert "namesrv" in refused.stderr
                assert "--access-key" in refused.stderr
            with pytest.raises(BlockingIOError):
                other.accept()
        assert process_start(broker["pid"]) is not None
    finally:
        down = run("down")
    assert down.returncode == 0


def test_secured_cluster_from_command_line_accepts_only_its_own_keys(tmp_path: Path) -> None:
    run = command_line(tmp_path)
    up = run("up", "--auth", "--mutual", "--proxy")
    assert up.returncode == 0, up.stderr
    try:
        assert "are open on every address of this machine" in up.stderr
        status = json.loads(run("status", "--json").stdout)
        folder, options = Path(status["directory"]), status["options"]
        secret = (folder / "admin.secret").read_text()
        assert f'"secretKey": "file:{folder}/admin.secret"' in up.stdout
        created = run("orders", "--type", "NORMAL", command="create-topic")
        assert created.returncode == 0, created.stderr

        # Brokers and proxy reject clients without a certificate, and unknown users.
        settings = {**client_options(options), "mq_client_api_timeout": 60_000, "send_msg_timeout": 60_000}
        addresses = {"name_server": status["name_server"]}, {"endpoints": status["endpoints"]}
        for address in addresses:
            with Producer("pg", **address, **settings) as producer:
                assert producer.send(Message.of("orders", b"let in")).status is SendStatus.SEND_OK
            for change, text in (
                ({"tls_cert_file": None, "tls_key_file": None}, "tlsCertFile"),
                ({"access_key": "nobody"}, "User:nobody is not found"),
            ):
                stranger = Producer("pg", **address, **{**settings, **change})
                with stranger, pytest.raises(RocketMQError, match=text):
                    stranger.send(Message.of("orders", b"not let in"))
        assert [row["body"] for row in json.loads(run("orders", "--json", command="peek").stdout)] == ["let in"] * 2

        shown = up.stdout + up.stderr + json.dumps(status) + run("logs", "-n", "100000").stdout
        shown += "".join(Path(f"/proc/{server['pid']}/cmdline").read_text() for server in status["servers"])
        assert secret not in shown
    finally:
        down = run("down")
    assert down.returncode == 0
    assert not folder.exists()
