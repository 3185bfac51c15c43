"""Sends the rows of one partition, in its task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.sink import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from rocketmq_spark.routing.client_instance import ClientInstance
    from rocketmq_spark.sink.task import SendRules


class RouteLookup(NamedTuple):
    """The result of the driver's look-up for a write; `queues` are those of an ordered write."""

    queues: Sequence[MessageQueue] | None = None
    # A name server or proxy has answered. A task that reaches none then knows that they are down.
    servers_reached: bool = False
    # The error, if no server was reached and the look-up is left to the tasks.
    unreached: str = ""

    def right_address(self, batch_id: int) -> bool:
        """Return whether the addresses are right: after a first micro-batch they are, even if no server answers now."""
        return self.servers_reached or batch_id > 0


NO_LOOKUP = RouteLookup()


def open_instance(options: SinkOptions) -> AbstractContextManager[ClientInstance]:
    """Return the client instance of a write, see `rocketmq_spark.sink.routes.acquired`.

    A task without rows and the end of a plain write need none. They do not import the modules of connections (80 ms).
    """
    from rocketmq_spark.sink.routes import acquired

    return acquired(options)


def send_rows(
    options: SinkOptions,
    recorder: Recorder,
    lookup: RouteLookup,
    save_id: str,
    batches: Iterator[pa.RecordBatch],
    *,
    row_id_name: str = "",
    rules: SendRules | None = None,
) -> None:
    """Send the rows of a task; see `rocketmq_spark.deliveries.base.Send`."""
    from rocketmq_spark.sink.task import AT_LEAST_ONCE, SendContext, write_rows

    open_trace_sender = None
    if options.enable_trace:
        # Only tasks with message trace load the producer's modules.
        from rocketmq_spark.producer.service import batch_trace_sender

        open_trace_sender = partial(batch_trace_sender, options)
    with open_instance(options) as instance:
        context = SendContext(
            options=options,
            instance=instance,
            queues=lookup.queues,
            servers_reached=lookup.right_address(recorder.batch_id),
            open_trace_sender=open_trace_sender,
        )
        # Within foreachBatch the recorder has the query's id, which all writes of a micro-batch share.
        write_id = row_id_name or save_id or recorder.write_id
        write_rows(context, recorder, batches, write_id, rules or AT_LEAST_ONCE)


def name_micro_batch(error: RocketMQError, query_id: str, batch_id: int) -> None:
    """Begin the text of a task's error with the micro-batch, unless the text names it already.

    Spark's own error names only stage and task, whose numbers continue from batch to batch.
    """
    where = f"micro-batch {batch_id} of query {query_id}"
    if where not in str(error):
        error.args = (f"{where}: {error}", *error.args[1:])
