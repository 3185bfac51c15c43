"""What a delayed message can be taken back with (``RecallMessageHandle.java``, spec/remoting.md section 10)."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from rocketmq_spark.errors import MQClientException


@dataclass(frozen=True, slots=True)
class RecallMessage:
    """A request to take a delayed message back (RECALL_MESSAGE, RecallMessage).

    Parameters
    ----------
    topic : str
        As servers know it.
    recall_handle : str
        From the acknowledgement of the message.
    producer_group : str
    broker_name : str
        The one that holds the message, from the handle; a proxy finds it by itself.
    """

    topic: str
    recall_handle: str
    producer_group: str
    broker_name: str


def broker_name_of(recall_handle: str) -> str:
    """Return the broker that a handle (URL-safe base64 of ``v1 topic broker deliverMs id``) names.

    Raises
    ------
    MQClientException
        It is no handle.
    """
    try:
        words = base64.urlsafe_b64decode(recall_handle.encode("ascii")).decode().split(" ")
    except (binascii.Error, UnicodeError):
        words = []
    if len(words) != 5 or words[0] != "v1":
        raise MQClientException(
            f"{recall_handle[:80]!r} is no recall handle: give SendResult.recall_handle of the message as it is"
        )
    return words[2]
