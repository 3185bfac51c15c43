"""One message, sent by a producer of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rocketmq_spark.client.producer import Producer
from rocketmq_spark.errors import OptionError, ReservedPropertyError
from rocketmq_spark.message import Message
from rocketmq_spark.option_parsing import parse_one
from rocketmq_spark.option_table import SINK_OPTIONS
from rocketmq_spark.producer.queue_selectors import SelectMessageQueueByHash

GROUP: Final = "rocketmq-spark-send"

_TAGS: Final = next(spec for spec in SINK_OPTIONS if spec.name == "tags")


def send_one(
    given: Mapping[str, Any],
    timeout: float,
    topic: str,
    body: bytes,
    *,
    tags: str | None,
    keys: str | None,
    properties: Mapping[str, str],
    sharding_key: str | None,
    delay_ms: int,
) -> dict[str, str | int | None]:
    """Send a message, and return its receipt, as `SendResult.facts`.

    Parameters
    ----------
    given : mapping of str to value
        How to reach the cluster, as `Admin` takes it.
    timeout : float
        Seconds for all of it.
    topic : str
    body : bytes
    tags, keys : str or None
    properties : mapping of str to str
        The user's own.
    sharding_key : str or None
        Messages of one key go to one queue.
    delay_ms : int

    Raises
    ------
    OptionError
        The message is not one.
    RocketMQError
        As of `Producer.send`.
    """
    if tags is not None:
        # A tag with | would be two to whoever filters; brokers take it all the same.
        parse_one(_TAGS, tags, "--tags")
    try:
        message = Message.of(
            topic,
            body,
            tags=tags,
            keys=keys,
            sharding_key=sharding_key,
            delay_ms=delay_ms,
            properties=properties,
        )
    except (ValueError, ReservedPropertyError) as exc:
        raise OptionError(str(exc)) from exc
    with Producer(GROUP, **given) as producer:
        if sharding_key is None:
            return producer.send(message, timeout_ms=timeout * 1000).facts()
        # With a selector there is one attempt, at the one queue that is right.
        chosen = SelectMessageQueueByHash()
        return producer.send(message, selector=chosen, arg=sharding_key, timeout_ms=timeout * 1000).facts()
