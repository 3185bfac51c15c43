"""Classes that a program's options name, and that Spark's workers import."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pyarrow as pa

from rocketmq_spark import Credentials, MessageQueue


class Vault:
    """Returns the credentials in environment variables."""

    def credentials(self) -> Credentials:
        return Credentials(os.environ["MQ_USER"], os.environ["MQ_SECRET"], os.environ["MQ_TOKEN"])


class Sealed:
    """Knows nobody."""

    def credentials(self) -> Credentials:
        raise PermissionError("the vault is sealed")


class Nonsense:
    """Gives the secret where credentials are wanted."""

    def credentials(self) -> object:
        return os.environ["MQ_SECRET"], os.environ["MQ_TOKEN"]


class Selector:
    """Chooses no queue."""

    def select(self, queues: Sequence[MessageQueue], rows: pa.RecordBatch) -> list[int]:
        raise RuntimeError("no queue is good enough")
