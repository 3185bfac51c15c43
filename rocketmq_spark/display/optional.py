"""Imports the packages that only a display needs."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, purpose: str) -> Any:
    """Return an optional module, or raise an ImportError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        name = module.partition(".")[0]
        raise ImportError(f"{purpose} needs {name}: pip install 'rocketmq-spark[notebook]'", name=name) from exc
