"""The messages of offset ranges to record batches: where puller and decoder meet.

    OffsetRange -> Puller -> Pulled -> decode -> Arrow record batch

Rule 1: nothing is decided here; the options say what is joined.
Rule 2: every offset of an unfiltered range becomes a row or is reported as missing.

Follows design.md section 8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa

from rocketmq_spark.arrow.decode import OnUnreadable, batches_of, fail, missing_offsets
from rocketmq_spark.client.connect import new_transport
from rocketmq_spark.consumer.data_loss import Gaps
from rocketmq_spark.consumer.puller import Puller
from rocketmq_spark.consumer.ranges import OffsetRange
from rocketmq_spark.consumer.topic_queues import TopicQueues
from rocketmq_spark.pull import Pulled
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.route_data import TopicRouteData
from rocketmq_spark.transport.remoting import RemotingTransport

# A record batch is made of so many messages or bytes, whichever come first: as many as Spark's own, and few enough
# bytes that a task's memory does not depend on what its messages are.
_ROWS: Final = 10_000
_BYTES: Final = 4 * 1024 * 1024
# What Java's String.trim, so a broker, takes off a tag's ends.
_TRIMMED: Final = "".join(map(chr, range(0x21)))


def read_rows(
    options: ReaderOptions,
    ranges: Sequence[OffsetRange],
    schema: pa.Schema,
    routes: Mapping[str, TopicRouteData] | None = None,
    *,
    filters_here: bool = False,
    on_unreadable: OnUnreadable = fail,
) -> Iterator[pa.RecordBatch]:
    """Yield every message of the ranges that the filter lets through.

    Parameters
    ----------
    options : ReaderOptions
    ranges : sequence of OffsetRange
        Each of another queue.
    schema : pyarrow.Schema
        The columns wanted.
    routes : mapping of str to TopicRouteData, optional
        Of the topics, as the driver knows them.
    filters_here : bool, default False
        Pull everything, and look for the tags of ``subExpression`` here alone.
    on_unreadable : callable, default `fail`
        Called for each unreadable message.

    Raises
    ------
    ReadError
        See `Puller.pull`.
    DataLossError
        Messages have expired, with ``failOnDataLoss``.
    RemotingCommandException
        A message is unreadable, unless `on_unreadable` returns.
    """
    with contextlib.closing(reading_transport(options, polled=True)) as transport:
        asked = replace(options, sub_expression="*") if filters_here else options
        # The transport's clock: while Spark holds the generator, no broker is silent.
        queues = TopicQueues(asked, transport, transport.clock, routes)
        pulls = Puller(asked, transport, queues, transport.clock).pull(ranges)
        yield from decoded(options, pulls, schema, _tags(options), on_unreadable)


def decoded(
    options: ReaderOptions,
    pulls: Iterable[Pulled],
    schema: pa.Schema,
    tags: frozenset[str] | None,
    on_unreadable: OnUnreadable = fail,
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of pulls as record batches, and report the messages that are missing.

    Raises
    ------
    DataLossError
        Messages are missing, with ``failOnDataLoss``.
    """
    gaps = Gaps(options)
    waiting: list[Pulled] = []
    rows = nbytes = 0
    for pulled in pulls:
        waiting.append(pulled)
        rows += pulled.end - pulled.start
        nbytes += len(pulled.body)
        if rows >= _ROWS or nbytes >= _BYTES:
            yield from _flushed(waiting, schema, tags, gaps, on_unreadable)
            waiting, rows, nbytes = [], 0, 0
    if waiting:
        yield from _flushed(waiting, schema, tags, gaps, on_unreadable)
    gaps.report()


def _flushed(
    pulls: Sequence[Pulled], schema: pa.Schema, tags: frozenset[str] | None, gaps: Gaps, on_unreadable: OnUnreadable
) -> Iterator[pa.RecordBatch]:
    rows = 0
    if bodies := [pull for pull in pulls if pull.body]:
        for batch in batches_of(bodies, schema, tags, on_unreadable):
            rows += batch.num_rows
            yield batch
    # Whole batches of a plain read need no look at their offsets: the number of rows says that all are there.
    if tags is not None or rows != sum(pull.end - pull.start for pull in pulls):
        for pull in pulls:
            if pull.contiguous:
                for start, end in missing_offsets(pull):
                    gaps.add(pull.queue, start, end)
    gaps.report({pull.queue: pull.end for pull in pulls})


def reading_transport(options: ReaderOptions, *, polled: bool = False) -> RemotingTransport:
    """Return the transport of a read; nothing is opened before the first request."""
    transport = new_transport(options, "", polled=polled)
    assert isinstance(transport, RemotingTransport), "a read never goes over gRPC"
    return transport


def _tags(options: ReaderOptions) -> frozenset[str] | None:
    """Return the tags of a filter by tag, which a broker looks at by their hashes only."""
    if options.filter_type != "TAG" or options.sub_expression.strip() == "*":
        return None
    tags = (tag.strip(_TRIMMED) for tag in options.sub_expression.split("||"))
    return frozenset(filter(None, tags))
