"""What must hold after each schedule of effectively-once writes, by what consumers see.

Each row of a completed write is visible as often as the input has it. A row of another attempt that is visible as well
needs an excuse: its request was under way for longer than the protocol can know. The end of the write reports it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.log.keys import unsigned
from rocketmq_spark.deliveries.log.records import BegunRecord, HomeRecord, InvalidRecordError, Record, parse
from rocketmq_spark.errors import DataLossError, InputChangedError, RocketMQError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from tests.simulation.spark import FENCE, LOG, LOG_ID, OF_LOSS, TOPIC, Attempt, Ending, History, SparkPlan
from tests.simulation.world import EPOCH

# An attempt sends until two thirds of the fence after its lease. So a request that is under way for longer than the
# rest may be stored after the fence.
UNDER_WAY = FENCE / 3


@dataclass(frozen=True, slots=True)
class Copy:
    """A row of a write that a broker has stored."""

    body: str
    key: str
    queue: MessageQueue
    offset: int
    at: float
    # None: another producer has stored it. The body may be any then.
    attempt: Attempt | None
    sent_at: float
    unique_id: str
    # What marks the rows of an attempt. Another producer may store it, too.
    token: str = ""
    # Another producer has stored an exact copy of a row. For consumers both are equal.
    same: bool = False
    # When the broker has lost it, and whether it had acknowledged it.
    lost_at: float = math.inf
    acknowledged: bool = True
    # The broker has deleted it because of its age.
    expired: bool = False

    def is_there(self, at: float) -> bool:
        """Return whether the broker had it at a time."""
        return self.at <= at < self.lost_at


class _Begun(NamedTuple):
    write: Write
    offset: int
    at: float


def problems_of(plan: SparkPlan, history: History, copies: Sequence[Copy], log: Iterable[MessageExt]) -> list[str]:
    """Return where consumers miss a row, or see one more often than the input has it."""
    records = [(message, record) for message in log if (record := _record(message)) is not None]
    homes = _homes(records)
    problems = []
    if len(_homes(records, "begun")) > 1 and (common := frozenset.intersection(*history.known)):
        problems.append(f"there are several logs, although all drivers that began one knew {sorted(common)}")
    # First drivers that see no common broker begin a log each. Then rows may be repeated, and later drivers fail.
    one_log = len(homes) < 2
    done = set(history.done)
    if len(done) < plan.tasks and one_log and not history.stopped:
        problems.append(f"{len(done)} of {plan.tasks} writes were completed ({history.error})")
    begun = _begun(records)
    for number in range(plan.tasks):
        write = plan.write(number)
        own = [copy for copy in copies if copy.body.startswith(f"{number}.")]
        expected = Counter(plan.bodies(number))
        if write in done:
            problems += _missing(plan, write, expected, own)
            problems += _lost_silently(write, expected, own, copies, history)
        if one_log:
            found = [copy for copy in own if not _is_hidden(copy, copies)]
            problems += _repeated(write, expected, found, begun)
            problems += _unreported(write, expected, found, history)
            problems += _not_in_receipt(write, own, history)
    rows = [copy for copy in copies if copy.attempt is not None and copy.lost_at == math.inf]
    if plan.options.get("ordered") and one_log and max(Counter(copy.body for copy in rows).values(), default=0) < 2:
        problems += _inversions(rows)
    return problems


def is_allowed(plan: SparkPlan, error: RocketMQError) -> bool:
    """Return whether a fault of the plan excuses that a write ends with an error."""
    faults = set(plan.faults)
    if faults & {"hostile rows", "hostile log", "hostile hashes"}:
        return True
    if isinstance(error, DataLossError):
        return bool(faults & OF_LOSS)
    changes = {"other partitions"} | ({"other order"} if plan.options.get("ordered") else set())
    return isinstance(error, InputChangedError) and bool(faults & changes)


def _missing(plan: SparkPlan, write: Write, expected: Counter[str], copies: Sequence[Copy]) -> list[str]:
    """A completed write has each row, or a broker has lost it."""
    visible = Counter(copy.body for copy in copies if copy.lost_at == math.inf and (copy.attempt or copy.same))
    # Some brokers lose what they have acknowledged. There, a barrier makes nothing safe, either.
    unsafe = bool({"promotion", "async flush", "lost end"} & set(plan.faults))
    lost = [copy for copy in copies if copy.lost_at < math.inf and (copy.attempt or copy.same)]
    missing = expected - visible - Counter(copy.body for copy in lost if copy.acknowledged or unsafe)
    return [f"{write}: {sum(missing.values())} rows are missing: {sorted(missing)[:3]}"] if missing else []


def _lost_silently(
    write: Write, expected: Counter[str], copies: Sequence[Copy], stored: Sequence[Copy], history: History
) -> list[str]:
    """Brokers had all rows when the end of a write began. What they lose later, the write cannot know.

    At the end, a queue that lacks the last row of the write is an error. If a row with a token of the write was stored
    there after the loss, the loss does not show.
    """
    ending = history.ends.get(write)
    ranges = None if ending is None else _ranges(ending)
    if ending is None or ranges is None:
        return []
    present = [copy for copy in copies if (copy.attempt or copy.same) and _is_in(copy, ranges)]
    lacking = expected - Counter(copy.body for copy in present if copy.is_there(ending.began))
    tokens = {copy.token for copy in stored if copy.attempt is not None and copy.attempt.write == write}
    shown = []
    for copy in present:
        if copy.body in lacking and copy.lost_at < ending.began:
            last = ranges[copy.queue][1]
            hiding = (
                other
                for other in stored
                if (other.queue, other.offset) == (copy.queue, last)
                and copy.lost_at <= other.at
                and other.lost_at > ending.began
                and (other.token in tokens or other.expired)
            )
            if next(hiding, None) is None:
                shown.append(copy)
    if shown:
        return [f"{write}: {shown[0].queue} lost {len(shown)} rows before the end, and it was completed: {shown[0]}"]
    return []


def _is_hidden(copy: Copy, stored: Sequence[Copy]) -> bool:
    """Return whether an attempt cannot find its row, because it knows a later offset of the queue.

    The broker had given the row's offset to another message before, and has lost that. So the attempt sends it again.
    """
    again = any(
        other.body == copy.body and other.attempt is copy.attempt is not None and other.at > copy.at for other in stored
    )
    return again and any(
        other.lost_at <= copy.at and other.queue == copy.queue and other.offset >= copy.offset for other in stored
    )


def _repeated(write: Write, expected: Counter[str], copies: Sequence[Copy], begun: Mapping[str, _Begun]) -> list[str]:
    """No row is visible more often than the input has it, except for requests that were late."""
    by_body: defaultdict[str, list[Copy]] = defaultdict(list)
    for copy in copies:
        if copy.attempt is not None and copy.lost_at == math.inf:
            by_body[copy.body].append(copy)
    problems = []
    for body, found in by_body.items():
        excess = len(found) - expected[body]
        if excess > sum(_is_late(copy, write, begun) for copy in found):
            found.sort(key=lambda copy: copy.at)
            places = ", ".join(
                f"at {copy.at:.3f} (sent at {copy.sent_at:.3f}) by attempt {copy.attempt and copy.attempt.number}"
                for copy in found
            )
            problems.append(f"row {body} is visible {len(found)} times, not {expected[body]}: stored {places}")
    return problems


def _is_late(copy: Copy, write: Write, begun: Mapping[str, _Begun]) -> bool:
    """Return whether a request was under way for so long that the fence of a newer attempt was over."""
    own = copy.attempt
    assert own is not None
    if copy.at - copy.sent_at <= UNDER_WAY:
        return False
    # A retry of the same attempt waits for the fence, too.
    if copy.at > own.first_ends.get(copy.unique_id, math.inf) + FENCE:
        return True
    place = begun.get(own.id)
    newer = [each for each in begun.values() if each.write == write and (place is None or each.offset > place.offset)]
    return any(copy.at > each.at + FENCE for each in newer)


def _unreported(write: Write, expected: Counter[str], copies: Sequence[Copy], history: History) -> list[str]:
    """The end of a write reports the rows that are visible too often at that time."""
    if write not in history.ends:
        return []
    ending = history.ends[write]
    at_end = Counter(
        copy.body for copy in copies if copy.attempt and copy.at < ending.began and copy.lost_at == math.inf
    )
    repeated = sum((at_end - expected).values())
    if repeated > ending.report.repeated_rows:
        return [f"{write}: {repeated} rows were repeated, {ending.report.repeated_rows} were reported"]
    return []


def _not_in_receipt(write: Write, copies: Sequence[Copy], history: History) -> list[str]:
    """The receipt of a write has every row, or says that it is incomplete.

    A row that its broker has lost was there: see `_lost_silently`.
    """
    ending = history.ends.get(write)
    ranges = None if ending is None else _ranges(ending)
    if ranges is None:
        return []
    # An exact copy of a row counts as the row.
    rows = [copy for copy in copies if copy.attempt or copy.same]
    lacking = {copy.body for copy in rows if copy.lost_at == math.inf}
    lacking -= {copy.body for copy in rows if _is_in(copy, ranges)}
    return [f"{write}: its receipt lacks {len(lacking)} rows: {sorted(lacking)[:3]}"] if lacking else []


def _ranges(ending: Ending) -> dict[MessageQueue, tuple[int, int]] | None:
    """Return the first and the last offset of each queue in a receipt; None if it is incomplete."""
    brokers = ending.receipt.to_dict()
    if any(broker["incomplete"] for broker in brokers.values()):
        return None
    return {
        MessageQueue(TOPIC, name, int(number)): (queue["first_offset"], queue["last_offset"])
        for name, broker in brokers.items()
        for number, queue in broker["queues"].get(TOPIC, {}).items()
    }


def _is_in(copy: Copy, ranges: Mapping[MessageQueue, tuple[int, int]]) -> bool:
    first, last = ranges.get(copy.queue, (0, -1))
    return first <= copy.offset <= last


def _inversions(copies: Sequence[Copy]) -> list[str]:
    """Rows of a key are in the order in which the attempt that stored them read its input."""
    last: dict[tuple[MessageQueue, str, int, int], tuple[int, int]] = {}
    problems = []
    for copy in sorted(copies, key=lambda copy: (copy.queue, copy.offset)):
        number, attempt = int(copy.body.split(".")[0]), copy.attempt
        assert attempt is not None
        row = attempt.bodies.index(copy.body)
        place = copy.queue, copy.key, attempt.partition_id, attempt.partitions
        if (number, row) < last.get(place, (-1, -1)):
            problems.append(f"key {copy.key} in {copy.queue}: row {copy.body} comes after {last[place]}")
        last[place] = number, row
    return problems


def _record(message: MessageExt) -> Record | None:
    try:
        return parse(unsigned(message.body) or message.body, LOG_ID, LOG, message.queue_offset, message.store_timestamp)
    except InvalidRecordError:
        return None


def _begun(records: Iterable[tuple[MessageExt, Record]]) -> dict[str, _Begun]:
    """Return write, offset and time of each attempt's record."""
    begun: dict[str, _Begun] = {}
    for message, record in records:
        if isinstance(record, BegunRecord):
            at = message.store_timestamp / 1000 - EPOCH
            begun.setdefault(record.attempt, _Begun(record.write, message.queue_offset, at))
    return begun


def _homes(records: Iterable[tuple[MessageExt, Record]], *kinds: str) -> set[str]:
    """Return the brokers with records of some kinds, by default those on which a driver has begun a log."""
    kinds = kinds or ("floors", "begun")
    return {
        message.store_host for message, record in records if record.KIND in kinds and not isinstance(record, HomeRecord)
    }


def outcomes_of(plan: SparkPlan, copies: Sequence[Copy], log: Iterable[MessageExt]) -> Counter[str]:
    """Return how many rows are stored too often, and whether there are several logs."""
    visible = Counter(copy.body for copy in copies if copy.attempt is not None and copy.lost_at == math.inf)
    expected: Counter[str] = sum((Counter(plan.bodies(number)) for number in range(plan.tasks)), Counter())
    records = [(message, record) for message in log if (record := _record(message)) is not None]
    repeats = sum((visible - expected).values())
    return Counter({"rows stored after the fence": repeats, "several logs": len(_homes(records)) > 1})
