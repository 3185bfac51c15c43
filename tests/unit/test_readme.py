"""What the README says of the code is what the code says of itself."""

from __future__ import annotations

import re
from pathlib import Path

from rocketmq_spark.options import options_table
from tests.benchmarks import contest

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def table() -> str:
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for row in options_table():
        aliases = f" (also {', '.join(f'`{alias}`' for alias in row.aliases)})" if row.aliases else ""
        lines.append(f"| `{row.name}`{aliases} | {row.default} | {row.doc} |")
    return "\n".join(lines)


def test_the_option_table_is_the_one_of_the_code() -> None:
    found = re.search(r"<!-- options:.*?-->\n(.*)\n<!-- end of options -->", README, re.DOTALL)
    assert found is not None
    assert found[1] == table(), f"put this into README.md:\n{table()}"


def test_the_figures_are_those_of_the_last_benchmark() -> None:
    found = re.search(r"<!-- figures:.*?-->\n(.*)\n<!-- end of figures -->", README, re.DOTALL)
    assert found is not None
    assert found[1] == contest.table(), f"put this into README.md:\n{contest.table()}"


def test_every_make_target_that_the_readme_names_exists() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)) <= targets
