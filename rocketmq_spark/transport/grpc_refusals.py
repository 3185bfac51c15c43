"""What a broker is asked over remoting, and gRPC has no call for.

Rule 1: refused with a text that says what to do, before anything is opened; nothing is faked.

Follows spec/grpc.md section 4: the calls for offsets are answered UNIMPLEMENTED, and there is none for the others.
"""

from __future__ import annotations

from typing import Any, NoReturn

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.message import MessageQueue, SendRequest
from rocketmq_spark.message_ext import MessageExt
from rocketmq_spark.wire.topic_config import TopicConfig


class RemotingOnly:
    """The calls of :class:`.base.Transport` that the gRPC protocol does not have: each raises ``MQClientException``."""

    def send_oneway(self, request: SendRequest, *_: Any, **__: Any) -> None:
        """Refuse: every call has a reply."""
        _refuse(f"sending to {request.queue} oneway", "send without an acknowledgement")

    def max_offset(self, queue: MessageQueue, *_: Any, **__: Any) -> int:
        """Refuse."""
        _refuse(f"asking for the max offset of {queue}", "call for offsets")

    def min_offset(self, queue: MessageQueue, *_: Any, **__: Any) -> int:
        """Refuse."""
        _refuse(f"asking for the min offset of {queue}", "call for offsets")

    def search_offset(self, queue: MessageQueue, *_: Any, **__: Any) -> int:
        """Refuse."""
        _refuse(f"searching an offset of {queue}", "call for offsets")

    def earliest_msg_store_time(self, queue: MessageQueue, *_: Any, **__: Any) -> int:
        """Refuse."""
        _refuse(f"asking for the oldest message of {queue}", "call for stored messages")

    def view_message(self, address: str, physical_offset: int, *_: Any, **__: Any) -> MessageExt:
        """Refuse."""
        _refuse(f"viewing the message at commit-log offset {physical_offset} of {address}", "call for stored messages")

    def topic_config(self, address: str, topic: str, *_: Any, **__: Any) -> TopicConfig:
        """Refuse."""
        _refuse(f"looking up the configuration of topic {topic} on {address}", "call for a topic's configuration")

    def create_topic(self, address: str, topic: str, *_: Any, **__: Any) -> None:
        """Refuse."""
        _refuse(f"creating topic {topic} on {address}", "call that creates topics")


def _refuse(doing: str, what: str) -> NoReturn:
    raise MQClientException(f"{doing}: the gRPC protocol has no {what}; use transport=remoting")
