"""Inner batches whose sender has chosen another number of offsets than they have messages, on real brokers."""

from __future__ import annotations

import json
import time
from queue import Queue

import pytest

from rocketmq_spark import read_arrow
from rocketmq_spark.errors import DataLossError, RemotingCommandException
from rocketmq_spark.model.message import Message, MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.protocol.remoting.records import encode_batch, encode_single
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import SharedCluster
from tests.support.processes import PATIENCE, wait_for

pytestmark = pytest.mark.integration

# INNER_NUM, sysFlag and number of messages of an inner batch, and the offsets that a broker gives it.
HOSTILE: list[tuple[str | None, int, int, int]] = [
    (None, 0xC0, 5, 1),
    ("1", 0xC0, 5, 1),
    ("0", 0xC0, 2, 1),
    ("3", 0xC0, 5, 3),
    ("+5", 0xC0, 3, 5),
    ("0000000003", 0xC0, 3, 3),
    ("3", 0x80, 1, 3),
]


def test_two_reads_of_hostile_inner_batches_give_the_same_rows(cluster: SharedCluster, topic: str) -> None:
    broker = cluster.brokers[0]
    queue = MessageQueue(topic, broker.name, 0)
    with RemotingTransport([cluster.name_server]) as transport:
        transport.create_topic(broker.address, topic, 1, 6, PATIENCE, attributes="+queue.type=BatchCQ")

        def send(body: bytes, sys_flag: int = 0, **properties: str) -> int:
            outcomes = Queue[SendOutcome]()
            encoded = encode_single(Message(topic, body, 0, properties), sys_flag)
            born = int(time.time() * 1000)
            request = SendRequest(encoded, queue, broker.address, "hostile", "TBW102", 4, born)
            transport.send(request, PATIENCE, outcomes.put)
            outcome = outcomes.get(timeout=PATIENCE)
            assert outcome.error is None
            return outcome.queue_offset

        end = send(b"first") + 1
        damaged = set[int]()
        for value, sys_flag, items, count in HOSTILE:
            body = encode_batch([Message(topic, b"item %d" % number) for number in range(items)])
            number = {} if value is None else {"INNER_NUM": value}
            assert send(body, sys_flag, ZINNER_NUM="4", **number) == end
            end += count
            if (items if sys_flag == 0xC0 else 1) != count:
                damaged.add(end - 1)
            assert send(b"between") == end
            end += 1
        wait_for(lambda: transport.max_offset(queue, broker.address, PATIENCE) == end)

        def read(start: int, stop: int, **options: str) -> dict[int, bytes]:
            """Return the bodies of a range by offset; an unreadable range has its first one."""
            spans = {"startingOffsets": start, "endingOffsets": stop}
            texts = {name: json.dumps({topic: {broker.name: {"0": at}}}) for name, at in spans.items()}
            table = read_arrow(topic, nameServer=cluster.name_server, **texts, **options).read_all()
            offsets = table["queueOffset"].to_pylist()
            assert sorted(set(offsets)) == offsets
            return dict(zip(offsets, table["body"].to_pylist(), strict=True))

        expected = read(0, end, onUnreadable="skip")
        for start in range(end):
            rows = {offset: body for offset, body in expected.items() if offset >= start}
            assert read(start, end, onUnreadable="skip") == rows
            if start in damaged:
                with pytest.raises(RemotingCommandException, match=rf"{queue}, .* {start} cannot .*onUnreadable=skip"):
                    read(start, start + 1)
        # A broker gives such a record an offset, and does not list it.
        assert send(b"x", 0xC0, INNER_NUM="-3") == end
        assert send(b"last") == end + 1
        wait_for(lambda: transport.max_offset(queue, broker.address, PATIENCE) == end + 2)
        for start in (end - 1, end):
            with pytest.raises(DataLossError, match=rf"messages {end} to {end} of {queue} are not there"):
                read(start, end + 2)
            assert end + 1 in read(start, end + 2, failOnDataLoss="false")
