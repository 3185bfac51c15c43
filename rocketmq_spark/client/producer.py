"""The producer: what a program without Spark sends messages and Arrow tables with.

Rule 1: it may be used by many threads, and in the process that started it only.
Rule 2: the caller's messages are never changed.
Rule 3: producers of one client id share a client instance (connections, routes, latency faults) if their connection
        options are equal; else the second one does not start. The instance closes with its last producer.

Follows ``DefaultMQProducer.java``, ``DefaultMQProducerImpl.java``, ``TransactionMQProducer.java`` (spec/producer.md).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from rocketmq_spark.client.admin import MQAdmin
from rocketmq_spark.client.connect import CONNECTION_OPTIONS
from rocketmq_spark.client.lifecycle import Event, Lifecycle, ServiceState
from rocketmq_spark.client.recall import recall_message
from rocketmq_spark.client.registry import GroupTakenError
from rocketmq_spark.client.sending import Target
from rocketmq_spark.client.service import Parts, ProducerService, trace_group
from rocketmq_spark.client.transaction import LocalTransactionExecutor, TransactionListener, Transactions
from rocketmq_spark.errors import MQClientException
from rocketmq_spark.message import Message, MessageQueue
from rocketmq_spark.namespace import wrap
from rocketmq_spark.producer.client_instance import ClientInstance
from rocketmq_spark.producer.hooks import CheckForbiddenHook, EndTransactionHook, Hooks, SendMessageHook
from rocketmq_spark.producer.queue_selectors import MessageQueueSelector
from rocketmq_spark.producer.trace import MAX_MESSAGE_BYTES
from rocketmq_spark.producer.validators import check_group
from rocketmq_spark.producer_options import ProducerOptions, producer_options
from rocketmq_spark.send_result import SendResult, TransactionSendResult
from rocketmq_spark.transport.base import Transport

if TYPE_CHECKING:
    from rocketmq_spark.client.arrow_send import ArrowData
    from rocketmq_spark.metrics import WriteSummary

logger = logging.getLogger("rocketmq_spark.producer")

_TRACE_TIMEOUT_MS: Final = 5000
# The tracer shares the producer's client instance, over remoting only. All other options are its own defaults.
_SHARED_WITH_TRACER: Final = tuple(
    name for name in CONNECTION_OPTIONS if name not in ("over_grpc", "endpoints", "namespace")
)


class Producer(MQAdmin):
    """Sends messages to RocketMQ.

    Parameters
    ----------
    producer_group : str
        Names the application; every producer of one group is the same to a broker. Checked by `start`.
    transport : str or Transport, optional
        ``"remoting"``: the brokers that `name_server` tells of; ``"grpc"``: the RocketMQ 5 proxies of `endpoints`,
        which alone mean it. Or an object that requests go to: a
        :class:`~rocketmq_spark.transport.scripted.ScriptedTransport` makes tests without a server.
    transaction_listener : TransactionListener, optional
        Decides on half messages, and is asked about those left open.
    async_sender_executor, callback_executor : concurrent.futures.Executor, optional
        Where `send_async` prepares its requests, and where its callbacks run; default: pools of the producer's own.
    **properties
        The Java producer's properties in snake_case, times in milliseconds: see
        :class:`~rocketmq_spark.producer_options.ProducerOptions`. ``name_server="host:9876;host:9876"`` is needed, here
        or in the environment variable ``NAMESRV_ADDR``, or ``endpoints="host:8081;host:8081"``.

    Raises
    ------
    OptionError
        A property is unknown or malformed, or means nothing over gRPC.

    Notes
    -----
    Over gRPC a proxy chooses the queues, answers every request and is asked for nothing but routes: a queue or
    selector, `send_oneway` and the calls of `MQAdmin` raise ``MQClientException``.

    Examples
    --------
    >>> from rocketmq_spark import Message, Producer
    >>> with Producer("orders-service", name_server="127.0.0.1:9876") as producer:
    ...     result = producer.send(Message.of("orders", b"one", tags="new", keys="o-1"))
    ...     future = producer.send_async(Message.of("orders", b"two"))
    ...     future.result().queue_offset
    """

    def __init__(
        self,
        producer_group: str,
        *,
        transport: Transport | str | None = None,
        transaction_listener: TransactionListener | None = None,
        async_sender_executor: Executor | None = None,
        callback_executor: Executor | None = None,
        **properties: Any,
    ) -> None:
        if isinstance(transport, str):
            properties["transport"], transport = transport, None
        self.producer_group = producer_group
        self._options = producer_options(properties, os.environ)
        self._parts = Parts(
            transport,
            transaction_listener,
            async_sender_executor,
            callback_executor,
            set(self._options.retry_response_codes),
        )
        self._hooks = Hooks()
        self._lifecycle = Lifecycle()
        self._service: ProducerService | None = None
        self._transactions: Transactions | None = None
        self._tracer: Producer | None = None

    # Life cycle

    @property
    def state(self) -> ServiceState:
        """Where it is in its life."""
        return self._lifecycle.state

    @property
    def options(self) -> ProducerOptions:
        """Its properties."""
        return self._options

    def start(self) -> None:
        """Make it ready to send: join the client instance, begin heart-beats and route refreshes.

        No connection is made before the first send, unless ``topics`` names some to look up.

        Raises
        ------
        MQClientException
            It was started before; the group's name is not allowed, or taken in this client instance.
        OptionError
            A running producer of the same client id has other connection options.
        """
        who = f"producer {self.producer_group}"
        self._lifecycle.fire(Event.START, who)
        group = wrap(self._namespace, self.producer_group)
        check_group(group)
        try:
            service = ProducerService(group, self._options, self._hooks, self._parts)
        except GroupTakenError:
            self._lifecycle.fire(Event.GROUP_TAKEN, who)
            raise
        self._service = service
        try:
            self._transactions = service.transactions(self.send)
            service.look_up_topics()
        except BaseException:
            # Interrupted, or a bug: in this state no shutdown would ever close what is open.
            service.close()
            raise
        self._lifecycle.fire(Event.STARTED, who)
        if self._options.enable_trace:
            self._start_trace(service)

    def shutdown(self) -> None:
        """Wait for asynchronous sends under way, tell the brokers, and close. Harmless if it does not run.

        A callback or a listener may call it, too. Sends that other threads wait for fail.
        """
        if self._lifecycle.foreign or not self._lifecycle.try_fire(Event.SHUTDOWN):
            return
        assert self._service is not None
        try:
            self._service.close()
        finally:
            if self._tracer is not None:
                self._tracer.shutdown()

    def __enter__(self) -> Producer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def __reduce__(self) -> Any:
        raise TypeError("a Producer holds connections and can't be pickled: make one where it is used")

    def __repr__(self) -> str:
        return f"<Producer {self.producer_group} {self.state.value} {self._service!r}>"

    # Sending

    def send(
        self,
        message: Message,
        queue: MessageQueue | None = None,
        *,
        selector: MessageQueueSelector | None = None,
        arg: Any = None,
        timeout_ms: float | None = None,
    ) -> SendResult:
        """Send a message and wait for the broker's answer.

        Parameters
        ----------
        message : Message
        queue : MessageQueue, optional
            Where to; then there is one attempt, and what happens to it is raised as it is.
        selector : callable, optional
            Picks the queue: ``(queues, message, arg) -> MessageQueue``; one attempt, too.
        arg : object, optional
            For the selector.
        timeout_ms : float, optional
            For all of it, retries included; default: ``send_msg_timeout``.

        Returns
        -------
        SendResult
            Its status may be other than ``SEND_OK``: stored, but not flushed or replicated yet.

        Raises
        ------
        MQClientException
            The message is not valid (13 or -1), there is no route (10004, 10005), or all attempts failed: the code
            says how the last one did (10001 connect, 10002 timeout, 10003 no broker, a broker's code, else -1).
        MQBrokerException
            A broker refused it with a code that is not tried again.
        RemotingTooMuchRequestException
            The time was over before an attempt could be made.
        """
        service = self._running_service()
        return service.sending.send(
            lambda: service.packing.pack(message), Target(queue, selector, arg), self._seconds(timeout_ms)
        )

    def send_async(
        self,
        message: Message,
        queue: MessageQueue | None = None,
        *,
        selector: MessageQueueSelector | None = None,
        arg: Any = None,
        callback: Callable[[Future[SendResult]], None] | None = None,
        timeout_ms: float | None = None,
    ) -> Future[SendResult]:
        """Send a message without waiting.

        Everything that `send` raises comes through the future, an invalid message too.

        Parameters
        ----------
        message, queue, selector, arg, timeout_ms
            As in `send`.
        callback : callable, optional
            Called once with the finished future, on a thread of the callback executor; what it raises is logged.

        Returns
        -------
        concurrent.futures.Future of SendResult
            Cancelling it works until a thread has begun with it.
        """
        service = self._running_service()
        nbytes = len(message.body) if isinstance(message, Message) and message.body else 1
        future = service.sending.send_async(
            lambda: service.packing.pack(message), Target(queue, selector, arg), self._seconds(timeout_ms), nbytes
        )
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def send_oneway(
        self,
        message: Message,
        queue: MessageQueue | None = None,
        *,
        selector: MessageQueueSelector | None = None,
        arg: Any = None,
        timeout_ms: float | None = None,
    ) -> None:
        """Send a message that no broker acknowledges; return when it is written. It may be lost, and nobody would know.

        Raises
        ------
        MQClientException
            The message is not valid, there is no route, or no connection (10001).
        """
        service = self._running_service()
        service.sending.send_oneway(
            lambda: service.packing.pack(message), Target(queue, selector, arg), self._seconds(timeout_ms)
        )

    def send_batch(
        self, messages: Iterable[Message], queue: MessageQueue | None = None, *, timeout_ms: float | None = None
    ) -> SendResult:
        """Send messages of one topic as one request: all of them are stored, or none.

        A batch is never compressed, and may be as long as one message (``max_message_size``).

        Raises
        ------
        MQClientException
            They don't go together (topics or waitStoreMsgOK differ, a delay, a retry topic, none at all), or as in
            `send`. Code 13: a message without keys to a compaction topic, which would store the batch and drop the
            message.
        """
        members = tuple(messages)
        service = self._running_service()
        return service.sending.send(
            lambda: service.sending.with_keys(service.packing.pack_batch(members), members),
            Target(queue),
            self._seconds(timeout_ms),
        )

    def send_in_transaction(
        self, message: Message, arg: Any = None, *, executor: LocalTransactionExecutor | None = None
    ) -> TransactionSendResult:
        """Send a message that becomes visible only if a local transaction succeeds.

        Parameters
        ----------
        message : Message
            A delay is dropped.
        arg : object, optional
            For the local transaction.
        executor : callable, optional
            ``(message, arg) -> LocalTransactionState``; default: the listener's ``execute_local_transaction``.

        Raises
        ------
        MQClientException
            There is no listener to answer the broker's questions; or the message could not be sent, then the local
            transaction has not run.
        """
        self._running_service()
        if self._parts.listener is None:
            raise MQClientException(
                "sending in a transaction: this producer has no transaction_listener, which the broker's checks need"
            )
        assert self._transactions is not None
        return self._transactions.run(message, executor or self._parts.listener.execute_local_transaction, arg)

    def recall_message(self, topic: str, recall_handle: str) -> str:
        """Take a delayed message back before it is delivered, and return its id.

        Parameters
        ----------
        topic : str
        recall_handle : str
            ``SendResult.recall_handle``: of a message with a delivery time, not with a delay level.

        Raises
        ------
        MQClientException
            No handle, a topic that nothing can be recalled from, or a broker that nobody knows.
        MQBrokerException, RemotingException
            The server refused (brokers allow it with ``recallMessageEnable=true``), or did not answer.
        """
        service = self._running_service()
        return recall_message(
            service.instance,
            wrap(self._options.wrapped_namespace, topic),
            recall_handle,
            service.producer_group,
            self._options.send_msg_timeout / 1000,
            over_grpc=self._options.over_grpc,
        )

    def send_arrow(self, data: ArrowData, topic: str | None = None, **options: str | int | bool) -> WriteSummary:
        """Send the rows of an Arrow table or of record batches; return when every row is stored and acknowledged.

        The same path as a DataFrame's write: the same columns, batches, windows and retries, at-least-once.

        Parameters
        ----------
        data : pyarrow.Table, RecordBatch, RecordBatchReader or iterable of RecordBatch
            Columns as a DataFrame's: ``body``, and ``tags``, ``keys``, ``properties``, ... where wanted.
        topic : str, optional
            Default: the column ``topic``.
        **options : str, int or bool
            Options of a write, by their own names, such as ``batchBytes="64k"`` or ``ordered=True``.

        Returns
        -------
        WriteSummary
            Rows, retries and latencies per broker: ``show()``, ``to_dict()``.

        Raises
        ------
        SchemaError, OptionError
            Before anything is sent.
        InvalidRowError, DeliveryError
            Some rows are not stored; the text accounts for all of them.
        """
        from rocketmq_spark.client.arrow_send import send_arrow

        service = self._running_service()
        return send_arrow(data, topic, options, self._options, service.producer_group, service.instance)

    # What can be changed on a running producer

    def add_retry_response_code(self, code: int) -> None:
        """Try another broker after this broker code, too."""
        self._parts.retry_response_codes.add(code)

    def set_back_pressure_for_async_send(self, messages: int, nbytes: int) -> None:
        """Set how much `send_async` may have under way; what is under way stays counted.

        Parameters
        ----------
        messages : int
            10 at least.
        nbytes : int
            1 MiB at least.

        Raises
        ------
        MQClientException
            It does not run, or was made without ``enable_backpressure_for_async_mode``.
        """
        limits = self._running_service().sending.back_pressure
        if limits is None:
            raise MQClientException(
                f"producer {self.producer_group} has no back pressure to set: it was made without "
                "enable_backpressure_for_async_mode=True"
            )
        limits.resize(messages, nbytes)

    def set_send_latency_fault_enable(self, enable: bool) -> None:
        """Switch the fault strategy of the client instance on or off."""
        self._running_service().instance.faults.enabled = enable

    def register_send_message_hook(self, hook: SendMessageHook) -> None:
        """Observe every attempt from now on."""
        self._hooks.send_message_hooks.append(hook)

    def register_check_forbidden_hook(self, hook: CheckForbiddenHook) -> None:
        """Let this be asked before every attempt; what it raises is the attempt's failure."""
        self._hooks.check_forbidden_hooks.append(hook)

    def register_end_transaction_hook(self, hook: EndTransactionHook) -> None:
        """Observe the end of every transaction from now on."""
        self._hooks.end_transaction_hooks.append(hook)

    # Inside

    @property
    def _namespace(self) -> str:
        return self._options.wrapped_namespace

    @property
    def _api_timeout(self) -> float:
        return self._options.mq_client_api_timeout / 1000

    def _running(self) -> ClientInstance:
        service = self._running_service()
        if self._options.over_grpc:
            raise MQClientException(
                f"producer {self.producer_group} works over gRPC, which has no questions about queues, offsets and "
                "stored messages, and creates no topics: ask a producer with transport=remoting (name_server)"
            )
        return service.instance

    def _running_service(self) -> ProducerService:
        self._lifecycle.require_running(f"producer {self.producer_group}")
        assert self._service is not None
        return self._service

    def _seconds(self, timeout_ms: float | None) -> float:
        return (self._options.send_msg_timeout if timeout_ms is None else timeout_ms) / 1000

    def _start_trace(self, service: ProducerService) -> None:
        options = self._options
        try:
            tracer = Producer(
                trace_group(self.producer_group),
                transport=self._parts.transport,
                # The same client instance: one that has the caller's transport for itself would close it, and take the
                # brokers' checks of transactions.
                instance_name=service.instance_name,
                send_msg_timeout=_TRACE_TIMEOUT_MS,
                max_message_size=MAX_MESSAGE_BYTES,
                **{name: getattr(options, name) for name in _SHARED_WITH_TRACER},
            )
            tracer.start()
        except Exception:
            logger.warning("producer %s sends without a message trace", self.producer_group, exc_info=True)
            return
        self._tracer = tracer
        service.start_trace(tracer.send)
