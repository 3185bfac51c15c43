"""What must hold after every schedule."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from rocketmq_spark.errors import DeliveryError
from rocketmq_spark.model.message import EncodedBatch, SendStatus
from rocketmq_spark.protocol.remoting.records import messages_in
from tests.simulation.client import Attempt, TaskResult, Worker
from tests.simulation.cluster import SimulatedCluster

if TYPE_CHECKING:
    from tests.simulation.schedule import Plan

# Keys of rows. The bytes of a row in a batch.
KEYS = 6
_ROW_BYTES = 40
# Seconds without a fault in which every row must be stored.
_ENOUGH = 15.0


def problems_of(plan: Plan, worker: Worker, cluster: SimulatedCluster) -> list[str]:
    """Return a text for everything that a promise does not allow."""
    stored = Counter(message.body for message in cluster.stored("T"))
    problems = [*worker.transport.problems, *_problems_of_attempts(worker)]
    for result in worker.results:
        problems += _problems_of_rows(plan, result, stored, cluster.lost, worker.options.delivery_timeout_ms / 1000)
        problems += _problems_of_metrics(result)
        # Incomplete groups that have waited for their linger time are sent without a wait for room.
        lingering = KEYS * plan.batch_rows * _ROW_BYTES if result.rest else 0
        if result.most_pending > max(worker.options.max_in_flight_bytes, plan.batch_rows * _ROW_BYTES) + lingering:
            problems.append(f"task {result.number}: {result.most_pending} bytes were pending")
    problems += _problems_of_repeats(worker, stored)
    if plan.ordered:
        problems += _problems_of_order(worker, cluster)
    return problems


def _problems_of_rows(
    plan: Plan, result: TaskResult, stored: Counter[bytes], lost: set[bytes], timeout: float
) -> list[str]:
    """Every row of a finished write is stored; a failed write counts its rows correctly."""
    problems = []
    rows = {body for _, body in result.rows}
    acknowledged = {body for batch in result.acknowledged for body in _bodies(batch)}
    if missing := sorted(body for body in acknowledged if not stored[body] and body not in lost):
        problems.append(f"task {result.number}: {len(missing)} acknowledged rows are not stored, {missing[0]!r}")
    if sum(batch.rows for batch in result.acknowledged) != len(acknowledged):
        problems.append(f"task {result.number}: rows were counted as stored twice")
    if result.error is None:
        if acknowledged != rows:
            problems.append(f"task {result.number}: it ended well, and {len(rows - acknowledged)} rows have no answer")
        return problems
    if isinstance(result.error, DeliveryError):
        calm = result.ended - plan.horizon
        if "gave up after deliveryTimeoutMs" in str(result.error) and timeout - plan.horizon > _ENOUGH:
            problems.append(f"task {result.number}: it gave up {calm:.1f} s after the last fault: {result.error}")
        not_sent, unknown = result.account
        taken = result.taken
        if not_sent + unknown + len(acknowledged) != taken:
            counts = f"{len(acknowledged)} stored, {not_sent} not sent, {unknown} unknown"
            problems.append(f"task {result.number}: {counts} are not the {taken} rows that it took")
        there = sum(1 for body in rows if stored[body] or body in lost)
        if there > len(acknowledged) + unknown:
            problems.append(f"task {result.number}: {there} rows are stored, and {len(acknowledged) + unknown} may be")
    return problems


def _problems_of_metrics(result: TaskResult) -> list[str]:
    """The metrics count what was acknowledged."""
    acknowledged = sum(batch.rows for batch in result.acknowledged)
    counted = sum(broker.rows for broker in result.summary.measures().brokers.values())
    if counted != acknowledged:
        return [f"task {result.number}: the metrics count {counted} rows, {acknowledged} were acknowledged"]
    return []


def _problems_of_attempts(worker: Worker) -> list[str]:
    """Every attempt ends in time, one attempt of a batch at a time, and none follows an acknowledgement."""
    problems = []
    by_batch: dict[int, list[Attempt]] = defaultdict(list)
    for attempt in worker.transport.attempts:
        by_batch[id(attempt.batch)].append(attempt)
        if attempt.outcome is None:
            problems.append(f"an attempt for {attempt.queue} has no outcome")
        elif attempt.ended > attempt.started + attempt.within + 0.5:
            seconds = attempt.ended - attempt.started
            problems.append(f"an attempt for {attempt.queue} ended {seconds:.1f} s after its start")
    for attempts in by_batch.values():
        for first, second in itertools.pairwise(attempts):
            if second.started < first.ended:
                problems.append("two attempts of one batch were in flight at once")
            elif first.outcome is not None and first.outcome.status is SendStatus.SEND_OK:
                problems.append("a batch was sent again after its acknowledgement")
        if len(attempts) > 1 and attempts[-1].started - attempts[0].started > worker.options.delivery_timeout_ms / 1000:
            problems.append("an attempt started after deliveryTimeoutMs")
    return problems


def _problems_of_repeats(worker: Worker, stored: Counter[bytes]) -> list[str]:
    """A row is stored again only if an attempt before it may have stored it."""
    allowed: Counter[bytes] = Counter()
    for attempt in worker.transport.attempts:
        outcome = attempt.outcome
        error = None if outcome is None else outcome.error
        if outcome is None or outcome.status is not None or (error is not None and error.maybe_stored):
            allowed.update(_bodies(attempt.batch))
    return [
        f"row {body!r} is stored {count} times, and {allowed[body]} attempts may have stored it"
        for body, count in stored.items()
        if count > allowed[body]
    ][:3]


def _problems_of_order(worker: Worker, cluster: SimulatedCluster) -> list[str]:
    """In each queue, the first copies of a task's rows of a key are in the order in which the task took them."""
    problems = []
    key_of = {body: (result.number, key) for result in worker.results for key, body in result.rows}
    for queue in cluster.queues("T"):
        store = cluster.masters[queue.broker_name].storage.store
        newest: dict[tuple[int, int], bytes] = {}
        seen: set[bytes] = set()
        for message in store.messages(queue, 0, store.end(queue)):
            key = key_of[message.body]
            if message.body in seen:
                continue
            seen.add(message.body)
            if newest.get(key, b"") > message.body:
                problems.append(f"{queue}: {message.body!r} is stored after {newest[key]!r}")
            newest[key] = max(message.body, newest.get(key, b""))
            if queue != worker.queue_of(key[1]):
                problems.append(f"{queue}: {message.body!r} belongs to {worker.queue_of(key[1])}")
    return problems[:3]


def _bodies(batch: EncodedBatch) -> list[bytes]:
    return [message.body for message in messages_in(batch)]
