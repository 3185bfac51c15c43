"""Saves the recall handles of the rows that a task stores with a time of delivery (option ``recallPath``).

With its handle, `Producer.recall_message` takes a row back before its delivery.
"""

from __future__ import annotations

import uuid
from typing import Final

import pyarrow as pa

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.model.message import SendOutcome
from rocketmq_spark.options.references import PATH, allowed
from rocketmq_spark.protocol.batches import lone_message
from rocketmq_spark.sink.in_flight import PendingBatch

_SCHEMA: Final = pa.schema(
    {"topic": pa.string(), "keys": pa.string(), "msgId": pa.string(), "recallHandle": pa.string()}
)
# The most handles of a file. A handle has about 200 bytes.
_ROWS: Final = 10_000


class RecallHandles:
    """A context manager around a task, which saves its handles as Parquet files in the folder `path`.

    If the task fails, the handles of its stored rows are saved all the same, because brokers will deliver these rows.
    Raises an MQClientException if the folder is not usable.
    """

    def __init__(self, path: str, partition_id: int, rows_per_file: int = _ROWS) -> None:
        self._path = path
        self._rows_per_file = rows_per_file
        self._prefix = f"part-{partition_id}-{uuid.uuid4().hex}"
        self._files = 0
        self._rows: list[dict[str, str | None]] = []

    def __enter__(self) -> RecallHandles:
        from pyarrow import fs

        allowed("recallPath", f"{PATH}{self._path}", "(not shown)")
        try:
            self._filesystem, self._folder = fs.FileSystem.from_uri(self._path)
            self._filesystem.create_dir(self._folder)
        except (OSError, pa.ArrowException) as exc:
            raise self._unusable(exc) from exc
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows:
            self._save()

    def append(self, pending: PendingBatch, outcome: SendOutcome) -> None:
        """Take the handle of a stored row, if it has one."""
        message = lone_message(pending.batch) if outcome.recall_handle else None
        if message is None:
            return
        row = {"topic": message.topic, "keys": message.keys, "msgId": message.unique_id}
        self._rows.append({**row, "recallHandle": outcome.recall_handle})
        if len(self._rows) >= self._rows_per_file:
            self._save()

    def _save(self) -> None:
        from pyarrow import parquet

        name = f"{self._prefix}-{self._files}.parquet"
        # Spark ignores files whose names begin with a dot.
        hidden, place = (f"{self._folder}/{prefix}{name}" for prefix in (".", ""))
        try:
            parquet.write_table(pa.Table.from_pylist(self._rows, _SCHEMA), hidden, filesystem=self._filesystem)
            self._filesystem.move(hidden, place)
        except (OSError, pa.ArrowException) as exc:
            raise self._unusable(exc) from exc
        self._files += 1
        self._rows = []

    def _unusable(self, cause: Exception) -> MQClientException:
        return MQClientException(
            f"saving the recall handles of stored rows in recallPath={self._path}: {cause}; give a folder that every "
            "executor can write"
        )
