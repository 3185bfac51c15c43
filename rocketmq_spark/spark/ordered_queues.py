"""Remembers each broker's number of queues, so that keys of an ordered stream stay on their queues without the broker.

While a broker is missing from the route, the stream uses its remembered number. If the route lists the broker, its
number there wins. With an order configuration for the topic, neither counts. If the driver's Python process cannot use
the checkpoint, it keeps the numbers in its memory, otherwise in a file (docs/internals/sink.md#ordered-writes):

    <checkpointLocation>/rocketmq-queues-<topic>.json   {"broker-a": 4, "broker-b": 4}
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from rocketmq_spark.errors import RocketMQError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

logger = logging.getLogger("rocketmq_spark.spark")

# What `pyarrow.fs` raises.
_FILE_ERRORS: Final = (OSError, ValueError, NotImplementedError)

_IN_MEMORY: Final[dict[tuple[str | None, str], dict[str, int]]] = {}
# Checkpoints that cannot be used, and why: an object store that does not answer takes 7 s each time.
_UNUSABLE: Final[dict[str, str]] = {}


class QueueMemory:
    """How many queues of one topic (with its namespace) each broker is known to have had.

    `checkpoint` is the query's ``checkpointLocation``: an absolute path, or a URI that `pyarrow.fs` resolves.
    """

    def __init__(self, checkpoint: str | None, topic: str) -> None:
        self._checkpoint = checkpoint
        self._topic = topic
        self._name = f"rocketmq-queues-{quote(topic, safe='')}.json"
        # The file, for messages.
        self.place = f"{(checkpoint or 'checkpointLocation').rstrip('/')}/{self._name}"

    def load(self) -> dict[str, int]:
        """Return the number of queues by broker; empty if nothing is known yet. Raises an error for a broken file."""
        from pyarrow import fs

        reading = f"reading the queues of topic {self._topic} from {self.place}"
        try:
            filesystem, path = self._resolved()
        except _FILE_ERRORS as exc:
            self._warn(exc)
            return dict(_IN_MEMORY.get((self._checkpoint, self._topic), {}))
        try:
            if filesystem.get_file_info(path).type == fs.FileType.NotFound:
                return {}
            with filesystem.open_input_stream(path, compression=None) as stream:
                text = bytes(stream.read())
        except _FILE_ERRORS as exc:
            raise RocketMQError(
                f"{reading}: {exc}. Without this file, keys could move to other queues. Let the driver read it, or "
                "give the topic an order configuration (mqadmin updateOrderConf)"
            ) from exc
        try:
            numbers = json.loads(text)
        except ValueError:
            numbers = None
        if not isinstance(numbers, dict) or not all(type(number) is int and number >= 0 for number in numbers.values()):
            raise RocketMQError(
                f"{reading}: the file does not hold a number of queues for each broker; delete it while all brokers of "
                "the topic are up"
            )
        return numbers

    def save(self, numbers: Mapping[str, int]) -> None:
        """Keep the number of queues by broker. If the file cannot be written, log a warning and keep them in memory."""
        _IN_MEMORY[self._checkpoint, self._topic] = dict(numbers)
        try:
            filesystem, path = self._resolved()
            # A driver that dies while it writes leaves the old file.
            with filesystem.open_output_stream(f"{path}.new", compression=None) as stream:
                stream.write(json.dumps(dict(sorted(numbers.items()))).encode())
            filesystem.move(f"{path}.new", path)
        except _FILE_ERRORS as exc:
            self._warn(exc)

    def _resolved(self) -> tuple[FileSystem, str]:
        """Return the file system and the file's path."""
        filesystem, folder = _folder_of(self._checkpoint)
        return filesystem, f"{folder}/{self._name}"

    def _warn(self, why: Exception) -> None:
        if self._checkpoint is not None:
            _UNUSABLE[self._checkpoint] = str(why)
        _warn_once(
            f"ordered=true: the queues of topic {self._topic} cannot be saved in {self.place} ({why}). If a broker is "
            "down when the driver starts again, keys move to other queues. Set an order configuration for the topic "
            "(mqadmin updateOrderConf)"
        )


def query_of(checkpoint: str) -> str | None:
    """Return the id of the query that a ``checkpointLocation`` belongs to; None if this process cannot read it."""
    try:
        filesystem, folder = _folder_of(checkpoint)
        with filesystem.open_input_stream(f"{folder}/metadata", compression=None) as stream:
            query = json.loads(bytes(stream.read()))["id"]
    except (*_FILE_ERRORS, LookupError, TypeError) as exc:
        logger.debug("the query of checkpoint %s is unknown to the driver's Python process: %s", checkpoint, exc)
        return None
    return str(query)


def _folder_of(checkpoint: str | None) -> tuple[FileSystem, str]:
    """Return the file system and the path of a checkpoint; raises one of `_FILE_ERRORS`."""
    from pyarrow import fs

    if checkpoint is None:
        raise OSError("the option checkpointLocation is not set")
    if checkpoint in _UNUSABLE:
        raise OSError(_UNUSABLE[checkpoint])
    location = re.sub("^file:/+", "file:///", checkpoint)
    if location.startswith("gs:") and "?" not in location:
        # By default Google's client retries for 15 minutes.
        location += "?retry_limit_seconds=10"
    filesystem, folder = fs.FileSystem.from_uri(location)
    # Spark has made the folder. If it does not exist, the path belongs to another file system.
    if filesystem.get_file_info(folder).type != fs.FileType.Directory:
        raise OSError(f"Python finds no folder {folder}")
    return filesystem, folder.rstrip("/")


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)
