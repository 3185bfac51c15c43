"""The sdist and the wheel of this tree, built as a release is: the wheel from the sdist."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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


@dataclass(frozen=True)
class Built:
    """What `build` has made."""

    sdist: Path
    wheel: Path


def build(folder: Path) -> Built:
    """Build both in a folder, without the network: the build's own requirements are those of the tests, too.

    Parameters
    ----------
    folder : pathlib.Path
        Empty, or not there yet.
    """
    # A copy, for setuptools leaves things where it builds.
    shutil.copytree(ROOT, folder / "source", ignore=_LEFT_BEHIND)
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder / "dist"),
        str(folder / "source"),
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return Built(sdist, wheel)
