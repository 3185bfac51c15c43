"""The figures in the documentation are those of the last benchmark."""

from __future__ import annotations

import re

import pytest

from tests.benchmarks import contest
from tests.support.markdown import ROOT


@pytest.mark.parametrize(
    ("page", "name", "figures"),
    [("docs/performance.md", "figures", contest.table()), ("README.md", "headlines", contest.headlines())],
    ids=["performance", "readme"],
)
def test_documented_figures_equal_the_last_benchmark(page: str, name: str, figures: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    found = re.search(rf"<!-- {name}:.*?-->\n(.*)\n<!-- end of {name} -->", text, re.DOTALL)
    assert found is not None
    assert found[1] == figures, f"put this into {page}:\n{figures}"
