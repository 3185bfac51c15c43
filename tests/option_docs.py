"""docs/options.md, made of the tables by which options are parsed.

Run: python -m tests.option_docs (``make docs``), which writes the file; tests/unit/test_docs.py holds it equal.

Rule 1: an option's name, default, allowed values and meaning come from its table; here is only their grouping.
Rule 2: an option that is in no group, or in two, is an error: a new one must find its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rocketmq_spark.options import OptionRow, options_table
from rocketmq_spark.producer_options import producer_options_table
from rocketmq_spark.reader_options import reader_options_table

PATH: Final = Path(__file__).parents[1] / "docs" / "options.md"

Groups = Mapping[str, str]

_INTRODUCTION: Final = """\
# Options

Made of the code by `make docs`: edit the option tables in `rocketmq_spark/`, not this file.

Names are the Java producer's and Spark's Kafka connector's where these have them, in any case (`NAMESERVER` is
`nameServer`). Values are texts, as `DataFrameWriter.option` makes them of numbers and booleans: `true` and `false`, whole
numbers, times in milliseconds. An unknown option is an error that suggests the right one; a value that is not allowed, or
that another option contradicts, is refused on the driver before any task. The value of a secret is in no error, log, plan
or metric of ours.

[Options of a write](#options-of-a-write) ([what they mean beside Java's producer](#where-an-option-means-something-else-than-in-the-java-producer)),
[options of a read](#options-of-a-read), [properties of the Producer](#properties-of-the-producer),
[environment](#environment).
"""

_WRITE: Final = """\
## Options of a write

`df.write.format("rocketmq").option(name, value)`, `df.writeStream...`, and `Producer.send_arrow(table, name=value)`. One of
`nameServer` and `endpoints` is required, and a topic, as an option or a column.
"""

_WRITE_GROUPS: Final[Groups] = {
    "Where to": "nameServer transport endpoints topic tags namespace producerGroup createTopicKey "
    "defaultTopicQueueNums",
    "Delivery": "sendMode deliveryTimeoutMs sendMsgTimeout sendMsgMaxTimeoutPerRequest retryTimesWhenSendFailed "
    "retryTimesWhenSendAsyncFailed retryAnotherBrokerWhenNotStoreOK retryBackoffMs retryBackoffMaxMs requireStoreOk "
    "rowId",
    "Rows that no broker could store": "onError deadLetterTopic maxMessageSize",
    "Queues and order": "queueSelector machineRoom ordered",
    "Batches, window and rate": "batching batchBytes batchType maxInFlight maxInFlightBytes clientAsyncSemaphoreValue "
    "clientOnewaySemaphoreValue maxRatePerSecond maxRateTasks",
    "Compression": "compressType compressMsgBodyOverHowmuch compressLevel",
    "Slow and failing brokers": "sendLatencyFaultEnable faultPreset latencyMax notAvailableDuration "
    "startDetectorEnable detectTimeout detectInterval",
    "Access control and encryption": "accessKey secretKey securityToken useTls tlsCaFile tlsServerName",
    "Figures and traces": "metricsPath enableTrace traceTopic",
    "The client": "instanceName clientIP unitName unitMode vipChannelEnabled pollNameServerInterval "
    "heartbeatBrokerInterval",
}

_JAVA: Final = """\
### Where an option means something else than in the Java producer

| option | in the sink |
|---|---|
| `sendMsgTimeout` | bounds one attempt, from its last byte written, plus 1 s per MiB; the whole is bounded by `deliveryTimeoutMs` |
| `sendMsgMaxTimeoutPerRequest` | bounds the attempts that another one follows at once; the last before a wait has `sendMsgTimeout`. Rows bound to a queue (`shardingKey`, `queueId`) have no other broker to go to, and no such bound |
| `retryTimesWhenSendFailed`, `retryTimesWhenSendAsyncFailed` | how many attempts follow each other at once, at other brokers; after them come waits, until `deliveryTimeoutMs`. With `async` an error code of a broker is retried too, which Java does not do |
| `namespace` | topics (of the option and of the column) and the group get the prefix `namespace%`; rows carry no `INSTANCE_ID`, as messages of a Java batch do not. A name server address that begins with `MQ_INST_` gives a namespace, as in Java |
| `unitName`, `unitMode` | as in Java: part of the client id; a mark on every request |
| `vipChannelEnabled` | every attempt goes to the port two below; in Java the retries of an asynchronous send don't |
| `clientAsyncSemaphoreValue`, `clientOnewaySemaphoreValue` | per worker process and options; a request beyond is tried again, a oneway one waits for its turn |
"""

_READ: Final = """\
## Options of a read

`spark.read.format("rocketmq").option(name, value)` and `spark.readStream...`: [reading](reading.md) says how they work
together. Reads go over the remoting protocol only: `nameServer` is required.
"""

_READ_GROUPS: Final[Groups] = {
    "What is read": "nameServer subscribe subscribePattern assign namespace consumerGroup",
    "Where it begins and ends": "startingOffsets endingOffsets startingTimestamp endingTimestamp "
    "startingOffsetsByTimestamp endingOffsetsByTimestamp startingOffsetsByTimestampStrategy failOnDataLoss",
    "Which messages and columns": "subExpression filterType includeProperties",
    "Partitions and pulls": "minPartitions maxRecordsPerPartition pullBatchSize pullTimeoutMs readTimeoutMs",
    "Streams": "maxOffsetsPerTrigger minOffsetsPerTrigger maxTriggerDelay commitOffsets",
    "Access control and encryption of a read": "accessKey secretKey securityToken useTls tlsCaFile tlsServerName",
    "The client of a read": "instanceName clientIP unitName",
}

_PRODUCER: Final = """\
## Properties of the Producer

`rocketmq_spark.Producer(group, name=value)`: the Java producer's properties with the Java producer's meaning, in snake_case;
lists are lists. `Producer.send_arrow` takes the [options of a write](#options-of-a-write) that are not among them. See
[producer.md](producer.md).
"""

_PRODUCER_GROUPS: Final[Groups] = {
    "Where the Producer sends to": "name_server transport endpoints namespace topics create_topic_key "
    "default_topic_queue_nums",
    "Sends and retries": "send_msg_timeout send_msg_max_timeout_per_request retry_times_when_send_failed "
    "retry_times_when_send_async_failed retry_another_broker_when_not_store_ok retry_response_codes max_message_size",
    "How much is under way": "enable_backpressure_for_async_mode back_pressure_for_async_send_num "
    "back_pressure_for_async_send_size client_async_semaphore_value client_oneway_semaphore_value "
    "client_callback_executor_threads",
    "Compression of messages": "compress_type compress_msg_body_over_howmuch compress_level",
    "Slow and failing brokers of the Producer": "send_latency_fault_enable fault_preset latency_max "
    "not_available_duration start_detector_enable detect_timeout detect_interval",
    "Access control and encryption of the Producer": "access_key secret_key security_token use_tls tls_ca_file "
    "tls_server_name",
    "Traces": "enable_trace trace_topic trace_msg_batch_num",
    "The client of the Producer": "instance_name client_ip unit_name unit_mode vip_channel_enabled "
    "poll_name_server_interval heartbeat_broker_interval mq_client_api_timeout",
}

_ENVIRONMENT: Final = """\
## Environment

| variable | read by | meaning |
|---|---|---|
| `NAMESRV_ADDR` | the driver; the process of a `Producer` | the name servers, where neither `nameServer` nor `endpoints` are given |
| `PYSPARK_PYTHON` | Spark | the interpreter that Python workers run: it needs this package ([getting started](getting-started.md)) |
| `JAVA_HOME` | Spark; the local cluster | the Java to run, else the first `java` on `PATH` |
| `ROCKETMQ_SPARK_CACHE` | the local cluster | where the RocketMQ server is kept, else `rocketmq-spark` in your user's cache folder |
| `ROCKETMQ_SPARK_STATE` | `rocketmq-spark cluster` | where it is noted which cluster runs, else `rocketmq-spark` in your user's state folder |
"""


def page() -> str:
    """Return the whole page."""
    parts = [
        _INTRODUCTION,
        _WRITE,
        *_sections(options_table(), _WRITE_GROUPS),
        _JAVA,
        _READ,
        *_sections(reader_options_table(), _READ_GROUPS),
        _PRODUCER,
        *_sections(producer_options_table(), _PRODUCER_GROUPS),
        _ENVIRONMENT,
    ]
    return "\n".join(parts)


def _sections(rows: Sequence[OptionRow], groups: Groups) -> list[str]:
    by_name = {row.name: row for row in rows}
    grouped = [name for names in groups.values() for name in names.split()]
    if sorted(grouped) != sorted(by_name):
        raise ValueError(f"not in one group each: {set(grouped) ^ set(by_name) or 'one is in two'}")
    return [f"### {title}\n\n{_table([by_name[name] for name in names.split()])}" for title, names in groups.items()]


def _table(rows: Sequence[OptionRow]) -> str:
    lines = ["| option | default | allowed | meaning |", "|---|---|---|---|"]
    for row in rows:
        also = [f"`{alias}`" for alias in row.aliases] + ([f"`${row.env}`"] if row.env else [])
        name = f"`{row.name}`" + (f" (also {', '.join(also)})" if also else "")
        cells = (name, row.default, row.allowed, row.doc)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PATH.write_text(page(), "utf-8")
