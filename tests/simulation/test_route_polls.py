"""Name servers get no storm of requests, in a small run of `tests.simulation.route_polls`."""

from __future__ import annotations

from collections import Counter

from tests.simulation.route_polls import Size, simulate

SIZE = Size(processes=300, topics=300, brokers=50)


def most(counts: Counter[int], begin: float, end: float) -> int:
    """Return the highest count of a second in this time."""
    return max(counts[second] for second in range(int(begin), int(end)))


def test_name_servers_that_start_again_get_no_storm_of_requests() -> None:
    servers = simulate(SIZE)
    usual = most(servers.requests, SIZE.start + 30.0, SIZE.stopped_at)
    assert SIZE.processes * SIZE.topics_of_process / 30 < usual < SIZE.processes * SIZE.topics_of_process / 5
    assert most(servers.requests, SIZE.started_again_at, SIZE.end) <= 1.5 * usual
    # Each process tries each of the three name servers once in a round.
    assert sum(servers.connects[second] for second in range(120, 180)) == 2 * 3 * SIZE.processes
