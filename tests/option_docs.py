"""The tables of docs/options.md, made of those by which options are parsed.

Run: python -m tests.option_docs (``make docs``), which fills them in; tests/unit/test_docs.py holds them equal.

Rule 1: an option's name, default, allowed values and meaning come from its table. What is between tables, and which
        options are in each (``<!-- write: nameServer topic -->``), is the page's own.
Rule 2: an option that is in no table of the page, or in two, is an error: a new one must find its place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rocketmq_spark.options import OptionRow, options_table
from rocketmq_spark.producer_options import producer_options_table
from rocketmq_spark.reader_options import reader_options_table

PATH: Final = Path(__file__).parents[1] / "docs" / "options.md"

_ROWS: Final[Mapping[str, Sequence[OptionRow]]] = {
    "write": options_table(),
    "read": reader_options_table(),
    "producer": producer_options_table(),
}
_TABLE: Final = re.compile(r"^<!-- (\w+): ([\w ]+) -->\n.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)


def filled(page: str) -> str:
    """Return a page with its tables as the code has them.

    Raises
    ------
    ValueError
        An option is in no table, or in two.
    """
    rows = {use: {row.name: row for row in table} for use, table in _ROWS.items()}

    def table(found: re.Match[str]) -> str:
        use, names = found[1], found[2].split()
        try:
            chosen = [rows[use].pop(name) for name in names]
        except KeyError as exc:
            raise ValueError(f"{found[0].splitlines()[0]}: {exc} is no such option, or in another table") from exc
        return f"<!-- {use}: {' '.join(names)} -->\n{_table(chosen)}\n<!-- end -->"

    text = _TABLE.sub(table, page)
    left_out = [f"{use}: {name}" for use, left in rows.items() for name in left]
    if left_out:
        raise ValueError(f"in no table: {', '.join(left_out)}")
    return text


def _table(rows: Sequence[OptionRow]) -> str:
    lines = ["| option | default | allowed | meaning |", "|---|---|---|---|"]
    for row in rows:
        also = [f"`{alias}`" for alias in row.aliases] + ([f"`${row.env}`"] if row.env else [])
        name = f"`{row.name}`" + (f" (also {', '.join(also)})" if also else "")
        cells = (cell.replace("|", r"\|") for cell in (name, row.default, row.allowed, row.doc))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PATH.write_text(filled(PATH.read_text("utf-8")), "utf-8")
