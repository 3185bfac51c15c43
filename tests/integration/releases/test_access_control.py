"""Access control of every release: ACL 1 before 5.3, and ACL 2."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import pytest
from pyspark.errors import PySparkException

from rocketmq_spark.admin import Admin
from rocketmq_spark.cluster import LocalCluster
from tests.support.cluster import started
from tests.support.processes import PATIENCE, wait_for
from tests.support.releases import RELEASES, Account, ReleaseCluster, of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rocketmq_spark.spark.report import Metrics

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.integration]


# The name and the secret key of a user.
User: TypeAlias = "tuple[str, str]"
RIGHT: User = ("writer-1", "the-right-secret")
# How brokers refuse another key, an unknown user, and no user.
REFUSALS: dict[User | None, str] = {
    ("writer-1", "another-secret"): "[Cc]heck signature failed",
    ("writer-2", "the-right-secret"): "No acl config for|is not found",
    None: "No accessKey is configured|username cannot be null",
}
NO_RIGHT = r"(?i)no (default )?permission"
GROUP = "spark-rocketmq-source"


@contextlib.contextmanager
def with_access_control(release: str) -> Iterator[LocalCluster]:
    """Run a cluster with the topics ``allowed`` and ``forbidden``. The user `RIGHT` may write to and read the first."""
    if of("access control", release) == "ACL 2":
        servers = ReleaseCluster(release, proxy=False, auth=True)
    else:
        user = Account(*RIGHT, {"allowed": "PUB|SUB"}, {GROUP: "SUB"})
        servers = ReleaseCluster(release, proxy=False, broker_properties={"aclEnable": "true"}, accounts=[user])
    with started(servers) as cluster:
        administrator = {key: value for key, value in cluster.client_options.items() if key != "name_server"}
        with Admin(cluster.name_server, **administrator, timeout=PATIENCE) as admin:
            for topic in ("allowed", "forbidden"):
                admin.create_topic(topic, 2)
        if of("access control", release) == "ACL 2":
            cluster.create_user(*RIGHT, publish=["allowed"], subscribe=["allowed"], groups=[GROUP])
        yield cluster


@pytest.mark.parametrize("name", [name for name in RELEASES if of("access control", name).startswith("ACL")])
def test_only_the_right_key_writes_and_reads(spark: SparkSession, metrics: Metrics, name: str) -> None:
    count = 1_000
    frame = spark.range(0, count, 1, 2).selectExpr("cast(id AS string) AS body", "concat('k', id) AS keys")
    with with_access_control(name) as cluster:

        def options(user: User | None) -> dict[str, str]:
            keys = {} if user is None else {"accessKey": user[0], "secretKey": user[1]}
            return {"nameServer": cluster.name_server, **keys}

        def save(user: User | None, topic: str, **more: str) -> None:
            frame.write.format("rocketmq").options(**options(user), topic=topic, **more).save()

        def read(user: User | None, topic: str) -> Counter[str]:
            found = spark.read.format("rocketmq").options(**options(user)).load(topic).select("keys").collect()
            return Counter(row["keys"] for row in found)

        expected_keys = Counter(f"k{number}" for number in range(count))
        save(RIGHT, "allowed")
        wait_for(lambda: read(RIGHT, "allowed").total() >= count)
        assert read(RIGHT, "allowed") == expected_keys
        for user, refusal in REFUSALS.items():
            for batching in ("true", "false"):
                with pytest.raises(PySparkException, match=refusal):
                    save(user, "allowed", batching=batching)
            with pytest.raises(PySparkException, match=refusal):
                read(user, "allowed")
        with pytest.raises(PySparkException, match=NO_RIGHT):
            save(RIGHT, "forbidden", batching="false")
        with pytest.raises(PySparkException, match=NO_RIGHT):
            read(RIGHT, "forbidden")
        forbidden = 0
        if name.startswith("4."):
            # These brokers check no right on the topic of a batch.
            save(RIGHT, "forbidden")
            forbidden = count
        else:
            with pytest.raises(PySparkException, match=NO_RIGHT):
                save(RIGHT, "forbidden")
        everything = {
            topic: spark.read.format("rocketmq").options(**cluster.options).load(topic)
            for topic in ("allowed", "forbidden")
        }
        assert Counter(row["keys"] for row in everything["allowed"].select("keys").collect()) == expected_keys
        wait_for(lambda: everything["forbidden"].count() == forbidden)
