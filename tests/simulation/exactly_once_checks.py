"""What must hold after each schedule of exactly-once writes, by what consumers see.

Each row of a completed write is visible once. All of them come from one driver, and those of a partition from one of
its attempts. No process of the connector ends or copies a half message of another user.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rocketmq_spark.deliveries.exactly_once.report import CommitReport
from rocketmq_spark.errors import DataLossError, DeliveryError, MQClientException, RocketMQError
from rocketmq_spark.model.message import MessageQueue
from tests.simulation.model_brokers import HALF_TOPIC, Entry
from tests.simulation.spark import OF_LOSS, TOPIC, History, SparkPlan

TRUSTED = "forged"
"""The body of half messages that a user makes for a group of the job."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A message of any queue that a broker has stored."""

    queue: MessageQueue
    offset: int
    body: str
    at: float
    lost_at: float
    # Whether the connector has sent it, or has committed it.
    own: bool
    # Of a committed message: whether the connector has sent its half message.
    own_half: bool
    # Of a half message: whether the connector has committed or rolled it back.
    ended: bool

    @classmethod
    def of(cls, entry: Entry) -> Committed:
        """Return a stored message for the checks."""
        sender, half = entry.sender, entry.half
        return cls(
            entry.queue,
            entry.message.queue_offset,
            entry.message.body.decode(errors="replace"),
            entry.stored_at,
            entry.lost_at,
            sender is not None and bool(sender.process),
            half is not None and half.sender is not None and bool(half.sender.process),
            entry.ended,
        )

    @property
    def place(self) -> tuple[int, int, int] | None:
        """The write, the attempt and the row, by number; None for a message of another kind."""
        parts = self.body.split(".")
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            return None
        write, attempt, row = map(int, parts)
        return write, attempt, row


def problems_of(plan: SparkPlan, history: History, stored: Sequence[Committed]) -> list[str]:
    """Return where consumers do not see each row of each write exactly once, from one attempt."""
    problems = list(_problems_of_others(history, stored, trusting=is_trusting(plan)))
    # First drivers that see no common broker begin a log each, and commit what they find in their own.
    if is_trusting(plan) or (history.known and not frozenset.intersection(*history.known)):
        return problems
    visible = [row for row in stored if row.queue.topic == TOPIC and row.lost_at == math.inf and row.own]
    if len(set(history.done)) < plan.tasks and not history.stopped:
        problems.append(f"{len(set(history.done))} of {plan.tasks} writes were completed ({history.error})")
    of_write: defaultdict[int, list[Committed]] = defaultdict(list)
    for row in visible:
        if row.place is not None:
            of_write[row.place[0]].append(row)
    for number in range(plan.tasks):
        problems += _problems_of_write(plan, history, number, of_write[number], stored)
    if plan.options.get("ordered") and "other order" not in plan.faults:
        problems += _inversions(history, visible)
    return problems


def is_trusting(plan: SparkPlan) -> bool:
    """Return whether another user writes to a log without a key: then a job believes what the log says."""
    return "hostile log" in plan.faults and "transactional_key" not in plan.options


def is_allowed(plan: SparkPlan, error: RocketMQError) -> bool:
    """Return whether a fault of the plan excuses that a write ends with an error."""
    faults = set(plan.faults)
    if "hostile log" in faults:
        return True
    if isinstance(error, DataLossError):
        return bool(faults & OF_LOSS)
    return bool(faults & {"async flush", "promotion"}) and isinstance(error, DeliveryError | MQClientException)


def _problems_of_write(
    plan: SparkPlan, history: History, number: int, rows: Sequence[Committed], stored: Sequence[Committed]
) -> Iterator[str]:
    write = plan.write(number)
    copies = Counter(row.place and row.place[2] for row in rows)
    for row, count in copies.items():
        if count > 1:
            places = ", ".join(
                f"{each.body} at {each.at:.3f} in {each.queue}/{each.offset}"
                for each in rows
                if each.place and each.place[2] == row
            )
            yield f"{write}: row {row} is visible {count} times: {places}"
    numbers = sorted({row.place[1] for row in rows if row.place})
    attempts = [history.attempts[attempt] for attempt in numbers]
    drivers = {attempt.driver for attempt in attempts}
    if len(drivers) > 1:
        yield f"{write}: rows of the attempts {numbers} of drivers {sorted(drivers)} are visible"
    elif len({attempt.partition_id for attempt in attempts}) < len(attempts):
        yield f"{write}: rows of the attempts {numbers} at the same partitions are visible"
    if write not in history.done:
        return
    # A user who commits a half message makes the same row visible.
    present = {
        row.place[2]
        for row in stored
        if row.queue.topic == TOPIC and (row.own or row.own_half) and row.place and row.place[0] == number
        if row.lost_at == math.inf or OF_LOSS & set(plan.faults) - {"retention"}
    }
    total = plan.rows * plan.partitions
    if len(present) < total:
        yield f"{write}: {total - len(present)} of {total} rows are missing"
    ending = history.ends.get(write)
    if ending is None:
        return
    report = ending.report
    assert isinstance(report, CommitReport)
    if report.rows != total:
        yield f"{write}: {report.rows} rows are reported, it has {total}"
    brokers = ending.receipt.to_dict()
    if brokers and sum(broker["rows"] for broker in brokers.values()) != total:
        yield f"{write}: its receipt has {brokers}, and the write has {total} rows"
    for name, broker in brokers.items():
        if broker["rows"] and not broker["incomplete"] and not broker["queues"]:
            yield f"{write}: its receipt has no offsets of broker {name}, and does not say that it is incomplete"


def _problems_of_others(history: History, stored: Sequence[Committed], *, trusting: bool) -> Iterator[str]:
    """No process of the connector copies or ends a message that none of its tasks has made.

    A `TRUSTED` one is made for the job, by a user whose records the job believes.
    """
    for row in stored:
        if row.queue.topic not in (TOPIC, HALF_TOPIC) or row.body == "fence" or (trusting and row.body == TRUSTED):
            continue
        if row.queue.topic == HALF_TOPIC and not row.own and row.ended:
            yield f"a half message of another user was ended: {row.body} in {row.queue}/{row.offset}"
        elif row.own and (row.place is None or row.place[1] >= len(history.attempts)):
            yield f"a message of another user was copied or committed: {row.body} in {row.queue}/{row.offset}"
        elif row.own and row.queue.topic == TOPIC and not row.own_half:
            yield f"a half message of another user was committed: {row.body} in {row.queue}/{row.offset}"


def _inversions(history: History, rows: Sequence[Committed]) -> Iterator[str]:
    last: dict[tuple[MessageQueue, int], int] = {}
    for row in sorted(rows, key=lambda row: (row.queue, row.offset)):
        if row.place is not None:
            _, attempt, number = row.place
            if number < last.get((row.queue, attempt), -1):
                yield f"{row.queue}: row {row.body} comes after row {last[row.queue, attempt]}"
            last[row.queue, attempt] = number
