"""What a scripted cluster is made of: its replies, its clock, its routes. Values only.

They belong to :mod:`rocketmq_spark.transport.scripted`, which plays them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.message import SendStatus
from rocketmq_spark.route_data import MASTER_ID, BrokerData, QueueData, TopicRouteData
from rocketmq_spark.wire.codes import broker_error


@dataclass(frozen=True, slots=True)
class Reply:
    """What a scripted broker does with one send.

    Parameters
    ----------
    status : SendStatus, default SEND_OK
        The acknowledgement, unless `error` or `silent` says otherwise.
    error : RocketMQError, optional
        The attempt fails with this.
    delay : float, default 0.0
        Seconds until the outcome; beyond the send's own timeout it becomes a ``RemotingTimeoutException``.
    silent : bool, default False
        No answer ever comes: the send times out.
    stored : bool, optional
        Whether the rows are kept, whatever the sender learns. Default: an answer with a status keeps them, an error
        or silence does not; ``Reply(silent=True, stored=True)`` is the lost acknowledgement.
    """

    status: SendStatus = SendStatus.SEND_OK
    error: RocketMQError | None = None
    delay: float = 0.0
    silent: bool = False
    stored: bool | None = None

    @classmethod
    def code(cls, code: int, remark: str = "", delay: float = 0.0) -> Reply:
        """Return the refusal that a broker's response code stands for, such as 2 (SYSTEM_BUSY)."""
        return cls(error=broker_error(code, remark, "scripted", "sending"), delay=delay)


class ManualClock:
    """A clock that stands still until it is moved.

    Parameters
    ----------
    now : float, default 0.0
        Seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Return the time, seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Move on."""
        self.now += seconds


def route(topic_queues: Mapping[str, int], perm: int = 6) -> TopicRouteData:
    """Return a route with so many queues per broker; a broker's address is its name and port 10911.

    >>> route({"broker-a": 4}).broker_datas[0].master
    'broker-a:10911'
    """
    names = sorted(topic_queues)
    return TopicRouteData(
        queue_datas=tuple(QueueData(name, topic_queues[name], topic_queues[name], perm) for name in names),
        broker_datas=tuple(BrokerData(name, {MASTER_ID: f"{name}:10911"}) for name in names),
    )
