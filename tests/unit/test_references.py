"""Files, anchors and names that a text or a test refers to exist in the repository."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.markdown import ROOT, anchors
from tests.support.processes import NEEDS_LIMITS

_TEXTS = ("*.py", "*.md", "*.ipynb", "*.yml", "*.cfg", "*.toml", "*.conf", "*.java", "*.proto", "Makefile")
_FOLDERS = ("conf", "docs", "notebooks", "proto", "rocketmq_spark", "tests")
_REFERENCE = re.compile(
    rf"(?<![\w./-])((?:{'|'.join(_FOLDERS)})/[\w/.-]*\w\.(?:py|md|conf|json|ipynb|svg|proto|sha256))(?:#([\w-]+))?"
)


def texts() -> Iterator[Path]:
    for pattern in _TEXTS:
        yield from ROOT.glob(pattern)
        for folder in _FOLDERS:
            yield from (ROOT / folder).rglob(pattern)


def dead_references(text: str) -> list[str]:
    dead = []
    for match in _REFERENCE.finditer(text):
        # protoc resolves its imports in proto/.
        path = ROOT / "proto" / match[1] if match[1].endswith(".proto") else ROOT / match[1]
        # The site has a page for each notebook.
        if path.parent.name == "notebooks" and path.suffix == ".md":
            path = path.with_suffix(".ipynb")
        if not path.exists() or (match[2] and match[2] not in anchors(path)):
            dead.append(match[0])
    return dead


def test_references_to_files_and_anchors_exist() -> None:
    files = [path for path in texts() if path != Path(__file__)]
    assert len(files) > 300
    assert {
        str(path.relative_to(ROOT)): dead for path in files if (dead := dead_references(path.read_text("utf-8")))
    } == {}


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("see docs/options.md.", []),
        ("see docs/options.md#options", []),
        ("see docs/options.md#no-such-heading", ["docs/options.md#no-such-heading"]),
        ("as in docs/missing.md and docs/options.md:", ["docs/missing.md"]),
        ("rocketmq_spark/protocol/grpc/_pb/service.proto", []),
        ("rocketmq_spark/no_module.py", ["rocketmq_spark/no_module.py"]),
    ],
)
def test_dead_reference_is_detected(text: str, dead: list[str]) -> None:
    assert dead_references(text) == dead


@NEEDS_LIMITS
def test_imports_of_the_package_in_tests_and_benchmarks_exist() -> None:
    missing = []
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rocketmq_spark":
                module = importlib.import_module(str(node.module))
                missing += [f"{path.name}: {name.name}" for name in node.names if not has(module, name.name)]
    assert missing == []


def has(module: ModuleType, name: str) -> bool:
    """Return whether a module has an attribute or a submodule of that name."""
    is_package = hasattr(module, "__path__")
    return hasattr(module, name) or (is_package and importlib.util.find_spec(f"{module.__name__}.{name}") is not None)
