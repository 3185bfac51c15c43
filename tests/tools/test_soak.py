"""Which rows a writer of the soak may store twice, and the links that its faults cut."""

from __future__ import annotations

import json
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.cluster.process import Watchdog
from tests.support.auditor import Found
from tests.support.links import TcpProxy
from tests.support.processes import wait_for
from tests.support.soak_writers import PERIOD, Writer
from tests.tools.soak import Soak

RATE, SECONDS = 10, 60


def writer(folder: Path, form: str, delivery: str = "atLeastOnce", *, spared: bool = False) -> Writer:
    # No program is started, so the watchdog has nothing to do.
    watchdog: Any = object.__new__(Watchdog)
    return Writer(delivery, form, "soak", folder, {}, SECONDS, RATE, watchdog, spared=spared)


def findings(folder: Path, *, rows: int = SECONDS * RATE, faults: int = 1, growth: float = 0.0, **wrong: int) -> str:
    """Return the findings of a run of 10 minutes with one writer."""
    soak = Soak(10, RATE, 1, 60, None)
    soak.writers, soak.ended = [writer(folder, "batch", spared=True)], 1e9
    lines = [{"at": at, "pid": 1, "done": at, "figures": {"worker MB": 100 + growth * at}} for at in range(100)]
    (folder / "figures.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    kinds = {kind: {"count": count, "examples": []} for kind, count in wrong.items()}
    found = Found(rows=rows, messages=rows, found=rows, repeats=0, most=1, offsets={}, findings=kinds)
    soak.report([found], Counter({"broker killed": faults}))
    return "\n".join(soak.findings)


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


def test_a_run_without_findings_is_fine(tmp_path: Path) -> None:
    assert findings(tmp_path) == ""


def test_each_kind_of_finding_fails_the_run(tmp_path: Path) -> None:
    assert findings(tmp_path, missing=2) == "atLeastOnce batch: missing: 2"
    assert findings(tmp_path, rows=599) == "atLeastOnce batch: the auditor compared 599 of 600 rows"
    assert findings(tmp_path, faults=0) == "no fault was injected"
    assert findings(tmp_path, growth=1.0) == "atLeastOnce batch worker MB has grown from 141.5 to 191.5"


def test_figures_count_from_the_first_write_of_a_program_on(tmp_path: Path) -> None:
    counts = [(1, 0), (1, 0), (1, 1), (2, 1), (2, 1), (2, 2)]
    lines = [{"at": at, "pid": pid, "done": done, "figures": {}} for at, (pid, done) in enumerate(counts)]
    (tmp_path / "figures.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert [sample.at for sample in writer(tmp_path, "stream").samples()] == [2, 5]
