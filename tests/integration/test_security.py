"""Access control and TLS on a real cluster that requires both."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from rocketmq_spark.cli.doctor import examine
from rocketmq_spark.cluster.probe import Probe, create_user
from rocketmq_spark.errors import (
    ClusterError,
    DeliveryError,
    MQBrokerException,
    MQClientException,
    RemotingCertificateException,
    RemotingTimeoutException,
    RemotingTlsException,
    RocketMQError,
)
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.model.message import Message, SendStatus
from rocketmq_spark.model.route import MASTER_ID, TopicRouteData
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.routing.client_instance import registry
from rocketmq_spark.spark.datasource import RocketMQDataSource
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import USER as KNOWN
from tests.support.cluster import SharedCluster, create_topic
from tests.support.links import Fault, TcpProxy, flip
from tests.support.processes import PATIENCE, wait_for
from tests.support.reading import read_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rocketmq_spark.spark.report import Metrics

pytestmark = [pytest.mark.integration, pytest.mark.spark]

USER = {
    "accessKey": KNOWN.access_key,
    "secretKey": KNOWN.secret_key,
    "securityToken": KNOWN.security_token,
}
SECRETS = (USER["secretKey"], USER["securityToken"], "wrong-hush-hush")
ROWS = pa.RecordBatch.from_pydict({"body": ["one", "two", "three"]})


MakeTopic = Callable[[str], str]


@pytest.fixture
def make_topic(secured: SharedCluster) -> MakeTopic:
    """Create a topic whose name begins with a prefix, and return its name."""

    def make(prefix: str) -> str:
        return create_topic(secured, f"{prefix}-{uuid.uuid4().hex[:8]}", "NORMAL")

    return make


@pytest.fixture
def allowed(make_topic: MakeTopic) -> str:
    """A topic that the user may publish to."""
    return make_topic("allowed")


@pytest.fixture
def grpc(secured: SharedCluster) -> Iterator[dict[str, Any]]:
    """Keyword arguments of a producer over the proxy."""
    user = {"access_key": USER["accessKey"], "secret_key": USER["secretKey"]}
    tls = {"use_tls": True, "tls_ca_file": secured.options["tlsCaFile"]}
    # A proxy looks up an unknown user at a broker, and the first request of each kind is slow.
    patience = {"send_msg_timeout": 60_000, "mq_client_api_timeout": 60_000}
    yield {"endpoints": secured.endpoints, **tls, **user, **patience}
    registry.close_all()


@pytest.fixture
def options(secured: SharedCluster, allowed: str) -> Iterator[dict[str, str]]:
    """Options of a write to the cluster."""
    tls = {"useTls": "true", "tlsCaFile": secured.options["tlsCaFile"]}
    yield {"nameServer": secured.name_server, "topic": allowed, **tls, **USER}
    registry.close_all()


def write_here(options: dict[str, str]) -> None:
    """Write three rows like Spark, in this process."""
    writer = RocketMQDataSource(options).writer(StructType().add("body", "string"), overwrite=False)
    writer.write(iter([ROWS]))


def shown_by_spark(spark: SparkSession) -> str:
    """Return all texts that Spark's UI would show about the session's queries."""
    store = spark._jsparkSession.sharedState().statusStore()
    executions = store.executionsList()
    found = [executions.apply(index) for index in range(executions.size())]
    return "\n".join(f"{one.description()} {one.details()} {one.physicalPlanDescription()}" for one in found)


def test_a_signed_and_encrypted_write_arrives_and_spark_shows_no_secret(
    spark: SparkSession, metrics: Metrics, secured: SharedCluster, options: dict[str, str]
) -> None:
    spark.conf.set("spark.sql.ui.explainMode", "extended")
    try:
        frame = spark.range(0, 2000, 1, 2).selectExpr("concat('row ', id) AS body")
        frame.write.format("rocketmq").options(**options).save()
    finally:
        spark.conf.unset("spark.sql.ui.explainMode")
    found = read_topic(secured.name_server, options["topic"], 2000, **secured.transport_settings)
    assert sorted(message.body for message in found) == sorted(f"row {number}".encode() for number in range(2000))
    shown = shown_by_spark(spark)
    assert "secretKey=*********(redacted)" in shown
    assert [secret for secret in SECRETS if secret in shown] == []


def test_cluster_options_suffice_for_write_and_read(
    spark: SparkSession, metrics: Metrics, secured: SharedCluster, make_topic: MakeTopic
) -> None:
    topic = make_topic("anything")
    frame = spark.range(100).selectExpr("cast(id AS string) AS body")
    addresses = {"nameServer": secured.name_server}, {"endpoints": secured.endpoints}
    for address in addresses:
        security = {name: value for name, value in secured.options.items() if name != "nameServer"}
        frame.write.format("rocketmq").options(**address, **security).option("topic", topic).save()
    assert spark.read.format("rocketmq").options(**secured.options).load(topic).count() == 200


def test_wrong_secret_fails_write_naming_option_but_not_value(
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
def test_unauthorized_write_fails_at_once(options: dict[str, str], change: dict[str, Any], text: str) -> None:
    changed = {name: value for name, value in {**options, **change}.items() if value is not None}
    with pytest.raises(DeliveryError, match=rf"16 NO_PERMISSION: {text}.*check accessKey") as raised:
        write_here(changed)
    assert "Rows of this task stored: none. Read but not sent: 3" in str(raised.value)


def test_cluster_with_unknown_authority_is_not_trusted(options: dict[str, str]) -> None:
    del options["tlsCaFile"]
    with pytest.raises(RemotingCertificateException, match="is not trusted; set tlsCaFile"):
        write_here(options)


def test_tls_server_name_replaces_host_names_in_certificate_check(options: dict[str, str]) -> None:
    write_here({**options, "tlsServerName": "localhost"})
    with pytest.raises(RemotingCertificateException, match=r"must name rocketmq\.outside .*option tlsServerName"):
        write_here({**options, "tlsServerName": "rocketmq.outside"})


def test_a_cluster_that_demands_tls_is_recognised(options: dict[str, str]) -> None:
    del options["tlsCaFile"]
    with pytest.raises(RemotingTlsException, match="it demands TLS: set useTls=true"):
        write_here({**options, "useTls": "false", "sendMsgTimeout": "500"})


def test_rows_written_here_arrive(secured: SharedCluster, options: dict[str, str]) -> None:
    write_here(options)
    found = read_topic(secured.name_server, options["topic"], 3, **secured.transport_settings)
    assert sorted(message.body for message in found) == [b"one", b"three", b"two"]


def test_a_producer_of_plain_python_signs_and_encrypts_too(secured: SharedCluster, allowed: str) -> None:
    connection: dict[str, Any] = {
        "name_server": secured.name_server,
        "use_tls": True,
        "tls_ca_file": secured.options["tlsCaFile"],
    }
    user: dict[str, Any] = {"access_key": USER["accessKey"], "secret_key": USER["secretKey"]}
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


class Rotated:
    """Returns the user's access key with the present `secret`."""

    secret = ""
    asked = 0

    def credentials(self) -> Credentials:
        Rotated.asked += 1
        return Credentials(KNOWN.access_key, Rotated.secret)


@pytest.mark.parametrize("over_grpc", [False, True], ids=["remoting", "grpc"])
def test_rejected_credentials_are_fetched_again_for_later_sends(
    secured: SharedCluster,
    grpc: dict[str, Any],
    allowed: str,
    monkeypatch: pytest.MonkeyPatch,
    over_grpc: bool,
) -> None:
    replaced = {"access_key", "secret_key"} | (set() if over_grpc else {"endpoints"})
    given = {name: value for name, value in grpc.items() if name not in replaced}
    if not over_grpc:
        given["name_server"] = secured.name_server
    monkeypatch.setattr(Rotated, "secret", "wrong-hush-hush")
    monkeypatch.setattr(Rotated, "asked", 0)
    with Producer("pg-rotated", **given, credentials_provider=f"{__name__}:Rotated") as producer:
        with pytest.raises((MQBrokerException, MQClientException), match="check signature failed"):
            producer.send(Message.of(allowed, b"before"))
        monkeypatch.setattr(Rotated, "secret", KNOWN.secret_key)

        def is_stored() -> bool:
            # The provider is asked at most once per second; a heart-beat may have done so before the change.
            with contextlib.suppress(MQBrokerException, MQClientException):
                return producer.send(Message.of(allowed, b"after")).status is SendStatus.SEND_OK
            return False

        wait_for(is_stored, 30)
    assert Rotated.asked <= 5, "once a minute, and once a second where it is refused"


def test_rejected_user_causes_errors_and_at_most_one_log_line(
    secured: SharedCluster, allowed: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = {**secured.admin_settings, "access_key": KNOWN.access_key, "secret_key": "wrong-hush-hush"}
    # A short interval, so that heart-beats are sent during the test.
    with Producer("pg-noise", name_server=secured.name_server, heartbeat_broker_interval=100, **given) as wrong:
        for _ in range(10):
            with pytest.raises(MQClientException, match="check signature failed"):
                wrong.send(Message.of(allowed, b"x"))
            time.sleep(0.1)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) <= 1, warnings


class Detour(RemotingTransport):
    """Connects to the broker over a link, whatever address the route has."""

    def __init__(self, link: TcpProxy, *name_servers: str, **settings: Any) -> None:
        super().__init__(name_servers, **settings)
        self._link = link

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        route = super().query_route(topic, timeout)
        brokers = (replace(broker, broker_addrs={MASTER_ID: self._link.address}) for broker in route.broker_datas)
        return replace(route, broker_datas=tuple(brokers))


def test_bit_flips_under_tls_change_and_lose_no_row(secured: SharedCluster, allowed: str) -> None:
    rows, requests, answers = 6_000, Fault(flip, 100_000), Fault(flip, 30_000)
    bodies = [f"row {number} ".ljust(200, ".") for number in range(rows)]
    batches = pa.table({"body": bodies}).to_batches(max_chunksize=500)
    with TcpProxy(secured.brokers[0].address, to_server=requests, to_client=answers) as link:
        detour = Detour(link, secured.name_server, **secured.transport_settings)
        with Producer("pg-flipped", name_server=secured.name_server, transport=detour) as producer:
            producer.send_arrow(batches, allowed, batchBytes="8k")
    assert min(requests.times, answers.times) > 0
    found = read_topic(secured.name_server, allowed, rows, key=attrgetter("body"), **secured.transport_settings)
    assert {message.body.decode() for message in found} == set(bodies)


@pytest.fixture(scope="module")
def read_from(secured: SharedCluster) -> dict[str, str]:
    """Options of a read of a topic with three messages."""
    topic = create_topic(secured, f"readable-{uuid.uuid4().hex[:8]}", "NORMAL")
    connection = {"useTls": "true", "tlsCaFile": secured.options["tlsCaFile"]}
    with Producer("pg-read", name_server=secured.name_server, **secured.admin_settings) as producer:
        producer.send_arrow(ROWS, topic)
    read_topic(secured.name_server, topic, 3, **secured.transport_settings)
    registry.close_all()
    return {"nameServer": secured.name_server, "subscribe": topic, **connection, **USER}


def test_signed_encrypted_read_returns_all_rows_and_spark_shows_no_secret(
    spark: SparkSession, metrics: Metrics, read_from: dict[str, str]
) -> None:
    spark.conf.set("spark.sql.ui.explainMode", "extended")
    try:
        for expression in ("*", "none"):
            frame = spark.read.format("rocketmq").options(**read_from, subExpression=expression).load()
            assert sorted(bytes(row.body) for row in frame.collect()) == sorted(
                [b"one", b"three", b"two"] if expression == "*" else []
            )
    finally:
        spark.conf.unset("spark.sql.ui.explainMode")
    shown = shown_by_spark(spark)
    assert "RocketMQ" in shown or "rocketmq" in shown
    assert [secret for secret in SECRETS if secret in shown] == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"secretKey": "wrong-hush-hush"}, r"check signature failed\..*check accessKey, secretKey"),
        ({"accessKey": "nobody"}, r"User:nobody is not found\..*check accessKey, secretKey"),
        (dict.fromkeys(USER), r"username cannot be null\..*check accessKey, secretKey"),
        ({"subscribe": "TBW102"}, "User:spark-user has no permission to access Topic:TBW102"),
        ({"consumerGroup": "another"}, "User:spark-user has no permission to access Group:another"),
        (
            {"consumerGroup": "another", "startingOffsets": "committed"},
            "User:spark-user has no permission to access Group:another",
        ),
        ({"tlsCaFile": None}, "is not trusted; set tlsCaFile"),
        ({"useTls": None, "tlsCaFile": None}, "it demands TLS: set useTls=true"),
    ],
)
def test_unauthorized_read_fails_with_reason(
    spark: SparkSession, metrics: Metrics, read_from: dict[str, str], change: dict[str, Any], text: str
) -> None:
    changed = {name: value for name, value in {**read_from, **change}.items() if value is not None}
    with pytest.raises(PySparkException, match=text) as raised:
        spark.read.format("rocketmq").options(**changed, pullTimeoutMs="3000", readTimeoutMs="3000").load().collect()
    assert [secret for secret in SECRETS if secret in f"{raised.value}{raised.value!r}"] == []


def refusals_of(cluster: SharedCluster) -> int:
    """Return the number of requests that the proxy has rejected for a missing right, by its log."""
    return Path(cluster.proxy.log).read_text(encoding="utf-8").count("RocketmqAuthAudit")


# With keys, so that both rows are one request: while the topic's type is unknown, a first row without a key is sent
# alone.
SENDS: dict[str, Callable[[Producer, str], object]] = {
    "send": lambda producer, topic: producer.send(Message.of(topic, b"row")),
    "send_arrow": lambda producer, topic: producer.send_arrow(
        pa.table({"body": ["one", "two"], "keys": ["1", "2"]}), topic
    ),
}


def test_correct_key_is_accepted_over_grpc_and_its_secret_is_not_shown(
    secured: SharedCluster, grpc: dict[str, Any], allowed: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with Producer("pg-grpc", **grpc, security_token=USER["securityToken"]) as producer:
        for send in SENDS.values():
            send(producer, allowed)
        shown = f"{producer!r} {producer.options!r} {caplog.text}"
    found = read_topic(secured.name_server, allowed, 3, **secured.transport_settings)
    assert sorted(message.body for message in found) == [b"one", b"row", b"two"]
    assert [secret for secret in SECRETS if secret in shown] == []


@pytest.mark.parametrize("send", SENDS)
@pytest.mark.parametrize(
    ("change", "prefix", "text", "refusals"),
    [
        ({"secret_key": "wrong-hush-hush"}, "allowed", r"check signature failed\.", 1),
        ({"access_key": "nobody"}, "allowed", r"User:nobody is not found\.", 1),
        # The proxy logs no rejection of a client without a user name.
        ({"access_key": None, "secret_key": None}, "allowed", r"username cannot be null\.", 0),
        ({}, "forbidden", "User:spark-user has no permission to access Topic:forbidden-", 1),
        # The right to read includes the route, so the proxy rejects the send itself.
        ({}, "readable", "User:spark-user has no permission to access Topic:readable-", 1),
    ],
    ids=["wrong secret", "unknown user", "no key", "no right", "right to read only"],
)
def test_unauthorized_send_over_grpc_fails_with_first_answer(
    secured: SharedCluster,
    grpc: dict[str, Any],
    make_topic: MakeTopic,
    caplog: pytest.LogCaptureFixture,
    send: str,
    change: dict[str, Any],
    prefix: str,
    text: str,
    refusals: int,
) -> None:
    caplog.set_level(logging.DEBUG)
    topic, before = make_topic(prefix), refusals_of(secured)
    given = {name: value for name, value in {**grpc, **change}.items() if value is not None}
    with Producer("pg-refused", **given) as producer:
        with pytest.raises(
            (MQBrokerException, DeliveryError), match=rf"40100 UNAUTHORIZED: {text}.*check accessKey"
        ) as caught:
            SENDS[send](producer, topic)
        shown = f"{caught.value} {caught.value!r} {producer!r} {producer.options!r} {caplog.text}"
    assert refusals_of(secured) - before == refusals
    assert [secret for secret in SECRETS if secret in shown] == []
    assert read_topic(secured.name_server, topic, 0, **secured.transport_settings) == []


def test_unauthorized_write_over_grpc_fails_without_showing_secrets(
    secured: SharedCluster, options: dict[str, str]
) -> None:
    del options["nameServer"]
    write_here({**options, "endpoints": secured.endpoints})
    with pytest.raises(RocketMQError, match=r"check signature failed\..*check accessKey, secretKey") as raised:
        write_here({**options, "endpoints": secured.endpoints, "secretKey": "wrong-hush-hush"})
    assert [secret for secret in SECRETS if secret in f"{raised.value}{raised.value!r}"] == []


def test_producer_sends_again_after_proxy_closed_idle_connection(
    secured: SharedCluster, grpc: dict[str, Any], allowed: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rocketmq_spark")
    with TcpProxy(secured.endpoints) as link, Producer("pg-idle", **{**grpc, "endpoints": link.address}) as producer:
        for body in (b"before", b"after"):
            producer.send(Message.of(allowed, body))
            wait_for(lambda: link.is_idle)
        producer.send_arrow(pa.table({"body": ["rows"]}), allowed)
        assert link.accepted >= 3
    found = read_topic(secured.name_server, allowed, 3, **secured.transport_settings)
    assert sorted(message.body for message in found) == [b"after", b"before", b"rows"]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_proxy_that_requires_tls_is_recognised(grpc: dict[str, Any], allowed: str) -> None:
    del grpc["tls_ca_file"]
    given = {**grpc, "use_tls": False, "send_msg_timeout": 1000}
    with Producer("pg-plain", **given) as producer, pytest.raises(RocketMQError, match="useTls"):
        producer.send(Message.of(allowed, b"x"))


def test_tls_server_name_replaces_proxy_name_in_certificate_check(grpc: dict[str, Any], allowed: str) -> None:
    with Producer("pg-named", **grpc, tls_server_name="localhost") as producer:
        assert producer.send(Message.of(allowed, b"x")).status is SendStatus.SEND_OK
    misnamed = Producer("pg-misnamed", **grpc, tls_server_name="rocketmq.outside")
    with misnamed, pytest.raises(RemotingCertificateException, match="tlsServerName"):
        misnamed.send(Message.of(allowed, b"x"))


def the_doctor_says(
    secured: SharedCluster, trusting: bool, user: str, key: str, topic: str | None = None
) -> dict[str, tuple[str, str]]:
    """Return state and finding by the first word of the checked item, without those of this machine."""
    trusted: dict[str, Any] = {"use_tls": True, "tls_ca_file": secured.options["tlsCaFile"]} if trusting else {}
    found = examine(
        secured.name_server,
        topic=topic,
        timeout=PATIENCE,
        environ={"PATH": ""},
        access_key=user,
        secret_key=key,
        **trusted,
    )
    asked = [one for one in found if one.check.split()[0] in ("name", "broker", "topic")]
    assert not [secret for secret in SECRETS if secret in repr(found)]
    return {one.check.split()[0]: (one.state, one.finding) for one in asked}


def test_existing_user_is_not_created_again_and_keeps_its_secret(secured: SharedCluster) -> None:
    assert secured.tls is not None
    probe = Probe(credentials=secured.admin, tls=secured.tls)
    brokers = [broker.address for broker in secured.brokers]
    with pytest.raises(ClusterError, match=r"user spark-user: the broker at .* already has this user.* another name"):
        create_user(probe, brokers, KNOWN.access_key, "wrong-hush-hush", publish=["*"], subscribe=[], groups=[])
    theirs = Probe(credentials=KNOWN, tls=secured.tls)
    for broker in secured.brokers:
        with pytest.raises(MQBrokerException, match="no permission to access Topic:not-allowed"):
            theirs.send(broker.address, broker.name, "not-allowed", b"let in?")


def test_user_that_one_broker_failed_to_create_can_be_created_again(secured: SharedCluster, allowed: str) -> None:
    assert secured.tls is not None
    probe = Probe(credentials=secured.admin, tls=secured.tls)
    brokers = [broker.address for broker in secured.brokers]
    late = Credentials(f"late-{uuid.uuid4().hex[:8]}", "late-hush-hush")

    class Breaking:
        """Gives out after the users were made, before their rights."""

        def ask(
            self, address: str, code: RequestCode, fields: Mapping[str, str], doing: str, body: bytes = b""
        ) -> RemotingCommand:
            if code == RequestCode.AUTH_CREATE_ACL:
                raise RemotingTimeoutException("no answer")
            return probe.ask(address, code, fields, doing, body)

    given: dict[str, Any] = {"publish": ["allowed-*"], "subscribe": [], "groups": []}
    with pytest.raises(RemotingTimeoutException):
        create_user(cast("Probe", Breaking()), brokers, late.access_key, late.secret_key, **given)
    create_user(probe, brokers, late.access_key, late.secret_key, **given)
    theirs = Probe(credentials=late, tls=secured.tls)
    for broker in secured.brokers:
        theirs.send(broker.address, broker.name, allowed, b"let in")


def test_doctor_distinguishes_missing_tls_wrong_key_and_missing_permission(
    secured: SharedCluster, allowed: str, make_topic: MakeTopic
) -> None:
    user, key = USER["accessKey"], USER["secretKey"]
    assert the_doctor_says(secured, False, user, key)["name"] == ("failed", "a server listens that accepts only TLS")
    wrong = the_doctor_says(secured, True, user, "wrong-hush-hush")
    assert wrong["broker"] == ("failed", "the access key is rejected: check signature failed.")
    found = the_doctor_says(secured, True, user, key, allowed)
    assert found["broker"][0] == "ok"
    assert found["topic"][0] == "warning"
    assert f"has no permission to access Topic:{allowed}" in found["topic"][1]
    readable = make_topic("readable")
    assert the_doctor_says(secured, True, user, key, readable)["topic"][0] == "ok"


def test_doctor_reports_rights_of_a_user_with_few(secured: SharedCluster, allowed: str, make_topic: MakeTopic) -> None:
    connection: dict[str, Any] = {"use_tls": True, "tls_ca_file": secured.options["tlsCaFile"], "timeout": PATIENCE}
    connection |= {"access_key": USER["accessKey"], "secret_key": USER["secretKey"], "environ": {"PATH": ""}}
    readable = make_topic("readable")
    found = list(examine(secured.name_server, topic=readable, trace_topic=readable, **connection))
    by_name = {one.check: (one.state, one.finding) for one in found}
    assert next(one.finding for one in found if one.check == f"topic {readable}") == (
        "the user may not write to it (no right Pub)"
    )
    lost = "the user may not write to it, so trace records are lost; writes do not fail"
    assert by_name[f"trace topic {readable}"] == ("warning", lost)
    # A broker shows its settings to every user.
    assert "an acknowledged row survives the end of the broker's process" in by_name["durability"][1]
    found = list(examine(secured.name_server, trace_topic=allowed, endpoints=secured.endpoints, **connection))
    by_name = {one.check: (one.state, one.finding) for one in found}
    assert by_name[f"trace topic {allowed}"] == ("ok", "the user may write to it")
    assert by_name[f"proxy {secured.endpoints}"] == ("ok", "answers gRPC")
