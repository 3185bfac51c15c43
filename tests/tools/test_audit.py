"""What is required of users is explained, and what an audit of it says is understood."""

from __future__ import annotations

import configparser
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.tools.audit import findings, installed, requirements

ROOT = Path(__file__).parents[2]


def report(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


def sound(name: str, *vulns: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": list(vulns)}


def test_every_lower_bound_has_its_line_in_the_table() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## What is required")[1].split("\n## ")[0]
    lines = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    listed = [line[0].removeprefix("| ").strip("`") for line in lines]
    lower = [
        f"{one.name}{bound}" for one in requirements() for bound in one.specifier if bound.operator in (">=", "==")
    ]
    assert listed == lower
    assert all(len(line) == 3 and all(map(str.strip, line)) for line in lines)


def test_a_vulnerability_is_found() -> None:
    bad = sound("two", {"id": "PYSEC-1", "fix_versions": ["1.1", "2.0"]}, {"id": "PYSEC-2", "fix_versions": []})
    found = ["two 1.0: PYSEC-1, fixed in 1.1, 2.0", "two 1.0: PYSEC-2, fixed in none yet"]
    assert findings(report(sound("one"), bad)) == (found, 2)


def test_dependency_unknown_to_the_service_counts_as_not_audited() -> None:
    skipped = {"name": "one", "skip_reason": "Dependency not found on PyPI and could not be audited: one (1.0)"}
    assert findings(report(skipped)) == ([], 0)
    assert findings(report(skipped, sound("two"))) == ([], 1)


@pytest.mark.parametrize("text", ["", "Traceback (most recent call last):", "[]", "{}", "null"])
def test_text_that_is_no_report_gives_no_findings(text: str) -> None:
    assert findings(text) is None


def test_requirements_cover_every_extra_of_users() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    assert set(config["options.extras_require"]) == {"grpc", "cluster", "notebook", "demo", "test"}
    names = {requirement.name for requirement in requirements()}
    assert {"pyspark", "grpcio", "trustme", "nbclient", "pandas"} <= names
    assert "pytest" not in names
    assert names | {"pytest"} <= {requirement.name for requirement in requirements(tests=True)}


def test_requirements_of_requirements_are_audited_too() -> None:
    versions, missing = installed(requirements())
    assert missing == []
    # Of pyspark, of trustme, of trustme's cryptography, and of nbclient's jupyter-client.
    assert {"py4j", "cryptography", "cffi", "pyzmq"} <= set(versions)
    assert versions["py4j"] == version("py4j")


def test_requirements_of_an_extra_are_audited_if_the_extra_is_required() -> None:
    plain, _ = installed([Requirement("pyspark")])
    connect, _ = installed([Requirement("pyspark"), Requirement("PySpark[connect]")])
    assert "googleapis-common-protos" not in plain
    assert "googleapis-common-protos" in connect


def test_missing_dependency_is_named() -> None:
    roots = [Requirement("iniconfig>=1"), Requirement("there-is-no-such-package")]
    assert installed(roots) == ({"iniconfig": version("iniconfig")}, ["there-is-no-such-package"])
