"""The messages that a test double has stored: a commit log in memory, and the queues that refer to it.

Offsets in the commit log count its entries, not bytes. An entry is a message, or an inner batch of several. Nothing
expires by itself. Follows ``CommitLog.java`` and ``ConsumeQueue.java``.
"""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.message_ext import MessageExt, PullOutcome, PullRequest, PullStatus
from rocketmq_spark.model.send_result import TransactionCheck
from rocketmq_spark.protocol.remoting.records import encode_record

HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"

# The defaults of a broker's ``maxTransferCountOnMessageInMemory`` and ``maxTransferBytesOnMessageInMemory``.
MOST_PULLED: Final = 32
_MOST_PULLED_BYTES: Final = 256 * 1024

_BORN_HOST: Final = "127.0.0.1:50000"


class Entry(NamedTuple):
    """An entry of the commit log: a message as sent and as read, its actual queue and its final queue.

    `items` has a message for each queue offset that the entry takes.
    """

    sent: Message
    read: MessageExt
    stored_in: MessageQueue
    meant_for: MessageQueue
    items: tuple[Message, ...]


class MessageStore:
    """Stored messages, acknowledged or not.

    `queues` has the messages that consumers see, and those of internal topics. `expired` and `removed` have the first
    remaining offset of each queue; brokers correct the minimum offset only for `expired`. `unindexed` has the first
    offset that is left in the index of a queue.
    """

    def __init__(self, store_host: str = "127.0.0.1:10911") -> None:
        self.store_host = store_host
        self.queues: dict[MessageQueue, list[Message]] = {}
        self.expired: dict[MessageQueue, int] = {}
        self.removed: dict[MessageQueue, int] = {}
        self.unindexed: dict[MessageQueue, int] = {}
        self.log: list[Entry] = []
        self._read: dict[MessageQueue, list[MessageExt]] = {}

    def put(self, queue: MessageQueue, messages: Iterable[Message], now: float) -> None:
        """Store messages without a request."""
        for message in messages:
            self.append(message, queue, queue, now)

    def append(
        self,
        message: Message,
        stored_in: MessageQueue,
        meant_for: MessageQueue,
        now: float,
        *,
        sys_flag: int = 0,
        born_timestamp: int | None = None,
        prepared_transaction_offset: int = 0,
        items: Sequence[Message] = (),
    ) -> MessageExt:
        """Store one message, and return it as consumers read it. `now` is seconds since the epoch.

        With `items` it is the batch of these, and takes an offset for each, as in queues of the type BatchCQ.
        """
        stored = MessageExt(
            topic=message.topic,
            body=message.body,
            flag=message.flag,
            properties=message.properties,
            queue_id=meant_for.queue_id,
            queue_offset=self.end(stored_in),
            physical_offset=len(self.log),
            sys_flag=sys_flag,
            born_timestamp=int(now * 1000) if born_timestamp is None else born_timestamp,
            born_host=_BORN_HOST,
            store_timestamp=int(now * 1000),
            store_host=self.store_host,
            reconsume_times=0,
            prepared_transaction_offset=prepared_transaction_offset,
            body_crc=zlib.crc32(message.body) & 0x7FFFFFFF,
        )
        self._add(Entry(message, stored, stored_in, meant_for, tuple(items) or (message,)))
        return stored

    def copy(self, physical_offset: int, now: float, *, stored_in: MessageQueue | None = None) -> MessageExt:
        """Store a half or delayed message again, by default in its own queue."""
        sent, read, _, meant_for, _ = self.log[physical_offset]
        target = stored_in or meant_for
        return self.append(sent, target, meant_for, now, sys_flag=read.sys_flag, born_timestamp=read.born_timestamp)

    def copy_from(self, master: MessageStore) -> None:
        """Make this store equal to a master's, except for the store host; keep the common beginning.

        Messages that were deleted here stay deleted: a slave may have begun later than its master.
        """
        common = min(len(self.log), len(master.log))
        # Usually only the end is missing.
        while common and self.log[common - 1] is not master.log[common - 1]:
            common -= 1
        self.truncate(common)
        for entry in master.log[common:]:
            self._add(entry)
        # A slave deletes messages on its own, perhaps earlier than its master.
        for ours, theirs in ((self.expired, master.expired), (self.removed, master.removed)):
            ours.update({queue: max(first, ours.get(queue, 0)) for queue, first in theirs.items()})

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` messages of the commit log, as a crash before a flush does."""
        for entry in reversed(self.log[length:]):
            del self.queues[entry.stored_in][-len(entry.items) :]
            del self._read[entry.stored_in][-len(entry.items) :]
        del self.log[length:]

    def _add(self, entry: Entry) -> None:
        self.log.append(entry)
        self.queues.setdefault(entry.stored_in, []).extend(entry.items)
        self._read.setdefault(entry.stored_in, []).extend([entry.read] * len(entry.items))

    def end(self, queue: MessageQueue) -> int:
        """Return the offset that the queue's next message will get."""
        return len(self.queues.get(queue, ()))

    def messages(self, queue: MessageQueue, start: int, stop: int) -> list[MessageExt]:
        """Return the messages of a queue in a range of offsets; a unit of several offsets once."""
        messages = self._read.get(queue, [])[start:stop]
        return [message for at, message in enumerate(messages) if not at or message is not messages[at - 1]]

    def pull(
        self, request: PullRequest, most: int = MOST_PULLED, matches: Callable[[MessageExt], bool] | None = None
    ) -> PullOutcome:
        """Return the outcome of a pull: at most `most` messages and 256 KiB, and only matching ones."""
        queue, offset = request.target.queue, request.offset
        first, end = self.expired.get(queue, 0), self.end(queue)
        if offset < first or offset > end:
            return PullOutcome(PullStatus.OFFSET_ILLEGAL, first if offset < first else end, first, end)
        if offset == end:
            return PullOutcome(PullStatus.NO_NEW_MSG, offset, first, end)
        if offset < self.unindexed.get(queue, 0):
            # OFFSET_FOUND_NULL, for example while a broker deletes files.
            return PullOutcome(PullStatus.NO_NEW_MSG, self.unindexed[queue], first, end)
        stop = self._stop(queue, offset, max(1, min(request.target.max_msg_nums, most)))
        left = max(offset, self.removed.get(queue, 0))
        if left >= stop:
            # A broker passes over deleted messages, however few were requested.
            return PullOutcome(PullStatus.OFFSET_ILLEGAL, left, first, end)
        found: list[bytes] = []
        nbytes = 0
        for message in self.messages(queue, left, stop):
            if matches is not None and not matches(message):
                continue
            record = encode_record(message)
            if found and nbytes + len(record) > _MOST_PULLED_BYTES:
                stop = message.queue_offset
                break
            found.append(record)
            nbytes += len(record)
        if not found:
            return PullOutcome(PullStatus.NO_MATCHED_MSG, stop, first, end)
        return PullOutcome(PullStatus.FOUND, stop, first, end, b"".join(found))

    def _stop(self, queue: MessageQueue, start: int, count: int) -> int:
        """Return where a pull of at most `count` messages stops: after whole units, and at least one."""
        read = self._read[queue]
        stop = min(read[start].queue_offset + count, len(read))
        if stop < len(read) and read[stop] is read[stop - 1]:
            unit = read[stop].queue_offset
            if unit > start:
                return unit
            while stop < len(read) and read[stop] is read[unit]:
                stop += 1
        return stop

    def view(self, physical_offset: int) -> MessageExt | None:
        """Return the message at a commit-log offset, a half message with the internal topic that has it."""
        if not 0 <= physical_offset < len(self.log):
            return None
        entry = self.log[physical_offset]
        queue = entry.stored_in
        return replace(entry.read, topic=HALF_TOPIC, queue_id=0) if queue.topic == HALF_TOPIC else entry.read

    def search(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the first offset stored at or after a time, or the end."""
        read = self._read.get(queue, [])
        return bisect.bisect_left(read, timestamp_ms, key=lambda message: message.store_timestamp)

    def earliest(self, queue: MessageQueue) -> int:
        """Return the store time of the queue's first message; -1 if the queue is empty."""
        return next((message.store_timestamp for message in self._read.get(queue, ())), -1)

    def check(self, address: str, physical_offset: int, now: float) -> TransactionCheck:
        """Store a half message again, as brokers do (docs/internals/messages.md#checks), and return the check."""
        half = self.log[physical_offset]
        message = self.copy(physical_offset, now, stored_in=half.stored_in)
        unique_id = message.unique_id or ""
        return TransactionCheck(
            address=address,
            message=message,
            tran_state_table_offset=message.queue_offset,
            commit_log_offset=message.physical_offset,
            msg_id=unique_id,
            transaction_id=unique_id,
            offset_msg_id=message.offset_msg_id,
            broker_name=half.meant_for.broker_name,
        )
