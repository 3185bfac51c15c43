"""Rows that break several rules at once: each is stored or reported once, whatever `onError` says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark import Producer
from rocketmq_spark.errors import InvalidRowError
from rocketmq_spark.testing import FakeCluster

# A delay that a broker rejects.
LATE = 10**12
TOO_LONG = "t" * 128

# The values of each column, those that fit the rules first. Whether a body or keys are needed depends on the topic.
TOPICS = (["plain", "compact"], [None, " ", "a.b", TOO_LONG, "SCHEDULE_TOPIC_XXXX", "\udcff"])
COLUMNS: dict[str, tuple[list[Any], list[Any]]] = {
    "tags": ([None, "a"], ["a|b", " "]),
    "keys": ([None, "", "k"], ["\x01"]),
    "shardingKey": ([None, ""], ["\x02"]),
    "properties": ([None, [("p", "1")]], [[("TAGS", "x")], [("p", None)]]),
    "flag": ([None, 0], [2**31]),
    "delayMs": ([None], [0, -1, LATE]),
    "queueId": ([None, 0], [99]),
    "brokerName": ([None, "broker-0"], []),
}
TYPES = {
    "body": pa.binary(),
    "properties": pa.map_(pa.string(), pa.string()),
    **dict.fromkeys(("flag", "delayMs", "queueId"), pa.int64()),
}


def any_of(values: tuple[list[Any], list[Any]]) -> st.SearchStrategy[Any]:
    return st.sampled_from(values[0] + values[1])


rows_ = st.lists(
    st.fixed_dictionaries(
        {"body": st.sampled_from([b"x", b"", None]), "topic": any_of(TOPICS)}
        | {name: any_of(values) for name, values in COLUMNS.items()}
    ),
    min_size=1,
    max_size=5,
)
columns_ = st.lists(st.sampled_from(list(COLUMNS)), unique=True)


def is_valid(row: dict[str, Any], *, over_grpc: bool) -> bool:
    """Return whether a row fits the rules; proxies choose the queues, and report no compaction topic."""
    row = row | {"queueId": None} if over_grpc else row
    if row["topic"] not in TOPICS[0] or any(row.get(name) in bad for name, (_, bad) in COLUMNS.items()):
        return False
    if row["topic"] == "compact" and not over_grpc:
        return bool(row.get("keys"))
    return bool(row["body"])


def column(name: str, values: list[Any]) -> pa.Array:
    if name in TYPES:
        return pa.array(values, TYPES[name])
    texts = [None if value is None else value.encode("utf-8", "surrogateescape") for value in values]
    # Spark's ``cast(binary as string)`` makes strings of any bytes.
    return pa.array(texts, pa.binary()).view(pa.string())


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(topics={"ns%plain": 1, "ns%dead": 1, "plain": 1, "dead": 1}, proxy=True) as cluster:
        cluster.create_topic("ns%compact", 1, attributes={"cleanup.policy": "COMPACTION"})
        cluster.create_topic("compact", 1)
        yield cluster


@pytest.mark.parametrize("over_grpc", [False, True], ids=["remoting", "grpc"])
@pytest.mark.parametrize("on_error", ["fail", "skip", "deadLetter"])
def test_a_row_with_any_faults_is_stored_or_reported_once(
    cluster: FakeCluster, on_error: str, *, over_grpc: bool
) -> None:
    prefix = "" if over_grpc else "ns%"
    server: dict[str, Any] = (
        {"endpoints": cluster.endpoints} if over_grpc else {"name_server": cluster.name_server, "namespace": "ns"}
    )
    options = {"onError": on_error} | ({"deadLetterTopic": "dead"} if on_error == "deadLetter" else {})

    def stored(topic: str) -> list[Any]:
        return cluster.messages(f"{prefix}{topic}")

    with Producer("mixed-faults", **server) as producer:

        @given(rows_, columns_, st.booleans())
        def check(rows: list[dict[str, Any]], columns: list[str], row_id: bool) -> None:
            names = ["body", "topic", *columns]
            for row in rows:
                if row["delayMs"] == LATE and (over_grpc or on_error == "fail"):
                    # The topics are not for delays over gRPC, and the error of a broker names no row.
                    row["delayMs"] = None
                if row["topic"] == TOO_LONG and not over_grpc:
                    row["topic"] = TOO_LONG[len("ns%") :]
            valid = [is_valid({name: row[name] for name in names}, over_grpc=over_grpc) for row in rows]
            table = pa.table({name: column(name, [row[name] for row in rows]) for name in names})
            before = {topic: len(stored(topic)) for topic in ("plain", "compact", "dead")}
            more = {"queueSelector": "column"} if "queueId" in columns and not over_grpc else {}
            if on_error == "fail" and not all(valid):
                with pytest.raises(InvalidRowError) as raised:
                    producer.send_arrow(table, rowId=row_id, **options, **more)
                assert raised.value.row == valid.index(False)
                return
            summary = producer.send_arrow(table, rowId=row_id, **options, **more)
            new = {topic: stored(topic)[count:] for topic, count in before.items()}
            wanted = Counter((row["topic"], row["body"] or b"") for row, fits in zip(rows, valid, strict=True) if fits)
            assert Counter((topic, one.body) for topic in TOPICS[0] for one in new[topic]) == wanted
            bad = [number for number, fits in enumerate(valid) if not fits]
            reported = summary.invalid_rows()
            if on_error == "deadLetter":
                assert sorted(int(letter.properties["DEAD_LETTER_row"]) for letter in new["dead"]) == bad
                assert sum(reported["dead_lettered_by_rule"].values()) == len(bad)
            elif on_error == "skip":
                assert (reported["skipped"], sum(reported["skipped_by_rule"].values())) == (len(bad), len(bad))

        check()
