"""The producer: what a program without Spark sends messages and Arrow tables with.

Rule 1: it may be used by many threads, and in the process that started it only.
Rule 2: the caller's messages are never changed.
Rule 3: one client instance (connections, routes, what is known of brokers) per client id in a process; it ends with its
        last producer.

Follows ``DefaultMQProducer.java``, ``DefaultMQProducerImpl.java``, ``TransactionMQProducer.java`` (spec/producer.md).
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from rocketmq_spark.client.admin import MQAdmin
from rocketmq_spark.client.lifecycle import Event, Lifecycle, ServiceState
from rocketmq_spark.client.sending import Sending
from rocketmq_spark.client.transaction import (
    CheckExecutor,
    LocalTransactionExecutor,
    TransactionListener,
    Transactions,
)
from rocketmq_spark.errors import MQClientException, RocketMQError
from rocketmq_spark.message import Message, MessageQueue
from rocketmq_spark.producer.client_instance import ClientInstance, acquire_instance
from rocketmq_spark.producer.hooks import CheckForbiddenHook, EndTransactionHook, Hooks, SendMessageHook
from rocketmq_spark.producer.namespace import namespace_of, wrap
from rocketmq_spark.producer.trace import TraceDispatcher, TraceHook
from rocketmq_spark.producer.validators import check_group
from rocketmq_spark.producer_options import ProducerOptions, producer_options
from rocketmq_spark.send_result import SendResult, TransactionSendResult
from rocketmq_spark.transport.base import Transport

if TYPE_CHECKING:
    import pyarrow as pa

    from rocketmq_spark.metrics import WriteSummary

logger = logging.getLogger("rocketmq_spark.producer")

# (queues of the topic, message, the caller's argument) -> one of the queues.
MessageQueueSelector: TypeAlias = Callable[[Sequence[MessageQueue], Message, Any], MessageQueue]

_trace_numbers = itertools.count()


class Producer(MQAdmin):
    """Sends messages to RocketMQ.

    Parameters
    ----------
    producer_group : str
        Names the application; every producer of one group is the same to a broker. Checked by `start`.
    transport : Transport, optional
        Where requests go; default: the remoting protocol to `name_server`. A
        :class:`~rocketmq_spark.transport.scripted.ScriptedTransport` makes tests without a server.
    transaction_listener : TransactionListener, optional
        Decides on half messages, and is asked about those left open.
    async_sender_executor, callback_executor : concurrent.futures.Executor, optional
        Where `send_async` prepares its requests, and where its callbacks run; default: pools of the producer's own.
    **properties
        The Java producer's properties in snake_case, times in milliseconds: see
        :class:`~rocketmq_spark.producer_options.ProducerOptions`. ``name_server="host:9876;host:9876"`` is needed, here
        or in the environment variable ``NAMESRV_ADDR``.

    Raises
    ------
    OptionError
        A property is unknown or malformed.

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
        transport: Transport | None = None,
        transaction_listener: TransactionListener | None = None,
        async_sender_executor: Executor | None = None,
        callback_executor: Executor | None = None,
        **properties: Any,
    ) -> None:
        self.producer_group = producer_group
        self._options = producer_options(properties, os.environ)
        self._transport = transport
        self._listener = transaction_listener
        self._own_executors: list[ThreadPoolExecutor] = []
        self._async_sender_executor = async_sender_executor
        self._callback_executor = callback_executor
        self._hooks = Hooks()
        self._lifecycle = Lifecycle()
        self._instance: ClientInstance | None = None
        self._sending: Sending | None = None
        self._transactions: Transactions | None = None
        self._checks: CheckExecutor | None = None
        self._trace: TraceDispatcher | None = None
        self._trace_producer: Producer | None = None
        self._retry_response_codes = set(self._options.retry_response_codes)

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
        """
        self._lifecycle.fire(Event.START, repr(self))
        group = wrap(self._namespace, self.producer_group)
        check_group(group)
        instance = acquire_instance(...)
