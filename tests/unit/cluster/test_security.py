"""The files of a cluster with access control and TLS."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography.x509 import load_pem_x509_certificate

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.cluster.config import properties_of
from rocketmq_spark.cluster.probe import Probe, check_user, create_user, user_requests
from rocketmq_spark.cluster.process import ServerProcess, Watchdog
from rocketmq_spark.cluster.security import Security, client_options, require_own_folder
from rocketmq_spark.errors import ClusterError, MQBrokerException, RemotingTimeoutException
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from tests.support.transports import TOMORROW, YESTERDAY, Authority


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def secret_of(security: Security) -> str:
    assert security.admin is not None
    return security.admin.secret_key


def test_default_security_creates_and_requires_no_files(tmp_path: Path) -> None:
    security = Security.made(tmp_path, auth=False, tls=False)
    assert (security, security.options, security.client_tls) == (Security(), {}, None)
    assert (security.jvm_options, security.broker_properties, security.proxy_properties) == ((), {}, {})
    assert list(tmp_path.iterdir()) == []


def test_secret_key_is_created_once_per_folder_and_is_owner_only(tmp_path: Path) -> None:
    first, again = (Security.made(tmp_path, auth=True, tls=False) for _ in range(2))
    (tmp_path / "other").mkdir(mode=0o700)
    other = Security.made(tmp_path / "other", auth=True, tls=False)
    assert secret_of(first) == secret_of(again) != secret_of(other)
    assert len(secret_of(first)) >= 40
    assert mode(tmp_path / "admin.secret") == 0o600


def plant_link(secret: Path) -> None:
    secret.with_name("elsewhere").write_text("planted")
    secret.with_name("elsewhere").chmod(0o600)
    secret.symlink_to("elsewhere")


def plant_readable(secret: Path) -> None:
    secret.write_text("planted")
    secret.chmod(0o640)


@pytest.mark.parametrize(
    ("plant", "text"),
    [
        (plant_link, "Too many levels of symbolic links|symbolic link"),
        (plant_readable, r"other users may access it \(mode 640\)"),
        (lambda secret: os.mkfifo(secret, 0o600), "it is not a regular file"),
        (lambda secret: secret.mkdir(mode=0o700), "it is not a regular file|Is a directory"),
    ],
    ids=["symbolic link", "readable", "fifo", "folder"],
)
@pytest.mark.timeout(60)
def test_planted_secret_file_is_refused(tmp_path: Path, plant: Callable[[Path], object], text: str) -> None:
    plant(tmp_path / "admin.secret")
    with pytest.raises(ClusterError, match=text):
        Security.made(tmp_path, auth=True, tls=False)


@pytest.mark.parametrize("owned", ["admin.secret", "broker-0", "tls", "."])
def test_file_of_another_user_in_the_folder_is_refused(tmp_path: Path, owned: str) -> None:
    if owned == "admin.secret":
        Security.made(tmp_path, auth=True, tls=False)
    else:
        (tmp_path / owned).mkdir(mode=0o700, exist_ok=True)
    if os.geteuid() == 0:
        os.chown(tmp_path / owned, 12_345, -1)
        with pytest.raises(ClusterError, match=r"user id 12345, not to user id 0.*directory="):
            Security.made(tmp_path, auth=True, tls=True)
    # The same folder, used by another user.
    with pytest.raises(ClusterError, match=f"not to user id {os.geteuid() + 1}"):
        require_own_folder(tmp_path, user=os.geteuid() + 1)


@pytest.mark.parametrize("demand", [{"auth": True, "tls": False}, {"auth": False, "tls": True}])
@pytest.mark.parametrize("bits", [0o770, 0o707])
def test_folder_writable_by_other_users_is_rejected(tmp_path: Path, demand: dict[str, bool], bits: int) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(bits)
    with pytest.raises(ClusterError, match=rf"other users may write to .*shared \(mode {bits:o}\).*chmod go-w"):
        Security.made(tmp_path / "shared", **demand)
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "entry", "refused"),
    [(0o755, 0o777, True), (0o755, 0o720, True), (0o700, 0o777, False), (0o755, 0o755, False)],
)
def test_entry_writable_by_other_users_is_rejected(tmp_path: Path, folder: int, entry: int, *, refused: bool) -> None:
    (tmp_path / "broker-0").mkdir()
    (tmp_path / "broker-0").chmod(entry)
    tmp_path.chmod(folder)
    with contextlib.ExitStack() as stack:
        if refused:
            stack.enter_context(pytest.raises(ClusterError, match=rf"broker-0 \(mode {entry:o}\).*chmod -R go-w"))
        require_own_folder(tmp_path)


def test_secret_key_appears_only_in_files_of_its_owner(tmp_path: Path) -> None:
    security = Security.made(tmp_path, auth=True, tls="mutual")
    secret = secret_of(security)
    for shown in (
        repr(security),
        str(security.options),
        str(security.jvm_options),
        str(client_options(security.options)),
    ):
        assert secret not in shown
    assert secret not in security.hidden(f'initAuthenticationUser={{"password":"{secret}"}}')
    for properties in (security.broker_properties, security.proxy_properties):
        assert secret in str(properties)


def test_options_name_the_files(tmp_path: Path) -> None:
    options = Security.made(tmp_path, auth=True, tls="mutual").options
    assert options == {
        "accessKey": "admin",
        "secretKey": f"file:{tmp_path}/admin.secret",
        "useTls": "true",
        "tlsCaFile": f"{tmp_path}/tls/ca.pem",
        "tlsCertFile": f"{tmp_path}/tls/client.pem",
        "tlsKeyFile": f"{tmp_path}/tls/client.key",
    }
    assert client_options(options)["use_tls"] is True
    assert client_options(options)["tls_key_file"] == options["tlsKeyFile"]


@pytest.mark.parametrize("tls", [True, "mutual"])
def test_private_keys_are_owner_only_and_the_authority_key_is_not_stored(tmp_path: Path, tls: Any) -> None:
    Security.made(tmp_path, auth=False, tls=tls)
    folder = tmp_path / "tls"
    keys = list(folder.glob("*.key"))
    assert sorted(key.stem for key in keys) == (["client", "server"] if tls == "mutual" else ["server"])
    assert {key.read_text().splitlines()[0] for key in keys} == {"-----BEGIN PRIVATE KEY-----"}
    assert {mode(key) for key in keys} == {0o600}
    assert mode(folder) == 0o700
    assert [file.name for file in folder.iterdir() if "PRIVATE" in file.read_text() and file not in keys] == []


def test_servers_trust_only_the_authority_and_require_configured_certs(tmp_path: Path) -> None:
    properties = {}
    for tls in (True, "mutual"):
        Security.made(tmp_path, auth=False, tls=tls)
        properties[tls] = properties_of((tmp_path / "tls" / "tls.properties").read_text())
    assert properties[True]["tls.client.authServer"] == "true"
    assert properties[True]["tls.client.trustCertPath"] == f"{tmp_path}/tls/ca.pem"
    assert "tls.server.need.client.auth" not in properties[True]
    assert properties["mutual"]["tls.server.need.client.auth"] == "require"
    assert properties["mutual"]["tls.server.trustCertPath"] == f"{tmp_path}/tls/ca.pem"


def test_secrets_and_private_keys_can_be_removed(tmp_path: Path) -> None:
    security = Security.made(tmp_path, auth=True, tls="mutual")
    security.remove_files()
    assert sorted(file.name for file in (tmp_path / "tls").iterdir() if file.suffix == ".key") == []
    assert not (tmp_path / "admin.secret").exists()


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"tls": "yes"}, "tls='yes' is not allowed: allowed are False, True and 'mutual'"),
        ({"tls": 1}, "tls=1 is not allowed: allowed are False, True and 'mutual'"),
        ({"auth": "hush"}, "auth must be False or True, not a str: use create_user to add keys"),
        ({"auth": None}, "auth must be False or True, not a NoneType"),
        ({"jvm_options": ["-Dtls.server.mode=enforcing"]}, r"may not set -Dtls\.server\.mode: use tls=True"),
        ({"tls": True, "proxy": {"tlsCertPath": "x"}}, "proxy may not set tlsCertPath: tls="),
        (
            {"auth": True, "proxy": {"authenticationProvider": "x"}},
            "proxy may not set authenticationProvider: auth=",
        ),
        (
            {"auth": True, "broker_properties": {"initAuthenticationUser": "hush"}},
            "broker_properties may not set initAuthenticationUser: auth=",
        ),
    ],
)
def test_contradicting_parameters_are_rejected_before_anything_starts(parameters: dict[str, Any], text: str) -> None:
    with pytest.raises(ClusterError, match=text) as caught:
        LocalCluster(**parameters)
    assert "hush" not in str(caught.value)


def test_tls_without_trustme_is_rejected_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trustme", None)
    LocalCluster(auth=True)
    with pytest.raises(ClusterError, match=r"importing trustme, .*pip install 'rocketmq-spark\[cluster\]'"):
        LocalCluster(tls=True)


def test_compatible_properties_with_security_do_not_raise() -> None:
    LocalCluster(
        auth=True,
        tls=True,
        broker_properties={"userCacheExpiredSecond": 1},
        proxy={"grpcClientIdleTimeMills": 2000},
        jvm_options=["-Xmx300m"],
    )


def test_a_cluster_that_does_not_run_has_no_options() -> None:
    cluster = LocalCluster(auth=True)
    for attribute in ("options", "grpc_options", "client_options", "admin"):
        with pytest.raises(ClusterError, match="the cluster isn't running: call start"):
            getattr(cluster, attribute)
    with pytest.raises(ClusterError, match="the cluster isn't running: call start"):
        cluster.create_user("shop", "hush")
    with pytest.raises(ClusterError, match=r"the cluster has no users: create it with LocalCluster\(auth=True\)"):
        LocalCluster().create_user("shop", "hush")


def test_user_gets_only_the_named_permissions() -> None:
    requests = list(user_requests("shop", "hush", ["orders-*"], ["invoices"], ["readers"]))
    assert [code for code, _, _ in requests] == [RequestCode.AUTH_CREATE_USER, RequestCode.AUTH_CREATE_ACL]
    assert json.loads(requests[0][2]) == {"username": "shop", "password": "hush", "userType": "Normal"}
    [policy] = json.loads(requests[1][2])["policies"]
    assert [(entry["resource"], entry["actions"], entry["decision"]) for entry in policy["entries"]] == [
        ("Topic:orders-*", ["Pub"], "Allow"),
        ("Topic:invoices", ["Sub", "Get"], "Allow"),
        ("Group:readers", ["Sub"], "Allow"),
    ]
    assert [code for code, _, _ in user_requests("nobody", "hush", [], [], [])] == [RequestCode.AUTH_CREATE_USER]


class Users:
    """Brokers that store users. Those in `fails` execute a request and lose its answer."""

    def __init__(self, *addresses: str) -> None:
        self.known: dict[str, dict[str, str]] = {address: {} for address in addresses}
        self.fails: dict[str, RequestCode] = {}

    def ask(
        self, address: str, code: RequestCode, fields: Mapping[str, str], doing: str, body: bytes = b""
    ) -> RemotingCommand:
        users, name = self.known[address], fields.get("username", "")
        answer = b""
        if code == RequestCode.AUTH_GET_USER:
            answer = users.get(name, "").encode()
        elif code == RequestCode.AUTH_DELETE_USER:
            users.pop(name, None)
        elif code == RequestCode.AUTH_CREATE_USER:
            if name in users:
                raise MQBrokerException("The user is existed", 1, "The user is existed", address)
            users[name] = "known"
        elif code == RequestCode.AUTH_CREATE_ACL:
            users[fields["subject"].removeprefix("User:")] = "may"
        if self.fails.get(address) == code:
            raise RemotingTimeoutException(f"{doing} at {address}: no answer")
        return RemotingCommand(0, 0, body=answer)


@pytest.mark.parametrize(
    "failing", [RequestCode.AUTH_GET_USER, RequestCode.AUTH_CREATE_USER, RequestCode.AUTH_CREATE_ACL]
)
def test_user_that_one_broker_failed_to_create_can_be_created_again(failing: RequestCode) -> None:
    brokers = Users("a:1", "b:1")
    probe = cast("Probe", brokers)
    rights: dict[str, Any] = {"publish": ["orders"], "subscribe": [], "groups": []}
    brokers.fails["b:1"] = failing
    with pytest.raises(RemotingTimeoutException, match="creating the user shop at b:1: no answer"):
        create_user(probe, brokers.known, "shop", "hush", **rights)
    assert brokers.known == {"a:1": {}, "b:1": {}}
    brokers.fails.clear()
    create_user(probe, brokers.known, "shop", "hush", **rights)
    assert brokers.known == {"a:1": {"shop": "may"}, "b:1": {"shop": "may"}}


def test_user_that_exists_on_one_broker_is_not_created_or_changed() -> None:
    brokers = Users("a:1", "b:1")
    brokers.known["b:1"]["shop"] = "old"
    with pytest.raises(ClusterError, match="the broker at b:1 already has this user"):
        create_user(cast("Probe", brokers), brokers.known, "shop", "hush", publish=["orders"], subscribe=[], groups=[])
    assert brokers.known == {"a:1": {}, "b:1": {"shop": "old"}}


@pytest.mark.parametrize("name", ["", " ", "shop:one", "a b", "shop/one", "shop,one", "café", None, 7])
def test_invalid_user_name_is_rejected(name: Any) -> None:
    with pytest.raises(ClusterError, match=f"creating the user {name!r}: allowed in a name are letters, digits, "):
        check_user(name, "hush", publish=[], subscribe=[], groups=[])


@pytest.mark.parametrize(
    "secret", ["", "  ", "hush\n", "env:HUSH", "file:/hush", "file:hush", "ENV:HUSH", None, b"hush"]
)
def test_secret_that_cannot_be_an_option_is_rejected_and_not_shown(secret: Any) -> None:
    with pytest.raises(ClusterError, match="creating the user shop: secret_key ") as caught:
        check_user("shop", secret, publish=[], subscribe=[], groups=[])
    assert "hush" not in str(caught.value).lower()


@pytest.mark.parametrize("parameter", ["publish", "subscribe", "groups"])
@pytest.mark.parametrize("names", ["orders", None, 7])
def test_single_name_instead_of_a_list_is_rejected(parameter: str, names: Any) -> None:
    given = {"publish": [], "subscribe": [], "groups": [], parameter: names}
    with pytest.raises(ClusterError, match=rf"the user shop: {parameter}={names!r} is not a list of names such as \["):
        check_user("shop", "hush", **given)


@pytest.mark.parametrize("name", ["*-x", "a*b", "a*b*", "**", "", "a b", "Topic:a", "a,b", None])
def test_invalid_topic_or_group_name_is_rejected(name: Any) -> None:
    with pytest.raises(
        ClusterError, match=re.escape(f"the user shop: subscribe contains {name!r}: allowed are names ")
    ):
        check_user("shop", "hush", publish=["orders"], subscribe=["orders", name], groups=[])


def test_checking_a_valid_user_does_not_raise() -> None:
    topics = ("orders", "new-*", "*", "ns%orders", "%RETRY%readers")
    check_user("shop.one_2-x", "s e:cret/env:", publish=topics, subscribe=topics, groups=["readers-*"])


def test_an_error_quotes_logs_without_the_secret_key(tmp_path: Path) -> None:
    security = Security.made(tmp_path, auth=True, tls=False)
    watchdog = Watchdog()
    logged = f"java.lang.RuntimeException: initAuthenticationUser={secret_of(security)}"
    process = ServerProcess(
        "broker-0", ["/bin/sh", "-c", f"echo '{logged}'; exit 1"], tmp_path, {}, watchdog, security.hidden
    )
    process.start()
    process.await_stopped(20)
    watchdog.release()
    assert "it logged: java.lang.RuntimeException: initAuthenticationUser=***;" in process.why()
    assert mode(process.console) == 0o600


@pytest.mark.parametrize(
    ("valid", "counts"), [({}, True), ({"not_after": YESTERDAY}, False), ({"not_before": TOMORROW}, False)]
)
def test_certificate_is_valid_only_between_its_dates(tmp_path: Path, valid: dict[str, datetime], counts: bool) -> None:
    server = Authority(tmp_path).server("server", "IP:127.0.0.1", **valid)
    certificate = load_pem_x509_certificate(server.cert_file.read_bytes())
    now = datetime.now(timezone.utc)
    assert (certificate.not_valid_before_utc < now < certificate.not_valid_after_utc) is counts
