"""What transactions have done, and what must hold for it: pure data and pure functions, as in `read_checks`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rocketmq_spark.errors import MQClientException, RocketMQError
from rocketmq_spark.model.message import SendStatus
from rocketmq_spark.model.send_result import (
    TRANSACTION_COMMIT_TYPE,
    TRANSACTION_NOT_TYPE,
    TRANSACTION_ROLLBACK_TYPE,
    LocalTransactionState,
    TransactionSendResult,
)

TYPES = {
    LocalTransactionState.COMMIT_MESSAGE: TRANSACTION_COMMIT_TYPE,
    LocalTransactionState.ROLLBACK_MESSAGE: TRANSACTION_ROLLBACK_TYPE,
    LocalTransactionState.UNKNOW: TRANSACTION_NOT_TYPE,
}


@dataclass(frozen=True)
class SentEnd:
    """An END_TRANSACTION that the client has sent."""

    at: float
    address: str
    msg_id: str
    kind: int
    from_check: bool
    offset: int


@dataclass(frozen=True)
class ExecutedEnd:
    """A commit or rollback that a broker has executed. `half_id` is the id of the half message at the offset."""

    at: float
    address: str
    msg_id: str
    half_id: str
    kind: int
    from_check: bool
    offset: int


@dataclass(frozen=True)
class Decision:
    """What the listener has returned for a message."""

    at: float
    msg_id: str
    state: LocalTransactionState
    from_check: bool


@dataclass(eq=False)
class Transaction:
    """One call of `send_in_transaction`; the message's body is its name."""

    body: bytes
    began: float
    ended: float = math.inf
    result: TransactionSendResult | None = None
    error: RocketMQError | None = None


@dataclass(eq=False)
class TransactionHistory:
    """Everything that the checks of transactions look at."""

    # Seconds that a call may take.
    longest: float
    transactions: list[Transaction] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    sent: list[SentEnd] = field(default_factory=list)
    executed: list[ExecutedEnd] = field(default_factory=list)
    # The checks that the client got: address, offset and message id.
    checks: list[tuple[str, int, str]] = field(default_factory=list)
    # The id of each half message that a master has, and the bodies that consumers see, at the end.
    halves: set[str] = field(default_factory=set)
    visible: Counter[bytes] = field(default_factory=Counter)
    # Bodies by message id.
    bodies: dict[str, bytes] = field(default_factory=dict)
    # Whether a broker has lost messages: then offsets were used again.
    shortened: bool = False

    def decided(self, msg_id: str) -> set[LocalTransactionState]:
        """Return the commit or rollback that the listener has decided on, if any."""
        states = {decision.state for decision in self.decisions if decision.msg_id == msg_id}
        return states - {LocalTransactionState.UNKNOW}


def problems_of_transactions(history: TransactionHistory) -> list[str]:
    """Return a text for everything that a promise does not allow."""
    return [
        *_problems_of_requests(history),
        *_problems_of_execution(history),
        *_problems_of_calls(history),
        *_problems_of_consumers(history),
    ]


def _problems_of_requests(history: TransactionHistory) -> Iterator[str]:
    """The client ends each half message once, answers each check once, and says what the listener has decided.

    While a call runs, no check decides.
    """
    calls = Counter((end.address, end.msg_id, end.offset) for end in history.sent if not end.from_check)
    yield from (f"message {key[1]} was ended {count} times by its call" for key, count in calls.items() if count > 1)
    ids = Counter(end.msg_id for end in history.sent if not end.from_check)
    yield from (f"{count} calls ended message {msg_id}" for msg_id, count in ids.items() if count > 1)
    answers = Counter((end.address, end.offset, end.msg_id) for end in history.sent if end.from_check)
    got = Counter(history.checks)
    for key, count in answers.items():
        if count > got[key]:
            yield f"{got[key]} checks of message {key[2]} at offset {key[1]} were answered {count} times"
    done = [(each.result, each.ended) for each in history.transactions if each.result is not None]
    results = {result.msg_id: (result, ended) for result, ended in done}
    for end in history.sent:
        result, ended = results.get(end.msg_id, (None, 0.0))
        if end.from_check and end.kind != TRANSACTION_NOT_TYPE and end.at < ended:
            yield f"a check ended message {end.msg_id} with {end.kind} while its call was running"
        states = {
            TYPES[decision.state]
            for decision in history.decisions
            if (decision.msg_id, decision.from_check) == (end.msg_id, end.from_check) and decision.at <= end.at
        }
        if not end.from_check and result is not None and result.status is not SendStatus.SEND_OK:
            # The listener was not asked: the message is not safe.
            states = {TRANSACTION_ROLLBACK_TYPE}
        if end.kind not in states:
            yield f"message {end.msg_id} was ended with {end.kind}, and the listener decided on {sorted(states)}"


def _problems_of_execution(history: TransactionHistory) -> Iterator[str]:
    """A broker executes an end once, commits a half message once, and commits none that was rolled back."""
    # After a loss, another half message has the offset.
    halves = Counter((end.address, end.offset) for end in history.executed if end.kind == TRANSACTION_COMMIT_TYPE)
    for (address, offset), count in halves.items():
        if count > 1 and not history.shortened:
            yield f"the half message at offset {offset} of {address} was committed {count} times"
    counts = Counter((end.address, end.offset, end.msg_id, end.from_check) for end in history.executed)
    sent = Counter((end.address, end.offset, end.msg_id, end.from_check) for end in history.sent)
    for key, count in counts.items():
        if count > sent[key]:
            yield f"the end of message {key[2]} was executed {count} times, and sent {sent[key]} times"
    for end in history.executed:
        rolled_back = LocalTransactionState.ROLLBACK_MESSAGE in history.decided(end.msg_id)
        if end.kind == TRANSACTION_COMMIT_TYPE and rolled_back and end.half_id == end.msg_id:
            yield f"message {end.msg_id} was committed, and the listener decided on a rollback"


def _problems_of_calls(history: TransactionHistory) -> Iterator[str]:
    """Each call ends in time, and its result agrees with what the broker has executed."""
    asked = {history.bodies[decision.msg_id] for decision in history.decisions if not decision.from_check}
    for each in history.transactions:
        name = f"transaction {each.body!r}"
        if each.ended > each.began + history.longest:
            yield f"{name}: it took {each.ended - each.began:.1f} s"
        if each.result is None:
            if not isinstance(each.error, MQClientException):
                yield f"{name}: it failed with {type(each.error).__name__}: {each.error}"
            if each.body in asked:
                yield f"{name}: the local transaction ran, and the call failed: {each.error}"
            continue
        result, msg_id = each.result, each.result.msg_id
        executed = [end for end in history.executed if end.msg_id == msg_id and not end.from_check]
        kinds = {end.kind for end in executed if end.at <= each.ended}
        was_asked = each.body in asked
        if was_asked != (result.status is SendStatus.SEND_OK):
            yield f"{name}: the status is {result.status.name}; the listener was asked: {was_asked}"
        if result.ended and kinds != {TYPES[result.local_transaction_state]}:
            yield f"{name}: it ended with {result.local_transaction_state.name}, and the broker has executed {kinds}"
        error = result.end_error
        if error is not None and not error.maybe_stored and executed:
            yield f"{name}: the broker has executed its end, and the error excludes that: {error}"
        if result.local_transaction_state is LocalTransactionState.UNKNOW and executed:
            yield f"{name}: its state is unknown, and the broker has executed {kinds}"


def _problems_of_consumers(history: TransactionHistory) -> Iterator[str]:
    """Consumers see a message once for each commit, and at last every message that was decided to be committed."""
    committed = Counter(end.half_id for end in history.executed if end.kind == TRANSACTION_COMMIT_TYPE)
    for msg_id, body in history.bodies.items():
        count = history.visible[body]
        if count > committed[msg_id]:
            yield f"message {msg_id} is visible {count} times, and was committed {committed[msg_id]} times"
        if history.shortened:
            continue
        states = history.decided(msg_id)
        if count and LocalTransactionState.COMMIT_MESSAGE not in states:
            yield f"message {msg_id} is visible, and the listener has not decided on a commit"
        if not count and msg_id in history.halves and LocalTransactionState.COMMIT_MESSAGE in states:
            yield f"message {msg_id} is not visible, and the listener has decided on a commit"
        # A message that is not safe is rolled back without the listener.
        ended = any(end.half_id == msg_id for end in history.executed)
        if msg_id in history.halves and not states and not ended:
            yield f"the broker has half message {msg_id}, and the client was never asked about it"
