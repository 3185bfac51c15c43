"""Single scenarios in virtual time: each a fault that the simulator, or a user, has found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rocketmq_spark.options.sink import SinkOptions
from tests.simulation.client import TaskResult, Worker
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.network import Conditions, Network
from tests.simulation.world import World


def write(
    rows: int, prepare: Callable[[World, SimulatedCluster], None], *, rest: float = 0.0, **options: Any
) -> TaskResult:
    """Write rows of six keys in batches of three to one broker, and return what the task did."""
    world = World(1)
    network = Network(world, Conditions(partial=0.0))
    cluster = SimulatedCluster(network, 1)
    cluster.create_topic("T", 4)
    sink = SinkOptions.of(name_server=tuple(cluster.addresses), topic="T", **options)
    worker = Worker(network, cluster.addresses, sink)
    prepare(world, cluster)

    def main() -> None:
        worker.run_task(0, [(row % 6, b"%05d" % row) for row in range(rows)], 3, rest)
        worker.instance.close()

    worker.instance.start()
    world.run(world.start(main, "main"))
    world.close()
    return worker.results[0]


def test_slow_upstream_waits_for_room_while_a_broker_hangs() -> None:
    # The rows of a key do not fill a batch, so each is sent after its linger time, without a wait for room.
    def hang(world: World, cluster: SimulatedCluster) -> None:
        world.call_later(1.0, cluster.masters["b0"].pause)

    result = write(3_000, hang, rest=1.0, max_in_flight_bytes=2_000, delivery_timeout_ms=60_000)
    assert result.error is not None
    assert result.most_pending <= 2_000 + 6 * 60
