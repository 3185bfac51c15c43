"""The messages of an asyncio producer in batches: which share a request, when it is sent, and which futures it ends.

All methods run in the event loop. Only after it was closed, other threads send the remaining messages.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from rocketmq_spark.errors import MQClientException, RemotingTooMuchRequestException, RocketMQError
from rocketmq_spark.model.message import Message
from rocketmq_spark.model.names import RETRY_PREFIX, is_blank
from rocketmq_spark.model.properties import KEYS, SHARDING_KEY, WAIT
from rocketmq_spark.model.send_result import SendResult, SharedResult
from rocketmq_spark.producer.async_send import SendFuture
from rocketmq_spark.producer.encode import NEVER_SHARED, ONLY_WAITS
from rocketmq_spark.producer.producer import Producer

logger = logging.getLogger("rocketmq_spark.producer")

# Bytes of a message beyond its body and texts. A batch of 4 MiB then has at most 32,000 messages, the brokers' limit.
_OVERHEAD: Final = 132
MOST_BATCH_BYTES: Final = 4 * 1024 * 1024
# Requests of a topic in flight. Messages that come meanwhile share the next batches.
_MOST_IN_FLIGHT: Final = 4
# Proxies send messages with a sharding key one after the other.
_NEVER_BATCHED: Final = NEVER_SHARED | {SHARDING_KEY}


class Waiter(asyncio.Future[SendResult]):
    """The future of one message, or of a batch of the caller. A refused one has no `batch`."""

    __slots__ = ("batch",)
    batch: _Batch

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the wait; the text of the error says whether the message may be stored."""
        if self.done():
            return super().cancel(msg)
        batch = self.batch
        batch.cancelled = True
        topic = batch.messages[0].topic
        if batch.sent:
            text = f"sending to topic {topic}: cancelled while the request is in flight; the message may be stored"
        else:
            text = f"sending to topic {topic}: cancelled before the request; the message is not sent"
        return super().cancel(text if msg is None else f"{msg} ({text})")


class _Batch:
    """Messages of one request, and the futures of their results; one future if the caller made the batch."""

    __slots__ = ("cancelled", "deadline", "maybe_stored", "messages", "nbytes", "sent", "waiters")

    def __init__(self, messages: list[Message], waiters: list[Waiter], nbytes: int, deadline: float = 0.0) -> None:
        self.messages = messages
        self.waiters = waiters
        self.nbytes = nbytes
        self.deadline = deadline  # Of the event loop's clock
        self.cancelled = False
        self.sent = False
        self.maybe_stored = False  # By an attempt of an earlier request

    def drop_cancelled(self) -> None:
        """Leave out the messages whose futures are cancelled."""
        if self.cancelled:
            kept = [number for number, waiter in enumerate(self.waiters) if not waiter.done()]
            self.messages = [self.messages[number] for number in kept]
            self.waiters = [self.waiters[number] for number in kept]


class _Lane:
    """The batches of one topic and ``WAIT``: an open one, and full ones that wait for a request to end."""

    __slots__ = ("in_flight", "key", "open", "ready", "scheduled")

    def __init__(self, key: tuple[str, str | None]) -> None:
        self.key = key
        self.open: _Batch | None = None
        self.ready: deque[_Batch] = deque()
        self.in_flight = 0
        self.scheduled = False

    def close(self) -> None:
        """Let later messages begin another batch."""
        if self.open is not None:
            self.ready.append(self.open)
            self.open = None


class Batches:
    """The messages of one producer that are not acknowledged, in batches of at most `batch_bytes` by topic."""

    def __init__(self, blocking: Producer, batch_bytes: int, max_pending_bytes: int) -> None:
        options = blocking.options
        self._blocking = blocking
        self._batch_bytes = min(batch_bytes, options.max_message_size)
        self._most_pending = max_pending_bytes
        # Larger bodies are compressed, which those of a batch are not.
        self._most_body = options.max_message_size
        if options.compress_type != "NONE":
            self._most_body = min(self._most_body, options.compress_msg_body_over_howmuch - 1)
        # A compaction topic drops messages without keys from a batch. A proxy does not report whether a topic is one.
        self._keys_needed = options.over_grpc
        self._timeout = options.send_msg_timeout / 1000
        self._lanes: dict[tuple[str, str | None], _Lane] = {}
        self.pending_bytes = 0
        # Futures of `wait_for`, with the most pending bytes at which they are done.
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        # Failed requests whose `end` the event loop has not called.
        self._unprocessed: dict[_Batch, BaseException] = {}
        # Guards the sends of other threads after the event loop was closed.
        self._closed_loop_lock = threading.RLock()
        self._warned = False

    async def wait_for(self, nbytes: int) -> None:
        """Wait until at most this number of bytes is pending."""
        while self.pending_bytes > nbytes:
            waiting = nbytes, asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            try:
                await waiting[1]
            finally:
                self._waiting.remove(waiting)

    def join(self, loop: asyncio.AbstractEventLoop, message: Message, waiter: Waiter) -> bool:
        """Add a message to the open batch of its topic; return False if it must be sent alone.

        A message that could make the others fail is sent alone. The steps are not methods, because each message would
        pay for the calls.
        """
        if type(message) is not Message or type(message.body) is not bytes or type(message.topic) is not str:
            return False
        properties, nbytes = message.properties, len(message.body)
        if not 0 < nbytes <= self._most_body or (self._keys_needed and is_blank(properties.get(KEYS) or "")):
            return False
        key: tuple[str, str | None]
        if properties == ONLY_WAITS:
            key, nbytes = (message.topic, "true"), nbytes + _OVERHEAD
        elif _NEVER_BATCHED.isdisjoint(properties):
            key, nbytes = (message.topic, properties.get(WAIT)), _size(message)
        else:
            return False
        lane, pending = self._lanes.get(key), self.pending_bytes + nbytes
        if lane is None and message.topic.startswith(RETRY_PREFIX):
            return False
        if pending > self._most_pending and self.pending_bytes:
            self._refuse(nbytes, waiter)
            return True
        batch = None if lane is None else lane.open
        if batch is None or batch.nbytes + nbytes > self._batch_bytes:
            batch = self._open_batch(loop, key)
        batch.messages.append(message)
        batch.waiters.append(waiter)
        batch.nbytes += nbytes
        self.pending_bytes = pending
        waiter.batch = batch
        return True

    def close(self) -> None:
        """Fail the batches that are not sent."""
        for lane in list(self._lanes.values()):
            lane.close()
            for batch in lane.ready:
                self._fail(batch, MQClientException("the producer was shut down before the request; nothing was sent"))
            lane.ready.clear()

    def send_alone(self, messages: list[Message], waiter: Waiter, send: Callable[[], Future[SendResult]]) -> None:
        """Send one message, or a batch of the caller."""
        nbytes = sum(_size(message) for message in messages if isinstance(message, Message)) or 1
        if self.pending_bytes and self.pending_bytes + nbytes > self._most_pending:
            self._refuse(nbytes, waiter)
            return
        self.pending_bytes += nbytes
        waiter.batch = _Batch(messages, [waiter], nbytes)
        self._begin(waiter.batch, send, self._end_alone)

    def _open_batch(self, loop: asyncio.AbstractEventLoop, key: tuple[str, str | None]) -> _Batch:
        """Begin a batch after the open one, and let it be sent."""
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(key)
        lane.close()
        batch = lane.open = _Batch([], [], 0, loop.time() + self._timeout)
        if not lane.scheduled and (lane.ready or not lane.in_flight):
            # After the other callbacks of this turn, which may send more. Threads that encode and send would compete
            # with them for the interpreter. Else the end of a request in flight sends the batch.
            lane.scheduled = True
            loop.call_soon(self._send_now, lane)
        return batch

    def _send_now(self, lane: _Lane) -> None:
        lane.scheduled = False
        self._send_ready(lane)
        if not lane.in_flight:
            self._send_open(lane)

    def _send_open(self, lane: _Lane) -> None:
        if lane.in_flight < _MOST_IN_FLIGHT:
            lane.close()
            self._send_ready(lane)

    def _send_ready(self, lane: _Lane) -> None:
        while lane.ready and lane.in_flight < _MOST_IN_FLIGHT:
            batch = lane.ready.popleft()
            batch.drop_cancelled()
            seconds_left = batch.deadline - asyncio.get_running_loop().time()
            if not batch.messages:
                self._release(batch.nbytes)
            elif seconds_left <= 0:
                self._fail(
                    batch,
                    RemotingTooMuchRequestException(
                        f"sending {len(batch.messages)} messages: earlier requests to the topic took all of "
                        f"send_msg_timeout={self._timeout * 1000:g} ms; nothing was sent"
                    ),
                )
            else:
                self._send_shared(lane, batch, seconds_left)

    def _send_shared(self, lane: _Lane, batch: _Batch, seconds: float) -> None:
        lane.in_flight += 1
        first, *others = batch.messages

        def send() -> Future[SendResult]:
            if not others:
                # Alone it may also go to a compaction topic.
                return self._blocking.send_async(first, timeout_ms=seconds * 1000)
            return self._blocking._sender.send_merged_async(batch.messages, seconds)

        self._begin(batch, send, partial(self._end_shared, lane))

    def _end_shared(self, lane: _Lane, batch: _Batch, future: Future[SendResult]) -> None:
        lane.in_flight -= 1
        error = future.exception()
        if error is None:
            results = SharedResult(future.result()).parts(len(batch.waiters))
            for waiter, result in zip(batch.waiters, results, strict=True):
                if not waiter.done():
                    waiter.set_result(result)
            self._release(batch.nbytes)
        elif getattr(error, "split", False) and len(batch.messages) > 1:
            # The last attempt was rejected as a whole. Alone, each message has its own outcome.
            sizes = list(map(_size, batch.messages))
            self._release(batch.nbytes - sum(sizes))  # Of cancelled messages
            for message, waiter, nbytes in zip(batch.messages, batch.waiters, sizes, strict=True):
                alone = _Batch([message], [waiter], nbytes)
                alone.maybe_stored = getattr(error, "maybe_stored", False)
                self._begin(alone, partial(self._blocking.send_async, message), self._end_alone)
        else:
            self._fail(batch, error)
        self._send_open(lane)
        if not (lane.in_flight or lane.open or lane.ready):
            self._lanes.pop(lane.key, None)

    def _end_alone(self, batch: _Batch, future: Future[SendResult]) -> None:
        error = future.exception()
        if error is not None:
            self._fail(batch, error)
            return
        (waiter,) = batch.waiters
        if not waiter.done():
            waiter.set_result(future.result())
        self._release(batch.nbytes)

    def _begin(
        self,
        batch: _Batch,
        send: Callable[[], Future[SendResult]],
        end: Callable[[_Batch, Future[SendResult]], None],
    ) -> None:
        """Send a batch that is admitted, and call `end` in the event loop when its outcome is known."""
        loop = batch.waiters[0].get_loop()
        batch.sent = True
        future: Future[SendResult]
        try:
            future = send()
        except Exception as exc:
            future = Future()
            future.set_exception(exc)

        def in_loop(done: Future[SendResult]) -> None:
            self._unprocessed.pop(batch, None)
            end(batch, done)

        def on_done(done: Future[SendResult]) -> None:
            error = done.exception()
            if error is not None:
                self._unprocessed[batch] = error
            try:
                loop.call_soon_threadsafe(in_loop, done)
            except RuntimeError:
                # The event loop is closed.
                self._unprocessed.pop(batch, None)
                self._end_without_loop(batch, done)

        future.add_done_callback(on_done)

    def _end_without_loop(self, batch: _Batch, future: Future[SendResult]) -> None:
        """Send the remaining messages when a request has ended: a closed event loop sends none, and sets no future."""
        self._blocking._sender.outstanding.watch()
        with self._closed_loop_lock:
            first, self._warned = not self._warned, True
        if first:
            logger.warning(
                "producer %s: its event loop was closed before the shutdown, so that sends in flight have no result. "
                "Await shutdown(), or use the producer in an async with statement",
                self._blocking.producer_group,
            )
        if isinstance(future, SendFuture) and len(batch.messages) > 1 and getattr(future.exception(), "split", False):
            future.sent_again = True
            for message in batch.messages:
                self._blocking.send_async(message)
        self._send_remaining()

    def hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send all messages at the end of the process, without a wait for requests in flight."""
        if not loop.is_running():
            self._send_remaining()
            while self._unprocessed:
                batch, error = self._unprocessed.popitem()
                self._blocking._sender.outstanding.fail(len(batch.messages), error)
            return
        # The event loop runs in a daemon thread, whose end the process does not wait for.
        sent = threading.Event()
        loop.call_soon_threadsafe(self._send_remaining)
        loop.call_soon_threadsafe(sent.set)
        sent.wait(self._timeout)

    def _send_remaining(self) -> None:
        with self._closed_loop_lock:
            for lane in list(self._lanes.values()):
                lane.close()
                while lane.ready:
                    batch = lane.ready.popleft()
                    batch.drop_cancelled()
                    if batch.messages:
                        self._send_shared(lane, batch, self._timeout)

    def _refuse(self, nbytes: int, waiter: Waiter) -> None:
        waiter.set_exception(
            RemotingTooMuchRequestException(
                f"sending {nbytes} bytes: {self.pending_bytes} bytes are pending, and max_pending_bytes="
                f"{self._most_pending} allows no more; nothing was sent. Await the results of earlier sends, or drain()"
            )
        )

    def _release(self, nbytes: int) -> None:
        self.pending_bytes -= nbytes
        for most, changed in self._waiting:
            if self.pending_bytes <= most and not changed.done():
                changed.set_result(None)

    def _fail(self, batch: _Batch, error: BaseException) -> None:
        if batch.maybe_stored and isinstance(error, RocketMQError):
            error.maybe_stored = True
        for waiter in batch.waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self._release(batch.nbytes)


def _size(message: Message) -> int:
    """Return about the bytes of a message in a batch. A batch that gets too large is sent message by message."""
    try:
        properties = message.properties
        nbytes = len(message.body or b"") + _OVERHEAD
        if len(properties) > 1:
            nbytes += sum(map(len, properties)) + sum(map(len, properties.values()))
    except TypeError:
        # A value has a wrong type, so the producer refuses the message.
        return _OVERHEAD
    return nbytes
