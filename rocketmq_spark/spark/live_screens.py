"""Where a live display is shown: a notebook, a terminal, or a file that takes a line now and then.

Rule 1: a screen is told what to show by one thread at a time, and keeps the last of it when it is closed.
Rule 2: what goes to a terminal or a file goes to stderr: stdout is the program's.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

from rocketmq_spark.spark.live_arrivals import BrokerArrivals
from rocketmq_spark.spark.live_tasks import TaskCounts
from rocketmq_spark.table_view import Layout, fitted, html_table
from rocketmq_spark.text import escaped

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_HEADINGS: Final = ("broker", "messages arrived", "per second")
# The column without a heading says what is wrong with a broker.
_LAYOUT: Final = Layout(right=_HEADINGS[1:], free=("",))

# Seconds between two lines where nothing can be overwritten.
_BETWEEN_LINES: Final = 5.0


@dataclass(frozen=True, slots=True, repr=False)
class LiveView:
    """One state of a live display.

    Parameters
    ----------
    topic : str
    seconds : float
        Since its beginning.
    over : bool
        This is the last one; rates are those of the whole time.
    tasks : TaskCounts or None
        None where nobody tells.
    brokers : tuple of BrokerArrivals
    problems : tuple of str
    """

    topic: str
    seconds: float
    over: bool
    tasks: TaskCounts | None
    brokers: tuple[BrokerArrivals, ...]
    problems: tuple[str, ...]

    @property
    def messages(self) -> int:
        """How many have arrived, as far as brokers have told."""
        return sum(broker.messages for broker in self.brokers)

    @property
    def per_second(self) -> float:
        """How many arrive in a second."""
        return sum(filter(None, map(self._rate, self.brokers)))

    def heading(self) -> str:
        """Return topic, time and tasks."""
        parts = [f"topic {self.topic}", f"{self.seconds:.1f} s{', ended' if self.over else ''}"]
        if self.tasks is not None:
            tasks = self.tasks
            running = "" if self.over and not tasks.running else f", {tasks.running:,} running"
            failed = f", {tasks.failed:,} failed" if tasks.failed else ""
            parts.append(f"{tasks.ended:,} of {tasks.total:,} tasks ended{running}{failed}")
        return escaped(" · ".join(parts))

    def rows(self) -> list[tuple[str, ...]]:
        """Return a line per broker, and one of all."""
        rows = [(broker.broker, broker.messages, self._rate(broker), broker.problem) for broker in self.brokers]
        if len(rows) != 1:
            rows.append(("all", self.messages, self.per_second, ""))
        return [
            (name, f"{messages:,}", "-" if rate is None else f"{rate:,.0f}", *([problem] if self._any_problem else []))
            for name, messages, rate, problem in rows
        ]

    def headings(self) -> tuple[str, ...]:
        """Return those of the rows' columns."""
        return (*_HEADINGS, "") if self._any_problem else _HEADINGS

    @property
    def _any_problem(self) -> bool:
        return any(broker.problem for broker in self.brokers)

    def line(self) -> str:
        """Return all of it in one line."""
        silent = [f"{broker.broker} {broker.problem}" for broker in self.brokers if broker.problem]
        arrived = f"{self.messages:,} messages arrived, {self.per_second:,.0f} per second"
        return escaped("; ".join([f"{self.heading()} · {arrived}", *silent, *self.problems]))

    def _rate(self, broker: BrokerArrivals) -> float | None:
        if self.over:
            return broker.messages / self.seconds if self.seconds else 0.0
        return broker.per_second

    def __repr__(self) -> str:
        return self.line()

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.heading())}</p>\n{html_table(self.headings(), self.rows(), notes=self.problems)}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text(self.heading())
        yield from (Text(escaped(problem)) for problem in self.problems)
        # The table ends with an empty line, which Spark's own progress bar overwrites then.
        yield fitted(self.headings(), self.rows(), _LAYOUT, options.max_width)


class Screen(Protocol):
    """Shows one view after the other."""

    def show(self, view: LiveView) -> None:
        """Show this in place of what was there."""
        ...

    def close(self) -> None:
        """Leave the last view where it is."""
        ...


class NotebookScreen:
    """An output of the cell, replaced each time.

    Parameters
    ----------
    display : callable
        ``IPython.display.display``.
    """

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, view: LiveView) -> None:
        """Show this in place of what was there."""
        if self._handle is None:
            self._handle = self._display(view, display_id=True)
        else:
            self._handle.update(view)

    def close(self) -> None:
        """Leave the last view where it is."""


class TerminalScreen:
    """The last lines of a terminal; what is printed meanwhile goes above them."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._live = Live(console=console, auto_refresh=False)

    def show(self, view: LiveView) -> None:
        """Show this in place of what was there."""
        if not self._live.is_started:
            self._live.start()
        self._live.update(view, refresh=True)

    def close(self) -> None:
        """Leave the last view where it is."""
        self._live.stop()


class LinesScreen:
    """A line every few seconds, and the last state.

    Parameters
    ----------
    file : file
    clock : callable, default time.monotonic
        Seconds.
    """

    def __init__(self, file: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._next = clock() + _BETWEEN_LINES

    def show(self, view: LiveView) -> None:
        """Write the view's line if it is time, or if it is the last."""
        if view.over or self._clock() >= self._next:
            self._next = self._clock() + _BETWEEN_LINES
            print(view.line(), file=self._file, flush=True)

    def close(self) -> None:
        """Leave what was written."""


def screen_here() -> Screen:
    """Return the screen that fits where this runs."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter:
        from IPython.display import display

        return NotebookScreen(display)
    return TerminalScreen(console) if console.is_terminal else LinesScreen(console.file)
