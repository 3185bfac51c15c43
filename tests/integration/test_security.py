"""Access control and TLS on a real cluster that demands both."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from rocketmq_spark.client.producer import Producer
from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import (
    DeliveryError,
    MQClientException,
    RemotingCertificateException,
    RouteNotFoundException,
)
from rocketmq_spark.message import Message, SendStatus
from rocketmq_spark.producer.client_instance import close_instances
from rocketmq_spark.spark.datasource import RocketMQDataSource
from rocketmq_spark.transport.remoting import RemotingTransport
from rocketmq_spark.transport.tls import TlsSettings
from rocketmq_spark.wire.acl import Credentials
from rocketmq_spark.wire.codes import RequestCode, ResponseCode
from tests.certificates import Authority
from tests.reading import read_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rocketmq_spark.spark.report import Metrics

pytestmark = [pytest.mark.integration, pytest.mark.spark]

PATIENCE = 20.0
ADMIN = Credentials("admin", "admin-hush-hush")
USER = {"accessKey": "spark-user", "secretKey": "user-hush-hush", "securityToken": "token-token"}
SECRETS = (ADMIN.secret_key, USER["secretKey"], USER["securityToken"], "wrong-hush-hush")
ROWS = pa.RecordBatch.from_pydict({"body": ["one", "two", "three"]})


def access_control() -> dict[str, object]:
    """Properties of a broker that knows an administrator and nobody else (spec/remoting.md section 15.2)."""
    package = "org.apache.rocketmq.auth"
    return {
        "authConfigPath": "auth",
        "authenticationEnabled": True,
        "authenticationProvider": f"{package}.authentication.provider.DefaultAuthenticationProvider",
        "authenticationMetadataProvider": f"{package}.authentication.provider.LocalAuthenticationMetadataProvider",
        "initAuthenticationUser": json.dumps({"username": ADMIN.access_key, "password": ADMIN.secret_key}),
        "innerClientAuthenticationCredentials": json.dumps(
            {"accessKey": ADMIN.access_key, "secretKey": ADMIN.secret_key}
        ),
        "authorizationEnabled": True,
        "authorizationProvider": f"{package}.authorization.provider.DefaultAuthorizationProvider",
        "authorizationMetadataProvider": f"{package}.authorization.provider.LocalAuthorizationMetadataProvider",
    }


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def tls(authority: Authority) -> TlsSettings:
    return TlsSettings(str(authority.ca_file))


@pytest.fixture(scope="module")
def secured(authority: Authority, tls: TlsSettings) -> Iterator[LocalCluster]:
    """One broker; its user may publish to topics that begin with ``allowed-``, and nothing else."""
    certificate, key = authority.server("server", "IP:127.0.0.1,DNS:rocketmq.inside")
    files = [f"-Dtls.server.certPath={certificate}", f"-Dtls.server.keyPath={key}"]
    options = ["-Dtls.server.mode=enforcing", "-Dtls.test.mode.enable=false", *files]
    with LocalCluster(broker_properties=access_control(), jvm_options=options) as cluster:
        address = cluster.brokers[0].address
        user = {"username": USER["accessKey"], "password": USER["secretKey"], "userType": "Normal"}
        entry = {"resource": "Topic:allowed-*", "actions": ["Pub"], "decision": "Allow"}
        subject = f"User:{USER['accessKey']}"
        acl = {"subject": subject, "policies": [{"policyType": "Custom", "entries": [entry]}]}
        with RemotingTransport([cluster.name_server], credentials=ADMIN, tls=tls) as admin:
            for code, fields, body in (
                (RequestCode.AUTH_CREATE_USER, {"username": USER["accessKey"]}, user),
                (RequestCode.AUTH_CREATE_ACL, {"subject": subject}, acl),
            ):
                answer = admin.invoke(address, code, fields, json.dumps(body).encode(), PATIENCE)
                assert answer.code == ResponseCode.SUCCESS, answer
        yield cluster


@pytest.fixture
def allowed(secured: LocalCluster, tls: TlsSettings) -> str:
    """A topic that the user may publish to."""
    name = f"allowed-{uuid.uuid4().hex[:8]}"
    with RemotingTransport([secured.name_server], credentials=ADMIN, tls=tls) as admin:
        admin.create_topic(secured.brokers[0].address, name, 2, 6, PATIENCE)
    return name


@pytest.fixture
def options(secured: LocalCluster, authority: Authority, allowed: str) -> Iterator[dict[str, str]]:
    """What a write to the cluster takes."""
    tls = {"useTls": "true", "tlsCaFile": str(authority.ca_file)}
    yield {"nameServer": secured.name_server, "topic": allowed, **tls, **USER}
    close_instances()


def write_here(options: dict[str, str]) -> None:
    """Write three rows as Spark would, in this process."""
    writer = RocketMQDataSource(options).writer(StructType().add("body", "string"), overwrite=False)
    writer.write(iter([ROWS]))


def shown_by_spark(spark: SparkSession) -> str:
    """Everything that Spark's UI would show of the session's queries."""
    store = spark._jsparkSession.sharedState().statusStore()
    executions = store.executionsList()
    found = [executions.apply(index) for index in range(executions.size())]
    return "\n".join(f"{one.description()} {one.details()} {one.physicalPlanDescription()}" for one in found)


def test_a_signed_and_encrypted_write_arrives_and_spark_shows_no_secret(
    spark: SparkSession, metrics: Metrics, secured: LocalCluster, tls: TlsSettings, options: dict[str, str]
) -> None:
    spark.conf.set("spark.sql.ui.explainMode", "extended")
    try:
        frame = spark.range(0, 2000, 1, 2).selectExpr("concat('row ', id) AS body")
        frame.write.format("rocketmq").options(**options).save()
    finally:
        spark.conf.unset("spark.sql.ui.explainMode")
    found = read_topic(secured.name_server, options["topic"], 2000, tls=tls, credentials=ADMIN)
    assert sorted(message.body for message in found) == sorted(f"row {number}".encode() for number in range(2000))
    shown = shown_by_spark(spark)
    assert "secretKey=*********(redacted)" in shown
    assert [secret for secret in SECRETS if secret in shown] == []


def test_a_wrong_secret_fails_the_write_with_an_error_that_names_the_option_and_not_the_value(
    spark: SparkSession, metrics: Metrics, options: dict[str, str]
) -> None:
    frame = spark.range(1).selectExpr("'row' AS body")
    with pytest.raises(PySparkException, match=r"16 NO_PERMISSION: check signature failed\..*secretKey") as raised:
        frame.write.format("rocketmq").options(**{**options, "secretKey": "wrong-hush-hush"}).save()
    assert [secret for secret in SECRETS if secret in f"{raised.value}{raised.value!r}"] == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"secretKey": "wrong-hush-hush"}, r"check signature failed\."),
        ({"accessKey": "nobody"}, r"User:nobody is not found\."),
        (dict.fromkeys(USER), r"username cannot be null\."),
        ({"topic": "TBW102"}, r"User:spark-user has no permission to access Topic:TBW102"),
    ],
)
def test_who_may_not_write_is_told_so_at_once(options: dict[str, str], change: dict[str, Any], text: str) -> None:
    changed = {name: value for name, value in {**options, **change}.items() if value is not None}
    with pytest.raises(DeliveryError, match=rf"16 NO_PERMISSION: {text}.*check accessKey, secretKey") as raised:
        write_here(changed)
    assert "Rows of this task stored: none. Read but not sent: 3" in str(raised.value)


def test_a_cluster_whose_authority_is_not_known_is_not_trusted(options: dict[str, str]) -> None:
    del options["tlsCaFile"]
    with pytest.raises(RemotingCertificateException, match="is not trusted; set tlsCaFile"):
        write_here(options)


def test_the_name_that_all_certificates_carry_takes_the_place_of_the_addresses(options: dict[str, str]) -> None:
    write_here({**options, "tlsServerName": "rocketmq.inside"})
    with pytest.raises(RemotingCertificateException, match=r"must name rocketmq\.outside .*option tlsServerName"):
        write_here({**options, "tlsServerName": "rocketmq.outside"})


def test_a_cluster_that_demands_tls_is_recognised(options: dict[str, str]) -> None:
    del options["tlsCaFile"]
    with pytest.raises(RouteNotFoundException, match=r"as a server does that demands TLS \(option useTls\)"):
        write_here({**options, "useTls": "false", "sendMsgTimeout": "500"})


def test_rows_written_here_arrive(secured: LocalCluster, tls: TlsSettings, options: dict[str, str]) -> None:
    write_here(options)
    found = read_topic(secured.name_server, options["topic"], 3, tls=tls, credentials=ADMIN)
    assert sorted(message.body for message in found) == [b"one", b"three", b"two"]


def test_a_producer_of_plain_python_signs_and_encrypts_too(
    secured: LocalCluster, tls: TlsSettings, authority: Authority, allowed: str
) -> None:
    connection = {"name_server": secured.name_server, "use_tls": True, "tls_ca_file": str(authority.ca_file)}
    user = {"access_key": USER["accessKey"], "secret_key": USER["secretKey"]}
    with Producer("pg-secured", **connection, **user) as producer:
        result = producer.send(Message.of(allowed, b"from plain Python"))
        assert result.status is SendStatus.SEND_OK
        with pytest.raises(MQClientException) as caught:
            producer.send(Message.of("forbidden", b"x"))
    assert not any(secret in str(caught.value) for secret in SECRETS)
    with Producer("pg-wrong", **connection, **{**user, "secret_key": "wrong-hush-hush"}) as wrong:
        with pytest.raises(MQClientException, match="check signature failed") as caught:
            wrong.send(Message.of(allowed, b"x"))
        assert caught.value.response_code == ResponseCode.NO_PERMISSION
        assert "wrong-hush-hush" not in str(caught.value) + repr(wrong)
