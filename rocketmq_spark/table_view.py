"""How a table of texts looks: printed, as one text, as HTML. Metrics, routes, receipts and answers of brokers share it.

Rule 1: HTML has no colours of its own: the page's apply, be it light or dark.
Rule 2: a text may come from a stranger's message: what a terminal would obey is shown as its code, not sent there.
"""

from __future__ import annotations

import html
import io
from collections.abc import Collection, Iterable, Sequence
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Without a terminal rich assumes 80 columns and would fold what has room in a file or a notebook.
_FILE_WIDTH: Final = 160

_HEADINGS: Final = {"broker_name": "broker", "broker_id": "id", "queue_id": "queue", "queue_offset": "offset"}


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Collection[str] = (),
    notes: Sequence[str] = (),
    empty: str = "",
    file: IO[str] | None = None,
) -> None:
    """Print a table, then its notes.

    Parameters
    ----------
    headings : sequence of str
    rows : iterable of sequence of str
    right : collection of str, default none
        Headings of the columns whose texts stand at their right end: numbers.
    notes : sequence of str, default none
    empty : str, default ""
        What is printed in place of a table without rows; "" prints the headings.
    file : file, optional
        Default: stdout.
    """
    from rich.console import Console

    console = Console(file=file, highlight=False)
    if not (console.is_terminal or console.is_jupyter):
        console = Console(file=file, highlight=False, width=_FILE_WIDTH)
    _print(console, headings, list(rows), right, notes, empty)


def text_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Collection[str] = (),
    notes: Sequence[str] = (),
    empty: str = "",
) -> str:
    """Return what `print_table` prints into a file."""
    from rich.console import Console

    file = io.StringIO()
    # Neither colours nor a notebook's display: a text and nothing else, wherever it is asked for.
    console = Console(
        file=file, highlight=False, width=_FILE_WIDTH, color_system=None, force_terminal=False, force_jupyter=False
    )
    _print(console, headings, list(rows), right, notes, empty)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).strip("\n")


def html_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, notes: Sequence[str] = (), empty: str = ""
) -> str:
    """Return the same as HTML; parameters as of `print_table`."""
    cells = list(rows)
    lines = [f"<p>{html.escape(empty)}</p>"]
    if cells or not empty:
        lines = ["<table>", _html_row("th", headings), *(_html_row("td", row) for row in cells), "</table>"]
    return "\n".join([*lines, *(f"<p>{html.escape(note)}</p>" for note in notes)])


def heading(name: str) -> str:
    """Return the heading of a column by its name: what is clear beside the other columns is left out."""
    return _HEADINGS.get(name) or name.replace("_percent", " %").replace("_", " ")


def printable(text: str) -> str:
    """Return a text in which what can't be printed, ends of lines among it, stands as its code."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode() for one in text)


def _print(
    console: Console,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[str],
    notes: Sequence[str],
    empty: str,
) -> None:
    console.print(rich_table(headings, rows, right) if rows or not empty else empty)
    for note in notes:
        console.print(note, markup=False)


def rich_table(headings: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> Table:
    """Return the table for a console of rich."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        # Texts, not markup: a body may hold what rich would take for a style.
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _html_row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(printable(cell))}</{tag}>" for cell in cells) + "</tr>"
