"""What a fake broker stores: topics, messages, delays, half messages, and committed offsets.

A slave copies all of this from its master. The settings of fake brokers, their topics and proxies are here, too.
Follows ``DefaultMessageStore.java``, ``TopicConfigManager.java`` and ``ScheduleMessageService.java``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import rocketmq_spark.model.properties as const
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.names import AUTO_CREATE_TOPIC
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.responses import BATCH_CQ, DEFAULT_REGION, QUEUE_TYPE
from rocketmq_spark.testing import fake_sends
from rocketmq_spark.testing.fake_sends import Refusal, Send
from rocketmq_spark.testing.store import MOST_PULLED, MessageStore

CLEANUP_POLICY: Final = "cleanup.policy"


@dataclass(slots=True)
class TopicSettings:
    """One topic on one broker."""

    read_queue_nums: int = 4
    write_queue_nums: int = 4
    perm: int = 6
    topic_sys_flag: int = 0
    order: bool = False
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def queue_nums(self) -> int:
        """Number of queues that exist, readable or not."""
        return max(self.read_queue_nums, self.write_queue_nums)

    @property
    def compacted(self) -> bool:
        """Whether the broker keeps only messages with a key."""
        return self.attributes.get(CLEANUP_POLICY) == "COMPACTION"


@dataclass(slots=True)
class BrokerSettings:
    """The settings of one broker, which may change while it runs. Times are seconds."""

    auto_create_topic: bool = True
    max_message_size: int = 4 * 1024 * 1024
    max_transfer_count: int = MOST_PULLED
    send_threads: int = 4
    send_queue_capacity: int = 10_000
    wait_time_in_send_queue: float = 0.2
    # How long a send thread is busy with a request (s), from its rows and bytes.
    service_time: Callable[[int, int], float] = lambda _rows, _nbytes: 0.0
    sync_flush: bool = False
    flush_time: float = 0.0
    # Without `sync_flush`: how often the broker flushes, and so the longest tail that a power failure takes.
    flush_interval: float = 0.5
    sync_flush_timeout: float = 5.0
    # The master answers after its slave has the message (SYNC_MASTER).
    sync_replication: bool = False
    replication_time: float = 0.0
    transaction_timeout: float = 6.0
    transaction_check_interval: float = 30.0
    transaction_check_max: int = 15
    permission: int = 6
    disk_full: bool = False


@dataclass(slots=True)
class ProxySettings:
    """The settings of a proxy. Times are seconds; they and the limits may change while it runs."""

    address: str = "127.0.0.1:0"
    # PEM files of the certificate and its key; without them the proxy speaks no TLS.
    certificate: tuple[Path, Path] | None = None
    # The authority of the certificates that clients must have; None: they need none.
    client_authority: Path | None = None
    max_message_size: int = 4 * 1024 * 1024
    topic_message_type_check: bool = True
    # How long the proxy waits for a broker's answer, and how long it remembers a half message.
    broker_timeout: float = 2.0
    transaction_data_expire: float = 30.0


class BrokerStorage:
    """The state of one broker that survives its restart.

    `later` calls a function after some seconds, while the broker runs. `on_topic` is called after `create_topic`,
    `on_stored` after messages were stored, copied or rolled back. `on_check` is called with the commit-log offset of a
    half message that the broker has to check.
    """

    def __init__(
        self,
        name: str,
        address: str,
        cluster: str,
        settings: BrokerSettings,
        time: Callable[[], float],
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.name = name
        self.cluster = cluster
        self.settings = settings
        self.topics: dict[str, TopicSettings] = {}
        self.store = MessageStore(address)
        # The next offsets of consumer groups, as committed.
        self.group_offsets: dict[tuple[str, MessageQueue], int] = {}
        self.on_topic: Callable[[], None] = lambda: None
        self.on_stored: Callable[[], None] = lambda: None
        self.on_check: Callable[[int], object] = lambda _: None
        self._time = time
        self._later = later
        self._ids = itertools.count(1)
        # By commit-log offset: the time of delivery of delayed messages, and the number of checks of half messages.
        self._delayed: dict[int, float] = {}
        self._halves: dict[int, int] = {}
        self._arrivals: list[Callable[[], None]] = []

    def create_topic(self, topic: str, settings: TopicSettings) -> None:
        """Create a topic, or overwrite its settings."""
        self.topics[topic] = settings
        self.on_topic()

    def when_stored(self, call: Callable[[], None]) -> None:
        """Call a function once, after the next message was stored."""
        self._arrivals.append(call)

    def store_send(self, send: Send, body: bytes) -> dict[str, str]:
        """Store a send's messages; return the ext fields of the answer. Refusal: nothing is stored."""
        settings = self._topic_of(send)
        queue_id = max(send.queue_id, 0)
        priority = fake_sends.priority_of(send)
        if priority is not None:
            queue_id = min(priority, settings.write_queue_nums - 1)
        queue = MessageQueue(send.topic, self.name, queue_id)
        fields = {"queueId": str(queue.queue_id), "MSG_REGION": DEFAULT_REGION, "TRACE_ON": "true"}
        if send.batch:
            fields |= self._store_batch(send, queue, settings, body)
        else:
            fields |= self._store_one(send, queue, settings)
        self._arrived()
        return fields

    def safety(self, send: Send, slaves: list[bool]) -> tuple[ResponseCode, float]:
        """Return the response code of a stored send, and the seconds until the broker answers.

        `slaves` has, for each slave, whether it executes anything.
        """
        settings, code, wait = self.settings, ResponseCode.SUCCESS, 0.0
        if not send.waits:
            return code, wait
        if settings.sync_flush:
            wait = min(settings.flush_time, settings.sync_flush_timeout)
            if settings.flush_time > settings.sync_flush_timeout:
                code = ResponseCode.FLUSH_DISK_TIMEOUT
        if settings.sync_replication:
            if not slaves:
                return ResponseCode.SLAVE_NOT_AVAILABLE, wait
            if not any(slaves) or settings.replication_time > settings.sync_flush_timeout:
                return ResponseCode.FLUSH_SLAVE_TIMEOUT, settings.sync_flush_timeout
            wait = max(wait, settings.replication_time)
        return code, wait

    def copy_from(self, master: BrokerStorage) -> None:
        """Take over a master's messages and topics; messages that the master does not have are dropped."""
        self.store.copy_from(master.store)
        self.topics = dict(master.topics)
        self.group_offsets = dict(master.group_offsets)
        self._delayed, self._halves = dict(master._delayed), dict(master._halves)
        self._arrived()

    def lose_unflushed(self) -> None:
        """Drop what a power failure would take: the messages since the last flush."""
        if self.settings.sync_flush:
            return
        flushed_ms = (self._time() - self.settings.flush_interval) * 1000
        log = self.store.log
        kept = next((at for at in range(len(log), 0, -1) if log[at - 1].read.store_timestamp <= flushed_ms), 0)
        self.store.truncate(kept)
        self._delayed = {offset: due for offset, due in self._delayed.items() if offset < kept}
        self._halves = {offset: checks for offset, checks in self._halves.items() if offset < kept}

    def restart(self) -> None:
        """Schedule deliveries and checks again, after the broker has started."""
        self._arrivals.clear()
        self.schedule()

    def schedule(self) -> None:
        """Schedule the delivery of all delayed messages, and the checks of all half messages."""
        for offset, due in self._delayed.items():
            self._deliver_later(offset, max(0.0, due - self._time()))
        for offset in self._halves:
            self._check_later(offset)

    def commit(self, offset: int) -> None:
        """Store a half message in its own queue; like a broker, again for each call."""
        self._halves.pop(offset, None)
        sent, read, _, queue, _ = self.store.log[offset]
        flags, born = read.sys_flag & ~0xC | 0x8, read.born_timestamp
        self.store.append(
            *(fake_sends.committed(sent), queue, queue, self._time()),
            sys_flag=flags,
            born_timestamp=born,
            prepared_transaction_offset=offset,
        )
        self._arrived()

    def roll_back(self, offset: int) -> None:
        """Check a half message no more."""
        self._halves.pop(offset, None)
        self.on_stored()

    def written_again(self, offset: int, copy: int) -> None:
        """Check the copy of a half message from now on."""
        if offset in self._halves:
            self._halves[copy] = self._halves.pop(offset)
            self._check_later(copy)
        self.on_stored()

    def recall(self, unique_id: str) -> bool:
        """Drop a delayed message; return whether there was one."""
        log = self.store.log
        offset = next((offset for offset in self._delayed if log[offset].read.unique_id == unique_id), None)
        if offset is not None:
            del self._delayed[offset]
        return offset is not None

    def _topic_of(self, send: Send) -> TopicSettings:
        """Return the settings of a send's topic, which the send may create."""
        if self.settings.disk_full:
            remark = "It may be caused by one of the following reasons: the broker's disk is full"
            raise Refusal(ResponseCode.SERVICE_NOT_AVAILABLE, f"service not available now. {remark}")
        settings = self.topics.get(send.topic)
        if settings is None:
            template = self.topics.get(send.default_topic)
            if template is None or not template.perm & 1:
                raise Refusal(ResponseCode.TOPIC_NOT_EXIST, f"topic[{send.topic}] not exist, apply first please!")
            nums = min(send.default_topic_queue_nums, template.write_queue_nums)
            settings = TopicSettings(nums, nums)
            self.create_topic(send.topic, settings)
        if send.queue_id >= settings.queue_nums:
            remark = f"request queueId[{send.queue_id}] is illegal, topic: {send.topic}, queues: {settings.queue_nums}"
            raise Refusal(ResponseCode.INVALID_PARAMETER, remark)
        return settings

    def _store_one(self, send: Send, queue: MessageQueue, settings: TopicSettings) -> dict[str, str]:
        now = self._time()
        placement = fake_sends.placement_of(send, now)
        if settings.compacted:
            fake_sends.check_keys(send)
        unique_id = send.properties.get(const.UNIQ_KEY) or f"{next(self._ids):032X}"
        message = fake_sends.with_additions(send, self.cluster, unique_id)
        stored_in = queue
        if placement.internal_topic:
            stored_in = MessageQueue(placement.internal_topic, self.name, 0)
            message = fake_sends.with_real_queue(message, queue)
        flags, born = send.sys_flag, send.born_timestamp
        stored = self.store.append(message, stored_in, queue, now, sys_flag=flags, born_timestamp=born)
        offset = stored.physical_offset
        fields = {"msgId": stored.offset_msg_id, "queueOffset": str(stored.queue_offset), "transactionId": unique_id}
        if placement.half:
            self._halves[offset] = 0
            self._check_later(offset)
        elif placement.delay is not None:
            self._delayed[offset] = now + placement.delay
            self._deliver_later(offset, placement.delay)
            if placement.is_timer:
                deliver_ms = int((now + placement.delay) * 1000)
                fields["recallHandle"] = fake_sends.recall_handle(queue, deliver_ms, unique_id)
        return fields

    def _store_batch(self, send: Send, queue: MessageQueue, settings: TopicSettings, body: bytes) -> dict[str, str]:
        now, first = self._time(), self.store.end(queue)
        messages = fake_sends.check_keys(send) if settings.compacted else send.messages
        if settings.attributes.get(QUEUE_TYPE) == BATCH_CQ and const.UNIQ_KEY in send.properties:
            unit = self.store.append(
                fake_sends.inner_batch(send, body, self.cluster, first),
                *(queue, queue, now),
                sys_flag=send.sys_flag | 0xC0,
                born_timestamp=send.born_timestamp,
                items=messages,
            )
            unique_id = send.properties[const.UNIQ_KEY]
            fields = {"batchUniqId": unique_id, "transactionId": unique_id}
            return {"msgId": unit.offset_msg_id, "queueOffset": str(first), **fields}
        stored = [
            self.store.append(message, queue, queue, now, sys_flag=send.sys_flag, born_timestamp=send.born_timestamp)
            for message in messages
        ]
        fields = {"msgId": ",".join(message.offset_msg_id for message in stored), "queueOffset": str(first)}
        if const.UNIQ_KEY in send.properties:
            fields["transactionId"] = send.properties[const.UNIQ_KEY]
        return fields

    def _deliver_later(self, offset: int, seconds: float) -> None:
        def deliver() -> None:
            if self._delayed.pop(offset, None) is not None:
                self.store.copy(offset, self._time())
                self._arrived()

        self._later(seconds, deliver)

    def _check_later(self, offset: int) -> None:
        checks = self._halves.get(offset)
        if checks is None or checks >= self.settings.transaction_check_max:
            return
        immunity = immunity_of(self.store.log[offset].read) or 0.0
        first = max(self.settings.transaction_timeout, immunity)

        def check() -> None:
            if offset in self._halves:
                self._halves[offset] += 1
                self.on_check(offset)
                if offset in self._halves:
                    self._check_later(offset)

        self._later(self.settings.transaction_check_interval if checks else first, check)

    def _arrived(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        for call in arrivals:
            call()
        self.on_stored()


def immunity_of(half: MessageExt) -> float | None:
    """Return the seconds after its birth in which a half message can be ended; None without a limit."""
    text = half.properties.get(const.CHECK_IMMUNITY_TIME_IN_SECONDS, "")
    return float(text) if text.isdigit() else None


def template_topic() -> dict[str, TopicSettings]:
    """Return the topic that a broker with ``autoCreateTopicEnable=true`` has from the start."""
    return {AUTO_CREATE_TOPIC: TopicSettings(8, 8, 7)}
