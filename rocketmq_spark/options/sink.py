"""The options of a write, and the options that a write shares with a producer in plain Python.

Names and defaults of the Java producer are verbatim. Other names follow Spark's Kafka connector.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import rocketmq_spark.options.kinds as kinds
from rocketmq_spark.model.names import DEFAULT_PRODUCER_GROUP, MAX_GROUP_LENGTH, MAX_TOPIC_LENGTH
from rocketmq_spark.options.connection import ConnectedOptions, ConnectionOptions, Spelling, security_contradictions
from rocketmq_spark.options.kinds import BOOLEAN, INSTANCE_NAME, INT_MAX, MIB, TOPIC, WRITE, option, specs_of

# Steps of the ladders of every faultPreset.
_PRESET_STEPS: Final = 7
_NOT_ABOVE: Final = (
    ("retry_backoff_ms", "retryBackoffMs", "retry_backoff_max_ms", "retryBackoffMaxMs"),
    ("batch_bytes", "batchBytes", "max_in_flight_bytes", "maxInFlightBytes"),
    ("send_msg_timeout", "sendMsgTimeout", "delivery_timeout_ms", "deliveryTimeoutMs"),
)
# Character.isISOControl, which a proxy uses.
_CONTROL: Final = "[\x00-\x1f\x7f-\x9f]"
_LEVELS: Final = {"ZLIB": (0, 9), "ZSTD": (1, 22)}

_MILLISECONDS: Final = kinds.integer(1, unit="ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions(ConnectedOptions):
    """The options that a write and a producer have in common. Times are milliseconds, sizes bytes."""

    # fmt: off
    send_msg_timeout: int = option("sendMsgTimeout", 3000, _MILLISECONDS,
        "How long one attempt may wait for its answer, from its last byte written; 1 s more per MiB.",
        section="attempts",
        producer_doc="How long one send may take, with all its attempts.")
    send_msg_max_timeout_per_request: int = option("sendMsgMaxTimeoutPerRequest", -1, kinds.integer(-1, unit="ms"),
        "Takes the place of a longer sendMsgTimeout while another attempt would follow without a wait, at another "
        "broker; -1: never.",
        producer_doc="How long an attempt may take that another one may follow; -1: as long as the send has left.")
    retry_times_when_send_failed: int = option("retryTimesWhenSendFailed", 2, kinds.integer(0),
        "With `sendMode` `sync` or `oneway`, the attempts that follow a failed one without a wait, at other brokers; "
        "in every mode, how often a batch that is stored but not safe is sent again before the task fails.",
        producer_doc="Attempts of `send` after the first, each at another broker.")
    retry_times_when_send_async_failed: int = option("retryTimesWhenSendAsyncFailed", 2, kinds.integer(0),
        "With `sendMode=async`, the attempts that follow a failed one without a wait, at other brokers; then they go "
        "on with waits until deliveryTimeoutMs.",
        producer_doc="Attempts of `send_async` after the first. An error code of a broker ends an asynchronous send, "
        "as in Java.")
    retry_another_broker_when_not_store_ok: bool = option("retryAnotherBrokerWhenNotStoreOK", False, BOOLEAN,
        "Send a batch that is stored but not safe to another broker next time.",
        producer_doc="Try another broker where a message is stored but not safe; else that status is the result.")
    max_message_size: int = option("maxMessageSize", 4 * MIB, kinds.size(1, 4 * MIB),
        "Longest body of one message, before it is compressed.", section="size")
    compress_type: str = option("compressType", "ZLIB", kinds.choice("ZLIB", "LZ4", "ZSTD", "NONE"),
        "How; every consumer reads ZLIB, those before 4.9.4 nothing else. LZ4 costs least time. Over gRPC the default "
        "is NONE, and ZLIB the only other.", section="compression")
    compress_msg_body_over_howmuch: int = option("compressMsgBodyOverHowmuch", 4096, kinds.size(0, INT_MAX),
        "Bodies of at least this size are compressed, each by itself, if that makes them shorter.")
    compress_level: int = option("compressLevel", 5, kinds.integer(0, 22),
        "How much: 0 to 9 for ZLIB, 1 to 22 for ZSTD; LZ4 has no levels.")
    enable_trace: bool = option("enableTrace", False, BOOLEAN,
        "Leave a trace record of every stored row at traceTopic, for looking at single messages: it costs more than "
        "the write itself. Rows that come too fast for it are stored and not traced; the log counts them.",
        section="trace",
        producer_doc="Leave a trace record of every message at `trace_topic`.")
    trace_topic: str = option("traceTopic", "RMQ_SYS_TRACE_TOPIC", TOPIC,
        "Topic of the trace records; the server's own tools read the default.")
    unit_mode: bool = option("unitMode", False, BOOLEAN,
        "Mark every request as one of a unit; brokers then create topics as unit topics.", section="requests")
    vip_channel_enabled: bool = option("vipChannelEnabled", False, BOOLEAN,
        "Send to the brokers' second port, the one two below the port of the route.")
    # fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions(SendOptions):
    """The options of one write. Times are milliseconds, sizes bytes. The constructor checks nothing."""

    # fmt: off
    topic: str | None = option("topic", None, TOPIC,
        'Topic of every row; wins over the column `topic`. Also .save("topic") and .start("topic").', section="topic")
    tags: str | None = option("tags", None,
        kinds.text("one tag that is not blank, without | and without the control characters 1 and 2", "[|\x01\x02]"),
        "Tag of the rows whose column `tags` is absent or null.")
    producer_group: str = option(
        "producerGroup", "spark-rocketmq-sink", kinds.name(MAX_GROUP_LENGTH, {DEFAULT_PRODUCER_GROUP}),
        "Group under which brokers know the producers.")
    instance_name: str | None = option("instanceName", None, INSTANCE_NAME,
        "Second part of the client id; by default made of the process id and a hash of the options.",
        section="instance")
    send_mode: str = option("sendMode", "async", kinds.choice("async", "sync", "oneway"),
        "`async`: a window of requests in flight; `sync`: a task sends the next request when the last one is "
        "acknowledged; `oneway`: no acknowledgements, so no promise that a row is stored.", section="delivery")
    delivery_timeout_ms: int = option("deliveryTimeoutMs", 120000, _MILLISECONDS,
        "How long a batch is tried before the task fails.")
    retry_backoff_ms: int = option("retryBackoffMs", 100, _MILLISECONDS,
        "First wait before a batch is sent again; it doubles each time.", section="backoff")
    retry_backoff_max_ms: int = option("retryBackoffMaxMs", 5000, _MILLISECONDS,
        "Longest wait before a batch is sent again.")
    require_store_ok: bool = option("requireStoreOk", True, BOOLEAN,
        "Count only SEND_OK as stored; false also accepts what is stored but not flushed or replicated yet.")
    keep_row_id: bool = option("keepRowId", False, BOOLEAN,
        "Keep a `SPARK_ROW_ID` in the column `properties`: for rows that are read and written one to one. false: the "
        "write drops it, as rows made of one row would share its id.")
    row_id: bool | tuple[str, ...] = option("rowId", False, kinds.ROW_ID,
        "Give each message the property `SPARK_ROW_ID`, equal in repeats of a row: true makes it of the row's place "
        "and content, columns:a,b of these columns.")
    on_error: str = option("onError", "fail", kinds.choice("fail", "skip", "deadLetter"),
        "What becomes of a row that no broker could store as it is: it fails the write, is left out and counted, or "
        "goes to `deadLetterTopic`.", section="invalid")
    dead_letter_topic: str | None = option("deadLetterTopic", None, TOPIC,
        "Topic of the invalid rows, with `onError=deadLetter` only.")
    queue_selector: str | None = option(
        "queueSelector", None, kinds.choice_or_class("roundRobin", "hash", "random", "machineRoom", "column"),
        "How rows find their queue; by default rows with a `shardingKey` by its hash, others round robin. module:Class "
        "is a class of yours.", section="queues")
    machine_room: tuple[str, ...] = option("machineRoom", (), kinds.words(
            "one or more names separated by commas, each of letters, digits and . _ - (such as idc1)",
            "[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?",
        ),
        "Rooms whose brokers come first with queueSelector=machineRoom: those with the room as a part of their name, "
        "as idc1 in idc1-broker-a. While none there is any good, others are taken.")
    ordered: bool = option("ordered", False, BOOLEAN,
        "Keep the order of the rows of one `shardingKey` within a Spark partition: one request on its way to each "
        "queue, and the queues of the whole write are those that the driver found.")
    batching: bool = option("batching", True, BOOLEAN, "Send many rows in one request.", section="batches")
    batch_bytes: int = option("batchBytes", MIB, kinds.size(1024, 4 * MIB), "Size at which a batch is sent.")
    batch_type: str = option("batchType", "plain", kinds.choice("plain", "inner"),
        "inner lets a topic of the type BatchCQ store each batch as one record, which consumers of 5.x take apart; "
        "bodies are not compressed then. A `topic` of another type is refused; a topic that comes with the rows stores "
        "them one by one if it is of another type.")
    max_in_flight: int = option("maxInFlight", 8, kinds.integer(1, 1024),
        "Largest number of batches on their way to one broker, per task; 3 to a proxy, unless it is given.")
    max_in_flight_bytes: int = option("maxInFlightBytes", 32 * MIB, kinds.size(1024, INT_MAX),
        "Bytes that a task holds at most: groups that fill, and batches sent.")
    max_rate_per_second: int | None = option("maxRatePerSecond", None, kinds.integer(1),
        "Most messages that the whole job sends in a second, retries not counted; each task gets an equal share.",
        section="rate")
    max_rate_tasks: int | None = option("maxRateTasks", None, kinds.integer(1),
        "How many tasks share maxRatePerSecond: those that run at once; by default the parallelism of the registered "
        "session.")
    metrics_path: str | None = option("metricsPath", None, kinds.location(),
        "Where each write and each micro-batch leaves its figures: a line of a local file, or a file of its own in a "
        "folder of another file system (s3://, gs://, hdfs://).", section="figures", secret=True)
    # fmt: on

    @property
    def custom_selector(self) -> str | None:
        """``module:Class`` if `queue_selector` is a class, else None."""
        return self.queue_selector if ":" in (self.queue_selector or "") else None


SINK_OPTIONS: Final = specs_of(SinkOptions, WRITE)


def sink_contradictions(options: SinkOptions, spelt: Spelling) -> Iterator[str]:
    """Yield an error text for each contradiction."""
    yield from security_contradictions(options.connection, spelt)
    yield from against_bounds(options, _NOT_ABOVE)
    yield from _of_faults(options.connection)
    yield from _of_dead_letters(options)
    for topic in filter(None, (options.topic, options.dead_letter_topic)):
        if len(options.connection.wire_name(topic)) > MAX_TOPIC_LENGTH:
            yield (
                f"topic {topic} in namespace {options.connection.namespace} has a name of more than {MAX_TOPIC_LENGTH} "
                "characters: shorten one of the two"
            )
    if bool(options.machine_room) != (options.queue_selector == "machineRoom"):
        yield (
            f"queueSelector is {options.queue_selector or 'not set'} and machineRoom is "
            f"{','.join(options.machine_room) or 'not set'}: queueSelector=machineRoom and the option machineRoom need "
            "each other"
        )
    lowest, highest = _LEVELS.get(options.compress_type, (0, 22))
    if not lowest <= options.compress_level <= highest:
        yield (
            f"compressLevel={options.compress_level} is no level of compressType={options.compress_type}: allowed is "
            f"{lowest} to {highest}"
        )
    if options.send_msg_max_timeout_per_request == 0:
        yield "sendMsgMaxTimeoutPerRequest=0 leaves no time for an attempt: allowed is -1 (no cap) or 1 and more (ms)"
    if options.max_rate_tasks is not None and options.max_rate_per_second is None:
        yield "maxRateTasks says how many tasks share maxRatePerSecond, which is missing: give both or neither"
    if options.send_mode == "oneway" and options.enable_trace:
        yield "sendMode=oneway leaves nothing to trace, as nothing is acknowledged: set enableTrace=false"
    if options.keep_row_id and options.row_id:
        yield "keepRowId=true keeps the ids of rows, and rowId gives them new ones: set one of the two"
    if options.ordered:
        yield from _against_order(options)
    if options.over_grpc and re.search(_CONTROL, options.tags or ""):
        yield (
            f"tags={options.tags!r} holds a control character, and a proxy takes none: remove it, or give nameServer "
            "in place of endpoints"
        )


def against_bounds(options: object, not_above: Sequence[tuple[str, str, str, str]]) -> Iterator[str]:
    """Yield an error text for each number above its bound: (field, option, field of the bound, option of the bound)."""
    for low_field, smaller, high_field, larger in not_above:
        low, high = getattr(options, low_field), getattr(options, high_field)
        if low is not None and high is not None and low > high:
            yield f"{smaller}={low} is more than {larger}={high}: lower the one or raise the other"


def _of_faults(options: ConnectionOptions) -> Iterator[str]:
    latency_steps, duration_steps = (
        _PRESET_STEPS if steps is None else len(steps)
        for steps in (options.latency_max, options.not_available_duration)
    )
    if latency_steps != duration_steps:
        yield (
            f"latencyMax has {latency_steps} steps and notAvailableDuration has {duration_steps} (a faultPreset's own "
            f"have {_PRESET_STEPS}): every step of the one needs its own in the other"
        )
    if options.start_detector_enable and options.fault_preset == "legacy":
        yield (
            "startDetectorEnable=true and faultPreset=legacy contradict each other: the rules of 4.x do not tell "
            "brokers that can't be reached from slow ones; choose v4 or v5, or leave the detector off"
        )


def _of_dead_letters(options: SinkOptions) -> Iterator[str]:
    topic = options.dead_letter_topic
    if options.on_error == "deadLetter" and topic is None:
        yield "onError=deadLetter needs the option deadLetterTopic: the topic that invalid rows go to"
    if options.on_error != "deadLetter" and topic is not None:
        yield (
            f"deadLetterTopic={topic!r} is used with onError=deadLetter only, and onError is {options.on_error}: "
            "set onError=deadLetter, or leave deadLetterTopic out"
        )
    if topic is not None and topic == options.topic:
        yield f"deadLetterTopic={topic!r} is the option topic, too: invalid rows need a topic of their own"
    if options.on_error == "deadLetter" and options.send_mode == "oneway":
        yield (
            "onError=deadLetter and sendMode=oneway exclude each other: a dead letter is acknowledged before the task "
            "ends; use sendMode=async or sync"
        )


def _against_order(options: SinkOptions) -> Iterator[str]:
    if options.send_mode == "oneway":
        yield (
            "ordered=true and sendMode=oneway exclude each other: without acknowledgements nobody knows when the next "
            "batch may go; use sendMode=async or sync"
        )
    if options.queue_selector not in (None, "hash"):
        yield (
            f"ordered=true and queueSelector={options.queue_selector} exclude each other: the hash of a shardingKey "
            "finds the one queue of its rows; leave queueSelector out, or set it to hash"
        )
    if options.connection.send_latency_fault_enable:
        yield (
            "ordered=true and sendLatencyFaultEnable=true exclude each other: rows of one shardingKey wait for their "
            "broker and never go round it; set one of the two to false"
        )
    if options.topic is None:
        yield (
            "ordered=true needs the option topic: the driver finds the queues of one topic for the whole write (over "
            "gRPC, its type); where topics come from a column, write each of them by itself"
        )
