"""Decides who filters the messages of a read: the brokers, or the tasks. Brokers check a SQL92 expression first.

Brokers cannot filter the messages of inner batches (docs/internals/messages.md#inner-batches).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from rocketmq_spark.errors import (
    MQBrokerException,
    OptionError,
    ReadError,
    RequestNotSupportedException,
    RocketMQError,
)
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.source.queue_requests import QueueRequests
from rocketmq_spark.source.topic_queues import place

logger = logging.getLogger("rocketmq_spark.source")

# The answer of a broker without enablePropertyFilter to a SQL expression (ClientManageProcessor.checkClientConfig).
_NO_SQL: Final = "does not support consumer to filter message"


def tasks_filter(requests: QueueRequests, selected: Iterable[MessageQueue]) -> bool:
    """Return whether tasks must filter by tags themselves; let brokers check a SQL92 expression.

    Raises an OptionError if a broker rejects the expression, and for SQL92 with inner batches or a proxy. Raises a
    ReadError if no broker answers.
    """
    options, checked = requests.options, list(selected)
    if options.sub_expression == "*":
        return False
    inner = may_hold_inner_batches(requests, checked)
    if options.filter_type == "TAG":
        return inner
    if inner:
        topics = sorted({queue.topic for queue in checked})
        names = ", ".join(topics[:5]) + (" and others" if len(topics) > 5 else "")
        raise OptionError(
            f"filterType=SQL92: at least one of the topics {names} is for inner batches (queue.type=BatchCQ). A "
            "broker sees only the properties of a batch, not those of its messages; leave filterType and "
            "subExpression out, and filter the rows"
        )
    check_filter(requests, checked)
    return False


def may_hold_inner_batches(requests: QueueRequests, selected: Iterable[MessageQueue]) -> bool:
    """Return whether a queue may hold inner batches; see `_is_plain`."""
    one_of_each = [*{place(queue): queue for queue in selected}.values()]
    # The first answer often decides, because most reads are of topics of one type.
    if not one_of_each or not _is_plain(requests, one_of_each[0]):
        return bool(one_of_each)
    return not all(requests.queues.by_topic(one_of_each[1:], lambda queue: _is_plain(requests, queue)).values())


def check_filter(requests: QueueRequests, selected: Iterable[MessageQueue]) -> None:
    """Raise an OptionError if a broker rejects SQL or the expression (docs/internals/reads.md#pulls).

    A broker answers a pull with an invalid expression with every message. So this waits for each broker's answer.
    """
    options = requests.options
    settings = options.consumer_group, options.sub_expression, options.filter_type

    def check(queue: MessageQueue, address: str, timeout: float) -> None:
        try:
            requests.transport.check_filter(address, queue.topic, *settings, timeout)
        except MQBrokerException as exc:
            if exc.response_code == ResponseCode.SUBSCRIPTION_PARSE_FAILED:
                cause = "a broker can't parse it"
            elif _NO_SQL in exc.remark:
                cause = "brokers accept SQL only with enablePropertyFilter=true"
            else:
                raise
            raise OptionError(f"subExpression of filterType={options.filter_type}: {cause}: {exc}") from exc

    one_of_each = {queue.broker_name: queue for queue in selected}
    requests.deadline.in_parallel(
        one_of_each.values(),
        lambda queue: requests.until_answered(queue, check, trusted=False),
        "checks of subExpression",
    )


def _is_plain(requests: QueueRequests, queue: MessageQueue) -> bool:
    """Return whether a queue certainly holds no batches as units. With an unknown type, return if SQL filters."""
    queues = requests.queues
    # Only brokers can evaluate SQL92, so it waits for their answers.
    brokers_filter = queues.options.filter_type == "SQL92"
    try:
        if brokers_filter:
            config = requests.until_answered(queue, lambda _, address, __: queues.config(queue, address), trusted=False)
        else:
            config = queues.config(queue, queues.brokers.address(queue))
        return not config.holds_batches
    except ReadError:
        raise
    except RocketMQError as exc:
        if brokers_filter and isinstance(exc, RequestNotSupportedException):
            raise OptionError(
                f"filterType=SQL92: {exc.broker_addr} is a proxy, so no broker can check subExpression, and brokers "
                "return every message for an expression that they can't parse. Read by the name servers of the "
                "cluster, or leave filterType and subExpression out, and filter the rows"
            ) from exc
        effect = "tasks filter instead of brokers"
        if brokers_filter:
            effect = "brokers filter, which returns wrong rows if the topic is for inner batches"
        text = "reading %s with a filter. The type of its queues is unknown, so %s: %s"
        logger.warning(text, queue, effect, exc)
        return brokers_filter
