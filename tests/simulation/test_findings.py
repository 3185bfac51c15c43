"""What the first design of once-deliveries assumed wrongly, and the planted bugs that show the simulator finds it.

Each entry of `FINDINGS` names removed rules, which are parameters of a test that a schedule fails without them.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.simulation import test_exactly_once, test_model

_RULES: Mapping[str, Mapping[str, object]] = {
    "effectively once": test_model.RULES,
    "exactly once": test_exactly_once.RULES,
    "lease": test_model.OVERLAPS,
}

FINDINGS: dict[str, tuple[tuple[str, str], ...]] = {
    # tests/simulation/test_reads.py plants the order of arrival in a read.
    "an input gives its rows in another order": (("effectively once", "any order"),),
    "a lost request counts as stored because of messages of others": (("effectively once", "contents of requests"),),
    "a later attempt believes ids without a look at contents": (("effectively once", "contents"),),
    "a forged record counts": (("effectively once", "signatures"), ("exactly once", "signatures")),
    "a forged manifest copies or ends messages of others": (("exactly once", "viewed half messages"),),
    # tests/simulation/test_model.py plants the missing bound of fences, too.
    "a forged timeout makes a driver wait for ever": (("exactly once", "timeouts"),),
    "a user prepares rows with equal hashes": (("effectively once", "seeds against collisions"),),
    "an old attempt sends rows beside its successor": (
        *(("lease", overlap) for overlap in ("zombie", "orphan", "second driver", "frozen driver")),
        ("exactly once", "fence"),
    ),
    "a thread without local properties guesses its identity": (("effectively once", "identity"),),
    "expired rows are stored again": (("effectively once", "floors"), ("exactly once", "floors")),
    "rows below the floor of a queue that lost its end are never read": (("effectively once", "ends below floors"),),
    "a broker loses rows before the end of a write": (
        *(("effectively once", rule) for rule in ("ends below receipts", "lost rows behind others")),
    ),
    "a receipt lacks rows that were found stored": (("effectively once", "recovered rows in receipts"),),
}


@pytest.mark.parametrize("finding", FINDINGS)
def test_a_finding_has_planted_bugs(finding: str) -> None:
    assert all(rule in _RULES[kind] for kind, rule in FINDINGS[finding])
