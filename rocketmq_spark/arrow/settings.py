"""What a write's options say about batches, parsed already: this module checks nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rocketmq_spark.arrow.unique_id import MessageIds, UniqueIds
from rocketmq_spark.compression import DEFAULT_LEVEL, CompressionType
from rocketmq_spark.message import Encoding
from rocketmq_spark.wire.records import MAX_BATCH_ROWS, MAX_BODY

# Kept free of a batch that a proxy is to make: it adds properties to each message before the broker's 4 MiB are
# measured (spec/grpc.md 5.3).
_PROXY_ROOM: Final = 512 * 1024


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """What a write's options say about batches.

    Parameters
    ----------
    topic : str or None, default None
        The option ``topic``: it wins over the column.
    tags : str or None, default None
        The option ``tags``: for rows whose own tag is null.
    max_message_size : int, default 4 MiB
        Bytes of one message's body, and of a whole batch's, if that is less than 4 MiB.
    batch_bytes : int, default 1 MiB
        A batch is closed before it passes this size, unless one row alone does.
    batching : bool, default True
        False: every row goes as a single message.
    queue_selector : str or None, default None
        The option ``queueSelector``. None: by hash where there is a shardingKey, else unbound.
    max_pending_bytes : int, default 32 MiB
        All batches that are being filled, together.
    ordered : bool, default False
        Refuse rows without a shardingKey; of one queue's rows, none overtakes another.
    max_rows : int, default 32,000
        Rows of one batch.
    inner_batches : bool, default False
        Let a topic of the type BatchCQ store each batch as one record; nothing is compressed then.
    compress_type : CompressionType or None, default None
        How long bodies are compressed, one by one; None: not at all.
    compress_over : int, default 4096
        Bodies of at least so many bytes are long.
    compress_level : int, default 5
    keep_row_id : bool, default False
        Keep a SPARK_ROW_ID among a row's own properties.
    encoding : Encoding, default REMOTING
        The protocol that rows are checked and batched for.
    """

    topic: str | None = None
    tags: str | None = None
    max_message_size: int = MAX_BODY
    batch_bytes: int = 1024 * 1024
    batching: bool = True
    queue_selector: str | None = None
    max_pending_bytes: int = 32 * 1024 * 1024
    ordered: bool = False
    max_rows: int = MAX_BATCH_ROWS
    inner_batches: bool = False
    compress_type: CompressionType | None = None
    compress_over: int = 4096
    compress_level: int = DEFAULT_LEVEL
    keep_row_id: bool = False
    encoding: Encoding = Encoding.REMOTING

    @property
    def over_grpc(self) -> bool:
        """True if a proxy takes the rows."""
        return self.encoding is Encoding.GRPC

    @property
    def item_limit(self) -> int:
        """Bytes of the largest batch, so also of the largest item: what is larger goes as a single message."""
        return min(MAX_BODY - _PROXY_ROOM if self.over_grpc else MAX_BODY, self.max_message_size)

    @property
    def unique_id_length(self) -> int:
        """Digits of a message's id."""
        return MessageIds.LENGTH if self.over_grpc else UniqueIds.LENGTH
