"""The live display with a session, a transport and a screen of the test: what reaches the screen and the user."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rocketmq_spark.errors import RemotingConnectException
from rocketmq_spark.model.route import BrokerData, TopicRouteData
from rocketmq_spark.protocol.remoting.responses import ClusterInfo
from rocketmq_spark.spark.live import LiveDisplay, LiveView, TaskCounts, Tasks, terminal_screen
from tests.support.scripted import route
from tests.support.sessions import ConnectSession, Session


class Tracker:
    """Spark's status tracker: `jobs` by id, their stages by id, and the stages that run."""

    def __init__(self) -> None:
        self.jobs: dict[int, Any] = {}
        self.stages: dict[int, Any] = {}
        self.active: list[int] = []
        self.groups: dict[str | None, list[int]] = {}

    def add(self, job_id: int, *stages: int, status: str = "RUNNING", group: str | None = None) -> None:
        self.jobs[job_id] = SimpleNamespace(stageIds=stages, status=status)
        self.groups.setdefault(group, []).append(job_id)

    def stage(self, stage_id: int, tasks: int, ended: int, running: int = 0, failed: int = 0) -> None:
        self.stages[stage_id] = SimpleNamespace(
            numTasks=tasks, numCompletedTasks=ended, numActiveTasks=running, numFailedTasks=failed
        )

    def getActiveJobsIds(self) -> list[int]:  # noqa: N802 - Spark's name
        return [job_id for job_id, job in self.jobs.items() if job.status == "RUNNING"]

    def getJobIdsForGroup(self, group: str | None) -> list[int]:  # noqa: N802 - Spark's name
        return self.groups.get(group, [])

    def getActiveStageIds(self) -> list[int]:  # noqa: N802 - Spark's name
        return self.active

    def getJobInfo(self, job_id: int) -> Any:  # noqa: N802 - Spark's name
        return self.jobs.get(job_id)

    def getStageInfo(self, stage_id: int) -> Any:  # noqa: N802 - Spark's name
        return self.stages.get(stage_id)


class WithJobs(Session):
    """A classic session with a status tracker and streaming queries."""

    def __init__(self, group: str | None = None, queries: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.tracker = Tracker()
        context: Any = self.sparkContext
        context.statusTracker = lambda: self.tracker
        context.getLocalProperty = {"spark.jobGroup.id": group}.get
        self.streams = SimpleNamespace(active=[SimpleNamespace(runId=run_id) for run_id in queries])


def tasks_of(session: Session) -> Tasks:
    return Tasks(session)  # type: ignore[arg-type]


def test_tasks_of_jobs_before_the_display_do_not_count() -> None:
    session = WithJobs()
    session.tracker.add(1, 1)
    session.tracker.stage(1, tasks=5, ended=5)
    tasks = tasks_of(session)
    session.tracker.add(2, 2)
    session.tracker.active = [2]
    session.tracker.stage(2, tasks=8, ended=3, running=2, failed=1)
    assert tasks.look() == TaskCounts(ended=3, running=2, failed=1, total=8)
    assert tasks.open == {2}


@pytest.mark.parametrize(("status", "total"), [("SUCCEEDED", 4), ("FAILED", 8)])
def test_ended_job_keeps_its_counts_and_runs_no_task(status: str, total: int) -> None:
    session = WithJobs()
    tasks = tasks_of(session)
    session.tracker.add(1, 1)
    session.tracker.stage(1, tasks=8, ended=4, running=2)
    session.tracker.active = [1]
    assert tasks.look() == TaskCounts(4, 2, 0, 8)
    session.tracker.jobs[1].status = status
    ended = TaskCounts(ended=4, running=0, failed=0, total=total)
    assert (tasks.look(), tasks.open) == (ended, set())
    del session.tracker.jobs[1]
    assert tasks.look() == ended


def test_skipped_stages_do_not_count() -> None:
    session = WithJobs()
    tasks = tasks_of(session)
    session.tracker.add(1, 1, 2, 3, 4)
    session.tracker.stage(1, tasks=10, ended=0)
    session.tracker.stage(2, tasks=4, ended=1, running=1)
    session.tracker.stage(3, tasks=6, ended=0)
    session.tracker.active = [2]
    # Stage 1 precedes the stage that runs, so Spark has skipped it. Stage 3 follows, and 4 is unknown.
    assert tasks.look() == TaskCounts(ended=1, running=1, failed=0, total=10)


def test_short_jobs_of_the_users_group_and_of_queries_count() -> None:
    session = WithJobs(group="mine", queries=("run-1",))
    tasks = tasks_of(session)
    for job_id, group in enumerate(("mine", "run-1", None, "of another user"), start=1):
        session.tracker.add(job_id, job_id, status="SUCCEEDED", group=group)
        session.tracker.stage(job_id, tasks=1, ended=1)
    assert tasks.look().ended == 3


class Transport:
    """One broker with one queue; `offset` grows by 5 whenever it is asked."""

    def __init__(self) -> None:
        self.offset = 0
        self.error: Exception | None = None
        self.is_closed = False

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        return route({"a": 1})

    def cluster_info(self, timeout: float) -> ClusterInfo:
        return ClusterInfo((BrokerData("a", {}),), {})

    def max_offset(self, *_: Any) -> int:
        if self.error is not None:
            raise self.error
        self.offset += 5
        return self.offset

    def close(self) -> None:
        self.is_closed = True


def display_of(session: Session, transport: Transport, screen: Any) -> LiveDisplay:
    return LiveDisplay(session, "orders", transport, screen)  # type: ignore[arg-type]


def test_last_view_follows_the_block_and_counts_from_before_it() -> None:
    views: list[LiveView] = []
    transport = Transport()
    display = display_of(ConnectSession(), transport, views.append)
    with pytest.raises(KeyError), display:
        # With an error the display does not wait for the last counts.
        raise KeyError
    assert (views[0].messages, views[0].over, views[-1].over) == (0, False, True)
    assert display.view is views[-1]
    assert display.view.messages > 0
    assert display.view.tasks is None
    assert transport.is_closed


def test_errors_of_servers_spark_and_screen_do_not_reach_the_job(caplog: pytest.LogCaptureFixture) -> None:
    def broken(view: LiveView) -> None:
        raise OSError("the terminal is closed")

    session, transport = WithJobs(), Transport()
    transport.error = RemotingConnectException("refused")
    session.streams = None  # type: ignore[assignment]
    caplog.set_level(logging.WARNING)
    with pytest.raises(KeyError), display_of(session, transport, broken) as display:
        raise KeyError
    logged = [message.partition("(the job continues): ")[2] for message in caplog.messages]
    assert logged == [
        "tasks: AttributeError: 'NoneType' object has no attribute 'active'",
        "a: refused",
        "display: OSError: the terminal is closed",
    ]
    assert display.view.over
    assert "tasks: AttributeError: 'NoneType' object has no attribute 'active'" in display.view.problems
    assert display.view.brokers[0].problem == "does not answer"


def test_terminal_keeps_the_last_view_below_other_output() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    screen = terminal_screen(console)
    view = LiveView("orders", 1.0, over=False, tasks=None, brokers=(), problems=())
    screen(view)
    console.print("output of the job")
    screen(LiveView("orders", 2.0, over=True, tasks=None, brokers=(), problems=()))
    shown = text.getvalue()
    assert shown.index("1.0 s") < shown.index("output of the job") < shown.rindex("2.0 s, ended")
    # A later print begins below the view, and does not repeat it.
    console.print("next")
    assert text.getvalue()[len(shown) :] == "next\n"
