"""The server's jars from a mirror: jars that Ivy fetches are used only if the package's list has their checksums."""

from __future__ import annotations

import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rocketmq_spark.cluster.config import render
from rocketmq_spark.cluster.jars import RELEASE, fetch, find_ivy
from rocketmq_spark.cluster.process import find_java
from rocketmq_spark.errors import ClusterError

pytestmark = pytest.mark.integration

SETTINGS = """<ivysettings>
  <settings defaultResolver="mirror"/>
  <resolvers><ibiblio name="mirror" m2compatible="true" usepoms="false" root="{root}"/></resolvers>
</ivysettings>
"""
CLASSIFIER = "{http://ant.apache.org/ivy/maven}classifier"


def make_mirror(folder: Path) -> int:
    """Put the same small jar in the place of every jar of the server; return their number."""
    small = folder / "small.jar"
    with zipfile.ZipFile(small, "w") as jar:
        jar.writestr("Planted.class", b"\xca\xfe\xba\xbe")
    count = 0
    for module in ElementTree.fromstring(render("ivy.xml", release=RELEASE)).iter("dependency"):
        organisation, name, revision = (module.attrib[key] for key in ("org", "name", "rev"))
        place = folder.joinpath(*organisation.split("."), name, revision)
        place.mkdir(parents=True)
        for classifier in [artifact.get(CLASSIFIER) for artifact in module] or [None]:
            stem = "-".join(filter(None, (name, revision, classifier)))
            (place / f"{stem}.jar").hardlink_to(small)
            count += 1
    return count


def test_mirror_that_serves_other_jars_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, cache, settings = tmp_path / "mirror", tmp_path / "cache", tmp_path / "settings.xml"
    mirror.mkdir()
    assert make_mirror(mirror) == 148
    settings.write_text(SETTINGS.format(root=mirror.as_uri() + "/"))
    monkeypatch.setenv("ROCKETMQ_SPARK_IVY_SETTINGS", str(settings))
    with pytest.raises(ClusterError, match=r"animal-sniffer-annotations-1\.21\.jar differs, .* and 143 more") as error:
        fetch(cache, find_java(), find_ivy())
    assert "ROCKETMQ_SPARK_IVY_SETTINGS" in str(error.value)
    assert [path.name for path in cache.iterdir()] == [".lock"]
