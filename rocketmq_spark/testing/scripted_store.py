"""The messages that scripted brokers store, by queue and by a commit-log offset over all queues.

A half message is in the queue of the half topic, and after its commit also in its own. Nothing expires by itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Final, NamedTuple

from rocketmq_spark.model.message import EncodedBatch, Encoding, Message, MessageQueue, SendRequest
from rocketmq_spark.model.message_ext import MessageExt, PullOutcome, PullRequest, PullStatus
from rocketmq_spark.model.properties import KEYS, TAGS, UNIQ_KEY
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, EndTransaction, TransactionCheck
from rocketmq_spark.protocol.remoting.records import encode_record, messages_in
from rocketmq_spark.testing.replies import MOST_PULLED

HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"

_STORE_HOST: Final = "127.0.0.1:10911"
_BORN_HOST: Final = "127.0.0.1:50000"


class _Entry(NamedTuple):
    """An entry of the commit log: a message as sent and as read, its actual queue and its final queue."""

    sent: Message
    read: MessageExt
    stored_in: MessageQueue
    meant_for: MessageQueue


class ScriptedStore:
    """Stored messages, acknowledged or not.

    `queues` has the messages that consumers see, and those of the half topic. `expired` and `removed` have the first
    remaining offset of each queue; brokers correct the minimum offset only for `expired`.
    """

    def __init__(self) -> None:
        self.queues: dict[MessageQueue, list[Message]] = {}
        self.expired: dict[MessageQueue, int] = {}
        self.removed: dict[MessageQueue, int] = {}
        self._log: list[_Entry] = []

    def keep(self, request: SendRequest, now: float) -> tuple[int, str]:
        """Store a request's messages; return the queue offset of the first, and the comma-separated ids."""
        batch, queue = request.batch, request.queue
        messages = _messages_of(batch)
        half = not batch.batch and messages[0].is_half_message
        stored_in = MessageQueue(HALF_TOPIC, queue.broker_name, 0) if half else queue
        read = [
            self._append(message, stored_in, queue, batch.sys_flag, request.born_timestamp, now) for message in messages
        ]
        return read[0].queue_offset, ",".join(message.offset_msg_id for message in read)

    def put(self, queue: MessageQueue, messages: Iterable[Message], now: float) -> None:
        """Store messages without a request."""
        for message in messages:
            self._append(message, queue, queue, 0, int(now * 1000), now)

    def messages(self, queue: MessageQueue, start: int, stop: int) -> list[MessageExt]:
        """Return the messages of a queue in a range of offsets."""
        entries = (entry.read for entry in self._log if entry.stored_in == queue)
        return [message for message in entries if start <= message.queue_offset < stop]

    def pull(self, request: PullRequest, most: int) -> PullOutcome:
        """Return the outcome of a pull with at most `most` messages."""
        queue, offset = request.target.queue, request.offset
        first, end = self.expired.get(queue, 0), len(self.queues.get(queue, ()))
        if offset < first or offset > end:
            return PullOutcome(PullStatus.OFFSET_ILLEGAL, first if offset < first else end, first, end)
        stop = min(offset + max(1, min(request.target.max_msg_nums, most, MOST_PULLED)), end)
        if offset == stop:
            return PullOutcome(PullStatus.NO_NEW_MSG, offset, first, end)
        left = max(offset, self.removed.get(queue, 0))
        if left >= stop:
            return PullOutcome(PullStatus.OFFSET_ILLEGAL, stop, first, end)
        body = b"".join(map(encode_record, self.messages(queue, left, stop)))
        return PullOutcome(PullStatus.FOUND, stop, first, end, body)

    def view(self, physical_offset: int) -> MessageExt | None:
        """Return the message at a commit-log offset, with its final topic and queue."""
        return self._log[physical_offset].read if 0 <= physical_offset < len(self._log) else None

    def search(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the first offset stored at or after a time, or the end."""
        times = (entry.read.store_timestamp for entry in self._log if entry.stored_in == queue)
        return sum(stored < timestamp_ms for stored in times)

    def earliest(self, queue: MessageQueue) -> int:
        """Return the store time of the queue's first message; -1 if the queue is empty."""
        return next((entry.read.store_timestamp for entry in self._log if entry.stored_in == queue), -1)

    def end_transaction(self, request: EndTransaction, now: float) -> None:
        """Make a committed half message visible; like a broker, again for each call."""
        if request.commit_or_rollback == TRANSACTION_COMMIT_TYPE and request.commit_log_offset < len(self._log):
            half = self._log[request.commit_log_offset]
            self._append(half.sent, half.meant_for, half.meant_for, half.read.sys_flag, half.read.born_timestamp, now)

    def check(self, address: str, physical_offset: int, now: float) -> TransactionCheck:
        """Store a half message again, as a broker does for each check, and return the check."""
        half = self._log[physical_offset]
        message = self._append(
            half.sent, half.stored_in, half.meant_for, half.read.sys_flag, half.read.born_timestamp, now
        )
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

    def _append(
        self,
        message: Message,
        stored_in: MessageQueue,
        meant_for: MessageQueue,
        sys_flag: int,
        born_timestamp: int,
        now: float,
    ) -> MessageExt:
        kept = self.queues.setdefault(stored_in, [])
        read = MessageExt(
            topic=message.topic,
            body=message.body,
            flag=message.flag,
            properties=message.properties,
            queue_id=meant_for.queue_id,
            queue_offset=len(kept),
            physical_offset=len(self._log),
            sys_flag=sys_flag,
            born_timestamp=born_timestamp,
            born_host=_BORN_HOST,
            store_timestamp=int(now * 1000),
            store_host=_STORE_HOST,
            reconsume_times=0,
            prepared_transaction_offset=0,
            body_crc=zlib.crc32(message.body) & 0x7FFFFFFF,
        )
        kept.append(message)
        self._log.append(_Entry(message, read, stored_in, meant_for))
        return read


def _messages_of(batch: EncodedBatch) -> list[Message]:
    if batch.encoding is Encoding.REMOTING:
        return messages_in(batch)
    # Tests over remoting do not need protobuf.
    from rocketmq_spark.protocol.grpc._pb.service_pb2 import SendMessageRequest

    messages = []
    for message in SendMessageRequest.FromString(b"".join(batch.body)).messages:
        system = message.system_properties
        named = {KEYS: " ".join(system.keys), TAGS: system.tag, UNIQ_KEY: system.message_id}
        properties = {name: text for name, text in named.items() if text} | dict(message.user_properties)
        messages.append(Message(message.topic.name, message.body, properties=properties))
    return messages
