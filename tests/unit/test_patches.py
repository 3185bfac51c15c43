"""Tests replace no name of the package: they use arguments, fakes and subclasses instead.

A test that patches a name tests the way of the call, not its effect, and hides that the code lacks an argument.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = [file.relative_to(TESTS).as_posix() for file in sorted(TESTS.rglob("*.py"))]

# These remove a rule of the package on purpose, to show that the checks find the fault: the simulator, and a program
# that holds commits.
PLANTED = {
    "programs/held_commits/sitecustomize.py",
    *(
        f"simulation/{name}.py"
        for name in ("test_model", "test_two_phase", "test_effectively_once", "test_exactly_once")
    ),
}

# Spark's session and context: tests change their interpreter.
OF_SPARK = {"spark"}


def patches_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and target of each patch that may replace a name of the package."""
    imported = dict(_imports(tree))
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def is_allowed(target: ast.expr) -> bool:
        if isinstance(target, ast.Constant) and isinstance(target.value, str):
            # "tests.support.processes.time.sleep" replaces a name of the module time.
            return any(name in sys.stdlib_module_names for name in target.value.split(".")[:-1])
        root = _root(target)
        return root in classes | OF_SPARK or imported.get(root, "").split(".")[0] in sys.stdlib_module_names

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and _is_patch(node.func) and not is_allowed(node.args[0]):
            yield node.lineno, ast.unparse(node.args[0])
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and imported.get(_root(target), "").startswith("rocketmq_spark"):
                    yield node.lineno, ast.unparse(target)


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each imported name with its module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.asname or name.name.split(".")[0], name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((name.asname or name.name, node.module or "") for name in node.names)


def _root(target: ast.expr) -> str:
    while isinstance(target, ast.Attribute):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def _is_patch(function: ast.expr) -> bool:
    """Return whether a call is ``monkeypatch.setattr`` under any name, or one of ``unittest.mock.patch``."""
    parts = ast.unparse(function).split(".")
    return "patch" in parts or (len(parts) > 1 and parts[-1] in ("setattr", "delattr"))


@pytest.mark.parametrize("file", [file for file in FILES if file not in PLANTED])
def test_tests_replace_no_name_of_the_package(file: str) -> None:
    found = [f"{file}:{line}: {target}" for line, target in patches_in(ast.parse((TESTS / file).read_text("utf-8")))]
    assert not found, f"use an argument, a fake or a subclass instead of patching {found}"


@pytest.mark.parametrize(
    "line",
    [
        "monkeypatch.setattr(recall, '_ROWS', 3)",
        "monkeypatch.setattr('rocketmq_spark.sink.recall._ROWS', 3)",
        "monkeypatch.setattr(job.log, '_draw', draw)",
        "patch.setattr(RecallHandles, 'append', draw)",
        "mock.patch.object(recall, '_ROWS', 3)",
        "recall._ROWS = 3",
    ],
)
def test_a_patch_of_the_package_is_found(line: str) -> None:
    imports = "from rocketmq_spark.sink import recall\nfrom rocketmq_spark.sink.recall import RecallHandles\n"
    assert len(list(patches_in(ast.parse(imports + line)))) == 1


@pytest.mark.parametrize(
    "line",
    ["monkeypatch.setattr(sys, 'path', [])", "monkeypatch.setattr(Answers, 'answer', 1)", "os.environ['A'] = '1'"],
)
def test_other_patches_are_allowed(line: str) -> None:
    imports = "import sys\nimport os\nclass Answers: ...\n"
    assert not list(patches_in(ast.parse(imports + line)))
