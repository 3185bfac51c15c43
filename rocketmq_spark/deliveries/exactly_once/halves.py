"""The acknowledged half messages of a task or of a whole write, as columns.

A half message is known by its broker, its offset in the commit log, and its offset in the queue of half messages; an
END_TRANSACTION needs all three. A column has one number per row, because a write may have millions of rows.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import rocketmq_spark.model.properties as const
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.half import ROWS_PER_MANIFEST, Half
from rocketmq_spark.deliveries.log.records import Decision
from rocketmq_spark.errors import DeliveryError, MQClientException
from rocketmq_spark.model.message import MessageQueue, SendOutcome
from rocketmq_spark.model.message_ext import decode_message_id
from rocketmq_spark.model.properties import NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR
from rocketmq_spark.protocol.remoting.command import loads

# A half message in a manifest, 20 bytes: docs/internals/decision-log.md#manifests.
_COLUMNS: Final = "queue", "commit_log_offset", "queue_offset"
_ROW: Final = np.dtype([*zip(_COLUMNS, ("<u4", "<i8", "<i8"), strict=True)])


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """Half messages in the order of their acknowledgement. Arrays have one element per half message."""

    queues: tuple[MessageQueue, ...]
    codes: npt.NDArray[np.int32]  # Index of the half message's queue in `queues`
    commit_log_offsets: npt.NDArray[np.int64]
    queue_offsets: npt.NDArray[np.int64]
    # The half message of each broker that was born last, which is the last one that can be ended.
    youngest: tuple[Half, ...]
    # The half message with the smallest born time; None without half messages.
    oldest: Half | None

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, row: int) -> Half:
        return Half(self.queues[self.codes[row]], int(self.commit_log_offsets[row]), int(self.queue_offsets[row]))

    def to_bytes(self) -> bytes:
        """Return a line of JSON and the arrays, compressed with zstd: what a task gives its driver."""
        queues = [[queue.topic, queue.broker_name, queue.queue_id] for queue in self.queues]
        youngest = [_to_json(half) for half in self.youngest]
        head = json.dumps([len(self), queues, youngest, self.oldest and _to_json(self.oldest)])
        arrays = b"".join(array.tobytes() for array in (self.commit_log_offsets, self.queue_offsets, self.codes))
        return b"%b\n%b" % (head.encode(), pa.compress(arrays, "zstd", asbytes=True))

    @classmethod
    def from_bytes(cls, data: bytes) -> Halves:
        """Return what `to_bytes` wrote. Only for bytes of own tasks, because they are not checked."""
        head, _, compressed = data.partition(b"\n")
        rows, queues, youngest, oldest = loads(head)
        arrays = pa.decompress(compressed, rows * _ROW.itemsize, "zstd", asbytes=True)
        commit_log_offsets, queue_offsets = np.frombuffer(arrays, np.int64, 2 * rows).reshape(2, rows)
        codes = np.frombuffer(arrays, np.int32, rows, 2 * rows * 8)
        named = tuple(MessageQueue(*queue) for queue in queues)
        halves = tuple(map(_from_json, youngest))
        return cls(named, codes, commit_log_offsets, queue_offsets, halves, oldest and _from_json(oldest))

    def to_manifests(self) -> list[bytes]:
        """Return the half messages as the bodies of manifests. `youngest` and `oldest` are not in them."""
        rows = np.empty(len(self), _ROW)
        columns = self.codes, self.commit_log_offsets, self.queue_offsets
        for name, column in zip(_COLUMNS, columns, strict=True):
            rows[name] = column
        return [rows[at : at + ROWS_PER_MANIFEST].tobytes() for at in range(0, len(rows), ROWS_PER_MANIFEST)]

    @classmethod
    def from_manifests(
        cls, manifests: Iterable[bytes], queues: Collection[MessageQueue], rows: int, youngest: tuple[Half, ...]
    ) -> Halves:
        """Return what `to_manifests` wrote, without `oldest`; raise a ValueError if it is not valid.

        Every user who can write to the log can store manifests.
        """
        parts, missing = [np.empty(0, _ROW)], rows
        for manifest in manifests:
            count = min(missing, ROWS_PER_MANIFEST)
            if len(manifest) != count * _ROW.itemsize:
                raise ValueError(f"a manifest has {len(manifest)} bytes, {count * _ROW.itemsize} are expected")
            parts.append(np.frombuffer(manifest, _ROW))
            missing -= count
        if missing:
            raise ValueError(f"the manifests lack {missing} of {rows} rows")
        table = np.concatenate(parts)
        codes, commit_log_offsets, queue_offsets = (np.ascontiguousarray(table[name]) for name in _COLUMNS)
        if np.any(codes >= len(queues)) or np.any(commit_log_offsets < 0) or np.any(queue_offsets < 0):
            raise ValueError("a half message has an unknown queue or a negative offset")
        names = np.array([queue.broker_name for queue in queues], object)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        brokers = np.array([numbers[name] for name in names], np.int64)[codes]
        without_youngest = numbers.keys() - {half.queue.broker_name for half in youngest}
        if np.isin(brokers, [numbers[name] for name in without_youngest]).any():
            raise ValueError("a broker has half messages, and none of them is the youngest one")
        if _have_repeats(brokers, commit_log_offsets):
            raise ValueError("a half message is listed twice")
        return cls(tuple(queues), codes.astype(np.int32), commit_log_offsets, queue_offsets, youngest, None)

    def check_not_lost(self, write: str) -> None:
        """Raise a DeliveryError if a broker has lost some of the half messages, and later ones have their places.

        The places are in the commit log, or in the broker's only queue of half messages, which is in the same order.
        """
        numbers: dict[str, int] = {}
        names = [numbers.setdefault(queue.broker_name, len(numbers)) for queue in self.queues]
        brokers = np.array(names, np.int64)[self.codes]
        order = np.lexsort((self.queue_offsets, self.commit_log_offsets, brokers))
        columns = brokers, self.commit_log_offsets, self.queue_offsets
        next_broker, next_in_log, next_in_queue = (np.diff(column[order]) for column in columns)
        if ((next_broker == 0) & ((next_in_log == 0) | (next_in_queue <= 0))).any():
            raise DeliveryError(
                f"committing {write}: a broker has acknowledged a half message at an offset of an earlier one, so it "
                "has lost the earlier one (a power failure with flushDiskType=ASYNC_FLUSH, or a slave that lacked it "
                "became the master). Neither of them is committed. Run the job again"
            )

    def select(self, rows: npt.NDArray[np.intp]) -> Halves:
        """Return some of the half messages. `youngest` and `oldest` stay those of all."""
        return replace(
            self,
            codes=self.codes[rows],
            commit_log_offsets=self.commit_log_offsets[rows],
            queue_offsets=self.queue_offsets[rows],
        )


def _have_repeats(brokers: npt.NDArray[np.int64], commit_log_offsets: npt.NDArray[np.int64]) -> bool:
    order = np.lexsort((commit_log_offsets, brokers))
    same = (np.diff(commit_log_offsets[order]) == 0) & (np.diff(brokers[order]) == 0)
    return bool(same.any())


def concat(parts: Sequence[Halves]) -> Halves:
    """Return the half messages of all parts."""
    numbers: dict[MessageQueue, int] = {}
    codes = [np.empty(0, np.int32)]
    for part in parts:
        own = np.array([numbers.setdefault(queue, len(numbers)) for queue in part.queues], np.int32)
        codes.append(own[part.codes] if len(part) else part.codes)
    empty = np.empty(0, np.int64)
    return Halves(
        tuple(numbers),
        np.concatenate(codes),
        np.concatenate([empty, *(part.commit_log_offsets for part in parts)]),
        np.concatenate([empty, *(part.queue_offsets for part in parts)]),
        youngest_of(half for part in parts for half in part.youngest),
        min((part.oldest for part in parts if part.oldest), key=lambda half: half.born_timestamp, default=None),
    )


def youngest_of(halves: Iterable[Half]) -> tuple[Half, ...]:
    """Return the half message of each broker that was born last."""
    youngest: dict[str, Half] = {}
    for half in halves:
        broker = half.queue.broker_name
        if broker not in youngest or half.born_timestamp > youngest[broker].born_timestamp:
            youngest[broker] = half
    return tuple(youngest.values())


@dataclass(slots=True, eq=False)
class HalfCollector:
    """Collects the half messages of a task as they are acknowledged: 20 bytes for each."""

    _queues: dict[MessageQueue, int] = field(default_factory=dict)
    _codes: array[int] = field(default_factory=lambda: array("i"))
    _commit_log_offsets: array[int] = field(default_factory=lambda: array("q"))
    _queue_offsets: array[int] = field(default_factory=lambda: array("q"))
    _youngest: dict[str, Half] = field(default_factory=dict)
    _oldest: Half | None = None

    def append(self, queue: MessageQueue, born: int, outcome: SendOutcome) -> None:
        """Add a half message; raise an MQClientException if the broker's acknowledgement lacks an offset."""
        if outcome.queue_offset < 0:
            raise MQClientException(f"{queue}: the acknowledgement of a half message has offset {outcome.queue_offset}")
        _, commit_log_offset = decode_message_id(outcome.offset_msg_id)
        self._codes.append(self._queues.setdefault(queue, len(self._queues)))
        self._commit_log_offsets.append(commit_log_offset)
        self._queue_offsets.append(outcome.queue_offset)
        youngest = self._youngest.get(queue.broker_name)
        if youngest is None or born > youngest.born_timestamp:
            self._youngest[queue.broker_name] = Half(queue, commit_log_offset, outcome.queue_offset, born)
        if self._oldest is None or born < self._oldest.born_timestamp:
            self._oldest = Half(queue, commit_log_offset, outcome.queue_offset, born)

    def halves(self) -> Halves:
        """Return all half messages so far."""
        return Halves(
            tuple(self._queues),
            np.array(self._codes, np.int32),
            np.array(self._commit_log_offsets, np.int64),
            np.array(self._queue_offsets, np.int64),
            tuple(self._youngest.values()),
            self._oldest,
        )


def half_properties(group: str, timeout_ms: int) -> str:
    """Return the properties that make a message a half message, which can be ended until `timeout_ms` after its birth.

    They follow the message's other properties. Brokers round times down to seconds.
    """
    properties = {
        const.TRAN_MSG: "true",
        const.PGROUP: group,
        const.CHECK_IMMUNITY_TIME_IN_SECONDS: str(-(-timeout_ms // 1000)),
    }
    return "".join(f"{name}{NAME_VALUE_SEPARATOR}{value}{PROPERTY_SEPARATOR}" for name, value in properties.items())


def read_halves(brokers: Brokers, log: DecisionLog, decision: Decision) -> Halves:
    """Return the half messages of a decision, without `oldest`.

    Raises a DataLossError if a manifest is deleted, and an MQClientException if they are not valid.
    """
    home = log.require_home()
    manifests = log.records.read_manifests(brokers, decision, home)
    try:
        return Halves.from_manifests(manifests, tuple(decision.start_offsets), decision.rows, decision.youngest)
    except ValueError as exc:
        raise MQClientException(
            f"completing {decision.write}: the manifests of its decision at offset {decision.offset} of queue {home} "
            f"are not valid: {exc}. No row of it is committed or copied. Find out which program writes to topic "
            f"{log.topic}, and use another transactionTopic or transactionalId"
        ) from exc


def _to_json(half: Half) -> list[Any]:
    return [half.queue.topic, half.queue.broker_name, half.queue.queue_id, *half[1:]]


def _from_json(values: Sequence[Any]) -> Half:
    return Half(MessageQueue(*values[:3]), *values[3:])
