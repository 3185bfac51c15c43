"""The life of a connection, as a table.

Rule 1: what the table does not have can't happen: firing it is a KeyError, and a fault of ours.
Rule 2: nothing leaves CLOSED. The next request makes a new connection.
"""

from __future__ import annotations

import enum
from typing import Final


class State(enum.Enum):
    """Where a connection is in its life."""

    CONNECTING = "connecting"  # requests queue up
    OPEN = "open"
    DRAINING = "draining"  # the server said GO_AWAY: answers still come, new requests go to a new connection
    CLOSED = "closed"


class Event(enum.Enum):
    """What moves a connection from state to state."""

    CONNECTED = "connected"
    GO_AWAY = "go away"
    CLOSE = "close"


TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.CONNECTING: {Event.CONNECTED: State.OPEN, Event.CLOSE: State.CLOSED},
    State.OPEN: {Event.GO_AWAY: State.DRAINING, Event.CLOSE: State.CLOSED},
    State.DRAINING: {Event.GO_AWAY: State.DRAINING, Event.CLOSE: State.CLOSED},
    State.CLOSED: {},
}
