"""The house's import rule: only downwards, read from the source with `ast`."""

from __future__ import annotations

import ast
import configparser
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "rocketmq_spark"

# As style has them; a half is a module that was split off to stand beneath its other half.
# A module imports only from a smaller number, or from its own folder. The longest prefix that fits counts.
NUMBERS = {
    "rocketmq_spark": 9,
    "rocketmq_spark.text": -1,
    "rocketmq_spark.errors": 0,
    "rocketmq_spark.table_view": 0,
    "rocketmq_spark.message_const": 0.2,
    "rocketmq_spark.names": 0,
    "rocketmq_spark.namespace": 0.5,
    "rocketmq_spark.route_data": 0.2,
    "rocketmq_spark.recall": 0.2,
    "rocketmq_spark.message": 0.4,
    "rocketmq_spark.message_ext": 0.6,
    "rocketmq_spark.pull": 0.6,
    "rocketmq_spark.send_result": 0.6,
    "rocketmq_spark.transaction": 0.8,
    "rocketmq_spark.credentials": 0,
    "rocketmq_spark.parallel": 0,
    "rocketmq_spark.user_class": 0.2,
    "rocketmq_spark.java_hash": 0,
    "rocketmq_spark.foreign_options": 0,
    "rocketmq_spark.option_rules": 0.6,
    "rocketmq_spark.option_transport": 0.5,
    "rocketmq_spark.option_values": 0.5,
    "rocketmq_spark.offset_json": 0.5,
    "rocketmq_spark.option_table": 0.7,
    "rocketmq_spark.option_parsing": 0.8,
    "rocketmq_spark.reader_option_rules": 0.8,
    "rocketmq_spark.reader_option_table": 0.8,
    "rocketmq_spark.options": 1,
    "rocketmq_spark.reader_options": 1.5,
    "rocketmq_spark.producer_options": 1.5,
    "rocketmq_spark.compression": 0.9,
    "rocketmq_spark.unique_id": 1.5,
    "rocketmq_spark.metrics": 1,
    "rocketmq_spark.wire": 1,
    "rocketmq_spark.transport.base": 1.1,
    "rocketmq_spark.transport.topic_configs": 1.2,
    "rocketmq_spark.arrow": 2,
    "rocketmq_spark.consumer": 2,
    "rocketmq_spark.producer": 2,
    "rocketmq_spark.transport": 2,
    "rocketmq_spark.client": 2.5,
    "rocketmq_spark.admin": 2.7,
    "rocketmq_spark.spark": 3,
    "rocketmq_spark.cluster": 4,
    "rocketmq_spark.doctor": 4.3,
    # Commands know the cluster that the command line has left running.
    "rocketmq_spark.admin.connection": 4.5,
    "rocketmq_spark.admin.commands": 4.6,
    "rocketmq_spark.demo": 5,
    "rocketmq_spark.cli": 6,
    "rocketmq_spark.__main__": 7,
}
# What a folder may not import from outside the standard library.
FOREIGN = {
    "rocketmq_spark.wire": {
        "pyarrow",
        "numpy",
        "pyspark",
        "grpc",
        "google",
        "socket",
        "threading",
        "time",
        "selectors",
    },
    "rocketmq_spark.arrow": {"pyspark", "socket", "threading", "grpc", "google"},
    "rocketmq_spark.consumer": {"pyspark", "pyarrow", "numpy", "socket", "grpc", "google"},
    "rocketmq_spark.producer": {"pyspark", "pyarrow", "numpy", "socket", "grpc", "google"},
    "rocketmq_spark.transport": {"pyspark", "pyarrow", "numpy"},
    "rocketmq_spark.metrics": {"pyspark", "pyarrow", "socket"},
    "rocketmq_spark.options": {"pyspark", "pyarrow", "socket"},
    "rocketmq_spark.reader_options": {"pyspark", "pyarrow", "socket"},
    "rocketmq_spark.reader_option_table": {"pyspark", "pyarrow", "socket"},
    "rocketmq_spark.offset_json": {"pyspark", "pyarrow", "socket"},
    "rocketmq_spark.cluster": {"pyarrow", "numpy"},
    "rocketmq_spark.doctor": {"pyarrow", "numpy"},
}

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "_pb" not in path.parts)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULE_NAMES = frozenset(map(module_name, MODULES))


def covering(name: str, table: Mapping[str, object]) -> str | None:
    """Return the longest key of `table` that is `name` or a package around it."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in table), None)


def folder(name: str) -> str:
    return ".".join(name.split(".")[:2])


def runtime_imports(tree: ast.AST) -> Iterator[str]:
    """Yield what a module imports, at the top and inside functions, but not for type checking only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from runtime_imports(node)


@cache
def imports_of(path: Path) -> frozenset[str]:
    return frozenset(runtime_imports(ast.parse(path.read_text("utf-8"))))


def known(name: str) -> str:
    """Return the module that an imported name lives in."""
    return name if name in MODULE_NAMES else name.rpartition(".")[0]


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_module_imports_only_from_below_or_from_its_own_folder(path: Path) -> None:
    name = module_name(path)
    own = covering(name, NUMBERS)
    assert own is not None, f"{name} has no number"
    if name == "rocketmq_spark":
        return
    for imported in imports_of(path):
        if not imported.startswith("rocketmq_spark"):
            continue
        target = known(imported)
        if target == "rocketmq_spark" or (folder(target) == folder(name) and folder(name) in NUMBERS and "." in name):
            continue
        below = covering(target, NUMBERS)
        assert below is not None
        assert NUMBERS[below] < NUMBERS[own], f"{name} ({NUMBERS[own]}) imports {target} ({NUMBERS[below]})"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_folder_keeps_out_what_it_must_not_know(path: Path) -> None:
    refused = FOREIGN.get(covering(module_name(path), FOREIGN) or "", set())
    assert not {imported.split(".")[0] for imported in imports_of(path)} & refused


def test_only_the_spark_folder_imports_pyspark() -> None:
    importers = {
        module_name(path) for path in MODULES if any(name.split(".")[0] == "pyspark" for name in imports_of(path))
    }
    allowed = {"rocketmq_spark.spark", "rocketmq_spark.demo", "rocketmq_spark.cluster"}
    assert {folder(name) for name in importers} <= allowed


def test_producer_and_arrow_see_no_concrete_transport_and_not_each_other() -> None:
    for path in MODULES:
        name = module_name(path)
        if folder(name) not in ("rocketmq_spark.producer", "rocketmq_spark.consumer", "rocketmq_spark.arrow"):
            continue
        targets = {known(imported) for imported in imports_of(path)}
        if folder(name) == "rocketmq_spark.producer":
            assert not {target for target in targets if folder(target) == "rocketmq_spark.arrow"}, name
        if folder(name) == "rocketmq_spark.arrow":
            assert not {target for target in targets if folder(target) == "rocketmq_spark.producer"}, name
        concrete = {target for target in targets if target.startswith("rocketmq_spark.transport")}
        assert concrete <= {"rocketmq_spark.transport.base", "rocketmq_spark.transport.topic_configs"}, name


def test_the_layer_test_sees_what_it_should() -> None:
    tree = ast.parse("import a.b\nfrom c import d\ndef f():\n    import e\nif TYPE_CHECKING:\n    import g")
    assert set(runtime_imports(tree)) == {"a.b", "c.d", "e"}


def test_every_folder_of_the_package_is_installed() -> None:
    config = configparser.ConfigParser()
    config.read(PACKAGE.parent / "setup.cfg", encoding="utf-8")
    installed = set(config["options"]["packages"].split()) - {"rocketmq_spark.conf"}
    assert installed == {module_name(path) for path in PACKAGE.rglob("__init__.py")}
