"""The auditor finds each fault that is planted into a topic of a real broker, and nothing else."""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.producer.producer import Producer
from tests.support.auditor import Audit, Found, Row, run_audits
from tests.support.cluster import SharedCluster, create_topic
from tests.support.java import Java
from tests.support.processes import wait_for
from tests.support.reading import send
from tests.support.writes import messages_in

pytestmark = pytest.mark.integration

Sent = list[Row]


def rows_of(topic: str, brokers: tuple[str, str]) -> Sent:
    """Rows of four order keys, each in one of four queues. All have a property, tag and keys."""
    return [
        Row(
            topic,
            f"{topic}/{number}",
            body=b"body %d of %s" % (number, topic.encode()),
            tag=f"tag-{number % 3}",
            keys=f"{topic}/{number}",
            properties={"number": str(number), "colour": "blue"},
            queue=f"{brokers[number % 2]}/{number // 2 % 2}",
            order=f"{topic}/{number % 4}",
            unit=topic,
        )
        for number in range(16)
    ]


def changed(sent: Sent, number: int, **fields: Any) -> Sent:
    return [replace(row, **fields) if place == number else row for place, row in enumerate(sent)]


def swapped(sent: Sent, one: int, other: int) -> Sent:
    return [sent[{one: other, other: one}.get(place, place)] for place in range(len(sent))]


def with_properties(sent: Sent, number: int, **properties: str) -> Sent:
    return changed(sent, number, properties={**(sent[number].properties or {}), **properties})


def marked(sent: Sent) -> Sent:
    """Give each row its own mark, and all rows the same variant."""
    for number, row in enumerate(sent):
        sent = with_properties(sent, number, mark=row.row, variant="1")
    return sent


# What is sent instead of the rows, and what is found.
FAULTS: dict[str, tuple[Callable[[Sent], Sent], dict[str, int]]] = {
    "none": (lambda sent: sent, {}),
    "lost row": (lambda sent: sent[:3] + sent[4:], {"missing": 1}),
    "repeated row": (lambda sent: [*sent, sent[3]], {"repeated": 1}),
    "swapped bodies": (
        lambda sent: changed(changed(sent, 3, body=sent[5].body), 5, body=sent[3].body),
        {"bodyOfAnotherRow": 2},
    ),
    "changed byte": (lambda sent: changed(sent, 3, body=b"B" + (sent[3].body or b"")[1:]), {"changedBody": 1}),
    "other tag": (lambda sent: changed(sent, 3, tag="tag-1"), {"wrongTag": 1}),
    "lost tag": (lambda sent: changed(sent, 3, tag=None), {"wrongTag": 1}),
    "lost keys": (lambda sent: changed(sent, 3, keys=None), {"wrongKeys": 1}),
    "added key": (lambda sent: changed(sent, 3, keys=f"{sent[3].keys} k2"), {"wrongKeys": 1}),
    "lost property": (lambda sent: changed(sent, 3, properties={"number": "3"}), {"lostProperty": 1}),
    "added property": (
        lambda sent: changed(sent, 3, properties={**(sent[3].properties or {}), "new": "1"}),
        {"addedProperty": 1},
    ),
    "changed property": (
        lambda sent: changed(sent, 3, properties={"number": "3", "colour": "red"}),
        {"changedProperty": 1},
    ),
    "order of a key": (lambda sent: swapped(sent, 2, 6), {"order": 1}),
    "other queue": (
        lambda sent: changed(sent, 15, queue=sent[12].queue),
        {"wrongQueue": 1, "keyInTwoQueues": 1},
    ),
    "foreign row": (lambda sent: [*sent, replace(sent[0], keys="nobody", body=b"of nobody")], {"foreign": 1}),
}
MARKED: dict[str, tuple[Callable[[Sent], Sent], dict[str, int]]] = {
    "no marks of others": (marked, {}),
    "copy with another mark": (
        lambda sent: [*marked(sent), marked(changed(sent, 3, row="other"))[3]],
        {"repeated": 1, "marksDiffer": 1},
    ),
    "mark of another row": (
        lambda sent: with_properties(marked(sent), 3, mark=sent[5].row),
        {"markShared": 1},
    ),
    "two variants": (lambda sent: with_properties(marked(sent), 3, variant="2"), {"mixedVariants": 1}),
}
MARKS: dict[str, Any] = {"ignored": ("mark", "variant"), "marks": ("mark",), "variant": "variant:(.*)"}
# Faults of a broker: what is written to the files of queue 0, whose rows are 0, 4, 8 and 12.
SWAPPED = "two messages of a queue swapped"
SKIPPED = "message without a place in its queue"
# A message that the consumer cannot decode, before one that it can: both are none of the rows.
UNREADABLE = "unreadable message"
PLANTED = FAULTS | MARKED
EXPECTED = {name: expected for name, (_, expected) in PLANTED.items()}
EXPECTED |= {
    SWAPPED: {"logOrder": 1, "order": 1},
    SKIPPED: {"gap": 1, "missing": 1},
    "row in another topic": {"wrongTopic": 1, "keyInTwoQueues": 1},
    UNREADABLE: {"unreadable": 1, "foreign": 1},
}


def store(producer: Producer, sent: Sent) -> None:
    """Send the rows in their order, each to its topic and queue."""
    queues = [(row.queue or "").split("/") for row in sent]
    pairs = [list((row.properties or {}).items()) for row in sent]
    columns = {
        "topic": [row.topic for row in sent],
        "body": pa.array([row.body for row in sent], pa.binary()),
        "tags": pa.array([row.tag for row in sent], pa.string()),
        "keys": pa.array([row.keys for row in sent], pa.string()),
        "properties": pa.array(pairs, pa.map_(pa.string(), pa.string())),
        "brokerName": [broker for broker, _ in queues],
        "queueId": pa.array([int(number) for _, number in queues], pa.int32()),
    }
    producer.send_arrow(pa.table(columns), queueSelector="column")


def damage(cluster: SharedCluster, topic: str) -> None:
    """Swap the second and third message of a queue in the files of a running broker, or skip the second one.

    A broker maps its files into memory, so it sees the changes. A place in a queue has 20 bytes, and begins with the
    message's position in the commit log. Byte 20 of the message begins its offset.
    """
    store = Path(cluster.brokers[0].log).parent / "store"
    with (
        (store / "consumequeue" / topic / "0" / f"{0:020}").open("r+b", buffering=0) as places,
        (store / "commitlog" / f"{0:020}").open("r+b", buffering=0) as log,
    ):
        second, third = (os.pread(places.fileno(), 20, 20 * number) for number in (1, 2))
        os.pwrite(places.fileno(), third, 20)
        if SWAPPED.replace(" ", "-") in topic:
            os.pwrite(places.fileno(), second, 40)
            for number, place in ((1, third), (2, second)):
                os.pwrite(log.fileno(), number.to_bytes(8, "big"), int.from_bytes(place[:8], "big") + 20)


@pytest.fixture(scope="module")
def found(cluster: SharedCluster, java: Java, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What one run of the auditor finds for each fault."""
    one, other = (broker.name for broker in cluster.brokers)
    folder, audits, sent = tmp_path_factory.mktemp("audited").name, dict[str, Audit](), Sent()
    damaged: list[str] = []
    for name in EXPECTED:
        topic = create_topic(cluster, f"{folder}-{name.replace(' ', '-')}-{uuid.uuid4().hex[:8]}", "NORMAL")
        rows, topics = rows_of(topic, (one, other)), [topic]
        if name in PLANTED:
            sent += PLANTED[name][0](rows)
        elif name in (SWAPPED, SKIPPED):
            damaged.append(topic)
            sent += rows
        elif name == UNREADABLE:
            send(cluster, MessageQueue(topic, one, 0), [(b"not compressed", 0x301), (b"body", 0)])
            sent += rows
        else:
            topics.append(create_topic(cluster, f"{topic}-2", "NORMAL"))
            sent += changed(rows, 3, topic=topics[1])
        audits[name] = Audit(rows, topics, settles=0, within=0, **MARKS if name in MARKED else {})
    with Producer("planted", name_server=cluster.name_server) as producer:
        store(producer, sent)
    stored = Counter(row.topic for row in sent)
    wait_for(lambda: all(messages_in(cluster.name_server, topic) >= count for topic, count in stored.items()))
    for topic in damaged:
        damage(cluster, topic)
    return dict(zip(audits, run_audits(java, cluster.name_server, audits.values()), strict=True))


@pytest.mark.parametrize("fault", EXPECTED)
def test_auditor_finds_a_planted_fault_and_nothing_else(found: dict[str, Found], fault: str) -> None:
    assert found[fault].counts == EXPECTED[fault]


def test_findings_name_row_queue_and_offset(found: dict[str, Found]) -> None:
    with pytest.raises(AssertionError) as raised:
        found["changed byte"].check()
    (example,) = found["changed byte"].findings["changedBody"]["examples"]
    start, after = found["changed byte"].offsets[example["queue"]]
    assert start <= example["offset"] < after
    assert example["row"].endswith("/3")
    assert example["body"].startswith("Body 3")
    assert f"changedBody: 1\n  {json.dumps(example)}" in str(raised.value)
    found["changed byte"].check("changedBody")
    assert (found["none"].rows, found["none"].messages, found["none"].repeats) == (16, 16, 0)
