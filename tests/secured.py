"""The cluster of a run that demands TLS and credentials, and who is known there besides its administrator."""

from __future__ import annotations

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.credentials import Credentials
from tests.waiting import PATIENCE

USER = Credentials("spark-user", "user-hush-hush", "token-token")
"""May publish to ``allowed-...``, read ``readable-...`` as the source does, and nothing else."""

MARKED = Credentials("marked", "password-7f3c9e51-must-not-show", "token-7f3c9e51-must-not-show")
"""May do the same; what is secret of this user is like nothing else, so that it is found wherever it shows."""

ANYBODY = Credentials("anybody", "anybody-hush-hush")
"""May send to all topics and read them, in any group."""


def secured_cluster() -> LocalCluster:
    """Return one broker and a proxy, not started yet; the proxy hangs up on whoever is idle for 2 seconds."""
    return LocalCluster(proxy={"grpcClientIdleTimeMills": 2000}, auth=True, tls=True, start_timeout=PATIENCE)


def add_users(cluster: LocalCluster) -> None:
    """Have a cluster that runs know them."""
    for user in (USER, MARKED):
        cluster.create_user(
            user.access_key,
            user.secret_key,
            publish=["allowed-*"],
            subscribe=["readable-*"],
            groups=["spark-rocketmq-source"],
        )
    cluster.create_user(ANYBODY.access_key, ANYBODY.secret_key, publish=["*"], subscribe=["*"], groups=["*"])
