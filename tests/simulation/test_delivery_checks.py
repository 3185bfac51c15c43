"""What the checks of effectively-once writes find: each case changes what was stored, or a receipt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.deliveries.effectively_once.complete import ResumeReport
from rocketmq_spark.metrics import WriteSummary
from rocketmq_spark.model.message import MessageQueue
from tests.simulation.delivery_checks import Copy, problems_of
from tests.simulation.spark import TOPIC, Attempt, Ending, History, SparkPlan

PLAN = SparkPlan(0, rows=3, partitions=1, identity="batch", options={"ordered": True})
WRITE = PLAN.write(0)
QUEUE = MessageQueue(TOPIC, "b0", 0)
ATTEMPT = Attempt(WRITE, 0, 1, 0, id="a", bodies=PLAN.bodies(0))
END = 1.0


class Receipt(WriteSummary):
    """A receipt of one queue."""

    incomplete = False
    last = 2

    def to_dict(self, write_id: str | None = None) -> dict[str, dict[str, Any]]:
        span = {"rows": 3, "first_offset": 0, "last_offset": self.last}
        return {"b0": {"incomplete": self.incomplete, "queues": {TOPIC: {"0": span}}}}


Copies = list[Copy]


def stored() -> Copies:
    return [
        Copy(body, "key", QUEUE, offset, 0.1, ATTEMPT, 0.1, f"id-{offset}", "token")
        for offset, body in enumerate(PLAN.bodies(0))
    ]


def of_another(copy: Copy, **changes: Any) -> Copy:
    """Return a message that another producer has stored with the token of the attempt."""
    return replace(copy, attempt=None, **changes)


def problems(change: Callable[[Copies, Receipt], None]) -> list[str]:
    copies, receipt = stored(), Receipt()
    change(copies, receipt)
    history = History(done=[WRITE], ends={WRITE: Ending(END, ResumeReport(), receipt)})
    return problems_of(PLAN, history, copies, ())


def nothing(copies: Copies, receipt: Receipt) -> None:
    pass


def loss_after_the_end(copies: Copies, receipt: Receipt) -> None:
    copies[2] = replace(copies[2], lost_at=END + 1)


def exact_copy_of_another(copies: Copies, receipt: Receipt) -> None:
    copies[1] = of_another(copies[1], same=True)


def copy_behind_an_incomplete_receipt(copies: Copies, receipt: Receipt) -> None:
    copies[2] = replace(copies[2], offset=7)
    receipt.incomplete = True


def loss_that_a_row_hides(copies: Copies, receipt: Receipt) -> None:
    copies[2] = replace(copies[2], lost_at=0.5)
    copies.append(of_another(copies[1], offset=2, at=0.6))


def row_is_gone(copies: Copies, receipt: Receipt) -> None:
    del copies[2]


def row_of_another_content_counts(copies: Copies, receipt: Receipt) -> None:
    copies[1] = of_another(copies[1])


def row_is_repeated(copies: Copies, receipt: Receipt) -> None:
    copies.append(replace(copies[2], offset=3, unique_id="id-3"))
    receipt.last = 3


def loss_before_the_end(copies: Copies, receipt: Receipt) -> None:
    copies[2] = replace(copies[2], lost_at=0.5)


def loss_behind_a_message_of_another(copies: Copies, receipt: Receipt) -> None:
    loss_before_the_end(copies, receipt)
    copies.append(of_another(copies[2], body="other", at=0.6, token="", lost_at=float("inf")))


def loss_that_a_copy_elsewhere_hides(copies: Copies, receipt: Receipt) -> None:
    loss_before_the_end(copies, receipt)
    copies.append(of_another(copies[2], offset=9, same=True, at=0.6, lost_at=float("inf")))


def receipt_ends_early(copies: Copies, receipt: Receipt) -> None:
    receipt.last = 1


def rows_are_exchanged(copies: Copies, receipt: Receipt) -> None:
    copies[1], copies[2] = replace(copies[1], offset=2), replace(copies[2], offset=1)


@pytest.mark.parametrize(
    "change",
    [nothing, loss_after_the_end, exact_copy_of_another, copy_behind_an_incomplete_receipt, loss_that_a_row_hides],
)
def test_what_a_write_cannot_know_is_no_problem(change: Callable[[Copies, Receipt], None]) -> None:
    assert problems(change) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (row_is_gone, "rows are missing"),
        (row_of_another_content_counts, "rows are missing"),
        (row_is_repeated, "is visible 2 times"),
        (loss_before_the_end, "lost 1 rows before the end"),
        (loss_behind_a_message_of_another, "lost 1 rows before the end"),
        (loss_that_a_copy_elsewhere_hides, "lost 1 rows before the end"),
        (receipt_ends_early, "its receipt lacks 1 rows"),
        (rows_are_exchanged, "comes after"),
    ],
)
def test_a_planted_violation_is_found(change: Callable[[Copies, Receipt], None], problem: str) -> None:
    assert any(problem in text for text in problems(change))
