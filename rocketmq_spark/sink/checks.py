"""What a driver checks before a write: columns, topics, and the queues of an ordered write.

Encoders and senders are not imported: with Spark, a process that plans a write needs none of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Final, Protocol

import pyarrow as pa

from rocketmq_spark.arrow.schema import (
    check_grpc,
    check_keys,
    check_message_types,
    check_own_type,
    check_row_id,
    check_schema,
    check_timers,
    own_types,
    timers,
)
from rocketmq_spark.errors import (
    OptionError,
    RequestNotSupportedException,
    RocketMQError,
    RouteNotFoundException,
    SchemaError,
)
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.names import java_order
from rocketmq_spark.model.route import MAX_QUEUES
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.responses import TopicConfig
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.route_cache import TopicPublishInfo
from rocketmq_spark.routing.topic_configs import TopicConfigs
from rocketmq_spark.sink.routes import RouteFinder
from rocketmq_spark.transport.base import Admin

logger = logging.getLogger("rocketmq_spark.producer")

_TIMEOUT_S: Final = 3.0
_ROCKSDB: Final = "defaultRocksDB"


def check_columns(schema: pa.Schema, options: SinkOptions) -> None:
    """Raise `SchemaError` for columns that cannot be sent in full with these options; asks no server."""
    check_schema(schema, topic=options.topic, queue_selector=options.queue_selector)
    if options.ordered and "shardingKey" not in schema.names:
        raise SchemaError(
            "ordered=true keeps the order of rows of one shardingKey, and there is no such column: add it, or set "
            "ordered=false"
        )
    if isinstance(options.row_id, tuple):
        check_row_id(schema, options.row_id)
    if options.over_grpc:
        check_grpc(schema)


class TopicRules(Protocol):
    """What a delivery requires of the topic: why; empty: nothing."""

    NEEDS_TOPIC: ClassVar[str]  # It must exist
    REFUSES_COMPACTION: ClassVar[str]  # It cannot be a compaction topic


def check_topic(options: SinkOptions, instance: ClientInstance, schema: pa.Schema, rules: type[TopicRules]) -> None:
    """Look up the option topic, and check the columns against it; without that option do nothing.

    Raises as `RouteFinder.look_up`, `check_keys`, `check_message_types` and `check_own_type`. An OptionError means that
    brokers would drop the rows, or store inner batches row by row.
    """
    if options.topic is None:
        return
    info = RouteFinder(options, instance).look_up(options.topic)
    if info.template and rules.NEEDS_TOPIC:
        raise RouteNotFoundException(
            f"delivery={options.delivery}: topic {options.topic} does not exist, and {rules.NEEDS_TOPIC}; create it "
            f"first (rocketmq-spark create-topic {options.topic}, or mqadmin updateTopic -t {options.topic})"
        )
    check_message_types(schema, options.topic, info.route.message_types)
    inner, own_type, timed = options.batch_type == "inner", own_types(schema), timers(schema)
    if options.over_grpc or (info.template and not (inner or own_type or timed)):
        return
    configs = instance.topic_configs.look_up({info.topic: info.route}, fresh=True)[info.topic]
    old = instance.topic_configs.old_brokers(configs, info.route) if inner or timed else {}
    check_timers(schema, options.topic, old)
    if own_type:
        _check_own_type(options.topic, schema, configs, info)
    if configs.compacted:
        _check_compacted(options, schema)
        if rules.REFUSES_COMPACTION:
            raise OptionError(
                f"delivery={options.delivery}: topic {options.topic} has cleanup.policy=COMPACTION. Brokers drop rows "
                f"with the same key, so {rules.REFUSES_COMPACTION}; use another topic"
            )
    if inner:
        _check_inner(options, configs, info, old)
        check_stores(options.topic, info, configs, partial(store_type, instance.transport))


def _check_own_type(topic: str, schema: pa.Schema, configs: TopicConfigs, info: TopicPublishInfo) -> None:
    """Raise if brokers would ignore a column, because the topic is of another type, or their release is too old."""
    types = {name: config.message_type for name, config in configs.by_broker.items()}
    if info.template:
        # The first send would create the topic with this type.
        types = {"the brokers, once it exists": TopicConfig().message_type}
    for broker_name, exc in configs.unknown.items():
        if isinstance(exc, RequestNotSupportedException):
            types[broker_name] = TopicConfig().message_type
        else:
            logger.warning(
                "the type of topic %s is unknown on %s. If it is none for the columns priority and liteTopic, the "
                "broker ignores them: %s",
                *(topic, broker_name, exc),
            )
    check_own_type(schema, topic, types)


def _check_compacted(options: SinkOptions, schema: pa.Schema) -> None:
    """Raise if the brokers of a compaction topic would drop the rows."""
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


def _check_inner(options: SinkOptions, configs: TopicConfigs, info: TopicPublishInfo, old: Mapping[str, str]) -> None:
    """Raise if a broker says that it would store the rows of inner batches one by one; `old` are releases before 5."""
    remedy = (
        "batchType=inner is for topics of the type BatchCQ: create one with that type (rocketmq-spark "
        "create-topic NAME --inner, or mqadmin updateTopic -t NAME -a +queue.type=BatchCQ), or leave the option out"
    )
    if info.template:
        raise OptionError(f"topic {options.topic} does not exist, and would be created with plain queues; {remedy}")
    for broker_name, release in old.items():
        raise OptionError(
            f"batchType=inner: broker {broker_name} of topic {options.topic} has RocketMQ {release}, which stores the "
            "rows of a batch one by one: leave the option out, or use brokers of RocketMQ 5"
        )
    for exc in configs.unknown.values():
        logger.warning(
            "batchType=inner: the type of topic %s is unknown. If it is not BatchCQ, brokers store the rows of a batch "
            "one by one: %s",
            *(options.topic, exc),
        )
    for broker_name, config in sorted(configs.by_broker.items()):
        if not config.holds_batches:
            raise OptionError(f"topic {options.topic} is of the type {config.queue_type} on {broker_name}; {remedy}")


def check_stores(
    topic: str, info: TopicPublishInfo, configs: TopicConfigs, store_of: Callable[[str], str | RocketMQError | None]
) -> None:
    """Raise an OptionError if a broker says that its store counts an inner batch as one message, and loses the others.

    `store_of` returns the `store_type` of the broker at an address; an unknown one is logged. Brokers store the rows of
    plain topics one by one.
    """
    inner = {name for name, config in configs.by_broker.items() if config.holds_batches}.union(configs.unknown)
    for broker_name, address in sorted(info.addresses.items()):
        if broker_name not in inner:
            continue
        store = store_of(address)
        if isinstance(store, RocketMQError):
            text = "batchType=inner: the store of %s, a broker of topic %s, is unknown. With %s it loses rows: %s"
            logger.warning(text, broker_name, topic, f"storeType={_ROCKSDB}", store)
        elif store == _ROCKSDB:
            raise OptionError(
                f"batchType=inner: {broker_name}, a broker of topic {topic}, has storeType={store}, which counts an "
                "inner batch as one message: consumers would not get the others. Leave the option out"
            )


def store_type(transport: Admin, address: str) -> str | RocketMQError | None:
    """Return the setting of a broker, or the error if it gives no answer, or the user may not read it."""
    try:
        return transport.broker_config(address, _TIMEOUT_S).get("storeType")
    except RocketMQError as exc:
        return exc


def ordered_queues(
    options: SinkOptions, instance: ClientInstance, known: Mapping[str, int] = MappingProxyType({})
) -> Sequence[MessageQueue] | None:
    """Return the queues of an ordered write (docs/internals/sink.md#ordered-writes); else None, as over gRPC.

    Brokers that the route does not list have the number of queues in `known`, of an earlier look-up. Raises an
    MQClientException (10005) if no name server answers, or the topic does not exist.
    """
    if not options.ordered or options.over_grpc:
        return None
    assert options.topic is not None
    try:
        info = RouteFinder(options, instance).look_up(options.topic)
    except RouteNotFoundException as exc:
        if exc.unreachable or not known:
            raise
        text = "ordered=true: topic %s has no broker now, and rows wait until deliveryTimeoutMs; start its brokers: %s"
        logger.warning(text, options.topic, exc)
        return _queues_of(options.topic, known)
    if info.template and not known:
        raise RouteNotFoundException(
            f"looking up the queues of topic {options.topic} for an ordered write: the topic does not exist, "
            "and its first messages would create its queues one broker after the other; create it first "
            f"(rocketmq-spark create-topic {options.topic}, or mqadmin updateTopic -t {options.topic})"
        )
    if info.order_topic:
        return info.queues
    listed = () if info.template else info.route.queue_datas
    numbers = {data.broker_name: data.write_queue_nums for data in listed if data.writable}
    return _queues_of(options.topic, {**known, **numbers})


def _queues_of(topic: str, numbers: Mapping[str, int]) -> Sequence[MessageQueue]:
    total = sum(numbers.values())
    if total > MAX_QUEUES:
        raise RouteNotFoundException(
            f"looking up the queues of topic {topic} for an ordered write: {total} queues on {len(numbers)} brokers, "
            f"at most {MAX_QUEUES} are allowed. Check that nameServer has the addresses of the right cluster. A stream "
            "also counts the queues in rocketmq-queues-*.json of its checkpoint"
        )
    names = sorted(numbers, key=java_order)
    return tuple(MessageQueue(topic, name, queue_id) for name in names for queue_id in range(numbers[name]))
