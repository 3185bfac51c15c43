"""A broker that ends many half messages."""

from __future__ import annotations

import queue as queues
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message import SendOutcome
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.processes import PATIENCE, wait_for
from tests.support.transactions import Transactional, topic_of

pytestmark = [pytest.mark.faults, pytest.mark.integration]

# A broker closes the connection of a registered producer 120 s after its last heart-beat, whatever is in flight.
# A machine under load may need that long for 20,000 transactions.
BEAT_EACH = 1000

ItemT = TypeVar("ItemT")
OutcomeT = TypeVar("OutcomeT", SendOutcome, RocketMQError | None)


def pipelined(items: Sequence[ItemT], start: Callable[[ItemT, Callable[[OutcomeT], None]], None]) -> list[OutcomeT]:
    """Start each item, 128 at once, and again after an error that lets it; return the outcomes."""
    window, outcomes = threading.BoundedSemaphore(128), list[OutcomeT]()
    waiting: queues.SimpleQueue[ItemT | None] = queues.SimpleQueue()

    def begin(item: ItemT) -> None:
        def ended(outcome: OutcomeT) -> None:
            error = outcome.error if isinstance(outcome, SendOutcome) else outcome
            window.release()
            # A half message that is stored twice stays open and is never delivered. An end must not be repeated unless
            # the broker has not executed it.
            repeatable = isinstance(outcome, SendOutcome) or (error is not None and not error.maybe_stored)
            if error is not None and error.retriable and repeatable:
                waiting.put(item)
                return
            outcomes.append(outcome)
            if len(outcomes) == len(items):
                waiting.put(None)

        assert window.acquire(timeout=PATIENCE)
        start(item, ended)

    for item in items:
        waiting.put(item)
    while (next_item := waiting.get(timeout=PATIENCE)) is not None:
        begin(next_item)
    return outcomes


# A broker with the default transaction store hangs after about 20,000 ends.
@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.long)])
def test_broker_executes_many_pipelined_transaction_ends(two_brokers: LocalCluster, count: int) -> None:
    address = two_brokers.brokers[0].address
    with RemotingTransport([two_brokers.name_server]) as transport:
        topic = topic_of(two_brokers, transport)
        producer = Transactional(transport, address, topic)

        def commit(messages: int) -> set[RocketMQError | None]:
            halves: list[SendOutcome] = []
            for start in range(0, messages, BEAT_EACH):
                producer.beat()
                requests = [producer.half_request(b"x") for _ in range(min(BEAT_EACH, messages - start))]
                halves += pipelined(requests, lambda one, done: transport.send(one, PATIENCE, done))
            assert {half.error for half in halves} == {None}
            ends = [producer.end_of(half) for half in halves]
            errors: list[RocketMQError | None] = []
            for start in range(0, messages, BEAT_EACH):
                producer.beat()
                errors += pipelined(
                    ends[start : start + BEAT_EACH],
                    lambda end, done: transport.end_transaction(address, end, PATIENCE, done),
                )
            return set(errors)

        assert commit(count) == {None}
        # The broker still takes a transaction, and each message is delivered once: a busy broker executes no end.
        assert commit(1) == {None}
        wait_for(lambda: transport.max_offset(producer.queue, address, PATIENCE) >= count + 1)
        assert transport.max_offset(producer.queue, address, PATIENCE) == count + 1
