"""How far the jobs of a Spark session are, from a moment on, by its status tracker.

Rule 1: only jobs that begin later count. They are found among those active, those of no group, and those of the groups
        of the session's queries and of the calling thread: a job of any other group is seen while it is active.
Rule 2: a job that has ended is not asked for again. If it succeeded, all of its tasks are those that ended: what it had
        beside them, Spark has skipped.
Rule 3: a stage that is passed over while a later one of the job is active is one that Spark skips, and does not count.

The tracker hears of a stage at most every 100 ms (``spark.ui.liveUpdate.period``). What happens right after that it is
told with the next event: a figure may be a task or two behind.

Follows org.apache.spark.SparkStatusTracker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_RUNNING: Final = frozenset({"RUNNING", "UNKNOWN"})


class TaskCounts(NamedTuple):
    """Tasks of the jobs that count: ended well, running, failed (to be tried again), and all there are."""

    ended: int = 0
    running: int = 0
    failed: int = 0
    total: int = 0

    def plus(self, other: TaskCounts) -> TaskCounts:
        """Return the sums."""
        return TaskCounts(*map(sum, zip(self, other, strict=True)))


class Tasks:
    """Counts the tasks of a classic session; begins with the jobs that are yet to come.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        Not one of Spark Connect, which tells a client nothing of tasks.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._tracker = spark.sparkContext.statusTracker()
        group = spark.sparkContext.getLocalProperty("spark.jobGroup.id")
        self._groups: set[str | None] = {None, group}
        self._open: set[int] = set()
        self._passed = self._jobs()
        self._ended = TaskCounts()

    def look(self) -> TaskCounts:
        """Ask how far the jobs are."""
        self._open |= self._jobs() - self._passed
        counts = self._ended
        for job_id in sorted(self._open):
            ended, of_job = self._of_job(job_id)
            counts = counts.plus(of_job)
            if ended:
                self._ended = self._ended.plus(of_job)
                self._open.discard(job_id)
                self._passed.add(job_id)
        return counts

    @property
    def idle(self) -> bool:
        """Whether none of the jobs was running at the last look."""
        return not self._open

    def _jobs(self) -> set[int]:
        self._groups |= {str(query.runId) for query in self._spark.streams.active}
        found = set(self._tracker.getActiveJobsIds())
        return found.union(*(self._tracker.getJobIdsForGroup(group) for group in self._groups))

    def _of_job(self, job_id: int) -> tuple[bool, TaskCounts]:
        job = self._tracker.getJobInfo(job_id)
        if job is None:
            return True, TaskCounts()
        active = set(self._tracker.getActiveStageIds()).intersection(job.stageIds)
        latest = max(active, default=-1)
        counts = TaskCounts()
        for stage_id in job.stageIds:
            stage = self._tracker.getStageInfo(stage_id)
            if stage is None or not (stage.numCompletedTasks or stage_id in active or stage_id > latest):
                continue
            ended = min(stage.numCompletedTasks, stage.numTasks)
            counts = counts.plus(TaskCounts(ended, stage.numActiveTasks, stage.numFailedTasks, stage.numTasks))
        if job.status in _RUNNING:
            return False, counts
        return True, counts._replace(running=0, total=counts.ended if job.status == "SUCCEEDED" else counts.total)
