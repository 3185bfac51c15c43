"""A model of the two-phase commit of exactly-once writes, small enough to look at every order of its events.

Two drivers write the same micro-batch of two rows, because the first one was paused and Spark has started a second one.
A third driver starts when both have ended or crashed. Each row goes to its own broker. An event is a step of a driver,
the arrival of a request, a step of a broker, the passing of a deadline, or a fault. Drivers pause and requests are
delayed at any place, because events happen in any order. The number of faults is limited: a driver crashes, the answer
to an END_TRANSACTION is lost, or a record of the decision log is stored twice.

Rows of different attempts count as different, as if the input were not deterministic. `Rules` are those of the
protocol. If one of them is removed, `explore` finds a violation.

What the model leaves out changes nothing: half messages that are in no decision are never committed, and rollbacks only
save space. A reader that waits for a barrier message sees all messages that the broker has stored before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias

ROWS: Final = 2
DRIVERS: Final = 3


class Rules(NamedTuple):
    """What the protocol demands."""

    # A recovery begins after the deadline of each half message that it looks at.
    fence: bool = True
    # It then waits for ENDs that have passed the broker's check of the deadline.
    barrier: bool = True
    # The first decision of a round counts.
    first_wins: bool = True
    # A driver never sends the END of a half message again.
    one_end: bool = True


class Half(NamedTuple):
    """A half message. Its content is that of the attempt that has read the input."""

    row: int
    round: int
    driver: int
    attempt: int


class Decision(NamedTuple):
    """A record of the decision log: a driver will commit these half messages."""

    round: int
    driver: int
    halves: tuple[Half, ...]


class Step(IntEnum):
    """What a driver does next. From `ENDED` on, it does nothing."""

    READ_LOG = 0
    AWAIT_APPEND = 1
    READ_BACK = 2
    AWAIT_ENDS = 3
    FENCE = 4
    SCAN = 5
    ENDED = 6
    CRASHED = 7
    # It would begin one round more than the model has.
    OUT_OF_ROUNDS = 8


class Driver(NamedTuple):
    """A driver, the decision that it executes or recovers, and the half messages whose commit was acknowledged."""

    step: Step = Step.READ_LOG
    decision: Decision | None = None
    acknowledged: frozenset[Half] = frozenset()

    def awaits(self, half: Half) -> bool:
        """Return whether the driver waits for the answer to the END of a half message."""
        return self.step is Step.AWAIT_ENDS and self.decision is not None and half in self.decision.halves


class State(NamedTuple):
    """Everything at one moment. Requests in flight and messages are sorted, because their order does not matter."""

    drivers: tuple[Driver, ...]
    faults_left: int
    # Records of the decision log in flight, and the log.
    appends: tuple[Decision, ...] = ()
    log: tuple[Decision, ...] = ()
    done: bool = False
    # ENDs in flight, that have passed the check of the deadline, and that were executed.
    ends: tuple[Half, ...] = ()
    checked: tuple[Half, ...] = ()
    committed: tuple[Half, ...] = ()
    # Half messages whose deadline has passed.
    expired: frozenset[Half] = frozenset()

    def with_driver(self, number: int, driver: Driver, **changes: object) -> State:
        """Return the state with another driver."""
        drivers = (*self.drivers[:number], driver, *self.drivers[number + 1 :])
        return self._replace(drivers=drivers, **changes)  # type: ignore[arg-type]

    def winner(self, round_: int) -> Decision:
        """Return the first decision of a round."""
        return next(decision for decision in self.log if decision.round == round_)


Event: TypeAlias = "tuple[str, State]"


class Found(NamedTuple):
    """What an exploration has found: a violation with the events that lead to it, or none."""

    states: int
    violation: str = ""
    events: tuple[str, ...] = ()
    # States in which nothing can happen any more: with all rows committed, and without more rounds.
    complete: int = 0
    out_of_rounds: int = 0


def explore(rules: Rules, faults: int, most_rounds: int = 2) -> Found:
    """Look at all states that can be reached."""
    first = State((Driver(),) * DRIVERS, faults)
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    pending = deque([first])
    complete = out_of_rounds = 0
    while pending:
        state = pending.popleft()
        is_last = True
        for text, following in events(state, rules, most_rounds):
            is_last = False
            if following in came_from:
                continue
            came_from[following] = state, text
            if violation := violation_of(following):
                return Found(len(came_from), violation, _events_to(following, came_from))
            pending.append(following)
        if is_last and any(driver.step is Step.OUT_OF_ROUNDS for driver in state.drivers):
            out_of_rounds += 1
        elif is_last:
            complete += 1
            if not state.done:
                return Found(len(came_from), "nothing happens any more", _events_to(state, came_from))
    return Found(len(came_from), "", (), complete, out_of_rounds)


def violation_of(state: State) -> str:
    """Return what must not be: repeated rows, rows of several attempts, missing rows; else an empty text."""
    rows = {half.row for half in state.committed}
    if len(rows) < len(state.committed):
        return "a row is committed twice"
    if len({half.attempt for half in state.committed}) > 1:
        return "rows of two attempts are committed"
    return "the write is done without all rows" if state.done and len(rows) < ROWS else ""


def events(state: State, rules: Rules, most_rounds: int) -> Iterator[Event]:
    """Return what can happen next."""
    for number, driver in enumerate(state.drivers):
        is_last = number == DRIVERS - 1
        others_run = any(other.step < Step.ENDED for other in state.drivers[:-1])
        if driver.step >= Step.ENDED or (is_last and others_run):
            continue
        if state.faults_left and not is_last:
            crashed = state.with_driver(number, Driver(Step.CRASHED), faults_left=state.faults_left - 1)
            yield f"driver {number} crashes", crashed
        yield from _steps_of(state, number, driver, rules, most_rounds)
    yield from _arrivals(state)
    yield from _executions(state)
    yield from _deadlines(state)


def _steps_of(state: State, number: int, driver: Driver, rules: Rules, most_rounds: int) -> Iterator[Event]:
    decision = driver.decision
    if driver.step is Step.READ_LOG:
        if state.done:
            yield f"driver {number} finds the write done", state.with_driver(number, Driver(Step.ENDED))
        elif state.log:
            latest = state.winner(max(one.round for one in state.log))
            yield f"driver {number} finds a decision", state.with_driver(number, Driver(Step.FENCE, latest))
        else:
            yield _decide(state, number, tuple(Half(row, 1, number, number) for row in range(ROWS)))
        return
    assert decision is not None
    if driver.step is Step.READ_BACK:
        winner = state.winner(decision.round)
        if winner == decision or not rules.first_wins:
            waiting = Driver(Step.AWAIT_ENDS, decision)
            ends = _plus(state.ends, *decision.halves)
            yield f"driver {number} sends ENDs", state.with_driver(number, waiting, ends=ends)
        else:
            yield f"driver {number} loses", state.with_driver(number, Driver(Step.FENCE, winner))
    elif driver.step is Step.AWAIT_ENDS:
        open_ones = [half for half in decision.halves if half not in driver.acknowledged]
        if not open_ones:
            yield f"driver {number} is done", state.with_driver(number, Driver(Step.ENDED), done=True)
        elif state.faults_left and rules.one_end:
            recovering = state.with_driver(number, Driver(Step.FENCE, decision), faults_left=state.faults_left - 1)
            yield f"driver {number} loses an answer", recovering
        elif state.faults_left:
            repeated = state._replace(ends=_plus(state.ends, *open_ones), faults_left=state.faults_left - 1)
            yield f"driver {number} loses an answer, and sends ENDs again", repeated
    elif driver.step is Step.FENCE:
        if not rules.fence or state.expired.issuperset(decision.halves):
            yield f"driver {number} has passed the fence", state.with_driver(number, Driver(Step.SCAN, decision))
    elif driver.step is Step.SCAN and not (rules.barrier and set(state.checked) & set(decision.halves)):
        missing = [half for half in decision.halves if half not in state.committed]
        if not missing:
            yield f"driver {number} finds all rows", state.with_driver(number, Driver(Step.ENDED), done=True)
        elif decision.round == most_rounds:
            yield f"driver {number} stops", state.with_driver(number, Driver(Step.OUT_OF_ROUNDS))
        else:
            again = (Half(half.row, decision.round + 1, number, half.attempt) for half in missing)
            yield _decide(state, number, tuple(again))


def _decide(state: State, number: int, halves: tuple[Half, ...]) -> Event:
    """The driver has stored half messages, and sends its decision."""
    decision = Decision(halves[0].round, number, halves)
    waiting = Driver(Step.AWAIT_APPEND, decision)
    rows = ", ".join(str(half.row) for half in halves)
    text = f"driver {number} prepares rows {rows} in round {decision.round}, and sends its decision"
    return text, state.with_driver(number, waiting, appends=_plus(state.appends, decision))


def _arrivals(state: State) -> Iterator[Event]:
    """Requests arrive at the decision log and at brokers."""
    for decision in set(state.appends):
        number = decision.driver
        driver = state.drivers[number]
        if driver == Driver(Step.AWAIT_APPEND, decision):
            driver = Driver(Step.READ_BACK, decision)
        stored = state.with_driver(number, driver, log=(*state.log, decision))
        text = f"the decision of driver {number} in round {decision.round} is stored"
        yield text, stored._replace(appends=_minus(state.appends, decision))
        if state.faults_left:
            yield f"{text}, and will be again", stored._replace(faults_left=state.faults_left - 1)
    for half in set(state.ends):
        rest = _minus(state.ends, half)
        if half not in state.expired:
            yield f"the END of {half} passes the check", state._replace(ends=rest, checked=_plus(state.checked, half))
            continue
        driver = state.drivers[half.driver]
        if driver.awaits(half):
            driver = Driver(Step.FENCE, driver.decision)
        yield f"the END of {half} is too late", state.with_driver(half.driver, driver, ends=rest)


def _executions(state: State) -> Iterator[Event]:
    """Brokers execute ENDs that have passed their check."""
    for half in set(state.checked):
        driver = state.drivers[half.driver]
        if driver.awaits(half):
            driver = driver._replace(acknowledged=driver.acknowledged | {half})
        changes = {"checked": _minus(state.checked, half), "committed": _plus(state.committed, half)}
        yield f"{half} is committed", state.with_driver(half.driver, driver, **changes)


def _deadlines(state: State) -> Iterator[Event]:
    """Deadlines pass: of half messages that a driver looks at, or whose END arrives. Others change nothing."""
    winners = {decision.round: decision for decision in reversed(state.log)}
    halves = {half for decision in winners.values() for half in decision.halves} | set(state.ends)
    for half in halves - state.expired:
        yield f"the deadline of {half} passes", state._replace(expired=state.expired | {half})


def _plus(halves: tuple[Any, ...], *more: Any) -> tuple[Any, ...]:
    return tuple(sorted((*halves, *more)))


def _minus(halves: tuple[Any, ...], one: Any) -> tuple[Any, ...]:
    at = halves.index(one)
    return (*halves[:at], *halves[at + 1 :])


def _events_to(state: State, came_from: dict[State, tuple[State, str] | None]) -> tuple[str, ...]:
    texts = []
    while (step := came_from[state]) is not None:
        state, text = step
        texts.append(text)
    return tuple(reversed(texts))
