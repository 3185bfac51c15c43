"""Runs the recipes of docs/cookbook.md as they are on the page.

Only addresses, topics and paths are replaced, and tasks wait less after a crash (`fenceMs`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rocketmq_spark.admin import queue_offsets
from tests.support.markdown import ROOT, Block, blocks

COOKBOOK: Final = ROOT / "docs" / "cookbook.md"

# The offsets at which a backfill ends. They are those of the page's topic.
ENDS: Final = '{"broker-0": {"0": 100, "1": 0}, "broker-1": {"0": 0, "1": 0}}'


def blocks_of(recipe: str) -> list[Block]:
    """Return the blocks of Python of a recipe, which is a section of the page."""
    found = [block for block in blocks(COOKBOOK) if (block.language, block.section) == ("python", recipe)]
    assert found, f"{COOKBOOK.name} has no recipe {recipe!r}"
    return found


def settings_of(recipe: str, folder: str) -> dict[str, str]:
    """Return the settings of Spark in the ``spark-submit`` command of a recipe."""
    commands = [block.text for block in blocks(COOKBOOK) if (block.language, block.section) == ("sh", recipe)]
    return dict(re.findall(r"--conf (\S+?)=(\S+)", "".join(commands).replace("/tmp/", f"{folder}/")))


def ends_of(name_server: str, topic: str) -> dict[str, dict[str, int]]:
    """Return where the queues of a topic end, by broker and queue, as `ENDS` has them."""
    ends: dict[str, dict[str, int]] = {}
    for offsets in queue_offsets([name_server], topic):
        ends.setdefault(offsets.broker_name, {})[str(offsets.queue_id)] = offsets.max_offset
    return ends


class Recipe:
    """A recipe whose names of topics, groups and tables begin with a prefix of the test.

    Attributes
    ----------
    folder : pathlib.Path
        Replaces ``/tmp``.
    """

    def __init__(self, name: str, places: Mapping[str, str], topics: Mapping[str, str], folder: Path) -> None:
        self._blocks = blocks_of(name)
        fence = 'delivery="effectivelyOnce"'
        self._places = {**places, "/tmp/": f"{folder}/", fence: f'{fence}, fenceMs="100"'}
        self._topics = topics
        self.folder = folder

    def run(self, *numbers: int, **names: Any) -> dict[str, Any]:
        """Run all blocks, or those with these numbers, and return the names that they have defined."""
        for number in numbers or range(len(self._blocks)):
            block = self._blocks[number]
            exec(compile(self._replaced(block.text), f"{COOKBOOK.name}, line {block.line}", "exec"), names)
        return names

    def _replaced(self, text: str) -> str:
        for place, other in self._places.items():
            text = text.replace(place, other)
        for topic, other in self._topics.items():
            text = re.sub(rf'(?<=["%]){topic}(?=[-"])', other, text)
        return text

    def repeat_last_micro_batch(self, checkpoint: str) -> None:
        """Forget that the last micro-batch was committed, as if the driver had died. The next run repeats it."""
        commits = [path for path in (self.folder / checkpoint / "commits").iterdir() if path.name.isdigit()]
        last = max(commits, key=lambda path: int(path.name))
        last.unlink()
        last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
