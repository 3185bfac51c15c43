"""The options of a write, as one table: their names, what each may hold, what it means.

Rule 1: parsing, messages, defaults and documentation come from this table and nowhere else.

Names and defaults of the Java producer are verbatim (spec/producer.md section 2); the rest follows Spark's Kafka
connector (design.md section 5).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import rocketmq_spark.option_values as kinds
from rocketmq_spark.names import DEFAULT_PRODUCER_GROUP, FORBIDDEN_TOPICS, MAX_GROUP_LENGTH, MAX_TOPIC_LENGTH
from rocketmq_spark.option_transport import GRPC, REMOTING
from rocketmq_spark.option_values import ADDRESSES, BOOLEAN, ENDPOINTS, INT_MAX, MIB, ValueKind


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """One row of the table.

    Parameters
    ----------
    name : str
        Canonical spelling, camelCase.
    kind : ValueKind
    doc : str
        One sentence or two, for the documentation.
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


_TOPIC: Final = kinds.name(MAX_TOPIC_LENGTH, FORBIDDEN_TOPICS)
# A shorter interval would be a load of its own on name servers and brokers.
_INTERVAL: Final = kinds.integer(100, unit="ms")
_MILLISECONDS: Final = kinds.integer(1, unit="ms")

_PRINTABLE: Final = kinds.text("a text that is not blank, without control characters", "[\x00-\x1f\x7f]")

TOPIC_SPEC: Final = OptionSpec(
    "topic", _TOPIC, 'Topic of every row; wins over the column `topic`. Also .save("topic") and .start("topic").'
)

SINK_OPTIONS: Final[tuple[OptionSpec, ...]] = (
    OptionSpec(
        "nameServer",
        ADDRESSES,
        "Addresses of the name servers, separated by ; or a comma: needed unless `endpoints` are given.",
        aliases=("nameServerAddress", "namesrvAddr"),
        env="NAMESRV_ADDR",
    ),
    OptionSpec(
        "transport",
        kinds.choice(REMOTING, GRPC),
        "`remoting`: to the brokers that `nameServer` tells of; `grpc`: to the RocketMQ 5 proxies of `endpoints`, "
        "which alone mean it.",
    ),
    OptionSpec(
        "endpoints",
        ENDPOINTS,
        "Addresses of proxies (host:port, separated by ; or a comma), for writing over gRPC without a name server. "
        "https:// before one needs `useTls`, and http:// excludes it.",
    ),
    TOPIC_SPEC,
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
        "Put before the names of topics and of the group as `namespace%`; metrics and receipts show the names without. "
        "By default that of a name server `MQ_INST_x_y.host`.",
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
        "How; every consumer reads ZLIB, those before 4.9.4 nothing else. LZ4 costs least time. Over gRPC the default "
        "is NONE, and ZLIB the only other.",
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
        "bodies are not compressed then. A `topic` of another type is refused; a topic that comes with the rows stores "
        "them one by one if it is of another type.",
    ),
    OptionSpec(
        "maxInFlight",
        kinds.integer(1, 1024),
        "Largest number of batches on their way to one broker, per task; 3 to a proxy, unless it is given.",
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
    OptionSpec(
        "keepRowId",
        BOOLEAN,
        "Keep a `SPARK_ROW_ID` in the column `properties`: for rows that are read and written one to one. false: the "
        "write drops it, as rows made of one row would share its id.",
    ),
    OptionSpec(
        "accessKey", kinds.SECRET, "Name of the user that signs requests to brokers or proxies, with secretKey."
    ),
    OptionSpec("secretKey", kinds.SECRET, "Password of that user: shown nowhere, and never sent.", secret=True),
    OptionSpec(
        "securityToken", kinds.SECRET, "Token of a temporary user, sent with every signed request.", secret=True
    ),
    OptionSpec(
        "credentialsProvider",
        kinds.CLASS,
        "A class of yours that gives the three, and new ones before they expire, in place of accessKey and secretKey.",
    ),
    OptionSpec(
        "signNameServerRequests",
        BOOLEAN,
        "Sign requests to name servers, too: for the remoting port of a proxy with access control, and for name "
        "servers that demand it. RocketMQ's own name servers know no users.",
    ),
    OptionSpec(
        "useTls",
        BOOLEAN,
        "Encrypt every connection, to name servers and brokers or to proxies; their certificates must be for the "
        "addresses dialled.",
    ),
    OptionSpec(
        "tlsCaFile",
        _PRINTABLE,
        "PEM file of the authorities to trust, at one path on the driver and every executor; by default the system's.",
    ),
    OptionSpec(
        "tlsCertFile",
        _PRINTABLE,
        "PEM file of this client's certificate, for servers that demand one, at one path on the driver and every "
        "executor; with the chain up to an authority that they trust.",
    ),
    OptionSpec(
        "tlsKeyFile",
        _PRINTABLE,
        "PEM file of that certificate's private key, which is not encrypted; by default in tlsCertFile.",
    ),
    OptionSpec(
        "tlsServerName",
        kinds.text("a host name or address without a port", r"[\s/@\[\]]|^\.|^[^:]*:[^:]*$"),
        "The one name that the certificates of all servers are for, where it is not the addresses dialled.",
    ),
    OptionSpec(
        "tlsInsecureSkipVerify",
        BOOLEAN,
        "Take every certificate, whoever has signed it and whatever it names: what is sent can be read and changed by "
        "who stands between. For trying things; it is warned of.",
    ),
    OptionSpec(
        "enableTrace",
        BOOLEAN,
        "Leave a trace record of every stored row at traceTopic, for looking at single messages: it costs more than "
        "the write itself. Rows that come too fast for it are stored and not traced; the log counts them.",
    ),
    OptionSpec("traceTopic", _TOPIC, "Topic of the trace records; the server's own tools read the default."),
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
