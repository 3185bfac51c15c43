"""A write in the address space that docs/operations.md names as the least for ``spark.executor.pyspark.memory``."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rocketmq_spark.testing import FakeCluster

_ROWS = 20_000
# As Spark's worker does: the limit is set before it imports the packages of the job.
_WORKER = f"""
import resource
import sys

resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]) << 20, int(sys.argv[2]) << 20))
import pyspark.worker
import pyarrow as pa
from rocketmq_spark import Producer

rows = [
    pa.record_batch({{"body": [f"{{row:0200d}}" for row in range(start, start + 5_000)]}})
    for start in range(0, {_ROWS}, 5_000)
]
with Producer("limited", name_server=sys.argv[1]) as producer:
    producer.send_arrow(iter(rows), "orders", rowId="true")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")
@pytest.mark.parametrize(("mib", "settings"), [(1024, {}), (640, {"MALLOC_ARENA_MAX": "1"})])
def test_a_write_needs_no_more_address_space_than_documented(mib: int, settings: dict[str, str]) -> None:
    with FakeCluster(topics={"orders": 4}) as cluster:
        command = [sys.executable, "-c", _WORKER, cluster.name_server, str(mib)]
        done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        # On a slow machine a request may be repeated before its answer comes.
        assert len({message.body for message in cluster.messages("orders")}) == _ROWS
