"""What the commit of an exactly-once write did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rocketmq_spark.deliveries.base import WriteReport


@dataclass(slots=True)
class CommitReport(WriteReport):
    """What the commit of one write did."""

    NAME: ClassVar[str] = "exactly_once"  # In the lines of ``metricsPath``

    # All rows of the write, including those of earlier drivers.
    rows: int = 0
    # Rows that were prepared again, and the number of recoveries.
    recovered_rows: int = 0
    recovery_rounds: int = 0
    # Seconds in each phase.
    decide_s: float = 0.0
    commit_s: float = 0.0
    recover_s: float = 0.0

    def __str__(self) -> str:
        text = f"{self.rows} rows committed (decision {self.decide_s:.2f} s, commit {self.commit_s:.2f} s"
        if self.recovery_rounds:
            text += f", {self.recovery_rounds} recoveries {self.recover_s:.2f} s, {self.recovered_rows} rows again"
        return f"{text})"
