"""The life of a producer, as a table.

Rule 1: what the table does not have is refused with ``MQClientException``, naming the state.
Rule 2: START_FAILED comes first and is replaced at the end: a start that breaks off can be neither repeated nor shut
        down; only a group name that is taken leads back to the beginning.

Follows ``DefaultMQProducerImpl.start`` and ``shutdown`` (spec/producer.md section 1.1).
"""

from __future__ import annotations

import enum
import os
import threading
from typing import Final

from rocketmq_spark.errors import MQClientException


class ServiceState(enum.Enum):
    """Where a producer is in its life (``ServiceState.java``)."""

    CREATE_JUST = "CREATE_JUST"
    RUNNING = "RUNNING"
    SHUTDOWN_ALREADY = "SHUTDOWN_ALREADY"
    START_FAILED = "START_FAILED"


class Event(enum.Enum):
    """What moves a producer from state to state."""

    START = "start"
    STARTED = "started"
    GROUP_TAKEN = "group taken"
    SHUTDOWN = "shutdown"


TRANSITIONS: Final[dict[ServiceState, dict[Event, ServiceState]]] = {
    ServiceState.CREATE_JUST: {Event.START: ServiceState.START_FAILED},
    ServiceState.START_FAILED: {
        Event.STARTED: ServiceState.RUNNING,
        Event.GROUP_TAKEN: ServiceState.CREATE_JUST,
    },
    ServiceState.RUNNING: {Event.SHUTDOWN: ServiceState.SHUTDOWN_ALREADY},
    ServiceState.SHUTDOWN_ALREADY: {},
}

_ADVICE: Final = {
    ServiceState.CREATE_JUST: "call start() first, or use it in a with statement",
    ServiceState.RUNNING: "it is running already",
    ServiceState.SHUTDOWN_ALREADY: "make a new producer, one that was shut down can't be started again",
    ServiceState.START_FAILED: "its start failed: make a new producer with what the first error says mended",
}


class Lifecycle:
    """The state of one producer, and the process that it was last moved on in; safe for many threads."""

    def __init__(self) -> None:
        self.state = ServiceState.CREATE_JUST
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def fire(self, event: Event, who: str) -> None:
        """Move on.

        Raises
        ------
        MQClientException
            The state does not allow it.
        """
        if not self.try_fire(event):
            raise MQClientException(f"{who} can't {event.value} in state {self.state.value}: {_ADVICE[self.state]}")

    def try_fire(self, event: Event) -> bool:
        """Move on if the state allows it; return whether it did."""
        with self._lock:
            following = TRANSITIONS[self.state].get(event)
            if following is None:
                return False
            self.state = following
            # Nothing lives before the start: what a fork inherits unstarted, it may start.
            self._pid = os.getpid()
            return True

    def require_running(self, who: str) -> None:
        """Refuse work before the start, after the shutdown, and in a forked child.

        Raises
        ------
        MQClientException
        """
        if self.state is not ServiceState.RUNNING:
            raise MQClientException(f"{who} is in state {self.state.value}: {_ADVICE[self.state]}")
        if os.getpid() != self._pid:
            raise MQClientException(
                f"{who} was started in process {self._pid}, this is its fork {os.getpid()}: make another one here"
            )

    @property
    def foreign(self) -> bool:
        """True in a forked child: connections and threads are the parent's."""
        return os.getpid() != self._pid
