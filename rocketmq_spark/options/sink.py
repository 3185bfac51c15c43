"""Declares the options of a write, and checks them for contradictions.

Many names and defaults are the Java producer's, some are those of Spark's Kafka connector. Others, such as ``onError``,
are this connector's own. `SendOptions` are also properties of a `Producer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final

import rocketmq_spark.options.kinds as kinds
from rocketmq_spark.deliveries import DELIVERIES
from rocketmq_spark.model.names import DEFAULT_PRODUCER_GROUP, MAX_GROUP_LENGTH, MAX_TOPIC_LENGTH
from rocketmq_spark.options.connection import ConnectedOptions, ConnectionOptions, Spelling, security_contradictions
from rocketmq_spark.options.kinds import BOOLEAN, INT_MAX, MIB, MILLISECONDS, TOPIC, WRITE, option, specs_of

# Steps of latencyMax and notAvailableDuration in every faultPreset.
_PRESET_STEPS: Final = 7
_NOT_ABOVE: Final = (
    ("retry_backoff_ms", "retry_backoff_max_ms"),
    ("batch_bytes", "max_in_flight_bytes"),
    ("send_msg_timeout", "delivery_timeout_ms"),
)
# A proxy rejects these characters (Character.isISOControl).
_CONTROL: Final = "[\x00-\x1f\x7f-\x9f]"
MAX_TRANSACTION_TIMEOUT_MS: Final = 3_600_000
MAX_FENCE_MS: Final = 3_600_000
_LEVELS: Final = {"ZLIB": (0, 9), "ZSTD": (1, 22)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions(ConnectedOptions):
    """The options that a write and a producer share. Times are milliseconds, sizes bytes."""

    # fmt: off
    send_msg_timeout: int = option("sendMsgTimeout", 3000, MILLISECONDS,
        "Timeout of one attempt, from the last byte of the request to the response, plus 1 s per MiB. `Producer`: "
        "timeout of one send with all its attempts.", section="attempts")
    send_msg_max_timeout_per_request: int = option("sendMsgMaxTimeoutPerRequest", -1, kinds.integer(-1, unit="ms"),
        "Shorter timeout that replaces `sendMsgTimeout` while an immediate retry at another broker is left. -1: none. "
        "`Producer`: timeout of an attempt while a retry is left. -1: the time that the send has left.")
    retry_times_when_send_failed: int = option("retryTimesWhenSendFailed", 2, kinds.integer(0),
        "With `sendMode=sync` or `oneway`: immediate retries at other brokers. In every mode: how often a batch that "
        "is [stored but not safe](faults.md#stored-but-not-safe) is sent again. `Producer`: retries of `send`.")
    retry_times_when_send_async_failed: int = option("retryTimesWhenSendAsyncFailed", 2, kinds.integer(0),
        "With `sendMode=async`: immediate retries at other brokers. Later retries wait, until `deliveryTimeoutMs`. "
        "`Producer`: retries of `send_async`. As in Java, an error code of a broker ends the send.")
    retry_another_broker_when_not_store_ok: bool = option("retryAnotherBrokerWhenNotStoreOK", False, BOOLEAN,
        "Whether a batch or message that is stored but not yet flushed or replicated is sent again to another broker. "
        "`Producer`: without it, that status is the result.")
    max_message_size: int = option("maxMessageSize", 4 * MIB, kinds.size(1, 64 * MIB),
        "Maximum size of a message body before compression. Brokers limit the compressed body: above 4 MiB set their "
        "`maxMessageSize`, too. At most 15.875 MiB compressed fit a frame.", section="size")
    compress_type: str = option("compressType", "ZLIB", kinds.choice("ZLIB", "LZ4", "ZSTD", "NONE"),
        "Compression of message bodies. All consumers read ZLIB; consumers before 4.9.4 read only ZLIB. LZ4 is the "
        "fastest. Over gRPC only NONE, the default there, and ZLIB are allowed.", section="compression")
    compress_msg_body_over_howmuch: int = option("compressMsgBodyOverHowmuch", 4096, kinds.size(0, INT_MAX),
        "Bodies of at least this size are compressed individually, if that makes them smaller.")
    compress_level: int = option("compressLevel", 5, kinds.integer(0, 22),
        "Compression level: 0 to 9 for ZLIB, 1 to 22 for ZSTD. LZ4 has no levels.")
    enable_trace: bool = option("enableTrace", False, BOOLEAN,
        "Send a trace record of every stored message to `traceTopic`. In a write, this costs more than the write "
        "itself; rows beyond the capacity of the trace are not traced, and the log counts them.", section="trace")
    trace_topic: str = option("traceTopic", "RMQ_SYS_TRACE_TOPIC", TOPIC,
        "Topic of the trace records. RocketMQ's own tools read the default topic.")
    unit_mode: bool = option("unitMode", False, BOOLEAN,
        "Mark every request as part of a unit. Brokers then create topics as unit topics.", section="requests")
    vip_channel_enabled: bool = option("vipChannelEnabled", False, BOOLEAN,
        "Send to the VIP port of the brokers, which is the port of the route minus 2.")
    # fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions(SendOptions):
    """The options of one write. Times are milliseconds, sizes bytes. The constructor checks nothing."""

    # fmt: off
    topic: str | None = option("topic", None, TOPIC,
        'Topic of every row; overrides the column `topic`. Also .save("topic") and .start("topic").', section="topic")
    tags: str | None = option("tags", None,
        kinds.text(
            "one tag without a blank at its beginning or end, without | and without the control characters 1 and 2",
            "[|\x01\x02]|^[\0- ]|[\0- ]$",
        ),
        "Tag of rows whose column `tags` is missing or null.")
    producer_group: str = option(
        "producerGroup", "spark-rocketmq-sink", kinds.name(MAX_GROUP_LENGTH, {DEFAULT_PRODUCER_GROUP}),
        "Producer group that the brokers see.")
    instance_name: str | None = option("instanceName", None, kinds.INSTANCE_NAME,
        "Second part of the client id. Default: the process id and a hash of the options.", section="instance")
    send_mode: str = option("sendMode", "async", kinds.choice("async", "sync", "oneway"),
        "`async`: several requests in flight. `sync`: a task sends a request after the previous one is acknowledged. "
        "`oneway`: no acknowledgements, so delivery is not guaranteed.", section="delivery")
    delivery_timeout_ms: int = option("deliveryTimeoutMs", 120000, MILLISECONDS,
        "How long the sink retries a batch before the task fails.")
    retry_backoff_ms: int = option("retryBackoffMs", 100, MILLISECONDS,
        "Wait before the first delayed retry; it doubles with each retry.", section="backoff")
    retry_backoff_max_ms: int = option("retryBackoffMaxMs", 5000, MILLISECONDS,
        "Maximum wait before a retry.")
    require_store_ok: bool = option("requireStoreOk", True, BOOLEAN,
        "Treat only SEND_OK as stored. false: also accept messages that are not yet flushed or replicated.")
    keep_row_id: bool = option("keepRowId", False, BOOLEAN,
        "Keep `SPARK_ROW_ID` of the column `properties`, for jobs that write each row they read exactly once. Without "
        "it the write drops the property, because rows derived from one row would share its id.", section="delivery")
    row_id: bool | tuple[str, ...] = option("rowId", False, kinds.ROW_ID,
        "Give each message a property `SPARK_ROW_ID` that is the same when a row is sent again. `true` derives it from "
        "the position and content of the row, `columns:a,b` from these columns.")
    on_error: str = option("onError", "fail", kinds.choice("fail", "skip", "deadLetter"),
        "Handling of a row that no broker can store. `fail`: the write fails. `skip`: the row is skipped and counted. "
        "`deadLetter`: the row goes to `deadLetterTopic`.", section="invalid")
    dead_letter_topic: str | None = option("deadLetterTopic", None, TOPIC,
        "Topic of invalid rows. Only with `onError=deadLetter`.")
    queue_selector: str | None = option(
        "queueSelector", None, kinds.choice("roundRobin", "hash", "random", "machineRoom", "column", or_class=True),
        "How the sink chooses the queue of a row. Default: the hash of `shardingKey`, else `roundRobin`.",
        section="queues")
    machine_room: tuple[str, ...] = option("machineRoom", (), kinds.words(
            "names separated by commas, each of letters, digits and . _ - (such as idc1)",
            "[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?",
        ),
        "Machine rooms that `queueSelector=machineRoom` prefers. A broker belongs to a room if its name contains the "
        "room, as in idc1-broker-a. If no broker there is available, others are used.")
    ordered: bool = option("ordered", False, BOOLEAN,
        "Keep the order of rows with the same `shardingKey` within a Spark partition. Each queue has one request in "
        "flight, and the whole write uses the queues that the driver looked up.")
    batching: bool = option("batching", True, BOOLEAN, "Send many rows in one request.", section="batches")
    batch_bytes: int = option("batchBytes", MIB, kinds.size(1024, 4 * MIB), "Size at which a batch is sent.")
    batch_type: str = option("batchType", "plain", kinds.choice("plain", "inner"),
        "`inner`: a topic of the type BatchCQ stores each batch as one uncompressed record for consumers of 5.x. The "
        "write fails if the option `topic` has another type. A topic of the column `topic` then gets single messages.",
        section="inflight")
    unique_key: bool = option("uniqueKey", True, BOOLEAN,
        "Give each message a unique id (UNIQ_KEY). false: 42 bytes and one index entry less per message; consumers see "
        "the id of its place in the store as message id. Single messages get a unique id from the broker.")
    max_in_flight: int = option("maxInFlight", 8, kinds.integer(1, 1024),
        "Maximum number of batches in flight per broker and task. Default for a proxy: 3.")
    max_in_flight_bytes: int = option("maxInFlightBytes", 32 * MIB, kinds.size(1024, INT_MAX),
        "Maximum number of bytes that a task holds in batches: those being filled and those in flight.")
    max_rate_per_second: int | None = option("maxRatePerSecond", None, kinds.integer(1),
        "Maximum messages per second of the job, without retries. Each task gets an equal share.", section="rate")
    max_rate_tasks: int | None = option("maxRateTasks", None, kinds.integer(1),
        "Number of concurrent tasks that share `maxRatePerSecond`. Default: the parallelism of the registered session.")
    recall_path: str | None = option("recallPath", None, kinds.LOCATION,
        "Folder of Parquet files with the handles by which rows with a time of delivery can be recalled. Every "
        "executor writes there.", section="figures", secret=True)
    delivery: str = option("delivery", next(iter(DELIVERIES)), kinds.choice(*DELIVERIES),
        "".join(f"`{name}`: {delivery.summary}. " for name, delivery in DELIVERIES.items())
        + "See [delivery](delivery.md).",
        section="transactions")
    transactional_id: str | None = option("transactionalId", None, kinds.name(100, ()),
        "Identity of the job in the decision log, the same after each restart. One streaming query or one batch job "
        "uses it. `effectivelyOnce` and `exactlyOnce` require it.")
    write_id: str | None = option("writeId", None, kinds.name(100, ()),
        "In a batch write: identity of this write. If a write of this identity was decided or completed before, the "
        "rows of the new attempt are not written. `effectivelyOnce` and `exactlyOnce` require it, except in a stream.")
    transaction_topic: str = option("transactionTopic", "rocketmq-spark-decisions", TOPIC,
        "Topic of the decision log. The driver creates it, with one queue on each broker, if it may.",
        section="recovery")
    transactional_key: str | None = option("transactionalKey", None, kinds.KEYS,
        "Key that signs the records of the decision log, or several keys separated by commas: the first signs, all "
        "are accepted. Records without a valid signature are then ignored. See [security](security.md#signed-records).",
        secret=True)
    transaction_timeout_ms: int = option("transactionTimeoutMs", 60000,
        kinds.integer(10000, MAX_TRANSACTION_TIMEOUT_MS, unit="ms"),
        "Time from the first row of a write or micro-batch to the end of its commit. After a crash during a commit, "
        "the restarted job waits until this time, and a tenth of it, is over.")
    fence_ms: int = option("fenceMs", 10000, kinds.integer(0, MAX_FENCE_MS, unit="ms"),
        "With `effectivelyOnce`: how long the task that replaces another one waits, at least 1 s, before it reads "
        "which rows are stored. The earlier task stops after two thirds of this time. If a broker stores a request "
        "more than a third of this time after the earlier task has written it, its rows may be repeated.")
    start_anew: bool = option("startAnew", False, BOOLEAN,
        "Start although the decision log belongs to another checkpoint, or has expired. Rows of the last micro-batch "
        "may then be repeated.")
    metrics_path: str | None = option("metricsPath", None, kinds.LOCATION,
        "Where each write and each micro-batch saves its metrics: as a line of a local file, or as a file in a folder "
        "of another file system (s3://, gs://, hdfs://).", section="figures", secret=True)
    metrics_format: str = option("metricsFormat", "json", kinds.choice("json", "openmetrics"),
        "Content of `metricsPath`: the metrics of each commit as JSON, or one file with their sums for Prometheus.")
    # fmt: on

    @property
    def custom_selector(self) -> str | None:
        """``module:Class`` if `queue_selector` is a class, else None."""
        return self.queue_selector if ":" in (self.queue_selector or "") else None


SINK_OPTIONS: Final = specs_of(SinkOptions, WRITE)
SINK_SPELLING: Final[Spelling] = {spec.field: spec.name for spec in SINK_OPTIONS}.__getitem__


def sink_contradictions(options: SinkOptions) -> Iterator[str]:
    """Yield an error text for each contradiction."""
    yield from security_contradictions(options.connection, SINK_SPELLING)
    yield from against_bounds(options, _NOT_ABOVE)
    yield from _of_faults(options.connection)
    yield from _of_dead_letters(options)
    topic_of_log = options.transactional_id and options.transaction_topic
    for topic in filter(None, (options.topic, options.dead_letter_topic, topic_of_log)):
        if len(options.connection.wire_name(topic)) > MAX_TOPIC_LENGTH:
            yield (
                f"topic {topic} with the prefix of namespace {options.connection.namespace} has more than "
                f"{MAX_TOPIC_LENGTH} characters: shorten one of the two names"
            )
    if bool(options.machine_room) != (options.queue_selector == "machineRoom"):
        yield (
            f"queueSelector is {options.queue_selector or 'not set'} and machineRoom is "
            f"{','.join(options.machine_room) or 'not set'}: set both queueSelector=machineRoom and machineRoom, or "
            "neither"
        )
    level, kind = options.compress_level, options.compress_type
    lowest, highest = _LEVELS.get(kind, (0, 22))
    if not lowest <= level <= highest:
        yield f"compressLevel={level} is not valid for compressType={kind}: allowed is {lowest} to {highest}"
    if options.send_msg_max_timeout_per_request == 0:
        yield "sendMsgMaxTimeoutPerRequest=0 leaves no time for an attempt: allowed is -1 (no limit) or 1 and more (ms)"
    if options.max_rate_tasks is not None and options.max_rate_per_second is None:
        yield "maxRateTasks is given without maxRatePerSecond: give maxRatePerSecond, too, or remove maxRateTasks"
    if options.send_mode == "oneway" and options.enable_trace:
        yield "enableTrace=true needs acknowledgements, and sendMode=oneway has none: set enableTrace=false"
    if options.send_mode == "oneway" and options.recall_path is not None:
        yield "recallPath needs acknowledgements, and sendMode=oneway has none: use async or sync, or remove recallPath"
    if options.keep_row_id and options.row_id:
        yield "keepRowId=true keeps the ids of rows, but rowId replaces them: set only one of the two"
    if options.ordered:
        yield from _against_order(options)
    yield from DELIVERIES[options.delivery].load().contradictions(options)
    if not options.unique_key:
        yield from _without_unique_key(options)
    if options.over_grpc and re.search(_CONTROL, options.tags or ""):
        yield (
            f"tags={options.tags!r} contains a control character, which a proxy rejects: remove it, or give nameServer "
            "instead of endpoints"
        )


def against_bounds(options: ConnectedOptions, not_above: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield an error text for each field whose value exceeds that of the field paired with it."""
    names = {field.name: field.metadata["option"].name for field in fields(options) if field.metadata}
    for smaller, larger in not_above:
        low, high = getattr(options, smaller), getattr(options, larger)
        if low is not None and high is not None and low > high:
            yield f"{names[smaller]}={low} is more than {names[larger]}={high}: lower the one or raise the other"


def _of_faults(options: ConnectionOptions) -> Iterator[str]:
    ladders = options.latency_max, options.not_available_duration
    latency_steps, duration_steps = (_PRESET_STEPS if steps is None else len(steps) for steps in ladders)
    if latency_steps != duration_steps:
        yield (
            f"latencyMax has {latency_steps} steps, but notAvailableDuration has {duration_steps} (every faultPreset "
            f"has {_PRESET_STEPS}): give both the same number of steps"
        )
    if options.start_detector_enable and options.fault_preset == "legacy":
        yield (
            "startDetectorEnable=true is not available with faultPreset=legacy, whose rules do not distinguish "
            "unreachable brokers from slow ones: set faultPreset to v4 or v5, or startDetectorEnable=false"
        )


def _of_dead_letters(options: SinkOptions) -> Iterator[str]:
    topic = options.dead_letter_topic
    if options.on_error == "deadLetter" and topic is None:
        yield "onError=deadLetter requires the option deadLetterTopic: give the topic for invalid rows"
    if options.on_error != "deadLetter" and topic is not None:
        yield (
            f"deadLetterTopic={topic!r} requires onError=deadLetter, but onError is {options.on_error}: set "
            "onError=deadLetter, or remove deadLetterTopic"
        )
    if topic is not None and topic == options.topic:
        yield f"deadLetterTopic={topic!r} is also the option topic: give a separate topic for invalid rows"
    if options.on_error == "deadLetter" and options.send_mode == "oneway":
        yield "onError=deadLetter is not available with sendMode=oneway (no acknowledgements): use async or sync"


def _without_unique_key(options: SinkOptions) -> Iterator[str]:
    causes = {
        "the connection over gRPC": (options.over_grpc, "proxies reject messages without a unique id"),
        "enableTrace=true": (options.enable_trace, "trace records name messages by their unique ids"),
        "batchType=inner": (options.batch_type == "inner", "all messages of an inner batch have the same place"),
    }
    for name, (given, why) in causes.items():
        if given:
            yield f"uniqueKey=false is not available with {name}, because {why}: remove uniqueKey"


def _against_order(options: SinkOptions) -> Iterator[str]:
    if options.send_mode == "oneway":
        yield "ordered=true is not available with sendMode=oneway (no acknowledgements): set sendMode to async or sync"
    if options.queue_selector not in (None, "hash"):
        yield (
            f"ordered=true is not available with queueSelector={options.queue_selector}, because the hash of the "
            "shardingKey chooses the queue: remove queueSelector, or set it to hash"
        )
    if options.connection.send_latency_fault_enable:
        yield (
            "ordered=true is not available with sendLatencyFaultEnable=true, because ordered rows wait for the broker "
            "of their queue: disable one of the two"
        )
    if options.topic is None:
        yield (
            "ordered=true requires the option topic, because the driver looks up the queues of one topic (over gRPC, "
            "its type) for the whole write: write each topic separately"
        )
