"""What users may attach to a send: a veto before it, an observer before and after it.

Rule 1: an observer can't disturb a send: what it raises is logged, and the next one is asked all the same.
Rule 2: a veto can: what a check-forbidden hook raises ends the attempt, and no observer sees it.
Rule 3: "after" is called once for each "before", with the result or with the exception (spec/producer.md 16.12; Java's
        asynchronous sends call it twice).
Rule 4: hooks run in the order of their registration.

Follows ``SendMessageHook.java``, ``CheckForbiddenHook.java``, ``EndTransactionHook.java`` (spec/producer.md section
7, 12).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rocketmq_spark.message import Message, MessageQueue
from rocketmq_spark.send_result import LocalTransactionState, SendResult

logger = logging.getLogger("rocketmq_spark.producer")

ContextT = TypeVar("ContextT")


class CommunicationMode(enum.Enum):
    """How a caller learns of the outcome (``CommunicationMode.java``)."""

    SYNC = "sync"
    ASYNC = "async"
    ONEWAY = "oneway"


class MessageType(enum.IntEnum):
    """What kind of message a hook sees (``MessageType.java``); the value is what a trace record carries."""

    NORMAL = 0
    TRANS_HALF = 1
    TRANS_COMMIT = 2
    DELAY = 3
    ORDER = 4


def message_type_of(message: Message) -> MessageType:
    """Return the kind by its properties; a delay wins over a transaction, timer properties do not count (7.9)."""
    properties = message.properties
    if "__STARTDELIVERTIME" in properties or "DELAY" in properties:
        return MessageType.DELAY
    return MessageType.TRANS_HALF if properties.get("TRAN_MSG") == "true" else MessageType.NORMAL


@dataclass(frozen=True, slots=True)
class CheckForbiddenContext:
    """What a check-forbidden hook decides by (``CheckForbiddenContext.java``).

    Parameters
    ----------
    name_servers : tuple of str
    producer_group : str
    communication_mode : CommunicationMode
    broker_addr : str
    message : Message
        As it goes on the wire: its topic carries the namespace, its body is compressed if it will be.
    message_queue : MessageQueue
    unit_mode : bool
    """

    name_servers: tuple[str, ...]
    producer_group: str
    communication_mode: CommunicationMode
    broker_addr: str
    message: Message
    message_queue: MessageQueue
    unit_mode: bool


@dataclass(slots=True)
class SendMessageContext:
    """One attempt as an observer sees it (``SendMessageContext.java``); the same object before and after.

    Parameters
    ----------
    producer_group : str
    communication_mode : CommunicationMode
    born_host : str
        ``clientIP``.
    broker_addr : str
    message : Message
        As it goes on the wire: its topic carries the namespace, its body is compressed if it will be.
    message_queue : MessageQueue
    namespace : str
        Empty without one.
    message_type : MessageType
    send_result : SendResult or None
        Set after a send that was answered.
    exception : BaseException or None
        Set after one that was not; a ``KeyboardInterrupt`` after one that was interrupted.
    props : dict
        For the hooks themselves: what one notes before, it finds after.
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
    # Who was told before, and is told after.
    observers: tuple[SendMessageHook, ...] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class EndTransactionContext:
    """The end of a transaction as an observer sees it (``EndTransactionContext.java``)."""

    producer_group: str
    broker_addr: str
    message: Message
    msg_id: str
    transaction_id: str
    transaction_state: LocalTransactionState
    from_transaction_check: bool


class SendMessageHook(Protocol):
    """Observes attempts. Called on the thread that sends, or on the one that brings the answer: be quick."""

    def send_message_before(self, context: SendMessageContext) -> None:
        """See an attempt that is about to be made."""
        ...

    def send_message_after(self, context: SendMessageContext) -> None:
        """See what became of it: `send_result` or `exception` is set, neither after a oneway send."""
        ...


CheckForbiddenHook = Callable[[CheckForbiddenContext], None]
EndTransactionHook = Callable[[EndTransactionContext], None]


class Hooks:
    """The hooks of one producer."""

    def __init__(self) -> None:
        self.check_forbidden_hooks: list[CheckForbiddenHook] = []
        self.send_message_hooks: list[SendMessageHook] = []
        self.end_transaction_hooks: list[EndTransactionHook] = []

    def check_forbidden(self, context: Callable[[], CheckForbiddenContext]) -> None:
        """Ask every check-forbidden hook; what one raises goes through. `context` is called only if there is one."""
        if self.check_forbidden_hooks:
            made = context()
            for hook in self.check_forbidden_hooks:
                hook(made)

    def before(self, context: Callable[[], SendMessageContext]) -> SendMessageContext | None:
        """Tell every observer of an attempt; None if there is no observer, and `context` is not called then."""
        if not self.send_message_hooks:
            return None
        made = context()
        made.observers = tuple(self.send_message_hooks)
        for hook in made.observers:
            _guarded(hook.send_message_before, made)
        return made

    def after(
        self,
        context: SendMessageContext | None,
        send_result: SendResult | None = None,
        exception: BaseException | None = None,
    ) -> None:
        """Tell every observer that was told before how it went."""
        if context is None:
            return
        context.send_result, context.exception = send_result, exception
        for hook in context.observers:
            _guarded(hook.send_message_after, context)

    def end_transaction(self, context: EndTransactionContext) -> None:
        """Tell every observer that a transaction is about to be ended."""
        for hook in self.end_transaction_hooks:
            _guarded(hook, context)

    def __repr__(self) -> str:
        return (
            f"<Hooks forbidden={len(self.check_forbidden_hooks)} send={len(self.send_message_hooks)} "
            f"end_transaction={len(self.end_transaction_hooks)}>"
        )


def _guarded(hook: Callable[[ContextT], None], context: ContextT) -> None:
    try:
        hook(context)
    except Exception:
        logger.warning("the hook %r failed; the send goes on", hook, exc_info=True)
