"""The entry points of a write: `check_columns`, `check_topic` and `ordered_queues` prepare it, `write_rows` sends rows.

With Spark the first three run on the driver, and `write_rows` in each task. `Producer.send_arrow` calls the functions
that it needs in one process. `write_rows` sends one partition: a batcher encodes rows, a `BatchSender` or
`OnewaySender` sends them, and with ``enableTrace`` a `BatchTracer` traces them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from ipaddress import IPv4Address
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.arrow.batch_source import BatchSource
from rocketmq_spark.arrow.batcher import ArrowBatcher, GrpcBatcher, RemotingBatcher
from rocketmq_spark.arrow.columns import distinct_texts, filtered
from rocketmq_spark.arrow.dead_letter import DeadLetterBatcher, DeadLetters
from rocketmq_spark.arrow.encoders import MessageIds, UniqueIds
from rocketmq_spark.arrow.hashes import RowIds
from rocketmq_spark.arrow.invalid_rows import InvalidRows
from rocketmq_spark.arrow.joiner import JoiningBatcher
from rocketmq_spark.arrow.model import KnownRows
from rocketmq_spark.arrow.schema import check_timers, timers
from rocketmq_spark.arrow.split import CustomSelector, KeyCheck
from rocketmq_spark.arrow.validate import topic_rule
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import MessageQueue, SendOutcome
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.records import LARGEST_BODY
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.route_cache import TopicPublishInfo
from rocketmq_spark.routing.topic_configs import TopicConfigs
from rocketmq_spark.sink.checks import check_stores, store_type
from rocketmq_spark.sink.in_flight import PendingBatch
from rocketmq_spark.sink.limits import largest_batch, task_rate
from rocketmq_spark.sink.pipeline import OnStored
from rocketmq_spark.sink.recall import RecallHandles
from rocketmq_spark.sink.routes import RouteFinder
from rocketmq_spark.sink.sender import BatchSender, OnewaySender
from rocketmq_spark.sink.trace import BatchTracer, SendTrace
from rocketmq_spark.transport.base import local_ip

logger = logging.getLogger("rocketmq_spark.producer")

# The fastest size of a request to a proxy, as measured (docs/internals/grpc-messages.md#batches).
_GRPC_BATCH_ROWS: Final = 1000


class OpenSender(Protocol):
    """Opens the sender of a task's rows."""

    def __call__(
        self, routes: RouteFinder, recorder: Recorder, *, max_rate_per_second: float | None, on_stored: OnStored | None
    ) -> BatchSender:
        """Return the sender."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRules:
    """How a delivery sends the rows of a task; the defaults are those of at least once."""

    open_sender: OpenSender | None = None  # None: as ``sendMode`` says
    # The end of each row's properties. With it, each row is a half message, so it is a separate message.
    half_properties: str = ""
    # The brokers that rows may go to, and how many of their queues; None: all of the route.
    queue_nums: Mapping[str, int] | None = None
    attempt: str = field(default="", repr=False)  # The token that each row gets
    stored: KnownRows | None = None  # Rows that are left out


AT_LEAST_ONCE: Final = SendRules()


class RowBatchers:
    """The batchers of one partition: of its rows, and with ``onError=deadLetter`` of its dead letters.

    The options also apply to a dead-letter topic, except for its name, the choice of queues and ``batchType``.
    `write_id` begins the ids of rows: it is the same for every attempt at the write, and for no other write.
    """

    def __init__(
        self, routes: RouteFinder, recorder: Recorder, write_id: str, rules: SendRules = AT_LEAST_ONCE
    ) -> None:
        self._routes = routes
        self._options = options = routes.options
        self._recorder = recorder
        self._write_id = write_id
        self._rules = rules
        pid, rng = os.getpid(), random.SystemRandom()
        self._unique_ids = (
            MessageIds(pid=pid, wall_clock=time.time, rng=rng)
            if options.over_grpc
            else UniqueIds(ip=IPv4Address(local_ip()).packed, pid=pid, wall_clock=time.time, rng=rng)
        )
        # Topics of rows whose brokers have timers, and that can get inner batches.
        self._timed: set[str] = set()
        self._inner = set(filter(None, (options.topic,)))  # The driver has checked the option
        self._store_of = cache(partial(store_type, routes.instance.transport))

    def source(self) -> BatchSource[pa.RecordBatch]:
        """Return the source of the partition's batches."""
        options, recorder, rules = self._options, self._recorder, self._rules
        rows = self._batcher(options)
        if options.row_id:
            columns = options.row_id if isinstance(options.row_id, tuple) else None
            rows.row_ids = RowIds(self._write_id, recorder.batch_id, recorder.partition_id, columns)
        rows.attempt, rows.stored = rules.attempt, rules.stored
        rows.on_stored = lambda span: recorder.record_recovered(span.queue, span.rows, span.first, span.last)
        if options.custom_selector is not None:
            rows.custom = CustomSelector(options.custom_selector)
        if options.on_error == "skip":
            rows.on_invalid = lambda invalid: recorder.record_skipped(invalid.by_rule())
        if options.dead_letter_topic is None:
            return rows
        letters = DeadLetters(
            min(options.max_message_size, LARGEST_BODY),
            self._write_id,
            recorder.batch_id,
            over_grpc=options.over_grpc,
            tags=options.tags,
        )

        def divert(invalid: InvalidRows) -> None:
            recorder.record_dead_letters(invalid.by_rule())
            letters.add(invalid)

        rows.on_invalid = divert
        dead = replace(
            options,
            topic=options.dead_letter_topic,
            queue_selector="roundRobin",
            ordered=False,
            keep_row_id=True,
            # The topic may be of any type, on brokers with any store.
            batch_type="plain",
        )
        return DeadLetterBatcher(rows, self._batcher(dead), letters)

    def _batcher(self, options: SinkOptions) -> ArrowBatcher:
        batcher: ArrowBatcher
        partition_id, queues_of, unique_ids = self._recorder.partition_id, self._routes.queues_of, self._unique_ids
        if self._rules.half_properties:
            # A half message is always a single message.
            options = replace(options, batching=False)
        if options.over_grpc:
            batcher = GrpcBatcher(
                options,
                partition_id=partition_id,
                queues_of=queues_of,
                unique_ids=unique_ids,
                max_rows=_GRPC_BATCH_ROWS,
                namespace=options.connection.namespace or "",
                born_host=options.connection.client_ip or local_ip(),
                epoch_offset=time.time() - time.monotonic(),
            )
        else:
            batcher = RemotingBatcher(options, partition_id=partition_id, queues_of=queues_of, unique_ids=unique_ids)
        rate = task_rate(options)
        if rate is not None:
            batcher.max_rows = min(batcher.max_rows, largest_batch(rate))
        inner = options.batch_type == "inner" and not options.over_grpc
        batcher.check_keys = KeyCheck(
            self._keys_required_in_batches if inner else self._keys_required, inner_batches=inner
        )
        if not options.over_grpc:
            batcher.check_rows = self._check_timers
        batcher.half_properties = self._rules.half_properties
        return batcher

    def _keys_required(self, topics: Sequence[str]) -> Mapping[str, bool | None]:
        """Return whether rows of each topic need a key, None if unknown; raises as `RouteFinder.look_up`."""
        routes = self._routes
        if self._options.over_grpc:
            return {}
        infos = {topic: routes.look_up(topic) for topic in topics}
        configs = routes.instance.topic_configs.look_up({info.topic: info.route for info in infos.values()})
        # A topic that does not exist is created with default attributes.
        return {topic: not info.template and configs[info.topic].keys_required for topic, info in infos.items()}

    def _keys_required_in_batches(self, topics: Sequence[str]) -> Mapping[str, bool | None]:
        """Return `_keys_required` for inner batches, and check the stores of new topics; raises as `check_stores`."""
        required = self._keys_required(topics)
        for topic in set(topics) - self._inner:
            check_stores(topic, *self._look_up(topic), self._store_of)
            self._inner.add(topic)
        return required

    def _check_timers(self, rows: pa.RecordBatch) -> None:
        """Check the brokers of rows with a time of delivery; raises as `RouteFinder.look_up` and `check_timers`."""
        for topic in _delayed_topics(rows, self._options) - self._timed:
            info, configs = self._look_up(topic)
            check_timers(rows.schema, topic, self._routes.instance.topic_configs.old_brokers(configs, info.route))
            self._timed.add(topic)

    def _look_up(self, topic: str) -> tuple[TopicPublishInfo, TopicConfigs]:
        """Return the route of a topic and its configurations; raises as `RouteFinder.look_up`."""
        info = self._routes.look_up(topic)
        return info, self._routes.instance.topic_configs.look_up({info.topic: info.route})[info.topic]


def _delayed_topics(rows: pa.RecordBatch, options: SinkOptions) -> set[str]:
    """Return the topics of rows with a time of delivery."""
    topics: set[str] = set()
    for name in timers(rows.schema):
        delayed = pc.is_valid(rows[name])
        if options.topic is None:
            topics.update(distinct_texts(filtered(rows["topic"], delayed)))
        elif pc.any(delayed).as_py():
            topics.add(options.topic)
    # Other rows are invalid.
    return {name for name in topics if topic_rule(name, options.connection.wire_namespace) is None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SendContext:
    """What the tasks of a write share in one process. The caller registers and unregisters the producer group."""

    options: SinkOptions
    instance: ClientInstance
    queues: Sequence[MessageQueue] | None = None  # Those of an ordered write
    servers_reached: bool = False  # As of `RouteFinder`
    open_trace_sender: Callable[[], contextlib.AbstractContextManager[SendTrace]] | None = None  # For ``enable_trace``


def write_rows(
    context: SendContext,
    recorder: Recorder,
    batches: Iterator[pa.RecordBatch],
    write_id: str,
    rules: SendRules = AT_LEAST_ONCE,
) -> None:
    """Send every row of `batches`; return when every row is acknowledged (with ``sendMode=oneway``: written).

    The schema has passed `check_schema`. See `RowBatchers` for `write_id`. Raises as `BatchSender.write`.
    """
    options, instance = context.options, context.instance
    observers: list[OnStored] = []
    with contextlib.ExitStack() as stack:
        if options.enable_trace:
            assert context.open_trace_sender is not None
            masters = instance.routes.masters
            send = stack.enter_context(context.open_trace_sender())
            tracer = BatchTracer(options, lambda broker_name: masters().get(broker_name, ""), send)
            observers.append(stack.enter_context(tracer).append)
        if options.recall_path is not None:
            handles = RecallHandles(options.recall_path, recorder.partition_id)
            observers.append(stack.enter_context(handles).append)

        on_stored = partial(_tell_all, observers) if observers else None
        routes = RouteFinder(
            options,
            instance,
            fixed_queues=context.queues,
            queue_nums=rules.queue_nums,
            servers_reached=context.servers_reached,
        )
        open_sender = rules.open_sender or (OnewaySender if options.send_mode == "oneway" else BatchSender)
        sender = open_sender(routes, recorder, max_rate_per_second=task_rate(options), on_stored=on_stored)
        source = RowBatchers(routes, recorder, write_id, rules).source()
        sender.write(batches, JoiningBatcher(source, options.topic))


def _tell_all(observers: Sequence[OnStored], pending: PendingBatch, outcome: SendOutcome) -> None:
    for observe in observers:
        observe(pending, outcome)
