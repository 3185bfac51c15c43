"""The public producer: sends messages and Arrow tables from plain Python.

Follows ``DefaultMQProducer.java`` and ``TransactionMQProducer.java``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.send_result import SendResult, TransactionSendResult
from rocketmq_spark.options.producer import ProducerOptions, producer_options
from rocketmq_spark.producer.hooks import CheckForbiddenHook, EndTransactionHook, Hooks, SendMessageHook
from rocketmq_spark.producer.message_sender import QueueChoice
from rocketmq_spark.producer.mq_admin import MQAdmin
from rocketmq_spark.producer.service import Lifecycle, ProducerService, ServiceState
from rocketmq_spark.producer.transaction import LocalTransactionExecutor, TransactionListener
from rocketmq_spark.routing.client_instance import GroupTakenError
from rocketmq_spark.routing.selectors import MessageQueueSelector
from rocketmq_spark.transport.base import Transport

if TYPE_CHECKING:
    from rocketmq_spark.metrics import WriteSummary
    from rocketmq_spark.producer.arrow_send import ArrowData


class Producer(MQAdmin):
    """Sends messages to RocketMQ; safe for many threads, in the process that started it.

    Over gRPC the proxy chooses the queues: a queue or selector, `send_oneway` and the methods of `MQAdmin` raise
    ``MQClientException``.

    Parameters
    ----------
    transport : str or Transport, optional
        ``"remoting"`` for the brokers that `name_server` knows, ``"grpc"`` for the RocketMQ 5 proxies of `endpoints`.
        Default: ``"grpc"`` if only `endpoints` are given. A
        :class:`~rocketmq_spark.testing.scripted.ScriptedTransport` makes tests without a server. The property
        `namespace` does not reach a transport of your own.
    async_sender_executor, callback_executor : concurrent.futures.Executor, optional
        Where `send_async` prepares its requests, and where its callbacks run. Default: pools of the producer.
    **properties
        The Java producer's properties in snake_case, times in milliseconds: see
        :class:`~rocketmq_spark.options.producer.ProducerOptions`. Required is ``name_server="host:9876;host:9876"``,
        or the environment variable ``NAMESRV_ADDR``, or ``endpoints="host:8081;host:8081"``. One that is unknown,
        malformed or not supported over gRPC raises an ``OptionError``.

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
        self._retry_response_codes = set(self._options.retry_response_codes)
        self._hooks = Hooks()
        self._lifecycle = Lifecycle(f"producer {producer_group}")
        self._service: ProducerService | None = None
        self._new_service = partial(
            ProducerService,
            options=self._options,
            hooks=self._hooks,
            transport=transport,
            listener=transaction_listener,
            async_sender_executor=async_sender_executor,
            callback_executor=callback_executor,
            retry_response_codes=self._retry_response_codes,
        )

    @property
    def state(self) -> ServiceState:
        """Created, running, shut down, or failed to start."""
        return self._lifecycle.state

    @property
    def options(self) -> ProducerOptions:
        """The properties, parsed."""
        return self._options

    def start(self) -> None:
        """Join the client instance and start heartbeats and route refreshes.

        No connection is made before the first send, unless ``topics`` names topics to look up. A producer that was
        started before, or whose group is not allowed or already in the client instance, raises ``MQClientException``. A
        running producer of the same client id with other connection options raises an ``OptionError``.
        """
        self._lifecycle.begin_start()
        try:
            service = self._service = self._new_service(self.producer_group)
        except GroupTakenError:
            self._lifecycle.enter(ServiceState.CREATE_JUST)
            raise
        try:
            service.look_up_topics()
        except BaseException:
            # In this state, no shutdown would close the service.
            service.close()
            raise
        self._lifecycle.enter(ServiceState.RUNNING)
        if self._options.enable_trace:
            service.start_trace()

    def shutdown(self) -> None:
        """Wait for asynchronous sends, unregister from the brokers, and close. Does nothing unless running.

        A callback or a listener may call it. Synchronous sends of other threads fail.
        """
        if self._lifecycle.foreign or not self._lifecycle.enter(ServiceState.SHUTDOWN_ALREADY):
            return
        assert self._service is not None
        self._service.close()

    def __enter__(self) -> Producer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __reduce__(self) -> Any:
        raise TypeError("a Producer holds connections and can't be pickled: make one where it is used")

    def __repr__(self) -> str:
        return f"<Producer {self.producer_group} {self.state.value} {self._service!r}>"

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

        A `queue`, or the queue that ``selector(queues, message, arg)`` returns, gets one attempt, and its error is
        raised. `timeout_ms` is for all attempts together; default: ``send_msg_timeout``. With a status other than
        ``SEND_OK`` the message is stored, but not flushed or replicated yet.

        Raises
        ------
        MQClientException
            The message is invalid (13 or -1), there is no route (10004, 10005), or all attempts failed. Then the code
            is the last attempt's: 10001 connect, 10002 timeout, 10003 no broker, a broker's code, else -1.
        MQBrokerException
            A broker answered with a code that is not retried.
        RemotingTooMuchRequestException
            The time was over before an attempt could be made.
        """
        choice = QueueChoice(queue, selector, arg)
        return self._running_service().sender.send(message, self._seconds(timeout_ms), choice)

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
        """Send a message without waiting; the parameters are those of `send`.

        The future has every error that `send` raises. It can be cancelled until a thread begins with the send. The
        callback gets the finished future once, on the callback executor; what it raises is logged.
        """
        choice = QueueChoice(queue, selector, arg)
        future = self._running_service().sender.send_async(message, self._seconds(timeout_ms), choice)
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
        """Send a message without an acknowledgement, and return when it is written. It may be lost unnoticed.

        An invalid message, a missing route or connection (10001) raises ``MQClientException``.
        """
        choice = QueueChoice(queue, selector, arg)
        self._running_service().sender.send_oneway(message, self._seconds(timeout_ms), choice)

    def send_batch(
        self, messages: Iterable[Message], queue: MessageQueue | None = None, *, timeout_ms: float | None = None
    ) -> SendResult:
        """Send messages of one topic as one request: the broker stores all of them, or none.

        A batch is never compressed. ``max_message_size`` limits it as a whole. Errors are those of `send`.
        ``MQClientException`` is also raised if the messages cannot share a batch (topics or waitStoreMsgOK differ, a
        delay, a retry topic, no message), or (13) for one without keys to a compaction topic, which would drop it.
        """
        members = tuple(messages)
        return self._running_service().sender.send_batch(members, self._seconds(timeout_ms), QueueChoice(queue))

    def send_in_transaction(
        self, message: Message, arg: Any = None, *, executor: LocalTransactionExecutor | None = None
    ) -> TransactionSendResult:
        """Send a message that becomes visible only if a local transaction succeeds. A delay is dropped.

        The local transaction is ``executor(message, arg)``; default: the listener's ``execute_local_transaction``. It
        does not run, and ``MQClientException`` is raised, without a listener or if the message could not be sent.
        """
        transactions = self._running_service().transactions
        assert transactions is not None
        return transactions.run(message, executor, arg)

    def send_arrow(self, data: ArrowData, topic: str | None = None, **options: str | int | bool) -> WriteSummary:
        """Send the rows of an Arrow table or of record batches; return when every row is stored and acknowledged.

        Columns, batches and retries are those of a DataFrame's write, at least once. `data` is a table, a batch, a
        reader, or an iterable of batches, with a column ``body``, and optionally ``tags``, ``keys``, ``properties`` and
        the others of a write. Without `topic`, the column ``topic`` names each row's. `options` are those of a write,
        by their own names, such as ``batchBytes="64k"`` or ``ordered=True``. The summary has rows, retries and
        latencies per broker: ``show()``, ``to_dict()``.

        ``SchemaError`` and ``OptionError`` are raised before anything is sent. After ``InvalidRowError`` and
        ``DeliveryError`` some rows are not stored; the text accounts for all of them.
        """
        from rocketmq_spark.producer.arrow_send import send_arrow

        service = self._running_service()
        return send_arrow(data, topic, options, self._options, service.producer_group, service.instance)

    def add_retry_response_code(self, code: int) -> None:
        """Try another broker after this broker code, too."""
        self._retry_response_codes.add(code)

    def set_back_pressure_for_async_send(self, messages: int, nbytes: int) -> None:
        """Set how many messages (at least 10) and bytes (at least 1 MiB) `send_async` may have in flight.

        The producer must run, with ``enable_backpressure_for_async_mode``; otherwise ``MQClientException`` is raised.
        """
        limits = self._running_service().sender.back_pressure
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
        """Call this before every attempt; the attempt fails with what it raises."""
        self._hooks.check_forbidden_hooks.append(hook)

    def register_end_transaction_hook(self, hook: EndTransactionHook) -> None:
        """Observe the end of every transaction from now on."""
        self._hooks.end_transaction_hooks.append(hook)

    def _running_service(self) -> ProducerService:
        self._lifecycle.require_running()
        assert self._service is not None
        return self._service

    def _seconds(self, timeout_ms: float | None) -> float:
        return (self._options.send_msg_timeout if timeout_ms is None else timeout_ms) / 1000
