"""The tables of docs/options.md, made of the declarations by which options are parsed.

Run: python -m tests.tools.option_docs (``make docs``), which fills them in; tests/unit/test_docs.py holds them equal.

The page says which sections of options a table has (``<!-- write: servers topic -->``). A section that no table has, or
that two tables have, is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rocketmq_spark.options.kinds import OptionSpec
from rocketmq_spark.options.producer import PRODUCER_OPTIONS
from rocketmq_spark.options.sink import SINK_OPTIONS
from rocketmq_spark.options.source import SOURCE_OPTIONS

PATH: Final = Path(__file__).parents[2] / "docs" / "options.md"

_OPTIONS: Final[Mapping[str, Sequence[OptionSpec]]] = {
    "write": SINK_OPTIONS,
    "read": SOURCE_OPTIONS,
    "producer": PRODUCER_OPTIONS,
}
_TABLE: Final = re.compile(r"^<!-- (\w+): ([\w ]+) -->\n.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)


def filled(page: str) -> str:
    """Return a page with its tables as the code has them.

    Raises
    ------
    ValueError
        A section is in no table, or in two.
    """
    left = {use: {spec.section: specs_in(use, spec.section) for spec in specs} for use, specs in _OPTIONS.items()}

    def table(found: re.Match[str]) -> str:
        use, sections = found[1], found[2].split()
        try:
            chosen = [spec for section in sections for spec in left[use].pop(section)]
        except KeyError as exc:
            raise ValueError(f"{found[0].splitlines()[0]}: {exc} is no such section, or in another table") from exc
        return f"<!-- {use}: {' '.join(sections)} -->\n{_table(chosen)}\n<!-- end -->"

    text = _TABLE.sub(table, page)
    left_out = [
        f"{use}: {spec.name}" for use, sections in left.items() for specs in sections.values() for spec in specs
    ]
    if left_out:
        raise ValueError(f"in no table: {', '.join(left_out)}")
    return text


def specs_in(use: str, section: str) -> list[OptionSpec]:
    """Return the options of one section."""
    return [spec for spec in _OPTIONS[use] if spec.section == section]


def _table(specs: Sequence[OptionSpec]) -> str:
    lines = ["| option | default | allowed | meaning |", "|---|---|---|---|"]
    for spec in specs:
        also = [f"`{alias}`" for alias in spec.aliases] + ([f"`${spec.env}`"] if spec.env else [])
        name = f"`{spec.name}`" + (f" (also {', '.join(also)})" if also else "")
        cells = (cell.replace("|", r"\|") for cell in (name, shown_default(spec), spec.kind.allowed, spec.doc))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shown_default(spec: OptionSpec) -> str:
    """Return an option's default as a user would write it."""
    default = spec.default
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple | frozenset):
        return ",".join(map(str, default)) or "none"
    return "none" if default is None else str(default)


if __name__ == "__main__":
    PATH.write_text(filled(PATH.read_text("utf-8")), "utf-8")
