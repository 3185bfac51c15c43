"""Execute notebooks, each in its own kernel, and save them without traces of the machine: ``make notebooks``.

Outputs and pictures stay. Standard error, execution times and local paths are removed. A notebook that still contains
a local path is not saved.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.support.processes import PATIENCE

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"

_STARTS = re.compile(r"^cluster = rocketmq_spark\.LocalCluster\(.*\)\ncluster\.start\(\)\n", re.MULTILINE)
_STOPS = re.compile(r"^cluster\.stop\(\)$", re.MULTILINE)
_ONE_CLUSTER = "cluster = rocketmq_spark.LocalCluster(brokers=2)\ncluster.start()"
_PLACES = re.compile(r"(?<![\w.<])/(?:tmp|root|home|work|var|usr|opt|Users|private)\b[^\s'\"<]*|file:/\S+")


def executed(path: Path, folder: Path) -> Any:
    """Return a notebook after a run from top to bottom in `folder`; raises at the first cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    _execute(notebook, folder)
    return notebook


def executed_together(paths: Sequence[Path], folder: Path, **environ: str) -> list[Any]:
    """Return notebooks after a run of one after another, in one kernel and on one cluster of two brokers.

    Each begins with no name but `cluster`. The topics of all must have different names. `environ` are environment
    variables of the kernel. A failed cell raises, as in `executed`.
    """
    notebooks = [nbformat.read(path, as_version=4) for path in paths]
    cells = []
    for path, notebook in zip(paths, notebooks, strict=True):
        first, last = notebook is notebooks[0], notebook is notebooks[-1]
        _replace(notebook, _STARTS, f"{_ONE_CLUSTER}\n" if first else "")
        _replace(notebook, _STOPS, "cluster.stop()" if last else "")
        for cell in notebook.cells:
            cell.id = f"{path.stem}-{cell.id}"
        cells += [nbformat.v4.new_code_cell(r"%reset_selective -f ^(?!cluster$)"), *notebook.cells]
    # They share the cells, which get the outputs.
    _execute(nbformat.v4.new_notebook(cells=cells), folder, **environ)
    return notebooks


def _replace(notebook: Any, pattern: re.Pattern[str], text: str) -> None:
    """Replace the only match of a pattern in the code of a notebook."""
    [cell] = [cell for cell in code_cells(notebook) if pattern.search(cell.source)]
    cell.source = pattern.sub(text, cell.source)


def _execute(notebook: Any, folder: Path, **environ: str) -> None:
    # Use the kernel of this environment, not one that the user has installed.
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=PATIENCE, kernel_name="python3", record_timing=False, resources=resources)
    client.execute(env={**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline", **environ})


def clean(notebook: Any) -> None:
    """Remove metadata and standard error, which belong to the run and not to its result."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in code_cells(notebook):
        cell.metadata = {}
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def data_of(notebook: Any, mime_type: str) -> list[str]:
    """Return the outputs of a MIME type."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output.data[mime_type] for output in outputs if mime_type in output.get("data", {})]


def leftovers(notebook: Any) -> list[str]:
    """Return texts that must not be saved: errors, stderr, paths and the host's name."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    found = [
        output.output_type for output in outputs if output.output_type == "error" or output.get("name") == "stderr"
    ]
    found += [f"metadata {cell.metadata}" for cell in notebook.cells if cell.metadata]
    host = socket.gethostname()
    for text in _texts(outputs):
        found += _PLACES.findall(text)
        if len(host) > 3 and re.search(rf"\b{re.escape(host)}\b", text):
            found.append(host)
    return found


def _texts(outputs: list[Any]) -> Iterator[str]:
    for output in outputs:
        yield output.get("text", "")
        yield from (text for kind, text in output.get("data", {}).items() if kind.startswith("text/"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute notebooks, and keep their outputs.")
    parser.add_argument("names", nargs="*", help="by default all", metavar="name")
    names = parser.parse_args().names
    paths = [NOTEBOOKS / f"{name}.ipynb" for name in names] or sorted(NOTEBOOKS.glob("*.ipynb"))
    for path in paths:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(path, Path(folder))
        clean(notebook)
        if leftovers(notebook):
            sys.exit(f"{path} is not saved: its outputs have {leftovers(notebook)}")
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - started:.0f} s, {path.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
