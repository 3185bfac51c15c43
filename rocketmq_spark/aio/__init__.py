"""`Producer` for asyncio: sends of one event loop, which batches by itself what callers send at the same time.

Every send is a send of :class:`rocketmq_spark.Producer`, with its checks, queue selection and retries. This module adds
the batches, and turns results into futures of the event loop. Java: ``DefaultMQProducer.setAutoBatch``, whose class
``ProduceAccumulator`` waits up to 10 ms for a batch. Here a batch waits only while requests of its topic are in flight.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rocketmq_spark.errors import MQClientException, OptionError, RemotingTooMuchRequestException
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.names import RETRY_PREFIX
from rocketmq_spark.model.properties import INNER_PROPERTIES, KEYS, RESERVED_PROPERTIES, SHARDING_KEY, TAGS, WAIT
from rocketmq_spark.model.send_result import SendResult, SharedResult
from rocketmq_spark.options.producer import ProducerOptions
from rocketmq_spark.producer import at_exit
from rocketmq_spark.producer.async_send import SendFuture
from rocketmq_spark.producer.encode import ONLY_WAITS
from rocketmq_spark.producer.producer import Producer as BlockingProducer
from rocketmq_spark.routing.selectors import MessageQueueSelector

if TYPE_CHECKING:
    import pyarrow as pa

    from rocketmq_spark.metrics import WriteSummary
    from rocketmq_spark.producer.arrow_send import ArrowData

T = TypeVar("T")

logger = logging.getLogger("rocketmq_spark.producer")

_running_loop = asyncio.get_running_loop
# Bytes of a message beyond its body and texts. A batch of 4 MiB then has at most 32,000 messages, the brokers' limit.
_OVERHEAD: Final = 132
_MOST_BATCH_BYTES: Final = 4 * 1024 * 1024
# Requests of a topic in flight. Messages that come meanwhile share the next batches.
_MOST_IN_FLIGHT: Final = 4
# Proxies send messages with a sharding key one after the other.
_NEVER_BATCHED: Final = (RESERVED_PROPERTIES | INNER_PROPERTIES | {SHARDING_KEY}) - {KEYS, TAGS, WAIT}


class Producer:
    """Sends messages to RocketMQ from coroutines; for the event loop that started it.

    `properties` are those of :class:`rocketmq_spark.Producer`, except ``enable_backpressure_for_async_mode``. A batch
    has at most `batch_bytes` bytes (up to 4 MiB, and ``max_message_size``). Messages of more than `max_pending_bytes`
    that are not acknowledged yet make further sends fail: see `drain`.

    >>> from rocketmq_spark import Message, aio
    >>> async def main():
    ...     async with aio.Producer("orders-service", name_server="127.0.0.1:9876") as producer:
    ...         result = await producer.send(Message.of("orders", b"one"))
    """

    def __init__(
        self,
        producer_group: str,
        *,
        batch_bytes: int = 128 * 1024,
        max_pending_bytes: int = 64 * 1024 * 1024,
        **properties: Any,
    ) -> None:
        self._blocking = BlockingProducer(producer_group, callback_executor=_Inline(), **properties)
        options = self._blocking.options
        if options.enable_backpressure_for_async_mode:
            raise OptionError(
                "enable_backpressure_for_async_mode would block the event loop: leave it out; max_pending_bytes is the "
                "limit of an asyncio producer"
            )
        if not 1 <= batch_bytes <= _MOST_BATCH_BYTES:
            raise OptionError(f"batch_bytes={batch_bytes}: give 1 to {_MOST_BATCH_BYTES} bytes")
        if max_pending_bytes < 1:
            raise OptionError(f"max_pending_bytes={max_pending_bytes}: give at least 1 byte")
        self._batch_bytes = min(batch_bytes, options.max_message_size)
        self._most_pending = max_pending_bytes
        # Larger bodies are compressed, which those of a batch are not.
        self._most_body = options.max_message_size
        if options.compress_type != "NONE":
            self._most_body = min(self._most_body, options.compress_msg_body_over_howmuch - 1)
        self._timeout = options.send_msg_timeout / 1000
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lanes: dict[tuple[str, str | None], _Lane] = {}
        self._pending_bytes = 0
        # Futures of `drain` and `flush`, with the most pending bytes at which they are done.
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        # Failed requests whose end the event loop has not seen.
        self._unseen: dict[_Batch, BaseException] = {}
        # Guards the sends of other threads after the event loop was closed.
        self._leaving = threading.RLock()
        self._left = False

    def __repr__(self) -> str:
        blocking = self._blocking
        return f"<aio.Producer {blocking.producer_group} {blocking.state.value}, {self._pending_bytes} bytes pending>"

    @property
    def options(self) -> ProducerOptions:
        """The properties, parsed."""
        return self._blocking.options

    async def start(self) -> None:
        """Start in the running event loop; raises as `rocketmq_spark.Producer.start`."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._blocking.start)
        self._loop = loop
        at_exit.add_hand_over(self._hand_over)

    async def shutdown(self) -> None:
        """Send what is pending, wait for its answers, and close. Does nothing unless running."""
        if self._loop is None:
            return
        loop = self._running_loop()
        try:
            await self.flush()
        finally:
            self._loop = None
            at_exit.discard_hand_over(self._hand_over)
            for lane in list(self._lanes.values()):
                lane.close()
                for batch in lane.ready:
                    self._fail(
                        batch, MQClientException("the producer was shut down before the request; nothing was sent")
                    )
                lane.ready.clear()
            await loop.run_in_executor(None, self._blocking.shutdown)

    async def __aenter__(self) -> Producer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    def send(
        self,
        message: Message,
        queue: MessageQueue | None = None,
        *,
        selector: MessageQueueSelector | None = None,
        arg: Any = None,
        timeout_ms: float | None = None,
    ) -> asyncio.Future[SendResult]:
        """Send a message; return a future of the result, with the errors of `rocketmq_spark.Producer.send_async`.

        The message shares a request with others of its topic that are sent at the same time. It is sent alone if it has
        a queue, a selector, a timeout, a sharding key or a body to compress. So is a message with reserved properties
        other than keys, tags and WAIT. Requests may overtake each other: to keep the order of two messages, await the
        first one.

        If the future is cancelled before the request is sent, the message is not sent. Otherwise the text of the
        ``CancelledError`` says that it may be stored. With too many pending bytes, the future fails with
        ``RemotingTooMuchRequestException``, and nothing is sent.
        """
        loop = self._loop
        if loop is None or _running_loop() is not loop:
            loop = self._running_loop()
        waiter = _Waiter(loop=loop)
        if queue is None and selector is None and timeout_ms is None:
            # Most messages have no other properties, and join a batch that is open. This takes half of `_join`'s time.
            if type(message) is Message and message.properties == ONLY_WAITS and type(message.body) is bytes:
                lane, nbytes = self._lanes.get((message.topic, "true")), len(message.body) + _OVERHEAD
                batch, pending = lane and lane.open, self._pending_bytes + nbytes
                fits = batch and batch.nbytes + nbytes <= self._batch_bytes and pending <= self._most_pending
                if batch and fits and _OVERHEAD < nbytes <= self._most_body + _OVERHEAD:
                    batch.messages.append(message)
                    batch.waiters.append(waiter)
                    batch.nbytes += nbytes
                    self._pending_bytes = pending
                    waiter.batch = batch
                    return waiter
            if self._may_join(message):
                self._join(loop, message, waiter)
                return waiter
        send = partial(self._blocking.send_async, message, queue, selector=selector, arg=arg, timeout_ms=timeout_ms)
        self._send_alone([message], waiter, send)
        return waiter

    def send_batch(
        self, messages: Iterable[Message], queue: MessageQueue | None = None, *, timeout_ms: float | None = None
    ) -> asyncio.Future[SendResult]:
        """Send messages of one topic as one request; the future has the errors of `rocketmq_spark.Producer.send_batch`.

        Cancellation and pending bytes are as in `send`.
        """
        members = list(messages)
        waiter = _Waiter(loop=self._running_loop())
        self._send_alone(
            members, waiter, partial(self._blocking.send_batch_async, members, queue, timeout_ms=timeout_ms)
        )
        return waiter

    async def send_arrow(self, data: ArrowData, topic: str | None = None, **options: str | int | bool) -> WriteSummary:
        """Send the rows of an Arrow table or of record batches, in a thread; see `rocketmq_spark.Producer.send_arrow`.

        If the task is cancelled, no more record batches are read. The ``CancelledError`` comes when the requests in
        flight have ended; rows that were read before may be stored.
        """
        loop = self._running_loop()
        cancelled = threading.Event()

        def run() -> WriteSummary:
            return self._blocking.send_arrow(_until(cancelled, data), topic, **options)

        writing = loop.run_in_executor(None, run)
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError as exc:
            cancelled.set()
            await asyncio.wait([writing])
            text = f"sending Arrow rows to topic {topic}: cancelled; rows that were read before may be stored"
            raise asyncio.CancelledError(text) from (writing.exception() or exc)

    async def recall_message(self, topic: str, recall_handle: str) -> str:
        """Take a delayed message back before it is delivered; see `rocketmq_spark.Producer.recall_message`."""
        return await self._running_loop().run_in_executor(None, self._blocking.recall_message, topic, recall_handle)

    async def drain(self) -> None:
        """Wait until at most half of `max_pending_bytes` are pending; for callers that do not await each send."""
        await self._wait_for(self._most_pending // 2)

    async def flush(self) -> None:
        """Wait until every message that was sent before is acknowledged or has failed."""
        await self._wait_for(0)

    async def _wait_for(self, nbytes: int) -> None:
        loop = self._running_loop()
        while self._pending_bytes > nbytes:
            waiting = nbytes, loop.create_future()
            self._waiting.append(waiting)
            try:
                await waiting[1]
            finally:
                self._waiting.remove(waiting)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop
        if loop is None or asyncio.get_running_loop() is not loop:
            name = f"producer {self._blocking.producer_group}"
            if loop is None:
                raise MQClientException(f"{name} does not run: await its start(), or use it in `async with`")
            raise MQClientException(f"{name} was started in another event loop: make another producer for this one")
        return loop

    def _may_join(self, message: Message) -> bool:
        """Return whether a message may share a request: others must not fail with it."""
        if type(message) is not Message or type(message.body) is not bytes or not message.body:
            return False
        topic = message.topic
        if len(message.body) > self._most_body or type(topic) is not str or topic.startswith(RETRY_PREFIX):
            return False
        return _NEVER_BATCHED.isdisjoint(message.properties)

    def _send_alone(self, messages: list[Message], waiter: _Waiter, send: Callable[[], Future[SendResult]]) -> None:
        """Send one message, or a batch of the caller."""
        nbytes = sum(_size(message) for message in messages if isinstance(message, Message)) or 1
        if self._admit(nbytes, waiter):
            waiter.batch = _Batch(messages, [waiter], nbytes)
            self._begin(waiter.batch, send, self._end_alone)

    def _join(self, loop: asyncio.AbstractEventLoop, message: Message, waiter: _Waiter) -> None:
        """Add a message to the open batch of its topic."""
        nbytes = _size(message)
        if not self._admit(nbytes, waiter):
            return
        key = message.topic, message.properties.get(WAIT)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(key)
        batch = lane.open
        if batch is not None and batch.nbytes + nbytes > self._batch_bytes:
            lane.close()
            batch = None
        if batch is None:
            batch = lane.open = _Batch([], [], 0, loop.time() + self._timeout)
            if not lane.scheduled and (lane.ready or not lane.in_flight):
                # After the other callbacks of this turn, which may send more. Threads that encode and send would
                # compete with them for the interpreter.
                lane.scheduled = True
                loop.call_soon(self._send_now, lane)
        batch.messages.append(message)
        batch.waiters.append(waiter)
        batch.nbytes += nbytes
        waiter.batch = batch

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
            left = batch.deadline - asyncio.get_running_loop().time()
            if not batch.messages:
                self._release(batch.nbytes)
            elif left <= 0:
                self._fail(
                    batch,
                    RemotingTooMuchRequestException(
                        f"sending {len(batch.messages)} messages: earlier requests to the topic took all of "
                        f"send_msg_timeout={self._timeout * 1000:g} ms; nothing was sent"
                    ),
                )
            else:
                lane.in_flight += 1
                send = partial(self._blocking.send_batch_async, batch.messages, timeout_ms=left * 1000)
                self._begin(batch, send, partial(self._end_shared, lane))

    def _end_shared(self, lane: _Lane, batch: _Batch, future: Future[SendResult]) -> None:
        lane.in_flight -= 1
        error = future.exception()
        if error is None:
            shared = SharedResult(future.result())
            for number, waiter in enumerate(batch.waiters):
                if not waiter.done():
                    waiter.set_result(shared.part(number))
            self._release(batch.nbytes)
        elif getattr(error, "split", False) and len(batch.messages) > 1:
            # Nothing is stored. Alone, each message has its own outcome.
            sizes = list(map(_size, batch.messages))
            self._release(batch.nbytes - sum(sizes))
            for message, waiter, nbytes in zip(batch.messages, batch.waiters, sizes, strict=True):
                alone = _Batch([message], [waiter], nbytes)
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

        def see(done: Future[SendResult]) -> None:
            self._unseen.pop(batch, None)
            end(batch, done)

        def ended(done: Future[SendResult]) -> None:
            error = done.exception()
            if error is not None:
                self._unseen[batch] = error
            try:
                loop.call_soon_threadsafe(see, done)
            except RuntimeError:
                # The event loop is closed.
                self._unseen.pop(batch, None)
                self._end_without_loop(batch, done)

        future.add_done_callback(ended)

    def _end_without_loop(self, batch: _Batch, future: Future[SendResult]) -> None:
        """Send the remaining messages when a request has ended: a closed event loop sends none, and sets no future."""
        self._blocking._outstanding.watch()
        with self._leaving:
            first, self._left = not self._left, True
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
        self._send_left()

    def _hand_over(self) -> None:
        """Send all messages at the end of the process, without a wait for requests in flight."""
        assert self._loop is not None
        if not self._loop.is_running():
            self._send_left()
            while self._unseen:
                batch, error = self._unseen.popitem()
                self._blocking._outstanding.fail(len(batch.messages), error)
            return
        # The event loop runs in a daemon thread, whose end the process does not wait for.
        sent = threading.Event()
        self._loop.call_soon_threadsafe(self._send_left)
        self._loop.call_soon_threadsafe(sent.set)
        sent.wait(self._timeout)

    def _send_left(self) -> None:
        with self._leaving:
            for lane in list(self._lanes.values()):
                lane.close()
                while lane.ready:
                    batch = lane.ready.popleft()
                    batch.drop_cancelled()
                    if batch.messages:
                        lane.in_flight += 1
                        send = partial(self._blocking.send_batch_async, batch.messages)
                        self._begin(batch, send, partial(self._end_shared, lane))

    def _admit(self, nbytes: int, waiter: _Waiter) -> bool:
        """Count bytes as pending, or fail the waiter."""
        if self._pending_bytes and self._pending_bytes + nbytes > self._most_pending:
            waiter.set_exception(
                RemotingTooMuchRequestException(
                    f"sending {nbytes} bytes: {self._pending_bytes} bytes are pending, and max_pending_bytes="
                    f"{self._most_pending} allows no more; nothing was sent. Await the results of earlier sends, or "
                    "drain()"
                )
            )
            return False
        self._pending_bytes += nbytes
        return True

    def _release(self, nbytes: int) -> None:
        self._pending_bytes -= nbytes
        for most, changed in self._waiting:
            if self._pending_bytes <= most and not changed.done():
                changed.set_result(None)

    def _fail(self, batch: _Batch, error: BaseException) -> None:
        for waiter in batch.waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self._release(batch.nbytes)


class _Waiter(asyncio.Future[SendResult]):
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
    """Messages of one request, and the futures of their results; only one for a batch of the caller."""

    __slots__ = ("cancelled", "deadline", "messages", "nbytes", "sent", "waiters")

    def __init__(self, messages: list[Message], waiters: list[_Waiter], nbytes: int, deadline: float = 0.0) -> None:
        self.messages = messages
        self.waiters = waiters
        self.nbytes = nbytes
        self.deadline = deadline  # Of the event loop's clock
        self.cancelled = False
        self.sent = False

    def drop_cancelled(self) -> None:
        """Leave out the messages whose futures are cancelled."""
        if self.cancelled:
            kept = [number for number, waiter in enumerate(self.waiters) if not waiter.done()]
            self.messages = [self.messages[number] for number in kept]
            self.waiters = [self.waiters[number] for number in kept]


class _Lane:
    """The batches of one topic: one that is open for messages, and full ones that wait for a request to end."""

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


class _Inline(Executor):
    """Runs callbacks in the thread that submits them: they only wake the event loop."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _size(message: Message) -> int:
    """Return about the bytes of a message in a batch. A batch that gets too large is sent message by message."""
    properties = message.properties
    nbytes = len(message.body or b"") + _OVERHEAD
    if len(properties) > 1:
        nbytes += sum(map(len, properties)) + sum(map(len, properties.values()))
    return nbytes


def _until(cancelled: threading.Event, data: ArrowData) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of `data` until an event is set, which raises an error."""
    from rocketmq_spark.producer.arrow_send import record_batches

    for batch in record_batches(data):
        if cancelled.is_set():
            raise MQClientException("sending Arrow rows: the caller cancelled it")
        yield batch
