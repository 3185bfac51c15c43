"""Prints tables on a terminal or into a file, and returns them as text or as HTML.

Control characters are shown as codes, because a text may come from another application. On a narrow terminal only the
columns in `Layout.free` and `Layout.listed` are folded, so that values in other columns can be copied. If this is not
enough, the columns in `Layout.spare` are left out, with a note; after that each row becomes a list. A table in a file
has all columns in full width.
"""

from __future__ import annotations

import html
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final

from rocketmq_spark.errors import escaped

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

# Longer than any line; rich assumes 80 columns for a file.
_FILE_WIDTH: Final = 1_000_000
# Blanks between two columns, and at both ends of a line.
_BETWEEN: Final = 3
_ENDS: Final = 2
# The minimum width of a free text.
_TEXT_WIDTH: Final = 20

_HEADINGS: Final = {"broker_name": "broker", "broker_id": "id", "queue_id": "queue", "queue_offset": "offset"}


@dataclass(frozen=True, slots=True)
class Layout:
    """How columns, named by their headings, are laid out."""

    right: Collection[str] = ()  # Numbers, aligned at the right
    listed: Collection[str] = ()  # Names separated by blanks, folded only at the blanks
    free: Collection[str] = ()  # Free texts, folded anywhere
    spare: Sequence[str] = ()  # Columns to leave out on a narrow terminal, the most expendable first


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    layout: Layout = Layout(),
    *,
    notes: Sequence[str] = (),
    empty: str = "",
    file: IO[str] | None = None,
    plain: bool = False,
) -> None:
    """Print a table, then its notes, to `file` or stdout. Without rows print `empty`, or the headings if that is "".

    With `plain` there are no colours and no width limit, also in a notebook and on a terminal.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(file=file, highlight=False)
    if plain:
        console = Console(file=file, highlight=False, color_system=None, force_terminal=False, force_jupyter=False)
    if not (console.is_terminal or console.is_jupyter):
        console.width = _FILE_WIDTH
    cells = list(rows)
    shown = fitted(headings, cells, layout, console.width) if cells or not empty else empty
    # The terminal wraps the lines of rows that became lists.
    console.print(shown, soft_wrap=isinstance(shown, Text))
    for note in notes:
        console.print(escaped(note), markup=False)


def text_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    layout: Layout = Layout(),
    *,
    notes: Sequence[str] = (),
    empty: str = "",
) -> str:
    """Return what `print_table` prints into a file."""
    file = io.StringIO()
    print_table(headings, rows, layout, notes=notes, empty=empty, file=file, plain=True)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).strip("\n")


def html_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, notes: Sequence[str] = (), empty: str = ""
) -> str:
    """Return the table as HTML; parameters as of `print_table`."""
    cells = list(rows)
    lines = [f"<p>{html.escape(escaped(empty))}</p>"]
    if cells or not empty:
        lines = ["<table>", _html_row("th", headings), *(_html_row("td", row) for row in cells), "</table>"]
    return "\n".join([*lines, *(f"<p>{html.escape(escaped(note))}</p>" for note in notes)])


def heading(name: str) -> str:
    """Return the heading of a column by its name."""
    return _HEADINGS.get(name) or name.replace("_percent", " %").replace("_", " ")


def one_line(text: str) -> str:
    """Return a text as one line without control characters, with single blanks."""
    return escaped(" ".join(text.split()))


def present(facts: Mapping[str, object]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the only row of a table of facts, without unknown facts."""
    known = {name: value for name, value in facts.items() if value is not None}
    return [*map(heading, known)], [[*map(str, known.values())]]


def fitted(headings: Sequence[str], rows: Iterable[Sequence[str]], layout: Layout, width: int) -> RenderableType:
    """Return the table in the form that fits a rich console of `width` columns."""
    from rich import box
    from rich.cells import cell_len
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    cells = [[escaped(cell) for cell in row] for row in rows]
    columns = [*zip(headings, *cells, strict=True)]
    natural = [max(map(cell_len, column)) for column in columns]
    least = [_least(heading, texts, layout) for heading, *texts in columns]
    shown = _shown(headings, least, layout.spare, width)
    if shown is None:
        return _stacked(headings, cells)
    room = width - _width(least[place] for place in shown)
    widths = {}
    # The last column gets room first, because it may be the body.
    for place in reversed(shown):
        widths[place] = least[place] + min(natural[place] - least[place], room)
        room -= widths[place] - least[place]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place in shown:
        justify = "right" if headings[place] in layout.right else "left"
        table.add_column(headings[place], justify=justify, width=widths[place], overflow="fold")  # type: ignore[arg-type]
    for row in cells:
        # Not as markup, because a body may contain rich's style tags.
        table.add_row(*(Text(row[place]) for place in shown))
    left_out = [heading for place, heading in enumerate(headings) if place not in shown]
    if not left_out:
        return table
    text = f"left out, as the terminal is too narrow: {', '.join(left_out)}"
    return Group(table, Text(text, style="dim"))


def _least(heading: str, texts: Sequence[str], layout: Layout) -> int:
    """Return the smallest width that folds only free texts."""
    from rich.cells import cell_len

    whole = " ".join(texts).split() if heading in layout.listed else texts
    longest = max(map(cell_len, whole), default=0)
    return max(cell_len(heading), min(longest, _TEXT_WIDTH) if heading in layout.free else longest)


def _width(widths: Iterable[int]) -> int:
    return sum(width + _BETWEEN for width in widths) - _BETWEEN + _ENDS


def _shown(headings: Sequence[str], least: Sequence[int], spare: Sequence[str], width: int) -> list[int] | None:
    """Return the columns to show; None if even the required ones do not fit."""
    shown = list(range(len(headings)))
    expendable = [headings.index(heading) for heading in spare]
    while _width(least[place] for place in shown) > width:
        if not expendable:
            return None
        shown.remove(expendable.pop(0))
    return shown


def _stacked(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> Text:
    from rich.text import Text

    longest = max(map(len, headings))
    text = Text(no_wrap=True, overflow="ignore")
    for number, row in enumerate(cells):
        text.append("\n" if number else "")
        for heading, cell in zip(headings, row, strict=True):
            text.append(f"{heading:<{longest}}", style="bold").append(f"  {cell}\n")
    return text


def _html_row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(escaped(cell))}</{tag}>" for cell in cells) + "</tr>"
