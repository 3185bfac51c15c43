"""Commits a write in two phases: its decision is stored in the log, then each half message is committed.

After a crash, a lost answer, or an expired deadline, a recovery finds out which half messages were committed. It first
waits until the brokers accept no more commits of the round (the fence). Then it prepares the missing rows again, and
commits them in the next round. docs/internals/exactly-once.md has the protocol, and why it works.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

import rocketmq_spark.model.properties as const
from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.exactly_once.ends import EndSender, end_half
from rocketmq_spark.deliveries.exactly_once.fence import check_fence
from rocketmq_spark.deliveries.exactly_once.half_sender import store_halves
from rocketmq_spark.deliveries.exactly_once.halves import HalfCollector, Halves, half_properties, read_halves
from rocketmq_spark.deliveries.exactly_once.report import CommitReport
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import BARRIER_WAIT, DecisionLog
from rocketmq_spark.deliveries.log.delivery import check_same_query, warn_of_complete, warn_of_other_rows
from rocketmq_spark.deliveries.log.half import Half
from rocketmq_spark.deliveries.log.records import Decision
from rocketmq_spark.deliveries.log.scan import LOST_TAIL, Known, floor_now, scan_messages
from rocketmq_spark.errors import DataLossError, DeliveryError, MQBrokerException, MQClientException, RocketMQError
from rocketmq_spark.model.message import EncodedBatch, MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.send_result import (
    TRANSACTION_COMMIT_TYPE,
    TRANSACTION_PREPARED_TYPE,
    TRANSACTION_ROLLBACK_TYPE,
)
from rocketmq_spark.protocol.compression import COMPRESSION_BITS
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.records import encode_properties

logger = logging.getLogger("rocketmq_spark.producer")

# Seconds between two questions whether a deadline has passed.
_FENCE_POLL: Final = 0.5
# The longest rollback, seconds. A rollback only saves space at the brokers.
_ROLLBACK_TIME: Final = 10.0
# A recovery reads and stores rows one by one. So its half messages can be committed this much longer, per row.
_RECOVERY_MS_PER_ROW: Final = 1
# Queues that a recovery reads at the same time: for each of them it holds an answer.
_QUEUES_AT_ONCE: Final = 8
# How many rows a recovery holds in memory.
_ROWS_AT_ONCE: Final = 256
# The share of ``transactionTimeoutMs`` that must be left for the commits, and by which clocks may differ.
_MARGIN: Final = 0.1
# Where brokers keep half messages; the second topic is 5.5.0's with ``transRocksDBEnable=true``.
_HALF_TOPICS: Final = ("RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC")
# Properties of a half message for the queue that it goes to. A broker overwrites what the sender gives for them.
_REAL_TOPIC: Final = "REAL_TOPIC"
_REAL_QUEUE: Final = "REAL_QID"
# Properties that the broker adds to a half message, or that the next round replaces.
_OF_HALF: Final = (
    _REAL_TOPIC,
    _REAL_QUEUE,
    const.TRAN_MSG,
    const.PGROUP,
    const.CHECK_IMMUNITY_TIME_IN_SECONDS,
    const.TRANSACTION_ID,
    "TRANSACTION_CHECK_TIMES",
    "TRAN_PREPARED_QUEUE_OFFSET",
)


def new_run_id() -> str:
    """Return a name for one attempt at a write, which makes its producer group unique."""
    return uuid.uuid4().hex[:16]


def group_of(transactional_id: str, write: Write, round_: int, run_id: str) -> str:
    """Return the property ``PGROUP`` of the half messages of one attempt and round."""
    return f"{transactional_id}#{write.name}#{round_}#{run_id}"


@dataclass(eq=False, repr=False)
class TwoPhaseCommit:
    """Commits and recovers the writes of one transactional id."""

    brokers: Brokers
    log: DecisionLog
    run_id: str

    def commit(self, write: Write, halves: Halves, group: str) -> CommitReport:
        """Commit the half messages of a write, or complete the write if another driver has decided it before.

        Returns when every row is stored and visible. Raises a DeliveryError or another RocketMQError if the write is
        not complete. If it was decided, the next attempt or `finish` completes it. Raises as `check_same_query`.
        """
        report, started = CommitReport(), self.brokers.clock()
        try:
            self.log.check_current(write)
        except DeliveryError:
            self.roll_back(halves, group)
            raise
        if write not in self.log.writes:
            timeout = self.brokers.options.transaction_timeout_ms
            self._check_halves(write, halves, group, timeout)
            self.prepare({queue.broker_name for queue in halves.queues})
            decision = self._decide(write, 1, group, halves, timeout)
            report.decide_s = self.brokers.clock() - started
            if decision.group == group:
                return self._execute(decision, halves, report)
        self.roll_back(halves, group)
        state = self.log.writes[write]
        check_same_query(write, state)
        warn_of_complete(write, state)
        warn_of_other_rows(write, state, len(halves))
        return self.finish(write)

    def finish(self, write: Write) -> CommitReport:
        """Complete a write that was decided; return at once if it is done."""
        self.log.check_current(write)
        state = self.log.writes.get(write)
        if state is None:
            raise DataLossError(
                f"completing {write}: its decision has expired in the decision log of transactionalId="
                f"{self.log.transactional_id}, or its broker is not registered. Start the broker and run the job "
                "again, or find out by the rows that consumers see whether the write is complete"
            )
        report = CommitReport()
        return report if state.done else self._recover(state.last, report)

    def prepare(self, broker_names: Collection[str]) -> None:
        """Create the topic of the log on brokers that lack it, and check that brokers reject late commits."""
        self.brokers.ensure_topic(self.log.topic, broker_names)
        queues = [MessageQueue(self.log.topic, name, 0) for name in sorted(broker_names)]
        self.brokers.for_each(queues, partial(check_fence, self.brokers))

    def roll_back(self, halves: Halves, group: str) -> None:
        """Roll back half messages that no decision has. Brokers then check them no more. Does not raise."""
        if len(halves):
            expires = self.brokers.clock() + _ROLLBACK_TIME
            EndSender(self.brokers, halves, group, TRANSACTION_ROLLBACK_TYPE, expires=expires).run()

    def _check_halves(self, write: Write, halves: Halves, group: str, timeout: int) -> None:
        """Raise if `timeout` (ms) leaves no time for the commits, clocks differ, or half messages are lost."""
        halves.check_not_lost(str(write))
        if halves.oldest is None:
            return
        age = self.brokers.runtime.wall_clock() * 1000 - halves.oldest.born_timestamp
        if age > timeout * (1 - _MARGIN):
            raise DeliveryError(
                f"committing {write} with {len(halves)} rows: its first row is {age / 1000:.1f} s old, and "
                f"transactionTimeoutMs={timeout} leaves no time for the commit. None of them is committed. Raise "
                "transactionTimeoutMs, or write fewer rows at once; check that the clocks of driver and executors agree"
            )

        def check(half: Half) -> None:
            name = half.queue.broker_name
            try:
                stored = self._view(half, group)
            except (DataLossError, MQClientException) as exc:
                if exc.retriable:
                    raise
                text = f"broker {name} lacks a half message that it has acknowledged: {LOST_TAIL}. No row is committed"
                raise DeliveryError(f"committing {write}: {text}. Run the job again. Its answer was: {exc}") from exc
            skew = (stored.store_timestamp - stored.born_timestamp) / 1000
            if abs(skew) > timeout * _MARGIN / 1000:
                raise DeliveryError(
                    f"committing {write}: the clocks of a client and of broker {name} differ by {skew:.1f} s, and "
                    f"transactionTimeoutMs={timeout} allows {timeout * _MARGIN / 1000:g} s. No row is committed. "
                    "Synchronise the clocks"
                )

        self.brokers.for_each(dict.fromkeys((*halves.youngest, halves.oldest)), check)

    def _decide(self, write: Write, round_: int, group: str, halves: Halves, timeout: int) -> Decision:
        """Store a decision, and return the decision that takes effect."""
        ends = self.brokers.max_offsets(halves.queues)
        names, claim = {queue.broker_name for queue in halves.queues}, None
        if self.log.writes:
            self.log.append_homes(self.brokers, write, names - {self.log.require_home().broker_name})
        else:
            claim = self.log.claim_home(self.brokers, write, names)
        decision = Decision(
            write=write,
            round=round_,
            group=group,
            rows=len(halves),
            timeout_ms=timeout,
            manifests=(),
            digest="",
            start_offsets={queue: ends[queue] for queue in halves.queues},
            youngest=halves.youngest,
        )
        return self.log.append_decision(self.brokers, decision, halves.to_manifests(), claim)

    def _execute(self, decision: Decision, halves: Halves, report: CommitReport) -> CommitReport:
        """Commit the half messages of an own decision."""
        started = self.brokers.clock()
        expires = started + decision.timeout_ms / 1000
        sender = EndSender(self.brokers, halves, decision.group, TRANSACTION_COMMIT_TYPE, expires=expires)
        sender.run()
        if not sender.acknowledged.all():
            report.commit_s += self.brokers.clock() - started
            missing = len(halves) - int(sender.acknowledged.sum())
            text = "%s: %d of %d rows are not known to be committed (%s); finding out which ones are missing"
            logger.warning(text, decision.write, missing, len(halves), sender.error or "the deadline has passed")
            return self._recover(decision, report)
        # The brokers have flushed and replicated the commits then.
        self.log.await_stored(self.brokers, decision.write, {queue.broker_name for queue in halves.queues})
        report.commit_s += self.brokers.clock() - started
        if self._has_lost_rows(decision, halves, sender):
            return self._recover(decision, report)
        self._complete(decision, report)
        return report

    def _has_lost_rows(self, decision: Decision, halves: Halves, sender: EndSender) -> bool:
        """Return whether a broker has lost rows: it commits with code 0 before it has flushed or replicated them.

        Then a queue has fewer messages since the decision than rows, unless other producers have stored some.
        """
        if sender.has_lost_connections():
            return not self._committed(decision, halves).all()
        ends = self.brokers.max_offsets(halves.queues)
        counts = zip(halves.queues, np.bincount(halves.codes, minlength=len(halves.queues)).tolist(), strict=True)
        lost = [queue for queue, count in counts if ends[queue] - decision.start_offsets[queue] < count]
        if lost:
            text = "%s: queues %s have fewer messages than committed rows: %s; finding out which ones are missing"
            logger.warning(text, decision.write, ", ".join(map(str, lost)), LOST_TAIL)
        return bool(lost)

    def _complete(self, decision: Decision, report: CommitReport) -> None:
        """Store that the write is done. All of its rows are flushed and replicated."""
        decisions = self.log.writes[decision.write].decisions
        report.rows = decisions[min(decisions)].rows
        self.log.append_done(self.brokers, decision.write)

    def _recover(self, decision: Decision, report: CommitReport) -> CommitReport:
        """Complete a decision of any driver, in as many rounds as it takes."""
        started = self.brokers.clock()
        self._check_topics(decision)
        halves = read_halves(self.brokers, self.log, decision)
        self.brokers.runtime.sleep(max(self._fence(decision), BARRIER_WAIT))
        self.log.await_stored(self.brokers, decision.write, {half.queue.broker_name for half in decision.youngest})
        committed = self._committed(decision, halves)
        report.recovery_rounds += 1
        report.recover_s += self.brokers.clock() - started
        if committed.all():
            self._complete(decision, report)
            return report
        missing = halves.select(np.flatnonzero(~committed))
        text = "%s: %d of %d rows were committed; preparing %d again in round %d"
        logger.warning(text, decision.write, committed.sum(), len(halves), len(missing), decision.round + 1)
        group = group_of(self.log.transactional_id, decision.write, decision.round + 1, self.run_id)
        timeout = self.brokers.options.transaction_timeout_ms + len(missing) * _RECOVERY_MS_PER_ROW
        again = self._prepare_again(missing, decision.group, group, timeout)
        try:
            self._check_halves(decision.write, again, group, timeout)
        except DeliveryError:
            self.roll_back(again, group)
            raise
        following = self._decide(decision.write, decision.round + 1, group, again, timeout)
        if following.group != group:
            self.roll_back(again, group)
            return self._recover(following, report)
        report.recovered_rows += len(again)
        return self._execute(following, again, report)

    def _check_topics(self, decision: Decision) -> None:
        """Raise an MQClientException if a decision has rows for topics to which this write has none."""
        options = self.brokers.options
        foreign = {queue.topic for queue in decision.start_offsets} - {options.topic, options.dead_letter_topic}
        if options.topic is not None and foreign:
            raise MQClientException(
                f"completing {decision.write}: its decision has rows for topic {', '.join(sorted(foreign))}, and this "
                f"write has topic={options.topic}. No row of it is committed or copied. If the option topic was "
                "changed, complete the write with the old one, or with rocketmq-spark transactions "
                f"{self.log.transactional_id} --finish. Otherwise find out which program writes to topic "
                f"{self.log.topic}"
            )

    def _view(self, half: Half, group: str) -> MessageExt:
        """Return a half message that a decision names, as the broker has it.

        Raises an MQClientException if it is another message. Every user who can write to the log can name any message,
        and 5.5.0 returns each message of its commit log to each user.
        """
        stored, wrap = self.brokers.view(half.queue, half.commit_log_offset), self.brokers.transport.namespace.wrap
        expected = {
            const.PGROUP: wrap(group),
            _REAL_TOPIC: wrap(half.queue.topic),
            _REAL_QUEUE: str(half.queue.queue_id),
        }
        found = {name: stored.properties.get(name) for name in expected}
        if stored.topic not in _HALF_TOPICS or found != expected:
            raise MQClientException(
                f"a decision of transactionalId={self.log.transactional_id} names the message at commit-log offset "
                f"{half.commit_log_offset} of broker {half.queue.broker_name} as a half message with {expected}. It is "
                f"a message of topic {stored.topic} with {found}. It is not copied or ended. Find out which program "
                f"writes to topic {self.log.topic}, and use another transactionTopic or transactionalId"
            )
        return stored

    def _fence(self, decision: Decision) -> float:
        """Return when each broker rejects ENDs of the youngest half message, and so of all others, as too late.

        The result is the time, in seconds, after which it rejects them also if its clock goes back by `_MARGIN`, or a
        slave with such a clock becomes the master.
        """
        self.brokers.for_each(decision.youngest, lambda half: self._view(half, decision.group))
        deadline = (max((half.born_timestamp for half in decision.youngest), default=0) + decision.timeout_ms) / 1000
        # Until then the broker would execute the rollbacks.
        wait = min(deadline - self.brokers.runtime.wall_clock(), decision.timeout_ms / 1000)
        if decision.youngest and wait > 0:
            text = "%s: waiting %.0f s until the brokers accept no more commits of round %d"
            logger.warning(text, decision.write, wait, decision.round)
            self.brokers.runtime.sleep(wait)
        waited = self.brokers.for_each(decision.youngest, lambda half: self._await_deadline(half, decision))
        margin = self.brokers.options.transaction_timeout_ms * _MARGIN / 1000
        # The deadline of a slow clock may have passed only now.
        left = deadline + 2 * margin - self.brokers.runtime.wall_clock()
        return margin if any(waited.values()) else min(left, margin)

    def _await_deadline(self, half: Half, decision: Decision) -> bool:
        """Return when the deadline has passed; False if it had before."""
        waited, expires = False, self.brokers.clock() + decision.timeout_ms / 1000 + self.brokers.patience
        while (error := self._roll_back_now(half, decision.group)) is None or error.retriable:
            if self.brokers.clock() >= expires:
                raise DeliveryError(
                    f"completing {decision.write}: broker {half.queue.broker_name} still accepts the end of a half "
                    f"message, or does not answer ({error or 'it answered with success'}); start it, and run the job "
                    "again"
                )
            self.brokers.runtime.sleep(_FENCE_POLL)
            waited = True
        if not (isinstance(error, MQBrokerException) and error.response_code == ResponseCode.ILLEGAL_OPERATION):
            raise error
        return waited

    def _roll_back_now(self, half: Half, group: str) -> RocketMQError | None:
        """Try to roll a half message back; return the error."""
        answers = self.brokers.runtime.queue()
        try:
            end_half(self.brokers, half, group, TRANSACTION_ROLLBACK_TYPE, answers.put)
            error: RocketMQError | None = answers.get()
        except RocketMQError as exc:
            error = exc
        if error is not None:
            self.brokers.refresh_route_after(error, half.queue.topic)
        return error

    def _committed(self, decision: Decision, halves: Halves) -> npt.NDArray[np.bool_]:
        """Return which half messages of a decision are committed."""
        places = zip(halves.codes.tolist(), halves.commit_log_offsets.tolist(), strict=True)
        numbers = {(halves.queues[code].broker_name, offset): row for row, (code, offset) in enumerate(places)}
        committed = np.zeros(len(halves), np.bool_)
        ends = self.brokers.max_offsets(decision.start_offsets)
        is_own = partial(self._is_of, decision.group)

        def rows_in(queue: MessageQueue) -> list[int]:
            floor = floor_now(self.brokers, queue, Known(decision.start_offsets[queue]), ends[queue], is_own)
            messages = scan_messages(self.brokers, queue, floor, ends[queue])
            return [
                row
                for message in filter(is_own, messages)
                if (row := numbers.get((queue.broker_name, message.prepared_transaction_offset))) is not None
            ]

        for rows in self.brokers.for_each(decision.start_offsets, rows_in, at_once=_QUEUES_AT_ONCE).values():
            committed[rows] = True
        return committed

    def _is_of(self, group: str, message: MessageExt) -> bool:
        return message.properties.get(const.PGROUP) == self.brokers.transport.namespace.wrap(group)

    def _prepare_again(self, missing: Halves, old_group: str, group: str, timeout: int) -> Halves:
        """Store half messages with the content of others, and return them."""
        properties = half_properties(group, timeout)
        collector = HalfCollector()
        for first in range(0, len(missing), _ROWS_AT_ONCE):
            rows = range(first, min(first + _ROWS_AT_ONCE, len(missing)))
            contents = self.brokers.for_each(rows, lambda row: self._content(missing[row], old_group, properties))
            store_halves(self.brokers, list(contents.values()), collector.append)
        return collector.halves()

    def _content(self, half: Half, group: str, properties: str) -> tuple[EncodedBatch, MessageQueue]:
        stored = self._view(half, group)
        own = {name: value for name, value in stored.properties.items() if name not in _OF_HALF}
        batch = EncodedBatch(
            half.queue.topic,
            (stored.body,),
            1,
            len(stored.body),
            batch=False,
            properties=encode_properties(own).decode() + properties,
            flag=stored.flag,
            # The bits of the compression stay.
            sys_flag=stored.sys_flag & COMPRESSION_BITS | TRANSACTION_PREPARED_TYPE,
        )
        return batch, half.queue
