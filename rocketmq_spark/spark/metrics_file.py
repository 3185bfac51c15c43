"""What a commit leaves at ``metricsPath``: its figures, as one line of JSON.

    {"write_id": ..., "batch_id": ..., "save_id": ..., "time": "2026-01-31T12:00:00.000+00:00", "tasks": 4,
     "brokers": {name: {...}}, "skipped": 0, "skipped_by_rule": {}, "dead_lettered": 0, "dead_lettered_by_rule": {}}

Rule 1: never raises: the rows are stored, and figures are not worth a failed write. What goes wrong is a warning.
Rule 2: a local path is a file, and gets one more line. Object stores can't append, nor can every HDFS: elsewhere the
        path is a folder, and gets a file for each write and micro-batch, which a second commit of the same replaces.
        Write id and batch id are those of the metrics. Within ``foreachBatch`` several writes have them in common: what
        tells these apart is the UUID that each has drawn (``save_id``; a stream draws none).
Rule 3: per broker there is what `WriteSummary.to_dict` has, as far as commit messages carry it: no queues, no reasons.

Follows design.md section 6.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import WriterCommitMessage

from rocketmq_spark.spark.report import CommitMessage, summarise

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

logger = logging.getLogger("rocketmq_spark.spark")

_NOT_CARRIED: Final = ("queues", "retries_by_reason", "failures_by_code")


def record_commit(
    path: str,
    messages: Sequence[WriterCommitMessage | None],
    write_id: str,
    batch_id: int | None,
    *,
    now: float,
    resolve: Callable[[str], tuple[FileSystem, str]] | None = None,
) -> None:
    """Leave one commit's figures at `path`.

    Parameters
    ----------
    path : str
        Absolute, or a URI that `pyarrow.fs` resolves.
    messages : sequence of CommitMessage or None
    write_id : str
        What the write has drawn itself; empty in a stream.
    batch_id : int or None
        The micro-batch; None outside of one.
    now : float
        Epoch seconds.
    resolve : callable, default pyarrow.fs.FileSystem.from_uri
        File system and path of a URI.
    """
    try:
        line = _line(messages, write_id, batch_id, now)
        _leave(path, line, resolve)
    except Exception as exc:
        # Whatever a file system may raise: pyarrow hands through what its libraries make of a network.
        logger.warning(
            "the figures of a commit could not be left at metricsPath %s: %s: %s (its rows are stored; metrics and log "
            "have the figures)", path, type(exc).__name__, exc,
        )  # fmt: skip


def _line(
    messages: Sequence[WriterCommitMessage | None], write_id: str, batch_id: int | None, now: float
) -> dict[str, Any]:
    finished = [message for message in messages if isinstance(message, CommitMessage)]
    summary = summarise(finished)
    return {
        "write_id": finished[0].write_id if finished else write_id,
        "batch_id": -1 if batch_id is None else batch_id,
        "save_id": write_id or None,
        "time": datetime.fromtimestamp(now, timezone.utc).isoformat(timespec="milliseconds"),
        "tasks": len(finished),
        "brokers": {
            broker: {name: value for name, value in numbers.items() if name not in _NOT_CARRIED}
            for broker, numbers in summary.to_dict().items()
        },
        **summary.invalid_rows(),
    }


def _leave(path: str, line: dict[str, Any], resolve: Callable[[str], tuple[FileSystem, str]] | None) -> None:
    from pyarrow import fs

    filesystem, place = (resolve or fs.FileSystem.from_uri)(path)
    text = (json.dumps(line) + "\n").encode()
    if isinstance(filesystem, fs.LocalFileSystem):
        filesystem.create_dir(place.rpartition("/")[0] or "/", recursive=True)
        # One write of one line: two commits at once leave two whole lines.
        with filesystem.open_append_stream(place, compression=None) as stream:
            stream.write(text)
        return
    name = f"{line['write_id'] or 'unknown'}-{line['batch_id']}"
    if line["save_id"] not in (None, line["write_id"]):
        name += f"-{line['save_id']}"
    with filesystem.open_output_stream(f"{place.rstrip('/')}/{name}.json", compression=None) as stream:
        stream.write(text)
