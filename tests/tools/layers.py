"""The folders of the package: the layer, the subject and the limits of each, and their table in CONTRIBUTING.md.

Run: python -m tests.tools.layers (``make docs``), which writes the table. tests/unit/test_layers.py compares the table
with this list, and the imports of every module with the layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = ROOT / "rocketmq_spark"
PATH: Final = ROOT / "CONTRIBUTING.md"


@dataclass(frozen=True)
class Folder:
    """A folder, or a module beside the folders. It imports only from itself and from smaller layers."""

    layer: int
    subject: str
    # What its modules do without.
    unaware: str = ""


FOLDERS: Final = {
    "display": Folder(0, "tables for terminals, files and notebooks", "everything but `errors.py`"),
    "model": Folder(0, "messages, queues, routes, results, names, ids, hashes", "options, bytes"),
    "options": Folder(1, "every option: name, kind, default, documentation, parsing", "what options do"),
    "protocol": Folder(1, "the bytes of remoting and gRPC", "sockets, threads, Arrow"),
    "metrics": Folder(1, "histograms and counters of tasks, merged on the driver", "how they are sent"),
    "transport": Folder(
        2,
        "sockets and gRPC channels, TLS, credentials, permits; converts errors of libraries to errors of this package",
        "rows, retries",
    ),
    "arrow": Folder(
        2, "columns to batches, and stored messages to columns, without a Python object per row", "Spark, sockets"
    ),
    "routing": Folder(3, "client instances, routes, heartbeats, latency faults, queue selection", "rows"),
    "sink": Folder(4, "the rows of one partition: batches in flight, retries, acknowledgements", "Spark"),
    "source": Folder(4, "queues, offsets, ranges, pulls", "Spark"),
    "deliveries": Folder(
        5,
        "how often a row may be stored: effectively-once and exactly-once writes, the decision log, recovery",
        "Spark",
    ),
    "admin": Folder(5, "topics, offsets, routes, brokers, the newest messages", "Spark"),
    "cluster": Folder(5, "a local name server, brokers and proxy", "rows"),
    "testing": Folder(5, "a fake cluster inside the process of a test", "real servers"),
    "producer": Folder(6, "`Producer` for plain Python", "Spark"),
    "aio": Folder(7, "`Producer` for asyncio: batches and futures around the sends of `producer/`", "Spark"),
    "spark": Folder(7, "the data source; only this folder and `cli/demo.py` import pyspark", "the command line"),
    "cli": Folder(8, "the `rocketmq-spark` command and its doctor"),
}

_TABLE: Final = re.compile(r"^<!-- layers -->\n.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)


def filled(page: str) -> str:
    """Return a page with its table of layers as `FOLDERS` has them."""
    head = "| layer | folder | subject | does not know |\n|---|---|---|---|"
    rows = "\n".join(_row(name, folder) for name, folder in FOLDERS.items())
    return _TABLE.sub(lambda _: f"<!-- layers -->\n{head}\n{rows}\n<!-- end -->", page)


def _row(name: str, folder: Folder) -> str:
    path = f"{name}/" if (PACKAGE / name).is_dir() else f"{name}.py"
    return f"| {folder.layer} | `{path}` | {folder.subject} | {folder.unaware or '-'} |"


if __name__ == "__main__":
    PATH.write_text(filled(PATH.read_text("utf-8")), encoding="utf-8")
