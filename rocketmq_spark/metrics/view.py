"""How a summary looks as a table: printed, HTML, a pandas DataFrame.

Rule 1: what is heavy is imported when it is first asked for; what is missing is an error that says how to get it.
Rule 2: printing is asked for by the user.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Final

from rocketmq_spark import table_view

if TYPE_CHECKING:
    import pandas as pd

ByBroker = Mapping[str, Mapping[str, Any]]

_NUMBERS: Final = (
    "rows", "sent_rows", "requests", "bytes", "retries", "failures", "p50_ms", "p90_ms", "p99_ms", "max_ms",
    "isolated_times", "isolated_ms",
)  # fmt: skip
_HEADINGS: Final = (
    "broker", "rows", "requests", "MiB", "retries", "failures", "isolated", "p50 ms", "p90 ms", "p99 ms", "max ms",
)  # fmt: skip
_LAYOUT: Final = table_view.Layout(
    right=_HEADINGS[1:], spare=("p90 ms", "isolated", "MiB", "p50 ms", "requests", "failures")
)
_EMPTY: Final = "No task has ended yet."


def require(module: str, purpose: str) -> Any:
    """Return an optional module.

    Raises
    ------
    ImportError
        It is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        name = module.partition(".")[0]
        raise ImportError(f"{purpose} needs {name}: pip install 'rocketmq-spark[notebook]'", name=name) from exc


def data_frame(by_broker: ByBroker) -> pd.DataFrame:
    """Return one row per broker; latencies that don't exist are NaN."""
    pandas = require("pandas", "to_pandas()")
    rows = [[broker, *(numbers[name] for name in _NUMBERS)] for broker, numbers in by_broker.items()]
    frame = pandas.DataFrame(rows, columns=["broker", *_NUMBERS]).set_index("broker")
    types = {name: "float64" if name.endswith("_ms") else "int64" for name in _NUMBERS}
    return frame.astype(types)


def print_table(by_broker: ByBroker, notes: Sequence[str], file: IO[str] | None) -> None:
    """Print one line per broker, then the notes."""
    table_view.print_table(_HEADINGS, _rows(by_broker), _LAYOUT, notes=notes, empty=_EMPTY, file=file)


def html_table(by_broker: ByBroker, notes: Sequence[str]) -> str:
    """Return the same as HTML, in the notebook's own colours."""
    return table_view.html_table(_HEADINGS, _rows(by_broker), notes=notes, empty=_EMPTY)


def _rows(by_broker: ByBroker) -> list[list[str]]:
    return [[broker, *_cells(numbers)] for broker, numbers in by_broker.items()]


def _cells(numbers: Mapping[str, Any]) -> list[str]:
    whole = [f"{numbers[name]:,}" for name in ("rows", "requests", "retries", "failures", "isolated_times")]
    whole.insert(2, f"{numbers['bytes'] / 1024**2:,.1f}")
    milliseconds = [numbers[name] for name in ("p50_ms", "p90_ms", "p99_ms", "max_ms")]
    return [*whole, *("-" if value is None else f"{value:,.1f}" for value in milliseconds)]
