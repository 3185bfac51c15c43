"""The cluster of a run that demands TLS and credentials, and who is known there besides its administrator."""

from __future__ import annotations

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.credentials import Credentials

USER = Credentials("spark-user", "user-hush-hush", "token-token")
"""May publish to ``allowed-...``, read ``readable-...`` as the source does, and nothing else."""

ANYBODY = Credentials("anybody", "anybody-hush-hush")
"""May send to all topics and read them, in any group."""


def secured_cluster() -> LocalCluster:
    """Return one broker and a proxy, not started yet; the proxy hangs up on whoever is idle for 2 seconds."""
    return LocalCluster(proxy={"grpcClientIdleTimeMills": 2000}, auth=True, tls=True, start_timeout=180.0)


def add_users(cluster: LocalCluster) -> None:
    """Have a cluster that runs know them."""
    cluster.create_user(
        USER.access_key,
        USER.secret_key,
        publish=["allowed-*"],
        subscribe=["readable-*"],
        groups=["spark-rocketmq-source"],
    )
    cluster.create_user(ANYBODY.access_key, ANYBODY.secret_key, publish=["*"], subscribe=["*"], groups=["*"])
