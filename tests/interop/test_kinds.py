"""A Java consumer reads the messages of a Java producer: the reference for tests of our reader."""

from __future__ import annotations

import pytest

from rocketmq_spark.protocol.compression import CompressionType
from tests.support.cluster import SharedCluster
from tests.support.java import Java, Line, create_topics, send_every_kind

pytestmark = pytest.mark.integration


def seen(sent: Line, found: Line) -> Line:
    """Return the fields of a read message that the producer set; brokers and clients add other properties."""
    properties = {name: found["properties"].get(name) for name in sent["properties"]}
    return {**{name: found[name] for name in sent}, "properties": properties}


def test_a_java_consumer_reads_every_kind_as_its_producer_has_sent_it(
    java: Java, cluster: SharedCluster, topic: str
) -> None:
    topics = create_topics(cluster, topic)
    sent = send_every_kind(java, cluster.name_server, topics)
    for message in sent["inner batch"]:
        # A Java consumer has none for what it has taken out of a record.
        message["offsetMsgId"] = None
    known = [message for messages in sent.values() for message in messages]
    lines = java.read_topics(cluster.name_server, topics, len(known))
    found = {line["msgId"]: line for line in lines}
    assert len(lines) == len(known)
    for message in known:
        assert seen(message, found[message["msgId"]]) == message
    flags = {kind: found[messages[0]["msgId"]]["sysFlag"] for kind, messages in sent.items()}
    for codec in CompressionType:
        # A consumer clears the bit that says "compressed", and leaves how.
        assert flags[codec.name] == codec.value
    assert (flags["transaction"], flags["inner batch"], flags["plain"]) == (0x8, 0xC0, 0)
    timer = found[sent["timer"][0]["msgId"]]
    # A broker counts in seconds.
    assert timer["storeTimestamp"] // 1000 >= int(timer["properties"]["TIMER_DELIVER_MS"]) // 1000
