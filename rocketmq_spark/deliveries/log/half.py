"""A half message, and how many of them a manifest in the decision log has."""

from __future__ import annotations

from typing import Final, NamedTuple

from rocketmq_spark.model.message import MessageQueue

ROWS_PER_MANIFEST: Final = 100_000
"""A manifest of 2 MB: a broker accepts messages up to 4 MiB."""

MAX_ROWS: Final = 2**28
"""The most rows of a write. A reader holds 20 bytes of each."""


class Half(NamedTuple):
    """One half message, for requests about it."""

    queue: MessageQueue  # The queue that the committed message goes to
    commit_log_offset: int
    queue_offset: int
    born_timestamp: int = 0  # Epoch milliseconds, by the clock of its task; 0 if unknown


def manifests_for(rows: int) -> int:
    """Return the number of manifests that `rows` rows need."""
    return -(-rows // ROWS_PER_MANIFEST)
