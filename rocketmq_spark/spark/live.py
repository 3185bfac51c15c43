"""`live(spark, topic, ...)`: shows Spark's tasks and arriving messages while a job runs.

A thread looks twice a second and shows a `LiveView`. No failure reaches the job: it is shown, and logged once. The
first look precedes the block, so that all of its messages count. The last one follows it and stays on the screen.
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
from rocketmq_spark.errors import escaped
from rocketmq_spark.model.table import Layout, fitted, html_table
from rocketmq_spark.spark.live_arrivals import Arrivals, BrokerArrivals
from rocketmq_spark.spark.register import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.console import Console, ConsoleOptions, RenderResult

    from rocketmq_spark.transport.remoting.transport import RemotingTransport

logger = logging.getLogger("rocketmq_spark.spark")

# Seconds: between two looks, between two looks after the block, how long these may go on, how long the thread may take
# to end, and between two lines in a file.
_INTERVAL: Final = 0.5
_SETTLING: Final = 0.2
_SETTLED_WITHIN: Final = 1.0
_STOPPED_WITHIN: Final = 10.0
_BETWEEN_LINES: Final = 5.0

_HEADINGS: Final = ("broker", "messages arrived", "per second")
# The column without a heading has the brokers' problems.
_LAYOUT: Final = Layout(right=_HEADINGS[1:], free=("",))

T = TypeVar("T")
Screen: TypeAlias = "Callable[[LiveView], object]"


def live(
    spark: SparkSession, topic: str, name_server: str | Sequence[str] | None = None, **connection: Any
) -> LiveDisplay:
    """Show Spark's tasks and the messages that arrive in a topic, twice a second, while a ``with`` block runs.

    In a notebook the display is an output of the cell, in a terminal its last lines, elsewhere a line on stderr every
    five seconds. The last state stays. Messages are counted by the brokers' own offsets, so those of other senders
    count, too.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        Its jobs that begin within the block count, and those of streaming queries. With Spark Connect only messages are
        shown, because its clients cannot see tasks.
    topic : str
        It need not exist yet.
    name_server : str or sequence of str, optional
        ``host:9876;host:9876``. Default: the environment variable ``NAMESRV_ADDR``.
    **connection
        As of `Admin`: access_key, secret_key, use_tls, tls_ca_file, namespace, ...

    Returns
    -------
    LiveDisplay
        A context manager.

    Raises
    ------
    OptionError
        There is no name server, or an option is malformed. A server that does not answer is shown, and is no error.

    Examples
    --------
    >>> with rocketmq_spark.live(spark, "orders", "127.0.0.1:9876"):  # doctest: +SKIP
    ...     df.write.format("rocketmq").option("nameServer", "127.0.0.1:9876").option("topic", "orders").save()
    """
    admin = Admin(name_server, **connection)
    return LiveDisplay(spark, topic, admin.transport)


class LiveDisplay:
    """The context manager that `live` returns, for one block; it closes `transport`. `view` is what was shown last."""

    def __init__(
        self,
        spark: SparkSession,
        topic: str,
        transport: RemotingTransport,
        screen: Screen | None = None,
    ) -> None:
        self.view = LiveView(topic, 0.0, over=False, tasks=None, brokers=(), problems=())
        self._spark = spark
        self._transport = transport
        self._screen = screen
        self._arrivals = Arrivals(transport, topic)
        self._tasks: Tasks | None = None
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
        # In the block's context, by which a notebook's kernel knows the cell of an output.
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
                    self._settle()
            self._show(ended)
        finally:
            self._transport.close()

    def _run(self) -> None:
        while not self._over.wait(_INTERVAL):
            self._look()
            if not self._over.is_set():
                self._show()

    def _settle(self) -> None:
        """Look until nothing changes: brokers and Spark report the end of a job a moment later."""
        deadline = time.monotonic() + _SETTLED_WITHIN
        while time.monotonic() < deadline:
            before = self.view.tasks, self._arrivals.messages
            time.sleep(_SETTLING)
            self._look(last=True)
            if before == (self.view.tasks, self._arrivals.messages) and (self._tasks is None or self._tasks.idle):
                return

    def _look(self, *, last: bool = False) -> None:
        self._guarded("messages", lambda: self._arrivals.look(time.monotonic(), last=last))
        if self._tasks is not None:
            self.view = replace(self.view, tasks=self._guarded("tasks", self._tasks.look) or self.view.tasks)

    def _show(self, ended: float | None = None) -> None:
        brokers = tuple(self._arrivals.brokers())
        details = {broker.broker: broker.detail for broker in brokers} | {"name servers": self._arrivals.problem}
        for what, problem in (details | self._failed).items():
            self._log_once(what, problem)
        failed = (f"{what}: {problem}" for what, problem in self._failed.items())
        problems = tuple(filter(None, (self._arrivals.note, self._arrivals.problem, *failed)))
        seconds = (ended or time.monotonic()) - self._began
        self.view = view = replace(
            self.view, seconds=seconds, over=ended is not None, brokers=brokers, problems=problems
        )
        if (screen := self._screen) is not None:
            self._guarded("display", lambda: screen(view))

    def _guarded(self, what: str, do: Callable[[], T]) -> T | None:
        """Return what `do` returns, or keep its error as a problem and return None."""
        try:
            result = do()
        except Exception as exc:
            # Py4J, a notebook's front end and a closed stream raise errors of all kinds.
            self._failed[what] = f"{type(exc).__name__}: {str(exc).strip().partition(chr(10))[0]}"
            self._log_once(what, self._failed[what])
            return None
        self._failed.pop(what, None)
        return result

    def _log_once(self, what: str, problem: str) -> None:
        if problem and what not in self._logged:
            self._logged.add(what)
            logger.warning("the live display of topic %s (the job goes on): %s: %s", self.view.topic, what, problem)


class TaskCounts(NamedTuple):
    """Tasks that ended well, that run, that failed (Spark tries them again), and all of them."""

    ended: int = 0
    running: int = 0
    failed: int = 0
    total: int = 0

    @classmethod
    def sum(cls, counts: Iterable[TaskCounts]) -> TaskCounts:
        """Return the sums."""
        return cls(*map(sum, zip(cls(), *counts, strict=True)))


class Tasks:
    """Counts the tasks of a classic session's jobs that begin from now on."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._tracker = spark.sparkContext.statusTracker()
        self._groups: set[str | None] = {None, spark.sparkContext.getLocalProperty("spark.jobGroup.id")}
        self._open: set[int] = set()
        self._counts: dict[int, TaskCounts] = {}
        self._before = self._jobs()

    def look(self) -> TaskCounts:
        """Return the counts of this moment."""
        self._open |= self._jobs() - self._before - self._counts.keys()
        for job_id in sorted(self._open):
            ended, self._counts[job_id] = self._of_job(job_id)
            if ended:
                self._open.discard(job_id)
        return TaskCounts.sum(self._counts.values())

    @property
    def idle(self) -> bool:
        """Whether no job was running at the last look."""
        return not self._open

    def _jobs(self) -> set[int]:
        self._groups |= {str(query.runId) for query in self._spark.streams.active}
        found = set(self._tracker.getActiveJobsIds())
        return found.union(*(self._tracker.getJobIdsForGroup(group) for group in self._groups))

    def _of_job(self, job_id: int) -> tuple[bool, TaskCounts]:
        """Return whether a job has ended, and its tasks; stages that Spark skips do not count."""
        job = self._tracker.getJobInfo(job_id)
        if job is None:
            return True, TaskCounts()
        active = set(self._tracker.getActiveStageIds()).intersection(job.stageIds)
        latest = max(active, default=-1)
        stages = [(stage_id, self._tracker.getStageInfo(stage_id)) for stage_id in job.stageIds]
        counts = TaskCounts.sum(
            TaskCounts(
                min(stage.numCompletedTasks, stage.numTasks), stage.numActiveTasks, stage.numFailedTasks, stage.numTasks
            )
            for stage_id, stage in stages
            if stage is not None and (stage.numCompletedTasks or stage_id in active or stage_id > latest)
        )
        if job.status in ("RUNNING", "UNKNOWN"):
            return False, counts
        return True, counts._replace(running=0, total=counts.ended if job.status == "SUCCEEDED" else counts.total)


@dataclass(frozen=True, slots=True, repr=False)
class LiveView:
    """One state of a live display. The last one (`over`) has the rates of the whole time.

    `seconds` count from the beginning; `tasks` is None with Spark Connect.
    """

    topic: str
    seconds: float
    over: bool
    tasks: TaskCounts | None
    brokers: tuple[BrokerArrivals, ...]
    problems: tuple[str, ...]

    @property
    def messages(self) -> int:
        """How many messages have arrived, as far as brokers have answered."""
        return sum(broker.messages for broker in self.brokers)

    def heading(self) -> str:
        """Return topic, time and tasks."""
        parts = [f"topic {self.topic}", f"{self.seconds:.1f} s{', ended' if self.over else ''}"]
        if self.tasks is not None:
            ended, active, failed, total = self.tasks
            running = "" if self.over and not active else f", {active:,} running"
            parts.append(f"{ended:,} of {total:,} tasks ended{running}{f', {failed:,} failed' if failed else ''}")
        return escaped(" · ".join(parts))

    def rows(self) -> list[tuple[str, ...]]:
        """Return a line per broker, and their sum."""
        rows = [(broker.broker, broker.messages, self._rate(broker), broker.problem) for broker in self.brokers]
        if len(rows) != 1:
            rows.append(("all", self.messages, self._rate_of_all(), ""))
        cells = [
            (name, f"{messages:,}", "-" if rate is None else f"{rate:,.0f}", problem)
            for name, messages, rate, problem in rows
        ]
        return [row[: len(self.headings())] for row in cells]

    def headings(self) -> tuple[str, ...]:
        """Return the headings of the rows; the problems have a column only if there are some."""
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
    """Return a screen of a terminal's last lines; what is printed meanwhile scrolls above them."""
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
    """Return the screen for this place. All but notebooks use stderr, because stdout is the program's."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter:
        from IPython.display import display

        return notebook_screen(display)
    return terminal_screen(console) if console.is_terminal else lines_screen(console.file)
