"""Half messages that the pipeline handles as batches: their order, retries and errors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from rocketmq_spark.deliveries.exactly_once.half_sender import half_rules, store_halves
from rocketmq_spark.errors import DeliveryError
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import MessageQueue, SendOutcome
from rocketmq_spark.model.message_ext import decode_message_id
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.sink.task import SendContext, write_rows
from rocketmq_spark.testing import FakeCluster, Reply
from tests.support.two_phase import TOPIC, Driver, MovedClock, driver, half_message

ROWS = [f"row-{number:03}" for number in range(300)]
BUSY = Reply.code(ResponseCode.SYSTEM_BUSY, "[TIMEOUT_CLEAN_QUEUE]")


class Sent:
    """The half messages that a sender has reported, and the sends that the brokers got."""

    def __init__(self, cluster: FakeCluster, driver: Driver) -> None:
        self._cluster = cluster
        self._driver = driver
        self._halves: list[tuple[MessageQueue, int, SendOutcome]] = []

    def send(self, bodies: list[str], *queues: MessageQueue | None) -> None:
        """Send each row to the next queue, in turn; None is any."""
        messages = [
            (half_message(body, "job#1", self._driver.options), queues[row % len(queues)])
            for row, body in enumerate(bodies)
        ]
        store_halves(self._driver.brokers, messages, lambda *half: self._halves.append(half))  # type: ignore[arg-type]

    @property
    def bodies(self) -> dict[MessageQueue, list[str]]:
        """The contents of the half messages in each queue, in the order of the reports."""
        found = defaultdict(list)
        for queue, _, outcome in self._halves:
            offset = decode_message_id(outcome.offset_msg_id)[1]
            found[queue].append(self._driver.brokers.view(queue, offset).body.decode())
        return found

    @property
    def times(self) -> Counter[str]:
        """How often each row was sent."""
        requests = [request for broker in self._cluster.brokers.values() for request in broker.requests]
        return Counter(body_of(request) for request in requests if request.code == RequestCode.SEND_MESSAGE_V2)


@pytest.fixture
def sent(cluster: FakeCluster, first: Driver) -> Sent:
    return Sent(cluster, first)


def body_of(request: RemotingCommand) -> str:
    return bytes(request.body).decode()


def to_rows(reply: Reply, times: dict[str, int]) -> Callable[[RemotingCommand], Reply | None]:
    """Return a function that gives a reply to the first requests for some rows."""
    left = Counter(times)

    def reply_to(request: RemotingCommand) -> Reply | None:
        left[body_of(request)] -= 1
        return reply if left[body_of(request)] >= 0 else None

    return reply_to


@pytest.fixture
def ordered(cluster: FakeCluster, clock: MovedClock) -> Iterator[Driver]:
    with driver(cluster, clock, ordered="true") as running:
        yield running


def test_each_half_message_is_reported_once_in_the_order_of_its_queue(cluster: FakeCluster, ordered: Driver) -> None:
    sent = Sent(cluster, ordered)
    sent.send(ROWS, *ordered.queues)
    assert sent.bodies == {queue: ROWS[number::4] for number, queue in enumerate(ordered.queues)}
    assert sent.times == Counter(ROWS)


def test_a_busy_broker_gets_only_the_messages_again_that_it_did_not_store(
    cluster: FakeCluster, ordered: Driver
) -> None:
    queue, sent = ordered.queues[0], Sent(cluster, ordered)
    cluster.brokers[queue.broker_name].always[None] = to_rows(BUSY, {"row-003": 1, "row-012": 2})
    sent.send(ROWS[:24], queue)
    assert sent.bodies == {queue: ROWS[:24]}
    assert sent.times == Counter(ROWS[:24]) + Counter({"row-003": 1, "row-012": 2})


def test_half_messages_that_moved_to_another_broker_are_all_there(cluster: FakeCluster, sent: Sent) -> None:
    for broker in cluster.brokers.values():
        broker.always[None] = to_rows(Reply(closes=True), {"row-003": 1, "row-012": 1})
    sent.send(ROWS[:24], None)
    assert Counter(body for bodies in sent.bodies.values() for body in bodies) == Counter(ROWS[:24])
    # A batch of eight is reported as a whole: all of them are in the queue that stored the last one.
    places = {body: queue for queue, bodies in sent.bodies.items() for body in bodies}
    assert len({places[body] for body in ROWS[:8]}) == 1


def test_the_error_names_the_message_that_the_broker_rejects(cluster: FakeCluster, sent: Sent, first: Driver) -> None:
    queue = first.queues[0]
    illegal = Reply.code(ResponseCode.MESSAGE_ILLEGAL, "the message is illegal")
    cluster.brokers[queue.broker_name].always[None] = to_rows(illegal, {"row-011": 10})
    with pytest.raises(DeliveryError, match=r"sending 1 rows of topic T .*message id .*is illegal") as caught:
        sent.send(ROWS[:24], queue)
    assert "Rows of this task prepared" in str(caught.value)
    assert "row-011" not in sent.bodies[queue]


def test_large_messages_are_stored_like_small_ones(sent: Sent, first: Driver) -> None:
    bodies = ["x" * 20_000 + row for row in ROWS[:9]]
    sent.send([*ROWS[:4], *bodies], first.queues[0])
    assert Counter(sent.bodies[first.queues[0]]) == Counter([*ROWS[:4], *bodies])


@pytest.mark.parametrize("bad", [1, 2])
def test_dead_letters_of_a_task_are_half_messages(cluster: FakeCluster, bad: int) -> None:
    cluster.create_topic("dead", 1)
    halves: list[MessageQueue] = []
    rows = pa.record_batch({"body": pa.array([b"row", b"other", *[b""] * bad], pa.binary())})
    with driver(cluster, MovedClock(cluster), onError="deadLetter", deadLetterTopic="dead") as job:
        context = SendContext(options=job.options, instance=job.instance, servers_reached=True)
        rules = half_rules("job#1", 60_000, lambda queue, *_: halves.append(queue))
        write_rows(context, Recorder("", -1, 0), iter([rows]), "id", rules)
    assert Counter(queue.topic for queue in halves) == {TOPIC: 2, "dead": bad}
    assert cluster.messages("dead") == cluster.messages(TOPIC) == []
