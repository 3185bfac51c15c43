"""Random plans of reads. The same plan of a table with the same rows says which rows it has to return."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from pyspark import StorageLevel
from pyspark.sql import Row
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from tests.support.processes import PYSPARK

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = (
    "topic", "brokerName", "queueId", "queueOffset", "body", "tags", "keys", "flag", "properties", "msgId",
    "bornTimestamp", "storeTimestamp", "bornHost", "reconsumeTimes",
)  # fmt: skip
PLACE = ("topic", "brokerName", "queueId", "queueOffset")
# Spark cannot compare maps, so plans that compare rows have the entries as text.
ENTRIES = "to_json(array_sort(map_entries(properties))) AS properties"
TAGS = ("red", "green", "a b", None)

SETTINGS: Mapping[str, Sequence[str]] = {
    "spark.sql.adaptive.enabled": ("true", "false"),
    "spark.sql.shuffle.partitions": ("1", "2", "5"),
    "spark.sql.execution.arrow.maxRecordsPerBatch": ("3", "10000"),
    "spark.sql.autoBroadcastJoinThreshold": ("-1", "10485760"),
    **({"spark.sql.python.filterPushdown.enabled": ("true", "false")} if PYSPARK >= (4, 1) else {}),
}

Step = Callable[["DataFrame"], "DataFrame"]


@dataclass(frozen=True)
class Stored:
    """What is stored: the first and next offset of each queue, by topic, broker and id, and times of messages."""

    offsets: Mapping[tuple[str, str, int], tuple[int, int]]
    times: Sequence[int]

    @property
    def topics(self) -> list[str]:
        return sorted({topic for topic, _, _ in self.offsets})


@dataclass
class Read:
    """Options of a read, and the condition that its rows fulfil."""

    options: dict[str, Any]
    condition: str


@dataclass
class Plan:
    """Reads and what is done with their rows; `text` describes both."""

    settings: dict[str, str]
    streams: bool
    reads: list[Read] = field(default_factory=list)
    steps: list[Callable[[list[DataFrame]], list[DataFrame]]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    limit: int | None = None
    counts_first: bool = False

    @property
    def text(self) -> str:
        reads = [f"read {number}: {read.options}" for number, read in enumerate(self.reads)]
        kind = "stream" if self.streams else "batch"
        return "\n".join([f"{kind}, {self.settings}", *reads, *self.said])

    def build(self, frames: Iterable[DataFrame]) -> DataFrame:
        """Return the plan of the frames of its reads."""
        made = list(frames)
        for step in self.steps:
            made = step(made)
        (frame,) = made
        return frame


def read_of(rng: Random, stored: Stored, *, streams: bool) -> Read:
    """Return a random read."""
    topics = stored.topics
    options: dict[str, Any] = {"subscribe": ",".join(topics)}
    conditions = ["true"]
    queues = sorted(stored.offsets)
    kind = rng.choice(("all", "one topic", "pattern", "assign"))
    if kind == "one topic":
        topic = rng.choice(topics)
        options, conditions = {"subscribe": topic}, [f"topic = '{topic}'"]
        queues = [queue for queue in queues if queue[0] == topic]
    elif kind == "pattern":
        options = {"subscribePattern": "|".join(topics)}
    elif kind == "assign":
        queues = rng.sample(queues, rng.randint(1, len(queues)))
        options = {"assign": json.dumps(_nested(dict.fromkeys(queues)))}
        conditions.append(
            " OR ".join(
                f"(topic = '{topic}' AND brokerName = '{broker}' AND queueId = {number})"
                for topic, broker, number in queues
            )
        )
    bounds = rng.choice(("none", "none", "offsets", "times"))
    sides = [("starting", ">="), ("ending", "<")]
    if streams or rng.random() < 0.5:
        sides = sides[:1] if streams else [rng.choice(sides)]
    if bounds == "offsets":
        for side, compared in sides:
            chosen = {queue: rng.randint(*stored.offsets[queue]) for queue in queues}
            if side == "ending" and "startingOffsets" in options:
                begins = options["startingOffsets"]
                chosen = {queue: max(offset, begins[queue]) for queue, offset in chosen.items()}
            options[f"{side}Offsets"] = chosen
            conditions.append(
                "CASE "
                + " ".join(
                    f"WHEN topic = '{topic}' AND brokerName = '{broker}' AND queueId = {number} "
                    f"THEN queueOffset {compared} {offset}"
                    for (topic, broker, number), offset in chosen.items()
                )
                + " ELSE false END"
            )
        for side, _ in sides:
            options[f"{side}Offsets"] = json.dumps(_nested(options[f"{side}Offsets"]))
    elif bounds == "times":
        first, last = sorted(rng.choices(stored.times, k=2))
        for side, compared in sides:
            at = first if side == "starting" else last
            options[f"{side}Timestamp"] = at
            if side == "starting":
                options["startingOffsetsByTimestampStrategy"] = "latest"
            conditions.append(f"storeTimestamp {compared} timestamp_millis({at})")
    if streams and not {"startingOffsets", "startingTimestamp"} & options.keys():
        options["startingOffsets"] = "earliest"
    if rng.random() < 0.3:
        tags = rng.sample([tag for tag in TAGS if tag], 2)
        options["subExpression"] = " || ".join(tags)
        conditions.append(f"tags IN ('{tags[0]}', '{tags[1]}')")
    if rng.random() < 0.5:
        name, values = rng.choice(
            (("minPartitions", (1, 3, 9)), ("maxRecordsPerPartition", (7, 100)), ("pullBatchSize", (1, 5, 1024)))
        )
        options[name] = rng.choice(values)
    if streams and PYSPARK >= (4, 2) and rng.random() < 0.7:
        options["maxOffsetsPerTrigger"] = rng.choice((60, 150))
    return Read(options, " AND ".join(f"({condition})" for condition in conditions))


def _nested(values: Mapping[tuple[str, str, int], Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for (topic, broker, number), value in values.items():
        of_topic = found.setdefault(topic, {})
        if value is None:
            of_topic.setdefault(broker, []).append(number)
        else:
            of_topic.setdefault(broker, {})[str(number)] = value
    return found


def condition_of(rng: Random, stored: Stored, columns: Sequence[str]) -> str:
    """Return a random condition of columns of the source or of the body."""
    at = rng.choice(stored.times)
    known = {
        "queueId": ["queueId > 0", "queueId IN (0, 7)", "NOT queueId = 1"],
        "brokerName": ["brokerName LIKE '%1'", "brokerName > 'broker-0'"],
        "topic": [f"topic = '{stored.topics[0]}'", f"topic <> '{stored.topics[0]}'"],
        "queueOffset": ["queueOffset BETWEEN 5 AND 30", "queueOffset % 3 = 1", "queueOffset < 12 OR queueOffset > 20"],
        "tags": ["tags = 'red'", "tags IS NULL", "tags IN ('green', 'a b')", "tags <=> NULL OR tags > 'b'"],
        "keys": ["keys IS NOT NULL", "keys LIKE '%1%'"],
        "flag": ["flag <> 0", "flag < 0 OR flag = 7"],
        "storeTimestamp": [f"storeTimestamp < timestamp_millis({at})", f"storeTimestamp >= timestamp_millis({at})"],
        "body": ["length(body) > 20", "CAST(body AS string) LIKE '%7%'", "crc32(body) % 2 = 0"],
        "number": ["number % 5 < 3", "number > 100"],
    }
    usable = [name for name in columns if name in known]
    return rng.choice(known[rng.choice(usable)]) if usable else "true"


class Maker:
    """Makes the plan of a seed."""

    def __init__(self, seed: int, stored: Stored) -> None:
        self.rng = Random(seed)
        self._stored = stored
        settings = {name: self.rng.choice(values) for name, values in SETTINGS.items()}
        self.plan = Plan(settings, streams=self.rng.random() < 0.15)
        self._columns = list(COLUMNS)

    def make(self) -> Plan:
        rng, plan = self.rng, self.plan
        plan.reads.append(read_of(rng, self._stored, streams=plan.streams))
        if rng.random() < 0.5:
            self._add("number", lambda frame: frame.selectExpr("*", NUMBER))
            self._columns.append("number")
        steps = [self._where, self._select, self._union]
        if not plan.streams:
            steps += [self._join, self._cache, self._distinct, self._repartition, self._reuse]
        for step in rng.choices(steps, k=rng.randint(1, 4)):
            step()
        if not plan.streams:
            rng.choice((self._group, self._order, self._where, self._where))()
            plan.counts_first = rng.random() < 0.4
            if plan.limit is None and rng.random() < 0.25:
                plan.limit = limit = rng.choice((0, 1, 17, 100_000))
                self.plan.said.append(f"limit {limit}")
        return plan

    def _add(self, text: str, step: Step) -> None:
        self.plan.said.append(text)
        self.plan.steps.append(lambda frames: [step(frames[0]), *frames[1:]])

    def _where(self) -> None:
        condition = condition_of(self.rng, self._stored, self._columns)
        self._add(f"where {condition}", lambda frame: frame.where(condition))

    def _select(self) -> None:
        self._columns = chosen = self.rng.sample(self._columns, self.rng.randint(1, len(self._columns)))
        self._add(f"select {chosen}", lambda frame: frame.select(*chosen))

    def _other(self) -> Step | None:
        """Add another read with the same columns, or use none: the frame itself."""
        if self.rng.random() < 0.5:
            return None
        self.plan.reads.append(read_of(self.rng, self._stored, streams=self.plan.streams))
        columns = list(self._columns)
        return lambda frame: frame.selectExpr("*", NUMBER).select(*columns)

    def _union(self) -> None:
        chosen = self._other() if self._is_raw() else None
        if chosen is None:
            self.plan.said.append("union with itself")
            self.plan.steps.append(lambda frames: [frames[0].union(frames[0]), *frames[1:]])
        else:
            other = chosen
            self.plan.said.append("union with the next read")
            self.plan.steps.append(lambda frames: [frames[0].union(other(frames[1])), *frames[2:]])

    def _is_raw(self) -> bool:
        return "entries" not in " ".join(self.plan.said)

    def _join(self) -> None:
        keys = [name for name in PLACE if name in self._columns]
        if len(keys) < len(PLACE):
            return
        kind = self.rng.choice(("left_semi", "left_anti", "inner"))
        condition = condition_of(self.rng, self._stored, PLACE)
        self._add(
            f"self join {kind} where {condition}",
            lambda frame: frame.join(frame.where(condition).select(*PLACE).distinct(), [*PLACE], kind),
        )
        # A join puts its keys first.
        self._columns = [*PLACE, *(name for name in self._columns if name not in PLACE)]

    def _cache(self) -> None:
        if self.rng.random() < 0.5:
            self._add("cache", lambda frame: frame.cache())
        else:
            self._add("persist on disk", lambda frame: frame.persist(StorageLevel.DISK_ONLY))

    def _reuse(self) -> None:
        """Run another action of the same frame before the plan goes on."""

        def used(frame: DataFrame) -> DataFrame:
            frame.count()
            return frame

        self._add("count", used)

    def _comparable(self) -> None:
        if "properties" in self._columns and self._is_raw():
            others = [name for name in self._columns if name != "properties"]
            self._add("entries", lambda frame: frame.selectExpr(*others, ENTRIES))
            self._columns = [*others, "properties"]

    def _distinct(self) -> None:
        self._comparable()
        self._add("distinct", lambda frame: frame.distinct())

    def _repartition(self) -> None:
        number, column = self.rng.choice((1, 2, 6)), self.rng.choice(self._columns)
        kind = self.rng.choice(("repartition", "coalesce", "by column"))
        if kind == "by column" and column != "properties":
            self._add(f"repartition {number} by {column}", lambda frame: frame.repartition(number, column))
        elif kind == "coalesce":
            self._add(f"coalesce {number}", lambda frame: frame.coalesce(number))
        else:
            self._add(f"repartition {number}", lambda frame: frame.repartition(number))

    def _group(self) -> None:
        self._comparable()
        keys = self.rng.sample(self._columns, min(len(self._columns), self.rng.randint(1, 2)))
        value = self.rng.choice(self._columns)
        self._columns = [*keys, "rows", "least", "values"]
        self._add(
            f"group by {keys}",
            lambda frame: frame.groupBy(*keys).agg(
                F.count("*").alias("rows"), F.min(value).alias("least"), F.countDistinct(value).alias("values")
            ),
        )

    def _order(self) -> None:
        columns = [name for name in self._columns if name != "properties"]
        if columns:
            chosen = self.rng.sample(columns, min(len(columns), self.rng.randint(1, 3)))
            self.plan.orders = chosen
            self._add(f"order by {chosen}", lambda frame: frame.orderBy(*chosen))


NUMBER = "try_cast(regexp_extract(CAST(body AS string), '^([0-9]+)', 1) AS long) AS number"


def comparable(value: Any) -> Any:
    """Return a value of a row that can be hashed."""
    if isinstance(value, dict):
        return tuple(sorted(value.items()))
    return bytes(value) if isinstance(value, bytearray) else value


def rows_of(rows: Iterable[Row]) -> list[tuple[Any, ...]]:
    return [tuple(map(comparable, row)) for row in rows]


def compare(plan: Plan, found: Sequence[Row], expected: Sequence[Row]) -> None:
    """Fail unless a plan returned the rows that it returns of the table, or of these as many as its limit allows.

    `expected` are the rows without the limit.
    """
    ours, theirs = rows_of(found), rows_of(expected)
    more, less = Counter(ours) - Counter(theirs), Counter(theirs) - Counter(ours)
    if plan.limit is not None:
        assert len(ours) == min(plan.limit, len(theirs)), f"{len(ours)} rows of {len(theirs)}"
        less.clear()
    wrong = f"{more.total()} rows too much:", *_few(more), f"{less.total()} rows are missing:", *_few(less)
    assert (more.total(), less.total()) == (0, 0), "\n".join(wrong)
    if plan.orders:
        assert [_keys(plan, row) for row in found] == [_keys(plan, row) for row in expected[: len(found)]]


def _few(rows: Counter[tuple[Any, ...]]) -> list[str]:
    return [f"  {count} times {_shown(row)}" for row, count in rows.most_common(3)]


def _shown(row: tuple[Any, ...]) -> str:
    return ", ".join(repr(value)[:200] for value in row)


def _keys(plan: Plan, row: Row) -> list[Any]:
    return [row[name] for name in plan.orders]


def run(spark: SparkSession, plan: Plan, load: Callable[..., DataFrame], table: DataFrame, folder: Path) -> None:
    """Run a plan of the reads and of the table, and compare the rows."""
    before = {name: spark.conf.get(name, None) for name in plan.settings}
    for name, value in plan.settings.items():
        spark.conf.set(name, value)
    try:
        expected = plan.build(table.where(read.condition) for read in plan.reads).collect()
        if plan.streams:
            compare(plan, stream_rows(plan, load, folder), expected)
            return
        frame = plan.build(load(**read.options) for read in plan.reads)
        limited = frame if plan.limit is None else frame.limit(plan.limit)
        if plan.counts_first:
            count = limited.count()
            assert count == (len(expected) if plan.limit is None else min(plan.limit, len(expected)))
        compare(plan, limited.collect(), expected)
        if plan.counts_first:
            # The first action is repeated by the second, and the frame is still the same.
            compare(plan, limited.collect(), expected)
    finally:
        spark.catalog.clearCache()
        for name, earlier in before.items():
            spark.conf.unset(name) if earlier is None else spark.conf.set(name, earlier)


def stream_rows(plan: Plan, load: Callable[..., DataFrame], folder: Path) -> list[Row]:
    """Return the rows of all micro-batches of a stream that ends when it has read everything."""
    rows: list[Row] = []

    def keep(batch: DataFrame, _: int) -> None:
        found = batch.collect()
        assert batch.count() == len(found)
        rows.extend(found)

    frame = plan.build(load(streams=True, **read.options) for read in plan.reads)
    query = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(folder / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()
    return rows
