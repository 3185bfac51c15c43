"""Breaks exactly-once commits of each Python process that finds this folder on its path.

The variable HELD_COMMITS is a JSON object. ``hold`` maps names of writes to numbers of requests. The first commit of
such a write creates ``held-<write>`` in ``folder`` and stops before that request, until ``go-<write>`` exists there, or
for ``seconds``. With ``fence`` false, recoveries do not wait for the deadlines of half messages.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rocketmq_spark.deliveries.exactly_once.commit import TwoPhaseCommit
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, EndTransaction
from rocketmq_spark.transport.remoting.transport import RemotingTransport

settings = json.loads(os.environ["HELD_COMMITS"])
folder, hold = Path(settings["folder"]), settings.get("hold", {})
end_transaction = RemotingTransport.end_transaction
requests: Counter[str] = Counter()


def held(self: RemotingTransport, address: str, request: EndTransaction, *arguments: Any) -> None:
    """Send the request, but first wait if it is the one to hold."""
    # <transactionalId>#<write>#<round>#<run id>
    write = request.producer_group.partition("#")[2].partition("#")[0]
    if request.commit_or_rollback == TRANSACTION_COMMIT_TYPE and write in hold:
        requests[write] += 1
        if requests[write] == hold[write]:
            wait(write)
    end_transaction(self, address, request, *arguments)


def wait(write: str) -> None:
    """Wait until a commit may continue, unless a commit of the write was held before."""
    try:
        (folder / f"held-{write}").touch(exist_ok=False)
    except FileExistsError:
        return
    deadline = time.monotonic() + settings["seconds"]
    while not (folder / f"go-{write}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)


RemotingTransport.end_transaction = held  # type: ignore[assignment]
if not settings.get("fence", True):
    TwoPhaseCommit._fence = lambda self, decision: 0.0
