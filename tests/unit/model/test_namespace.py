"""How namespaces are added to names and removed from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.admin.queues import admin_options
from rocketmq_spark.errors import MQClientException, OptionError
from rocketmq_spark.model.names import check_namespace, namespace_of, unwrap, wrap
from rocketmq_spark.options.parsing import parse_sink_options, parse_source_options
from rocketmq_spark.options.producer import ProducerOptions, producer_options
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.options.source import SourceOptions
from tests.support.strategies import topics

EXAMPLES = [("T", "A%T"), ("%RETRY%G", "%RETRY%A%G"), ("%DLQ%G", "%DLQ%A%G")]


@pytest.mark.parametrize(("bare", "wrapped"), EXAMPLES)
def test_names_are_wrapped_once_and_unwrapped(bare: str, wrapped: str) -> None:
    assert wrapped == wrap("A", bare) == wrap("A", wrapped)
    assert bare == unwrap(wrapped, "A") == unwrap(bare, "A")


@pytest.mark.parametrize(
    "name", ["TBW102", "SCHEDULE_TOPIC_XXXX", "rmq_sys_x", "RMQ_SYS_TRACE_TOPIC", "CID_RMQ_SYS_x", ""]
)
def test_system_names_are_never_wrapped(name: str) -> None:
    assert name == wrap("A", name)


def test_name_of_another_namespace_stays_wrapped() -> None:
    assert unwrap("B%T", "A") == "B%T"
    assert unwrap("%DLQ%B%G", "A") == "%DLQ%B%G"
    assert wrap("A", "B%T") == "A%B%T"


@pytest.mark.parametrize("namespace", [None, "", "  ", "\u3000"])
def test_no_namespace_changes_nothing(namespace: str | None) -> None:
    check_namespace(namespace)
    assert wrap(namespace, "T") == "T"
    assert unwrap("%T", namespace) == "%T"


def test_a_namespace_with_a_percent_sign_is_refused() -> None:
    # Java accepts it; its unwrap then cuts at the first of the two signs.
    for refuse in (lambda: wrap("A%B", "T"), lambda: unwrap("A%B%T", "A%B"), lambda: check_namespace("A%B")):
        with pytest.raises(MQClientException, match="namespace 'A%B' contains '%'") as caught:
            refuse()
        assert caught.value.response_code == -1


@given(st.text("abcXYZ019-_|", min_size=1), topics)
def test_wrapping_is_idempotent_and_unwrapping_reverts_it(namespace: str, topic: str) -> None:
    wrapped = wrap(namespace, topic)
    assert wrapped == wrap(namespace, wrapped)
    assert unwrap(topic, namespace) == unwrap(wrapped, namespace)


@pytest.mark.parametrize(
    ("address", "namespace"),
    [
        ("MQ_INST_1234_abc.mq.example.com:80", "MQ_INST_1234_abc"),
        ("http://MQ_INST_1234_a_b.mq.example.com:80", "MQ_INST_1234_a_b"),
        ("MQ_INST_1234.mq.example.com:80", None),
        ("MQ_INST_1234_abc:80", None),
        ("x-MQ_INST_1_a.b", None),
        ("127.0.0.1:9876", None),
        ("", None),
    ],
)
def test_namespace_is_parsed_from_the_address(address: str, namespace: str | None) -> None:
    assert namespace == namespace_of(address)


def of_sink(options: Mapping[str, str], environ: Mapping[str, str]) -> SinkOptions:
    return parse_sink_options({"topic": "T", **options}, environ)


def of_source(options: Mapping[str, str], environ: Mapping[str, str]) -> SourceOptions:
    return parse_source_options({"subscribe": "T", **options}, environ, streaming=False)


def in_snake_case(options: Mapping[str, str]) -> dict[str, str | None]:
    return {"name_server": options.get("nameServer"), "namespace": options.get("namespace")}


def of_producer(options: Mapping[str, str], environ: Mapping[str, str]) -> ProducerOptions:
    return producer_options(in_snake_case(options), environ)


def of_admin(options: Mapping[str, str], environ: Mapping[str, str]) -> SourceOptions:
    return admin_options(in_snake_case(options), 5.0, environ)


Parse = Callable[[Mapping[str, str], Mapping[str, str]], "SinkOptions | SourceOptions | ProducerOptions"]
everywhere = pytest.mark.parametrize("parse", [of_sink, of_source, of_producer, of_admin])

INSTANCE = "MQ_INST_1_a.mq.example:80"


@everywhere
@pytest.mark.parametrize("given_as", ["option", "variable"])
@pytest.mark.parametrize(
    ("name_server", "address", "namespace"),
    [
        (INSTANCE, INSTANCE, "MQ_INST_1_a"),
        (f"http://{INSTANCE}", INSTANCE, "MQ_INST_1_a"),
        (f"HTTP://{INSTANCE}", INSTANCE, "MQ_INST_1_a"),
        (f" http://{INSTANCE} ; 10.0.0.1:9876", INSTANCE, "MQ_INST_1_a"),
        # As in Java, the whole text of the first address decides.
        (f"http://a/{INSTANCE}", INSTANCE, ""),
        (f"http://{INSTANCE};http://a/MQ_INST_2_b.mq.example:80", INSTANCE, "MQ_INST_1_a"),
        (f"10.0.0.1:9876;{INSTANCE}", "10.0.0.1:9876", ""),
        ("http://10.0.0.1:9876", "10.0.0.1:9876", ""),
        ("MQ_INST_1.mq.example:80", "MQ_INST_1.mq.example:80", ""),
    ],
)
def test_every_client_uses_the_namespace_of_its_name_server(
    parse: Parse, given_as: str, name_server: str, address: str, namespace: str
) -> None:
    options, environ = (
        ({"nameServer": name_server}, {}) if given_as == "option" else ({}, {"NAMESRV_ADDR": name_server})
    )
    parsed = parse(options, environ)
    assert parsed.connection.name_server[0] == address
    assert parsed.connection.wire_name("T") == (f"{namespace}%T" if namespace else "T")


@everywhere
def test_explicit_namespace_wins_over_the_name_servers(parse: Parse) -> None:
    assert parse({"nameServer": INSTANCE, "namespace": "mine"}, {}).connection.wire_name("T") == "mine%T"


@everywhere
@pytest.mark.parametrize("scheme", ["https", "tcp", "ftp"])
def test_scheme_that_names_no_name_server_is_refused(parse: Parse, scheme: str) -> None:
    with pytest.raises(OptionError, match="allowed is host:port;host:port"):
        parse({"nameServer": f"{scheme}://{INSTANCE}"}, {})


def test_endpoints_define_no_namespace() -> None:
    environ = {"NAMESRV_ADDR": INSTANCE}
    assert parse_sink_options({"endpoints": INSTANCE, "topic": "T"}, environ).connection.namespace is None
    assert producer_options({"endpoints": INSTANCE}, environ).connection.namespace is None
