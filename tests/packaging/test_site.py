"""The documentation builds as a site: home page, every page, notebooks with outputs, a complete API reference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rocketmq_spark
from tests.support.markdown import ROOT, documents


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "REPO_URL": "https://forge.example/rocketmq-spark"}
    build = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stdout + build.stderr
    return folder


def test_site_has_every_page(site: Path) -> None:
    pages = {path.relative_to(ROOT).as_posix().removeprefix("docs/") for path in documents()} - {"SECURITY.md"}
    built = {page.replace("README.md", "index.html").replace(".md", ".html") for page in pages}
    assert {page for page in built if not (site / page).exists()} == set()
    assert list(site.rglob("*.py")) == []


def test_home_page_is_the_upper_half_of_the_readme(site: Path) -> None:
    home = (site / "index.html").read_text("utf-8")
    headings = re.findall(r'<h2 id="([\w-]+)">', home)
    assert headings == ["install", "quick-start", "documentation"]
    assert 'href="delivery.html#duplicates"' in home
    assert 'href="notebooks/streaming.html"' in home


def test_notebooks_are_pages_with_outputs_and_pictures(site: Path) -> None:
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks
    for notebook in notebooks:
        page = (site / "notebooks" / f"{notebook.stem}.html").read_text("utf-8")
        assert f'href="{notebook.name}" download' in page
        assert (site / "notebooks" / notebook.name).read_bytes() == notebook.read_bytes()
        pictures = re.findall(r'<img alt="Output of the cell above" src="([^"]+)"', page)
        assert len(pictures) == notebook.read_text("utf-8").count('"image/png":')
        assert all((site / "notebooks" / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert "<td>broker-0</td>" in (site / "notebooks" / "quickstart.html").read_text("utf-8")


def test_pages_link_to_their_source_in_the_repository(site: Path) -> None:
    sources = {"index": "README.md", "writing": "docs/writing.md", "notebooks/quickstart": "notebooks/quickstart.ipynb"}
    for page, source in sources.items():
        text = (site / f"{page}.html").read_text("utf-8")
        assert f'href="https://forge.example/rocketmq-spark/edit/main/{source}"' in text


def test_api_reference_has_every_name_and_inherited_methods(site: Path) -> None:
    # mkdocstrings has found a docstring for each name.
    reference = (site / "reference.html").read_text("utf-8")
    assert set(rocketmq_spark.__all__) <= set(re.findall(r'id="rocketmq_spark\.(?:errors\.)?(\w+)"', reference))
    methods = {name for name in dir(rocketmq_spark.Metrics) if not name.startswith("_")}
    assert methods <= set(re.findall(r'id="rocketmq_spark\.Metrics\.(\w+)"', reference))
