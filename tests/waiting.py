"""Waiting for what must come."""

from __future__ import annotations

import time
from collections.abc import Callable

# What hangs ends by this, seconds. A machine with a fifth of the usual speed, and other tests beside, fails no test.
PATIENCE = 600.0


def wait_for(condition: Callable[[], bool], within: float = PATIENCE) -> None:
    """Return once a condition holds; nothing that tests wait for takes longer than `within` seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not so after {within:g} s"
        time.sleep(0.05)
