"""The documentation builds as a site, and its API reference is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import rocketmq_spark
from tests.support.markdown import ROOT, links


def test_site_builds_in_strict_mode(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    build = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert build.returncode == 0, build.stdout + build.stderr
    for page in {target.partition("#")[0] for target in links(ROOT / "docs" / "README.md")}:
        built = "index.html" if page == "README.md" else page.replace(".md", ".html")
        assert (tmp_path / "site" / built).exists(), page
    # mkdocstrings has found a docstring for each name.
    reference = (tmp_path / "site" / "reference.html").read_text("utf-8")
    assert set(rocketmq_spark.__all__) <= set(re.findall(r'id="rocketmq_spark\.(?:errors\.)?(\w+)"', reference))
