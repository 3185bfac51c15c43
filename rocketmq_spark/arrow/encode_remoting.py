"""Batches of the remoting protocol: batch items, and the little that a batch's header may carry.

Follows ``MessageBatch.generateFromList`` (spec/producer.md 3.8) and spec/remoting.md 6.4.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from rocketmq_spark.arrow.batcher import ArrowBatcher, Group
from rocketmq_spark.arrow.block import MessageBlock
from rocketmq_spark.arrow.columns import ByteColumn, Ints
from rocketmq_spark.arrow.items import encode_items
from rocketmq_spark.arrow.settings import BatchSettings
from rocketmq_spark.message import EncodedBatch
from rocketmq_spark.wire.records import unique_id

__all__ = ["BatchSettings", "RemotingBatcher"]

# All that the header of a batch may carry, beside the UNIQ_KEY that asks for an inner batch (spec/remoting.md 6.4:
# anything else there is refused or loses messages).
_NO_WAIT: Final = "WAIT\x01false\x02"


class RemotingBatcher(ArrowBatcher):
    """Fills batches for brokers; parameters as of `ArrowBatcher`."""

    def _encode_items(
        self,
        block: MessageBlock,
        start: int,
        stop: int,
        rows: Ints | None,
        first_id: int,
        packed: ByteColumn | None,
        now: float,  # noqa: ARG002 - a broker is told with each request when its messages were born
    ) -> tuple[memoryview, npt.NDArray[np.int64]]:
        return encode_items(block, start, stop, rows, self._ids, first_id, self._workspace, packed)

    def _batch(self, group: Group) -> EncodedBatch:
        properties = "" if group.key.wait_store_msg_ok else _NO_WAIT
        if self._settings.inner_batches:
            properties += f"UNIQ_KEY\x01{unique_id(self._ids.prefix, self._ids.take(1))}\x02"
        return EncodedBatch(
            group.key.topic,
            group.body,
            group.rows,
            group.nbytes,
            properties=properties,
            sys_flag=group.key.sys_flag,
        )
