"""The demo as a user runs it from a shell, ended by Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.processes import PATIENCE, descendants, processes, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.integration]

# Stuck is what fails these tests, not slow.


def test_ctrl_c_during_the_write_ends_all_processes_without_a_traceback(cluster: object) -> None:
    # The shared cluster is only here so that a machine that can't run one skips this too.
    command = [sys.executable, "-m", "rocketmq_spark", "demo"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as demo:
        assert demo.stdout is not None
        output = ""
        for line in demo.stdout:
            output += line
            if line.startswith("rows"):
                break
        started = descendants(demo.pid)
        # As a terminal does: to every process of the foreground group.
        os.killpg(demo.pid, signal.SIGINT)
        output += demo.communicate(timeout=PATIENCE)[0]
    assert "336,776 flights" in output
    # Two brokers, a name server, Spark's own JVM.
    assert len(started) >= 4, output
    assert (demo.returncode, "Traceback" in output, "stored" in output) == (130, False, False), output
    wait_for(lambda: not started & processes().keys())
