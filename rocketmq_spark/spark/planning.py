"""What the driver does before a write: it looks up the topics that options name, and plans the delivery.

With ``ordered`` over remoting, the driver also gives all tasks the same queues. Otherwise each task finds its routes
itself.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rocketmq_spark.deliveries.base import delivery_of
from rocketmq_spark.errors import (
    MQBrokerException,
    OptionError,
    RemotingException,
    RouteNotFoundException,
    TopicRouteStaleException,
)
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.options.references import load_class
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.grpc.codes import Code
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.connect import check_connection
from rocketmq_spark.routing.route_cache import TopicPublishInfo
from rocketmq_spark.sink.checks import check_columns
from rocketmq_spark.sink.routes import acquired, new_instance
from rocketmq_spark.spark.ordered_queues import QueueMemory, query_of
from rocketmq_spark.spark.partition import RouteLookup
from rocketmq_spark.spark.spark_api import SessionFacts, arrow_schema
from rocketmq_spark.spark.writer import RocketMQBatchWriter, stream_writer

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceStreamWriter
    from pyspark.sql.types import StructType

logger = logging.getLogger("rocketmq_spark.spark")

# A proxy's answers about the template topic: it is a system topic, or the user has no permission.
_REFUSALS = frozenset({Code.ILLEGAL_TOPIC, Code.UNAUTHORIZED, Code.FORBIDDEN})


def plan_batch_write(
    given: Mapping[str, str],
    columns: pa.Schema,
    session: SessionFacts,
    warn: Callable[[str], None],
    batch_id: int | None = None,
) -> RocketMQBatchWriter:
    """Check a batch write, look up one route, and return its writer; `given` are the options, as texts.

    `batch_id` is the number of the micro-batch that `foreach_batch` writes. Raises an OptionError if the delivery needs
    an identity of the write and has none.
    """
    options = checked_options(given, columns, session, warn)
    delivery = delivery_of(options)
    write = delivery.identify(options, batch_id)
    if write is not None and batch_id is not None and not options.start_anew:
        write = replace(write, spark_query=session.query_id)
    lookup = look_up_route(options, columns)
    planned = delivery.plan(options, partial(acquired, options), write, lookup.queues)
    return RocketMQBatchWriter(planned, session.accumulator, str(uuid.uuid4()), lookup, metrics_id=session.metrics_id)


def plan_stream_write(
    given: Mapping[str, str], schema: StructType, session: SessionFacts, warn: Callable[[str], None]
) -> DataSourceStreamWriter:
    """Check a streaming write, look up the route of the option topic, and return the writer of one micro-batch."""
    columns = arrow_schema(schema)
    options = checked_options(given, columns, session, warn)
    if options.write_id is not None:
        raise OptionError("writeId is an option of batch writes: a stream has the numbers of its micro-batches")
    checkpoint = given.get("checkpointLocation")
    lookup = look_up_route_of_stream(options, columns, checkpoint)
    planned = delivery_of(options).plan(options, partial(acquired, options), queues=lookup.queues)
    if checkpoint is not None:
        planned.check_checkpoint(checkpoint, query_of)
    return stream_writer(planned, session.accumulator, schema, lookup)


def checked_options(
    given: Mapping[str, str], columns: pa.Schema, session: SessionFacts, warn: Callable[[str], None]
) -> SinkOptions:
    """Return the options of a write; raises an OptionError or a SchemaError, and warns."""
    options = parse_sink_options(given, os.environ)
    check_connection(options.connection)
    check_columns(columns, options)
    delivery = delivery_of(options)
    delivery.check_columns(columns, options)
    if options.custom_selector is not None:
        load_class("queueSelector", options.custom_selector, "select")
    if session.speculation and (warning := delivery.speculation_warning(options)):
        warn(warning)
    if options.send_mode == "oneway":
        warn("sendMode=oneway: brokers acknowledge nothing, and rows may be lost unnoticed")
    if options.max_rate_per_second is None or options.max_rate_tasks is not None:
        return options
    # Neither a task nor the process that makes this writer can ask Spark how many tasks run at once.
    if session.parallelism is None:
        raise OptionError(
            "maxRatePerSecond needs to know how many tasks share it: call rocketmq_spark.register(spark) on "
            "classic Spark, or set the option maxRateTasks (how many tasks of the write run at once)"
        )
    return replace(options, max_rate_tasks=session.parallelism)


def look_up_route(options: SinkOptions, columns: pa.Schema) -> RouteLookup:
    """Look up the topics that options name, so that a wrong address or topic fails before any task.

    Raises an MQClientException (10005) if no server answers, or if the topic does not exist and the write cannot create
    it, as with ``ordered`` and over gRPC. Raises as `check_topic`.
    """
    with closing(new_instance(options)) as instance:
        queues = _look_up(options, columns, instance, None)
        if options.topic is None and options.dead_letter_topic is None:
            _await_any_answer(options, instance)
        return RouteLookup(queues, servers_reached=True)


def look_up_route_of_stream(options: SinkOptions, columns: pa.Schema, checkpoint: str | None = None) -> RouteLookup:
    """Look up what `look_up_route` does, for one micro-batch. Without an option topic nothing is looked up.

    Connection and routes are kept for a minute, so that an outage of the name servers fails neither the start nor the
    commit of a micro-batch. In a longer outage the look-up is left to the tasks, which wait longer. With ``ordered`` it
    is an error, because all tasks need the same queues.
    """
    if options.topic is None and options.dead_letter_topic is None:
        return RouteLookup()
    memory = None
    if options.ordered and not options.over_grpc:
        memory = QueueMemory(checkpoint, options.connection.wire_name(str(options.topic)))
    try:
        with acquired(options) as instance:
            return RouteLookup(_look_up(options, columns, instance, memory), servers_reached=True)
    except RouteNotFoundException as exc:
        if options.ordered or not exc.unreachable:
            raise
        text = "the driver could not look up topic %s for a micro-batch, and leaves it to the tasks: %s"
        logger.warning(text, options.topic or options.dead_letter_topic, exc)
        return RouteLookup(unreached=str(exc))


def _look_up(
    options: SinkOptions, columns: pa.Schema, instance: ClientInstance, memory: QueueMemory | None
) -> Sequence[MessageQueue] | None:
    """Check the topics, and return the queues of an ordered write; `memory` has those of brokers that are down."""
    import pyarrow as pa

    from rocketmq_spark.sink.checks import check_topic, ordered_queues

    rules = delivery_of(options)
    known = memory.load() if memory else {}
    queues = ordered_queues(options, instance, known)
    if memory and queues:
        info = instance.routes.cached(queues[0].topic)
        if info is None or not info.order_topic:
            numbers = Counter(queue.broker_name for queue in queues)
            kept = numbers if info is None else _kept_queues(numbers, known, instance, info)
            if kept != known:
                memory.save(kept)
            missing = ", ".join(sorted(numbers.keys() - (() if info is None else info.addresses)))
            if missing:
                text = (
                    "ordered=true: topic %s has no master of %s now, and rows for its queues wait until "
                    "deliveryTimeoutMs. If a broker was removed permanently: stop the query, delete %s, and restart it"
                )
                logger.warning(text, options.topic, missing, memory.place)
    try:
        check_topic(options, instance, columns, rules)
    except RouteNotFoundException as exc:
        # A topic with known queues may lack a route now.
        if exc.unreachable or not known:
            raise
    if options.dead_letter_topic is not None:
        # Dead letters have neither sharding keys nor delays, so topics of all types accept them.
        dead_letters = replace(options, topic=options.dead_letter_topic, batch_type="plain")
        check_topic(dead_letters, instance, pa.schema([]), rules)
    return queues


def _kept_queues(
    numbers: Mapping[str, int], known: Mapping[str, int], instance: ClientInstance, info: TopicPublishInfo
) -> Mapping[str, int]:
    """Return the number of queues of each broker, from `numbers` and `known`, to use also while the broker is down.

    A name server may list brokers that do not exist. Rows would be bound to their queues for ever. So a new
    number counts only if the broker answers, unless the driver reaches no broker of the topic.
    """
    if numbers == known:
        return known
    configs = instance.topic_configs.look_up({info.topic: info.route})[info.topic]
    refused = {name for name, exc in configs.unknown.items() if not isinstance(exc, RemotingException)}
    answered = refused.union(configs.by_broker)
    new = {name: nums for name, nums in numbers.items() if name in answered or not answered}
    return {**known, **new}


def _await_any_answer(options: SinkOptions, instance: ClientInstance) -> None:
    """Return once a name server or proxy has answered: if rows name the topics, nothing else can be checked."""
    connection = options.connection
    timeout = options.send_msg_timeout * len(connection.route_servers) / 1000
    try:
        instance.transport.query_route(connection.create_topic_key, timeout)
    except MQBrokerException as exc:
        if not (isinstance(exc, TopicRouteStaleException) or (options.over_grpc and exc.response_code in _REFUSALS)):
            raise
        logger.debug("the server answers, without a route: %s", exc)
