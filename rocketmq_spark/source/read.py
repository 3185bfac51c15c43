"""Pulls and decodes the offset ranges of one task.

An offset without a row is reported as missing: an error, or with ``failOnDataLoss=false`` a warning. This does not
apply to messages that a filter rejects, that compaction removed, or that cannot be read (``onUnreadable``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import pyarrow as pa

from rocketmq_spark.arrow.columns import Ints, to_numpy
from rocketmq_spark.arrow.decode import OnUnreadable, batches_of, fail
from rocketmq_spark.arrow.read_columns import arrow_schema_of
from rocketmq_spark.arrow.stored import missing_offsets
from rocketmq_spark.model.message_ext import Pulled, utc
from rocketmq_spark.model.names import trim
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.protocol.remoting.unwrap import Unreadable
from rocketmq_spark.source.broker_choice import BrokerChoice
from rocketmq_spark.source.plan import ReadPlan, reading_transport
from rocketmq_spark.source.puller import Puller
from rocketmq_spark.source.ranges import Gaps, OffsetRange, lost
from rocketmq_spark.source.time_search import stored_records
from rocketmq_spark.source.topic_routes import TopicRoutes
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from rocketmq_spark.transport.runtime import PROCESS, Runtime

logger = logging.getLogger("rocketmq_spark.source")

# A record batch is made of about this many messages, as Spark's own, or bytes. The second bounds a task's memory.
_ROWS: Final = 10_000
_BYTES: Final = 4 * 1024 * 1024
# Seconds from one warning of skipped messages to the next.
_WARNING_INTERVAL: Final = 1.0
_NONE: Final = np.empty(0, np.int64)
_OFFSET: Final = arrow_schema_of(["queueOffset"]).field(0)


def read_rows(
    options: SourceOptions, plan: ReadPlan, schema: pa.Schema, on_unreadable: OnUnreadable = fail
) -> Iterator[pa.RecordBatch]:
    """Yield every message of the plan's ranges that matches the filter.

    Raises as `Puller.pull` and `decoded`, and for an unreadable message unless `on_unreadable` returns.
    """
    with contextlib.closing(reading_transport(options, polled=True)) as transport:
        yield from rows_over(transport, options, plan, schema, on_unreadable)


def rows_over(
    transport: RemotingTransport,
    options: SourceOptions,
    plan: ReadPlan,
    schema: pa.Schema,
    on_unreadable: OnUnreadable,
    runtime: Runtime = PROCESS,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `read_rows`, which come over this transport."""
    pulled_with = replace(options, sub_expression="*") if plan.tasks_filter else options
    # The transport's clock excludes the time that Spark spends between two batches.
    brokers = BrokerChoice(TopicRoutes(pulled_with, transport, transport.clock, dict(plan.routes), runtime))
    puller = Puller(pulled_with, transport, brokers, transport.clock)
    yield from decoded(options, puller.pull(plan.ranges), schema, on_unreadable)
    _compare_last(options, plan, transport, puller)


def _compare_last(options: SourceOptions, plan: ReadPlan, transport: RemotingTransport, read_by: Puller) -> None:
    """Report the queues that have another last message than when the read was planned.

    A log only grows, so a queue with its last planned message has not been replaced before. A message that has expired
    meanwhile is not compared. A slave may still have what its master has replaced before it answered.
    """
    unfiltered = replace(options, sub_expression="*", filter_type="TAG", pull_batch_size=1)
    puller = Puller(unfiltered, transport, read_by.brokers, transport.clock, trusted=read_by.of_masters)
    for pulled in puller.pull([OffsetRange(queue, end - 1, end) for queue, (end, _) in plan.lasts.items()]):
        planned = plan.lasts[pulled.queue][1]
        for record in stored_records(pulled.body):
            if record.start <= pulled.start < record.end and 0 <= record.time != planned:
                lost(
                    options,
                    f"queue {pulled.queue} has another message at offset {pulled.start} than the query has planned to "
                    f"read: it was stored at {utc(record.time)}, and the planned one at {utc(planned)}. The topic was "
                    "deleted and created again, or its broker lost messages",
                )


def decoded(
    options: SourceOptions, pulls: Iterable[Pulled], schema: pa.Schema, on_unreadable: OnUnreadable = fail
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of pulls that match the filter of `options`; the filter of the pulls may let pass more.

    Raises a DataLossError for gaps, with ``failOnDataLoss``.
    """
    tags = None
    if options.filter_type == "TAG" and options.sub_expression != "*":
        # Brokers compare hashes of tags (docs/internals/reads.md#pulls).
        tags = frozenset(filter(None, map(trim, options.sub_expression.split("||"))))
    gaps, with_offsets = Gaps(options), schema
    if _OFFSET.name not in schema.names:
        with_offsets = schema.append(_OFFSET)
    for group in grouped(pulls, _BYTES, _ROWS):
        offsets: list[Ints] = []
        if bodies := [pull for pull in group if pull.body]:
            for batch in batches_of(bodies, with_offsets, tags, on_unreadable):
                offsets.append(to_numpy(batch.column(_OFFSET.name)))
                yield pa.RecordBatch.from_arrays(batch.columns[: len(schema)], schema=schema)
        # In most plain reads the offsets of rows prove that no message is missing, so answers need no check.
        if tags is not None or not _have_each_offset(offsets, group):
            for pull in group:
                if pull.contiguous:
                    for start, end in missing_offsets(pull):
                        gaps.add(pull.queue, start, end)
        gaps.report({pull.queue: pull.end for pull in group})
    gaps.report()


def _have_each_offset(offsets: Sequence[Ints], pulls: Sequence[Pulled]) -> bool:
    """Return whether rows have each offset of pulls once, in order. A damaged queue may return a message twice."""
    # First the numbers, because a pull without messages may have any number of offsets.
    if sum(map(len, offsets)) != sum(pull.end - pull.start for pull in pulls):
        return False
    due = (np.arange(pull.start, pull.end) for pull in pulls)
    return np.array_equal(np.concatenate([_NONE, *offsets]), np.concatenate([_NONE, *due]))


def grouped(pulls: Iterable[Pulled], most_bytes: int, most_offsets: float = math.inf) -> Iterator[list[Pulled]]:
    """Yield pulls in groups that are decoded together: decoding has a fixed cost. A group ends at one of the limits."""
    group: list[Pulled] = []
    offsets = nbytes = 0
    for pulled in pulls:
        group.append(pulled)
        offsets += pulled.end - pulled.start
        nbytes += len(pulled.body)
        if offsets >= most_offsets or nbytes >= most_bytes:
            yield group
            group, offsets, nbytes = [], 0, 0
    if group:
        yield group


@dataclass(slots=True)
class SkippedMessages:
    """Counts the unreadable messages that one task leaves out; at most one warning a second names the newest."""

    clock: Callable[[], float] = time.monotonic
    by_topic: Counter[str] = field(default_factory=Counter)
    _warned_at: float = -math.inf
    _newest: Unreadable | None = None

    def policy(self, options: SourceOptions) -> OnUnreadable:
        """Return what happens to an unreadable message by ``onUnreadable``."""
        policies: dict[str, OnUnreadable] = {"fail": fail, "skip": self.skip, "raw": lambda _: True}
        return policies[options.on_unreadable]

    def skip(self, message: Unreadable) -> bool:
        """Count a message, and return False, so that no row is made."""
        self.by_topic[message.queue.topic] += message.end - message.start
        self._newest = message
        if self.clock() - self._warned_at >= _WARNING_INTERVAL:
            self.close()
        return False

    def close(self) -> None:
        """Log the messages skipped since the last warning. Idempotent."""
        if self._newest is not None:
            logger.warning(
                "onUnreadable=skip: this task has left out %d messages so far; the newest: %s",
                *(self.by_topic.total(), self._newest),
            )
            self._newest, self._warned_at = None, self.clock()
