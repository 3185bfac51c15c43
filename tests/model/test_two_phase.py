"""The rules of exactly-once writes suffice, and each of them is needed: every order of events of a small model."""

from __future__ import annotations

import pytest

from tests.model.two_phase import Rules, explore


@pytest.mark.parametrize("faults", [1, pytest.param(2, marks=pytest.mark.long)])
def test_every_row_is_committed_once_in_every_order_of_events(faults: int) -> None:
    found = explore(Rules(), faults)
    assert found.violation == "", "\n".join(found.events)
    # The model does end, and it ends with all rows.
    assert found.complete > 0


@pytest.mark.parametrize(
    ("rule", "violation"),
    [
        ("fence", "a row is committed twice"),
        ("barrier", "a row is committed twice"),
        ("first_wins", "rows of two attempts are committed"),
        ("one_end", "a row is committed twice"),
    ],
)
def test_without_a_rule_some_order_of_events_breaks_the_promise(rule: str, violation: str) -> None:
    found = explore(Rules()._replace(**{rule: False}), faults=1)
    assert found.violation == violation
