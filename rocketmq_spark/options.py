"""The string options of a write, as one table and one frozen value.

Rule 1: the table below is all there is: parsing, messages, defaults and documentation come from it.
Rule 2: every value is checked here, on the driver; a message says the option, the value and what is allowed.
Rule 3: what is not in the table is refused, and its value is not shown: it might be a misspelt secret.
Rule 4: the value of a secret option is in no message and no repr.

Names and defaults of the Java producer are verbatim (spec/producer.md section 2); the rest follows Spark's Kafka
connector (design.md section 5). Spark hands over keys in lower case: messages show the spelling of the table.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import rocketmq_spark.option_values as kinds
from rocketmq_spark.errors import OptionError
from rocketmq_spark.names import DEFAULT_PRODUCER_GROUP, FORBIDDEN_TOPICS, MAX_GROUP_LENGTH, MAX_TOPIC_LENGTH
from rocketmq_spark.option_rules import contradictions
from rocketmq_spark.option_values import ADDRESSES, BOOLEAN, INT_MAX, MIB, ValueKind

# What Spark puts among a sink's options on its own account: tried on 4.3 (path, checkpointLocation, queryName), the
# reserved table properties are the constants of TableCatalog.java.
_SPARK_KEYS: Final = frozenset(
    {"path", "checkpointlocation", "queryname", "owner", "provider", "location", "external", "comment", "collation",
     "is_managed_location", "table_type"}
)  # fmt: skip
_SPARK_PREFIX: Final = "option."


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """One row of the table.

    Parameters
    ----------
    name : str
        Canonical spelling, camelCase.
    kind : ValueKind
    doc : str
        One sentence or two, for README and the documentation.
    aliases : tuple of str, default ()
        Other names of the same option.
    env : str, default ""
        Environment variable that stands in for a missing option.
    secret : bool, default False
        The value must never be shown.
    """

    name: str
    kind: ValueKind
    doc: str
    aliases: tuple[str, ...] = ()
    env: str = ""
    secret: bool = False

    @property
    def field(self) -> str:
        """The attribute that holds the value: the name in snake_case."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.name).lower()

    @property
    def names(self) -> tuple[str, ...]:
        """Every accepted name, the canonical one first."""
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One option as the documentation shows it."""

    name: str
    aliases: tuple[str, ...]
    type: str
    allowed: str
    default: str
    doc: str


@dataclass(frozen=True, slots=True, repr=False)
class SinkOptions:
    """The options of one write, parsed. Times are milliseconds, sizes bytes; see `SINK_OPTIONS` for each one's meaning.

    Hashable and picklable; equal options share a client instance. Building one directly checks nothing.
    """

    name_server: tuple[str, ...]
    topic: str | None = None
    tags: str | None = None
    producer_group: str = "spark-rocketmq-sink"
    instance_name: str | None = None
    client_ip: str | None = None
    unit_name: str | None = None
    unit_mode: bool = False
    namespace: str | None = None
    vip_channel_enabled: bool = False
    create_topic_key: str = "TBW102"
    default_topic_queue_nums: int = 4
    send_mode: str = "async"
    send_msg_timeout: int = 3000
    send_msg_max_timeout_per_request: int = -1
    retry_times_when_send_failed: int = 2
    retry_times_when_send_async_failed: int = 2
    retry_another_broker_when_not_store_ok: bool = False
    max_message_size: int = 4 * MIB
    compress_msg_body_over_howmuch: int = 4096
    compress_type: str = "ZLIB"
    compress_level: int = 5
    send_latency_fault_enable: bool = False
    fault_preset: str = "v4"
    latency_max: tuple[int, ...] | None = None
    not_available_duration: tuple[int, ...] | None = None
    start_detector_enable: bool = False
    detect_timeout: int = 200
    detect_interval: int = 2000
    poll_name_server_interval: int = 30000
    heartbeat_broker_interval: int = 30000
    client_async_semaphore_value: int = 65535
    client_oneway_semaphore_value: int = 65535
    queue_selector: str | None = None
    machine_room: tuple[str, ...] = ()
    ordered: bool = False
    batching: bool = True
    batch_bytes: int = MIB
    batch_type: str = "plain"
    max_in_flight: int = 8
    max_in_flight_bytes: int = 32 * MIB
    delivery_timeout_ms: int = 120000
    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 5000
    require_store_ok: bool = True
    on_error: str = "fail"
    dead_letter_topic: str | None = None
    row_id: bool | tuple[str, ...] = False
    access_key: str | None = None
    secret_key: str | None = None
    security_token: str | None = None
    use_tls: bool = False
    tls_ca_file: str | None = None
    max_rate_per_second: int | None = None
    max_rate_tasks: int | None = None
    metrics_path: str | None = None

    @property
    def custom_selector(self) -> str | None:
        """``module:Class`` if `queue_selector` is a class, else None."""
        return self.queue_selector if ":" in (self.queue_selector or "") else None

    def __repr__(self) -> str:
        return redacted_repr(self, SINK_OPTIONS)


_TOPIC: Final = kinds.name(MAX_TOPIC_LENGTH, FORBIDDEN_TOPICS)
# A shorter interval would be a load of its own on name servers and brokers.
_INTERVAL: Final = kinds.integer(100, unit="ms")
_MILLISECONDS: Final = kinds.integer(1, unit="ms")

_PRINTABLE: Final = kinds.text("a text that is not blank, without control characters", "[\x00-\x1f\x7f]")

_TOPIC_SPEC: Final = OptionSpec(
    "topic", _TOPIC, 'Topic of every row; wins over the column `topic`. Also .save("topic") and .start("topic").'
)

SINK_OPTIONS: Final[tuple[OptionSpec, ...]] = (
    OptionSpec(
        "nameServer",
        ADDRESSES,
        "Addresses of the name servers, separated by ; or a comma.",
        aliases=("nameServerAddress", "namesrvAddr"),
        env="NAMESRV_ADDR",
    ),
    _TOPIC_SPEC,
    OptionSpec(
        "tags",
        kinds.text("one tag that is not blank, without | and without the control characters 1 and 2", "[|\x01\x02]"),
        "Tag of the rows whose column `tags` is absent or null.",
    ),
    OptionSpec(
        "producerGroup",
        kinds.name(MAX_GROUP_LENGTH, {DEFAULT_PRODUCER_GROUP}),
        "Group under which brokers know the producers.",
    ),
    OptionSpec(
        "instanceName",
        kinds.text("a text that is not blank", "[\x00-\x1f]"),
        "Second part of the client id; by default made of the process id and a hash of the options.",
    ),
    OptionSpec(
        "clientIP",
        kinds.text("a text without blanks and without @", r"[\s@]"),
        "First part of the client id; by default the address of the host.",
    ),
    OptionSpec(
        "unitName",
        kinds.text("a text that is not blank", "[\x00-\x1f]"),
        "Third part of the client id, for brokers of several units; by default none.",
    ),
    OptionSpec("unitMode", BOOLEAN, "Mark every request as one of a unit; brokers then create topics as unit topics."),
    OptionSpec(
        "namespace",
        kinds.text("characters of a-z A-Z 0-9 _ - |", "[^a-zA-Z0-9_|-]"),
        "Put before the names of topics and of the group as `namespace%`; metrics and receipts show the names without.",
    ),
    OptionSpec(
        "vipChannelEnabled", BOOLEAN, "Send to the brokers' second port, the one two below the port of the route."
    ),
    OptionSpec("createTopicKey", _TOPIC, "Topic whose route serves as template for a topic that does not exist yet."),
    OptionSpec(
        "defaultTopicQueueNums", kinds.integer(1), "Queues per broker of a topic that is created by writing to it."
    ),
    OptionSpec(
        "sendMode",
        kinds.choice("async", "sync", "oneway"),
        "`async`: a window of requests in flight; `sync`: a task sends the next request when the last one is "
        "acknowledged; `oneway`: no acknowledgements, so no promise that a row is stored.",
    ),
    OptionSpec(
        "sendMsgTimeout",
        _MILLISECONDS,
        "How long one attempt may wait for its answer, from its last byte written; 1 s more per MiB.",
    ),
    OptionSpec(
        "sendMsgMaxTimeoutPerRequest",
        kinds.integer(-1, unit="ms"),
        "Takes the place of a longer sendMsgTimeout while another attempt would follow without a wait, at another "
        "broker; -1: never.",
    ),
    OptionSpec(
        "retryTimesWhenSendFailed",
        kinds.integer(0),
        "With `sendMode` `sync` or `oneway`, the attempts that follow a failed one without a wait, at other brokers; "
        "in every mode, how often a batch that is stored but not safe is sent again before the task fails.",
    ),
    OptionSpec(
        "retryTimesWhenSendAsyncFailed",
        kinds.integer(0),
        "With `sendMode=async`, the attempts that follow a failed one without a wait, at other brokers; then they go "
        "on with waits until deliveryTimeoutMs.",
    ),
    OptionSpec(
        "retryAnotherBrokerWhenNotStoreOK",
        BOOLEAN,
        "Send a batch that is stored but not safe to another broker next time.",
    ),
    OptionSpec("maxMessageSize", kinds.size(1, 4 * MIB), "Longest body of one message, before it is compressed."),
    OptionSpec(
        "compressMsgBodyOverHowmuch",
        kinds.size(0, INT_MAX),
        "Bodies of at least this size are compressed, each by itself, if that makes them shorter.",
    ),
    OptionSpec(
        "compressType",
        kinds.choice("ZLIB", "LZ4", "ZSTD", "NONE"),
        "How; every consumer reads ZLIB, those before 4.9.4 nothing else. LZ4 costs least time.",
    ),
    OptionSpec(
        "compressLevel", kinds.integer(0, 22), "How much: 0 to 9 for ZLIB, 1 to 22 for ZSTD; LZ4 has no levels."
    ),
    OptionSpec("sendLatencyFaultEnable", BOOLEAN, "Avoid slow and failing brokers for a while."),
    OptionSpec(
        "faultPreset",
        kinds.choice("v4", "v5", "legacy"),
        "Rules by which brokers are avoided: those of RocketMQ 5 with the durations of 4.x (`v4`) or of 5.x (`v5`), or "
        "those of 4.x (`legacy`: one fast answer ends an isolation).",
    ),
    OptionSpec(
        "latencyMax",
        kinds.ladder(strictly=True),
        "Latencies at which a broker is avoided, ascending; by default those of `faultPreset`.",
    ),
    OptionSpec(
        "notAvailableDuration",
        kinds.ladder(strictly=False),
        "How long a broker is avoided, for each step of latencyMax; by default as in `faultPreset`.",
    ),
    OptionSpec(
        "startDetectorEnable",
        BOOLEAN,
        "Ask brokers that could not be reached, in the background, whether they can be reached again; not with "
        "faultPreset=legacy, which does not tell such brokers from slow ones.",
    ),
    OptionSpec("detectTimeout", _MILLISECONDS, "How long the detector waits for a broker's answer."),
    OptionSpec("detectInterval", _INTERVAL, "Shortest time between two questions of the detector to one broker."),
    OptionSpec("pollNameServerInterval", _INTERVAL, "Time between two refreshes of the routes."),
    OptionSpec("heartbeatBrokerInterval", _INTERVAL, "Time between two heartbeats to the brokers."),
    OptionSpec(
        "clientAsyncSemaphoreValue",
        kinds.integer(1),
        "Most requests on their way from one worker process, whatever their brokers; what is beyond is tried again.",
    ),
    OptionSpec(
        "clientOnewaySemaphoreValue", kinds.integer(1), "The same for requests without an acknowledgement (`oneway`)."
    ),
    OptionSpec(
        "queueSelector",
        kinds.choice_or_class("roundRobin", "hash", "random", "machineRoom", "column"),
        "How rows find their queue; by default rows with a `shardingKey` by its hash, others round robin. module:Class "
        "is a class of yours.",
    ),
    OptionSpec(
        "machineRoom",
        kinds.words(
            "one or more names separated by commas, each of letters, digits and . _ - (such as idc1)",
            r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?",
        ),
        "Rooms whose brokers come first with queueSelector=machineRoom: those with the room as a part of their name, "
        "as idc1 in idc1-broker-a. While none there is any good, others are taken.",
    ),
    OptionSpec(
        "ordered",
        BOOLEAN,
        "Keep the order of the rows of one `shardingKey` within a Spark partition: one request on its way to each "
        "queue, and the queues of the whole write are those that the driver found.",
    ),
    OptionSpec("batching", BOOLEAN, "Send many rows in one request."),
    OptionSpec("batchBytes", kinds.size(1024, 4 * MIB), "Size at which a batch is sent."),
    OptionSpec(
        "batchType",
        kinds.choice("plain", "inner"),
        "inner lets a topic of the type BatchCQ store each batch as one record, which consumers of 5.x take apart; "
        "bodies are not compressed then, and on other topics nothing changes.",
    ),
    OptionSpec(
        "maxInFlight", kinds.integer(1, 1024), "Largest number of batches on their way to one broker, per task."
    ),
    OptionSpec(
        "maxInFlightBytes",
        kinds.size(1024, INT_MAX),
        "Bytes that a task holds at most: groups that fill, and batches sent.",
    ),
    OptionSpec("deliveryTimeoutMs", _MILLISECONDS, "How long a batch is tried before the task fails."),
    OptionSpec("retryBackoffMs", _MILLISECONDS, "First wait before a batch is sent again; it doubles each time."),
    OptionSpec("retryBackoffMaxMs", _MILLISECONDS, "Longest wait before a batch is sent again."),
    OptionSpec(
        "requireStoreOk",
        BOOLEAN,
        "Count only SEND_OK as stored; false also accepts what is stored but not flushed or replicated yet.",
    ),
    OptionSpec(
        "onError",
        kinds.choice("fail", "skip", "deadLetter"),
        "What becomes of a row that no broker could store as it is: it fails the write, is left out and counted, or "
        "goes to `deadLetterTopic`.",
    ),
    OptionSpec("deadLetterTopic", _TOPIC, "Topic of the invalid rows, with `onError=deadLetter` only."),
    OptionSpec(
        "rowId",
        kinds.ROW_ID,
        "Give each message the property `SPARK_ROW_ID`, equal in repeats of a row: true makes it of the row's place "
        "and content, columns:a,b of these columns.",
    ),
    OptionSpec("accessKey", _PRINTABLE, "Name of the user that signs every request, with secretKey."),
    OptionSpec("secretKey", _PRINTABLE, "Password of that user: shown nowhere, and never sent.", secret=True),
    OptionSpec("securityToken", _PRINTABLE, "Token of a temporary user, sent with every request.", secret=True),
    OptionSpec(
        "useTls",
        BOOLEAN,
        "Encrypt every connection, to name servers and brokers; their certificates must be for the addresses dialled.",
    ),
    OptionSpec(
        "tlsCaFile",
        _PRINTABLE,
        "PEM file of the authorities to trust, at one path on the driver and every executor; by default the system's.",
    ),
    OptionSpec(
        "maxRatePerSecond",
        kinds.integer(1),
        "Most messages that the whole job sends in a second, retries not counted; each task gets an equal share.",
    ),
    OptionSpec(
        "maxRateTasks",
        kinds.integer(1),
        "How many tasks share maxRatePerSecond: those that run at once; by default the parallelism of the registered "
        "session.",
    ),
    OptionSpec(
        "metricsPath",
        kinds.location(),
        "Where each write and each micro-batch leaves its figures: a line of a local file, or a file of its own in a "
        "folder of another file system (s3://, gs://, hdfs://).",
        secret=True,
    ),
)


def parse_sink_options(options: Mapping[str, str], environ: Mapping[str, str]) -> SinkOptions:
    """Return the options of a write.

    Parameters
    ----------
    options : mapping of str to str
        As Spark hands them over; keys in any case.
    environ : mapping of str to str
        Environment of the driver: ``NAMESRV_ADDR`` stands in for ``nameServer``, as in the Java client.

    Raises
    ------
    OptionError
        An option is unknown, malformed or missing, or two contradict each other.
    """
    values = parse_values(SINK_OPTIONS, options, environ)
    path = next((text for key, text in options.items() if key.lower() == "path"), None)
    if path is not None:
        named = _parse_one(_TOPIC_SPEC, path, 'path (.save("topic"), .start("topic"))')
        if values.setdefault("topic", named) != named:
            raise OptionError(f"topic={values['topic']!r} and .save({named!r}) name two topics: give one of them")
    if "name_server" not in values:
        raise OptionError(
            'option nameServer is missing: give .option("nameServer", "host:9876;host:9876"), or set the environment '
            "variable NAMESRV_ADDR on the driver. INSERT INTO a table hands its writer no options: say "
            "INSERT INTO t WITH ('nameServer'='host:9876') SELECT ..."
        )
    parsed = SinkOptions(**values)
    _check_faults(parsed)
    if bool(parsed.machine_room) != (parsed.queue_selector == "machineRoom"):
        raise OptionError(
            f"queueSelector is {parsed.queue_selector or 'not set'} and machineRoom is "
            f"{','.join(parsed.machine_room) or 'not set'}: queueSelector=machineRoom and the option machineRoom need "
            "each other"
        )
    _check_dead_letters(parsed)
    _check_compression(parsed)
    for given, needed in _NEEDS:
        if getattr(parsed, _FIELDS[given]) and not getattr(parsed, _FIELDS[needed]):
            raise OptionError(f"{given} is given without {needed}: give both, or neither")
    for smaller, larger in _NOT_ABOVE:
        low, high = getattr(parsed, _FIELDS[smaller]), getattr(parsed, _FIELDS[larger])
        if low > high:
            raise OptionError(f"{smaller}={low} is more than {larger}={high}: lower the one or raise the other")
    for contradiction in contradictions(parsed):
        raise OptionError(contradiction)
    return parsed


def _check_faults(options: SinkOptions) -> None:
    latency_steps, duration_steps = (
        _PRESET_STEPS if steps is None else len(steps)
        for steps in (options.latency_max, options.not_available_duration)
    )
    if latency_steps != duration_steps:
        raise OptionError(
            f"latencyMax has {latency_steps} steps and notAvailableDuration has {duration_steps} (a faultPreset's own "
            f"have {_PRESET_STEPS}): every step of the one needs its own in the other"
        )
    if options.start_detector_enable and options.fault_preset == "legacy":
        raise OptionError(
            "startDetectorEnable=true and faultPreset=legacy contradict each other: the rules of 4.x do not tell "
            "brokers that can't be reached from slow ones; choose v4 or v5, or leave the detector off"
        )


def _check_dead_letters(parsed: SinkOptions) -> None:
    topic = parsed.dead_letter_topic
    if parsed.on_error == "deadLetter" and topic is None:
        raise OptionError("onError=deadLetter needs the option deadLetterTopic: the topic that invalid rows go to")
    if parsed.on_error != "deadLetter" and topic is not None:
        raise OptionError(
            f"deadLetterTopic={topic!r} is used with onError=deadLetter only, and onError is {parsed.on_error}: "
            "set onError=deadLetter, or leave deadLetterTopic out"
        )
    if topic is not None and topic == parsed.topic:
        raise OptionError(f"deadLetterTopic={topic!r} is the option topic, too: invalid rows need a topic of their own")


def _check_compression(parsed: SinkOptions) -> None:
    lowest, highest = {"ZLIB": (0, 9), "ZSTD": (1, 22)}.get(parsed.compress_type, (0, 22))
    if not lowest <= parsed.compress_level <= highest:
        raise OptionError(
            f"compressLevel={parsed.compress_level} is no level of compressType={parsed.compress_type}: allowed is "
            f"{lowest} to {highest}"
        )


def parse_values(table: Sequence[OptionSpec], options: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the parsed value of every option given, by field; those not given are absent.

    Raises
    ------
    OptionError
        An option is unknown or malformed, or two names of one option disagree.
    """
    spec_of = {name.lower(): spec for spec in table for name in spec.names}
    own = {key: text for key, text in options.items() if not _is_sparks(key)}
    unknown = [key for key in own if key.lower() not in spec_of]
    if unknown:
        raise OptionError(_unknown_text(unknown, table))
    values: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    for key, text in own.items():
        spec = spec_of[key.lower()]
        name = next(name for name in spec.names if name.lower() == key.lower())
        value = _parse_one(spec, text, name)
        if values.setdefault(spec.field, value) != value:
            raise OptionError(
                f"options {given_as[spec.field]} and {name} are one option with two values: give one of them"
            )
        given_as.setdefault(spec.field, name)
    for spec in table:
        if spec.env and spec.field not in values and environ.get(spec.env, "").strip():
            values[spec.field] = _parse_one(spec, environ[spec.env], f"{spec.name} (environment variable {spec.env})")
    return values


def redacted_repr(value: Any, table: Sequence[OptionSpec]) -> str:
    """Return the repr of a dataclass of options, without the values of secret ones.

    Parameters
    ----------
    value : dataclass instance
        Its fields are those of `table`.
    table : sequence of OptionSpec
    """
    shown = []
    for spec in table:
        held = getattr(value, spec.field)
        shown.append(f"{spec.field}={'<redacted>' if spec.secret and held is not None else repr(held)}")
    return f"{type(value).__name__}({', '.join(shown)})"


def options_table() -> list[OptionRow]:
    """Return the options of a write in the order of the documentation, with their defaults as one would type them."""
    defaults = {field.name: field.default for field in dataclasses.fields(SinkOptions)}
    return [
        OptionRow(
            spec.name, spec.aliases, spec.kind.type, spec.kind.allowed, _shown_default(defaults[spec.field]), spec.doc
        )
        for spec in SINK_OPTIONS
    ]


def _shown_default(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _is_sparks(key: str) -> bool:
    return key.lower() in _SPARK_KEYS or key.lower().startswith(_SPARK_PREFIX)


def _unknown_text(keys: Sequence[str], table: Sequence[OptionSpec]) -> str:
    canonical = {name.lower(): spec.name for spec in table for name in spec.names}
    near = {key: difflib.get_close_matches(key.lower(), canonical, n=1) for key in keys}
    texts = [
        f"unknown option {key!r}" + (f": did you mean {canonical[hit[0]]}?" if hit else "") for key, hit in near.items()
    ]
    if not all(near.values()):
        texts.append(f"the options of a write are {', '.join(spec.name for spec in table)}")
    return "; ".join(texts)


def _parse_one(spec: OptionSpec, text: str, name: str) -> Any:
    try:
        return spec.kind.parse(text)
    except ValueError:
        pass
    # Outside the except block: the parser's own error, which may quote the value, does not become the context.
    shown = "has a value (not shown: it is secret) that" if spec.secret else f"is {text!r}, which"
    raise OptionError(f"option {name} {shown} is not allowed: allowed is {spec.kind.allowed}")


# Steps of each preset's ladder: a test holds it equal to the presets of the producer, which is above this file.
_PRESET_STEPS: Final = 7
_FIELDS: Final = {spec.name: spec.field for spec in SINK_OPTIONS}
_NEEDS: Final = (
    ("accessKey", "secretKey"),
    ("secretKey", "accessKey"),
    ("securityToken", "accessKey"),
    ("tlsCaFile", "useTls"),
)
_NOT_ABOVE: Final = (
    ("retryBackoffMs", "retryBackoffMaxMs"),
    ("batchBytes", "maxInFlightBytes"),
    ("sendMsgTimeout", "deliveryTimeoutMs"),
)
