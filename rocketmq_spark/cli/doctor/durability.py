"""The doctor's check of what an acknowledged row survives (docs/operations.md#durability-of-acknowledged-rows).

Follows ``CommitLog.handleDiskFlushAndHA`` and ``calcNeedAckNums``. A 5.x master waits for slaves only if
``inSyncReplicas`` or a mode with replicas requires more than one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from rocketmq_spark import errors
from rocketmq_spark.cli.doctor.machine import OK, WARNING, Check
from rocketmq_spark.model.route import MASTER_ID, BrokerData
from rocketmq_spark.protocol.remoting.codes import missing_right
from rocketmq_spark.protocol.remoting.responses import integer_of
from rocketmq_spark.transport.parallel import query_all
from rocketmq_spark.transport.remoting.transport import RemotingTransport

_SAFER: Final = (
    "flushDiskType=SYNC_FLUSH survives a power failure, SYNC_MASTER with inSyncReplicas=2 the loss of a disk"
)
_SAFE_IN_CONTROLLER_MODE: Final = "minInSyncReplicas=2 rejects rows while only the master has them"


class Survival(NamedTuple):
    """What an acknowledged row survives. Brokers with equal values share one finding."""

    state: str
    finding: str
    fix: str = ""


def check_durability(transport: RemotingTransport, brokers: Iterable[BrokerData], timeout: float) -> list[Check]:
    """Check the settings of masters that decide what an acknowledged row survives."""
    masters = {broker.broker_name: broker for broker in brokers if broker.master is not None}
    answers = query_all(masters, lambda name: transport.broker_config(masters[name].broker_addrs[MASTER_ID], timeout))
    found: dict[Survival, list[str]] = {}
    for name, answer in answers.items():
        if not isinstance(answer, errors.RocketMQError):
            found.setdefault(survival_of(answer, len(masters[name].broker_addrs)), []).append(name)
        elif isinstance(answer, errors.MQBrokerException) and not isinstance(answer, errors.UserRefusedException):
            # Unreachable brokers and rejected keys have their own findings.
            right = missing_right(answer.remark)
            why = (
                f"the user has no right on {right}" if right else f"the user may not read its settings: {answer.remark}"
            )
            unknown = Survival(
                OK, f"unknown, because {why}", "give the user the right Get on the cluster" if right else ""
            )
            found.setdefault(unknown, []).append(name)
    return [
        Check("durability", state, f"{', '.join(names)}: {finding}", fix)
        for (state, finding, fix), names in found.items()
    ]


def survival_of(settings: Mapping[str, str], registered: int) -> Survival:
    """Return what a row survives that such a master has acknowledged; `registered` counts its slaves, too."""
    synced, waits = settings.get("flushDiskType") == "SYNC_FLUSH", settings.get("brokerRole") == "SYNC_MASTER"
    copies = _copies(settings) if waits else 1
    facts = [
        f"{name}={settings[name]}" for name in ("flushDiskType", "brokerRole", *_counting(settings)) if name in settings
    ]
    described = ", ".join(facts)
    if copies > registered:
        finding = f"{described} needs {copies} brokers for each row, and {registered} are registered: writes fail"
        return Survival(WARNING, finding, "start its slaves, or lower that number")
    if settings.get("transientStorePoolEnable") == "true" and not synced and copies == 1:
        finding = f"{described}, transientStorePoolEnable=true: a row can be lost with the broker's process"
        return Survival(WARNING, finding, "set transientStorePoolEnable=false, or SYNC_FLUSH")
    survives = f"{described}: an acknowledged row survives {_events(copies, synced=synced)}"
    if waits and copies == 1:
        in_controller_mode = settings.get("enableControllerMode") == "true"
        why = "the set of replicas in sync may be the master alone" if in_controller_mode else "it waits for no slave"
        fix = _SAFE_IN_CONTROLLER_MODE if in_controller_mode else "set inSyncReplicas=2"
        return Survival(WARNING, f"{survives}, because {why}", fix)
    return Survival(OK, survives, "" if synced and copies > 1 else _SAFER)


def _copies(settings: Mapping[str, str]) -> int:
    """Return how many brokers have a row at least when a SYNC_MASTER acknowledges it."""
    needed = integer_of(settings, "inSyncReplicas")
    if needed is None:
        # A master of 4.x waits for one slave.
        return 2
    fewest = max(integer_of(settings, "minInSyncReplicas") or 1, 1)
    if settings.get("enableControllerMode") == "true":
        return fewest if settings.get("allAckInSyncStateSet") == "true" else max(needed, 1)
    if settings.get("enableSlaveActingMaster") == "true" and settings.get("enableAutoInSyncReplicas") == "true":
        return fewest
    return max(needed, 1)


def _counting(settings: Mapping[str, str]) -> list[str]:
    """Return the names of the further settings that count."""
    if settings.get("brokerRole") != "SYNC_MASTER":
        return []
    if settings.get("enableControllerMode") == "true":
        all_of_them = settings.get("allAckInSyncStateSet") == "true"
        return ["allAckInSyncStateSet", "minInSyncReplicas"] if all_of_them else ["inSyncReplicas", "minInSyncReplicas"]
    if settings.get("enableSlaveActingMaster") == "true" and settings.get("enableAutoInSyncReplicas") == "true":
        return ["inSyncReplicas", "enableAutoInSyncReplicas", "minInSyncReplicas"]
    return ["inSyncReplicas"]


def _events(copies: int, *, synced: bool) -> str:
    """Return the failures that a row survives, and those that it does not."""
    if copies > 1:
        others = f"the loss of {copies - 1} of its {copies} disks"
        return f"a power failure, and {others}" if synced else f"{others}, not a power failure of all {copies} machines"
    if synced:
        return "a power failure, not the loss of its disk"
    return "the end of the broker's process, not a power failure or the loss of its disk"
