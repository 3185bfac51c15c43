"""Saves the plots of simulations, in the style of the package's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rocketmq_spark.metrics.plots import STYLE


@contextlib.contextmanager
def plotted(path: Path, size: tuple[float, float], columns: int = 1) -> Iterator[Any]:
    """Yield the axes of a new figure, `size` in inches, and save it as SVG, the same file for the same results."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("svg")
    plt.style.use(dict(STYLE))
    mpl.rcParams["svg.hashsalt"] = path.stem
    figure, axes = plt.subplots(1, columns, figsize=size)
    yield axes
    figure.savefig(path, metadata={"Date": None})
