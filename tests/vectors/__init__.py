"""Golden bytes: hex, what they mean, and how they were made (the key ``made`` of each file)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def load(name: str) -> Any:
    """Return the contents of one file of vectors, such as ``remoting_frames.json``."""
    return json.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
