"""How a summary looks: a printed table, HTML, a pandas DataFrame, a plot.

Rule 1: what is heavy is imported when it is first asked for; what is missing is an error that says how to get it.
Rule 2: printing is asked for by the user.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from rocketmq_spark import table_view
from rocketmq_spark.metrics.histogram import IntArray, highest_us, lowest_us

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

ByBroker = Mapping[str, Mapping[str, Any]]

_NUMBERS: Final = (
    "rows", "sent_rows", "requests", "bytes", "retries", "failures", "p50_ms", "p90_ms", "p99_ms", "max_ms",
    "isolated_times", "isolated_ms",
)  # fmt: skip
_HEADINGS: Final = (
    "broker", "rows", "requests", "MiB", "retries", "failures", "isolated", "p50 ms", "p90 ms", "p99 ms", "max ms",
)  # fmt: skip
_EMPTY: Final = "No task has ended yet."

# Of middle lightness, so that they stand out from white and from black; brokers beyond take another line style.
_COLOURS: Final = ("#3b82f6", "#e0662f", "#2a9d6f", "#c04fa8", "#a07d1c", "#7c6cd9", "#d04a5a", "#1f98a8")
_STYLES: Final = ("-", "--", "-.", ":")
_GREY: Final = "#7a7a7a"


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
    table_view.print_table(_HEADINGS, _rows(by_broker), right=_HEADINGS[1:], notes=notes, empty=_EMPTY, file=file)


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


def plot_latencies(latencies: Mapping[str, tuple[IntArray, IntArray]], ax: Axes | None) -> Axes:
    """Draw, per broker, the share of successful attempts that took at most so long."""
    axes = ax or _new_axes()
    axes.patch.set_alpha(0)
    for place, (broker, (indices, counts)) in enumerate(latencies.items()):
        if not len(indices):
            continue
        # Within a bucket nothing is known: the share is reached at its end, as every quantile shows it.
        edges = [lowest_us(int(indices[0])) / 1000, *(highest_us(index) / 1000 for index in indices.tolist())]
        share = np.concatenate(([0.0], np.cumsum(counts) / counts.sum()))
        axes.step(
            np.maximum(edges, 0.001),
            share * 100,
            where="post",
            label=broker,
            color=_COLOURS[place % len(_COLOURS)],
            linestyle=_STYLES[place // len(_COLOURS) % len(_STYLES)],
            linewidth=1.8,
        )
    axes.set_xscale("log")
    axes.set_ylim(0, 101)
    axes.set_xlabel("latency of successful attempts (ms)", color=_GREY)
    axes.set_ylabel("attempts that took at most so long (%)", color=_GREY)
    axes.tick_params(which="both", colors=_GREY)
    for spine in axes.spines.values():
        spine.set_color(_GREY)
    axes.grid(visible=True, which="both", color=_GREY, alpha=0.25, linewidth=0.6)
    if axes.has_data():
        axes.legend(frameon=False, labelcolor=_GREY, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return axes


def _new_axes() -> Axes:
    axes: Axes
    figure, axes = require("matplotlib.pyplot", "plot()").subplots(figsize=(9, 4.5), layout="constrained")
    # No background of its own: the page's shows through, be it light or dark.
    figure.patch.set_alpha(0)
    return axes
