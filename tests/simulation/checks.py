"""What must hold after every schedule."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from rocketmq_spark.model.message import EncodedBatch, SendOutcome, SendStatus
from rocketmq_spark.protocol.remoting.records import messages_in
from tests.simulation.client import TaskResult, Worker
from tests.simulation.cluster import SimulatedCluster
from tests.support.history import NONE, History, Outcome
from tests.support.history_rules import check

if TYPE_CHECKING:
    from tests.simulation.schedule import Plan

# Keys of rows. The bytes of a row in a batch.
KEYS = 6
_ROW_BYTES = 40
# Seconds without a fault in which every row must be stored.
_ENOUGH = 15.0
# Seconds after its time in which an attempt ends.
_GRACE = 0.5


def problems_of(plan: Plan, worker: Worker, cluster: SimulatedCluster) -> list[str]:
    """Return a text for everything that a promise does not allow."""
    problems = [*worker.transport.problems, *map(str, check(history_of(plan, worker, cluster)))]
    for result in worker.results:
        problems += _problems_of_metrics(result)
        patient = worker.options.delivery_timeout_ms / 1000 - plan.horizon > _ENOUGH
        if patient and re.search("(gave up after|waited) deliveryTimeoutMs", str(result.error)):
            seconds = result.ended - plan.horizon
            problems.append(f"task {result.number}: it gave up {seconds:.1f} s after the last fault: {result.error}")
        # Incomplete groups that have waited for their linger time are sent without a wait for room.
        lingering = KEYS * plan.batch_rows * _ROW_BYTES if result.rest else 0
        if result.most_pending > max(worker.options.max_in_flight_bytes, plan.batch_rows * _ROW_BYTES) + lingering:
            problems.append(f"task {result.number}: {result.most_pending} bytes were pending")
    if plan.ordered:
        problems += _problems_of_queues(worker, cluster)
    return problems


def history_of(plan: Plan, worker: Worker, cluster: SimulatedCluster) -> History:
    """Return what the tasks did and what consumers can read. Row 12 of task 3 has the id 300012."""
    history = History()
    rows: dict[bytes, int] = {}
    for result in worker.results:
        ids = [result.number * 100_000 + place for place in range(len(result.rows))]
        rows.update(zip((body for _, body in result.rows), ids, strict=True))
        # A task that failed has taken the first rows only.
        taken = len(ids) if result.error is None else result.taken
        keys = [key if plan.ordered else NONE for key, _ in result.rows]
        history.offer(result.number, ids[:taken], keys[:taken])
        history.count(result.number, [rows[body] for batch in result.acknowledged for body in _bodies(batch)])
        stored, timeout = sum(batch.rows for batch in result.acknowledged), worker.options.delivery_timeout_ms / 1000
        history.finish(result.number, result.error is None, stored, *result.account, timeout)
    batches: dict[int, int] = {}
    for attempt in worker.transport.attempts:
        if id(attempt.batch) not in batches:
            batches[id(attempt.batch)] = len(batches)
            history.batch(len(batches) - 1, [rows[body] for body in _bodies(attempt.batch)])
    queues = {queue: number for number, queue in enumerate(cluster.queues("T"))}
    sends = [
        (batches[id(attempt.batch)], queues.get(attempt.queue, NONE), attempt.started, attempt.within)
        for attempt in worker.transport.attempts
    ]
    if sends:
        batch, target, started, within = map(np.array, zip(*sends, strict=True))
        history.send(np.arange(len(sends)), batch, target, started, started + within + _GRACE)
    for number, attempt in enumerate(worker.transport.attempts):
        if attempt.outcome is not None:
            history.end(number, _outcome_of(attempt.outcome), attempt.ended)
    for queue, number in queues.items():
        store = cluster.masters[queue.broker_name].storage.store
        messages = list(store.messages(queue, 0, store.end(queue)))
        history.expect(0, number, 0, store.end(queue))
        # A body that no task wrote gets an id that no row has.
        found = [rows.get(message.body, -2 - message.queue_offset) for message in messages]
        history.read(0, number, [message.queue_offset for message in messages], found)
    history.lose(sorted(rows[body] for body in cluster.lost if body in rows))
    return history


def _outcome_of(outcome: SendOutcome) -> Outcome:
    if outcome.status is SendStatus.SEND_OK:
        return Outcome.ACKNOWLEDGED
    stored = outcome.error is None or outcome.error.maybe_stored
    return Outcome.MAYBE_STORED if stored else Outcome.NOT_STORED


def _problems_of_metrics(result: TaskResult) -> list[str]:
    """The metrics count what was acknowledged."""
    acknowledged = sum(batch.rows for batch in result.acknowledged)
    counted = sum(broker.rows for broker in result.summary.measures().brokers.values())
    if counted != acknowledged:
        return [f"task {result.number}: the metrics count {counted} rows, {acknowledged} were acknowledged"]
    return []


def _problems_of_queues(worker: Worker, cluster: SimulatedCluster) -> list[str]:
    """A key's rows are in the queue of the key."""
    queue_of = {body: worker.queue_of(key) for result in worker.results for key, body in result.rows}
    return [
        f"{queue}: {message.body!r} belongs to {queue_of.get(message.body)}"
        for queue in cluster.queues("T")
        for message in cluster.masters[queue.broker_name].storage.store.messages(queue, 0, 1 << 62)
        if queue != queue_of.get(message.body)
    ][:3]


def _bodies(batch: EncodedBatch) -> list[bytes]:
    return [message.body for message in messages_in(batch)]
