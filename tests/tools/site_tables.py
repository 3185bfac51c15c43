"""Adapt the tables of the site to the width of the screen; docs/assets/site.css has the styles.

A table of options gets two columns: the option, and its meaning with all other cells below it. Every other cell gets
the heading of its column as ``data-label``, which narrow screens show, because there each row is a block.
"""

from __future__ import annotations

import html
import re
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_TABLE: Final = re.compile(r"<table>\s*<thead>(.*?)</thead>\s*<tbody>(.*?)</tbody>\s*</table>", re.DOTALL)
_ROW: Final = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
_CELL: Final = re.compile(r"<t[hd]([^>]*)>(.*?)</t[hd]>", re.DOTALL)
# First columns of the tables of options. Their last column has the meaning.
_NAMES: Final = ("option", "property")
# Five columns of 160 px fit a page of 1,400 px. A table with more has numbers or single words, and narrower columns.
_MOST_COLUMNS: Final = 5


def on_page_content(content: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with tables that fit the screen. Outputs of notebooks scroll instead."""
    return content if page.file.src_uri.startswith("notebooks/") else _TABLE.sub(_fitting, content)


def _fitting(table: re.Match[str]) -> str:
    names = [name for _, name in _CELL.findall(table[1])]
    rows = [_CELL.findall(row) for row in _ROW.findall(table[2])]
    if names[0] in _NAMES and len(names) > 2:
        head = f"<tr><th>{names[0]}</th><th>{names[-1]}</th></tr>"
        body = "".join(_option_row(names, [cell for _, cell in row]) for row in rows)
        return f'<table data-of="options"><thead>{head}</thead><tbody>{body}</tbody></table>'
    labels = [html.escape(re.sub("<.*?>", "", html.unescape(name))) for name in names]
    cells = (
        "".join(
            f'<td{style} data-label="{label}">{cell}</td>' for label, (style, cell) in zip(labels, row, strict=True)
        )
        for row in rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    kind = "text" if len(names) <= _MOST_COLUMNS else "numbers"
    return f'<table data-of="{kind}"><thead>{table[1]}</thead><tbody>{body}</tbody></table>'


def _option_row(names: list[str], cells: list[str]) -> str:
    others = list(zip(names, cells, strict=True))[1:-1]
    # The values are the longest cell, so they come last.
    others.sort(key=lambda other: other[0] == "values")
    facts = "".join(f"<li><b>{name}</b> {cell}</li>" for name, cell in others)
    return f"<tr><td>{cells[0]}</td><td>{cells[-1]}<ul>{facts}</ul></td></tr>"
