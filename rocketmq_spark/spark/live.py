"""`live(spark, topic, ...)`: shows arriving messages while a ``with`` block runs, and in classic Spark also its tasks.

A thread makes a new `LiveView` about twice a second. In the block, errors of servers, Spark and the display do not
reach the user's job. The view has them, and the first problem of each part and broker is logged. The first count
precedes the block, so that no message is missed at a broker that answers it. A last count follows the block, and the
last view stays on the screen.
"""

from __future__ import annotations

import contextvars
import html
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from rocketmq_spark.admin.admin import Admin
from rocketmq_spark.display.tables import Layout, fitted, html_table
from rocketmq_spark.errors import escaped
from rocketmq_spark.spark.live_arrivals import Arrivals, BrokerArrivals
from rocketmq_spark.spark.spark_api import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.console import Console, ConsoleOptions, RenderResult

    from rocketmq_spark.transport.remoting.transport import RemotingTransport

logger = logging.getLogger("rocketmq_spark.spark")

# Seconds: between two looks, between two looks after the block, limit of the latter, for the thread to end, and between
# two lines in a file.
_INTERVAL, _SETTLING, _SETTLED_WITHIN, _STOPPED_WITHIN, _BETWEEN_LINES = 0.5, 0.2, 1.0, 10.0, 5.0

_HEADINGS: Final = ("broker", "messages arrived", "per second")
# The column without a heading has the brokers' problems.
_LAYOUT: Final = Layout(right=_HEADINGS[1:], free=("",))

T = TypeVar("T")
Screen: TypeAlias = "Callable[[LiveView], object]"


def live(
    spark: SparkSession, topic: str, name_server: str | Sequence[str] | None = None, **connection: Any
) -> LiveDisplay:
    """Show Spark's tasks and the messages that arrive in a topic, about twice a second, while a ``with`` block runs.

    In a notebook the display is an output of the cell, in a terminal its last lines, elsewhere a line on stderr every
    five seconds. Messages are counted by the brokers' own offsets, so those of other senders count, too. The topic need
    not exist yet. A server that does not answer is shown, and is no error.

    Tasks are those of the Spark application's jobs that begin within the block, also for streaming queries. With Spark
    Connect only messages are shown, because its clients cannot see tasks. The name servers (default: the
    environment variable ``NAMESRV_ADDR``) and `connection` are those of `Admin`; an OptionError is raised if they are
    malformed or missing.

    >>> with rocketmq_spark.live(spark, "orders", "127.0.0.1:9876"):  # doctest: +SKIP
    ...     df.write.format("rocketmq").option("nameServer", "127.0.0.1:9876").option("topic", "orders").save()
    """
    return LiveDisplay(spark, topic, Admin(name_server, **connection).transport)


class LiveDisplay:
    """The context manager that `live` returns, for one block; it closes `transport`. `view` is the newest state."""

    def __init__(
        self, spark: SparkSession, topic: str, transport: RemotingTransport, screen: Screen | None = None
    ) -> None:
        self.view = LiveView(topic, 0.0, over=False, tasks=None, brokers=(), problems=())
        self._spark = spark
        self._transport = transport
        self._screen = screen
        self._arrivals = Arrivals(transport, topic)
        self._tasks: Tasks | None = None
        # The failing parts of the display, and why.
        self._failed: dict[str, str] = {}
        self._logged: set[str] = set()
        self._over = threading.Event()

    def __enter__(self) -> LiveDisplay:
        self._began = time.monotonic()
        self._screen = self._screen or self._guarded("display", screen_here)
        if not is_connect(self._spark):
            self._tasks = self._guarded("tasks", lambda: Tasks(self._spark))
        self._look()
        self._show()
        # By the block's context a notebook's kernel finds the cell of an output.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="rocketmq-spark-live", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ended = time.monotonic()
        self._over.set()
        try:
            self._thread.join(_STOPPED_WITHIN)
            if not self._thread.is_alive():
                self._look(last=True)
                if error is None:
                    self._await_last_counts()
            self._show(ended, interrupted=isinstance(error, KeyboardInterrupt))
        finally:
            self._transport.close()

    def _run(self) -> None:
        while not self._over.wait(_INTERVAL):
            self._look()
            if not self._over.is_set():
                self._show()

    def _await_last_counts(self) -> None:
        # Brokers and Spark report the end of a job with a delay: look until nothing changes.
        deadline = time.monotonic() + _SETTLED_WITHIN
        while time.monotonic() < deadline:
            before = self.view.tasks, self._arrivals.messages
            time.sleep(_SETTLING)
            self._look(last=True)
            if before == (self.view.tasks, self._arrivals.messages) and not (self._tasks and self._tasks.open):
                return

    def _look(self, *, last: bool = False) -> None:
        self._guarded("messages", lambda: self._arrivals.look(time.monotonic(), last=last))
        if self._tasks is not None:
            self.view = replace(self.view, tasks=self._guarded("tasks", self._tasks.look) or self.view.tasks)

    def _show(self, ended: float | None = None, *, interrupted: bool = False) -> None:
        brokers = tuple(self._arrivals.brokers())
        self._log_once("name servers", self._arrivals.problem)
        for broker in brokers:
            self._log_once(broker.broker, broker.detail)
        failed = (f"{part}: {problem}" for part, problem in self._failed.items())
        problems = tuple(filter(None, (self._arrivals.note, self._arrivals.problem, *failed)))
        seconds = (ended or time.monotonic()) - self._began
        view = replace(self.view, seconds=seconds, over=ended is not None, brokers=brokers, problems=problems)
        self.view = view = replace(view, interrupted=interrupted)
        if (screen := self._screen) is not None:
            self._guarded("display", lambda: screen(view))

    def _guarded(self, part: str, action: Callable[[], T]) -> T | None:
        """Return the action's result, or keep its error as a problem and return None."""
        try:
            result = action()
        except Exception as exc:
            # Py4J, a notebook's front end and a closed stream raise errors of all kinds.
            self._failed[part] = f"{type(exc).__name__}: {str(exc).strip().partition(chr(10))[0]}"
            self._log_once(part, self._failed[part])
            return None
        self._failed.pop(part, None)
        return result

    def _log_once(self, part: str, problem: str) -> None:
        if problem and part not in self._logged:
            self._logged.add(part)
            logger.warning("live display of topic %s (the job continues): %s: %s", self.view.topic, part, problem)


class TaskCounts(NamedTuple):
    """Tasks that succeeded, that run, that failed (Spark tries them again), and all of them."""

    ended: int = 0
    running: int = 0
    failed: int = 0
    total: int = 0


def _sum(counts: Iterable[TaskCounts]) -> TaskCounts:
    return TaskCounts(*map(sum, zip(*counts, strict=True)))


class Tasks:
    """Counts the tasks of a classic Spark application's jobs that begin from now on.

    A job of another session or job group is missed if it begins and ends between two looks.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._tracker = spark.sparkContext.statusTracker()
        self._groups: set[str | None] = {None, spark.sparkContext.getLocalProperty("spark.jobGroup.id")}
        # The jobs that ran at the last look.
        self.open: set[int] = set()
        self._counts: dict[int, TaskCounts] = {}
        self._before = self._jobs()

    def look(self) -> TaskCounts:
        """Return the counts of this moment."""
        self.open |= self._jobs() - self._before - self._counts.keys()
        for job_id in sorted(self.open):
            ended, self._counts[job_id] = self._of_job(job_id)
            if ended:
                self.open.discard(job_id)
        return _sum(self._counts.values())

    def _jobs(self) -> set[int]:
        self._groups |= {str(query.runId) for query in self._spark.streams.active}
        active = set(self._tracker.getActiveJobsIds())
        return active.union(*(self._tracker.getJobIdsForGroup(group) for group in self._groups))

    def _of_job(self, job_id: int) -> tuple[bool, TaskCounts]:
        """Return whether a job has ended, and its tasks; stages that Spark skips do not count."""
        job = self._tracker.getJobInfo(job_id)
        if job is None:
            return True, TaskCounts()
        active = set(self._tracker.getActiveStageIds()).intersection(job.stageIds)
        stages = []
        for stage_id in job.stageIds:
            stage = self._tracker.getStageInfo(stage_id)
            if stage and (stage.numCompletedTasks or stage_id in active or stage_id > max(active, default=-1)):
                ended = min(stage.numCompletedTasks, stage.numTasks)
                stages.append(TaskCounts(ended, stage.numActiveTasks, stage.numFailedTasks, stage.numTasks))
        counts = _sum(stages)
        if job.status in ("RUNNING", "UNKNOWN"):
            return False, counts
        return True, counts._replace(running=0, total=counts.ended if job.status == "SUCCEEDED" else counts.total)


@dataclass(frozen=True, slots=True, repr=False)
class LiveView:
    """One state of a live display, `seconds` after its beginning. The last one has the rates of the whole time."""

    topic: str
    seconds: float
    over: bool
    tasks: TaskCounts | None
    brokers: tuple[BrokerArrivals, ...]
    problems: tuple[str, ...]
    interrupted: bool = False  # By Ctrl-C; running tasks may store more

    @property
    def messages(self) -> int:
        """How many messages have arrived, as far as brokers have answered."""
        return sum(broker.messages for broker in self.brokers)

    def heading(self) -> str:
        """Return topic, time and tasks."""
        end = ", interrupted" if self.interrupted else ", ended" if self.over else ""
        parts = [f"topic {self.topic}", f"{self.seconds:.1f} s{end}"]
        if self.tasks is not None:
            ended, active, failed, total = self.tasks
            running = "" if self.over and not active else f", {active:,} running"
            parts.append(f"{ended:,} of {total:,} tasks ended{running}{f', {failed:,} failed' if failed else ''}")
        return escaped(" · ".join(parts))

    def rows(self) -> list[tuple[str, ...]]:
        """Return a line per broker, and their sum."""
        lines = [(broker.broker, broker.messages, self._rate(broker), broker.problem) for broker in self.brokers]
        if len(lines) != 1:
            lines.append(("all", self.messages, self._rate_of_all(), ""))
        width = len(self.headings())
        return [
            (name, f"{messages:,}", "-" if rate is None else f"{rate:,.0f}", problem)[:width]
            for name, messages, rate, problem in lines
        ]

    def headings(self) -> tuple[str, ...]:
        """Return the headings of the rows; problems have a column only if there are any."""
        return (*_HEADINGS, "") if any(broker.problem for broker in self.brokers) else _HEADINGS

    def line(self) -> str:
        """Return the whole state in one line."""
        silent = [f"{broker.broker} {broker.problem}" for broker in self.brokers if broker.problem]
        arrived = f"{self.messages:,} messages arrived, {self._rate_of_all():,.0f} per second"
        return escaped("; ".join([f"{self.heading()} · {arrived}", *silent, *self.problems]))

    def _rate(self, broker: BrokerArrivals) -> float | None:
        if self.over:
            return broker.messages / self.seconds if self.seconds else 0.0
        return broker.per_second

    def _rate_of_all(self) -> float:
        return sum(filter(None, map(self._rate, self.brokers)))

    __repr__ = line

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.heading())}</p>\n{html_table(self.headings(), self.rows(), notes=self.problems)}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text(self.heading())
        yield from (Text(escaped(problem)) for problem in self.problems)
        # The table ends with an empty line, which Spark's own progress bar overwrites.
        yield fitted(self.headings(), self.rows(), _LAYOUT, options.max_width)


def notebook_screen(display: Callable[..., Any]) -> Screen:
    """Return a screen that replaces one output of the cell; `display` is ``IPython.display.display``."""
    handles: list[Any] = []

    def show(view: LiveView) -> None:
        if handles:
            handles[0].update(view)
        else:
            handles.append(display(view, display_id=True))

    return show


def terminal_screen(console: Console) -> Screen:
    """Return a screen of a terminal's last lines; other output scrolls above them."""
    from rich.live import Live

    lines = Live(console=console, auto_refresh=False)

    def show(view: LiveView) -> None:
        lines.start()
        lines.update(view, refresh=True)
        if view.over:
            lines.stop()

    return show


def lines_screen(file: IO[str], clock: Callable[[], float] = time.monotonic) -> Screen:
    """Return a screen that writes a line every five seconds, and the last view."""
    due = clock() + _BETWEEN_LINES

    def show(view: LiveView) -> None:
        nonlocal due
        if view.over or clock() >= due:
            due = clock() + _BETWEEN_LINES
            print(view.line(), file=file, flush=True)

    return show


def screen_here() -> Screen:
    """Return the screen for this process. All but notebooks use stderr, because stdout is the program's."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter:
        from IPython.display import display

        return notebook_screen(display)
    return terminal_screen(console) if console.is_terminal else lines_screen(console.file)
