"""The rows of one partition to the brokers: where batcher, sender and recorder meet.

    Arrow record batches -> batcher -> BatchSender -> Recorder

Rule 1: nothing is decided here; the options say what is joined.
Rule 2: it returns when every row is acknowledged (with ``sendMode=oneway``: written), and raises otherwise.

Follows design.md section 2.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import pyarrow as pa

from rocketmq_spark.arrow.schema import (
    check_grpc,
    check_keys,
    check_message_types,
    check_ordered,
    check_row_id,
    check_schema,
)
from rocketmq_spark.arrow.settings import BatchSettings
from rocketmq_spark.arrow.unique_id import MessageIds, UniqueIds
from rocketmq_spark.client.row_batcher import row_batcher
from rocketmq_spark.compression import CompressionType
from rocketmq_spark.errors import OptionError, RouteNotFoundException
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.names import java_order
from rocketmq_spark.namespace import wrap
from rocketmq_spark.options import SinkOptions
from rocketmq_spark.producer.batch_sender import BatchSender
from rocketmq_spark.producer.client_instance import ClientInstance
from rocketmq_spark.producer.oneway_sender import OnewaySender
from rocketmq_spark.producer.rate import largest_batch
from rocketmq_spark.producer.route_cache import TopicPublishInfo
from rocketmq_spark.transport.local_address import local_ip
from rocketmq_spark.transport.topic_configs import TopicConfigs
from rocketmq_spark.wire.records import MAX_BATCH_ROWS

logger = logging.getLogger("rocketmq_spark.producer")

# A proxy is fastest with requests of so many rows: measured with 100-byte bodies, 1,000 rows went 1.3 times as fast as
# the 5,000 that batchBytes would allow, 500 and 2,000 a little slower.
_GRPC_BATCH_ROWS: Final = 1000


def write_rows(
    options: SinkOptions,
    instance: ClientInstance,
    recorder: Recorder,
    batches: Iterator[pa.RecordBatch],
    *,
    write_id: str,
    queues: Sequence[MessageQueue] | None = None,
    servers_reached: bool = False,
) -> None:
    """Send every row of `batches`.

    Parameters
    ----------
    options : SinkOptions
    instance : ClientInstance
        Its producer group is counted in by the caller.
    recorder : Recorder
    batches : iterator of pyarrow.RecordBatch
        Of a schema that has passed `check_schema`.
    write_id : str
        What the ids of rows begin with.
    queues : sequence of MessageQueue, optional
        With ``ordered``, the queues that rows are bound to.
    servers_reached : bool, default False
        See `BatchSender`.

    Raises
    ------
    DeliveryError, InvalidRowError
        See `BatchSender.write`.
    """
    with contextlib.ExitStack() as stack:
        on_stored = None
        if options.enable_trace:
            from rocketmq_spark.client.batch_trace import BatchTracer

            masters = instance.routes.masters
            tracer = stack.enter_context(BatchTracer(options, lambda broker_name: masters().get(broker_name, "")))
            on_stored = tracer.append
        rate = _share_of_rate(options)
        sender_class = OnewaySender if options.send_mode == "oneway" else BatchSender
        sender: BatchSender[pa.RecordBatch] = sender_class(
            options,
            instance,
            recorder,
            fixed_queues=queues,
            max_rate_per_second=rate,
            on_stored=on_stored,
            servers_reached=servers_reached,
        )
        batcher = row_batcher(
            options,
            batch_settings(options, rate),
            recorder,
            write_id=write_id,
            queues_of=sender.publish_queues,
            keys_required=lambda topics: _keys_required(options, instance, sender, topics),
            unique_ids=_unique_ids(options),
        )
        sender.write(batches, batcher)


def _keys_required(
    options: SinkOptions, instance: ClientInstance, sender: BatchSender[pa.RecordBatch], topics: Sequence[str]
) -> Mapping[str, bool | None]:
    """Return whether rows of each topic need a key, None if unknown; raises as `BatchSender.publish_queues`."""
    if options.over_grpc:
        return {}
    infos = {topic: sender.publish_info(topic) for topic in topics}
    configs = instance.topic_configs.get({info.topic: info.route for info in infos.values()})
    # A topic that does not exist is created with default attributes.
    return {topic: not info.template and configs[info.topic].keys_required for topic, info in infos.items()}


def _unique_ids(options: SinkOptions) -> UniqueIds:
    if options.over_grpc:
        return MessageIds(pid=os.getpid(), wall_clock=time.time, rng=random.SystemRandom())
    return UniqueIds(ip=socket.inet_aton(local_ip()), pid=os.getpid(), wall_clock=time.time, rng=random.SystemRandom())


def batch_settings(options: SinkOptions, rate: float | None) -> BatchSettings:
    """Return what the options of a write say about batches; `rate` is the task's share of ``maxRatePerSecond``."""
    most_rows = _GRPC_BATCH_ROWS if options.over_grpc else MAX_BATCH_ROWS
    return BatchSettings(
        topic=options.topic,
        tags=options.tags,
        max_message_size=options.max_message_size,
        batch_bytes=options.batch_bytes,
        batching=options.batching,
        inner_batches=options.batch_type == "inner",
        compress_type=None if options.compress_type == "NONE" else CompressionType.parse(options.compress_type),
        compress_over=options.compress_msg_body_over_howmuch,
        compress_level=options.compress_level,
        keep_row_id=options.keep_row_id,
        queue_selector=options.queue_selector,
        # Groups that fill and batches that are on their way share maxInFlightBytes.
        max_pending_bytes=options.max_in_flight_bytes // 2,
        ordered=options.ordered,
        max_rows=most_rows if rate is None else min(most_rows, largest_batch(rate)),
    )


def check_columns(schema: pa.Schema, options: SinkOptions) -> None:
    """Refuse columns that a write with these options could not send in full, as far as that is known without a server.

    Raises
    ------
    SchemaError
    """
    check_schema(schema, topic=options.topic, queue_selector=options.queue_selector)
    if options.ordered:
        check_ordered(schema.names)
    if isinstance(options.row_id, tuple):
        check_row_id(schema, options.row_id)
    if options.over_grpc:
        check_grpc(schema)


def check_topic(options: SinkOptions, instance: ClientInstance, schema: pa.Schema) -> None:
    """Look up the option topic, and refuse columns that it can't take; without that option do nothing.

    Raises
    ------
    MQClientException
        10005: no name server or proxy answers, or none knows the topic, nor a template for it.
    SchemaError
        The topic does not accept messages of the type that the columns make (over gRPC only: brokers accept every
        type); or it needs keys, and there is no such column.
    OptionError
        ``batchType=inner``, and the topic is of another type. The topic or the dead-letter topic is a compaction topic
        that would drop what is sent.
    """
    if options.topic is None:
        return
    queues = BatchSender(options, instance, Recorder("", -1, 0)).publish_queues(options.topic)
    info = instance.routes.cached(queues[0].topic)
    if info is None:
        return
    check_message_types(schema, options.topic, info.route.message_types)
    inner = options.batch_type == "inner"
    if options.over_grpc or (info.template and not inner):
        return
    configs = instance.topic_configs.get({info.topic: info.route}, fresh=True)[info.topic]
    if configs.compacted:
        _check_compacted(options, schema)
    if inner:
        _check_inner(options, configs, info)


def _check_compacted(options: SinkOptions, schema: pa.Schema) -> None:
    """Refuse a write whose rows the brokers of a compaction topic would drop."""
    if options.topic == options.dead_letter_topic:
        raise OptionError(
            f"deadLetterTopic={options.topic} is a compaction topic (cleanup.policy=COMPACTION), whose brokers drop "
            "dead letters without a key; name another topic"
        )
    if options.batch_type == "inner":
        raise OptionError(
            f"batchType=inner: topic {options.topic} is a compaction topic (cleanup.policy=COMPACTION), whose brokers "
            "drop inner batches; leave the option out"
        )
    check_keys(schema, str(options.topic))


def _check_inner(options: SinkOptions, configs: TopicConfigs, info: TopicPublishInfo) -> None:
    """Refuse a topic that would store the rows of inner batches one by one, if a broker of it says so."""
    remedy = (
        "batchType=inner is for topics of the type BatchCQ: create one with that type (rocketmq-spark "
        "create-topic NAME --inner, or mqadmin updateTopic -t NAME -a +queue.type=BatchCQ), or leave the option out"
    )
    if info.template:
        raise OptionError(f"topic {options.topic} does not exist, and would be created as a plain one; {remedy}")
    for exc in configs.unknown.values():
        logger.warning("batchType=inner: the type of the topic is unknown: %s", exc)
    for broker_name, config in sorted(configs.by_broker.items()):
        if not config.holds_batches:
            raise OptionError(f"topic {options.topic} is of the type {config.queue_type} on {broker_name}; {remedy}")


def ordered_queues(
    options: SinkOptions, instance: ClientInstance, known: Mapping[str, int] = MappingProxyType({})
) -> Sequence[MessageQueue] | None:
    """Return the queues that the rows of a whole ordered write are bound to.

    They are those of the order configuration, if the topic has one. Else they are the queues of every broker in the
    route, whether it has a master now or not, and of each `known` broker that the route does not list.

    Parameters
    ----------
    options : SinkOptions
    instance : ClientInstance
    known : mapping of str to int, default empty
        Queues by broker, as an earlier look-up returned them.

    Returns
    -------
    sequence of MessageQueue or None
        None for a write that is not ordered; and over gRPC, where the proxy has one queue for the rows of each key.

    Raises
    ------
    MQClientException
        10005: no name server answers, or the topic does not exist.
    """
    if not options.ordered or options.over_grpc:
        return None
    assert options.topic is not None
    topic = wrap(options.wrapped_namespace, options.topic)
    try:
        BatchSender(options, instance, Recorder("", -1, 0)).publish_queues(options.topic)
    except RouteNotFoundException as exc:
        if exc.unreachable or not known:
            raise
        logger.warning("ordered=true: every broker of topic %s is gone, its rows wait: %s", options.topic, exc)
        return _queues_of(topic, known)
    info = instance.routes.cached(topic)
    if info is None or (info.template and not known):
        raise RouteNotFoundException(
            f"looking up the queues of topic {options.topic} for an ordered write: the topic does not exist, "
            "and its first messages would make its queues one broker after the other; create it first "
            f"(rocketmq-spark create-topic {options.topic}, or mqadmin updateTopic -t {options.topic})"
        )
    if info.order_topic:
        return info.queues
    listed = {} if info.template else {data.broker_name: data for data in info.route.queue_datas}
    numbers = {name: data.write_queue_nums for name, data in listed.items() if data.writable}
    return _queues_of(topic, {**known, **numbers})


def _queues_of(topic: str, numbers: Mapping[str, int]) -> Sequence[MessageQueue]:
    names = sorted(numbers, key=java_order)
    return tuple(MessageQueue(topic, name, queue_id) for name in names for queue_id in range(numbers[name]))


def _share_of_rate(options: SinkOptions) -> float | None:
    """Return how many messages a task may send in a second, None for as many as it can."""
    rate, tasks = options.max_rate_per_second, options.max_rate_tasks
    return None if rate is None else rate / (tasks or 1)
