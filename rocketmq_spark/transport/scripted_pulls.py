"""What scripted brokers answer to consumers: the names of topics, and messages from what they keep.

Rule 1: a pull answers as a broker does (spec/remoting.md section 13.1), unless the script of its queue says otherwise.
Rule 2: what is there is looked at when the request comes, also where the answer is held for its `suspend_ms`.
Rule 3: nothing expires by itself; a test says what has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.errors import RemotingTimeoutException
from rocketmq_spark.message import Message, MessageQueue
from rocketmq_spark.pull import PullOutcome, PullRequest, PullStatus
from rocketmq_spark.route_data import TopicRouteData
from rocketmq_spark.transport.scripted_calls import ScriptedCalls
from rocketmq_spark.wire.records import encode_record

# A broker's own limit (spec/remoting.md section 13.1).
_MOST: Final = 32


@dataclass(frozen=True, slots=True)
class PullReply:
    """What a scripted broker does with one pull.

    Parameters
    ----------
    outcome : PullOutcome, optional
        The answer, or the error. Default: what the queue holds.
    most : int, default 32
        So many messages at most, if the queue holds them.
    delay : float, default 0.0
        Seconds until the outcome; beyond the pull's own timeout it becomes a ``RemotingTimeoutException``.
    silent : bool, default False
        No answer ever comes: the pull times out.
    """

    outcome: PullOutcome | None = None
    most: int = _MOST
    delay: float = 0.0
    silent: bool = False


class ScriptedPulls(ScriptedCalls):
    """The part of a scripted transport that consumers use; parameters as of `ScriptedCalls`."""

    def __init__(self, routes: Mapping[str, TopicRouteData], clock: Callable[[], float]) -> None:
        super().__init__(routes, clock)
        self.pulls: list[PullRequest] = []
        self.always_pull: dict[MessageQueue, PullReply] = {}
        # The first message left of each queue; `removed`: without the correction of the minimum offset that follows.
        self.expired: dict[MessageQueue, int] = {}
        self.removed: dict[MessageQueue, int] = {}
        self.members: dict[tuple[str, str], set[str]] = {}
        self._pull_script: dict[MessageQueue, deque[PullReply | Callable[[PullRequest], PullReply]]] = {}

    def keep(self, queue: MessageQueue, messages: Iterable[Message]) -> None:
        """Store messages at the end of a queue, as if they had been sent there."""
        with self._changed:
            self._store.put(queue, messages, self._clock())

    def play_pulls(self, queue: MessageQueue, *replies: PullReply | Callable[[PullRequest], PullReply]) -> None:
        """Add to the end of a queue's script; used up, `always_pull` decides, and then what the queue holds."""
        with self._changed:
            self._pull_script.setdefault(queue, deque()).extend(replies)

    def topics(self, timeout: float) -> frozenset[str]:
        """Return the topics of `routes`."""
        self._record(timeout, "topics")
        return frozenset(self.routes)

    def min_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the first offset that has not expired."""
        self._record(timeout, "min_offset", queue, address)
        return self.expired.get(queue, 0)

    def check_filter(
        self, address: str, topic: str, group: str, expression: str, expression_type: str, timeout: float
    ) -> None:
        """Record the call."""
        self._record(timeout, "check_filter", address, topic, group, expression, expression_type)

    def update_consumer_offset(
        self, queue: MessageQueue, group: str, offset: int, address: str, timeout: float
    ) -> None:
        """Record the call."""
        self._record(timeout, "update_consumer_offset", queue, group, offset, address)

    def register_consumer(self, client_id: str, group: str, address: str, timeout: float) -> None:
        """Record the call, and the client among the group's `members`."""
        self._record(timeout, "register_consumer", client_id, group, address)
        self.members.setdefault((group, address), set()).add(client_id)

    def consumers(self, group: str, address: str, timeout: float) -> tuple[str, ...]:
        """Return the group's `members` at the broker."""
        self._record(timeout, "consumers", group, address)
        return tuple(self.members.get((group, address), ()))

    def _pulled(self, request: PullRequest, timeout: float) -> tuple[float, PullOutcome]:
        """Return when a pull ends, in seconds from now, and how."""
        queue = request.target.queue
        script = self._pull_script.get(queue)
        found = script.popleft() if script else self.always_pull.get(queue, PullReply())
        reply = found if isinstance(found, PullReply) else found(request)
        timeout += request.suspend_ms / 1000
        if reply.silent or reply.delay > timeout:
            error = RemotingTimeoutException(f"pulling from {queue}: no answer within {timeout:g} s")
            return timeout, PullOutcome(None, error=error)
        if reply.outcome is not None:
            return reply.delay, reply.outcome
        outcome = self._held(request, reply.most)
        held = request.suspend_ms / 1000 if outcome.status is PullStatus.NO_NEW_MSG else 0.0
        return max(reply.delay, held), outcome

    def _held(self, request: PullRequest, most: int) -> PullOutcome:
        queue, offset = request.target.queue, request.offset
        first, end = self.expired.get(queue, 0), len(self.stored.get(queue, ()))
        if offset < first or offset > end:
            return PullOutcome(PullStatus.OFFSET_ILLEGAL, first if offset < first else end, first, end)
        stop = min(offset + max(1, min(request.target.max_msg_nums, most, _MOST)), end)
        if offset == stop:
            return PullOutcome(PullStatus.NO_NEW_MSG, offset, first, end)
        left = max(offset, self.removed.get(queue, 0))
        if left >= stop:
            return PullOutcome(PullStatus.OFFSET_ILLEGAL, stop, first, end)
        body = b"".join(map(encode_record, self._store.messages(queue, left, stop)))
        return PullOutcome(PullStatus.FOUND, stop, first, end, body)
