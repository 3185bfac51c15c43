"""A hostile user with the rights to read and write the topics of rows and of the log.

The user sees each request, also lost ones. He stores rows with the properties of a write, and records of its
log: replayed ones, forged ones, junk, and floods. He also prepares rows with equal hashes, without the seed of a hash.
"""

from __future__ import annotations

import functools
import json
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

from rocketmq_spark.deliveries.log.keys import unsigned
from rocketmq_spark.model.hashes import STEP
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.properties import ATTEMPT, UNIQ_KEY
from tests.simulation.spark import LOG, TOPIC, SparkPlan
from tests.simulation.world import World

KINDS = ("hostile rows", "hostile log")
HASHES = "hostile hashes"
KEY = "a-key-of-tests-with-32-characters"

# More than a broker returns at once.
_FLOOD = 40
# The bytes of a body before its first whole word.
_HEAD = 7
_HUGE = (2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**300, -1)


class Victims(Protocol):
    """The brokers that the user writes to."""

    # The messages of all requests that were sent so far, stored or not.
    seen: list[Message]

    def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic that exist."""

    def stored(self, topic: str) -> Any:
        """Return the messages of a topic."""

    def forge(self, queue: MessageQueue, message: Message, *, same: bool) -> None:
        """Store a message; `same`: it is an exact copy of a row."""


class HostileUser:
    """Stores rows and records at random times."""

    def __init__(self, world: World, victims: Victims, plan: SparkPlan) -> None:
        self._world, self._victims, self._plan = world, victims, plan
        self._rng: random.Random = world.rng
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """Schedule the attacks of the plan."""
        rng = self._rng
        for kind, attack in self._attacks():
            if kind in self._plan.faults:
                for _ in range(rng.choice((3, 10, 40))):
                    # Most writes end within the first seconds.
                    at = rng.random() * rng.choice((0.1, 1.0, self._plan.horizon))
                    self._world.call_later(at, functools.partial(self._attack, kind, attack))

    def _attacks(self) -> Iterable[tuple[str, Callable[[], None]]]:
        return ("hostile rows", self._rows), ("hostile log", self._log), (HASHES, self._prepared_rows)

    def _attack(self, kind: str, attack: Any) -> None:
        self.counts[kind] += 1
        attack()

    def _rows(self) -> None:
        """Store rows with the properties of rows that were sent, and the same content, or another one."""
        rng, seen, queues = self._rng, self._victims.seen, self._victims.queues(TOPIC)
        if not seen or not queues:
            return
        queue, changes = rng.choice(queues), rng.choice((_copied, _copied, self._other_body, self._other_properties))
        first = rng.randrange(len(seen))
        # Whole batches, too.
        for message in seen[first : first + rng.choice((1, 2, 6))]:
            forged = changes(message)
            self._victims.forge(queue, forged, same=_content(forged) == _content(message))

    def _prepared_rows(self) -> None:
        """Store rows with a content that has the same sum of mixed words as another one; see `_colliding`."""
        queues = self._victims.queues(TOPIC)
        for message in self._victims.seen if queues else ():
            prepared = replace(message, body=_colliding(message.body))
            self._victims.forge(self._rng.choice(queues), prepared, same=False)

    def _other_body(self, message: Message) -> Message:
        bodies = self._plan.bodies(self._rng.randrange(self._plan.tasks))
        return replace(message, body=self._rng.choice((*bodies, "forged")).encode())

    def _other_properties(self, message: Message) -> Message:
        rng, properties = self._rng, dict(message.properties)
        name = rng.choice([*properties, "TAGS", "KEYS", "mine"])
        if rng.random() < 0.5:
            properties.pop(name, None)
        else:
            properties[name] = rng.choice(("x", "0", *properties.values()))
        return replace(message, properties=properties, flag=rng.choice((0, 7)))

    def _log(self) -> None:
        """Store messages in the topic of the log."""
        rng, queues = self._rng, self._victims.queues(LOG)
        records: list[MessageExt] = list(self._victims.stored(LOG))
        if not records:
            return
        record, queue = rng.choice(records), rng.choice(queues)
        attack = rng.choice(("replay", "replay", "forge", "forge", "forge", "junk", "flood"))
        self.counts[f"hostile log: {attack}"] += 1
        properties = record.properties
        if attack == "replay":
            bodies = [record.body]
        elif attack == "forge":
            bodies = [self._forged(record)]
        elif attack == "junk":
            bodies = [rng.choice((b"", b"\x00" * 50, rng.randbytes(300), b"[" * 500, b"{" * 500, record.body[:-3]))]
        else:
            bodies = [rng.choice((record.body, rng.randbytes(20)))] * _FLOOD
        for body in bodies:
            self._victims.forge(queue, Message(LOG, body, 0, properties), same=False)

    def _forged(self, record: MessageExt) -> bytes:
        """Return a record with other values, under the old signature, another one or none."""
        rng, old = self._rng, record.body
        body = unsigned(old) or old
        try:
            fields = json.loads(body)
        except ValueError:
            return b"{}"
        if not isinstance(fields, dict):
            return b"{}"
        for _ in range(rng.choice((1, 1, 2, 4))):
            self._change(fields)
        end = rng.choice((old[len(body) :], b"\n0." + b"A" * 43, b""))
        return json.dumps(fields).encode() + end

    def _change(self, fields: dict[str, Any]) -> None:
        rng = self._rng
        name = rng.choice(("kind", "kind", "write", "floors", "floors", *fields))
        number = rng.choice((0, 1, 3, *_HUGE))
        if name == "kind":
            fields["kind"] = rng.choice(("done", "done", "begun", "floors", "home", "claim", "decision"))
            queues = self._victims.queues(TOPIC)
            fields.setdefault("floors", [[*place_of(queue), number] for queue in queues])
        elif name == "write":
            fields["write"] = str(rng.randrange(self._plan.tasks + 1))
            fields["query"] = self._plan.write(0).query
        elif name == "floors":
            fields["floors"] = [[*place_of(queue), number] for queue in self._victims.queues(TOPIC)]
        elif name == "home":
            fields["home"] = place_of(rng.choice(self._victims.queues(LOG)))
        elif name == "fence":
            # Of another attempt: the first record of an attempt counts.
            fields |= {"fence": number, "attempt": f"{fields.get('attempt')}-forged"}
        elif isinstance(fields.get(name), int):
            fields[name] = number
        else:
            fields[name] = rng.choice(("", "x" * 300, number, [], {}, None, True, [[[]]]))


def _colliding(body: bytes) -> bytes:
    """Exchange two words of a body, each moved by a step.

    Both bodies have one hash in ``SPARK_ROW_ID``, whatever its seed. One byte precedes a body there.
    """
    one, other = struct.unpack_from("<QQ", body, _HEAD)
    words = struct.pack("<QQ", (other + STEP) % 2**64, (one - STEP) % 2**64)
    return body[:_HEAD] + words + body[_HEAD + len(words) :]


def _copied(message: Message) -> Message:
    return message


def _content(message: Message) -> object:
    """Return what consumers see of a row."""
    properties = {name: value for name, value in message.properties.items() if name not in (UNIQ_KEY, ATTEMPT)}
    return message.body, message.flag, properties


def place_of(queue: MessageQueue) -> list[object]:
    """Return a queue as records name it."""
    return [queue.topic, queue.broker_name, queue.queue_id]
