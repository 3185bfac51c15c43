"""The states of a producer (`Lifecycle`), and the parts of a running one with their start and end (`ProducerService`).

`batch_trace_sender` makes such a service for the trace messages of a Spark write or of `Producer.send_arrow`. See
docs/internals/producer.md#life-cycle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from ipaddress import IPv4Address
from typing import Any, Final, TypeVar

from rocketmq_spark.errors import MQClientException, RocketMQError, RouteNotFoundException
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.names import DLQ_PREFIX, MAX_GROUP_LENGTH, RETRY_PREFIX, check_group, check_topic
from rocketmq_spark.model.send_result import RecallMessage, SendResult, TransactionCheck, broker_name_of
from rocketmq_spark.options.connection import ConnectionOptions
from rocketmq_spark.options.producer import ProducerOptions, producer_options
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.producer import at_exit
from rocketmq_spark.producer.attempt import SendAttempt, broker_address
from rocketmq_spark.producer.encode import MessageEncoder
from rocketmq_spark.producer.hooks import Hooks, TraceDispatcher
from rocketmq_spark.producer.message_sender import MessageSender, QueueChoice
from rocketmq_spark.producer.transaction import TransactionListener, Transactions
from rocketmq_spark.protocol.unique_id import MessageIdGenerator, UniqueIdGenerator
from rocketmq_spark.routing.client_instance import ClientInstance, registry
from rocketmq_spark.routing.connect import SharedConnection, client_id_of, new_transport
from rocketmq_spark.sink.trace import MAX_MESSAGE_BYTES, SendTrace
from rocketmq_spark.transport.base import Transport, local_ip

T = TypeVar("T")

logger = logging.getLogger("rocketmq_spark.producer")

_TRACE_TIMEOUT_MS: Final = 5000
# Traces are sent over remoting only, to topics outside the namespace.
_NOT_OF_TRACER: Final = ("transport", "endpoints", "namespace")
_trace_numbers: Final = itertools.count()


class ServiceState(enum.Enum):
    """The state of a producer (``ServiceState.java``)."""

    CREATE_JUST = "CREATE_JUST"
    RUNNING = "RUNNING"
    SHUTDOWN_ALREADY = "SHUTDOWN_ALREADY"
    START_FAILED = "START_FAILED"


# The next states. START_FAILED is also the state during the start, which a taken group resets to CREATE_JUST.
_NEXT: Final = {
    ServiceState.CREATE_JUST: {ServiceState.START_FAILED},
    ServiceState.START_FAILED: {ServiceState.RUNNING, ServiceState.CREATE_JUST},
    ServiceState.RUNNING: {ServiceState.SHUTDOWN_ALREADY},
    ServiceState.SHUTDOWN_ALREADY: set[ServiceState](),
}

_ADVICE: Final = {
    ServiceState.CREATE_JUST: "call start() first, or use it in a with statement",
    ServiceState.RUNNING: "it is running already",
    ServiceState.SHUTDOWN_ALREADY: "make a new producer: a producer cannot be started after its shutdown",
    ServiceState.START_FAILED: "its start failed: fix what its error names, and make a new producer",
}


class Lifecycle:
    """The state of one producer, and the process of its last change; safe for many threads."""

    def __init__(self, who: str) -> None:
        self.state = ServiceState.CREATE_JUST
        self._who = who
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def enter(self, state: ServiceState) -> bool:
        """Change to a state if it may follow the present one; return whether it may."""
        with self._lock:
            if state not in _NEXT[self.state]:
                return False
            self.state = state
            # A forked child may start a producer that its parent has not started.
            self._pid = os.getpid()
            return True

    def begin_start(self) -> None:
        """Leave CREATE_JUST, or raise ``MQClientException`` in any other state."""
        if not self.enter(ServiceState.START_FAILED):
            raise MQClientException(f"{self._who} can't start in state {self.state.value}: {_ADVICE[self.state]}")

    @property
    def foreign(self) -> bool:
        """True in a forked child, where connections and threads are the parent's, and the lock may stay locked."""
        return os.getpid() != self._pid

    def require_running(self) -> None:
        """Raise ``MQClientException`` in any state but RUNNING, and in a forked child."""
        if self.state is not ServiceState.RUNNING:
            raise MQClientException(f"{self._who} is in state {self.state.value}: {_ADVICE[self.state]}")
        if self.foreign:
            raise MQClientException(
                f"{self._who} was started in process {self._pid}, and this is its fork {os.getpid()}: make another "
                "producer here"
            )


@functools.cache
def _message_ids(over_grpc: bool) -> MessageIdGenerator | UniqueIdGenerator:
    """Return the generator of message ids for this process and its forks."""
    return MessageIdGenerator() if over_grpc else UniqueIdGenerator(IPv4Address(local_ip()).packed)


class OwnPool(ThreadPoolExecutor):
    """A thread pool that a callback, a listener or a hook on its threads may shut down."""

    def __init__(self, name: str, threads: int) -> None:
        self._inside = threading.local()
        self._closed = False
        super().__init__(threads, thread_name_prefix=name, initializer=self._enter)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run work on a thread, or in the caller's thread when the process ends."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as exc:
            # concurrent.futures takes no work after the end of the main thread, but other threads may still send. If a
            # thread can't start, the work is queued all the same.
            if self._closed or "schedule new futures" not in str(exc):
                raise
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as exc:
            future.set_exception(exc)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work, and wait for running work unless the caller is part of it."""
        self._closed = True
        super().shutdown(wait and not hasattr(self._inside, "entered"), cancel_futures=cancel_futures)

    def _enter(self) -> None:
        self._inside.entered = True


class ProducerService:
    """A running producer. Raises ``MQClientException`` for a group that is not allowed, and as `Registry.join`."""

    def __init__(
        self,
        producer_group: str,
        options: ProducerOptions,
        hooks: Hooks,
        *,
        transport: Transport | None = None,
        listener: TransactionListener | None = None,
        async_sender_executor: Executor | None = None,
        callback_executor: Executor | None = None,
        retry_response_codes: Collection[int] | None = None,
    ) -> None:
        check_group(options.connection.wire_name(producer_group))
        self.producer_group = producer_group
        self._options = options
        self._hooks = hooks
        self._transport = transport
        self._trace: TraceDispatcher | None = None
        self._tracer: ProducerService | None = None
        self.transactions: Transactions | None = None
        # Without an instance name, producers share nothing (Java 4.9): docs/internals/producer.md#client-instances.
        own_name = f"{os.getpid()}#{time.monotonic_ns()}"
        self.instance_name = own_name if options.instance_name == "DEFAULT" else options.instance_name
        self.client_id = client_id_of(options.connection, self.instance_name)
        ids = _message_ids(options.over_grpc)
        encoder = MessageEncoder(options, ids.next_id, ids.next_ids)
        connection = SharedConnection.of(options.connection, transport)
        # After everything that may raise: an unfinished producer would not leave the instance again.
        self.instance = registry.join(self.client_id, connection, producer_group, self._on_check, self._new_instance)
        processors = os.cpu_count() or 4
        async_pool = OwnPool("AsyncSenderExecutor", processors)
        callback_pool = OwnPool("ClientCallbackExecutor", options.client_callback_executor_threads or processors)
        self._check_pool = OwnPool("rocketmq-transaction-check", 1)
        # Threads start with the first task, so unused pools cost nothing.
        self._pools = (async_pool, callback_pool)
        self.sender = MessageSender(
            SendAttempt(producer_group, options, self.instance, hooks),
            encoder,
            async_executor=async_sender_executor or async_pool,
            callback_executor=callback_executor or callback_pool,
            retry_response_codes=options.retry_response_codes if retry_response_codes is None else retry_response_codes,
        )
        at_exit.add(self.sender)
        timeout, pool = self.sender.timeout, self._check_pool
        self.transactions = Transactions(producer_group, timeout, self.instance, hooks, self.send, listener, pool)

    def prepare(self) -> None:
        """Start the transport's thread, and look up the topics that the options name; their failures are logged."""
        self.instance.transport.open()
        for topic in self._options.topics:
            try:
                self.instance.routes.look_up(topic, self._options.connection.mq_client_api_timeout / 1000)
            except RocketMQError as exc:
                logger.warning(
                    "looking up topic %s at the start failed, and its first send tries again: %s", topic, exc
                )

    def start_trace(self) -> None:
        """Trace every message from now on, through a tracer on the same client instance; a failure is logged.

        With another instance, the tracer would close the caller's transport and receive the brokers' checks.
        """
        options, group = self._options, self.producer_group
        try:
            tracer = _new_tracer(group, self._transport, options.connection, instance_name=self.instance_name)
        except Exception:
            logger.warning("starting the message trace failed: producer %s sends without it", group, exc_info=True)
            return
        self._tracer = tracer
        self._trace = TraceDispatcher(options.trace_topic, tracer.send, options.trace_msg_batch_num)
        self._trace.start()
        self._hooks.send_message_hooks.append(self._trace)

    def send(self, message: Message) -> SendResult:
        """Send a message within ``sendMsgTimeout``."""
        return self.sender.send(message, self.sender.timeout, QueueChoice())

    def recall(self, topic: str, recall_handle: str) -> str:
        """Take a delayed message back; see `Producer.recall_message`."""
        routes, timeout = self.instance.routes, self.sender.timeout
        check_topic(self._options.connection.wire_name(topic))
        if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
            raise MQClientException(
                f"recalling a message of topic {topic}: retry and dead-letter topics have no delayed messages"
            )
        broker_name = broker_name_of(recall_handle)
        if self._options.over_grpc:
            info = routes.look_up(topic, timeout)
            if not info.addresses:
                raise RouteNotFoundException(f"recalling a message of topic {topic}: no proxy is known")
            # Any proxy finds the broker.
            address = next(iter(info.addresses.values()))
        else:
            address = broker_address(routes, MessageQueue(topic, broker_name, 0))
        request = RecallMessage(topic, recall_handle, self.producer_group, broker_name)
        return self.instance.transport.recall_message(address, request, timeout)

    def close(self) -> None:
        """Wait for asynchronous sends, at most ``sendMsgTimeout``; then leave the instance, even if interrupted."""
        with contextlib.ExitStack() as last_first:
            if self._tracer is not None:
                last_first.callback(self._tracer.close)
            for pool in reversed(self._pools):
                last_first.callback(pool.shutdown)
            last_first.callback(registry.leave, self.instance, self.producer_group)
            last_first.callback(self._check_pool.shutdown, cancel_futures=True)
            if self._trace is not None:
                last_first.callback(self._trace.shutdown)
            last_first.callback(at_exit.senders.discard, self.sender)
            if not self.sender.outstanding.wait(self.sender.timeout):
                text = "shutting down producer %s: asynchronous sends have not ended within send_msg_timeout, and fail"
                logger.warning(text, self.producer_group)

    def _on_check(self, check: TransactionCheck) -> None:
        # A check that arrives during the start is dropped: the broker repeats it.
        if self.transactions is not None:
            self.transactions.submit_check(check)

    def _new_instance(self) -> ClientInstance:
        options = self._options.connection
        transport = self._transport or new_transport(options, self.client_id)
        return ClientInstance(self.client_id, transport, options, idle_seconds=math.inf)

    def __repr__(self) -> str:
        return f"<ProducerService {self.producer_group} {self.instance!r}>"


def _new_tracer(
    producer_group: str, transport: Transport | None, connection: ConnectionOptions, **properties: Any
) -> ProducerService:
    """Return a service that sends the trace of a producer group; a group name that gets too long is cut."""
    end = f"-PRODUCE-{next(_trace_numbers)}"
    trace_group = f"_INNER_TRACE_PRODUCER-{producer_group}"[: MAX_GROUP_LENGTH - len(end)] + end
    own = {"send_msg_timeout": _TRACE_TIMEOUT_MS, "max_message_size": MAX_MESSAGE_BYTES}
    values = {field.name: getattr(connection, field.name) for field in dataclasses.fields(connection)}
    shared = {name: value for name, value in values.items() if name not in _NOT_OF_TRACER}
    options = producer_options({**shared, **properties, **own}, os.environ)
    return ProducerService(trace_group, options, Hooks(), transport=transport)


@contextlib.contextmanager
def batch_trace_sender(options: SinkOptions, transport: Transport | None = None) -> Iterator[SendTrace]:
    """Yield a function that sends the trace messages of a write, over `transport` or over new connections."""
    with contextlib.closing(_new_tracer(options.producer_group, transport, options.connection)) as tracer:
        yield tracer.send
