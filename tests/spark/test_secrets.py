"""No log, plan, event or file of a job contains a secret, whether the job succeeds or fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from rocketmq_spark import Admin, Message, Producer
from tests.support.cluster import MARKED, SharedCluster
from tests.support.processes import PATIENCE

pytestmark = [pytest.mark.integration, pytest.mark.spark]

PROGRAMS = Path(__file__).parents[1] / "programs"
WRONG = "mistaken-7f3c9e51-must-not-show"
MARK = b"7f3c9e51"
# Every process of the job runs it, the workers, too. Py4J logs whatever the driver hands over (docs/security.md).
TELL_ALL = """
import logging

logging.basicConfig(level=logging.DEBUG, format="LOG %(process)d %(levelname)s %(name)s: %(message)s")
logging.getLogger("py4j").setLevel(logging.INFO)
"""


def test_jobs_that_succeed_and_jobs_that_fail_leave_no_secret_behind(secured: SharedCluster, tmp_path: Path) -> None:
    prefixes = {"writable": "allowed", "readable": "readable", "forbidden": "forbidden"}
    topics = {kind: f"{prefix}-{uuid.uuid4().hex[:8]}" for kind, prefix in prefixes.items()}
    with Admin(secured.name_server, **secured.admin_settings) as admin:
        for topic in topics.values():
            admin.create_topic(topic, 2)
    with Producer("pg-secrets", name_server=secured.name_server, **secured.admin_settings) as producer:
        for body in (b"one", b"two"):
            producer.send(Message.of(topics["readable"], body))
    secret_file = tmp_path / "secret"
    secret_file.write_text(MARKED.secret_key)
    left = tmp_path / "left"
    (left / "events").mkdir(parents=True)
    given = {
        **topics,
        "folder": str(left),
        "nameServer": secured.name_server,
        "endpoints": secured.endpoints,
        "tlsCaFile": secured.options["tlsCaFile"],
        "user": MARKED.access_key,
        "secret": MARKED.secret_key,
        "token": MARKED.security_token,
        "wrong": WRONG,
        "secretFile": str(secret_file),
    }
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(TELL_ALL)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(tmp_path / "site"), str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "MQ_USER": MARKED.access_key,
        "MQ_SECRET": MARKED.secret_key,
        "MQ_TOKEN": MARKED.security_token,
    }
    run = subprocess.run(
        [sys.executable, str(PROGRAMS / "with_secrets.py"), json.dumps(given)],
        cwd=left,
        env=environment,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    (left / "stdout").write_bytes(run.stdout)
    (left / "stderr").write_bytes(run.stderr)
    ended = dict(re.findall(r"^JOB (.*): (.*)$", run.stdout.decode(), re.MULTILINE))
    assert run.returncode == 0, run.stderr.decode()[-3000:]
    assert len(ended) == 28
    assert {name for name, end in ended.items() if end != "as expected"} == set(), run.stderr.decode()[-30000:]
    loggers = set(re.findall(r"^LOG (\d+) DEBUG rocketmq_spark", run.stderr.decode(), re.MULTILINE))
    assert len(loggers) > 1, "workers tell as much as the driver does"
    files = [path for path in left.rglob("*") if path.is_file()]
    kinds = {path.relative_to(left).parts[0] for path in files}
    assert kinds >= {"stdout", "stderr", "events", "checkpoints", "metrics.jsonl"}
    assert leaked(secret_file.read_bytes()), "what is looked for can be found"
    assert {str(path.relative_to(left)): leaks for path in files if (leaks := leaked(path.read_bytes()))} == {}


def leaked(data: bytes) -> list[bytes]:
    """Return the text around each secret that is found."""
    return [data[max(0, found.start() - 200) : found.end() + 30] for found in re.finditer(re.escape(MARK), data)]
