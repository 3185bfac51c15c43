"""The messages of a fake broker, its slaves, and a power failure."""

from __future__ import annotations

from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.message_ext import PullRequest, PullStatus, PullTarget
from rocketmq_spark.testing.store import MessageStore

QUEUE = MessageQueue("orders", "broker-0", 0)


def with_units() -> MessageStore:
    """A store with a message, and a batch of three messages that was stored as one."""
    store = MessageStore()
    store.put(QUEUE, [Message("orders", b"first")], 1.0)
    items = [Message("orders", b"%d" % number) for number in range(3)]
    store.append(Message("orders", b"unit"), QUEUE, QUEUE, 2.0, sys_flag=0xC0, items=items)
    return store


def test_slave_has_all_messages_of_a_unit() -> None:
    slave = MessageStore("127.0.0.1:10921")
    slave.copy_from(with_units())
    assert slave.end(QUEUE) == 4
    assert [message.body for message in slave.messages(QUEUE, 0, 4)] == [b"first", b"unit"]
    assert [message.body for message in slave.queues[QUEUE]] == [b"first", b"0", b"1", b"2"]


def test_power_failure_takes_all_messages_of_a_unit() -> None:
    store = with_units()
    store.truncate(1)
    assert store.end(QUEUE) == 1
    store.put(QUEUE, [Message("orders", b"next")], 3.0)
    assert [message.queue_offset for message in store.messages(QUEUE, 0, 2)] == [0, 1]


def test_messages_that_a_slave_deleted_stay_deleted() -> None:
    master, slave = with_units(), MessageStore("127.0.0.1:10921")
    slave.expired[QUEUE], slave.removed[QUEUE] = 1, 4
    master.expired[QUEUE], master.removed[QUEUE] = 4, 1
    slave.copy_from(master)
    assert (slave.expired[QUEUE], slave.removed[QUEUE]) == (4, 4)


def test_an_answer_has_at_most_256_kib_or_one_message() -> None:
    store = MessageStore()
    store.put(QUEUE, [Message("orders", b"x" * size) for size in (100_000, 100_000, 100_000, 300_000, 1)], 1.0)

    def next_offset(offset: int) -> int:
        return store.pull(PullRequest(PullTarget(QUEUE, "readers", 32, "*", "TAG"), "", offset)).next_begin_offset

    assert [next_offset(offset) for offset in range(5)] == [2, 3, 3, 4, 5]


def test_pull_passes_over_all_deleted_messages() -> None:
    store = MessageStore()
    store.put(QUEUE, [Message("orders", b"x")] * 50, 1.0)
    store.removed[QUEUE] = 40
    outcome = store.pull(PullRequest(PullTarget(QUEUE, "readers", 1, "*", "TAG"), "127.0.0.1:10911", 10))
    assert (outcome.status, outcome.next_begin_offset) == (PullStatus.OFFSET_ILLEGAL, 40)
