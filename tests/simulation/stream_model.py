"""A streaming query that is restarted again and again, while brokers, topics, queues and messages come and go.

The reader, its offsets, requests, plans, pulls and decoding are the connector's own. Spark's part is in `stream_spark`,
brokers and name servers in `stream_brokers`, their faults in `stream_faults`, the checks in `stream_checks`.

``python -m tests.simulation --kind stream --seeds 100000`` runs many schedules.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from rocketmq_spark.errors import (
    DataLossError,
    OptionError,
    RemotingCommandException,
    RocketMQError,
    RouteNotFoundException,
)
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.offsets import EARLIEST, LATEST, OffsetSpec
from rocketmq_spark.options.source import SourceOptions
from tests.simulation.cluster import BasePlan, BaseRun, Warnings
from tests.simulation.stream_brokers import FRESH_AFTER, REFUSES, InlineRuntime, StreamCluster, Timeline
from tests.simulation.stream_checks import problems_of_stream
from tests.simulation.stream_faults import EVENTS, REQUESTS, StreamAdversary
from tests.simulation.stream_spark import (
    AVAILABLE_NOW,
    PROCESSING_TIME,
    Driver,
    DriverEnd,
    DriverRun,
    Habits,
    StreamHistory,
)
from tests.simulation.world import EPOCH, SimulationError

TOPICS: Final = ("T0", "T1")
Pairs: TypeAlias = "tuple[tuple[MessageQueue, int], ...]"

# What happens to drivers, and what Spark does now and then.
OF_DRIVERS: Final = ("crash", "stop", "plans twice", "tasks twice", "lost commit", "late tasks")
# What users change when they restart a query, and what exists only later.
OF_USERS: Final = ("other topics", "other triggers", "late broker", "late topic", "other failOnDataLoss")
KINDS: Final = (*EVENTS, *REQUESTS, *OF_DRIVERS, *OF_USERS)

# The tags of messages, if a query selects some. The first two have the same hash.
TAGS: Final = ("Aa", "BB", "C", "")

# The points around the logs of a checkpoint at which drivers crash most often.
_POINTS: Final = (
    "after latestOffset",
    "before the offset log",
    "after the offset log",
    "after commit",
    "before partitions",
    "after partitions",
    "before the sink",
    "before the commit log",
    "after the commit log",
    "before latestOffset",
    "after initialOffset",
    "after prepare",
    "task",
)
# How often a seed enables these.
_OFTEN: Final = {"crash": 0.7, "deleted topic": 0.1}
_MOST_DRIVERS: Final = 12
# The most micro-batches and idle triggers of the last driver.
_MOST_LAST: Final = 400


@dataclass
class StreamPlan(BasePlan):
    """A query and what happens to it. `start` is how it begins, `selection` how the options name topics."""

    topics: int = 1
    start: str = "earliest"
    selection: str = "subscribe"
    legacy: bool = False
    trigger: str = PROCESSING_TIME
    interval: float = 5.0
    # What requireBrokers has of the brokers: nothing, their number, or their names.
    required: str = ""

    @classmethod
    def of_seed(cls, seed: int) -> StreamPlan:
        """Draw a plan."""
        rng = random.Random(f"stream {seed}")
        options: dict[str, Any] = {
            "read_timeout_ms": rng.choice((3_000, 10_000, 60_000)),
            "pull_timeout_ms": rng.choice((500, 1_000, 3_000)),
            "fail_on_data_loss": rng.random() < 0.5,
            "commit_offsets": rng.random() < 0.4,
        }
        legacy = rng.random() < 0.15
        if not legacy:
            options |= _limits(rng)
        if rng.random() < 0.2:
            options["min_partitions"] = rng.choice((2, 5))
        if random.Random(f"tags {seed}").random() < 0.15:
            options["sub_expression"] = "Aa" if seed % 2 else "Aa || C"
        if (unreadable := random.Random(f"unreadable {seed}")).random() < 0.15:
            options["on_unreadable"] = unreadable.choice(("fail", "skip", "raw"))
        horizon = rng.choice((40.0, 120.0))
        start = rng.choice(("earliest", "earliest", "latest", "latest", "json", "time", "times", "committed"))
        if start == "committed":
            options["starting_offsets_fallback"] = rng.choice(("error", "earliest", "latest"))
        elif start in ("time", "times"):
            options["starting_offsets_by_timestamp_strategy"] = "latest"
        return cls(
            seed,
            tuple(kind for kind in KINDS if rng.random() < _OFTEN.get(kind, rng.choice((0.05, 0.2, 0.4)))),
            brokers=rng.choice((1, 2, 2, 3)),
            name_servers=rng.choice((1, 1, 2)),
            queues=rng.choice((1, 1, 2)),
            rows=rng.choice((3, 10, 30)),
            topics=rng.choice((1, 1, 2)),
            start=start,
            selection=rng.choice(("subscribe", "subscribe", "subscribe", "pattern", "assign")),
            legacy=legacy,
            trigger=rng.choice((PROCESSING_TIME, PROCESSING_TIME, AVAILABLE_NOW)),
            interval=horizon / rng.choice((4, 8, 16)),
            required=random.Random(f"required {seed}").choice((*[""] * 8, "number", "names")),
            horizon=horizon,
            options=options,
        )


def _limits(rng: random.Random) -> dict[str, int]:
    """Draw the options that limit micro-batches."""
    options: dict[str, int] = {}
    if rng.random() < 0.4:
        options["max_offsets_per_trigger"] = rng.choice((1, 2, 5, 20))
    if rng.random() < 0.15:
        options["max_bytes_per_trigger"] = rng.choice((1, 300, 2_000))
    if rng.random() < 0.15:
        options["min_offsets_per_trigger"] = rng.choice((1, 3, 10))
        options["max_trigger_delay"] = rng.choice((1_000, 20_000))
    if options.get("min_offsets_per_trigger", 0) > options.get("max_offsets_per_trigger", 100):
        del options["max_offsets_per_trigger"]
    return options


@dataclass
class StreamRun(BaseRun):
    """A stream that was run."""

    plan: StreamPlan
    history: StreamHistory = field(repr=False)
    cluster: StreamCluster = field(repr=False)


def run_stream(plan: StreamPlan) -> StreamRun:
    """Run a query until it has read everything, and check what it returned; problems are texts."""
    world = Timeline(plan.seed, longest=20_000.0)
    cluster = StreamCluster(world, plan.brokers, plan.name_servers)
    history = StreamHistory()
    user = _User(plan, world, cluster, history)
    problems: list[str] = []
    with Warnings(world, "rocketmq_spark", history.warnings):
        try:
            user.run()
        except SimulationError as exc:
            problems.append(f"no end: {exc}")
        except Exception as exc:
            problems.append(f"{type(exc).__name__}: {exc}")
    problems += user.problems
    if not problems:
        problems = problems_of_stream(plan, cluster, history)
    return StreamRun(world, cluster.counts, problems, plan, history, cluster)


class _User:
    """Sets the cluster up, and starts the query again and again."""

    def __init__(self, plan: StreamPlan, world: Timeline, cluster: StreamCluster, history: StreamHistory) -> None:
        self.plan, self.world, self.cluster, self.history = plan, world, cluster, history
        self.rng, self.runtime = world.rng, InlineRuntime(world)
        self.problems: list[str] = []
        self._topics = TOPICS[: plan.topics]
        self._late_broker = "late broker" in plan.faults and plan.brokers > 1
        self._late_topic = "late topic" in plan.faults and plan.topics > 1
        # The steps of the present driver by name, and all of them under an empty one; and at which it crashes.
        self._steps: Counter[str] = Counter()
        self._crash: tuple[str, int] | None = None
        # After an error that names lost data, the user reads the remaining messages.
        self._accepts_loss = False
        # After an error that names an unreadable message, the user leaves such messages out.
        self._skips = False
        self._stop_at = 0.0

    def run(self) -> None:
        """Set up, run drivers while faults happen, then one after the last fault."""
        self._set_up()
        StreamAdversary(self.plan, self.world, self.cluster, self._topics).start()
        world, plan, rng = self.world, self.plan, self.rng
        while world.now < plan.horizon and len(self.history.drivers) < _MOST_DRIVERS:
            self._drive(last=False)
            world.advance(rng.random() * rng.choice((0.1, 3.0, 20.0)))
        if world.now < plan.horizon:
            world.advance(plan.horizon - world.now)
        world.advance(FRESH_AFTER)
        self.history.calm = world.now
        for _ in range(6):
            if self._drive(last=True):
                break
            if not self.history.ends and isinstance(
                self.history.drivers[-1].error, OptionError | RouteNotFoundException
            ):
                # The options name a queue or a topic that does not exist any more.
                break
            world.advance(1.0)
        else:
            self.problems.append(f"after the last fault the query failed: {self.history.drivers[-1].error}")

    def _set_up(self) -> None:
        plan, cluster, rng = self.plan, self.cluster, self.rng
        brokers = list(cluster.brokers.values())
        if "sub_expression" in plan.options:
            cluster.tags = TAGS
            cluster.counts["tag filter"] += 1
        if "on_unreadable" in plan.options:
            cluster.unreadable = 0.1
            cluster.counts[f"onUnreadable={plan.options['on_unreadable']}"] += 1
        if self._late_broker:
            late = brokers.pop()
            late.state = REFUSES
            for names in cluster.listed.values():
                names.discard(late.name)
            cluster.disturb([late.name], plan.horizon)
            cluster.counts["late broker"] += 1
        topics = self._topics[:-1] if self._late_topic else self._topics
        for broker in brokers:
            for topic in topics:
                cluster.create(broker, topic, plan.queues)
        queues = [queue for queue, _ in cluster.queues()]
        for _ in range(rng.randrange(plan.rows + 1)):
            self.world.advance(rng.random() * 0.2)
            cluster.store(rng.choice(queues))
        for queue in queues:
            log = cluster.log(queue)
            assert log is not None
            if plan.start == "committed" and rng.random() < 0.7:
                cluster.brokers[queue.broker_name].committed[queue] = rng.randint(0, len(log.records))
            if rng.random() < 0.1:
                cluster.expire(queue, rng.randint(0, len(log.records)), 0.0)
        self._start = self._draw_start(queues)
        self._assigned = frozenset(queue for queue in queues if rng.random() < 0.7) or frozenset(queues)

    def _draw_start(self, queues: list[MessageQueue]) -> dict[str, Any]:
        """Draw the options that say where the query begins."""
        rng, start, cluster = self.rng, self.plan.start, self.cluster
        if start in ("earliest", "latest", "committed"):
            return {"starting_offsets": OffsetSpec(start)}
        ends = {queue: len(log.records) for queue, log in cluster.queues()}
        if start == "json":
            offsets = {queue: rng.choice((EARLIEST, LATEST, rng.randint(0, ends[queue]))) for queue in queues}
            return {"starting_offsets": OffsetSpec(offsets=tuple(sorted(offsets.items())))}
        now = int((EPOCH + self.world.now) * 1000)
        if start == "time":
            return {"starting_timestamp": now - rng.randrange(int(self.world.now * 1200) + 1)}
        times = {queue: now - rng.randrange(int(self.world.now * 1200) + 1) for queue in queues}
        return {"starting_offsets_by_timestamp": tuple(sorted(times.items()))}

    def _drive(self, *, last: bool) -> bool:
        """Run one driver; return whether it has read everything."""
        history = self.history
        options = self._options(last=last)
        run = DriverRun(len(history.drivers), options, self._trigger(last=last), self.plan.legacy, self.world.now)
        history.drivers.append(run)
        self._draw_end(last=last)
        habits, calls = self._habits(options, last=last), 0

        def is_stopped() -> bool:
            nonlocal calls
            calls += 1
            if last:
                return run.rest > 2 or calls > _MOST_LAST
            return self.world.now >= self._stop_at

        self.world.note(f"driver {run.number} starts, {run.trigger}, failOnDataLoss={options.fail_on_data_loss}")
        try:
            Driver(self.cluster, self.runtime, history, run, habits, self._step, is_stopped).run()
        except DriverEnd as exc:
            self.cluster.counts["crash"] += 1
            self.world.note(f"driver {run.number} crashes {exc}")
        except RocketMQError as exc:
            run.error = exc
            self.world.note(f"driver {run.number} fails: {type(exc).__name__}: {exc}")
            self.cluster.counts[f"error: {type(exc).__name__}"] += 1
            self._skips |= isinstance(exc, RemotingCommandException)
            self._accepts_loss = last or (isinstance(exc, DataLossError) and self.rng.random() < 0.7)
        else:
            self.world.note(f"driver {run.number} ends")
        run.ended = self.world.now
        if last and run.error is None and calls > _MOST_LAST:
            self.problems.append(f"the query does not come to rest: {history.ends[-1][0]}")
        return run.error is None

    def _trigger(self, *, last: bool) -> str:
        trigger = self.plan.trigger
        if "other triggers" in self.plan.faults and self.rng.random() < 0.5:
            trigger = self.rng.choice((PROCESSING_TIME, AVAILABLE_NOW))
            self.cluster.counts["other triggers"] += 1
        return PROCESSING_TIME if last else trigger

    def _draw_end(self, *, last: bool) -> None:
        """Draw whether the next driver crashes or is stopped, and when."""
        rng, faults = self.rng, self.plan.faults
        self._steps.clear()
        self._crash = None
        if "crash" in faults and not last and rng.random() < 0.7:
            if rng.random() < 0.6:
                self._crash = rng.choice(_POINTS), 1 + rng.randrange(rng.choice((1, 3)))
            else:
                self._crash = "", 1 + rng.randrange(rng.choice((20, 100, 400)))
        stops = "stop" in faults and not last and rng.random() < 0.5
        self._stop_at = self.world.now + rng.random() * 30 if stops else self.plan.horizon
        self.cluster.counts["stop"] += stops

    def _habits(self, options: SourceOptions, *, last: bool) -> Habits:
        def chance(kind: str) -> float:
            return 0.3 if kind in self.plan.faults else 0.0

        interval = self.plan.interval
        if last:
            # A query may wait for more messages.
            interval = options.max_trigger_delay / 1000 if options.min_offsets_per_trigger else 0.2
        return Habits(
            interval,
            plans_twice=chance("plans twice"),
            tasks_twice=chance("tasks twice"),
            commits_lost=chance("lost commit"),
            late_tasks=chance("late tasks"),
        )

    def _options(self, *, last: bool) -> SourceOptions:
        """Return the options of the next driver."""
        plan, rng = self.plan, self.rng
        fields = dict(plan.options)
        if "other failOnDataLoss" in plan.faults and rng.random() < 0.4:
            fields["fail_on_data_loss"] = not fields["fail_on_data_loss"]
            self.cluster.counts["other failOnDataLoss"] += 1
        if self._skips:
            fields["on_unreadable"] = "skip"
        if self._accepts_loss:
            fields["fail_on_data_loss"] = False
        if plan.required and not last:
            names = tuple(self.cluster.brokers)
            fields["require_brokers"] = names if plan.required == "names" else len(names)
            self.cluster.counts["requireBrokers"] += 1
        topics = self._topics
        if "other topics" in plan.faults and not last and len(topics) > 1 and rng.random() < 0.4:
            topics = tuple(rng.sample(topics, rng.randint(1, len(topics) - 1)))
            self.cluster.counts["other topics"] += 1
        if plan.selection == "assign":
            selected: dict[str, Any] = {"assign": self._assigned}
        elif plan.selection == "pattern":
            selected = {"subscribe_pattern": "|".join(topics)}
        else:
            selected = {"subscribe": topics}
        options = _options_of(tuple(self.cluster.name_servers), tuple(sorted(fields.items())))
        options = replace(options, **selected)
        return options if self.history.ends else replace(options, **self._start_for(options))

    def _start_for(self, options: SourceOptions) -> dict[str, Any]:
        """Return the options of the start, without queues that the other options do not select."""

        def selected(pairs: Pairs) -> Pairs:
            return tuple(pair for pair in pairs if options.reads(pair[0]))

        offsets, times = "starting_offsets", "starting_offsets_by_timestamp"
        start = self._start
        if offsets in start and start[offsets].offsets:
            return {offsets: OffsetSpec(offsets=selected(start[offsets].offsets))}
        return {times: selected(start[times])} if times in start else start

    def _step(self, name: str) -> None:
        """End the driver here, if that was drawn."""
        self._steps.update((name, ""))
        if self._crash is not None and self._crash in ((name, self._steps[name]), ("", self._steps[""])):
            self.cluster.counts[f"crash {name}" if self._crash[0] else "crash at any request"] += 1
            raise DriverEnd(name)


@functools.lru_cache(maxsize=512)
def _options_of(name_servers: tuple[str, ...], fields: tuple[tuple[str, Any], ...]) -> SourceOptions:
    return SourceOptions.of(name_server=name_servers, client_ip="10.0.0.1", **dict(fields))
