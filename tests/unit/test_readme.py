"""The README's figures are those of the last benchmark."""

from __future__ import annotations

import re

from tests.benchmarks import contest
from tests.support.markdown import ROOT


def test_readme_figures_equal_the_last_benchmark() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    found = re.search(r"<!-- figures:.*?-->\n(.*)\n<!-- end of figures -->", readme, re.DOTALL)
    assert found is not None
    assert found[1] == contest.table(), f"put this into README.md:\n{contest.table()}"
