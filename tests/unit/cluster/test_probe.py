"""Asking a server whether it is there."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from rocketmq_spark.cluster.probe import Probe
from rocketmq_spark.errors import RemotingConnectException
from rocketmq_spark.wire.codes import RequestCode, ResponseCode
from tests.certificates import Authority
from tests.peer import BrokerPeer


def test_a_server_with_any_certificate_is_asked_and_the_connection_closed(tmp_path: Path) -> None:
    with BrokerPeer(tls=Authority(tmp_path).context("server", "DNS:elsewhere.example")) as peer:
        answer = Probe(tls=True).ask(peer.address, RequestCode.HEART_BEAT, {}, "asking")
        gc.collect()  # a socket left open would warn
    assert answer.code == ResponseCode.SUCCESS
    assert len(peer.sessions) == 1


def test_a_server_that_demands_tls_is_a_failed_connect(tmp_path: Path) -> None:
    context = Authority(tmp_path).context("server", "IP:127.0.0.1")
    with BrokerPeer(tls=context) as peer, pytest.raises(RemotingConnectException, match=f"asking {peer.address}"):
        Probe().ask(peer.address, RequestCode.HEART_BEAT, {}, "asking")
