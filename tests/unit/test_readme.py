"""What the README says of the code is what the code says of itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from rocketmq_spark.options import OptionRow, options_table
from rocketmq_spark.reader_options import reader_options_table
from tests.benchmarks import contest

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def table(rows: Sequence[OptionRow]) -> str:
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for row in rows:
        aliases = f" (also {', '.join(f'`{alias}`' for alias in row.aliases)})" if row.aliases else ""
        lines.append(f"| `{row.name}`{aliases} | {row.default} | {row.doc} |")
    return "\n".join(lines)


@pytest.mark.parametrize(("name", "rows"), [("options", options_table()), ("read options", reader_options_table())])
def test_the_option_tables_are_those_of_the_code(name: str, rows: Sequence[OptionRow]) -> None:
    found = re.search(rf"<!-- {name}:.*?-->\n(.*)\n<!-- end of {name} -->", README, re.DOTALL)
    assert found is not None
    assert found[1] == table(rows), f"put this into README.md:\n{table(rows)}"


def test_the_figures_are_those_of_the_last_benchmark() -> None:
    found = re.search(r"<!-- figures:.*?-->\n(.*)\n<!-- end of figures -->", README, re.DOTALL)
    assert found is not None
    assert found[1] == contest.table(), f"put this into README.md:\n{contest.table()}"


def test_every_make_target_that_the_readme_names_exists() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)) <= targets
