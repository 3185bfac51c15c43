"""Plots of a summary."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rocketmq_spark.metrics import WriteSummary
from rocketmq_spark.metrics.plots import STYLE
from tests.support.pipelines import recorder, success, summary_of

EPOCH = 1_700_000_000


@pytest.fixture
def pyplot() -> Iterator[Any]:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def with_a_fault() -> WriteSummary:
    """Broker b answers slowly in the second second, and is isolated for the next two."""
    recording = recorder(epoch=EPOCH)
    for second in range(5):
        success(recording, "a", rows=100, latency_ms=2, now=second)
        if second in (0, 4):
            success(recording, "b", rows=60, latency_ms=4, now=second)
    success(recording, "b", rows=10, latency_ms=800, now=1.5)
    recording.record_retry("b", "timeout", 1.6)
    recording.record_isolation("b", 2_000, 1.6)
    success(recording, "a", rows=1, now=4.5)
    return summary_of([recording.snapshot()])


def drawn(panel: Any) -> dict[str, list[float | None]]:
    """Return the steps of each broker in a panel; None where a broker has no value."""
    return {
        str(patch.get_label()): [None if np.isnan(value) else value for value in patch.get_data().values]
        for patch in panel.patches
        if hasattr(patch, "get_data")
    }


def shaded(panel: Any) -> list[tuple[float, float]]:
    return [
        (patch.get_x(), patch.get_x() + patch.get_width()) for patch in panel.patches if hasattr(patch, "get_width")
    ]


def test_plot_has_a_line_per_broker_that_answered(pyplot: Any) -> None:
    summary = with_a_fault()
    axes: Any = summary.plot()
    assert [line.get_label() for line in axes.lines] == ["a", "b"]
    assert [line.get_xdata()[-1] for line in axes.lines] == [
        summary.to_dict()[broker]["max_ms"] for broker in ("a", "b")
    ]
    assert {line.get_ydata()[-1] for line in axes.lines} == {100}
    assert axes.get_legend() is not None
    assert WriteSummary().plot(axes) is axes


@pytest.mark.parametrize("broker", ["$x$", r"a$\frac$", r"a\$b$", "$", "_broker", "a_1^2{b}"])
def test_broker_name_is_shown_as_it_is(pyplot: Any, broker: str) -> None:
    recording = recorder(epoch=EPOCH)
    success(recording, broker, rows=100, latency_ms=2, now=0)
    recording.record_isolation(broker, 2_000, 0.5)
    summary = summary_of([recording.snapshot()])
    _, given = pyplot.subplots(3)
    figures: list[Any] = [
        summary.plot().figure,
        summary.plot_timeline()[0].figure,
        summary.plot_timeline(given)[0].figure,
    ]
    for figure in figures:
        svg = io.StringIO()
        with pyplot.rc_context({"svg.fonttype": "none"}):
            figure.savefig(svg, format="svg")
        texts = [text.strip() for text in re.findall(r">([^<>]+)</text>", svg.getvalue())]
        assert broker in texts
        assert (f"{broker} isolated" in texts) is (figure is not figures[0])


def test_timeline_has_rates_latencies_and_retries_per_broker(pyplot: Any) -> None:
    rates, latencies, retries = with_a_fault().plot_timeline()
    assert drawn(rates) == {"a": [100, 100, 100, 100, 101], "b": [60, 10, 0, 0, 60]}
    assert drawn(latencies) == {"a": [2, 2, 2, 2, 2], "b": [4, 800, None, None, 4]}
    assert drawn(retries) == {"a": [0] * 5, "b": [0, 1, 0, 0, 0]}
    assert retries.get_xlabel() == "seconds since 2023-11-14 22:13:20 UTC"


def test_timeline_shades_where_a_broker_is_isolated(pyplot: Any) -> None:
    panels: list[Any] = [*with_a_fault().plot_timeline()]
    assert [shaded(panel) for panel in panels] == [[(1, 4)]] * 3
    (legend,) = panels[0].get_figure().legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "b isolated"]
    shades = [patch for panel in panels for patch in panel.patches if patch.get_alpha() is not None]
    (in_legend,) = legend.get_patches()[-1:]
    assert {patch.get_facecolor() for patch in shades} == {in_legend.get_facecolor()}
    first = panels[0].patches
    assert first[1].get_edgecolor()[:3] == first[2].get_facecolor()[:3]


def test_broker_name_with_control_characters_is_drawn_escaped(pyplot: Any) -> None:
    recording = recorder(epoch=EPOCH)
    success(recording, "b\n\x1b\u202e", rows=1, now=0)
    recording.record_isolation("b\n\x1b\u202e", 2_000, 0.5)
    summary = summary_of([recording.snapshot()])
    axes: Any = summary.plot()
    figure: Any = summary.plot_timeline()[0].figure
    [legend] = figure.legends
    names = [text.get_text() for text in (*axes.get_legend().get_texts(), *legend.get_texts())]
    assert names == [r"b\n\x1b\u202e", r"b\n\x1b\u202e", r"b\n\x1b\u202e isolated"]
    axes.figure.canvas.draw()


def test_long_timeline_has_hours_on_its_axis_and_rates_per_second(pyplot: Any) -> None:
    recording = recorder(epoch=0)
    for second in range(0, 16_384, 8):
        success(recording, "a", rows=80, now=second)
    summary = summary_of([recording.snapshot()])
    assert summary.timeline()[0]["width_s"] == 32
    rates: Any
    rates, latencies = summary.plot_timeline()
    assert set(drawn(rates)["a"]) == {10}
    assert latencies.get_xlabel() == "hours since 1970-01-01 00:00:00 UTC"
    assert rates.patches[0].get_data().edges[-1] == 16_384 / 3600


def test_timeline_goes_into_axes_that_are_given(pyplot: Any) -> None:
    _, axes = pyplot.subplots(3, 2)
    panels = with_a_fault().plot_timeline(axes[:, 1])
    assert panels == list(axes[:, 1])
    assert [len(panel.patches) for panel in axes[:, 0]] == [0] * 3
    assert panels[0].get_legend() is not None
    assert [panel.get_ylabel() for panel in with_a_fault().plot_timeline(axes[:2, 0])] == [
        "rows per second",
        "largest latency (ms)",
    ]
    assert axes[1, 0].get_xlabel() == axes[2, 1].get_xlabel()
    with pytest.raises(ValueError, match=r"needs 2 or 3 axes \(rows, latency, perhaps retries\), not 1"):
        with_a_fault().plot_timeline(axes[0, :1])


def test_new_axes_have_no_panel_of_retries_if_there_was_none(pyplot: Any) -> None:
    recording = recorder(epoch=EPOCH)
    success(recording, "a", rows=1, now=0)
    summary = summary_of([recording.snapshot()])
    panels = summary.plot_timeline()
    assert [panel.get_ylabel() for panel in panels] == ["rows per second", "largest latency (ms)"]
    assert panels[-1].get_xlabel() == "seconds since 2023-11-14 22:13:20 UTC"
    _, given = pyplot.subplots(3)
    assert drawn(summary.plot_timeline(given)[2]) == {"a": [0]}


def test_timeline_of_nothing_has_labels_and_no_lines(pyplot: Any) -> None:
    panels = WriteSummary().plot_timeline()
    assert [panel.get_ylabel() for panel in panels] == ["rows per second", "largest latency (ms)", "retries"]
    assert not any(panel.has_data() for panel in panels)


def test_no_plot_has_a_background(pyplot: Any) -> None:
    panels: list[Any] = [with_a_fault().plot(), *with_a_fault().plot_timeline()]
    for panel in panels:
        assert panel.patch.get_alpha() == 0
        assert panel.get_figure().patch.get_alpha() == 0


def test_style_is_accepted_by_matplotlib(pyplot: Any) -> None:
    with pyplot.style.context(dict(STYLE)):
        figure, axes = pyplot.subplots()
        (line,) = axes.plot([1, 2])
    assert figure.get_facecolor()[3] == 0
    assert line.get_color() == with_a_fault().plot().lines[0].get_color()
