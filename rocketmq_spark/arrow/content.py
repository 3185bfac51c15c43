"""Keyed hashes of the contents of messages, by which a recovery recognises its rows (`ContentHash`).

A content is a set of strings: the body, the flag, and each property of the sender. Each string is hashed with keys that
a seed gives (`rocketmq_spark.arrow.numpy_hashes`). The hashes of a row's strings are added.

Without the seed a user can prepare no collision.

The hash does not depend on the order of properties, on compression, or on how rows are cut into record batches.
"""

from __future__ import annotations

import copy
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from rocketmq_spark.arrow.columns import ByteColumn, decimals
from rocketmq_spark.arrow.gather import Workspace
from rocketmq_spark.arrow.hashes import content_sums, stored_content
from rocketmq_spark.arrow.kernel import Kernel, default_kernel
from rocketmq_spark.arrow.model import MessageBlock, Property
from rocketmq_spark.arrow.numpy_hashes import KEYS, Hashes, Strings
from rocketmq_spark.model.hashes import NOT_CONTENT
from rocketmq_spark.model.properties import ATTEMPT, CARRIED, ROW_ID


@dataclass(frozen=True, slots=True)
class ContentHash:
    """A hash function for contents, drawn by a seed. The hashes of n rows have the shape (2, n).

    With `numbered`, the numbers of rows belong to their content. Only one thread at a time may use an instance.
    """

    numbered: bool = False
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    kernel: Kernel = field(default_factory=default_kernel, repr=False, compare=False)
    _keys: Hashes = field(init=False, repr=False, compare=False)
    _workspace: Workspace = field(default_factory=Workspace, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        data = hashlib.shake_256(self.seed).digest(KEYS * 8)
        object.__setattr__(self, "_keys", np.frombuffer(data, "<u8"))

    def for_thread(self) -> ContentHash:
        """Return the same hash function with memory of its own, for another thread."""
        own = copy.copy(self)
        object.__setattr__(own, "_workspace", Workspace())
        return own

    def of_block(self, block: MessageBlock, first_row: int) -> Hashes:
        """Return the hashes of the rows of a block; its first row has the number `first_row` in its partition."""
        properties = [prop for prop in block.properties if CARRIED[prop.name].hashed or prop.name == ROW_ID]
        if self.numbered:
            numbers = decimals(np.arange(first_row, first_row + block.rows))
            properties.append(Property(ATTEMPT, numbers, None, b"/"))
        return content_sums(
            self._sums, block.topics, block.topic_codes, properties, block.user_entries, block.body, block.flags
        )

    def of_stored(
        self, topic: str, attempts: ByteColumn, bodies: pa.Array, flags: pa.Array, properties: pa.Array
    ) -> Hashes:
        """Return the hashes of stored messages.

        `attempts` has what follows the token in `ATTEMPT`. `bodies` are decompressed. `properties` are maps.
        """
        numbers = [Property(ATTEMPT, attempts, attempts.valid)] if self.numbered else []
        content = stored_content(bodies, flags, properties, NOT_CONTENT)
        return content_sums(self._sums, [topic], None, numbers, *content)

    def _sums(self, columns: Sequence[Strings]) -> Hashes:
        return self.kernel.nh_sums(columns, self._workspace, self._keys)
