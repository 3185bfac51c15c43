"""A user's own choice of queues, for whole record batches: ``queueSelector=module:Class``.

Rule 1: the class is imported on the driver, so that a missing one fails before any task, and made once per task.
Rule 2: what it answers is checked: a wrong queue would be somebody else's rows out of order.

Follows ``MessageQueueSelector.java``, for rows by the thousand (spec/producer.md 11.2; checklist 118).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.user_class import load_class, make


class RowSelector(Protocol):
    """What a class for ``queueSelector`` looks like; it is made without arguments."""

    def select(self, queues: Sequence[MessageQueue], rows: pa.RecordBatch) -> Any:
        """Return an index into `queues` for each of `rows`, -1 or null for any queue.

        Parameters
        ----------
        queues : sequence of MessageQueue
            The writable queues of one topic, at least one.
        rows : pyarrow.RecordBatch
            Valid rows for that topic, at least one, with all columns of the write.

        Returns
        -------
        pyarrow, numpy or other array of whole numbers
        """
        ...


def check_selector(name: str) -> None:
    """Refuse a class that can't be had.

    Raises
    ------
    OptionError
    """
    load_class("queueSelector", name, "select")


class CustomSelector:
    """Asks a user's selector, and checks what it answers.

    Parameters
    ----------
    name : str
        ``module:Class``, as the option has it.

    Raises
    ------
    OptionError
        The class can't be imported or made.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._selector: RowSelector = make("queueSelector", name, "select")

    def select(self, queues: Sequence[MessageQueue], rows: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Return an index into `queues` for each of `rows`, -1 for any.

        Raises
        ------
        MQClientException
            The selector failed, or did not answer one index of a queue for each row.
        """
        what = f"queueSelector={self._name}, choosing among {len(queues)} queues of {queues[0].topic}"
        try:
            answer = self._selector.select(queues, rows)
            array = answer if isinstance(answer, (pa.Array, pa.ChunkedArray)) else pa.array(answer)
        except Exception as exc:
            raise MQClientException(f"{what} for {len(rows)} rows failed: {exc!r}") from exc
        if len(array) != len(rows) or not (pa.types.is_integer(array.type) or pa.types.is_null(array.type)):
            raise MQClientException(
                f"{what}: it returned {len(array)} values of type {array.type}; return {len(rows)} whole numbers, one "
                "a row"
            )
        chosen: npt.NDArray[np.int64] = array.cast(pa.int64()).fill_null(-1).to_numpy()
        wrong = np.flatnonzero((chosen < -1) | (chosen >= len(queues)))
        if len(wrong):
            raise MQClientException(
                f"{what}: it returned {chosen[wrong[0]]} for row {wrong[0]} of {len(rows)}; allowed is 0 to "
                f"{len(queues) - 1}, and -1 or null for any queue"
            )
        return chosen
