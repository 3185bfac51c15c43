"""Which options select remoting or gRPC, and which a proxy does not support."""

from __future__ import annotations

from typing import Any

import pytest

from rocketmq_spark.errors import OptionError
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.options.producer import (
    GRPC_RETRY_RESPONSE_CODES,
    PRODUCER_OPTIONS,
    RETRY_RESPONSE_CODES,
    ProducerOptions,
    producer_options,
)
from rocketmq_spark.options.sink import SINK_OPTIONS, SinkOptions

ENDPOINTS = {"endpoints": "p:8081;q:8081"}
ENVIRON = {"NAMESRV_ADDR": "e:9876"}


def sink_refusal(options: dict[str, str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(OptionError) as caught:
        parse_sink_options(options, environ or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def producer_refusal(**properties: Any) -> str:
    with pytest.raises(OptionError) as caught:
        producer_options(properties, {})
    return str(caught.value)


@pytest.mark.parametrize("environ", [{}, ENVIRON])
@pytest.mark.parametrize("given", [ENDPOINTS, {**ENDPOINTS, "transport": "GRPC"}])
def test_endpoints_select_grpc_despite_the_environment(given: dict[str, str], environ: dict[str, str]) -> None:
    options = parse_sink_options(given, environ)
    assert options == SinkOptions.of(
        transport="grpc", endpoints=("p:8081", "q:8081"), compress_type="NONE", max_in_flight=3
    )
    assert (options.over_grpc, options.connection.route_servers) == (True, ("p:8081", "q:8081"))
    producers = producer_options(given, environ)
    assert (producers.over_grpc, producers.connection.name_server) == (True, ())
    assert producers.connection.route_servers == ("p:8081", "q:8081")


@pytest.mark.parametrize("given", [{"nameServer": "a:9876"}, {"nameServer": "a:9876", "transport": "remoting"}])
def test_name_servers_select_remoting(given: dict[str, str]) -> None:
    options = parse_sink_options(given, ENVIRON)
    assert options == SinkOptions.of(name_server=("a:9876",))
    assert (options.over_grpc, options.connection.route_servers) == (False, ("a:9876",))


def test_environment_variable_is_the_name_server_of_a_remoting_write() -> None:
    assert parse_sink_options({"transport": "remoting"}, ENVIRON).connection.route_servers == ("e:9876",)
    assert producer_options({"transport": "remoting"}, ENVIRON).connection.route_servers == ("e:9876",)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("p:8081", ("p:8081",)),
        ("p:8081; q:8082 ;", ("p:8081", "q:8082")),
        ("p:8081,p:8081", ("p:8081",)),
        ("http://p:8081;HTTP://q:8081", ("p:8081", "q:8081")),
        ("[::1]:8081", ("[::1]:8081",)),
        ("http://[fe80::2]:8081", ("[fe80::2]:8081",)),
        ("10.0.0.1:8081", ("10.0.0.1:8081",)),
    ],
)
def test_endpoints_are_addresses_with_or_without_a_scheme(value: str, expected: tuple[str, ...]) -> None:
    assert parse_sink_options({"endpoints": value}, {}).connection.endpoints == expected


@pytest.mark.parametrize("endpoints", ["https://p:8081", "p:8081;HTTPS://q:8081", "http://p:8081,https://q:8081"])
def test_https_without_tls_is_refused_by_name(endpoints: str) -> None:
    for given in ({}, {"useTls": "false"}):
        assert sink_refusal({"Endpoints": endpoints, **given}).startswith(
            "endpoints begins with https://, but useTls is false: set useTls=true, or remove https://"
        )
    listed = endpoints.replace(",", ";").split(";")
    for value in (endpoints, listed, tuple(listed)):
        assert producer_refusal(endpoints=value).startswith(
            "endpoints begins with https://, but use_tls is false: set use_tls=true, or remove https://"
        )


@pytest.mark.parametrize("endpoints", ["http://p:8081", "p:8081;HTTP://q:8081", "http://p:8081,https://q:8081"])
def test_http_with_tls_is_refused_by_name(endpoints: str) -> None:
    assert sink_refusal({"endpoints": endpoints, "useTls": "true"}).startswith(
        "endpoints begins with http://, but useTls is true: set useTls=false, or remove http://"
    )
    assert producer_refusal(endpoints=endpoints, use_tls=True).startswith("endpoints begins with http://, but use_tls")


def test_scheme_that_matches_use_tls_is_accepted() -> None:
    given = {"endpoints": "https://p:8081;https://q:8081;r:8081"}
    wanted = ("p:8081", "q:8081", "r:8081")
    assert parse_sink_options({**given, "useTls": "true"}, {}).connection.endpoints == wanted
    assert producer_options({**given, "use_tls": True}, {}).connection.endpoints == wanted


@pytest.mark.parametrize(
    "value",
    ["", ";", "p", "p:", ":8081", "p:0", "p:65536", "http://", "http://;p:1", "http://p", "http://p:1/x", "dns:p:1/"],
)
def test_malformed_endpoints_are_refused(value: str) -> None:
    message = sink_refusal({"endpoints": value})
    assert message.startswith(f"option endpoints is {value!r}, which is not allowed: allowed is host:port;host:port")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nameServer": "a:1", **ENDPOINTS}, "nameServer and endpoints are both given: give nameServer (remoting)"),
        ({"namesrvAddr": "a:1", **ENDPOINTS}, "nameServer and endpoints are both given: give nameServer (remoting)"),
        (
            {"transport": "remoting", **ENDPOINTS},
            "transport=remoting excludes endpoints",
        ),
        (
            {"transport": "remoting", "nameServer": "a:1", **ENDPOINTS},
            "transport=remoting excludes endpoints: give nameServer instead",
        ),
        (
            {"transport": "grpc", "nameServer": "a:1"},
            "transport=grpc excludes nameServer: give endpoints (proxies) instead",
        ),
        ({"transport": "grpc"}, "option endpoints is missing: transport=grpc requires"),
    ],
)
def test_addresses_of_the_wrong_kind_are_rejected_with_advice(given: dict[str, str], message: str) -> None:
    assert sink_refusal(given, ENVIRON).startswith(message)


def test_producer_errors_use_the_spelling_of_producer_properties() -> None:
    assert producer_refusal(name_server="a:1", endpoints="p:1").startswith("name_server and endpoints are both given")
    assert producer_refusal(transport="grpc", name_server="a:1").startswith(
        "transport=grpc excludes name_server: give endpoints (proxies) instead"
    )
    assert producer_refusal(transport="remoting", endpoints="p:1").startswith("transport=remoting excludes endpoints")
    assert producer_refusal(transport="grpc").startswith("option endpoints is missing")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("vipChannelEnabled", "true", "a proxy has no VIP port"),
        ("unitMode", "true", "requests over gRPC have no unit mode"),
        ("queueSelector", "hash", "the proxy chooses the queue; in a topic of the type FIFO it keeps the order"),
        ("queueSelector", "column", "the proxy chooses the queue"),
        ("queueSelector", "my.module:Class", "the proxy chooses the queue"),
        ("batchType", "inner", "a proxy stores no inner batches"),
        ("sendMode", "oneway", "a proxy answers every request; allowed are async and sync"),
        ("enableTrace", "true", "a proxy rejects messages to the trace topic"),
        ("createTopicKey", "template", "a proxy creates no topics, so create them first"),
        ("defaultTopicQueueNums", "8", "a proxy creates no topics, so create them first"),
        ("compressType", "LZ4", "allowed are ZLIB and NONE"),
        ("compressType", "ZSTD", "allowed are ZLIB and NONE"),
    ],
)
def test_option_that_is_unsupported_over_grpc_is_rejected(name: str, value: str, why: str) -> None:
    message = sink_refusal({**ENDPOINTS, name: value})
    assert message.startswith(f"{name}={value} is not available over gRPC: ")
    assert why in message
    assert message.endswith(f"Remove {name}, or give nameServer instead of endpoints")


def test_machine_rooms_are_rejected_over_grpc() -> None:
    message = sink_refusal({**ENDPOINTS, "queueSelector": "machineRoom", "machineRoom": "idc1"})
    assert message.startswith("queueSelector=machineRoom is not available over gRPC")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vip_channel_enabled", True),
        ("unit_mode", True),
        ("enable_trace", True),
        ("create_topic_key", "template"),
        ("default_topic_queue_nums", 8),
        ("compress_type", "LZ4"),
    ],
)
def test_producer_property_that_is_unsupported_over_grpc_is_rejected(name: str, value: object) -> None:
    shown = str(value).lower() if isinstance(value, bool) else value
    message = producer_refusal(endpoints="p:8081", **{name: value})
    assert message.startswith(f"{name}={shown} is not available over gRPC: ")
    assert message.endswith(f"Remove {name}, or give name_server instead of endpoints")


@pytest.mark.parametrize(
    "given",
    [
        {"vipChannelEnabled": "false"},
        {"queueSelector": "roundRobin"},
        {"queueSelector": "random"},
        {"sendMode": "sync"},
        {"createTopicKey": "TBW102", "defaultTopicQueueNums": "4"},
        {"compressType": "ZLIB", "compressLevel": "9"},
        {"batchType": "plain"},
        {"sendLatencyFaultEnable": "true", "startDetectorEnable": "true"},
        {"ordered": "true", "topic": "orders"},
        {"unitName": "u"},
    ],
)
def test_defaults_and_supported_options_are_accepted_over_grpc(given: dict[str, str]) -> None:
    assert parse_sink_options({**ENDPOINTS, **given}, {}).over_grpc


@pytest.mark.parametrize("tag", ["a\tb", "a\nb", "a\x7f", "a\x85"])
def test_a_tag_with_a_control_character_is_refused_over_grpc_alone(tag: str) -> None:
    message = sink_refusal({**ENDPOINTS, "tags": tag})
    assert message.startswith(f"tags={tag!r} contains a control character, which a proxy rejects")
    assert parse_sink_options({"nameServer": "a:1", "tags": tag}, {}).tags == tag
    assert parse_sink_options({**ENDPOINTS, "tags": "gr\u00fcn \u20ac"}, {}).tags == "gr\u00fcn \u20ac"


def test_bodies_are_compressed_over_grpc_only_on_request() -> None:
    assert parse_sink_options(ENDPOINTS, {}).compress_type == "NONE"
    assert parse_sink_options({**ENDPOINTS, "compressType": "zlib"}, {}).compress_type == "ZLIB"
    assert producer_options(ENDPOINTS, {}).compress_type == "NONE"
    assert producer_options({**ENDPOINTS, "compress_type": "ZLIB"}, {}).compress_type == "ZLIB"
    assert parse_sink_options({"nameServer": "a:1"}, {}).compress_type == "ZLIB"


def test_names_are_wrapped_into_a_namespace_by_remoting_only() -> None:
    for given, wrapped in (({"endpoints": "p:1"}, "T"), ({"nameServer": "a:1"}, "ns%T")):
        assert parse_sink_options({**given, "namespace": "ns"}, {}).connection.wire_name("T") == wrapped
    assert producer_options({**ENDPOINTS, "namespace": "ns"}, {}).connection.wire_name("T") == "T"
    assert producer_options({"namespace": "ns"}, {}).connection.wire_name("T") == "ns%T"
    assert ProducerOptions().connection.wire_name("T") == SinkOptions().connection.wire_name("T") == "T"


def test_producer_over_grpc_retries_codes_of_both_protocols() -> None:
    codes = set(producer_options(ENDPOINTS, {}).retry_response_codes)
    assert codes == RETRY_RESPONSE_CODES | GRPC_RETRY_RESPONSE_CODES
    assert codes > {42900, 40402, 40300, 50000, 50001, 50400, 40800}
    assert producer_options({**ENDPOINTS, "retry_response_codes": [42900]}, {}).retry_response_codes == (42900,)
    assert set(producer_options({}, {}).retry_response_codes) == RETRY_RESPONSE_CODES


def test_tls_server_name_requires_use_tls() -> None:
    remedy = "set use_tls=true, or remove"
    assert (
        producer_refusal(tls_server_name="mq") == f"tls_server_name is given without use_tls: {remedy} tls_server_name"
    )
    skipped = producer_refusal(tls_insecure_skip_verify=True)
    assert skipped == f"tls_insecure_skip_verify is given without use_tls: {remedy} tls_insecure_skip_verify"
    assert producer_options({"tls_server_name": "mq", "use_tls": True}, {}).connection.tls_server_name == "mq"


def test_signing_for_name_servers_needs_credentials() -> None:
    assert producer_refusal(sign_name_server_requests=True) == (
        "sign_name_server_requests is given without credentials: give access_key or credentials_provider, or "
        "remove sign_name_server_requests"
    )
    keys = {"access_key": "user", "secret_key": "hush"}
    assert producer_options({"sign_name_server_requests": True, **keys}, {}).connection.sign_name_server_requests
    provided = {"sign_name_server_requests": True, "credentials_provider": "keys:Keys"}
    assert producer_options(provided, {}).connection.sign_name_server_requests
    assert "no name server is used" in producer_refusal(**ENDPOINTS, sign_name_server_requests=True, **keys)


def test_shared_options_and_properties_have_equal_defaults() -> None:
    sink = {spec.field: spec.default for spec in SINK_OPTIONS}
    for spec in PRODUCER_OPTIONS:
        if spec.field in sink and spec.field != "instance_name":
            assert spec.default == sink[spec.field], spec.field
