"""Calls proxies over gRPC, with a blocking wait or with a callback (docs/internals/grpc.md#calls).

gRPC reports the end of a call with a callback on one of gRPC's threads, or on the thread that starts the call. So a
queue passes each end to the client's own thread, which calls back. The code that removes such a call from the table of
calls in flight reports its end, so each ends once. From its first call until it is closed, a client stays referenced:
garbage collection in a forked child would close its channels, which can hang the child (docs/internals/grpc.md#forks).
"""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

from google.protobuf.message import DecodeError

from rocketmq_spark import errors
from rocketmq_spark.errors import escaped
from rocketmq_spark.model.credentials import Credentials, reply_without_token, without_token
from rocketmq_spark.protocol.batches import REPEATED, check_parts
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc.codes import call_error, proxy_error
from rocketmq_spark.transport.base import thread_failed
from rocketmq_spark.transport.grpc.channels import Channels
from rocketmq_spark.transport.grpc.metadata import Metadata, MetadataSource
from rocketmq_spark.transport.parallel import Permit, Permits

if TYPE_CHECKING:
    import grpc
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message as ProtoMessage

logger = logging.getLogger("rocketmq_spark.transport")

_SERVICE: Final = "/apache.rocketmq.v2.MessagingService/"
_JOIN_TIMEOUT: Final = 5.0
# Default limit of a reply's parts (see `check_parts`): 4 MiB. A half message has 32,767 bytes of keys.
_PARTS: Final = 65_536
# A shorter reply is parsed at once: 32,768 parts of 2 bytes need 2 MiB.
_SHORT: Final = 65_536
# Parts of gRPC's texts for a connect that the server ended; the last three mean a TLS alert, in various releases.
_HUNG_UP: Final = ("socket closed", "connection reset", "secure read failed", "unwrap failed", "tls handshake failed")

_opened: Final[set[GrpcClient]] = set()


@dataclass(frozen=True, slots=True)
class GrpcAnswer:
    """How a call ended. Exactly one of `reply` (whatever its status) and `error` is set."""

    reply: bytes | None
    error: errors.RocketMQError | None
    latency_ms: float
    doing: str
    signed_by: Credentials | None = None


OnAnswer: TypeAlias = Callable[[GrpcAnswer], None]


_CallT = TypeVar("_CallT")
_ReplyT = TypeVar("_ReplyT", bound="ProtoMessage")


@dataclass(frozen=True, slots=True)
class _Flight:
    """A call in flight with a callback."""

    endpoint: str
    doing: str
    on_answer: OnAnswer
    started: float
    permit: Permit | None = None
    signed_by: Credentials | None = None


class GrpcClient:
    """The calls and channels of one transport in one process; safe for many threads.

    `closed` is also True if the client's thread failed.
    """

    def __init__(
        self, channels: Channels, metadata: MetadataSource, permits: Permits, clock: Callable[[], float]
    ) -> None:
        self._channels = channels
        self._metadata = metadata
        self._permits = permits
        self._clock = clock
        self._numbers = itertools.count()
        self._flights: dict[int, _Flight] = {}
        # (number of the flight, its call or the error of a call that was not made, time); None ends the thread.
        self._ended: queue.SimpleQueue[tuple[int, grpc.Future | errors.RocketMQError, float] | None] = (
            queue.SimpleQueue()
        )
        self._calls: dict[tuple[str, str], grpc.UnaryUnaryMultiCallable] = {}
        # The last stream of each endpoint, kept from garbage collection.
        self._streams: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # gRPC starts a thread for the calls of `start` and `stream` on each channel, and ends it after the last one.
        self._starting = threading.Lock()
        self._no_threads = False
        self.closed = False

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<GrpcClient {self._metadata.client_id} {state}, {len(self._flights)} in flight, {self._channels!r}>"

    def start(
        self, endpoint: str, method: str, request: bytes, timeout: float, on_answer: OnAnswer, doing: str
    ) -> None:
        """Start a call and return; `on_answer` is called once, on the client's thread, and must not block.

        RocketMQError: the client is closed; `on_answer` is not called.
        """
        try:
            call, metadata, signed_by, doing = self._prepared(endpoint, method, timeout, doing)
            permit = self._permits.try_acquire()
            if permit is None:
                raise self._permits.exhausted(doing)
        except (errors.CredentialsError, errors.RemotingException) as exc:
            # Without credentials, a channel or a permit this call fails; the next one may succeed.
            self.refuse(exc, on_answer)
            return
        try:
            number = self._register(_Flight(endpoint, doing, on_answer, self._clock(), permit, signed_by))
        except BaseException:
            permit.release()
            raise
        try:
            started = self._with_thread(functools.partial(call.future, request, timeout, metadata))
            if started is None:
                started = _waited_for(call, request, timeout, metadata)
        except BaseException:
            # A flight that left the table was ended by `close`, which has closed the channel too.
            if self._flights.pop(number, None) is not None:
                permit.release()
                self._check()
                raise
        else:
            started.add_done_callback(lambda ended: self._ended.put((number, ended, self._clock())))

    def refuse(self, error: errors.RocketMQError, on_answer: OnAnswer) -> None:
        """Fail a call that can't be made, on the client's thread like all others."""
        now = self._clock()
        self._ended.put((self._register(_Flight("", "", on_answer, now)), error, now))

    def invoke(
        self,
        endpoint: str,
        method: str,
        request: ProtoMessage,
        reply_type: type[_ReplyT],
        timeout: float,
        doing: str,
        *,
        most_parts: int = _PARTS,
    ) -> _ReplyT:
        """Call and return the reply; MQBrokerException if its status is not OK, RemotingException without a reply."""
        call, metadata, signed_by, doing = self._prepared(endpoint, method, timeout, doing)
        try:
            started = _waited_for(call, request.SerializeToString(), timeout, metadata)
        except ValueError:
            self._check()
            raise
        end = self._end_of(started, endpoint, doing, signed_by)
        if not isinstance(end, errors.RocketMQError):
            reply = parsed(end, reply_type, endpoint, doing, most_parts)
            error = error_in(cast("Any", reply).status, endpoint, doing)
            if error is None:
                return reply
            end = error
        self.report(end, signed_by)
        raise end

    def report(self, error: errors.RocketMQError | None, signed_by: Credentials | None) -> None:
        """Report rejected credentials to their provider."""
        if isinstance(error, errors.UserRefusedException):
            self._metadata.refused(signed_by)

    def stream(self, endpoint: str, method: str, requests: Iterator[bytes]) -> Any:
        """Open a stream: an iterator of the server's messages as bytes, with `cancel`; raises ``grpc.RpcError``."""
        metadata = self._metadata.fresh().metadata
        call = self._channel(endpoint).stream_stream(_SERVICE + method)
        stream = self._with_thread(functools.partial(call, requests, metadata=metadata))
        if stream is None:
            raise errors.RocketMQError(f"{endpoint}: {method} is not called, because this process can start no thread")
        self._streams[endpoint] = stream
        return stream

    def open(self) -> None:
        """Start the thread. Idempotent."""
        with self._lock:
            self._check()
            self._start_thread()

    def close(self) -> None:
        """Close the channels and end the thread; calls in flight fail. Idempotent."""
        with self._lock:
            self.closed = True
            thread = self._thread
        if self._no_threads:
            # gRPC would wait forever for the call without a thread, also to free the channel. The client's thread keeps
            # it until the process has ended.
            return
        self._ended.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT)
        self._channels.close()
        self._streams.clear()
        _opened.discard(self)

    def _prepared(
        self, endpoint: str, method: str, timeout: float, doing: str
    ) -> tuple[grpc.UnaryUnaryMultiCallable, Metadata, Credentials | None, str]:
        """Return gRPC's function for a call, its metadata and credentials, and `doing` with the request's id."""
        call = self._calls.get((endpoint, method))
        if call is None:
            call = self._calls[endpoint, method] = self._channel(endpoint).unary_unary(_SERVICE + method)
        request_id, metadata, signed_by = self._metadata.fresh()
        doing = f"{doing} (request {request_id})"
        if timeout <= 0:
            raise errors.RemotingTooMuchRequestException(f"{doing}: not sent, because no time is left")
        return call, metadata, signed_by, doing

    def _channel(self, endpoint: str) -> grpc.Channel:
        self._check()
        _opened.add(self)
        return self._channels.channel(endpoint)

    def _check(self) -> None:
        if self.closed:
            raise errors.RocketMQError("this transport is closed: make a new one")

    def _register(self, flight: _Flight) -> int:
        number = next(self._numbers)
        with self._lock:
            self._check()
            self._start_thread()
            self._flights[number] = flight
        return number

    def _start_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="rocketmq-spark-grpc", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:
                raise thread_failed(exc) from exc
            # Only a thread that runs: the next call starts it again, instead of waiting forever.
            self._thread = thread

    def _run(self) -> None:
        try:
            while (ended := self._ended.get()) is not None:
                number, end, at = ended
                flight = self._flights.get(number)
                if flight is not None:
                    end = (
                        end
                        if isinstance(end, errors.RocketMQError)
                        else self._end_of(end, flight.endpoint, flight.doing, flight.signed_by)
                    )
                    self._finish(number, end, at)
        finally:
            # Closed, or this thread failed: no other callbacks would be called.
            with self._lock:
                self.closed = True
            for number, flight in tuple(self._flights.items()):
                text = f"{flight.doing}: this process closed its connection before the proxy replied"
                text += "; the request may have been executed"
                self._finish(number, errors.RemotingSendRequestException(text), self._clock())

    def _with_thread(self, start: Callable[[], _CallT]) -> _CallT | None:
        """Start a call that gRPC's thread ends; None if this process can start none, as when it ends."""
        with self._starting:
            if not self._no_threads:
                try:
                    return start()
                except RuntimeError:
                    # gRPC counts this call, and starts no thread for later ones: they would never end.
                    self._no_threads = True
        return None

    def _finish(self, number: int, end: bytes | errors.RocketMQError, at: float) -> None:
        flight = self._flights.pop(number, None)
        if flight is None:
            return
        if flight.permit is not None:
            flight.permit.release()
        reply, error = (None, end) if isinstance(end, errors.RocketMQError) else (end, None)
        try:
            flight.on_answer(GrpcAnswer(reply, error, (at - flight.started) * 1000.0, flight.doing, flight.signed_by))
        except Exception:
            logger.exception(
                "the callback of a call to a proxy raised (%s)", flight.doing or "the call was not started"
            )

    def _end_of(
        self, call: grpc.Future, endpoint: str, doing: str, signed_by: Credentials | None
    ) -> bytes | errors.RocketMQError:
        """Wait for a call; return its reply, or the error."""
        code = call.code()
        if code.name == "OK":
            return reply_without_token(cast("bytes", call.result()), signed_by)
        details = without_token(call.details() or "", signed_by)
        error = call_error(code.name, details, endpoint, doing, self._channels.server_name)
        if type(error) is errors.RemotingConnectException and any(words in details.lower() for words in _HUNG_UP):
            try:
                if (remedy := self._channels.explained(endpoint)) is not None:
                    kind, text = remedy
                    error = kind(f"{doing}: {endpoint}: {text}")
            except Exception as exc:
                # Return the call's own error, even if its cause stays unknown.
                logger.debug("finding out why %s closed the connection failed: %r", endpoint, exc)
        # The traceback of gRPC's own exception would show the server's text unescaped and on several lines.
        error.__cause__ = RuntimeError(escaped(without_token(str(call.exception()), signed_by)))
        return error


def _waited_for(call: grpc.UnaryUnaryMultiCallable, request: bytes, timeout: float, metadata: Metadata) -> grpc.Future:
    """Make a call, wait for its end in this thread, and return it."""
    import grpc

    try:
        return call.with_call(request, timeout, metadata)[1]
    except grpc.RpcError as exc:
        # gRPC's error of a call is this call.
        return cast("grpc.Future", exc)


def error_in(status: pb.Status, endpoint: str, doing: str) -> errors.RocketMQError | None:
    """Return the error for a reply's status, None for OK."""
    return None if status.code == pb.OK else proxy_error(status.code, status.message, endpoint, doing)


def parsed(data: bytes, reply_type: type[_ReplyT], endpoint: str, doing: str, most_parts: int = _PARTS) -> _ReplyT:
    """Return the parsed reply or command; RemotingCommandException if it is invalid, or long with too many parts."""
    reply = reply_type()
    try:
        if len(data) > _SHORT:
            check_parts(data, _fields_of(reply_type.DESCRIPTOR), most_parts)
        reply.ParseFromString(data)
    except (DecodeError, errors.RemotingCommandException) as exc:
        text = f"{doing}: {endpoint} answered {len(data)} bytes that are not a valid reply: {exc}"
        raise errors.RemotingCommandException(text) from exc
    return reply


@functools.cache
def _fields_of(message: Descriptor) -> Mapping[int, Any]:
    """Return the fields of a message type for `check_parts`. It ends, because no type contains itself."""
    return {
        field.number: _fields_of(field.message_type) if field.message_type else REPEATED if field.is_repeated else None
        for field in message.fields
    }
