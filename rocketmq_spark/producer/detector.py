"""Finds out whether brokers that could not be reached can be reached again.

Rule 1: no clock and no thread here: `run_due` is called with `now`, on a thread that a slow probe may hold up.
Rule 2: a broker is looked at once per `interval` at most; one that has no master any more is forgotten.
Rule 3: an answer makes a broker reachable; silence changes nothing. So only unreachable ones are asked (Java asks all
        of them, which can tell it nothing new).
Rule 4: the isolation of a broker is left to run: being reachable decides only whom to take while all are in isolation.

Follows ``LatencyFaultToleranceImpl.detectByOneRound`` (spec/producer.md section 5.6).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from rocketmq_spark.message import MessageQueue
from rocketmq_spark.producer.fault import LatencyFaultTolerance

logger = logging.getLogger("rocketmq_spark.producer")

# Time between two rounds, and before the first, seconds.
PERIOD: Final = 3.0

# (queue to ask for, address of its broker) -> it answered the question in time
Probe = Callable[[MessageQueue, str], bool]


class FaultDetector:
    """Looks at the brokers of a fault table, one after the other.

    Parameters
    ----------
    table : LatencyFaultTolerance
    master_of : callable
        ``broker name -> address or None``.
    topics : callable
        ``() -> topics of the client``; the first one is asked for, and without any a broker can't be asked.
    probe : callable
        ``(queue, address) -> bool``; asks a broker for a queue's max offset, and returns whether it said it in time.
    interval : float
        ``detectInterval``, seconds.
    """

    def __init__(
        self,
        table: LatencyFaultTolerance,
        *,
        master_of: Callable[[str], str | None],
        topics: Callable[[], Sequence[str]],
        probe: Probe,
        interval: float,
    ) -> None:
        self._table = table
        self._master_of = master_of
        self._topics = topics
        self._probe = probe
        self._interval = interval

    def run_due(self, now: float) -> float:
        """Look at every broker whose time has come; return when to be called again (seconds)."""
        for broker_name in self._table.take_checks(now, self._interval):
            address = self._master_of(broker_name)
            topic = next(iter(self._topics()), None)
            if address is None:
                logger.info("broker %s has no master any more: it is not kept in the fault table", broker_name)
                self._table.remove(broker_name)
            elif (
                topic is not None
                and not self._table.is_reachable(broker_name)
                and self._probe(MessageQueue(topic, broker_name, 0), address)
            ):
                logger.info("broker %s can be reached again", broker_name)
                self._table.set_reachable(broker_name)
        return now + PERIOD
