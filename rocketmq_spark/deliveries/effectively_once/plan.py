"""Plans an effectively-once write: the driver notes where the queues end before it, and what the log knows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.effectively_once.lease import fresh_id
from rocketmq_spark.deliveries.effectively_once.stored import most_queues
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.delivery import LogPlan, read_log
from rocketmq_spark.deliveries.log.records import Begun
from rocketmq_spark.deliveries.log.scan import warn_of_lost_tail
from rocketmq_spark.deliveries.log.state import StartOffsets
from rocketmq_spark.model.message import MessageQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan(LogPlan):
    """What tasks need to know of an effectively-once write."""

    log_name: str
    home: MessageQueue
    position: int  # Up to this offset the driver has read the home
    driver: str  # Begins the ids of the attempts of this plan
    since: int  # An offset of the home from which all records follow that a new plan needs
    start_offsets: tuple[StartOffsets, ...]
    begins: Begun  # What the tasks of this plan record
    begun: Mapping[Write, Mapping[int, Mapping[str, Begun]]]  # What earlier tasks have recorded, by partition and id
    completed: frozenset[Write]  # The micro-batches that were done at the plan, as far as the log has them

    def start_offsets_of(self, write: Write) -> StartOffsets | None:
        """Return the newest start offsets below all rows of a write; None if they have expired."""
        return next(
            (start_offsets for start_offsets in reversed(self.start_offsets) if start_offsets.after != write), None
        )


def plan_write(
    brokers: Brokers, log: DecisionLog, write: Write | None, queues: Sequence[MessageQueue] | None = None
) -> ResumePlan:
    """Return the plan of a batch write with ``writeId``, or of another write (None), by the log.

    `queues` are those of an ordered write.

    Raises an MQClientException or another RocketMQError if the user may not read the topic, or not store records.
    """
    info = brokers.routes().look_up(str(brokers.options.topic))
    names = info.broker_names.union(queue.broker_name for queue in queues or ())
    brokers.ensure_topic(log.topic, names)
    is_first = not (log.writes or log.start_offsets)
    read_log(log, brokers, everything=write is not None)
    if is_first and not info.template:
        # Only a recovery reads the topic. A missing right must show before the first row.
        brokers.check_readable(info.queues[0])
    existing = () if info.template else info.queues
    ends = None
    # A stream whose first records have expired has none: the present ends are above rows of its attempts.
    is_new = not log.start_offsets and (brokers.options.start_anew or not any(known.query for known in log.writes))
    if is_new if write is None else write not in log.writes:
        ends = brokers.max_offsets(existing)
        claim = None
        if not (log.writes or log.start_offsets):
            claim = log.claim_home(brokers, write or Write(""), names)
        log.append_start_offsets(brokers, write, ends, claim)
    known_nums = most_queues({queue.broker_name: queue.queue_id + 1} for queue in (*info.queues, *(queues or ())))
    queue_nums = {name: known_nums.get(name, 0) for name in names}
    known, done = tuple(log.start_offsets), False
    if write is not None:
        # Read after the start offsets were stored: another driver may have completed the write since this one froze.
        state = log.writes[write]
        done = state.done
        # Start offsets after other writes may be too high. So a write whose own start offsets have expired has none.
        known = () if state.start_offsets is None else (StartOffsets(None, state.start_offsets, state.since),)
    assert log.home is not None
    if ends is None:
        # A process that has not asked for the end of a queue before may follow a failure of its broker.
        asked = [q for q in existing if q not in log.ends or any(q not in one.by_queue for one in known)]
        ends = brokers.ends_at_once(asked)
    log.ends |= {queue: (end, log.position) for queue, end in ends.items()}
    begun = {
        other: {part: dict(attempts) for part, attempts in state.begun.items()}
        for other, state in log.writes.items()
        if state.begun
    }
    since = log.start_offsets[0].offset if log.start_offsets else 0
    return ResumePlan(
        write=write,
        done=done,
        newest=log.newest,
        key_id=log.keys.signs,
        log_name=log.transactional_id,
        home=log.home,
        position=log.position,
        driver=fresh_id(brokers),
        since=since,
        start_offsets=known,
        begins=Begun(queue_nums, _corrected(known, ends, log.ends), brokers.options.fence_ms),
        begun=begun,
        completed=frozenset(other for other, state in log.writes.items() if state.done and other.query),
    )


def _corrected(
    known: Sequence[StartOffsets], ends: Mapping[MessageQueue, int], seen: Mapping[MessageQueue, tuple[int, int]]
) -> dict[MessageQueue, int]:
    """Return the ends of queues that lack a known start offset, or had a start offset above their end.

    `seen` has the last ends that the process has asked for, and up to which offset it had read the log then. `ends` are
    those of this plan.
    """
    corrected = {}
    for queue, (end, position) in seen.items():
        before = [one.by_queue[queue] for one in known if one.offset < position and queue in one.by_queue]
        is_lost = max(before, default=-1) > end
        if is_lost and queue in ends:
            warn_of_lost_tail(queue, max(before), end, "Rows of this write are looked for from there on")
        if is_lost or (queue in ends and any(queue not in one.by_queue for one in known)):
            corrected[queue] = end
    return corrected
