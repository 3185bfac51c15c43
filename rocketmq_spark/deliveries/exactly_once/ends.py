"""Commits or rolls back many half messages: END_TRANSACTION requests with a window, each answered.

A request is sent again only if the broker has certainly not executed it. After any other failure its broker gets no
further requests, because a recovery has to find out what was committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from rocketmq_spark.deliveries.exactly_once.halves import Halves
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.half import Half
from rocketmq_spark.errors import (
    BrokerBusyException,
    RemotingConnectException,
    RemotingTooMuchRequestException,
    RocketMQError,
    RouteNotFoundException,
)
from rocketmq_spark.model.send_result import EndTransaction
from rocketmq_spark.protocol.remoting.codes import ResponseCode

# Requests in flight per broker, and with ``ordered`` per queue.
_WINDOW: Final = 256


@dataclass(slots=True, eq=False)
class _Lane:
    """The half messages of a broker, or with ``ordered`` of a queue, in their order."""

    broker_name: str
    rows: Iterator[int]
    window: int
    # Rows whose request was certainly not executed.
    again: deque[int] = field(default_factory=deque)
    in_flight: int = 0
    failures: int = 0
    waits_until: float = 0.0
    stopped: bool = False


class EndSender:
    """Ends half messages; `acknowledged` says which ones the brokers have answered with success.

    An answer starts the next request of its lane on the transport's thread, because a change of threads costs more than
    the request.
    """

    def __init__(self, brokers: Brokers, halves: Halves, group: str, how: int, *, expires: float) -> None:
        self.acknowledged: npt.NDArray[np.bool_] = np.zeros(len(halves), np.bool_)
        self.error: RocketMQError | None = None
        self._brokers = brokers
        self._halves = halves
        self._group = group
        self._how = how
        # When no request is sent any more, on the clock of `brokers`.
        self._expires = expires
        self._lock = brokers.runtime.lock()
        self._changed = brokers.runtime.condition(self._lock)
        # In the order of their creation, so that a simulation replays exactly.
        self._open_lanes: dict[_Lane, None] = {}
        # Requests that failed before they were sent; the calling thread handles them.
        self._unsent: list[tuple[_Lane, int, RocketMQError]] = []
        self._connections: list[object] = []

    def run(self) -> None:
        """Send the requests and take all answers; does not raise for the errors of requests."""
        self._connections = self._connections_now()
        with self._changed:
            self._open_lanes = dict.fromkeys(self._lanes())
            for lane in tuple(self._open_lanes):
                self._fill(lane)
            while self._open_lanes:
                self._handle_unsent()
                now = self._brokers.clock()
                resting = [lane for lane in self._open_lanes if lane.again and not lane.stopped]
                for lane in resting:
                    if lane.waits_until <= now:
                        self._fill(lane)
                pause = min((lane.waits_until - now for lane in resting if lane.waits_until > now), default=None)
                if self._open_lanes and not self._unsent:
                    self._changed.wait(pause)

    def has_lost_connections(self) -> bool:
        """Return whether a broker may have failed since `run` began, and have lost ends that it had acknowledged."""
        return self._connections != self._connections_now()

    def _connections_now(self) -> list[object]:
        names = dict.fromkeys(queue.broker_name for queue in self._halves.queues)
        addresses = map(self._brokers.instance.routes.master_of, names)
        return [address and self._brokers.transport.connection(address) for address in addresses]

    def _handle_unsent(self) -> None:
        while self._unsent:
            lane, row, error = self._unsent.pop()
            self._count_answer(lane, row, error)

    def _on_end(self, lane: _Lane, row: int, error: RocketMQError | None) -> None:
        """Take an answer, on the transport's thread."""
        with self._changed:
            self._count_answer(lane, row, error)
            if lane not in self._open_lanes or self._unsent or lane.again:
                self._changed.notify_all()

    def _lanes(self) -> Iterator[_Lane]:
        halves, ordered = self._halves, self._brokers.options.ordered
        names = [queue.broker_name for queue in halves.queues]
        keys: list[object] = list(halves.queues) if ordered else list(names)
        for key in dict.fromkeys(keys):
            codes = [code for code, other in enumerate(keys) if other == key]
            rows = np.flatnonzero(np.isin(halves.codes, codes))
            yield _Lane(names[codes[0]], map(int, rows), 1 if ordered else _WINDOW)

    def _fill(self, lane: _Lane) -> None:
        """Send requests of a lane until its window is full."""
        clock = self._brokers.clock
        while lane.in_flight < lane.window and not lane.stopped:
            if clock() >= self._expires:
                lane.stopped = True
            elif lane.again:
                if clock() < lane.waits_until:
                    return
                self._send(lane, lane.again.popleft())
            else:
                row = next(lane.rows, None)
                if row is None:
                    break
                self._send(lane, row)
        if not lane.in_flight and (lane.stopped or not lane.again):
            self._open_lanes.pop(lane, None)

    def _send(self, lane: _Lane, row: int) -> None:
        lane.in_flight += 1
        try:
            end_half(
                self._brokers,
                self._halves[row],
                self._group,
                self._how,
                lambda error: self._on_end(lane, row, error),
            )
        except RocketMQError as exc:
            self._unsent.append((lane, row, exc))

    def _count_answer(self, lane: _Lane, row: int, error: RocketMQError | None) -> None:
        """Count the end of a request, and start the next one of its lane."""
        lane.in_flight -= 1
        if error is None:
            self.acknowledged[row] = True
            lane.failures = 0
        elif _is_not_executed(error):
            lane.again.append(row)
            lane.failures += 1
            lane.waits_until = self._brokers.clock() + self._brokers.backoff(lane.failures)
            self._brokers.refresh_route_after(error, self._halves[row].queue.topic)
        else:
            self.error = self.error or error
            lane.stopped = True
        self._fill(lane)


def end_half(
    brokers: Brokers, half: Half, group: str, how: int, on_end: Callable[[RocketMQError | None], None]
) -> None:
    """Start to end a half message; see `Transactions.end_transaction`. A RocketMQError means that nothing was sent."""
    address = brokers.address_of(half.queue)
    brokers.transport.end_transaction(address, end_request(half, group, how), brokers.request_timeout, on_end)


def end_request(half: Half, group: str, how: int) -> EndTransaction:
    """Return the request to end a half message."""
    return EndTransaction(
        topic=half.queue.topic,
        producer_group=group,
        tran_state_table_offset=half.queue_offset,
        commit_log_offset=half.commit_log_offset,
        commit_or_rollback=how,
        # Brokers only log it.
        msg_id=group,
        broker_name=half.queue.broker_name,
    )


def _is_not_executed(error: RocketMQError) -> bool:
    """Return whether the broker has certainly not executed a request, and may execute the same one later."""
    if isinstance(error, BrokerBusyException):
        # A broker takes the request out of its queue, and answers SYSTEM_BUSY.
        return error.response_code == ResponseCode.SYSTEM_BUSY
    never_sent = isinstance(error, RemotingConnectException | RemotingTooMuchRequestException | RouteNotFoundException)
    return never_sent and error.retriable
