"""What happens to the brokers, topics and messages of a stream: a seed draws the events and their times."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from rocketmq_spark.model.message import MessageQueue
from tests.simulation.stream_brokers import ANSWERS, REFUSES, SILENT, StreamBroker, StreamCluster, Timeline

if TYPE_CHECKING:
    from tests.simulation.stream_model import StreamPlan

# How requests fail.
REQUESTS: Final = ("lost request", "busy request")


class StreamAdversary:
    """Stores messages, and plays the events of a plan."""

    def __init__(self, plan: StreamPlan, world: Timeline, cluster: StreamCluster, topics: tuple[str, ...]) -> None:
        self.plan, self.world, self.cluster, self.topics = plan, world, cluster, topics
        self.rng = world.rng

    def start(self) -> None:
        """Plan the messages and the events."""
        plan, world, rng = self.plan, self.world, self.rng
        left = plan.horizon - world.now
        for _ in range(plan.rows):
            world.call_later(rng.random() * left, self._store)
        for kind in EVENTS:
            if kind in plan.faults:
                for _ in range(rng.choice((1, 1, 2, 4))):
                    world.call_later(rng.random() * left, functools.partial(self._play, kind))
        for kind in REQUESTS:
            if kind in plan.faults:
                self.cluster.chances[kind] = rng.choice((0.01, 0.05, 0.2))
        if "late broker" in plan.faults:
            world.call_later(rng.random() * left, self._add_broker)
        if "late topic" in plan.faults:
            world.call_later(rng.random() * left, self._add_topic)
        world.call_later(left, self._calm)

    def _calm(self) -> None:
        """End all faults."""
        cluster = self.cluster
        cluster.chances.clear()
        self._add_broker()
        self._add_topic()
        for broker in cluster.brokers.values():
            broker.state = ANSWERS
        for address in cluster.name_servers:
            cluster.states[address] = ANSWERS
            cluster.listed[address] = set(cluster.brokers)
        self.world.note("calm")

    def _play(self, kind: str) -> None:
        if _EVENTS[kind](self):
            self.cluster.counts[kind] += 1
            self.world.note(f"fault: {kind}")

    def _store(self) -> None:
        """Store some messages in a queue that producers can reach."""
        cluster, rng = self.cluster, self.rng
        queues = [
            queue
            for queue, _ in cluster.queues()
            if cluster.brokers[queue.broker_name].state == ANSWERS
            and queue.queue_id < cluster.brokers[queue.broker_name].topics.get(queue.topic, (0, 0))[1]
        ]
        if queues:
            queue = rng.choice(queues)
            for _ in range(rng.choice((1, 1, 2, 5))):
                cluster.store(queue)

    def _any_broker(self) -> StreamBroker:
        return self.rng.choice([*self.cluster.brokers.values()])

    def _later(self, call: Callable[[], None], *names: str) -> None:
        """Call a function after the time that a fault of brokers takes."""
        left = self.plan.horizon - self.world.now
        seconds = min(left, self.rng.random() * self.rng.choice((1.0, 10.0, 60.0)))
        self.cluster.disturb(names, seconds)
        self.world.call_later(seconds, call)

    def _unlist(self, *, everywhere: bool) -> bool:
        cluster, name = self.cluster, self._any_broker().name
        servers = cluster.name_servers if everywhere else [self.rng.choice(cluster.name_servers)]
        if not everywhere and len(cluster.name_servers) == 1:
            return False
        cluster.unlist(name, servers)
        self._later(lambda: cluster.list_again(name, servers), name)
        return True

    def _stop_broker(self, state: str, *, unlist: bool) -> bool:
        cluster, broker = self.cluster, self._any_broker()
        if broker.state != ANSWERS:
            return False
        broker.state = state
        if unlist:
            cluster.unlist(broker.name, cluster.name_servers)

        def back() -> None:
            broker.state = ANSWERS
            cluster.list_again(broker.name, cluster.name_servers)

        # Requests are sent one after the other here, so others may have no time left.
        self._later(back, *(cluster.brokers if state == SILENT else [broker.name]))
        return True

    def _stop_name_server(self) -> bool:
        cluster, address = self.cluster, self.rng.choice(self.cluster.name_servers)
        cluster.states[address] = self.rng.choice((REFUSES, SILENT))

        def back() -> None:
            cluster.states[address] = ANSWERS

        self._later(back, *cluster.brokers)
        return True

    def _replace_broker(self) -> bool:
        """Replace a broker by an empty one with the same name and topics."""
        cluster, broker = self.cluster, self._any_broker()
        topics = dict(broker.topics)
        broker.committed.clear()
        for topic, (queues, _) in topics.items():
            cluster.delete(broker, topic)
            cluster.create(broker, topic, queues)
        return bool(topics)

    def _lose_end(self) -> bool:
        broker = self._any_broker()
        stored = sorted(record.stored_at for log in broker.logs.values() for record in log.records)
        if not stored:
            return False
        self.cluster.cut(broker, stored[-1 - self.rng.randrange(min(6, len(stored)))] - 1e-9)
        if self.rng.random() < 0.7:
            self._refill([queue for queue in broker.logs if queue.topic in broker.topics], 8)
        return True

    def _expire(self, reported_after: float) -> bool:
        logs = [(queue, log) for queue, log in self.cluster.queues() if log.records]
        if not logs:
            return False
        queue, log = self.rng.choice(logs)
        self.cluster.expire(queue, self.rng.randint(log.first, len(log.records)), reported_after)
        return True

    def _more_queues(self) -> bool:
        cluster, broker = self.cluster, self._any_broker()
        if not broker.topics:
            return False
        topic = self.rng.choice(sorted(broker.topics))
        cluster.create(broker, topic, broker.topics[topic][0] + 1)
        return True

    def _fewer_queues(self) -> bool:
        """Reduce the write queues, and some time later the read queues."""
        cluster, broker = self.cluster, self._any_broker()
        topics = [topic for topic, (reads, _) in broker.topics.items() if reads > 1]
        if not topics:
            return False
        topic = self.rng.choice(topics)
        reads = broker.topics[topic][0]
        broker.topics[topic] = reads, reads - 1

        def close() -> None:
            if broker.topics.get(topic) == (reads, reads - 1):
                cluster.remove_queues(broker, topic, reads - 1)
                cluster.counts["queue removed"] += 1
                self._later(again)

        def again() -> None:
            if broker.topics.get(topic) == (reads - 1, reads - 1) and self.rng.random() < 0.7:
                cluster.create(broker, topic, reads)

        left = self.plan.horizon - self.world.now
        self.world.call_later(min(self.rng.random() * 20, max(0.0, left - 0.1)), close)
        return True

    def _recreate(self, *, regrow: bool) -> bool:
        cluster, rng = self.cluster, self.rng
        topics = sorted({topic for broker in cluster.brokers.values() for topic in broker.topics})
        if not topics:
            return False
        topic = rng.choice(topics)
        old = [(broker, broker.topics[topic][0]) for broker in cluster.brokers.values() if topic in broker.topics]
        lengths = [len(log.records) for queue, log in cluster.queues() if queue.topic == topic]
        for broker, _ in old:
            cluster.delete(broker, topic)

        def create() -> None:
            for broker, queues in old:
                if topic not in broker.topics:
                    cluster.create(broker, topic, queues)
            if regrow:
                self._refill([queue for queue, _ in cluster.queues() if queue.topic == topic], max(lengths) + 3)

        if rng.random() < 0.5:
            create()
        else:
            self._later(create)
        return True

    def _refill(self, queues: list[MessageQueue], most: int) -> None:
        """Store up to so many messages in each queue."""
        for queue in queues:
            for _ in range(self.rng.randint(0, most)):
                self.cluster.store(queue)

    def _delete(self) -> bool:
        """Delete a topic on all brokers, or on one."""
        brokers = [*self.cluster.brokers.values()] if self.rng.random() < 0.5 else [self._any_broker()]
        topic = self.rng.choice(self.topics)
        for broker in brokers:
            self.cluster.delete(broker, topic)
        return True

    def _add_broker(self) -> None:
        """Start the broker that did not exist at first."""
        cluster = self.cluster
        broker = [*cluster.brokers.values()][-1]
        if "late broker" not in self.plan.faults or len(cluster.brokers) == 1 or broker.topics:
            return
        for topic in self.topics:
            if self.rng.random() < 0.8:
                cluster.create(broker, topic, self.plan.queues)
        broker.state = ANSWERS
        cluster.list_again(broker.name, cluster.name_servers)
        self._refill([queue for queue in broker.logs if self.rng.random() < 0.7], 5)
        self.world.note("late broker starts")

    def _add_topic(self) -> None:
        """Create the topic that did not exist at first."""
        cluster, topic = self.cluster, self.topics[-1]
        if "late topic" not in self.plan.faults or len(self.topics) == 1:
            return
        if any(topic in broker.topics for broker in cluster.brokers.values()):
            return
        for broker in cluster.brokers.values():
            if broker.state == ANSWERS:
                cluster.create(broker, topic, self.plan.queues)
        cluster.counts["late topic"] += 1
        self._refill([queue for queue, _ in cluster.queues() if queue.topic == topic], 5)


# What happens to brokers, topics and messages, once or several times in a schedule. False: nothing could happen.
_EVENTS: Final[Mapping[str, Callable[[StreamAdversary], bool]]] = {
    "broker not listed": lambda adversary: adversary._unlist(everywhere=True),
    "broker listed by one": lambda adversary: adversary._unlist(everywhere=False),
    "broker refuses": lambda adversary: adversary._stop_broker(REFUSES, unlist=False),
    "broker silent": lambda adversary: adversary._stop_broker(SILENT, unlist=False),
    "broker removed": lambda adversary: adversary._stop_broker(REFUSES, unlist=True),
    "broker replaced": StreamAdversary._replace_broker,
    "name server silent": StreamAdversary._stop_name_server,
    "lost end": StreamAdversary._lose_end,
    "expiry": lambda adversary: adversary._expire(0.0),
    "late expiry": lambda adversary: adversary._expire(adversary.rng.random() * 10),
    "more queues": StreamAdversary._more_queues,
    "fewer queues": StreamAdversary._fewer_queues,
    "recreated topic": lambda adversary: adversary._recreate(regrow=False),
    "regrown topic": lambda adversary: adversary._recreate(regrow=True),
    "deleted topic": StreamAdversary._delete,
}
EVENTS: Final = tuple(_EVENTS)
