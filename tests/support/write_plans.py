"""Random plans of writes, and the rows that they have to store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from pyspark.sql import Row as SparkRow
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from tests.support.auditor import ROW_ID, SHARDING_KEY, Audit, Row

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = (
    "id long, body binary, tags string, keys string, properties map<string, string>, shardingKey string, flag int,"
    " topic string"
)
# What a dead letter says of its row, which no row has.
_LETTER = [
    f"DEAD_LETTER_{name}"
    for name in ("rule", "bodySize", "topic", "partition", "row", "writeId", "batchId", "shardingKey", "flag", "tags")
]
_LETTER += ["DEAD_LETTER_leftOut", "DEAD_LETTER_keys"]
_BY_ID = (r":(?s)(\d+):.*", r"KEYS:k(\d+)")


@dataclass
class WritePlan:
    """One or two writes of a frame to one or two topics; `text` describes them."""

    seed: int
    topics: Sequence[str]
    dead: str
    options: dict[str, Any] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    steps: list[Callable[[DataFrame], DataFrame]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    partitions: int = 1
    # The `writeId` of each write of the frame; "" without one.
    writes: list[str] = field(default_factory=lambda: [""])
    in_order: bool = False

    @property
    def text(self) -> str:
        what = f"{len(self.rows)} rows in {self.partitions} partitions, columns {self.columns}, writes {self.writes}"
        return "\n".join([f"seed {self.seed}: {what}", f"{self.options}", *self.said])

    @property
    def invalid_allowed(self) -> bool:
        return self.options.get("onError") in ("skip", "deadLetter")

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return the rows to write, with their ids."""
        frame = spark.createDataFrame(self.rows, SCHEMA).repartition(self.partitions)
        for step in self.steps:
            frame = step(frame)
        return frame

    def save(self, frame: DataFrame, name_server: str) -> None:
        for write_id in self.writes:
            writer = frame.select(*self.columns).write.format("rocketmq").mode("append")
            given = {**self.options, **({"writeId": write_id} if write_id else {})}
            # A request that is sent again can be stored twice.
            writer.options(nameServer=name_server, sendMsgTimeout=120_000, **given).save()

    def audit(self, given: Sequence[SparkRow], **settings: Any) -> Audit:
        """Return the audit of the topics; `given` are the rows of the frame."""
        rows, topics = list(self._expected(given)), [*self.topics, self.dead]
        return Audit(rows, topics, identity=_BY_ID, ignored=[ROW_ID, "SPARK_ATTEMPT", *_LETTER], **settings)

    def _expected(self, given: Sequence[SparkRow]) -> Iterator[Row]:
        times = len(set(self.writes)) if self.options.get("delivery") else len(self.writes)
        copies: dict[int, int] = {}
        for row in given:
            copies[row.id] = copies.get(row.id, 0) + 1
        done: set[int] = set()
        for row in sorted(given, key=lambda row: row.id) if self.in_order else given:
            if row.id in done:
                continue
            done.add(row.id)
            valid = bool(row.body)
            if not valid and self.options["onError"] == "skip":
                continue
            topic = (row.topic if "topic" in self.columns else self.topics[0]) if valid else self.dead
            yield self._row(row, topic, copies[row.id] * times, valid=valid)

    def _row(self, row: SparkRow, topic: str, times: int, *, valid: bool) -> Row:
        present = {name: row[name] if name in self.columns else None for name in ("tags", "keys", "shardingKey")}
        properties = dict(row.properties or {}) if "properties" in self.columns else {}
        body = bytes(row.body) if valid else (b"(null)" if row.body is None else b"(empty)")
        key = present["shardingKey"] if valid else None
        return Row(
            topic,
            str(row.id),
            body,
            tag=present["tags"],
            keys=present["keys"],
            properties={**properties, **({SHARDING_KEY: key} if key else {})} or None,
            order=f"{topic} {key}" if key else None,
            times=times,
        )


def write_plan(seed: int, topics: Sequence[str], dead: str) -> WritePlan:
    """Return the plan of a seed."""
    rng = Random(f"write {seed}")
    plan = WritePlan(seed, topics, dead)
    plan.partitions = rng.choice((1, 2, 5))
    _choose_options(rng, plan)
    _choose_rows(rng, plan)
    _choose_steps(rng, plan)
    return plan


def _choose_options(rng: Random, plan: WritePlan) -> None:
    options = plan.options
    if rng.random() < 0.4:
        options |= {"delivery": "effectivelyOnce", "transactionalId": f"job-{plan.topics[0]}", "fenceMs": 0}
        plan.writes = rng.choice((["a"], ["a"], ["a", "a"], ["a", "b"]))
    else:
        plan.writes = rng.choice(([""], [""], ["", ""]))
        options["rowId"] = rng.choice(("true", "false"))
    for name, values in {
        "batchBytes": ("1k", "16k", "1m"),
        "maxInFlight": (1, 8),
        "compressMsgBodyOverHowmuch": (64, 4096),
        "compressType": ("ZLIB", "LZ4", "ZSTD"),
        "retryTimesWhenSendFailed": (0, 2),
    }.items():
        if rng.random() < 0.4:
            options[name] = rng.choice(values)
    if rng.random() < 0.3 and "delivery" not in options:
        options["batching"] = "false"
    if rng.random() < 0.5:
        options["onError"] = "skip" if "delivery" in options else rng.choice(("skip", "deadLetter"))
        if options["onError"] == "deadLetter":
            options["deadLetterTopic"] = plan.dead


def _choose_rows(rng: Random, plan: WritePlan) -> None:
    chosen = [name for name in ("tags", "keys", "properties", "shardingKey", "flag") if rng.random() < 0.6]
    # An effectively-once write takes its topic from the option.
    if rng.random() < 0.3 and "delivery" not in plan.options:
        chosen.append("topic")
    else:
        plan.options["topic"] = plan.topics[0]
    # The key says which row a dead letter is.
    if plan.invalid_allowed and "keys" not in chosen:
        chosen.append("keys")
    plan.columns = ["body", *chosen]
    # An ordered write takes its topic from the option, too.
    if "shardingKey" in chosen and rng.random() < 0.5 and "topic" in plan.options:
        plan.options["ordered"] = "true"
    for number in range(rng.choice((0, 1, 40, 300))):
        body: bytes | None = b"%d:" % number + rng.randbytes(rng.choice((0, 10, 300)))
        if plan.invalid_allowed and rng.random() < 0.1:
            body = rng.choice((None, b""))
        names = rng.sample(("colour", "grün", "a b", "n"), rng.randint(0, 3))
        key = None if rng.random() < 0.2 and "ordered" not in plan.options else f"key-{rng.randrange(7)}"
        plan.rows.append(
            (
                number,
                body,
                rng.choice((None, "red", "a b", "grün")),
                f"k{number}" if body is None or not body or rng.random() < 0.8 else None,
                {name: f"{rng.randrange(5)} {name}" for name in names} if rng.random() < 0.9 else None,
                key,
                rng.choice((None, 0, -1, 7)),
                rng.choice(plan.topics),
            )
        )


def _choose_steps(rng: Random, plan: WritePlan) -> None:
    def add(text: str, step: Callable[[DataFrame], DataFrame]) -> None:
        plan.said.append(text)
        plan.steps.append(step)

    number = rng.choice((1, 3, 8))
    choices: list[Callable[[], None]] = [
        lambda: add(f"repartition {number}", lambda frame: frame.repartition(number)),
        lambda: add("coalesce 1", lambda frame: frame.coalesce(1)),
        lambda: add("cache", lambda frame: frame.cache()),
        lambda: add("only few rows", lambda frame: frame.where("id < 5")),
        lambda: add("union with itself", lambda frame: frame.union(frame)),
        lambda: add("join with every second id", _joined),
        lambda: add("order by keys", lambda frame: frame.orderBy("keys", F.desc("id"))),
    ]
    for step in rng.sample(choices, rng.randint(0, 3)):
        step()
    if "ordered" in plan.options and rng.random() < 0.7:
        plan.in_order = True
        add(
            f"order within {number} partitions",
            lambda frame: frame.repartition(number, "shardingKey").sortWithinPartitions("id"),
        )


def _joined(frame: DataFrame) -> DataFrame:
    ids = frame.select("id").distinct().where("id % 2 = 0")
    return frame.join(ids, "id")
