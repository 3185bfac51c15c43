"""A fake broker with a manual clock and without sockets: its queue of sends, checks, deliveries and timers."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import FLAG_ONEWAY, RemotingCommand
from rocketmq_spark.testing import BrokerSettings, Reply, TopicSettings
from rocketmq_spark.testing.fake_broker import FakeBroker
from rocketmq_spark.testing.fake_requests import HANDLERS


class ManualTimers:
    """Timers that run while `advance` moves the clock."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (self.now + seconds, next(self._numbers), call))

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._calls and self._calls[0][0] <= end:
            self.now, _, call = heapq.heappop(self._calls)
            call()
        self.now = end


class Client:
    """One connection to a broker; it keeps what the broker sends."""

    def __init__(self, **settings: Any) -> None:
        self.timers = ManualTimers()
        self.broker = FakeBroker(
            "a", self.timers, HANDLERS, address="127.0.0.1:10911", settings=BrokerSettings(**settings)
        )
        self.broker.storage.topics["orders"] = TopicSettings()
        self.received: list[RemotingCommand] = []
        self.closed = False
        self._opaques = itertools.count(1)

    def send(self, command: RemotingCommand) -> None:
        self.received.append(command)

    def close(self) -> None:
        self.closed = True

    def request(self, code: int, fields: dict[str, str], body: bytes = b"", flag: int = 0) -> None:
        self.broker.receive(RemotingCommand(code, next(self._opaques), fields, body, flag), self)

    def message(self, properties: str = "", sys_flag: int = 0, **fields: str) -> None:
        """Send a message to queue 0."""
        values = {"a": "pg", "b": "orders", "c": "TBW102", "d": "4", "e": "0", "f": str(sys_flag), "g": "0", "h": "0"}
        self.request(RequestCode.SEND_MESSAGE_V2, {**values, "i": properties, "m": "false", **fields}, b"x")

    @property
    def codes(self) -> list[int]:
        return [command.code for command in self.received]

    @property
    def stored(self) -> int:
        return sum(entry.stored_in.topic == "orders" for entry in self.broker.storage.store.log)


def test_send_waits_for_a_thread_at_most_the_time_in_the_queue() -> None:
    client = Client(send_threads=2, service_time=lambda rows, nbytes: 0.125 * rows)
    for _ in range(5):
        client.message()
    # Parts of a second that a float has exactly.
    for codes in ([], [0, 0], [0, 0], [0, 0, ResponseCode.SYSTEM_BUSY, 0, 0]):
        client.timers.advance(0.0625)
        assert client.codes == codes
    assert client.stored == 4


def test_pause_stops_threads_and_timers_until_resume() -> None:
    client = Client(send_threads=1, service_time=lambda rows, nbytes: 0.125)
    client.message()
    client.message()
    client.broker.pause()
    client.message()
    client.timers.advance(60.0)
    assert client.codes == []
    client.broker.resume()
    client.timers.advance(0.125)
    # The second send was in the queue for a minute, and the third one arrives only now.
    assert sorted(client.codes) == [0, 0, ResponseCode.SYSTEM_BUSY]


def test_stopped_broker_forgets_its_queue_and_its_timers() -> None:
    client = Client(send_threads=1, service_time=lambda rows, nbytes: 0.125)
    client.message()
    client.broker.stop()
    client.message()
    client.broker.start()
    client.timers.advance(60.0)
    assert (client.codes, client.stored) == ([], 0)
    client.message()
    client.timers.advance(0.125)
    assert (client.codes, client.stored) == ([0], 1)


@pytest.mark.parametrize("fields", [{"f": "many"}, {"e": ""}])
def test_malformed_send_is_an_error_and_frees_its_thread(fields: dict[str, Any]) -> None:
    client = Client(send_threads=1)
    for _ in range(3):
        client.message(**fields)
    client.message()
    assert client.codes == [*[ResponseCode.SYSTEM_ERROR] * 3, 0]


def test_half_message_is_checked_15_times_from_its_timeout_on() -> None:
    client = Client(transaction_timeout=6.0, transaction_check_interval=30.0)
    body = b'{"clientID":"me","producerDataSet":[{"groupName":"pg"}],"consumerDataSet":[]}'
    client.request(RequestCode.HEART_BEAT, {}, body)
    client.message("TRAN_MSG\x01true\x02PGROUP\x01pg\x02", sys_flag=4)
    client.received.clear()
    client.timers.advance(5.9)
    assert client.codes == []
    for _ in range(20):
        client.timers.advance(30.0)
    assert client.codes == [RequestCode.CHECK_TRANSACTION_STATE] * 15


@pytest.mark.parametrize(("delay", "seconds"), [("DELAY\x013", 10.0), ("TIMER_DELAY_SEC\x017", 7.0)])
def test_delayed_message_is_delivered_at_its_time(delay: str, seconds: float) -> None:
    client = Client()
    client.message(f"{delay}\x02")
    client.broker.stop()
    client.broker.start()
    client.timers.advance(seconds - 0.5)
    assert client.stored == 0
    client.timers.advance(0.5)
    assert client.stored == 1


def test_flush_time_delays_the_answer_but_not_the_message() -> None:
    client = Client(sync_flush=True, flush_time=0.5, sync_flush_timeout=1.0)
    client.message()
    assert (client.codes, client.stored) == ([], 1)
    client.timers.advance(0.5)
    client.broker.settings.flush_time = 2.0
    client.message()
    client.timers.advance(1.0)
    assert client.codes == [0, ResponseCode.FLUSH_DISK_TIMEOUT]


def test_oneway_request_has_no_answer_even_if_a_reply_is_played() -> None:
    client = Client()
    client.broker.play(Reply.code(2), Reply(repeats=1), code=RequestCode.GET_MAX_OFFSET)
    for _ in range(3):
        client.request(RequestCode.GET_MAX_OFFSET, {"topic": "orders", "queueId": "0"}, flag=FLAG_ONEWAY)
    assert client.codes == []
    client.broker.play(Reply(closes=True, delay=1.0))
    client.message()
    assert not client.closed
    client.timers.advance(1.0)
    assert client.closed


@pytest.mark.parametrize(
    ("properties", "queue_id"),
    [
        ("_SYS_MSG_PRIORITY_\x012\x02", 2),
        ("_SYS_MSG_PRIORITY_\x0199\x02", 3),
        # A message of another type has no priority.
        ("_SYS_MSG_PRIORITY_\x012\x02__SHARDINGKEY\x01s\x02", 0),
    ],
)
def test_priority_of_a_message_chooses_its_queue(properties: str, queue_id: int) -> None:
    client = Client()
    client.broker.storage.topics["orders"] = TopicSettings(4, 4)
    client.message(properties)
    [stored] = client.broker.storage.store.log
    assert stored.read.queue_id == queue_id
    assert ("_SYS_MSG_PRIORITY_" in stored.read.properties) == (queue_id > 0)


def test_message_with_a_lite_topic_names_the_queue_of_its_copy() -> None:
    client = Client()
    client.message("__LITE_TOPIC\x01chat-1\x02")
    [stored] = client.broker.storage.store.log
    assert stored.read.properties["INNER_MULTI_DISPATCH"] == "%LMQ%$orders$chat-1"
