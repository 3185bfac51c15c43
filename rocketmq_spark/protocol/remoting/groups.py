"""Decodes brokers' answers about consumer groups."""

from __future__ import annotations

import json
import re
import reprlib
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.protocol.remoting.command import loads
from rocketmq_spark.protocol.remoting.responses import loads_lenient

_T = TypeVar("_T")

# fastjson writes the keys of a ``Map<MessageQueue, ..>`` as objects.
_OBJECT_AS_KEY: Final = re.compile(r"([{,])(\{[^{}]*\}):")


@dataclass(frozen=True, slots=True)
class ConsumeStats:
    """A group's offset of one queue (``OffsetWrapper``)."""

    queue: MessageQueue  # As servers know it
    consumer_offset: int  # 0 also without a committed offset
    broker_offset: int  # Of the queue's next message
    last_timestamp: int  # When the message before `consumer_offset` was stored (epoch, ms); 0 if that is not known


@dataclass(frozen=True, slots=True)
class ConsumerConnection:
    """A member of a group."""

    client_id: str
    address: str  # host:port
    language: str


def decode_committed_offset(body: bytes, topic: str, group: str, queue_id: int) -> int | None:
    """Return a group's offset of a queue in a GET_ALL_CONSUMER_OFFSET answer, which has those of all groups."""
    doing = "reading the offsets of all groups"
    table = _field(loads_lenient(body), "offsetTable", dict, doing)
    key = f"{topic}@{group}"
    if key not in table:
        return None
    queues = _field(table, key, dict, doing)
    return _field(queues, str(queue_id), int, doing) if str(queue_id) in queues else None


def decode_consume_stats(body: bytes) -> tuple[ConsumeStats, ...]:
    """Return the offsets of a GET_CONSUME_STATS answer."""
    doing = "reading the offsets of a group"
    try:
        value = loads(body, lambda text: _OBJECT_AS_KEY.sub(lambda hit: f"{hit[1]}{json.dumps(hit[2])}:", text))
        rows = [(loads(key.encode()), row) for key, row in _field(value, "offsetTable", dict, doing).items()]
    except ValueError as exc:
        raise RemotingCommandException(f"{doing}: {exc}") from exc
    return tuple(
        ConsumeStats(
            MessageQueue(
                _field(queue, "topic", str, doing),
                _field(queue, "brokerName", str, doing),
                _field(queue, "queueId", int, doing),
            ),
            _field(row, "consumerOffset", int, doing),
            _field(row, "brokerOffset", int, doing),
            _field(row, "lastTimestamp", int, doing),
        )
        for queue, row in rows
    )


def decode_consumer_connections(body: bytes) -> tuple[ConsumerConnection, ...]:
    """Return the members of a GET_CONSUMER_CONNECTION_LIST answer."""
    doing = "reading the members of a group"
    names = ("clientId", "clientAddr", "language")
    return tuple(
        ConsumerConnection(*(_field(member, name, str, doing) for name in names))
        for member in _field(loads_lenient(body), "connectionSet", list, doing)
    )


def _field(value: Any, name: str, kind: type[_T], doing: str) -> _T:
    field = value.get(name) if isinstance(value, dict) else None
    # bool is an int to Python.
    if type(field) is not kind:
        wanted = {dict: "object", list: "list", str: "text", int: "integer"}[kind]
        raise RemotingCommandException(f"{doing}: {reprlib.repr(value)} has no {wanted} {reprlib.repr(name)}")
    return field
