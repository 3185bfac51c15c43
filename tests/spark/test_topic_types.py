"""Every type of topic: written in a batch and in a stream, over both protocols, and read by this source and by Java.

docs/compatibility.md has the results as a table, which `test_the_documentation_has_the_table` compares with them.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

from rocketmq_spark.admin import Admin
from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import OptionError
from tests.support.cluster import EVERY_TYPE, SharedCluster, mqadmin, started
from tests.support.java import Java
from tests.support.local_mode import local_mode_proxy
from tests.support.processes import PATIENCE, wait_for
from tests.support.releases import cluster_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.integration]

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
BEGIN, END = "<!-- topic types: compared by tests/spark/test_topic_types.py -->\n", "<!-- end of topic types -->"
ROWS = 4


@dataclass(frozen=True)
class Kind:
    """A type of topic, and the rows for it: `columns` are expressions of ``id``, besides body and keys."""

    name: str
    rows: str
    create: Mapping[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    # What the driver's error says instead, by protocol; "source" for a read.
    refusals: Mapping[str, str] = field(default_factory=dict)
    static: bool = False


ONCE = {"delivery": "exactlyOnce", "transactionalId": "types"}
KINDS = {
    kind.name: kind
    for kind in (
        Kind("NORMAL", "any", {"message_type": "NORMAL"}),
        Kind("FIFO", "`shardingKey`", {"message_type": "FIFO"}, ("concat('s', id % 2) AS shardingKey",)),
        Kind("DELAY", "`delayMs`, `deliverTime`", {"message_type": "DELAY"}, ("300L AS delayMs",)),
        Kind(
            "TRANSACTION",
            "with `delivery=exactlyOnce`",
            {"message_type": "TRANSACTION"},
            options=ONCE,
            refusals={"gRPC": "delivery=exactlyOnce is not available over gRPC"},
        ),
        Kind("PRIORITY", "`priority`", {"message_type": "PRIORITY"}, ("CAST(id AS INT) AS priority",)),
        Kind("LITE", "`liteTopic`", {"message_type": "LITE"}, ("concat('lite-', id % 2) AS liteTopic",)),
        Kind(
            "MIXED",
            "of NORMAL, FIFO, DELAY",
            {"message_type": "MIXED"},
            ("if(id = 1, 's', null) AS shardingKey", "if(id = 2, 300L, null) AS delayMs"),
        ),
        Kind(
            "BatchCQ",
            "with `batchType=inner`",
            {"inner": True},
            options={"batchType": "inner"},
            refusals={"gRPC": "batchType=inner is not available over gRPC"},
        ),
        Kind("COMPACTION", "with `keys`", {"compaction": True}),
        Kind(
            "COMPACTION, deletions",
            "`keys` and no body",
            {"compaction": True},
            ("CAST(null AS STRING) AS body",),
            refusals={"gRPC": "body is null"},
        ),
        Kind(
            "static",
            "any",
            refusals={
                "remoting": r"writes to static \(logical\) topics are not supported",
                "source": r"it is a static \(logical\) topic, which this release can't read",
            },
            static=True,
        ),
    )
}


@dataclass
class Outcomes:
    """What was seen: the rows of each write, or the error; and the rows that each reader has found."""

    written: dict[tuple[str, str, str], int | Exception] = field(default_factory=dict)
    source: Counter[str] = field(default_factory=Counter)
    java: Counter[str] = field(default_factory=Counter)
    expected: Counter[str] = field(default_factory=Counter)
    topics: dict[str, str] = field(default_factory=dict)


Write = Callable[["SparkSession", Kind, Mapping[str, str], str, Path], None]


def rows_for(frame: DataFrame, kind: Kind, mark: str) -> DataFrame:
    given = {column.rpartition(" ")[2] for column in kind.columns}
    texts = {"body": f"concat('{mark}-', id) AS body", "keys": f"concat('{mark}-', id) AS keys"}
    return frame.selectExpr(*(text for name, text in texts.items() if name not in given), *kind.columns)


def write_batch(spark: SparkSession, kind: Kind, options: Mapping[str, str], mark: str, _: Path) -> None:
    writer = rows_for(spark.range(0, ROWS, 1, 1), kind, mark).write.format("rocketmq").mode("append").options(**options)
    (writer.option("writeId", "types") if "transactionalId" in options else writer).save()


def write_stream(spark: SparkSession, kind: Kind, options: Mapping[str, str], mark: str, folder: Path) -> None:
    rows = folder / "rows"
    if not rows.exists():
        spark.range(0, ROWS, 1, 1).write.parquet(str(rows))
    frame = rows_for(spark.readStream.schema("id BIGINT").parquet(str(rows)), kind, mark)
    writer = frame.writeStream.format("rocketmq").options(**options).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(folder / mark)).start()
    assert query.awaitTermination(int(PATIENCE))


WRITES: Mapping[str, Write] = {"batch": write_batch, "stream": write_stream}


def create(cluster: SharedCluster, kind: Kind, topic: str, folder: Path) -> None:
    if kind.static:
        brokers = ",".join(broker.name for broker in cluster.brokers)
        arguments = ("-n", cluster.name_server, "-t", topic, "-qn", "2", "-b", brokers)
        mqadmin(folder, "updateStaticTopic", *arguments)
        return
    with Admin(cluster.name_server, timeout=PATIENCE) as admin:
        admin.create_topic(topic, 2, **kind.create)


def outcomes_of(
    spark: SparkSession, cluster: SharedCluster, java: Java, folder: Path, kinds: Mapping[str, Kind]
) -> Outcomes:
    """Create a topic of each kind, write to it in every way, and read all topics back."""
    run = uuid.uuid4().hex[:8]
    topics = {kind.name: f"type-{re.sub('[^A-Za-z]+', '-', kind.name)}-{run}" for kind in kinds.values()}
    found = Outcomes(topics=topics)
    servers = {"remoting": {"nameServer": cluster.name_server}}
    if cluster.endpoints:
        servers["gRPC"] = {"endpoints": cluster.endpoints}
    for kind in kinds.values():
        topic = topics[kind.name]
        create(cluster, kind, topic, folder)
        for protocol, server in servers.items():
            for kind_of_write, write in WRITES.items():
                mark = f"{topic}-{protocol}-{kind_of_write}"
                options = {**server, "topic": topic, **kind.options}
                if "transactionalId" in options:
                    options["transactionalId"] = mark
                try:
                    write(spark, kind, options, mark, folder)
                except (OptionError, PySparkException) as exc:
                    found.written[kind.name, protocol, kind_of_write] = exc
                else:
                    found.written[kind.name, protocol, kind_of_write] = ROWS
                    found.expected[topic] += ROWS
    read_back(spark, cluster, java, found, [topics[name] for name, kind in kinds.items() if not kind.static])
    for counter in (found.source, found.java, found.expected):
        named = Counter({kind.name: counter[topics[kind.name]] for kind in kinds.values()})
        counter.clear()
        counter.update(named)
    return found


def read(spark: SparkSession, cluster: SharedCluster, topics: Sequence[str]) -> Counter[str]:
    """Return the number of rows that the source finds in each topic."""
    reader = spark.read.format("rocketmq").option("nameServer", cluster.name_server)
    return Counter(row.topic for row in reader.option("subscribe", ",".join(topics)).load().select("topic").collect())


def read_back(
    spark: SparkSession, cluster: SharedCluster, java: Java, found: Outcomes, readable: Sequence[str]
) -> None:
    def all_are_readable() -> bool:
        found.source = read(spark, cluster, readable)
        return found.source.total() >= sum(found.expected[topic] for topic in readable)

    wait_for(all_are_readable)
    lines = java.read_topics(cluster.name_server, list(found.expected), found.expected.total(), within=PATIENCE)
    found.java = Counter(line["topic"] for line in lines)


@pytest.fixture(scope="module")
def outcomes(
    spark: SparkSession, cluster: SharedCluster, java: Java, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    from rocketmq_spark import register

    register(spark)
    return outcomes_of(spark, cluster, java, tmp_path_factory.mktemp("types"), KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_each_type_of_topic_is_written_and_read_or_refused(outcomes: Outcomes, name: str) -> None:
    for (kind, protocol, kind_of_write), result in outcomes.written.items():
        if kind == name:
            refusal = KINDS[name].refusals.get(protocol)
            if refusal is None:
                assert result == ROWS, (protocol, kind_of_write, result)
            else:
                assert re.search(refusal, str(result)), (protocol, kind_of_write, result)
    assert outcomes.java[name] == outcomes.expected[name]
    if "source" not in KINDS[name].refusals:
        assert outcomes.source[name] == outcomes.expected[name]


def test_a_static_topic_is_refused_by_a_read(spark: SparkSession, cluster: SharedCluster, outcomes: Outcomes) -> None:
    with pytest.raises(PySparkException, match=KINDS["static"].refusals["source"]):
        read(spark, cluster, [outcomes.topics["static"]])


def test_the_documentation_has_the_table(outcomes: Outcomes) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0] == table(outcomes)


# By server: the types that are not tested there, because it does not have them, or the driver refuses them.
OTHERS = {
    # Its consume queues count an inner batch as one message, and do not show those of compaction topics.
    "RocksDB": ("BatchCQ", "COMPACTION", "COMPACTION, deletions"),
    "local mode": (),
    "5.5.1": (),
    "5.3.3": ("PRIORITY", "LITE"),
    "5.2.0": ("PRIORITY", "LITE", "MIXED"),
    # It has no types, and delivers rows with delayMs at once.
    "4.9.7": tuple(name for name in KINDS if name not in ("NORMAL", "FIFO")),
}


@contextmanager
def other_servers(name: str) -> Iterator[SharedCluster]:
    if name == "RocksDB":
        properties = {**EVERY_TYPE, "storeType": "defaultRocksDB"}
        with started(LocalCluster(proxy=True, broker_properties=properties, start_timeout=PATIENCE)) as cluster:
            yield SharedCluster.of(cluster)
    elif name == "local mode":
        with local_mode_proxy(EVERY_TYPE) as shared:
            yield shared
    else:
        with cluster_of(name, broker_properties=EVERY_TYPE) as shared:
            yield shared


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_types_of_topics_on_other_servers(spark: SparkSession, java: Java, tmp_path: Path, name: str) -> None:
    kinds = {kind.name: kind for kind in KINDS.values() if kind.name not in (*OTHERS[name], "static")}
    with other_servers(name) as cluster:
        found = outcomes_of(spark, cluster, java, tmp_path, kinds)
    for (kind, protocol, kind_of_write), result in found.written.items():
        if protocol not in kinds[kind].refusals:
            assert result == ROWS, (kind, protocol, kind_of_write, result)
    assert found.source == found.java == found.expected


def table(outcomes: Outcomes) -> str:
    """Return the results as a table of the documentation."""
    lines = ["| topic | rows | batch and stream over remoting | over gRPC | read by this source | by Java's consumer |"]
    lines.append("|---|---|---|---|---|---|")
    for kind in KINDS.values():
        cells = [
            "yes"
            if all(outcomes.written[kind.name, protocol, kind_of_write] == ROWS for kind_of_write in WRITES)
            else "an error"
            for protocol in ("remoting", "gRPC")
        ]
        expected = outcomes.expected[kind.name]
        for counter in (outcomes.source, outcomes.java):
            cells.append("yes" if counter[kind.name] == expected else "an error")
        lines.append(f"| {kind.name} | {kind.rows} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
