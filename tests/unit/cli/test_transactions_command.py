"""The command ``transactions``: open writes of a job on stdout, errors on stderr, exit codes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from rocketmq_spark.cli.app import main
from rocketmq_spark.model.message import Message
from rocketmq_spark.testing import FakeCluster
from tests.support.two_phase import ID, TOPIC, Driver, MovedClock, driver, visible

Capture = pytest.CaptureFixture[str]

ROWS = [f"row-{number}" for number in range(20)]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(topics={TOPIC: 2}) as fake:
        yield fake


@pytest.fixture
def job(cluster: FakeCluster) -> Iterator[Driver]:
    """A driver that died two minutes ago, when it had committed 7 of 20 rows."""
    clock = MovedClock(cluster)
    with driver(cluster, clock) as running:
        clock.ahead = -120
        running.open().decide_and_crash(ROWS, 7)
        clock.ahead = 0
        yield running


def test_open_writes_are_listed(cluster: FakeCluster, job: Driver, capsys: Capture) -> None:
    assert main(["transactions", ID, "-n", cluster.name_server]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["write", "query", "id", "round", "rows", "state", "recovered", "rows", "topics"] in lines
    assert ["write-1", "-", "1", "20", "open", "-", TOPIC] in lines
    assert visible(cluster).total() == 7


def test_finish_completes_open_writes(cluster: FakeCluster, job: Driver, capsys: Capture) -> None:
    command = ["transactions", ID, "-n", cluster.name_server, "--json"]
    assert main([*command, "--finish"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == [
        {
            "write": "write-1",
            "query_id": None,
            "round": 2,
            "rows": 20,
            "state": "finished",
            "recovered_rows": 13,
            "topics": [TOPIC],
        }
    ]
    assert captured.err == ""
    assert visible(cluster).total() == 20
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["other"], "topic rocketmq-spark-decisions has no decision of transactionalId=other: "),
        ([ID, "--transaction-topic", "missing"], "topic missing does not exist: "),
        ([ID, "--transaction-topic", "a b"], "option transaction_topic is 'a b', which is not allowed"),
    ],
)
def test_errors_are_one_line_with_exit_code_1(
    cluster: FakeCluster, job: Driver, capsys: Capture, arguments: list[str], text: str
) -> None:
    assert main(["transactions", *arguments, "-n", cluster.name_server]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"rocketmq-spark: {text}")
    assert captured.err.count("\n") == 1
    assert "missing" not in cluster.brokers["broker-0"].storage.topics


def test_a_record_with_control_characters_is_not_shown(cluster: FakeCluster, job: Driver, capsys: Capture) -> None:
    home = job.log.home
    assert home is not None
    broker = cluster.brokers[home.broker_name]
    with broker.lock:
        store = broker.storage.store
        forged = store.messages(home, 0, 100)[-1]
        body = forged.body.replace(b"write-1", rb"evil\u001b]0;title\u0007")
        assert body != forged.body
        store.put(home, [Message(home.topic, body, properties={"TAGS": forged.tags or ""})], time.time())
    for output in ([], ["--json"]):
        assert main(["transactions", ID, "-n", cluster.name_server, *output]) == 0
        out = capsys.readouterr().out
        assert "write-1" in out
        assert "\x1b" not in out
        assert "evil" not in out
