"""What a reader asks of a broker, and what comes back. Frozen values without behaviour.

Follows ``PullMessageRequestHeader.java``, ``PullResult.java`` and ``PullStatus.java``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.message import Buffer, MessageQueue


class PullStatus(enum.Enum):
    """What a broker found at an offset (``PullStatus.java``); the value is the response code."""

    FOUND = 0
    NO_NEW_MSG = 19
    NO_MATCHED_MSG = 20
    OFFSET_ILLEGAL = 21


@dataclass(frozen=True, slots=True, eq=False)
class PullTarget:
    """What all requests for messages of one queue share. It is itself alone: two equal ones are not one.

    Parameters
    ----------
    queue : MessageQueue
        With the topic as brokers know it.
    consumer_group : str
    max_msg_nums : int
        The server's own limits apply beside it.
    sub_expression : str
        ``*``, ``tagA || tagB``, or SQL92.
    expression_type : str
        ``TAG`` or ``SQL92``.
    """

    queue: MessageQueue
    consumer_group: str
    max_msg_nums: int
    sub_expression: str
    expression_type: str


@dataclass(frozen=True, slots=True)
class PullRequest:
    """One request for messages.

    Parameters
    ----------
    target : PullTarget
    address : str
        ``host:port`` of the broker, master or slave.
    offset : int
        The first one wanted.
    suspend_ms : int, default 0
        How long the broker may hold the request until there is a message; 0: it answers at once.
    """

    target: PullTarget
    address: str
    offset: int
    suspend_ms: int = 0


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """How one request ended.

    Parameters
    ----------
    status : PullStatus or None
        None where there is an error.
    next_begin_offset, min_offset, max_offset : int
        Where to go on; what the queue holds, the last one excluded.
    body : bytes or memoryview
        Records (spec/remoting.md section 8).
    error : RocketMQError or None
    """

    status: PullStatus | None
    next_begin_offset: int = -1
    min_offset: int = -1
    max_offset: int = -1
    body: Buffer = b""
    error: RocketMQError | None = None


@dataclass(frozen=True, slots=True)
class Pulled:
    """The records of one answer, and which of their messages count.

    Parameters
    ----------
    queue : MessageQueue
        With the topic as the user knows it.
    start, end : int
        The first offset wanted, and the first one behind it that is not.
    body : bytes or memoryview
        Empty if the broker no longer has the messages.
    contiguous : bool, default False
        Every offset from `start` to `end` must be in the body; a missing one is lost data.
    """

    queue: MessageQueue
    start: int
    end: int
    body: Buffer
    contiguous: bool = False
