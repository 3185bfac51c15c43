"""Which rows a writer of the soak may store twice, and the links that its faults cut."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.cluster.process import Watchdog
from tests.support.links import TcpProxy
from tests.support.processes import wait_for
from tests.support.soak_writers import PERIOD, Writer

RATE, SECONDS = 10, 60


def writer(folder: Path, form: str, delivery: str = "atLeastOnce", **options: str) -> Writer:
    # No program is started, so the watchdog has nothing to do.
    watchdog: Any = object.__new__(Watchdog)
    return Writer(delivery, form, "soak", folder, options, SECONDS, RATE, watchdog)


def micro_batches(folder: Path, *seconds: int, complete: int) -> None:
    """Write the files that Spark keeps of micro-batches with their last seconds."""
    for name in ("offsets", "commits"):
        (folder / "checkpoint" / name).mkdir(parents=True, exist_ok=True)
    for batch, second in enumerate(seconds):
        (folder / "checkpoint" / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{second}")
    for batch in range(complete):
        (folder / "checkpoint" / "commits" / str(batch)).touch()


def repeated(writer: Writer) -> list[int]:
    return [number for number, may in enumerate(writer.may_repeat()) if may]


def test_rows_of_batches_during_a_fault_may_be_repeated(tmp_path: Path) -> None:
    soak = writer(tmp_path, "stream")
    micro_batches(tmp_path, 1, 3, complete=1)
    soak.note()
    first = soak.written + 1
    micro_batches(tmp_path, 1, 3, 7, 9, complete=3)
    soak.note()
    soak.risk(first)
    micro_batches(tmp_path, 1, 3, 7, 9, 20, complete=5)
    soak.note()
    assert repeated(soak) == list(range(1 * RATE, 9 * RATE))
    assert [row.repeats for row in soak.audit().rows] == [10 <= number < 90 for number in range(SECONDS * RATE)]


def test_rows_of_batches_with_a_retry_may_be_repeated(tmp_path: Path) -> None:
    soak = writer(tmp_path, "stream")
    micro_batches(tmp_path, 1, 3, 4, complete=3)
    soak.note()
    lines = [{"batch_id": batch, "brokers": {"a": {"retries": batch % 2}}} for batch in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert repeated(soak) == list(range(1 * RATE, 3 * RATE))


def test_batch_writes_are_counted_by_their_notes(tmp_path: Path) -> None:
    soak, size = writer(tmp_path, "batch"), RATE * PERIOD
    (tmp_path / "written").write_text("2")
    soak.risk(soak.written + 1)
    (tmp_path / "metrics-7.jsonl").write_text(json.dumps({"batch_id": -1, "brokers": {"a": {"retries": 1}}}))
    assert repeated(soak) == [*range(2 * size, 3 * size), *range(7 * size, 8 * size)]


def test_no_row_of_a_once_delivery_may_be_repeated(tmp_path: Path) -> None:
    soak = writer(tmp_path, "batch", "effectivelyOnce")
    soak.risk(0)
    assert repeated(soak) == []


def test_rows_of_a_batch_share_a_unit(tmp_path: Path) -> None:
    soak = writer(tmp_path, "stream", "exactlyOnce")
    micro_batches(tmp_path, 1, 3, complete=2)
    soak.note()
    units = [row.unit for row in soak.audit().rows]
    assert units == ["0"] * RATE + ["1"] * 2 * RATE + ["2"] * (SECONDS - 3) * RATE


@pytest.mark.parametrize("hold", [False, True])
def test_a_cut_link_has_no_connections(*, hold: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, TcpProxy(f"127.0.0.1:{server.getsockname()[1]}") as link:
        host, _, port = link.address.rpartition(":")
        with socket.create_connection((host, int(port))) as client:
            wait_for(lambda: link.connections == 1)
            link.is_cut = hold
            link.cut()
            assert client.recv(1) == b""
            wait_for(lambda: link.connections == 0)
        with socket.create_connection((host, int(port))) as client:
            if hold:
                assert client.recv(1) == b""
            else:
                wait_for(lambda: link.connections == 1)
