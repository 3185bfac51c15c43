"""Add pages from outside `docs/` to the site (README.md, CHANGELOG.md, notebooks, ...), and adapt links to the site."""

from __future__ import annotations

import base64
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[2]
# Paths in the repository; the site has them below the same path.
OUTSIDE: Final = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "notebooks/*.ipynb", "conf/broker.conf")
# The home page is README.md up to this heading.
REST_OF_README: Final = "\n## Speed\n"

_LINK: Final = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)([^)\s]*)\)")
# pandas adds this to each table. Without it the theme's style applies.
_PANDAS: Final = re.compile(r'<style scoped>.*?</style>\s*| border="1" class="dataframe"', re.DOTALL)


def on_config(config: MkDocsConfig) -> None:
    """Let pages have a link to edit them only if the address of the repository is known."""
    config.edit_uri = "edit/main/docs/" if config.repo_url else None


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Add the home page, the files of `OUTSIDE`, and a page for each notebook."""
    home, found, _ = (ROOT / "README.md").read_text("utf-8").partition(REST_OF_README)
    assert found, f"README.md has no heading {REST_OF_README.strip()}"
    files.append(_generated(config, "index.md", home, "../README.md"))
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
            files.get_file_from_path(uri).edit_uri = f"../{uri}"  # type: ignore[union-attr]
            if path.suffix == ".ipynb":
                for name, content in notebook_files(path):
                    files.append(_generated(config, f"notebooks/{name}", content, f"../{uri}"))


def _generated(config: MkDocsConfig, uri: str, content: str | bytes, edit_uri: str) -> File:
    file = File.generated(config, uri, content=content)
    file.edit_uri = edit_uri
    return file


def notebook_files(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield name and content of each picture of a notebook, and then of its page."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    parts: list[str] = []
    pictures = 0
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        for output in cell.get("outputs", ()):
            if picture := output.get("data", {}).get("image/png"):
                pictures += 1
                name = f"{path.stem}-{pictures}.png"
                yield name, base64.b64decode(picture)
                parts.append(f"![Output of the cell above]({name})")
            else:
                parts.append(_output(output))
    heading, _, rest = "\n\n".join(parts).partition("\n")
    download = f'<a href="{path.name}" download>Download this notebook</a>'
    yield f"{path.stem}.md", f"{heading}\n\n{download}\n{rest}\n"


def _output(output: dict[str, Any]) -> str:
    """Return the Markdown of an output that is no picture."""
    data = output.get("data", {})
    if "text/html" in data:
        return f'<div class="notebook-output">\n{_PANDAS.sub("", "".join(data["text/html"]))}\n</div>'
    text = "".join(output["text"] if output["output_type"] == "stream" else data["text/plain"])
    return f"```text\n{text.strip()}\n```"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links that are relative to the site instead of the repository."""
    uri = page.file.src_uri
    in_docs = (ROOT / "docs" / uri).exists()
    folder = posixpath.dirname(f"docs/{uri}" if in_docs else uri)

    def in_site(match: re.Match[str]) -> str:
        path = PurePosixPath(posixpath.normpath(posixpath.join(folder, match[1])).removeprefix("docs/"))
        if path.suffix == ".ipynb":
            path = path.with_suffix(".md")
        return f"]({posixpath.relpath(path, posixpath.dirname(uri) or '.')}{match[2]})"

    return _LINK.sub(in_site, markdown)
