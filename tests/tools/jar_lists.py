"""The jars that only tests and benchmarks run, checked against a list; ``make jars`` writes the lists again.

A list has a SHA-256 and a path in the user's cache folder per line, as ``sha256sum`` writes them. It rests on one fetch
from Maven Central over HTTPS, in which Ivy compared each jar with the SHA-1 of the same repository: review its diff.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from rocketmq_spark.cluster.jars import (
    RELEASE,
    cache_folder,
    differences,
    find_ivy,
    listed_checksums,
    no_progress,
    retrieve,
    sha256_of,
)
from rocketmq_spark.cluster.process import find_java
from rocketmq_spark.errors import ClusterError

SERVER_LIST: Final = Path(__file__).parents[2] / "conf" / "jars.sha256"
TEST_LIST: Final = Path(__file__).parents[1] / "jars.sha256"

Fetch: TypeAlias = Callable[[Path], None]
"""Fetches jars into the folder ``jars`` of the folder that it is called with."""

_HEADER: Final = "# {what}: SHA-256 and file name, written by `make jars`.\n"


def listed_jars(place: str, fetch: Fetch, checksums: Mapping[str, str] | None = None) -> Sequence[Path]:
    """Return the jars of a folder, fetching them first unless the folder has exactly the listed jars.

    `place` is the folder, relative to the cache folder. `checksums` has file name and SHA-256 of every jar; its default
    is the tests' list. A ClusterError is raised if the fetched jars are not the listed ones.
    """
    checksums = checksums if checksums is not None else _checksums_of(place)
    cache = cache_folder()
    folder = cache / place
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (cache / ".tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir() or differences(folder, checksums):
            with tempfile.TemporaryDirectory(prefix=".tests-", dir=cache) as work:
                fetch(Path(work))
                different = differences(Path(work, "jars"), checksums)
                if different:
                    raise ClusterError(f"fetching {place}: the jars are not those of {TEST_LIST.name}: {different}")
                shutil.rmtree(folder, ignore_errors=True)
                Path(work, "jars").rename(folder)
    return [folder / name for name in sorted(checksums)]


def _checksums_of(place: str) -> dict[str, str]:
    listed = listed_checksums(TEST_LIST.read_text(encoding="utf-8"))
    return {Path(path).name: checksum for path, checksum in listed.items() if str(Path(path).parent) == place}


def _lines_of(fetch: Fetch, place: str = "") -> list[str]:
    with tempfile.TemporaryDirectory() as work:
        fetch(Path(work))
        jars = sorted(Path(work, "jars").glob("*.jar"))
        return [f"{sha256_of(jar)}  {Path(place, jar.name)}\n" for jar in jars]


def _fetch_server(work: Path) -> None:
    retrieve(work, find_java(), find_ivy(), no_progress)


def main() -> None:
    """Write the list of the server's jars and the list of the tests' jars."""
    from tests.benchmarks import bench_spark
    from tests.benchmarks.kafka import AVRO, CONNECTOR, KAFKA, fetch_module, place_of
    from tests.support import lake, postgres
    from tests.support.java import PLACE, fetch_client

    header = _HEADER.format(what=f"The jars of the RocketMQ {RELEASE} server")
    SERVER_LIST.write_text("".join([header, *_lines_of(_fetch_server)]), encoding="utf-8")
    lines = [_HEADER.format(what="Jars that only tests and benchmarks run")]
    for module in (KAFKA, bench_spark.CONNECTOR, AVRO, CONNECTOR):
        lines += _lines_of(fetch_module(*module), place_of(*module))
    for module in (*lake.MODULES, postgres.BINARIES):
        lines += _lines_of(fetch_module(*module, alone=True), place_of(*module))
    lines += _lines_of(fetch_client, PLACE)
    TEST_LIST.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
