"""The doctor's findings for the answers of proxies."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.cli.doctor.machine import FAILED
from rocketmq_spark.cli.doctor.servers import check_proxies
from rocketmq_spark.testing.fake_proxy_messages import status_reply
from tests.support.peer import Peer, Session
from tests.support.processes import PATIENCE
from tests.support.proxies import running_proxy
from tests.support.transports import Authority

REFUSED = "check signature failed."
NO_RIGHT = "User:shop has no permission to access Topic:orders from 127.0.0.1, no matched policies."


@pytest.mark.parametrize(
    ("said", "finding", "fix"),
    [
        (REFUSED, f"the access key is rejected: {REFUSED}", "give the right access key and secret key"),
        (NO_RIGHT, NO_RIGHT, "let the user's policies allow it"),
    ],
)
def test_wrong_key_and_missing_permission_have_different_advice(said: str, finding: str, fix: str) -> None:
    with running_proxy() as proxy:
        proxy.handlers["QueryRoute"] = lambda *_: status_reply(40100, said)
        *_, check = check_proxies(proxy.address, "orders", {}, PATIENCE)
    assert (check.state, check.finding) == (FAILED, finding)
    assert check.fix.startswith(fix)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def demanding(authority: Authority) -> Peer:
    """Reject clients without a certificate with an alert, as Java's servers do."""
    context = authority.context("server", "IP:127.0.0.1")
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(authority.ca_file)
    context.verify_mode = ssl.CERT_REQUIRED
    return Peer(Session.wait_for_hangup, tls=context)


def outdated(authority: Authority) -> Peer:
    return Peer(Session.serve, tls=authority.outdated("server", "IP:127.0.0.1"))


def showing(names: str) -> Any:
    return lambda authority: running_proxy(certificate=authority.server("server", names))


@pytest.mark.parametrize(
    ("serve", "trusts", "given", "finding", "fix"),
    [
        (demanding, True, {"use_tls": True}, "the server refuses this client's certificate, or", "give a certificate"),
        (showing("IP:127.0.0.1"), False, {"use_tls": True}, "is not trusted", "give the authority's file (tlsCaFile"),
        (
            showing("DNS:a.example"),
            True,
            {"use_tls": True},
            "must name 127.0.0.1",
            "give the certificate's name",
        ),
        (showing("IP:127.0.0.1"), True, {}, "it demands TLS: set useTls=true", "switch TLS on (useTls=true, --tls)"),
        (
            lambda _: running_proxy(),
            True,
            {"use_tls": True},
            "it speaks no TLS",
            (
                "connect without TLS (useTls, --tls), or switch TLS on at the server; if it should speak TLS, an "
                "attacker may be"
            ),
        ),
        (outdated, True, {"use_tls": True}, "older than 1.2", "enable TLS 1.2 or newer on the server"),
    ],
    ids=["no certificate", "wrong authority", "wrong name", "no TLS", "TLS to a plain one", "TLS 1.1"],
)
def test_each_tls_problem_has_its_own_advice(
    authority: Authority,
    tmp_path: Path,
    serve: Any,
    trusts: bool,
    given: dict[str, Any],
    finding: str,
    fix: str,
) -> None:
    trusted = authority if trusts else Authority(tmp_path, "another")
    files = {"tls_ca_file": str(trusted.ca_file)} if given else {}
    server: AbstractContextManager[Any] = serve(authority)
    with server as listening:
        *_, check = check_proxies(listening.address, None, {**given, **files}, PATIENCE)
    assert check.state == FAILED
    assert finding in check.finding
    assert check.fix.startswith(fix)


@pytest.mark.parametrize("verbosity", [None, "ERROR"])
def test_grpc_log_of_a_rejected_handshake_is_shown_only_on_request(authority: Authority, verbosity: str | None) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    if verbosity is not None:
        environ["GRPC_VERBOSITY"] = verbosity
    with demanding(authority) as server:
        given = ["--endpoints", server.address, "--tls", "--tls-ca-file", str(authority.ca_file)]
        command = [sys.executable, "-m", "rocketmq_spark", "doctor", *given]
        answer = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert "the server refuses this client's certificate" in answer.stdout
    assert ("ssl_transport_security" in answer.stderr) is (verbosity is not None), answer.stderr
