"""What a fault has cost a write: rows in, rows stored, repeats, retries, the longest time in which nothing was stored.

The rows are read back by RocketMQ's own Java client. Whoever writes gives each row a key of its own and ``rowId=true``.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rocketmq_spark.admin import queue_offsets
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.producer.route_cache import publish_info_of
from rocketmq_spark.transport.remoting import RemotingTransport
from rocketmq_spark.wire.row_hash import ROW_ID
from tests.java import Java
from tests.waiting import PATIENCE

_EVERY = 0.05
# A broker builds its queues in the background, and after a crash once more: what it holds is known when it stays so.
_SETTLED = 1.0
_SETTLES_WITHIN = 60.0
# A paused broker answers nothing: whoever asks it must not be held up for long.
_PATIENCE = 0.5


class Account(NamedTuple):
    """One line of the table; `longest_stall` is in seconds, `most` how often the most repeated row is there."""

    fault: str
    rows: int
    stored: int
    repeats: int
    retries: int
    longest_stall: float
    most: int


class Ledger:
    """The account of one write.

    Parameters
    ----------
    java : Java
        Reads the rows back.
    tell : callable
        Told the account when it is settled.
    """

    def __init__(self, java: Java, tell: Callable[[Account], None]) -> None:
        self._java = java
        self._tell = tell
        # When a broker had stored more than before, which, and how many messages more.
        self._grown: list[tuple[float, str, int]] = []

    def stored_between(self, start: float, end: float) -> int:
        """Return how many messages the watched brokers have stored in that time (monotonic seconds)."""
        return sum(more for at, _, more in self._grown if start <= at < end)

    def last_stored(self, broker: str) -> float:
        """Return when a broker was last seen to have stored something, monotonic seconds; 0 before that."""
        return max((at for at, address, _ in self._grown if address == broker), default=0.0)

    @property
    def pace(self) -> float:
        """Messages stored per second, from the first ones to the last of the write."""
        at = [at for at, _, _ in self._grown]
        return sum(more for _, _, more in self._grown) / (max(at) - min(at))

    @property
    def longest_stall(self) -> float:
        """The longest time without a message stored, seconds; from the first ones to the last of the write."""
        pairs = itertools.pairwise(sorted(at for at, _, _ in self._grown))
        return max((later - earlier for earlier, later in pairs), default=0.0)

    @contextlib.contextmanager
    def watch(self, name_servers: Sequence[str], topic: str, brokers: Sequence[str]) -> Iterator[None]:
        """Watch what the brokers store for as long as the write runs.

        Parameters
        ----------
        name_servers : sequence of str
        topic : str
            Exists already.
        brokers : sequence of str
            Addresses, each asked by a thread of its own.
        """
        self._grown, over = [], threading.Event()
        with RemotingTransport(name_servers) as transport:
            queues = defaultdict[str, list[MessageQueue]](list)
            info = publish_info_of(topic, transport.query_route(topic, 5.0))
            for queue in info.queues:
                queues[info.addresses[queue.broker_name]].append(queue)

            def ask(broker: str) -> None:
                most = None
                while not over.wait(_EVERY):
                    with contextlib.suppress(RocketMQError):
                        now = sum(transport.max_offset(queue, broker, _PATIENCE) for queue in queues[broker])
                        if most is not None and now > most:
                            self._grown.append((time.monotonic(), broker, now - most))
                        # A broker that starts again has fewer for a while.
                        most = now if most is None else max(most, now)

            threads = [threading.Thread(target=ask, args=(broker,)) for broker in brokers]
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                over.set()
                for thread in threads:
                    thread.join()

    def settle(
        self,
        fault: str,
        name_server: str,
        topic: str,
        keys: set[str],
        retries: int,
        *,
        begins: Callable[[str], bytes] = lambda _key: b"",
    ) -> Account:
        """Read everything back once all brokers are up again; look whether it is whole, and every repeat marked.

        Parameters
        ----------
        fault : str
        name_server, topic : str
        keys : set of str
            Of the rows that went in.
        retries : int
            As the write's metrics have them.
        begins : callable, optional
            ``key -> bytes``: how the body of a row begins.
        """
        held = _held(name_server, topic)
        lines = self._java.read_topic(name_server, topic, held, within=PATIENCE)
        ids, times = defaultdict[str, set[str]](set), Counter[str]()
        for line in lines:
            ids[line["properties"]["KEYS"]].add(line["properties"][ROW_ID])
            times[line["properties"]["KEYS"]] += 1
        account = Account(
            fault,
            len(keys),
            len(lines),
            len(lines) - len(ids),
            retries,
            self.longest_stall,
            max(times.values(), default=0),
        )
        self._tell(account)
        assert len(lines) == held
        assert ids.keys() == keys, f"missing: {sorted(keys - ids.keys())[:5]}, strange: {sorted(ids.keys() - keys)[:5]}"
        # A repeat is marked by the id that it shares; no two rows do.
        assert {len(found) for found in ids.values()} <= {1}
        assert len(set().union(*ids.values())) == len(keys)
        altered = [line["body"] for line in lines if not line["body"].startswith(begins(line["properties"]["KEYS"]))]
        assert not altered, f"{len(altered)} bodies are not their rows': {altered[:3]}"
        return account


def _held(name_server: str, topic: str) -> int:
    """Return how many messages a topic holds once that number stays the same."""
    deadline, since, held = time.monotonic() + _SETTLES_WITHIN, time.monotonic(), -1
    while time.monotonic() < min(since + _SETTLED, deadline):
        now = sum(offsets.messages for offsets in queue_offsets([name_server], topic))
        if now != held:
            since, held = time.monotonic(), now
        time.sleep(_EVERY)
    return held
