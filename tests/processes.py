"""Processes that tests start, look for and expect to be gone."""

from __future__ import annotations

import psutil


def processes() -> dict[int, int]:
    """Return the parents of all processes that run, by their ids."""
    # Nobody may wait for orphans that have ended.
    return {
        process.pid: process.info["ppid"]
        for process in psutil.process_iter(["ppid", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
    }


def descendants(pid: int) -> set[int]:
    """Return the ids of all processes below one."""
    parents, found, new = processes(), set[int](), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found |= new
    return found
