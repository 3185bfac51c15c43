"""Two reads of one range give one sequence of rows, whatever answers first; a plan has the same tasks, too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import BrokerBusyException, RemotingConnectException, RemotingTimeoutException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import Pulled, PullOutcome, PullRequest, PullStatus
from rocketmq_spark.model.route import BrokerData, TopicRouteData
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.source.broker_choice import BrokerChoice
from rocketmq_spark.source.plan import ReadPlan, plan_of
from rocketmq_spark.source.puller import Puller
from rocketmq_spark.source.queue_fetch import divided
from rocketmq_spark.source.ranges import OffsetRange, in_turns, tasks_of
from rocketmq_spark.source.read import decoded
from rocketmq_spark.source.topic_routes import TopicRoutes
from tests.support.scripted import ManualClock, ScriptedTransport, route
from tests.unit.source.conftest import QUEUES, Reader, stored

SCHEMA = pa.schema(
    [("topic", pa.string()), ("brokerName", pa.string()), ("queueId", pa.int32()), ("queueOffset", pa.int64())]
)
TOPICS, BROKERS = ("orders", "payments"), ("a", "b", "c")
ROUTE = dict.fromkeys(BROKERS, 11)
Row = tuple[MessageQueue, int]


def message(queue: MessageQueue, offset: int, tag: str, length: int) -> bytes:
    return stored(offset, b"x" * length, queue=queue, TAGS=tag)


@dataclass
class Topic:
    """Stored messages that a seed decides: the tag and record of each offset, none where compaction removed one."""

    seed: int
    queues: int
    rows: int
    compacted: bool
    tags: frozenset[str] | None
    stored: dict[MessageQueue, dict[int, tuple[str, bytes]]] = field(default_factory=dict)
    ranges: list[OffsetRange] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        known = [MessageQueue(topic, broker, number) for topic in TOPICS for broker in BROKERS for number in range(11)]
        for queue in rng.sample(known, self.queues):
            start, size = rng.randrange(50), rng.randrange(self.rows)
            self.stored[queue] = {
                offset: (tag := rng.choice("AAABC"), message(queue, offset, tag, rng.choice((0, 30, 200))))
                for offset in range(start + size)
                if not (self.compacted and rng.random() < 0.5)
            }
            self.ranges.append(OffsetRange(queue, start, start + size, self.compacted))

    def expected(self, ranges: Sequence[OffsetRange], turn: int) -> list[Row]:
        """Return the rows of ranges in the order of their turns."""
        rows = [
            ((offset - part.begin) // turn, place, offset, part.queue)
            for place, part in enumerate(ranges)
            for offset, (tag, _) in self.stored[part.queue].items()
            if part.start <= offset < part.end and (self.tags is None or tag in self.tags)
        ]
        return [(queue, offset) for _, _, offset, queue in sorted(rows)]


class Brokers(ScriptedTransport):
    """Brokers that answer late, in parts, in another order, or not at all, as a seed decides."""

    def __init__(self, topic: Topic, seed: int, clock: ManualClock) -> None:
        super().__init__(dict.fromkeys(TOPICS, route(ROUTE)), clock=clock)
        self.topic = topic
        self.clock = clock
        self.rng = random.Random(seed)
        self.routes = {
            name: TopicRouteData(
                old.queue_datas, tuple(BrokerData(broker, {0: broker, 1: f"{broker}-slave"}) for broker in BROKERS)
            )
            for name, old in self.routes.items()
        }
        # Brokers that are slow for the whole read, and how often a request fails.
        self.slow = {broker: self.rng.choice((0.0, 0.0, 0.05, 1.0)) for broker in BROKERS}
        self.fails = self.rng.choice((0.0, 0.05, 0.3))
        # When each answer arrives.
        self.arrivals: list[tuple[float, MessageQueue, int]] = []

    def _pulled(self, request: PullRequest, timeout: float) -> tuple[float, PullOutcome]:
        rng, queue = self.rng, request.target.queue
        delay = rng.choice((0.0, 0.001, 0.01, 0.3)) * rng.random() + self.slow[queue.broker_name]
        if rng.random() < self.fails:
            error = rng.choice(
                (RemotingConnectException("no"), RemotingTimeoutException("no"), BrokerBusyException("no", 2, "", "a"))
            )
            return delay, PullOutcome(None, error=error)
        if request.address.endswith("slave") and rng.random() < 0.3:
            return delay, PullOutcome(PullStatus.NO_NEW_MSG, request.offset, 0, request.offset)
        outcome = self._found(request)
        self.arrivals.append((self.clock() + delay, queue, request.offset))
        return delay, outcome

    def _found(self, request: PullRequest) -> PullOutcome:
        stored = self.topic.stored[request.target.queue]
        end = next(part.end for part in self.topic.ranges if part.queue == request.target.queue)
        stop = min(request.offset + self.rng.randint(1, request.target.max_msg_nums), end)
        tags = None if request.target.sub_expression == "*" else self.topic.tags
        found = [
            stored[offset][1]
            for offset in range(request.offset, stop)
            if offset in stored and (tags is None or stored[offset][0] in tags)
        ]
        status = PullStatus.FOUND if found else PullStatus.NO_MATCHED_MSG
        return PullOutcome(status, stop, 0, end, b"".join(found))


def rows_of(topic: Topic, ranges: Sequence[OffsetRange], seed: int, turn: int, **options: Any) -> list[Row]:
    """Read ranges as a task does."""
    clock, rng = ManualClock(), random.Random(seed)
    expression = "*" if topic.tags is None else " || ".join(sorted(topic.tags))
    settings = SourceOptions.of(name_server=("n:9876",), subscribe=TOPICS, sub_expression=expression, **options)
    with Brokers(topic, seed, clock) as transport:
        brokers = BrokerChoice(TopicRoutes(settings, transport, clock, dict(transport.routes)))
        puller = Puller(
            settings, transport, brokers, clock, rng.choice((1, 2, 8, 64)), rng.choice((300, 20_000, 1 << 25)), turn
        )
        rows = []
        for batch in decoded(settings, puller.pull(ranges), SCHEMA):
            for row in batch.to_pylist():
                rows.append((MessageQueue(row["topic"], row["brokerName"], row["queueId"]), row["queueOffset"]))
    return rows


def drawn(seed: int) -> tuple[Topic, int, random.Random]:
    """Draw a topic and the length of a turn."""
    rng = random.Random(seed)
    topic = Topic(
        seed,
        queues=rng.choice((1, 2, 3, 8, 64)),
        rows=rng.choice((2, 40, 150)),
        compacted=rng.random() < 0.3,
        tags=rng.choice((None, None, frozenset("A"), frozenset("BC"))),
    )
    return topic, rng.choice((1, 7, 32, 1024)), rng


@pytest.mark.parametrize("seed", range(60))
def test_two_reads_of_one_range_return_one_sequence_of_rows(seed: int) -> None:
    topic, turn, rng = drawn(seed)
    ranges = in_turns(topic.ranges)
    one, two = (
        rows_of(topic, ranges, 2 * seed + read, turn, pull_batch_size=rng.choice((1, 5, 32))) for read in (0, 1)
    )
    assert one == two
    assert one == topic.expected(ranges, turn)


def test_answers_to_two_reads_arrive_in_different_orders() -> None:
    # Otherwise the test above could not find a read in the order of arrival.
    topic = Topic(1, queues=8, rows=150, compacted=False, tags=None)
    orders = []
    for seed in (1, 2):
        clock = ManualClock()
        options = SourceOptions.of(name_server=("n:9876",), subscribe=TOPICS)
        with Brokers(topic, seed, clock) as transport:
            brokers = BrokerChoice(TopicRoutes(options, transport, clock, dict(transport.routes)))
            list(Puller(options, transport, brokers, clock).pull(topic.ranges))
            orders.append(list(dict.fromkeys(queue for _, queue, _ in sorted(transport.arrivals))))
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_answer_of_two_turns_is_divided_between_its_records() -> None:
    queue = QUEUES[0]
    records = [message(queue, offset, "A", offset) for offset in (2, 5, 6, 9)]
    pulled = Pulled(queue, 0, 12, b"".join(records), contiguous=True)
    for offset, count in ((1, 0), (2, 0), (3, 1), (6, 2), (9, 3), (10, 4)):
        first, rest = divided(pulled, offset)
        assert (first.start, first.end, rest.start, rest.end) == (0, offset, offset, 12)
        assert (first.body, rest.body) == (b"".join(records[:count]), b"".join(records[count:]))
    # The records of a body with an unexpected one are selected by their offsets.
    inner = bytearray(records[1])
    inner[36:40] = (0xC0).to_bytes(4, "big")
    for strange in (bytes(inner), records[0], records[1][:30], b"\0" * 40, records[1] + b"x"):
        body = records[0] + strange + records[3]
        first, rest = divided(replace(pulled, body=body), 6)
        assert first.body == rest.body == body


@pytest.mark.parametrize("seed", range(20))
def test_messages_that_have_expired_do_not_change_the_order_of_the_others(seed: int) -> None:
    topic, turn, rng = drawn(seed)
    ranges = in_turns(topic.ranges)
    left = [
        replace(part, start=start, expired=start - part.start)
        for part in ranges
        for start in [rng.randint(part.start, part.end)]
    ]
    kept = {part.queue: part.start for part in left}
    before = rows_of(topic, ranges, seed, turn)
    assert rows_of(topic, left, seed + 1, turn) == [row for row in before if row[1] >= kept[row[0]]]


sizes = st.one_of(st.integers(0, 5), st.integers(0, 200_000), st.integers(0, 10**8))


@st.composite
def spans(draw: st.DrawFn) -> list[OffsetRange]:
    queues = draw(
        st.lists(st.builds(MessageQueue, st.sampled_from(TOPICS), st.sampled_from(BROKERS), st.integers(0, 11)))
    )
    starts = [draw(st.integers(0, 10**9)) for _ in set(queues)]
    return [OffsetRange(queue, start, start + draw(sizes)) for queue, start in zip(set(queues), starts, strict=True)]


@given(spans(), st.none() | st.integers(1, 100), st.none() | st.integers(100_000, 10**7), st.randoms())
def test_tasks_do_not_depend_on_the_order_of_ranges(
    found: list[OffsetRange], min_partitions: int | None, max_records: int | None, rng: random.Random
) -> None:
    shuffled = rng.sample(found, len(found))
    tasks = tasks_of(found, min_partitions, max_records)
    assert tasks == tasks_of(shuffled, min_partitions, max_records)
    assert all(task == in_turns(task) for task in tasks)
    queues = [min(part.queue for part in task) for task in tasks]
    assert queues == sorted(queues)


@given(spans(), st.none() | st.integers(1, 100), st.integers(0, 100))
def test_messages_that_have_expired_do_not_change_the_tasks_of_the_others(
    found: list[OffsetRange], min_partitions: int | None, percent: int
) -> None:
    left = [
        replace(part, start=start, expired=start - part.start)
        for part in found
        for start in [part.start + part.size * percent // 100]
    ]
    tasks, later = tasks_of(found, min_partitions), tasks_of(left, min_partitions)
    assert [[(part.queue, part.begin, part.end) for part in task] for task in tasks] == [
        [(part.queue, part.begin, part.end) for part in task] for task in later
    ]
    assert sum(part.size for task in later for part in task) == sum(part.size for part in left)


@pytest.mark.parametrize("seed", range(5))
def test_plan_does_not_depend_on_the_order_of_route_answers_and_offsets(seed: int) -> None:
    def plan(rng: random.Random, *, stream: bool) -> list[ReadPlan]:
        reader = Reader()
        reader.fill(dict.fromkeys(QUEUES, 5))
        old = reader.transport.routes["orders"]
        reader.transport.routes["orders"] = TopicRouteData(
            tuple(rng.sample(old.queue_datas, len(old.queue_datas))),
            tuple(rng.sample(old.broker_datas, len(old.broker_datas))),
        )
        if not stream:
            return plan_of(reader.resolver.ranges(reader.queues.look_up()), reader.requests).tasks(reader.options)
        starts, ends = (dict.fromkeys(rng.sample(QUEUES, len(QUEUES)), at) for at in (1, 4))
        return plan_of(reader.cluster.ranges(starts, ends), reader.cluster.requests).tasks(reader.options)

    for stream in (False, True):
        found = [task.ranges for task in plan(random.Random(seed), stream=stream)]
        assert found == [task.ranges for task in plan(random.Random(seed + 100), stream=stream)]
        assert [part.queue for task in found for part in task] == sorted(
            QUEUES, key=lambda queue: (queue.queue_id, queue.broker_name)
        )
