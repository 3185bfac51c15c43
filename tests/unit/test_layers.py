"""Import rules of the package: modules import only from lower layers."""

from __future__ import annotations

import ast
import configparser
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.tools.layers import FOLDERS, PACKAGE, PATH, filled

# These two are above all layers: they provide the public names and the command.
ENTRY_POINTS = {"rocketmq_spark", "rocketmq_spark.__main__"}
# They import nothing of the package but each other, and are imported from everywhere.
LEAVES = {
    "rocketmq_spark._version",
    "rocketmq_spark.deliveries",
    "rocketmq_spark.errors",
    "rocketmq_spark.display.optional",
    "rocketmq_spark.display.row_table",
    "rocketmq_spark.display.tables",
}

# Third-party packages that a folder may not import.
FOREIGN = {
    "display": {"pyspark", "pyarrow", "numpy", "socket", "grpc", "google"},
    "model": {"pyspark", "pyarrow", "numpy", "socket", "grpc", "google"},
    "options": {"pyspark", "pyarrow", "socket", "grpc", "google"},
    "protocol": {"pyspark", "numpy", "grpc", "socket", "selectors"},
    "protocol.remoting": {"pyspark", "pyarrow", "numpy", "grpc", "google", "socket", "threading", "time", "selectors"},
    "metrics": {"pyspark", "pyarrow", "socket"},
    "transport": {"pyspark", "pyarrow", "numpy"},
    "arrow": {"pyspark", "socket", "threading", "grpc", "google"},
    "routing": {"pyspark", "pyarrow", "numpy", "socket", "grpc", "google"},
    "sink": {"pyspark", "socket", "grpc", "google"},
    "source": {"pyspark", "socket", "grpc", "google"},
    "producer": {"pyspark", "numpy", "socket", "grpc", "google"},
    "aio": {"pyspark", "numpy", "socket", "grpc", "google"},
    "deliveries": {"pyspark", "socket", "grpc", "google"},
    "cluster": {"pyarrow", "numpy"},
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
    """Return the folder, or the module beside the folders, that a module counts to."""
    return name.removeprefix("rocketmq_spark.").split(".")[0]


def imports(tree: ast.AST, *, for_types: bool = False) -> Iterator[str]:
    """Yield what a module imports, at the top and inside functions; with `for_types` also for type checking only."""
    for node in ast.iter_child_nodes(tree):
        if not for_types and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node, for_types=for_types)


@cache
def imports_of(path: Path) -> frozenset[str]:
    return frozenset(imports(ast.parse(path.read_text("utf-8"))))


def known(name: str) -> str:
    """Return the module that an imported name lives in."""
    return name if name in MODULE_NAMES else name.rpartition(".")[0]


@cache
def graph() -> dict[str, set[str]]:
    """Return what each module imports of this package when it is imported or called."""
    return {
        module_name(path): {known(name) for name in imports_of(path) if name.split(".")[0] == "rocketmq_spark"}
        for path in MODULES
    }


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one import circle, or nothing."""
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        path.append(name)
        found = next(filter(None, map(visit, sorted(imports.get(name, ())))), [])
        path.pop()
        done.add(name)
        return found

    return next(filter(None, map(visit, sorted(imports))), [])


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_module_imports_only_from_lower_layers_and_its_own_folder(path: Path) -> None:
    name = module_name(path)
    if name in ENTRY_POINTS:
        return
    if name in LEAVES or folder(name) == "display":
        assert graph()[name] <= LEAVES, f"{name} imports {sorted(graph()[name] - LEAVES)}"
        return
    for imported in graph()[name] - LEAVES:
        assert imported not in ENTRY_POINTS, f"{name} imports {imported}"
        if folder(imported) != folder(name):
            assert FOLDERS[folder(imported)].layer < FOLDERS[folder(name)].layer, f"{name} imports {imported}"


@pytest.mark.parametrize(
    ("name", "above"),
    [
        ("log", ("effectively_once", "exactly_once")),
        ("effectively_once", ("exactly_once",)),
        ("exactly_once", ("effectively_once",)),
    ],
)
def test_deliveries_use_the_log_and_not_each_other(name: str, above: tuple[str, ...]) -> None:
    deliveries = "rocketmq_spark.deliveries."
    imported = {
        target for module, targets in graph().items() if module.startswith(deliveries + name) for target in targets
    }
    assert imported, f"no module of {name} was found"
    assert [target for target in imported if target.startswith(tuple(deliveries + other for other in above))] == []


def test_no_import_circle_even_for_type_checking() -> None:
    found = {
        module_name(path): set(map(known, imports(ast.parse(path.read_text("utf-8")), for_types=True)))
        for path in MODULES
    }
    own = {name: (targets & MODULE_NAMES) - ENTRY_POINTS for name, targets in found.items()}
    assert circle(own) == []


def test_circle_search_finds_a_circle() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_at_most_nine_layers_with_whole_numbers() -> None:
    numbers = [about.layer for about in FOLDERS.values()]
    assert all(type(number) is int for number in numbers)
    assert len(set(numbers)) <= 9


def test_contributing_has_the_table_of_layers() -> None:
    page = PATH.read_text("utf-8")
    assert page == filled(page), "run: make docs"
    for name in FOLDERS:
        assert f"| `{name}" in page


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_folder_imports_none_of_its_refused_packages(path: Path) -> None:
    table = {f"rocketmq_spark.{folder}": refused for folder, refused in FOREIGN.items()}
    refused = table.get(covering(module_name(path), table) or "", set())
    assert not {imported.split(".")[0] for imported in imports_of(path)} & refused


def test_only_the_spark_folder_imports_pyspark() -> None:
    importers = {
        module_name(path) for path in MODULES if any(name.split(".")[0] == "pyspark" for name in imports_of(path))
    }
    # The demo starts a session, and the cluster finds the Ivy that PySpark ships.
    allowed = {"spark", "cli", "cluster"}
    assert {folder(name) for name in importers} <= allowed


def test_arrow_and_sink_folders_import_no_concrete_transport() -> None:
    allowed = {"base", "credentials", "parallel", "runtime"}
    for path in MODULES:
        name = module_name(path)
        if folder(name) in ("arrow", "sink"):
            concrete = {target for target in graph()[name] if target.startswith("rocketmq_spark.transport.")}
            assert {target.split(".")[2] for target in concrete} <= allowed, name


def test_import_search_finds_imports_at_runtime_and_for_type_checking() -> None:
    tree = ast.parse("import a.b\nfrom c import d\ndef f():\n    import e\nif TYPE_CHECKING:\n    import g")
    assert set(imports(tree)) == {"a.b", "c.d", "e"}
    assert set(imports(tree, for_types=True)) == {"a.b", "c.d", "e", "g"}


def test_every_folder_of_the_package_is_installed() -> None:
    config = configparser.ConfigParser()
    config.read(PACKAGE.parent / "setup.cfg", encoding="utf-8")
    installed = set(config["options"]["packages"].split()) - {"rocketmq_spark.conf"}
    assert installed == {module_name(path) for path in PACKAGE.rglob("__init__.py")}
