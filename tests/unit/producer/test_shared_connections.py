"""Connections are shared only if all connection options are equal."""

from __future__ import annotations

import dataclasses
import ssl
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from rocketmq_spark.admin import Admin
from rocketmq_spark.errors import OptionError, RocketMQError
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.model.message import Message
from rocketmq_spark.options.connection import ConnectionOptions
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.options.producer import PRODUCER_OPTIONS
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.protocol.remoting.headers import signed
from rocketmq_spark.routing.client_instance import registry
from rocketmq_spark.routing.connect import SharedConnection
from rocketmq_spark.sink.routes import acquired
from rocketmq_spark.spark.datasource import RocketMQDataSource
from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.transport.grpc.metadata import authorization
from tests.support.proxies import running_proxy, stored
from tests.support.scripted import ScriptedTransport
from tests.support.transports import Authority

Make = Callable[..., Producer]

KEYS: dict[str, Any] = {"access_key": "first-user", "secret_key": "hush-hush", "security_token": "token-token"}
SECRETS = ("hush-hush", "token-token", "other-hush", "other-token")
PROVIDER = "two_vaults:Vault"

# The user is the same; the secrets differ.
SIGNING_KEYS = {"one": "secret-of-one", "two": "secret-of-two"}

# By field: the option of the second producer, and further options that both need.
DIFFERENT: dict[str, tuple[Any, dict[str, Any]]] = {
    "name_server": ("other:9876", {}),
    "client_async_semaphore_value": (7, {}),
    "client_oneway_semaphore_value": (7, {}),
    "access_key": ("other-user", KEYS),
    "secret_key": ("other-hush", KEYS),
    "security_token": ("other-token", KEYS),
    "sign_name_server_requests": (True, KEYS),
    "use_tls": (True, {}),
    "tls_ca_file": ("/ca.pem", {"use_tls": True}),
    "tls_cert_file": ("/client.pem", {"use_tls": True}),
    "tls_key_file": ("/client.key", {"use_tls": True, "tls_cert_file": "/client.pem"}),
    "tls_server_name": ("other.example", {"use_tls": True}),
    "tls_insecure_skip_verify": (True, {"use_tls": True}),
    "create_topic_key": ("template", {}),
    "default_topic_queue_nums": (9, {}),
    "poll_name_server_interval": (1234, {}),
    "heartbeat_broker_interval": (1234, {}),
    "mq_client_api_timeout": (1234, {}),
    "fault_preset": ("v5", {}),
    "latency_max": ((1, 2, 3, 4, 5, 6, 7), {}),
    "not_available_duration": ((1, 2, 3, 4, 5, 6, 7), {}),
    "send_latency_fault_enable": (True, {}),
    "start_detector_enable": (True, {}),
    "detect_timeout": (1234, {}),
    "detect_interval": (1234, {}),
}
# Options that producers with shared connections may differ in. An option in neither list fails a test.
OWN = {
    *("instance_name", "unit_mode", "send_msg_timeout", "send_msg_max_timeout_per_request", "max_message_size"),
    *("compress_msg_body_over_howmuch", "compress_type", "compress_level", "retry_times_when_send_failed"),
    *("retry_times_when_send_async_failed", "retry_another_broker_when_not_store_ok", "retry_response_codes"),
    *("topics", "enable_backpressure_for_async_mode", "back_pressure_for_async_send_num"),
    *("back_pressure_for_async_send_size", "vip_channel_enabled", "client_callback_executor_threads"),
    *("enable_trace", "trace_topic", "trace_msg_batch_num"),
}


@pytest.fixture(autouse=True)
def _close_instances() -> Iterator[None]:
    yield
    registry.close_all()


@pytest.fixture
def vaults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("two_vaults")
    for name in ("Vault", "Other"):
        setattr(module, name, type(name, (), {"credentials": lambda _: Credentials("user", "hush-hush")}))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def refusal(make_producer: Make, first: dict[str, Any], second: dict[str, Any]) -> str:
    """Start two producers of one instance name; return why the second one does not start."""
    running = make_producer("g1", instance_name="both", **first)
    running.start()
    refused = make_producer("g2", instance_name="both", **second)
    with pytest.raises(OptionError) as raised:
        refused.start()
    assert [secret for secret in SECRETS if secret in f"{raised.value} {raised.value!r} {vars(raised.value)}"] == []
    running.send(Message.of("T", b"the first one still works"))
    return str(raised.value)


def one_broker(tls: ssl.SSLContext | None = None) -> FakeCluster:
    return FakeCluster(topics={"T": 1}, tls=tls)


def requests_to_broker(cluster: FakeCluster) -> deque[RemotingCommand]:
    return cluster.brokers["broker-0"].requests


def bodies_in(cluster: FakeCluster) -> list[bytes]:
    return [message.body for message in cluster.messages("T")]


def signing_key(request: RemotingCommand) -> str:
    """Return the name of the key that has signed a request, "" if it is not signed."""
    fields = dict(request.ext_fields)
    if "Signature" not in fields:
        return ""
    signature, user = fields.pop("Signature"), fields["AccessKey"]
    matching = [
        name
        for name, key in SIGNING_KEYS.items()
        if signed(fields, [request.body], Credentials(user, key))["Signature"] == signature
    ]
    return matching[0]


def keys_of_broker_requests(cluster: FakeCluster) -> set[str]:
    """Return the keys that signed the requests to a broker; requests to name servers are unsigned."""
    return {signing_key(request) for request in requests_to_broker(cluster)}


@pytest.mark.parametrize("option", DIFFERENT)
def test_producer_with_another_connection_option_does_not_start(make_producer: Make, option: str) -> None:
    value, both = DIFFERENT[option]
    text = refusal(make_producer, both, {**both, option: value})
    assert f"is in use by a producer whose {option} differs. Set another instance_name" in text


def test_error_names_each_option_that_differs_and_no_value(make_producer: Make) -> None:
    other = {**KEYS, "secret_key": "other-hush", "name_server": "10.9.9.9:9876", "use_tls": True}
    text = refusal(make_producer, KEYS, other)
    assert "whose name_server, use_tls, secret_key differ. Set" in text
    assert "10.9.9.9" not in text


def test_namespace_is_part_of_a_connection_over_grpc_only(make_producer: Make) -> None:
    over_grpc, other = (
        SharedConnection.of(ConnectionOptions(transport="grpc", endpoints=("p:8081",), namespace=name))
        for name in ("a", "b")
    )
    assert over_grpc.differences(other) == ["namespace"]
    remoting = [SharedConnection.of(ConnectionOptions(name_server=("n:9876",), namespace=name)) for name in ("a", "b")]
    assert remoting[0].differences(remoting[1]) == []
    assert {"transport", "name_server", "endpoints", "namespace"} == set(remoting[0].differences(over_grpc))


def test_custom_transports_are_shared_only_if_they_are_the_same_object(make_producer: Make) -> None:
    with ScriptedTransport({}) as another:
        assert "whose transport differs" in refusal(make_producer, {}, {"transport": another})


def test_equal_client_ids_of_different_unit_names_do_not_share(make_producer: Make) -> None:
    make_producer("g1", instance_name="i@cell").start()
    with pytest.raises(OptionError, match="whose unit_name differs"):
        make_producer("g2", instance_name="i", unit_name="cell").start()


def test_files_are_equal_by_name_and_not_by_content(
    make_producer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hush-hush")
    for name in ("FIRST_SECRET", "SECOND_SECRET"):
        monkeypatch.setenv(name, "hush-hush")
    by_file = {**KEYS, "secret_key": f"file:{secret}"}
    first = make_producer("g1", instance_name="files", **by_file)
    first.start()
    secret.write_text("other-hush")
    second = make_producer("g2", instance_name="files", **by_file)
    second.start()
    assert first._running() is second._running()
    references = ({**KEYS, "secret_key": f"env:{name}"} for name in ("FIRST_SECRET", "SECOND_SECRET"))
    assert "whose secret_key differs" in refusal(make_producer, *references)


def test_changed_environment_variable_counts_as_another_user(
    make_producer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_variable = {**KEYS, "secret_key": "env:MQ_SECRET", "instance_name": "variables"}
    monkeypatch.setenv("MQ_SECRET", "hush-hush")
    first, second, third = (make_producer(group, **by_variable) for group in ("g1", "g2", "g3"))
    first.start()
    second.start()
    assert first._running() is second._running()
    monkeypatch.setenv("MQ_SECRET", "other-hush")
    with pytest.raises(OptionError, match="whose secret_key differs"):
        third.start()


def test_tasks_of_one_worker_follow_a_variable_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_broker() as peer:
        common = {"nameServer": peer.name_server, "topic": "T", "accessKey": "user", "secretKey": "env:MQ_SECRET"}
        for key in SIGNING_KEYS.values():
            monkeypatch.setenv("MQ_SECRET", key)
            writer = RocketMQDataSource(common).writer(StructType().add("body", "string"), overwrite=False)
            writer.write(iter([pa.RecordBatch.from_pydict({"body": ["of one"]})]))
        sends = [request for request in requests_to_broker(peer) if b"of one" in bytes(request.body)]
        assert [signing_key(request) for request in sends] == ["one", "two"]


def test_provider_is_equal_to_the_same_class_only(make_producer: Make, vaults: ModuleType) -> None:
    first = make_producer("g1", instance_name="vault", credentials_provider=PROVIDER)
    first.start()
    same = make_producer("g2", instance_name="vault", credentials_provider=PROVIDER)
    same.start()
    assert first._running() is same._running()
    # A notebook cell that runs again defines a new class of the same name.
    vaults.Vault = vaults.Other  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match="whose credentials_provider differs"):
        make_producer("g3", instance_name="vault", credentials_provider=PROVIDER).start()


@pytest.mark.parametrize("option", DIFFERENT)
def test_tracer_shares_the_instance_of_its_producer(make_producer: Make, option: str) -> None:
    value, both = DIFFERENT[option]
    producer = make_producer(enable_trace=True, instance_name=f"traced-{option}", **{**both, option: value})
    producer.start()
    assert producer._service is not None
    assert producer._service._tracer is not None
    assert producer._service._tracer.instance is producer._running()


def test_every_producer_option_is_shared_or_belongs_to_the_producer() -> None:
    fields = {spec.field for spec in PRODUCER_OPTIONS}
    parts_of_the_client_id = {"client_ip", "unit_name"}
    tested_elsewhere = {"transport", "endpoints", "namespace", "credentials_provider"}
    assert fields == OWN | set(DIFFERENT) | parts_of_the_client_id | tested_elsewhere
    assert not OWN & {field.name for field in dataclasses.fields(ConnectionOptions)}


def test_repr_of_connection_options_shows_no_secret() -> None:
    assert "hush" not in repr(SharedConnection.of(ConnectionOptions(**KEYS)))


def test_encrypted_producer_never_sends_through_a_plain_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = authority.context("server", "IP:127.0.0.1")
    with one_broker() as plain, one_broker(tls) as encrypted:
        settings = {
            **KEYS,
            "use_tls": True,
            "tls_ca_file": str(authority.ca_file),
            "name_server": encrypted.name_server,
        }
        with Producer("g1", name_server=plain.name_server, instance_name="both") as first:
            second = Producer("g2", instance_name="both", **settings)
            with pytest.raises(OptionError, match=r"whose name_server, use_tls, tls_ca_file, access_key, .* differ"):
                second.start()
            first.send(Message.of("T", b"public"))
            with Producer("g2", instance_name="of its own", **settings) as third:
                third.send(Message.of("T", b"private"))
        assert [bytes(request.body) for request in requests_to_broker(plain) if b"private" in bytes(request.body)] == []
        assert bodies_in(encrypted) == [b"private"]
        unsigned = [*requests_to_broker(plain), *plain.name_servers[0].requests]
        assert {signing_key(request) for request in unsigned} == {""}


def test_tasks_of_one_worker_sign_with_their_own_keys() -> None:
    with one_broker() as peer:
        common = {"nameServer": peer.name_server, "topic": "T", "instanceName": "etl"}
        for name, key in (*SIGNING_KEYS.items(), *SIGNING_KEYS.items()):
            source = RocketMQDataSource({**common, "accessKey": "user", "secretKey": key})
            writer = source.writer(StructType().add("body", "string"), overwrite=False)
            writer.write(iter([pa.RecordBatch.from_pydict({"body": [f"of {name}"]})]))
        sends = [request for request in requests_to_broker(peer) if b"of " in bytes(request.body)]
        assert [signing_key(request) for request in sends] == ["one", "two", "one", "two"]
        assert [bytes(request.body).partition(b"of ")[2][:3].decode() for request in sends] == ["one", "two"] * 2


def test_tasks_share_an_instance_only_if_connection_options_are_equal() -> None:
    common = {"nameServer": "127.0.0.1:9", "instanceName": "etl"}
    given = ({"topic": "T"}, {"topic": "U", "maxInFlight": "2"}, {"topic": "T", "pollNameServerInterval": "900"})
    with ExitStack() as stack:
        parsed = (parse_sink_options({**common, **options}, {}) for options in given)
        first, second, other = map(stack.enter_context, map(acquired, parsed))
        assert first is second
        assert first.users == 2
        assert other is not first


def test_tasks_of_one_worker_write_to_their_own_cluster() -> None:
    with one_broker() as first, one_broker() as second:
        for peer in (first, second):
            source = RocketMQDataSource({"nameServer": peer.name_server, "topic": "T", "instanceName": "etl"})
            writer = source.writer(StructType().add("body", "string"), overwrite=False)
            writer.write(iter([pa.RecordBatch.from_pydict({"body": [peer.name_server]})]))
        for peer in (first, second):
            assert [body.decode() for body in bodies_in(peer)] == [peer.name_server]


def test_reads_of_one_worker_sign_with_their_own_keys() -> None:
    with one_broker() as peer:
        with Producer("pg", name_server=peer.name_server) as producer:
            producer.send(Message.of("T", b"a row"))
        requests_to_broker(peer).clear()
        for name, key in SIGNING_KEYS.items():
            options = {"nameServer": peer.name_server, "subscribe": "T", "accessKey": "user", "secretKey": key}
            reader = RocketMQDataSource(options).reader(StructType().add("body", "binary"))
            batches: list[Any] = [batch for part in reader.partitions() for batch in reader.read(part)]
            assert sum(batch.num_rows for batch in batches) == 1
            assert keys_of_broker_requests(peer) == {name}
            requests_to_broker(peer).clear()


def test_admins_of_one_process_sign_with_their_own_keys() -> None:
    with one_broker() as peer, Admin(peer.name_server, access_key="user", secret_key=SIGNING_KEYS["one"]) as first:
        first.offsets("T")
        with Admin(peer.name_server, access_key="user", secret_key=SIGNING_KEYS["two"]) as second:
            requests_to_broker(peer).clear()
            second.offsets("T")
            assert keys_of_broker_requests(peer) == {"two"}
            requests_to_broker(peer).clear()
            first.offsets("T")
            assert keys_of_broker_requests(peer) == {"one"}


def test_grpc_channels_are_not_shared_between_users_or_certificates(tmp_path: Path) -> None:
    folders = [tmp_path / "trusted", tmp_path / "stranger"]
    for folder in folders:
        folder.mkdir()
    authority, stranger = map(Authority, folders)
    with running_proxy(certificate=authority.server("proxy", "IP:127.0.0.1")) as proxy:
        tls: dict[str, Any] = {"endpoints": proxy.address, "use_tls": True}
        for name, key in SIGNING_KEYS.items():
            keys: dict[str, Any] = {"access_key": "user", "secret_key": key}
            with Producer("pg", tls_ca_file=str(authority.ca_file), **keys, **tls) as producer:
                producer.send(Message.of("orders", name.encode()))
                distrusting = Producer("pg", tls_ca_file=str(stranger.ca_file), **keys, **tls)
                with distrusting, pytest.raises(RocketMQError, match="certificate"):
                    distrusting.send(Message.of("orders", b"to a proxy that is not trusted"))
        sends = [call.metadata for call in proxy.calls if call.method == "SendMessage"]
        for metadata, key in zip(sends, SIGNING_KEYS.values(), strict=True):
            assert metadata["authorization"] == authorization(Credentials("user", key), metadata["x-mq-date-time"])
        assert [bytes(message.body) for message in stored(proxy)] == [b"one", b"two"]
