"""Sends remoting requests over the connections of an `IoLoop`: with a blocking wait, with a callback, or one-way.

Adds the namespace to the topics and groups in a request's ext fields. With credentials, signs each request unless its
code is in `unsigned`. Permits limit the requests of `start` and the one-way requests that are in flight. If time is
left, sends a request once more after GO_AWAY (docs/internals/remoting.md#connections). Repeats a blocking one also if
its signature was rejected and the provider has new credentials (docs/internals/access-control.md#signing).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from typing import Final, TypeAlias, TypeVar

from rocketmq_spark import errors
from rocketmq_spark.model.credentials import CredentialsProvider, gives_another, tell_refused, without_token
from rocketmq_spark.model.message import Buffer
from rocketmq_spark.model.names import check_namespace, is_none, unwrap, wrap
from rocketmq_spark.model.properties import PGROUP
from rocketmq_spark.model.send_result import TRANSACTION_PREPARED_TYPE, TransactionCheck
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode, broker_error, refuses_user
from rocketmq_spark.protocol.remoting.command import FLAG_ONEWAY, RemotingCommand
from rocketmq_spark.protocol.remoting.headers import RequestHeader, signed
from rocketmq_spark.transport.parallel import Permits
from rocketmq_spark.transport.remoting.loop import IoLoop
from rocketmq_spark.transport.remoting.requests import Answer, Request
from rocketmq_spark.transport.runtime import PROCESS, Runtime

logger = logging.getLogger("rocketmq_spark.transport")

T = TypeVar("T")
# A request with header fields, or only the code of one without any.
Query: TypeAlias = RequestHeader | RequestCode
Body: TypeAlias = "Buffer | tuple[Buffer, ...]"

# Seconds that a caller waits after the end of a request's timeout, before it reports that the loop has failed.
_GRACE: Final = 1.0

# The group of RocketMQ's own tools, which exists on every broker (``MixAll.TOOLS_CONSUMER_GROUP``).
TOOLS_CONSUMER: Final = "TOOLS_CONSUMER"

# The ext fields that name topics and groups. SendMessageRequestHeaderV2 uses letters: group, topic; flag, properties.
_NAMES: Final = ("topic", "producerGroup", "consumerGroup", "a", "b")
_SYS_FLAG: Final = "f"
_PROPERTIES: Final = "i"
_GROUP_OF_HALF: Final = re.compile(rf"(?<![^\x02])({PGROUP}\x01)([^\x02]+)")


class Namespace:
    """Adds a namespace to names of topics and groups, or removes it (docs/internals/access-control.md#namespaces)."""

    def __init__(self, name: str, create_topic_key: str) -> None:
        check_namespace(name)
        self.name = "" if is_none(name) else name
        self._outside = frozenset((TOOLS_CONSUMER, create_topic_key))

    def wrap(self, name: str) -> str:
        """Return the servers' name of a topic or group."""
        return name if name in self._outside else wrap(self.name, name)

    def unwrap(self, name: str) -> str:
        """Return the user's name of a topic or group; a name outside of the namespace is returned unchanged."""
        return unwrap(name, self.name)

    def members(self, names: Iterable[str]) -> dict[str, str]:
        """Return the names that are in the namespace, as servers know them, by the users' names."""
        if not self.name:
            return {name: name for name in names}
        # Unwrapping does not change a name of another namespace, or of none.
        return {bare: name for name in names if (bare := self.unwrap(name)) != name and wrap(self.name, bare) == name}

    def wrap_fields(self, ext_fields: Mapping[str, str]) -> Mapping[str, str]:
        """Return a request's ext fields with the servers' names."""
        if not self.name:
            return ext_fields
        fields = {**ext_fields, **{key: self.wrap(ext_fields[key]) for key in _NAMES if key in ext_fields}}
        if _PROPERTIES in fields and int(fields[_SYS_FLAG]) & TRANSACTION_PREPARED_TYPE:
            # The broker sends its checks of a half message to this group.
            fields[_PROPERTIES] = _GROUP_OF_HALF.sub(lambda hit: hit[1] + self.wrap(hit[2]), fields[_PROPERTIES])
        return fields

    def unwrap_check(self, check: TransactionCheck) -> TransactionCheck:
        """Return a broker's check of a transaction with the users' names."""
        if not self.name:
            return check
        message, properties = check.message, check.message.properties
        if PGROUP in properties:
            properties = {**properties, PGROUP: self.unwrap(properties[PGROUP])}
        return replace(check, message=replace(message, topic=self.unwrap(message.topic), properties=properties))


class RequestClient:
    """Sends requests of any code to any address over the connections of a loop.

    The provider of `credentials` is asked for each request that is signed; requests with a code in `unsigned` are not.
    The permits limit the requests of `start`, and the one-way requests. Blocking calls and `submit` need no permit.
    """

    def __init__(
        self,
        loop: IoLoop,
        namespace: Namespace,
        credentials: CredentialsProvider | None,
        unsigned: Container[int],
        async_permits: int,
        oneway_permits: int,
        runtime: Runtime = PROCESS,
    ) -> None:
        self.loop = loop
        self._runtime = runtime
        loop.on_end = self._on_end
        self.clock = loop.clock
        self._namespace = namespace
        self._credentials = credentials
        self._unsigned = unsigned
        self._async_permits = Permits(async_permits, "clientAsyncSemaphoreValue")
        self._oneway_permits = Permits(oneway_permits, "clientOnewaySemaphoreValue")

    def invoke(
        self, address: str, code: int, ext_fields: Mapping[str, str], body: Body, timeout: float
    ) -> RemotingCommand:
        """Send a request and return its answer, whatever its code; `timeout` also bounds the connect and the write.

        Nothing was sent after a RemotingConnectException or RemotingTooMuchRequestException. After another
        RemotingException the server may have executed the request. RocketMQError: the transport is closed, another
        process created it, or the caller is a callback, whose thread would wait for itself.
        """
        expires = self.clock() + timeout
        answer = self._wait(address, Request(code, ext_fields, _pieces(body), timeout))
        retry = answer.refused is not None and gives_another(self._credentials, answer.refused)
        if retry and (left := expires - self.clock()) > 0:
            answer = self._wait(address, Request(code, ext_fields, _pieces(body), left))
        assert answer.command is not None
        return answer.command

    def invoke_oneway(
        self, address: str, code: int, ext_fields: Mapping[str, str], body: Body, timeout: float, remark: str = ""
    ) -> None:
        """Send a request that the server never answers; return when the socket has taken its last byte.

        Raises as `invoke`; RemotingTooMuchRequestException or RemotingTimeoutException if no permit became free.
        """
        self._wait(address, Request(code, ext_fields, _pieces(body), timeout, flag=FLAG_ONEWAY, remark=remark))

    def call(self, address: str, request: Query, timeout: float, doing: str, body: Body = ()) -> RemotingCommand:
        """Send a request and return its answer if that is SUCCESS; any other code raises its error."""
        code, fields = (request, {}) if isinstance(request, RequestCode) else (request.code, request.to_ext_fields())
        answer = self.invoke(address, code, fields, body, timeout)
        if answer.code == ResponseCode.SUCCESS:
            return answer
        error = broker_error(answer.code, answer.remark, address, doing)
        if isinstance(error, errors.UserRefusedException) and self._credentials is not None and code in self._unsigned:
            raise errors.UserRefusedException(
                f"{doing}: {address} answered {error.response_code}: {error.remark} It demands signed requests, but "
                "requests to name servers are not signed by default. Set signNameServerRequests=true if nameServer is "
                "the address of your own proxy or name server with access control",
                *(error.response_code, error.remark, error.broker_addr),
            ) from error
        raise error

    def ask(
        self, address: str, request: Query, timeout: float, doing: str, decode: Callable[[RemotingCommand], T]
    ) -> T:
        """Return the decoded answer; raises as `call`, or RemotingCommandException if `decode` raises it."""
        answer = self.call(address, request, timeout, doing)
        try:
            return decode(answer)
        except errors.RemotingCommandException as exc:
            raise errors.RemotingCommandException(
                f"{doing}: {address} sent an answer that cannot be read: {exc} (check that it is a RocketMQ server)"
            ) from exc

    def ask_body(self, address: str, request: Query, timeout: float, doing: str, decode: Callable[[bytes], T]) -> T:
        """Return the decoded body of the answer; raises as `ask`."""
        return self.ask(address, request, timeout, doing, lambda answer: decode(bytes(answer.body)))

    def start(self, address: str, request: Request) -> None:
        """Send a request whose caller does not wait; without a free permit it fails at once."""
        self.loop.check()
        request.permit = self._async_permits.try_acquire()
        if request.permit is None:
            self.loop.refuse(request, self._async_permits.exhausted(f"{request.name} to {address}"))
            return
        try:
            self.submit(address, request)
        except errors.CredentialsError as exc:
            # Only this attempt fails: the provider may have credentials for the next one.
            self.loop.refuse(request, exc)
        except BaseException:
            request.permit.release()
            raise

    def submit(self, address: str, request: Request) -> None:
        """Sign and send a request without a permit: the caller limits how many are in flight."""
        self.loop.check()
        # Before the connection takes the request and its lock, because signing reads the whole body.
        fields = self._namespace.wrap_fields(request.ext_fields)
        request.signed_by = None
        if self._credentials is not None and request.code not in self._unsigned:
            request.signed_by = self._credentials.credentials()
            fields = signed(fields, request.body, request.signed_by)
        request.sent_fields = fields
        self.loop.submit(address, request)

    def _on_end(self, address: str, request: Request, answer: Answer) -> None:
        """Finish a request on the loop's thread; after GO_AWAY send it again, once, over a new connection."""
        command, signed_by = answer.command, request.signed_by
        if command is not None:
            command.remark = without_token(command.remark, signed_by)
        if command is not None and signed_by is not None and refuses_user(command.code, command.remark):
            tell_refused(self._credentials, signed_by)
            answer = replace(answer, refused=signed_by)
        if command is not None and command.code == ResponseCode.GO_AWAY and request.send_again(self.clock()):
            logger.debug("%s: go away; %s is sent again over a new connection", address, request.name)
            try:
                # With its signature: the provider could hold up this thread, and so all connections.
                self.loop.submit(address, request)
                return
            except errors.RocketMQError as exc:
                error = errors.RemotingConnectException(
                    f"{request.name} to {address}: the server is shutting down (GO_AWAY), and the resend failed: {exc}"
                )
                error.__cause__ = exc
                answer = Answer(None, error, answer.latency)
        request.finish(answer)

    def _wait(self, address: str, request: Request) -> Answer:
        timeout = request.timeout
        if self.loop.in_own_thread:
            text = f"{request.name} to {address}: not sent, because a blocking call in a callback"
            text = f"{text} would wait for its own thread"
            raise errors.RocketMQError(f"{text}. Use a call with a callback, or another thread")
        self.loop.check()
        done = self._runtime.event()
        answers: list[Answer] = []

        def on_answer(answer: Answer) -> None:
            answers.append(answer)
            done.set()

        request.on_answer = on_answer
        request.deadline = expires = self.clock() + timeout
        if request.flag == FLAG_ONEWAY:
            request.permit = self._oneway_permits.acquire(timeout, f"{request.name} to {address}")
        try:
            self.submit(address, request)
        except BaseException:
            if request.permit is not None:
                request.permit.release()
            raise
        while self.loop.polled and not done.is_set():
            self.loop.poll(max(0.0, expires - self.clock()))
        if not done.wait(timeout + _GRACE):
            text = f"{request.name} to {address}: the transport's thread did not end the request within {timeout:g} s"
            raise errors.RemotingTimeoutException(f"{text}; does a callback block this thread? ({self.loop!r})")
        answer = answers.pop()
        if answer.error is None:
            return answer
        try:
            raise answer.error
        finally:
            # The error's traceback holds this frame. With this name it would be a cycle that keeps the body.
            del answer


def _pieces(body: Body) -> tuple[Buffer, ...]:
    return body if isinstance(body, tuple) else (body,)
