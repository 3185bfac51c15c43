"""What a started producer consists of, and in which order it is put together and taken apart.

Rule 1: no connection is made here: the first send, or a topic that is to be looked up, makes it.
Rule 2: taking apart first waits for asynchronous sends under way, then tells the brokers, then closes; each step is
        taken though one before it was interrupted, and on a thread of the producer's own, too.
Rule 3: tracing that can't be set up is logged, and nothing else.

Follows ``DefaultMQProducer.start`` and ``DefaultMQProducerImpl.start``, ``shutdown`` (spec/producer.md sections 1.2,
1.6).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.client.connect import ConnectionOptions, client_id_of, new_transport
from rocketmq_spark.client.own_pool import OwnPool
from rocketmq_spark.client.registry import registry
from rocketmq_spark.client.sending import Sending
from rocketmq_spark.client.transaction import CheckExecutor, TransactionListener, Transactions
from rocketmq_spark.compression import CompressionType
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.message import Message
from rocketmq_spark.names import MAX_GROUP_LENGTH
from rocketmq_spark.namespace import wrap
from rocketmq_spark.producer.client_instance import ClientInstance
from rocketmq_spark.producer.hooks import Hooks
from rocketmq_spark.producer.kernel import Kernel, KernelSettings
from rocketmq_spark.producer.outgoing import Packing
from rocketmq_spark.producer.trace import TraceDispatcher, TraceHook
from rocketmq_spark.producer_options import ProducerOptions
from rocketmq_spark.send_result import SendResult
from rocketmq_spark.transaction import TransactionCheck
from rocketmq_spark.transport.base import Transport
from rocketmq_spark.transport.local_address import local_ip
from rocketmq_spark.unique_id import MessageIdGenerator, UniqueIdGenerator

logger = logging.getLogger("rocketmq_spark.producer")

_trace_numbers: Final = itertools.count()


def trace_group(producer_group: str) -> str:
    """Return a group for the producer that sends the trace of another one; a long group is cut to fit into it."""
    end = f"-PRODUCE-{next(_trace_numbers)}"
    return f"_INNER_TRACE_PRODUCER-{producer_group}"[: MAX_GROUP_LENGTH - len(end)] + end


@functools.cache
def unique_ids() -> UniqueIdGenerator:
    """Return the process's source of message ids; a fork draws ids of its own from it."""
    return UniqueIdGenerator(socket.inet_aton(local_ip()))


@functools.cache
def message_ids() -> MessageIdGenerator:
    """Return the process's source of message ids for gRPC."""
    return MessageIdGenerator()


@dataclass(frozen=True, slots=True)
class Parts:
    """What the caller of a producer may bring along.

    Parameters
    ----------
    transport : Transport or None
    listener : TransactionListener or None
    async_sender_executor, callback_executor : Executor or None
    retry_response_codes : set of int
        May be added to while it runs.
    """

    transport: Transport | None
    listener: TransactionListener | None
    async_sender_executor: Executor | None
    callback_executor: Executor | None
    retry_response_codes: set[int]


class ProducerService:
    """A producer that runs.

    Parameters
    ----------
    producer_group : str
        With the namespace.
    options : ProducerOptions
    hooks : Hooks
    parts : Parts

    Raises
    ------
    OptionError
        The client instance has other connection options.
    GroupTakenError
        The client instance has a producer of that group.
    """

    def __init__(self, producer_group: str, options: ProducerOptions, hooks: Hooks, parts: Parts) -> None:
        self.producer_group = producer_group
        self._options = options
        self._hooks = hooks
        self._parts = parts
        self._namespace = options.wrapped_namespace
        self._pools: list[OwnPool] = []
        self._checks: CheckExecutor | None = None
        self._trace: TraceDispatcher | None = None
        # As Java from 4.9 on: producers that name no instance share none.
        own_name = f"{os.getpid()}#{time.monotonic_ns()}"
        self.instance_name = own_name if options.instance_name == "DEFAULT" else options.instance_name
        self.client_id = client_id_of(options, self.instance_name)
        self.packing = Packing(
            namespace=self._namespace,
            max_message_size=options.max_message_size,
            compress_over=options.compress_msg_body_over_howmuch,
            compression=None if options.compress_type == "NONE" else CompressionType.parse(options.compress_type),
            compress_level=options.compress_level,
            next_id=message_ids().next_id if options.over_grpc else unique_ids().next_id,
        )
        # After what can fail: nobody would take the group out of the instance again.
        connection = ConnectionOptions.of(options, parts.transport)
        self.instance = registry.join(self.client_id, connection, producer_group, self._on_check, self._new_instance)
        self._kernel = Kernel(
            KernelSettings(
                producer_group=producer_group,
                name_servers=options.name_server,
                client_ip=options.client_ip or local_ip(),
                namespace=self._namespace,
                create_topic_key=options.create_topic_key,
                default_topic_queue_nums=options.default_topic_queue_nums,
                unit_mode=options.unit_mode,
                vip_channel_enabled=options.vip_channel_enabled,
            ),
            self.instance,
            hooks,
            clock=time.monotonic,
            wall_clock=time.time,
        )
        processors = os.cpu_count() or 4
        callback_threads = options.client_callback_executor_threads or processors
        self.sending = Sending(
            options,
            self.instance,
            self._kernel,
            hooks,
            async_executor=parts.async_sender_executor or self._pool("AsyncSenderExecutor", processors),
            callback_executor=parts.callback_executor or self._pool("ClientCallbackExecutor", callback_threads),
            retry_response_codes=parts.retry_response_codes,
            clock=time.monotonic,
            rng=random.Random(),
        )

    def transactions(self, send: Callable[[Message], SendResult]) -> Transactions:
        """Return the transactional side, and begin to answer checks if there is a listener."""
        made = Transactions(
            self.producer_group,
            self._namespace,
            self.instance.transport,
            self._kernel,
            self._hooks,
            send,
            self._options.send_msg_timeout / 1000,
        )
        if self._parts.listener is not None:
            self._checks = CheckExecutor(made, self._parts.listener)
        return made

    def look_up_topics(self) -> None:
        """Look up the topics that the options name; one that is not there is logged."""
        for topic in self._options.topics:
            try:
                self.instance.routes.find(wrap(self._namespace, topic), self._options.mq_client_api_timeout / 1000)
            except RocketMQError as exc:
                logger.warning("looking up topic %s at the start: %s", topic, exc)

    def start_trace(self, send: Callable[[Message], object]) -> None:
        """Trace every message from now on; `send` sends one trace message."""
        self._trace = TraceDispatcher(self._options.trace_topic, send, self._options.trace_msg_batch_num)
        self._trace.start()
        self._hooks.send_message_hooks.append(TraceHook(self._options.trace_topic, self._trace.append))

    def close(self) -> None:
        """Wait for asynchronous sends under way, at most as long as one may take; then leave the client instance."""
        with contextlib.ExitStack() as last_first:
            for pool in reversed(self._pools):
                last_first.callback(pool.shutdown)
            last_first.callback(registry.leave, self.instance, self.producer_group)
            if self._checks is not None:
                last_first.callback(self._checks.shutdown)
            if self._trace is not None:
                last_first.callback(self._trace.shutdown)
            if not self.sending.drain(self._options.send_msg_timeout / 1000):
                logger.warning(
                    "producer %s is shut down with asynchronous sends under way: they fail", self.producer_group
                )

    def _on_check(self, check: TransactionCheck) -> None:
        if self._checks is None:
            logger.warning("%s asks about message %s, and producer %s has no transaction_listener", check.address,
                           check.unique_id, self.producer_group)  # fmt: skip
            return
        self._checks.submit(check)

    def _new_instance(self) -> ClientInstance:
        options = self._options
        transport = self._parts.transport or new_transport(options, self.client_id)
        api_timeout = options.mq_client_api_timeout / 1000
        return ClientInstance(self.client_id, transport, options, idle_seconds=math.inf, api_timeout=api_timeout)

    def _pool(self, name: str, threads: int) -> OwnPool:
        pool = OwnPool(name, threads)
        self._pools.append(pool)
        return pool

    def __repr__(self) -> str:
        return f"<ProducerService {self.producer_group} {self.instance!r}>"
