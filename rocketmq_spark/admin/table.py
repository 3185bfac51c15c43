"""What an answer comes as: a sequence of typed rows that knows how to show itself.

Rule 1: a row is a frozen dataclass. Its columns are its ``COLUMNS``, or else its fields, in their order.
Rule 2: views shorten free texts; `to_dicts` and the rows themselves have everything. On a terminal that is too narrow,
        a view leaves out the columns of a row's ``SPARE``, the first of them first. A column of ``RARE`` is
        there only if a row has a value in it.
Rule 3: what could not be asked is in `missing`: a table that is not whole says so.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

from rocketmq_spark import table_view

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

# Of a body, or of a message's properties, in a view.
_LONGEST_SHOWN: Final = 60


class Table(Sequence[T], Generic[T]):
    """Rows of one kind.

    Parameters
    ----------
    kind : type
        The dataclass of the rows.
    rows : iterable of `kind`
    missing : sequence of str, default none
        One sentence for each server, queue or topic that is not in the rows because somebody did not answer.
    notes : sequence of str, default none
        What is to be said beside the rows, such as a total.
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

    def __iter__(self) -> Iterator[T]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return table_view.text_table(self.headings, self.cells(), self.layout, notes=self.remarks)

    def _repr_html_(self) -> str:
        return table_view.html_table(self.headings, self.cells(), notes=self.remarks)

    def print(self, file: IO[str] | None = None) -> None:
        """Print the rows and the notes, as wide as the terminal is.

        Parameters
        ----------
        file : file, optional
            Default: stdout.
        """
        table_view.print_table(self.headings, self.cells(), self.layout, notes=self.notes, file=file)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        named: tuple[str, ...] | None = getattr(self._kind, "COLUMNS", None)
        names = named or tuple(field.name for field in dataclasses.fields(self._kind))  # type: ignore[arg-type]
        rare = getattr(self._kind, "RARE", ())
        return tuple(name for name in names if name not in rare or any(getattr(row, name) for row in self._rows))

    @property
    def headings(self) -> tuple[str, ...]:
        """The names of the columns as a view has them."""
        return tuple(map(table_view.heading, self.columns))

    @property
    def layout(self) -> table_view.Layout:
        """What is done with the columns where a terminal is narrow, by what is in them."""
        values = [self._values(row) for row in self._rows]

        def of(fits: Callable[[object], bool]) -> list[str]:
            named = zip(self.columns, self.headings, strict=True)
            return [heading for name, heading in named if any(fits(row[name]) for row in values)]

        spare = [*map(table_view.heading, getattr(self._kind, "SPARE", ()))]
        return table_view.Layout(right=of(_is_number), listed=of(_is_list), free=of(_is_free_text), spare=spare)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and what is missing."""
        return (*self.notes, *(f"missing: {text}" for text in self.missing))

    def cells(self) -> list[list[str]]:
        """Return each row's values as a view has them: times are local, long texts are shortened."""
        return [[_cell(value) for value in self._values(row).values()] for row in self._rows]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one dict per row, of plain JSON values.

        A time is ISO 8601 in UTC; bytes are their text if they are UTF-8, else ``{"base64": "..."}``.
        """
        return [{name: _plain(value) for name, value in self._values(row).items()} for row in self._rows]

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame of the rows' own values.

        Raises
        ------
        ImportError
            pandas is not installed; the message says what to install.
        """
        from rocketmq_spark.metrics.view import require

        pandas = require("pandas", "to_pandas()")
        frame: pd.DataFrame = pandas.DataFrame([self._values(row) for row in self._rows], columns=list(self.columns))
        return frame

    def _values(self, row: T) -> dict[str, Any]:
        return {name: getattr(row, name) for name in self.columns}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, tuple) or (isinstance(value, Mapping) and not _is_free_text(value))


def _is_free_text(value: object) -> bool:
    # Properties; the addresses of a broker have its numbers as their names.
    return isinstance(value, bytes) or (isinstance(value, Mapping) and any(isinstance(name, str) for name in value))


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
        return _shortened(_text_of(value))
    if isinstance(value, Mapping):
        text = ", ".join(f"{name}={one}" for name, one in value.items())
        return _shortened(text) if _is_free_text(value) else text
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _text_of(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"{len(data):,} bytes: {data[:_LONGEST_SHOWN].hex(' ')}"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value
