"""The fault detector."""

from __future__ import annotations

from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.routing.fault_strategy import PRESETS, FaultDetector, FaultSite, FaultStrategy


class Rig:
    """Return a detector of brokers that lost their connection at time 0. Probes reach those in `answering`."""

    def __init__(self, *brokers: str, topics: tuple[str, ...] = ("T", "U")) -> None:
        self.faults = FaultStrategy(PRESETS["v4"], enabled=True, detector_enabled=True)
        for broker in brokers:
            self.faults.update(FaultSite.REMOTING_FAILED, broker, 1.0, 0.0)
        self.masters = {broker: f"{broker}:1" for broker in brokers}
        self.answering: set[str] = set()
        self.probed: list[tuple[MessageQueue, str]] = []
        self.detector = FaultDetector(
            self.faults.table, master_of=self.masters.get, topics=lambda: topics, probe=self.probe, interval=2.0
        )

    def probe(self, queue: MessageQueue, address: str) -> bool:
        self.probed.append((queue, address))
        return queue.broker_name in self.answering


def test_an_answer_makes_a_broker_reachable_and_silence_changes_nothing() -> None:
    rig = Rig("a", "b")
    rig.answering = {"b"}
    assert rig.detector.run_due(3.0) == 6.0
    assert rig.probed == [(MessageQueue("T", "a", 0), "a:1"), (MessageQueue("T", "b", 0), "b:1")]
    assert not rig.faults.table.is_reachable("a")
    assert rig.faults.table.is_reachable("b")
    # A reachable broker stays isolated.
    assert not rig.faults.is_available("b", 3.0)


def test_broker_without_a_master_in_any_route_is_removed() -> None:
    rig = Rig("a", "b")
    del rig.masters["a"]
    rig.detector.run_due(3.0)
    assert list(rig.faults.table.items()) == ["b"]
    assert [address for _, address in rig.probed] == ["b:1"]


def test_broker_is_probed_once_per_interval() -> None:
    rig = Rig("a")
    for now in (3.0, 4.9, 5.0, 6.9, 7.0):
        rig.detector.run_due(now)
    assert len(rig.probed) == 3


def test_reachable_broker_is_not_probed() -> None:
    rig = Rig("a")
    rig.answering = {"a"}
    for now in (3.0, 6.0, 9.0):
        rig.detector.run_due(now)
    assert len(rig.probed) == 1


def test_broker_without_a_topic_to_probe_stays_unreachable() -> None:
    rig = Rig("a", topics=())
    rig.answering = {"a"}
    rig.detector.run_due(3.0)
    assert rig.probed == []
    assert not rig.faults.table.is_reachable("a")
