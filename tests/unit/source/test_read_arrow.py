"""`read_arrow`: reads of a fake cluster without Spark."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rocketmq_spark import Message, Producer, read_arrow
from rocketmq_spark.arrow.read_columns import arrow_schema_of, column_names
from rocketmq_spark.errors import DataLossError, OptionError, ReadError, SchemaError
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.testing import FakeCluster, Reply

ROWS = [f"row-{number:03}" for number in range(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(brokers=2, topics={"orders": 2, "empty": 1}) as fake:
        table = pa.table({"body": ROWS, "tags": ["even" if n % 2 == 0 else "odd" for n in range(300)], "keys": ROWS})
        with Producer("feed", name_server=fake.name_server) as producer:
            producer.send_arrow(table, "orders", batchBytes="1k")
            producer.send(Message.of("orders", b"last", properties={"own": "1"}))
        yield fake


def test_all_messages_are_read_with_the_columns_of_spark(cluster: FakeCluster) -> None:
    table = read_arrow("orders", nameServer=cluster.name_server).read_all()
    assert table.schema == arrow_schema_of(column_names())
    assert sorted(table["body"].to_pylist()) == sorted([*(row.encode() for row in ROWS), b"last"])
    (last,) = table.filter(pc.equal(table["body"], b"last")).to_pylist()
    assert ("own", "1") in last["properties"]
    assert (last["topic"], last["tags"]) == ("orders", None)


def test_an_option_of_none_is_not_given(cluster: FakeCluster) -> None:
    server: Any = {"nameServer": cluster.name_server}
    assert read_arrow("orders", **server, subExpression=None, endingOffsets=None).read_all().num_rows == 301


def test_brokers_that_one_name_server_lacks_are_read() -> None:
    with FakeCluster(brokers=2, name_servers=2, topics={"orders": 1}) as fake:
        with Producer("feed", name_server=fake.name_server) as producer:
            producer.send_arrow(pa.table({"body": ROWS}), "orders", batchBytes="1k")
        # As after its restart: brokers register again within 30 s.
        restarted = fake.name_servers[0]
        whole = restarted.route("orders")
        assert whole is not None
        for listed in (["broker-0"], ["broker-1"], []):
            restarted.routes["orders"] = whole.only(listed)
            every: tuple[dict[str, Any], ...] = ({}, {"requireBrokers": 2})
            for options in every:
                assert read_arrow("orders", nameServer=fake.name_server, **options).read_all().num_rows == 300
        fake.name_servers[1].routes["orders"] = restarted.routes["orders"] = whole.only(["broker-1"])
        assert 0 < read_arrow("orders", nameServer=fake.name_server).read_all().num_rows < 300
        with pytest.raises(ReadError, match=r"requireBrokers=broker-0: .* list broker-1, and not broker-0"):
            read_arrow("orders", nameServer=fake.name_server, requireBrokers="broker-0")


@pytest.mark.parametrize("lists_brokers", [True, False])
def test_acting_master_counts_as_the_slave_that_it_is(caplog: pytest.LogCaptureFixture, *, lists_brokers: bool) -> None:
    with FakeCluster(slaves=1, topics={"orders": 1}) as fake:
        fake.name_servers[0].support_acting_master = True
        with Producer("feed", name_server=fake.name_server) as producer:
            producer.send(Message.of("orders", b"1"))
        options: dict[str, Any] = {"nameServer": fake.name_server, "readTimeoutMs": 1_000, "pullTimeoutMs": 200}
        assert read_arrow("orders", **options).read_all().num_rows == 1
        assert caplog.text == ""
        # Its copy may end before the last acknowledged message, so a read waits for the master first.
        fake.kill("broker-0")
        if not lists_brokers:
            fake.name_servers[0].always[RequestCode.GET_BROKER_CLUSTER_INFO] = Reply.code(3)
        assert read_arrow("orders", **options).read_all()["body"].to_pylist() == [b"1"]
        slave = fake.slaves["broker-0"][0].address
        assert f"has not answered for readTimeoutMs=1000: the offsets of its slave {slave} count" in caplog.text
        assert ("so listed masters count as slaves" in caplog.text) is not lists_brokers
        # A master whose topic is closed to writers stays a master.
        caplog.clear()
        fake.brokers["broker-0"].settings.permission = 4
        fake.restart("broker-0")
        fake.name_servers[0].always.clear()
        assert read_arrow("orders", **options).read_all().num_rows == 1
        assert caplog.text == ""


def test_rows_of_a_queue_are_in_order(cluster: FakeCluster) -> None:
    table = read_arrow("orders", columns=["brokerName", "queueId", "queueOffset"], nameServer=cluster.name_server)
    last: dict[tuple[str, int], int] = {}
    for row in table.read_all().to_pylist():
        queue = row["brokerName"], row["queueId"]
        assert row["queueOffset"] == last.get(queue, -1) + 1
        last[queue] = row["queueOffset"]
    assert len(last) == 4


def test_options_are_those_of_a_batch_read(cluster: FakeCluster) -> None:
    server = {"nameServer": cluster.name_server}
    odd = read_arrow(subscribe="orders", subExpression="odd", columns=["tags"], **server).read_all()
    assert odd.num_rows == 150
    assert set(odd["tags"].to_pylist()) == {"odd"}
    assert "properties" not in read_arrow("orders", includeProperties=False, **server).schema.names
    assert read_arrow("orders", onUnreadable="raw", **server).schema.names[-1] == "unreadable"


def test_doubtful_options_are_logged(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    assert read_arrow("orders", nameServer=cluster.name_server, startingTimestamp=1_700_000_000).read_all().num_rows
    assert "startingTimestamp is 1700000000, or 1970-01-20 16:13:20.000 UTC: it looks like seconds" in caplog.text


def test_empty_topic_is_a_table_without_rows(cluster: FakeCluster) -> None:
    assert read_arrow("empty", columns=["body"], nameServer=cluster.name_server).read_all().num_rows == 0


@pytest.mark.parametrize(
    "given", [{}, {"subExpression": "none"}, {"failOnDataLoss": "false"}], ids=["plain", "filter", "not failing"]
)
def test_other_messages_than_those_of_the_plan_are_lost_data(
    caplog: pytest.LogCaptureFixture, given: dict[str, str]
) -> None:
    with FakeCluster(topics={"orders": 1}) as fake, Producer("feed", name_server=fake.name_server) as producer:
        producer.send_arrow(pa.table({"body": ROWS[:10]}), "orders")
        reader = read_arrow("orders", nameServer=fake.name_server, **given)
        (broker,) = fake.brokers.values()
        broker.storage.store.truncate(0)
        # Store times are milliseconds.
        time.sleep(0.01)
        producer.send_arrow(pa.table({"body": ROWS[:20]}), "orders")
        text = r"queue orders/broker-0/0 has another message at offset 9 than the query has planned to read"
        if given.get("failOnDataLoss") == "false":
            assert reader.read_all().num_rows == 10
            assert re.search(text, caplog.text)
        else:
            with pytest.raises(DataLossError, match=text):
                reader.read_all()


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (["payload"], "no column payload; its columns are topic, body"),
        (["body", "body"], "each once"),
        ([], "at least one column"),
    ],
)
def test_columns_that_a_read_does_not_have_are_refused(columns: list[str], reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        read_arrow("orders", columns=columns, nameServer="ns:9876")


def test_malformed_options_are_refused() -> None:
    with pytest.raises(OptionError, match="nameServr"):
        read_arrow("orders", nameServr="ns:9876")


def test_reading_needs_no_spark() -> None:
    code = "import sys, rocketmq_spark; rocketmq_spark.read_arrow; print('pyspark' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
