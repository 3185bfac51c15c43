"""What a fault has cost a write: rows in, rows stored, repeats, retries, the longest time in which nothing was stored.

The rows are read back by RocketMQ's own Java client. Whoever writes gives each row a key of its own and ``rowId=true``.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rocketmq_spark.admin import queue_offsets
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.producer.route_cache import publish_info_of
from rocketmq_spark.transport.remoting import RemotingTransport
from rocketmq_spark.wire.row_hash import ROW_ID
from tests.java import Java

_EVERY = 0.05
# A paused broker answers nothing: whoever asks it must not be held up for long.
_PATIENCE = 0.5


class Account(NamedTuple):
    """One line of the table; `longest_stall` is in seconds."""

    fault: str
    rows: int
    stored: int
    repeats: int
    retries: int
    longest_stall: float


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
        self._longest_stall = 0.0

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
        grown, over = list[float](), threading.Event()
        with RemotingTransport(name_servers) as transport:
            queues = defaultdict[str, list[MessageQueue]](list)
            info = publish_info_of(topic, transport.query_route(topic, 5.0))
            for queue in info.queues:
                queues[info.addresses[queue.broker_name]].append(queue)

            def ask(broker: str) -> None:
                before = None
                while not over.wait(_EVERY):
                    with contextlib.suppress(RocketMQError):
                        now = sum(transport.max_offset(queue, broker, _PATIENCE) for queue in queues[broker])
                        if before is not None and now > before:
                            grown.append(time.monotonic())
                        before = now

            threads = [threading.Thread(target=ask, args=(broker,)) for broker in brokers]
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                over.set()
                for thread in threads:
                    thread.join()
        # From the first rows to the last: neither the start of the job nor its end counts.
        pairs = itertools.pairwise(sorted(grown))
        self._longest_stall = max((later - earlier for earlier, later in pairs), default=0.0)

    def settle(self, fault: str, name_server: str, topic: str, keys: set[str], retries: int) -> Account:
        """Read everything back once all brokers are up again; look whether it is whole, and every repeat marked.

        Parameters
        ----------
        fault : str
        name_server, topic : str
        keys : set of str
            Of the rows that went in.
        retries : int
            As the write's metrics have them.
        """
        held = sum(offsets.messages for offsets in queue_offsets([name_server], topic))
        lines = self._java.read_topic(name_server, topic, held, within=120.0)
        ids = defaultdict[str, set[str]](set)
        for line in lines:
            ids[line["properties"]["KEYS"]].add(line["properties"][ROW_ID])
        account = Account(fault, len(keys), len(lines), len(lines) - len(ids), retries, self._longest_stall)
        self._tell(account)
        assert len(lines) == held
        assert ids.keys() == keys, f"missing: {sorted(keys - ids.keys())[:5]}, strange: {sorted(ids.keys() - keys)[:5]}"
        # A repeat is marked by the id that it shares; no two rows do.
        assert {len(found) for found in ids.values()} <= {1}
        assert len(set().union(*ids.values())) == len(keys)
        return account
