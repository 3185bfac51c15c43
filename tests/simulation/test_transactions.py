"""Transactions in virtual time: fixed seeds, and errors that the checks must find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from rocketmq_spark.errors import MQClientException, RemotingConnectException
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, LocalTransactionState, TransactionSendResult
from tests.simulation.transaction_checks import (
    TYPES,
    ExecutedEnd,
    SentEnd,
    Transaction,
    TransactionHistory,
    problems_of_transactions,
)
from tests.simulation.transactions import TransactionPlan, run_transactions

SEEDS = range(60)

COMMIT = LocalTransactionState.COMMIT_MESSAGE
ROLLBACK = LocalTransactionState.ROLLBACK_MESSAGE
UNKNOWN = LocalTransactionState.UNKNOW


def test_transactions_keep_their_promises_under_faults() -> None:
    runs = [run_transactions(TransactionPlan.of_seed(seed)) for seed in SEEDS]
    assert not {run.plan.seed: run.problems for run in runs if run.problems}
    # Otherwise the checks would see little.
    results = [each.result for run in runs for each in run.history.transactions]
    assert None in results
    assert {True, False} <= {result.end_error.maybe_stored for result in results if result and result.end_error}
    assert any(end.from_check for run in runs for end in run.history.executed)


def test_transactions_replay_exactly() -> None:
    first, again = (run_transactions(TransactionPlan.of_seed(7)) for _ in range(2))
    assert first.trace == again.trace
    assert first.faults == again.faults
    assert first.history.sent == again.history.sent


class Without:
    """A history without a fault, and the first transaction, end and check of a kind in it."""

    def __init__(self) -> None:
        options = {"send_msg_timeout": 3_000}
        run = run_transactions(TransactionPlan(1, brokers=1, tasks=2, rows=12, options=options))
        assert not run.problems
        self.history: TransactionHistory = run.history

    def call(self, state: LocalTransactionState) -> tuple[Transaction, TransactionSendResult]:
        """Return the first call that ended in a state."""
        found = (
            (each, each.result)
            for each in self.history.transactions
            if each.result is not None and each.result.local_transaction_state is state
        )
        return next(found)

    def sent(self, state: LocalTransactionState, *, from_check: bool = False) -> SentEnd:
        """Return the first end of a kind that the client has sent."""
        kind = TYPES[state]
        return next(end for end in self.history.sent if (end.kind, end.from_check) == (kind, from_check))

    def executed(self, state: LocalTransactionState) -> ExecutedEnd:
        """Return the first end of a kind that the broker has executed."""
        return next(end for end in self.history.executed if end.kind == TYPES[state])


def commit_again(run: Without) -> None:
    run.history.sent.append(run.sent(COMMIT))


def answer_a_check_again(run: Without) -> None:
    run.history.sent.append(run.sent(COMMIT, from_check=True))


def end_otherwise_than_decided(run: Without) -> None:
    end = run.sent(ROLLBACK)
    run.history.sent[run.history.sent.index(end)] = dataclasses.replace(end, kind=TRANSACTION_COMMIT_TYPE)


def execute_again(run: Without) -> None:
    run.history.executed.append(run.executed(COMMIT))


def commit_after_a_rollback(run: Without) -> None:
    end = run.executed(ROLLBACK)
    run.history.executed[run.history.executed.index(end)] = dataclasses.replace(end, kind=TRANSACTION_COMMIT_TYPE)


def end_without_execution(run: Without) -> None:
    _, result = run.call(COMMIT)
    run.history.executed = [end for end in run.history.executed if end.msg_id != result.msg_id]


def exclude_an_execution(run: Without) -> None:
    transaction, result = run.call(COMMIT)
    transaction.result = dataclasses.replace(result, end_error=RemotingConnectException("refused"))


def execute_an_unknown_end(run: Without) -> None:
    transaction, result = run.call(COMMIT)
    transaction.result = dataclasses.replace(result, local_transaction_state=UNKNOWN)


def fail_after_the_local_transaction(run: Without) -> None:
    transaction, _ = run.call(COMMIT)
    transaction.result, transaction.error = None, MQClientException("failed")


def fail_with_another_error(run: Without) -> None:
    transaction, _ = run.call(COMMIT)
    transaction.result, transaction.error = None, RemotingConnectException("failed")


def take_too_long(run: Without) -> None:
    run.history.transactions[0].ended += 100


def show_twice(run: Without) -> None:
    run.history.visible[run.call(COMMIT)[0].body] += 1


def show_what_was_rolled_back(run: Without) -> None:
    run.history.visible[run.call(ROLLBACK)[0].body] += 1


def hide_what_was_committed(run: Without) -> None:
    del run.history.visible[run.call(COMMIT)[0].body]


def forget_to_ask(run: Without) -> None:
    _, result = run.call(UNKNOWN)
    history = run.history
    history.decisions = [each for each in history.decisions if each.msg_id != result.msg_id]
    history.executed = [each for each in history.executed if each.msg_id != result.msg_id]


PLANTED: dict[Callable[[Without], None], str] = {
    commit_again: "was ended 2 times by its call",
    answer_a_check_again: "were answered 2 times",
    end_otherwise_than_decided: "and the listener decided on",
    execute_again: "was executed 2 times, and sent 1 times",
    commit_after_a_rollback: "was committed, and the listener decided on a rollback",
    end_without_execution: "it ended with COMMIT_MESSAGE, and the broker has executed set()",
    exclude_an_execution: "the error excludes that",
    execute_an_unknown_end: "its state is unknown",
    fail_after_the_local_transaction: "the local transaction ran, and the call failed",
    fail_with_another_error: "it failed with RemotingConnectException",
    take_too_long: "it took",
    show_twice: "is visible 2 times, and was committed 1 times",
    show_what_was_rolled_back: "the listener has not decided on a commit",
    hide_what_was_committed: "is not visible",
    forget_to_ask: "the client was never asked about it",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_error_of_a_transaction_is_found(plant: Callable[[Without], None]) -> None:
    run = Without()
    plant(run)
    assert any(PLANTED[plant] in problem for problem in problems_of_transactions(run.history))
