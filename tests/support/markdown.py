"""What Markdown files hold, as far as tests look at it: links, headings, blocks of code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]

_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A block of code: its language, the line of the file that it begins in, and the ``##`` heading above it."""

    language: str
    line: int
    section: str
    text: str


def documents() -> list[Path]:
    """Return every page."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = path.read_text("utf-8")
    return [
        Block(found[1], text.count("\n", 0, found.start(2)) + 1, _section(text[: found.start()]), found[2])
        for found in _FENCE.finditer(text)
    ]


def _section(before: str) -> str:
    headings = re.findall(r"^## (.+)$", _FENCE.sub("", before), re.MULTILINE)
    return headings[-1] if headings else ""


def prose(path: Path) -> str:
    """Return a page without its blocks."""
    return _FENCE.sub("", path.read_text("utf-8"))


def anchors(path: Path) -> set[str]:
    """Return what a link to a part of a page may end with, as code hosts make it of headings."""
    found: set[str] = set()
    times: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{slug}-{times[slug]}" if times[slug] else slug)
        times[slug] += 1
    return found


def links(path: Path) -> Iterator[str]:
    """Yield where a page links to, images included; not what another site has."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if not re.match(r"[a-z]+:", target):
            yield target
