"""Arrow tables to RocketMQ without Spark: the path of a partition task, on the producer's own client instance.

Rule 1: the columns, checks, batches and retries are those of a DataFrame's write; nothing is decided here.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import TypeAlias

import pyarrow as pa

from rocketmq_spark.client.write_rows import check_columns, check_topic, ordered_queues, write_rows
from rocketmq_spark.errors import OptionError
from rocketmq_spark.metrics import Recorder, WriteSummary, merge_into
from rocketmq_spark.option_table import SINK_OPTIONS
from rocketmq_spark.options import SinkOptions, parse_sink_options
from rocketmq_spark.producer.client_instance import ClientInstance
from rocketmq_spark.producer_options import ProducerOptions, option_text

ArrowData: TypeAlias = "pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch]"


def sink_options(
    producer: ProducerOptions, group: str, topic: str | None, options: Mapping[str, str | int | bool]
) -> SinkOptions:
    """Return the options of a write with the properties of a producer, and those given for this write.

    Raises
    ------
    OptionError
        An option is unknown or malformed, says what the producer has settled already, or contradicts that.
    """
    settled = {field.name for field in fields(ProducerOptions)} | {"producer_group"}
    own = {name.lower() for spec in SINK_OPTIONS if spec.field in settled for name in spec.names}
    taken = sorted(name for name in options if name.lower() in own)
    if taken:
        raise OptionError(f"options {', '.join(taken)} belong to the producer: give them to Producer(...) instead")
    servers = "endpoints" if producer.over_grpc else "nameServer"
    given = {name: option_text(value) for name, value in options.items()}
    given[servers] = ";".join(producer.route_servers)
    if topic is not None:
        given["topic"] = topic
    shared = {field.name for field in fields(SinkOptions)} & settled - {"producer_group", "instance_name"}
    values = {name: getattr(producer, name) for name in shared}
    return parse_sink_options(given, {}, {"producer_group": group, **values})


def send_arrow(
    data: ArrowData,
    topic: str | None,
    options: Mapping[str, str | int | bool],
    producer: ProducerOptions,
    group: str,
    instance: ClientInstance,
) -> WriteSummary:
    """Send every row; see :meth:`rocketmq_spark.Producer.send_arrow`."""
    parsed = sink_options(producer, group, topic, options)
    recorder = Recorder(uuid.uuid4().hex, -1, 0)
    queues = ordered_queues(parsed, instance)
    rows = _checked(_batches(data), parsed, instance)
    write_rows(parsed, instance, recorder, rows, write_id=recorder.write_id, queues=queues)
    summary = WriteSummary()
    merge_into(summary, recorder.snapshot())
    return summary


def _batches(data: ArrowData) -> Iterator[pa.RecordBatch]:
    if isinstance(data, pa.RecordBatch):
        return iter((data,))
    if isinstance(data, pa.Table):
        return iter(data.to_batches())
    return iter(data)


def _checked(
    batches: Iterator[pa.RecordBatch], options: SinkOptions, instance: ClientInstance
) -> Iterator[pa.RecordBatch]:
    schema: pa.Schema | None = None
    for batch in batches:
        if schema is None or batch.schema != schema:
            schema = batch.schema
            check_columns(schema, options)
            # Elsewhere the topic's route says no more than the send itself finds out.
            if options.over_grpc or options.batch_type == "inner":
                check_topic(options, instance, schema)
        if batch.num_rows:
            yield batch
