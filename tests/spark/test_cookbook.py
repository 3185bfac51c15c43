"""The recipes of docs/cookbook.md do what the page says, also in a second run and after a crash."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession

import rocketmq_spark
from rocketmq_spark import Producer
from rocketmq_spark.errors import ClusterError
from rocketmq_spark.spark.report import Metrics
from tests.support.cluster import SharedCluster, unavailable
from tests.support.java import WITHIN, Java, un64
from tests.support.postgres import postgres
from tests.support.processes import NEEDS_LIMITS, PATIENCE, wait_for
from tests.support.recipes import ENDS, Recipe, ends_of
from tests.support.writes import messages_in

pytestmark = [pytest.mark.spark, pytest.mark.integration]


class Kitchen:
    """The topics of a recipe: sends its input, and reads its output."""

    def __init__(self, spark: SparkSession, cluster: SharedCluster, topic: str, folder: Path) -> None:
        self.spark = spark
        self.cluster = cluster
        self.topic = topic
        self.folder = folder

    def recipe(self, name: str, prefix: str, *suffixes: str, places: Mapping[str, str] | None = None) -> Recipe:
        """Return a recipe, and create its topics: `prefix`, and the same with each of `suffixes`."""
        with rocketmq_spark.Admin(self.cluster.name_server, timeout=PATIENCE) as admin:
            for topic in (prefix, *(f"{prefix}-{suffix}" for suffix in suffixes)):
                admin.create_topic(self.name(topic), 2, update=True)
        addresses = {"127.0.0.1:9876": self.cluster.name_server, **(places or {})}
        return Recipe(name, addresses, {prefix: self.name(prefix)}, self.folder)

    def name(self, topic: str) -> str:
        return f"{self.topic}-{topic}"

    def send(
        self, topic: str, bodies: Iterable[object], *, options: Mapping[str, str] | None = None, **columns: Any
    ) -> None:
        """Send messages, and return when readers see them. A body that is no text is sent as JSON."""
        where = self.name(topic)
        texts = [body if isinstance(body, str) else json.dumps(body) for body in bodies]
        before = messages_in(self.cluster.name_server, where)
        with Producer("cookbook", name_server=self.cluster.name_server, send_msg_timeout=120_000) as producer:
            producer.send_arrow(pa.table({"body": texts, **columns}), where, **(options or {}))
        wait_for(lambda: messages_in(self.cluster.name_server, where) == before + len(texts))

    def read(self, *topics: str) -> DataFrame:
        return self.load(",".join(map(self.name, topics)))

    def load(self, names: str) -> DataFrame:
        return self.spark.read.format("rocketmq").options(nameServer=self.cluster.name_server).load(names)

    def rows(self, *topics: str) -> list[Row]:
        return self.read(*topics).collect()

    def bodies(self, *topics: str) -> Counter[str]:
        return Counter(bytes(row.body).decode() for row in self.rows(*topics))


@pytest.fixture
def kitchen(spark: SparkSession, metrics: Metrics, cluster: SharedCluster, topic: str, tmp_path: Path) -> Kitchen:
    return Kitchen(spark, cluster, topic[-60:], tmp_path)


@NEEDS_LIMITS
def test_dead_letters_go_back_once_and_are_recorded(kitchen: Kitchen, java: Java) -> None:
    recipe = kitchen.recipe("Reprocess dead letters", "orders")
    orders = kitchen.name("orders")
    group = f"{orders}-consumers"
    # The third was sent back three times before. The condition of the recipe leaves the fourth out.
    tags, keys = ["dead", "dead", "dead", "obsolete", "good", "later"], ["a", "b", "c", "d", "e", "f"]
    properties = [[("shop", "north")], [("SENT_BACK_TIMES", "2")], [("SENT_BACK_TIMES", "3")], [], [], []]
    pairs = pa.array(properties, pa.map_(pa.string(), pa.string()))
    bodies = [f"order {key}" for key in keys]
    kitchen.send("orders", bodies, keys=keys, shardingKey=keys, tags=tags, properties=pairs)
    request = {"nameServer": kitchen.cluster.name_server, "topic": orders, "group": group, "count": len(keys)}
    consumed = java.run("DeadLetters", [{**request, "withinMs": int(WITHIN * 1000)}])
    assert sorted(un64(line["body"]).decode() for line in consumed) == bodies
    letters = kitchen.load(f"%DLQ%{group}").collect()
    assert sorted(letter["keys"] for letter in letters) == keys[:4]

    names = recipe.run(0, spark=kitchen.spark)
    recipe.repeat_last_micro_batch(f"sent-back-{group}")
    recipe.run(0, 1, spark=kitchen.spark)
    assert kitchen.bodies("orders") == Counter(bodies + bodies[:2])
    copies = {row["keys"]: row for row in kitchen.rows("orders") if "SENT_BACK_FROM" in row.properties}
    assert copies["a"].properties["shop"] == "north"
    for letter in letters:
        if letter["keys"] in copies:
            copy = copies[letter["keys"]]
            assert (copy.tags, copy.properties["__SHARDINGKEY"], copy.reconsumeTimes) == ("dead", letter["keys"], 0)
            assert "RETRY_TOPIC" not in copy.properties
    record = kitchen.spark.read.parquet(str(kitchen.folder / "sent-back-record")).collect()
    places = {
        (letter["keys"], f"{letter.topic}/{letter.brokerName}/{letter.queueId}/{letter.queueOffset}")
        for letter in letters
    }
    assert len(record) == 2
    assert {(row["keys"], row.deadLetter) for row in record} < places
    assert {(row["keys"], row.times) for row in record} == {("a", 1), ("b", 3)}
    originals = {row.offsetMsgId for row in kitchen.rows("orders") if row["keys"] in ("a", "b")}
    assert {row.originalMessageId for row in record} < originals
    # The last one waits in the retry topic, and the group is gone.
    wait_for(lambda: messages_in(kitchen.cluster.name_server, f"%RETRY%{group}") == 1)
    for _ in range(2):
        recipe.run(2, **names)
        assert kitchen.bodies("orders") == Counter([*bodies, *bodies[:2], bodies[5]])


def change(kind: str, *rows: dict[str, str], old: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a message of Canal."""
    rest = {"database": "shop", "table": "customers", "pkNames": ["id"], "isDdl": False, "es": 1, "ts": 2}
    return {"type": kind, "data": list(rows), "old": [old] if old else None, **rest}


def customer(number: int, name: str, balance: str = "1.50") -> dict[str, str]:
    return {"id": str(number), "name": name, "balance": balance}


# In the order in which the database made them.
CANAL: list[object] = [
    change("INSERT", customer(1, "ada"), customer(2, "bob"), customer(3, "cid")),
    change("UPDATE", customer(1, "eve", "2.00"), old={"name": "ada", "balance": "1.50"}),
    change("DELETE", customer(2, "bob")),
    change("UPDATE", customer(4, "cid"), old={"id": "3"}),
    {"type": "ALTER", "isDdl": True, "data": None, "sql": "ALTER TABLE customers ADD COLUMN city text"},
]
DEBEZIUM: list[object] = [
    {"op": "c", "before": None, "after": {"id": 5, "name": "dan", "balance": "7"}},
    {"schema": {}, "payload": {"op": "d", "before": {"id": 1, "name": "eve"}, "after": None}},
    {"payload": {"op": "u", "before": {"id": 4, "name": "cid"}, "after": {"id": 6, "name": "cid", "balance": 3}}},
    "no JSON",
]


def test_changes_are_applied_in_order_and_once(kitchen: Kitchen) -> None:
    recipe = kitchen.recipe("Apply change data", "customer-changes")
    one_queue = {"ordered": "true"}

    def customers(version: int) -> set[tuple[int, str, str]]:
        table = kitchen.spark.read.parquet(str(kitchen.folder / "customers" / f"version={version}"))
        return {(row.id, row["name"], str(row.balance)) for row in table.collect()}

    kitchen.send("customer-changes", CANAL, shardingKey=["customers"] * len(CANAL), options=one_queue)
    names = recipe.run(0, 1, spark=kitchen.spark)
    assert customers(0) == {(1, "eve", "2.00"), (4, "cid", "1.50")}
    kitchen.send("customer-changes", DEBEZIUM, shardingKey=["customers"] * len(DEBEZIUM), options=one_queue)
    recipe.run(1, **names)
    recipe.repeat_last_micro_batch("customers-checkpoint")
    recipe.run(1, **names)
    assert customers(1) == {(5, "dan", "7.00"), (6, "cid", "3.00")}
    rejected = kitchen.spark.read.parquet(str(kitchen.folder / "customers-rejected"))
    assert [row.queueOffset for row in rejected.orderBy("queueOffset").collect()] == [4, 8]


def test_every_span_of_a_topic_is_in_the_files_once(kitchen: Kitchen) -> None:
    recipe = kitchen.recipe("Lake: Parquet", "orders")
    first, second = [f"first {n}" for n in range(20)], [f"second {n}" for n in range(20)]

    def send(bodies: list[str]) -> None:
        kitchen.send("orders", bodies, shardingKey=["one queue"] * len(bodies))

    send(first)
    send(second)
    names = recipe.run(0, spark=kitchen.spark)  # It loads yesterday, when no message was stored

    def stored() -> Counter[str]:
        return Counter(bytes(row.body).decode() for row in kitchen.spark.read.parquet(names["lake"]).collect())

    assert stored() == Counter()
    rows = kitchen.rows("orders")
    begin, end = min(row.storeTimestamp for row in rows), max(row.storeTimestamp for row in rows)
    middle = min(row.storeTimestamp for row in rows if bytes(row.body).startswith(b"second"))
    begin, middle, end = (time.replace(tzinfo=timezone.utc) for time in (begin, middle, end))
    for _ in range(2):
        names["load_time"](begin, middle - begin)
        assert stored() == Counter(first)
    for _ in range(2):
        names["load_time"](middle, end - middle + timedelta(milliseconds=1))
        assert stored() == Counter(first + second)
    assert names["gaps"]().collect() == []
    # Load a gap by its offsets, twice.
    send(third := [f"third {n}" for n in range(20)])
    send(fourth := [f"fourth {n}" for n in range(20)])
    rows = kitchen.rows("orders")
    begin = min(row.storeTimestamp for row in rows if bytes(row.body).startswith(b"fourth"))
    begin = begin.replace(tzinfo=timezone.utc)
    names["load_time"](begin, timedelta(hours=1))
    assert stored() == Counter(first + second + fourth)
    assert names["gaps"]().count() == 1
    ends = json.dumps(ends_of(kitchen.cluster.name_server, kitchen.name("orders")))
    recipe = kitchen.recipe("Lake: Parquet", "orders", places={ENDS: ends})
    for _ in range(2):
        recipe.run(1, **names)
        assert stored() == Counter(first + second + third + fourth)
    assert names["gaps"]().collect() == []


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """The address of an empty database."""
    with contextlib.ExitStack() as stack:
        try:
            address = stack.enter_context(postgres())
        except ClusterError as exc:
            unavailable(exc)
        yield address


@NEEDS_LIMITS
def test_newest_rows_are_upserted_once(kitchen: Kitchen, database: str) -> None:
    recipe = kitchen.recipe("Upsert to PostgreSQL", "orders", places={"127.0.0.1:5432": database})

    def query(statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(f"postgresql://postgres@{database}/postgres") as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def order(number: int, customer: str, amount: float) -> dict[str, Any]:
        return {"id": number, "customer": customer, "amount": amount}

    def send(*orders: object) -> None:
        kitchen.send("orders", orders, shardingKey=["all"] * len(orders), options={"ordered": "true"})

    send(order(1, "ada", 1), order(2, "bob", 2), "no JSON", order(1, "ada", 3))
    recipe.run(spark=kitchen.spark)
    every = "SELECT id, customer, amount FROM orders ORDER BY id"
    assert query(every) == [(1, "ada", 3), (2, "bob", 2)]
    # The transaction fails in the middle.
    query("ALTER TABLE orders ADD CONSTRAINT small CHECK (amount < 100)")
    send(order(3, "cid", 3), order(1, "ada", 500))
    with pytest.raises(PySparkException, match="violates check constraint"):
        recipe.run(spark=kitchen.spark)
    assert query(every) == [(1, "ada", 3), (2, "bob", 2)]
    query("ALTER TABLE orders DROP CONSTRAINT small")
    recipe.run(spark=kitchen.spark)
    assert query(every) == [(1, "ada", 500), (2, "bob", 2), (3, "cid", 3)]
    # The driver dies after the transaction. The repeated micro-batch changes nothing.
    recipe.repeat_last_micro_batch("orders-to-postgres")
    query("UPDATE orders SET amount = 9 WHERE id = 1")
    recipe.run(spark=kitchen.spark)
    assert query(every) == [(1, "ada", 9), (2, "bob", 2), (3, "cid", 3)]
    [(place, body)] = query("SELECT place, body FROM rejected_orders")
    assert (place.split("/")[0], place.split("/")[3], bytes(body)) == (kitchen.name("orders"), "2", b"no JSON")


def at(hour: int, minute: int) -> str:
    return f"2026-11-28T{hour:02}:{minute:02}:00Z"


def test_complete_windows_go_to_the_topic_once(kitchen: Kitchen) -> None:
    recipe = kitchen.recipe("Aggregate to a topic", "clicks", "by-user")
    ada, bob = {"user": "ada"}, {"user": "bob"}
    kitchen.send("clicks", [ada | {"time": at(8, 0)}, ada | {"time": at(8, 4)}, bob | {"time": at(8, 9)}, "no JSON"])
    recipe.run(spark=kitchen.spark)
    # The watermark is 07:59.
    assert kitchen.bodies("clicks-by-user") == Counter()
    kitchen.send("clicks", [ada | {"time": at(8, 1)}, bob | {"time": at(8, 19)}])
    recipe.run(spark=kitchen.spark)
    # The driver dies before the end of the micro-batch. A click is too late.
    recipe.repeat_last_micro_batch("clicks-by-user")
    kitchen.send("clicks", [ada | {"time": at(8, 2)}, bob | {"time": at(8, 19)}])
    recipe.run(spark=kitchen.spark)
    [window] = kitchen.rows("clicks-by-user")
    found = json.loads(bytes(window.body))
    assert (found["user"], found["count"], window["keys"]) == ("ada", 3, "ada/2026-11-28T08:00")
    assert found["start"].startswith("2026-11-28T08:00")


def test_reminders_come_later_unless_they_are_recalled(
    spark: SparkSession, metrics: Metrics, tuned: SharedCluster, topic: str, tmp_path: Path
) -> None:
    kitchen = Kitchen(spark, tuned, topic[-60:], tmp_path)
    recipe = kitchen.recipe("Delay and recall", "reminders")

    def give(*reminders: tuple[str, str, int, str]) -> None:
        now = datetime.now(timezone.utc)
        rows = [(key, customer, now + timedelta(seconds=due), text) for key, customer, due, text in reminders]
        frame = spark.createDataFrame(rows, "id string, customer string, due timestamp, text string")
        frame.createOrReplaceTempView("new_reminders")

    give(
        ("id-0", "customer-1", -3600, "at once"),
        ("id-2", "customer-17", 3600, "recalled"),
        ("id-3", "customer-17", -3600, "not recalled"),
    )
    names = recipe.run(spark=spark)
    assert (names["recalled"], names["missed"]) == (["id-2 customer-17"], [])
    stored = Counter(["at once", "not recalled"])
    others = kitchen.recipe("Delay and recall", "reminders", places={"customer-17": "customer-1"})
    for seconds in (8, 80, 400):
        give(("id-1", "customer-1", seconds, "soon"))
        recipe.run(0, spark=spark)
        stored["soon"] += 1
        wait_for(lambda: messages_in(tuned.name_server, kitchen.name("reminders")) == stored.total())
        # A slow writer stores it after its time. It has no handle then.
        if missed := others.run(1, spark=spark)["missed"]:
            break
    assert kitchen.bodies("reminders") == stored
    # The time of this one has come.
    [(keys, error)] = missed
    assert keys == "id-1 customer-1"
    assert "recall failed" in error


def test_rows_go_to_the_topics_of_their_content(kitchen: Kitchen) -> None:
    recipe = kitchen.recipe("Fan out by content", "orders", "eu", "us", "other")
    targets = ("orders-eu", "orders-us", "orders-other")
    orders = [{"id": n, "region": region} for n, region in enumerate(("eu", "us", "eu", "mars"))]
    kitchen.send("orders", [*orders, "no JSON"], keys=[f"k{n}" for n in range(5)])
    names = recipe.run(0, spark=kitchen.spark)
    expected = kitchen.bodies("orders")
    assert [kitchen.read(target).count() for target in targets] == [2, 1, 2]
    assert kitchen.bodies(*targets) == expected
    # The driver dies before the end of the micro-batch: the rows are stored again, and `dedupe` finds them.
    recipe.repeat_last_micro_batch("orders-fan-out")
    recipe.run(0, spark=kitchen.spark)
    assert kitchen.bodies(*targets) == Counter(dict.fromkeys(expected, 2))
    assert rocketmq_spark.dedupe(kitchen.read(*targets)).count() == len(expected)
    # The variant without repeats.
    recipe.run(1, **names)
    assert kitchen.bodies(*targets) == Counter(dict.fromkeys(expected, 3))
    recipe.repeat_last_micro_batch("orders-fan-out-once")
    recipe.run(1, **names)
    assert kitchen.bodies(*targets) == Counter(dict.fromkeys(expected, 3))
