"""`Producer` for asyncio: sends of one event loop, which batches by itself what callers send at the same time.

Every send is a send of :class:`rocketmq_spark.Producer`, with its checks, queue selection and retries. This module adds
the batches, and turns results into futures of the event loop. Java: ``DefaultMQProducer.setAutoBatch``, whose class
``ProduceAccumulator`` waits up to 10 ms for a batch. Here a batch waits only while requests of its topic are in flight.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rocketmq_spark.aio.batches import MOST_BATCH_BYTES, Batches, Waiter
from rocketmq_spark.errors import MQClientException, OptionError
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.send_result import SendResult
from rocketmq_spark.options.producer import ProducerOptions
from rocketmq_spark.producer import at_exit
from rocketmq_spark.producer.producer import Producer as BlockingProducer
from rocketmq_spark.routing.selectors import MessageQueueSelector

if TYPE_CHECKING:
    import pyarrow as pa

    from rocketmq_spark.metrics import WriteSummary
    from rocketmq_spark.producer.arrow_send import ArrowData

T = TypeVar("T")

_running_loop = asyncio.get_running_loop


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
        if not 1 <= batch_bytes <= MOST_BATCH_BYTES:
            raise OptionError(f"batch_bytes={batch_bytes}: give 1 to {MOST_BATCH_BYTES} bytes")
        if max_pending_bytes < 1:
            raise OptionError(f"max_pending_bytes={max_pending_bytes}: give at least 1 byte")
        self._most_pending = max_pending_bytes
        self._batches = Batches(self._blocking, batch_bytes, max_pending_bytes)
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        blocking, pending = self._blocking, self._batches.pending_bytes
        return f"<aio.Producer {blocking.producer_group} {blocking.state.value}, {pending} bytes pending>"

    @property
    def options(self) -> ProducerOptions:
        """The properties, parsed."""
        return self._blocking.options

    async def start(self) -> None:
        """Start in the running event loop; raises as `rocketmq_spark.Producer.start`. A cancelled start is undone."""
        loop, cancelled = asyncio.get_running_loop(), threading.Event()

        def start() -> None:
            self._blocking.start()
            if cancelled.is_set():
                self._blocking.shutdown()

        try:
            await loop.run_in_executor(None, start)
        except asyncio.CancelledError:
            # The thread may have looked at the event before.
            cancelled.set()
            loop.run_in_executor(None, self._blocking.shutdown)
            raise
        self._loop = loop
        at_exit.hand_overs.add(self._hand_over)

    async def shutdown(self) -> None:
        """Send what is pending, wait for its answers, and close. Does nothing unless running."""
        if self._loop is None:
            return
        loop = self._running_loop()
        try:
            await self.flush()
        finally:
            self._loop = None
            at_exit.hand_overs.discard(self._hand_over)
            self._batches.close()
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
        other than keys, tags and WAIT, and one without keys if the topic may be a compaction topic, as over gRPC.
        Requests may overtake each other: to keep the order of two messages, await the first one.

        If the future is cancelled before the request is sent, the message is not sent. Otherwise the text of the
        ``CancelledError`` says that it may be stored. With too many pending bytes, the future fails with
        ``RemotingTooMuchRequestException``, and nothing is sent.
        """
        loop = self._loop
        if loop is None or _running_loop() is not loop:
            loop = self._running_loop()
        waiter = Waiter(loop=loop)
        shared = queue is None and selector is None and timeout_ms is None
        try:
            shared = shared and self._batches.join(loop, message, waiter)
        except (AttributeError, TypeError):
            # A value of the message has a wrong type. The producer refuses it alone.
            shared = False
        if shared:
            return waiter
        send = partial(self._blocking.send_async, message, queue, selector=selector, arg=arg, timeout_ms=timeout_ms)
        self._batches.send_alone([message], waiter, send)
        return waiter

    def send_batch(
        self, messages: Iterable[Message], queue: MessageQueue | None = None, *, timeout_ms: float | None = None
    ) -> asyncio.Future[SendResult]:
        """Send messages of one topic as one request; the future has the errors of `rocketmq_spark.Producer.send_batch`.

        Cancellation and pending bytes are as in `send`.
        """
        members = list(messages)
        waiter = Waiter(loop=self._running_loop())
        send = partial(self._blocking.send_batch_async, members, queue, timeout_ms=timeout_ms)
        self._batches.send_alone(members, waiter, send)
        return waiter

    async def send_arrow(
        self, data: ArrowData, topic: str | None = None, **options: str | int | bool | None
    ) -> WriteSummary:
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
        self._running_loop()
        await self._batches.wait_for(self._most_pending // 2)

    async def flush(self) -> None:
        """Wait until every message that was sent before is acknowledged or has failed."""
        self._running_loop()
        await self._batches.wait_for(0)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop
        if loop is None or asyncio.get_running_loop() is not loop:
            name = f"producer {self._blocking.producer_group}"
            if loop is None:
                raise MQClientException(f"{name} does not run: await its start(), or use it in `async with`")
            raise MQClientException(f"{name} was started in another event loop: make another producer for this one")
        return loop

    def _hand_over(self) -> None:
        assert self._loop is not None
        self._batches.hand_over(self._loop)


class _Inline(Executor):
    """Runs callbacks in the thread that submits them: they only wake the event loop."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _until(cancelled: threading.Event, data: ArrowData) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of `data` until an event is set, which raises an error."""
    from rocketmq_spark.producer.arrow_send import record_batches

    for batch in record_batches(data):
        if cancelled.is_set():
            raise MQClientException("sending Arrow rows: the caller cancelled it")
        yield batch
