"""Add files from outside `docs/` to the site (notebooks, CONTRIBUTING.md, ...), and adapt links to the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[2]
# Paths in the repository; the site has them below the same path.
OUTSIDE: Final = ("CHANGELOG.md", "CONTRIBUTING.md", "notebooks/*.ipynb", "conf/broker.conf")

_LINK: Final = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Add the files of `OUTSIDE` to the site."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links that are relative to the site instead of the repository."""
    uri = page.file.src_uri
    in_docs = (ROOT / "docs" / uri).exists()
    folder = posixpath.dirname(f"docs/{uri}" if in_docs else uri)

    def in_site(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        path = path.removeprefix("docs/")
        return f"]({posixpath.relpath(path, posixpath.dirname(uri) or '.')})"

    return _LINK.sub(in_site, markdown)
