"""Plots of a `WriteSummary`: latency distributions, and a timeline. Only drawing imports matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rocketmq_spark.display.optional import require
from rocketmq_spark.errors import escaped
from rocketmq_spark.metrics.measures import IntArray, highest_us, lowest_us

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_GREY: Final = "#7a7a7a"
# Colours and transparent backgrounds fit light and dark pages. More brokers than colours have another line style.
_COLOURS: Final = ("#3b82f6", "#e0662f", "#2a9d6f", "#c04fa8", "#a07d1c", "#7c6cd9", "#d04a5a", "#1f98a8")
_STYLES: Final = ("-", "--", "-.", ":")
_GRID: Final[Mapping[str, Any]] = {"color": _GREY, "alpha": 0.25, "linewidth": 0.6}
_LEGEND: Final[Mapping[str, Any]] = {"frameon": False, "labelcolor": _GREY}

STYLE: Final[Mapping[str, Any]] = {
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
    "axes.prop_cycle": f"cycler(color={_COLOURS})",
    "axes.grid": True,
    "axes.axisbelow": True,
    **{f"grid.{name}": value for name, value in _GRID.items()},
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _GREY),
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}
"""The style of the plots, for other figures: ``matplotlib.pyplot.style.use(STYLE)``."""

# The unit of the time axis, by the shortest span that uses it (seconds).
_UNITS: Final = ((2 * 86_400, "days", 86_400), (2 * 3_600, "hours", 3_600), (600, "minutes", 60), (0, "seconds", 1))


def plot_latencies(latencies: Mapping[str, tuple[IntArray, IntArray]], ax: Axes | None) -> Axes:
    """Draw each broker's cumulative latency distribution."""
    axes = ax or _new_axes(1, "plot()", figsize=(9, 4.5))[0]
    for (broker, (indices, counts)), line in zip(latencies.items(), _lines(), strict=False):
        if not len(indices):
            continue
        # The curve reaches the share of a bucket at the bucket's end, as quantiles do.
        edges = [lowest_us(int(indices[0])) / 1000, *(highest_us(index) / 1000 for index in indices.tolist())]
        share = np.concatenate(([0.0], np.cumsum(counts) / counts.sum()))
        axes.step(np.maximum(edges, 0.001), share * 100, where="post", label=_label(broker), **line)
    axes.set_xscale("log")
    _label_plainly(axes.xaxis)
    axes.set_ylim(0, 101)
    axes.set_xlabel("latency of successful attempts (ms)")
    axes.set_ylabel("attempts that took at most this long (%)")
    _dress(axes)
    if axes.has_data():
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), **_LEGEND)
    return axes


def plot_timeline(
    timeline: Sequence[Mapping[str, Any]], brokers: Sequence[str], axes: Sequence[Axes] | None
) -> list[Axes]:
    """Draw `WriteSummary.timeline`; `brokers` are in the order of their colours in `plot_latencies`."""
    if axes is None:
        has_retries = not timeline or any(row["retries"] for row in timeline)
        panels = _new_axes(3 if has_retries else 2, "plot_timeline()", figsize=(9, 6.5 if has_retries else 4.5))
    else:
        panels = list(axes)
    if len(panels) not in (2, 3):
        raise ValueError(f"plot_timeline() needs 2 or 3 axes (rows, latency, perhaps retries), not {len(panels)}")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    rates, latencies, *retries = panels
    width = timeline[0]["width_s"] if timeline else 1
    first = timeline[0]["second"] if timeline else 0
    buckets = (timeline[-1]["second"] - first) // width + 1 if timeline else 0
    unit, seconds = next((name, of) for least, name, of in _UNITS if buckets * width >= least)
    edges = np.arange(buckets + 1) * width / seconds
    of_broker: dict[str, list[Mapping[str, Any]]] = {}
    for row in timeline:
        of_broker.setdefault(row["broker"], []).append(row)
    shades: dict[str, Patch] = {}
    for broker, line in zip(brokers, _lines(), strict=False):
        drawn = np.zeros((4, buckets))
        drawn[1] = np.nan
        for row in of_broker.get(broker, ()):
            largest = row["max_ms"] or np.nan
            at = (row["second"] - first) // width
            drawn[:, at] = row["rows"] / width, largest, row["retries"], row["isolated"]
        for panel, values in zip(panels, drawn, strict=False):
            panel.stairs(values, edges, baseline=None, label=_label(broker), **line)
        shade = {"color": line["color"], "alpha": 0.15, "linewidth": 0}
        # The start and the end of each run of isolated buckets.
        changes = np.flatnonzero(np.diff(drawn[3], prepend=0, append=0))
        for start, end in changes.reshape(-1, 2).tolist():
            for panel in panels:
                panel.axvspan(edges[start], edges[end], **shade)
            shades[_label(f"{broker} isolated")] = Patch(**shade)
    rates.set_ylabel("rows per second")
    latencies.set_ylabel("largest latency (ms)")
    for panel in retries:
        panel.set_ylabel("retries")
    since = datetime.fromtimestamp(first, timezone.utc)
    panels[-1].set_xlabel(f"{unit} since {since:%Y-%m-%d %H:%M:%S} UTC" if timeline else unit)
    latencies.set_yscale("log")
    _label_plainly(latencies.yaxis)
    for panel in (rates, *retries):
        # The upper limit grows with another plot into shared axes.
        panel.set_ylim(0, max(1, panel.get_ylim()[1]), auto=True)
        panel.yaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
        panel.yaxis.set_major_formatter("{x:,.0f}")
    for panel in panels:
        _dress(panel)
    if brokers:
        handles, labels = rates.get_legend_handles_labels()
        handles += shades.values()
        labels += shades
        if axes is None and isinstance(rates.figure, Figure):
            rates.figure.legend(handles, labels, loc="outside right upper", **_LEGEND)
            rates.figure.align_ylabels(panels)
        else:
            rates.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.0, 1.0), **_LEGEND)
    return panels


def _label(name: str) -> str:
    """Return a label that matplotlib shows as `name`, without control characters."""
    # Text between two "$" is a formula. Legends omit labels that begin with an underscore.
    label = escaped(name).replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def _lines() -> Iterator[dict[str, Any]]:
    """Yield a different line style for each broker."""
    for style, colour in itertools.cycle(itertools.product(_STYLES, _COLOURS)):
        yield {"color": colour, "linestyle": style, "linewidth": 1.8}


def _dress(axes: Axes) -> None:
    axes.patch.set_alpha(0)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(_GREY)
    axes.tick_params(which="both", colors=_GREY)
    for spine in axes.spines.values():
        spine.set_color(_GREY)
    axes.grid(visible=True, which="both", **_GRID)


def _label_plainly(axis: Axis) -> None:
    """Let a logarithmic axis show 300, not 3 x 10^2."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(LogFormatter())


def _new_axes(rows: int, purpose: str, figsize: tuple[float, float]) -> list[Axes]:
    pyplot = require("matplotlib.pyplot", purpose)
    figure, axes = pyplot.subplots(rows, figsize=figsize, sharex=True, squeeze=False, layout="constrained")
    figure.patch.set_alpha(0)
    return list(axes[:, 0])
