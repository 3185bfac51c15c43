"""The hooks that users attach to sends and transactions of a `Producer`. Its message trace is such a hook.

Hooks of one kind run in the order of their registration. A check-forbidden hook that raises makes the attempt fail;
exceptions of other hooks are logged. See docs/internals/producer.md#hooks and docs/internals/producer.md#trace.
"""

from __future__ import annotations

import enum
import logging
import queue as queues
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from rocketmq_spark.model.message import Message, MessageQueue, SendStatus
from rocketmq_spark.model.send_result import LocalTransactionState, SendResult
from rocketmq_spark.sink.trace import FLUSH_SECONDS, MessageType, PubTrace, SendTrace, trace_messages

logger = logging.getLogger("rocketmq_spark.producer")

ContextT = TypeVar("ContextT")

_MAX_TRACE_BATCH: Final = 20
_MAX_TRACE_QUEUE: Final = 2048
_STARTED: Final = "trace.started_ms"


class CommunicationMode(enum.Enum):
    """How the caller gets the outcome (``CommunicationMode.java``)."""

    SYNC = "sync"
    ASYNC = "async"
    ONEWAY = "oneway"


@dataclass(frozen=True, slots=True)
class CheckForbiddenContext:
    """The argument of a check-forbidden hook (``CheckForbiddenContext.java``), with the encoded message."""

    name_servers: tuple[str, ...]
    producer_group: str
    communication_mode: CommunicationMode
    broker_addr: str
    message: Message
    message_queue: MessageQueue
    unit_mode: bool


@dataclass(slots=True)
class SendMessageContext:
    """One attempt (``SendMessageContext.java``); hooks get the same object before and after it.

    For an asynchronous send it is the first attempt with its retries. The body of `message` may be compressed. An
    acknowledgement sets `send_result`, a failure `exception`. Hooks may keep values in `props`.
    """

    producer_group: str
    communication_mode: CommunicationMode
    born_host: str
    broker_addr: str
    message: Message
    message_queue: MessageQueue
    namespace: str
    message_type: MessageType
    send_result: SendResult | None = None
    exception: BaseException | None = None
    props: dict[str, Any] = field(default_factory=dict)
    # The hooks to call before and after the attempt.
    observers: tuple[SendMessageHook, ...] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class EndTransactionContext:
    """The end of a transaction (``EndTransactionContext.java``)."""

    producer_group: str
    broker_addr: str
    message: Message
    msg_id: str
    transaction_id: str
    transaction_state: LocalTransactionState
    from_transaction_check: bool


class SendMessageHook(Protocol):
    """Observes attempts (``SendMessageHook.java``), on the sending or the transport's thread. It must not block."""

    def send_message_before(self, context: SendMessageContext) -> None:
        """Observe an attempt before it is made."""

    def send_message_after(self, context: SendMessageContext) -> None:
        """Observe its outcome: `send_result` or `exception` is set, neither after a oneway send that was written."""


# As CheckForbiddenHook.java and EndTransactionHook.java.
CheckForbiddenHook = Callable[[CheckForbiddenContext], None]
EndTransactionHook = Callable[[EndTransactionContext], None]


@dataclass(slots=True)
class Hooks:
    """The hooks of one producer. The context of an attempt is made only if there is a hook."""

    check_forbidden_hooks: list[CheckForbiddenHook] = field(default_factory=list)
    send_message_hooks: list[SendMessageHook] = field(default_factory=list)
    end_transaction_hooks: list[EndTransactionHook] = field(default_factory=list)

    def check_forbidden(self, make_context: Callable[[], CheckForbiddenContext]) -> None:
        """Call every check-forbidden hook; raise what one raises."""
        if self.check_forbidden_hooks:
            context = make_context()
            for hook in self.check_forbidden_hooks:
                hook(context)

    def before(self, make_context: Callable[[], SendMessageContext]) -> SendMessageContext | None:
        """Call every send hook before an attempt; return the context for `after`, None without a hook."""
        if not self.send_message_hooks:
            return None
        context = make_context()
        context.observers = tuple(self.send_message_hooks)
        for hook in context.observers:
            _guarded(hook.send_message_before, context)
        return context

    def after(
        self,
        context: SendMessageContext | None,
        send_result: SendResult | None = None,
        exception: BaseException | None = None,
    ) -> None:
        """Call every hook that was called before the attempt."""
        if context is not None:
            context.send_result, context.exception = send_result, exception
            for hook in context.observers:
                _guarded(hook.send_message_after, context)

    def end_transaction(self, context: EndTransactionContext) -> None:
        """Call every transaction hook before a transaction is ended."""
        for hook in self.end_transaction_hooks:
            _guarded(hook, context)


def _guarded(hook: Callable[[ContextT], None], context: ContextT) -> None:
    try:
        hook(context)
    except Exception:
        logger.warning("the hook %r failed; the send continues", hook, exc_info=True)


class TraceDispatcher:
    """Traces acknowledged sends on its own thread (docs/internals/producer.md#trace); never blocks or fails a send."""

    def __init__(self, trace_topic: str, send: SendTrace, batch_num: int = 10) -> None:
        self._trace_topic = trace_topic
        self._send = send
        self._batch_num = min(batch_num, _MAX_TRACE_BATCH)
        self._queue: queues.Queue[PubTrace | None] = queues.Queue(_MAX_TRACE_QUEUE)
        self._thread = threading.Thread(target=self._run, name="rocketmq-trace", daemon=True)
        self._closed = threading.Event()
        self.discarded = 0

    def send_message_before(self, context: SendMessageContext) -> None:
        """Note when the attempt began."""
        if not context.message.topic.startswith(self._trace_topic):
            context.props[_STARTED] = int(time.time() * 1000)

    def send_message_after(self, context: SendMessageContext) -> None:
        """Make the record of an answered attempt."""
        result, started = context.send_result, context.props.get(_STARTED)
        if result is None or started is None or not (result.region_id and result.trace_on):
            return
        message = context.message
        self.append(
            PubTrace(
                time_stamp=started,
                region_id=result.region_id,
                group_name=context.producer_group,
                topic=message.topic,
                msg_id=result.msg_id,
                tags=message.tags,
                keys=message.keys,
                store_host=context.broker_addr,
                body_length=len(message.body),
                cost_time=int(time.time() * 1000) - started,
                message_type=context.message_type,
                offset_msg_id=result.offset_msg_id,
                success=result.status is SendStatus.SEND_OK,
            )
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def append(self, record: PubTrace) -> None:
        """Take a record, or drop it if the queue is full."""
        try:
            self._queue.put_nowait(record)
        except queues.Full:
            self.discarded += 1
            text = "message trace: record of message %s dropped, because %d are pending already (%d dropped so far)"
            logger.warning(text, record.msg_id, _MAX_TRACE_QUEUE, self.discarded)

    def shutdown(self, timeout: float = FLUSH_SECONDS) -> None:
        """Send the pending records and end the thread, within `timeout` seconds."""
        self._closed.set()
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=timeout)
            except queues.Full:
                text = "message trace: records for topic %s are lost at the shutdown: their queue stayed full for %g s"
                logger.warning(text, self._trace_topic, timeout)
            self._thread.join(timeout)

    def _run(self) -> None:
        while not (self._closed.is_set() and self._queue.empty()):
            records: list[PubTrace] = []
            deadline = time.monotonic() + FLUSH_SECONDS
            while len(records) < self._batch_num:
                try:
                    record = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
                except queues.Empty:
                    record = None
                if record is None:
                    break
                records.append(record)
            for message in trace_messages(self._trace_topic, records):
                try:
                    self._send(message)
                except Exception:
                    # Whatever the error is, later records are sent.
                    text = (
                        "message trace: %d records could not be sent to topic %s; the traced messages are not affected"
                    )
                    logger.warning(text, len(records), self._trace_topic, exc_info=True)
