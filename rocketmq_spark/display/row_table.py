"""`Table`: a sequence of rows that prints as a table, in a notebook as HTML."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

from rocketmq_spark.display.optional import require
from rocketmq_spark.display.tables import Layout, heading, html_table, print_table, text_table

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

# Maximum characters of a body, or of a message's properties, in a view.
_LONGEST_SHOWN: Final = 60


class Table(Sequence[T], Generic[T]):
    """A sequence of rows, of the dataclass `kind`, that prints as a table.

    `missing` has one sentence for each server, queue or topic without an answer; `notes` are remarks such as a total.
    """

    def __init__(
        self, kind: type[T], rows: Iterable[T], *, missing: Sequence[str] = (), notes: Sequence[str] = ()
    ) -> None:
        self._kind = kind
        self._rows = tuple(rows)
        self.missing = tuple(missing)
        self.notes = tuple(notes)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return text_table(self.headings, self.cells(), self.layout, notes=self.remarks)

    def _repr_html_(self) -> str:
        return html_table(self.headings, self.cells(), notes=self.remarks)

    def print(self, file: IO[str] | None = None) -> None:
        """Print the rows and the notes in the terminal's width, to `file` or by default to stdout."""
        print_table(self.headings, self.cells(), self.layout, notes=self.notes, file=file)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        fields = [field.name for field in dataclasses.fields(self._kind)]  # type: ignore[arg-type]
        rare = getattr(self._kind, "RARE", ())
        names = getattr(self._kind, "COLUMNS", fields)
        return tuple(name for name in names if name not in rare or any(getattr(row, name) for row in self._rows))

    @property
    def headings(self) -> tuple[str, ...]:
        """The headings of the columns in a view."""
        return tuple(map(heading, self.columns))

    @property
    def layout(self) -> Layout:
        """How the columns fit into a narrow terminal, depending on their values."""

        def of(kind: str) -> list[str]:
            names = (name for name in self.columns if any(_kind_of(getattr(row, name)) == kind for row in self._rows))
            return [*map(heading, names)]

        spare = [heading(name) for name in getattr(self._kind, "SPARE", ()) if name in self.columns]
        return Layout(right=of("right"), listed=of("listed"), free=of("free"), spare=spare)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and the missing answers."""
        return (*self.notes, *(f"missing: {text}" for text in self.missing))

    def cells(self) -> list[list[str]]:
        """Return the texts of a view, with local times and shortened long texts."""
        return [[_cell(value) for value in self._values(row).values()] for row in self._rows]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one dict per row with JSON values: times are ISO 8601 in UTC, bytes UTF-8 or ``{"base64": "..."}``."""
        return [_plain(self._values(row)) for row in self._rows]

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame of the rows' values. Raises an ImportError without pandas."""
        pandas = require("pandas", "to_pandas()")
        frame: pd.DataFrame = pandas.DataFrame([self._values(row) for row in self._rows], columns=list(self.columns))
        return frame

    def _values(self, row: T) -> dict[str, Any]:
        return {name: getattr(row, name) for name in self.columns}


def _kind_of(value: object) -> str:
    """Return the kind of column in a `Layout` for a value, or "" for none."""
    if isinstance(value, Mapping):
        # Properties have names, a broker's addresses have numbers.
        return "free" if any(isinstance(name, str) for name in value) else "listed"
    if isinstance(value, bytes):
        return "free"
    if isinstance(value, tuple):
        return "listed"
    return "right" if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _cell(value: object) -> str:
    if value is None or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.astimezone().isoformat(" ", "milliseconds")[:23]
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, bytes):
        text = _decoded(value)
        return _shortened(f"{len(value):,} bytes: {value[:_LONGEST_SHOWN].hex(' ')}" if text is None else text)
    if isinstance(value, Mapping):
        text = ", ".join(f"{name}={item}" for name, item in value.items())
        return _shortened(text) if _kind_of(value) == "free" else text
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _decoded(data: bytes) -> str | None:
    with contextlib.suppress(UnicodeDecodeError):
        return data.decode()
    return None


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, bytes):
        text = _decoded(value)
        return {"base64": base64.b64encode(value).decode()} if text is None else text
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
