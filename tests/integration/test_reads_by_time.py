"""Reads from a time and to a time, of every type of queue. `releases/` has those of other releases."""

from __future__ import annotations

import pytest

from tests.support.by_time import check_reads_by_time
from tests.support.cluster import SharedCluster

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("kind", [{}, {"inner": True}, {"compaction": True}])
def test_reads_by_time_return_exactly_the_messages_of_the_span(
    cluster: SharedCluster, topic: str, kind: dict[str, bool]
) -> None:
    check_reads_by_time(cluster.name_server, topic, kind)
