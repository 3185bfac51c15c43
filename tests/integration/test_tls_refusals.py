"""Rejected certificates of real servers, and clients that real servers reject: reported after one attempt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from rocketmq_spark.cluster.jars import server_jars
from rocketmq_spark.cluster.probe import Probe
from rocketmq_spark.cluster.process import Watchdog, find_java
from rocketmq_spark.cluster.security import Security, TlsFiles, write_tls_properties
from rocketmq_spark.cluster.servers import NameServer, Site
from rocketmq_spark.errors import RemotingCertificateException, RouteNotFoundException
from rocketmq_spark.routing.client_instance import registry
from rocketmq_spark.spark.datasource import RocketMQDataSource
from rocketmq_spark.transport.tls import TlsSettings
from tests.support.links import TcpProxy
from tests.support.processes import PATIENCE
from tests.support.transports import TOMORROW, YESTERDAY, Authority

pytestmark = pytest.mark.integration

ROWS = pa.RecordBatch.from_pydict({"body": ["one"]})
Serve = Callable[..., NameServer]
NOT_TRUSTED = "the server's certificate is not trusted; set tlsCaFile"
OUT_OF_DATE = "the server needs a new certificate, or a clock is wrong"
OTHER_NAME = "the server's certificate must name 127.0.0.1 (subjectAltName), by which the server was dialled"
OWN = ("tlsCertFile", "tlsKeyFile")
OURS = "the server refuses this client's certificate, or demands one"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def serve(authority: Authority, tmp_path: Path) -> Iterator[Serve]:
    """Start a name server with a certificate of the authority; no broker registers with it."""
    java = find_java()
    servers: list[NameServer] = []
    watchdog = Watchdog()

    def start(names: str = "IP:127.0.0.1", *, mutual: bool = False, **valid: Any) -> NameServer:
        site = Site(
            java=java,
            jars=server_jars(lambda: java, lambda *_: None),
            directory=tmp_path,
            watchdog=watchdog,
            probe=Probe(),
            jvm_options=(),
            start_timeout=PATIENCE,
        )
        client = authority.server("client", "DNS:client.localhost")
        files = TlsFiles(
            authority.ca_file,
            authority.server("server", names, **valid),
            client if mutual else None,
            tmp_path / "tls.properties",
        )
        write_tls_properties(files)
        site.security = Security(tls=files)
        cert_file, key_file = map(str, client)
        # Whether it is up, whatever it shows.
        anybody = TlsSettings(cert_file=cert_file, key_file=key_file, insecure_skip_verify=True)
        site.probe = Probe(tls=anybody)
        server = NameServer(site, None)
        servers.append(server)
        server.start()
        server.await_ready(time.monotonic() + PATIENCE)
        return server

    yield start
    for server in servers:
        server.kill()
    watchdog.release()
    registry.close_all()


def write(name_server: str, **options: str) -> None:
    source = RocketMQDataSource({"nameServer": name_server, "topic": "orders", "useTls": "true", **options})
    source.writer(StructType().add("body", "string"), overwrite=False).write(iter([ROWS]))


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ({"not_after": YESTERDAY}, OUT_OF_DATE),
        ({"not_before": TOMORROW}, OUT_OF_DATE),
        ({"names": "DNS:elsewhere.example"}, OTHER_NAME),
        ({"mutual": True}, OURS),
    ],
    ids=["expired", "not valid yet", "another name", "a client without a certificate"],
)
def test_certificate_error_fails_the_write_with_a_single_attempt(
    serve: Serve, authority: Authority, shown: Any, text: str
) -> None:
    server = serve(**shown)
    with TcpProxy(server.address) as link:
        with pytest.raises(RemotingCertificateException) as raised:
            write(link.address, tlsCaFile=str(authority.ca_file))
        assert link.accepted == 1
    assert text in str(raised.value)
    assert link.address in str(raised.value)


def test_certificates_of_unknown_authorities_are_rejected_on_both_sides(
    serve: Serve, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = Authority(tmp_path_factory.mktemp("other"), "another authority")
    server = serve(mutual=True)
    with TcpProxy(server.address) as link:
        with pytest.raises(RemotingCertificateException) as raised:
            write(link.address, tlsCaFile=str(other.ca_file))
        assert NOT_TRUSTED in str(raised.value)
        foreign = map(str, other.server("client", "DNS:client.localhost"))
        with pytest.raises(RemotingCertificateException) as raised:
            write(link.address, tlsCaFile=str(authority.ca_file), **dict(zip(OWN, foreign, strict=True)))
        assert OURS in str(raised.value)
        assert link.accepted == 2
    trusted = map(str, authority.server("client", "DNS:client.localhost"))
    with pytest.raises(RouteNotFoundException, match="knows no broker"):
        write(server.address, tlsCaFile=str(authority.ca_file), **dict(zip(OWN, trusted, strict=True)))


def test_tls_insecure_skip_verify_accepts_any_certificate(serve: Serve) -> None:
    server = serve("DNS:elsewhere.example", not_after=YESTERDAY)
    with pytest.raises(RouteNotFoundException, match="knows no broker"):
        write(server.address, tlsInsecureSkipVerify="true")
