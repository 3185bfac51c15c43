"""Test the package with every available Python and PySpark, one environment after the other.

usage: make check-matrix [PYTHONS="/path/of/python3.12 ..."] [PYSPARKS="4.0 4.3"]

Results are kept in ``build/matrix.json``. A run of the same commit goes on where the one before has stopped, and tests
only pairs that have not passed. It prints the table of all kept pairs.

An environment is deleted after use, because PySpark alone needs 450 MB. Each installs the sdist, which builds the
compiled kernel where a C compiler and the headers of this Python are. Unit tests run once for each Python, in the tree
of the sdist. Tests with Spark and servers run on every pair, with the installed package. The oldest Python is also
tested with the lowest version of every requirement (PYSPARKS="lowest"). PySpark 3.5 runs the tests of
`rocketmq_spark.write` and `foreach_batch` only. An interpreter or a PySpark that is not available is reported and is
not a failure.
"""

from __future__ import annotations

import configparser
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Final

from tests.support.kernels import can_build
from tests.tools.packages import ROOT, Built, build

PYTHONS: Final = ("3.10", "3.11", "3.12", "3.13")
LOWEST: Final = "lowest"
# PySpark 3.5 has no data sources in Python.
WITHOUT_SOURCES: Final = "3.5"
PYSPARKS: Final = (LOWEST, WITHOUT_SOURCES, "4.0", "4.1", "4.2", "4.3")
ON_ALL: Final = ("tests/spark/test_write_function.py",)
# Batch and stream in both directions, over both protocols, and with each kind of Spark session.
WITH_SPARK: Final = tuple(
    f"tests/spark/test_{name}.py"
    for name in (
        "batch_write",
        "dedupe",
        "exactly_once",
        "grpc_write",
        "read",
        "register",
        "sessions",
        "stream_read",
        "stream_write",
        "unreadable",
    )
)
_SAYS_WHAT_IT_IS: Final = "import sys; print('%d.%d %d.%d.%d' % (sys.version_info[:2] + sys.version_info[:3]))"
_SAYS_WHAT_IT_HAS: Final = (
    "import pyspark, rocketmq_spark as ours; assert 'site-packages' in ours.__file__; print(pyspark.__version__)"
)
# These tests wait a minute for idle connections of workers.
_LEFT_OUT: Final = "not cut_short"
_PATIENCE: Final = 3600
_NOT_AVAILABLE: Final = "not available"


@dataclass
class Pair:
    """A Python with a PySpark, and the results of its tests."""

    python: str  # Its full version
    asked: str  # One of `PYSPARKS`
    pyspark: str = ""  # The version that pip has installed
    unit: str = ""
    spark: str = ""
    day: str = ""
    failed: bool = False


class Results:
    """The pairs that runs of one state of the tree have tested; they are saved after each."""

    def __init__(self, file: Path, tree: str) -> None:
        self._file = file
        self._tree = tree
        kept = json.loads(file.read_text()) if file.exists() else {}
        same = kept.get("tree") == tree
        self.pairs = [Pair(**fields) for fields in kept["pairs"]] if same else []

    def passed(self, python: str, asked: str) -> bool:
        """Return whether a pair has passed, or pip has no such PySpark."""
        return any(not pair.failed for pair in self.pairs if (pair.python, pair.asked) == (python, asked))

    def has_units(self, python: str) -> bool:
        """Return whether the unit tests have passed with the newest requirements."""
        return any(
            pair.unit and not pair.failed for pair in self.pairs if pair.python == python and pair.asked != LOWEST
        )

    def add(self, pair: Pair) -> None:
        """Keep a pair instead of its earlier result."""
        self.pairs = [kept for kept in self.pairs if (kept.python, kept.asked) != (pair.python, pair.asked)]
        self.pairs.append(pair)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps({"tree": self._tree, "pairs": [asdict(pair) for pair in self.pairs]}, indent=1))
        part.replace(self._file)


def state_of_tree() -> str:
    """Return the commit, and a digest of uncommitted changes."""
    texts = [run("git", *command.split(), folder=ROOT).stdout for command in ("rev-parse HEAD", "diff HEAD")]
    return f"{texts[0].strip()} {hashlib.sha256(texts[1].encode()).hexdigest()[:16]}"


def run(*command: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command without this tree on its path, and capture its output."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYSPARK_PYTHON")}
    return subprocess.run(
        list(map(str, command)), cwd=folder, env=kept, capture_output=True, text=True, timeout=_PATIENCE, check=False
    )


def candidates() -> Iterator[str]:
    """Yield interpreters: those of PYTHONS, else those on PATH and pyenv's."""
    if os.environ.get("PYTHONS"):
        yield from os.environ["PYTHONS"].split()
        return
    yield from filter(None, (shutil.which(f"python{release}") for release in PYTHONS))
    if shutil.which("pyenv"):
        for name in run("pyenv", "versions", "--bare").stdout.split():
            yield str(Path(run("pyenv", "prefix", name).stdout.strip(), "bin", "python"))


def interpreters() -> dict[str, tuple[str, str]]:
    """Return path and full version of the first interpreter of each release. A shim without interpreter is skipped."""
    found: dict[str, tuple[str, str]] = {}
    for path in candidates():
        try:
            release, _, whole = run(path, "-c", _SAYS_WHAT_IT_IS).stdout.strip().partition(" ")
        except OSError:
            continue
        if release in PYTHONS:
            found.setdefault(release, (path, whole))
    return found


def lowest() -> str:
    """Return pip constraints that pin the requirements to the oldest versions of setup.cfg, but PySpark to 4.0.0."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    needs = config["options"]["install_requires"] + config["options.extras_require"]["grpc"]
    oldest = "\n".join(re.findall(r"^[a-z0-9]+>=[0-9.]+", needs, re.MULTILINE)).replace(">=", "==")
    return re.sub(r"pyspark==3\.5[0-9.]*", "pyspark==4.0.0", oldest)


def tested(python: Path, tree: Path, tests: Sequence[str], processes: int, *options: str) -> tuple[str, bool]:
    """Run tests, and return the counts of pytest's last line and whether a test failed."""
    command: tuple[str | Path, ...] = (
        python,
        "-m",
        "pytest",
        *tests,
        "-q",
        "-n",
        str(processes),
        "--no-loadscope-reorder",
        *options,
    )
    try:
        done = run(*command, "-k", _LEFT_OUT, folder=tree)
    except subprocess.TimeoutExpired:
        return f"no end within {_PATIENCE} s", True
    if done.returncode:
        print(done.stdout[-20_000:], done.stderr[-5_000:], sep="\n", file=sys.stderr)
    lines = done.stdout.strip().splitlines()
    counts = re.findall(r"[0-9]+ (?:passed|skipped|failed|errors?)", lines[-1] if lines else "")
    return ", ".join(counts) or "did not start", bool(done.returncode)


def check(pair: Pair, interpreter: str, built: Built, folder: Path, *, unit: bool) -> None:
    """Install the sdist with a PySpark, run the tests, and set the results of `pair`."""
    without_sources = pair.asked == WITHOUT_SOURCES
    done = run(interpreter, "-m", "venv", folder / "environment")
    python = folder / "environment" / "bin" / "python"
    # The tests compile the modules that they import.
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile")
    if done.returncode == 0:
        done = run(*pip, "--upgrade", "pip")
    if done.returncode == 0:
        (folder / "lowest.txt").write_text(lowest())
        pyspark: tuple[str | Path, ...] = (f"pyspark=={pair.asked}.*",)
        if pair.asked == LOWEST:
            pyspark = ("--constraint", folder / "lowest.txt")
        elif without_sources:
            # Its extra connect, which the extra test has, needs a numpy that is too old for the newest pyarrow.
            pyspark = ()
        done = run(*pip, f"{built.sdist}[test]", *pyspark)
    if done.returncode == 0 and without_sources:
        done = run(*pip, "--no-deps", f"pyspark=={pair.asked}.*")
    if done.returncode:
        absent = "No matching distribution found for pyspark" in done.stderr
        pair.pyspark = pair.asked
        pair.spark, pair.failed = (_NOT_AVAILABLE if absent else "could not be installed"), not absent
        print(done.stderr[-5_000:], file=sys.stderr)
        return
    tree = folder / "tree"
    shutil.unpack_archive(built.sdist, folder / "sdist")
    next((folder / "sdist").iterdir()).rename(tree)
    # Old releases warn about newer ones; these warnings are not errors of the package.
    options = ("-W", "default") if without_sources or pair.asked == LOWEST else ()
    if unit and not without_sources:
        # The unit tests import the tree.
        run(python, "setup.py", "-q", "build_ext", "--inplace", folder=tree)
        built_kernel = run(python, "-m", "tests.tools.built_kernel", folder=tree)
        pair.unit, pair.failed = tested(python, tree, ["tests/unit"], 3, *options)
        if built_kernel.returncode:
            pair.unit, pair.failed = f"{pair.unit}; {built_kernel.stderr.strip()}", True
    # From here on the installed package is the only one.
    shutil.rmtree(tree / "rocketmq_spark")
    (tree / "pyspark_rocketmq.py").unlink()
    said = run(python, "-c", _SAYS_WHAT_IT_HAS, folder=tree)
    if said.returncode:
        pair.spark, pair.failed = said.stderr.strip().splitlines()[-1], True
        return
    pair.pyspark = said.stdout.strip()
    tests = ON_ALL if without_sources else (*WITH_SPARK, *ON_ALL)
    pair.spark, failed = tested(python, tree, tests, 2, *options)
    pair.failed |= failed


def table(pairs: Sequence[Pair]) -> str:
    """Return the results as a Markdown table: a line for each Python, a column for each PySpark."""
    newest = {pair.asked: pair.pyspark for pair in pairs if pair.spark != _NOT_AVAILABLE}
    columns = [asked for asked in PYSPARKS if asked in newest]
    heads = [f"{newest[asked]}, all at its lowest" if asked == LOWEST else newest[asked] for asked in columns]
    lines = [f"| Python | unit tests | {' | '.join(heads)} |", "|---" * (len(columns) + 2) + "|"]
    for python in sorted({pair.python for pair in pairs}, key=lambda text: [int(part) for part in text.split(".")]):
        of_it = {pair.asked: pair for pair in pairs if pair.python == python}
        units = [pair.unit for pair in of_it.values() if pair.unit and pair.asked != LOWEST]
        cells = [of_it[asked].spark if asked in of_it else "" for asked in columns]
        lines.append(f"| {python} | {units[0] if units else ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Check every pair that has not passed, print the table, and return 1 if one of them failed."""
    found, results = interpreters(), Results(ROOT / "build" / "matrix.json", state_of_tree())
    pysparks = os.environ.get("PYSPARKS", "").split() or PYSPARKS
    with tempfile.TemporaryDirectory(prefix="rocketmq-spark-matrix-") as name:
        built = build(Path(name, "built"), compiled=can_build())
        for release in PYTHONS:
            if release not in found:
                print(f"Python {release} is not available", file=sys.stderr)
                continue
            interpreter, python = found[release]
            for pyspark in pysparks:
                if (pyspark == LOWEST and release != PYTHONS[0]) or results.passed(python, pyspark):
                    continue
                pair = Pair(python, pyspark, day=str(date.today()))
                start, unit = time.monotonic(), pyspark == LOWEST or not results.has_units(python)
                with tempfile.TemporaryDirectory(dir=name) as folder:
                    check(pair, interpreter, built, Path(folder), unit=unit)
                results.add(pair)
                print(f"{pair} after {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(table(results.pairs))
    return int(any(pair.failed for pair in results.pairs))


if __name__ == "__main__":
    sys.exit(main())
