"""The replies that tests set for requests to a fake name server or broker, and how the server gives them.

`fake_proxy` gives the replies that tests set for a fake proxy.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from rocketmq_spark.errors import MQBrokerException, RocketMQError
from rocketmq_spark.model.message import SendStatus
from rocketmq_spark.protocol.remoting.codes import ResponseCode, broker_error
from rocketmq_spark.protocol.remoting.command import FLAG_RESPONSE, RemotingCommand

# The version of every answer and request of a server: that of 5.5.0.
VERSION: Final = 513
# The most requests that a server keeps for tests to look at.
KEPT_REQUESTS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to one request: acknowledge it with `status`, fail with `error`, or stay `silent`.

    `stored` says whether the rows are kept. By default only an answer with a status keeps them.
    ``Reply(silent=True, stored=True)`` is a lost acknowledgement.
    """

    status: SendStatus = SendStatus.SEND_OK
    error: RocketMQError | None = None
    delay: float = 0.0  # Seconds until the outcome. A delay beyond the send's timeout is a RemotingTimeoutException
    silent: bool = False
    stored: bool | None = None
    # Close the connection instead of the answer; send the answer that many times more.
    closes: bool = False
    repeats: int = 0

    @classmethod
    def code(cls, code: int, remark: str = "", delay: float = 0.0) -> Reply:
        """Return a reply with the error of a broker's response code, such as 2 (SYSTEM_BUSY)."""
        return cls(error=broker_error(code, remark, "fake", "sending"), delay=delay)

    @property
    def stores(self) -> bool:
        """Whether the rows are kept."""
        if self.stored is not None:
            return self.stored
        return self.error is None and not self.silent and not self.closes


ReplyOf: TypeAlias = "Reply | Callable[[RemotingCommand], Reply | None]"


class Channel(Protocol):
    """A client's connection, as a server sees it."""

    def send(self, command: RemotingCommand) -> None:
        """Send an answer, or a request of the server. Does nothing after the connection has ended."""

    def close(self) -> None:
        """Close the connection."""


class Replies:
    """The replies to the next requests, each with a key: the request code, or None.

    `always` has the replies to the requests after these. `played` counts the replies by their kind.
    """

    def __init__(self) -> None:
        self.always: dict[int | None, ReplyOf] = {}
        self.played: Counter[str] = Counter()
        self._next: defaultdict[int | None, deque[ReplyOf]] = defaultdict(deque)

    def add(self, replies: tuple[ReplyOf, ...], key: int | None, times: int) -> None:
        """Add replies to the next requests with a key, `times` times in all."""
        self._next[key].extend(replies * times)

    def take(self, command: RemotingCommand, *keys: int | None) -> Reply | None:
        """Return the reply to a request with one of the keys; None if the server itself answers."""
        for key in keys:
            reply = self._next[key].popleft() if self._next[key] else self.always.get(key)
            if callable(reply):
                reply = reply(command)
            if reply is not None:
                return reply
        return None

    def play(
        self,
        reply: Reply,
        command: RemotingCommand,
        channel: Channel,
        execute: Callable[[], RemotingCommand | None],
        after: Callable[[float, Callable[[], None]], None],
    ) -> None:
        """Answer as a reply says; the request is executed if the reply stores. `after` calls after some seconds."""
        self.played[_kind(reply)] += 1
        response = execute() if reply.stores else None
        if reply.error is not None:
            code, remark = getattr(reply.error, "response_code", ResponseCode.SYSTEM_ERROR), str(reply.error)
            response = response_to(command, code, getattr(reply.error, "remark", remark))
        elif response is not None and response.code == ResponseCode.SUCCESS and reply.status is not SendStatus.SEND_OK:
            response.code = reply.status.value
        if reply.closes:
            after(reply.delay, channel.close)
        elif response is not None and not reply.silent and not command.is_oneway:
            for _ in range(1 + reply.repeats):
                after(reply.delay, functools.partial(channel.send, response))


def response_to(
    command: RemotingCommand,
    code: int = ResponseCode.SUCCESS,
    remark: str = "",
    ext_fields: Mapping[str, str] | None = None,
    body: bytes = b"",
) -> RemotingCommand:
    """Return the answer to a request."""
    return RemotingCommand(int(code), command.opaque, ext_fields or {}, body, FLAG_RESPONSE, remark, "JAVA", VERSION)


def _kind(reply: Reply) -> str:
    """Return the name under which a reply is counted."""
    stored = "after storing" if reply.stores else "before storing"
    if reply.closes:
        return f"connection closed {stored}"
    if reply.silent:
        return f"no answer {stored}"
    if isinstance(reply.error, MQBrokerException):
        return f"code {reply.error.response_code} {stored}"
    if reply.repeats:
        return "answer repeated"
    return "answer delayed" if reply.delay else reply.status.name
