"""Every notebook runs from top to bottom, and is checked in with what it shows."""

from __future__ import annotations

import base64
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.execute import NOTEBOOKS, clean, code_cells, data_of, executed_together, leftovers

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
LONGER = ("effectively_once", "exactly_once", "latency_and_faults", "streaming", "throughput")
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


@pytest.mark.notebook
@pytest.mark.integration
# The kernel's sockets and loops belong to jupyter_client, which leaves some to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "names", [("quickstart",), pytest.param(LONGER, marks=pytest.mark.long)], ids=["quickstart", "longer"]
)
def test_notebooks_run(tmp_path: Path, names: tuple[str, ...]) -> None:
    # A tenth of the rows: the test needs the code, not the figures.
    for notebook in executed_together([path for path in PATHS if path.stem in names], tmp_path, ROWS="20_000"):
        clean(notebook)
        assert data_of(notebook, "image/png")
        assert data_of(notebook, "text/html")
        assert leftovers(notebook) == []
    # They remove their files.
    assert list(tmp_path.iterdir()) == []


@each_notebook
def test_notebook_is_checked_in_with_outputs_and_pictures(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in data_of(notebook, "image/png"))
    assert data_of(notebook, "image/png")
    assert data_of(notebook, "text/html")
    assert leftovers(notebook) == []


def test_all_notebooks_are_there_and_small() -> None:
    assert {path.stem for path in PATHS} == {"quickstart", *LONGER}
    assert sum(path.stat().st_size for path in PATHS) < 1_500_000


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("saved to /tmp/abc/x.parquet now", ["/tmp/abc/x.parquet"]),
        ("'/home/somebody/work'", ["/home/somebody/work"]),
        ("see file:///data/part-0.json", ["file:///data/part-0.json"]),
        ("<p>12 of 14</p> rows/second, 127.0.0.1:9876", []),
    ],
)
def test_local_paths_are_found_in_outputs(text: str, found: list[str]) -> None:
    v4 = nbformat.v4
    output = v4.new_output("display_data", {"text/plain": text})
    notebook = v4.new_notebook(cells=[v4.new_code_cell("1", outputs=[output], execution_count=1)])
    assert leftovers(notebook) == found


def test_stderr_and_execution_times_are_removed_from_outputs() -> None:
    v4 = nbformat.v4
    outputs = [v4.new_output("stream", text=name, name=name) for name in ("stdout", "stderr")]
    notebook = v4.new_notebook(cells=[v4.new_code_cell("1", outputs=outputs, metadata={"execution": {}})])
    assert len(leftovers(notebook)) == 2
    clean(notebook)
    assert leftovers(notebook) == []
    assert [output.name for output in code_cells(notebook)[0].outputs] == ["stdout"]
