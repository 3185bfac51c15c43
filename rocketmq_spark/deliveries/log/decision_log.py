"""The decision log: what the records of a transactional id say about its writes, and in which queue they are.

With ``delivery=exactlyOnce`` they say which half messages the driver commits. With ``effectivelyOnce`` they say where
the rows of a write begin in each queue (start offsets), which partitions tasks have begun, and which writes are done.

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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.keys import NO_KEYS, LogKeys
from rocketmq_spark.deliveries.log.record_store import RecordStore, digest_of
from rocketmq_spark.deliveries.log.records import (
    ANY_WRITE,
    Begun,
    BegunRecord,
    Decision,
    DoneRecord,
    HomeRecord,
    Record,
    StartRecord,
)
from rocketmq_spark.deliveries.log.state import StartOffsets, WriteState, homes_in
from rocketmq_spark.errors import DataLossError, DeliveryError, MQClientException
from rocketmq_spark.model.message import MessageQueue

# The claim of a first decision may precede the offset where reading began. Then at least this many messages are read.
_CLAIM_WINDOW: Final = 1000

BARRIER_WAIT: Final = 1.0
"""A broker may store a request this much later than it has checked the deadline, or has answered another one, seconds.
"""


@dataclass(eq=False, repr=False)
class DecisionLog:
    """The log of one transactional id. `open` or `refresh` precedes every other use."""

    transactional_id: str
    topic: str
    keys: LogKeys = NO_KEYS
    # None until a record exists, or the first one is written.
    home: MessageQueue | None = None
    # The offset of the next record to read.
    position: int = 0
    writes: dict[Write, WriteState] = field(default_factory=dict)
    # The micro-batch of the newest record of a stream, and of each query: queries that start anew share a log.
    newest: Write | None = None
    newest_of: dict[str, Write] = field(default_factory=dict, init=False)
    # Whether all writes were read, also those before the newest one.
    everything: bool = False
    # The last two start offsets of different writes.
    start_offsets: list[StartOffsets] = field(default_factory=list)
    # Where the queues of rows ended when a plan asked last, and `position` then.
    ends: dict[MessageQueue, tuple[int, int]] = field(default_factory=dict, init=False)
    # Where the queues ended when `open` searched them, and those that could be written then.
    _searched: Mapping[MessageQueue, int] = field(default_factory=dict, init=False)
    _writable: Sequence[MessageQueue] = field(default=(), init=False)
    # The `writes` of streams by query. There may be many queries.
    _of_query: dict[str, dict[Write, WriteState]] = field(default_factory=dict, init=False)
    # From which offset of the home on `_away` is known, and the offset of the newest record that names another home.
    _away_from: int = field(default=-1, init=False)
    _away: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self.records = RecordStore(self.transactional_id, self.topic, self.keys)

    def open(self, brokers: Brokers, *, everything: bool) -> None:
        """Find the home, and read the newest write of a stream, or with `everything` all writes.

        Raises a RouteNotFoundException (10005) if the home is on a broker without a master now.
        """
        self.writes.clear()
        self._of_query.clear()
        self.newest_of.clear()
        self.start_offsets.clear()
        self.newest, self.everything = None, everything
        self._away_from = self._away = -1
        self.records.forget_first_offsets()
        self.home = self._look_up_home(brokers)
        if self.home is None:
            self.home = max(self._writable, key=self._draw)
            self.position = self._searched[self.home]
            # Otherwise a missing right would show after the first decision, when the driver reads it back.
            brokers.check_readable(self.home)
            return
        brokers.address_of(self.home)
        if self.home not in self._writable:
            raise MQClientException(
                f"the decision log of transactionalId={self.transactional_id} is in queue {self.home}, which is "
                "not writable now: make broker and topic writable (brokerPermission=6, mqadmin updateTopicPerm -p 6)"
            )
        # A home that is down raises here.
        end = brokers.max_offsets([self.home])[self.home]
        first = self.records.first_offset(brokers, self.home)
        self.position = first if everything else max(first, self._start(brokers, self.home, end))
        self.refresh(brokers)

    def resume(self, home: MessageQueue, position: int, write: Write, state: WriteState) -> None:
        """Read the home from a position on; `state` is what the records before it say about a write."""
        self.home, self.position = home, position
        self.writes[write] = state
        if write.query:
            self._of_query[write.query] = {write: state}

    def claim_home(self, brokers: Brokers, write: Write, broker_names: Collection[str]) -> int:
        """Claim the home in itself, then in all other queues of the topic; return the offset of the first claim.

        Raises an MQClientException if another driver has claimed another home since `open`, or the topic has no queue
        on one of the brokers of the write.
        """
        home, queues = self.require_home(), brokers.await_listed(self.topic, broker_names).queues
        claim = HomeRecord(write=write, home=home, is_claim=True)
        claims = self.records.store(brokers, claim, [home])
        claims |= self.records.store(brokers, claim, [queue for queue in queues if queue != home])

        def is_free(queue: MessageQueue) -> bool:
            brokers.await_readable(queue, claims[queue])
            records = self.records.read(brokers, queue, self._searched.get(queue, 0), claims[queue])
            return all(record.home_in(queue) == home for record in records)

        if not all(brokers.for_each(claims, is_free).values()):
            raise self._contended(write)
        return claims[home]

    def check_only(self, brokers: Brokers) -> None:
        """Raise an MQClientException if the id has another log, unless this one has a completed write.

        Two first drivers begin a log each if the name servers list no broker for both of them.
        """
        if any(state.done for state in self.writes.values()) or any(
            start_offsets.after for start_offsets in self.start_offsets
        ):
            return
        DecisionLog(self.transactional_id, self.topic, self.keys)._look_up_home(brokers)

    def _contended(self, write: Write) -> MQClientException:
        return MQClientException(
            f"committing {write}: another driver of transactionalId={self.transactional_id} begins a decision log in "
            f"another queue than {self.home} at this moment. No row of this driver is visible. Run the job again"
        )

    def refresh(self, brokers: Brokers, own: int = -1, *, complete: bool = False) -> None:
        """Read new records. With `complete`, or `own`, the offset of a record, missing ones are a DataLossError."""
        home, known, is_stored = self.require_home(), max(self.position, own + 1), own < 0
        end = brokers.max_offsets([home])[home]
        if end < known:
            raise DataLossError(
                f"the decision log of transactionalId={self.transactional_id}: queue {home} ends at offset {end}, and "
                f"had messages up to {known}: the topic was deleted, or the broker has lost messages"
            )
        if self._away_from < 0:
            self._away_from = self.position
        for record in self.records.read(brokers, home, self.position, end, complete=complete or own >= 0):
            is_stored = is_stored or record.offset == own
            if record.home_in(home) != home:
                self._away = record.offset
            elif not self._is_void(brokers, home, record):
                self._apply(record)
        if not is_stored:
            raise DataLossError(
                f"the decision log of transactionalId={self.transactional_id}: queue {home} has another message at "
                f"offset {own}, where the broker has acknowledged a record of this driver: the broker has lost messages"
            )
        self.position = end

    def append_decision(
        self, brokers: Brokers, decision: Decision, manifests: Sequence[bytes], claim: int | None = None
    ) -> Decision:
        """Store a decision, and return the decision that counts in its round: this one, or an earlier one.

        The first decision of the id has the offset of its `claim`. It does not count if another home was claimed in
        this one since then, which raises an MQClientException.
        """
        home, state = self.require_home(), self.writes.get(decision.write)
        decision = replace(
            decision,
            manifests=self.records.store_manifests(brokers, manifests, home),
            digest=digest_of(manifests),
            since=_since(decision.write, self.position if state is None else state.since),
            claim=claim,
        )
        self._append(brokers, decision)
        self.check_current(decision.write)
        state = self.writes.get(decision.write)
        counted = None if state is None else state.decisions.get(decision.round)
        if counted is None:
            raise self._contended(decision.write)
        return counted

    def append_done(self, brokers: Brokers, write: Write) -> None:
        """Store that a write is complete."""
        self.check_current(write)
        self._append(brokers, DoneRecord(write=write, since=_since(write, self.writes[write].since)))

    def append_start_offsets(
        self, brokers: Brokers, write: Write | None, start_offsets: Mapping[MessageQueue, int], claim: int | None
    ) -> None:
        """Store the start offsets of a batch write, or of whichever write is the first one (None).

        The first record counts. That of the id has the offset of its `claim`; see `append_decision`.
        """
        since = self.position if write is None else 0
        record = StartRecord(write=write or ANY_WRITE, since=since, start_offsets=dict(start_offsets), claim=claim)
        self._append(brokers, record)
        if not (self.start_offsets if write is None else self.writes.get(write)):
            raise self._contended(write or ANY_WRITE)

    def append_begun(
        self, brokers: Brokers, write: Write, partition_id: int, attempt: str, begun: Begun, since: int
    ) -> None:
        """Store that an attempt begins a partition; read the log up to this record.

        `attempt` is the unique id of the attempt. `since` is an offset from which all records of the write follow.
        """
        record = BegunRecord(write=write, since=since, partition=partition_id, attempt=attempt, begun=begun)
        self._append(brokers, record)
        self.check_current(write)

    def append_done_at(
        self, brokers: Brokers, write: Write, start_offsets: Mapping[MessageQueue, int], since: int
    ) -> None:
        """Store that a write is complete, and where later writes start; `since` as of `append_begun`."""
        self.check_current(write)
        record = DoneRecord(write=write, since=since, start_offsets=dict(start_offsets))
        # After a large write it is readable seconds later. A plan that does not see it uses older start offsets.
        self.records.store(brokers, record, [self.require_home()])

    def check_current(self, write: Write) -> None:
        """Raise a DeliveryError if a write `is_superseded`."""
        if self.is_superseded(write):
            raise DeliveryError(
                f"committing {write}: another driver of the same query has completed this micro-batch, and continued "
                f"with micro-batch {self.newest_of[write.query].name}. This driver commits nothing; stop it"
            )

    def append_homes(self, brokers: Brokers, write: Write, broker_names: set[str]) -> dict[MessageQueue, int]:
        """Store a record that names the home on each broker, and return the queues and offsets of these records.

        The brokers acknowledge it only after they have flushed and replicated what they stored before.
        """
        info = brokers.await_listed(self.topic, broker_names)
        queues = {queue.broker_name: queue for queue in reversed(info.queues)}
        record = HomeRecord(write=write, home=self.require_home())
        return self.records.store(brokers, record, [queues[name] for name in sorted(broker_names)])

    def await_stored(self, brokers: Brokers, write: Write, broker_names: Collection[str]) -> None:
        """Return when all that these brokers have stored is flushed and replicated, and can be read."""
        stored = self.append_homes(brokers, write, set(broker_names))
        brokers.for_each(stored, lambda queue: brokers.await_readable(queue, stored[queue]))

    def require_home(self) -> MessageQueue:
        """Return the home; `open` precedes."""
        assert self.home is not None
        return self.home

    def _draw(self, queue: MessageQueue) -> bytes:
        """Return a value that is random for each pair of transactional id and queue."""
        return hashlib.sha256(f"{self.transactional_id} {queue.broker_name} {queue.queue_id}".encode()).digest()

    def _look_up_home(self, brokers: Brokers) -> MessageQueue | None:
        """Return the home that the queues' newest records name; None without a record."""
        # The home may be on a broker that is newer than a cached route, or that allows only reads.
        brokers.fresh_route(self.topic)
        self._writable, read_only = self.records.queues(brokers), self.records.read_only_queues(brokers)
        # Before the search, so that no record between the search and the first reading is missed.
        self._searched = ends = brokers.max_offsets((*self._writable, *read_only))
        named = self._homes(brokers, ends)
        homes: dict[MessageQueue, bool] = {}
        for found in named.values():
            for home, has_decision in found.items():
                homes[home] = homes.get(home, False) or has_decision
        if not homes:
            return None
        home = self._only(homes)
        # The first claim of a home is in the home itself.
        if home in named and not named[home]:
            self.records.check_not_lost(brokers, home)
        return home

    def _homes(
        self, brokers: Brokers, ends: Mapping[MessageQueue, int]
    ) -> Mapping[MessageQueue, Mapping[MessageQueue, bool]]:
        """Return the home that each queue's newest record names, or all homes claimed there; see `homes_in`."""
        return brokers.for_each(ends, lambda queue: homes_in(queue, self.records.search(brokers, queue, ends[queue])))

    def _only(self, homes: Mapping[MessageQueue, bool]) -> MessageQueue:
        """Return the home with decisions, or one of the claimed homes, if possible one that is not writable now."""
        decided = [home for home, has_decision in homes.items() if has_decision]
        if len(decided) > 1:
            raise MQClientException(
                f"the decision log of transactionalId={self.transactional_id} is in several queues "
                f"({', '.join(map(str, sorted(decided)))}), because topic {self.topic} was changed, or two first "
                "drivers saw no common broker. Rows of the first write may be stored twice: compare them with the "
                "topic, and use another transactionalId"
            )
        return decided[0] if decided else max(homes, key=lambda home: (home not in self._writable, self._draw(home)))

    def _start(self, brokers: Brokers, home: MessageQueue, end: int) -> int:
        """Return an offset from which all records of the newest write follow, if they have not expired."""
        records = self.records.search(brokers, home, end)
        newest = next((record for record in records if not isinstance(record, HomeRecord)), None)
        return end if newest is None else newest.since

    def _is_void(self, brokers: Brokers, home: MessageQueue, record: Record) -> bool:
        """Return whether a record of the home is a first decision, and another home was named since its own claim."""
        claim = record.claim
        if claim is None:
            return False
        if claim < self._away_from:
            # A window at a time, so that claims of any order cause few pulls.
            start = max(0, min(claim, self._away_from - _CLAIM_WINDOW))
            for other in self.records.read(brokers, home, start, self._away_from):
                if other.home_in(home) != home:
                    self._away = max(self._away, other.offset)
            self._away_from = start
        return self._away >= claim

    def is_superseded(self, write: Write) -> bool:
        """Return whether the log has a later micro-batch of the same query."""
        newest = self.newest_of.get(write.query)
        return newest is not None and newest.batch_id > write.batch_id

    def _apply(self, record: Record) -> None:
        if isinstance(record, HomeRecord):
            return
        write = record.write
        if self.is_superseded(write):
            # A driver that was frozen wrote this record. Spark starts a micro-batch after the end of the one before.
            return
        if isinstance(record, DoneRecord | StartRecord) and record.start_offsets is not None:
            self._apply_start_offsets(record.KIND, write, record.start_offsets, record.offset)
        if write == ANY_WRITE:
            return
        state = self.writes.setdefault(write, WriteState(since=record.since))
        if write.query:
            self._of_query.setdefault(write.query, {})[write] = state
        if isinstance(record, BegunRecord):
            # A driver that was frozen may begin other partitions of a write that is done. Such attempts send nothing.
            if not (state.done and record.partition not in state.begun):
                state.begun.setdefault(record.partition, {}).setdefault(record.attempt, record.begun)
            return
        if write.query:
            self.newest = self.newest_of[write.query] = write
        if isinstance(record, StartRecord):
            if state.start_offsets is None:
                state.since, state.start_offsets = record.offset, record.start_offsets
        elif isinstance(record, Decision):
            # The first one counts.
            state.decisions.setdefault(record.round, record)
        else:
            state.done, state.done_ms = True, state.done_ms or record.stored_ms
            if not write.query:
                # The log of a batch job names many writes.
                state.start_offsets = None
                state.begun.clear()
        if write.query:
            # Of a stream, only the last micro-batches matter.
            writes = self._of_query[write.query]
            for other in [other for other in writes if other.batch_id < write.batch_id - 1]:
                del self.writes[other], writes[other]

    def _apply_start_offsets(
        self, kind: str, write: Write, start_offsets: Mapping[MessageQueue, int], offset: int
    ) -> None:
        """Keep the start offsets after a write; a write that is completed again keeps the first ones."""
        if not (write.query if kind == DoneRecord.KIND else write == ANY_WRITE):
            # A batch write has start offsets of its own, and may end during the first attempts at a micro-batch.
            return
        after = write if kind == DoneRecord.KIND else None
        # A driver that was frozen while it planned appends start offsets that are too high for the writes since then.
        if self.start_offsets and after in (None, self.start_offsets[-1].after):
            return
        self.start_offsets = [*self.start_offsets[-1:], StartOffsets(after, start_offsets, offset)]

    def _append(self, brokers: Brokers, record: Record) -> None:
        home = self.require_home()
        offset = self.records.store(brokers, record, [home])[home]
        brokers.await_readable(home, offset)
        self.refresh(brokers, offset)


def _since(write: Write, since: int) -> int:
    # The writes of a batch job are in no order, so their readers read everything.
    return since if write.query else 0
