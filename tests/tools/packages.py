"""The sdist and the wheels of this tree, built as a release is: the wheel of this platform from the sdist."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.processes import PATIENCE

ROOT: Final = Path(__file__).parents[2]
# What tools leave in a tree, and what git keeps there: setuptools is to see what a clone has.
_LEFT_BEHIND: Final = shutil.ignore_patterns(
    ".*",
    "__pycache__",
    "*.egg-info",
    "*.so",
    "_hashes.c",
    "_records.c",
    "artifacts",
    "build",
    "dist",
    "metastore_db",
    "site",
    "spark-warehouse",
    "*.log",
)


class Built(NamedTuple):
    """What `build` has made."""

    sdist: Path
    wheel: Path  # Of this platform
    pure: Path  # For any platform


def build(folder: Path, *, compiled: bool) -> Built:
    """Build all in a folder, without the network: the build's own requirements are those of the tests, too.

    Parameters
    ----------
    folder : pathlib.Path
        Empty, or not there yet.
    compiled : bool
        Whether a build without the compiled kernel fails.
    """
    (wheel,) = _build(folder, "platform", ROCKETMQ_SPARK_KERNEL="1" if compiled else "")
    (pure,) = _build(folder, "pure", "--wheel", ROCKETMQ_SPARK_KERNEL="0")
    (sdist,) = (folder / "platform").glob("*.tar.gz")
    return Built(sdist, wheel, pure)


def build_without_compiler(folder: Path) -> Path:
    """Return the wheel that is built where a C compiler is missing."""
    (wheel,) = _build(folder, "without", "--wheel", CC="/bin/false", ROCKETMQ_SPARK_KERNEL="")
    return wheel


def _build(folder: Path, name: str, *options: str, **environ: str) -> list[Path]:
    # A copy, for setuptools leaves things where it builds.
    source = folder / f"source-{name}"
    shutil.copytree(ROOT, source, ignore=_LEFT_BEHIND)
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(folder / name), str(source)]
    built = subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return list((folder / name).glob("*.whl"))
