"""Bytes from servers are data: no source turns them into objects or code, and JSON is parsed with limits."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((*ROOT.glob("rocketmq_spark/**/*.py"), ROOT / "pyspark_rocketmq.py"))

# Calls that can create any object, or run any code, from bytes or text.
MODULES = {
    *("pickle", "_pickle", "cPickle", "pickletools", "cloudpickle", "dill", "joblib", "jsonpickle", "copyreg"),
    *("marshal", "shelve", "dbm", "yaml", "ruamel", "runpy", "code", "codeop", "imp", "zipimport", "xml", "lxml"),
}
CALLS = {
    *("eval", "exec", "compile", "__import__", "import_module", "spec_from_file_location"),
    *("read_pickle", "literal_eval", "unsafe_load", "full_load"),
}
KEYWORDS = {"allow_pickle", "shell"}
JSON = {"json.load", "json.loads", "json.JSONDecoder"}

# (module, call) -> why it is allowed.
ALLOWED = {
    ("rocketmq_spark/spark/report.py", "pickle"): "measures how long Spark's own pickle of a commit message will be",
    ("rocketmq_spark/__init__.py", "import_module"): "imports the public names of this package, which it lists",
    ("rocketmq_spark/deliveries/__init__.py", "import_module"): "imports a delivery of this package, which it lists",
    ("rocketmq_spark/display/optional.py", "import_module"): "imports pandas or matplotlib, by names that stand there",
    ("rocketmq_spark/options/references.py", "import_module"): "imports the class that an option of the user names",
    ("rocketmq_spark/protocol/remoting/command.py", "json.JSONDecoder"): "reads what servers send, with limits",
    ("rocketmq_spark/options/offsets.py", "json.loads"): "reads the user's options, and what a query wrote itself",
    ("rocketmq_spark/spark/ordered_queues.py", "json.loads"): "reads what a driver wrote into its query's checkpoint",
    ("rocketmq_spark/spark/lag.py", "json.loads"): "reads offsets in the progress of a query of this session",
    ("rocketmq_spark/metrics/measures.py", "json.loads"): "reads the reports of this job's own tasks",
    ("rocketmq_spark/spark/worker_log.py", "json.loads"): "reads what the session's own writes logged",
    ("rocketmq_spark/cli/doctor/machine.py", "json.loads"): "reads the status of a Python on this machine",
    ("rocketmq_spark/cluster/state.py", "json.loads"): "reads its configuration file",
    ("rocketmq_spark/cluster/servers.py", "json.loads"): "reads a template of this package",
    ("rocketmq_spark/cluster/jars.py", "xml.etree"): "reads what Ivy reports of the jars that it has fetched",
}


def uses(tree: ast.AST) -> Iterator[str]:
    """Yield the forbidden calls of a module by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] in MODULES:
                yield module
            yield from (alias.name for alias in node.names if alias.name in CALLS)
            yield from (f"json.{alias.name}" for alias in node.names if f"{module}.{alias.name}" in JSON)
        elif isinstance(node, ast.Name) and node.id in CALLS:
            yield node.id
        elif isinstance(node, ast.Attribute) and f"json.{node.attr}" in JSON and ast.unparse(node) in JSON:
            yield f"json.{node.attr}"
        elif isinstance(node, ast.Attribute) and node.attr in CALLS and ast.unparse(node) != "re.compile":
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg in KEYWORDS:
            yield node.arg


@cache
def found() -> frozenset[tuple[str, str]]:
    return frozenset(
        (path.relative_to(ROOT).as_posix(), use) for path in SOURCES for use in uses(ast.parse(path.read_text("utf-8")))
    )


def test_package_never_unpickles_or_evaluates_data() -> None:
    assert found() - ALLOWED.keys() == set()


def test_list_of_exceptions_has_no_unused_entries() -> None:
    assert ALLOWED.keys() - found() == set()


def test_report_module_only_pickles() -> None:
    tree = ast.parse((ROOT / "rocketmq_spark/spark/report.py").read_text("utf-8"))
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {name for name in used if name.startswith("pickle.")} == {"pickle.dumps"}


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("import pickle as p", "pickle"),
        ("from marshal import loads", "marshal"),
        ("import xml.etree.ElementTree", "xml.etree.ElementTree"),
        ("eval(text)", "eval"),
        ("builtins.exec(text)", "exec"),
        ("run = compile", "compile"),
        ("from importlib import import_module", "import_module"),
        ("numpy.load(file, allow_pickle=True)", "allow_pickle"),
        ("json.loads(text)", "json.loads"),
        ("from json import loads", "json.loads"),
    ],
)
def test_search_finds_forbidden_uses(source: str, use: str) -> None:
    assert use in set(uses(ast.parse(source)))


def test_search_ignores_regular_expressions() -> None:
    assert not set(uses(ast.parse("re.compile('x'); json.dumps({}); loads(data)")))
