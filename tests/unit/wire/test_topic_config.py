"""What a broker says of a topic."""

from __future__ import annotations

import pytest

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.wire.topic_config import decode_topic_attributes


@pytest.mark.parametrize(
    ("body", "attributes"),
    [
        (b'{"attributes":{"queue.type":"BatchCQ"},"perm":6}', {"queue.type": "BatchCQ"}),
        (b'{"attributes":{},"perm":6}', {}),
        (b'{"order":false,"perm":6}', {}),
    ],
)
def test_attributes_are_those_that_the_topic_was_made_with(body: bytes, attributes: dict[str, str]) -> None:
    assert decode_topic_attributes(body) == attributes


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"attributes":[]}', b'{"attributes":{"queue.type":1}}', b"\xff"])
def test_what_is_no_configuration_is_refused(body: bytes) -> None:
    with pytest.raises(RemotingCommandException, match="reading a"):
        decode_topic_attributes(body)
