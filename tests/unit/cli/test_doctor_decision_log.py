"""The doctor's check of a decision log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from rocketmq_spark.admin.admin import Admin
from rocketmq_spark.cli.doctor.decision_log import check_decision_log
from rocketmq_spark.cli.doctor.machine import FAILED, OK, WARNING
from rocketmq_spark.deliveries.log.keys import NO_KEYS, LogKeys
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.testing import FakeCluster

TOPIC = "decisions"
QUEUE = MessageQueue(TOPIC, "a", 0)
OLD, NEW = "the-old-key-of-the-log", "the-new-key-of-the-log"


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    with FakeCluster(["a"], topics={TOPIC: 1, "orders": 1}) as cluster:
        yield cluster


def store(fake: FakeCluster, job: str, keys: LogKeys = NO_KEYS) -> None:
    body = keys.sealed(json.dumps({"id": job}).encode(), job, QUEUE, 0)
    put(fake, body)


def put(fake: FakeCluster, body: bytes) -> None:
    broker = fake.brokers["a"]
    with broker.lock:
        broker.storage.store.put(QUEUE, [Message(TOPIC, body)], time.time())


def found(fake: FakeCluster, key: str | None = None, topic: str = TOPIC) -> list[tuple[str, str, str]]:
    with Admin(fake.name_server) as admin:
        return [(one.state, one.finding, one.fix) for one in check_decision_log(admin, topic, key)]


def test_records_of_several_jobs_without_a_signature_are_a_warning(fake: FakeCluster) -> None:
    for body in (b"", b"\xff", b"[]", b'{"id": 7}', b"[" * 100_000):
        put(fake, body)
    assert found(fake) == []
    store(fake, "job-1")
    # An effectively-once log of the same job.
    store(fake, "job-1#orders")
    assert found(fake) == [(OK, "its newest records are of transactionalId job-1, not signed", "")]
    store(fake, "job-2\x1b[2J")
    ((state, finding, fix),) = found(fake)
    assert state == WARNING
    assert "2 transactionalIds without a signature (job-1, job-2\\x1b[2J)" in finding
    assert "its own transactionTopic" in fix
    assert "transactionalKey" in fix


def test_the_key_that_signs_is_named_by_its_fingerprint(fake: FakeCluster) -> None:
    old, new = LogKeys.of(OLD.encode()), LogKeys.of(NEW.encode())
    for keys in (old, old, new, LogKeys.of(b"a-key-of-another-user")):
        store(fake, "job", keys)
    signs, other = new.signs, old.signs
    expected = f"key {signs} signs; key {signs}: 1 of the newest records, key {other}: 2 of the newest records"
    assert found(fake, f"{NEW},{OLD}") == [(OK, f"{expected}; another key: 1", "")]
    assert found(fake) == [(OK, "4 of the newest records are signed (give transactionalKey to check them)", "")]


def test_a_topic_that_does_not_exist_is_no_finding(fake: FakeCluster) -> None:
    assert found(fake, topic="no-such-topic") == []


def test_a_key_that_is_not_allowed_is_not_shown(fake: FakeCluster) -> None:
    ((state, finding, _),) = found(fake, "short")
    assert state == FAILED
    assert "at least 16 bytes" in finding
    assert "short" not in finding
