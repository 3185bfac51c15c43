"""Stores the records of one transactional id in the queues of the decision log's topic, and reads them.

Every user who can write to the topic can store messages there. A message that is no valid record is ignored. With
``transactionalKey``, only a record with a valid signature is valid. A record of another version is an error, because it
may say that rows are committed.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import rocketmq_spark.model.properties as const
from rocketmq_spark.deliveries.log.brokers import COMPARE, Brokers
from rocketmq_spark.deliveries.log.keys import NO_KEYS, LogKeys, unsigned
from rocketmq_spark.deliveries.log.records import (
    BegunRecord,
    Decision,
    InvalidRecordError,
    Record,
    UnreadableRecordError,
    encode,
    parse,
)
from rocketmq_spark.deliveries.log.scan import LOST_TAIL
from rocketmq_spark.errors import DataLossError, DeliveryError, MQClientException
from rocketmq_spark.model.message import Buffer, EncodedBatch, Message, MessageQueue, SendOutcome
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.options.kinds import MIB
from rocketmq_spark.protocol.remoting.records import encode_single
from rocketmq_spark.sink.in_flight import PendingBatch

logger = logging.getLogger("rocketmq_spark.producer")

# The number of messages that a backward search reads first; it reads four times as many each time.
_FIRST_WINDOW: Final = 1000
# Bytes of the records that a backward search holds. Parsed, they take about ten times as much. Queues are searched at
# the same time.
_WINDOW_BYTES: Final = MIB
# How many ignored messages are counted.
_MOST_IGNORED: Final = 1000

# How often, and after how many seconds, a home without records is searched again.
_LATE_TRIES: Final = 5
_LATE_WAIT: Final = 1.0

_MANIFEST_TAG: Final = "manifest"


@dataclass(eq=False, repr=False)
class RecordStore:
    """The records of one transactional id."""

    transactional_id: str
    topic: str
    keys: LogKeys = NO_KEYS
    # Queues and offsets of messages that have the tag of this id, and are no valid records; at most 1,000.
    ignored: set[tuple[MessageQueue, int]] = field(default_factory=set)

    # The first offset that a queue had when it was searched. With keys, a signed record whose writer had read less of
    # the queue may be a copy of an expired one.
    _oldest: dict[MessageQueue, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.tag = hashlib.sha256(self.transactional_id.encode()).hexdigest()[:16]

    def queues(self, brokers: Brokers) -> Sequence[MessageQueue]:
        """Return the queues of the topic that can be written now."""
        return brokers.routes().look_up(self.topic).queues

    def read_only_queues(self, brokers: Brokers) -> Sequence[MessageQueue]:
        """Return the other queues of the topic that can be read now. They may have records of this id, too."""
        info = brokers.routes().look_up(self.topic)
        readable = (
            MessageQueue(self.topic, data.broker_name, queue_id)
            for data in info.route.queue_datas
            if data.broker_name in info.addresses and not info.template
            for queue_id in range(data.open_queues)
        )
        return [queue for queue in readable if queue not in info.queue_set]

    def read(
        self, brokers: Brokers, queue: MessageQueue, start: int, end: int, *, complete: bool = False
    ) -> Iterator[Record]:
        """Yield the records of this id from one offset of a queue to another.

        Raises an MQClientException at a record of another version; with `complete`, a DataLossError if some expired.
        """
        return (record for record, _ in self._sized(brokers, queue, start, end, complete=complete))

    def first_offset(self, brokers: Brokers, queue: MessageQueue) -> int:
        """Return the offset of the first message of a queue, and ignore copies of expired records from now on.

        It asks the broker once, until `forget_first_offsets`.
        """
        if queue not in self._oldest:
            self._oldest[queue] = brokers.first_offset(queue) if self.keys else brokers.min_offset(queue)
        return self._oldest[queue]

    def forget_first_offsets(self) -> None:
        """Ask for the first offsets of queues again."""
        self._oldest.clear()

    def search(self, brokers: Brokers, queue: MessageQueue, end: int) -> Iterator[Record]:
        """Yield the records of this id in a queue, the newest first."""
        lowest, window = self.first_offset(brokers, queue), _FIRST_WINDOW
        while end > lowest:
            start, nbytes = max(lowest, end - window), 0
            found: deque[tuple[Record, int]] = deque()
            for record, size in self._sized(brokers, queue, start, end):
                found.append((record, size))
                nbytes += size
                while nbytes > _WINDOW_BYTES and len(found) > 1:
                    # The next, smaller window reads this record again.
                    nbytes -= found.popleft()[1]
                    start = found[0][0].offset
                    window = (end - start) // 4
            yield from (record for record, _ in reversed(found))
            end, window = start, max(1, window * 4)

    def check_not_lost(self, brokers: Brokers, home: MessageQueue) -> None:
        """Raise a DataLossError if a home that other queues name has no record, and none can have expired."""
        tries = 0
        # A broker may build the queue of a new claim later than other brokers build theirs.
        while self.first_offset(brokers, home) == 0 and not any(
            True for _ in self.search(brokers, home, brokers.max_offsets([home])[home])
        ):
            if tries == _LATE_TRIES:
                raise DataLossError(
                    f"the decision log of transactionalId={self.transactional_id}: queue {home} has no record of it, "
                    f"and other queues of topic {self.topic} say that its records were there: {LOST_TAIL}. {COMPARE}"
                )
            tries += 1
            brokers.runtime.sleep(_LATE_WAIT)

    def _sized(
        self, brokers: Brokers, queue: MessageQueue, start: int, end: int, *, complete: bool = False
    ) -> Iterator[tuple[Record, int]]:
        """Yield the records of a range with their sizes in bytes; raise an MQClientException if others delay it."""
        messages, ignored, expires = 0, 0, brokers.clock() + brokers.patience
        for message in brokers.read(queue, start, end, self.tag, complete=complete):
            # Brokers select by a hash of the tag.
            if message.tags != self.tag:
                continue
            messages += 1
            record = self._parsed(queue, message)
            if record is not None:
                yield record, len(message.body)
                continue
            ignored += 1
            if brokers.clock() >= expires:
                raise MQClientException(
                    f"the decision log of transactionalId={self.transactional_id}: reading queue {queue} from offset "
                    f"{start} to {end} is not complete after deliveryTimeoutMs={brokers.options.delivery_timeout_ms}. "
                    f"Up to offset {message.queue_offset}, {ignored} of {messages} messages with the tag of this log "
                    f"are no records of it. Find out which program writes to topic {self.topic}, and use another "
                    "transactionTopic or transactionalId"
                )

    def _parsed(self, queue: MessageQueue, message: MessageExt) -> Record | None:
        """Return the record in a message; None if it has another id, or is not valid."""
        offset = message.queue_offset
        try:
            return self._opened(queue, message)
        except InvalidRecordError as exc:
            if not self.ignored:
                logger.warning(
                    "the decision log of transactionalId=%s: queue %s, offset %d has a message that is no valid record "
                    "(%s). It is ignored. Further such messages are ignored without a warning. Let no other program "
                    "write to this topic",
                    *(self.transactional_id, queue, offset, exc),
                )
            if len(self.ignored) < _MOST_IGNORED:
                self.ignored.add((queue, offset))
            return None
        except UnreadableRecordError as exc:
            # Without this record, rows could be lost or repeated.
            raise MQClientException(
                f"the decision log of transactionalId={self.transactional_id}: queue {queue}, offset {offset} has "
                f"{exc}. Finish with the release that wrote it. If there is none, find out who writes to topic "
                f"{self.topic}, and use another transactionTopic or transactionalId"
            ) from exc

    def _opened(self, queue: MessageQueue, message: MessageExt) -> Record | None:
        """Return the record in a message; raise as `parse`."""
        offset, signed = message.queue_offset, None
        body: Buffer = message.body
        if self.keys:
            signed = self.keys.opened(body, self.transactional_id, queue)
            if signed is None:
                raise InvalidRecordError("it has no valid signature of a key in transactionalKey")
            if not self._oldest.get(queue, 0) <= signed.position <= offset:
                raise InvalidRecordError("it is a copy of a record that has expired")
            body = signed.body
        elif (record := unsigned(body)) is not None:
            body = record
        found = parse(body, self.transactional_id, self.topic, offset, message.store_timestamp)
        if found is not None and signed is None and body is not message.body:
            raise UnreadableRecordError("a signed record, and this job has no transactionalKey")
        if signed is not None and isinstance(found, BegunRecord):
            return replace(found, begun=replace(found.begun, key_id=signed.key_id))
        return found

    def store(self, brokers: Brokers, record: Record, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        """Store a record in each queue, and return its offset in each of them."""
        try:
            body = encode(record, self.transactional_id, self.topic)
        except InvalidRecordError as exc:
            raise MQClientException(
                f"writing the decision log of transactionalId={self.transactional_id}: {record.write} needs a record "
                f"that is not allowed: {exc}. Write fewer rows at once, or to fewer queues"
            ) from exc
        ends = brokers.max_offsets(queues) if self.keys else dict.fromkeys(queues, 0)
        bodies = [self.keys.sealed(body, self.transactional_id, queue, ends[queue]) for queue in queues]
        offsets = self._send(brokers, [self._message(self.tag, body) for body in bodies], queues)
        return dict(zip(queues, offsets, strict=True))

    def store_manifests(self, brokers: Brokers, manifests: Sequence[bytes], home: MessageQueue) -> tuple[int, ...]:
        """Store the manifests of a decision, and return their offsets."""
        messages = [self._message(_MANIFEST_TAG, body) for body in manifests]
        return tuple(self._send(brokers, messages, [home] * len(messages)))

    def read_manifests(self, brokers: Brokers, decision: Decision, home: MessageQueue) -> Iterator[bytes]:
        """Yield the manifests of a decision.

        Raises a DataLossError if one is deleted, and a ValueError if the driver stored others.
        """
        read = hashlib.sha256()
        for offset in decision.manifests:
            for message in brokers.read(home, offset, offset + 1, complete=True):
                if message.tags != _MANIFEST_TAG:
                    raise ValueError(f"the message at offset {offset} is no manifest")
                read.update(message.body)
                yield message.body
        if read.hexdigest() != decision.digest:
            raise ValueError("their content differs from what the decision says")

    def _message(self, tag: str, body: bytes) -> EncodedBatch:
        return encode_single(Message(self.topic, body, 0, {const.TAGS: tag, const.WAIT: "true"}))

    def _send(self, brokers: Brokers, messages: Sequence[EncodedBatch], queues: Sequence[MessageQueue]) -> list[int]:
        """Store messages, and return their queue offsets, in order."""
        numbers = {id(batch): number for number, batch in enumerate(messages)}
        offsets = [-1] * len(messages)

        def on_stored(pending: PendingBatch, outcome: SendOutcome) -> None:
            offsets[numbers[id(pending.batch)]] = outcome.queue_offset

        try:
            brokers.send_records(list(zip(messages, queues, strict=True)), on_stored)
        except DeliveryError as exc:
            exc.args = (f"writing the decision log of transactionalId={self.transactional_id}: {exc}", *exc.args[1:])
            raise
        return offsets


def digest_of(manifests: Iterable[bytes]) -> str:
    """Return the SHA-256 of manifests, one after the other. Their sizes follow from the number of rows."""
    digest = hashlib.sha256()
    for manifest in manifests:
        digest.update(manifest)
    return digest.hexdigest()
