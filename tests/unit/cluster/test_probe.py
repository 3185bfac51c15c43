"""Probes of servers."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from rocketmq_spark.cluster.probe import Probe
from rocketmq_spark.errors import RemotingConnectException
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.headers import signed
from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.transport.tls import TlsSettings
from tests.support import fakes
from tests.support.processes import wait_for
from tests.support.transports import Authority


def test_trusted_tls_server_is_queried_and_the_connection_closed(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    probe = Probe(tls=TlsSettings(str(authority.ca_file)))
    with FakeCluster(tls=authority.context("server", "IP:127.0.0.1")) as cluster:
        broker = cluster.brokers["broker-0"]
        answer = probe.ask(broker.address, RequestCode.GET_BROKER_CONFIG, {}, "asking")
        gc.collect()  # a socket left open would warn
        wait_for(lambda: cluster.connections(broker.address) == 0)
    assert answer.code == ResponseCode.SUCCESS
    assert len(broker.requests) == 1


def test_server_with_certificate_of_another_name_gets_no_request(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    probe = Probe(tls=TlsSettings(str(authority.ca_file)))
    with (
        fakes.broker(tls=authority.context("server", "DNS:elsewhere.example")) as peer,
        pytest.raises(RemotingConnectException, match="certificate is not valid for"),
    ):
        probe.ask(peer.address, RequestCode.HEART_BEAT, {}, "asking")
    assert len(peer.requests) == 0


def test_probe_with_credentials_signs_its_requests() -> None:
    user = Credentials("ak", "hush-hush")
    with fakes.broker() as peer:
        Probe(credentials=user).ask(peer.address, RequestCode.GET_BROKER_CONFIG, {"a": "b"}, "asking", b"body")
    assert dict(peer.requests[0].ext_fields) == signed({"a": "b"}, (b"body",), user)


def test_server_that_requires_tls_is_a_connect_error(tmp_path: Path) -> None:
    context = Authority(tmp_path).context("server", "IP:127.0.0.1")
    with fakes.broker(tls=context) as peer, pytest.raises(RemotingConnectException, match=f"asking at {peer.address}"):
        Probe().ask(peer.address, RequestCode.HEART_BEAT, {}, "asking")
