"""What every transport promises (transport/base.py), whatever it speaks.

`Promises` are tests against a `Seam`, which the fixture `seam` makes: with servers of the tests in
unit/transport/test_contract.py, with real ones in integration/test_transport_contract.py.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

import pytest

from rocketmq_spark.errors import (
    RemotingConnectException,
    RemotingException,
    RemotingTimeoutException,
    RocketMQError,
    TopicRouteStaleException,
)
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendRequest, SendStatus
from rocketmq_spark.model.message_ext import PullOutcome, PullRequest, PullStatus, PullTarget
from rocketmq_spark.protocol.remoting.records import (
    decode_records,
    encode_batch,
    encode_properties,
    unique_id,
    unique_id_prefix,
)
from rocketmq_spark.transport.base import ProxyTransport, ReadTransport
from tests.support.peer import refused_address
from tests.support.processes import PATIENCE


class Outcomes(list[Any]):
    """A callback that keeps its arguments, and that a test can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self.threads: list[threading.Thread] = []

    def __call__(self, item: Any) -> None:
        with self._changed:
            self.threads.append(threading.current_thread())
            self.append(item)
            self._changed.notify_all()

    def wait(self, count: int) -> Outcomes:
        """Wait until there are `count` items; return this list."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self) >= count, PATIENCE), f"{len(self)} of {count} came: {self}"
        return self


# Time-out of requests to silent servers, seconds.
SOON = 0.1

_PREFIX = unique_id_prefix(b"\x7f\0\0\1", 4711, 1)
_NUMBERS = itertools.count(int(time.time()) << 16)


def next_id() -> str:
    """A message id that no other call returns."""
    return unique_id(_PREFIX, next(_NUMBERS))


def single(topic: str, body: bytes, **properties: str) -> EncodedBatch:
    """One message, as the producer encodes it."""
    text = encode_properties({"UNIQ_KEY": next_id(), "WAIT": "true", **properties}).decode()
    half = 4 if "TRAN_MSG" in properties else 0
    return EncodedBatch(topic, (body,), 1, len(body), batch=False, properties=text, sys_flag=half)


def batch(topic: str, *bodies: bytes) -> EncodedBatch:
    """Several messages in two pieces."""
    body = memoryview(encode_batch([Message(topic, body, properties={"UNIQ_KEY": next_id()}) for body in bodies]))
    half = len(body) // 2
    return EncodedBatch(topic, (body[:half], body[half:]), len(bodies), len(body))


class Seam(ABC):
    """A transport and a topic of its servers. `queue` is of that topic, which exists and is empty.

    `address` is the address of the queue's broker, or of the proxy.
    """

    def __init__(self, transport: ProxyTransport, queue: MessageQueue, address: str) -> None:
        self.transport = transport
        self.queue = queue
        self.address = address
        self.stack = ExitStack()

    @property
    def topic(self) -> str:
        return self.queue.topic

    @abstractmethod
    def stored(self, count: int) -> Sequence[Message]:
        """Wait until the topic holds `count` messages, then return all of them."""

    @abstractmethod
    def elsewhere(self, address: str) -> tuple[MessageQueue, str]:
        """Return a queue as it would be at another address."""

    @abstractmethod
    def another(self, address: str) -> ProxyTransport:
        """Return a transport of the same kind that asks this address for routes."""

    def dead(self) -> tuple[MessageQueue, str]:
        """Return a queue whose address refuses connections."""
        return self.elsewhere(refused_address())

    def silent(self) -> tuple[MessageQueue, str]:
        """Return a queue whose server accepts connections and never answers."""
        return self.elsewhere(self.silent_address())

    def silent_address(self) -> str:
        listener = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def pass_time(self, seconds: float) -> None:  # noqa: B027 - needed by manual clocks only
        """Let time pass."""

    def request(self, encoded: EncodedBatch, where: tuple[MessageQueue, str] | None = None) -> SendRequest:
        queue, address = where or (self.queue, self.address)
        return SendRequest(encoded, queue, address, "pg", "TBW102", 4, int(time.time() * 1000))

    def send(self, *encoded: EncodedBatch, timeout: float = PATIENCE, **others: Any) -> Outcomes:
        """Send all batches, wait for their outcomes, and return these in the order of the answers."""
        outcomes = Outcomes()
        for one in encoded:
            self.transport.send(self.request(one, **others), timeout, outcomes)
        self.pass_time(min(timeout, SOON))
        return outcomes.wait(len(encoded))


class Promises:
    """The tests; a subclass in a test module runs them."""

    def test_batches_and_singles_are_stored_and_acknowledged(self, seam: Seam) -> None:
        outcomes = seam.send(
            batch(seam.topic, b"one", b"two"), single(seam.topic, b"three", TAGS="a", KEYS="k1 k2", mine="yours")
        )
        assert [(one.status, one.error) for one in outcomes] == [(SendStatus.SEND_OK, None)] * 2
        assert {(one.queue.topic, one.queue.broker_name) for one in outcomes} == {(seam.topic, seam.queue.broker_name)}
        assert all(one.latency_ms >= 0 for one in outcomes)
        stored = {message.body: message for message in seam.stored(3)}
        assert sorted(stored) == [b"one", b"three", b"two"]
        three = stored[b"three"]
        assert (three.tags, three.keys, three.user_properties["mine"]) == ("a", "k1 k2", "yours")

    def test_every_send_has_one_outcome_and_not_on_the_thread_that_sends(self, seam: Seam) -> None:
        sending = threading.Lock()
        outcomes = Outcomes()

        def on_outcome(outcome: Any) -> None:
            # The lock is held during `send`: calling this inside `send`, on the same thread, would block here.
            assert sending.acquire(timeout=PATIENCE)
            sending.release()
            outcomes(outcome)

        where = [None, seam.dead(), None]
        for target in where:
            with sending:
                seam.transport.send(seam.request(single(seam.topic, b"x"), target), PATIENCE, on_outcome)
        seam.pass_time(0.0)
        outcomes.wait(3)
        seam.transport.close()
        assert len(outcomes) == 3
        assert sum(outcome.error is None for outcome in outcomes) == 2

    def test_the_same_request_sent_again_keeps_its_ids(self, seam: Seam) -> None:
        encoded = batch(seam.topic, b"one", b"two")
        seam.send(encoded, encoded)
        stored = seam.stored(4)
        ids = {body: {message.unique_id for message in stored if message.body == body} for body in (b"one", b"two")}
        assert [len(found) for found in ids.values()] == [1, 1]
        assert ids[b"one"] != ids[b"two"]

    def test_many_threads_can_send(self, seam: Seam) -> None:
        outcomes = Outcomes()

        def send(number: int) -> None:
            for turn in range(10):
                encoded = batch(seam.topic, *(b"%d-%d-%d" % (number, turn, row) for row in range(5)))
                seam.transport.send(seam.request(encoded), PATIENCE, outcomes)

        threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        seam.pass_time(0.0)
        assert {outcome.status for outcome in outcomes.wait(40)} == {SendStatus.SEND_OK}
        assert len({message.body for message in seam.stored(200)}) == 200

    def test_a_dead_address_is_a_connect_failure_and_nothing_is_stored(self, seam: Seam) -> None:
        where = seam.dead()
        [outcome] = seam.send(single(seam.topic, b"x"), where=where)
        assert outcome.status is None
        assert isinstance(outcome.error, RemotingConnectException)
        assert outcome.error.maybe_stored is False
        assert seam.stored(0) == []

    def test_send_without_an_answer_ends_at_its_deadline(self, seam: Seam) -> None:
        outcomes = Outcomes()
        request = seam.request(single(seam.topic, b"x"), seam.silent())
        seam.transport.send(request, 3600.0, outcomes, within=SOON)
        seam.pass_time(SOON)
        [outcome] = outcomes.wait(1)
        assert isinstance(outcome.error, RemotingException)

    def test_known_topic_has_a_route_and_unknown_topic_has_none(self, seam: Seam) -> None:
        route = seam.transport.query_route(seam.topic, PATIENCE)
        assert seam.address in {broker.master for broker in route.broker_datas}
        assert seam.queue.broker_name in {queue.broker_name for queue in route.queue_datas if queue.writable}
        with pytest.raises(TopicRouteStaleException) as raised:
            seam.transport.query_route(f"no-{seam.topic}", PATIENCE)
        assert raised.value.refresh_route is True

    def test_route_lookup_without_an_answer_ends_at_its_deadline(self, seam: Seam) -> None:
        with pytest.raises(RemotingException, match="route of topic"):
            seam.another(seam.silent_address()).query_route(seam.topic, SOON)
        with pytest.raises(RemotingTimeoutException):
            seam.another(seam.address).query_route(seam.topic, 0.0)

    def test_probe_distinguishes_unreachable_from_reachable_addresses(self, seam: Seam) -> None:
        seam.transport.probe(seam.queue, seam.address, PATIENCE)
        with pytest.raises(RemotingConnectException):
            seam.transport.probe(*seam.dead(), PATIENCE)

    def test_heartbeats_and_unregistrations_do_not_raise(self, seam: Seam) -> None:
        seam.transport.heart_beat(seam.address, "10.0.0.1@test", ["pg"], PATIENCE)
        seam.transport.unregister_client(seam.address, "10.0.0.1@test", "pg", PATIENCE)

    def test_close_completes_every_request_in_flight_once(self, seam: Seam) -> None:
        outcomes, where = Outcomes(), seam.silent()
        for _ in range(5):
            seam.transport.send(seam.request(single(seam.topic, b"x"), where), PATIENCE, outcomes)
        assert seam.transport.closed is False
        seam.transport.close()
        seam.transport.close()
        assert [isinstance(outcome.error, RemotingException) for outcome in outcomes] == [True] * 5
        assert seam.transport.closed is True

    def test_closed_transport_rejects_requests(self, seam: Seam) -> None:
        outcomes = Outcomes()
        seam.transport.close()
        with pytest.raises(RocketMQError, match="closed"):
            seam.transport.send(seam.request(single(seam.topic, b"late")), PATIENCE, outcomes)
        with pytest.raises(RocketMQError, match="closed"):
            seam.transport.query_route(seam.topic, PATIENCE)
        assert outcomes == []


class ReadPromises:
    """The promises of a `ReadTransport`."""

    def pulled(self, seam: Seam, offset: int, count: int = 32, where: tuple[MessageQueue, str] | None = None) -> Any:
        """Return the outcome of one pull."""
        queue, address = where or (seam.queue, seam.address)
        outcomes = Outcomes()
        target = PullTarget(queue, "cg", count, "*", "TAG")
        held = threading.Lock()

        def on_pulled(outcome: PullOutcome) -> None:
            # The lock is held during `pull`: calling this inside `pull`, on the same thread, would block here.
            assert held.acquire(timeout=PATIENCE)
            held.release()
            outcomes(outcome)

        with held:
            self.reads(seam).pull(PullRequest(target, address, offset), PATIENCE, on_pulled)
        seam.pass_time(0.0)
        return outcomes.wait(1)[0]

    def reads(self, seam: Seam) -> ReadTransport:
        return cast("ReadTransport", seam.transport)

    def test_stored_messages_are_pulled_from_any_offset(self, seam: Seam) -> None:
        seam.send(batch(seam.topic, b"one", b"two", b"three"))
        seam.send(single(seam.topic, b"four", TAGS="a"))
        seam.stored(4)
        for offset, count, bodies in ((0, 3, [b"one", b"two", b"three"]), (2, 32, [b"three", b"four"])):
            outcome = self.pulled(seam, offset, count)
            assert (outcome.status, outcome.error) == (PullStatus.FOUND, None)
            assert (outcome.next_begin_offset, outcome.min_offset, outcome.max_offset) == (offset + len(bodies), 0, 4)
            records = decode_records(outcome.body)
            assert [record.body for record in records] == bodies
            assert [record.queue_offset for record in records] == list(range(offset, offset + len(bodies)))
        assert records[-1].properties["TAGS"] == "a"

    def test_pull_at_the_end_has_no_message_and_beyond_it_is_illegal(self, seam: Seam) -> None:
        assert self.pulled(seam, 0).status is PullStatus.NO_NEW_MSG
        seam.send(batch(seam.topic, b"one", b"two"))
        seam.stored(2)
        at_end, beyond = self.pulled(seam, 2), self.pulled(seam, 7)
        assert (at_end.status, at_end.next_begin_offset, at_end.max_offset) == (PullStatus.NO_NEW_MSG, 2, 2)
        assert beyond.status is PullStatus.OFFSET_ILLEGAL
        assert beyond.next_begin_offset <= 2

    def test_close_ends_the_pulls_that_wait(self, seam: Seam) -> None:
        queue, address = seam.silent()
        outcomes = Outcomes()
        target = PullTarget(queue, "cg", 32, "*", "TAG")
        self.reads(seam).pull(PullRequest(target, address, 0, 3_600_000), PATIENCE, outcomes)
        seam.transport.close()
        [outcome] = outcomes.wait(1)
        assert outcome.status is None
        assert isinstance(outcome.error, RemotingException)
        with pytest.raises(RocketMQError, match="closed"):
            self.reads(seam).pull(PullRequest(target, address, 0), PATIENCE, outcomes)

    def test_all_topics_are_listed(self, seam: Seam) -> None:
        assert seam.topic in self.reads(seam).topics(PATIENCE)

    def test_group_lists_its_registered_consumers(self, seam: Seam) -> None:
        reads, group = self.reads(seam), f"group-{seam.topic}"
        assert list(reads.consumers(group, seam.address, PATIENCE)) == []
        reads.register_consumer("10.0.0.2@spark#17", group, seam.address, PATIENCE)
        assert list(reads.consumers(group, seam.address, PATIENCE)) == ["10.0.0.2@spark#17"]

    def test_group_offset_is_accepted(self, seam: Seam) -> None:
        self.reads(seam).update_consumer_offset(seam.queue, "cg", 5, seam.address, PATIENCE)
        seam.transport.close()
        with pytest.raises(RocketMQError, match="closed"):
            self.reads(seam).update_consumer_offset(seam.queue, "cg", 5, seam.address, PATIENCE)
