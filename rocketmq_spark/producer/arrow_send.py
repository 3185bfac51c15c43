"""Implements `Producer.send_arrow`: sends Arrow record batches with the code of a Spark write task.

Rows are sent over the client instance of the producer, and trace messages (``enable_trace``) over another one. A call
cannot change options that the producer also has.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TypeAlias

import pyarrow as pa

from rocketmq_spark.arrow.schema import own_types
from rocketmq_spark.deliveries.base import OpenInstance, PartitionTask, TaskResults, delivery_of
from rocketmq_spark.errors import OptionError
from rocketmq_spark.metrics import Recorder, WriteSummary, merge_into
from rocketmq_spark.options.kinds import option_texts
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.options.producer import ProducerOptions
from rocketmq_spark.options.sink import SINK_OPTIONS, SinkOptions
from rocketmq_spark.producer.service import batch_trace_sender
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.sink.checks import check_columns, check_topic, ordered_queues
from rocketmq_spark.sink.task import AT_LEAST_ONCE, SendContext, SendRules, write_rows

ArrowData: TypeAlias = "pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch]"


def sink_options(
    producer: ProducerOptions, group: str, topic: str | None, options: Mapping[str, str | int | bool | None]
) -> SinkOptions:
    """Return the options of a write: the producer's properties, and `options` of this write."""
    properties = {**producer.values(), "producer_group": group}
    shared = [spec for spec in SINK_OPTIONS if spec.field in properties]
    shared_names = {name.lower() for spec in shared for name in spec.names}
    misplaced = sorted(name for name in options if name.lower() in shared_names)
    if misplaced:
        raise OptionError(f"options {', '.join(misplaced)} belong to the producer: pass them to Producer(...) instead")
    texts = option_texts(options)
    texts["endpoints" if producer.over_grpc else "nameServer"] = ";".join(producer.connection.route_servers)
    if topic is not None:
        texts["topic"] = topic
    defaults = {spec.field: properties[spec.field] for spec in shared if spec.field != "instance_name"}
    parsed = parse_sink_options(texts, {}, defaults)
    if needs_spark := delivery_of(parsed).NEEDS_SPARK:
        raise OptionError(f"delivery={parsed.delivery} needs Spark, {needs_spark}; write a DataFrame instead")
    return parsed


def record_batches(data: ArrowData) -> Iterable[pa.RecordBatch]:
    """Return the record batches of any form of data."""
    if isinstance(data, pa.RecordBatch):
        return (data,)
    return data.to_batches() if isinstance(data, pa.Table) else data


def send_arrow(
    data: ArrowData,
    topic: str | None,
    options: Mapping[str, str | int | bool | None],
    producer: ProducerOptions,
    group: str,
    instance: ClientInstance,
) -> WriteSummary:
    """Send every row; see :meth:`rocketmq_spark.Producer.send_arrow`."""
    parsed = sink_options(producer, group, topic, options)
    delivery = delivery_of(parsed)
    write = delivery.identify(parsed, None)
    recorder = Recorder(uuid.uuid4().hex, -1, 0)
    queues = ordered_queues(parsed, instance)
    batches = _checked(record_batches(data), parsed, instance)
    open_trace_sender = partial(batch_trace_sender, parsed)
    context = SendContext(options=parsed, instance=instance, queues=queues, open_trace_sender=open_trace_sender)

    def send(batches: Iterator[pa.RecordBatch], *, row_id_name: str = "", rules: SendRules | None = None) -> None:
        write_rows(context, recorder, batches, row_id_name or recorder.write_id, rules or AT_LEAST_ONCE)

    open_instance: OpenInstance = lambda: nullcontext(instance)  # noqa: E731 - a name for the type
    planned = delivery.plan(parsed, open_instance, write, queues)
    result = planned.write_partition(PartitionTask(recorder, batches, open_instance, send))
    summary = WriteSummary()
    merge_into(summary, recorder.snapshot())
    results = [] if result is None else [result]
    planned.complete(open_instance, TaskResults(results, recorder.write_id, -1, lambda: summary.to_dict().keys()))
    return summary


def _checked(
    batches: Iterable[pa.RecordBatch], options: SinkOptions, instance: ClientInstance
) -> Iterator[pa.RecordBatch]:
    schema: pa.Schema | None = None
    delivery = delivery_of(options)
    for batch in batches:
        if schema is None or batch.schema != schema:
            schema = batch.schema
            check_columns(schema, options)
            # For other writes, the checks while sending are enough.
            delivery.check_columns(schema, options)
            special = options.batch_type == "inner" or delivery.REFUSES_COMPACTION or own_types(schema)
            if options.over_grpc or special:
                check_topic(options, instance, schema, delivery)
        if batch.num_rows:
            yield batch
