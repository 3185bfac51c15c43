"""The harness of fault tests ends what a driver has started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

from rocketmq_spark.cluster.process import Watchdog
from tests.support.drivers import Driver
from tests.support.processes import wait_for

# Starts a program in another session, writes its pid, and ends at once.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print(child.pid, flush=True)
"""


def test_a_driver_ends_with_all_its_processes(tmp_path: Path) -> None:
    output, watchdog = tmp_path / "out", Watchdog()
    driver = Driver([sys.executable, "-c", PARENT], os.environ, output, watchdog)
    assert driver.wait() == 0
    orphan = int(output.read_text())
    assert psutil.pid_exists(orphan)
    driver.end()
    watchdog.release()
    wait_for(lambda: not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE)


def test_a_kill_counts_only_if_it_ended_the_driver(tmp_path: Path) -> None:
    watchdog = Watchdog()
    sleeping = Driver([sys.executable, "-c", "import time; time.sleep(1000)"], os.environ, tmp_path / "1", watchdog)
    assert sleeping.kill()
    ended = Driver([sys.executable, "-c", ""], os.environ, tmp_path / "2", watchdog)
    assert ended.wait() == 0
    assert not ended.kill_program()
    assert not ended.kill_jvm()
    watchdog.release()
