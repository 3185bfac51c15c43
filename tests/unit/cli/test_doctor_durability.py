"""What the doctor says that an acknowledged row survives, by the settings of a master."""

from __future__ import annotations

import pytest

from rocketmq_spark.cli.doctor import examine
from rocketmq_spark.cli.doctor.durability import survival_of
from rocketmq_spark.cli.doctor.machine import OK, WARNING, Check
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.testing import FakeCluster, Reply

ASYNC = {"flushDiskType": "ASYNC_FLUSH", "brokerRole": "ASYNC_MASTER", "inSyncReplicas": "1", "minInSyncReplicas": "1"}
SYNC_MASTER = {**ASYNC, "brokerRole": "SYNC_MASTER"}
CONTROLLER = {**SYNC_MASTER, "enableControllerMode": "true"}
ACTING = {**SYNC_MASTER, "enableSlaveActingMaster": "true", "enableAutoInSyncReplicas": "true", "inSyncReplicas": "2"}
OF_4_9 = {"flushDiskType": "ASYNC_FLUSH", "brokerRole": "SYNC_MASTER"}
SYNC_FLUSH = {"flushDiskType": "SYNC_FLUSH"}


@pytest.mark.parametrize(
    ("settings", "registered", "state", "survives"),
    [
        (ASYNC, 2, OK, "survives the end of the broker's process, not a power failure or the loss of its disk"),
        ({**ASYNC, **SYNC_FLUSH}, 2, OK, "survives a power failure, not the loss of its disk"),
        ({**ASYNC, "transientStorePoolEnable": "true"}, 2, WARNING, "a row can be lost with the broker's process"),
        (SYNC_MASTER, 2, WARNING, "because it waits for no slave"),
        ({**SYNC_MASTER, "inSyncReplicas": "2"}, 2, OK, "the loss of 1 of its 2 disks, not a power failure of all 2 "),
        (
            {**SYNC_MASTER, **SYNC_FLUSH, "inSyncReplicas": "3"},
            3,
            OK,
            "a power failure, and the loss of 2 of its 3 disks",
        ),
        ({**SYNC_MASTER, "inSyncReplicas": "2"}, 1, WARNING, "needs 2 brokers for each row, and 1 are registered"),
        (OF_4_9, 2, OK, "the loss of 1 of its 2 disks"),
        ({**CONTROLLER, "allAckInSyncStateSet": "true"}, 3, WARNING, "replicas in sync may be the master alone"),
        (
            {**CONTROLLER, "allAckInSyncStateSet": "true", "minInSyncReplicas": "2"},
            3,
            OK,
            "the loss of 1 of its 2 disks",
        ),
        ({**CONTROLLER, "inSyncReplicas": "2"}, 3, OK, "the loss of 1 of its 2 disks"),
        (ACTING, 2, WARNING, "because it waits for no slave"),
        ({**ACTING, "minInSyncReplicas": "2"}, 2, OK, "the loss of 1 of its 2 disks"),
    ],
)
def test_settings_decide_what_a_row_survives(
    settings: dict[str, str], registered: int, state: str, survives: str
) -> None:
    found = survival_of(settings, registered)
    assert (found.state, survives in found.finding) == (state, True), found
    assert all(f"{name}={settings[name]}" in found.finding for name in ("flushDiskType", "brokerRole"))


def durability(cluster: FakeCluster, topic: str | None = None) -> list[Check]:
    return [check for check in examine(cluster.name_server, topic=topic) if check.check == "durability"]


def test_brokers_with_equal_settings_share_a_finding() -> None:
    with FakeCluster(["a", "b", "c"]) as cluster:
        cluster.brokers["b"].config["flushDiskType"] = "SYNC_FLUSH"
        assert [check.finding.partition(":")[0] for check in durability(cluster)] == ["a, c", "b"]


def test_settings_that_the_user_may_not_read_are_unknown_with_the_right() -> None:
    with FakeCluster(["a"]) as cluster:
        remark = "User:u1 has no permission to access Cluster:DefaultCluster from 127.0.0.1, no matched policies."
        cluster.brokers["a"].always[RequestCode.GET_BROKER_CONFIG] = Reply.code(ResponseCode.NO_PERMISSION, remark)
        (found,) = durability(cluster)
    assert found.finding == "a: unknown, because the user has no right on Cluster:DefaultCluster"
    assert found.fix == "give the user the right Get on the cluster"
