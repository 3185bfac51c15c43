"""Statements of the documentation about the code and links between pages are correct."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark.options.sink import SINK_OPTIONS
from rocketmq_spark.options.source import SOURCE_OPTIONS
from tests.support.markdown import ROOT, Block, anchors, blocks, documents, links
from tests.support.releases import table
from tests.tools import option_docs

PAGES = documents()
BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}:{block.line}")
    for path in PAGES
    for block in blocks(path)
    if block.language == "python"
]
# Options of Spark itself.
SPARKS = {"checkpointLocation"}


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_options_page_matches_the_code() -> None:
    page = option_docs.PATH.read_text("utf-8")
    assert page == option_docs.filled(page), "run: make docs"


def test_missing_or_duplicate_option_of_the_page_is_detected() -> None:
    page = option_docs.PATH.read_text("utf-8")
    with pytest.raises(ValueError, match=r"in no table: maxRatePerSecond, maxRateTasks$"):
        option_docs.filled(page.replace(" rate -->", " -->"))
    with pytest.raises(ValueError, match="'topic' is no such section, or in another table"):
        option_docs.filled(page.replace(" rate -->", " rate topic -->"))


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_links_are_valid(path: Path) -> None:
    dead = []
    for target in links(path):
        place, _, anchor = target.partition("#")
        page = (path.parent / place).resolve() if place else path
        if not page.exists() or (anchor and anchor not in anchors(page)):
            dead.append(target)
    assert dead == []


def test_heading_anchors_follow_the_rules_of_code_hosts(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# `a.b`, and *C_d*!\n```sh\n# no heading\n[no](link)\n```\n## Twice\n## Twice\n[a](#twice-1) [b](x.md)"
    )
    assert anchors(page) == {"ab-and-c_d", "twice", "twice-1"}
    assert list(links(page)) == ["#twice-1", "x.md"]


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    nav = re.findall(r"^ +- (?:\w+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    pages = {path.relative_to(ROOT).as_posix().removeprefix("docs/") for path in PAGES} - {"README.md"}
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert sorted(nav) == sorted(pages | notebooks | {"index.md"})


def test_readme_and_the_index_of_internals_link_to_every_page() -> None:
    folder = ROOT / "docs"
    listed = {target.partition("#")[0].removeprefix("docs/") for target in links(ROOT / "README.md")}
    listed |= {f"internals/{target.partition('#')[0]}" for target in links(folder / "internals" / "README.md")}
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")} - listed == set()


def option_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names of the options that a block passes to readers and writers."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            if call.func.attr == "option" and isinstance(call.args[0], ast.Constant):
                yield str(call.args[0].value)
            elif call.func.attr == "options":
                yield from (keyword.arg for keyword in call.keywords if keyword.arg)


@pytest.mark.parametrize("block", BLOCKS)
def test_code_can_be_read_and_its_options_exist(block: Block) -> None:
    known = {name for spec in (*SINK_OPTIONS, *SOURCE_OPTIONS) for name in spec.names} | SPARKS
    # `nameSever` is misspelt on purpose, to show the error.
    # `includeHeaders` is an option of the Kafka connector, `fanout-enabled` one of Iceberg.
    assert set(option_names(ast.parse(block.text))) - {"nameSever", "includeHeaders", "fanout-enabled"} <= known


def bound_names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names that a block imports, and the names that it binds otherwise."""
    imported, bound = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {(name.asname or name.name).partition(".")[0] for name in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler):
            bound.add(str(node.name))
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
    return imported, bound


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_code_imports_what_it_uses_and_the_page_defines_the_rest(path: Path) -> None:
    # Readers copy single blocks. `spark` is a session, `df` a DataFrame with a column `body`.
    defined = {"spark", "df", *dir(builtins)}
    undefined = {}
    for block in blocks(path):
        if block.language == "python":
            tree = ast.parse(block.text)
            imported, bound = bound_names(tree)
            defined |= bound
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            if missing := used - defined - imported:
                undefined[block.line] = missing
    assert undefined == {}


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_lines_outside_tables_fit_on_a_screen(path: Path) -> None:
    lines = enumerate(path.read_text("utf-8").splitlines(), 1)
    assert [number for number, line in lines if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("block", BLOCKS)
def test_users_can_write_to_the_paths_of_the_code(block: Block) -> None:
    paths = re.findall(r'"checkpointLocation", "([^"]*)"|start\("([^"]+)"\)', block.text)
    assert [path for groups in paths for path in groups if path and not path.startswith("/tmp/")] == []


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_every_make_target_that_a_page_names_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", path.read_text("utf-8"), re.MULTILINE)) <= targets


def test_table_of_releases_is_that_of_the_tests() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    begin, end = "<!-- releases: those of tests/support/releases.py -->\n", "<!-- end of releases -->"
    assert page.partition(begin)[2].partition(end)[0] == table()
