"""The decision log: records of the half messages that the driver commits, as messages of ``transactionTopic``.

With ``delivery=effectivelyOnce`` it has no decisions. It says where the rows of a write begin in each queue (floors),
which partitions tasks have begun, and which writes are done.

All records of a transactional id are in one queue, its home. The home is drawn from the id, and claimed in all queues
before the first decision. Before each later one the driver names the home in a record on every other broker of the
write. So a home that is down is noticed.

The first decision of a round counts. Later ones of other drivers have lost. The half messages of a decision are in
manifest records before it, because they may be larger than a message.

Each record knows an offset of the home from which all records of its write follow (`since`). A reader of a stream's log
searches backwards for the last record, and then reads from its `since`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import rocketmq_spark.model.properties as const
from rocketmq_spark.errors import DataLossError, DeliveryError, MQClientException
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendOutcome
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.route import MAX_QUEUES
from rocketmq_spark.protocol.remoting.command import loads
from rocketmq_spark.protocol.remoting.records import encode_single
from rocketmq_spark.sink.in_flight import InFlightBatch
from rocketmq_spark.transactions.brokers import Brokers
from rocketmq_spark.transactions.halves import NO_HALVES, Half, Halves

# Bytes of a manifest record. A message may have 4 MiB.
_MANIFEST_BYTES: Final = 2 * 1024 * 1024
# The number of messages that a backward search reads first; it reads four times as many each time.
_FIRST_WINDOW: Final = 1000

_MANIFEST_TAG: Final = "manifest"
_DECISION: Final = "decision"
_DONE: Final = "done"
# With ``delivery=effectivelyOnce``: a driver plans a write, or the first one; a task begins a partition.
_FLOORS: Final = "floors"
_BEGUN: Final = "begun"
_HOME: Final = "home"
# A driver without decisions names its home.
_CLAIM: Final = "claim"
# Records that name a home, in any queue.
_NAMING: Final = (_HOME, _CLAIM)


@dataclass(frozen=True, slots=True)
class Write:
    """A batch write, or a micro-batch of a stream."""

    name: str  # The ``writeId``, or the number of the micro-batch
    query: str = ""  # The query id of a stream

    @property
    def batch_id(self) -> int:
        """The number of the micro-batch; -1 for a batch write."""
        return int(self.name) if self.query else -1

    def __str__(self) -> str:
        return f"micro-batch {self.name} of query {self.query}" if self.query else f"write {self.name}"


QueueNums: TypeAlias = Mapping[str, int]
"""Brokers, each with the number of its queues of the topic of rows."""

# Whichever write is the first one.
_ANY: Final = Write("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A driver's decision to commit half messages."""

    write: Write
    round: int  # From 1 on: a recovery prepares missing rows again, in the next round
    group: str  # The property ``PGROUP`` of the half messages
    rows: int
    timeout_ms: int
    # The offsets of the manifest records in the home.
    manifests: tuple[int, ...]
    # The maximum offset of each target queue before the first commit.
    floors: dict[MessageQueue, int]
    # The half message of each broker that was born last.
    youngest: tuple[Half, ...]
    offset: int = -1  # In the home; -1 until it is stored


@dataclass(frozen=True, slots=True)
class Floors:
    """Offsets of queues, and a write: all rows of later writes have these offsets or higher ones."""

    after: Write | None  # None: the first record of the log
    by_queue: Mapping[MessageQueue, int]
    offset: int  # Of the record, in the home


@dataclass(slots=True)
class WriteState:
    """What the log says about a write."""

    since: int
    decisions: dict[int, Decision] = field(default_factory=dict)  # By round
    done: bool = False
    # Of a batch write with ``writeId`` that is not done, see `Floors`.
    floors: Mapping[MessageQueue, int] | None = None
    # The brokers to which each attempt could send, by partition and by the id of the attempt, in the order of records.
    begun: dict[int, dict[str, QueueNums]] = field(default_factory=dict)

    @property
    def last(self) -> Decision:
        """The decision of the last round."""
        return self.decisions[max(self.decisions)]


@dataclass(eq=False, repr=False)
class DecisionLog:
    """The log of one transactional id. `open` or `refresh` precedes every other use."""

    transactional_id: str
    topic: str
    # None until a record exists, or the first one is written.
    home: MessageQueue | None = None
    # The offset of the next record to read.
    position: int = 0
    writes: dict[Write, WriteState] = field(default_factory=dict)
    # The micro-batch of the newest record of a stream.
    newest: Write | None = None
    # Whether all writes were read, also those before the newest one.
    everything: bool = False
    # The last two floors of different writes.
    floors: list[Floors] = field(default_factory=list)
    # Where the queues ended when `open` searched them.
    _searched: Mapping[MessageQueue, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._tag = hashlib.sha256(self.transactional_id.encode()).hexdigest()[:16]

    def open(self, brokers: Brokers, *, everything: bool) -> None:
        """Find the home, and read the newest write of a stream, or with `everything` all writes.

        Raises a RouteNotFoundException (10005) if the home is on a broker without a master now.
        """
        self.writes.clear()
        self.floors.clear()
        self.newest, self.everything = None, everything
        # Before the search, so that no record between the search and the first reading is missed.
        self._searched = ends = brokers.max_offsets(self._queues(brokers))
        homes = self._homes(brokers, ends)
        if not homes:
            self.home = max(ends, key=self._draw)
            self.position = ends[self.home]
            # Otherwise a missing right would show after the first decision, when the driver reads it back.
            brokers.check_readable(self.home)
            return
        self.home = self._only(homes)
        brokers.address_of(self.home)
        if self.home not in ends:
            raise MQClientException(
                f"the decision log of transactionalId={self.transactional_id} is in queue {self.home}, which is "
                "not writable now: make broker and topic writable (brokerPermission=6, mqadmin updateTopicPerm -p 6)"
            )
        # A home that is down raises here.
        end = brokers.max_offsets([self.home])[self.home]
        self.position = brokers.min_offset(self.home) if everything else self._start(brokers, self.home, end)
        self.refresh(brokers)

    def claim_home(self, brokers: Brokers, write: Write, broker_names: Collection[str]) -> int:
        """Claim the home in itself, then in all other queues of the topic; return the offset of the first claim.

        Raises an MQClientException if another driver has claimed another home since `open`, or the topic has no queue
        on one of the brokers of the write.
        """
        home, queues = self._require_home(), self._queues(brokers)
        self._check_named(broker_names, {queue.broker_name for queue in queues})
        claims = self._name_home(brokers, _CLAIM, write, [home])
        claims |= self._name_home(brokers, _CLAIM, write, [queue for queue in queues if queue != home])

        def is_free(queue: MessageQueue) -> bool:
            brokers.await_readable(queue, claims[queue])
            records = self._records(brokers, queue, self._searched.get(queue, 0), claims[queue])
            return all(self._home_of(record, queue) == home for record, _ in records)

        if not all(brokers.ask_all(claims, is_free).values()):
            raise self._contended(write)
        return claims[home]

    def check_only(self, brokers: Brokers) -> None:
        """Raise an MQClientException if the id has another log, unless this one has a completed write.

        Two first drivers begin a log each if the name servers list no broker for both of them.
        """
        if any(state.done for state in self.writes.values()) or any(floors.after for floors in self.floors):
            return
        brokers.fresh_route(self.topic)
        DecisionLog(self.transactional_id, self.topic).open(brokers, everything=False)

    def _contended(self, write: Write) -> MQClientException:
        return MQClientException(
            f"committing {write}: another driver of transactionalId={self.transactional_id} begins a decision log in "
            f"another queue than {self.home} at this moment. No row of this driver is visible. Run the job again"
        )

    def refresh(self, brokers: Brokers, at_least: int = 0) -> None:
        """Read new records, at least up to the offset `at_least`."""
        assert self.home is not None
        end = brokers.max_offsets([self.home])[self.home]
        if end < max(self.position, at_least):
            raise DataLossError(
                f"the decision log of transactionalId={self.transactional_id}: queue {self.home} ends at offset {end}, "
                f"and had messages up to {max(self.position, at_least)}: the topic was deleted, or the broker has lost "
                "messages"
            )
        for record, message in self._records(brokers, self.home, self.position, end):
            try:
                if not self._is_void(brokers, self.home, record, message.queue_offset):
                    self._take(record, message.queue_offset)
            except (KeyError, TypeError, ValueError) as exc:
                raise self._unreadable(message, exc) from exc
        self.position = end

    def append_decision(
        self, brokers: Brokers, decision: Decision, halves: Halves, claim: int | None = None
    ) -> Decision:
        """Store a decision, and return the decision that counts in its round: this one, or an earlier one.

        The first decision of the id has the offset of its `claim`. It does not count if another home was claimed in
        this one since then, which raises an MQClientException.
        """
        home = self._require_home()
        data = halves.to_bytes() if len(halves) else b""
        pieces = [data[at : at + _MANIFEST_BYTES] for at in range(0, len(data), _MANIFEST_BYTES)]
        offsets = self._send(brokers, [(self._message(_MANIFEST_TAG, piece), home) for piece in pieces])
        state = self.writes.get(decision.write)
        record = {
            **self._head(_DECISION, decision.write, self.position if state is None else state.since),
            "round": decision.round,
            "group": decision.group,
            "rows": decision.rows,
            "timeout_ms": decision.timeout_ms,
            "manifests": offsets,
            "floors": _to_json(decision.floors),
            "youngest": [half.to_json() for half in decision.youngest],
        }
        if claim is not None:
            record["claim"] = claim
        self._append(brokers, record)
        self.check_current(decision.write)
        state = self.writes.get(decision.write)
        counted = None if state is None else state.decisions.get(decision.round)
        if counted is None:
            raise self._contended(decision.write)
        return counted

    def append_done(self, brokers: Brokers, write: Write) -> None:
        """Store that a write is complete."""
        self.check_current(write)
        self._append(brokers, self._head(_DONE, write, self.writes[write].since))

    def append_floors(
        self, brokers: Brokers, write: Write | None, floors: Mapping[MessageQueue, int], claim: int | None
    ) -> None:
        """Store the floors of a batch write, or of whichever write is the first one (None); the first record counts.

        The first record of the id has the offset of its `claim`; see `append_decision`.
        """
        record = {
            **self._head(_FLOORS, write or _ANY, self.position),
            "since": self.position,
            "floors": _to_json(floors),
        }
        if claim is not None:
            record["claim"] = claim
        self._append(brokers, record)
        if not (self.floors if write is None else self.writes.get(write)):
            raise self._contended(write or _ANY)

    def append_begun(
        self, brokers: Brokers, write: Write, partition_id: int, attempt: str, queue_nums: QueueNums, since: int
    ) -> None:
        """Store that an attempt begins a partition, and to which brokers it may send; read the log up to this record.

        `attempt` is an id of its own. `since` is an offset from which all records of the write follow.
        """
        record = {
            **self._head(_BEGUN, write, 0),
            "since": since,
            "partition": partition_id,
            "attempt": attempt,
            "brokers": dict(queue_nums),
        }
        self._append(brokers, record)
        self.check_current(write)

    def append_done_at(self, brokers: Brokers, write: Write, floors: Mapping[MessageQueue, int], since: int) -> None:
        """Store that a write is complete, and the floors of the writes after it; `since` as of `append_begun`."""
        self.check_current(write)
        record = {**self._head(_DONE, write, 0), "since": since, "floors": _to_json(floors)}
        # It is readable only after the broker has built the queues of all rows before it, which takes seconds after a
        # large write. A plan that does not see it uses older floors.
        self._send(brokers, [(self._message(self._tag, json.dumps(record).encode()), self._require_home())])

    def check_current(self, write: Write) -> None:
        """Raise a DeliveryError if the log has a later micro-batch of the same query."""
        if self._is_superseded(write):
            raise DeliveryError(
                f"committing {write}: another driver of the same query has completed this micro-batch, and continued "
                f"with micro-batch {self.newest and self.newest.name}. This driver commits nothing; stop it"
            )

    def append_homes(self, brokers: Brokers, write: Write, broker_names: set[str]) -> dict[MessageQueue, int]:
        """Store a record that names the home on each broker, and return the queues and offsets of these records.

        The brokers acknowledge it only after they have flushed and replicated what they stored before.
        """
        queues = {queue.broker_name: queue for queue in reversed(self._queues(brokers))}
        self._check_named(broker_names, queues)
        return self._name_home(brokers, _HOME, write, [queues[name] for name in sorted(broker_names)])

    def _check_named(self, wanted: Collection[str], found: Collection[str]) -> None:
        if lost := sorted(set(wanted).difference(found)):
            raise MQClientException(
                f"topic {self.topic} has no writable queue on broker {', '.join(lost)}, to which rows go: start the "
                "broker, or create the topic there"
            )

    def _name_home(
        self, brokers: Brokers, kind: str, write: Write, targets: Sequence[MessageQueue]
    ) -> dict[MessageQueue, int]:
        """Store a record that names the home in each queue, and return the queues and offsets of these records."""
        record = json.dumps({**self._head(kind, write, 0), "home": _place(self._require_home())}).encode()
        offsets = self._send(brokers, [(self._message(self._tag, record), queue) for queue in targets])
        return dict(zip(targets, offsets, strict=True))

    def halves_of(self, brokers: Brokers, decision: Decision) -> Halves:
        """Return the half messages of a decision; DataLossError if a manifest record is deleted."""
        home, pieces = self._require_home(), []
        if not decision.manifests:
            return NO_HALVES
        for offset in decision.manifests:
            pieces += [message.body for message in brokers.read(home, offset, offset + 1, complete=True)]
        return Halves.from_bytes(b"".join(pieces))

    def _queues(self, brokers: Brokers) -> Sequence[MessageQueue]:
        return brokers.routes().find(self.topic).queues

    def _require_home(self) -> MessageQueue:
        assert self.home is not None, "`open` precedes"
        return self.home

    def _draw(self, queue: MessageQueue) -> bytes:
        """Return a value that is random for each pair of transactional id and queue."""
        text = f"{self.transactional_id} {queue.broker_name} {queue.queue_id}"
        return hashlib.sha256(text.encode()).digest()

    def _homes(self, brokers: Brokers, ends: Mapping[MessageQueue, int]) -> dict[MessageQueue, bool]:
        """Return the home of each queue's newest record, or all homes claimed there, with whether it has a decision."""

        def homes_in(queue: MessageQueue) -> dict[MessageQueue, bool]:
            # All claims: the newest one may be of a driver that has failed because of an older one.
            claimed: dict[MessageQueue, bool] = {}
            for record, offset in self._search(brokers, queue, ends[queue]):
                if record["kind"] == _CLAIM:
                    claimed[self._home_of(record, queue)] = False
                elif not self._is_void(brokers, queue, record, offset):
                    return {self._home_of(record, queue): True}
            return claimed

        homes: dict[MessageQueue, bool] = {}
        for found in brokers.ask_all(ends, homes_in).values():
            for home, has_decision in found.items():
                homes[home] = homes.get(home, False) or has_decision
        return homes

    def _only(self, homes: Mapping[MessageQueue, bool]) -> MessageQueue:
        """Return the home with decisions, or one of the claimed homes, if possible one that is down now."""
        decided = [home for home, has_decision in homes.items() if has_decision]
        if len(decided) > 1:
            raise MQClientException(
                f"the decision log of transactionalId={self.transactional_id} is in several queues "
                f"({', '.join(map(str, sorted(decided)))}), because topic {self.topic} was changed, or two first "
                "drivers saw no common broker. Rows of the first write may be stored twice: compare them with the "
                "topic, and use another transactionalId"
            )
        return decided[0] if decided else max(homes, key=lambda home: (home not in self._searched, self._draw(home)))

    def _start(self, brokers: Brokers, home: MessageQueue, end: int) -> int:
        """Return an offset from which all records of the newest write follow."""
        records = self._search(brokers, home, end)
        newest = next((record for record, _ in records if record["kind"] not in _NAMING), None)
        return end if newest is None else max(int(newest["since"]), brokers.min_offset(home))

    def _search(self, brokers: Brokers, queue: MessageQueue, end: int) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the records of the id in a queue with their offsets, the newest first."""
        lowest, window = brokers.min_offset(queue), _FIRST_WINDOW
        while end > lowest:
            start = max(lowest, end - window)
            for record, message in reversed(list(self._records(brokers, queue, start, end))):
                yield record, message.queue_offset
            end, window = start, window * 4

    def _records(
        self, brokers: Brokers, queue: MessageQueue, start: int, end: int
    ) -> Iterator[tuple[dict[str, Any], MessageExt]]:
        """Yield the records of this id from one offset of a queue to another, with their messages."""
        for message in brokers.read(queue, start, end, self._tag):
            # Brokers select by a hash of the tag.
            if message.tags != self._tag:
                continue
            try:
                record = loads(message.body)
                is_own = record["id"] == self.transactional_id
                if is_own:
                    self._home_of(record, queue)
            except (KeyError, TypeError, ValueError) as exc:
                raise self._unreadable(message, exc) from exc
            if is_own:
                yield record, message

    def _home_of(self, record: Mapping[str, Any], queue: MessageQueue) -> MessageQueue:
        """Return the home that a record of a queue belongs to."""
        named = record["kind"] in _NAMING
        return MessageQueue(self.topic, *record["home"][1:]) if named else queue

    def _is_void(self, brokers: Brokers, queue: MessageQueue, record: Mapping[str, Any], offset: int) -> bool:
        """Return whether a record is a first decision, and another home was claimed since its own claim."""
        if record.get("claim") is None:
            return False
        since = self._records(brokers, queue, record["claim"], offset)
        return any(self._home_of(other, queue) != queue for other, _ in since)

    def _is_superseded(self, write: Write) -> bool:
        newest = self.newest
        return newest is not None and newest.query == write.query and newest.batch_id > write.batch_id

    def _unreadable(self, message: MessageExt, exc: Exception) -> MQClientException:
        return MQClientException(
            f"the decision log of transactionalId={self.transactional_id}: topic {self.topic}, queue "
            f"{message.queue_id}, offset {message.queue_offset} has a message that is no record of rocketmq-spark: "
            f"{exc!r}. Let no other program write to this topic, or use another transactionTopic"
        )

    def _take(self, record: dict[str, Any], offset: int) -> None:
        if record["kind"] in _NAMING:
            return
        write, floors = Write(record["write"], record["query"]), record.get("floors")
        if self._is_superseded(write):
            # A driver that was frozen wrote this record. Spark starts a micro-batch after the end of the one before.
            return
        if floors is not None and record["kind"] != _DECISION:
            self._take_floors(record["kind"], write, _from_json(floors), offset)
        if write == _ANY:
            return
        state = self.writes.setdefault(write, WriteState(since=int(record["since"])))
        if record["kind"] == _BEGUN:
            attempts = state.begun.setdefault(int(record["partition"]), {})
            attempts.setdefault(record["attempt"], _queue_nums_of(record["brokers"]))
            return
        if write.query:
            self.newest = write
        if record["kind"] == _FLOORS:
            if state.floors is None:
                state.since, state.floors = offset, _from_json(record["floors"])
        elif record["kind"] == _DONE:
            state.done = True
            if not write.query:
                # The log of a batch job names many writes.
                state.floors = None
                state.begun.clear()
        else:
            decision = self._decision(write, record, offset)
            # The first one counts.
            state.decisions.setdefault(decision.round, decision)
        if write.query:
            # Of a stream, only the last micro-batches matter.
            old = [other for other in self.writes if other.query == write.query and other.batch_id < write.batch_id - 1]
            for other in old:
                del self.writes[other]

    def _take_floors(self, kind: str, write: Write, floors: Mapping[MessageQueue, int], offset: int) -> None:
        """Keep the floors after a write; a write that is completed again keeps the first ones."""
        after = write if kind == _DONE else None
        # A driver that was frozen while it planned appends floors that are too high for the writes since then.
        is_late = bool(self.floors) and after in (None, self.floors[-1].after)
        if is_late or (kind == _FLOORS and write != _ANY):
            return
        self.floors = [*self.floors[-1:], Floors(after, floors, offset)]

    def _decision(self, write: Write, record: dict[str, Any], offset: int) -> Decision:
        return Decision(
            write=write,
            round=record["round"],
            group=record["group"],
            rows=record["rows"],
            timeout_ms=record["timeout_ms"],
            manifests=tuple(record["manifests"]),
            floors=_from_json(record["floors"]),
            youngest=tuple(map(Half.of_json, record["youngest"])),
            offset=offset,
        )

    def _head(self, kind: str, write: Write, since: int) -> dict[str, Any]:
        # The writes of a batch job are in no order, so their readers read everything.
        since = since if write.query else 0
        return {
            "kind": kind, "id": self.transactional_id, "write": write.name, "query": write.query, "since": since
        }  # fmt: skip

    def _append(self, brokers: Brokers, record: dict[str, Any]) -> None:
        body = json.dumps(record).encode()
        (offset,) = self._send(brokers, [(self._message(self._tag, body), self._require_home())])
        self._await(brokers, offset)

    def _await(self, brokers: Brokers, offset: int) -> None:
        brokers.await_readable(self._require_home(), offset)
        self.refresh(brokers, offset + 1)

    def _message(self, tag: str, body: bytes) -> EncodedBatch:
        return encode_single(Message(self.topic, body, 0, {const.TAGS: tag, const.WAIT: "true"}))

    def _send(self, brokers: Brokers, messages: Sequence[tuple[EncodedBatch, MessageQueue]]) -> list[int]:
        """Store messages, and return their queue offsets, in order."""
        numbers = {id(batch): number for number, (batch, _) in enumerate(messages)}
        offsets = [-1] * len(messages)

        def on_stored(delivery: InFlightBatch, outcome: SendOutcome) -> None:
            offsets[numbers[id(delivery.batch)]] = outcome.queue_offset

        try:
            brokers.send_records(messages, on_stored)
        except DeliveryError as exc:
            exc.args = (f"writing the decision log of transactionalId={self.transactional_id}: {exc}", *exc.args[1:])
            raise
        return offsets


def _queue_nums_of(brokers: Mapping[str, Any]) -> QueueNums:
    if not isinstance(brokers, dict):
        raise TypeError(f"brokers {brokers!r}")
    queue_nums = {name: int(nums) for name, nums in brokers.items()}
    if any(not 0 <= nums <= MAX_QUEUES for nums in queue_nums.values()):
        raise ValueError(f"a broker with more than {MAX_QUEUES} queues, or fewer than none")
    return queue_nums


def _place(queue: MessageQueue) -> list[object]:
    return [queue.topic, queue.broker_name, queue.queue_id]


def _to_json(floors: Mapping[MessageQueue, int]) -> list[list[object]]:
    return [[*_place(queue), offset] for queue, offset in floors.items()]


def _from_json(floors: Sequence[Sequence[Any]]) -> dict[MessageQueue, int]:
    return {MessageQueue(*place): int(floor) for *place, floor in floors}
