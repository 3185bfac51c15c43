"""The batcher of one task: the options of a write, as the encoder takes them, and what becomes of invalid rows.

Rule 1: rows that are left out or diverted are counted where everything else of the task is, so that the driver hears
        of each.

Follows design.md section 7.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rocketmq_spark.arrow.batcher import ArrowBatcher
from rocketmq_spark.arrow.custom_selector import CustomSelector
from rocketmq_spark.arrow.dead_letter import DeadLetterBatcher, DeadLetters
from rocketmq_spark.arrow.encode_grpc import GrpcBatcher
from rocketmq_spark.arrow.encode_remoting import RemotingBatcher
from rocketmq_spark.arrow.invalid import InvalidRows
from rocketmq_spark.arrow.row_id import RowIds
from rocketmq_spark.arrow.settings import BatchSettings
from rocketmq_spark.arrow.unique_id import UniqueIds
from rocketmq_spark.arrow.validate_keys import KeyCheck, KeysRequired
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.options import SinkOptions
from rocketmq_spark.transport.local_address import local_ip

if TYPE_CHECKING:
    import pyarrow as pa

    from rocketmq_spark.producer.batch_sender import Batcher


def row_batcher(
    options: SinkOptions,
    settings: BatchSettings,
    recorder: Recorder,
    *,
    write_id: str,
    queues_of: Callable[[str], Sequence[MessageQueue]],
    keys_required: KeysRequired,
    unique_ids: UniqueIds,
) -> Batcher[pa.RecordBatch]:
    """Return what turns the rows of one partition into batches.

    Parameters
    ----------
    options : SinkOptions
    settings : BatchSettings
        Of the rows; a dead-letter topic has the same, but for its name and the choice of queues.
    recorder : Recorder
        Says which partition of which micro-batch this is, and counts invalid rows.
    write_id : str
        What the ids of rows begin with: the same for every attempt at the write, and for no other write.
    queues_of : callable
        The writable queues of a topic.
    keys_required : callable
        See `KeyCheck`.
    unique_ids : UniqueIds
        Of the protocol's make.
    """
    common: dict[str, Any] = {
        "partition_id": recorder.partition_id,
        "queues_of": queues_of,
        "unique_ids": unique_ids,
        "check_keys": KeyCheck(keys_required, inner_batches=settings.inner_batches),
    }
    batcher: Callable[..., ArrowBatcher] = partial(RemotingBatcher, **common)
    if options.over_grpc:
        batcher = partial(
            GrpcBatcher,
            **common,
            namespace=options.namespace or "",
            born_host=options.client_ip or local_ip(),
            epoch_offset=time.time() - time.monotonic(),
        )
    row_ids = None
    if options.row_id:
        columns = options.row_id if isinstance(options.row_id, tuple) else None
        row_ids = RowIds(write_id, recorder.batch_id, recorder.partition_id, columns)
    of_rows = partial(batcher, settings, row_ids=row_ids)
    if options.custom_selector is not None:
        of_rows = partial(of_rows, custom=CustomSelector(options.custom_selector))
    if options.on_error == "skip":
        return of_rows(on_invalid=lambda invalid: recorder.record_skipped(invalid.by_rule()))
    if options.dead_letter_topic is None:
        return of_rows()
    letters = DeadLetters(
        options.max_message_size, write_id, recorder.batch_id, over_grpc=options.over_grpc, tags=settings.tags
    )

    def divert(invalid: InvalidRows) -> None:
        recorder.record_dead_letters(invalid.by_rule())
        letters.take(invalid)

    dead = replace(settings, topic=options.dead_letter_topic, queue_selector="roundRobin", ordered=False)
    return DeadLetterBatcher(of_rows(on_invalid=divert), batcher(dead), letters)
