"""The options of a write: every option, and the errors of invalid values."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.errors import OptionError
from rocketmq_spark.model.names import FORBIDDEN_TOPICS
from rocketmq_spark.options.kinds import OptionSpec, ValueKind, option, specs_of, text
from rocketmq_spark.options.parsing import NAMES, parse_sink_options, parse_values
from rocketmq_spark.options.sink import SINK_OPTIONS, SinkOptions
from rocketmq_spark.options.source import SOURCE_OPTIONS
from tests.support.markdown import ROOT
from tests.tools.option_docs import shown_default

NAME_SERVER = {"nameServer": "a:9876"}


def parse(**options: str) -> SinkOptions:
    return parse_sink_options({**NAME_SERVER, **options}, {})


def refusal(options: dict[str, str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(OptionError) as caught:
        parse_sink_options(options, environ or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_name_server_alone_results_in_all_defaults() -> None:
    assert parse() == SinkOptions.of(name_server=("a:9876",))


def test_defaults_are_those_of_the_design() -> None:
    shown = {spec.name: shown_default(spec) for spec in SINK_OPTIONS}
    assert shown == {
        "nameServer": "none",
        "transport": "remoting",
        "endpoints": "none",
        "topic": "none",
        "tags": "none",
        "producerGroup": "spark-rocketmq-sink",
        "instanceName": "none",
        "clientIP": "none",
        "unitName": "none",
        "unitMode": "false",
        "namespace": "none",
        "vipChannelEnabled": "false",
        "createTopicKey": "TBW102",
        "defaultTopicQueueNums": "4",
        "sendMode": "async",
        "sendMsgTimeout": "3000",
        "sendMsgMaxTimeoutPerRequest": "-1",
        "retryTimesWhenSendFailed": "2",
        "retryTimesWhenSendAsyncFailed": "2",
        "retryAnotherBrokerWhenNotStoreOK": "false",
        "maxMessageSize": "4194304",
        "compressMsgBodyOverHowmuch": "4096",
        "compressType": "ZLIB",
        "compressLevel": "5",
        "sendLatencyFaultEnable": "false",
        "faultPreset": "v4",
        "latencyMax": "none",
        "notAvailableDuration": "none",
        "startDetectorEnable": "false",
        "detectTimeout": "200",
        "detectInterval": "2000",
        "pollNameServerInterval": "30000",
        "heartbeatBrokerInterval": "30000",
        "clientAsyncSemaphoreValue": "65535",
        "clientOnewaySemaphoreValue": "65535",
        "queueSelector": "none",
        "machineRoom": "none",
        "ordered": "false",
        "batching": "true",
        "batchBytes": "1048576",
        "batchType": "plain",
        "uniqueKey": "true",
        "maxInFlight": "8",
        "maxInFlightBytes": "33554432",
        "deliveryTimeoutMs": "120000",
        "retryBackoffMs": "100",
        "retryBackoffMaxMs": "5000",
        "requireStoreOk": "true",
        "onError": "fail",
        "deadLetterTopic": "none",
        "rowId": "false",
        "keepRowId": "false",
        "accessKey": "none",
        "secretKey": "none",
        "securityToken": "none",
        "credentialsProvider": "none",
        "signNameServerRequests": "false",
        "useTls": "false",
        "tlsCaFile": "none",
        "tlsCertFile": "none",
        "tlsKeyFile": "none",
        "tlsServerName": "none",
        "tlsInsecureSkipVerify": "false",
        "maxRatePerSecond": "none",
        "maxRateTasks": "none",
        "enableTrace": "false",
        "traceTopic": "RMQ_SYS_TRACE_TOPIC",
        "delivery": "atLeastOnce",
        "transactionalId": "none",
        "writeId": "none",
        "transactionTopic": "rocketmq-spark-decisions",
        "transactionalKey": "none",
        "transactionTimeoutMs": "60000",
        "fenceMs": "10000",
        "metricsFormat": "json",
        "startAnew": "false",
        "metricsPath": "none",
        "recallPath": "none",
    }


def test_every_field_has_its_row_in_the_same_order() -> None:
    fields = [name for name in SinkOptions().values() if name != "mq_client_api_timeout"]
    assert [spec.field for spec in SINK_OPTIONS] == fields


def test_every_shown_default_parses_to_the_default() -> None:
    given = {spec.name: shown_default(spec) for spec in SINK_OPTIONS if shown_default(spec) != "none"}
    assert parse(**given) == parse()


def test_every_row_is_documented() -> None:
    assert [spec.name for spec in SINK_OPTIONS if not (spec.doc and spec.kind.allowed)] == []


@pytest.mark.parametrize("spec", SINK_OPTIONS, ids=lambda spec: spec.name)
@settings(max_examples=5)
@given(random=st.randoms(use_true_random=False))
def test_names_are_accepted_in_any_case(spec: OptionSpec, random: object) -> None:
    sample = {"nameServer": "h:1", "clientIP": "1.2.3.4", "queueSelector": "hash", "latencyMax": "1,2"}
    sample |= {"notAvailableDuration": "0,9", "machineRoom": "idc1", "maxRatePerSecond": "9", "maxRateTasks": "9"}
    sample |= {
        "metricsPath": "/var/sink.jsonl",
        "recallPath": "/var/handles",
        "endpoints": "p:8081",
        "credentialsProvider": "keys:Keys",
    }
    sample |= {"transactionalId": "job", "writeId": "day-1", "transactionalKey": "k" * 16}
    value = sample.get(spec.name) or shown_default(spec)
    name = "".join(random.choice((letter.lower(), letter.upper())) for letter in spec.name)  # type: ignore[attr-defined]
    assert parse_values(SINK_OPTIONS, {name: value}) == parse_values(SINK_OPTIONS, {spec.name: value})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a:9876", ("a:9876",)),
        ("a:9876;b:9876", ("a:9876", "b:9876")),
        ("a:1, b:2 ;c:3;", ("a:1", "b:2", "c:3")),
        ("a:1;a:1", ("a:1",)),
        ("[::1]:9876", ("[::1]:9876",)),
        ("::1:9876", ("[::1]:9876",)),
        ("fe80::2:9876;a:1", ("[fe80::2]:9876", "a:1")),
        ("http://10.0.0.1:9876", ("10.0.0.1:9876",)),
        ("http://gateway/path/10.0.0.1:9876", ("10.0.0.1:9876",)),
        ("HTTP://a:1;b:2", ("a:1", "b:2")),
    ],
)
def test_name_server_addresses(value: str, expected: tuple[str, ...]) -> None:
    assert parse(nameServer=value).connection.name_server == expected


@pytest.mark.parametrize(
    "value",
    ["", ";", "a", "a:", ":1", "a:b", "a:0", "a:65536", "a:-1", "https://a:1", "http://", "a b:1", "a:1;b", "[]:1"],
)
def test_malformed_addresses_are_refused(value: str) -> None:
    message = refusal({"nameServer": value})
    assert message.startswith(f"option nameServer is {value!r}, which is not allowed: allowed is host:port;host:port")


@pytest.mark.parametrize("alias", ["nameServerAddress", "nameserveraddress", "namesrvAddr", "NAMESRVADDR"])
def test_aliases_of_name_server(alias: str) -> None:
    assert parse_sink_options({alias: "a:9876"}, {}) == parse()


def test_aliases_that_agree_are_accepted() -> None:
    assert parse(namesrvAddr=" a:9876 ") == parse()


def test_aliases_that_disagree_are_refused_by_both_names() -> None:
    message = refusal({"nameserver": "a:1", "namesrvaddr": "b:1"})
    assert message == "nameServer and namesrvAddr are the same option with two values: give one of them"


def test_environment_variable_is_the_default_name_server() -> None:
    assert parse_sink_options({}, {"NAMESRV_ADDR": "e:1;f:2"}).connection.name_server == ("e:1", "f:2")


def test_an_option_wins_over_the_environment() -> None:
    assert parse_sink_options(NAME_SERVER, {"NAMESRV_ADDR": "e:1"}) == parse()


def test_a_malformed_environment_variable_is_named() -> None:
    assert "environment variable NAMESRV_ADDR" in refusal({}, {"NAMESRV_ADDR": "nonsense"})


@pytest.mark.parametrize("environ", [{}, {"NAMESRV_ADDR": " "}])
def test_missing_name_server_error_explains_how_to_set_it(environ: dict[str, str]) -> None:
    message = refusal({"topic": "t"}, environ)
    assert message.startswith("option nameServer is missing")
    for hint in ('.option("nameServer", ', "NAMESRV_ADDR", '.option("endpoints", ', "INSERT INTO"):
        assert hint in message


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("nameServr", "nameServer"),
        ("namesrvadr", "nameServer"),
        ("batchByte", "batchBytes"),
        ("retrybackoff", "retryBackoffMs"),
        ("topics", "topic"),
        ("requirestoreOK1", "requireStoreOk"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(given: str, meant: str) -> None:
    message = refusal({**NAME_SERVER, given: "hunter2"})
    assert message == f"unknown option {given!r}: did you mean {meant}?"


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("group", "use producerGroup"),
        ("kafka.bootstrap.servers", "use nameServer"),
        ("userName", "use accessKey"),
        ("kafka.batch.size", "use batchBytes"),
        ("nameserver.addr", "use nameServer"),
        (
            "kafka.metrics.num.samples",
            "an option of Kafka's clients; docs/migration.md lists the options to use instead",
        ),
    ],
)
def test_option_of_another_connector_error_names_the_equivalent(given: str, hint: str) -> None:
    assert refusal({**NAME_SERVER, given: "hunter2"}) == f"unknown option {given!r}: {hint}"


@pytest.mark.parametrize(("use", "table"), [("write", SINK_OPTIONS), ("read", SOURCE_OPTIONS)])
def test_option_names_of_other_connectors_have_documented_equivalents(use: str, table: Sequence[OptionSpec]) -> None:
    documented = {name for spec in table for name in spec.names}
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8").lower()
    for foreign, here in NAMES[use].items():
        assert foreign not in {name.lower() for name in documented}
        assert set(re.findall(r"[a-z]+[A-Z]\w*|topic|subscribe", here)) <= documented, foreign
        assert f"`{foreign}`" in page


def test_unknown_option_without_similar_name_lists_options_not_its_value() -> None:
    message = refusal({**NAME_SERVER, "zzzz": "hunter2", "nameservr": "hunter2"})
    assert message.startswith(
        "unknown option 'zzzz'; unknown option 'nameservr': did you mean nameServer?; the options"
    )
    assert all(spec.name in message for spec in SINK_OPTIONS)
    assert "hunter2" not in message


def test_keys_of_spark_itself_are_ignored() -> None:
    keys = ["checkpointLocation", "checkpointlocation", "queryName", "owner", "provider", "location", "external"]
    keys += ["comment", "is_managed_location", "option.nameserver", "OPTION.x"]
    assert parse(**dict.fromkeys(keys, "x/y")) == parse()


@pytest.mark.parametrize(
    ("name", "text_", "value"),
    [
        ("batching", "FALSE", False),
        ("requireStoreOk", "False", False),
        ("sendLatencyFaultEnable", "tRuE", True),
        ("retryAnotherBrokerWhenNotStoreOK", "true", True),
        ("defaultTopicQueueNums", "1", 1),
        ("retryTimesWhenSendFailed", "0", 0),
        ("maxInFlight", "1024", 1024),
        ("sendMsgTimeout", " 500 ", 500),
        ("maxMessageSize", "1", 1),
        ("maxMessageSize", "64m", 64 * 1024**2),
        ("batchBytes", "512k", 512 * 1024),
        ("batchBytes", "1M", 1024**2),
        ("batchBytes", "4mb", 4 * 1024**2),
        ("batchBytes", "1024", 1024),
        ("batchBytes", "2048b", 2048),
        ("maxInFlightBytes", "1g", 1024**3),
        ("queueSelector", "roundrobin", "roundRobin"),
        ("queueSelector", "column", "column"),
        ("producerGroup", "g" * 120, "g" * 120),
        ("topic", "%RETRY%a|b-c_d", "%RETRY%a|b-c_d"),
        ("topic", "t" * 127, "t" * 127),
        ("tags", "blue sky", "blue sky"),
        ("instanceName", "job 7", "job 7"),
        ("clientIP", "10.1.2.3", "10.1.2.3"),
        ("sendMode", "ONEWAY", "oneway"),
        ("sendMsgMaxTimeoutPerRequest", "-1", -1),
        ("maxRatePerSecond", "1", 1),
        ("namespace", "MQ_INST_1-a", "MQ_INST_1-a"),
        ("transport", "REMOTING", "remoting"),
        ("metricsPath", "/var/log/sink.jsonl", "/var/log/sink.jsonl"),
        ("metricsPath", "s3://bucket/a folder", "s3://bucket/a folder"),
        ("metricsPath", "hdfs://host:8020/user/me@example", "hdfs://host:8020/user/me@example"),
        ("metricsPath", "hdfs://me@host:8020/sink", "hdfs://me@host:8020/sink"),
    ],
)
def test_values_that_are_allowed(name: str, text_: str, value: object) -> None:
    field = next(spec.field for spec in SINK_OPTIONS if spec.name == name)
    assert parse(**{name: text_}).values()[field] == value


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("batching", "yes"),
        ("batching", "1"),
        ("batching", ""),
        ("defaultTopicQueueNums", "0"),
        ("retryTimesWhenSendFailed", "-1"),
        ("retryTimesWhenSendFailed", "2.0"),
        ("retryTimesWhenSendFailed", "1_000"),
        ("retryTimesWhenSendFailed", "٣"),
        ("sendMsgTimeout", "0"),
        ("sendMsgTimeout", "3s"),
        ("sendMsgTimeout", "2147483648"),
        ("maxMessageSize", "0"),
        ("maxMessageSize", "67108865"),
        ("batchBytes", "1023"),
        ("batchBytes", "5m"),
        ("batchBytes", "1.5m"),
        ("batchBytes", "1x"),
        ("batchBytes", "-1"),
        ("maxInFlight", "0"),
        ("maxInFlight", "1025"),
        ("pollNameServerInterval", "99"),
        ("heartbeatBrokerInterval", "0"),
        ("queueSelector", "machine"),
        ("faultPreset", "v3"),
        ("machineRoom", ""),
        ("machineRoom", "idc1,,idc2"),
        ("machineRoom", "idc 1"),
        ("machineRoom", "-"),
        ("latencyMax", ""),
        ("latencyMax", "50,50,550,1000,2000,3000,15000"),
        ("latencyMax", "50,40,550,1000,2000,3000,15000"),
        ("latencyMax", "-1,100,550,1000,2000,3000,15000"),
        ("latencyMax", "50;100"),
        ("notAvailableDuration", "0,0,30000,20000,120000,180000,600000"),
        ("topic", ""),
        ("topic", " "),
        ("topic", "a b"),
        ("topic", "a\n"),
        ("topic", "großes"),
        ("topic", "t" * 128),
        *(("topic", forbidden) for forbidden in sorted(FORBIDDEN_TOPICS)),
        ("tags", " "),
        ("tags", "a|b"),
        ("tags", "a\x01b"),
        ("producerGroup", ""),
        ("producerGroup", "g" * 121),
        ("producerGroup", "DEFAULT_PRODUCER"),
        ("instanceName", " "),
        ("clientIP", "10.0.0.1@x"),
        ("tlsServerName", ""),
        ("tlsServerName", "mq.example:8081"),
        ("tlsServerName", "https://mq.example"),
        ("tlsServerName", ".example"),
        ("tlsServerName", "[::1]"),
        ("transport", "http2"),
        ("retryBackoffMs", "0"),
        ("sendMode", "fast"),
        ("sendMsgMaxTimeoutPerRequest", "-2"),
        ("namespace", "a%b"),
        ("namespace", " "),
        ("maxRatePerSecond", "0"),
        ("clientAsyncSemaphoreValue", "0"),
    ],
)
def test_invalid_value_error_names_option_value_and_allowed_values(name: str, bad: str) -> None:
    spec = next(spec for spec in SINK_OPTIONS if spec.name == name)
    message = refusal({**NAME_SERVER, name.lower(): bad})
    assert message == f"option {name} is {bad!r}, which is not allowed: allowed is {spec.kind.allowed}"


@pytest.mark.parametrize(
    "bad",
    [
        "sink.jsonl",
        "./sink.jsonl",
        "~/sink.jsonl",
        "s3:/x",
        "",
        "s3://key:hunter2@bucket/x",
        "s3://key:hunt/er2@bucket/x",
        "s3://key:/hunter2@bucket/x",
        "hdfs://user:hunter2@host:8020/x",
    ],
)
def test_metrics_path_that_is_relative_or_has_a_password_is_rejected(bad: str) -> None:
    message = refusal({**NAME_SERVER, "metricsPath": bad})
    assert message.startswith(
        "option metricsPath has a value (not shown: it is secret) that is not allowed: allowed is an"
    )
    assert "hunter2" not in message


EXACTLY_ONCE = {"delivery": "exactlyOnce", "transactionalId": "job"}
EFFECTIVELY_ONCE = {"delivery": "effectivelyOnce", "transactionalId": "job", "topic": "t"}
ORDERED = {"ordered": "true", "topic": "orders"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**ORDERED, "sendMode": "oneway"}, "ordered=true is not available with sendMode=oneway"),
        ({**ORDERED, "queueSelector": "random"}, "ordered=true is not available with queueSelector=random"),
        ({**ORDERED, "queueSelector": "roundRobin"}, "ordered=true is not available with queueSelector=roundRobin"),
        ({**ORDERED, "queueSelector": "column"}, "ordered=true is not available with queueSelector=column"),
        (
            {**ORDERED, "sendLatencyFaultEnable": "true"},
            "ordered=true is not available with sendLatencyFaultEnable=true",
        ),
        ({"ordered": "true"}, "ordered=true requires the option topic"),
        ({"maxRateTasks": "4"}, "maxRateTasks is given without maxRatePerSecond"),
        ({"keepRowId": "true", "rowId": "true"}, "keepRowId=true keeps the ids of rows, but rowId replaces them"),
        ({"uniqueKey": "false", "enableTrace": "true"}, "uniqueKey=false is not available with enableTrace=true"),
        ({"uniqueKey": "false", "batchType": "inner"}, "uniqueKey=false is not available with batchType=inner"),
        ({**EXACTLY_ONCE, "uniqueKey": "false"}, "uniqueKey=false is not available with delivery=exactlyOnce"),
        ({"delivery": "exactlyOnce"}, "delivery=exactlyOnce requires transactionalId"),
        ({"transactionalId": "job"}, "transactionalId is given without delivery=exactlyOnce"),
        ({"writeId": "day-1"}, "writeId is given without delivery=exactlyOnce"),
        ({**EXACTLY_ONCE, "sendMode": "oneway"}, "sendMode=oneway is not available with delivery=exactlyOnce"),
        ({**EXACTLY_ONCE, "batchType": "inner"}, "batchType=inner is not available with delivery=exactlyOnce"),
        ({**EXACTLY_ONCE, "requireStoreOk": "false"}, "requireStoreOk=false is not available with delivery=exact"),
        ({**EXACTLY_ONCE, "recallPath": "/tmp/x"}, "recallPath=/tmp/x is not available with delivery=exactlyOnce"),
        ({**EXACTLY_ONCE, "enableTrace": "true"}, "enableTrace=true is not available with delivery=exactlyOnce"),
        ({**EXACTLY_ONCE, "topic": "log", "transactionTopic": "log"}, "transactionTopic=log is also a topic of rows"),
        ({"delivery": "effectivelyOnce", "topic": "t"}, "delivery=effectivelyOnce requires transactionalId"),
        ({"delivery": "effectivelyOnce", "transactionalId": "j"}, "delivery=effectivelyOnce requires the option topic"),
        ({**EFFECTIVELY_ONCE, "sendMode": "oneway"}, "sendMode=oneway is not available with delivery=effectivelyOnce"),
        ({**EFFECTIVELY_ONCE, "requireStoreOk": "false"}, "requireStoreOk=false is not available with delivery=effect"),
        ({**EFFECTIVELY_ONCE, "recallPath": "/x"}, "recallPath=/x is not available with delivery=effectivelyOnce"),
        (
            {**EFFECTIVELY_ONCE, "onError": "deadLetter", "deadLetterTopic": "dead"},
            "onError=deadLetter is not available with delivery=effectivelyOnce",
        ),
        ({**EFFECTIVELY_ONCE, "transactionTopic": "t"}, "transactionTopic=t is also a topic of rows"),
        ({"sendMsgMaxTimeoutPerRequest": "0"}, "sendMsgMaxTimeoutPerRequest=0 leaves no time for an attempt"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(given: dict[str, str], message: str) -> None:
    assert refusal({**NAME_SERVER, **given}).startswith(message)


@pytest.mark.parametrize("given", [{}, {"queueSelector": "hash"}, {"sendMode": "sync"}, {"batching": "false"}])
def test_options_compatible_with_ordered_are_accepted(given: dict[str, str]) -> None:
    assert parse(**ORDERED, **given).ordered


def test_both_ladders_are_settable() -> None:
    parsed = parse(latencyMax="1,2", notAvailableDuration="0, 7")
    assert (parsed.connection.latency_max, parsed.connection.not_available_duration) == ((1, 2), (0, 7))


def test_machine_rooms_are_a_list_and_go_with_their_selector() -> None:
    assert parse(queueSelector="machineRoom", machineRoom="idc1, eu-west.2 ,idc1").machine_room == ("idc1", "eu-west.2")
    for given_ in (
        {"queueSelector": "machineRoom"},
        {"machineRoom": "idc1"},
        {"machineRoom": "a", "queueSelector": "hash"},
    ):
        assert refusal({**NAME_SERVER, **given_}).endswith(
            "set both queueSelector=machineRoom and machineRoom, or neither"
        )


def test_detector_with_legacy_fault_preset_is_rejected() -> None:
    assert parse(faultPreset="V5", startDetectorEnable="true").connection.fault_preset == "v5"
    assert refusal({**NAME_SERVER, "faultPreset": "legacy", "startDetectorEnable": "true"}).startswith(
        "startDetectorEnable=true is not available with faultPreset=legacy"
    )


def test_ladders_of_different_length_are_refused() -> None:
    assert refusal({**NAME_SERVER, "latencyMax": "1,2"}).startswith(
        "latencyMax has 2 steps, but notAvailableDuration has 7"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"retryBackoffMs": "6000"}, "retryBackoffMs=6000 is more than retryBackoffMaxMs=5000"),
        ({"maxInFlightBytes": "1k"}, "batchBytes=1048576 is more than maxInFlightBytes=1024"),
        ({"deliveryTimeoutMs": "2999"}, "sendMsgTimeout=3000 is more than deliveryTimeoutMs=2999"),
    ],
)
def test_options_that_contradict_each_other_are_refused(given: dict[str, str], message: str) -> None:
    assert refusal({**NAME_SERVER, **given}) == f"{message}: lower the one or raise the other"


@pytest.mark.parametrize(
    "given",
    [
        {"retryBackoffMs": "5000"},
        {"maxInFlightBytes": "1m"},
        {"deliveryTimeoutMs": "3000"},
    ],
)
def test_options_at_the_limit_of_each_other_are_accepted(given: dict[str, str]) -> None:
    assert parse(**given) != parse()


def test_path_is_the_topic() -> None:
    assert parse(path="orders").topic == "orders"


def test_path_and_topic_can_be_equal() -> None:
    assert parse(path="orders", topic="orders").topic == "orders"


def test_path_and_topic_that_differ_are_refused() -> None:
    message = refusal({**NAME_SERVER, "path": "a", "topic": "b"})
    assert message == "topic='b' and .save('a') name two topics: give one of them"


def test_path_that_is_no_topic_error_names_the_save_call() -> None:
    assert refusal({**NAME_SERVER, "path": "/data/out"}).startswith('option path (.save("topic"), .start("topic")) is')


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"onError": "deadLetter"},
            "onError=deadLetter requires the option deadLetterTopic: give the topic for invalid rows",
        ),
        (
            {"deadLetterTopic": "dead"},
            (
                "deadLetterTopic='dead' requires onError=deadLetter, but onError is fail: "
                "set onError=deadLetter, or remove deadLetterTopic"
            ),
        ),
        (
            {"onError": "DEADLETTER", "topic": "t", "deadLetterTopic": "t"},
            "deadLetterTopic='t' is also the option topic: give a separate topic for invalid rows",
        ),
    ],
)
def test_dead_letter_topic_is_required_only_for_its_use_and_differs(options: dict[str, str], message: str) -> None:
    assert refusal(NAME_SERVER | options) == message


@pytest.mark.parametrize(("kind", "level", "span"), [("ZLIB", "10", "0 to 9"), ("zstd", "0", "1 to 22")])
def test_compression_level_must_be_supported_by_the_type(kind: str, level: str, span: str) -> None:
    message = refusal({**NAME_SERVER, "compressType": kind, "compressLevel": level})
    assert message == f"compressLevel={level} is not valid for compressType={kind.upper()}: allowed is {span}"


def test_options_pickle_compare_and_hash_by_value() -> None:
    one, other = parse(latencyMax="1", notAvailableDuration="2"), parse(latencyMax="1", notAvailableDuration="2")
    assert pickle.loads(pickle.dumps(one)) == one
    assert {one: "instance"}[other] == "instance"
    assert hash(one) != hash(parse())


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse().topic = "x"  # type: ignore[misc]


def test_repr_shows_every_option() -> None:
    shown = repr(parse(topic="orders"))
    assert shown.startswith("SinkOptions(connection=ConnectionOptions(name_server=('a:9876',), transport='remoting', ")
    assert "topic='orders'" in shown
    assert [spec.name for spec in SINK_OPTIONS if (f"{spec.field}=" in shown) == spec.secret] == []


# The handling of secrets, tested with test options of a stricter kind.


def _even_length(value: str) -> str:
    if len(value) % 2:
        raise ValueError(f"odd: {value}")
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    access_key: str = option("accessKey", None, text("a text", r"\s"), "Who.")
    secret_key: str | None = option("secretKey", None, ValueKind("an even length", _even_length), "Proof.", secret=True)


CREDENTIALS = specs_of(Credentials, "write")


def test_a_secret_is_parsed_and_not_shown_by_repr() -> None:
    credentials = Credentials(**parse_values(CREDENTIALS, {"accesskey": "me", "secretkey": "hunter22"}))
    assert credentials.secret_key == "hunter22"
    assert repr(credentials).endswith("Credentials(access_key='me')")


def test_a_malformed_secret_is_nowhere_in_its_error() -> None:
    with pytest.raises(OptionError) as caught:
        parse_values(CREDENTIALS, {"secretKey": "hunter2"})
    assert str(caught.value) == (
        "option secretKey has a value (not shown: it is secret) that is not allowed: allowed is an even length"
    )
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


def test_a_secret_given_twice_differently_is_not_shown() -> None:
    with pytest.raises(OptionError) as caught:
        parse_values(CREDENTIALS, {"secretKey": "hunter22", "SECRETKEY": "hunter33"})
    assert "hunter" not in str(caught.value)


def test_the_secrets_of_a_write_travel_with_its_options_and_are_not_shown() -> None:
    options = parse(
        accesskey="me",
        secretkey="hunter22",
        securitytoken="hunter33",
        usetls="true",
        tlscafile="/a b/ca.pem",
        tlsservername="::1",
    )
    connection = options.connection
    assert (connection.access_key, connection.secret_key, connection.security_token) == ("me", "hunter22", "hunter33")
    assert (connection.use_tls, connection.tls_ca_file, connection.tls_server_name) == (True, "/a b/ca.pem", "::1")
    assert pickle.loads(pickle.dumps(options)) == options
    for shown in (repr(options), str(options), f"{options!s:>2} {[options]!r}"):
        assert "access_key='me'" in shown
        assert "hunter" not in shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"accessKey": "me"}, "accessKey is given without secretKey: give secretKey, too, or remove accessKey"),
        ({"secretKey": "hunter2"}, "secretKey is given without accessKey: give accessKey, too, or remove secretKey"),
        (
            {"securityToken": "hunter2"},
            "securityToken is given without accessKey: give accessKey, too, or remove securityToken",
        ),
        ({"tlsCaFile": "ca.pem"}, "tlsCaFile is given without useTls: set useTls=true, or remove tlsCaFile"),
        (
            {"tlsCaFile": "ca.pem", "useTls": "false"},
            "tlsCaFile is given without useTls: set useTls=true, or remove tlsCaFile",
        ),
        (
            {"tlsServerName": "mq.example"},
            "tlsServerName is given without useTls: set useTls=true, or remove tlsServerName",
        ),
    ],
)
def test_one_security_option_without_the_other_is_refused(given: dict[str, str], message: str) -> None:
    assert refusal({**NAME_SERVER, **given}) == message


@pytest.mark.parametrize("value", ["", " ", "hunter2\n", "hunter2\x00"])
@pytest.mark.parametrize("name", ["secretKey", "securityToken"])
def test_invalid_secret_is_rejected_and_not_shown(name: str, value: str) -> None:
    message = refusal({**NAME_SERVER, "accessKey": "me", "secretKey": "s", name: value})
    assert message.startswith(f"option {name} has a value (not shown: it is secret) that is not allowed")
    assert "hunter" not in message


@pytest.mark.parametrize("tag", ["a ", " a", "a\n", "\ta b"])
def test_a_default_tag_that_no_subscription_matches_is_refused(tag: str) -> None:
    assert "allowed is one tag without a blank at its beginning or end" in refusal({**NAME_SERVER, "tags": tag})
