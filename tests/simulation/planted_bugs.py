"""Bugs that the simulator must find: each replaces one text of the package by another.

``python -m tests.simulation.planted_bugs`` plants each in a copy of the package, and prints how many schedules ran
until one failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# The most schedules in which a bug must show.
MOST_SCHEDULES = 1_000


class PlantedBug(NamedTuple):
    """A bug: what it is, its module, the change that makes it, and the kind of schedules that find it."""

    name: str
    module: str
    right: str
    wrong: str
    kind: str = "writes"


BUGS = (
    PlantedBug(
        "answer matched to the oldest request",
        "transport/remoting/connection.py",
        "            request = self._pending.get(command.opaque)\n",
        "            command.opaque = next(iter(self._pending), -1)\n"
        "            request = self._pending.get(command.opaque)\n",
    ),
    PlantedBug(
        "broken connection fails only its oldest request",
        "transport/remoting/connection.py",
        "waiting = list(self._pending.values())",
        "waiting = list(self._pending.values())[:1]",
    ),
    PlantedBug(
        "window not restored after an error",
        "sink/limits.py",
        "        self.release(cost)\n        # Requests that started before",
        "        # Requests that started before",
    ),
    PlantedBug(
        "request in flight counted as not sent",
        "sink/pipeline.py",
        "pending.maybe_stored |= error.maybe_stored",
        "pass",
    ),
    PlantedBug(
        "busy broker counted as stored",
        "sink/in_flight.py",
        "if outcome.status is SendStatus.SEND_OK:",
        "if outcome.status is SendStatus.SEND_OK or (outcome.error is not None and outcome.error.flow_control):",
    ),
    PlantedBug(
        "retried batch counted twice",
        "sink/pipeline.py",
        "            self._record(pending, outcome, now)\n            return",
        "            for _ in range(1 + pending.not_store_ok):\n"
        "                self._record(pending, outcome, now)\n            return",
    ),
    PlantedBug(
        "batch sent twice at once after a failure",
        "sink/pipeline.py",
        "        self._wait(pending, now + wait)\n",
        "        self._wait(pending, now + wait)\n        self._wait(pending, now + wait)\n",
    ),
    PlantedBug(
        "ordered rows overtake a failed batch",
        "sink/pipeline.py",
        "serial=options.ordered or sync",
        "serial=sync",
    ),
    PlantedBug(
        "ordered rows move to another queue",
        "sink/in_flight.py",
        "return self.bound or (self.queue if self.same_queue else None)",
        "return self.queue if self.same_queue else None",
    ),
    PlantedBug(
        "deliveryTimeoutMs ignored",
        "sink/pipeline.py",
        "return began is not None and at >= began + self.options.delivery_timeout_ms / 1000",
        "return False",
    ),
    PlantedBug(
        "no limit of pending bytes",
        "sink/sender.py",
        "return not pending or pending + grouped + batch_weight(batch) <= limit",
        "return True",
    ),
    PlantedBug(
        "failed batch missing in the account",
        "sink/pipeline.py",
        "            unfinished.add(self._failed)",
        "            unfinished.discard(self._failed)",
    ),
    PlantedBug(
        "route of a failed broker not refreshed",
        "sink/pipeline.py",
        "            self.refresh_route(pending.batch.topic)\n            if pending.first_tried_at",
        "            if pending.first_tried_at",
    ),
)

_READER = "spark/stream_reader.py"
_OFFSETS = "source/stream_offsets.py"
_LAST = "source/last_messages.py"

STREAM_BUGS = tuple(
    PlantedBug(*bug, kind="stream")
    for bug in (
        (
            "restarted query reads new messages in its last micro-batch",
            _READER,
            "passed, ends = flat(start), flat(end)\n",
            "passed, ends = flat(start), flat(end) if self._available else self._offsets().available(flat(end))\n",
        ),
        (
            "beginnings of a repeated first micro-batch are forgotten",
            _READER,
            "starts |= ends | begun\n",
            "starts |= ends\n",
        ),
        (
            "queue that appears later begins at its end",
            _OFFSETS,
            "earliest = self._resolver.earliest(new)",
            "earliest = self._resolver.latest(new)",
        ),
        (
            "queue that has regrown is not compared",
            _LAST,
            "if stored is not None and stored != times.get(queue, stored):",
            "if stored is not None and stored < times.get(queue, stored):",
        ),
        (
            "queue that ends before its offset is not reported",
            _OFFSETS,
            "if offset is None or end >= offset:",
            "if offset is None or end >= 0:",
        ),
        (
            "store time of a message that was replaced is kept",
            _LAST,
            "            self._stored.pop(queue, None)\n",
            "            pass\n",
        ),
        (
            "repeated micro-batch is not compared at its end",
            _LAST,
            "            for queue in batch.filled | batch.begun_again\n",
            "            for queue in set[MessageQueue]()\n",
        ),
        (
            "expired messages of a queue that was replaced are not reported",
            _LAST,
            "if at_start and offset > 0 and queue not in older:",
            "if at_start and offset < 0 and queue not in older:",
        ),
        (
            "target of Trigger.AvailableNow is forgotten",
            _READER,
            "self._target = self._offsets().target()",
            "self._offsets().target()",
        ),
        (
            "Trigger.AvailableNow ends without brokers that are away",
            _OFFSETS,
            "if not absent or not self._options.fail_on_data_loss:",
            "if self._options:",
        ),
        (
            "Trigger.AvailableNow ends with fewer messages than minOffsetsPerTrigger",
            _READER,
            "fewest is not None and self._target is None and waiting",
            "fewest is not None and waiting",
        ),
        (
            "topic that is not selected loses its offsets",
            _OFFSETS,
            "sorted(selected - gone), dict(known)",
            "sorted(selected - gone), {queue: at for queue, at in known.items() if self._options.reads(queue)}",
        ),
        (
            "broker that is away loses its offsets",
            _OFFSETS,
            "sorted(selected - gone), dict(known)",
            "sorted(present - gone), {queue: at for queue, at in known.items() if queue in present}",
        ),
        (
            "offsets are committed before their micro-batch",
            _READER,
            "        return nested(ends, {queue",
            "        self.commit(nested(ends))\n        return nested(ends, {queue",
        ),
        (
            "message above maxBytesPerTrigger is never read",
            _READER,
            "max(1, int(waiting",
            "max(0, int(waiting",
        ),
        (
            "unreadable message becomes a row with onUnreadable=skip",
            "source/read.py",
            "            self.close()\n        return False\n",
            "            self.close()\n        return True\n",
        ),
        (
            "query begins without a broker of requireBrokers",
            "source/topic_queues.py",
            "        self._routes.require_brokers(routes)\n",
            "        pass\n",
        ),
        (
            "tags with equal hashes are not told apart",
            "source/read.py",
            '        tags = frozenset(filter(None, map(trim, options.sub_expression.split("||"))))\n',
            "        tags = None\n",
        ),
    )
)


def schedules_until_found(bug: PlantedBug) -> int | None:
    """Plant a bug in a copy of the package; return the number of the schedule that failed, None if none did."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("rocketmq_spark", "tests/simulation", "tests/support"):
            shutil.copytree(ROOT / part, Path(folder, part), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "tests" / "__init__.py", Path(folder, "tests"))
        module = Path(folder, "rocketmq_spark", bug.module)
        text = module.read_text("utf-8")
        if text.count(bug.right) != 1:
            raise ValueError(f"{bug.name}: {bug.module} has the text {text.count(bug.right)} times, not once")
        module.write_text(text.replace(bug.right, bug.wrong), "utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "tests.simulation.planted_bugs", "run", bug.kind],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{bug.name}: {done.stderr[-2000:]}")
    found = re.search(r"found in schedule (\d+)", done.stdout)
    return int(found[1]) if found else None


def run_until_found(kind: str) -> None:
    """Run schedules until one fails. The process that calls this imports the copy with the planted bug."""
    import rocketmq_spark
    from tests.simulation.schedule import Plan
    from tests.simulation.stream_model import StreamPlan
    from tests.simulation.swarm import be_quiet, run_plan

    assert Path(rocketmq_spark.__file__).parents[1] == Path.cwd()
    be_quiet()
    plan_class = StreamPlan if kind == "stream" else Plan
    for seed in range(MOST_SCHEDULES):
        problems = run_plan(plan_class.of_seed(seed)).problems
        if problems:
            print(f"found in schedule {seed + 1}: {problems[0]}")
            return


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run_until_found(sys.argv[2])
    else:
        for planted in (*BUGS, *STREAM_BUGS):
            print(f"{schedules_until_found(planted) or 'not found':>10}  {planted.name}", flush=True)
