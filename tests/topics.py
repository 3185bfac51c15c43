"""Topics of a type, made before anybody names them to a proxy."""

from __future__ import annotations

from rocketmq_spark.admin import Admin
from rocketmq_spark.cluster import LocalCluster
from tests.sharing import SharedCluster
from tests.waiting import PATIENCE


def create_topic(
    cluster: LocalCluster | SharedCluster, topic: str, message_type: str, queues: int = 2, *, inner: bool = False
) -> str:
    """Create a topic on all brokers of a cluster, and return its name once the name server knows it of each.

    A proxy creates no topic, and remembers for a while that it has not found one. To an `inner` one, a batch can be
    stored as one unit.
    """
    settings = cluster.admin_settings if isinstance(cluster, SharedCluster) else {}
    with Admin(cluster.name_server, **settings, timeout=PATIENCE) as admin:
        admin.create_topic(topic, queues, message_type=message_type, inner=inner, update=True)
    return topic
