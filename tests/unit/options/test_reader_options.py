"""The options of a read: every option, and the errors of invalid values."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import OptionError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.connection import ConnectionOptions
from rocketmq_spark.options.kinds import OptionSpec, ValueKind, parse_one
from rocketmq_spark.options.offsets import OffsetSpec
from rocketmq_spark.options.parsing import parse_sink_options, parse_source_options, parse_values
from rocketmq_spark.options.sink import SINK_OPTIONS
from rocketmq_spark.options.source import SOURCE_OPTIONS, SourceOptions, option_warnings
from tests.tools.option_docs import shown_default

if TYPE_CHECKING:
    pass

NAME_SERVER = {"nameServer": "a:9876"}
BASE = {**NAME_SERVER, "subscribe": "t"}
QUEUE = MessageQueue("t", "b", 0)
OFFSETS = '{"t":{"b":{"0":7}}}'


def receipt(**offsets: tuple[int, int]) -> str:
    """The receipt of a write to queue 0 on the broker b of each topic."""
    queues = {topic: {"0": {"first_offset": first, "last_offset": last}} for topic, (first, last) in offsets.items()}
    return json.dumps({"b": {"rows": 1, "queues": queues}})


def batch(**options: str) -> SourceOptions:
    return parse_source_options({**BASE, **options}, {}, streaming=False)


def stream(**options: str) -> SourceOptions:
    return parse_source_options({**BASE, **options}, {}, streaming=True)


def refusal(options: dict[str, str], environ: dict[str, str] | None = None, *, streaming: bool = False) -> str:
    with pytest.raises(OptionError) as caught:
        parse_source_options(options, environ or {}, streaming=streaming)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_name_server_and_topic_alone_give_every_default() -> None:
    assert batch() == SourceOptions.of(name_server=("a:9876",), subscribe=("t",))
    assert stream() == SourceOptions.of(
        name_server=("a:9876",),
        subscribe=("t",),
        starting_offsets=OffsetSpec("latest"),
        ending_offsets=OffsetSpec("latest"),
    )


def test_defaults_are_those_of_the_design() -> None:
    assert {spec.name: shown_default(spec) for spec in SOURCE_OPTIONS} == {
        "nameServer": "none",
        "subscribe": "none",
        "subscribePattern": "none",
        "assign": "none",
        "requireBrokers": "none",
        "startingOffsets": "earliest",
        "endingOffsets": "latest",
        "startingTimestamp": "none",
        "endingTimestamp": "none",
        "startingOffsetsByTimestamp": "none",
        "endingOffsetsByTimestamp": "none",
        "startingOffsetsByTimestampStrategy": "error",
        "startingOffsetsFallback": "error",
        "minPartitions": "none",
        "maxRecordsPerPartition": "none",
        "failOnDataLoss": "true",
        "onUnreadable": "fail",
        "subExpression": "*",
        "filterType": "TAG",
        "includeProperties": "true",
        "consumerGroup": "spark-rocketmq-source",
        "commitOffsets": "false",
        "maxOffsetsPerTrigger": "none",
        "maxBytesPerTrigger": "none",
        "minOffsetsPerTrigger": "none",
        "maxTriggerDelay": "900000",
        "pullBatchSize": "512",
        "pullTimeoutMs": "10000",
        "readTimeoutMs": "120000",
        "instanceName": "none",
        "clientIP": "none",
        "unitName": "none",
        "namespace": "none",
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
    }


def test_every_field_has_its_row_in_the_same_order() -> None:
    fields = [*dataclasses.fields(ConnectionOptions), *dataclasses.fields(SourceOptions)]
    of_reads = {spec.field for spec in SOURCE_OPTIONS}
    assert [spec.field for spec in SOURCE_OPTIONS] == [field.name for field in fields if field.name in of_reads]
    assert {field.name for field in dataclasses.fields(SourceOptions)} <= {"connection", *of_reads}


def test_every_shown_default_parses_to_the_default() -> None:
    shown = {spec.name: shown_default(spec) for spec in SOURCE_OPTIONS if shown_default(spec) != "none"}
    values = parse_values(SOURCE_OPTIONS, shown, "read")
    assert SourceOptions.of(**values) == SourceOptions()
    assert len(values) == len(shown)


def test_every_row_is_documented() -> None:
    assert [spec.name for spec in SOURCE_OPTIONS if not (spec.doc and spec.kind.allowed)] == []


def test_options_shared_with_writes_are_identical() -> None:
    of_writes = {spec.field: spec for spec in SINK_OPTIONS}
    shared = [spec for spec in SOURCE_OPTIONS if spec.field in of_writes]
    assert {spec.field for spec in shared if spec != of_writes[spec.field]} == {"instance_name"}
    assert all(
        dataclasses.replace(spec, doc="") == dataclasses.replace(of_writes[spec.field], doc="") for spec in shared
    )
    assert {"name_server", "secret_key", "use_tls", "namespace", "client_ip", "unit_name"} <= {
        spec.field for spec in shared
    }


def test_option_names_are_unique() -> None:
    names = [name.lower() for spec in SOURCE_OPTIONS for name in spec.names]
    assert len(set(names)) == len(names)


@given(st.data())
def test_names_are_accepted_in_any_case(data: st.DataObject) -> None:
    letters = (st.sampled_from((letter.lower(), letter.upper())) for letter in "maxOffsetsPerTrigger")
    name = "".join(map(data.draw, letters))
    assert stream(**{name: "5"}).max_offsets_per_trigger == 5


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("subscribe", "a, b ,a", ("a", "b")),
        ("subscribe", "%RETRY%group", ("%RETRY%group",)),
        ("topic", "a,b", ("a", "b")),
        ("startingOffsets", " EARLIEST", OffsetSpec("earliest")),
        ("startingOffsets", OFFSETS, OffsetSpec(None, ((QUEUE, 7),))),
        (
            "startingOffsets",
            '{"t":{"b":{"1":-2,"0":7}}}',
            OffsetSpec(None, ((QUEUE, 7), (MessageQueue("t", "b", 1), -2))),
        ),
        ("endingOffsets", "latest", OffsetSpec("latest")),
        ("endingOffsets", '{"t":{"b":{"0":-1}}}', OffsetSpec(None, ((QUEUE, -1),))),
        ("startingTimestamp", "0", 0),
        ("endingTimestamp", "1700000000000", 1_700_000_000_000),
        ("startingOffsetsByTimestamp", OFFSETS, ((QUEUE, 7),)),
        ("endingOffsetsByTimestamp", OFFSETS, ((QUEUE, 7),)),
        ("requireBrokers", "2", 2),
        ("requireBrokers", " broker-a , 2,broker-a", ("broker-a", "2")),
        ("minPartitions", "1", 1),
        ("maxRecordsPerPartition", "9223372036854775807", 2**63 - 1),
        ("failOnDataLoss", "False", False),
        ("subExpression", "TagA || TagB", "TagA || TagB"),
        # Only "*" itself is all messages to a broker.
        ("subExpression", " *\n", "*"),
        ("subExpression", "\u00a0*", "\u00a0*"),
        ("includeProperties", "false", False),
        ("consumerGroup", "g" * 120, "g" * 120),
        ("commitOffsets", "false", False),
        ("pullBatchSize", "1024", 1024),
        ("pullTimeoutMs", "120000", 120_000),
        ("readTimeoutMs", "10000", 10_000),
        ("unitName", "unit", "unit"),
        ("namespace", "MQ_INST_1", "MQ_INST_1"),
    ],
)
def test_values_that_are_allowed(name: str, text: str, value: object) -> None:
    field = next(spec.field for spec in SOURCE_OPTIONS if name in spec.names)
    given_ = {**NAME_SERVER, name: text} if field == "subscribe" else {**BASE, name: text}
    assert parse_source_options(given_, {}, streaming=False).values()[field] == value


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("subscribe", ""),
        ("subscribe", "a,,b"),
        ("subscribe", "a b"),
        ("subscribe", "t" * 128),
        ("startingTimestamp", "-1"),
        ("startingTimestamp", "2026-01-01"),
        ("endingTimestamp", "9223372036854775808"),
        ("startingOffsetsByTimestampStrategy", "earliest"),
        ("startingOffsetsFallback", "committed"),
        ("requireBrokers", "0"),
        ("requireBrokers", "a,,b"),
        ("minPartitions", "0"),
        ("maxRecordsPerPartition", "0"),
        ("failOnDataLoss", "yes"),
        ("subExpression", ""),
        ("subExpression", "  "),
        ("subExpression", "a\x01"),
        ("filterType", "SQL"),
        ("includeProperties", "1"),
        ("consumerGroup", ""),
        ("consumerGroup", "g" * 121),
        ("consumerGroup", "DEFAULT_CONSUMER"),
        ("consumerGroup", "a b"),
        ("commitOffsets", "on"),
        ("maxOffsetsPerTrigger", "0"),
        ("maxBytesPerTrigger", "0"),
        ("minOffsetsPerTrigger", "0"),
        ("maxTriggerDelay", "0"),
        ("maxTriggerDelay", "15 minutes"),
        ("maxTriggerDelay", "1.5h"),
        ("maxTriggerDelay", "-1s"),
        ("maxTriggerDelay", "s"),
        ("maxTriggerDelay", "25d"),
        ("pullBatchSize", "0"),
        ("pullBatchSize", "1025"),
        ("pullTimeoutMs", "0"),
        ("readTimeoutMs", "0"),
    ],
)
def test_invalid_value_error_names_option_value_and_allowed_values(name: str, bad: str) -> None:
    spec = next(spec for spec in SOURCE_OPTIONS if spec.name == name)
    message = refusal({**BASE, name: bad}, streaming=True)
    assert message == f"option {name} is {bad!r}, which is not allowed: allowed is {spec.kind.allowed}"


@pytest.mark.parametrize(
    ("name", "bad", "why"),
    [
        ("subscribePattern", "", "it is blank"),
        (
            "subscribePattern",
            "a(",
            "it is not a valid regular expression: missing ), unterminated subpattern at position 1",
        ),
        (
            "subscribePattern",
            "a{99999999999999}",
            "it is not a valid regular expression: the repetition number is too large",
        ),
        ("assign", '{"t":{"b":["0"]}}', "topic 't', broker 'b': \"0\" is not an integer"),
        ("endingOffsets", "committed", "it is neither earliest, latest nor a JSON object"),
        ("startingOffsets", "soon", "it is neither earliest, latest, committed nor a JSON object"),
        (
            "startingOffsets",
            '{"t":{"b":{"0":-3}}}',
            "topic 't', broker 'b', queue 0: -3 is not from -2 to 9223372036854775807",
        ),
        ("endingOffsets", '{"t":{"b":{"0":1.5}}}', "topic 't', broker 'b', queue 0: 1.5 is not an integer"),
        ("endingOffsets", '{"t":{"b":{"0":1,"0":2}}}', "the name '0' occurs twice in one object"),
        (
            "startingOffsetsByTimestamp",
            '{"t":7}',
            "topic 't': 7 is not an object with a broker as key, as in {\"broker\": ...}",
        ),
        (
            "endingOffsetsByTimestamp",
            '{"t":{"b":{"0":-1}}}',
            "topic 't', broker 'b', queue 0: -1 is not from 0 to 9223372036854775807",
        ),
    ],
)
def test_malformed_structured_value_error_names_the_place(name: str, bad: str, why: str) -> None:
    spec = next(spec for spec in SOURCE_OPTIONS if spec.name == name)
    message = refusal({**NAME_SERVER, name: bad})
    assert message == f"option {name} is {bad!r}, which is not allowed: {why}; allowed is {spec.kind.allowed}"


def test_a_long_value_is_cut_in_its_message() -> None:
    many = json.dumps({"t": {"b": {str(queue): 1 for queue in range(5_000)} | {"x": 1}}})
    message = refusal({**NAME_SERVER, "startingOffsets": many})
    assert "topic 't', broker 'b': 'x' is not a queue id" in message
    assert len(message) < 1_000


@pytest.mark.parametrize(("secret", "shown"), [(False, True), (True, False)])
def test_parser_error_of_a_secret_option_is_not_shown(secret: bool, shown: bool) -> None:
    def parse(text: str) -> str:
        raise ValueError(f"{text} is wrong")

    spec = OptionSpec("pass", ValueKind("none", parse), "Doc.", secret=secret)
    with pytest.raises(OptionError) as caught:
        parse_one(spec, "hunter2", "pass")
    assert ("hunter2 is wrong; allowed is none" in str(caught.value)) is shown
    assert ("hunter2" in str(caught.value)) is shown
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("7", 7),
        ("7ms", 7),
        ("90s", 90_000),
        ("15m", 900_000),
        ("2 MIN", 120_000),
        ("1h", 3_600_000),
        ("1d", 86_400_000),
    ],
)
def test_durations_are_milliseconds_or_have_a_suffix(text: str, ms: int) -> None:
    assert stream(minOffsetsPerTrigger="1", maxTriggerDelay=text).max_trigger_delay == ms


# Topics of the read.


def test_exactly_one_of_subscribe_pattern_and_assign_is_accepted() -> None:
    topics = {"subscribe": "t", "subscribePattern": "t.*", "assign": '{"t":{"b":[0]}}'}
    for one in topics:
        assert parse_source_options({**NAME_SERVER, one: topics[one]}, {}, streaming=False).reads(QUEUE)
        for other in set(topics) - {one}:
            message = refusal({**NAME_SERVER, one: topics[one], other: topics[other]})
            assert message.startswith(
                "only one of the following options can be specified for a read from RocketMQ: subscribe, "
                "subscribePattern, assign; given are "
            )
            assert one in message.partition("given are")[2]
            assert other in message.partition("given are")[2]


@pytest.mark.parametrize("streaming", [False, True])
def test_missing_subscription_error_explains_how_to_set_it(streaming: bool) -> None:
    message = refusal(NAME_SERVER, streaming=streaming)
    assert message.startswith("one of the following options must be specified for a read from RocketMQ: subscribe, sub")
    assert '.load("orders")' in message


def test_path_is_the_subscription() -> None:
    for streaming in (False, True):
        parsed = parse_source_options({**NAME_SERVER, "path": "a,b"}, {}, streaming=streaming)
        assert parsed.subscribe == ("a", "b")
    assert batch(path="t").subscribe == ("t",)


def test_path_and_subscribe_that_differ_are_refused() -> None:
    assert refusal({**BASE, "path": "u"}) == "subscribe='t' and .load('u') name different topics: give one of them"


def test_path_with_another_subscription_option_is_rejected() -> None:
    refused = refusal({**NAME_SERVER, "path": "t", "assign": '{"t":{"b":[0]}}'})
    assert refused == "assign and .load('t') both select topics: give one of them"


def test_read_that_ends_before_its_start_is_rejected() -> None:
    read = {**NAME_SERVER, "subscribe": "t"}
    offsets = {"startingOffsets": '{"t":{"b":{"0":-2,"1":5}}}', "endingOffsets": '{"t":{"b":{"0":3,"1":4}}}'}
    assert (
        refusal({**read, **offsets}) == "startingOffsets of t/b/1 is 5, but endingOffsets is 4: give an end from 5 on"
    )
    times = {"startingTimestamp": "1700000000001", "endingTimestamp": "1700000000000"}
    assert "startingTimestamp=1700000000001 is later than endingTimestamp" in refusal({**read, **times})
    # Options that a time overrides are not checked.
    assert batch(**offsets, endingTimestamp="1700000000000").ending_timestamp == 1_700_000_000_000


@pytest.mark.parametrize("expression", ["a | b", "a ||| b", "|"])
def test_single_pipe_between_tags_is_rejected(expression: str) -> None:
    assert "contains a single pipe" in refusal({**NAME_SERVER, "subscribe": "t", "subExpression": expression})


def test_suspicious_options_cause_warnings() -> None:
    assert [*option_warnings(batch(subExpression="a || b", startingTimestamp="1700000000000"))] == []
    for mistaken in ("region = 'eu'", "a && b"):
        (condition,) = option_warnings(batch(subExpression=mistaken))
        assert "filterType=SQL92" in condition
    assert [*option_warnings(batch(subExpression="region = 'like' OR likes > 5", filterType="SQL92"))] == []


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (1_700_000_000, "1970-01-20 16:13:20.000 UTC: it looks like seconds, but milliseconds"),
        (1_700_000_000_000_000, "ms since 1970 (not in the years 1 to 9999): it looks like microseconds or nano"),
        (0, ""),
        # The end of the year 9999, and the greatest number: ends that are never reached.
        (253_402_300_799_999, ""),
        (2**63 - 1, ""),
        (1_700_000_000_123, ""),
    ],
)
@pytest.mark.parametrize("name", ["startingTimestamp", "endingTimestamp", "OffsetsByTimestamp"])
def test_times_that_are_hardly_in_milliseconds_cause_one_warning(name: str, time: int, text: str) -> None:
    values = {name: str(time)}
    if name == "OffsetsByTimestamp":
        of_queues = json.dumps({"t": {"a": {"0": time, "1": time}}})
        values = {"startingOffsetsByTimestamp": of_queues, "endingOffsetsByTimestamp": of_queues}
        name = "startingOffsetsByTimestamp of t/a/0"
    warnings = [*option_warnings(batch(**values))]
    assert len(warnings) == bool(text)
    assert not text or (warnings[0].startswith(f"{name} is {time}, or ") and text in warnings[0])


def test_pull_timeout_defaults_to_at_most_the_read_timeout() -> None:
    assert batch(readTimeoutMs="3000").pull_timeout_ms == 3_000
    assert batch(readTimeoutMs="30000").pull_timeout_ms == 10_000
    assert "pullTimeoutMs" in refusal(
        {**NAME_SERVER, "subscribe": "t", "readTimeoutMs": "3000", "pullTimeoutMs": "3001"}
    )


def test_path_that_is_no_topic_error_names_the_load_call() -> None:
    assert refusal({**NAME_SERVER, "path": "/data/in"}).startswith("option path (.load(\"topic\")) is '/data/in'")


def test_topic_and_subscribe_are_the_same_option() -> None:
    assert (
        refusal({**BASE, "topic": "u"}) == "subscribe and topic are the same option with two values: give one of them"
    )


@pytest.mark.parametrize(
    ("given_", "read"),
    [
        ({"subscribe": "t,u"}, {"t/b/0", "t/b/1", "u/b/0"}),
        ({"subscribePattern": "t"}, {"t/b/0", "t/b/1"}),
        ({"subscribePattern": "[tu].?"}, {"t/b/0", "t/b/1", "u/b/0", "tt/b/0"}),
        ({"assign": '{"t":{"b":[1]},"u":{"b":[0]}}'}, {"t/b/1", "u/b/0"}),
        ({"startingOffsets": receipt(t=(1, 2), u=(3, 4))}, {"t/b/0", "u/b/0"}),
        ({"startingOffsets": receipt(t=(1, 2), u=(3, 4)), "subscribe": "t"}, {"t/b/0"}),
        ({"endingOffsets": receipt(t=(1, 2)), "subscribe": "t,u"}, {"t/b/0"}),
    ],
)
def test_reads_accepts_exactly_the_subscribed_queues(given_: dict[str, str], read: set[str]) -> None:
    queues = [
        MessageQueue("t", "b", 0),
        MessageQueue("t", "b", 1),
        MessageQueue("u", "b", 0),
        MessageQueue("tt", "b", 0),
    ]
    options = parse_source_options({**NAME_SERVER, **given_}, {}, streaming=False)
    assert {str(queue) for queue in queues if options.reads(queue)} == read


# Where it begins and ends.


def test_receipt_alone_defines_start_and_end_of_a_batch_read() -> None:
    options = parse_source_options({**NAME_SERVER, "startingOffsets": receipt(t=(3, 7))}, {}, streaming=False)
    assert options.starting_offsets == OffsetSpec(None, ((QUEUE, 3),), receipt=True)
    assert options.ending_offsets == OffsetSpec(None, ((QUEUE, 8),), receipt=True)


def test_a_receipt_is_found_under_a_name_in_any_case() -> None:
    options = parse_source_options({**NAME_SERVER, "STARTINGoffsets": receipt(t=(3, 7))}, {}, streaming=False)
    assert options.ending_offsets.offsets == ((QUEUE, 8),)


def test_explicit_end_overrides_the_end_of_the_receipt() -> None:
    assert batch(startingOffsets=receipt(t=(3, 7)), endingOffsets="latest").ending_offsets == OffsetSpec("latest")


def test_stream_starts_at_a_receipt_and_has_no_end() -> None:
    options = parse_source_options({**NAME_SERVER, "startingOffsets": receipt(t=(3, 7))}, {}, streaming=True)
    assert options.starting_offsets == OffsetSpec(None, ((QUEUE, 3),), receipt=True)
    assert options.ending_offsets == OffsetSpec("latest")


def test_ending_offsets_alone_are_rejected_without_a_subscription() -> None:
    assert refusal({**NAME_SERVER, "endingOffsets": receipt(t=(3, 7))}).startswith("one of the following options must")


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (
            {"startingOffsets": "latest"},
            "startingOffsets=latest: starting offset can't be latest for batch queries on RocketMQ",
        ),
        (
            {"startingOffsets": '{"t":{"b":{"0":-1}}}'},
            "startingOffsets: starting offset of t/b/0 can't be latest (-1) for batch queries on RocketMQ",
        ),
        (
            {"endingOffsets": "earliest"},
            "endingOffsets=earliest: ending offset can't be earliest for batch queries on RocketMQ",
        ),
        (
            {"endingOffsets": '{"t":{"b":{"0":-2}}}'},
            "endingOffsets: ending offset of t/b/0 can't be earliest (-2) for batch queries on RocketMQ",
        ),
    ],
)
def test_batch_read_that_cannot_have_rows_is_rejected(given_: dict[str, str], message: str) -> None:
    assert refusal({**BASE, **given_}) == message


@pytest.mark.parametrize(
    "given_",
    [
        {"startingOffsets": "latest", "startingTimestamp": "1"},
        {"startingOffsets": "latest", "startingOffsetsByTimestamp": OFFSETS},
        {"endingOffsets": "earliest", "endingTimestamp": "1"},
        {"endingOffsets": "earliest", "endingOffsetsByTimestamp": OFFSETS},
    ],
)
def test_offset_overridden_by_a_timestamp_is_not_checked(given_: dict[str, str]) -> None:
    assert batch(**given_) != batch()


@pytest.mark.parametrize("place", ["earliest", "latest", '{"t": {"b": {"0": -1}}}', '{"t": {"b": {"0": -2}}}'])
def test_stream_can_start_at_any_offset(place: str) -> None:
    assert str(stream(startingOffsets=place).starting_offsets) == place


@pytest.mark.parametrize(
    ("name", "value"), [("endingOffsets", "latest"), ("endingTimestamp", "5"), ("endingOffsetsByTimestamp", OFFSETS)]
)
def test_a_stream_has_no_end(name: str, value: str) -> None:
    message = refusal({**BASE, name.lower(): value}, streaming=True)
    assert message == f"{name}: ending offset not valid in streaming queries; remove it, or use spark.read"
    assert batch(**{name: value}).subscribe == ("t",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("maxOffsetsPerTrigger", "5"),
        ("maxBytesPerTrigger", "5"),
        ("minOffsetsPerTrigger", "5"),
        ("maxTriggerDelay", "15m"),
        ("commitOffsets", "true"),
    ],
)
def test_trigger_and_commit_options_are_rejected_for_batch_reads(name: str, value: str) -> None:
    message = refusal({**BASE, name.lower(): value})
    assert message == f"{name} is for streams and not valid in batch queries: remove it, or use spark.readStream"


@pytest.mark.parametrize("name", ["minPartitions", "maxRecordsPerPartition"])
def test_partition_limits_apply_to_batches_and_streams(name: str) -> None:
    assert batch(**{name: "5"}) != batch()
    assert stream(**{name: "5"}) != stream()


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (
            {"minOffsetsPerTrigger": "6", "maxOffsetsPerTrigger": "5"},
            "minOffsetsPerTrigger=6 is more than maxOffsetsPerTrigger=5: lower the one or raise the other",
        ),
        (
            {"maxTriggerDelay": "15m"},
            (
                "maxTriggerDelay is given without minOffsetsPerTrigger: give minOffsetsPerTrigger, too, or remove "
                "maxTriggerDelay"
            ),
        ),
        (
            {"pullTimeoutMs": "120001"},
            "pullTimeoutMs=120001 is more than readTimeoutMs=120000: lower the one or raise the other",
        ),
        (
            {"filterType": "SQL92"},
            "filterType=SQL92 requires a condition, but subExpression is *: give a condition, or remove filterType",
        ),
        (
            {"filterType": "SQL92", "subExpression": "a = 'like' AND b Like 'c%'"},
            (
                "subExpression=\"a = 'like' AND b Like 'c%'\": brokers match no message with LIKE; use CONTAINS, "
                "STARTSWITH or ENDSWITH with a text without %"
            ),
        ),
        ({"subExpression": " || "}, "subExpression=' || ' has no tag: allowed is *, or tags as in TagA || TagB"),
        (
            {"startingOffsetsByTimestampStrategy": "latest"},
            (
                "startingOffsetsByTimestampStrategy=latest requires startingTimestamp or "
                "startingOffsetsByTimestamp: give one of them, or remove startingOffsetsByTimestampStrategy"
            ),
        ),
        (
            {"startingOffsets": "Committed"},
            ("startingOffsets=committed requires consumerGroup: name the group whose committed offsets begin the read"),
        ),
        (
            {"startingOffsetsFallback": "latest", "consumerGroup": "billing"},
            (
                "startingOffsetsFallback=latest requires startingOffsets=committed: give it, or remove "
                "startingOffsetsFallback"
            ),
        ),
        ({"accessKey": "me"}, "accessKey is given without secretKey: give secretKey, too, or remove accessKey"),
        ({"tlsCaFile": "/ca.pem"}, "tlsCaFile is given without useTls: set useTls=true, or remove tlsCaFile"),
        (
            {"startingOffsets": '{"u":{"b":{"0":1}}}'},
            "startingOffsets has u/b/0, but the read does not include it (subscribe is t): remove or include it",
        ),
        (
            {"startingOffsetsByTimestamp": '{"t":{"b":{"0":1}},"u":{"b":{"0":1}}}'},
            (
                "startingOffsetsByTimestamp has u/b/0, but the read does not include it (subscribe is t): remove or "
                "include it"
            ),
        ),
        (
            {"startingOffsets": receipt(u=(1, 2))},
            "startingOffsets has u/b/0, but the read does not include it (subscribe is t): remove or include it",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(given_: dict[str, str], message: str) -> None:
    assert refusal({**BASE, **given_}, streaming=True) == message


def test_ending_offset_of_a_queue_missing_in_the_receipt_is_rejected() -> None:
    message = refusal({**NAME_SERVER, "startingOffsets": receipt(t=(1, 2)), "endingOffsets": '{"t":{"b":{"1":5}}}'})
    cause = "endingOffsets has t/b/1, but the read does not include it (startingOffsets is a receipt)"
    assert message == f"{cause}: remove or include it"


def test_options_at_the_limit_of_each_other_are_accepted() -> None:
    assert stream(minOffsetsPerTrigger="5", maxOffsetsPerTrigger="5").min_offsets_per_trigger == 5
    assert stream(filterType="sql92", subExpression="a > 5").filter_type == "SQL92"
    assert batch(startingTimestamp="5", startingOffsetsByTimestampStrategy="latest").starting_timestamp == 5


# Options of a write only.


@pytest.mark.parametrize(
    ("name", "value"), [("transport", "grpc"), ("transport", "remoting"), ("Endpoints", "proxy:8081")]
)
def test_a_read_over_grpc_is_refused_with_the_reason(name: str, value: str) -> None:
    message = refusal({"subscribe": "t", name: value})
    assert message == (
        f"{name.lower()} is an option of a write: reads use only the remoting protocol, because a proxy can't replay "
        "stored messages (gRPC). Remove it, and give nameServer"
    )


@pytest.mark.parametrize("name", ["batchBytes", "producerGroup", "tags", "metricsPath"])
def test_write_option_of_a_read_is_reported_as_a_write_option(name: str) -> None:
    message = refusal({**BASE, name.lower(): "hunter2"})
    assert message == f"unknown option {name.lower()!r}: {name} is an option of a write"


def test_read_option_of_a_write_is_reported_as_a_read_option() -> None:
    with pytest.raises(OptionError) as caught:
        parse_sink_options({**NAME_SERVER, "startingoffsets": "earliest"}, {})
    assert str(caught.value) == "unknown option 'startingoffsets': startingOffsets is an option of a read"


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("group", "use consumerGroup"),
        ("kafka.group.id", "use consumerGroup"),
        ("kafka.bootstrap.servers", "use nameServer"),
        ("includeHeaders", "use includeProperties"),
        ("topics", "did you mean subscribe?"),
    ],
)
def test_option_of_another_connector_error_names_the_equivalent(given: str, hint: str) -> None:
    assert refusal({**BASE, given: "x"}) == f"unknown option {given!r}: {hint}"


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    assert refusal({**BASE, "startingoffset": "x"}) == "unknown option 'startingoffset': did you mean startingOffsets?"


def test_an_unknown_option_near_to_none_lists_those_of_a_read() -> None:
    message = refusal({**BASE, "zzzz": "hunter2"})
    assert message.startswith("unknown option 'zzzz'; the options of a read are nameServer, namespace, clientIP, ")
    assert "hunter2" not in message


def test_keys_of_spark_itself_are_ignored() -> None:
    assert batch(**dict.fromkeys(["checkpointLocation", "queryName", "owner", "option.x"], "x/y")) == batch()


# Servers and secrets.


def test_environment_variable_is_the_default_name_server() -> None:
    parsed = parse_source_options({"subscribe": "t"}, {"NAMESRV_ADDR": "e:1"}, streaming=False)
    assert parsed.connection.name_server == parsed.connection.route_servers == ("e:1",)
    assert parse_source_options(BASE, {"NAMESRV_ADDR": "e:1"}, streaming=False) == batch()


def test_missing_name_server_error_explains_how_to_set_it() -> None:
    assert refusal({"subscribe": "t"}) == (
        'option nameServer is missing: give .option("nameServer", "host:9876;host:9876"), or set the environment '
        "variable NAMESRV_ADDR on the driver"
    )


def test_connection_options_are_derived_from_source_options() -> None:
    config = batch(namespace="ns").connection
    assert (config.over_grpc, config.endpoints, config.name_server) == (False, (), ("a:9876",))
    assert (config.client_async_semaphore_value, config.client_oneway_semaphore_value) == (65535, 65535)
    assert (batch().connection.wire_name("T"), config.wire_name("T")) == ("T", "ns%T")


def test_secrets_travel_with_the_options_and_are_not_shown() -> None:
    options = batch(accessKey="me", secretKey="hunter22", securityToken="hunter33")
    assert pickle.loads(pickle.dumps(options)) == options
    assert (options.connection.secret_key, options.connection.security_token) == ("hunter22", "hunter33")
    assert "access_key='me'" in repr(options)
    assert "hunter" not in f"{options!r} {options!s}"


def test_options_pickle_compare_and_hash_by_value() -> None:
    one, other = batch(startingOffsets=OFFSETS), batch(startingOffsets=OFFSETS)
    assert pickle.loads(pickle.dumps(one)) == one
    assert {one: "instance"}[other] == "instance"
    assert hash(one) != hash(batch())


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch().subscribe = ("x",)  # type: ignore[misc]


def test_two_receipts_must_be_of_the_same_queues() -> None:
    both = {"startingOffsets": receipt(t=(1, 2)), "endingOffsets": receipt(t=(5, 9))}
    assert batch(**both).ending_offsets == OffsetSpec(None, ((QUEUE, 10),), receipt=True)
    for one, other in (({"t": (1, 2)}, {"t": (5, 9), "u": (3, 4)}), ({"t": (1, 2), "u": (3, 4)}, {"t": (5, 9)})):
        message = refusal({**NAME_SERVER, "startingOffsets": receipt(**one), "endingOffsets": receipt(**other)})
        assert "are receipts of different queues: only one of them has u/b/0" in message
