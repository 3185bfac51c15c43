"""Watches from outside how many messages topics have on each broker, and when they get more."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Mapping, Sequence

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.routing.route_cache import TopicPublishInfo, publish_info_of
from rocketmq_spark.transport.remoting.transport import RemotingTransport

# A topic, and a broker's name; `ANY` means all brokers together.
Pair = tuple[str, str]
ANY = "any broker"
_TIMEOUT = 1.0


class Flow(threading.Thread):
    """Asks the masters of some topics for the number of messages all the time, over connections of its own."""

    def __init__(self, name_servers: Sequence[str], topics: Sequence[str]) -> None:
        super().__init__(daemon=True)
        self._transport = RemotingTransport(name_servers)
        self._topics = topics
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._counts: dict[Pair, int] = {}
        self._marked: dict[Pair, tuple[int, float]] = {}
        self._resumed: dict[Pair, float] = {}
        self._infos: dict[str, TopicPublishInfo] = {}

    def __enter__(self) -> Flow:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join()
        self._transport.close()

    def mark(self, topics: Sequence[str], brokers: Sequence[str], since: float | None = None) -> None:
        """Wait for more messages of each topic on each broker, and count the time from `since` on (monotonic seconds).

        Without `since`, the time counts from now on.
        """
        with self._lock:
            begin = time.monotonic() if since is None else since
            pairs = itertools.product(topics, brokers)
            self._marked = {pair: (self._counts.get(pair, 0), begin) for pair in pairs}
            self._resumed = {}

    @property
    def waiting(self) -> list[Pair]:
        """The pairs that have no more messages than when they were marked."""
        with self._lock:
            return [pair for pair in self._marked if pair not in self._resumed]

    @property
    def resumed(self) -> Mapping[Pair, float]:
        """How long after the beginning each pair had more messages, seconds."""
        with self._lock:
            return dict(self._resumed)

    def count(self, topic: str) -> int:
        with self._lock:
            return self._counts.get((topic, ANY), 0)

    def run(self) -> None:
        while not self._stopped.wait(0.2):
            for topic in self._topics:
                # Without name servers the last route counts.
                with contextlib.suppress(RocketMQError):
                    self._infos[topic] = publish_info_of(topic, self._transport.query_route(topic, _TIMEOUT))
            for broker in sorted({name for info in self._infos.values() for name in info.addresses}):
                # A broker that does not answer one request is not asked for more.
                with contextlib.suppress(RocketMQError):
                    for topic, info in self._infos.items():
                        if broker in info.addresses:
                            self._ask(topic, broker, info)

    def _ask(self, topic: str, broker: str, info: TopicPublishInfo) -> None:
        queues = [queue for queue in info.queues if queue.broker_name == broker]
        count = sum(self._transport.max_offset(queue, info.addresses[broker], _TIMEOUT) for queue in queues)
        with self._lock:
            self._counts[topic, broker] = count
            self._counts[topic, ANY] = sum(
                number for (name, where), number in self._counts.items() if name == topic and where != ANY
            )
            for pair in ((topic, broker), (topic, ANY)):
                before, since = self._marked.get(pair, (self._counts[pair], 0.0))
                if self._counts[pair] > before:
                    self._resumed.setdefault(pair, time.monotonic() - since)
