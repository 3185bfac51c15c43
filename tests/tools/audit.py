"""Check the requirements for known vulnerabilities: ``python -m tests.tools.audit``, a part of ``make check``.

It covers everything that pip installs for the package with all extras, in the installed versions. Requirements that
are not installed are listed and not audited. A finding fails the check. If no advisory service answers, or none knows
the packages, one line reports that and the check passes, so that `make check` works offline. A mirror of PyPI without
advisories knows no package; pip-audit reports "no known vulnerabilities" then.
"""

from __future__ import annotations

import configparser
import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SETUP: Final = Path(__file__).parents[2] / "setup.cfg"
# For developers of the package: audited, but without a promise about lower bounds.
FOR_TESTS: Final = "test"
# Advisories that do not concern us -> why.
NOT_OURS: Final[dict[str, str]] = {}

_SERVICES: Final = ("pypi", "osv")
# A service answers for one package at a time; there are about 120.
_PATIENCE: Final = 180


def requirements(*, tests: bool = False) -> list[Requirement]:
    """Return what setup.cfg names, without the package itself: for users, and with `tests` for developers too."""
    config = configparser.ConfigParser()
    config.read(SETUP, encoding="utf-8")
    extras = config["options.extras_require"]
    lines = [config["options"]["install_requires"], *(extras[name] for name in extras if tests or name != FOR_TESTS)]
    named = [Requirement(line) for text in lines for line in text.split("\n") if line and not line.startswith("#")]
    return [requirement for requirement in named if requirement.name != "rocketmq-spark"]


def findings(report: str) -> tuple[list[str], int] | None:
    """Return the findings of a pip-audit report (JSON) and the number of audited packages; None for other text."""
    try:
        packages = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return None
    audited = [package for package in packages if "skip_reason" not in package]
    found = [
        f"{package['name']} {package['version']}: {one['id']}, fixed in {', '.join(one['fix_versions']) or 'none yet'}"
        for package in audited
        for one in package["vulns"]
        if one["id"] not in NOT_OURS
    ]
    return found, len(audited)


def installed(roots: Iterable[Requirement]) -> tuple[dict[str, str], list[str]]:
    """Return the versions of requirements and of their requirements, and the names that are not installed."""
    versions: dict[str, str] = {}
    missing: list[str] = []
    pending, seen = deque(roots), set()
    while pending:
        requirement = pending.popleft()
        name = canonicalize_name(requirement.name)
        # The same package may be required again with an extra, which brings more.
        if (name, *sorted(requirement.extras)) in seen:
            continue
        seen.add((name, *sorted(requirement.extras)))
        try:
            found = distribution(name)
        except PackageNotFoundError:
            missing.append(name)
            continue
        versions[name] = found.version
        for text in found.requires or ():
            required = Requirement(text)
            extras = ("", *requirement.extras)
            if required.marker is None or any(required.marker.evaluate({"extra": extra}) for extra in extras):
                pending.append(required)
    return versions, sorted(set(missing))


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
    """Return 1 if a package has a known vulnerability."""
    versions, missing = installed(requirements(tests=True))
    if missing:
        print(f"not installed here, so not audited: {', '.join(missing)}")
    pins = "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))
    for service in _SERVICES:
        answer = findings(_asked(service, pins))
        if answer is None or not answer[1]:
            continue
        found, audited = answer
        print(f"{audited} of {len(versions)} packages audited by {service}: {len(found)} known vulnerabilities")
        print(*found, sep="\n", end="\n" if found else "")
        return 1 if found else 0
    print("packages not audited: no service of advisories answers here; CONTRIBUTING.md explains the lower bounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
