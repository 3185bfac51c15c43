"""Requests over the loop's connections: waiting for the answer, told of it later, or without one.

Rule 1: codes, ext fields and bodies only; what they mean is the affair of who asks.
Rule 2: who does not wait takes a permit (spec/producer.md section 10.2); the request gives it back when it ends.
        Pulls do without: a reader has a window of its own.
Rule 3: an error of a server is an answer here, whatever its code.
Rule 4: who waits is spared the change of a user: a request that is refused for who signed it has done nothing, and is
        sent once more if others sign by then.

Follows NettyRemotingClient.java (invokeSync, invokeAsync, invokeOneway).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from rocketmq_spark.errors import CredentialsError, RemotingTimeoutException, RocketMQError
from rocketmq_spark.message import Buffer
from rocketmq_spark.transport.loop import IoLoop
from rocketmq_spark.transport.permits import Permits
from rocketmq_spark.transport.request import FLAG_REQUEST, Answer, OnAnswer, Request
from rocketmq_spark.wire.command import FLAG_ONEWAY, RemotingCommand

Body: TypeAlias = "Buffer | tuple[Buffer, ...]"

# The loop ends every call in time; this much longer a caller waits before it concludes that the loop is gone, seconds.
_GRACE: Final = 1.0


class RemotingClient:
    """The three ways to send a request.

    Parameters
    ----------
    loop : IoLoop
    clock : callable
        Seconds, monotonic.
    async_permits, oneway_permits : int
        How many requests may be under way whose callers do not wait, and how many oneway ones.
    """

    def __init__(self, loop: IoLoop, clock: Callable[[], float], async_permits: int, oneway_permits: int) -> None:
        self._loop = loop
        self._clock = clock
        self._async_permits = Permits(async_permits, "clientAsyncSemaphoreValue")
        self._oneway_permits = Permits(oneway_permits, "clientOnewaySemaphoreValue")

    @property
    def closed(self) -> bool:
        """True after `close`, or when the thread behind it has failed."""
        return self._loop.closed

    def invoke(
        self, address: str, code: int, ext_fields: Mapping[str, str], body: Body, timeout: float
    ) -> RemotingCommand:
        """Send a request and wait for its answer, whatever its code.

        Parameters
        ----------
        address : str
            ``host:port``.
        code : int
        ext_fields : mapping of str to str
        body : buffer, or tuple of buffers
        timeout : float
            Seconds in all: connecting, writing and the answer.

        Raises
        ------
        RemotingConnectException, RemotingTooMuchRequestException
            Nothing was sent.
        RemotingSendRequestException, RemotingTimeoutException, RemotingCommandException
            It may have been executed.
        CredentialsError
            The server refuses who signed, and there are no others.
        RocketMQError
            Closed, in another process, or called from a callback (which runs on the thread it would wait for).
        """
        expires = self._clock() + timeout
        answer = self._wait(address, code, ext_fields, body, timeout, FLAG_REQUEST)
        if answer.refused is not None and self._loop.hooks.gives_another(answer.refused):
            left = expires - self._clock()
            if left > 0:
                answer = self._wait(address, code, ext_fields, body, left, FLAG_REQUEST)
        assert answer.command is not None
        return answer.command

    def invoke_async(
        self, address: str, code: int, ext_fields: Mapping[str, str], body: Body, timeout: float, on_done: OnAnswer
    ) -> None:
        """Send a request and return; `on_done` is called once, on the transport's thread, and must not block.

        `timeout` counts from the last byte written. Without a permit: a ``RemotingTooMuchRequestException``.
        """
        self._start(address, Request(code, ext_fields, _pieces(body), timeout, on_done))

    def invoke_oneway(
        self, address: str, code: int, ext_fields: Mapping[str, str], body: Body, timeout: float, remark: str = ""
    ) -> None:
        """Send a request that the server never answers; return when the socket has taken its last byte.

        Raises what :meth:`invoke` raises, and a ``RemotingTooMuchRequestException`` or ``RemotingTimeoutException``
        when no permit came free in time. Java 5.x only logs a failed oneway; ours says so (spec/producer.md 10.5).
        """
        self._wait(address, code, ext_fields, body, timeout, FLAG_ONEWAY, remark)

    def close(self) -> None:
        """Close every connection and end the thread; what is in flight fails. Idempotent."""
        self._loop.close()

    def _start(self, address: str, request: Request) -> None:
        """Submit a request whose caller does not wait, if there is a permit for it."""
        self._loop.check()
        request.permit = self._async_permits.take()
        if request.permit is None:
            self._loop.refuse(request, self._async_permits.exhausted(f"{request.name} to {address}"))
            return
        try:
            self._loop.submit(address, request)
        except CredentialsError as exc:
            # Nobody to sign as: of this attempt, and perhaps not of the next.
            self._loop.refuse(request, exc)
        except BaseException:
            request.permit.release()
            raise

    def _wait(
        self,
        address: str,
        code: int,
        ext_fields: Mapping[str, str],
        body: Body,
        timeout: float,
        flag: int,
        remark: str = "",
    ) -> Answer:
        if self._loop.in_own_thread:
            raise RocketMQError(
                f"request {code} to {address}: a blocking call in a callback would wait for its own thread; "
                "use invoke_async there, or another thread"
            )
        self._loop.check()
        done = threading.Event()
        answers: list[Answer] = []

        def on_answer(answer: Answer) -> None:
            answers.append(answer)
            done.set()

        expires = self._clock() + timeout
        request = Request(
            code, ext_fields, _pieces(body), timeout, on_answer, expires=expires, flag=flag, remark=remark
        )
        if flag == FLAG_ONEWAY:
            request.permit = self._oneway_permits.acquire(timeout, f"{request.name} to {address}")
        try:
            self._loop.submit(address, request)
        except BaseException:
            if request.permit is not None:
                request.permit.release()
            raise
        while self._loop.polled and not done.is_set():
            self._loop.poll(max(0.0, expires - self._clock()))
        if not done.wait(timeout + _GRACE):
            raise RemotingTimeoutException(
                f"request {code} to {address}: the transport's thread did not end it within {timeout:g} s ({self!r})"
            )
        answer = answers.pop()
        if answer.error is None:
            return answer
        try:
            raise answer.error
        finally:
            # The error's traceback holds this frame: together with this name that would be a cycle around the body.
            del answer


def _pieces(body: Body) -> tuple[Buffer, ...]:
    return body if isinstance(body, tuple) else (body,)
