"""Which tests `make test` gives to the same process, and which ones it leaves out.

By default one process runs all tests of a file, in the order of the file, because its tests share servers and topics.
Processes begin with the longest groups and files (`FIRST`), and take the others in the order of their paths. So short
unit tests fill the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import Scheduling

# A group runs in one process, because its tests use the same servers, and faults kill and pause them. Without groups,
# each of the four processes starts its own, and the suite takes a minute more. One group for all faults would end last.
_READS: Final = ("reader", "lost_messages", "expired_messages")
GROUPS: Final = {
    "faults of reads": tuple(f"tests/faults/test_{name}.py" for name in _READS),
    "faults": ("tests/faults/",),
    "releases": ("tests/integration/releases/",),
}
# Each of them takes minutes. A process that began one late would end long after the others.
FIRST: Final = ("tests/faults/", "tests/notebooks/")


def group_of(node_id: str) -> str:
    """Return the name of the group of a test: the first that fits, or else its file."""
    path = node_id.partition("::")[0]
    return next((name for name, paths in GROUPS.items() if path.startswith(paths)), path)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run faults at full length, and the tests marked long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest tests, and leave out tests marked `long` unless `--full` is set."""
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """Give the tests of a group or file to one process.

    Without this, pytest-xdist spreads the tests of a file over all processes. (`--dist loadgroup` cannot replace it:
    pytest-xdist 3.8 finds no groups with pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)
