"""The documentation builds as a site, with every page, notebook and public name, and its pages fit screens."""

from __future__ import annotations

import functools
import http.server
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rocketmq_spark
from tests.support.markdown import ROOT, documents

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "REPO_URL": "https://forge.example/rocketmq-spark"}
    build = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stdout + build.stderr
    return folder


def test_site_has_every_page(site: Path) -> None:
    pages = {path.relative_to(ROOT).as_posix().removeprefix("docs/") for path in documents()}
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


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_pages_fit_a_phone_and_a_desktop(site: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    with served(site) as (address, findings):
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", address]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
            try:
                assert findings.get(timeout=120) == []
            finally:
                browser.terminate()


@contextmanager
def served(site: Path) -> Iterator[tuple[str, queue.Queue[list[str]]]]:
    """Serve the site and layout.html; the queue gets the list that layout.html posts."""
    findings: queue.Queue[list[str]] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/layout.html":
                self.answer(Path(__file__).with_name("layout.html").read_bytes())
            elif self.path == "/pages":
                pages = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.html"))
                self.answer(json.dumps(pages).encode())
            else:
                super().do_GET()

        def do_POST(self) -> None:
            findings.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer(b"")

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/layout.html", findings
        finally:
            server.shutdown()
            thread.join()
