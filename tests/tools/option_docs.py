"""The tables of docs/options.md, made of the declarations by which options are parsed.

Run: python -m tests.tools.option_docs (``make docs``), which fills them in; tests/unit/test_docs.py holds them equal.

The page says which sections of options a table has (``<!-- options: servers access -->``). A section that no table has,
or that two tables have, is an error. An option that is used in several places has one row.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from rocketmq_spark.options import kinds
from rocketmq_spark.options.kinds import BATCH, PRODUCER, READ, STREAM, WRITE, OptionSpec, specs_of
from rocketmq_spark.options.producer import ProducerOptions
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.options.source import SourceOptions

PATH: Final = Path(__file__).parents[2] / "docs" / "options.md"

_BLOCK: Final = re.compile(r"^<!-- (\w+): ([\w ]+) -->\n.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)
# Kinds of values that many options have, by the name that the tables of options show: what is allowed, and the kinds.
_VALUES: Final[Mapping[str, tuple[str, Iterable[kinds.ValueKind]]]] = {
    "topic": (kinds.TOPIC.allowed, [kinds.TOPIC]),
    "integer": (f"a whole number; at most {kinds.INT_MAX} if the table of the option has no upper bound", ()),
    "size": ("bytes, or with a suffix as in 512k or 1m", ()),
    "time": ("milliseconds, or with a suffix as in 90s, 15m or 1h", ()),
    "secret": (kinds.SECRET.allowed, [kinds.SECRET]),
    "file": ("the path of a file, at the same place on the driver and every executor", [kinds.READ_FILE]),
    "place": (f"{kinds.LOCATION.allowed}. No log or error shows it", [kinds.LOCATION]),
    "class": ("module:Class, which Python can import on the driver and every executor", [kinds.CLASS]),
}


def filled(page: str) -> str:
    """Return a page with its tables as the code has them.

    Raises
    ------
    ValueError
        A section is in no table, or in two.
    """
    uses = _uses()
    left: dict[str, list[OptionSpec]] = {}
    for spec in uses:
        left.setdefault(spec.section, []).append(spec)

    def block(found: re.Match[str]) -> str:
        what, words = found[1], found[2].split()
        if what == "options":
            try:
                specs = [spec for section in words for spec in left.pop(section)]
            except KeyError as exc:
                raise ValueError(f"{found[0].splitlines()[0]}: {exc} is no such section, or in another table") from exc
            body = _table({spec: uses[spec] for spec in specs})
        elif what == "values":
            body = _rows(("value", "allowed"), ((name, rule) for name, (rule, _) in _VALUES.items()))
        else:
            shared = [f"`{spec.field}`" for spec, used in uses.items() if PRODUCER in used and len(used) > 1]
            body = textwrap.fill(", ".join(sorted(shared)), 120)
        return f"<!-- {what}: {' '.join(words)} -->\n{body}\n<!-- end -->"

    text = _BLOCK.sub(block, page)
    if left:
        raise ValueError(f"in no table: {', '.join(spec.name for specs in left.values() for spec in specs)}")
    return text


def _uses() -> dict[OptionSpec, list[str]]:
    """Return the uses of each declaration."""
    uses: dict[OptionSpec, list[str]] = {}
    for options, use in ((SinkOptions, WRITE), (SourceOptions, READ), (ProducerOptions, PRODUCER)):
        for spec in specs_of(options, use):
            uses.setdefault(spec, []).append(use)
    return uses


def _table(uses: Mapping[OptionSpec, list[str]]) -> str:
    places = [_place(spec, used) for spec, used in uses.items()]
    rows: list[tuple[str, ...]] = [
        (_name(spec, used), place, _values(spec), _default(spec), spec.doc)
        for (spec, used), place in zip(uses.items(), places, strict=True)
    ]
    head: tuple[str, ...] = ("option", "for", "values", "default", "meaning")
    if set(places) in ({"write"}, {"`Producer`"}, {"write, `Producer`"}):
        # The text above the table says it.
        head, rows = (head[0], *head[2:]), [(row[0], *row[2:]) for row in rows]
    return _rows(head, rows)


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cells)} |" for cells in ([cell.replace("|", r"\|") for cell in line] for line in lines)
    )


def _name(spec: OptionSpec, used: list[str]) -> str:
    also = ", ".join(f"`{alias}`" for alias in spec.aliases)
    return f"`{spec.field if used == [PRODUCER] else spec.name}`" + (f" (also {also})" if also else "")


def _place(spec: OptionSpec, used: list[str]) -> str:
    if used == [READ]:
        return spec.reads or f"{BATCH}, {STREAM}"
    return ", ".join("`Producer`" if use == PRODUCER else use for use in used)


def _values(spec: OptionSpec) -> str:
    for name, (_, of_name) in _VALUES.items():
        if spec.kind in of_name:
            return name
    allowed = spec.kind.allowed
    if allowed.startswith("one of "):
        choices, _, more = allowed.removeprefix("one of ").partition(", or ")
        return re.sub(r"\w+", r"`\g<0>`", choices) + (f", or {more}" if more else "")
    # The table of values says what the parts that are left out say.
    allowed = re.sub(rf" to {kinds.INT_MAX}( bytes)?|: [a-z]+, or with a suffix .*", "", allowed)
    return re.sub("^an? ", "", allowed).replace(str(2**63 - 1), "2^63 - 1")


def _default(spec: OptionSpec) -> str:
    default = f"${spec.env}" if spec.env else shown_default(spec)
    return default if default == "none" else f"`{default}`"


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
