"""Decides who filters the messages of a read: the brokers, or the tasks. Brokers check a SQL92 expression first.

Brokers cannot filter the messages of inner batches (docs/internals/messages.md#inner-batches).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from rocketmq_spark.errors import MQBrokerException, OptionError, RocketMQError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.source.topic_queues import TopicQueues, place

logger = logging.getLogger("rocketmq_spark.source")

# The answer of a broker without enablePropertyFilter to a SQL expression (ClientManageProcessor.checkClientConfig).
_NO_SQL: Final = "does not support consumer to filter message"


def tasks_filter(queues: TopicQueues, selected: Iterable[MessageQueue]) -> bool:
    """Return whether tasks must filter by tags themselves; let brokers check a SQL92 expression.

    Raises an OptionError if a broker rejects the expression, and for SQL92 with inner batches.
    """
    options, checked = queues.options, list(selected)
    if options.sub_expression == "*":
        return False
    inner = may_hold_inner_batches(queues, checked)
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
    check_filter(queues, checked)
    return False


def may_hold_inner_batches(queues: TopicQueues, selected: Iterable[MessageQueue]) -> bool:
    """Return whether a queue may hold inner batches; see `_is_plain`."""
    one_of_each = [*{place(queue): queue for queue in selected}.values()]
    # The first answer often decides, because most reads are of topics of one type.
    if not one_of_each or not _is_plain(queues, one_of_each[0]):
        return bool(one_of_each)
    return not all(queues.by_topic(one_of_each[1:], lambda queue: _is_plain(queues, queue)).values())


def check_filter(queues: TopicQueues, selected: Iterable[MessageQueue]) -> None:
    """Raise an OptionError if a broker rejects SQL or the expression (docs/internals/reads.md#pulls)."""
    options = queues.options
    settings = options.consumer_group, options.sub_expression, options.filter_type
    for queue in {queue.broker_name: queue for queue in selected}.values():
        try:
            timeout = queues.deadline.limit(queues.brokers.timeout)
            queues.transport.check_filter(queues.brokers.address(queue), queue.topic, *settings, timeout)
        except RocketMQError as exc:
            if isinstance(exc, MQBrokerException):
                cause = ""
                if exc.response_code == ResponseCode.SUBSCRIPTION_PARSE_FAILED:
                    cause = "a broker can't parse it"
                elif _NO_SQL in exc.remark:
                    cause = "brokers accept SQL only with enablePropertyFilter=true"
                if cause:
                    raise OptionError(f"subExpression of filterType={options.filter_type}: {cause}: {exc}") from exc
                if not exc.retriable:
                    raise
            logger.warning(
                "broker %s could not check the filter, the first pull will do so: %s", queue.broker_name, exc
            )


def _is_plain(queues: TopicQueues, queue: MessageQueue) -> bool:
    """Return whether a queue certainly holds no batches as units. With an unknown type, return if SQL filters."""
    try:
        return not queues.config(queue, queues.brokers.address(queue)).holds_batches
    except RocketMQError as exc:
        # Only brokers can evaluate SQL92.
        brokers_filter = queues.options.filter_type == "SQL92"
        effect = "tasks filter instead of brokers"
        if brokers_filter:
            effect = "brokers filter, which returns wrong rows if the topic is for inner batches"
        text = "reading %s with a filter. The type of its queues is unknown, so %s: %s"
        logger.warning(text, queue, effect, exc)
        return brokers_filter
