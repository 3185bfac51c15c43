"""The first write and the first read of a Spark session, milliseconds beyond a data source that does nothing.

Run: make bench PART=first (python -m tests.benchmarks.bench_first [rounds])

Each measurement has a new session in ``local[2]``, which starts before it. It writes 10 rows in one task, and then
reads two columns of the topic. The file cache is warm.
"""

from __future__ import annotations

import compileall
import sys
from collections.abc import Iterator

from rocketmq_spark import LocalCluster, Producer
from tests.benchmarks.bench_spark import Session
from tests.benchmarks.contest import ROOT, Figure, by_name, differences, rounds_of, show

TOPIC = "bench-first"
SYSTEMS = ("rocketmq", "nothing")
# The most ms above the data source that does nothing.
AIMS = {"write": 600, "read": None}


def figures(rounds: int) -> Iterator[Figure]:
    """Measure everything here."""
    # As pip does when it installs a package.
    compileall.compile_dir(ROOT / "rocketmq_spark", quiet=1)
    with LocalCluster() as cluster:
        with Producer("bench-admin", name_server=cluster.name_server) as producer:
            producer.create_topic("TBW102", TOPIC, 4)

        def measure(system: str) -> dict[str, float]:
            with Session("spark_first.py", system, cluster.name_server, TOPIC) as session:
                return session.ask()

        said = rounds_of(SYSTEMS, rounds, measure)
    taken = by_name([{f"{system} {what}": of[system][what] for system in SYSTEMS for what in AIMS} for of in said])
    for what, wanted in AIMS.items():
        name = f"ms of the first {what} of a session, beyond a data source that does nothing"
        yield Figure(name, differences(taken[f"rocketmq {what}"], taken[f"nothing {what}"]), wanted, True)


if __name__ == "__main__":
    show(figures, sys.argv[1:], 5)
