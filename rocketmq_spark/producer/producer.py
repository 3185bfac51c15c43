"""`Producer`, the API for plain Python.

It follows parts of Java's ``DefaultMQProducer``, ``TransactionMQProducer`` and ``MQAdminImpl``. `Producer.send_arrow`
is not in Java.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any

from rocketmq_spark.errors import MQClientException, RocketMQError
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.message_ext import MessageExt, decode_message_id
from rocketmq_spark.model.names import check_topic, is_system_topic
from rocketmq_spark.model.route import masters_of
from rocketmq_spark.model.send_result import SendResult, TransactionSendResult
from rocketmq_spark.options.producer import ProducerOptions, producer_options
from rocketmq_spark.producer.attempt import broker_address
from rocketmq_spark.producer.encode import decompressed
from rocketmq_spark.producer.hooks import CheckForbiddenHook, EndTransactionHook, Hooks, SendMessageHook
from rocketmq_spark.producer.message_sender import MessageSender, QueueChoice
from rocketmq_spark.producer.service import Lifecycle, ProducerService, ServiceState
from rocketmq_spark.producer.transaction import LocalTransactionExecutor, TransactionListener
from rocketmq_spark.routing.client_instance import ClientInstance, GroupTakenError
from rocketmq_spark.routing.route_cache import publish_info_of
from rocketmq_spark.routing.selectors import MessageQueueSelector
from rocketmq_spark.transport.base import Transport

if TYPE_CHECKING:
    from rocketmq_spark.metrics import WriteSummary
    from rocketmq_spark.producer.arrow_send import ArrowData


class Producer:
    """Sends messages to RocketMQ; safe for many threads, in the process that started it.

    `transport` is ``"remoting"`` for the brokers that `name_server` knows, or ``"grpc"`` for the RocketMQ 5 proxies of
    `endpoints`; default: ``"grpc"`` if only `endpoints` are given. A ``Transport`` object gets topics and groups
    without the prefix of the property `namespace`.

    The other `properties` are the fields of :class:`~rocketmq_spark.options.producer.ProducerOptions`, many of them the
    Java producer's in snake_case; times are in milliseconds. Required is ``name_server="host:9876;host:9876"``, or the
    environment variable ``NAMESRV_ADDR``, or ``endpoints="host:8081;host:8081"``. A property that is unknown, malformed
    or not supported over gRPC raises an ``OptionError``.

    Methods that send or ask servers raise ``MQClientException`` if the producer does not run. Over gRPC the proxy
    chooses the queues: a queue or selector, `send_oneway`, and the requests for topics, queues, offsets and stored
    messages raise it, too. Over remoting, those requests raise it if the broker of a queue is unknown. They raise
    ``RemotingException`` for an unreachable server, and ``MQBrokerException`` if a server rejects them.

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
        """Join the client instance. Without the property ``topics``, no connection is made before the first send.

        Raises ``MQClientException`` if the producer was started before, or if its group is not allowed or already in
        the client instance; ``OptionError`` if the client id has a producer with other connection options.
        """
        self._lifecycle.begin_start()
        try:
            service = self._service = self._new_service(self.producer_group)
        except GroupTakenError:
            self._lifecycle.enter(ServiceState.CREATE_JUST)
            raise
        try:
            service.prepare()
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

        A `queue`, or the queue that ``selector(queues, message, arg)`` returns, gets one attempt. `timeout_ms` is for
        all attempts together; default: ``send_msg_timeout``. With a status other than ``SEND_OK`` the message is
        stored, but not flushed or replicated yet.

        Raises ``MQClientException`` for an invalid message (13 or -1), without a route (10004, 10005), and if all
        attempts failed. Then the code is the last attempt's: 10001 connect, 10002 timeout, 10003 no broker, a broker's
        code, else -1. A broker's code that is not retried raises ``MQBrokerException``, a timeout before an attempt
        could be made ``RemotingTooMuchRequestException``. An error's `maybe_stored` is for all attempts together.
        """
        choice = QueueChoice(queue, selector, arg)
        return self._sender.send(message, self._seconds(timeout_ms), choice)

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
        future = self._sender.send_async(message, self._seconds(timeout_ms), choice)
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
        """Send a message without an acknowledgement, and return when it is written; it may be lost unnoticed.

        Raises ``MQClientException`` for an invalid message, and without a route or a connection (10001).
        """
        choice = QueueChoice(queue, selector, arg)
        self._sender.send_oneway(message, self._seconds(timeout_ms), choice)

    def send_batch(
        self, messages: Iterable[Message], queue: MessageQueue | None = None, *, timeout_ms: float | None = None
    ) -> SendResult:
        """Send messages of one topic as one request: the broker stores all of them, or none.

        A batch is never compressed, and ``max_message_size`` limits the whole of it. Raises as `send`, and
        ``MQClientException`` if the messages cannot share a batch: topics or waitStoreMsgOK differ, a delay, a retry
        topic, no message. The code 13 also means a message without keys to a compaction topic, which would drop it.
        """
        members = tuple(messages)
        return self._sender.send_batch(members, self._seconds(timeout_ms), QueueChoice(queue))

    def send_batch_async(
        self,
        messages: Iterable[Message],
        queue: MessageQueue | None = None,
        *,
        callback: Callable[[Future[SendResult]], None] | None = None,
        timeout_ms: float | None = None,
    ) -> Future[SendResult]:
        """Send messages as one request without waiting; the future is that of `send_async`, its errors of `send_batch`.

        An error whose flag `split` is set concerns one message or the size: nothing is stored.
        """
        members = tuple(messages)
        future = self._sender.send_batch_async(members, self._seconds(timeout_ms), QueueChoice(queue))
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def send_in_transaction(
        self, message: Message, arg: Any = None, *, executor: LocalTransactionExecutor | None = None
    ) -> TransactionSendResult:
        """Send a message that becomes visible only if its transaction is committed. A delay is dropped.

        The local transaction is ``executor(message, arg)``; default: the listener's ``execute_local_transaction``. It
        runs only after ``SEND_OK``. Without a listener, or if the send fails, ``MQClientException`` is raised.
        """
        transactions = self._running_service().transactions
        assert transactions is not None
        return transactions.run(message, executor, arg)

    def send_arrow(self, data: ArrowData, topic: str | None = None, **options: str | int | bool | None) -> WriteSummary:
        """Send the rows of an Arrow table or of record batches; return when every row is stored and acknowledged.

        Columns, `options` (such as ``batchBytes="64k"``; None means not given), batches and retries are those of a
        DataFrame's write, at least once. `data` is a table, a batch, a reader, or an iterable of batches. Required is
        the column ``body``, and ``topic`` without the argument `topic`. The summary has rows, retries and latencies per
        broker. With ``delivery="effectivelyOnce"``, a call with the ``writeId`` of a failed one sends the rows that are
        missing.

        ``SchemaError`` and ``OptionError`` are raised before anything is sent. After ``InvalidRowError`` and
        ``DeliveryError`` some rows are not stored; the error accounts for all of them.
        """
        from rocketmq_spark.producer.arrow_send import send_arrow

        service = self._running_service()
        return send_arrow(data, topic, options, self._options, service.producer_group, service.instance)

    def add_retry_response_code(self, code: int) -> None:
        """Try another broker after this broker code, too."""
        self._retry_response_codes.add(code)

    def set_back_pressure_for_async_send(self, messages: int, nbytes: int) -> None:
        """Set how many messages (at least 10) and bytes (at least 1 MiB) `send_async` may have in flight.

        Raises ``MQClientException`` without ``enable_backpressure_for_async_mode``.
        """
        limits = self._sender.back_pressure
        if limits is None:
            raise MQClientException(
                f"producer {self.producer_group} has no back pressure: make it with "
                "enable_backpressure_for_async_mode=True"
            )
        limits.resize(messages, nbytes)

    def set_send_latency_fault_enable(self, enable: bool) -> None:
        """Switch the fault strategy of the client instance on or off."""
        self._running_service().instance.faults.enabled = enable

    def register_send_message_hook(self, hook: SendMessageHook) -> None:
        """Observe every attempt from now on; an asynchronous send with its retries counts as one."""
        self._hooks.send_message_hooks.append(hook)

    def register_check_forbidden_hook(self, hook: CheckForbiddenHook) -> None:
        """Call this before every attempt except asynchronous retries; the attempt fails with what it raises."""
        self._hooks.check_forbidden_hooks.append(hook)

    def register_end_transaction_hook(self, hook: EndTransactionHook) -> None:
        """Observe the end of every transaction from now on."""
        self._hooks.end_transaction_hooks.append(hook)

    def create_topic(self, key: str, new_topic: str, queue_num: int, *, perm: int = 6) -> None:
        """Create or change a topic on every broker that has the topic `key`.

        ``TBW102`` is on every broker with ``autoCreateTopicEnable``. The topic gets `queue_num` read queues and as many
        write queues on each broker. `perm` is the sum of 4 to read and 2 to write. ``MQClientException`` is
        raised for a name that is not allowed, and if some brokers failed: the error names each.
        """
        transport = self._running().transport
        check_topic(self._options.connection.wire_name(new_topic))
        if is_system_topic(new_topic):
            raise MQClientException(f"creating topic {new_topic}: RocketMQ reserves this name; choose another one")
        masters = masters_of(transport.query_route(key, self._api_timeout).broker_datas)
        errors = {}
        for name, address in sorted(masters.items()):
            try:
                transport.create_topic(address, new_topic, queue_num, perm, self._api_timeout)
            except RocketMQError as exc:
                errors[name] = exc
        if errors or not masters:
            reasons = (
                "; ".join(f"{name}: {exc}" for name, exc in errors.items())
                or f"no broker has topic {key}; pass an existing topic as key"
            )
            error = MQClientException(f"creating topic {new_topic} with {queue_num} queues: {reasons}")
            raise error from next(iter(errors.values()), None)

    def fetch_publish_message_queues(self, topic: str) -> list[MessageQueue]:
        """Return the writable queues of a topic, from a name server.

        ``MQBrokerException`` (17): no name server knows the topic. The first message may still create it.
        """
        route = self._running().transport.query_route(topic, self._api_timeout)
        return list(publish_info_of(topic, route).queues)

    def max_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the queue's next message; 0 for a queue that the broker does not have."""
        return self._running().transport.max_offset(queue, self._address(queue), self._api_timeout)

    def min_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the queue's oldest message; 0 for a queue that the broker does not have."""
        return self._running().transport.min_offset(queue, self._address(queue), self._api_timeout)

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        """Return the broker's answer: the offset of the first message stored at `timestamp` (epoch, ms) or later.

        Brokers of 4.9.7 answer with the message nearest to the time. A read with ``startingTimestamp`` corrects that.
        """
        return self._running().transport.search_offset(queue, timestamp, self._address(queue), self._api_timeout)

    def earliest_msg_store_time(self, queue: MessageQueue) -> int:
        """Return when the queue's oldest message was stored, epoch milliseconds; -1 if the queue is empty."""
        return self._running().transport.earliest_msg_store_time(queue, self._address(queue), self._api_timeout)

    def view_message(self, offset_msg_id: str, topic: str = "") -> MessageExt:
        """Return a stored message, decompressed, by the broker's id (``SendResult.offset_msg_id``).

        Brokers with access control require the topic. Raises ``MQClientException`` for a malformed id and for an id
        without a message, ``CompressionError`` for a body that cannot be decompressed.
        """
        transport = self._running().transport
        address, offset = decode_message_id(offset_msg_id)
        return decompressed(transport.view_message(address, offset, self._api_timeout, topic=topic))

    def recall_message(self, topic: str, recall_handle: str) -> str:
        """Take a delayed message back before it is delivered, and return its id. Works over gRPC, too.

        Only messages with a delivery time have a handle (``SendResult.recall_handle``), and brokers need
        ``recallMessageEnable=true``. Raises ``MQClientException`` for a malformed handle, a retry or dead-letter topic,
        and an unknown broker.
        """
        return self._running_service().recall(topic, recall_handle)

    @property
    def _sender(self) -> MessageSender:
        """The sender of a running producer; the asyncio producer uses it, too."""
        return self._running_service().sender

    def _running_service(self) -> ProducerService:
        self._lifecycle.require_running()
        assert self._service is not None
        return self._service

    def _seconds(self, timeout_ms: float | None) -> float:
        return (self._options.send_msg_timeout if timeout_ms is None else timeout_ms) / 1000

    def _running(self) -> ClientInstance:
        service = self._running_service()
        if self._options.over_grpc:
            raise MQClientException(
                f"producer {self.producer_group} works over gRPC, which has no requests for queues, offsets and "
                "stored messages, and creates no topics: use a producer with transport=remoting (name_server)"
            )
        return service.instance

    @property
    def _api_timeout(self) -> float:
        return self._options.connection.mq_client_api_timeout / 1000

    def _address(self, queue: MessageQueue) -> str:
        return broker_address(self._running().routes, queue)
