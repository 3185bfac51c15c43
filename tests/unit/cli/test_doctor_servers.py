"""The doctor's checks of name servers, brokers and topics."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest

from rocketmq_spark.admin import Table
from rocketmq_spark.cli.doctor import Check, examine
from rocketmq_spark.cli.doctor.machine import FAILED, OK, WARNING
from rocketmq_spark.model.route import BrokerData, QueueData, TopicRouteData
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.testing import BrokerSettings, FakeCluster, Reply, TopicSettings
from rocketmq_spark.transport.tls_probe import Listener, who_listens
from tests.support.fakes import name_server
from tests.support.peer import Peer, Session, refused_address
from tests.support.transports import Authority

TIMEOUT = 3.0
# An empty SETTINGS frame.
GREETING = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
# Rejected by Python's IDNA codec, before the resolver.
NO_NAMES = ("a..b", "a" * 64)


def figures(**changes: str) -> dict[str, str]:
    """The runtime information of a healthy broker."""
    booted = int(time.time() * 1000) - 60_000
    return {
        "brokerVersionDesc": "V5_5_0",
        "commitLogDiskRatio": "0.31",
        "bootTimestamp": str(booted),
        "runtime": "[ 0 days, 0 hours, 1 minutes, 0 seconds ]",
        **changes,
    }


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    """A healthy name server, and a healthy broker `a` with topic `orders`."""
    with FakeCluster(["a"], topics={"orders": 2}, settings=lambda: BrokerSettings(auto_create_topic=False)) as cluster:
        cluster.brokers["a"].figures.update(figures())
        yield cluster


def move_orders(fake: FakeCluster, name: str, address: str, broker_id: int = 0) -> None:
    """Let the name server know one broker, which has topic `orders` at an address."""
    fake.kill("a")
    fake.name_servers[0].routes["orders"] = TopicRouteData(
        (QueueData(name, 1, 1, 6),), (BrokerData(name, {broker_id: address}, "c"),)
    )


def looked_at(name_server: str | None, topic: str | None = None, **given: Any) -> Table[Check]:
    """Return the doctor's findings. Without Java the checks of this machine are fast."""
    return examine(name_server, topic=topic, timeout=TIMEOUT, environ={"PATH": ""}, **given)


def about(name_server: str, what: str, topic: str | None = None, **given: object) -> list[tuple[str, str, str]]:
    """Return the findings whose names have a prefix: (rest of the name, state, finding)."""
    checks = looked_at(name_server, topic, **given)
    return [(one.check.removeprefix(what), one.state, one.finding) for one in checks if one.check.startswith(what)]


def test_healthy_cluster_passes_all_checks(fake: FakeCluster) -> None:
    assert about(fake.name_server, "name server") == [(f" {fake.name_server}", OK, "knows a")]
    well = f"reachable at {fake.brokers['a'].address}, 5.5.0, permission rw, disk 31 % full, clock as on this machine"
    assert about(fake.name_server, "broker") == [(" a", OK, well)]
    assert about(fake.name_server, "topic", "orders") == [
        (" orders", OK, "2 queues on a; NORMAL messages, queues SimpleCQ"),
    ]


def test_doctor_sends_no_message_and_creates_no_topic(fake: FakeCluster) -> None:
    looked_at(fake.name_server, "orders")
    requests = [request for server in fake.name_servers for request in server.requests]
    requests += [request for broker in fake.brokers.values() for request in broker.requests]
    asked = {request.code for request in requests}
    assert asked.isdisjoint(
        {RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, RequestCode.UPDATE_AND_CREATE_TOPIC}
    )


def test_each_name_server_is_checked_separately(fake: FakeCluster) -> None:
    gone = refused_address()
    findings = about(f"{fake.name_server};{gone}", "name server")
    assert [state for _, state, _ in findings] == [OK, FAILED]
    assert findings[1][2] == "no server listens"


def test_missing_name_server_option_is_reported_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    last = looked_at(None)[-1]
    assert (last.check, last.state) == ("name server", FAILED)
    assert "rocketmq-spark cluster up" in last.fix


def test_malformed_address_is_reported_with_the_allowed_form() -> None:
    ((_, state, finding),) = about("localhost", "name server")
    assert state == FAILED
    assert "option name_server is 'localhost', which is not allowed: allowed is host:port" in finding


def test_name_server_without_brokers_fails() -> None:
    with name_server() as server:
        assert about(server.address, "name server")[0][1:] == (FAILED, "answers, but knows no broker")


def test_broker_port_and_proxy_port_are_distinguished(fake: FakeCluster) -> None:
    # A proxy knows routes, and supports no other request to name servers.
    fake.name_servers[0].always[RequestCode.GET_BROKER_CLUSTER_INFO] = Reply.code(3)
    assert about(fake.name_server, "name server")[0][1] == WARNING
    assert "a RocketMQ 5 proxy listens there" in about(fake.name_server, "name server")[0][2]
    assert about(fake.brokers["a"].address, "name server")[0][1:] == (FAILED, "a broker listens there")


def test_unreachable_registered_broker_address_gets_the_broker_ip1_advice(fake: FakeCluster) -> None:
    address = refused_address()
    move_orders(fake, "b", address)
    (check,) = [one for one in looked_at(fake.name_server) if one.check.startswith("broker")]
    assert check.state == FAILED
    assert check.finding == f"it is registered as {address}; from here: no server listens"
    assert "brokerIP1" in check.fix


@pytest.mark.parametrize(
    ("changes", "permission", "name", "state", "finding"),
    [
        ({"brokerVersionDesc": "V4_8_0"}, "6", "version", FAILED, "4.8.0, and 4.9 is the oldest"),
        ({}, "4", "permission", WARNING, "accepts no messages"),
        ({"commitLogDiskRatio": "0.87"}, "6", "disk", WARNING, "87 % full"),
        ({"commitLogDiskRatio": "0.93"}, "6", "disk", FAILED, "93 % full"),
        ({"runtime": "[ 0 days, 2 hours, 0 minutes, 0 seconds ]"}, "6", "clock", WARNING, "s ahead of this machine's"),
        ({"runtime": "[ 0 days, 0 hours, 0 minutes, 9 seconds ]"}, "6", "clock", WARNING, "s behind this machine's"),
    ],
)
def test_each_problem_of_a_broker_has_its_own_line(
    fake: FakeCluster, changes: dict[str, str], permission: str, name: str, state: str, finding: str
) -> None:
    fake.brokers["a"].figures.update(figures(**changes))
    fake.brokers["a"].settings.permission = int(permission)
    first, second = about(fake.name_server, "broker a")
    assert first[:2] == ("", OK)
    assert second[:2] == (f": {name}", state)
    assert finding in second[2]


def test_broker_that_returns_few_messages_per_pull_gets_advice() -> None:
    with FakeCluster(["a", "b", "c"]) as cluster:
        for name in ("a", "c"):
            cluster.brokers[name].config["maxTransferCountOnMessageInMemory"] = "32"
        expected = "a, c return at most 32 messages per pull (maxTransferCountOnMessageInMemory)"
        assert about(cluster.name_server, "reads") == [("", OK, expected)]


def test_brokers_that_limit_cold_reads_are_a_warning() -> None:
    with FakeCluster(["a", "b", "c"]) as cluster:
        for name in ("a", "c"):
            cluster.brokers[name].config.update(coldDataFlowControlEnable="true", cgColdReadThreshold="3145728")
        cluster.brokers["b"].config["coldDataFlowControlEnable"] = "false"
        finding = "a, c let a consumer group read 3,145,728 bytes of messages outside of memory in 5 s"
        assert about(cluster.name_server, "cold reads") == [("", WARNING, f"{finding} (coldDataFlowControlEnable)")]


@pytest.mark.parametrize("number", ["256", "1024", None])
def test_broker_with_many_or_unknown_messages_per_pull_gets_no_advice(fake: FakeCluster, number: str | None) -> None:
    fake.brokers["a"].config["maxTransferCountOnMessageInMemory"] = number
    assert about(fake.name_server, "reads") == []


def exactly_once(fake: FakeCluster) -> list[tuple[str, str]]:
    """Return state and finding of the checks for exactly-once writes."""
    return [(state, finding) for _, state, finding in about(fake.name_server, "exactly-once writes")]


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        (
            {"transRocksDBEnable": "false", "transWriteOriginTransHalfEnable": "true"},
            "slow on a (transRocksDBEnable=false, transWriteOriginTransHalfEnable=true): ",
        ),
        (
            {"transWriteOriginTransHalfEnable": "true"},
            "slow on a (transRocksDBEnable=true, transWriteOriginTransHalfEnable=true): ",
        ),
        (
            {"enableBuildConsumeQueueConcurrently": "true"},
            "unsafe on a (enableBuildConsumeQueueConcurrently=true): ",
        ),
        ({"rejectTransactionMessage": "true"}, "not possible on a (rejectTransactionMessage=true): "),
        (
            {"transactionTimeOut": "60001"},
            "slow after a crash on a (transactionTimeOut=60001): a job that crashed during a commit waits 60 s ",
        ),
        ({"transRocksDBEnable": None}, "may not be possible on a (release 5.5.0): they need brokers that reject "),
    ],
)
def test_setting_against_exactly_once_writes_is_a_warning(
    fake: FakeCluster, changes: dict[str, str | None], finding: str
) -> None:
    fake.brokers["a"].config.update(changes)
    ((state, actual),) = exactly_once(fake)
    assert state == WARNING
    assert actual.startswith(finding)


def test_settings_that_suit_exactly_once_writes_are_not_reported(fake: FakeCluster) -> None:
    assert exactly_once(fake) == []
    # The store in RocksDB does not use the settings of the default store.
    fake.brokers["a"].config.update(
        transactionTimeOut="60000",
        transactionOpMsgMaxSize="1",
        transactionOpBatchInterval="2000000000",
        enableBuildConsumeQueueConcurrently="false",
        rejectTransactionMessage="false",
    )
    assert exactly_once(fake) == []


@pytest.mark.parametrize(("size", "interval", "lines"), [("1", "3000", 2), ("4096", "60001", 2), ("4096", "3000", 1)])
def test_extreme_settings_of_the_default_transaction_store_are_reported(
    fake: FakeCluster, size: str, interval: str, lines: int
) -> None:
    fake.brokers["a"].config.update(
        transRocksDBEnable="false", transactionOpMsgMaxSize=size, transactionOpBatchInterval=interval
    )
    findings = exactly_once(fake)
    assert len(findings) == lines
    reported = f"slow on a (transactionOpMsgMaxSize={size}, transactionOpBatchInterval={interval}): "
    assert [finding.startswith(reported) for _, finding in findings] == [False, True][:lines]


def test_brokers_with_the_same_finding_about_exactly_once_share_a_line() -> None:
    with FakeCluster(["a", "b", "c"]) as cluster:
        for name, timeout in (("a", "90000"), ("b", "6000"), ("c", "90000")):
            cluster.brokers[name].config["transactionTimeOut"] = timeout
        ((_, finding),) = exactly_once(cluster)
    assert finding.startswith("slow after a crash on a, c (transactionTimeOut=90000): ")


def test_settings_of_a_slave_are_not_checked_for_exactly_once_writes() -> None:
    with FakeCluster(["a"], slaves=1) as cluster:
        cluster.slaves["a"][0].config["rejectTransactionMessage"] = "true"
        assert exactly_once(cluster) == []


def test_settings_that_the_user_may_not_see_are_no_warning(fake: FakeCluster) -> None:
    remark = "User:u has no permission to access Cluster:c"
    fake.brokers["a"].always[RequestCode.GET_BROKER_CONFIG] = Reply.code(ResponseCode.NO_PERMISSION, remark)
    assert exactly_once(fake) == [(OK, "not checked on a: this user may not see the settings")]


def test_clock_that_no_broker_reports_is_unknown(fake: FakeCluster) -> None:
    fake.brokers["a"].figures.update(dict.fromkeys(figures()))
    assert about(fake.name_server, "broker")[0][2].endswith("release unknown, permission rw, clock unknown")


def test_silent_brokers_are_checked_concurrently(fake: FakeCluster) -> None:
    together = Barrier(2, timeout=TIMEOUT)

    def play(session: Session) -> None:
        said = session.sock.recv(64)
        if said.startswith(b"PRI"):
            # The HTTP/2 server answers only while the other connection gets the same bytes.
            together.wait()
            session.sock.sendall(GREETING)
            session.wait_for_hangup()

    with Peer(play) as one, Peer(play) as other:
        move_orders(fake, "b0", one.address)
        fake.name_servers[0].routes["more"] = TopicRouteData(
            (QueueData("b1", 1, 1, 6),), (BrokerData("b1", {0: other.address}, "c"),)
        )
        findings = about(fake.name_server, "broker")
    assert [(name, state) for name, state, _ in findings] == [(" b0", FAILED), (" b1", FAILED)]
    assert all("from here: a gRPC server listens" in text for _, _, text in findings)


def test_a_broker_without_master_takes_no_messages() -> None:
    with FakeCluster(["a"], slaves=1, topics={"orders": 1}) as fake:
        fake.slaves["a"][0].figures.update(figures())
        fake.kill("a")
        first, second = about(fake.name_server, "broker a")
    assert first[1] == WARNING
    assert second[:2] == (", slave 1", OK)


@pytest.mark.parametrize(
    ("code", "remark", "state", "finding"),
    [
        (16, "check signature failed.", FAILED, "the access key is rejected: check signature failed."),
        (16, "User:u has no permission to access Cluster:c", OK, "this user may not see its release, disk and clock"),
        (1, "a.AclException: No acl config for u, a.B", FAILED, "the access key is rejected: a.AclException: No acl"),
    ],
)
def test_rejected_key_and_missing_permission_are_distinguished(
    fake: FakeCluster, code: int, remark: str, state: str, finding: str
) -> None:
    fake.brokers["a"].always[RequestCode.GET_BROKER_RUNTIME_INFO] = Reply.code(code, remark)
    ((_, actual_state, actual_finding),) = about(fake.name_server, "broker")
    assert actual_state == state
    assert finding in actual_finding


def test_topic_without_permission_is_a_warning(fake: FakeCluster) -> None:
    remark = "User:u has no permission to access Topic:orders"
    fake.brokers["a"].always[RequestCode.GET_MAX_OFFSET] = Reply.code(ResponseCode.NO_PERMISSION, remark)
    ((_, state, finding),) = about(fake.name_server, "topic", "orders")
    assert (state, finding) == (WARNING, f"the user may not query its offsets and settings: {remark}")


def test_missing_topic_fails_unless_brokers_create_topics(fake: FakeCluster) -> None:
    ((_, state, finding),) = about(fake.name_server, "topic", "ordres")
    assert state == FAILED
    assert "did you mean orders?" in finding
    fake.brokers["a"].settings.auto_create_topic = True
    fake.create_topic("TBW102")
    ((_, state, finding),) = about(fake.name_server, "topic", "ordres")
    assert state == WARNING
    assert finding.startswith("it does not exist; the first write creates it on a")


def test_read_only_topic_fails(fake: FakeCluster) -> None:
    fake.create_topic("orders", 2, perm=4)
    checks = [check for check in looked_at(fake.name_server, "orders") if check.check == "topic orders"]
    (failed,) = [check for check in checks if check.state == FAILED]
    assert failed.finding == "its permission does not allow it to be written on a (all its brokers)"
    assert failed.fix == "rocketmq-spark create-topic orders --update --queues 2 sets its permission to rw"


@pytest.mark.parametrize(
    ("attributes", "fix"),
    [
        ({"message.type": "FIFO"}, "create-topic orders --update --queues 3 --type TYPE sets one message type"),
        ({"queue.type": "BatchCQ"}, "create it under another name, because queue types can't be changed"),
    ],
)
def test_advice_for_brokers_that_differ_depends_on_the_type(attributes: dict[str, str], fix: str) -> None:
    with FakeCluster(brokers=2) as cluster:
        first, second = cluster.brokers.values()
        first.storage.create_topic("orders", TopicSettings(2, 2))
        second.storage.create_topic("orders", TopicSettings(3, 3, attributes=attributes))
        checks = [check for check in looked_at(cluster.name_server, "orders") if check.check == "topic orders"]
    assert [check.state for check in checks] == [OK, WARNING]
    assert fix in checks[1].fix


def test_static_topic_is_reported(fake: FakeCluster) -> None:
    route = fake.name_servers[0].route("orders")
    assert route is not None
    fake.name_servers[0].routes["orders"] = replace(route, static_topic=True)
    assert about(fake.name_server, "topic", "orders") == [
        (" orders", FAILED, "reading topic orders: it is a static (logical) topic, which this release can't read"),
    ]


class Handler(BaseHTTPRequestHandler):
    """Answers every GET."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_http_server_is_recognised() -> None:
    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = f"127.0.0.1:{http.server_port}"
        try:
            assert who_listens(address, TIMEOUT) is Listener.HTTP
        finally:
            http.shutdown()
            thread.join()


def greeting(session: Session) -> None:
    """Send the first frame of an HTTP/2 server."""
    session.sock.recv(64)
    session.sock.sendall(GREETING)
    session.wait_for_hangup()


def test_grpc_server_is_recognised() -> None:
    with Peer(greeting) as peer:
        assert who_listens(peer.address, TIMEOUT) is Listener.GRPC


def test_tls_server_is_recognised_and_so_is_grpc_over_tls(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).server("server", "IP:127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with name_server(tls=context) as peer:
        ((_, state, finding),) = about(peer.address, "name server")
        assert (state, finding) == (FAILED, "a server listens that accepts only TLS")
    context.set_alpn_protocols(["h2"])
    with name_server(tls=context) as peer:
        assert who_listens(peer.address, TIMEOUT) is Listener.GRPC


def test_tls_to_a_plain_server_is_reported(fake: FakeCluster) -> None:
    findings = about(fake.name_server, "name server", use_tls=True)
    assert findings == [(f" {fake.name_server}", FAILED, "it does not support TLS")]
    (check,) = [one for one in looked_at(fake.name_server, use_tls=True) if one.check.startswith("name server")]
    assert "an attacker may be intercepting the connection" in check.fix


def test_certificate_of_an_unknown_authority_is_reported(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).server("server", "IP:127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with name_server(tls=context) as peer:
        (check,) = [one for one in looked_at(peer.address, use_tls=True) if one.check.startswith("name server")]
    assert "the server's certificate is not trusted" in check.finding
    assert "tlsCaFile" in check.fix
    assert "tlsServerName" not in check.fix


def name_server_over_tls(address: str, authority: Authority) -> Check:
    """Return the findings about a name server, with or without trust in its authority."""
    given: dict[str, Any] = {"use_tls": True, "tls_ca_file": str(authority.ca_file)}
    (check,) = [one for one in looked_at(address, **given) if one.check.startswith("name server")]
    return check


def test_certificate_for_another_name_gets_the_server_name_advice(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with name_server(tls=authority.context("elsewhere", "DNS:elsewhere.example")) as peer:
        check = name_server_over_tls(peer.address, authority)
    assert "the server's certificate must name 127.0.0.1" in check.finding
    assert "tlsServerName" in check.fix
    assert "tlsCaFile" not in check.fix


def test_name_server_with_tls_1_1_only_is_reported_as_outdated(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with name_server(tls=authority.outdated("server", "IP:127.0.0.1")) as peer:
        check = name_server_over_tls(peer.address, authority)
    assert "the server's TLS is older than 1.2" in check.finding
    assert check.fix == "enable TLS 1.2 or newer on the server"


def test_missing_client_certificate_gets_the_client_certificate_advice(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = authority.context("server", "IP:127.0.0.1")
    context.load_verify_locations(authority.ca_file)
    context.verify_mode = ssl.CERT_REQUIRED
    with name_server(tls=context) as peer:
        check = name_server_over_tls(peer.address, authority)
    assert "the server refuses this client's certificate, or demands one" in check.finding
    assert "tlsCertFile" in check.fix
    assert "tlsCaFile" not in check.fix


def test_server_that_closes_the_connection_is_another_service() -> None:
    with Peer(lambda session: None) as peer:
        assert who_listens(peer.address, TIMEOUT) is Listener.OTHER


def test_refused_port_and_unknown_host_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    assert who_listens(refused_address(), TIMEOUT) is Listener.NOBODY
    # A resolver may be slow, or may resolve every name.
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert who_listens("no-such-host:9876", TIMEOUT) is Listener.UNKNOWN_HOST


@pytest.mark.parametrize("host", NO_NAMES)
def test_a_host_that_no_name_is_like_is_unknown(fake: FakeCluster, host: str) -> None:
    assert about(f"{host}:9876", "name server") == [(f" {host}:9876", FAILED, "the host's name is unknown here")]
    move_orders(fake, "b", f"{host}:10911")
    ((_, state, finding),) = about(fake.name_server, "broker")
    assert (state, finding) == (
        FAILED,
        f"it is registered as {host}:10911; from here: the host's name is unknown here",
    )


def test_malformed_address_is_an_unknown_host() -> None:
    assert who_listens("no-port", TIMEOUT) is Listener.UNKNOWN_HOST
