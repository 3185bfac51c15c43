"""Ask whether what we require has known vulnerabilities: ``python -m tests.audit``, a part of ``make check``.

Rule 1: asked about is what setup.cfg names for users, in the versions that are installed here.
Rule 2: a finding fails. Where no service can be reached, or none knows the packages (a mirror of PyPI without its
        advisories answers so, and pip-audit calls that "no known vulnerabilities"), one line says so, and that is all:
        `make check` works offline.
"""

from __future__ import annotations

import configparser
import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

SETUP: Final = Path(__file__).parents[1] / "setup.cfg"
EXTRAS: Final = ("grpc", "notebook", "demo")
# Advisories that do not concern us -> why.
NOT_OURS: Final[dict[str, str]] = {}

_SERVICES: Final = ("pypi", "osv")
_PATIENCE: Final = 60


def requirements() -> list[Requirement]:
    """What users install, by setup.cfg: of the package and of its extras, without the package itself."""
    config = configparser.ConfigParser()
    config.read(SETUP, encoding="utf-8")
    lines = [config["options"]["install_requires"], *(config["options.extras_require"][extra] for extra in EXTRAS)]
    wanted = [Requirement(line) for text in lines for line in text.split("\n") if line and not line.startswith("#")]
    return [one for one in wanted if one.name != "rocketmq-spark"]


def findings(report: str) -> tuple[list[str], int] | None:
    """Return what a report of pip-audit (JSON) finds, and how many packages it is about; None if it is no report."""
    try:
        packages = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return None
    audited = [package for package in packages if "skip_reason" not in package]
    found = [
        f"{package['name']} {package['version']}: {one['id']}, mended in {', '.join(one['fix_versions']) or 'none yet'}"
        for package in audited
        for one in package["vulns"]
        if one["id"] not in NOT_OURS
    ]
    return found, len(audited)


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return the versions that are here; what is not here is left out."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _asked(service: str, pins: str) -> str:
    command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", service, "--timeout", "5"]
    command += ["--format", "json", "--progress-spinner", "off", "--no-deps", "--disable-pip", "-r", "/dev/stdin"]
    try:
        return subprocess.run(
            command, input=pins, capture_output=True, text=True, timeout=_PATIENCE, check=False
        ).stdout
    except subprocess.TimeoutExpired:
        return ""


def main() -> int:
    """Return 1 if there is something to mend."""
    here = installed(sorted({one.name for one in requirements()}))
    pins = "".join(f"{name}=={found}\n" for name, found in here.items())
    for service in _SERVICES:
        answer = findings(_asked(service, pins))
        if answer is None or not answer[1]:
            continue
        found, audited = answer
        print(f"{audited} of {len(here)} requirements audited by {service}: {len(found)} known vulnerabilities")
        print(*found, sep="\n", end="\n" if found else "")
        return 1 if found else 0
    print("requirements not audited: no service of advisories answers here; CONTRIBUTING.md explains the lower bounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
