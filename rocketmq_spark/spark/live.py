"""`live(spark, topic, ...)`: what a job does, and what arrives, shown while it runs.

    looks (a thread) -> LiveView -> Screen

Rule 1: a job is never disturbed: whatever fails here is shown, and logged once. Options that make no sense are an error
        before anything runs.
Rule 2: the first look is taken before the block runs, so that every message of the block counts; the last one when it
        has ended, by an error, too, and stays.
Rule 3: one thread looks and shows; it ends with the block.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from rocketmq_spark.admin.admin import Admin
from rocketmq_spark.namespace import wrap
from rocketmq_spark.spark.live_arrivals import Arrivals
from rocketmq_spark.spark.live_screens import LiveView, Screen, screen_here
from rocketmq_spark.spark.live_tasks import TaskCounts, Tasks
from rocketmq_spark.spark.register import is_connect
from rocketmq_spark.transport.remoting import RemotingTransport

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("rocketmq_spark.spark")

# Seconds: between two looks, between the last ones, how long these may go on, and how long the thread may take to end.
_INTERVAL: Final = 0.5
_SETTLING: Final = 0.2
_SETTLED_WITHIN: Final = 1.0
_STOPPED_WITHIN: Final = 10.0


def live(
    spark: SparkSession,
    topic: str,
    name_server: str | Sequence[str] | None = None,
    **connection: Any,
) -> LiveDisplay:
    """Show Spark's tasks and the messages that arrive in a topic, twice a second, while a ``with`` block runs.

    In a notebook it is an output of the cell, in a terminal its last lines, elsewhere a line on stderr every five
    seconds. What was shown last stays. It counts by the brokers' own offsets: what others send to the topic, too.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        Its jobs that begin within the block count, those of streaming queries among them. Spark Connect tells nothing
        of tasks; there only messages are shown.
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
        No name server is named, or an option is malformed. A server that does not answer is no error: it is shown.

    Examples
    --------
    >>> with rocketmq_spark.live(spark, "orders", "127.0.0.1:9876"):  # doctest: +SKIP
    ...     df.write.format("rocketmq").option("nameServer", "127.0.0.1:9876").option("topic", "orders").save()
    """
    admin = Admin(name_server, **connection)
    return LiveDisplay(spark, topic, admin.transport, admin.options.wrapped_namespace)


class LiveDisplay:
    """Looks and shows while its block runs, once; `live` makes it.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
    topic : str
        As the user knows it.
    transport : RemotingTransport
        Closed with the block.
    namespace : str, default ""
        What names of topics begin with.
    screen : Screen, optional
        Default: the one that fits where this runs.

    Attributes
    ----------
    view : LiveView
        What was shown last.
    """

    def __init__(
        self,
        spark: SparkSession,
        topic: str,
        transport: RemotingTransport,
        namespace: str = "",
        screen: Screen | None = None,
    ) -> None:
        self.view = LiveView(topic, 0.0, over=False, tasks=None, brokers=(), problems=())
        self._spark = spark
        self._transport = transport
        self._screen = screen
        self._arrivals = Arrivals(transport, wrap(namespace, topic))
        self._tasks: Tasks | None = None
        self._counts: TaskCounts | None = None
        self._failed: dict[str, str] = {}
        self._logged: set[str] = set()
        self._over = threading.Event()
        self._began = 0.0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> LiveDisplay:
        self._began = time.monotonic()
        self._guarded("display", self._choose_screen)
        self._guarded("tasks", self._find_tasks)
        self._look()
        self._show()
        # In the block's context: by it a kernel knows which cell an output belongs to.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="rocketmq-spark-live", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = time.monotonic()
        self._over.set()
        try:
            if self._ended():
                self._look(last=True)
                if error is None:
                    self._settle()
                self._show(ended)
        finally:
            if self._screen is not None:
                self._guarded("display", self._screen.close)
            self._transport.close()

    def _ended(self) -> bool:
        """Wait for the thread; return whether it has left the screen to us."""
        if self._thread is not None:
            self._thread.join(_STOPPED_WITHIN)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while not self._over.wait(_INTERVAL):
            self._look()
            self._show()

    def _settle(self) -> None:
        """Look again for what ended just now: brokers and Spark tell of it a moment later."""
        deadline = time.monotonic() + _SETTLED_WITHIN
        while time.monotonic() < deadline:
            before = self._counts, self._arrivals.messages
            time.sleep(_SETTLING)
            self._look(last=True)
            if before == (self._counts, self._arrivals.messages) and (self._tasks is None or self._tasks.idle):
                return

    def _choose_screen(self) -> None:
        self._screen = self._screen or screen_here()

    def _find_tasks(self) -> None:
        self._tasks = None if is_connect(self._spark) else Tasks(self._spark)

    def _look(self, *, last: bool = False) -> None:
        self._guarded("messages", lambda: self._arrivals.look(time.monotonic(), last=last))
        if self._tasks is not None:
            self._guarded("tasks", partial(self._count, self._tasks))

    def _count(self, tasks: Tasks) -> None:
        self._counts = tasks.look()

    def _show(self, ended: float | None = None) -> None:
        brokers = self._arrivals.brokers()
        problems = {one.broker: one.detail for one in brokers} | self._failed
        problems["name servers"] = self._arrivals.problem
        for what, problem in problems.items():
            self._log_once(what, problem)
        general = [f"{what}: {problem}" for what, problem in self._failed.items()]
        self.view = LiveView(
            self.view.topic,
            (ended or time.monotonic()) - self._began,
            over=ended is not None,
            tasks=self._counts,
            brokers=tuple(brokers),
            problems=tuple(filter(None, (self._arrivals.note, self._arrivals.problem, *general))),
        )
        if self._screen is not None:
            screen, view = self._screen, self.view
            self._guarded("display", lambda: screen.show(view))

    def _guarded(self, what: str, do: Callable[[], object]) -> None:
        """Do something of which no failure may reach the job."""
        try:
            do()
        except Exception as exc:
            # Whatever py4j, a notebook's front end or a closed stream may raise.
            self._failed[what] = f"{type(exc).__name__}: {str(exc).strip().partition(chr(10))[0]}"
            self._log_once(what, self._failed[what])
        else:
            self._failed.pop(what, None)

    def _log_once(self, what: str, problem: str) -> None:
        if problem and what not in self._logged:
            self._logged.add(what)
            logger.warning("the live display of topic %s (the job goes on): %s: %s", self.view.topic, what, problem)
