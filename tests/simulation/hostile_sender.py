"""A hostile user of exactly-once writes, who also knows half messages, decisions and manifests.

He commits half messages of the job before it does, and stores half messages for its groups. He forges decisions with
manifests that name half messages of the job, of other users, or his own ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

from rocketmq_spark.deliveries.log.records import VERSION
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.properties import CHECK_IMMUNITY_TIME_IN_SECONDS, PGROUP, TAGS, TRAN_MSG
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, TRANSACTION_ROLLBACK_TYPE, EndTransaction
from tests.simulation.exactly_once_checks import TRUSTED
from tests.simulation.hostile import HostileUser, place_of
from tests.simulation.model_brokers import HALF_TOPIC, Entry, ModelCluster, Sender
from tests.simulation.spark import ID, LOG, TOPIC

# The half messages of another job, which has nothing to do with the log.
_OTHER_GROUP = "other#0#1#run"
_TIMEOUTS = (1, 1, 4_000, 3_600_000, 10**12)


class HostileSender(HostileUser):
    """Also sends half messages, and the requests that end them."""

    _victims: ModelCluster

    def start(self) -> None:
        """Schedule the attacks, after another job has stored half messages."""
        if {"hostile log", "hostile halves"} & set(self._plan.faults):
            for queue in self._victims.queues(TOPIC):
                for number in range(2):
                    self._store(queue, _OTHER_GROUP, f"victim {number}")
        super().start()

    def _attacks(self) -> Iterable[tuple[str, Callable[[], None]]]:
        return (*super()._attacks(), ("hostile log", self._decide), ("hostile halves", self._half))

    def _halves(self) -> list[Entry]:
        return [entry for entry in self._victims.all_entries() if entry.queue.topic == HALF_TOPIC]

    def _store(self, queue: MessageQueue, group: str, body: str) -> None:
        properties = {TRAN_MSG: "true", PGROUP: group, CHECK_IMMUNITY_TIME_IN_SECONDS: "4"}
        self._victims.forge(queue, Message(queue.topic, body.encode(), 0, properties), same=False)

    def _half(self) -> None:
        """End a half message of the job, or store one for its group, or one for the log's topic."""
        rng, halves = self._rng, [entry for entry in self._halves() if PGROUP in entry.message.properties]
        if not halves:
            return
        half = rng.choice(halves)
        group = half.message.properties[PGROUP]
        if rng.random() < 0.5:
            how = rng.choice((TRANSACTION_COMMIT_TYPE, TRANSACTION_COMMIT_TYPE, TRANSACTION_ROLLBACK_TYPE))
            request = EndTransaction(
                topic=TOPIC,
                producer_group=group,
                tran_state_table_offset=half.message.queue_offset,
                commit_log_offset=half.message.physical_offset,
                commit_or_rollback=how,
                from_transaction_check=rng.random() < 0.3,
                msg_id="",
                broker_name=half.queue.broker_name,
            )
            broker = self._victims.brokers[half.queue.broker_name]
            if not broker.idle and not broker.check_end(request) and how == TRANSACTION_COMMIT_TYPE:
                broker.commit(half, Sender(None, self._world.now))
        else:
            queues = self._victims.queues(TOPIC) + self._victims.queues(LOG)
            self._store(rng.choice(queues), group, TRUSTED)

    def _decide(self) -> None:
        """Store manifests and a decision."""
        rng, victims = self._rng, self._victims
        home = rng.choice(victims.queues(LOG))
        number = rng.randrange(self._plan.tasks + 1)
        write, round_ = self._plan.write(number), rng.choice((1, 1, 2, 3))
        group = f"{ID}#{write.name}#{round_}#{rng.choice(('hostile', 'run'))}"
        own = [queue for queue in victims.queues(TOPIC) if rng.random() < 0.5]
        for queue in own:
            self._store(queue, group, TRUSTED)
        halves = self._halves()
        chosen = rng.sample(halves, min(len(halves), rng.choice((0, 1, 3))))
        if rng.random() < 0.5:
            chosen = halves[len(halves) - len(own) :]
        queues = list(dict.fromkeys(entry.real_queue for entry in chosen if entry.real_queue is not None))
        if rng.random() < 0.2:
            queues = [MessageQueue("payments", queue.broker_name, queue.queue_id) for queue in queues]
        manifest = b"".join(self._row(queues, entry) for entry in chosen if entry.real_queue is not None)
        properties = {TAGS: "manifest"}
        at = len(victims.brokers[home.broker_name].queues[home])
        manifests = [at] if chosen else []
        if chosen:
            victims.forge(home, Message(LOG, manifest, 0, properties), same=False)
        youngest = {entry.queue.broker_name: entry for entry in chosen}
        record: dict[str, Any] = {
            "version": VERSION,
            "kind": "decision",
            "id": ID,
            "write": write.name,
            "query": write.query,
            "since": 0,
            "round": round_,
            "group": rng.choice((group, *(entry.message.properties.get(PGROUP, "") for entry in chosen))),
            "rows": len(chosen),
            "timeout_ms": rng.choice(_TIMEOUTS),
            "floors": [[*place_of(queue), rng.choice((0, 0, 1, 10**9))] for queue in queues],
            "youngest": [_half_of(queues, entry) for entry in youngest.values()],
            "digest": hashlib.sha256(manifest).hexdigest(),
            "manifests": manifests,
        }
        tag = hashlib.sha256(ID.encode()).hexdigest()[:16]
        victims.forge(home, Message(LOG, json.dumps(record).encode(), 0, {TAGS: tag}), same=False)

    def _row(self, queues: list[MessageQueue], entry: Entry) -> bytes:
        message, number = entry.message, queues.index(_named(queues, entry))
        offset = self._rng.choice((message.physical_offset,) * 5 + (message.physical_offset + 1, 2**40))
        return number.to_bytes(4, "little") + offset.to_bytes(8, "little") + message.queue_offset.to_bytes(8, "little")


def _half_of(queues: list[MessageQueue], entry: Entry) -> list[Any]:
    message = entry.message
    place = place_of(_named(queues, entry))
    return [*place, message.physical_offset, message.queue_offset, message.born_timestamp]


def _named(queues: list[MessageQueue], entry: Entry) -> MessageQueue:
    """Return the queue of a half message, perhaps in another topic."""
    real = entry.real_queue
    assert real is not None
    return next(
        queue for queue in queues if (queue.broker_name, queue.queue_id) == (real.broker_name, real.queue_id)
    )  # fmt: skip
