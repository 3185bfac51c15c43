"""Decodes brokers' answers about consumer groups."""

from __future__ import annotations

import reprlib
from typing import Any

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.protocol.remoting.responses import loads_lenient


def decode_committed_offset(body: bytes, topic: str, group: str, queue_id: int) -> int | None:
    """Return a group's offset of a queue in a GET_ALL_CONSUMER_OFFSET answer, which has those of all groups."""
    doing = "reading the offsets of all groups"
    table = _object(loads_lenient(body), "offsetTable", doing)
    key = f"{topic}@{group}"
    if key not in table:
        return None
    offset = _object(table, key, doing).get(str(queue_id))
    if offset is not None and type(offset) is not int:
        raise RemotingCommandException(f"{doing}: the offset of {key} is {reprlib.repr(offset)}, not an integer")
    return offset


def _object(value: Any, name: str, doing: str) -> dict[str, Any]:
    item = value.get(name) if isinstance(value, dict) else None
    if not isinstance(item, dict):
        raise RemotingCommandException(f"{doing}: {reprlib.repr(value)} has no object {reprlib.repr(name)}")
    return item
