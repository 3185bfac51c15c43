"""Records of the decision log, and the one parser that reads them.

A record is a JSON object in a message. Every user who can write to the log's topic can store such a message. So `parse`
checks the type, range and size of each value, and raises nothing but the two errors of this module. The tables in
docs/internals/decision-log.md#records have the bounds.

A change of a field or a bound needs a new `VERSION`: readers that disagree about a record would lose or repeat rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, TypeAlias

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.log.half import MAX_ROWS, Half, manifests_for
from rocketmq_spark.deliveries.log.scan import UNKNOWN, Floor, Known
from rocketmq_spark.errors import escaped
from rocketmq_spark.model.message import Buffer, MessageQueue
from rocketmq_spark.model.names import FORBIDDEN_TOPICS, MAX_TOPIC_LENGTH, is_legal
from rocketmq_spark.model.route import MAX_BROKERS, MAX_QUEUES
from rocketmq_spark.options.kinds import INT_MAX, MIB
from rocketmq_spark.options.sink import MAX_FENCE_MS, MAX_TRANSACTION_TIMEOUT_MS
from rocketmq_spark.protocol.remoting.command import loads

VERSION: Final = 4
"""The version of the records that this release writes, and the only one that it reads."""

# A broker accepts messages up to 4 MiB.
_MAX_BYTES: Final = 4 * MIB
_MAX_OFFSET: Final = 2**63 - 1
_MAX_ROUNDS: Final = 1_000_000
# Of a write, a query, an attempt.
_LONGEST_NAME: Final = 256
# Of a broker, as in a route.
_LONGEST_BROKER: Final = 512

_BATCH_ID: Final = re.compile(r"0|[1-9][0-9]{0,18}")
_RUN_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class InvalidRecordError(ValueError):
    """A message is no record, or one of its values is out of bounds."""


class UnreadableRecordError(ValueError):
    """A message is a record that this reader can't read, and must not ignore."""


# A write that means the first write of the log.
ANY_WRITE: Final = Write("")

QueueNums: TypeAlias = Mapping[str, int]
"""Brokers, each with the number of its queues of the topic of rows."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What an attempt at a partition has recorded before its first row."""

    queue_nums: QueueNums  # The brokers to which it may send, and how many of their queues
    # Offsets below all its rows, of queues for which the start offsets of the log are missing or too high.
    start_offsets: Mapping[MessageQueue, int] = field(default_factory=dict)
    fence_ms: int = 0  # Its `fenceMs`: so long its requests may be on their way
    key_id: str = ""  # The fingerprint of the key that signed the record; empty without a key
    stored_ms: int = field(default=0, compare=False)  # Of its record
    changed: bool | None = None  # Of an attempt that has ended: whether its rows differ from the stored ones

    def floor_of(self, queue: MessageQueue, start_offsets: Mapping[MessageQueue, int]) -> Floor:
        """Return the floor of the attempt's rows in a queue; `start_offsets` are those of its write."""
        offset = self.start_offsets.get(queue, start_offsets.get(queue))
        return UNKNOWN if offset is None else Known(offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record of one transactional id."""

    KIND: ClassVar[str]

    write: Write
    # An offset of the home from which all records of the write follow.
    since: int = 0
    offset: int = -1  # In its queue; -1 until it is stored
    stored_ms: int = 0  # When the broker stored it, epoch milliseconds
    claim: int | None = None  # In the first record of an id after its driver's claim: the offset of that claim

    def home_in(self, queue: MessageQueue) -> MessageQueue:
        """Return the home that this record belongs to, which is in a queue."""
        return self.home if isinstance(self, HomeRecord) else queue


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeRecord(Record):
    """Names the queue that has the records of the id. A claim comes from a driver that has read no other record."""

    KIND: ClassVar[str] = "home"

    home: MessageQueue
    is_claim: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Record):
    """A driver's decision to commit half messages."""

    KIND: ClassVar[str] = "decision"

    round: int  # From 1 on: a recovery prepares missing rows again, in the next round
    group: str  # The property ``PGROUP`` of the half messages
    rows: int
    timeout_ms: int
    # The offsets of the manifest records in the home, and the SHA-256 of their contents.
    manifests: tuple[int, ...]
    digest: str
    # The maximum offset of each target queue before the first commit. Manifests refer to queues by this order.
    start_offsets: Mapping[MessageQueue, int]
    # The half message of each broker that was born last.
    youngest: tuple[Half, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneRecord(Record):
    """All rows of the write are stored, those of later writes with at least these offsets."""

    KIND: ClassVar[str] = "done"

    start_offsets: Mapping[MessageQueue, int] | None = None  # None with ``delivery=exactlyOnce``


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord(Record):
    """With ``delivery=effectivelyOnce``: the rows of a write, or of the first one, have at least these offsets."""

    KIND: ClassVar[str] = "floors"

    start_offsets: Mapping[MessageQueue, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunRecord(Record):
    """With ``delivery=effectivelyOnce``: an attempt begins a partition."""

    KIND: ClassVar[str] = "begun"

    partition: int
    attempt: str
    begun: Begun


def parse(
    body: Buffer, transactional_id: str, topic: str, offset: int = _MAX_OFFSET, stored_ms: int = 0
) -> Record | None:
    """Return the record in a message of the log's topic; None for a record of another transactional id.

    Raises an InvalidRecordError or an UnreadableRecordError, and nothing else.
    """
    if len(body) > _MAX_BYTES:
        raise InvalidRecordError(f"it has {len(body)} bytes, {_MAX_BYTES} are allowed")
    try:
        fields = loads(body)
    except ValueError as exc:
        raise InvalidRecordError(str(exc)) from None
    if not isinstance(fields, dict) or type(fields.get("id")) is not str:
        raise InvalidRecordError("it is no JSON object with a text id")
    if fields["id"] != transactional_id:
        return None
    version = _integer(fields.get("version"), "version", 0, INT_MAX)
    if version != VERSION:
        raise UnreadableRecordError(f"a record of version {version}, and this release reads version {VERSION}")
    kind = fields.get("kind")
    kinds = _KINDS["#" in transactional_id]
    parse_kind = kinds.get(kind) if isinstance(kind, str) else None
    if parse_kind is None:
        raise InvalidRecordError(f"kind is {_shown(kind)}, in this log it is one of {', '.join(kinds)}")
    query = _text(fields.get("query"), "query", 0, _LONGEST_NAME)
    write = Write(_text(fields.get("write"), "write", 0, _LONGEST_NAME), query)
    if query and not _BATCH_ID.fullmatch(write.name):
        raise InvalidRecordError(f"write is {_shown(write.name)}, of a stream it is the number of a micro-batch")
    since = _integer(fields.get("since"), "since", 0, offset)
    common = {"write": write, "since": since, "offset": offset, "stored_ms": stored_ms}
    if kind in (Decision.KIND, BegunRecord.KIND) and write == ANY_WRITE:
        raise InvalidRecordError("write is empty")
    return parse_kind(fields, common, transactional_id, topic)


def encode(record: Record, transactional_id: str, topic: str) -> bytes:
    """Return the bytes of a record; raise an InvalidRecordError if readers would ignore them."""
    own: dict[str, object]
    kind = record.KIND
    match record:
        case HomeRecord():
            kind = _CLAIM if record.is_claim else kind
            own = {"home": _place(record.home)}
        case Decision():
            own = {
                "round": record.round,
                "group": record.group,
                "rows": record.rows,
                "timeout_ms": record.timeout_ms,
                "manifests": record.manifests,
                "digest": record.digest,
                "floors": _rows_of(record.start_offsets),
                "youngest": [[*_place(half.queue), *half[1:]] for half in record.youngest],
            }
        case BegunRecord():
            begun = record.begun
            own = {"partition": record.partition, "attempt": record.attempt, "brokers": dict(begun.queue_nums)}
            own |= {"fence": begun.fence_ms, "floors": _rows_of(begun.start_offsets)}
            if begun.changed is not None:
                own["changed"] = begun.changed
        case DoneRecord() | StartRecord():
            own = {} if record.start_offsets is None else {"floors": _rows_of(record.start_offsets)}
        case _:
            raise TypeError(f"{record!r}")
    if record.claim is not None:
        own["claim"] = record.claim
    head = {
        "version": VERSION,
        "kind": kind,
        "id": transactional_id,
        "write": record.write.name,
        "query": record.write.query,
        "since": record.since,
    }
    body = json.dumps({**head, **own}).encode()
    # A record that readers ignore would lose or repeat rows.
    parsed = parse(body, transactional_id, topic)
    if parsed is None or replace(parsed, offset=record.offset, stored_ms=record.stored_ms) != record:
        raise InvalidRecordError(f"readers would parse the record of {record.write} as another record")
    return body


def _home(fields: dict[str, Any], common: dict[str, Any], _: str, topic: str) -> HomeRecord:
    _, broker_name, queue_id = _list(fields.get("home"), "home", 3, 3)
    home = MessageQueue(topic, _broker(broker_name), _integer(queue_id, "queue id", 0, MAX_QUEUES - 1))
    return HomeRecord(**common, home=home, is_claim=fields["kind"] == _CLAIM)


def _decision(fields: dict[str, Any], common: dict[str, Any], transactional_id: str, _: str) -> Decision:
    round_ = _integer(fields.get("round"), "round", 1, _MAX_ROUNDS)
    group = _text(fields.get("group"), "group", 1, 1_000)
    start = f"{transactional_id}#{common['write'].name}#{round_}#"
    if not group.startswith(start) or not _RUN_ID.fullmatch(group, len(start)):
        raise InvalidRecordError(f"group is {_shown(group)}, it begins with {_shown(start)}")
    rows = _integer(fields.get("rows"), "rows", 0, MAX_ROWS)
    # A recovery prepares rows again, for which it gets 1 ms per row more.
    longest = MAX_TRANSACTION_TIMEOUT_MS + (rows if round_ > 1 else 0)
    manifests = _list(fields.get("manifests"), "manifests", 0, manifests_for(MAX_ROWS))
    if len(manifests) != manifests_for(rows):
        raise InvalidRecordError(f"{len(manifests)} manifests for {rows} rows")
    # Each manifest has different rows.
    offsets = tuple(_integer(offset, "manifest", 0, common["offset"] - 1) for offset in manifests)
    if len(set(offsets)) != len(offsets):
        raise InvalidRecordError("a manifest is listed twice")
    digest = _text(fields.get("digest"), "digest", 64, 64)
    if not _DIGEST.fullmatch(digest):
        raise InvalidRecordError(f"digest is {_shown(digest)}, allowed are 64 hexadecimal digits")
    start_offsets = _start_offsets(fields.get("floors"))
    youngest = tuple(map(_half, _list(fields.get("youngest"), "youngest", 0, MAX_BROKERS)))
    if len({half.queue.broker_name for half in youngest}) != len(youngest):
        raise InvalidRecordError("a broker has two youngest half messages")
    if any(half.queue not in start_offsets for half in youngest):
        raise InvalidRecordError("a half message is for a queue without a floor")
    return Decision(
        **common,
        round=round_,
        group=group,
        rows=rows,
        timeout_ms=_integer(fields.get("timeout_ms"), "timeout_ms", 1, longest),
        manifests=offsets,
        digest=digest,
        start_offsets=start_offsets,
        youngest=youngest,
        claim=_claim(fields, common),
    )


def _done(_: dict[str, Any], common: dict[str, Any], __: str, ___: str) -> DoneRecord:
    return DoneRecord(**common)


def _done_at(fields: dict[str, Any], common: dict[str, Any], log_name: str, _: str) -> DoneRecord:
    return DoneRecord(**common, start_offsets=_own_start_offsets(fields, log_name))


def _start_record(fields: dict[str, Any], common: dict[str, Any], log_name: str, _: str) -> StartRecord:
    return StartRecord(**common, start_offsets=_own_start_offsets(fields, log_name), claim=_claim(fields, common))


def _begun(fields: dict[str, Any], common: dict[str, Any], log_name: str, _: str) -> BegunRecord:
    brokers = fields.get("brokers")
    if not isinstance(brokers, dict) or len(brokers) > MAX_BROKERS:
        raise InvalidRecordError(f"brokers is no object of at most {MAX_BROKERS} brokers")
    nums = {_broker(name): _integer(count, "number of queues", 0, MAX_QUEUES) for name, count in brokers.items()}
    _integer(sum(nums.values()), "number of queues of all brokers", 0, MAX_QUEUES)
    if not isinstance(changed := fields.get("changed"), bool | None):
        raise InvalidRecordError(f"changed is {_shown(changed)}, allowed are true and false")
    fence_ms = _integer(fields.get("fence"), "fence", 0, MAX_FENCE_MS)
    return BegunRecord(
        **common,
        partition=_integer(fields.get("partition"), "partition", 0, INT_MAX),
        attempt=_text(fields.get("attempt"), "attempt", 1, _LONGEST_NAME),
        begun=Begun(nums, _own_start_offsets(fields, log_name), fence_ms, "", common["stored_ms"], changed),
    )


_CLAIM: Final = "claim"
# By delivery: ``exactlyOnce``, then ``effectivelyOnce``, whose ids have a topic after a ``#``.
_NAMING: Final = {HomeRecord.KIND: _home, _CLAIM: _home}
_KINDS: Final = (
    {**_NAMING, Decision.KIND: _decision, DoneRecord.KIND: _done},
    {**_NAMING, StartRecord.KIND: _start_record, BegunRecord.KIND: _begun, DoneRecord.KIND: _done_at},
)


def _claim(fields: dict[str, Any], common: dict[str, Any]) -> int | None:
    return _integer(fields["claim"], "claim", 0, common["offset"] - 1) if "claim" in fields else None


def _start_offsets(value: object) -> dict[MessageQueue, int]:
    start_offsets = {}
    rows = _list(value, "floors", 0, MAX_QUEUES)
    for row in rows:
        *place, offset = _list(row, "floor", 4, 4)
        start_offsets[_queue(place)] = _integer(offset, "floor", 0, _MAX_OFFSET)
    if len(start_offsets) != len(rows):
        raise InvalidRecordError("a queue has two floors")
    return start_offsets


def _own_start_offsets(fields: dict[str, Any], log_name: str) -> dict[MessageQueue, int]:
    """Return start offsets, which are in the topic of a log with ``delivery=effectivelyOnce``."""
    start_offsets, topic = _start_offsets(fields.get("floors")), log_name.partition("#")[2]
    if any(queue.topic != topic for queue in start_offsets):
        raise InvalidRecordError(f"a floor is in another topic than {_shown(topic)}")
    return start_offsets


def _half(value: object) -> Half:
    *place, commit_log_offset, queue_offset, born = _list(value, "half message", 6, 6)
    return Half(
        _queue(place),
        _integer(commit_log_offset, "commit-log offset", 0, _MAX_OFFSET),
        _integer(queue_offset, "queue offset", 0, _MAX_OFFSET),
        _integer(born, "born time", 0, _MAX_OFFSET),
    )


def _queue(place: list[Any]) -> MessageQueue:
    topic, broker_name, queue_id = place
    name = _text(topic, "topic", 1, MAX_TOPIC_LENGTH)
    if not is_legal(name) or name in FORBIDDEN_TOPICS:
        raise InvalidRecordError(f"topic is {_shown(name)}")
    return MessageQueue(name, _broker(broker_name), _integer(queue_id, "queue id", 0, MAX_QUEUES - 1))


def _broker(value: object) -> str:
    return _text(value, "broker", 1, _LONGEST_BROKER)


def _integer(value: object, name: str, lowest: int, highest: int) -> int:
    # True is an int, too.
    if type(value) is not int or not lowest <= value <= highest:
        raise InvalidRecordError(f"{name} is {_shown(value)}, allowed are {lowest} to {highest}")
    return value


def _text(value: object, name: str, shortest: int, longest: int) -> str:
    if type(value) is not str or not shortest <= len(value) <= longest or escaped(value) != value:
        raise InvalidRecordError(f"{name} is {_shown(value)}, allowed are {shortest} to {longest} printable characters")
    return value


def _list(value: object, name: str, shortest: int, longest: int) -> list[Any]:
    if type(value) is not list or not shortest <= len(value) <= longest:
        raise InvalidRecordError(f"{name} is {_shown(value)}, allowed is a list of {shortest} to {longest} values")
    return value


def _shown(value: object) -> str:
    """Return a short text of a value. Lists and objects may be large, or deep."""
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return escaped(repr(value[:100] if isinstance(value, str) else value), 120)


def _place(queue: MessageQueue) -> list[object]:
    return [queue.topic, queue.broker_name, queue.queue_id]


def _rows_of(start_offsets: Mapping[MessageQueue, int]) -> list[list[object]]:
    return [[*_place(queue), offset] for queue, offset in start_offsets.items()]
